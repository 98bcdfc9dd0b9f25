//! Compressors for tasks that compress now and then.

use std::sync::{Mutex, PoisonError};

use bytes::Bytes;

use crate::{Compressor, Level, Piece};

/// A compressor that is kept between pieces, because it takes 380 KB. A task that finds it in use
/// makes one of its own for its piece.
#[derive(Debug, Default)]
pub struct Compressors {
    level: Level,
    /// `None` before the first piece, and while a task uses it.
    kept: Mutex<Option<Compressor>>,
}

impl Compressors {
    /// Makes one piece: as [`Compressor::compress`] if it may, otherwise stored.
    pub fn piece(&self, plain: Bytes, may_compress: bool) -> Piece {
        if may_compress { self.compress(plain) } else { Piece::stored(plain) }
    }

    /// Compresses one piece, as [`Compressor::compress`].
    pub fn compress(&self, plain: Bytes) -> Piece {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut compressor = kept.unwrap_or_else(|| Compressor::new(self.level));
        let piece = compressor.compress(plain);
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(compressor);
        piece
    }

    /// Releases the memory of the compressor that is kept.
    pub fn forget(&self) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
