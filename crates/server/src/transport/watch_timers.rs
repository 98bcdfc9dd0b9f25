//! The timers of one watch: its end, its bookmarks, and the stall of its backlog.
//!
//! A backlog (snapshot, catch-up or backfill) pins state, so a client must read it without long
//! pauses. A watch that has sent its backlog pins nothing and may wait for its client forever.

use std::time::Duration;

use kubefan_cache::StreamEnd;
use tokio::time::Instant;

use super::limits::{PROGRESS_BYTES_MIN, WATCH_AGE_MIN, time_for};

/// Time before its timeout at which a watch over HTTP is sent a last bookmark, as the apiserver
/// does.
const LAST_BOOKMARK_BEFORE_TIMEOUT: Duration = Duration::from_secs(2);

/// The timers of a watch.
#[derive(Debug)]
pub struct WatchTimers {
    /// A bookmark is sent after this time without events; `None` if no bookmarks are sent.
    bookmark_interval: Option<Duration>,
    /// Time at which the watch ends by itself.
    timeout_at: Option<Instant>,
    /// The deadline of the gRPC call.
    deadline_at: Option<Instant>,
    /// Time at which the last bookmark is due; `None` once it was sent.
    last_bookmark_at: Option<Instant>,
    stall_timeout: Duration,
    last_sent: Instant,
    /// Whether there was a backlog when that was last looked at.
    in_backlog: bool,
    /// Start of the current progress window, and bytes sent in it.
    window_start: Instant,
    window_bytes: usize,
    /// Start of the backlog, and bytes sent of it.
    backlog_start: Instant,
    backlog_bytes: usize,
    /// End of the last backlog, or start of the watch.
    state_sent_at: Instant,
}

/// The timer that is due.
#[derive(Debug, PartialEq, Eq)]
pub enum Due {
    /// No timer is due.
    Nothing,
    /// Send a bookmark, if the subscription has one.
    Bookmark,
    /// End the watch.
    End(StreamEnd),
}

impl WatchTimers {
    /// Starts the timers. With `bookmark_before_end` a last bookmark is due shortly before the
    /// timeout.
    pub fn new(
        bookmark_interval: Option<Duration>,
        timeout_at: Option<Instant>,
        deadline_at: Option<Instant>,
        stall_timeout: Duration,
        bookmark_before_end: bool,
    ) -> Self {
        let last_sent = Instant::now();
        let last_bookmark_at = timeout_at.filter(|_| bookmark_before_end && bookmark_interval.is_some());
        let last_bookmark_at = last_bookmark_at.and_then(|at| at.checked_sub(LAST_BOOKMARK_BEFORE_TIMEOUT));
        let last_bookmark_at = last_bookmark_at.filter(|at| *at > last_sent);
        let in_backlog = false;
        let window_start = last_sent;
        let window_bytes = 0;
        Self {
            bookmark_interval,
            timeout_at,
            deadline_at,
            last_bookmark_at,
            stall_timeout,
            last_sent,
            in_backlog,
            window_start,
            window_bytes,
            backlog_start: last_sent,
            backlog_bytes: 0,
            state_sent_at: last_sent,
        }
    }

    /// Records that `bytes` were sent. `in_backlog`: whether the subscription is still sending its
    /// backlog.
    pub fn sent(&mut self, now: Instant, bytes: usize, in_backlog: bool) {
        self.last_sent = now;
        self.window_bytes += bytes;
        if in_backlog && !self.in_backlog {
            self.begin_backlog(now);
        }
        if self.in_backlog && !in_backlog {
            self.state_sent_at = now;
        }
        self.in_backlog = in_backlog;
        self.backlog_bytes = self.backlog_bytes.saturating_add(bytes);
        if self.window_bytes >= PROGRESS_BYTES_MIN {
            self.window_start = now;
            self.window_bytes = 0;
        }
    }

    /// Time from which a watch over HTTP may end only so that its client comes back.
    pub fn may_move_at(&self) -> Instant {
        self.state_sent_at + WATCH_AGE_MIN
    }

    /// Records that a backlog has begun. Nothing of it was sent yet.
    pub fn begin_backlog(&mut self, now: Instant) {
        self.in_backlog = true;
        self.backlog_start = now;
        self.backlog_bytes = 0;
        self.window_start = now;
        self.window_bytes = 0;
    }

    /// Time of the next call of [`Self::tick`]: during a backlog at least once per bookmark
    /// interval, and otherwise at least once per stall timeout. Neither the end of a backlog nor
    /// the start of another one gives a signal.
    pub fn due_at(&self, now: Instant, in_backlog: bool) -> Instant {
        let (look_at, bookmark_at) = if in_backlog {
            (self.stalls_at(), self.bookmark_interval.map(|interval| now + interval))
        } else {
            (now + self.stall_timeout, self.bookmark_interval.map(|interval| self.last_sent + interval))
        };
        // No bookmark is sent during a backlog, so its timer is left out: it would be due for ever.
        let last_bookmark_at = self.last_bookmark_at.filter(|_| !in_backlog);
        [bookmark_at, self.timeout_at, self.deadline_at, last_bookmark_at]
            .into_iter()
            .flatten()
            .fold(look_at, Instant::min)
    }

    /// Time at which the backlog has stalled: if too little was read lately, or of all of it.
    fn stalls_at(&self) -> Instant {
        let average = self.backlog_start + time_for(self.backlog_bytes, self.stall_timeout);
        average.min(self.window_start + self.stall_timeout)
    }

