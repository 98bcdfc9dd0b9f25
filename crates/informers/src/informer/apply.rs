//! Applies updates of the reflector to the cache.
//!
//! The order of the steps matters: readers that wait for the first state also need the time of its
//! list, and a proof must not hold for the state before its update.

use kubefan_cache::{Commit, RelistReason, Update, UpdateError};
use kubefan_fanout::CommitBatch;
use tokio::{task::yield_now, time::Instant};
use tracing::{info, warn};

use super::{
    Informer,
    informer_state::{Event, ListBegin},
};
use crate::stop_reason::Stopped;

/// Objects to pack before yielding to other tasks: a few milliseconds of work.
const PREPARE_OBJECTS: usize = 100;

/// The times at which the cache was current, as far as an update proves them.
#[derive(Clone, Copy)]
struct Proofs {
    /// Time of upstream's proof in the update.
    proven_at: Option<Instant>,
    /// Time at which the list that ends with the update was requested, which may be long ago. The
    /// list is consistent as of then.
    listed_at: Option<Instant>,
}

impl Informer {
    /// Applies an update, and publishes the commit that it leads to. Returns the reason if the
    /// informer has to stop.
    pub(super) async fn apply(
        &mut self,
        batch: &mut CommitBatch,
        update: Update,
        received: Instant,
    ) -> Option<Stopped> {
        let begun_because = if let Update::ListBegin { reason } = update { Some(reason) } else { None };
        if self.state.must_confirm(&update) && !self.confirm(batch, begun_because).await {
            return None;
        }
        let is_list_end = matches!(update, Update::ListEnd(_));
        let is_event = matches!(update, Update::Event(..));
        let proofs = self.proofs_in(&update, received);
        self.note_received(batch, &update, received);
        let is_first_state = self.writer.version().is_none();
        if is_list_end {
            // A list may remove many objects, so other tasks get a turn in between.
            while self.writer.prepare(PREPARE_OBJECTS) {
                yield_now().await;
            }
        }
        let applied = self.schema.write(&mut self.writer, &self.planned_relist, update);
        if is_list_end {
            self.note_list_end();
        }
        // A new watch repeats the events of a version that may have more of them. Repeated events
        // prove nothing new.
        let is_repeated = is_event && matches!(applied, Ok(None));
        let is_applied = applied.is_ok() && !is_repeated;
        if is_applied && begun_because.is_none() {
            self.retry.served();
        }
        match applied {
            Ok(Some(commit)) => {
                if is_first_state {
                    self.note_first_state(&commit, proofs);
                }
                batch.commit(commit, received);
            }
            Ok(None) => {}
            Err(error) => self.list_after(batch, &error).await,
        }
        // After the commit: a proved state is served at once, and the proof of the update does not
        // hold for the state before.
        if is_applied {
            self.note_proofs(proofs);
        }
        let (objects, bytes) = self.writer.size_with_list();
        self.quota.as_ref()?.record(&self.served.gvr, objects, bytes).err().map(Stopped::from)
    }

    fn proofs_in(&self, update: &Update, received: Instant) -> Proofs {
        let source = self.reflector.source();
        let begin = self.state.list_begin().filter(|_| matches!(update, Update::ListEnd(_)));
        // A list that only repeats the objects for a new schema proves nothing. Over gRPC, a
        // snapshot may be as old as the state of the kubefan that sent it.
        let begin = begin.filter(|begin| begin.reason != RelistReason::SchemaChanged && !source.is_grpc());
        Proofs { proven_at: source.proof_in(update, received), listed_at: begin.map(|begin| begin.requested_at) }
    }

    /// Notes an update that is not applied yet.
    fn note_received(&mut self, batch: &mut CommitBatch, update: &Update, received: Instant) {
        match update {
            &Update::ListBegin { reason } => {
                let begin = ListBegin { reason, requested_at: received };
                self.follow(Event::ListBegun { begin, at: Instant::now() });
            }
            Update::ListItem(_) => self.follow(Event::ItemReceived(Instant::now())),
            // Its permit is held until it is applied.
            Update::ListEnd(_) => {}
            _ => self.follow(Event::Updated),
        }
        let hub = &self.served.hub;
        match update {
            &Update::ListBegin { reason } => {
                hub.listing(reason);
                self.planned_relist.list_begun(received);
                info!(resource = %self.served.gvr, media = self.served.parser.media().as_str(), reason = reason.as_str(), "listing");
            }
            Update::Event(kind, _) => hub.metrics().received(*kind),
            Update::WentBack { reached } => {
                let message = format!("the cluster is at version {reached}, below one that it had sent; listing again");
                warn!(resource = %self.served.gvr, message);
                batch.wake();
                hub.trouble(message);
            }
            _ => {}
        }
    }

    /// Notes that a list has ended, after its end was applied.
    fn note_list_end(&mut self) {
        self.follow(Event::ListEnded);
        self.served.hub.warn(&self.reflector.warnings());
        if self.state.has_watch() {
            self.served.hub.live();
        }
    }

    /// Notes the first state, before its commit.
    fn note_first_state(&self, commit: &Commit, proofs: Proofs) {
        info!(resource = %self.served.gvr, scope = self.served.scope.namespace(), media = self.served.parser.media().as_str(), version = %commit.version.whole(), objects = commit.store.len(), bytes = commit.store.json_bytes(), "synced");
        // Readers that have waited for the first state also find the time of its list.
        if let Some(at) = proofs.listed_at {
            self.served.hub.listed(at);
        }
    }

    /// Publishes the proofs of an update that is applied.
    fn note_proofs(&mut self, Proofs { proven_at, listed_at }: Proofs) {
        if let Some(at) = proven_at {
            self.retry.watched();
            self.served.hub.proved(at);
        }
        if let Some(at) = listed_at {
            self.served.hub.listed(at);
        }
    }

    /// Requests a list after an update that does not fit. Applying it would repeat or reorder
    /// events, and only a list restores the true state.
    async fn list_after(&mut self, batch: &mut CommitBatch, error: &UpdateError) {
        warn!(resource = %self.served.gvr, %error, "listing again");
        batch.wake();
        self.served.hub.trouble(error.to_string());
        self.relist(RelistReason::OutOfOrder);
        self.wait_after(None).await;
    }
}
