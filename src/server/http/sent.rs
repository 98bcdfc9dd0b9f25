//! A response's body on its way out: how long it takes is measured, and one that would go on for ever ends with kubefan.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::Body;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::telemetry::requests::Counted;

/// A body, with what is to be known of its end.
pub(super) struct Sent {
    body: Body,
    /// When it ends, whatever is still to come.
    drain: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
    _counted: Option<Counted>,
}

impl Sent {
    /// One whose request is under way until it has ended.
    pub(super) fn counted(body: Body, counted: Counted) -> Self {
        Self { body, drain: None, _counted: Some(counted) }
    }

    /// One that ends when `drain` is cancelled.
    pub(super) fn until(body: Body, drain: CancellationToken) -> Self {
        Self { body, drain: Some(Box::pin(drain.cancelled_owned())), _counted: None }
    }
}

impl http_body::Body for Sent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.drain.as_mut().is_some_and(|drain| drain.as_mut().poll(cx).is_ready()) {
            self.drain = None;
            self.body = Body::empty();
        }
        Pin::new(&mut self.body).poll_frame(cx)
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
    use futures::stream;
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn what_would_go_on_for_ever_ends_with_the_drain() {
        let drain = CancellationToken::new();
        let endless = stream::unfold((), |()| async { Some((Ok::<_, axum::Error>(Bytes::from_static(b"x")), ())) });
        let mut body = Sent::until(Body::from_stream(endless), drain.clone());
        assert!(body.frame().await.is_some() && body.frame().await.is_some());
        drain.cancel();
        assert!(body.frame().await.is_none());
    }
}
