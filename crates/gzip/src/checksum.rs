//! CRC-32 values of plain bytes, which are combined without the bytes.
//!
//! Let `a` and `b` be two texts. Then `crc(a b) = shift(crc(a), len(b)) xor crc(b)`, where `shift`
//! multiplies by a power of x modulo the polynomial of the CRC. That takes one multiplication of
//! 32-bit polynomials for each bit that is set in the length. Because the operation is an exclusive
//! or, the same combination of `crc(a)` and `crc(a b)` is `crc(b)`.

use crc32fast::Hasher;

/// The CRC-32 and the length of some plain bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Checksum {
    crc: u32,
    len: u64,
}

impl Checksum {
    /// The checksum of no bytes.
    pub const EMPTY: Self = Self { crc: 0, len: 0 };

    /// Reads all the bytes.
    pub fn of(plain: &[u8]) -> Self {
        Self { crc: crc32fast::hash(plain), len: plain.len() as u64 }
    }

    /// The CRC-32 of the bytes, as RFC 1952 defines it.
    pub fn crc(self) -> u32 {
        self.crc
    }

    /// Number of bytes.
    pub fn len(self) -> u64 {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Returns the checksum of these bytes and then `next`. The operation is associative, with
    /// [`EMPTY`](Self::EMPTY) as its neutral element.
    #[must_use]
    pub fn then(self, next: Self) -> Self {
        Self { crc: combine(self.crc, next), len: self.len.wrapping_add(next.len) }
    }
}

/// Returns `shift(crc, other.len) xor other.crc`. A length of zero demands a CRC of zero: crc32fast
/// does not read it then.
fn combine(crc: u32, other: Checksum) -> u32 {
    // The combination needs only the second length.
    let mut first = Hasher::new_with_initial(crc);
    first.combine(&Hasher::new_with_initial_len(other.crc, other.len));
    first.finalize()
}

/// The checksum of everything before one position, in segments of a log that follow each other.
///
/// Segments compute one per entry when they are encoded. The checksum of a response that begins and
/// ends at any two positions is then one combination at the end of the response, and nothing for
/// each entry that is sent. Prefixes stay valid when the log drops its oldest entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Prefix(Checksum);

impl Prefix {
    /// The position before the first entry.
    pub const START: Self = Self(Checksum::EMPTY);

    /// Returns the position after an entry that begins here.
    #[must_use]
    pub fn then(self, entry: Checksum) -> Self {
        Self(self.0.then(entry))
    }

    /// Number of plain bytes before this position.
    pub fn bytes(self) -> u64 {
        self.0.len
    }

    /// Returns the checksum of what lies between `start` and this position of the same
    /// segments. It is `None` if `start` is later.
    pub fn since(self, start: Self) -> Option<Checksum> {
        let len = self.0.len.checked_sub(start.0.len)?;
        if len == 0 {
            // Two positions with one length and different bytes are of different segments.
            return (self == start).then_some(Checksum::EMPTY);
        }
        let crc = combine(start.0.crc, Checksum { crc: self.0.crc, len });
        Some(Checksum { crc, len })
    }
}
