//! A watch as the body of an HTTP/1.1 response. hyper polls it whenever the socket has room.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf, Bytes};
use futures::future::FutureExt;
use http::Response;
use http_body::{Body, Frame};
use kubefan_audit::record::put_id;
use kubefan_cache::StreamEnd;
use kubefan_fanout::{ConnectionWaker, ReadyStreams};
use tokio::time::{Instant, Sleep, sleep_until};

use super::socket::{Pace, ResponseNeeds};
use crate::{
    kube::{answer::WatchHeaders, status},
    transport::{
        limits::BATCH_BYTES_MAX,
        open_connections::{CountedWatch, EndReason, EndRequests, OpenConnection},
        watch_timers::{Due, WatchTimers},
    },
    watch::OpenedWatch,
};

/// The body: a subscription and its timers.
pub struct WatchBody {
    /// `None` once the watch has ended.
    opened: Option<OpenedWatch>,
    connection_waker: Arc<ConnectionWaker>,
    timers: WatchTimers,
    timer: Pin<Box<Sleep>>,
    end_requests: EndRequests,
    /// Reason to end the watch as soon as it is current and not new.
    ending: Option<EndReason>,
    _counted: CountedWatch,
    needs: ResponseNeeds,
}

impl WatchBody {
    /// The response for a watch whose subscription wakes `connection_waker`.
    pub fn response(
        opened: OpenedWatch,
        connection_waker: Arc<ConnectionWaker>,
        stall_timeout: Duration,
        open: &OpenConnection,
        needs: ResponseNeeds,
    ) -> Response<axum::body::Body> {
        let headers = WatchHeaders::of(&opened, opened.protocol.media());
        let id = opened.record.id();
        let watch = Self::new(opened, connection_waker, stall_timeout, open, needs);
        let mut response = Response::new(axum::body::Body::new(watch));
        headers.put(response.headers_mut());
        put_id(id, response.headers_mut());
        response
    }

    fn new(
        opened: OpenedWatch,
        connection_waker: Arc<ConnectionWaker>,
        stall_timeout: Duration,
        open: &OpenConnection,
        needs: ResponseNeeds,
    ) -> Self {
        let mut timers = WatchTimers::new(opened.bookmark_interval, opened.timeout_at, None, stall_timeout, true);
        if opened.subscription.in_backlog() {
            timers.begin_backlog(Instant::now());
        }
        let timer = Box::pin(sleep_until(Instant::now()));
        let end_requests = open.end_requests();
        let counted = open.watch(opened.movable());
        let opened = Some(opened);
        Self { opened, connection_waker, timers, timer, end_requests, ending: None, _counted: counted, needs }
    }

    /// Ends the subscription. Returns the last bytes of the body, if there are any: the ERROR event
    /// that says why it ends, and the end of a gzip body.
    fn end(&mut self, end: StreamEnd) -> Option<Bytes> {
        let mut opened = self.opened.take()?;
        let error_event = status::watch_error(&end).map(|failure| failure.event(opened.protocol.media()));
        let mut last = opened.subscription.end_body(error_event.unwrap_or_default());
        opened.record.ended(end.as_str(), None);
        opened.subscription.ended(end);
        let remaining = last.remaining();
        (remaining > 0).then(|| last.copy_to_bytes(remaining))
    }

    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.connection_waker.register(cx.waker());
        self.connection_waker.take_ready(&mut ReadyStreams::new());
        loop {
            let Some(opened) = &mut self.opened else { return Poll::Ready(None) };
            while let Poll::Ready(request) = self.end_requests.poll_next(cx) {
                match request.reason {
                    EndReason::Draining => return Poll::Ready(self.end(StreamEnd::Draining)),
                    reason if reason.ends(opened.movable()) => self.ending = Some(reason),
                    _ => {}
                }
            }
            if let Some(end) = opened.end() {
                return Poll::Ready(self.end(end));
            }
            // A backlog pins state. After it, a watch that is not read fills the kernel's buffers.
            let in_backlog = opened.subscription.in_backlog();
            self.needs.pace(if in_backlog { Pace::Pinning } else { Pace::Live });
            let may_move_at = self.ending.map(|_| self.timers.may_move_at());
            let may_move = may_move_at.is_some_and(|at| at <= Instant::now());
            match opened.subscription.take(BATCH_BYTES_MAX) {
                Ok(Some(mut pieces)) => {
                    let remaining = pieces.remaining();
                    let in_backlog = opened.subscription.in_backlog();
                    // These may be the first bytes of a catch-up.
                    self.needs.pace(if in_backlog { Pace::Pinning } else { Pace::Live });
                    self.timers.sent(Instant::now(), remaining, in_backlog);
                    return Poll::Ready(Some(pieces.copy_to_bytes(remaining)));
                }
                // Its client has everything, and a last bookmark says so.
                Ok(None) if may_move && !opened.subscription.is_behind() => {
                    return Poll::Ready(match opened.subscription.bookmark() {
                        Some(mut bookmark) => {
                            let remaining = bookmark.remaining();
                            Some(bookmark.copy_to_bytes(remaining))
                        }
                        None => self.ending.take().and_then(|reason| self.end(reason.stream_end())),
                    });
                }
                Ok(None) => {}
                Err(end) => return Poll::Ready(self.end(end)),
            }
            let now = Instant::now();
            match self.timers.tick(now, opened.subscription.in_backlog()) {
                Due::End(end) => return Poll::Ready(self.end(end)),
                Due::Bookmark => {
                    if let Some(mut bookmark) = opened.subscription.bookmark() {
                        let remaining = bookmark.remaining();
                        return Poll::Ready(Some(bookmark.copy_to_bytes(remaining)));
                    }
                }
                Due::Nothing => {}
            }
            let due_at = self.timers.due_at(now, opened.subscription.in_backlog());
            let move_at = may_move_at.filter(|at| *at > now);
            self.timer.as_mut().reset(move_at.map_or(due_at, |at| at.min(due_at)));
            if self.timer.poll_unpin(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }
}

impl Body for WatchBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.poll_data(cx).map(|data| data.map(|data| Ok(Frame::data(data))))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;
    use crate::{
        kube::api::tests::opened_watch,
        transport::{
            limits::WATCH_AGE_MIN,
            open_connections::{EndingOptions, OpenConnections},
        },
    };

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_moves_ends_some_time_after_its_state() {
        for state in ["", "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan"] {
            let all = OpenConnections::new(EndingOptions::default());
            let waker = ConnectionWaker::new();
            let opened = opened_watch(state, &waker).await;
            let stall_timeout = Duration::from_secs(30);
            let mut watch = WatchBody::new(opened, waker, stall_timeout, &all.open(), ResponseNeeds::default());
            watch.ending = Some(EndReason::Rebalanced);
            let start = Instant::now();
            while poll_fn(|cx| watch.poll_data(cx)).await.is_some() {}
            let elapsed = start.elapsed();
            assert!(elapsed >= WATCH_AGE_MIN && elapsed < 2 * WATCH_AGE_MIN, "{state}: {elapsed:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_watch_ends_at_once_at_a_drain() {
        let all = OpenConnections::new(EndingOptions::default());
        let waker = ConnectionWaker::new();
        let opened = opened_watch("", &waker).await;
        let stall_timeout = Duration::from_secs(30);
        let mut watch = WatchBody::new(opened, waker, stall_timeout, &all.open(), ResponseNeeds::default());
        let start = Instant::now();
        all.drain();
        assert_eq!(poll_fn(|cx| watch.poll_data(cx)).await, None);
        assert!(start.elapsed() < WATCH_AGE_MIN);
    }
}
