//! Versions as numbers. A version to resume from may have a place inside it, which only kubefan
//! knows: several events may have one version. `218.1` is after the second of them, and `218.end`
//! after all. To wait for a version, and for an apiserver, only the number counts.

/// The place after all events of a version, in a text. On the wire a field says so.
const END: &str = ".end";

/// The text of a version that was received, to resume from.
pub(crate) fn received(version: String, is_complete: bool) -> String {
    if is_complete && !version.is_empty() { version + END } else { version }
}

/// A version on the wire, and whether all events of it were received; `None` without a version.
pub(crate) fn sent(version: &str) -> (String, Option<bool>) {
    let number = version.strip_suffix(END);
    (number.unwrap_or(version).to_owned(), (!version.is_empty()).then_some(number.is_some()))
}

/// The version as an apiserver knows it.
pub(crate) fn whole(version: &str) -> &str {
    version.split_once('.').map_or(version, |(whole, _)| whole)
}

/// The number of a version; `None` if it has none.
pub(crate) fn number(version: &str) -> Option<u64> {
    whole(version).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_sent_back_as_it_was_received() {
        for (version, is_complete, text) in
            [("218", true, "218.end"), ("218", false, "218"), ("218.1", false, "218.1"), ("", true, "")]
        {
            let known = received(version.to_owned(), is_complete);
            assert_eq!(known, text);
            assert_eq!(sent(&known), (version.to_owned(), (!version.is_empty()).then_some(is_complete)));
        }
    }

    #[test]
    fn a_place_inside_a_version_does_not_count() {
        assert_eq!((whole("218.1"), whole("218"), whole("")), ("218", "218", ""));
        assert_eq!((whole("218.end"), number("218.end")), ("218", Some(218)));
        assert_eq!((number("218.1"), number("218"), number(""), number("x.1")), (Some(218), Some(218), None, None));
    }
}
