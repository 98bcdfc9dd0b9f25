//! The clocks of one watch: when it ends, when silence calls for a bookmark, and when a snapshot has stalled.

use std::time::Duration;

use tokio::time::Instant;

use super::limits::PROGRESS_BYTES_MIN;
use crate::fanout::StreamEnd;

/// Before its end a watch over HTTP is told once more how far it is, as the apiserver does it.
const BEFORE_THE_END: Duration = Duration::from_secs(2);

/// What a watch waits for.
#[derive(Debug)]
pub struct Clocks {
    /// The silence after which a bookmark is sent; `None`: never.
    bookmark_interval: Option<Duration>,
    /// When it ends by itself.
    timeout_at: Option<Instant>,
    /// When its caller no longer waits.
    deadline_at: Option<Instant>,
    /// When a last bookmark is sent; `None` once it was.
    last_bookmark_at: Option<Instant>,
    stall_timeout: Duration,
    last_sent: Instant,
    /// Whether what was last sent was of a snapshot or a catch-up, which always has more to send.
    in_backlog: bool,
    /// When of that enough was last sent, and how much since then.
    got_on_at: Instant,
    got_on_bytes: usize,
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub enum Tick {
    /// Nothing yet.
    Nothing,
    /// Send a bookmark, if there is one.
    Bookmark,
    /// End it.
    End(StreamEnd),
}

impl Clocks {
    /// They start now. `tells_end`: a bookmark comes shortly before the timeout.
    pub fn new(
        bookmark_interval: Option<Duration>,
        timeout_at: Option<Instant>,
        deadline_at: Option<Instant>,
        stall_timeout: Duration,
        tells_end: bool,
    ) -> Self {
        let last_sent = Instant::now();
        let last_bookmark_at = timeout_at.filter(|_| tells_end && bookmark_interval.is_some());
        let last_bookmark_at = last_bookmark_at.and_then(|at| at.checked_sub(BEFORE_THE_END));
        let last_bookmark_at = last_bookmark_at.filter(|at| *at > last_sent);
        let (in_backlog, got_on_at, got_on_bytes) = (false, last_sent, 0);
        Self {
            bookmark_interval,
            timeout_at,
            deadline_at,
            last_bookmark_at,
            stall_timeout,
            last_sent,
            in_backlog,
            got_on_at,
            got_on_bytes,
        }
    }

    /// So many bytes were sent; `in_backlog`: of a snapshot or a catch-up.
    pub fn sent(&mut self, now: Instant, bytes: usize, in_backlog: bool) {
        self.last_sent = now;
        self.got_on_bytes += bytes;
        let has_begun = in_backlog && !self.in_backlog;
        self.in_backlog = in_backlog;
        if has_begun || self.got_on_bytes >= PROGRESS_BYTES_MIN {
            (self.got_on_at, self.got_on_bytes) = (now, 0);
        }
    }

    /// When it must be looked at, whatever happens; `None`: never. Nobody is told when a snapshot or a catch-up is over: it is looked for,
    /// so that the first bookmark does not wait for the end of what that may take.
    pub fn due_at(&self, now: Instant, in_backlog: bool) -> Option<Instant> {
        let silent = match (in_backlog, self.bookmark_interval) {
            (true, interval) => {
                let stalled = self.got_on_at + self.stall_timeout;
                Some(interval.map_or(stalled, |interval| stalled.min(now + interval)))
            }
            (false, interval) => interval.map(|interval| self.last_sent + interval),
        };
        [silent, self.timeout_at, self.deadline_at, self.last_bookmark_at].into_iter().flatten().min()
    }

    /// What is to be done now.
    pub fn tick(&mut self, now: Instant, in_backlog: bool) -> Tick {
        let over = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if over(self.timeout_at) {
            return Tick::End(StreamEnd::Timeout);
        }
        if over(self.deadline_at) {
            return Tick::End(StreamEnd::Deadline);
        }
        if in_backlog {
            let stalled = now.saturating_duration_since(self.got_on_at) >= self.stall_timeout;
            return if stalled { Tick::End(StreamEnd::SnapshotStalled(self.stall_timeout)) } else { Tick::Nothing };
        }
        let silence = now.saturating_duration_since(self.last_sent);
        let ends = over(self.last_bookmark_at);
        if ends {
            self.last_bookmark_at = None;
        }
        if ends || self.bookmark_interval.is_some_and(|interval| silence >= interval) {
            // Also where the version has not moved: the next bookmark is one interval away.
            self.last_sent = now;
            return Tick::Bookmark;
        }
        Tick::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALL: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_watch_with_a_timeout_has_a_last_bookmark_before_it() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut clocks = Clocks::new(Some(Duration::from_secs(60)), Some(at(10)), None, STALL, true);
        assert_eq!(clocks.due_at(now, false), Some(at(8)));
        assert_eq!(clocks.tick(at(8), false), Tick::Bookmark);
        assert_eq!(clocks.due_at(at(8), false), Some(at(10)));
        assert_eq!(clocks.tick(at(10), false), Tick::End(StreamEnd::Timeout));
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_wants_no_bookmarks_waits_for_nothing() {
        let now = Instant::now();
        let mut clocks = Clocks::new(None, None, None, STALL, true);
        assert_eq!(clocks.due_at(now, false), None);
        assert_eq!(clocks.due_at(now, true), Some(now + STALL), "but for a snapshot that does not get on");
        assert_eq!(clocks.tick(now + STALL, true), Tick::End(StreamEnd::SnapshotStalled(STALL)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_snapshot_of_which_too_little_is_taken_has_stalled() {
        let now = Instant::now();
        let at = |tenths: u32| now + tenths * STALL / 10;
        let mut clocks = Clocks::new(None, None, None, STALL, true);
        // Long after the watch began: a catch-up.
        clocks.sent(at(90), 10, false);
        for tenths in 100..130 {
            clocks.sent(at(tenths), PROGRESS_BYTES_MIN / 8, true);
            assert_eq!(clocks.tick(at(tenths), true), Tick::Nothing, "{tenths}");
        }
        for tenths in 130..150 {
            clocks.sent(at(tenths), 10, true);
        }
        assert_eq!(clocks.tick(at(150), true), Tick::End(StreamEnd::SnapshotStalled(STALL)));
        assert_eq!(clocks.tick(at(150), false), Tick::Nothing, "a watch waits for as long as it takes");
    }
}
