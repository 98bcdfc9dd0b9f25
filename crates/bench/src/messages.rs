//! Splits a gRPC stream into messages and recognizes their kinds without decoding them.
//!
//! A receiver that decoded and copied would mainly measure itself. It only needs the end of each
//! message and its first bytes, which show the kind.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Number of bytes retained from the start of a message: enough for a resume version of 20 digits
/// and the next tag.
const HEAD_BYTES: usize = 32;
/// Compression flag and length.
pub(super) const PREFIX_BYTES: usize = 5;

/// A message with its gRPC prefix, not compressed.
pub(super) fn framed(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(PREFIX_BYTES + message.len());
    framed.put_u8(0);
    framed.put_u32(message.len() as u32);
    framed.put_slice(message);
    framed.freeze()
}

/// Splits data that arrives in chunks of any size into messages.
#[derive(Default)]
pub(super) struct MessageReader {
    prefix: [u8; PREFIX_BYTES],
    prefix_bytes: usize,
    head: [u8; HEAD_BYTES],
    head_bytes: usize,
    /// Bytes of the current message still to come, once its prefix is complete.
    missing_bytes: usize,
}

/// The field of `WatchResponse` that a message contains, identified by its protobuf field number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageKind {
    SnapshotBegin,
    Event,
    SnapshotEnd,
    GapBegin,
    /// A bookmark, or a field added in a later version of the protocol.
    Other,
}

impl MessageReader {
    /// Reads a chunk, and calls `complete` for each message that ends in it.
    pub(super) fn read(&mut self, mut chunk: &[u8], mut complete: impl FnMut(MessageKind, Option<&[u8]>)) {
        loop {
            if self.prefix_bytes < PREFIX_BYTES {
                let count = chunk.len().min(PREFIX_BYTES - self.prefix_bytes);
                self.prefix[self.prefix_bytes..][..count].copy_from_slice(&chunk[..count]);
                self.prefix_bytes += count;
                chunk.advance(count);
                if self.prefix_bytes < PREFIX_BYTES {
                    return;
                }
                self.missing_bytes = (&self.prefix[1..]).get_u32() as usize;
                self.head_bytes = 0;
            }
            let count = chunk.len().min(self.missing_bytes);
            let head = count.min(HEAD_BYTES - self.head_bytes);
            self.head[self.head_bytes..][..head].copy_from_slice(&chunk[..head]);
            self.head_bytes += head;
            chunk.advance(count);
            self.missing_bytes -= count;
            if self.missing_bytes > 0 {
                return;
            }
            self.prefix_bytes = 0;
            let (kind, version) = parse(&self.head[..self.head_bytes]);
            complete(kind, version);
        }
    }
}

/// The kind and the resume version of a `WatchResponse`, from its first bytes. prost encodes fields
/// in the order of their numbers.
fn parse(mut head: &[u8]) -> (MessageKind, Option<&[u8]>) {
    const LENGTH_DELIMITED: u8 = 2;
    const RESUME_VERSION: u8 = 1 << 3 | LENGTH_DELIMITED;
    let mut version = None;
    if let [RESUME_VERSION, length, rest @ ..] = head
        && let Some((text, rest)) = rest.split_at_checked(usize::from(*length))
    {
        version = Some(text);
        head = rest;
    }
    let kind = match head.first().map(|tag| (tag >> 3, tag & 7)) {
        Some((2, LENGTH_DELIMITED)) => MessageKind::SnapshotBegin,
        Some((3, LENGTH_DELIMITED)) => MessageKind::Event,
        Some((4, LENGTH_DELIMITED)) => MessageKind::SnapshotEnd,
        Some((5, LENGTH_DELIMITED)) => MessageKind::GapBegin,
        _ => MessageKind::Other,
    };
    (kind, version)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use kubefan_common::proto::v1alpha1::{self, WatchResponse, watch_response::Message as Body};

    /// The kind and the resume version of a message.
    type FoundMessage = (MessageKind, Option<Vec<u8>>);

    fn stream() -> (BytesMut, Vec<FoundMessage>) {
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
            MessageKind::SnapshotBegin,
            MessageKind::Event,
            MessageKind::Event,
            MessageKind::SnapshotEnd,
            MessageKind::Event,
            MessageKind::GapBegin,
            MessageKind::Other,
            MessageKind::Other,
        ];
        let mut bytes = BytesMut::new();
        let mut expected = Vec::new();
        for ((version, body), kind) in bodies.into_iter().zip(kinds) {
            let message =
                WatchResponse { resume_version: version.into(), message: Some(body), ..WatchResponse::default() }
                    .encode_to_vec();
            bytes.put_u8(0);
            bytes.put_u32(message.len() as u32);
            bytes.put_slice(&message);
            expected.push((kind, (!version.is_empty()).then(|| version.as_bytes().to_vec())));
        }
        (bytes, expected)
    }

    proptest! {
        #[test]
        fn messages_are_found_wherever_the_stream_is_split(cuts in prop::collection::vec(0..500usize, 0..12)) {
            let (bytes, expected) = stream();
            let mut rest: Bytes = bytes.freeze();
            let mut messages = MessageReader::default();
            let mut found = Vec::new();
            for cut in cuts {
                let chunk = rest.split_to(cut.min(rest.len()));
                messages.read(&chunk, |kind, version| found.push((kind, version.map(<[u8]>::to_vec))));
            }
            messages.read(&rest, |kind, version| found.push((kind, version.map(<[u8]>::to_vec))));
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            MessageReader::default().read(&bytes, |_, _| {});
        }
    }
}
