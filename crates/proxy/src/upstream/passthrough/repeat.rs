//! A forwarded request that can be sent again, as long as the apiserver has not read it.
//!
//! Many callers share an HTTP/2 connection upstream. kube-apiserver closes it (GOAWAY) after a
//! request that it cannot authenticate, and at random to spread the load (`--goaway-chance`).
//! Requests that were sent meanwhile fail. They have streams above the last one that GOAWAY names,
//! so the server has not processed them (RFC 9113, 6.8), and any method is safe to repeat. Go's
//! HTTP/2 client does the same with `Request.GetBody`.

use std::{
    error::Error,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use h2::Reason;
use http::{Request, request};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use tower::BoxError;

use crate::upstream::transport::connection::UpstreamBody;
use kubefan_common::text;

/// The waits before each repeat. Each connection that closes costs one, and several may close while
/// a large body is written. A server that refuses streams (REFUSED_STREAM) needs time.
pub(super) const DELAYS: [Duration; 8] = [
    Duration::ZERO,
    Duration::from_millis(20),
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_millis(500),
    Duration::from_millis(500),
    Duration::from_secs(1),
    Duration::from_secs(1),
];

/// The most bytes that an attempt reads again at once.
const PIECE_BYTES_MAX: usize = 16 << 10;

/// A request that keeps the beginning of its body while it is sent.
pub(super) struct Repeatable {
    head: request::Parts,
    body: Arc<Mutex<KeptBody>>,
}

/// The body, and what the attempts have read of it.
struct KeptBody {
    source: UpstreamBody,
    /// A copy of what was read. The chunks themselves are parts of the read buffers of the caller's
    /// connection: each would keep several KiB, however small it is.
    bytes: Vec<u8>,
    /// How many bytes may be kept; `None` once the body is longer, so nothing is kept.
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
            (self.bytes, self.bytes_max) = (Vec::new(), None);
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

/// Whether the server has certainly not processed the request: its stream was refused, or is above
/// the last one of a GOAWAY, or the connection closed before the request was written.
pub(super) fn is_unread(error: &(dyn Error + Send + Sync + 'static)) -> bool {
    let Some(error) = text::find::<hyper::Error>(error) else { return false };
    if error.is_canceled() || error.is_closed() {
        return true;
    }
    // An error of the body comes from the caller's connection. This is about the server's.
    let of_server = error.source().filter(|_| !error.is_user()).and_then(|error| error.downcast_ref::<h2::Error>());
    // A GOAWAY without an error fails only the streams above its last one; the others end with the
    // connection. After a GOAWAY with an error, any stream may have been processed.
    of_server.is_some_and(|error| {
        let is_closed = error.is_go_away() && error.reason() == Some(Reason::NO_ERROR);
        error.is_remote() && (is_closed || error.reason() == Some(Reason::REFUSED_STREAM))
    })
}

#[cfg(test)]
mod tests {
    use futures::{StreamExt, stream};
    use http_body_util::{Full, StreamBody};
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use kubefan_testkit::scripted_server::{failure, go_away, reset};

    fn write() -> Request<UpstreamBody> {
        Request::post("http://h/").body(Full::new(Bytes::from("x")).map_err(BoxError::from).boxed_unsync()).unwrap()
    }

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
        assert_eq!(read(request.attempt().unwrap()).await, "one two three");
        assert!(request.attempt().is_none());
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

    #[tokio::test]
    async fn only_the_server_can_say_that_it_has_not_read_a_request() {
        for (bytes, says_so) in [
            (reset(Reason::REFUSED_STREAM), true),
            (go_away(0, Reason::NO_ERROR), true),
            (go_away(1, Reason::NO_ERROR), false),
            ([go_away(u32::MAX >> 1, Reason::NO_ERROR), go_away(1, Reason::NO_ERROR)].concat(), false),
            (go_away(0, Reason::INTERNAL_ERROR), false),
            (go_away(0, Reason::ENHANCE_YOUR_CALM), false),
            (reset(Reason::NO_ERROR), false),
            (reset(Reason::CANCEL), false),
            (reset(Reason::INTERNAL_ERROR), false),
            (reset(Reason::STREAM_CLOSED), false),
            (reset(Reason::ENHANCE_YOUR_CALM), false),
            (Vec::new(), false),
        ] {
            let error = failure(write(), &bytes).await;
            assert_eq!(is_unread(&*error), says_so, "{bytes:?}: {error:?}");
        }
        let wrapped = |error: h2::Error| std::io::Error::other(error);
        assert!(!is_unread(&wrapped(h2::Error::from(Reason::NO_ERROR))), "an error of this side");
        assert!(!is_unread(&std::io::Error::other("reset")));
    }

    /// The error of a request over HTTP/1.1 whose server closes the connection after these bytes.
    async fn failure_over_http1(body: UpstreamBody, bytes: &'static [u8]) -> BoxError {
        let (client, mut server) = tokio::io::duplex(1 << 16);
        let (mut requests, connection) = hyper::client::conn::http1::handshake(TokioIo::new(client)).await.unwrap();
        tokio::spawn(connection);
        let sent = requests.send_request(Request::post("/").body(body).unwrap());
        let served = async move {
            let _begun = server.read_u8().await;
            let _written = server.write_all(bytes).await;
        };
        let (sent, ()) = tokio::join!(sent, served);
        sent.unwrap_err().into()
    }

    #[tokio::test]
    async fn a_request_over_http1_that_was_begun_may_have_been_read() {
        for bytes in [&b""[..], b"HTTP/1.1 200 OK\r\n", b"no HTTP\r\n\r\n"] {
            let error = failure_over_http1(write().into_body(), bytes).await;
            assert!(!is_unread(&*error), "{error:?}");
        }
        let of_caller = failure(write(), &reset(Reason::REFUSED_STREAM)).await;
        assert!(is_unread(&*of_caller));
        let broken = StreamBody::new(stream::iter([Ok(Frame::data(Bytes::from("x"))), Err(of_caller)])).boxed_unsync();
        let error = failure_over_http1(broken, b"").await;
        assert!(!is_unread(&*error), "the caller has refused something, not the server: {error:?}");
    }

    #[tokio::test]
    async fn a_connection_that_closes_before_a_request_has_not_read_it() {
        let (client, server) = tokio::io::duplex(1 << 16);
        let (mut requests, connection) =
            hyper::client::conn::http2::handshake::<_, _, UpstreamBody>(TokioExecutor::new(), TokioIo::new(client))
                .await
                .unwrap();
        drop(server);
        let _broken = connection.await;
        assert!(is_unread(&requests.ready().await.unwrap_err()));
    }
}
