//! Decodes gzip bodies (RFC 1952) as a streaming client does. It shares no code with the encoder
//! under test.
//!
//! It hands out what it has where a deflate stream was flushed, as Go's decoder does. So an event
//! whose bytes do not end there arrives late.

use flate2::{Crc, Decompress, FlushDecompress, Status};

/// The magic number, the compression method, and no flags.
const HEADER: [u8; 4] = [0x1f, 0x8b, 8, 0];
const HEADER_BYTES: usize = 10;
const TRAILER_BYTES: usize = 8;
/// The lengths of an empty stored block, with which a flush ends.
const FLUSH: [u8; 4] = [0x00, 0x00, 0xff, 0xff];

/// The reason why a body is not a gzip member.
type Damage = String;

/// The part of the member that comes next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Header,
    Blocks,
    Trailer,
    /// Nothing may follow.
    Over,
}

/// Decodes one member.
pub(crate) struct GzipDecoder {
    part: Part,
    /// The bytes of the header or the trailer that have arrived.
    fields: Vec<u8>,
    inflate: Decompress,
    /// The last bytes of the blocks.
    last: [u8; 4],
    /// The number of flushes so far.
    flushes: u64,
    /// The number of parts after the first flush, each up to the next one, that begin with a block
    /// that is not stored.
    compressed: u64,
    /// Whether the last part that began was compressed. `None` before the first flush.
    last_compressed: Option<bool>,
    /// The number of changes between parts that are stored and parts that are compressed.
    switches: u64,
    /// Plain bytes since the last flush.
    held: Vec<u8>,
    /// The CRC-32 and the length of all plain bytes.
    crc: Crc,
}

impl GzipDecoder {
    pub(crate) fn new() -> GzipDecoder {
        GzipDecoder {
            part: Part::Header,
            fields: Vec::new(),
            inflate: Decompress::new(false),
            last: [0xff; 4],
            flushes: 0,
            compressed: 0,
            last_compressed: None,
            switches: 0,
            held: Vec::new(),
            crc: Crc::new(),
        }
    }

    /// Whether the whole member was decoded, and its CRC and length are right.
    pub(crate) fn has_ended(&self) -> bool {
        self.part == Part::Over
    }

    /// Returns the number of parts that were compressed, of those after the first flush, since the
    /// last call. They are events if the body is a watch, because its state is often one part.
    pub(crate) fn take_compressed(&mut self) -> u64 {
        std::mem::take(&mut self.compressed)
    }

    /// Returns the number of changes between stored and compressed parts since the last call.
    pub(crate) fn take_switches(&mut self) -> u64 {
        std::mem::take(&mut self.switches)
    }

    /// Decodes the next bytes of the body. Returns the plain bytes up to the last flush.
    pub(crate) fn decode(&mut self, mut wire: &[u8]) -> Result<Vec<u8>, Damage> {
        let mut plain = Vec::new();
        while !wire.is_empty() {
            wire = match self.part {
                Part::Header => self.header(wire)?,
                Part::Blocks => self.blocks(wire, &mut plain)?,
                Part::Trailer => self.trailer(wire)?,
                Part::Over => return Err(format!("{} bytes follow the end of the gzip member", wire.len())),
            };
        }
        Ok(plain)
    }

    fn header<'a>(&mut self, wire: &'a [u8]) -> Result<&'a [u8], Damage> {
        let rest = self.collect(wire, HEADER_BYTES);
        if self.fields.len() == HEADER_BYTES {
            let header = std::mem::take(&mut self.fields);
            if !header.starts_with(&HEADER) {
                return Err(format!("the body begins with {header:02x?}"));
            }
            self.part = Part::Blocks;
        }
        Ok(rest)
    }

    /// Decodes up to the next flush.
    fn blocks<'a>(&mut self, wire: &'a [u8], plain: &mut Vec<u8>) -> Result<&'a [u8], Damage> {
        // After a flush a block begins with a byte. Its lowest bit says that it is the last one,
        // and the next two are zero if it is stored.
        if self.flushes > 0 && self.last == FLUSH && wire[0] & 0b001 == 0 {
            let is_compressed = wire[0] & 0b110 != 0;
            self.compressed += u64::from(is_compressed);
            let before = self.last_compressed.replace(is_compressed);
            self.switches += u64::from(before.is_some_and(|before| before != is_compressed));
        }
        let last = &mut self.last;
        let flush = wire.iter().position(|byte| {
            last.rotate_left(1);
            last[3] = *byte;
            *last == FLUSH
        });
        let blocks = flush.map_or(wire, |at| &wire[..=at]);
        let (read, has_ended) = self.inflate(blocks)?;
        if has_ended {
            self.part = Part::Trailer;
        }
        self.flushes += u64::from(flush.is_some());
        if has_ended || flush.is_some() {
            plain.append(&mut self.held);
        }
        Ok(&wire[read..])
    }

    /// Returns the number of bytes that it has read, and whether the last block has ended.
    fn inflate(&mut self, wire: &[u8]) -> Result<(usize, bool), Damage> {
        let mut read = 0;
        let mut buffer = [0; 8192];
        loop {
            let read_before = self.inflate.total_in();
            let written_before = self.inflate.total_out();
            let status = self.inflate.decompress(&wire[read..], &mut buffer, FlushDecompress::Sync);
            let status = status.map_err(|error| format!("the deflate stream is broken: {error}"))?;
            let newly_read = (self.inflate.total_in() - read_before) as usize;
            let plain = &buffer[..(self.inflate.total_out() - written_before) as usize];
            read += newly_read;
            self.crc.update(plain);
            self.held.extend_from_slice(plain);
            if status == Status::StreamEnd {
                return Ok((read, true));
            }
            if read == wire.len() && plain.len() < buffer.len() {
                return Ok((read, false));
            }
            if newly_read == 0 && plain.is_empty() {
                return Err("the decoder makes no progress".to_owned());
            }
        }
    }

    fn trailer<'a>(&mut self, wire: &'a [u8]) -> Result<&'a [u8], Damage> {
        let rest = self.collect(wire, TRAILER_BYTES);
        if let Some((crc, len)) = self.fields.split_first_chunk()
            && let Ok(len) = len.try_into()
        {
            let crc = u32::from_le_bytes(*crc);
            let len = u32::from_le_bytes(len);
            if (crc, len) != (self.crc.sum(), self.crc.amount()) {
                return Err(format!(
                    "the gzip member ends with the CRC {crc:08x} of {len} bytes, and has {:08x} of {}",
                    self.crc.sum(),
                    self.crc.amount()
                ));
            }
            self.part = Part::Over;
        }
        Ok(rest)
    }

    /// Collects bytes up to this number. Returns the others.
    fn collect<'a>(&mut self, wire: &'a [u8], bytes: usize) -> &'a [u8] {
        let (taken, rest) = wire.split_at(wire.len().min(bytes - self.fields.len()));
        self.fields.extend_from_slice(taken);
        rest
    }
}
