//! Freshness proofs: when may a consistent read be answered from a cache?
//!
//! **Problem.** Kubernetes promises that a list without a `resourceVersion` shows every write that
//! completed before the request. A cache follows a watch, so it may be behind, and its own version
//! does not reveal that: the version of a quiet resource is that of its last change, while every
//! Lease renewal moves the cluster's version. "The cache is at version 100 and the cluster at 200"
//! may mean that nothing happened to this resource, or that a hundred events are still on their
//! way.
//!
//! **Proof.** First, a consistent list of one name that no object has (cheap: one look-up) returns
//! the cluster's version R. A cache at or above R is fresh. Otherwise the cache's own watch has a
//! moment to reach R, which is enough on a busy resource. Otherwise a second, short watch starts at
//! the cache's version. kube-apiserver sends a bookmark shortly before a watch times out; the
//! look-up has moved its watch cache to R, so the bookmark can be that recent. A bookmark at or
//! above R proves that there are no events up to R other than those which the short watch returned.
//! When the cache has received these as well, it may advance to the bookmark's version. Only the
//! informer advances it, in the middle of its own watch, because a list in progress may be older. A
//! bookmark below R comes from an apiserver that lags, and proves nothing.
//!
//! **Why not forward every consistent read?** Then upstream pays for each reader: decoding,
//! filtering and encoding all objects. A proof costs one empty list and at most one empty watch,
//! for any number of readers. **Why not wait for the next bookmark of the cache's own watch?**
//! kube-apiserver sends them about once a minute. **Why a list for small caches?** One list of
//! their metadata proves the state at once ([`super::state_comparison`]). It does not advance the
//! cache, so a reader that names a version still needs a bookmark. **Why not trust the age of the
//! last event?** Age proves nothing: the connection may be delayed or the apiserver behind.
//!
//! **Cost limits.** An answer proves nothing about writes after its request was sent, so a reader
//! waits for a proof that starts after it arrived. One proof serves all readers that wait for it,
//! and the proofs of a cache run one after the other, at most one per second, or 40 per second
//! while the look-up alone is enough. If upstream serves the watch but sends no bookmark, readers
//! stop waiting for bookmarks for a while, else such an apiserver would delay every read. Outages
//! do not count as missing bookmarks: when upstream is back, reads are proved again.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kubefan_cache::{Phase, Refusal, Update};
use kubefan_common::{
    planted::{self, Bug},
    unless_planted,
};
use kubefan_fanout::{CachePosition, Hub, OWN_WATCH_WAIT, Patience, ReadSource, Served};
use kubefan_model::{ResourceVersion, selection::Selection};
use kubefan_telemetry::metrics::{Proof, WatchPurpose};
use kubefan_upstream::{UpstreamError, identity::IdentityError, reflector::ReflectorEvent};
use tokio::{
    sync::Notify,
    time::{Instant, timeout},
};
use tracing::debug;

use super::{
    batched_requests::{BatchTicket, BatchedRequests},
    bookmark_pause::{BookmarkPause, ProofFailure, ProofResult},
    cached_schema::CachedSchema,
    missing_right::MissingRight,
    state_comparison::StateComparison,
    upstream_context::{CacheContext, VersionError},
};

/// The shortest time between the starts of two proofs, if the first one needed a watch or failed.
const PROOF_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest time between two proofs if a look-up was enough. Each look-up is an empty list that
/// saves upstream at least one full list. The interval is shorter than the wait of
/// [`Patience::AtOnce`], so that these readers reach the next proof.
const LOOK_UP_INTERVAL: Duration = Duration::from_millis(25);
/// A resource without an update for this time is quiet. For a quiet resource a look-up alone proves
/// nothing, because the next event is far off. The look-up would also take upstream up to 100 ms,
/// because the apiserver's watch cache must first request progress from etcd.
const QUIET_AFTER: Duration = Duration::from_millis(100);
/// The time limit of one proof. The bookmark arrives after 1 to 2.25 seconds.
const PROOF_TIMEOUT: Duration = Duration::from_secs(4);
/// The time limit of a proof behind another kubefan, whose own proof may wait for one that is under
/// way there.
const PROOF_TIMEOUT_BEHIND: Duration = Duration::from_secs(9);
/// Maximum wait for the bookmark of a watch that is open. The watch itself asks upstream for a
/// shorter timeout.
const BOOKMARK_TIMEOUT: Duration = Duration::from_secs(3);
/// A watch that ends without a bookmark after at least this time counts as a failed wait. A shorter
/// one has delayed no reader.
const LONG_WAIT: Duration = Duration::from_secs(1);
/// The freshness proofs of one cache.
pub(super) struct Prover {
    context: CacheContext,
    served: Served,
    /// Shared with the self-check, which may be off.
    missing_right: Arc<MissingRight>,
    /// Whether this cache is ever proved.
    is_enabled: bool,
    comparison: Arc<StateComparison>,
    /// The rounds demand the greatest patience of their readers.
    rounds: BatchedRequests<Patience, ProofResult>,
    bookmarks: Mutex<BookmarkPause>,
    /// The last result of a short watch, for the informer, which alone advances the cache.
    empty_range: Mutex<Option<EmptyRange>>,
    range_found: Notify,
}

