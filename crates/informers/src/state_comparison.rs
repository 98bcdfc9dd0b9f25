//! Proves the state of a small cache by one list of metadata.
//!
//! A consistent list returns keys, uids and versions at the cluster's version R. If they are those
//! of the cache at a version c, then the state at c is the state at R, and readers that came before
//! the list was sent may be served it. The comparison proves nothing else. In particular the cache
//! does not have all events up to R: an object that was created and deleted after c is in neither
//! state, and its events may still come. So the cache stays at c, as do its bookmarks and its
//! staleness, and the readers are served that very state ([`ReadSource::Proved`]).
//!
//! Upstream lists the reader's selection only, because it would read no more for the reader itself.
//! (A shard is the exception: its reader's list would have cost upstream as much as one of all
//! shards.) The proof is one of the selected objects only. Readers with equal selections share it,
//! and a list of all objects serves every reader.
//!
//! If the states differ, the cache is behind. It is compared again after each of its commits, for a
//! moment. A difference never causes a list of the cache: its own watch is on the way.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures::future::join_all;
use kubefan_cache::{Phase, Store};
use kubefan_common::when_planted;
use kubefan_fanout::{CachePosition, ProvedState, ReadSource, Served};
use kubefan_model::{ObjectKey, ResourceVersion, selection::Selection};
use kubefan_telemetry::metrics::Proof;
use kubefan_upstream::metadata::{MetadataPages, ObjectMetadata};
use tokio::time::{Instant, timeout};
use tracing::debug;

use super::{batched_requests::BatchedRequests, cached_schema::CachedSchema, upstream_context::CacheContext};

/// Maximum selections of one round. The readers of others wait for a bookmark, one for all.
const SELECTIONS_MAX: usize = 16;
/// The most objects of a cache that is proved by a list. Upstream reads and encodes all of them, so
/// for a larger cache an empty watch costs less.
const OBJECTS_MAX: usize = 1_000;
/// Time for upstream to answer the list. A bookmark arrives about as soon.
const LIST_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for a cache that differs to catch up.
const CATCH_UP_TIMEOUT: Duration = Duration::from_millis(500);
/// The shortest time between two lists of a cache. Each serves at least one reader that would
/// otherwise list all objects.
const LIST_INTERVAL: Duration = Duration::from_millis(25);
/// The shortest time between two lists after one that proved nothing. Meanwhile readers wait for a
/// bookmark.
const FAILED_LIST_INTERVAL: Duration = Duration::from_secs(1);

/// The comparisons of one cache.
pub(super) struct StateComparison {
    context: CacheContext,
    served: Served,
    schema: Arc<CachedSchema>,
    /// A round lists the selections of its readers, each once, and answers with the proved ones.
    rounds: BatchedRequests<Vec<Selection>, Arc<Vec<(Selection, ReadSource)>>>,
}

/// A list of metadata.
struct Listed {
    version: ResourceVersion,
    /// Uid and version of each object.
    objects: BTreeMap<ObjectKey, (String, ResourceVersion)>,
}

impl Listed {
    /// Whether a selection has exactly these objects in a cache.
    fn equals(&self, store: &Store, selection: &Selection) -> bool {
        let selected = store.iter().filter(|cached| selection.matches(cached));
        let selected = selected.map(|cached| (cached.key(), cached.uid(), cached.version()));
        let listed = self.objects.iter().map(|(key, (uid, version))| (key, uid.as_str(), *version));
        when_planted!(EqualSoFar => return selected.zip(listed).all(|(cached, listed)| cached == listed));
        selected.eq(listed)
    }
}

impl StateComparison {
    pub(super) fn new(context: CacheContext, served: Served, schema: Arc<CachedSchema>) -> Arc<Self> {
        Arc::new(Self { context, served, schema, rounds: BatchedRequests::default() })
    }

    /// Waits for a comparison of the selected objects that starts after this call. `None` if it
    /// proved nothing, if the cache is too large, or if there are too many other selections.
    pub(super) async fn prove(self: &Arc<Self>, selection: &Selection) -> Option<ReadSource> {
        if self.schema.awaits_version() || self.served.hub.position()?.store.len() > OBJECTS_MAX {
            return None;
        }
        // A kubefan's cache proves nothing here, and asking the apiserver would cost it a list from
        // each kubefan of the lower tier.
        if self.context.source.is_kubefan() {
            return None;
        }
        // Upstream may not know shards. One list proves all of them.
        let selection = &selection.in_all_shards();
        let mut is_compared = false;
        let place = self.rounds.join(LIST_INTERVAL, |selections| {
            let is_in = selections.iter().any(|other| self.serves(other, selection));
            if !is_in && selections.len() < SELECTIONS_MAX {
                selections.push(selection.clone());
            }
            is_compared = is_in || selections.last() == Some(selection);
        })?;
        if place.must_run {
            tokio::spawn(self.clone().run());
        }
        if !is_compared {
            return None;
        }
        // The round under way, and the next one.
        let proved = place.answer(2 * (LIST_TIMEOUT + CATCH_UP_TIMEOUT)).await?;
        proved.iter().find(|(other, _)| self.serves(other, selection)).map(|(_, source)| source.clone())
    }

