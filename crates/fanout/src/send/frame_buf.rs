//! Bytes that are ready for the wire: whole messages, in chunks that are shared with the log and
//! the cache.
//!
//! A chunk is not copied on its way to the socket: the bytes sent to a thousand subscribers are in
//! memory once.

use std::{collections::VecDeque, io::IoSlice, ops::Range};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kubefan_gzip::{Checksum, Piece};
use kubefan_telemetry::metrics::GzipPieces;

/// Some messages, as a buffer to write from.
#[derive(Debug, Clone, Default)]
pub struct FrameBuf {
    /// Outside of the queue, so that a batch from one segment needs no allocation.
    first: Bytes,
    rest: VecDeque<Bytes>,
    remaining: usize,
    messages: usize,
    /// The pieces of a gzip body that were added. Boxed, because a batch is moved several times,
    /// and few have it.
    gzip: Option<Box<GzipBatch>>,
}

/// The pieces of a gzip body in a batch.
#[derive(Debug, Clone, Default)]
struct GzipBatch {
    /// The checksum of the plain bytes of the pieces that were added.
    plain: Checksum,
    /// The shared pieces, and the plain bytes of all pieces.
    pieces: GzipPieces,
}

impl FrameBuf {
    /// Adds bytes.
    pub fn push(&mut self, chunk: Bytes) {
        if chunk.is_empty() {
            return;
        }
        self.remaining += chunk.len();
        if self.first.is_empty() && self.rest.is_empty() {
            self.first = chunk;
        } else {
            self.rest.push_back(chunk);
        }
    }

    /// Adds a piece of a gzip body.
    pub fn push_piece(&mut self, piece: &Piece) {
        for slice in piece.wire() {
            self.push(slice);
        }
        let gzip = self.gzip.get_or_insert_default();
        gzip.plain = gzip.plain.then(piece.checksum());
        gzip.pieces.plain_bytes += piece.checksum().len();
    }

    /// Counts pieces that subscribers share, whose bytes were added.
    pub fn count_pieces(&mut self, pieces: GzipPieces) {
        self.gzip.get_or_insert_default().pieces += pieces;
    }

    /// The shared pieces of a gzip body that were added, and the plain bytes of all pieces.
    pub fn pieces(&self) -> GzipPieces {
        self.gzip.as_ref().map_or_else(GzipPieces::default, |gzip| gzip.pieces)
    }

    /// The checksum of the plain bytes of its pieces. Slices of shared segments do not count: their
    /// checksums are combined once, at the end of a response.
    pub fn plain(&self) -> Checksum {
        self.gzip.as_ref().map_or(Checksum::EMPTY, |gzip| gzip.plain)
    }

    /// Adds bytes in front of all others.
    pub fn push_front(&mut self, chunk: Bytes) {
        self.remaining += chunk.len();
        let second = std::mem::replace(&mut self.first, chunk);
        // An empty chunk would hide those behind it.
        if !second.is_empty() {
            self.rest.push_front(second);
        }
    }

    /// Adds another batch.
    pub fn append(&mut self, other: Self) {
        if let Some(other) = other.gzip {
            let gzip = self.gzip.get_or_insert_default();
            gzip.plain = gzip.plain.then(other.plain);
            gzip.pieces += other.pieces;
        }
        self.push(other.first);
        for chunk in other.rest {
            self.push(chunk);
        }
        self.messages += other.messages;
    }

    /// Replaces a range of bytes in the first chunk; nothing is copied.
    pub fn replace(&mut self, place: Range<usize>, with: Bytes) {
        if place.is_empty() || place.end > self.first.len() {
            return;
        }
        self.remaining = self.remaining - place.len() + with.len();
        let after = self.first.split_off(place.end);
        self.first.truncate(place.start);
        // An empty chunk would hide those behind it.
        for chunk in [after, with].into_iter().filter(|chunk| !chunk.is_empty()) {
            self.rest.push_front(chunk);
        }
        if self.first.is_empty() {
            self.first = self.rest.pop_front().unwrap_or_default();
        }
    }

    /// Counts messages whose bytes were added.
    pub fn count(&mut self, messages: usize) {
        self.messages += messages;
    }

    /// The number of messages that were added, sent or not.
    pub fn messages(&self) -> usize {
        self.messages
    }

    /// The number of bytes that are left.
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
        let chunks = std::iter::once(&self.first).filter(|first| !first.is_empty()).chain(&self.rest);
        let mut filled = 0;
        for (slice, chunk) in slices.iter_mut().zip(chunks) {
            *slice = IoSlice::new(chunk);
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

    /// Shared if they lie in one chunk, as those of a segment do.
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
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..9),
            steps in prop::collection::vec(1usize..12, 1..40),
        ) {
            let mut all = FrameBuf::default();
            for chunk in &chunks {
                all.push(Bytes::from(chunk.clone()));
            }
            let expected = chunks.concat();
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
