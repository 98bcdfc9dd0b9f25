//! Progress of the demo: the counters and the current phase. The subscribers and the writer update
//! them, and the display reads them.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use super::lag::{Lags, WriteTimes};

/// The server that the subscribers watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// The apiserver.
    Direct,
    /// kubefan, which watches the apiserver.
    Kubefan,
}

impl Route {
    /// Both routes, in the order in which the demo runs them.
    pub const ALL: [Self; 2] = [Self::Direct, Self::Kubefan];

    /// The name shown to the user.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Kubefan => "through kubefan",
        }
    }
}

/// Current activity of the demo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// Creating the objects in the simulated apiserver.
    Filling,
    /// Subscribers connect and receive their initial state.
    Connecting,
    /// Objects change.
    Churning,
    /// Changes have stopped; the last ones are still being delivered.
    Settling,
}

/// The current phase of the demo.
#[derive(Debug, Clone, Copy)]
pub struct Phase {
    /// The current route.
    pub route: Route,
    /// The current activity on it.
    pub activity: Activity,
    /// Time since the first subscriber of the first route started to connect; zero before that.
    pub elapsed: Duration,
}

/// The shared counters and phase. Counters only grow, except that each route resets the versions
/// and the number of ready subscribers.
pub(super) struct Progress {
    phase: Mutex<(Route, Activity, Option<Instant>)>,
    /// By subscriber: the version up to which it has received everything; 0 until its initial state
    /// is complete.
    versions: Box<[AtomicU64]>,
    ready: AtomicUsize,
    pub(super) changes: AtomicU64,
    pub(super) deliveries: AtomicU64,
    pub(super) delivered_bytes: AtomicU64,
    pub(super) breaks: AtomicU64,
    pub(super) lags: Lags,
    pub(super) writes: WriteTimes,
}

impl Progress {
    pub(super) fn new(subscribers: usize) -> Self {
        Self {
            phase: Mutex::new((Route::Direct, Activity::Filling, None)),
            versions: (0..subscribers).map(|_| AtomicU64::new(0)).collect(),
            ready: AtomicUsize::new(0),
            changes: AtomicU64::new(0),
            deliveries: AtomicU64::new(0),
            delivered_bytes: AtomicU64::new(0),
            breaks: AtomicU64::new(0),
            lags: Lags::default(),
            writes: WriteTimes::default(),
        }
    }

    /// The current phase.
    pub(super) fn phase(&self) -> Phase {
        let (route, activity, since) = *self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        Phase { route, activity, elapsed: since.map(|since| since.elapsed()).unwrap_or_default() }
    }

    /// Enters a phase. When the route changes, the subscribers of the previous route must have
    /// ended.
    pub(super) fn enter(&self, route: Route, activity: Activity) {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let since = phase.2.or_else(|| (activity != Activity::Filling).then(Instant::now));
        if activity == Activity::Connecting {
            for version in &self.versions {
                version.store(0, Ordering::Relaxed);
            }
            self.ready.store(0, Ordering::Relaxed);
        }
        *phase = (route, activity, since);
    }

    /// Records that a subscriber received a change that is not part of its initial state.
    pub(super) fn delivered(&self, version: u64, bytes: usize) {
        self.deliveries.fetch_add(1, Ordering::Relaxed);
        self.delivered_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        if let Some(lag) = self.writes.age(version) {
            self.lags.record(lag);
        }
    }

    /// Records that a subscriber has received everything up to `version`.
    pub(super) fn reached(&self, subscriber: usize, version: u64) {
        if version > 0 && self.versions[subscriber].fetch_max(version, Ordering::Relaxed) == 0 {
            self.ready.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records that a subscriber's watch broke.
    pub(super) fn broke(&self) {
        self.breaks.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of subscribers whose initial state is complete.
    pub(super) fn ready(&self) -> usize {
        self.ready.load(Ordering::Relaxed)
    }

    /// Number of subscribers.
    pub(super) fn subscribers(&self) -> usize {
        self.versions.len()
    }

    /// Number of subscribers that have received everything up to `version`.
    pub(super) fn at(&self, version: u64) -> usize {
        self.versions.iter().filter(|reached| reached.load(Ordering::Relaxed) >= version).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subscriber_counts_as_ready_once_and_a_new_route_resets_it() {
        let progress = Progress::new(2);
        progress.reached(0, 0);
        assert_eq!(progress.ready(), 0);
        progress.reached(0, 5);
        progress.reached(0, 9);
        progress.reached(0, 7);
        assert_eq!((progress.ready(), progress.at(9), progress.at(10)), (1, 1, 0));
        progress.enter(Route::Kubefan, Activity::Connecting);
        assert_eq!((progress.ready(), progress.at(1)), (0, 0));
    }
}
