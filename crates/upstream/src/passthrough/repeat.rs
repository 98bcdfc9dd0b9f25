//! A forwarded request that can be sent again, as long as the apiserver has not read it.
//!
//! Many callers share an HTTP/2 connection upstream, and requests that were sent when it closes
//! fail. `transport::unprocessed` says which of them the apiserver has not read. Go's HTTP/2 client
//! repeats them with `Request.GetBody`.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Uri, request};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use tower::BoxError;

use crate::transport::connection::UpstreamBody;

/// The most bytes that an attempt reads again at once.
const PIECE_BYTES_MAX: usize = 16 << 10;

/// A request that keeps the beginning of its body while it is sent.
pub(super) struct Repeatable {
    head: request::Parts,
    body: Arc<Mutex<KeptBody>>,
}

/// The body, and the bytes that the attempts have read of it.
struct KeptBody {
    source: UpstreamBody,
    /// A copy of the bytes read so far. The chunks themselves are parts of the read buffers of the
    /// caller's connection: each would keep several KiB, however small it is.
    bytes: Vec<u8>,
    /// Number of bytes that may be kept; `None` once the body is longer, so nothing is kept.
    bytes_max: Option<usize>,
    /// The number of the attempt that may read.
    attempt: usize,
}

/// The body of one attempt: the bytes that are kept, and then the rest of the source.
struct AttemptBody {
    body: Arc<Mutex<KeptBody>>,
    attempt: usize,
    /// The number of kept bytes that this attempt has read.
    position: usize,
}

impl Repeatable {
    /// Keeps up to `kept_bytes_max` bytes of a request's body.
    pub(super) fn new(request: Request<UpstreamBody>, kept_bytes_max: usize) -> Self {
        let (head, source) = request.into_parts();
        let body = KeptBody { source, bytes: Vec::new(), bytes_max: Some(kept_bytes_max), attempt: 0 };
        Self { head, body: Arc::new(Mutex::new(body)) }
    }

    /// Returns the same request for another server.
    pub(super) fn to(mut self, uri: Uri) -> Self {
        self.head.uri = uri;
        self
    }

    /// Whether there can be another attempt.
    pub(super) fn is_repeatable(&self) -> bool {
        lock(&self.body).bytes_max.is_some()
    }

    /// The request for the next attempt; `None` if a part of its body was read and is not kept.
    /// The bodies of earlier attempts fail from now on.
    pub(super) fn attempt(&self) -> Option<Request<UpstreamBody>> {
        let attempt = {
            let mut body = lock(&self.body);
            body.bytes_max?;
            body.attempt += 1;
            body.attempt
        };
        let body = AttemptBody { body: self.body.clone(), attempt, position: 0 };
        Some(Request::from_parts(self.head.clone(), body.boxed_unsync()))
    }
}

fn lock(body: &Mutex<KeptBody>) -> std::sync::MutexGuard<'_, KeptBody> {
    body.lock().unwrap_or_else(PoisonError::into_inner)
}

impl KeptBody {
    /// Keeps a chunk if there is room for it, and forgets all of them otherwise.
    fn keep(&mut self, chunk: Option<&Bytes>) {
        let has_room = |(chunk, most): &(&Bytes, usize)| self.bytes.len() + chunk.len() <= *most;
        let Some((chunk, most)) = chunk.zip(self.bytes_max).filter(has_room) else {
            self.bytes = Vec::new();
            self.bytes_max = None;
            return;
        };
        let length = self.bytes.len() + chunk.len();
        if length > self.bytes.capacity() {
            // Twice as much, as a vector grows by itself, but no more than is counted.
            let capacity = length.max((2 * self.bytes.len()).min(most));
            self.bytes.reserve_exact(capacity - self.bytes.len());
        }
        self.bytes.extend_from_slice(chunk);
    }

    /// The next kept bytes from a position on; empty behind the last.
    fn kept_from(&self, position: usize) -> &[u8] {
        let rest = self.bytes.get(position..).unwrap_or_default();
        &rest[..rest.len().min(PIECE_BYTES_MAX)]
    }
}

