//! Bodies of HTTP responses: counts the events of a watch, whatever the media type and the content
//! coding.

use std::sync::{Arc, Mutex, PoisonError};

use http::{HeaderMap, header};
use kubefan_gzip::Decoder;

use super::{
    encoding::Encoding,
    event_counter::{EventCounter, GzipEvents},
    shared_body::{SharedBodies, SharedBody},
};

/// Counts the events of a watch whose body arrives in parts of any size.
pub(super) struct WatchBody {
    content: Content,
    /// Number of events so far of a gzip body.
    events: u64,
}

/// The content coding of a body, and its reader.
enum Content {
    Identity(EventCounter),
    /// Gzip, up to `position` the same bytes as other subscribers receive.
    Shared {
        body: Arc<Mutex<SharedBody>>,
        position: u64,
    },
    /// Gzip that differs.
    Own(Box<GzipEvents>),
}

impl WatchBody {
    /// Reads the content coding from the head of a response. A server need not use the one that the
    /// subscriber accepts. `shared` has the bodies of other subscribers, and `path` is the URL path
    /// of the watch.
    ///
    /// # Errors
    /// If the content coding is unknown.
    pub(super) fn new(
        encoding: Encoding,
        headers: &HeaderMap,
        shared: &SharedBodies,
        path: &str,
    ) -> Result<Self, String> {
        let mut content = Content::Identity(EventCounter::new(encoding));
        if is_gzip(headers)? {
            content = Content::Shared { body: shared.of(path, encoding), position: 0 };
        }
        Ok(Self { content, events: 0 })
    }

    /// Reads a part of the body. Returns the number of events that it completes.
    ///
    /// # Errors
    /// If it is not gzip, or the subscriber can neither be compared with the others nor decode the
    /// body itself.
    pub(super) fn read(&mut self, part: &[u8]) -> Result<u64, String> {
        let events = match &mut self.content {
            Content::Identity(counter) => return Ok(counter.count(part)),
            Content::Own(own) => {
                own.read(part)?;
                own.events()
            }
            Content::Shared { body, position } => {
                let mut shared = body.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(events) = shared.read(*position, part)? {
                    *position += part.len() as u64;
                    events
                } else {
                    let mut own = shared.decode_to(*position)?;
                    drop(shared);
                    own.read(part)?;
                    let events = own.events();
                    self.content = Content::Own(Box::new(own));
                    events
                }
            }
        };
        let completed = events.saturating_sub(self.events);
        self.events = events;
        Ok(completed)
    }
}

/// Returns the decoder of a response; `None` if the body has no content coding.
///
/// # Errors
/// If the content coding is unknown.
pub(super) fn decoder_of(headers: &HeaderMap) -> Result<Option<Decoder>, String> {
    Ok(is_gzip(headers)?.then(Decoder::new))
}

fn is_gzip(headers: &HeaderMap) -> Result<bool, String> {
    match headers.get(header::CONTENT_ENCODING).map(|coding| coding.as_bytes()) {
        None | Some(b"identity") => Ok(false),
        Some(b"gzip") => Ok(true),
        Some(other) => Err(format!("the server sent the content coding {}", String::from_utf8_lossy(other))),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::HeaderValue;
    use kubefan_gzip::{Checksum, HEADER, Piece, end};
    use proptest::prelude::*;

    use super::*;

    fn headers(coding: Option<&'static str>) -> HeaderMap {
        coding.into_iter().map(|coding| (header::CONTENT_ENCODING, HeaderValue::from_static(coding))).collect()
    }

    fn reader(encoding: Encoding, coding: Option<&'static str>, shared: &SharedBodies) -> Result<WatchBody, String> {
        WatchBody::new(encoding, &headers(coding), shared, "/api/v1/pods?watch=1")
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
            let shared = SharedBodies::default();
            let coding = is_gzip.then_some("gzip");
            let mut first = reader(encoding, coding, &shared).unwrap();
            let mut second = reader(encoding, coding, &shared).unwrap();
            let mut rest = &body[..];
            let mut count = 0;
            for cut in cuts {
                let (part, after) = rest.split_at(cut.min(rest.len()));
                rest = after;
                count += first.read(part).unwrap();
            }
            count += first.read(rest).unwrap();
            prop_assert_eq!(count, sizes.len() as u64);
            prop_assert_eq!(second.read(&body).unwrap(), sizes.len() as u64);
        }
    }

    #[test]
    fn a_body_that_differs_from_the_others_is_counted_like_them() {
        let body = |number: u8| {
            let mut body = HEADER.to_vec();
            for line in ["first\n".to_owned(), format!("{number}\n"), "last\n".to_owned()] {
                body.extend_from_slice(&Piece::stored(Bytes::from(line)).to_bytes());
            }
            body
        };
        let shared = SharedBodies::default();
        for number in 0..3 {
            let mut reader = reader(Encoding::Gzip, Some("gzip"), &shared).unwrap();
            let body = body(number);
            let counts: Vec<u64> = body.chunks(4).map(|part| reader.read(part).unwrap()).collect();
            assert_eq!(counts.iter().sum::<u64>(), 3);
            assert_eq!(matches!(reader.content, Content::Own(_)), number > 0);
        }
    }

    #[test]
    fn only_gzip_and_identity_are_read() {
        let shared = SharedBodies::default();
        let is_identity = |encoding, coding| {
            reader(encoding, coding, &shared).map(|reader| matches!(reader.content, Content::Identity(_)))
        };
        assert_eq!(is_identity(Encoding::Gzip, Some("identity")), Ok(true));
        assert_eq!(is_identity(Encoding::Gzip, None), Ok(true));
        assert_eq!(is_identity(Encoding::Json, Some("gzip")), Ok(false));
        assert!(is_identity(Encoding::Gzip, Some("br")).is_err());
    }
}
