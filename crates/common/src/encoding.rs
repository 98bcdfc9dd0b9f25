//! The compressed forms of `watch.proto`: deltas of objects, and chunks of snapshots. Pure
//! functions over bytes.
//!
//! The server encodes them and the client decodes them, so this module belongs to neither layer.
//! Encoder and decoder of a form are in the same file, so that each tests the other.

pub mod chunk;
pub mod delta;
#[cfg(test)]
mod vectors;

use std::cell::RefCell;

use zstd::zstd_safe::{self, DCtx};

use crate::proto::v1alpha1;

/// Encoding of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Encoding {
    /// Every object as JSON
    #[default]
    Json,
    /// Snapshots in compressed chunks, changes as JSON
    Zstd,
    /// Snapshots in compressed chunks, changes as deltas; without metadata.resourceVersion and
    /// metadata.managedFields (experimental)
    ZstdDelta,
    /// Every object as Kubernetes protobuf; for built-in types only
    #[cfg_attr(feature = "clap", value(skip))]
    Protobuf,
}

impl From<Encoding> for v1alpha1::Encoding {
    /// As a request names it.
    fn from(encoding: Encoding) -> Self {
        match encoding {
            Encoding::Json => Self::Unspecified,
            Encoding::Zstd => Self::Zstd,
            Encoding::ZstdDelta => Self::ZstdDelta,
            Encoding::Protobuf => Self::Protobuf,
        }
    }
}

impl Encoding {
    /// The name on the command line and in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Zstd => "zstd",
            Self::ZstdDelta => "zstd-delta",
            Self::Protobuf => "protobuf",
        }
    }

    /// Whether snapshots are sent in compressed chunks.
    pub fn compresses_snapshots(self) -> bool {
        matches!(self, Self::Zstd | Self::ZstdDelta)
    }
}

thread_local! {
    /// Creating a context takes longer than using it.
    static CONTEXT: RefCell<DCtx<'static>> = RefCell::new(DCtx::create());
}

/// The bit in a frame header's first byte for a checksum after the content (RFC 8878, 3.1.1.1.1).
const CHECKSUM_FLAG: u8 = 0b100;
/// Offset of that byte: it follows the magic number.
const DESCRIPTOR_AT: usize = 4;

/// The reason why bytes are not a zstd frame that `watch.proto` allows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The content would be larger than the reader accepts.
    #[error("the content has {content_bytes} bytes; the maximum is {content_bytes_max}")]
    TooLarge {
        /// The size that the frame states, in bytes.
        content_bytes: u64,
        /// The limit, in bytes.
        content_bytes_max: usize,
    },
    /// The frame cannot be decompressed or verified.
    #[error("broken zstd frame: {0}")]
    Broken(&'static str),
}

/// Decompresses a single frame, with `prefix` as its raw dictionary. A frame without a content size
/// or a checksum is refused, because it cannot be verified.
fn decompress(frame: &[u8], prefix: &[u8], content_bytes_max: usize) -> Result<Vec<u8>, FrameError> {
    let broken = |code| FrameError::Broken(zstd_safe::get_error_name(code));
    if zstd_safe::find_frame_compressed_size(frame).map_err(broken)? != frame.len() {
        return Err(FrameError::Broken("data follows the frame"));
    }
    if frame.get(DESCRIPTOR_AT).is_none_or(|descriptor| descriptor & CHECKSUM_FLAG == 0) {
        return Err(FrameError::Broken("it has no checksum"));
    }
    let content_bytes = match zstd_safe::get_frame_content_size(frame) {
        Ok(Some(size)) => size,
        Ok(None) | Err(_) => return Err(FrameError::Broken("it does not state its content size")),
    };
    let size = usize::try_from(content_bytes).ok().filter(|size| *size <= content_bytes_max);
    let size = size.ok_or(FrameError::TooLarge { content_bytes, content_bytes_max })?;
    let mut content = Vec::with_capacity(size);
    let len = CONTEXT.with_borrow_mut(|context| context.decompress_using_dict(&mut content, frame, prefix));
    match len.map_err(broken)? {
        len if len == size => Ok(content),
        _ => Err(FrameError::Broken("its content does not have the stated size")),
    }
}
