//! Availability of the apiserver after an outage: one probe for all callers that wait.
//!
//! After an outage every cache wants to continue at once, but none should find out by itself when
//! that is possible: with a backoff of its own each would be late by up to a minute, and without
//! one they would be a load on an apiserver that is starting. So a caller that cannot connect waits
//! here. The first one sends a probe a second, and its success releases all of them.
//!
//! A gateway in front of the apiserver may accept connections during an outage and answer 502, 503
//! or 504. Single requests get such answers from a healthy apiserver too. So these callers keep
//! their own backoff, and the end of an outage only cuts it.
//!
//! The probe is `GET /readyz`: kube-apiserver allows it to every user, it costs one small answer,
//! and through proxies and load balancers it takes the way of all other requests. A TCP connection
//! would be cheaper, but it says little: a load balancer accepts it while no apiserver is up, and
//! an apiserver accepts it seconds before it has read its authorization rules. While `/readyz`
//! answers 429 or 5xx the apiserver is starting. That answer is trusted for a limited time only,
//! because one failed check makes an apiserver unready that still serves. A 403 is trusted for a
//! shorter time: the apiserver may never answer anything else. Any other answer means that requests
//! are worth a try, and that their own failures say more than the probe's.
//!
//! This file holds the data; `probe` sends the requests.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Time after an outage for which the apiserver counts as starting.
const STARTING: Duration = Duration::from_secs(30);

/// The known availability of an apiserver.
#[derive(Default)]
pub(crate) struct Availability {
    /// Locked while a caller probes for all.
    pub(super) probes: tokio::sync::Mutex<Probes>,
    /// End of the last outage.
    returned: Mutex<Option<Instant>>,
}

#[derive(Default)]
pub(super) struct Probes {
    /// The earliest start of the next probe.
    pub(super) next_at: Option<Instant>,
    /// Time of the last answered probe, and its result.
    pub(super) last: Option<(Instant, Health)>,
    /// Start of the time for which the apiserver has answered that it is not ready.
    pub(super) unready_since: Option<Instant>,
    /// Whether the last probe failed.
    pub(super) failed: bool,
}

/// Result of a probe for the requests that wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Health {
    Serving,
    /// The apiserver has answered for too long that it is not ready: requests are worth a try.
    Unknown,
    /// The apiserver serves, and denies kubefan the probe.
    Denied,
    Down,
}

impl Availability {
    fn returned(&self) -> MutexGuard<'_, Option<Instant>> {
        self.returned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes the end of an outage.
    pub(super) fn outage_ended(&self) {
        *self.returned() = Some(Instant::now());
    }

    /// End of the last outage.
    pub(super) fn ended_at(&self) -> Option<Instant> {
        *self.returned()
    }

    /// Whether an outage has ended a moment ago.
    pub(super) fn is_starting(&self) -> bool {
        self.ended_at().is_some_and(|at| at.elapsed() < STARTING)
    }
}
