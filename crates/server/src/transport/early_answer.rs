//! Requests that are answered before their bodies were read: refusals, above all.
//!
//! A client that still sends its body may not see such an answer. Over HTTP/1.1 hyper closes the
//! connection, without having said so. Over HTTP/2 the stream is reset, which many clients report
//! instead of the answer. So the rest of the body is read and dropped, as Go's servers do.
//!
//! The hazard is a client whose bodies never end. So the rest has limits of bytes and of time, and
//! all rests together have a number of places, which callers share fairly. Without one, and beyond
//! the limits, the client finds a closed connection or a reset stream.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderMap, header::EXPECT};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use tokio::{sync::oneshot, task::coop::consume_budget, time::timeout};
use tower::BoxError;

use kubefan_admission::{FairPool, Holder};

/// The longest rest that is read, in bytes: more than a request that etcd takes (1.5 MiB,
/// `--max-request-bytes`). Go's `net/http` reads 256 KiB, and waits half a second before it closes.
const BYTES_MAX: usize = 2 << 20;

/// Time for the rest of a body to arrive.
const TIME_MAX: Duration = Duration::from_secs(1);

/// The number of rests that are read at a time.
const PLACES: usize = 1000;

/// The places of the rests that are read.
pub struct DiscardPlaces(Arc<FairPool>);

impl Default for DiscardPlaces {
    fn default() -> Self {
        Self(FairPool::new(PLACES))
    }
}

/// The rest of a request's body, once its reader has dropped it.
pub struct BodyRest<B>(Option<oneshot::Receiver<Rest<B>>>);

/// A body that has not ended.
struct Rest<B> {
    body: B,
    /// Whether its client sends it only once kubefan begins to read it.
    awaits_continue: bool,
}

/// A body that is handed back if it is dropped before its end.
struct HandedBack<B> {
    /// `None` after the end of the body.
    rest: Option<(Rest<B>, oneshot::Sender<Rest<B>>)>,
}

impl<B> BodyRest<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    /// Returns the body of a request with these headers for its reader, and the rest of it.
    pub fn of(body: B, headers: &HeaderMap) -> (axum::body::Body, Self) {
        if body.is_end_stream() {
            return (axum::body::Body::new(body), Self(None));
        }
        let expected = headers.get(EXPECT).map(|value| value.as_bytes());
        let awaits_continue = expected.is_some_and(|value| value.eq_ignore_ascii_case(b"100-continue"));
        let (handed_back, rest) = oneshot::channel();
        let body = HandedBack { rest: Some((Rest { body, awaits_continue }, handed_back)) };
        (axum::body::Body::new(body), Self(Some(rest)))
    }

    /// Whether the reader has dropped the body before its end.
    pub fn is_left(self) -> bool {
        let Self(Some(mut rest)) = self else { return false };
        rest.try_recv().is_ok_and(|rest| !rest.body.is_end_stream())
    }

    /// Reads the rest and drops it, within the limits. Returns whether the body has ended.
    pub async fn discard(self, places: &DiscardPlaces, holder: Holder) -> bool {
        let Self(Some(rest)) = self else { return true };
        let discarding = async {
            // A connection to the apiserver may keep the body a moment longer than its request.
            let Ok(Rest { body, awaits_continue }) = rest.await else { return true };
            if body.is_end_stream() {
                return true;
            }
            // To read the body would invite a client that waits for `100 Continue` to send it.
            if awaits_continue || body.size_hint().lower() > BYTES_MAX as u64 {
                return false;
            }
            let Some(_place) = places.0.try_take(Some(holder)) else { return false };
            read_to_end(body).await
        };
        timeout(TIME_MAX, discarding).await.unwrap_or(false)
    }
}

/// Reads a body to its end, unless it fails or is too long. Returns whether it has ended.
async fn read_to_end(mut body: impl Body<Data = Bytes> + Unpin) -> bool {
    let mut left = BYTES_MAX;
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else { return false };
        let bytes = frame.data_ref().map_or(0, Bytes::len);
        let Some(rest) = left.checked_sub(bytes) else { return false };
        left = rest;
        // A client with a fast connection would otherwise occupy this thread.
        consume_budget().await;
    }
    true
}