/// Two versions without an event of the resource in between. A cache that has every event up to
/// `from` also has every event up to `to`.
#[derive(Debug, Clone, Copy)]
pub(super) struct EmptyRange {
    /// The epoch of the cache.
    epoch: u64,
    /// The last event, or the start of the short watch.
    from: ResourceVersion,
    /// The version of the bookmark.
    to: ResourceVersion,
    /// Time at which the bookmark was read.
    pub(super) received: Instant,
}

impl Prover {
    /// Creates a prover that proves nothing if `is_enabled` is false or if upstream has no watch
    /// cache of the resource.
    pub(super) fn new(
        context: CacheContext,
        served: Served,
        schema: Arc<CachedSchema>,
        missing_right: Arc<MissingRight>,
        is_enabled: bool,
    ) -> Arc<Self> {
        let is_enabled = is_enabled && served.gvr.has_watch_cache();
        let comparison = StateComparison::new(context.clone(), served.clone(), schema);
        Arc::new(Self {
            context,
            served,
            missing_right,
            is_enabled,
            comparison,
            rounds: Default::default(),
            bookmarks: Default::default(),
            empty_range: Default::default(),
            range_found: Default::default(),
        })
    }

    fn bookmarks(&self) -> MutexGuard<'_, BookmarkPause> {
        self.bookmarks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a proof of the state that starts after this call. Upstream may list the metadata
    /// of the `listed` objects for it.
    pub(super) async fn prove(
        self: &Arc<Self>,
        listed: Option<&Selection>,
        patience: Patience,
    ) -> Result<ReadSource, Refusal> {
        if let Some(selection) = listed.filter(|_| self.is_enabled) {
            // A look-up costs less than a list, and is enough for a busy resource.
            if !self.is_quiet() {
                match self.advance(Patience::AtOnce).await {
                    Err(_) if patience > Patience::AtOnce => {}
                    proved => return proved.map(|()| ReadSource::Cache),
                }
            }
            if let Some(source) = self.comparison.prove(selection).await {
                return Ok(source);
            }
        }
        self.advance(patience).await.map(|()| ReadSource::Cache)
    }

    /// Waits for a proof of the cache that starts after this call.
    pub(super) async fn advance(self: &Arc<Self>, patience: Patience) -> Result<(), Refusal> {
        let resource = &self.served.gvr;
        let unproved = |reason: &str| Refusal::Unavailable(format!("{resource} is not proved to be fresh: {reason}"));
        if !self.is_enabled {
            return Err(unproved("upstream answers its consistent reads; resourceVersion=0 accepts any state"));
        }
        let pause = match patience {
            Patience::Bookmark => self.bookmarks().remaining(Instant::now()),
            Patience::AtOnce | Patience::NoFallback => None,
        };
        let patience = pause.map_or(patience, |_| Patience::AtOnce);
        let Some(place) = self.join(patience) else {
            return Err(match pause {
                Some(left) => unproved(&format!(
                    "upstream sent no bookmark in the last attempt; the next attempt is in {left:.0?} at the latest"
                )),
                None => unproved("its last update is too old for an immediate proof, or the last proof too recent"),
            });
        };
        match place.answer(self.wait_limit(patience)).await {
            Some(Ok(_)) => Ok(()),
            Some(Err(failure)) => Err(unproved(failure.reason())),
            None => Err(unproved("upstream did not answer in time")),
        }
    }

    /// Returns the time limit of one proof.
    fn proof_timeout(&self) -> Duration {
        if self.context.source.is_grpc_now() { PROOF_TIMEOUT_BEHIND } else { PROOF_TIMEOUT }
    }

