//! Whether a refusal as too old, a snapshot in its place, a gap or a catch-up was needed. A refusal
//! for a while (429, 503) is not, when no fault has been active for minutes.
//!
//! A replica that has run since a version, and has not listed since, can continue from it exactly,
//! as long as its ring has every later event. The oracle knows the limits of the ring, and sees the
//! requests upstream. It judges only if this is true of every replica, so that it need not know
//! which one answered.

use std::{ops::Range, time::Duration};

use super::{Breach, Guarantee, Walk};

/// Facts that explain why a stream cannot continue from a version.
#[derive(Clone, Debug, Default)]
pub(crate) struct Facts {
    /// The limits of the ring. 0: it may be empty at any time.
    pub(crate) ring_events_max: usize,
    pub(crate) ring_age_max: Duration,
    /// Times at which a replica started or listed, or of the last requests for a state.
    pub(crate) interruptions: Vec<Duration>,
    /// Time at which memory first became short, after which history is short for some time.
    pub(crate) memory_short: Option<Duration>,
    /// A time without a reason to refuse anything: no fault is active, or has an effect any more.
    pub(crate) quiet: Option<Range<Duration>>,
    /// Times of the changes of the schema.
    pub(crate) schema_changes: Vec<Duration>,
}

/// Events that replicas get some time after they were written.
const DELAY: Duration = Duration::from_secs(5);

/// From the last request of a list to its end: four times the longest delay of a message, because
/// upstream must confirm its identity afterwards.
const LIST_TIME: Duration = Duration::from_secs(12);

/// From a change of the schema until every replica has the new bytes. Until then a client that
/// comes from another replica may have either, at one version.
const SCHEMA_SETTLES: Duration = Duration::from_secs(160);

impl Walk<'_> {
    /// Checks that it was not possible to continue exactly from `version` at the time `now`.
    pub(super) fn check_need(&self, what: &str, version: u64, now: Duration) -> Result<(), Breach> {
        let [epoch] = &self.truth.epochs[..] else { return Ok(()) };
        let Facts { ring_events_max, ring_age_max, interruptions, memory_short, schema_changes, .. } = self.facts;
        let at = epoch.after(version);
        let known = at.checked_sub(1).map_or(Duration::ZERO, |last| epoch.writes[last].at);
        let later = &epoch.writes[at..];
        let oldest = later.first().map_or(now, |write| write.at);
        // One event may be evicted before another one is added.
        let in_ring = later.iter().take_while(|write| write.at <= now).count() + 1 < *ring_events_max
            && now.saturating_sub(oldest) + DELAY < *ring_age_max;
        let was_interrupted = interruptions.iter().any(|at| *at + LIST_TIME >= known && *at <= now);
        let is_reread = schema_changes.iter().any(|at| *at + SCHEMA_SETTLES >= known && *at <= now);
        if in_ring && !was_interrupted && !is_reread && memory_short.is_none_or(|at| at > now) {
            return Err((
                Guarantee::Resumable,
                format!("got {what} from {version}, although every replica has had all later events in its ring"),
            ));
        }
        Ok(())
    }

    /// Checks that there was a reason to refuse a request at the time `now`.
    pub(super) fn check_refusal(&self, reason: &str, message: &str, now: Duration) -> Result<(), Breach> {
        if self.facts.quiet.as_ref().is_some_and(|quiet| quiet.contains(&now)) {
            return Err((
                Guarantee::Resumable,
                format!("was refused ({reason}), although no fault was active for minutes: {message}"),
            ));
        }
        Ok(())
    }
}
