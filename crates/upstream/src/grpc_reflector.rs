//! Lists and watches one resource in one scope at the next kubefan, over gRPC: the counterpart of
//! [`Reflector`](super::Reflector), with the same steps.
//!
//! # Simpler than over HTTP
//!
//! One call sends the state and its changes, so there are no pages and no second request after a
//! list. A break loses nothing: the next call names the last version and its cluster, and kubefan
//! itself finds out whether that version is of another history. A connection that is half open is
//! found by the pings of HTTP/2.
//!
//! # Differences
//!
//! **Marked spans.** After a relist or a lag the next kubefan sends a difference between two states
//! and marks it. Its events are collected, and become one update at its end mark. If the stream
//! breaks inside, they are dropped, and the next call starts again from the version before: half a
//! difference is a state that never was.
//!
//! **Age.** An event that arrives now may be old, because the next kubefan may have lost its own
//! upstream. So neither events nor bookmarks prove anything here. Instead the next kubefan is asked
//! how old its own proof is, when a watch opens and every [`FRESHNESS_INTERVAL`] after that. The
//! answer counts once everything up to its version was received: the ages add up.
//!
//! **Bytes.** Objects have to be the apiserver's own, byte for byte. So the state comes in
//! compressed chunks, and changes as whole objects: a delta leads to the form without
//! `metadata.resourceVersion` and `metadata.managedFields`.
//!
//! # Requests that a kubefan cannot answer
//!
//! The state at an older version, which a backfill for selectors needs. It counts as expired: the
//! subscribers start over with a snapshot from this cache. The apiserver has it, but each kubefan
//! that restarts would cost it a list of everything.

use std::{collections::VecDeque, mem, sync::Arc, time::Duration};

use kubefan_cache::{RelistReason, Update};
use kubefan_client::{ClientError, Encoding, OnExpired, OnLag, WatchItem, WatchOptions, WatchStream};
use kubefan_model::{ResourceVersion, object::ObjectParser};
use kubefan_telemetry::metrics::UpstreamWatchGuard;
use rand::{RngExt, rngs::StdRng};
use span::{Change, Span, invalid};
use stream_failure::{StreamFailure, stalled};
use stream_state::{ANSWER_TIMEOUT, FreshnessAnswer, Input, OpenWatch, StreamState};
use tokio::time::{Instant, sleep, timeout};

use super::{
    client::{Upstream, Verb},
    error::UpstreamError,
    fallback::Attempt,
    kubefan_client::{Freshness, KubefanClient},
    reflector::{NextStep, ReflectorError, ReflectorEvent, Target},
};

/// Mean interval at which the next kubefan is asked for the age of its state.
const FRESHNESS_INTERVAL: Duration = Duration::from_secs(15);
/// Interval at which a quiet watch gets a new version. The shortest that kubefan accepts.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(1);

/// The upstream kubefan has reached a version. A watch that does not bring it within this time is
/// stuck.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// A list and watch of one [`Target`].
pub struct GrpcReflector {
    kubefan: KubefanClient,
    target: Target,
    parser: Arc<ObjectParser>,
    open_watch: Arc<dyn Fn() -> UpstreamWatchGuard + Send + Sync>,
    random: StdRng,
    state: StreamState,
    /// Steps that were made but not yet returned.
    ready: VecDeque<ReflectorEvent>,
    /// The apiserver. Every snapshot must be of its cluster.
    apiserver: Upstream,
    /// The version of the newest state so far. An older snapshot is not taken without a proof that
    /// the cluster itself went back.
    floor: Option<ResourceVersion>,
    /// Set for a backfill: only single events after this version, and no marked spans.
    is_backfill: bool,
}

impl GrpcReflector {
    /// A reflector that starts with a snapshot from a kubefan in front of `apiserver`. `open_watch`
    /// counts a watch until its guard is dropped.
    pub fn new(
        kubefan: KubefanClient,
        apiserver: Upstream,
        target: Target,
        parser: Arc<ObjectParser>,
        open_watch: Arc<dyn Fn() -> UpstreamWatchGuard + Send + Sync>,
        random: StdRng,
    ) -> Self {
        let state = StreamState::Empty { reason: RelistReason::Initial };
        let ready = VecDeque::new();
        Self { kubefan, target, parser, open_watch, random, state, ready, apiserver, floor: None, is_backfill: false }
    }

