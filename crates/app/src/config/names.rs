//! Names of options. The spellings of one option's name, made from its field's name while the
//! program is compiled: the flag, the environment variable and the key in the configuration file.
//! No spelling is written by hand, so the three cannot drift apart.

/// Spelling of a field's name, such as `page_size`.
#[derive(Clone, Copy)]
pub(super) enum Spelling {
    /// `page-size`, after `--` in a flag.
    Kebab,
    /// `PAGE_SIZE`, after `KUBEFAN_` in an environment variable.
    Upper,
    /// `pageSize`, as a key in the file.
    Camel,
}

/// The length of the spelled name in bytes, with its prefix.
pub(super) const fn spelled_len(prefix: &str, name: &str, spelling: Spelling) -> usize {
    let bytes = name.as_bytes();
    let mut len = prefix.len();
    let mut at = 0;
    while at < bytes.len() {
        if !(bytes[at] == b'_' && matches!(spelling, Spelling::Camel)) {
            len += 1;
        }
        at += 1;
    }
    len
}

/// Spells `name`. `LEN` is [`spelled_len`] of the same arguments.
pub(super) const fn spell<const LEN: usize>(prefix: &str, name: &str, spelling: Spelling) -> [u8; LEN] {
    let prefix = prefix.as_bytes();
    let name = name.as_bytes();
    let mut spelled = [0; LEN];
    let mut len = 0;
    while len < prefix.len() {
        spelled[len] = prefix[len];
        len += 1;
    }
    let mut at = 0;
    let mut word_starts = false;
    while at < name.len() {
        let byte = match (spelling, name[at]) {
            (Spelling::Camel, b'_') => {
                word_starts = true;
                at += 1;
                continue;
            }
            (Spelling::Kebab, b'_') => b'-',
            (Spelling::Upper, byte) => byte.to_ascii_uppercase(),
            (Spelling::Camel, byte) if word_starts => byte.to_ascii_uppercase(),
            (_, byte) => byte,
        };
        word_starts = false;
        spelled[len] = byte;
        len += 1;
        at += 1;
    }
    spelled
}

/// `spelled!("--", Kebab, page_size)` is the constant text `"--page-size"`.
macro_rules! spelled {
    ($prefix:expr, $spelling:ident, $name:ident) => {
        const {
            use $crate::config::names::{Spelling, spell, spelled_len};
            const LEN: usize = spelled_len($prefix, stringify!($name), Spelling::$spelling);
            const BYTES: [u8; LEN] = spell($prefix, stringify!($name), Spelling::$spelling);
            match std::str::from_utf8(&BYTES) {
                Ok(text) => text,
                Err(_) => panic!("a field's name is ASCII"),
            }
        }
    };
}
pub(super) use spelled;

/// The known name that a misspelt one probably means: the same words in another order or spelling,
/// or at most three typing errors, in fewer than half of the characters.
pub(super) fn nearest<'a>(misspelt: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let wanted = words(misspelt);
    let distances = known.into_iter().map(|known| {
        let words = words(known);
        let is_reordered = wanted.len() == words.len() && wanted.iter().all(|word| words.contains(word));
        let distance = strsim::damerau_levenshtein(&wanted.concat(), &words.concat());
        (if is_reordered { 0 } else { distance }, known)
    });
    let is_near = |(distance, _): &(usize, &str)| *distance <= 3 && *distance * 2 < misspelt.chars().count();
    distances.filter(is_near).min().map(|(_, known)| known)
}

/// The words of a name in any spelling, in lower case.
fn words(name: &str) -> Vec<String> {
    let mut words = Vec::<String>::new();
    let mut starts = true;
    let mut was_upper = true;
    for c in name.chars() {
        if !c.is_alphanumeric() {
            starts = true;
            continue;
        }
        starts |= c.is_uppercase() && !was_upper;
        was_upper = c.is_uppercase();
        if std::mem::take(&mut starts) {
            words.push(String::new());
        }
        words.last_mut().into_iter().for_each(|word| word.extend(c.to_lowercase()));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::{nearest, words};

    #[test]
    fn a_near_miss_is_of_the_same_words_or_has_a_few_typing_errors() {
        let known = ["ringAgeMax", "ringBytesMax", "resources", "pageSize"];
        for (misspelt, meant) in [
            ("ringMaxAge", Some("ringAgeMax")),
            ("ring-age-max", Some("ringAgeMax")),
            ("--ring-bytes-max", Some("ringBytesMax")),
            ("RING_AGE_MAX", Some("ringAgeMax")),
            ("resorces", Some("resources")),
            ("Resources", Some("resources")),
            ("pagesize", Some("pageSize")),
            ("zzzzzzzzz", None),
            ("", None),
        ] {
            assert_eq!(nearest(misspelt, known), meant, "{misspelt}");
        }
        assert_eq!(words("aB-cD_EF.gHI"), ["a", "b", "c", "d", "ef", "g", "hi"]);
    }

    #[test]
    fn one_name_has_three_spellings() {
        assert_eq!(spelled!("--", Kebab, ring_bytes_max), "--ring-bytes-max");
        assert_eq!(spelled!("KUBEFAN_", Upper, ring_bytes_max), "KUBEFAN_RING_BYTES_MAX");
        assert_eq!(spelled!("", Camel, ring_bytes_max), "ringBytesMax");
        assert_eq!(spelled!("", Camel, listen), "listen");
    }
}
