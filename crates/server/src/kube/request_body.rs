//! The body of a forwarded request, while it arrives.
//!
//! The hazard is a client that never finishes its request: it would hold up a drain until the drain
//! timeout. So a body that has not arrived soon after the drain starts is cut off. The apiserver
//! sees a request that breaks off, and executes none of it.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt};
use http_body::{Body as _, Frame, SizeHint};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tower::BoxError;

/// Time for a request to arrive once the drain has started.
const DRAIN_REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// A body that fails if it has not arrived in time.
pub(super) struct RequestBody {
    body: Body,
    /// Completes when the body is too late; `None` if it has arrived.
    too_late: Option<BoxFuture<'static, ()>>,
    is_cut_off: Arc<AtomicBool>,
}

impl RequestBody {
    /// Creates a body that must arrive soon after `drain` is cancelled.
    pub(super) fn new(body: Body, drain: &CancellationToken) -> Self {
        let drain = drain.clone();
        let too_late = async move {
            drain.cancelled_owned().await;
            sleep(DRAIN_REQUEST_TIMEOUT).await;
        };
        let too_late = (!body.is_end_stream()).then(|| too_late.boxed());
        Self { body, too_late, is_cut_off: Arc::default() }
    }

    /// Returns a flag that turns true when the body is cut off.
    pub(super) fn is_cut_off(&self) -> Arc<AtomicBool> {
        self.is_cut_off.clone()
    }
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        if let Poll::Ready(frame) = frame {
            if frame.is_none() {
                self.too_late = None;
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(BoxError::from)));
        }
        match self.too_late.as_mut().map(|too_late| too_late.poll_unpin(cx)) {
            Some(Poll::Ready(())) => {
                self.too_late = None;
                self.is_cut_off.store(true, Ordering::Relaxed);
                Poll::Ready(Some(Err("the request did not arrive before kubefan shut down".into())))
            }
            _ => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_body_that_never_ends_is_cut_off_after_the_drain_starts() {
        let drain = CancellationToken::new();
        let body = RequestBody::new(Body::from_stream(futures::stream::pending::<Result<Bytes, BoxError>>()), &drain);
        let is_cut_off = body.is_cut_off();
        let start = Instant::now();
        tokio::spawn(async move {
            sleep(Duration::from_secs(3600)).await;
            drain.cancel();
        });
        assert!(body.collect().await.is_err() && is_cut_off.load(Ordering::Relaxed));
        assert_eq!(start.elapsed(), Duration::from_secs(3600) + DRAIN_REQUEST_TIMEOUT);
    }

    #[tokio::test]
    async fn a_body_that_arrives_stays_as_it_is() {
        let drain = CancellationToken::new();
        drain.cancel();
        let body = RequestBody::new(Body::from("all of it"), &drain);
        assert_eq!(body.size_hint().exact(), Some(9));
        assert_eq!(body.collect().await.unwrap().to_bytes(), "all of it");
        assert!(RequestBody::new(Body::empty(), &drain).too_late.is_none());
    }
}