    /// As [`Reflector::for_backfill`](super::Reflector::for_backfill). With `with_state` the first
    /// step fails with `Gone`.
    pub fn for_backfill(mut self, version: ResourceVersion, with_state: bool) -> Self {
        self.state = if with_state { StreamState::Unserved } else { StreamState::Resume { version: version.end() } };
        self.is_backfill = true;
        self
    }

    /// Discards the known state. The next step asks for a snapshot, for `reason`.
    pub fn relist(&mut self, reason: RelistReason) {
        self.ready.clear();
        self.state = StreamState::Empty { reason };
    }

    /// As [`Self::relist`], for a state that is not older than `floor`.
    pub(super) fn relist_above(&mut self, reason: RelistReason, floor: Option<ResourceVersion>) {
        self.floor = self.floor.max(floor);
        self.relist(reason);
    }

    /// Discards everything read after `version`. The next step continues from there.
    pub fn resume_from(&mut self, version: ResourceVersion) {
        self.ready.clear();
        self.floor = Some(version);
        self.state = StreamState::Resume { version };
    }

    /// As [`Reflector::reached`](super::Reflector::reached).
    pub(super) fn reached(&self) -> Option<ResourceVersion> {
        match &self.state {
            StreamState::Watching { version, .. } | StreamState::Resume { version } => Some(*version),
            StreamState::Empty { .. } | StreamState::Snapshot { .. } | StreamState::Unserved => None,
        }
    }

    /// Returns the reason of the list that follows if the state is discarded.
    pub(super) fn relist_reason(&self) -> RelistReason {
        self.state.relist_reason()
    }

    /// Returns the action of the next step. A snapshot is a list.
    pub fn next_step(&self) -> NextStep {
        if self.ready.is_empty() { self.state.next_step() } else { NextStep::ReturnUpdate }
    }

    /// Performs one step: opens a call, or takes what it has received. After an error the next step
    /// continues from the last valid state.
    ///
    /// Cancel-safe if it [reads from the watch](NextStep::ReadWatch). Otherwise drop the reflector
    /// if a step is dropped.
    pub async fn step(&mut self) -> Result<ReflectorEvent, ReflectorError> {
        loop {
            if let Some(step) = self.ready.pop_front() {
                return Ok(step);
            }
            let input = self.state.input().await;
            let lost = StreamState::Empty { reason: self.state.relist_reason() };
            match mem::replace(&mut self.state, lost) {
                StreamState::Empty { reason } => {
                    let watch = self.call(None);
                    self.state = StreamState::Snapshot { reason, watch };
                }
                StreamState::Resume { version } => return self.resume(version).await,
                StreamState::Unserved => {
                    let message = "another kubefan has no state of an older version".to_owned();
                    return Err(ReflectorError::List(UpstreamError::Gone { message }));
                }
                StreamState::Snapshot { reason, watch } => self.read_snapshot(reason, watch, input).await?,
                StreamState::Watching { watch, version } => self.read_watch(watch, version, input).await?,
            }
        }
    }

    /// A call that is sent when it is first read.
    fn call(&mut self, from: Option<ResourceVersion>) -> OpenWatch {
        // A state was taken only if it was of the apiserver's cluster.
        let known = || self.apiserver.cluster().or_else(|| self.kubefan.cluster());
        let cluster = from.and_then(|_| known()).unwrap_or_default();
        let options = WatchOptions {
            resource_version: from.map(|from| from.to_string()).unwrap_or_default(),
            cluster: cluster.clone(),
            bookmark_interval: Some(BOOKMARK_INTERVAL),
            encoding: Encoding::Zstd,
            on_expired: OnExpired::Fail,
            on_lag: if self.is_backfill { OnLag::Expire } else { OnLag::Conflate },
            reports_first_connection: true,
            seed: Some(self.random.random()),
            ..WatchOptions::default()
        };
        OpenWatch {
            attempt: self.kubefan.attempt(),
            stream: self.kubefan.watch(&self.target, options),
            called_at: Instant::now(),
            cluster,
            marked: None,
            received_at: Instant::now(),
            freshness: self.ask(Duration::ZERO),
            proof: None,
            _guard: (self.open_watch)(),
        }
    }

