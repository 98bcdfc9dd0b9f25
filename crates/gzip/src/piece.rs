//! Pieces of a deflate stream (RFC 1951) that begin and end at byte boundaries and refer to nothing
//! before them.

use bytes::{BufMut, Bytes};

use crate::Checksum;

/// The empty stored block at the end of each piece. Go's `compress/flate` hands out what it has
/// decoded when its window is full, at the end of the stream, and at such a block. A stored block
/// that is not empty does not have this effect.
pub(crate) const SYNC: [u8; 5] = [0x00, 0x00, 0x00, 0xff, 0xff];
/// The part of [`SYNC`] that does not share its first byte with the block before it.
pub(crate) const SYNC_LENGTHS: [u8; 4] = [0x00, 0x00, 0xff, 0xff];

/// Most bytes of one stored block: its length has 16 bits.
const STORED_BLOCK_BYTES_MAX: usize = 65_535;
/// The header of a stored block of the greatest length.
const FULL_BLOCK: [u8; 5] = stored_header(u16::MAX);

const fn stored_header(len: u16) -> [u8; 5] {
    let [l0, l1] = len.to_le_bytes();
    // Three bits (not the last block, stored) and five bits up to the next byte.
    [0x00, l0, l1, !l0, !l1]
}

/// A part of a gzip member: some plain bytes, compressed or stored, with their checksum. It is
/// immutable, and a clone shares its bytes. A piece of no plain bytes has no bytes on the wire.
#[derive(Debug, Clone)]
pub struct Piece {
    form: Form,
    checksum: Checksum,
}

#[derive(Debug, Clone)]
enum Form {
    /// The bytes on the wire.
    Deflated(Bytes),
    /// The plain bytes, and the header of their last block.
    Stored { plain: Bytes, last_header: Bytes },
}

impl Piece {
    /// The piece without plain bytes.
    pub fn empty() -> Self {
        Self { form: Form::Deflated(Bytes::new()), checksum: Checksum::EMPTY }
    }

    /// Makes a piece that stores `plain` and shares its memory. On the wire it has ten bytes more
    /// for up to 65,535 plain bytes, and five more for each further block.
    pub fn stored(plain: Bytes) -> Self {
        let checksum = Checksum::of(&plain);
        Self::stored_with(plain, checksum)
    }

    pub(crate) fn stored_with(plain: Bytes, checksum: Checksum) -> Self {
        if plain.is_empty() {
            return Self::empty();
        }
        // The last block has at least one byte.
        let last = (plain.len() - 1) % STORED_BLOCK_BYTES_MAX + 1;
        let last_header = stored_header(u16::try_from(last).unwrap_or(u16::MAX));
        Self { form: Form::Stored { plain, last_header: Bytes::copy_from_slice(&last_header) }, checksum }
    }

    /// Makes a piece of a deflate stream that ends with [`SYNC`].
    pub(crate) fn deflated(wire: Bytes, checksum: Checksum) -> Self {
        Self { form: Form::Deflated(wire), checksum }
    }

    /// The CRC-32 and the length of the plain bytes.
    pub fn checksum(&self) -> Checksum {
        self.checksum
    }

    /// Whether the plain bytes are stored and not compressed. The piece then shares their memory.
    pub fn is_stored(&self) -> bool {
        matches!(self.form, Form::Stored { .. })
    }

    /// Number of bytes on the wire.
    pub fn wire_len(&self) -> usize {
        match &self.form {
            Form::Deflated(wire) => wire.len(),
            Form::Stored { plain, .. } => stored_wire_len(plain.len()),
        }
    }

    /// Returns the bytes on the wire as shared slices: one for a compressed piece. A stored one has
    /// two for each block, the header and the plain bytes, and one for the empty block.
    pub fn wire(&self) -> Wire<'_> {
        Wire { form: &self.form, next: Next::Block { start: 0 } }
    }

    /// Writes the bytes on the wire. `out` must have room for them, as a growing buffer always has.
    pub fn put(&self, out: &mut impl BufMut) {
        for slice in self.wire() {
            out.put_slice(&slice);
        }
    }

    /// Returns the bytes on the wire in one slice. A stored piece is copied.
    pub fn to_bytes(&self) -> Bytes {
        match &self.form {
            Form::Deflated(wire) => wire.clone(),
            Form::Stored { .. } => {
                let mut joined = Vec::with_capacity(self.wire_len());
                self.put(&mut joined);
                joined.into()
            }
        }
    }
}

/// Returns the size on the wire of stored bytes.
pub(crate) fn stored_wire_len(plain_len: usize) -> usize {
    if plain_len == 0 {
        return 0;
    }
    let blocks = plain_len.div_ceil(STORED_BLOCK_BYTES_MAX);
    plain_len + blocks * FULL_BLOCK.len() + SYNC.len()
}

/// The slices of a piece on the wire, in order. None is empty.
#[derive(Debug, Clone)]
pub struct Wire<'a> {
    form: &'a Form,
    next: Next,
}

/// The next slice.
#[derive(Debug, Clone, Copy)]
enum Next {
    /// The header of the block that begins here, or all of a compressed piece.
    Block { start: usize },
    /// The plain bytes of that block.
    Plain { start: usize },
    /// The empty block.
    Sync,
    /// Nothing.
    Done,
}

impl Iterator for Wire<'_> {
    type Item = Bytes;

    fn next(&mut self) -> Option<Bytes> {
        let (plain, last_header) = match self.form {
            Form::Deflated(wire) => {
                let is_new = matches!(std::mem::replace(&mut self.next, Next::Done), Next::Block { .. });
                return (is_new && !wire.is_empty()).then(|| wire.clone());
            }
            Form::Stored { plain, last_header } => (plain, last_header),
        };
        match self.next {
            Next::Block { start } => {
                self.next = Next::Plain { start };
                if plain.len() - start > STORED_BLOCK_BYTES_MAX {
                    return Some(Bytes::from_static(&FULL_BLOCK));
                }
                Some(last_header.clone())
            }
            Next::Plain { start } => {
                let end = plain.len().min(start + STORED_BLOCK_BYTES_MAX);
                self.next = Next::Block { start: end };
                if end == plain.len() {
                    self.next = Next::Sync;
                }
                Some(plain.slice(start..end))
            }
            Next::Sync => {
                self.next = Next::Done;
                Some(Bytes::from_static(&SYNC))
            }
            Next::Done => None,
        }
    }
}
