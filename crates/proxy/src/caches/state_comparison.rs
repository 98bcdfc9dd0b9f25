//! Proves the state of a small cache by one list of metadata.
//!
//! A consistent list returns keys, uids and versions at the cluster's version R. If they are those
//! of the cache at a version c, then the state at c is the state at R, and readers that came before
//! the list was sent may be served it. Nothing else follows. In particular the cache does not have
//! all events up to R: an object that was created and deleted after c is in neither state, and its
//! events may still come. So the cache stays at c, as do its bookmarks and its staleness, and the
//! readers are served that very state ([`Fresh::State`]).
//!
//! If they differ, the cache is behind. It is compared again after each of its commits, for a
//! moment. A difference never causes a list of the cache: its own watch is on the way.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tokio::time::{Instant, timeout};
use tracing::debug;

use super::{context::CacheContext, rounds::Rounds};
use crate::{
    cache::Store,
    fanout::{CachePosition, Fresh, Phase, ProvedState, Served},
    telemetry::metrics::Proof,
    upstream::metadata::{MetadataPages, ObjectMetadata},
};
use kubefan_common::planted::{self, Bug};
use kubefan_model::{ObjectKey, ResourceVersion};

/// The most objects of a cache that is proved by a list. Upstream reads and encodes all of them, so
/// for a larger cache an empty watch costs less.
const OBJECTS_MAX: usize = 1_000;
/// How long upstream may take to answer the list. A bookmark arrives about as soon.
const LIST_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a cache that differs may take to catch up.
const CATCH_UP_TIMEOUT: Duration = Duration::from_millis(500);
/// The shortest time between two lists of a cache. Each serves at least one reader that would
/// otherwise list all objects.
const LIST_INTERVAL: Duration = Duration::from_millis(25);
/// The same after a list that proved nothing. Meanwhile readers wait for a bookmark.
const FAILED_LIST_INTERVAL: Duration = Duration::from_secs(1);

/// The comparisons of one cache.
pub(super) struct StateComparison {
    context: CacheContext,
    served: Served,
    rounds: Rounds<(), Option<Fresh>>,
}

/// A list of metadata.
struct Listed {
    version: ResourceVersion,
    /// Uid and version of each object.
    objects: BTreeMap<ObjectKey, (String, ResourceVersion)>,
}

impl Listed {
    /// Whether a cache has exactly these objects.
    fn equals(&self, store: &Store) -> bool {
        (store.len() == self.objects.len() || planted::is(Bug::EqualSoFar))
            && store.iter().zip(&self.objects).all(|(cached, (key, (uid, version)))| {
                cached.key() == key && cached.version() == *version && cached.uid() == uid
            })
    }
}

impl StateComparison {
    pub(super) fn new(context: CacheContext, served: Served) -> Arc<Self> {
        Arc::new(Self { context, served, rounds: Rounds::default() })
    }

    /// Waits for a comparison that starts after this call. `None` if it proved nothing, or if the
    /// cache is too large.
    pub(super) async fn prove(self: &Arc<Self>) -> Option<Fresh> {
        if self.served.hub.position()?.store.len() > OBJECTS_MAX {
            return None;
        }
        let place = self.rounds.join(LIST_INTERVAL, |()| {})?;
        if place.must_run {
            tokio::spawn(self.clone().run());
        }
        // The one under way, and the next.
        place.answer(2 * (LIST_TIMEOUT + CATCH_UP_TIMEOUT)).await.flatten()
    }

    /// Runs one comparison after the other until there are no more readers.
    async fn run(self: Arc<Self>) {
        while let Some(round) = self.rounds.begin(LIST_INTERVAL).await {
            let started = Instant::now();
            let result = self.compare(started).await;
            let label = match &result {
                Ok((proof, _)) | Err((proof, _)) => *proof,
            };
            self.served.hub.metrics().proof(label, started.elapsed());
            match result {
                Ok((_, fresh)) => round.answer(Some(fresh)),
                Err((_, why)) => {
                    debug!(resource = %self.served.gvr, scope = self.served.scope.namespace(), why, "not compared");
                    round.answer(None);
                    self.rounds.pause(Instant::now() + FAILED_LIST_INTERVAL, None);
                }
            }
        }
    }

    async fn compare(&self, started: Instant) -> Result<(Proof, Fresh), (Proof, String)> {
        let hub = &self.served.hub;
        let failed = |why: String| (Proof::Failed, why);
        // Without its own watch the cache would not notice that upstream was restored from a
        // backup.
        let is_synced = *hub.phase().borrow() == Phase::Synced;
        let from = hub.position().filter(|_| is_synced);
        let CachePosition { epoch, version: from, .. } =
            from.ok_or_else(|| failed("the cache has no watch at the moment".to_owned()))?;
        let listed = timeout(LIST_TIMEOUT, self.list()).await;
        let listed = listed.map_err(|_| failed(format!("no list within {LIST_TIMEOUT:?}")))?.map_err(failed)?;
        let Some(listed) = listed else {
            return Err((Proof::Behind, format!("upstream has more than {OBJECTS_MAX} objects")));
        };
        let asked = listed.version;
        if asked < from {
            return Err(failed(format!("the cluster is at version {asked}, below the cache's version {from}")));
        }
        let (mut is_first, caught_up_by) = (true, Instant::now() + CATCH_UP_TIMEOUT);
        loop {
            let position = hub.position().filter(|position| position.epoch == epoch);
            let position = position.ok_or_else(|| failed("it is being listed again".to_owned()))?;
            let CachePosition { store, version, .. } = position;
            if version >= asked {
                hub.proved(started);
                return Ok((if is_first { Proof::Held } else { Proof::CaughtUp }, Fresh::Cache));
            }
            if listed.equals(&store) {
                return Ok((Proof::Equal, Fresh::State(ProvedState { epoch, store, version: asked })));
            }
            is_first = false;
            let left = caught_up_by.saturating_duration_since(Instant::now());
            let next = ResourceVersion::new(version.get().saturating_add(1)).unwrap_or(asked);
            if hub.reached(next, left).await.is_err() {
                let why = format!("the cache at version {version} differs from the cluster at {asked}");
                return Err((Proof::Behind, why));
            }
        }
    }

    /// The metadata of all objects, at the version that the cluster has reached. `None` if there
    /// are too many.
    async fn list(&self) -> Result<Option<Listed>, String> {
        let upstream = &self.context.upstream;
        let (doubt, target) = (upstream.doubt(), self.context.metadata_target(&self.served));
        let mut pages = MetadataPages::consistent(upstream.clone(), target).with_page_objects(OBJECTS_MAX);
        let page = pages.next_objects().await.map_err(|error| error.to_string())?;
        upstream.confirm(doubt).await.map_err(|error| error.to_string())?;
        let Some(version) = pages.version().filter(|_| pages.is_complete()) else { return Ok(None) };
        let objects = page.into_iter().flatten();
        let objects = objects.map(|ObjectMetadata { key, version, uid, .. }| (key, (uid, version)));
        Ok(Some(Listed { version, objects: objects.collect() }))
    }
}
