//! Ready bytes for the wire: whole gRPC messages with their length prefixes, in pieces that are shared with the log and the cache.
//!
//! A piece is never copied on its way to the socket: what a thousand subscribers are sent is in memory once.

use std::{collections::VecDeque, io::IoSlice, ops::Range};

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Some messages, as a buffer to write from.
#[derive(Debug, Clone, Default)]
pub struct FrameBuf {
    /// Outside the queue, so that a batch that lies in one block needs no memory of its own.
    first: Bytes,
    rest: VecDeque<Bytes>,
    remaining: usize,
    messages: usize,
}

impl FrameBuf {
    /// Adds bytes.
    pub fn push(&mut self, piece: Bytes) {
        if piece.is_empty() {
            return;
        }
        self.remaining += piece.len();
        if self.first.is_empty() && self.rest.is_empty() {
            self.first = piece;
        } else {
            self.rest.push_back(piece);
        }
    }

    /// Adds what another batch holds.
    pub fn append(&mut self, other: Self) {
        self.push(other.first);
        other.rest.into_iter().for_each(|piece| self.push(piece));
        self.messages += other.messages;
    }

    /// Puts other bytes in the place of some that lie in the first piece; nothing is copied.
    pub fn replace(&mut self, place: Range<usize>, with: Bytes) {
        if place.is_empty() || place.end > self.first.len() {
            return;
        }
        self.remaining = self.remaining - place.len() + with.len();
        let after = self.first.split_off(place.end);
        self.first.truncate(place.start);
        // An empty piece would hide those behind it.
        for piece in [after, with].into_iter().filter(|piece| !piece.is_empty()) {
            self.rest.push_front(piece);
        }
        if self.first.is_empty() {
            self.first = self.rest.pop_front().unwrap_or_default();
        }
    }

    /// Counts messages in, whose bytes were added.
    pub fn count(&mut self, messages: usize) {
        self.messages += messages;
    }

    /// The messages that were put in, sent or not.
    pub fn messages(&self) -> usize {
        self.messages
    }

    /// The bytes that are left.
    pub fn len(&self) -> usize {
        self.remaining
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.remaining == 0
    }
}

impl Buf for FrameBuf {
    fn remaining(&self) -> usize {
        self.remaining
    }

    fn chunk(&self) -> &[u8] {
        &self.first
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let pieces = std::iter::once(&self.first).filter(|first| !first.is_empty()).chain(&self.rest);
        let mut filled = 0;
        for (slice, piece) in slices.iter_mut().zip(pieces) {
            *slice = IoSlice::new(piece);
            filled += 1;
        }
        filled
    }

    fn advance(&mut self, count: usize) {
        assert!(count <= self.remaining, "cannot advance past the end: {count} > {}", self.remaining);
        self.remaining -= count;
        let mut left = count;
        while left >= self.first.len() && !self.first.is_empty() {
            left -= self.first.len();
            self.first = self.rest.pop_front().unwrap_or_default();
        }
        self.first.advance(left);
    }

    /// Shared where they lie in one piece, as those of a batch in one block do.
    fn copy_to_bytes(&mut self, len: usize) -> Bytes {
        if len <= self.first.len() {
            let bytes = self.first.slice(..len);
            self.advance(len);
            return bytes;
        }
        assert!(len <= self.remaining, "cannot copy past the end: {len} > {}", self.remaining);
        let mut bytes = BytesMut::with_capacity(len);
        bytes.put(self.take(len));
        bytes.freeze()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_bytes_come_out_in_order_however_they_are_taken(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..9),
            steps in prop::collection::vec(1usize..12, 1..40),
        ) {
            let mut all = FrameBuf::default();
            pieces.iter().for_each(|piece| all.push(Bytes::from(piece.clone())));
            let expected = pieces.concat();
            let mut taken = Vec::new();
            for step in steps {
                let mut slices = [IoSlice::new(&[]); 3];
                let filled = all.chunks_vectored(&mut slices);
                let seen: Vec<u8> = slices[..filled].iter().flat_map(|slice| slice.to_vec()).collect();
                prop_assert!(expected[taken.len()..].starts_with(&seen));
                let step = step.min(all.remaining());
                taken.extend_from_slice(&all.copy_to_bytes(step));
                prop_assert_eq!(all.is_empty(), taken.len() == expected.len());
            }
            prop_assert!(expected.starts_with(&taken));
        }
    }
}
