//! Subscribing: the waits of a watch before the hub takes it, and the check that the version of its
//! client is of this cluster's history at all.

use std::sync::Arc;

use kubefan_cache::{Backfill, Refusal};
use kubefan_common::planted::{self, Bug};
use kubefan_fanout::{
    NotSubscribed, Patience, Provided, ProvidedBackfill, Served, StreamWaker, SubscribeNeed, SubscribeOptions,
    Subscription,
};
use kubefan_model::{ResourceVersion, format::Format, selection::Selection};
use kubefan_telemetry::{metrics::Resume, traces};
use tokio::time::Instant;

use super::{NotReached, Reader};

/// The most backfills to read for one subscription: history may move past the end of each while it
/// is read.
const BACKFILLS_MAX: usize = 3;

impl Reader {
    /// Subscribes. The hub decides how; this fetches the hub's needs for it and asks again.
    ///
    /// # Errors
    /// [`Refusal::Expired`] if neither the cache nor upstream can resume from the version, and the
    /// options ask for no restart.
    pub async fn subscribe(
        &self,
        served: &Served,
        selection: Selection,
        format: Format,
        options: SubscribeOptions,
        waker: StreamWaker,
    ) -> Result<Subscription, Refusal> {
        let hub = &served.hub;
        let waker = Arc::new(waker);
        let mut provided = Provided::default();
        if let Some(version) = options.resumes_from() {
            provided.other_history = self.other_history(served, &options.cluster, version).await;
        }
        hub.index_for(&selection, options.holder).await;
        if let Some(version) = options.reads_history_after() {
            provided.replayed = hub.replay(&selection, &format, version, options.holder).await?;
        }
        let mut backfills = 0;
        let mut oldest = None;
        loop {
            match hub.try_subscribe(&selection, &format, &options, &mut provided, &waker) {
                Ok(subscription) => {
                    traces::note("kubefan.resume", subscription.way());
                    return Ok(subscription);
                }
                // The hub knows only its own history. A backfill may start at an older version.
                Err(NotSubscribed::Refused(Refusal::Expired(expired))) => {
                    traces::note("kubefan.resume", Resume::Expired.as_str());
                    return Err(expired.or_after(oldest).into());
                }
                Err(NotSubscribed::Refused(refusal)) => return Err(refusal),
                Err(NotSubscribed::Needs(SubscribeNeed::Permit)) => {
                    provided.permit = Some(Arc::new(hub.gate().acquire(options.holder).await?));
                }
                Err(NotSubscribed::Needs(SubscribeNeed::Replay(version))) => {
                    provided.replayed = hub.replay(&selection, &format, version, options.holder).await?;
                }
                Err(NotSubscribed::Needs(SubscribeNeed::Backfill(version))) => {
                    // A backfill takes its own permit while it is read.
                    provided.permit = None;
                    backfills += 1;
                    provided.backfill = match backfills {
                        ..=BACKFILLS_MAX => match self.backfill(served, &selection, &format, version).await {
                            Ok(backfill) => ProvidedBackfill::Read(backfill),
                            Err(Refusal::Expired(expired)) => {
                                oldest = Some(expired.oldest);
                                ProvidedBackfill::Unavailable
                            }
                            Err(refusal) => return Err(refusal),
                        },
                        _ => ProvidedBackfill::Unavailable,
                    };
                }
            }
        }
    }

    /// The events after `version`, read again from upstream.
    async fn backfill(
        &self,
        served: &Served,
        selection: &Selection,
        format: &Format,
        version: ResourceVersion,
    ) -> Result<Arc<Backfill>, Refusal> {
        // The state before an event decides whether an object enters or leaves, and whether its
        // projection has changed.
        let hides = format.only_changes() && !planted::is(Bug::BackfillSendsUnchanged);
        let compares = selection.membership_can_change() || hides;
        let needs_state = compares && !planted::is(Bug::BackfillWithoutMembership);
        let _wait = traces::wait("backfill");
        self.catalog.backfill(served, version, needs_state).await
    }

    /// Waits until the cache has reached `version`. Returns a refusal if the version belongs to
    /// another history: to another cluster, or beyond the version that this cluster has reached by
    /// upstream's answer.
    ///
    /// `None` also if the cache only lags, or if upstream could not be asked: then the hub refuses
    /// the version and counts that.
    async fn other_history(&self, served: &Served, cluster: &str, version: ResourceVersion) -> Option<Refusal> {
        if let Some(known) = served.hub.cluster()
            && !cluster.is_empty()
            && cluster != known
        {
            let message = format!(
                "version {} belongs to another cluster ({cluster:.64}); this cluster is {known}",
                version.whole()
            );
            return Some(Refusal::Rewritten(message));
        }
        let asked = Instant::now();
        let version = version.least_reached();
        // Upstream cannot answer instead.
        let NotReached { is_proved, .. } = self.reach(served, version, Patience::NoFallback).await.err()?;
        let reached =
            if is_proved { served.hub.head() } else { self.catalog.cluster_version(served, asked).await.ok() };
        let reached = reached.filter(|reached| *reached < version.whole())?;
        Some(Refusal::Rewritten(format!(
            "version {version} belongs to another history: the cluster has reached {} (etcd was restored from a backup, or \
             this is another cluster)",
            reached.whole()
        )))
    }
}
