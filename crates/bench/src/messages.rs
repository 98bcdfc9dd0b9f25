//! The messages of a gRPC stream, told apart without being decoded.
//!
//! A receiver that decoded and copied would measure itself. It needs a message's end and its first bytes: what kind it is stands there.

use bytes::Buf;

/// The first bytes of a message that are kept: a version of 20 digits and the tag after it.
const HEAD_BYTES: usize = 32;
/// Compression flag and length.
const PREFIX_BYTES: usize = 5;

/// Messages as they come in pieces of any size.
#[derive(Default)]
pub(super) struct Messages {
    prefix: [u8; PREFIX_BYTES],
    prefix_bytes: usize,
    head: [u8; HEAD_BYTES],
    head_bytes: usize,
    /// Of the message that has begun; its prefix is complete.
    missing: usize,
}

/// The field of `WatchResponse` that a message carries, by the number it has in the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    SnapshotBegin,
    Event,
    SnapshotEnd,
    GapBegin,
    /// A bookmark, or what a later contract adds.
    Other,
}

impl Messages {
    /// Reads a piece, and calls for each message that it completes.
    pub(super) fn read(&mut self, mut piece: &[u8], mut complete: impl FnMut(Kind, Option<&[u8]>)) {
        loop {
            if self.prefix_bytes < PREFIX_BYTES {
                let count = piece.len().min(PREFIX_BYTES - self.prefix_bytes);
                self.prefix[self.prefix_bytes..][..count].copy_from_slice(&piece[..count]);
                self.prefix_bytes += count;
                piece.advance(count);
                if self.prefix_bytes < PREFIX_BYTES {
                    return;
                }
                self.missing = (&self.prefix[1..]).get_u32() as usize;
                self.head_bytes = 0;
            }
            let count = piece.len().min(self.missing);
            let head = count.min(HEAD_BYTES - self.head_bytes);
            self.head[self.head_bytes..][..head].copy_from_slice(&piece[..head]);
            self.head_bytes += head;
            piece.advance(count);
            self.missing -= count;
            if self.missing > 0 {
                return;
            }
            self.prefix_bytes = 0;
            let (kind, version) = parse(&self.head[..self.head_bytes]);
            complete(kind, version);
        }
    }
}

/// The kind of a `WatchResponse` and its resume version, from its first bytes. Fields stand in the order of their numbers.
fn parse(mut head: &[u8]) -> (Kind, Option<&[u8]>) {
    const LENGTH_DELIMITED: u8 = 2;
    const RESUME_VERSION: u8 = 1 << 3 | LENGTH_DELIMITED;
    let mut version = None;
    if let [RESUME_VERSION, length, rest @ ..] = head
        && let Some((text, rest)) = rest.split_at_checked(usize::from(*length))
    {
        (version, head) = (Some(text), rest);
    }
    let kind = match head.first().map(|tag| (tag >> 3, tag & 7)) {
        Some((2, LENGTH_DELIMITED)) => Kind::SnapshotBegin,
        Some((3, LENGTH_DELIMITED)) => Kind::Event,
        Some((4, LENGTH_DELIMITED)) => Kind::SnapshotEnd,
        Some((5, LENGTH_DELIMITED)) => Kind::GapBegin,
        _ => Kind::Other,
    };
    (kind, version)
}

#[cfg(test)]
mod tests {
    use bytes::{BufMut, Bytes, BytesMut};
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use kubefan_common::proto::v1alpha1::{self, WatchResponse, watch_response::Message as Body};

    /// A kind and its resume version.
    type Found = (Kind, Option<Vec<u8>>);

    fn stream() -> (BytesMut, Vec<Found>) {
        let event = |size| v1alpha1::Event {
            resource_version: "7".into(),
            object: vec![b'x'; size].into(),
            ..v1alpha1::Event::default()
        };
        let bodies = [
            ("", Body::SnapshotBegin(v1alpha1::SnapshotBegin { resource_version: "5".into(), ..Default::default() })),
            ("", Body::Event(event(0))),
            ("", Body::Event(event(300))),
            ("18446744073709551615", Body::SnapshotEnd(v1alpha1::SnapshotEnd { object_count: 2 })),
            ("8", Body::Event(event(5))),
            ("", Body::GapBegin(v1alpha1::GapBegin::default())),
            ("9", Body::GapEnd(v1alpha1::GapEnd {})),
            ("10", Body::Bookmark(v1alpha1::Bookmark {})),
        ];
        let kinds = [
            Kind::SnapshotBegin,
            Kind::Event,
            Kind::Event,
            Kind::SnapshotEnd,
            Kind::Event,
            Kind::GapBegin,
            Kind::Other,
            Kind::Other,
        ];
        let mut bytes = BytesMut::new();
        let mut expected = Vec::new();
        for ((version, body), kind) in bodies.into_iter().zip(kinds) {
            let message = WatchResponse { resume_version: version.into(), message: Some(body) }.encode_to_vec();
            bytes.put_u8(0);
            bytes.put_u32(message.len() as u32);
            bytes.put_slice(&message);
            expected.push((kind, (!version.is_empty()).then(|| version.as_bytes().to_vec())));
        }
        (bytes, expected)
    }

    proptest! {
        #[test]
        fn messages_are_found_however_they_are_cut(cuts in prop::collection::vec(0..500usize, 0..12)) {
            let (bytes, expected) = stream();
            let mut rest: Bytes = bytes.freeze();
            let (mut messages, mut found) = (Messages::default(), Vec::new());
            for cut in cuts {
                let piece = rest.split_to(cut.min(rest.len()));
                messages.read(&piece, |kind, version| found.push((kind, version.map(<[u8]>::to_vec))));
            }
            messages.read(&rest, |kind, version| found.push((kind, version.map(<[u8]>::to_vec))));
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn no_bytes_are_too_strange(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            Messages::default().read(&bytes, |_, _| {});
        }
    }
}
