//! The states on disk, and the hubs that serve them.
//!
//! The cluster of the files counts as the known one as long as a hub serves a state that upstream
//! has not confirmed. So nothing that another cluster sends is believed until the last of these
//! hubs is closed. From then on no file is served: another cluster is behind the address.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::SystemTime,
};

use kubefan_cache::{Phase, StreamEnd};
use kubefan_fanout::{Hub, SavedState};
use kubefan_peer::{
    CacheIdentity,
    saved::{Endpoint, SavedError, StateDir, StateHead, StateName},
};
use kubefan_telemetry::metrics::SavedStart;
use kubefan_upstream::Upstream;
use tokio::{
    sync::{OnceCell, Semaphore},
    task::spawn_blocking,
};
use tracing::warn;

/// Reason for readers of a state that is dropped.
pub(super) const OTHER_CLUSTER: &str = "another cluster answers than that of the saved state";
/// Files that are read at a time.
const READS_MAX: usize = 2;

/// The saved states of a process.
pub struct SavedStates {
    dir: Arc<StateDir>,
    bytes_max: u64,
    wall_clock: fn() -> SystemTime,
    /// Limits the files that are read at a time.
    pub(super) reads: Semaphore,
    /// The files of the process before.
    found: OnceCell<BTreeMap<StateName, FoundFile>>,
    /// The hubs that serve a saved state, or have served one. `None` once another cluster has
    /// answered.
    serving: Mutex<Option<Vec<Weak<Hub>>>>,
}

/// The cache that a file is of.
pub(super) struct FoundFile {
    pub(super) head: StateHead,
    pub(super) identity: CacheIdentity,
}

impl SavedStates {
    /// The states in `dir`, of at most `bytes_max` uncompressed bytes each.
    pub fn new(dir: StateDir, bytes_max: u64, wall_clock: fn() -> SystemTime) -> Self {
        let reads = Semaphore::new(READS_MAX);
        let serving = Mutex::new(Some(Vec::new()));
        Self { dir: Arc::new(dir), bytes_max, wall_clock, reads, found: OnceCell::new(), serving }
    }

    /// The directory with the files.
    pub(super) fn dir(&self) -> &Arc<StateDir> {
        &self.dir
    }

    /// The largest state, in uncompressed bytes.
    pub(super) fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Returns the wall clock.
    pub(super) fn now(&self) -> SystemTime {
        (self.wall_clock)()
    }

    /// Returns the files of the process before. Those that cannot be used are logged.
    pub(super) async fn found(&self) -> &BTreeMap<StateName, FoundFile> {
        let dir = self.dir.clone();
        let finding = async { spawn_blocking(move || find(&dir)).await.unwrap_or_default() };
        self.found.get_or_init(|| finding).await
    }

    /// Returns the cluster whose files may be served: that of the newest file of these servers. The
    /// others are of a cluster that was at this address before.
    pub(super) async fn cluster_at(&self, ours: &Endpoint) -> Option<&str> {
        let now = self.now();
        let files = self.found().await.values().filter(|file| file.head.endpoint == *ours);
        files.max_by_key(|file| newness(&file.head, now))?.head.cluster_uid.as_deref()
    }

    /// Serves a saved state of the cluster with this uid as stale, and takes that cluster as the
    /// known one. Returns false if another cluster is known, or has answered.
    pub(super) fn serve(&self, upstream: &Upstream, uid: &str, hub: &Arc<Hub>, state: SavedState) -> bool {
        let mut serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(hubs) = &mut *serving else { return false };
        if !upstream.assume_cluster(uid) {
            return false;
        }
        hubs.push(Arc::downgrade(hub));
        hub.start_unconfirmed(state);
        true
    }

    /// Ends every stream of a state that is not confirmed, because another cluster answers. Forgets
    /// the cluster of the files, and removes them.
    pub(super) async fn drop_unconfirmed(&self, upstream: &Upstream) {
        let uid = {
            // Held to the end, so that no cache begins to serve a state of the old cluster.
            let mut serving = self.serving.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(hubs) = serving.take() else { return };
            for hub in hubs.iter().filter_map(Weak::upgrade).filter(|hub| hub.is_unconfirmed()) {
                hub.metrics().saved_states.started(SavedStart::Unconfirmed);
                hub.close(Phase::Syncing, StreamEnd::Rewritten(OTHER_CLUSTER.to_owned()));
            }
            // Only now: the name of the new cluster must not be that of a state of the old one.
            upstream.forget_assumed_cluster()
        };
        let Some(uid) = uid else { return };
        for (name, file) in self.found().await {
            if file.head.cluster_uid.as_deref() == Some(&uid) {
                self.remove(name.clone()).await;
            }
        }
    }

    /// Removes a file that must not be served after the next start.
    pub(super) async fn remove(&self, name: StateName) {
        let dir = self.dir.clone();
        let file = name.as_str().to_owned();
        if let Ok(Err(error)) = spawn_blocking(move || dir.remove(&name)).await {
            warn!(file, %error, "a saved state could not be removed");
        }
    }
}

fn find(dir: &StateDir) -> BTreeMap<StateName, FoundFile> {
    let names = dir.names().inspect_err(|error| warn!(%error, "the saved states cannot be read")).unwrap_or_default();
    let found = names.into_iter().filter_map(|name| {
        let peeked: Result<_, SavedError> = dir.peek(&name);
        let peeked = peeked.inspect_err(|error| warn!(file = name.as_str(), %error, "a saved state cannot be used"));
        peeked.ok().map(|(head, identity)| (name, FoundFile { head, identity }))
    });
    found.collect()
}
/// Orders files by their time. A time in the future is unknown, and counts as the oldest.
pub(super) fn newness(head: &StateHead, now: SystemTime) -> (bool, u64) {
    (head.elapsed(now).is_some(), head.saved_at_millis)
}
