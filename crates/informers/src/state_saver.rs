//! Saves the states of the configured caches, one after the other, by one task.
//!
//! A state is written as a whole, so large caches cost many bytes. The task pauses after each file
//! for as long as the limit of bytes demands, also if the file could not be completed. State and
//! history are copied in parts under the hub's lock, by reference; encoding and writing happen on a
//! thread that may block.
//!
//! A cache without changes needs a new file only for the time of its last proof. Such files have a
//! small share of the bytes, and no change waits for them.
//!
//! A state that follows from a saved one and is not confirmed is not saved: its file is on disk.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, SystemTime},
};

use kubefan_cache::Phase;
use kubefan_model::{GroupVersionResource, Media, ResourceVersion};
use kubefan_peer::{
    CacheIdentity, Encoder, copy_cache,
    saved::{SaveFailure, SavedError, StateHead, StateName},
};
use kubefan_upstream::discovery::SchemaFingerprint;
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{cache_entry::Cache, registry::Registry, saved_states::SavedStates};

/// A file is also written for a new proof alone, after this many intervals.
const PROOF_INTERVALS: u32 = 5;
/// The share of the bytes for these files is one in this many.
const PROOF_SHARE: u64 = 10;

/// The limits of saving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SaveLimits {
    /// The time between two looks at the caches.
    pub interval: Duration,
    /// The bytes written in a minute, on average.
    pub bytes_per_minute: u64,
}

/// Saves the states of a registry.
pub struct StateSaver {
    registry: Arc<Registry>,
    states: Arc<SavedStates>,
    limits: SaveLimits,
    written: HashMap<StateName, Written>,
    /// Reasons that are logged already, by cache.
    reported: HashMap<String, String>,
    /// Time of the next file for a proof alone.
    next_proof_at: Instant,
}

/// A file of this process.
struct Written {
    /// The resource in the configuration.
    name: String,
    content: SavedContent,
    bytes: u64,
    at: Instant,
}

/// The facts about a state that tell whether its file is up to date.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SavedContent {
    /// Epoch and version of the last change.
    last_change: (u64, ResourceVersion),
    /// Time of the last proof.
    proven_at: Option<Instant>,
}

/// The news for which a file is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum News {
    Change,
    Proof,
}

