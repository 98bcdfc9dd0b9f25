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

/// The waits before each repeat. A connection that closes costs one; a server that refuses streams
/// (REFUSED_STREAM) needs time.
pub(super) const DELAYS: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_millis(20),
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_millis(500),
];

/// A request, of whose body the beginning is kept while it is sent.
pub(super) struct Repeatable {
    head: request::Parts,
    body: Arc<Mutex<KeptBody>>,
}

/// The body, and what the attempts have read of it.
struct KeptBody {
    source: UpstreamBody,
    chunks: Vec<Bytes>,
    /// How many more bytes may be kept; `None` once the body is longer, so nothing is kept.
    bytes_left: Option<usize>,
    /// The number of the attempt that may read.
    attempt: usize,
}

/// The body of one attempt: the chunks that are kept, and then the rest of the source.
struct AttemptBody {
    body: Arc<Mutex<KeptBody>>,
    attempt: usize,
    /// The number of chunks that this attempt has read.
    position: usize,
}

impl Repeatable {
    /// A request, of whose body up to `kept_bytes_max` bytes are kept.
    pub(super) fn new(request: Request<UpstreamBody>, kept_bytes_max: usize) -> Self {
        let (head, source) = request.into_parts();
        let body = KeptBody { source, chunks: Vec::new(), bytes_left: Some(kept_bytes_max), attempt: 0 };
        Self { head, body: Arc::new(Mutex::new(body)) }
    }

    /// The request for the next attempt; `None` if a part of its body was read and is not kept.
    /// The bodies of earlier attempts fail from now on.
    pub(super) fn attempt(&self) -> Option<Request<UpstreamBody>> {
        let attempt = {
            let mut body = lock(&self.body);
            body.bytes_left?;
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
        let left = chunk.zip(self.bytes_left).and_then(|(chunk, left)| left.checked_sub(chunk.len()));
        self.bytes_left = left;
        match chunk {
            Some(chunk) if left.is_some() => self.chunks.push(chunk.clone()),
            _ => self.chunks = Vec::new(),
        }
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
        if let Some(chunk) = body.chunks.get(this.position) {
            this.position += 1;
            return Poll::Ready(Some(Ok(Frame::data(chunk.clone()))));
        }
        let frame = ready!(Pin::new(&mut body.source).poll_frame(cx));
        if let Some(Ok(frame)) = &frame {
            // Trailers are not kept. Requests of the Kubernetes API have none.
            body.keep(frame.data_ref());
            this.position += 1;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        let body = lock(&self.body);
        self.position >= body.chunks.len() && body.source.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let body = lock(&self.body);
        let kept: u64 = body.chunks.iter().skip(self.position).map(|chunk| chunk.len() as u64).sum();
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
    if text::find::<hyper::Error>(error).is_some_and(hyper::Error::is_canceled) {
        return true;
    }
    // A GOAWAY fails only the streams above its last one; the others end with the connection. One
    // with an error code says nothing about either.
    text::find::<h2::Error>(error).is_some_and(|error| {
        let is_closed = error.is_go_away() && error.reason() == Some(Reason::NO_ERROR);
        error.is_remote() && (is_closed || error.reason() == Some(Reason::REFUSED_STREAM))
    })
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
        assert_eq!(read(request.attempt().unwrap()).await, "one two three");
        assert!(request.attempt().is_none());
        let request = self::request(&[], 0);
        assert_eq!(read(request.attempt().unwrap()).await, "");
        assert!(request.attempt().is_some(), "an empty body needs no room");
    }

    #[test]
    fn only_the_server_can_say_that_it_has_not_read_a_request() {
        let wrapped = |error: h2::Error| std::io::Error::other(error);
        assert!(!is_unread(&wrapped(h2::Error::from(Reason::NO_ERROR))), "an error of this side");
        assert!(!is_unread(&std::io::Error::other("reset")));
    }
}
