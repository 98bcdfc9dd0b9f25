//! The options and the state of a simulated apiserver.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rand::RngExt;
use rand_pcg::Pcg64Mcg;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::{
    faults::Faults,
    stats::Counters,
    store::{Collection, Snapshot, Store},
};
use kubefan_common::sync::watch;

/// Configuration of the simulated apiserver.
#[derive(Debug, Clone)]
pub struct SimOptions {
    /// Whether `sendInitialEvents` (the WatchList feature) is supported. Servers before 1.32 answer
    /// such a request with 422.
    pub watch_list: bool,
    /// Whether watches are compressed for clients that accept gzip: one gzip member per event, as
    /// in Kubernetes 1.37.
    pub gzip_watches: bool,
    /// Number of recent events retained per resource. Watches, exact lists and continued lists can
    /// start no earlier. Values below 1 are raised to 1.
    pub window_events_max: usize,
    /// The time between two bookmarks.
    pub bookmark_interval: Duration,
    /// Time that a read waits for a resource version that does not exist yet.
    pub freshness_wait: Duration,
    /// A watch without `timeoutSeconds` ends after a random time between this and twice this.
    pub request_timeout_min: Duration,
    /// If set, any request without this bearer token gets 401.
    pub bearer_token: Option<String>,
    /// The `gitVersion` that `/version` reports, such as `v1.35.4`.
    pub git_version: String,
    /// Seed of generated uids, generated names and jitter.
    pub seed: u64,
    /// Returns the `creationTimestamp` of an object that has none.
    pub clock: fn() -> String,
    /// Whether responses have a `Date`. It is that of the real clock, and over HTTP/2 its length
    /// depends on its digits, so a test that must repeat byte for byte does without.
    pub date: bool,
}

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            watch_list: true,
            gzip_watches: false,
            window_events_max: 10_000,
            bookmark_interval: Duration::from_secs(60),
            freshness_wait: Duration::from_secs(3),
            request_timeout_min: Duration::from_secs(1800),
            bearer_token: None,
            git_version: "v1.35.4".to_owned(),
            seed: 0,
            clock: wall_clock,
            date: true,
        }
    }
}

/// The state of a simulated apiserver. Other files add the requests to it.
pub(super) struct Inner {
    pub(super) options: SimOptions,
    pub(super) store: Arc<Store>,
    /// The version that the watch caches have reached. `None` if they do not lag.
    pub(super) held: watch::Sender<Option<u64>>,
    pub(super) faults: Faults,
    pub(super) counters: Arc<Counters>,
    pub(super) random: Mutex<Pcg64Mcg>,
    /// Cancelled to drop the current connections. Later connections get a new token.
    pub(super) connections: Mutex<CancellationToken>,
}

impl Inner {
    /// A number in [0, 1).
    pub(super) fn random(&self) -> f64 {
        self.random.lock().unwrap_or_else(PoisonError::into_inner).random()
    }

    /// The state that the watch cache of a collection has, and its version.
    pub(super) fn cached(&self, collection: &Collection) -> (Snapshot, u64) {
        let (objects, progress) = collection.snapshot();
        let held = self.held.borrow().filter(|held| *held < progress);
        // A version that cannot be read any more is too old for a watch as well.
        let lagging = held.and_then(|held| Some((collection.at(held)?, held)));
        lagging.unwrap_or((objects, progress))
    }

    /// The version up to which the watch cache of a collection has all events.
    pub(super) fn progress(&self, collection: &Collection) -> u64 {
        collection.progress().min(self.held.borrow().unwrap_or(u64::MAX))
    }

    /// Waits until the watch caches lag no more, or for as long as a read waits for a version.
    pub(super) async fn wait_for_caches(&self) {
        let mut held = self.held.subscribe();
        // Whether it was in time is visible in the caches.
        let _ = timeout(self.options.freshness_wait, held.wait_for(Option::is_none)).await;
    }

    pub(super) fn uid(&self) -> String {
        let bits: u128 = self.random.lock().unwrap_or_else(PoisonError::into_inner).random();
        let hex = format!("{bits:032x}");
        format!("{}-{}-4{}-a{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..])
    }

    pub(super) fn connection_token(&self) -> CancellationToken {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner).child_token()
    }
}

/// The current time in the format of `creationTimestamp`.
#[expect(clippy::disallowed_methods, reason = "the default of an option, which a simulation sets")]
fn wall_clock() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
