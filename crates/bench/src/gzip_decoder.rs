//! Decodes bodies with `Content-Encoding: gzip` as they arrive.

use zlib_rs::{Inflate, InflateFlush, Status};

/// The largest window, and a gzip header before the deflate stream.
const GZIP_WINDOW_BITS: u8 = 16 + 15;
/// Decoded bytes at a time. There may be ten thousand decoders, so it is not larger.
const OUTPUT_BYTES: usize = 16 << 10;

/// Decodes one or more gzip members (RFC 1952) that arrive in parts of any size.
pub(super) struct GzipDecoder {
    inflate: Inflate,
    output: Box<[u8]>,
    /// Whether a member has ended and no byte has come after it.
    is_at_end: bool,
}

impl Default for GzipDecoder {
    fn default() -> Self {
        Self { inflate: Inflate::new(true, GZIP_WINDOW_BITS), output: vec![0; OUTPUT_BYTES].into(), is_at_end: false }
    }
}

impl GzipDecoder {
    /// Decodes a part of the body, and passes on all plain bytes that it completes.
    ///
    /// # Errors
    /// If the bytes are not gzip, or a member's CRC-32 or length is wrong.
    pub(super) fn decode(&mut self, mut part: &[u8], mut plain: impl FnMut(&[u8])) -> Result<(), String> {
        loop {
            if self.is_at_end {
                if part.is_empty() {
                    return Ok(());
                }
                // A reset would expect zlib's header.
                self.inflate = Inflate::new(true, GZIP_WINDOW_BITS);
                self.is_at_end = false;
            }
            let read_before = self.inflate.total_in();
            let written_before = self.inflate.total_out();
            let status = self.inflate.decompress(part, &mut self.output, InflateFlush::SyncFlush);
            let status = status.map_err(|error| format!("gzip: {}", error.as_str()))?;
            let read = (self.inflate.total_in() - read_before) as usize;
            let written = (self.inflate.total_out() - written_before) as usize;
            part = part.get(read..).unwrap_or_default();
            plain(self.output.get(..written).unwrap_or_default());
            self.is_at_end = status == Status::StreamEnd;
            if self.is_at_end {
                continue;
            }
            // The decoder has nothing more if it leaves space free.
            if part.is_empty() && written < self.output.len() {
                return Ok(());
            }
            if read == 0 && written == 0 {
                return Err("gzip: the decoder makes no progress".to_owned());
            }
        }
    }

    /// Whether the body may end here: after a complete member.
    pub(super) fn is_at_end(&self) -> bool {
        self.is_at_end
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use kubefan_gzip::{Checksum, Compressor, HEADER, Level, Piece, end};
    use proptest::prelude::*;

    use super::*;

    /// A watch event of about this size.
    fn event(number: usize, bytes: usize) -> Bytes {
        let labels: String = (0..bytes / 16).map(|label| format!("\"l{number}-{label}\":\"v\",")).collect();
        format!("{{\"type\":\"MODIFIED\",{labels}}}\n").into()
    }

    /// A body of some members, each with some events, and its plain bytes.
    fn body(members: &[Vec<usize>]) -> (Vec<u8>, Vec<u8>) {
        let mut compressor = Compressor::new(Level::DEFAULT);
        let mut body = Vec::new();
        let mut all = Vec::new();
        for (member, sizes) in members.iter().enumerate() {
            body.extend_from_slice(&HEADER);
            let mut of_member = Vec::new();
            for (number, bytes) in sizes.iter().enumerate() {
                let plain = event(number, *bytes);
                of_member.extend_from_slice(&plain);
                let is_stored = (member + number).is_multiple_of(3);
                let piece = if is_stored { Piece::stored(plain) } else { compressor.compress(plain) };
                body.extend_from_slice(&piece.to_bytes());
            }
            body.extend_from_slice(&end(Checksum::of(&of_member)));
            all.extend_from_slice(&of_member);
        }
        (body, all)
    }

    proptest! {
        #[test]
        fn members_are_decoded_wherever_the_body_is_cut(
            members in prop::collection::vec(prop::collection::vec(0..40_000usize, 0..4), 1..4),
            cuts in prop::collection::vec(0..3_000usize, 0..12),
        ) {
            let (body, expected) = body(&members);
            let mut decoder = GzipDecoder::default();
            let mut found = Vec::new();
            let mut rest = &body[..];
            for cut in cuts {
                let (part, after) = rest.split_at(cut.min(rest.len()));
                rest = after;
                decoder.decode(part, |plain| found.extend_from_slice(plain)).unwrap();
            }
            decoder.decode(rest, |plain| found.extend_from_slice(plain)).unwrap();
            prop_assert!(decoder.is_at_end());
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = GzipDecoder::default();
            let _ = decoder.decode(&HEADER, |_| {}).and_then(|()| decoder.decode(&bytes, |_| {}));
        }
    }

    #[test]
    fn an_event_is_handed_out_when_its_last_byte_arrives() {
        for sizes in [vec![9_000, 9_000, 9_000], vec![100_000, 16, 16 << 10]] {
            let (body, expected) = body(&[sizes]);
            let lines = |plain: &[u8]| plain.iter().filter(|byte| **byte == b'\n').count();
            let mut decoder = GzipDecoder::default();
            let mut found = Vec::new();
            for byte in &body[..body.len() - kubefan_gzip::END_BYTES] {
                decoder.decode(std::slice::from_ref(byte), |plain| found.extend_from_slice(plain)).unwrap();
            }
            assert_eq!((lines(&found), lines(&expected)), (3, 3));
        }
    }

    #[test]
    fn a_body_is_complete_only_after_a_member() {
        let (body, _) = body(&[vec![3_000], vec![3_000]]);
        let is_at_end = |bytes: &[u8]| {
            let mut decoder = GzipDecoder::default();
            decoder.decode(bytes, |_| {}).unwrap();
            decoder.is_at_end()
        };
        assert!(is_at_end(&body));
        assert!(!is_at_end(&body[..body.len() - 1]));
        assert!(!is_at_end(&[]));
    }

    #[test]
    fn a_wrong_checksum_is_an_error() {
        let (mut body, _) = body(&[vec![3_000]]);
        let crc = body.len() - 8;
        body[crc] ^= 1;
        assert!(GzipDecoder::default().decode(&body, |_| {}).is_err());
    }
}
