//! Text that others chose, for a terminal or a log.
//!
//! The hazard is a name or a message that controls the terminal of its reader: colours, another
//! title, a forged row. kubectl escapes such text, too (`printers.WriteEscaped`).

use std::{
    fmt::Write as _,
    io::{self, Write},
};

/// Marks that change the order in which text is shown.
const ORDER: [char; 12] = [
    '\u{200e}', '\u{200f}', '\u{061c}', '\u{202a}', '\u{202b}', '\u{202c}', '\u{202d}', '\u{202e}', '\u{2066}',
    '\u{2067}', '\u{2068}', '\u{2069}',
];

/// Whether a terminal would not show a character, but obey it.
pub fn is_hidden(c: char) -> bool {
    c.is_control() || ORDER.contains(&c)
}

/// The text without characters that control a terminal. They would also forge rows of a table.
pub fn visible(text: &str) -> String {
    text.chars().map(|c| if is_hidden(c) { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// The visible text as one line: line feeds become spaces.
pub fn visible_line(text: &str) -> String {
    visible(&text.trim_end().replace('\n', " "))
}

/// The visible text of several lines, which stay lines.
pub fn visible_lines(text: &str) -> String {
    text.chars().map(|c| if is_hidden(c) && c != '\n' { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

/// Writes JSON with these characters escaped, so it stays the same JSON. Each write must be whole
/// characters, as those of serde_json are.
pub struct EscapedJson<W>(pub W);

impl<W: Write> Write for EscapedJson<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Newlines and tabs only stand between values. A server may also send text that is no JSON.
        let is_escaped = |c: char| is_hidden(c) && !matches!(c, '\n' | '\t');
        let text = String::from_utf8_lossy(bytes);
        if !text.contains(is_escaped) {
            self.0.write_all(text.as_bytes())?;
            return Ok(bytes.len());
        }
        let mut escaped = String::with_capacity(text.len() + 16);
        for c in text.chars() {
            if c == '\r' {
                escaped.push(' ');
            } else if is_escaped(c) {
                write!(escaped, "\\u{:04x}", u32::from(c)).map_err(io::Error::other)?;
            } else {
                escaped.push(c);
            }
        }
        self.0.write_all(escaped.as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const HOSTILE: &str = "a\u{1b}[31m\nforged\u{9b}31m\u{202e}\u{7f}ü";

    #[test]
    fn characters_that_control_a_terminal_are_replaced() {
        assert_eq!(visible(HOSTILE), "a\u{fffd}[31m\u{fffd}forged\u{fffd}31m\u{fffd}\u{fffd}ü");
        assert_eq!(visible_lines("a\nb\u{9b}"), "a\nb\u{fffd}");
        assert_eq!(visible_line("a\nb\u{9b}\n"), "a b\u{fffd}");
    }

    #[test]
    fn json_stays_the_same_without_them() {
        let value = json!({ "reason": HOSTILE });
        let mut out = Vec::new();
        serde_json::to_writer_pretty(EscapedJson(&mut out), &value).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(!text.chars().any(|c| is_hidden(c) && c != '\n'), "{text:?}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }

    #[test]
    fn invalid_json_cannot_control_the_terminal_either() {
        let mut out = Vec::new();
        EscapedJson(&mut out).write_all(b"{\r\n\t\"a\x1b[2J\xff").unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "{ \n\t\"a\\u001b[2J\u{fffd}");
    }
}
