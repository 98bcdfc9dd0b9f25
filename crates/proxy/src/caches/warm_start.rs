//! The begin of a cache with what a peer holds, once upstream has confirmed it.
//!
//! A wrong state would be served for as long as nobody lists again, so keys, versions, uids and labels are compared with a list of upstream's
//! metadata first; any doubt ends in a cold start. The rest of what a version names, spec and status, and the history before it are believed
//! of a peer: it has proved by certificate to be one, and to compare them would cost the list that a warm start is to save.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rand::Rng;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::{
    informer::Shared,
    registry::{CacheId, Registry},
};
use crate::{
    cache::{CacheWriter, Store},
    fanout::Served,
    peer::{CacheIdentity, Decoder, Offer, PeerError, Peers, Restored, Source, schema_text},
    telemetry::metrics::WarmStart,
    upstream::{UpstreamError, discovery::SchemaFingerprint, identity::IdentityError, metadata::MetadataPages},
};
use kubefan_model::{GroupVersionResource, Media, ResourceVersion, Scope};

/// How many keys a log line names.
const KEYS_MAX: usize = 10;

/// Why a cache begins cold.
#[derive(Debug, thiserror::Error)]
enum ColdStart {
    #[error(transparent)]
    Peer(#[from] PeerError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(
        "nobody can tell whether a peer reads the same: /version, or the schema's hash in /openapi/v3, is not known"
    )]
    UnknownSchema,
    #[error("nothing tells this cluster from others: neither the uid of kube-system nor a serving CA")]
    Unidentified,
    #[error("upstream's metadata could not be read: {0}")]
    Unchecked(#[from] UpstreamError),
    #[error("the peer's state at version {version} is not upstream's: {count} objects differ, among them {keys}")]
    Different { version: ResourceVersion, count: usize, keys: String },
    #[error("none within {0:?} (--peer-timeout)")]
    Timeout(std::time::Duration),
}

impl ColdStart {
    fn result(&self) -> WarmStart {
        match self {
            Self::Peer(PeerError::Alone) => WarmStart::Alone,
            Self::Peer(_) | Self::Identity(_) | Self::Unidentified | Self::UnknownSchema => WarmStart::Failed,
            Self::Unchecked(_) | Self::Different { .. } => WarmStart::Unconfirmed,
            Self::Timeout(_) => WarmStart::Timeout,
        }
    }
}

/// The schema that the objects held were read by.
#[derive(Default)]
pub(super) struct HeldSchema(Mutex<Known>);

#[derive(Default)]
struct Known {
    held: Option<SchemaFingerprint>,
    /// The one of the list to come.
    next: Option<SchemaFingerprint>,
}