impl<B> Body for HandedBack<B>
where
    B: Body<Data = Bytes> + Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let Some((rest, _)) = &mut self.rest else { return Poll::Ready(None) };
        rest.awaits_continue = false;
        let frame = ready!(Pin::new(&mut rest.body).poll_frame(cx));
        let has_ended = !matches!(frame, Some(Ok(_))) || rest.body.is_end_stream();
        if has_ended {
            self.rest = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.rest.as_ref().is_none_or(|(rest, _)| rest.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), |(rest, _)| rest.body.size_hint())
    }
}

impl<B> Drop for HandedBack<B> {
    fn drop(&mut self) {
        if let Some((rest, handed_back)) = self.rest.take() {
            // Fails if the request was answered and its rest is not read.
            let _ = handed_back.send(rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::stream;
    use http::HeaderValue;
    use tokio::time::Instant;

    use super::*;

    fn holder() -> Holder {
        Holder::new(1, None)
    }

    /// A body of unknown length.
    fn chunks(sizes: &[usize]) -> axum::body::Body {
        let chunks: Vec<_> = sizes.iter().map(|size| Ok::<_, BoxError>(vec![b'x'; *size])).collect();
        axum::body::Body::from_stream(stream::iter(chunks))
    }

    /// Whether a body ends after its reader has dropped it.
    async fn is_discarded(body: axum::body::Body, headers: &HeaderMap, places: usize) -> bool {
        let (body, rest) = BodyRest::of(body, headers);
        drop(body);
        rest.discard(&DiscardPlaces(FairPool::new(places)), holder()).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_rest_is_read_to_its_end_within_the_limits() {
        let none = HeaderMap::new();
        let never = || axum::body::Body::from_stream(stream::pending::<Result<Bytes, BoxError>>());
        assert!(is_discarded(axum::body::Body::empty(), &none, 0).await);
        assert!(is_discarded(chunks(&[BYTES_MAX / 2, BYTES_MAX / 2]), &none, PLACES).await);
        assert!(!is_discarded(chunks(&[BYTES_MAX, 1]), &none, PLACES).await, "too long");
        let long = axum::body::Body::from(vec![b'x'; BYTES_MAX + 1]);
        assert!(!is_discarded(long, &none, PLACES).await, "too long, as it says");
        assert!(!is_discarded(chunks(&[1]), &none, 0).await, "without a place");
        let start = Instant::now();
        assert!(!is_discarded(never(), &none, PLACES).await);
        assert_eq!(start.elapsed(), TIME_MAX);
        let expects = HeaderMap::from_iter([(EXPECT, HeaderValue::from_static("100-Continue"))]);
        assert!(!is_discarded(never(), &expects, PLACES).await);
        assert_eq!(start.elapsed(), TIME_MAX, "nothing is invited or awaited");
    }

    #[tokio::test(start_paused = true)]
    async fn a_rest_is_read_once_its_reader_has_dropped_it() {
        let (mut body, rest) = BodyRest::of(chunks(&[1, 1]), &HeaderMap::new());
        assert!(body.frame().await.is_some());
        let reading = async move {
            tokio::task::yield_now().await;
            drop(body);
        };
        let places = DiscardPlaces::default();
        assert!(tokio::join!(rest.discard(&places, holder()), reading).0);
    }

    #[tokio::test]
    async fn a_body_has_a_rest_only_after_its_reader_was_dropped() {
        for (reads, is_left) in [(0, true), (1, true), (3, false)] {
            let (mut body, rest) = BodyRest::of(chunks(&[1, 1]), &HeaderMap::new());
            for _ in 0..reads {
                body.frame().await;
            }
            drop(body);
            assert_eq!(rest.is_left(), is_left, "after {reads} reads");
        }
        let (_read_on, rest) = BodyRest::of(chunks(&[1]), &HeaderMap::new());
        assert!(!rest.is_left());
    }
}
