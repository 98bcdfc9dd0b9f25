//! Comments fit on a screen, beside another file.

/// The width of a comment line, with its indentation and marker, in columns.
const COLUMNS_MAX: usize = 100;

/// The whole-line comments that are too wide, as lines and columns. Tables, links and code may be
/// wider.
pub(crate) fn wide(text: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut in_code = false;
    for (index, line) in text.lines().enumerate() {
        let Some(comment) = line.trim_start().strip_prefix("//") else {
            // A fence does not reach beyond its comment.
            in_code = false;
            continue;
        };
        let content = comment.trim_start_matches(['/', '!', ' ']);
        let is_fence = content.starts_with("```");
        in_code ^= is_fence;
        let is_free = in_code || is_fence || content.starts_with('|') || content.contains("://");
        let columns = line.chars().count();
        if columns > COLUMNS_MAX && !is_free {
            found.push((index + 1, columns));
        }
    }
    found
}

#[test]
fn a_planted_wide_comment_is_found() {
    let words = "word ".repeat(25);
    let text = format!(
        "//! {words}\nlet a = 1; // {words}\n    /// | {words}|\n/// https://x/{words}\n// ```\n// {words}\n// ```\n\n// {words}\n"
    );
    assert_eq!(wide(&text), [(1, 129), (9, 128)]);
    let fits = format!("{}// {}\n", " ".repeat(10), "ä".repeat(87));
    assert_eq!(fits.trim_end().chars().count(), 100);
    assert!(wide(&fits).is_empty());
}
