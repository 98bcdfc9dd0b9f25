//! Error messages of other programs, made fit for a log line.

use std::error::Error;

/// The text as one line of at most `chars_max` characters, and an ellipsis if it was longer.
pub fn one_line(text: &str, chars_max: usize) -> String {
    let mut line: String = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if let Some((cut, _)) = line.char_indices().nth(chars_max) {
        line.truncate(cut);
        line.push('…');
    }
    line
}

/// The error at the end of the chain of sources.
pub fn innermost<'a>(error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_with_control_characters_becomes_one_short_line() {
        assert_eq!(one_line(" a\nb\u{7}c ", 10), "a b c");
        assert_eq!(one_line("äöü", 2), "äö…");
        assert_eq!(one_line("äöü", 3), "äöü");
    }
}
