//! Warm start: a cache starts with the state and history of a peer, after upstream has confirmed
//! the state.
//!
//! A rolling update restarts every replica. A replica that starts with a list has a state but no
//! history, so all its subscribers need backfills or snapshots at once. A peer has both. But a
//! wrong state would be served until the next relist, and a peer's certificate proves that it is a
//! peer, not that its state is right. So the state is compared with a list of upstream's metadata
//! first: object keys, resource versions, uids and labels. Any doubt ends in a cold start, which
//! costs time and nothing else.
//!
//! Spec, status and history are not compared. Their comparison would take the full list that a warm
//! start saves, and a resource version already names one content of an object. An answer from
//! another kubefan's cache does not count as a confirmation, because that cache may have the same
//! error.
//!
//! A state on disk ([`super::saved_resource`]) is compared in the same way, also if it is served
//! already because upstream did not answer.

use std::collections::BTreeMap;

use kubefan_cache::{CacheWriter, Store};
use kubefan_fanout::Served;
use kubefan_model::ResourceVersion;
use kubefan_peer::{CacheIdentity, Decoder, PeerError, Peers, ReceivedCache};
use kubefan_telemetry::metrics::WarmStart;
use kubefan_upstream::{UpstreamError, identity::IdentityError, metadata::MetadataPages};
use rand::Rng;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::{
    cached_schema::CachedSchema, list_scheduler::ListPriority, saved_states::OTHER_CLUSTER,
    upstream_context::CacheContext,
};

/// The most keys that a log line names.
const KEYS_MAX: usize = 10;

/// The reason why a cache starts cold.
#[derive(Debug, thiserror::Error)]
enum ColdStart {
    #[error(transparent)]
    Peer(#[from] PeerError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error("the schema cannot be compared with a peer's: /version, or the schema's hash in /openapi/v3, is not known")]
    UnknownSchema,
    #[error("this cluster cannot be told from others: neither the uid of kube-system nor a serving CA is known")]
    Unidentified,
    #[error("upstream's metadata could not be read: {0}")]
    Unchecked(#[from] UpstreamError),
    // Readers may see this text, and not every key.
    #[error(
        "the state at version {version} differs from upstream's: {count} objects differ, and {surplus} are missing \
         upstream"
    )]
    Different { version: ResourceVersion, count: usize, surplus: usize, keys: String },
    #[error("upstream has only reached version {reached}, and the state is at {version}")]
    Behind { version: ResourceVersion, reached: ResourceVersion },
    #[error("upstream cannot be asked for the state's version {version} any more: {reason}")]
    TooOld { version: ResourceVersion, reason: String },
    #[error("no warm start within {0:?} (tuning.peerTimeout)")]
    Timeout(std::time::Duration),
}

impl ColdStart {
    /// Turns missing objects into a state that may be right, because upstream's is a later one. An
    /// object that differs at an older version is a contradiction at any time.
    fn or_too_old(self, version: ResourceVersion) -> Self {
        match self {
            Self::Different { count: 0, .. } => Self::TooOld { version, reason: self.to_string() },
            error => error,
        }
    }

    /// The keys of some objects that differ.
    fn keys(&self) -> &str {
        if let Self::Different { keys, .. } = self { keys } else { "" }
    }

    fn result(&self) -> WarmStart {
        match self {
            Self::Peer(PeerError::NoOtherReplica) => WarmStart::Alone,
            Self::Peer(_) | Self::Identity(_) | Self::Unidentified | Self::UnknownSchema => WarmStart::Failed,
            Self::Unchecked(_) | Self::Different { .. } | Self::Behind { .. } | Self::TooOld { .. } => {
                WarmStart::Unconfirmed
            }
            Self::Timeout(_) => WarmStart::Timeout,
        }
    }
}

/// Fetches a peer's cache and confirms it. `None` for a cold start, after its reason was logged.
///
/// The time is that of the confirmation, if it proved that the state is current.
pub(super) async fn warm_start(
    context: &CacheContext,
    served: &Served,
    schema: &CachedSchema,
    random: &mut impl Rng,
) -> Option<(ReceivedCache, Option<Instant>)> {
    let peers = context.peers.as_ref()?;
    let started = Instant::now();
    let limit = peers.peer_timeout;
    let done = timeout(limit, fetch_confirmed(context, peers, served, schema, random));
    let done = done.await.unwrap_or(Err(ColdStart::Timeout(limit)));
    let resource = &served.gvr;
    let scope = served.scope.namespace();
    let result = done.as_ref().map_or_else(ColdStart::result, |_| WarmStart::Warm);
    served.hub.metrics().warm_start(result);
    match done {
        Ok((restored, proven_at)) => {
            let ReceivedCache { received, bytes, .. } = &restored;
            let version = restored.commit.version;
            let took = started.elapsed();
            info!(%resource, scope, version = %version.whole(), ?received, bytes, ?took, "warm start");
            Some((restored, proven_at))
        }
        // A cold start costs time and nothing else. At a first install no peer has anything to
        // send.
        Err(error @ ColdStart::Peer(_)) => {
            info!(%resource, scope, %error, "cold start");
            None
        }
        Err(error) => {
            warn!(%resource, scope, %error, keys = error.keys(), "cold start");
            None
        }
    }
}

