//! Counts the events of a watch over HTTP in its plain bytes, or in a gzip body.

use bytes::Bytes;
use kubefan_gzip::{Decoder, GzipError};

use super::encoding::Encoding;

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
    decoder: Decoder,
    /// The reason why nothing more is decoded.
    error: Option<GzipError>,
    counter: EventCounter,
    events: u64,
}

impl GzipEvents {
    pub(super) fn new(encoding: Encoding) -> Self {
        Self { decoder: Decoder::new(), error: None, counter: EventCounter::new(encoding), events: 0 }
    }

    /// Decodes the next part of the body.
    ///
    /// # Errors
    /// If it is not gzip.
    pub(super) fn read(&mut self, part: &[u8]) -> Result<(), String> {
        if let Some(error) = self.error {
            return Err(error.to_string());
        }
        self.decode(part).map_err(|error| {
            self.error = Some(error);
            error.to_string()
        })
    }

    fn decode(&mut self, part: &[u8]) -> Result<(), GzipError> {
        self.decoder.push(Bytes::copy_from_slice(part));
        while let Some(plain) = self.decoder.next_slice()? {
            self.events += self.counter.count(&plain);
        }
        Ok(())
    }

    /// Number of events that were complete so far.
    pub(super) fn events(&self) -> u64 {
        self.events
    }
}

#[cfg(test)]
mod tests {
    use kubefan_gzip::{Checksum, HEADER, Piece, end};

    use super::*;

    #[test]
    fn a_body_that_was_broken_stays_an_error() {
        let plain = Bytes::from_static(b"first\nsecond\n");
        let mut body = HEADER.to_vec();
        Piece::stored(plain).put(&mut body);
        body.extend_from_slice(&end(Checksum::of(b"other")));
        let mut events = GzipEvents::new(Encoding::Gzip);
        let error = events.read(&body).unwrap_err();
        assert_eq!(events.read(&HEADER), Err(error));
    }
}
