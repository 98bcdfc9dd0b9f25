//! Text that others chose, for a terminal.

/// Marks that change the order in which text is shown.
const ORDER: [char; 12] = [
    '\u{200e}', '\u{200f}', '\u{061c}', '\u{202a}', '\u{202b}', '\u{202c}', '\u{202d}', '\u{202e}', '\u{2066}',
    '\u{2067}', '\u{2068}', '\u{2069}',
];

/// The text without characters that control a terminal.
pub(super) fn visible(text: &str) -> String {
    let is_hidden = |c: char| c.is_control() || ORDER.contains(&c);
    text.chars().map(|c| if is_hidden(c) { char::REPLACEMENT_CHARACTER } else { c }).collect()
}
