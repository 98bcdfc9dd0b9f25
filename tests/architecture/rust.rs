//! Splits Rust source text into code, comments and string literals, without a parser's knowledge of
//! the grammar. It knows just enough that a path in a comment or a string is not taken for code.

/// A comment of one line, or one line of a block comment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Comment {
    /// From 1.
    pub(crate) line: usize,
    /// The text without its marker (`//`, `///`, `//!`).
    pub(crate) text: String,
    /// Whether nothing but blanks precedes it on its line.
    pub(crate) is_whole_line: bool,
}

/// One source file, split.
#[derive(Debug, Default)]
pub(crate) struct Source {
    pub(crate) tokens: Vec<Token>,
    pub(crate) comments: Vec<Comment>,
    /// The string literals with their lines.
    pub(crate) strings: Vec<(usize, String)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Token {
    Ident(String, usize),
    /// `::`
    PathSep,
    Punct(char),
    /// A literal. Only its place matters.
    Literal,
}

impl Token {
    pub(crate) fn ident(&self) -> Option<&str> {
        match self {
            Self::Ident(name, _) => Some(name),
            _ => None,
        }
    }

    pub(crate) fn is(&self, punct: char) -> bool {
        *self == Self::Punct(punct)
    }
}

/// Splits `text`.
pub(crate) fn split(text: &str) -> Source {
    let chars: Vec<char> = text.chars().collect();
    let mut lexer = Lexer { chars, at: 0, line: 1, line_is_blank: true, source: Source::default() };
    lexer.run();
    lexer.source
}

struct Lexer {
    chars: Vec<char>,
    at: usize,
    line: usize,
    line_is_blank: bool,
    source: Source,
}

impl Lexer {
    fn peek(&self, ahead: usize) -> char {
        self.chars.get(self.at + ahead).copied().unwrap_or('\0')
    }

    fn next(&mut self) -> char {
        let c = self.peek(0);
        self.at += 1;
        if c == '\n' {
            self.line += 1;
            self.line_is_blank = true;
        } else if !c.is_whitespace() {
            self.line_is_blank = false;
        }
        c
    }

    fn run(&mut self) {
        while self.at < self.chars.len() {
            match (self.peek(0), self.peek(1)) {
                ('/', '/') => self.line_comment(),
                ('/', '*') => self.block_comment(),
                ('"', _) => self.string(),
                ('\'', _) => self.quote(),
                (':', ':') => {
                    self.next();
                    self.next();
                    self.source.tokens.push(Token::PathSep);
                }
                (c, _) if c.is_whitespace() => {
                    self.next();
                }
                (c, _) if c.is_alphanumeric() || c == '_' => self.word(),
                _ => {
                    let punct = self.next();
                    self.source.tokens.push(Token::Punct(punct));
                }
            }
        }
    }

    fn line_comment(&mut self) {
        let (line, is_whole_line) = (self.line, self.line_is_blank);
        let mut text = String::new();
        while self.at < self.chars.len() && self.peek(0) != '\n' {
            text.push(self.next());
        }
        let text = text.trim_start_matches('/');
        let text = text.strip_prefix('!').unwrap_or(text).to_owned();
        self.source.comments.push(Comment { line, text, is_whole_line });
    }

    fn block_comment(&mut self) {
        let (mut depth, mut line, mut is_whole_line) = (0, self.line, self.line_is_blank);
        let mut text = String::new();
        while self.at < self.chars.len() {
            match (self.peek(0), self.peek(1)) {
                ('/', '*') => depth += 1,
                ('*', '/') => depth -= 1,
                ('\n', _) => {
                    self.source.comments.push(Comment { line, text: std::mem::take(&mut text), is_whole_line });
                    self.next();
                    (line, is_whole_line) = (self.line, true);
                    continue;
                }
                _ => {
                    text.push(self.next());
                    continue;
                }
            }
            self.next();
            self.next();
            if depth == 0 {
                break;
            }
        }
        self.source.comments.push(Comment { line, text, is_whole_line });
    }

    /// A string with escapes; the opening quote is next.
    fn string(&mut self) {
        let line = self.line;
        let mut text = String::new();
        self.next();
        while self.at < self.chars.len() {
            match self.next() {
                '"' => break,
                // The string continues on the next line, without the break and the indentation.
                '\\' if self.peek(0) == '\n' => {
                    while self.peek(0).is_whitespace() && self.at < self.chars.len() {
                        self.next();
                    }
                }
                '\\' => {
                    self.next();
                }
                c => text.push(c),
            }
        }
        self.source.strings.push((line, text));
        self.source.tokens.push(Token::Literal);
    }

    /// `r"..."` or `r#"..."#`; the prefix is consumed, `#` or the quote is next.
    fn raw_string(&mut self) {
        let line = self.line;
        let mut hashes = 0;
        while self.peek(0) == '#' {
            self.next();
            hashes += 1;
        }
        self.next();
        let mut text = String::new();
        while self.at < self.chars.len() {
            let c = self.next();
            if c == '"' && (0..hashes).all(|ahead| self.peek(ahead) == '#') {
                (0..hashes).for_each(|_| {
                    self.next();
                });
                break;
            }
            text.push(c);
        }
        self.source.strings.push((line, text));
        self.source.tokens.push(Token::Literal);
    }

    /// A character literal or a lifetime.
    fn quote(&mut self) {
        let is_char = self.peek(1) == '\\' || self.peek(2) == '\'';
        self.next();
        if !is_char {
            // A lifetime: its name is no identifier.
            while self.peek(0).is_alphanumeric() || self.peek(0) == '_' {
                self.next();
            }
            return;
        }
        if self.next() == '\\' {
            self.next();
        }
        while self.at < self.chars.len() && self.next() != '\'' {}
        self.source.tokens.push(Token::Literal);
    }

