//! The texts of an object (uid, labels, selectable fields) and their two encodings: as spans of the
//! object's bytes, and inline, each after its length.

/// Iterates over the texts of an object, in order.
pub(super) enum Texts<'a> {
    /// The bytes, the spans not yet read, and the end of the previous text.
    Plain(&'a [u8], &'a [u8], usize),
    Packed(&'a [u8]),
}

impl<'a> Texts<'a> {
    /// The bytes of the text at a position, without a check for UTF-8.
    pub(super) fn at(mut self, position: usize) -> Option<&'a [u8]> {
        for _ in 0..position {
            self.advance()?;
        }
        self.advance()
    }

    /// Writes all texts in the inline encoding, each after its length.
    pub(super) fn write(mut self, out: &mut Vec<u8>) {
        while let Some(text) = self.advance() {
            put_number(out, text.len());
            out.extend_from_slice(text);
        }
    }

    /// The bytes of the next text, without a check for UTF-8.
    pub(super) fn advance(&mut self) -> Option<&'a [u8]> {
        match self {
            Self::Plain(bytes, spans, end) => {
                let (distance, rest) = split_number(spans)?;
                let (len, rest) = split_number(rest)?;
                // The lowest bit is the sign: a text may lie before the previous one.
                let start = if distance & 1 == 0 { *end + distance / 2 } else { end.checked_sub(distance / 2)? };
                *spans = rest;
                *end = start + len;
                bytes.get(start..*end)
            }
            Self::Packed(rest) => {
                let (len, text) = split_number(rest)?;
                let (text, after) = text.split_at_checked(len)?;
                *rest = after;
                Some(text)
            }
        }
    }
}

impl<'a> Iterator for Texts<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        // The bytes were parsed as JSON or read as text from protobuf.
        self.advance().map(|text| std::str::from_utf8(text).unwrap_or_default())
    }

    fn nth(&mut self, skip: usize) -> Option<&'a str> {
        for _ in 0..skip {
            self.advance()?;
        }
        self.next()
    }
}

/// Encodes the spans of texts in `bytes`.
#[derive(Default)]
pub(super) struct SpanWriter {
    pub(super) written: Vec<u8>,
    end: usize,
}

impl SpanWriter {
    /// Adds the span of `text`, which must be a slice of `bytes` unless it is empty.
    pub(super) fn put(&mut self, bytes: &[u8], text: &[u8]) {
        let start = if text.is_empty() { self.end } else { text.as_ptr() as usize - bytes.as_ptr() as usize };
        let distance = if start >= self.end { (start - self.end) * 2 } else { (self.end - start) * 2 + 1 };
        put_number(&mut self.written, distance);
        put_number(&mut self.written, text.len());
        self.end = start + text.len();
    }
}

/// Appends a number in groups of seven bits, lowest first.
fn put_number(buffer: &mut Vec<u8>, mut number: usize) {
    while number >= 0x80 {
        buffer.push(number as u8 | 0x80);
        number >>= 7;
    }
    buffer.push(number as u8);
}

fn split_number(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let mut number = 0;
    let mut shift = 0;
    // The largest number is twice a length of 31 bits, so five groups are enough.
    for (at, byte) in bytes.iter().enumerate().take(5) {
        number |= usize::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            return Some((number, &bytes[at + 1..]));
        }
    }
    None
}
