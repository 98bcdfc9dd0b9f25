//! Counts the events of a watch over HTTP in its plain bytes, or in a gzip body.

use super::{encoding::Encoding, gzip_decoder::GzipDecoder};

/// Size in bytes of the length before each event in protobuf.
const LENGTH_BYTES: usize = 4;

/// Counts events in plain bytes.
pub(super) enum EventCounter {
    /// JSON: a line for each event.
    Lines,
    /// Protobuf: a length before each event.
    Lengths {
        length: [u8; LENGTH_BYTES],
        /// Bytes of the length that have arrived.
        length_bytes: usize,
        /// Bytes of the current event still to come, once its length is complete.
        missing_bytes: usize,
    },
}

impl EventCounter {
    pub(super) fn new(encoding: Encoding) -> Self {
        if encoding.is_protobuf() {
            return Self::Lengths { length: [0; LENGTH_BYTES], length_bytes: 0, missing_bytes: 0 };
        }
        Self::Lines
    }

    /// Returns the number of events that `plain` completes.
    pub(super) fn count(&mut self, mut plain: &[u8]) -> u64 {
        let Self::Lengths { length, length_bytes, missing_bytes } = self else {
            return memchr::memchr_iter(b'\n', plain).count() as u64;
        };
        let mut count = 0;
        while !plain.is_empty() {
            if *length_bytes < LENGTH_BYTES {
                let taken = plain.len().min(LENGTH_BYTES - *length_bytes);
                length[*length_bytes..][..taken].copy_from_slice(&plain[..taken]);
                *length_bytes += taken;
                plain = &plain[taken..];
                *missing_bytes = u32::from_be_bytes(*length) as usize;
            }
            let taken = plain.len().min(*missing_bytes);
            plain = &plain[taken..];
            *missing_bytes -= taken;
            if *length_bytes == LENGTH_BYTES && *missing_bytes == 0 {
                count += 1;
                *length_bytes = 0;
            }
        }
        count
    }
}

/// Counts the events of a body with `Content-Encoding: gzip`.
pub(super) struct GzipEvents {
    decoder: GzipDecoder,
    counter: EventCounter,
    events: u64,
}

impl GzipEvents {
    pub(super) fn new(encoding: Encoding) -> Self {
        Self { decoder: GzipDecoder::default(), counter: EventCounter::new(encoding), events: 0 }
    }

    /// Decodes the next part of the body.
    ///
    /// # Errors
    /// If it is not gzip.
    pub(super) fn read(&mut self, part: &[u8]) -> Result<(), String> {
        self.decoder.decode(part, |plain| self.events += self.counter.count(plain))
    }

    /// Number of events that were complete so far.
    pub(super) fn events(&self) -> u64 {
        self.events
    }
}
