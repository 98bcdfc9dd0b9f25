//! Comments fit on a screen.

use crate::rust::Source;

/// The width of a comment line, with its indentation and marker, in columns.
const COLUMNS_MAX: usize = 100;

/// The whole-line comments that are too wide, as lines and columns. Tables, links and code may be
/// wider.
pub(crate) fn wide_comments(text: &str, source: &Source) -> Vec<(usize, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let (mut found, mut in_code, mut last) = (Vec::new(), false, 0);
    for comment in source.comments.iter().filter(|comment| comment.is_whole_line) {
        // A fence does not reach beyond its comment.
        in_code &= comment.line == last + 1;
        last = comment.line;
        let content = comment.text.trim_start();
        let is_fence = content.starts_with("```");
        in_code ^= is_fence;
        let is_free = in_code || is_fence || content.starts_with('|') || content.contains("://");
        let columns = lines.get(comment.line - 1).map_or(0, |line| line.chars().count());
        if columns > COLUMNS_MAX && !is_free {
            found.push((comment.line, columns));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rust::split;

    #[test]
    fn a_planted_wide_comment_is_found() {
        let words = "word ".repeat(25);
        let text = format!(
            "//! {words}\nlet a = 1; // {words}\n    /// | {words}|\n/// https://x/{words}\n// ```\n// {words}\n// ```\n\n// {words}\n"
        );
        assert_eq!(wide_comments(&text, &split(&text)), [(1, 129), (9, 128)]);
        let fits = format!("{}// {}\n", " ".repeat(10), "ä".repeat(87));
        assert_eq!(fits.trim_end().chars().count(), 100);
        assert!(wide_comments(&fits, &split(&fits)).is_empty());
    }
}