    /// Returns the timer that is due now.
    pub fn tick(&mut self, now: Instant, in_backlog: bool) -> Due {
        let over = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if over(self.timeout_at) {
            return Due::End(StreamEnd::Timeout);
        }
        if over(self.deadline_at) {
            return Due::End(StreamEnd::Deadline);
        }
        if in_backlog {
            if !self.in_backlog {
                self.begin_backlog(now);
            }
            return if self.stalls_at() <= now {
                Due::End(StreamEnd::SnapshotStalled(self.stall_timeout))
            } else {
                Due::Nothing
            };
        }
        self.in_backlog = false;
        let silence = now.saturating_duration_since(self.last_sent);
        let ends = over(self.last_bookmark_at);
        if ends {
            self.last_bookmark_at = None;
        }
        if ends || self.bookmark_interval.is_some_and(|interval| silence >= interval) {
            // Even if there is no newer version to announce: the next bookmark is due one interval
            // later.
            self.last_sent = now;
            return Due::Bookmark;
        }
        Due::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::transport::limits::AVERAGE_BYTES_MIN;

    const STALL: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_watch_with_a_timeout_gets_a_last_bookmark_before_it() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut timers = WatchTimers::new(Some(Duration::from_secs(60)), Some(at(10)), None, STALL, true);
        assert_eq!(timers.due_at(now, false), at(8));
        assert_eq!(timers.tick(at(8), false), Due::Bookmark);
        assert_eq!(timers.due_at(at(8), false), at(10));
        assert_eq!(timers.tick(at(10), false), Due::End(StreamEnd::Timeout));
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_may_move_a_while_after_its_state_was_sent() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut timers = WatchTimers::new(None, None, None, STALL, true);
        assert_eq!(timers.may_move_at(), now + WATCH_AGE_MIN, "a watch without a state");
        timers.begin_backlog(now);
        timers.sent(at(5), 100, true);
        timers.sent(at(9), 100, false);
        timers.sent(at(20), 100, false);
        assert_eq!(timers.may_move_at(), at(9) + WATCH_AGE_MIN);
    }

    #[tokio::test(start_paused = true)]
    async fn a_timer_that_did_nothing_is_due_later() {
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        let mut timers = WatchTimers::new(Some(Duration::from_secs(60)), Some(at(10)), None, STALL, true);
        timers.sent(at(1), 100, true);
        assert_eq!(timers.tick(at(9), true), Due::Nothing, "a backlog is sent no bookmark");
        assert_eq!(timers.due_at(at(9), true), at(10));
        assert_eq!(timers.tick(at(9), false), Due::Bookmark, "the backlog has ended");
    }

    #[tokio::test(start_paused = true)]
    async fn an_initial_backlog_that_is_never_read_has_stalled() {
        let now = Instant::now();
        let mut timers = WatchTimers::new(None, None, None, STALL, true);
        timers.begin_backlog(now);
        assert_eq!(timers.due_at(now, true), now + STALL);
        assert_eq!(timers.tick(now + STALL, true), Due::End(StreamEnd::SnapshotStalled(STALL)));
    }

    /// A client that stops reading falls behind the history, and a catch-up waits for it.
    #[tokio::test(start_paused = true)]
    async fn a_backlog_that_begins_later_is_noticed_however_rare_bookmarks_are() {
        let now = Instant::now();
        for interval in [None, Some(Duration::from_hours(24))] {
            let mut timers = WatchTimers::new(interval, None, None, STALL, true);
            timers.sent(now, 10, false);
            assert_eq!(timers.due_at(now, false), now + STALL);
            assert_eq!(timers.tick(now + STALL, true), Due::Nothing, "it may have begun just now");
            assert_eq!(timers.due_at(now + STALL, true), now + 2 * STALL);
            assert_eq!(timers.tick(now + 2 * STALL, true), Due::End(StreamEnd::SnapshotStalled(STALL)));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_backlog_that_is_read_too_slowly_has_stalled() {
        let now = Instant::now();
        let at = |tenths: u32| now + tenths * STALL / 10;
        let mut timers = WatchTimers::new(None, None, None, STALL, true);
        // Long after the watch started: a catch-up.
        timers.sent(at(90), 10, false);
        for tenths in 100..130 {
            timers.sent(at(tenths), AVERAGE_BYTES_MIN / 10, true);
            assert_eq!(timers.tick(at(tenths), true), Due::Nothing, "{tenths}");
        }
        for tenths in 130..150 {
            timers.sent(at(tenths), 10, true);
        }
        assert_eq!(timers.tick(at(150), true), Due::End(StreamEnd::SnapshotStalled(STALL)));
        // Just enough to count, and far too little on average.
        timers.sent(at(160), 10, false);
        for tenths in 170..189 {
            timers.sent(at(tenths), PROGRESS_BYTES_MIN, true);
            assert_eq!(timers.tick(at(tenths), true), Due::Nothing, "{tenths}");
        }
        timers.sent(at(200), PROGRESS_BYTES_MIN, true);
        assert_eq!(timers.tick(at(200), true), Due::End(StreamEnd::SnapshotStalled(STALL)));
        timers.sent(at(210), 10, false);
        assert_eq!(timers.tick(at(150), false), Due::Nothing, "without a backlog there is no stall timer");
    }
}
