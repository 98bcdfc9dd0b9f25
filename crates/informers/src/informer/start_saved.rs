//! The start from a state that the process before has saved.
//!
//! Upstream must confirm the state. If it does, the watch continues from there, and so do streams
//! that are open already: while upstream does not answer, the state is served as stale. If nothing
//! contradicts a served state, but upstream no longer has its version, the cache is listed again,
//! as after any outage that was too long: a marked gap. Otherwise the state was wrong, its streams
//! end, and its file is removed.

use kubefan_cache::{Phase, RelistReason, StreamEnd};
use kubefan_fanout::CommitBatch;
use kubefan_telemetry::metrics::SavedStart;
use kubefan_upstream::fallback::Fallback;
use tokio::time::Instant;
use tracing::{info, warn};

use super::Informer;
use crate::{
    saved_resource::{self, UnconfirmedState},
    warm_start::{SavedCheck, check_saved},
};

impl Informer {
    /// Starts with the saved state, if there is one that upstream confirms. Otherwise the first
    /// step lists.
    pub(super) async fn start_from_file(&mut self, batch: &mut CommitBatch) {
        if self.context.saved.is_none() {
            return;
        }
        let Some(schema) = self.schema.text(&self.served) else {
            info!(resource = %self.served.gvr, "the saved state is not used: the schema is not known");
            return;
        };
        if let Some(state) = saved_resource::read(&self.context, &self.served, schema).await {
            self.start_saved(batch, state).await;
        }
    }

    /// Continues from a saved state as far as upstream confirms it. Otherwise the first step lists.
    pub(super) async fn start_saved(&mut self, batch: &mut CommitBatch, mut state: UnconfirmedState) {
        loop {
            self.wait_to_compare(&mut state).await;
            // Without a state, another cache has found another cluster, and has closed this one.
            let Some((store, version)) = state.content(&self.served.hub) else { return };
            let checked = check_saved(&self.context, &self.served, &state.cluster, &store, version).await;
            let hub = &self.served.hub;
            let metrics = &hub.metrics().saved_states;
            let resource = &self.served.gvr;
            let scope = self.served.scope.namespace();
            match checked {
                SavedCheck::Confirmed(proven_at) => {
                    let commit = state.commit.take();
                    if commit.is_none() && !hub.confirmed() {
                        return;
                    }
                    metrics.started(SavedStart::Confirmed);
                    info!(%resource, scope, version = %version.whole(), "the saved state is confirmed");
                    self.reflector.resume_from(version);
                    self.writer = state.writer;
                    if let Some(at) = proven_at {
                        hub.proved(at);
                    }
                    if let Some(commit) = commit {
                        batch.commit(commit, Instant::now());
                    }
                    return;
                }
                SavedCheck::TooOld(message) => {
                    metrics.started(SavedStart::Unconfirmed);
                    info!(%resource, scope, message, "the saved state cannot be confirmed; listing");
                    if state.is_served() {
                        hub.trouble(message);
                        self.reflector.relist(RelistReason::Expired);
                        self.writer = state.writer;
                    }
                    return;
                }
                SavedCheck::Refuted(message) => {
                    metrics.started(SavedStart::Unconfirmed);
                    if state.is_served() {
                        hub.close(Phase::Syncing, StreamEnd::Rewritten(message));
                    }
                    self.context.remove_saved(&self.served).await;
                    return;
                }
                SavedCheck::OtherCluster(message) => {
                    warn!(%resource, scope, message, "the saved state is of another cluster; listing");
                    if !state.is_served() {
                        metrics.started(SavedStart::Unconfirmed);
                    }
                    // A file of a cluster that was here before contradicts no other file.
                    if state.is_served() || self.context.upstream.is_doubted() {
                        self.context.drop_unconfirmed().await;
                    }
                    return;
                }
                SavedCheck::Unanswered { message, cause } => {
                    if state.is_served() {
                        hub.trouble(message);
                    } else if !state.serve(&self.context, &self.served, &message).await {
                        return;
                    }
                    self.retry.wait_after(cause.as_ref()).await;
                }
            }
        }
    }
    /// While the kubefan at `--upstream` is away, serves the state as stale and waits for the turn
    /// of this cache: each kubefan behind that one would compare its states at the apiserver.
    async fn wait_to_compare(&mut self, state: &mut UnconfirmedState) {
        let away = self.context.source.fallback().filter(|fallback| fallback.is_away());
        let Some(message) = away.map(Fallback::status) else { return };
        let is_served = state.is_served() || state.serve(&self.context, &self.served, &message).await;
        self.reflector.choose_server(is_served).await;
    }
}
