//! What the subscribers, the churn and the view share: counters, and where the demo stands.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use super::lag::{Lags, WriteTimes};

/// Which way the subscribers' watches go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// To the apiserver.
    Direct,
    /// To kubefan, and kubefan's to the apiserver.
    Kubefan,
}

impl Route {
    /// Both, in their order.
    pub const ALL: [Self; 2] = [Self::Direct, Self::Kubefan];

    /// As it is shown.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Kubefan => "through kubefan",
        }
    }
}

/// What is being done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// The simulated apiserver is filled.
    Filling,
    /// Subscribers connect and receive the state.
    Connecting,
    /// Objects change.
    Churning,
    /// Changes have stopped; what is under way arrives.
    Settling,
}

/// Where the demo stands.
#[derive(Debug, Clone, Copy)]
pub struct Stage {
    /// Which way the watches go.
    pub route: Route,
    /// What is being done.
    pub activity: Activity,
    /// Since the first subscriber of the first route; zero before.
    pub elapsed: Duration,
}

/// The shared counters. They only grow, but for what belongs to one route: versions and readiness.
pub(super) struct Board {
    stage: Mutex<(Route, Activity, Option<Instant>)>,
    /// By subscriber: everything up to here has arrived; 0 until its initial state is complete.
    versions: Box<[AtomicU64]>,
    ready: AtomicUsize,
    pub(super) changes: AtomicU64,
    pub(super) deliveries: AtomicU64,
    pub(super) delivered_bytes: AtomicU64,
    pub(super) breaks: AtomicU64,
    pub(super) lags: Lags,
    pub(super) writes: WriteTimes,
}

impl Board {
    pub(super) fn new(subscribers: usize) -> Self {
        Self {
            stage: Mutex::new((Route::Direct, Activity::Filling, None)),
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

    /// Where the demo stands.
    pub(super) fn stage(&self) -> Stage {
        let (route, activity, since) = *self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        Stage { route, activity, elapsed: since.map(|since| since.elapsed()).unwrap_or_default() }
    }

    /// Goes on to `activity`. The subscribers of another route have ended by then.
    pub(super) fn enter(&self, route: Route, activity: Activity) {
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        let since = stage.2.or_else(|| (activity != Activity::Filling).then(Instant::now));
        if activity == Activity::Connecting {
            self.versions.iter().for_each(|version| version.store(0, Ordering::Relaxed));
            self.ready.store(0, Ordering::Relaxed);
        }
        *stage = (route, activity, since);
    }

    /// A subscriber received a change, not part of an initial state.
    pub(super) fn delivered(&self, version: u64, bytes: usize) {
        self.deliveries.fetch_add(1, Ordering::Relaxed);
        self.delivered_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        if let Some(lag) = self.writes.age(version) {
            self.lags.record(lag);
        }
    }

    /// A subscriber has received everything up to `version`.
    pub(super) fn reached(&self, subscriber: usize, version: u64) {
        if version > 0 && self.versions[subscriber].fetch_max(version, Ordering::Relaxed) == 0 {
            self.ready.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A subscriber's watch broke.
    pub(super) fn broke(&self) {
        self.breaks.fetch_add(1, Ordering::Relaxed);
    }

    /// Subscribers whose initial state is complete.
    pub(super) fn ready(&self) -> usize {
        self.ready.load(Ordering::Relaxed)
    }

    /// Subscribers in all.
    pub(super) fn subscribers(&self) -> usize {
        self.versions.len()
    }

    /// Subscribers that have received everything up to `version`.
    pub(super) fn at(&self, version: u64) -> usize {
        self.versions.iter().filter(|reached| reached.load(Ordering::Relaxed) >= version).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subscriber_is_ready_once_and_a_new_route_starts_from_nothing() {
        let board = Board::new(2);
        board.reached(0, 0);
        assert_eq!(board.ready(), 0);
        board.reached(0, 5);
        board.reached(0, 9);
        board.reached(0, 7);
        assert_eq!((board.ready(), board.at(9), board.at(10)), (1, 1, 0));
        board.enter(Route::Kubefan, Activity::Connecting);
        assert_eq!((board.ready(), board.at(1)), (0, 0));
    }
}
