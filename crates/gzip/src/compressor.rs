//! Compresses pieces with zlib-rs, whose state is allocated once and then reset.

use bytes::Bytes;
use zlib_rs::{Deflate, DeflateFlush};

use crate::{
    Checksum, Piece,
    piece::{SYNC_LENGTHS, stored_wire_len},
};

/// A piece refers back only to its own bytes, as far as deflate allows, 32 KiB. A smaller window
/// saves memory and no time, and chunks of lists become twice as large.
const WINDOW_BITS: u8 = 15;

/// Free bytes of the output before each step. A flush needs six, and a repeated step costs a call.
const FREE_BYTES_MIN: usize = 4096;

/// Output buffer that a compressor keeps between pieces. Larger ones are released.
const KEPT_OUTPUT_BYTES_MAX: usize = 256 << 10;

/// The least part of the bytes that compression must save, as a divisor. A compressed piece has
/// memory of its own and takes the readers time; a stored one shares the plain bytes.
const SAVED_DIVISOR: usize = 8;

/// A compression level of zlib, from 1 (fast) to 9 (small).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Level(u8);

impl Level {
    /// Decision 54 has the figures. Higher levels take much time for little, with events as with
    /// chunks of lists.
    pub const DEFAULT: Self = Self(3);

    /// Returns `None` if the level is not in 1 to 9.
    pub fn new(level: u8) -> Option<Self> {
        (1..=9).contains(&level).then_some(Self(level))
    }
}

impl Default for Level {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// The state of a deflate stream, which makes one piece after another. It occupies 380 KB, so it
/// is kept and not made for each piece.
pub struct Compressor {
    deflate: Deflate,
    /// The compressed bytes of the piece in work, and free space after them.
    output: Vec<u8>,
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compressor").finish_non_exhaustive()
    }
}

impl Compressor {
    /// Allocates the state.
    pub fn new(level: Level) -> Self {
        Self { deflate: Deflate::new(i32::from(level.0), false, WINDOW_BITS), output: Vec::new() }
    }

    /// Compresses one piece. The piece stores the plain bytes if compression does not save an
    /// eighth of them.
    pub fn compress(&mut self, plain: Bytes) -> Piece {
        if plain.is_empty() {
            return Piece::empty();
        }
        let checksum = Checksum::of(&plain);
        self.deflate.reset();
        let is_written = self.write(&plain, DeflateFlush::SyncFlush).is_ok();
        let deflated = if is_written { self.deflated(plain.len()) } else { None };
        if self.output.len() > KEPT_OUTPUT_BYTES_MAX {
            self.output = Vec::new();
        }
        match deflated {
            Some(wire) => Piece::deflated(wire, checksum),
            None => Piece::stored_with(plain, checksum),
        }
    }

    /// Number of compressed bytes of the piece in work.
    fn written(&self) -> usize {
        usize::try_from(self.deflate.total_out()).unwrap_or(usize::MAX)
    }

    /// Compresses `input`, and flushes if that is asked for.
    fn write(&mut self, mut input: &[u8], flush: DeflateFlush) -> Result<(), Failed> {
        loop {
            let written = self.written();
            if self.output.len().saturating_sub(written) < FREE_BYTES_MIN {
                let len = (2 * self.output.len()).max(written + FREE_BYTES_MIN);
                self.output.resize(len, 0);
            }
            let read_before = self.deflate.total_in();
            let free = self.output.get_mut(written..).ok_or(Failed)?;
            self.deflate.compress(input, free, flush).map_err(|_| Failed)?;
            let read = usize::try_from(self.deflate.total_in() - read_before).map_err(|_| Failed)?;
            input = input.get(read..).ok_or(Failed)?;
            // zlib has no more to write if it leaves space free.
            if self.written() < self.output.len() {
                return if input.is_empty() { Ok(()) } else { Err(Failed) };
            }
        }
    }

    /// Returns the compressed bytes if they end as a piece must, and if they save enough.
    fn deflated(&self, plain_len: usize) -> Option<Bytes> {
        let wire = self.output.get(..self.written())?;
        let saves_enough = wire.len() <= stored_wire_len(plain_len) - plain_len / SAVED_DIVISOR;
        (saves_enough && wire.ends_with(&SYNC_LENGTHS)).then(|| Bytes::copy_from_slice(wire))
    }
}

/// zlib reports an inconsistent state. That cannot happen with valid parameters, and a piece can be
/// stored then.
struct Failed;
