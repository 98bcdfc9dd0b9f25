//! Comments, documents and help texts are plain English: lines that fit on a screen, and no words
//! that only the author knows.

use std::path::Path;

use crate::rust::{Comment, Source, Token};

/// The width of a comment line, with its indentation and marker, in columns.
const COLUMNS_MAX: usize = 100;

/// Words and phrases that read like a translation, or hide who does what. They are found as whole
/// words, in any case, also across a line break.
pub(crate) const PHRASES: &[&str] = &[
    "at hand",
    "by now",
    "everybody",
    "for want of",
    "go on",
    "goes on",
    "in vain",
    "is told",
    "are told",
    "be told",
    "was told",
    "lead on",
    "leads on",
    "let go",
    "lets go",
    "next to nothing",
    "nobody",
    "see to it",
    "sees to it",
    "so long as",
    "somebody",
    "the begin",
    "whoever",
    "whom",
    "whomever",
    "whose turn",
];

/// Words that kubefan once coined or used with a meaning of its own, in identifiers and in prose.
pub(crate) const COINED: &[&str] = &["bell", "door", "governor", "laggard", "prelude", "remnant", "residue", "speech"];

/// Identifiers that keep a coined word because it is part of an interface.
const INTERFACE: &[(&str, &str)] = &[
    ("residue_bytes", "the metric kubefan_residue_bytes"),
    ("residue_bytes_max", "the flag --residue-bytes-max and its key in the configuration file"),
    ("residue_floor", "a field of peer.proto"),
];

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

/// The phrases and coined words in the comments of a source file, with their lines.
pub(crate) fn words_in_comments(comments: &[Comment]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut paragraph: Vec<(usize, &str)> = Vec::new();
    for comment in comments {
        if paragraph.last().is_some_and(|(line, _)| line + 1 != comment.line) {
            found.extend(words_in(&paragraph));
            paragraph.clear();
        }
        paragraph.push((comment.line, &comment.text));
    }
    found.extend(words_in(&paragraph));
    found
}

/// The phrases and coined words in a document in Markdown, with their lines.
pub(crate) fn words_in_document(text: &str) -> Vec<(usize, String)> {
    let mut in_code = false;
    let lines = text.lines().enumerate().filter(|(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        !in_code && !is_fence
    });
    words_in(&lines.map(|(index, line)| (index + 1, line)).collect::<Vec<_>>())
}

/// The phrases and coined words in one text, whose lines are given with their numbers. Inline code
/// is passed over: it quotes names.
pub(crate) fn words_in(lines: &[(usize, &str)]) -> Vec<(usize, String)> {
    let mut words: Vec<(usize, String)> = Vec::new();
    let mut in_code = false;
    for (number, line) in lines {
        for (index, part) in line.split('`').enumerate() {
            in_code ^= index > 0;
            if in_code {
                // Separates the words around it.
                words.push((*number, String::new()));
                continue;
            }
            // The signs that join the parts of a name count as letters: `--a-word-max` is one word.
            let parts = part.split(|c: char| !(c.is_alphanumeric() || matches!(c, '_' | '-' | '\'' | '/' | '.')));
            for word in parts.filter(|word| !word.is_empty()) {
                words.push((*number, word.trim_matches(['.', '/', '\'']).to_lowercase()));
                if word.ends_with('.') {
                    words.push((*number, String::new()));
                }
            }
        }
    }
    let mut found = Vec::new();
    for phrase in PHRASES {
        let phrase_words: Vec<&str> = phrase.split(' ').collect();
        for (at, window) in words.windows(phrase_words.len()).enumerate() {
            let is_phrase = window.iter().zip(&phrase_words).all(|((_, word), expected)| word == expected);
            // To tell things apart is plain English.
            let is_apart = words.get(at + phrase_words.len()).is_some_and(|(_, next)| next == "apart");
            if is_phrase && !is_apart {
                found.push((window[0].0, (*phrase).to_owned()));
            }
        }
    }
    for (number, word) in &words {
        // "bell-like" is two words, "--residue-bytes-max" and "residue.rs" are names.
        let is_coined = COINED.iter().any(|coined| word == coined || word.strip_suffix('s') == Some(coined));
        if is_coined {
            found.push((*number, word.clone()));
        }
    }
    found.sort();
    found
}

/// The identifiers that contain a coined word, with their lines.
pub(crate) fn coined_identifiers(source: &Source) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (index, token) in source.tokens.iter().enumerate() {
        let Token::Ident(name, line) = token else { continue };
        let is_interface = INTERFACE.iter().any(|(interface, _)| name == interface);
        // `proptest::prelude` and the like are names of other crates.
        let follows = |ahead: usize| index.checked_sub(ahead).map(|before| &source.tokens[before]);
        let is_path = follows(1) == Some(&Token::PathSep) || source.tokens.get(index + 1) == Some(&Token::PathSep);
        let of_other_crate = name == "prelude"
            && is_path
            && !follows(2).and_then(Token::ident).is_some_and(|first| ["crate", "self", "super"].contains(&first));
        let words = words_of_identifier(name);
        let is_coined = words.iter().any(|word| COINED.contains(&word.strip_suffix('s').unwrap_or(word)));
        if is_coined && !is_interface && !of_other_crate {
            found.push((*line, name.clone()));
        }
    }
    found
}

/// `heldResidue`, `HeldResidue` and `HELD_RESIDUE` are all `held` and `residue`.
fn words_of_identifier(name: &str) -> Vec<String> {
    let is_constant = !name.chars().any(char::is_lowercase);
    let mut words = vec![String::new()];
    for c in name.chars() {
        if c == '_' || (c.is_uppercase() && !is_constant) {
            words.push(String::new());
        }
        if c != '_'
            && let Some(word) = words.last_mut()
        {
            word.extend(c.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Whether the strings of `file` are texts of `--help`.
pub(crate) fn has_help_texts(file: &Path) -> bool {
    file.starts_with("src/cli") || file.starts_with("crates/app/src/config") || file.starts_with("src/config")
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

    #[test]
    fn a_planted_phrase_is_found_in_comments_also_across_lines() {
        let text = "/// Everything fits.\n/// Whoever reads this\n/// sees to\n/// it that nobody.\n\n// The beginning is fine; `whoever` and what is told apart too.\n// The\n// begin is not.";
        let found = words_in_comments(&split(text).comments);
        let expected = [(2, "whoever"), (3, "sees to it"), (4, "nobody"), (7, "the begin")];
        assert_eq!(found, expected.map(|(line, word)| (line, word.to_owned())));
    }

    #[test]
    fn a_planted_phrase_is_found_in_documents_outside_of_code() {
        let text = "# A\n\nA slow one lets go\nof it in vain.\n\n```\nnobody\n```\n\nThe `--residue-bytes-max` of the residue.";
        let found = words_in_document(text);
        let expected = [(3, "lets go"), (4, "in vain"), (10, "residue")];
        assert_eq!(found, expected.map(|(line, word)| (line, word.to_owned())));
    }

    #[test]
    fn a_planted_coined_identifier_is_found() {
        let text = "struct HeldResidue { bells: Bell, residue_bytes_max: u8 } use proptest::prelude::*;\nuse super::prelude; fn belly() { \"bell\" }";
        let found = coined_identifiers(&split(text));
        let expected = [(1, "HeldResidue"), (1, "bells"), (1, "Bell"), (2, "prelude")];
        assert_eq!(found, expected.map(|(line, word)| (line, word.to_owned())));
    }
}
