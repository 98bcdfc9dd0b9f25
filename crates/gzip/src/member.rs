//! The bytes before the first piece of a member, and those after the last.

use crate::Checksum;

/// The header of a member without a name and a time (RFC 1952, section 2.3).
pub const HEADER: [u8; 10] = [0x1f, 0x8b, DEFLATE, NO_FLAGS, 0, 0, 0, 0, NO_EXTRA_FLAGS, UNKNOWN_SYSTEM];

const DEFLATE: u8 = 8;
const NO_FLAGS: u8 = 0;
const NO_EXTRA_FLAGS: u8 = 0;
const UNKNOWN_SYSTEM: u8 = 255;

/// An empty block with fixed Huffman codes that is the last of its deflate stream. It is three
/// bytes shorter than an empty stored block.
const LAST_BLOCK: [u8; 2] = [0x03, 0x00];

/// Size in bytes of the end of a member: the last block, the CRC-32 and the length.
pub const END_BYTES: usize = LAST_BLOCK.len() + 4 + 4;

/// Ends a member whose plain bytes have this checksum. Only a response that is complete may end so:
/// without the end many decoders report that the body was cut off.
pub fn end(plain: Checksum) -> [u8; END_BYTES] {
    let [first, second] = LAST_BLOCK;
    let [c0, c1, c2, c3] = plain.crc().to_le_bytes();
    // ISIZE is the length modulo 2³².
    let [l0, l1, l2, l3, ..] = plain.len().to_le_bytes();
    [first, second, c0, c1, c2, c3, l0, l1, l2, l3]
}