impl HeldSchema {
    pub(super) fn new(held: Option<SchemaFingerprint>) -> Self {
        Self(Mutex::new(Known { held, next: None }))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From here on everything is listed again because of another one.
    pub(super) fn changes_to(&self, next: SchemaFingerprint) {
        self.known().next = Some(next);
    }

    /// A list is complete.
    pub(super) fn listed(&self) {
        let mut known = self.known();
        if let Some(next) = known.next.take() {
            known.held = Some(next);
        }
    }

    /// As peers tell it to each other; `None` where it is not known, or what is held is of an older one.
    pub(super) fn text(&self, served: &Served) -> Option<String> {
        let known = self.known();
        let kind = &served.hub.resource().kind;
        let held = known.held.as_ref().filter(|_| known.next.is_none());
        schema_text(kind, &served.fields, held)
    }
}

/// What a peer has given and upstream has confirmed, and as of when that is the present, if it is known to be; `None` for a cold start,
/// about which everything was said.
pub(super) async fn warm_start(
    shared: &Shared,
    served: &Served,
    schema: &HeldSchema,
    random: &mut impl Rng,
) -> Option<(Restored, Option<Instant>)> {
    let peers = shared.peers.as_ref()?;
    let (begun, limit) = (Instant::now(), peers.peer_timeout);
    let done = timeout(limit, take_over(shared, peers, served, schema, random));
    let done = done.await.unwrap_or(Err(ColdStart::Timeout(limit)));
    let (resource, scope) = (&served.gvr, served.scope.namespace());
    let result = done.as_ref().map_or_else(ColdStart::result, |_| WarmStart::Warm);
    served.hub.metrics().warm_start(result);
    match done {
        Ok((restored, proven_at)) => {
            let Restored { received, bytes, .. } = &restored;
            let (version, took) = (restored.commit.version, begun.elapsed());
            info!(%resource, scope, %version, ?received, bytes, ?took, "warm start");
            Some((restored, proven_at))
        }
        Err(error @ ColdStart::Peer(PeerError::Alone)) => {
            info!(%resource, scope, %error, "cold start");
            None
        }
        Err(error) => {
            warn!(%resource, scope, %error, "cold start");
            None
        }
    }
}

async fn take_over(
    shared: &Shared,
    peers: &Peers,
    served: &Served,
    schema: &HeldSchema,
    random: &mut impl Rng,
) -> Result<(Restored, Option<Instant>), ColdStart> {
    let schema = schema.text(served).ok_or(ColdStart::UnknownSchema)?;
    shared.upstream.confirm(shared.upstream.doubt()).await?;
    let wanted = CacheIdentity {
        cluster: shared.upstream.proven_identity().ok_or(ColdStart::Unidentified)?,
        gvr: served.gvr.clone(),
        scope: served.scope.clone(),
        upstream_field_selector: shared.upstream_field_selector.clone(),
        schema,
    };
    let decoder = || {
        let writer = CacheWriter::new(shared.cache_compression);
        let (limits, parser) = (served.hub.limits(), served.parser.clone());
        Decoder::new(wanted.clone(), limits, parser, writer, peers.peer_transfer_bytes_max, Instant::now())
    };
    let (peer, restored) = peers.fetch(&wanted, decoder, random).await?;
    info!(resource = %served.gvr, scope = served.scope.namespace(), %peer, "taken over; comparing it with upstream");
    let doubt = shared.upstream.doubt();
    let proven_at = check(shared, served, &restored.commit.store, restored.commit.version).await?;
    // What another cluster has, confirms nothing.
    shared.upstream.confirm(doubt).await?;
    Ok((restored, proven_at))
}

/// What upstream's present says of a state.
enum Present {
    /// Nothing has happened to it since.
    Same,
    /// Something has, which the watch from its version on brings at once.
    Newer,
}

/// Whether upstream has exactly this, and as of when it is the present, if it is: that alone proves how fresh it is, because a state at an
/// old version is as right as it is old. Where something has happened since, it is compared at its own version; where upstream no longer
/// holds that, with the present all the same.
async fn check(
    shared: &Shared,
    served: &Served,
    store: &Store,
    version: ResourceVersion,
) -> Result<Option<Instant>, ColdStart> {
    let target = shared.metadata_target(served);
    let present = || MetadataPages::consistent(shared.upstream.clone(), target.clone());
    let asked_at = Instant::now();
    match compare(present(), store, version, true).await {
        Ok(Present::Same) => return Ok(Some(asked_at)),
        // What is missing may have been deleted since.
        Ok(Present::Newer) | Err(ColdStart::Different { .. } | ColdStart::Unchecked(UpstreamError::Gone { .. })) => {}
        Err(error) => return Err(error),
    }
    let exact = MetadataPages::new(shared.upstream.clone(), target.clone(), version);
    match compare(exact, store, version, false).await {
        Err(ColdStart::Unchecked(UpstreamError::Gone { .. })) => compare(present(), store, version, false).await?,
        done => done?,
    };
    Ok(None)
}

/// Newer versions of objects are no difference: the watch will bring them. The first of them may end the comparison.
async fn compare(
    mut pages: MetadataPages,
    store: &Store,
    version: ResourceVersion,
    ends_at_newer: bool,
) -> Result<Present, ColdStart> {
    let (mut found, mut count, mut keys) = (0, 0, Vec::new());
    while let Some(page) = pages.next_told().await? {
        for told in page {
            let held = store.get(told.key.as_str());
            found += usize::from(held.is_some());
            let same = held.is_some_and(|held| {
                let labels: BTreeMap<_, _> = held.labels().collect();
                let told_labels = told.labels.iter().map(|(key, value)| (key.as_str(), value.as_str()));
                (held.version(), held.uid()) == (told.version, told.uid.as_str()) && labels.into_iter().eq(told_labels)
            });
            // In a list at exactly `version` there is none.
            let is_to_come = told.version > version;
            if is_to_come && ends_at_newer {
                return Ok(Present::Newer);
            }
            if !same && !is_to_come {
                count += 1;
                if keys.len() < KEYS_MAX {
                    keys.push(told.key.to_string());
                }
            }
        }
    }
    let surplus = store.len() - found.min(store.len());
    if surplus > 0 {
        keys.push(format!("{surplus} that upstream does not have"));
    }
    match count + surplus {
        // A cluster that has not reached the version has another history.
        0 if pages.version() >= Some(version) => Ok(Present::Same),
        0 => Ok(Present::Newer),
        count => Err(ColdStart::Different { version, count, keys: keys.join(", ") }),
    }
}

/// The caches of a registry, for its peers.
impl Source for Arc<Registry> {
    fn offer(&self, gvr: &GroupVersionResource, scope: &Scope) -> Option<Offer> {
        let id = CacheId { gvr: gvr.clone(), scope: scope.clone(), media: Media::Json };
        let cache = self.caches.get(&id)?.clone();
        Some(Offer {
            hub: cache.served.hub.clone(),
            upstream_field_selector: self.shared.upstream_field_selector.clone(),
            schema: cache.schema.text(&cache.served),
        })
    }

    fn cluster(&self) -> Option<String> {
        self.shared.upstream.proven_identity()
    }
}