impl Body for AttemptBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        let mut body = lock(&this.body);
        if body.attempt != this.attempt {
            return Poll::Ready(Some(Err("the request is sent again".into())));
        }
        let piece = body.kept_from(this.position);
        if !piece.is_empty() {
            this.position += piece.len();
            return Poll::Ready(Some(Ok(Frame::data(Bytes::copy_from_slice(piece)))));
        }
        let frame = ready!(Pin::new(&mut body.source).poll_frame(cx));
        if let Some(Ok(frame)) = &frame {
            // Trailers are not kept. Requests of the Kubernetes API have none.
            body.keep(frame.data_ref());
            this.position = body.bytes.len();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        let body = lock(&self.body);
        self.position >= body.bytes.len() && body.source.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let body = lock(&self.body);
        let kept = body.bytes.len().saturating_sub(self.position) as u64;
        let source = body.source.size_hint();
        let mut size = SizeHint::new();
        if let Some(upper) = source.upper() {
            size.set_upper(upper.saturating_add(kept));
        }
        size.set_lower(source.lower().saturating_add(kept));
        size
    }
}

#[cfg(test)]
mod tests {
    use futures::{StreamExt, stream};
    use http_body_util::StreamBody;

    use super::*;

    fn request(chunks: &'static [&'static str], kept_bytes_max: usize) -> Repeatable {
        let frames = stream::iter(chunks).map(|chunk| Ok(Frame::data(Bytes::from_static(chunk.as_bytes()))));
        let request = Request::post("/api?a=b").header("x-a", "b").body(StreamBody::new(frames).boxed_unsync());
        Repeatable::new(request.unwrap(), kept_bytes_max)
    }

    async fn read(request: Request<UpstreamBody>) -> Bytes {
        request.into_body().collect().await.unwrap().to_bytes()
    }

    #[tokio::test]
    async fn every_attempt_sends_the_whole_request() {
        let request = request(&["one ", "two ", "three"], 13);
        let mut first = request.attempt().unwrap();
        assert_eq!((first.uri().to_string().as_str(), &first.headers()["x-a"]), ("/api?a=b", &"b".parse().unwrap()));
        first.body_mut().frame().await.unwrap().unwrap();
        let second = request.attempt().unwrap();
        assert_eq!(second.body().size_hint().lower(), 4, "what is kept is part of the size");
        first.body_mut().frame().await.unwrap().unwrap_err();
        assert_eq!(read(second).await, "one two three");
        let third = request.attempt().unwrap();
        assert_eq!((third.body().is_end_stream(), third.body().size_hint().lower()), (false, 13));
        assert_eq!(read(third).await, "one two three");
    }

    #[tokio::test]
    async fn a_body_that_is_longer_is_sent_once() {
        let request = request(&["one ", "two ", "three"], 12);
        assert!(request.is_repeatable());
        assert_eq!(read(request.attempt().unwrap()).await, "one two three");
        assert!(!request.is_repeatable() && request.attempt().is_none());
        let request = self::request(&[], 0);
        assert_eq!(read(request.attempt().unwrap()).await, "");
        assert!(request.attempt().is_some(), "an empty body needs no room");
    }

    /// A buffer that tells when it is freed.
    struct Buffer {
        bytes: [u8; 8192],
        _alive: Arc<()>,
    }

    impl AsRef<[u8]> for Buffer {
        fn as_ref(&self) -> &[u8] {
            &self.bytes
        }
    }

    #[tokio::test]
    async fn a_body_in_small_pieces_keeps_no_buffer_of_its_connection() {
        const BYTES: usize = 64 << 10;
        let alive = Arc::new(());
        let held = alive.clone();
        let buffer = move || Buffer { bytes: [b'x'; 8192], _alive: held.clone() };
        let pieces = stream::repeat_with(move || Bytes::from_owner(buffer()).slice(..1));
        let body = StreamBody::new(pieces.take(BYTES).map(|piece| Ok(Frame::data(piece)))).boxed_unsync();
        let request = Repeatable::new(Request::post("/").body(body).unwrap(), BYTES);
        assert_eq!(read(request.attempt().unwrap()).await.len(), BYTES);
        assert!(Arc::strong_count(&alive) <= 2, "{} buffers are held", Arc::strong_count(&alive) - 2);
        assert_eq!(read(request.attempt().unwrap()).await, vec![b'x'; BYTES]);
    }
}
