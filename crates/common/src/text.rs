//! Picks the innermost error of another program, and makes its message fit for a log line.

use std::{borrow::Cow, error::Error, io};

use crate::visible::is_hidden;

/// The text as one line of at most `chars_max` characters, and an ellipsis if it was longer.
pub fn one_line(text: &str, chars_max: usize) -> String {
    let mut line: String = text.trim().chars().map(|c| if is_hidden(c) { ' ' } else { c }).collect();
    if let Some((cut, _)) = line.char_indices().nth(chars_max) {
        line.truncate(cut);
        line.push('…');
    }
    line
}

/// Returns the bytes, with U+FFFD for each one that is not UTF-8, as Go's encoding/json reads them.
/// kube-apiserver sends some fields as it received them.
pub fn valid_utf8(bytes: &[u8]) -> Cow<'_, [u8]> {
    if std::str::from_utf8(bytes).is_ok() {
        return Cow::Borrowed(bytes);
    }
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, chunk.invalid().len()));
    }
    Cow::Owned(text.into_bytes())
}

/// A text without the name of the user in an error of the apiserver, as in `User "x" cannot list`.
/// The user is kubefan's own account, which clients need not know.
pub fn without_user(text: &str) -> String {
    const START: &str = "User \"";
    let mut shown = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, name)) = rest.split_once(START) {
        shown.push_str(before);
        let Some((_, after)) = name.split_once('"') else { return shown };
        shown.push_str("kubefan");
        rest = after;
    }
    shown.push_str(rest);
    shown
}

/// The text of an error of serde_json without the value that it quotes, which may be a secret: as
/// in `invalid type: string "…", expected u32 at line 1 column 7`.
pub fn without_value(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let starts = ["invalid type", "invalid value", "unknown variant", "unknown field"];
    let Some(start) = starts.into_iter().find(|start| text.starts_with(start)) else { return text };
    // The value may contain these words, too, but not the expected text.
    let expected = text.rfind(", expected ").map_or("", |at| &text[at..]);
    format!("{start}{expected}")
}

/// A text in which a library wrote a path with two kinds of quotes, as in `'"/a"'`, with one.
pub fn with_single_quotes(text: &str) -> String {
    text.replace("'\"", "\"").replace("\"'", "\"")
}

/// The error at the end of the chain of sources.
pub fn innermost<'a>(error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost
}

/// The first error of one type in the chain of sources. `io::Error` needs a special case, because
/// its `source` skips the error that it wraps.
pub fn find<'a, E: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a E> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        let wrapped = error.downcast_ref::<io::Error>().and_then(|error| error.get_ref());
        next = wrapped.map(|error| error as &(dyn Error + 'static)).or_else(|| error.source());
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_an_io_error_wraps_is_found() {
        let wrapped = io::Error::other(io::Error::other(std::fmt::Error));
        assert!(find::<std::fmt::Error>(&wrapped).is_some());
        assert!(find::<std::num::ParseIntError>(&wrapped).is_none());
    }

    #[test]
    fn each_byte_that_is_not_utf8_becomes_a_character() {
        assert!(matches!(valid_utf8("ä".as_bytes()), Cow::Borrowed(_)));
        assert_eq!(&*valid_utf8(b"a\xff\xe2\x82b"), "a\u{fffd}\u{fffd}\u{fffd}b".as_bytes());
    }

    #[test]
    fn an_error_of_json_has_no_value() {
        let of = |json: &str| without_value(&serde_json::from_str::<(u32, String)>(json).unwrap_err());
        assert_eq!(of(r#"["secret, expected b"]"#), "invalid type, expected u32 at line 1 column 21");
        assert_eq!(of("[1"), "EOF while parsing a list at line 1 column 2");
    }

    #[test]
    fn the_names_of_users_are_left_out_however_many_there_are() {
        assert_eq!(
            without_user(r#"pods: User "a" cannot list, User "b" neither"#),
            "pods: kubefan cannot list, kubefan neither"
        );
        assert_eq!(without_user(r#"cut: User "a"#), "cut: ");
        // A client chooses the text of its invalid selector.
        assert_eq!(without_user(&r#"User """#.repeat(100_000)), "kubefan".repeat(100_000));
    }

    #[test]
    fn a_path_has_one_kind_of_quotes() {
        let text = r#"failed to read file '"/a b"': No such file"#;
        assert_eq!(with_single_quotes(text), r#"failed to read file "/a b": No such file"#);
        assert_eq!(with_single_quotes("'a' \"b\""), "'a' \"b\"");
    }

    #[test]
    fn a_long_text_with_control_characters_becomes_one_short_line() {
        assert_eq!(one_line(" a\nb\u{7}c ", 10), "a b c");
        assert_eq!(one_line("äöü", 2), "äö…");
        assert_eq!(one_line("äöü", 3), "äöü");
    }
}