    /// Asks for the age after a time. A backfill does not need it.
    fn ask(&self, after: Duration) -> FreshnessAnswer {
        if self.is_backfill {
            return Box::pin(std::future::pending());
        }
        let kubefan = self.kubefan.clone();
        let target = self.target.clone();
        Box::pin(async move {
            sleep(after).await;
            kubefan.freshness(&target, false).await
        })
    }

    async fn resume(&mut self, version: ResourceVersion) -> Result<ReflectorEvent, ReflectorError> {
        if self.kubefan.cluster().is_none() {
            // After a warm start no snapshot has named it. Without it no state counts as confirmed.
            self.state = StreamState::Resume { version };
            self.kubefan.freshness(&self.target, false).await.map_err(ReflectorError::Watch)?;
        }
        let mut watch = self.call(Some(version));
        match timeout(ANSWER_TIMEOUT, watch.stream.next()).await {
            Ok(Some(Ok(WatchItem::Reconnected { .. }))) => {
                self.kubefan.observe(Verb::Watch, true);
                self.kubefan.take_budget(watch.stream.fallback_budget());
                self.state = StreamState::Watching { watch, version };
                Ok(ReflectorEvent::Watching { proven_at: None })
            }
            Err(_) => {
                self.kubefan.observe(Verb::Watch, false);
                watch.note_stall();
                self.state = StreamState::Resume { version };
                Err(ReflectorError::Watch(stalled()))
            }
            Ok(other) => {
                self.kubefan.observe(Verb::Watch, false);
                Err(self.watch_failed(version, watch.attempt.as_ref(), other).await)
            }
        }
    }

    async fn read_snapshot(
        &mut self,
        reason: RelistReason,
        watch: OpenWatch,
        input: Input,
    ) -> Result<(), ReflectorError> {
        let item = match input {
            Input::Item(item) => item,
            Input::Stalled => {
                self.kubefan.observe(Verb::List, false);
                watch.note_stall();
                return Err(ReflectorError::List(stalled()));
            }
            Input::Nothing | Input::Freshness(_) => return Ok(()),
        };
        let received = Instant::now();
        let update = match item {
            Some(Ok(WatchItem::Reconnected { .. })) => {
                self.kubefan.observe(Verb::List, true);
                self.kubefan.take_budget(watch.stream.fallback_budget());
                self.state = StreamState::Snapshot { reason, watch };
                return Ok(());
            }
            Some(Ok(WatchItem::SnapshotBegin { resource_version, .. })) => {
                return self.begin_snapshot(reason, watch, &resource_version).await;
            }
            Some(Ok(WatchItem::Event(event))) => {
                let object = self.parser.parse(&event.object)?;
                self.state = StreamState::Snapshot { reason, watch };
                Update::ListItem(object)
            }
            Some(Ok(WatchItem::SnapshotEnd { .. })) => {
                let version = reached(&watch.stream).map_err(ReflectorError::List)?;
                self.floor = Some(version);
                self.state = StreamState::Watching { watch, version };
                self.ready.push_back(ReflectorEvent::Watching { proven_at: None });
                Update::ListEnd(version)
            }
            Some(Ok(WatchItem::Disconnected { .. }) | Err(_)) | None => {
                self.kubefan.observe(Verb::List, false);
                let failure = StreamFailure::of(&self.kubefan, watch.attempt.as_ref(), item).await;
                return Err(ReflectorError::List(failure.error));
            }
            Some(Ok(_)) => return Err(ReflectorError::List(UpstreamError::invalid("a mark inside a snapshot"))),
        };
        self.ready.push_back(ReflectorEvent::Update { update, received });
        Ok(())
    }

    /// Takes a snapshot, unless its state is older than one before: the kubefan that sends it may
    /// be behind another one at the same address.
    async fn begin_snapshot(
        &mut self,
        reason: RelistReason,
        mut watch: OpenWatch,
        version: &str,
    ) -> Result<(), ReflectorError> {
        watch.cluster = watch.stream.snapshot_cluster().to_owned();
        self.kubefan.note_cluster(watch.cluster.clone());
        let version: ResourceVersion = ResourceVersion::parse_place(version)
            .map_err(|error| ReflectorError::List(UpstreamError::invalid(error)))?;
        let mut went_back = (reason == RelistReason::Rewritten).then_some(version);
        if let Some(floor) = self.floor.filter(|floor| went_back.is_none() && version.whole() < floor.whole()) {
            let proved = self.kubefan.freshness(&self.target, true).await.map_err(ReflectorError::List)?;
            if proved.version.whole() >= floor.whole() || proved.is_of_another(&watch.cluster) {
                let message = format!("a snapshot at version {version}, after version {floor}");
                return Err(ReflectorError::List(UpstreamError::VersionTooLarge { message, retry_after: None }));
            }
            went_back = Some(proved.version);
        }
        let went_back = went_back.map(|reached| Update::WentBack { reached });
        let updates = went_back.into_iter().chain([Update::ListBegin { reason }]);
        self.ready.extend(updates.map(|update| ReflectorEvent::Update { update, received: watch.called_at }));
        self.state = StreamState::Snapshot { reason, watch };
        Ok(())
    }

