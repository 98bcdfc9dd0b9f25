//! Decodes a gzip body with zlib-rs, in slices: a body from a hostile server inflates a
//! thousandfold, and its reader decides after each slice whether to go on.

use bytes::{Buf, Bytes};
use zlib_rs::{Inflate, InflateError, InflateFlush, Status};

/// The most plain bytes that are decoded at once.
pub const SLICE_BYTES_MAX: usize = 16 << 10;

/// zlib's number for a window of 32 KiB in a gzip member, whose header and end it checks.
const GZIP_WINDOW_BITS: u8 = 16 + 15;

/// The reason why a body cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GzipError {
    /// The body ends inside a member.
    #[error("the gzip body was cut off")]
    CutOff,
    /// It is not gzip, or a checksum or a length differs.
    #[error("broken gzip: {0}")]
    Broken(&'static str),
}

/// Decodes a body of gzip members (RFC 1952), one after the other.
///
/// It hands out all plain bytes that the received bytes contain, so a reader gets an event as soon
/// as the server has flushed it. Between two members it holds no state but the last slice's buffer.
#[derive(Default)]
pub struct Decoder {
    /// Received bytes that are not decoded yet.
    input: Bytes,
    /// The state of the member that is not complete, of about 40 KiB.
    member: Option<Inflate>,
    /// The buffer for a slice.
    output: Vec<u8>,
    /// Whether the last slice was full. The state may have more plain bytes without more input.
    is_full: bool,
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decoder").field("input_bytes", &self.input.len()).finish_non_exhaustive()
    }
}

impl Decoder {
    /// A decoder at the start of a body.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds received bytes. [`Self::next_slice`] must have returned `None` before.
    pub fn push(&mut self, received: Bytes) {
        debug_assert!(self.input.is_empty(), "the bytes before are decoded");
        self.input = received;
    }

    /// Decodes at most [`SLICE_BYTES_MAX`] plain bytes, never none; `None` until more is received.
    /// After an error, it must not be called again.
    ///
    /// # Errors
    /// [`GzipError::Broken`]. The bytes after a member must be another member.
    pub fn next_slice(&mut self) -> Result<Option<Bytes>, GzipError> {
        while self.is_full || !self.input.is_empty() {
            let written = self.decode()?;
            if written > 0 {
                return Ok(Some(Bytes::copy_from_slice(self.output.get(..written).unwrap_or_default())));
            }
        }
        Ok(None)
    }

    /// Checks that the body may end here: between two members. A body may be empty.
    ///
    /// # Errors
    /// [`GzipError::CutOff`].
    pub fn finish(&self) -> Result<(), GzipError> {
        if self.member.is_some() || !self.input.is_empty() { Err(GzipError::CutOff) } else { Ok(()) }
    }

    /// Decodes into the buffer until it is full, the input is empty, or the member ends. Returns
    /// the number of plain bytes.
    fn decode(&mut self) -> Result<usize, GzipError> {
        self.output.resize(SLICE_BYTES_MAX, 0);
        let inflate = self.member.get_or_insert_with(|| Inflate::new(true, GZIP_WINDOW_BITS));
        let read_before = inflate.total_in();
        let written_before = inflate.total_out();
        let status = inflate.decompress(&self.input, &mut self.output, InflateFlush::NoFlush);
        let read = usize::try_from(inflate.total_in() - read_before).unwrap_or(usize::MAX);
        let written = usize::try_from(inflate.total_out() - written_before).unwrap_or(usize::MAX);
        let status = status.map_err(|error| GzipError::Broken(describe(inflate, error)))?;
        let was_full = std::mem::replace(&mut self.is_full, written == SLICE_BYTES_MAX);
        self.input.advance(read.min(self.input.len()));
        if status == Status::StreamEnd {
            self.member = None;
            self.is_full = false;
        } else if read == 0 && written == 0 && !was_full {
            // zlib takes all input or fills the output. Anything else would repeat for ever.
            return Err(GzipError::Broken("no progress"));
        }
        Ok(written)
    }
}

/// zlib's text for a broken stream.
fn describe(inflate: &Inflate, error: InflateError) -> &'static str {
    inflate.error_message().unwrap_or_else(|| error.as_str())
}

#[cfg(test)]
mod tests;