/// The reason why a state is not saved now.
#[derive(Debug, thiserror::Error)]
enum NotSaved {
    /// As it should be.
    #[error("{0}")]
    Skipped(&'static str),
    /// Operators should know it before they need the file.
    #[error("{0}")]
    Impossible(&'static str),
    #[error(transparent)]
    Failed(#[from] SaveFailure),
}

impl From<SavedError> for NotSaved {
    fn from(error: SavedError) -> Self {
        Self::Failed(SaveFailure { bytes: 0, error })
    }
}

impl StateSaver {
    /// Saves the states of `registry`. `None` if there is no directory for them.
    pub fn new(registry: &Arc<Registry>, limits: SaveLimits) -> Option<Self> {
        let states = registry.context.saved.clone()?;
        let registry = registry.clone();
        let next_proof_at = Instant::now();
        Some(Self { registry, states, limits, written: HashMap::new(), reported: HashMap::new(), next_proof_at })
    }

    /// Saves states until `last` is cancelled, and then each one once more. No save is cut off.
    pub async fn run(mut self, last: CancellationToken) {
        let bytes_per_minute = self.limits.bytes_per_minute;
        let for_proofs = bytes_per_minute / PROOF_SHARE;
        while last.run_until_cancelled(sleep(self.limits.interval)).await.is_some() {
            for cache in self.registry.caches.in_order() {
                let bytes = self.save_due(&cache, News::Change).await;
                let pause = pause_after(bytes, bytes_per_minute - for_proofs);
                if last.run_until_cancelled(sleep(pause)).await.is_none() {
                    break;
                }
            }
            if !last.is_cancelled() && Instant::now() >= self.next_proof_at {
                let bytes = self.save_a_proof().await;
                self.next_proof_at = Instant::now() + pause_after(bytes, for_proofs);
            }
            self.remove_unwanted().await;
        }
        // There may not be time for all. Small files first, and changes before proofs.
        let mut caches = self.registry.caches.in_order();
        caches.sort_by_key(|cache| self.last_file(cache).map_or(0, |written| written.bytes));
        for news in [News::Change, News::Proof] {
            for cache in &caches {
                self.save_due(cache, news).await;
            }
        }
        self.remove_unwanted().await;
    }

    /// Writes the oldest file that only lacks a newer proof. Returns the number of bytes written.
    async fn save_a_proof(&mut self) -> u64 {
        let mut old = Vec::new();
        for cache in self.registry.caches.in_order() {
            if let Some(written) = self.last_file(&cache)
                && written.at.elapsed() >= self.limits.interval * PROOF_INTERVALS
            {
                old.push((written.at, cache));
            }
        }
        old.sort_by_key(|(at, _)| *at);
        for (_, cache) in old {
            let bytes = self.save_due(&cache, News::Proof).await;
            if bytes > 0 {
                return bytes;
            }
        }
        0
    }

    fn last_file(&self, cache: &Cache) -> Option<&Written> {
        self.written.get(&StateName::of(&cache.served.gvr, &cache.served.scope).ok()?)
    }

    /// Saves a cache if its file lacks these news. Returns the number of bytes written.
    async fn save_due(&mut self, cache: &Cache, news: News) -> u64 {
        let hub = &cache.served.hub;
        let resource = &cache.served.gvr;
        let scope = cache.served.scope.namespace();
        let title = format!("{resource} {scope}");
        match self.save(cache, news).await {
            Ok(bytes) => {
                hub.metrics().saved_states.saved(bytes);
                debug!(%resource, scope, bytes, "saved the state");
                self.reported.remove(&title);
                bytes
            }
            Err(NotSaved::Skipped(because)) => {
                debug!(%resource, scope, because, "the state is not saved");
                0
            }
            Err(error) => {
                let mut bytes = 0;
                if let NotSaved::Failed(failure) = &error {
                    hub.metrics().saved_states.failed();
                    bytes = failure.bytes;
                }
                let text = error.to_string();
                if self.reported.get(&title) == Some(&text) {
                    debug!(%resource, scope, text, "the state is still not saved");
                } else {
                    warn!(%resource, scope, text, "the state is not saved");
                    self.reported.insert(title, text);
                }
                bytes
            }
        }
    }

    /// Whether the states of a cache are saved.
    fn is_saved(&self, cache: &Cache) -> Result<(), NotSaved> {
        let served = &cache.served;
        if cache.on_demand() || served.parser.media() != Media::Json {
            return Err(NotSaved::Skipped("only configured JSON caches are saved"));
        }
        if is_of_secrets(&served.gvr) && !self.states.dir().is_encrypted() {
            return Err(NotSaved::Skipped("Secrets are saved only with --state-key-file"));
        }
        Ok(())
    }

    async fn save(&mut self, cache: &Cache, news: News) -> Result<u64, NotSaved> {
        self.is_saved(cache)?;
        let served = &cache.served;
        let hub = &served.hub;
        // Before the state: the proof holds for what follows, too.
        let proven_at = hub.proven_at();
        let last_change = hub.last_change().ok_or(NotSaved::Skipped("there is none"))?;
        let content = SavedContent { last_change, proven_at };
        let name = StateName::of(&served.gvr, &served.scope)?;
        if !is_due(self.written.get(&name).map(|written| written.content), content, news) {
            return Err(NotSaved::Skipped("its file is up to date"));
        }
        if hub.is_unconfirmed() {
            return Err(NotSaved::Skipped("it is a saved state that is not confirmed"));
        }
        let (head, identity) = self.describe(cache, proven_at)?;
        // It pins state as a snapshot does.
        let permit = hub.gate().acquire(None).await;
        let _permit = permit.map_err(|_| NotSaved::Impossible("memory is short, or many snapshots are sent"))?;
        let copied = copy_cache(hub).await.ok_or(NotSaved::Skipped("another history has begun"))?;
        if hub.is_unconfirmed() {
            return Err(NotSaved::Skipped("it is a saved state that is not confirmed"));
        }
        if cache.schema.text(served).as_ref() != Some(&identity.schema) {
            return Err(NotSaved::Skipped("its schema is changing"));
        }
        let (position, history) = copied;
        let encoder = Encoder::new(&identity, position.store, history, Instant::now());
        let parts = encoder.limited_to(self.states.bytes_max());
        let dir = self.states.dir().clone();
        let file = name.clone();
        let saved = spawn_blocking(move || dir.save(&file, &head, parts)).await;
        let bytes = saved.map_err(|_| NotSaved::Skipped("its thread has ended"))??;
        self.written.insert(name, Written { name: cache.name.clone(), content, bytes, at: Instant::now() });
        Ok(bytes)
    }

    /// Returns the head of a cache's file, and the identity of the cache.
    fn describe(&self, cache: &Cache, proven_at: Option<Instant>) -> Result<(StateHead, CacheIdentity), NotSaved> {
        let context = &self.registry.context;
        let served = &cache.served;
        let unknown = || NotSaved::Impossible("the hash of its schema in /openapi/v3, or /version, is not known");
        let fingerprint = cache.schema.of_all_objects();
        let Some(SchemaFingerprint { server_version: Some(server_version), schema_hash: Some(schema_hash) }) =
            fingerprint
        else {
            return Err(unknown());
        };
        let identity = CacheIdentity {
            cluster: context.upstream.proven_identity().ok_or(NotSaved::Impossible(
                "this cluster cannot be told from others: neither the uid of kube-system nor a serving CA is known",
            ))?,
            gvr: served.gvr.clone(),
            scope: served.scope.clone(),
            upstream_field_selector: context.upstream_field_selector.clone(),
            schema: cache.schema.text(served).ok_or_else(unknown)?,
        };
        let now = self.states.now();
        let head = StateHead {
            endpoint: context.endpoint(),
            cluster_uid: context.upstream.cluster(),
            name: cache.name.clone(),
            kind: served.hub.resource().kind.clone(),
            list_kind: served.list_kind.to_string(),
            namespaced: served.namespaced,
            selectable_fields: served.fields.declared(&served.gvr),
            server_version,
            schema_hash,
            saved_at_millis: millis(now),
            proven_at_millis: proven_at.and_then(|at| now.checked_sub(at.elapsed())).map(millis),
        };
        Ok((head, identity))
    }

    /// Removes the files that no cache of the configuration has. Nothing is removed before upstream
    /// has answered: the caches are not known.
    async fn remove_unwanted(&mut self) {
        let registry = &self.registry;
        let upstream = &registry.context.upstream;
        if upstream.identity().is_none() || upstream.is_assumed() {
            return;
        }
        let caches = registry.caches.in_order();
        let is_kept = |cache: &Cache| {
            let phase = *cache.served.hub.phase().borrow();
            self.is_saved(cache).is_ok() && !matches!(phase, Phase::Forbidden | Phase::NotFound)
        };
        let kept = caches.iter().filter(|cache| is_kept(cache));
        let kept = kept.filter_map(|cache| StateName::of(&cache.served.gvr, &cache.served.scope).ok());
        let mut kept: HashSet<StateName> = kept.collect();
        // A resource that is being set up has no cache.
        let is_set_up = |name: &str| {
            let is_missing = registry.uncached.get(name).is_some_and(|reason| reason.phase == Phase::NotFound);
            let is_configured = registry.configured.borrow().iter().any(|resource| resource.name == name);
            is_configured && !is_missing && caches.iter().all(|cache| cache.name != name)
        };
        let found = self.states.found().await.iter().map(|(file, found)| (file, &found.head.name));
        let written = self.written.iter().map(|(file, written)| (file, &written.name));
        kept.extend(found.chain(written).filter(|(_, name)| is_set_up(name)).map(|(file, _)| file.clone()));
        self.written.retain(|file, _| kept.contains(file));
        let dir = self.states.dir().clone();
        match spawn_blocking(move || dir.keep_only(|file| kept.contains(file))).await {
            Ok(Ok(count)) if count > 0 => info!(count, "removed saved states that are no longer wanted"),
            Ok(Err(error)) => debug!(%error, "old saved states could not be removed"),
            Ok(Ok(_)) | Err(_) => {}
        }
    }
}

fn is_of_secrets(gvr: &GroupVersionResource) -> bool {
    gvr.group.is_empty() && gvr.resource == "secrets"
}

/// Whether a file with the content `written` lacks these news.
fn is_due(written: Option<SavedContent>, content: SavedContent, news: News) -> bool {
    let Some(written) = written else { return true };
    match news {
        News::Change => written.last_change != content.last_change,
        News::Proof => written.last_change != content.last_change || content.proven_at > written.proven_at,
    }
}

/// Returns the pause after a file, with which the limit is kept on average.
fn pause_after(bytes: u64, bytes_per_minute: u64) -> Duration {
    let millis = u128::from(bytes) * 60_000 / u128::from(bytes_per_minute.max(1));
    Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX))
}

fn millis(at: SystemTime) -> u64 {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn content(version: u64, proven_at: Option<Instant>) -> SavedContent {
        SavedContent { last_change: (1, ResourceVersion::new(version).unwrap()), proven_at }
    }

    #[tokio::test(start_paused = true)]
    async fn a_proof_alone_is_no_change() {
        let first = content(5, Some(Instant::now()));
        advance(Duration::from_secs(60)).await;
        let is_due = |content| [News::Change, News::Proof].map(|news| is_due(Some(first), content, news));
        assert_eq!(is_due(first), [false, false], "nothing is new");
        assert_eq!(is_due(content(5, Some(Instant::now()))), [false, true]);
        assert_eq!(is_due(content(6, first.proven_at)), [true, true]);
        assert_eq!(is_due(SavedContent { last_change: (2, first.last_change.1), ..first }), [true, true], "history");
        assert!(super::is_due(None, first, News::Change), "there is no file");
    }

    #[test]
    fn the_pauses_keep_the_limit_of_bytes() {
        assert_eq!(pause_after(0, 100), Duration::ZERO);
        assert_eq!(pause_after(50, 100), Duration::from_secs(30));
        assert_eq!(pause_after(300, 100), Duration::from_secs(180), "a file larger than the limit");
        assert!(pause_after(u64::MAX, 1) > Duration::from_secs(1 << 40));
    }

    #[test]
    fn only_the_secrets_of_the_core_group_are_secrets() {
        assert!(is_of_secrets(&GroupVersionResource::new("", "v1", "secrets")));
        assert!(!is_of_secrets(&GroupVersionResource::new("", "v1", "pods")));
    }
}
