//! The compressed forms of the contract: deltas of objects, and chunks of snapshots. Pure functions over bytes.
//!
//! Both ends use them, the server to encode and the client to decode, so they stand beside the layers and not in one; each pair is in
//! one file, so that what one writes is what the other checks.

pub mod chunk;
pub mod delta;
#[cfg(test)]
mod vectors;

use std::cell::RefCell;

use zstd::zstd_safe::{self, DCtx};

/// How objects are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Encoding {
    /// Every object as JSON
    #[default]
    Json,
    /// The state in compressed chunks, changes as JSON
    Zstd,
    /// The state in compressed chunks, changes as deltas; without metadata.resourceVersion and metadata.managedFields (experimental)
    ZstdDelta,
}

impl Encoding {
    /// The name on the command line and in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Zstd => "zstd",
            Self::ZstdDelta => "zstd-delta",
        }
    }

    /// Whether snapshots come in compressed chunks.
    pub fn compresses_snapshots(self) -> bool {
        self != Self::Json
    }
}

thread_local! {
    /// To make one takes longer than to use it.
    static CONTEXT: RefCell<DCtx<'static>> = RefCell::new(DCtx::create());
}

/// The bit of a frame header's first byte that says that a checksum follows the content (RFC 8878, 3.1.1.1.1).
const CHECKSUM_FLAG: u8 = 0b100;
/// Where that byte stands: after the magic number.
const DESCRIPTOR_AT: usize = 4;

/// Why bytes are not one zstd frame that the contract allows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Its content would be larger than the reader takes.
    #[error("{content_bytes} bytes of content are more than the {content_bytes_max} that are taken")]
    TooLarge {
        /// What the frame says.
        content_bytes: u64,
        /// The limit.
        content_bytes_max: usize,
    },
    /// It cannot be decompressed, or not be checked.
    #[error("broken zstd frame: {0}")]
    Broken(&'static str),
}

/// Decompresses the one frame in `frame`, with `prefix` as its raw dictionary. What cannot be checked is refused: a frame without
/// content size or checksum.
fn decompress(frame: &[u8], prefix: &[u8], content_bytes_max: usize) -> Result<Vec<u8>, FrameError> {
    let broken = |code| FrameError::Broken(zstd_safe::get_error_name(code));
    if zstd_safe::find_frame_compressed_size(frame).map_err(broken)? != frame.len() {
        return Err(FrameError::Broken("there is something after it"));
    }
    if frame.get(DESCRIPTOR_AT).is_none_or(|descriptor| descriptor & CHECKSUM_FLAG == 0) {
        return Err(FrameError::Broken("it has no checksum"));
    }
    let content_bytes = match zstd_safe::get_frame_content_size(frame) {
        Ok(Some(size)) => size,
        Ok(None) | Err(_) => return Err(FrameError::Broken("it does not say its content's size")),
    };
    let size = usize::try_from(content_bytes).ok().filter(|size| *size <= content_bytes_max);
    let size = size.ok_or(FrameError::TooLarge { content_bytes, content_bytes_max })?;
    let mut content = Vec::with_capacity(size);
    let len = CONTEXT.with_borrow_mut(|context| context.decompress_using_dict(&mut content, frame, prefix));
    match len.map_err(broken)? {
        len if len == size => Ok(content),
        _ => Err(FrameError::Broken("its content has another size than it says")),
    }
}