async fn fetch_confirmed(
    context: &CacheContext,
    peers: &Peers,
    served: &Served,
    schema: &CachedSchema,
    random: &mut impl Rng,
) -> Result<(ReceivedCache, Option<Instant>), ColdStart> {
    let schema = schema.text(served).ok_or(ColdStart::UnknownSchema)?;
    context.upstream.confirm().await?;
    let wanted = CacheIdentity {
        cluster: context.upstream.proven_identity().ok_or(ColdStart::Unidentified)?,
        gvr: served.gvr.clone(),
        scope: served.scope.clone(),
        upstream_field_selector: context.upstream_field_selector.clone(),
        schema,
    };
    let decoder = || {
        let writer = CacheWriter::new(context.cache_compression);
        let limits = served.hub.limits();
        let parser = served.parser.clone();
        Decoder::new(wanted.clone(), limits, parser, writer, peers.peer_transfer_bytes_max, Instant::now())
    };
    let (peer, restored) = peers.fetch(&wanted, decoder, random).await?;
    info!(resource = %served.gvr, scope = served.scope.namespace(), %peer, "received a peer's cache; comparing it with upstream");
    let proven_at = confirm(context, served, &restored.commit.store, restored.commit.version).await?;
    Ok((restored, proven_at))
}

/// Relation of upstream to a saved state.
pub(super) enum SavedCheck {
    /// It is upstream's state at its version. The time is that of the proof that it is the current
    /// one, if it is.
    Confirmed(Option<Instant>),
    /// Upstream no longer has its version, and its present state differs, as it may.
    TooOld(String),
    /// It is not upstream's state.
    Refuted(String),
    /// Another cluster answers.
    OtherCluster(String),
    /// Upstream did not answer.
    Unanswered { message: String, cause: Option<UpstreamError> },
}

/// Compares a saved state of a cluster with upstream.
pub(super) async fn check_saved(
    context: &CacheContext,
    served: &Served,
    cluster: &str,
    store: &Store,
    version: ResourceVersion,
) -> SavedCheck {
    let checked = async {
        context.upstream.confirm().await?;
        if context.upstream.proven_identity().as_deref() != Some(cluster) {
            return Ok(None);
        }
        confirm(context, served, store, version).await.map(Some)
    };
    let error = match checked.await {
        Ok(Some(proven_at)) => return SavedCheck::Confirmed(proven_at),
        Ok(None) => return SavedCheck::OtherCluster(OTHER_CLUSTER.to_owned()),
        Err(error) => error,
    };
    let message = error.to_string();
    match error {
        ColdStart::Identity(IdentityError::OtherCluster { .. }) => SavedCheck::OtherCluster(message),
        ColdStart::Different { .. } | ColdStart::Behind { .. } => {
            warn!(resource = %served.gvr, scope = served.scope.namespace(), %error, keys = error.keys(), "the saved state is wrong");
            SavedCheck::Refuted(message)
        }
        ColdStart::TooOld { .. } => SavedCheck::TooOld(message),
        // The list decides what such a failure means.
        ColdStart::Unchecked(cause) if !cause.is_passing() => SavedCheck::TooOld(message),
        ColdStart::Identity(IdentityError::Unanswered(cause)) | ColdStart::Unchecked(cause) => {
            SavedCheck::Unanswered { message, cause: Some(cause) }
        }
        _ => SavedCheck::Unanswered { message, cause: None },
    }
}

/// Whether a correct state is also the current one.
enum StateAge {
    /// There were no changes since.
    Current,
    /// There were changes since, which the watch from the state's version will deliver.
    Outdated,
}

