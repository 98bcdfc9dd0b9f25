//! Splits the body of a watch into events: one JSON document per line, or one protobuf message
//! after each length prefix.
//!
//! It guards against a broken or hostile server: an endless event meets a limit, and the start of
//! an event is never taken for all of it. It does no I/O. Its callers read the chunks, with their
//! own limits of time.

use std::collections::VecDeque;

use bytes::{Buf, Bytes, BytesMut};

/// Separation of the events of a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Framing {
    /// One event per line.
    #[default]
    Lines,
    /// A four-byte big-endian length before each event (apimachinery's `util/framer`).
    Lengths,
}

/// The size of a length prefix.
const LENGTH_BYTES: usize = size_of::<u32>();

/// An event is longer than the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an event is longer than the limit")]
pub struct EventTooLong;

/// The received part of a body.
///
/// An event that lies within one chunk is a slice of it, not a copy, so retaining an event retains
/// its chunk. Blank lines are skipped.
#[derive(Debug)]
pub struct WatchBody {
    framing: Framing,
    event_bytes_max: usize,
    /// Received chunks that are not examined yet.
    ready: VecDeque<Bytes>,
    /// The start of an incomplete event. It has no newline, so no byte is searched twice.
    partial: BytesMut,
}

impl WatchBody {
    /// An empty body. The limit is for a line without its newline, or a message without its length.
    pub fn new(framing: Framing, event_bytes_max: usize) -> Self {
        Self { framing, event_bytes_max, ready: VecDeque::new(), partial: BytesMut::new() }
    }

    /// Adds the next chunk.
    pub fn push(&mut self, chunk: Bytes) {
        self.ready.push_back(chunk);
    }

    /// The next complete event without its newline or length; `None` until more is received. After
    /// an error, it must not be called again.
    ///
    /// # Errors
    /// [`EventTooLong`].
    pub fn next_event(&mut self) -> Result<Option<Bytes>, EventTooLong> {
        match self.framing {
            Framing::Lines => self.next_line(),
            Framing::Lengths => self.next_message(),
        }
    }

    /// Bytes of an event that is not complete. A body that ends with any was cut off.
    pub fn incomplete_bytes(&self) -> usize {
        let is_blank = self.framing == Framing::Lines && self.partial.trim_ascii().is_empty();
        if is_blank { 0 } else { self.partial.len() }
    }

    fn next_line(&mut self) -> Result<Option<Bytes>, EventTooLong> {
        while let Some(chunk) = self.ready.front_mut() {
            let newline = memchr::memchr(b'\n', chunk);
            if self.partial.len() + newline.unwrap_or(chunk.len()) > self.event_bytes_max {
                return Err(EventTooLong);
            }
            let Some(newline) = newline else {
                self.partial.extend_from_slice(chunk);
                self.ready.pop_front();
                continue;
            };
            let head = chunk.split_to(newline + 1).slice(..newline);
            if chunk.is_empty() {
                self.ready.pop_front();
            }
            let line = if self.partial.is_empty() {
                head
            } else {
                self.partial.extend_from_slice(&head);
                self.partial.split().freeze()
            };
            if !line.trim_ascii().is_empty() {
                return Ok(Some(line));
            }
        }
        Ok(None)
    }

    /// A message above the limit is refused as soon as its length is known, before any of it is
    /// buffered.
    fn next_message(&mut self) -> Result<Option<Bytes>, EventTooLong> {
        let limit = self.event_bytes_max;
        while let Some(chunk) = self.ready.front_mut() {
            let whole = if self.partial.is_empty() { message_len(chunk, limit)? } else { None };
            let message = match whole.filter(|whole| *whole <= chunk.len()) {
                Some(whole) => Some(chunk.split_to(whole)),
                None => {
                    let wanted = message_len(&self.partial, limit)?.unwrap_or(LENGTH_BYTES);
                    let taken = chunk.split_to(chunk.len().min(wanted - self.partial.len()));
                    self.partial.extend_from_slice(&taken);
                    let whole = message_len(&self.partial, limit)?;
                    (whole == Some(self.partial.len())).then(|| self.partial.split().freeze())
                }
            };
            if chunk.is_empty() {
                self.ready.pop_front();
            }
            if let Some(mut message) = message {
                message.advance(LENGTH_BYTES);
                return Ok(Some(message));
            }
        }
        Ok(None)
    }
}

