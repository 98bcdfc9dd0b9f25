//! One gzip member (RFC 1952) made of pieces that are compressed once and sent in many responses.
//!
//! A response with `Content-Encoding: gzip` is [`HEADER`], the [`Piece::wire`] bytes of any pieces
//! in any order, and [`end`]. A piece refers to no byte before it, so a response may begin at every
//! piece of a log. It ends at a byte boundary with an empty block, at which streaming decoders hand
//! out what they have.
//!
//! The member ends with the CRC-32 of all plain bytes. A [`Checksum`] is combined from those of the
//! pieces, and segments of a log keep a [`Prefix`] per entry, so no response reads its bytes again.
//! A response that is cut off has no [`end`]. Not every decoder reports that, so its HTTP body must
//! be incomplete too. Decision 54 has the reasons.
//!
//! [`PlainBody`] decodes received bodies, which may have several members.

mod checksum;
mod compressor;
mod compressors;
mod decoder;
mod member;
mod piece;
mod plain_body;

#[cfg(test)]
mod tests;

pub use checksum::{Checksum, Prefix};
pub use compressor::{Compressor, Level};
pub use compressors::Compressors;
pub use decoder::{Decoder, GzipError, SLICE_BYTES_MAX};
pub use member::{END_BYTES, HEADER, end};
pub use piece::{Piece, Wire};
pub use plain_body::{BodyError, PlainBody, UnknownCoding};