    async fn read_watch(
        &mut self,
        watch: OpenWatch,
        version: ResourceVersion,
        input: Input,
    ) -> Result<(), ReflectorError> {
        match input {
            Input::Nothing | Input::Stalled => Ok(()),
            Input::Freshness(answer) => self.read_freshness(watch, version, answer),
            Input::Item(item) => self.read_item(watch, version, item).await,
        }
    }

    /// Takes an answer about the age. The watch ends if it does not bring the version of an earlier
    /// one.
    fn read_freshness(
        &mut self,
        mut watch: OpenWatch,
        version: ResourceVersion,
        answer: Result<Freshness, UpstreamError>,
    ) -> Result<(), ReflectorError> {
        match answer {
            Ok(answer) if answer.is_of_another(&watch.cluster) => {
                self.state = StreamState::Resume { version };
                return Err(invalid("the next kubefan now serves another cluster"));
            }
            // A proof whose version is not reached yet stays: with a newer one each time, a cache
            // that is always a little behind would never be proved.
            Ok(answer) if answer.proven_at.is_some() => {
                watch.proof.get_or_insert((answer, Instant::now()));
            }
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(resource = %self.target.gvr, %error, "the age of the next kubefan's state is not known");
            }
        }
        let is_quiet = watch.marked.is_none() || watch.received_at.elapsed() >= IDLE_TIMEOUT;
        if is_quiet && watch.proof.as_ref().is_some_and(|(_, since)| since.elapsed() >= IDLE_TIMEOUT) {
            self.continue_watch(watch, version);
            if self.ready.is_empty() {
                self.state = StreamState::Resume { version };
                self.ready.push_back(ReflectorEvent::Ended { reason: "idle" });
            }
            return Ok(());
        }
        let after = FRESHNESS_INTERVAL.mul_f64(self.random.random_range(0.75..1.25));
        watch.freshness = self.ask(after);
        self.continue_watch(watch, version);
        Ok(())
    }

    async fn read_item(
        &mut self,
        mut watch: OpenWatch,
        version: ResourceVersion,
        item: Option<Result<WatchItem, ClientError>>,
    ) -> Result<(), ReflectorError> {
        let received = Instant::now();
        watch.received_at = received;
        let update = match item {
            Some(Ok(WatchItem::GapBegin { .. } | WatchItem::CatchUpBegin { .. })) if self.is_backfill => {
                let message = "another kubefan no longer has the single events".to_owned();
                return Err(ReflectorError::Watch(UpstreamError::Gone { message }));
            }
            // A span inside another one comes after the stream has moved to another connection: it
            // starts again from the version before both.
            Some(Ok(WatchItem::GapBegin { reason, .. })) => {
                watch.marked = Some(Span::gap(&reason));
                None
            }
            Some(Ok(WatchItem::CatchUpBegin { .. })) => {
                watch.marked = Some(Span::catch_up());
                None
            }
            Some(Ok(WatchItem::Event(event))) => match (&mut watch.marked, Change::read(&event, &self.parser)?) {
                (Some(_), _) if moved_past(&watch.stream, version)? => {
                    return Err(invalid("a version inside a marked span"));
                }
                (Some(span), change) => {
                    span.push(change)?;
                    None
                }
                (_, Change::Event(kind, object)) => Some(Update::Event(kind, object)),
                (_, Change::Gone(_)) => return Err(invalid("a delete without an object, outside of a marked span")),
            },
            Some(Ok(WatchItem::GapEnd | WatchItem::CatchUpEnd)) => {
                let span = watch.marked.take().ok_or_else(|| invalid("the end of a span without its begin"))?;
                let Span { reason, changes, .. } = span;
                if !moved_past(&watch.stream, version)? {
                    return Err(invalid("the end of a span without a new version"));
                }
                let version = reached(&watch.stream).map_err(ReflectorError::Watch)?;
                tracing::info!(resource = %self.target.gvr, reason = reason.as_str(), changes = changes.len(), "the next kubefan marked a difference");
                Some(Update::Conflated { reason, changes, version })
            }
            Some(Ok(WatchItem::Bookmark)) if watch.marked.is_some() => {
                return Err(invalid("a bookmark inside a marked span"));
            }
            Some(Ok(WatchItem::Bookmark)) => {
                Some(Update::Bookmark(reached(&watch.stream).map_err(ReflectorError::Watch)?))
            }
            Some(Ok(WatchItem::SnapshotBegin { resource_version, .. })) => {
                // It starts over by itself. Everything sent before is replaced.
                watch.marked = None;
                return self.begin_snapshot(RelistReason::Expired, watch, &resource_version).await;
            }
            // The stream continues over another connection. An incomplete span comes again.
            Some(Ok(WatchItem::Reconnected { .. })) => {
                watch.marked = None;
                None
            }
            Some(Ok(WatchItem::SnapshotEnd { .. } | WatchItem::Restarted { .. })) => {
                return Err(invalid("the end of a snapshot without its begin"));
            }
            Some(Ok(WatchItem::Disconnected { .. }) | Err(_)) | None => {
                return Err(self.watch_failed(version, watch.attempt.as_ref(), item).await);
            }
        };
        let at = match &update {
            // Other events may have the same version.
            Some(Update::Event(_, object)) => {
                reached(&watch.stream).map_err(ReflectorError::Watch)?.max(object.version())
            }
            Some(Update::Bookmark(at) | Update::Conflated { version: at, .. }) => *at,
            _ => version,
        };
        self.ready.extend(update.map(|update| ReflectorEvent::Update { update, received }));
        self.continue_watch(watch, at.max(version));
        Ok(())
    }

    /// Continues, and emits the proof whose version is reached.
    fn continue_watch(&mut self, mut watch: OpenWatch, version: ResourceVersion) {
        self.floor = self.floor.max(Some(version));
        if let Some((proof, _)) = watch.proof.take_if(|(proof, _)| proof.version <= version) {
            self.ready.extend(proof.proven_at.map(|at| ReflectorEvent::Proved { at }));
        }
        self.state = StreamState::Watching { watch, version };
    }

    /// Continues from the last version, unless the error made it useless.
    async fn watch_failed(
        &mut self,
        version: ResourceVersion,
        attempt: Option<&Attempt>,
        last: Option<Result<WatchItem, ClientError>>,
    ) -> ReflectorError {
        // A step that is dropped from here on has lost nothing.
        self.state = StreamState::Resume { version };
        let StreamFailure { error, is_rewritten } = StreamFailure::of(&self.kubefan, attempt, last).await;
        self.state = match &error {
            // The snapshot that follows says where the cluster is.
            UpstreamError::Gone { .. } if is_rewritten => StreamState::Empty { reason: RelistReason::Rewritten },
            UpstreamError::Gone { .. } => StreamState::Empty { reason: RelistReason::Expired },
            UpstreamError::NotFound { .. } => StreamState::Empty { reason: RelistReason::NotFound },
            UpstreamError::Forbidden { .. } => StreamState::Empty { reason: RelistReason::Forbidden },
            _ => StreamState::Resume { version },
        };
        ReflectorError::Watch(error)
    }

    /// Advances the version to resume from, after a proof that no events lie in between.
    pub fn advance_to(&mut self, reached: ResourceVersion) {
        if let StreamState::Watching { version, .. } | StreamState::Resume { version } = &mut self.state {
            *version = reached.max(*version);
        }
    }
}

/// The version up to which a stream has sent everything.
fn reached(stream: &WatchStream) -> Result<ResourceVersion, UpstreamError> {
    ResourceVersion::parse_place(stream.resume_version()).map_err(UpstreamError::invalid)
}

fn moved_past(stream: &WatchStream, version: ResourceVersion) -> Result<bool, ReflectorError> {
    Ok(reached(stream).map_err(ReflectorError::Watch)? > version)
}

mod span;
mod stream_failure;
mod stream_state;

#[cfg(test)]
mod tests;
