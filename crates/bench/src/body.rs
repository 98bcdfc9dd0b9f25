//! Bodies of HTTP responses: counts the events of a watch, whatever the media type and the content
//! coding.

use http::{HeaderMap, header};

use super::{encoding::Encoding, gzip_decoder::GzipDecoder};

/// Size in bytes of the length before each event in protobuf.
const LENGTH_BYTES: usize = 4;

/// Counts the events of a watch whose body arrives in parts of any size.
pub(super) struct WatchBody {
    /// `None` if the body has no content coding.
    decoder: Option<GzipDecoder>,
    events: EventCounter,
}

impl WatchBody {
    /// Reads the content coding from the head of a response. A server need not use the one that the
    /// subscriber accepts.
    ///
    /// # Errors
    /// If it is unknown.
    pub(super) fn new(encoding: Encoding, headers: &HeaderMap) -> Result<Self, String> {
        Ok(Self { decoder: decoder_of(headers)?, events: EventCounter::new(encoding) })
    }

    /// Reads a part of the body. Returns the number of events that it completes.
    pub(super) fn read(&mut self, part: &[u8]) -> Result<u64, String> {
        let Some(decoder) = &mut self.decoder else { return Ok(self.events.count(part)) };
        let mut count = 0;
        decoder.decode(part, |plain| count += self.events.count(plain))?;
        Ok(count)
    }
}

/// Returns the decoder of a response; `None` if the body has no content coding.
///
/// # Errors
/// If the content coding is unknown.
pub(super) fn decoder_of(headers: &HeaderMap) -> Result<Option<GzipDecoder>, String> {
    match headers.get(header::CONTENT_ENCODING).map(|coding| coding.as_bytes()) {
        None | Some(b"identity") => Ok(None),
        Some(b"gzip") => Ok(Some(GzipDecoder::default())),
        Some(other) => Err(format!("the server sent the content coding {}", String::from_utf8_lossy(other))),
    }
}

/// Counts events in plain bytes.
enum EventCounter {
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
    fn new(encoding: Encoding) -> Self {
        if encoding.is_protobuf() {
            return Self::Lengths { length: [0; LENGTH_BYTES], length_bytes: 0, missing_bytes: 0 };
        }
        Self::Lines
    }

    fn count(&mut self, mut plain: &[u8]) -> u64 {
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

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use kubefan_gzip::{Checksum, HEADER, Piece, end};
    use proptest::prelude::*;

    use super::*;

    fn headers(coding: Option<&'static str>) -> HeaderMap {
        coding.into_iter().map(|coding| (header::CONTENT_ENCODING, HeaderValue::from_static(coding))).collect()
    }

    /// The plain bytes of events of these sizes.
    fn plain(encoding: Encoding, sizes: &[usize]) -> Vec<u8> {
        let mut plain = Vec::new();
        for bytes in sizes {
            if encoding.is_protobuf() {
                plain.extend_from_slice(&(*bytes as u32).to_be_bytes());
                // Not the end of an event in protobuf.
                plain.resize(plain.len() + bytes, b'\n');
            } else {
                plain.resize(plain.len() + bytes, b'x');
                plain.push(b'\n');
            }
        }
        plain
    }

    proptest! {
        #[test]
        fn events_are_counted_wherever_the_body_is_cut(
            sizes in prop::collection::vec(0..300usize, 0..12),
            cuts in prop::collection::vec(0..500usize, 0..12),
            is_protobuf: bool,
            is_gzip: bool,
        ) {
            let encoding = if is_protobuf { Encoding::ProtobufGzip } else { Encoding::Gzip };
            let plain = plain(encoding, &sizes);
            let mut body = plain.clone();
            if is_gzip {
                body = HEADER.to_vec();
                body.extend_from_slice(&Piece::stored(plain.clone().into()).to_bytes());
                body.extend_from_slice(&end(Checksum::of(&plain)));
            }
            let mut reader = WatchBody::new(encoding, &headers(is_gzip.then_some("gzip"))).unwrap();
            let mut rest = &body[..];
            let mut count = 0;
            for cut in cuts {
                let (part, after) = rest.split_at(cut.min(rest.len()));
                rest = after;
                count += reader.read(part).unwrap();
            }
            count += reader.read(rest).unwrap();
            prop_assert_eq!(count, sizes.len() as u64);
        }
    }

    #[test]
    fn only_gzip_and_identity_are_read() {
        assert!(WatchBody::new(Encoding::Gzip, &headers(Some("identity"))).unwrap().decoder.is_none());
        assert!(WatchBody::new(Encoding::Gzip, &headers(None)).unwrap().decoder.is_none());
        assert!(WatchBody::new(Encoding::Json, &headers(Some("gzip"))).unwrap().decoder.is_some());
        assert!(WatchBody::new(Encoding::Gzip, &headers(Some("br"))).is_err());
    }
}