/// Confirms that upstream has exactly this state, and is the known cluster.
///
/// The first comparison is with the current state, because only it also proves the freshness of the
/// peer's state; then the result is the time of that proof. If there were changes since, the state
/// is compared at its own version, or with the current state again if upstream no longer has that
/// version.
async fn confirm(
    context: &CacheContext,
    served: &Served,
    store: &Store,
    version: ResourceVersion,
) -> Result<Option<Instant>, ColdStart> {
    let _permit = context.lists.acquire(ListPriority::First).await;
    let proven_at = compare_with_upstream(context, served, store, version).await?;
    // Another cluster's objects confirm nothing.
    context.upstream.confirm().await?;
    Ok(proven_at)
}

async fn compare_with_upstream(
    context: &CacheContext,
    served: &Served,
    store: &Store,
    version: ResourceVersion,
) -> Result<Option<Instant>, ColdStart> {
    let target = context.metadata_target(served);
    let current = || MetadataPages::consistent(context.upstream.clone(), target.clone());
    let asked_at = Instant::now();
    match compare(current(), store, version, true).await {
        Ok(StateAge::Current) => return Ok(Some(asked_at)),
        // Objects that are missing upstream may have been deleted since.
        Ok(StateAge::Outdated)
        | Err(ColdStart::Different { .. } | ColdStart::Unchecked(UpstreamError::Gone { .. })) => {}
        Err(error) => return Err(error),
    }
    let exact = MetadataPages::new(context.upstream.clone(), target.clone(), version);
    match compare(exact, store, version, false).await {
        Err(ColdStart::Unchecked(UpstreamError::Gone { .. })) => {
            compare(current(), store, version, false).await.map_err(|error| error.or_too_old(version))?
        }
        // The cluster may not have reached the version: etcd was restored from a backup.
        Err(ColdStart::Unchecked(error)) if is_about_the_version(&error) => {
            return Err(ColdStart::TooOld { version, reason: error.to_string() });
        }
        done => done?,
    };
    Ok(None)
}

/// Whether a list at an exact version fails because of that version, so that a repetition would
/// fail, too.
fn is_about_the_version(error: &UpstreamError) -> bool {
    !error.is_passing()
        || matches!(error, UpstreamError::VersionTooLarge { .. } | UpstreamError::Server { code: 500, .. })
}

/// Compares a state at `version` with a list of upstream's metadata.
///
/// An object that is newer upstream is not a difference, because the watch will deliver it. If
/// `stop_at_newer` is set, the first such object ends the comparison.
async fn compare(
    mut pages: MetadataPages,
    store: &Store,
    version: ResourceVersion,
    stop_at_newer: bool,
) -> Result<StateAge, ColdStart> {
    let mut found = 0;
    let mut count = 0;
    let mut keys = Vec::new();
    while let Some(page) = pages.next_objects().await? {
        for theirs in page {
            let ours = store.get(theirs.key.as_str());
            found += usize::from(ours.is_some());
            let same = ours.is_some_and(|ours| {
                let labels: BTreeMap<_, _> = ours.labels().collect();
                let their_labels = theirs.labels.iter().map(|(key, value)| (key.as_str(), value.as_str()));
                (ours.version(), ours.uid()) == (theirs.version, theirs.uid.as_str())
                    && labels.into_iter().eq(their_labels)
            });
            // A list at exactly `version` has no newer objects.
            let is_newer = theirs.version > version;
            if is_newer && stop_at_newer {
                return Ok(StateAge::Outdated);
            }
            if !same && !is_newer {
                count += 1;
                if keys.len() < KEYS_MAX {
                    keys.push(theirs.key.to_string());
                }
            }
        }
    }
    // A consistent list that has not reached `version` is of another history: etcd was restored.
    if let Some(reached) = pages.version().filter(|reached| *reached < version.whole()) {
        return Err(ColdStart::Behind { version, reached });
    }
    let surplus = store.len() - found.min(store.len());
    if count + surplus > 0 {
        return Err(ColdStart::Different { version, count, surplus, keys: keys.join(", ") });
    }
    Ok(StateAge::Current)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_are_not_told_the_keys_of_objects_that_differ() {
        let version = ResourceVersion::new(5).unwrap();
        let keys = "payments/merger".to_owned();
        let different = |count| ColdStart::Different { version, count, surplus: 1, keys: keys.clone() };
        assert_eq!(different(2).keys(), "payments/merger", "they are logged");
        for count in [0, 2] {
            let text = different(count).or_too_old(version).to_string();
            assert!(!text.contains("merger"), "{text}");
        }
        assert!(matches!(different(0).or_too_old(version), ColdStart::TooOld { .. }), "it may have been deleted since");
        assert!(matches!(different(1).or_too_old(version), ColdStart::Different { .. }), "no time explains it");
    }
}