/// The size of the first message in these bytes, including its length prefix; `None` if the prefix
/// is incomplete.
fn message_len(bytes: &[u8], message_bytes_max: usize) -> Result<Option<usize>, EventTooLong> {
    let Some(length) = bytes.first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
    let length = usize::try_from(u32::from_be_bytes(*length)).unwrap_or(usize::MAX);
    if length > message_bytes_max { Err(EventTooLong) } else { Ok(Some(LENGTH_BYTES + length)) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: usize = 100;

    /// The events of a body that arrives in these chunks, and the bytes that are incomplete at its
    /// end.
    fn read(chunks: Vec<Bytes>, framing: Framing) -> Result<(Vec<Bytes>, usize), EventTooLong> {
        let mut body = WatchBody::new(framing, LIMIT);
        let mut events = Vec::new();
        for chunk in chunks {
            body.push(chunk);
            while let Some(event) = body.next_event()? {
                events.push(event);
            }
        }
        Ok((events, body.incomplete_bytes()))
    }

    fn split(mut body: &[u8], sizes: &[usize]) -> Vec<Bytes> {
        let mut chunks = Vec::new();
        for size in sizes.iter().cycle() {
            if body.is_empty() {
                break;
            }
            let (chunk, rest) = body.split_at((*size).min(body.len()));
            chunks.push(Bytes::copy_from_slice(chunk));
            body = rest;
        }
        chunks
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_split_into_chunks_gives_the_same_lines(
            lines in prop::collection::vec("[a-z{}\" ]{0,40}[}]", 0..20),
            sizes in prop::collection::vec(1usize..50, 1..10),
        ) {
            let body: Vec<u8> = lines.iter().flat_map(|line| [line.as_bytes(), b"\n"].concat()).collect();
            let lines: Vec<_> = lines.into_iter().map(Bytes::from).collect();
            prop_assert_eq!(read(split(&body, &sizes), Framing::Lines), Ok((lines, 0)));
        }

        #[test]
        fn any_split_into_chunks_gives_the_same_messages(
            messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
            sizes in prop::collection::vec(1usize..50, 1..10),
            cut in 0..60usize,
        ) {
            let framed = |message: &Vec<u8>| [&(message.len() as u32).to_be_bytes()[..], message].concat();
            let body: Vec<u8> = messages.iter().flat_map(framed).collect();
            let whole: Vec<_> = messages.iter().cloned().map(Bytes::from).collect();
            prop_assert_eq!(read(split(&body, &sizes), Framing::Lengths), Ok((whole, 0)));
            // A cut body is incomplete, unless the cut lies between two messages.
            let cut = &body[..body.len().saturating_sub(cut)];
            let ends: Vec<_> = messages.iter().scan(0, |end, message| { *end += 4 + message.len(); Some(*end) }).collect();
            let is_whole = cut.is_empty() || ends.contains(&cut.len());
            prop_assert_eq!(read(split(cut, &sizes), Framing::Lengths).unwrap().1 == 0, is_whole);
        }
    }

    #[test]
    fn a_line_in_one_chunk_is_not_copied() {
        let chunk = Bytes::from_static(b"{\"a\":1}\n\r\n{\"b\":2}\n");
        let lines = read(vec![chunk.clone()], Framing::Lines).unwrap().0;
        assert_eq!((lines.len(), lines[1].as_ptr()), (2, chunk[10..].as_ptr()));
    }

    #[test]
    fn a_body_that_ends_inside_a_line_is_incomplete_and_one_that_ends_with_a_blank_is_not() {
        for (body, incomplete) in [("{}\n{\"a\"", 4), ("{}\n \r", 0), ("{}\n", 0)] {
            let (events, bytes) = read(vec![Bytes::from_static(body.as_bytes())], Framing::Lines).unwrap();
            assert_eq!((events.len(), bytes), (1, incomplete), "{body:?}");
        }
    }

    #[test]
    fn an_endless_event_meets_the_limit() {
        for chunks in [vec![Bytes::from_static(&[b'x'; 60]); 1000], vec![Bytes::from(vec![b'x'; LIMIT + 1])]] {
            assert_eq!(read(chunks, Framing::Lines), Err(EventTooLong));
        }
        assert_eq!(read(vec![[&[b'x'; LIMIT][..], b"\n"].concat().into()], Framing::Lines).unwrap().0.len(), 1);
        let long = vec![Bytes::from_static(&[0, 0, 0]), Bytes::from_static(&[101])];
        assert_eq!(read(long, Framing::Lengths), Err(EventTooLong), "at its length");
    }
}