    fn word(&mut self) {
        let (line, starts_with_digit) = (self.line, self.peek(0).is_ascii_digit());
        let mut word = String::new();
        while self.peek(0).is_alphanumeric() || self.peek(0) == '_' {
            word.push(self.next());
        }
        let is_raw = self.peek(0) == '"' || (self.peek(0) == '#' && matches!(self.peek(1), '"' | '#'));
        match word.as_str() {
            "r" | "br" | "cr" if is_raw => self.raw_string(),
            "b" | "c" if self.peek(0) == '"' => self.string(),
            "b" if self.peek(0) == '\'' => self.quote(),
            _ if starts_with_digit => self.source.tokens.push(Token::Literal),
            _ => self.source.tokens.push(Token::Ident(word, line)),
        }
    }
}

/// Removes everything that is compiled only for unit tests.
pub(crate) fn without_tests(tokens: &[Token]) -> Vec<Token> {
    let mut kept = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        if tokens[at].is('#') && tokens.get(at + 1).is_some_and(|next| next.is('!')) {
            let end = closing(tokens, at + 2);
            if is_for_tests(&tokens[at..end]) {
                return Vec::new();
            }
            at = end;
        } else if tokens[at].is('#') && tokens.get(at + 1).is_some_and(|next| next.is('[')) {
            let end = closing(tokens, at + 1);
            if is_for_tests(&tokens[at..end]) {
                at = end_of_item(tokens, end);
            } else {
                kept.extend_from_slice(&tokens[at..end]);
                at = end;
            }
        } else {
            kept.push(tokens[at].clone());
            at += 1;
        }
    }
    kept
}

/// Whether an attribute is `test`, `cfg(test)` or `cfg(all(test, ...))`.
fn is_for_tests(attribute: &[Token]) -> bool {
    let words: Vec<&str> = attribute.iter().filter_map(Token::ident).collect();
    words.first() == Some(&"test")
        || matches!(words.as_slice(), ["cfg", "test", ..] | ["cfg", "all", "test", ..])
        || (words.starts_with(&["cfg", "all"]) && words.contains(&"test") && !words.contains(&"not"))
}

/// The index after the bracket that closes the one at `open`.
pub(crate) fn closing(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token {
            Token::Punct('(' | '[' | '{') => depth += 1,
            Token::Punct(')' | ']' | '}') => {
                depth -= 1;
                if depth == 0 {
                    return at + 1;
                }
            }
            _ => {}
        }
    }
    tokens.len()
}

/// The index after the item, statement, field or variant that starts at `at`, with its further
/// attributes.
fn end_of_item(tokens: &[Token], mut at: usize) -> usize {
    while at < tokens.len() && tokens[at].is('#') {
        at = closing(tokens, at + 1);
    }
    const ITEMS: [&str; 15] = [
        "pub",
        "fn",
        "mod",
        "use",
        "struct",
        "enum",
        "impl",
        "const",
        "static",
        "type",
        "trait",
        "unsafe",
        "async",
        "extern",
        "macro_rules",
    ];
    let is_item = tokens.get(at).and_then(Token::ident).is_some_and(|word| ITEMS.contains(&word));
    while at < tokens.len() {
        match &tokens[at] {
            Token::Punct(';') => return at + 1,
            Token::Punct(',') if !is_item => return at + 1,
            Token::Punct('{') => return closing(tokens, at),
            Token::Punct('(' | '[') => at = closing(tokens, at),
            // The end of what surrounds it.
            Token::Punct(')' | ']' | '}') => return at,
            _ => at += 1,
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn idents(tokens: &[Token]) -> Vec<&str> {
        tokens.iter().filter_map(Token::ident).collect()
    }

    #[test]
    fn comments_and_strings_are_not_code() {
        let text = "use a; // crate::b\n/* crate::c\n still */ let d = \"crate::e \\\" //\"; let f: &'g str = r#\"h \" \"#; 'i'";
        let source = split(text);
        assert_eq!(idents(&source.tokens), ["use", "a", "let", "d", "let", "f", "str"]);
        let comments: Vec<_> = source.comments.iter().map(|c| (c.line, c.text.as_str(), c.is_whole_line)).collect();
        assert_eq!(comments, [(1, " crate::b", false), (2, " crate::c", true), (3, " still ", true)]);
        assert_eq!(source.strings, [(3, "crate::e  //".to_owned()), (3, "h \" ".to_owned())]);
    }

    #[test]
    fn a_string_continues_over_lines_without_their_indentation() {
        assert_eq!(split("\"a \\\n    b\"").strings, [(1, "a b".to_owned())]);
    }

    #[test]
    fn code_for_tests_is_removed_and_only_that() {
        let text = "
            #[derive(A)] struct B { #[cfg(test)] c: D, e: F }
            #[cfg(test)] #[allow(x)] fn g<H, I>(j: K) { l }
            #[cfg(not(test))] fn m() {}
            #[cfg(all(test, shuttle))] mod n;
            #[cfg(test)] mod tests { mod o { } use p; }
            fn q() {}";
        let kept = without_tests(&split(text).tokens);
        assert_eq!(idents(&kept), ["derive", "A", "struct", "B", "e", "F", "cfg", "not", "test", "fn", "m", "fn", "q"]);
        assert!(without_tests(&split("#![cfg(test)] use a;").tokens).is_empty());
    }
}
