//! The start of a cache from the state that the process before has saved.
//!
//! While upstream does not answer, a saved state is served as stale. Nothing tells then which
//! cluster is behind the address, so the address and the CA of the apiserver must be those of the
//! file, and the cluster of the file counts as the known one: see [`super::saved_states`].

use std::sync::Arc;

use kubefan_cache::{CacheWriter, Commit, Store};
use kubefan_fanout::{Hub, SavedState, Served};
use kubefan_model::{ResourceVersion, fields::FieldTable};
use kubefan_peer::{
    CacheIdentity, Decoder, ReceivedCache,
    saved::{RestoredState, SavedError, StateHead, StateName},
};
use kubefan_telemetry::metrics::SavedStart;
use kubefan_upstream::discovery::{ResourceInfo, SchemaFingerprint};
use tokio::{task::spawn_blocking, time::Instant};
use tracing::{info, warn};

use super::{
    discovered::DiscoveredResource,
    saved_states::{FoundFile, newness},
    upstream_context::CacheContext,
};

/// A state from a file, which upstream has not confirmed.
pub(super) struct UnconfirmedState {
    /// The writer that continues from it.
    pub(super) writer: CacheWriter,
    /// The state. `None` once the hub serves it.
    pub(super) commit: Option<Commit>,
    head: StateHead,
    /// The cluster that it is of.
    pub(super) cluster: String,
}

/// A resource with saved states, as discovery would describe it.
pub(super) struct SavedResource {
    pub(super) discovered: DiscoveredResource,
    /// The schema of the caches that may be served together, as text.
    pub(super) schema: String,
}

/// Finds the resource with this configured name among the files of this apiserver.
pub(super) async fn find(context: &CacheContext, name: &str) -> Option<SavedResource> {
    let states = context.saved.as_ref()?;
    let ours = context.endpoint();
    let uid = states.cluster_at(&ours).await?;
    let is_usable = |head: &StateHead| head.endpoint == ours && head.cluster_uid.as_deref() == Some(uid);
    let files = states.found().await.values();
    let of_name = files.filter(|file| file.head.name == name && is_usable(&file.head));
    let now = states.now();
    let FoundFile { head, identity } = of_name.max_by_key(|file| newness(&file.head, now))?;
    let info = ResourceInfo {
        gvr: identity.gvr.clone(),
        kind: head.kind.clone(),
        namespaced: head.namespaced,
        verbs: ["get", "list", "watch"].map(str::to_owned).into(),
    };
    let schema = SchemaFingerprint {
        server_version: Some(head.server_version.clone()),
        schema_hash: Some(head.schema_hash.clone()),
    };
    let discovered = DiscoveredResource {
        info,
        fields: Arc::new(FieldTable::new(&identity.gvr, head.namespaced, &head.selectable_fields)),
        list_kind: head.list_kind.as_str().into(),
        schema: Some(schema),
    };
    Some(SavedResource { discovered, schema: identity.schema.clone() })
}

/// Reads the saved state of a cache with this schema. `None` if there is none, or if it cannot be
/// used, after the reason was logged.
pub(super) async fn read(context: &CacheContext, served: &Served, schema: String) -> Option<UnconfirmedState> {
    let states = context.saved.as_ref()?;
    let resource = &served.gvr;
    let scope = served.scope.namespace();
    let name = StateName::of(&served.gvr, &served.scope).ok()?;
    let Some(FoundFile { identity, .. }) = states.found().await.get(&name) else {
        info!(%resource, scope, "there is no saved state");
        return None;
    };
    let cluster = identity.cluster.clone();
    let wanted = CacheIdentity {
        cluster: cluster.clone(),
        gvr: served.gvr.clone(),
        scope: served.scope.clone(),
        upstream_field_selector: context.upstream_field_selector.clone(),
        schema,
    };
    let dir = states.dir().clone();
    let now = states.now();
    let bytes_max = states.bytes_max();
    let pack = context.cache_compression;
    let limits = served.hub.limits();
    let parser = served.parser.clone();
    let restore = move || {
        dir.restore(&name, |head, theirs| {
            wanted.agrees_with(theirs)?;
            // The records are older by the time since they were written.
            let elapsed = head.elapsed(now).unwrap_or_default();
            let written_at = Instant::now().checked_sub(elapsed).unwrap_or_else(Instant::now);
            Ok(Decoder::new(wanted, limits, parser, CacheWriter::new(pack), bytes_max, written_at))
        })
    };
    let refused = |error: &dyn std::fmt::Display| {
        served.hub.metrics().saved_states.started(SavedStart::Refused);
        warn!(%resource, scope, %error, "the saved state cannot be used");
    };
    // A few at a time: each state takes memory before it can be measured.
    let _turn = states.reads.acquire().await.ok()?;
    let Ok(_permit) = served.hub.gate().acquire(None).await else {
        refused(&"memory is short");
        return None;
    };
    match spawn_blocking(restore).await {
        Ok(Ok(RestoredState { head, received: ReceivedCache { commit, writer, received, bytes }, .. })) => {
            info!(%resource, scope, version = %commit.version.whole(), ?received, bytes, "read the saved state");
            Some(UnconfirmedState { writer, commit: Some(commit), head, cluster })
        }
        Ok(Err(SavedError::Absent)) => None,
        Ok(Err(error)) => {
            refused(&error);
            None
        }
        // Its runtime stops, or it has panicked, which is a defect.
        Err(error) => {
            refused(&error);
            None
        }
    }
}

impl UnconfirmedState {
    /// Returns objects and version. `None` if the hub was closed, because another cluster answers.
    pub(super) fn content(&self, hub: &Hub) -> Option<(Store, ResourceVersion)> {
        match &self.commit {
            Some(commit) => Some((commit.store.clone(), commit.version)),
            None => hub.is_unconfirmed().then(|| hub.state())?,
        }
    }

    /// Whether the hub serves it, or did until it was closed.
    pub(super) fn is_served(&self) -> bool {
        self.commit.is_none()
    }

    /// Serves it as stale, for the reason in `message`. Returns false if it may not be served
    /// without upstream, after the reason was logged.
    pub(super) async fn serve(&mut self, context: &CacheContext, served: &Served, message: &str) -> bool {
        let Some(states) = &context.saved else { return false };
        let ours = context.endpoint();
        let uid = states.cluster_at(&ours).await;
        let refused = |because: &str| {
            served.hub.metrics().saved_states.started(SavedStart::Refused);
            warn!(resource = %served.gvr, scope = served.scope.namespace(), because, "the saved state is not served without the apiserver");
            false
        };
        if self.head.endpoint != ours {
            return refused(&format!("it is of {}, and this is {ours}", self.head.endpoint));
        }
        let Some(uid) = uid.filter(|uid| self.head.cluster_uid.as_deref() == Some(*uid)) else {
            return refused("its cluster is not known, or another one was here later");
        };
        let Some(commit) = self.commit.take() else { return true };
        let age = self.head.age(states.now());
        let version = commit.version;
        let proven_at = age.and_then(|age| Instant::now().checked_sub(age));
        let state = SavedState { commit, proven_at, message: message.to_owned() };
        if !states.serve(&context.upstream, uid, &served.hub, state) {
            return refused("another cluster answers");
        }
        served.hub.metrics().saved_states.started(SavedStart::Served);
        warn!(resource = %served.gvr, scope = served.scope.namespace(), version = %version.whole(), ?age, "serving a saved state until the apiserver confirms it");
        true
    }
}

#[cfg(test)]
mod tests;