    /// Whether a proof of one selection also proves another.
    fn serves(&self, proved: &Selection, selection: &Selection) -> bool {
        proved == selection || proved.is_everything_in(&self.served.scope)
    }

    /// Runs one comparison after the other until there are no more readers.
    async fn run(self: Arc<Self>) {
        while let Some(round) = self.rounds.begin(LIST_INTERVAL).await {
            let everything = |selection: &&Selection| selection.is_everything_in(&self.served.scope);
            let compared = match round.demand.iter().find(everything) {
                Some(everything) => std::slice::from_ref(everything),
                None => &round.demand,
            };
            let proved: Vec<_> = join_all(compared.iter().map(|selection| self.try_selection(selection))).await;
            let proved: Vec<_> = proved.into_iter().flatten().collect();
            let is_failed = proved.is_empty();
            round.answer(Arc::new(proved));
            if is_failed {
                self.rounds.pause(Instant::now() + FAILED_LIST_INTERVAL, Arc::default());
            }
        }
    }

    async fn try_selection(&self, selection: &Selection) -> Option<(Selection, ReadSource)> {
        let started = Instant::now();
        let result = self.compare(selection, started).await;
        let label = match &result {
            Ok((proof, _)) | Err((proof, _)) => *proof,
        };
        self.served.hub.metrics().proof(label, started.elapsed());
        if let Err((_, why)) = &result {
            debug!(resource = %self.served.gvr, scope = self.served.scope.namespace(), why, "not compared");
        }
        result.ok().map(|(_, source)| (selection.clone(), source))
    }

    async fn compare(&self, selection: &Selection, started: Instant) -> Result<(Proof, ReadSource), (Proof, String)> {
        let hub = &self.served.hub;
        let failed = |why: String| (Proof::Failed, why);
        // Without its own watch the cache would not notice that upstream was restored from a
        // backup.
        let is_synced = *hub.phase().borrow() == Phase::Synced;
        let from = hub.position().filter(|_| is_synced);
        let CachePosition { epoch, version: from, .. } =
            from.ok_or_else(|| failed("the cache has no watch at the moment".to_owned()))?;
        let listed = timeout(LIST_TIMEOUT, self.list(selection)).await;
        let listed = listed.map_err(|_| failed(format!("no list within {LIST_TIMEOUT:?}")))?.map_err(failed)?;
        let Some(listed) = listed else {
            return Err((Proof::Behind, format!("upstream has more than {OBJECTS_MAX} objects")));
        };
        let asked = listed.version;
        if asked < from.whole() {
            return Err(failed(format!(
                "the cluster is at version {asked}, below the cache's version {}",
                from.whole()
            )));
        }
        let mut is_first = true;
        let caught_up_by = Instant::now() + CATCH_UP_TIMEOUT;
        loop {
            let position = hub.position().filter(|position| position.epoch == epoch);
            let position = position.ok_or_else(|| failed("it is being listed again".to_owned()))?;
            let CachePosition { store, version, .. } = position;
            // Upstream has the objects in another encoding, and a bookmark brings it.
            if self.schema.awaits_version() {
                return Err(failed("the objects of a new schema wait for the next version".to_owned()));
            }
            let equals = || listed.equals(&store, selection);
            // The cache may have a part of the changes at that version.
            let is_part = !version.is_end() && version.is_at(asked);
            if version >= asked && (!is_part || equals()) {
                hub.proved(started);
                return Ok((if is_first { Proof::Held } else { Proof::CaughtUp }, ReadSource::Cache));
            }
            if equals() {
                let proved = ProvedState { epoch, store, cached_at: version, version: asked.end() };
                return Ok((Proof::Equal, hub.serve_proved(proved)));
            }
            is_first = false;
            let left = caught_up_by.saturating_duration_since(Instant::now());
            let next = version.followed_by(version).unwrap_or_else(|| version.above());
            if hub.reached(next, left).await.is_err() {
                let why = format!("the cache at version {} differs from the cluster at {asked}", version.whole());
                return Err((Proof::Behind, why));
            }
        }
    }

    /// Returns the metadata of all selected objects, at the version that the cluster has reached.
    /// `None` if there are too many.
    async fn list(&self, selection: &Selection) -> Result<Option<Listed>, String> {
        let upstream = &self.context.upstream;
        upstream.confirm_if_doubted().await.map_err(|error| error.to_string())?;
        let target = self.context.metadata_target(&self.served).narrowed_to(selection, &self.served.fields);
        let mut pages = MetadataPages::consistent(upstream.clone(), target).with_page_objects(OBJECTS_MAX);
        let page = pages.next_objects().await.map_err(|error| error.to_string())?;
        upstream.confirm().await.map_err(|error| error.to_string())?;
        let Some(version) = pages.version().filter(|_| pages.is_complete()) else { return Ok(None) };
        let objects = page.into_iter().flatten();
        let objects = objects.map(|ObjectMetadata { key, version, uid, .. }| (key, (uid, version)));
        Ok(Some(Listed { version, objects: objects.collect() }))
    }
}