    /// Returns the maximum wait of a reader for its proof, including the proof under way.
    fn wait_limit(&self, patience: Patience) -> Duration {
        match patience {
            Patience::AtOnce => Duration::from_millis(40),
            Patience::Bookmark | Patience::NoFallback => 2 * self.proof_timeout(),
        }
    }

    fn is_quiet(&self) -> bool {
        self.served.hub.status().age.is_none_or(|age| age > QUIET_AFTER)
    }

    /// Joins the next proof. `None` if the reader would wait without a chance of success.
    fn join(self: &Arc<Self>, patience: Patience) -> Option<BatchTicket<ProofResult>> {
        if patience == Patience::AtOnce && self.is_quiet() {
            return None;
        }
        let place = self.rounds.join(self.wait_limit(patience), |greatest| *greatest = patience.max(*greatest))?;
        if place.must_run {
            tokio::spawn(self.clone().run());
        }
        Some(place)
    }

    /// Runs one proof after the other until there are no more readers.
    async fn run(self: Arc<Self>) {
        while let Some(round) = self.rounds.begin(PROOF_INTERVAL).await {
            let started = Instant::now();
            let patience = round.demand;
            let is_attempt = patience > Patience::AtOnce && self.bookmarks().begin(started);
            let limit = self.proof_timeout();
            let proof = timeout(limit, self.run_one(is_attempt || patience == Patience::NoFallback)).await;
            let proof = proof.unwrap_or_else(|_| Err(ProofFailure::Failed(format!("no proof within {limit:?}"))));
            let label = proof.as_ref().map_or_else(ProofFailure::result, |proof| *proof);
            self.served.hub.metrics().proof(label, started.elapsed());
            if matches!(label, Proof::Held | Proof::CaughtUp) || planted::is(Bug::FailedProofsInARow) {
                self.rounds.next_due(started + LOOK_UP_INTERVAL);
            }
            // A reader that upstream cannot serve instead does not make a pause longer.
            if is_attempt || matches!(label, Proof::Bookmark) {
                self.bookmarks().end(&proof, Instant::now());
            }
            if let Err(failure) = &proof {
                let why = failure.reason();
                debug!(resource = %self.served.gvr, scope = self.served.scope.namespace(), why, "not proved");
            }
            round.answer(proof);
        }
    }

    /// Proves that the cache is at or above the version that the cluster had when this was called.
    async fn run_one(&self, wait_for_bookmark: bool) -> ProofResult {
        let hub = &self.served.hub;
        let failed = ProofFailure::Failed;
        // While the cache's own watch is down, upstream is ahead in any case.
        let synced = *hub.phase().borrow() == Phase::Synced;
        let Some(CachePosition { epoch, version: from, .. }) = hub.position().filter(|_| synced) else {
            return Err(failed("the cache has no watch at the moment".to_owned()));
        };
        if self.context.source.is_fallen_back() && !hub.status().message.is_empty() {
            // It would cost the apiserver a list per proof, and the cache could not follow.
            return Err(failed("the cache waits for its turn at the apiserver".to_owned()));
        }
        let asked_at = Instant::now();
        let asked = self.context.cluster_version(&self.context.target(&self.served)).await;
        match &asked {
            Err(VersionError::Request(error @ UpstreamError::Forbidden { .. })) => {
                self.missing_right.list_is_forbidden(&self.served, &error.to_string());
            }
            Ok(_) => self.missing_right.list_is_allowed(),
            Err(_) => {}
        }
        let asked = asked.map_err(|error| failed(error.to_string()))?;
        if asked < from.whole() {
            return Err(failed(format!(
                "the cluster is at version {asked}, below the cache's version {}",
                from.whole()
            )));
        }
        let result = if self.reached(epoch)? >= asked {
            Proof::Held
        } else if hub.reached(asked, OWN_WATCH_WAIT).await.is_ok() {
            Proof::CaughtUp
        } else if !wait_for_bookmark {
            return Err(ProofFailure::Behind(format!(
                "the cache is at version {}, and the cluster at {asked}",
                self.reached(epoch)?.whole()
            )));
        } else if self.context.source.is_grpc_now() {
            // The other kubefan has the version already, and sends a bookmark within a second.
            let _ = hub.reached(asked, self.proof_timeout()).await;
            Proof::CaughtUp
        } else {
            tokio::select! {
                biased;
                _ = hub.reached(asked, PROOF_TIMEOUT) => Proof::CaughtUp,
                range = self.find_empty_range(epoch, asked) => {
                    self.publish(range?);
                    let _ = hub.reached(asked, PROOF_TIMEOUT).await;
                    Proof::Bookmark
                }
            }
        };
        if self.reached(epoch)? < asked {
            return Err(failed("the cache's own watch does not follow".to_owned()));
        }
        hub.proved(asked_at);
        Ok(result)
    }

