//! Confirms that the right cluster answers: before an update is applied, and before a request if
//! the last check failed.
//!
//! Changes of another cluster must never reach the cache, so everything that was received before a
//! check is discarded if the check fails. Without a check before the next request, each attempt
//! would cost the apiserver a list or a watch that is discarded again.

use std::time::Duration;

use kubefan_cache::RelistReason;
use kubefan_fanout::CommitBatch;
use kubefan_upstream::identity::IdentityError;
use tokio::time::Instant;

use super::{
    Informer,
    informer_state::{Discard, Event},
};

/// The wait before objects are read again for a new schema, if that failed.
const REREAD_INTERVAL: Duration = Duration::from_secs(60);

impl Informer {
    /// Whether upstream may be asked for a list or a watch. If it is not confirmed, this waits.
    ///
    /// After an answer of another cluster, to any cache, it is confirmed first: the next answer
    /// could come from there, and its check from the right one.
    pub(super) async fn may_request(&mut self, batch: &mut CommitBatch) -> bool {
        if !self.state.checks_first(self.reflector.source().is_doubted()) {
            return true;
        }
        let Err(error) = self.reflector.source().confirm().await else {
            self.follow(Event::Confirmed);
            return true;
        };
        // Without a list in progress there is nothing to discard, and the reflector keeps the
        // reason of the list that it is about to request.
        if self.state.list_begin().is_some() {
            self.discard(None);
        }
        self.wait_unconfirmed(batch, &error).await;
        false
    }

    /// Whether the last update is from the cluster of this cache. If it is not, or if upstream does
    /// not confirm it, the update must be discarded: this waits, and the reflector reads it again.
    /// `begins` is the reason of a list that has just started.
    pub(super) async fn confirm(&mut self, batch: &mut CommitBatch, begins: Option<RelistReason>) -> bool {
        let Err(error) = self.reflector.source().confirm().await else {
            self.follow(Event::Confirmed);
            return true;
        };
        self.discard(begins);
        self.wait_unconfirmed(batch, &error).await;
        false
    }

    /// Discards the known state and the list in progress. The next step lists, for `reason`, also
    /// if a check fails before it: if that discarded a list for the schema, the watch would
    /// continue.
    pub(super) fn relist(&mut self, reason: RelistReason) {
        self.reflector.relist(reason);
        self.follow(Event::Relisted);
    }

    /// Plans to read the objects again for the schema, after that has failed.
    pub(super) fn plan_reread(&self) {
        self.planned_relist.request(Instant::now() + REREAD_INTERVAL, RelistReason::SchemaChanged);
    }

    /// Discards everything that the reflector has received since the last commit.
    fn discard(&mut self, begins: Option<RelistReason>) {
        match self.state.discard(begins, self.writer.version()) {
            Discard::Resume(version) => self.reflector.resume_from(version),
            Discard::ResumeAndReread(version) => {
                self.reflector.resume_from(version);
                self.plan_reread();
            }
            Discard::Relist(reason) => self.reflector.relist(reason),
        }
    }

    /// Waits after a check that failed.
    async fn wait_unconfirmed(&mut self, batch: &mut CommitBatch, error: &IdentityError) {
        // Over gRPC only an answer to a request names the cluster.
        self.follow(Event::Unconfirmed { checks_first: self.reflector.source().http().is_some() });
        let hub = &self.served.hub;
        batch.wake();
        hub.metrics().watch_restart(error.reason());
        self.failures.log_unconfirmed(&self.served, error);
        hub.trouble(error.to_string());
        let source = self.reflector.source();
        if self.context.upstream.is_doubted() || !source.is_kubefan() && source.is_doubted() {
            // It may be this cache alone that asks.
            self.context.drop_unconfirmed().await;
        }
        let cause = if let IdentityError::Unanswered(cause) = error { Some(cause) } else { None };
        self.wait_after(cause).await;
    }
}
