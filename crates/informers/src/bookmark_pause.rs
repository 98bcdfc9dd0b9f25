//! Decides whether readers wait for bookmarks. An apiserver that sends none must not delay every
//! read.

use std::time::Duration;

use tokio::time::Instant;

use kubefan_telemetry::metrics::Proof;

/// Pause of the waits for bookmarks after a failed wait. It doubles with each failed attempt. It is
/// longer than an attempt.
const PAUSE: Duration = Duration::from_secs(5);
/// The longest pause: one attempt a minute finds out whether bookmarks arrive again. A pause that
/// ended longer ago than this is forgotten.
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The way in which freshness was proved, or the reason why it was not.
pub(super) type ProofResult = Result<Proof, ProofFailure>;

/// The reason why a cache was not proved fresh, with a text for readers.
#[derive(Debug, Clone)]
pub(super) enum ProofFailure {
    /// Upstream did not answer, or the cache is not being watched.
    Failed(String),
    /// The cache is behind, and either no reader could wait or the apiserver that answered is
    /// behind as well.
    Behind(String),
    /// Upstream answered the look-up and the watch, but all readers waited for a bookmark that did
    /// not arrive.
    NoBookmark(String),
}

impl ProofFailure {
    /// Returns the metric label.
    pub(super) fn result(&self) -> Proof {
        match self {
            Self::Failed(_) => Proof::Failed,
            Self::Behind(_) | Self::NoBookmark(_) => Proof::Behind,
        }
    }

    pub(super) fn reason(&self) -> &str {
        let (Self::Failed(reason) | Self::Behind(reason) | Self::NoBookmark(reason)) = self;
        reason
    }
}

/// Whether readers wait for bookmarks.
#[derive(Default)]
pub(super) struct BookmarkPause {
    /// The last failed wait. `None` if there was none recently.
    failed: Option<FailedWait>,
    /// Readers do not wait for bookmarks until then. `None` if the last wait did not fail.
    paused_until: Option<Instant>,
}

/// A wait for a bookmark that did not arrive.
struct FailedWait {
    /// The length of the pause after it.
    pause: Duration,
    /// The end of that pause.
    until: Instant,
}

impl BookmarkPause {
    /// Returns the rest of the pause. During the attempt that follows a pause: the longest time
    /// until that attempt ends.
    pub(super) fn remaining(&self, now: Instant) -> Option<Duration> {
        self.paused_until.map(|until| until.saturating_duration_since(now)).filter(|left| !left.is_zero())
    }

    /// Starts an attempt, unless there is a pause. Only readers that wait already share an attempt
    /// that follows a failed one; the pause continues for all others until the attempt ends.
    pub(super) fn begin(&mut self, now: Instant) -> bool {
        if self.remaining(now).is_some() {
            return false;
        }
        self.failed.take_if(|failed| now - failed.until > PAUSE_MAX);
        self.paused_until = self.failed.as_ref().map(|failed| now + failed.pause);
        true
    }

    /// Records the result of an attempt.
    pub(super) fn end(&mut self, result: &ProofResult, now: Instant) {
        self.paused_until = None;
        match result {
            Ok(Proof::Bookmark) => self.failed = None,
            Err(ProofFailure::NoBookmark(_)) => {
                let pause = self.failed.take().map_or(PAUSE, |failed| (2 * failed.pause).min(PAUSE_MAX));
                self.failed = Some(FailedWait { pause, until: now + pause });
                self.paused_until = Some(now + pause);
            }
            // Other results say nothing about bookmarks.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Makes an attempt that gets no bookmark for three seconds. Returns its end.
    fn fail(pause: &mut BookmarkPause, begin: Instant) -> Instant {
        assert!(pause.begin(begin), "a reader may wait");
        let end = begin + seconds(3);
        pause.end(&Err(ProofFailure::NoBookmark(String::new())), end);
        end
    }

    #[test]
    fn pauses_grow_to_a_minute_and_old_failures_are_forgotten() {
        let mut pause = BookmarkPause::default();
        let mut now = Instant::now();
        for expected in [5, 10, 20, 40, 60, 60] {
            now = fail(&mut pause, now);
            assert_eq!(pause.remaining(now), Some(seconds(expected)));
            assert!(!pause.begin(now + seconds(expected - 1)));
            now += seconds(expected);
            assert_eq!(pause.remaining(now), None);
        }
        // A proof without a bookmark says nothing about bookmarks.
        assert!(pause.begin(now));
        pause.end(&Ok(Proof::Held), now);
        now = fail(&mut pause, now);
        assert_eq!(pause.remaining(now), Some(PAUSE_MAX));
        now = fail(&mut pause, now + PAUSE_MAX + PAUSE_MAX + seconds(1));
        assert_eq!(pause.remaining(now), Some(PAUSE));
    }

    #[test]
    fn only_one_reader_waits_in_the_attempt_after_a_pause() {
        let mut pause = BookmarkPause::default();
        let now = fail(&mut pause, Instant::now()) + PAUSE;
        assert!(pause.begin(now));
        assert_eq!(pause.remaining(now), Some(PAUSE), "the pause continues for all others");
        assert!(!pause.begin(now + seconds(1)));
        pause.end(&Ok(Proof::Bookmark), now + seconds(2));
        assert_eq!(pause.remaining(now), None);
        let now = fail(&mut pause, now + seconds(2));
        assert_eq!(pause.remaining(now), Some(PAUSE), "a bookmark ends all of it");
    }
}
