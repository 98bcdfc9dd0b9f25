//! Versions as numbers. A version to resume from may have a place inside it, which only kubefan
//! knows (`218.1`): several events may have one version. To wait for a version, and for an
//! apiserver, only the number counts.

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
    fn a_place_inside_a_version_does_not_count() {
        assert_eq!((whole("218.1"), whole("218"), whole("")), ("218", "218", ""));
        assert_eq!((number("218.1"), number("218"), number(""), number("x.1")), (Some(218), Some(218), None, None));
    }
}
