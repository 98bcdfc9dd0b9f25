//! A watch as the body of an HTTP/1.1 response: pulled by whoever writes the connection, as far as the socket takes it.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf, Bytes};
use futures::future::FutureExt;
use http_body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::status;
use crate::{
    fanout::{ConnectionWaker, ReadyStreams, StreamEnd},
    server::{
        clocks::{Clocks, Tick},
        limits::BATCH_BYTES_MAX,
        reader::Opened,
        stall::Sending,
    },
};

/// Its subscription and its clocks.
pub struct WatchBody {
    opened: Option<Opened>,
    line: Arc<ConnectionWaker>,
    clocks: Clocks,
    alarm: Pin<Box<Sleep>>,
    drain: Pin<Box<WaitForCancellationFutureOwned>>,
    sending: Sending,
}

impl WatchBody {
    pub(super) fn new(
        opened: Opened,
        line: Arc<ConnectionWaker>,
        stall_timeout: Duration,
        drain: CancellationToken,
        sending: Sending,
    ) -> Self {
        let clocks = Clocks::new(opened.bookmark_interval, opened.timeout_at, None, stall_timeout, true);
        let alarm = Box::pin(sleep_until(Instant::now()));
        let drain = Box::pin(drain.cancelled_owned());
        Self { opened: Some(opened), line, clocks, alarm, drain, sending }
    }

    /// Says why it ends, if there is something to say.
    fn end(&mut self, end: StreamEnd) -> Option<Bytes> {
        let mut opened = self.opened.take()?;
        let word = status::last_word(&end).map(|failure| failure.event(opened.speech.media()));
        opened.subscription.ended(end);
        word
    }

    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.line.register(cx.waker());
        self.line.take_ready(&mut ReadyStreams::new());
        loop {
            let Some(opened) = &mut self.opened else { return Poll::Ready(None) };
            if self.drain.as_mut().poll(cx).is_ready() {
                return Poll::Ready(self.end(StreamEnd::Draining));
            }
            // A snapshot pins state; a watch that is not read keeps its place and no more.
            self.sending.must_not_wait(opened.subscription.in_backlog());
            match opened.subscription.take(BATCH_BYTES_MAX) {
                Ok(Some(mut pieces)) => {
                    let remaining = pieces.remaining();
                    self.clocks.sent(Instant::now(), remaining, opened.subscription.in_backlog());
                    return Poll::Ready(Some(pieces.copy_to_bytes(remaining)));
                }
                Ok(None) => {}
                Err(end) => return Poll::Ready(self.end(end)),
            }
            let now = Instant::now();
            match self.clocks.tick(now, opened.subscription.in_backlog()) {
                Tick::End(end) => return Poll::Ready(self.end(end)),
                Tick::Bookmark => {
                    if let Some(mut bookmark) = opened.subscription.bookmark() {
                        let remaining = bookmark.remaining();
                        return Poll::Ready(Some(bookmark.copy_to_bytes(remaining)));
                    }
                }
                Tick::Nothing => {}
            }
            let Some(due_at) = self.clocks.due_at(now, opened.subscription.in_backlog()) else { return Poll::Pending };
            self.alarm.as_mut().reset(due_at);
            if self.alarm.poll_unpin(cx).is_pending() {
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
