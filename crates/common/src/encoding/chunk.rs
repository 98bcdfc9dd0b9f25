//! Chunks of a snapshot: many `Event` messages in one zstd frame, encoded once and sent to every
//! subscriber that needs a snapshot.
//!
//! There are many frames per snapshot and not one, so that a change renews only one of them and a
//! reader need not buffer the whole snapshot. The hazard is a small frame with huge content, so a
//! reader limits the size before it decompresses.

use bytes::{Buf, Bytes};
use prost::Message;
use zstd::zstd_safe::{self, CCtx, CParameter, ErrorCode};

use super::FrameError;
use crate::proto::v1alpha1::Event;

/// A chunk is shared by many subscribers, but encoded again when one of its objects changes. So
/// speed matters more than the last percent of size.
const LEVEL: i32 = 1;

/// Maximum size of a chunk's content in bytes, as stated in `watch.proto`. It is far above etcd's
/// limit for one object. Senders stay near 1 MiB to limit the memory of readers.
pub const CONTENT_BYTES_MAX: usize = 64 << 20;

/// The least bytes per event, its length included, on average. An event with a key and an object is
/// longer. An event in memory is far larger, so bytes that decode to empty events would take
/// gigabytes.
const EVENT_BYTES_MIN: usize = 16;
/// Number of events that are decoded however short they are.
const SHORT_EVENTS_MAX: usize = 1024;

/// The reason why a chunk cannot be decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// The chunk cannot be decompressed, or its content is corrupt.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The content of the chunk is not a sequence of events.
    #[error("snapshot chunk: {0}")]
    Content(#[from] prost::DecodeError),
    /// The events of the chunk are shorter than events can be.
    #[error("snapshot chunk: more than {events_max} events in {content_bytes} bytes")]
    TooManyEvents {
        /// The most events that content of this size may have.
        events_max: usize,
        /// The size of the content in bytes.
        content_bytes: usize,
    },
}

/// Encodes a chunk. `events` are encoded `Event` messages, each after its length as a varint, split
/// into slices in any way.
///
/// # Errors
/// If the content is larger than [`CONTENT_BYTES_MAX`].
pub fn encode<P: AsRef<[u8]>>(events: impl IntoIterator<Item = P>) -> Result<Bytes, FrameError> {
    let mut content = Vec::new();
    for slice in events {
        content.extend_from_slice(slice.as_ref());
    }
    encode_content(&content)
}

/// Encodes a chunk from contiguous content. See [`encode`].
pub fn encode_content(content: &[u8]) -> Result<Bytes, FrameError> {
    if content.len() > CONTENT_BYTES_MAX {
        return Err(FrameError::TooLarge { content_bytes: content.len() as u64, content_bytes_max: CONTENT_BYTES_MAX });
    }
    let compress = || -> Result<Vec<u8>, ErrorCode> {
        let mut context = CCtx::create();
        context.set_parameter(CParameter::CompressionLevel(LEVEL))?;
        context.set_parameter(CParameter::ChecksumFlag(true))?;
        let mut frame = Vec::with_capacity(zstd_safe::compress_bound(content.len()));
        context.compress2(&mut frame, content)?;
        Ok(frame)
    };
    let frame = compress().map_err(|code| FrameError::Broken(zstd_safe::get_error_name(code)))?;
    Ok(Bytes::from(frame.into_boxed_slice()))
}

/// Decompresses a chunk. More than `content_bytes_max` bytes of content are refused before they are
/// decompressed.
pub fn decode_content(zstd: &[u8], content_bytes_max: usize) -> Result<Vec<u8>, FrameError> {
    super::decompress(zstd, b"", content_bytes_max)
}

/// The events of a chunk, in order. More than `content_bytes_max` bytes of content are refused
/// before they are decompressed. All objects share one allocation.
pub fn decode(zstd: &[u8], content_bytes_max: usize) -> Result<Vec<Event>, ChunkError> {
    let mut content = Bytes::from(super::decompress(zstd, b"", content_bytes_max)?);
    let content_bytes = content.len();
    let events_max = SHORT_EVENTS_MAX.max(content_bytes / EVENT_BYTES_MIN);
    let mut events = Vec::new();
    while content.has_remaining() {
        if events.len() == events_max {
            return Err(ChunkError::TooManyEvents { events_max, content_bytes });
        }
        events.push(Event::decode_length_delimited(&mut content)?);
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::proto::v1alpha1::EventType;

    fn events(count: usize) -> Vec<Event> {
        let event = |i: usize| Event {
            r#type: EventType::Added.into(),
            name: format!("pod-{i}"),
            resource_version: i.to_string(),
            object: format!(r#"{{"metadata":{{"name":"pod-{i}"}},"spec":{{"nodeName":"n1"}}}}"#).into(),
            ..Event::default()
        };
        (0..count).map(event).collect()
    }

    fn chunk(events: &[Event]) -> Bytes {
        encode(events.iter().map(Message::encode_length_delimited_to_vec)).unwrap()
    }

    #[test]
    fn a_chunk_decodes_to_its_events_in_order() {
        for count in [0, 1, 1000] {
            let events = events(count);
            assert_eq!(decode(&chunk(&events), CONTENT_BYTES_MAX), Ok(events));
        }
        assert!(chunk(&events(1000)).len() < 1000 * 20, "it is compressed");
    }

    #[test]
    fn events_may_be_split_anywhere() {
        let bytes: Vec<u8> = events(3).iter().flat_map(Message::encode_length_delimited_to_vec).collect();
        assert_eq!(encode(bytes.chunks(7)), encode_content(&bytes));
    }

    #[test]
    fn a_small_frame_with_large_content_is_refused_before_decompression() {
        let bomb = encode_content(&vec![0; CONTENT_BYTES_MAX]).unwrap();
        assert!(bomb.len() < 1 << 20);
        let refused = decode(&bomb, CONTENT_BYTES_MAX - 1).unwrap_err();
        assert!(matches!(refused, ChunkError::Frame(FrameError::TooLarge { .. })), "{refused}");
        assert!(encode_content(&vec![0; CONTENT_BYTES_MAX + 1]).is_err());
    }

    #[test]
    fn content_of_empty_events_is_refused() {
        let bomb = encode_content(&vec![0; 1 << 20]).unwrap();
        let refused = decode(&bomb, CONTENT_BYTES_MAX).unwrap_err();
        assert_eq!(refused, ChunkError::TooManyEvents { events_max: 1 << 16, content_bytes: 1 << 20 });
    }

    #[test]
    fn a_truncated_event_is_an_error() {
        let bytes = events(1)[0].encode_length_delimited_to_vec();
        let cut = encode_content(&bytes[..bytes.len() - 1]).unwrap();
        assert!(matches!(decode(&cut, CONTENT_BYTES_MAX), Err(ChunkError::Content(_))));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_corrupt_chunk_never_decodes_to_other_events(at: usize, flip in 1..=255u8, cut in any::<bool>()) {
            let events = events(20);
            let mut bytes = chunk(&events).to_vec();
            let at = at % bytes.len();
            if cut { bytes.truncate(at) } else { bytes[at] ^= flip }
            if let Ok(decoded) = decode(&bytes, CONTENT_BYTES_MAX) {
                prop_assert_eq!(decoded, events, "the flipped bit has no meaning");
            }
        }
    }
}
