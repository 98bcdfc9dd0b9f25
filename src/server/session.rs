//! One subscriber's stream: its subscription, its clocks, and how it ends.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::codec::Frame;
use crate::fanout::{Hub, Pieces, StreamEnd, Subscription};

/// A running watch. Dropping it ends it, which is how a subscriber that went away is noticed.
pub struct Session {
    hub: Arc<Hub>,
    subscription: Subscription,
    pending: Pieces,
    bookmark_interval: Duration,
    deadline: Option<Instant>,
    last_sent: Instant,
    drain: CancellationToken,
    end: Option<StreamEnd>,
}

impl Session {
    /// A session that ends by itself after `timeout`, or when `drain` is cancelled.
    pub fn new(
        hub: Arc<Hub>,
        subscription: Subscription,
        bookmark_interval: Duration,
        timeout: Option<Duration>,
        drain: CancellationToken,
    ) -> Self {
        let now = Instant::now();
        let deadline = timeout.map(|timeout| now + timeout);
        Self {
            hub,
            subscription,
            pending: Pieces::default(),
            bookmark_interval,
            deadline,
            last_sent: now,
            drain,
            end: None,
        }
    }

    /// The next frame; after an `Err` there is nothing more.
    pub async fn next(&mut self) -> Result<Frame, StreamEnd> {
        if let Some(frame) = Frame::take(&mut self.pending) {
            return Ok(frame);
        }
        let result = self.next_batch().await;
        match result {
            Ok(frame) => Ok(frame),
            Err(end) => {
                self.end = Some(end.clone());
                Err(end)
            }
        }
    }

    async fn next_batch(&mut self) -> Result<Frame, StreamEnd> {
        loop {
            // Looked at first: a stream that always has something to send must end too.
            if self.drain.is_cancelled() {
                return Err(StreamEnd::Draining);
            }
            let now = Instant::now();
            if self.deadline.is_some_and(|deadline| deadline <= now) {
                return Err(StreamEnd::Timeout);
            }
            let bookmark = self.last_sent + self.bookmark_interval;
            let frame = tokio::select! {
                biased;
                frames = self.subscription.next() => {
                    self.pending = frames?;
                    Frame::take(&mut self.pending)
                }
                () = self.drain.cancelled() => return Err(StreamEnd::Draining),
                () = sleep_until(self.deadline.unwrap_or(bookmark).min(bookmark)) => {
                    // Also where the version has not moved: the next bookmark is one interval away.
                    self.last_sent = Instant::now();
                    self.subscription.bookmark().and_then(|mut pieces| Frame::take(&mut pieces))
                }
            };
            if let Some(frame) = frame {
                self.last_sent = Instant::now();
                return Ok(frame);
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.hub.metrics().subscription_finished(self.end.as_ref().unwrap_or(&StreamEnd::Cancelled));
    }
}
