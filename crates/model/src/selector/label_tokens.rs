//! The tokens of a label selector, as apimachinery's lexer has them.

/// The kind of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenKind {
    End,
    Word,
    In,
    NotIn,
    Open,
    Close,
    Comma,
    Not,
    Equals,
    DoubleEquals,
    NotEquals,
    Greater,
    Less,
}

/// A word or symbol of the text.
#[derive(Debug, Clone, Copy)]
pub(super) struct Token<'a> {
    pub(super) kind: TokenKind,
    pub(super) text: &'a str,
    /// The position in the text, in bytes.
    pub(super) at: usize,
}

fn is_symbol(byte: u8) -> bool {
    matches!(byte, b'=' | b'!' | b'(' | b')' | b',' | b'>' | b'<')
}

/// Splits the text into tokens; the last one is always `End`. As in apimachinery, a NUL byte ends a
/// word or a symbol, and ends the whole text if a token would start there.
pub(super) fn scan(text: &str) -> Vec<Token<'_>> {
    let bytes = text.as_bytes();
    let mut tokens = Vec::new();
    let mut pos = 0;
    loop {
        pos += bytes[pos..].iter().take_while(|b| matches!(b, b' ' | b'\t' | b'\r' | b'\n')).count();
        let rest = &bytes[pos..];
        let (kind, len) = match rest {
            [] | [0, ..] => (TokenKind::End, 0),
            [b'=', b'=', ..] => (TokenKind::DoubleEquals, 2),
            [b'!', b'=', ..] => (TokenKind::NotEquals, 2),
            [b'=', ..] => (TokenKind::Equals, 1),
            [b'!', ..] => (TokenKind::Not, 1),
            [b'(', ..] => (TokenKind::Open, 1),
            [b')', ..] => (TokenKind::Close, 1),
            [b',', ..] => (TokenKind::Comma, 1),
            [b'>', ..] => (TokenKind::Greater, 1),
            [b'<', ..] => (TokenKind::Less, 1),
            _ => {
                let ends = |b: &u8| is_symbol(*b) || matches!(b, 0 | b' ' | b'\t' | b'\r' | b'\n');
                let len = rest.iter().position(ends).unwrap_or(rest.len());
                let kind = match &rest[..len] {
                    b"in" => TokenKind::In,
                    b"notin" => TokenKind::NotIn,
                    _ => TokenKind::Word,
                };
                (kind, len)
            }
        };
        tokens.push(Token { kind, text: &text[pos..pos + len], at: pos });
        if kind == TokenKind::End {
            return tokens;
        }
        pos += len;
        // A NUL byte after a token is skipped.
        pos += usize::from(bytes.get(pos) == Some(&0));
    }
}