    /// Watches from the cache's version until a bookmark at or above `asked`, then waits until the
    /// cache has received every event of that watch.
    async fn find_empty_range(&self, epoch: u64, asked: ResourceVersion) -> Result<EmptyRange, ProofFailure> {
        let source = self.context.source.current();
        let unconfirmed = |error: IdentityError| ProofFailure::Failed(error.to_string());
        source.confirm_if_doubted().await.map_err(unconfirmed)?;
        let position = self.served.hub.position().filter(|position| position.epoch == epoch);
        let CachePosition { version, store, .. } = position.ok_or_else(listed_again)?;
        let start = version.read_from();
        let watch = self.context.reflector_for(&source, &self.served, WatchPurpose::Probe);
        let mut watch = watch.for_backfill(start, false);
        let mut from = version;
        let no_bookmark = || format!("upstream sent no bookmark up to version {asked}");
        let mut opened: Option<Instant> = None;
        let (to, received) = loop {
            // Until the watch is open, only the limit of the whole proof applies.
            let limit = opened.map_or(PROOF_TIMEOUT, |at| BOOKMARK_TIMEOUT.saturating_sub(at.elapsed()));
            let step = timeout(limit, watch.step()).await.map_err(|_| ProofFailure::NoBookmark(no_bookmark()))?;
            match step.map_err(|error| ProofFailure::Failed(error.to_string()))? {
                ReflectorEvent::Update { update: Update::Event(kind, object), .. } => {
                    let is_known = object.version().is_at(version) && store.has_applied(kind, &object);
                    let next = if is_known { from } else { from.followed_by(object.version()).unwrap_or(from) };
                    unless_planted!(ProofForgetsEvents => from = next);
                }
                ReflectorEvent::Update { update: Update::Bookmark(version), received } if version >= asked => {
                    break (version, received);
                }
                ReflectorEvent::Update { .. } => {}
                ReflectorEvent::Proved { .. } => {}
                ReflectorEvent::Watching { .. } => opened = Some(Instant::now()),
                // The watch reached an apiserver that is behind, or this one sends no bookmarks.
                ReflectorEvent::Ended { .. } => {
                    let is_long = opened.is_some_and(|at| at.elapsed() >= LONG_WAIT);
                    return Err(if is_long {
                        ProofFailure::NoBookmark(no_bookmark())
                    } else {
                        ProofFailure::Behind(no_bookmark())
                    });
                }
            }
        };
        source.confirm().await.map_err(unconfirmed)?;
        let _ = self.served.hub.reached(from, PROOF_TIMEOUT).await;
        Ok(EmptyRange { epoch, from, to, received })
    }

    /// Returns the version of the cache, if it is still in this epoch.
    fn reached(&self, epoch: u64) -> Result<ResourceVersion, ProofFailure> {
        let here = self.served.hub.position().filter(|ahead| ahead.epoch == epoch);
        here.map(|ahead| ahead.version).ok_or_else(listed_again)
    }

    fn publish(&self, range: EmptyRange) {
        *self.empty_range.lock().unwrap_or_else(PoisonError::into_inner) = Some(range);
        self.range_found.notify_one();
    }

    /// Waits for the next range that a proof has found. For the informer only. Cancel-safe.
    pub(super) async fn next_empty_range(&self) -> EmptyRange {
        loop {
            if let Some(range) = self.empty_range.lock().unwrap_or_else(PoisonError::into_inner).take() {
                return range;
            }
            self.range_found.notified().await;
        }
    }
}

fn listed_again() -> ProofFailure {
    ProofFailure::Failed("it is being listed again".to_owned())
}

impl EmptyRange {
    /// Returns the version that the hub's cache may advance to. `None` if it is not inside the
    /// range.
    pub(super) fn target_for(&self, hub: &Hub) -> Option<ResourceVersion> {
        let CachePosition { epoch, version, .. } = hub.position()?;
        (epoch == self.epoch && (self.from..self.to).contains(&version)).then_some(self.to)
    }
}
