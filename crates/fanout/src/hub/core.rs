//! State, history and views of one resource and scope, behind one lock.
//!
//! The hazard is a subscriber that misses an event or receives it twice because state and events
//! were read at different moments. So there is one critical section: a commit changes the published
//! state, its history and the logs of all views in it, and a subscription takes its snapshot and
//! its place in the log in it. Separate locks, or a lock per view, would allow more parallelism,
//! but a subscription would then have to detect and repair every interleaving.
//!
//! The section is short. Nothing is encoded, compared, sent or awaited in it; wake-ups are sent
//! after it. The head version, which bookmarks are made from, is published after the last append
//! and before the section ends, so a reader of it finds every event up to it in the logs.

use std::{
    sync::{Arc, PoisonError},
    time::{Duration, SystemTime},
};

use kubefan_admission::{fair_share::Holder, gate::Gate};
use kubefan_cache::{
    Budgets, CachedState, Commit, HistoryCopy, HistoryRecord, Phase, ProcessBudgets, PublishedCache, Refusal,
    RelistReason, RingLimits, Store, equality_term::Column, published::Applied, stream_end::StreamEnd,
    warnings::Warnings, writer::Change,
};
use kubefan_common::{
    planted::{self, Bug},
    proto::v1alpha1::ResolvedResource,
    sync::watch,
    when_planted,
};
use kubefan_model::{GroupVersionResource, ResourceVersion, object::ObjectParser, selection::Selection};
use kubefan_telemetry::metrics::{CacheGauges, CacheMetrics};
use tokio::{
    runtime::Handle,
    time::{Instant, sleep_until},
};

use super::replay_turns::ReplayTurns;
use crate::{
    sync::{Mutex, MutexGuard},
    views::{selections::Selections, shared_lists::SharedLists, view::View, view_set::Views},
    wake::pacer::Pacer,
};

/// State, history and views of one resource and scope.
pub struct Hub {
    pub(crate) resource: ResolvedResource,
    pub(crate) parser: Arc<ObjectParser>,
    pub(crate) metrics: CacheMetrics,
    pub(crate) budgets: Budgets,
    pub(crate) selections: Selections,
    limits: RingLimits,
    gate: Arc<Gate>,
    pub(super) replay_turns: ReplayTurns,
    cluster: ClusterName,
    /// Mirrors of the published head and phase, for readers that take no lock.
    pub(super) head: watch::Sender<Option<ResourceVersion>>,
    phase: watch::Sender<Phase>,
    state: Mutex<HubState>,
    /// Locked after `state`, or alone.
    pub(super) shared_lists: Mutex<SharedLists>,
}

/// The parts of a hub that change together, in the critical section.
pub(crate) struct HubState {
    pub(crate) published: PublishedCache,
    pub(crate) views: Views,
    pub(crate) subscribers: usize,
    /// The highest version of this history at which readers received a proved state ahead of the
    /// cache.
    pub(super) served_ahead: Option<ResourceVersion>,
    /// The value of `served_ahead` when the last list began. A proof during a list may be newer
    /// than the list.
    served_ahead_before_list: Option<ResourceVersion>,
    /// Time of the last subscriber or reader.
    pub(crate) used_at: Instant,
    pacer: Pacer,
    /// Whether a wave of wake-ups is scheduled.
    is_wave_scheduled: bool,
    /// Whether events are being tested outside of the critical section.
    pub(super) is_matching: bool,
    /// Time when the views last dropped data that is too old to be reused.
    tidied_at: Instant,
    /// The indexes that are being built; each is set to true when it is complete or given up.
    pub(super) builds: Vec<(Column, watch::Receiver<bool>)>,
}

/// The current state of a cache, at which a backfill has to end.
pub struct CachePosition {
    /// The epoch of the history.
    pub epoch: u64,
    /// The version reached.
    pub version: ResourceVersion,
    /// The objects.
    pub store: Store,
}

/// The ways in which the history of a cache continues from a version.
pub struct Continuation {
    /// Whether it can resume from exactly this place.
    pub can_resume: bool,
    /// Whether it can resume from after all events of that version.
    pub can_resume_after: bool,
    /// The version reached.
    pub head: ResourceVersion,
}

/// Returns the time to show to people; no decision depends on it.
#[expect(clippy::disallowed_methods, reason = "a timestamp to show, which no test compares")]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// Options that all hubs of a process share.
#[derive(Clone)]
pub struct HubOptions {
    /// Limits of the history.
    pub limits: RingLimits,
    /// Maximum delay of a wave of wake-ups under load.
    pub coalesce_max: Duration,
    /// Permits for requests that pin state.
    pub gate: Arc<Gate>,
    /// Memory that all hubs together may hold beyond objects and history.
    pub budgets: ProcessBudgets,
    /// Name of the cluster that versions belong to, if it is known.
    pub cluster: ClusterName,
}

/// Returns the name of a cluster, once it is known.
pub type ClusterName = Arc<dyn Fn() -> Option<String> + Send + Sync>;

/// Default of [`HubOptions::coalesce_max`].
pub const COALESCE_MAX: Duration = Duration::from_millis(20);

/// The least interval between two removals of expired data from views.
const TIDY_INTERVAL: Duration = Duration::from_secs(30);

impl Hub {
    /// Creates a hub without state.
    pub fn new(
        resource: ResolvedResource,
        parser: Arc<ObjectParser>,
        options: HubOptions,
        metrics: CacheMetrics,
    ) -> Arc<Self> {
        let HubOptions { limits, coalesce_max, gate, budgets, cluster } = options;
        let budgets = budgets.part();
        let ResolvedResource { group, version, resource: plural, .. } = &resource;
        let name = GroupVersionResource::new(group, version, plural).to_string();
        let published = PublishedCache::new(name, limits, parser.clone(), wall_clock, budgets.indexes.share());
        let head = watch::Sender::new(None);
        let phase = watch::Sender::new(published.phase());
        let state = HubState {
            published,
            views: Views::default(),
            subscribers: 0,
            used_at: Instant::now(),
            pacer: Pacer::new(coalesce_max),
            is_wave_scheduled: false,
            is_matching: false,
            served_ahead: None,
            served_ahead_before_list: None,
            tidied_at: Instant::now(),
            builds: Vec::new(),
        };
        let selections = Selections::new(budgets.selectors.clone());
        let state = Mutex::new(state);
        let replay_turns = ReplayTurns::default();
        Arc::new(Self {
            resource,
            parser,
            metrics,
            budgets,
            selections,
            limits,
            gate,
            replay_turns,
            cluster,
            head,
            phase,
            state,
            shared_lists: Mutex::default(),
        })
    }

    /// Returns the resource as messages name it.
    pub fn resource(&self) -> &ResolvedResource {
        &self.resource
    }

    /// Returns the name of the cluster that versions belong to; `None` if it is not known.
    pub fn cluster(&self) -> Option<String> {
        (self.cluster)()
    }

    /// Returns the metrics of this cache.
    pub fn metrics(&self) -> &CacheMetrics {
        &self.metrics
    }

    /// Replaces the warnings that upstream sends to every reader of this resource.
    pub fn warn(&self, warnings: &Warnings) {
        self.lock().published.warn(warnings);
    }

    /// Returns the warnings that readers over HTTP receive.
    pub fn warnings(&self) -> Warnings {
        self.lock().published.warnings().clone()
    }

    /// Returns the shared selection that equals this one. It counts to the budget of selectors.
    ///
    /// # Errors
    /// [`Refusal::Exhausted`] if there is no room for it.
    pub fn share(&self, selection: Selection, holder: Option<Holder>) -> Result<Selection, Refusal> {
        self.selections.share(selection, holder)
    }

    /// Enters the critical section. Never held across an await.
    pub(crate) fn lock(&self) -> MutexGuard<'_, HubState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes a new state. A wake-up must follow, so only [`super::batch::CommitBatch`] calls
    /// it.
    pub(super) fn publish(&self, commit: Commit, received: Instant) {
        let version = commit.version;
        let mut state = self.lock();
        when_planted!(HeadBeforeAppend => self.head.send_replace(Some(version)));
        let commit = state.or_new_history(commit);
        let HubState { published, views, served_ahead, served_ahead_before_list, .. } = &mut *state;
        // The logs first: the eviction below depends on their size.
        let dispatched = match &commit.change {
            Change::Record(record) if published.state().is_some() => views.append(record, received),
            _ => 0,
        };
        let mut ended = Vec::new();
        let mut evicted = Vec::new();
        let log_share = views.shorten_logs(&self.budgets.logs, None, received);
        match published.apply(commit, received, log_share) {
            Applied::Continued(records) => {
                views.trim(&records);
                evicted = records;
            }
            Applied::NewEpoch { because, replaced } => {
                *served_ahead = None;
                *served_ahead_before_list = None;
                if replaced && !planted::is(Bug::RewoundSilently) {
                    ended = views.drain();
                    let end = StreamEnd::Rewritten(because);
                    close_all(&ended, &end);
                }
            }
        }
        // After the last append, and inside the section, so that no subscription starts in between.
        self.head.send_replace(Some(version));
        self.publish_phase(&state.published);
        // Upstream's bookmarks are commits too, so a quiet resource gets here every minute.
        let mut snapshots = Vec::new();
        let mut lists = None;
        if received.saturating_duration_since(state.tidied_at) > TIDY_INTERVAL {
            state.tidied_at = received;
            let HubState { published, views, .. } = &mut *state;
            snapshots = views.tidy(received);
            lists = Some(self.shared_lists().tidy(received));
            published.drop_unused_indexes(views.selections(), received);
        }
        drop(state);
        drop((snapshots, lists));
        // Outside of the section: there may be many.
        drop(evicted);
        wake_all(&ended);
        self.metrics.dispatched(dispatched);
    }

    /// Wakes the subscribers that have something to read: at once, or a moment later if the last
    /// wave is still being worked off.
    pub(super) fn wake(self: &Arc<Self>) {
        self.start_matching();
        let mut state = self.lock();
        if state.views.all_announced() || state.is_wave_scheduled {
            return;
        }
        // Outside of a runtime there is no timer, and no load to wait for.
        let wait = state.pacer.hold(Instant::now());
        match wait.and_then(|until| Some((until, Handle::try_current().ok()?))) {
            None => {
                let (views, records) = state.views.take_unannounced();
                drop(state);
                self.start_wave(&views, records);
            }
            Some((until, runtime)) => {
                state.is_wave_scheduled = true;
                drop(state);
                let hub = self.clone();
                runtime.spawn(async move {
                    sleep_until(until).await;
                    let (views, records) = {
                        let mut state = hub.lock();
                        state.is_wave_scheduled = false;
                        state.views.take_unannounced()
                    };
                    hub.start_wave(&views, records);
                });
            }
        }
    }

    fn start_wave(&self, views: &[Arc<View>], records: usize) {
        // The time at which the wave starts: waking is part of its work.
        let now = Instant::now();
        let woken = views.iter().map(|view| view.wake()).sum();
        self.lock().pacer.begin(woken, records, now);
    }

    /// Limits history to a share, from 0 to 1, of its usual size. `keep_derived` says whether
    /// projections, deltas and snapshots may be retained for reuse.
    pub fn shed(&self, history_share: f64, keep_derived: bool) {
        let mut state = self.lock();
        let HubState { published, views, .. } = &mut *state;
        let now = Instant::now();
        let log_share = views.shorten_logs(&self.budgets.logs, None, now);
        let evicted = published.shrink(history_share, now, log_share);
        views.trim(&evicted);
        self.budgets.open(keep_derived);
        published.open_indexes(keep_derived);
        let mut snapshots = Vec::new();
        let mut lists = None;
        if !keep_derived {
            snapshots = views.forget();
            lists = Some(self.shared_lists().forget());
        }
        drop(state);
        drop((snapshots, lists));
    }

    /// Reports that the upstream watch is down, or why there is no state yet. The cached state is
    /// still served.
    pub fn trouble(&self, message: String) {
        let mut state = self.lock();
        state.published.trouble(message);
        self.publish_phase(&state.published);
    }

    /// Like [`Self::trouble`], for a failure whose `cause` upstream has named. Readers that wait
    /// for the first list get it at once.
    pub fn failing(&self, message: String, cause: String) {
        let mut state = self.lock();
        state.published.failing(message, cause);
        self.publish_phase(&state.published);
    }

    /// Returns the reason why readers are refused now; `None` if they are served.
    pub fn refusal(&self) -> Option<Refusal> {
        self.lock().published.serving(Instant::now()).err()
    }

    /// Reports that the upstream watch is live again.
    pub fn live(&self) {
        let mut state = self.lock();
        state.published.live();
        self.publish_phase(&state.published);
    }

    /// Refuses readers from now on if upstream has not proved the version for longer than
    /// `staleness_max`. Open streams continue.
    pub fn limit_staleness(&self, staleness_max: Option<Duration>) {
        self.lock().published.limit_staleness(staleness_max);
    }

    /// Records upstream's proof, as of `at`, that the version reached is current: an event, a
    /// bookmark (one that repeats the version too), or a consistent read that finds the cluster at
    /// this very version. An open watch alone proves nothing: from a version that its apiserver has
    /// not reached it would be just as silent.
    pub fn proved(&self, at: Instant) {
        self.lock().published.proved(at);
    }

    /// Records a complete, consistent list whose first request was sent at `at`.
    pub fn listed(&self, at: Instant) {
        self.lock().published.listed(at);
    }

    /// Whether the state is from a consistent list that was requested after `at`.
    pub fn is_listed_after(&self, at: Instant) -> bool {
        self.lock().published.is_listed_after(at)
    }

    /// Reports that upstream is being listed because of `reason`: the cached state will be
    /// replaced.
    pub fn listing(&self, reason: RelistReason) {
        self.metrics.relist(reason.as_str());
        let mut state = self.lock();
        state.served_ahead_before_list = state.served_ahead;
        state.published.listing();
    }

    /// Returns the number of upstream lists that have started.
    pub fn lists(&self) -> u64 {
        self.lock().published.lists()
    }

    /// Publishes the phase, inside the critical section, so that phase and state agree.
    pub(super) fn publish_phase(&self, published: &PublishedCache) {
        let phase = published.phase();
        self.phase.send_if_modified(|current| std::mem::replace(current, phase) != phase);
    }

    /// Returns a receiver of the phase and its changes.
    pub fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Ends every stream and forgets the state.
    pub fn close(&self, phase: Phase, end: StreamEnd) {
        let mut state = self.lock();
        state.published.close(phase, end.to_string());
        let mut views = state.views.drain();
        when_planted!(WokenBeforeTheEnd => { wake_all(&views); close_all(&std::mem::take(&mut views), &end) });
        close_all(&views, &end);
        let lists = self.shared_lists().forget();
        self.head.send_replace(None);
        // Sent even if it stays the same: readers that wait for the first list must look again.
        self.phase.send_replace(state.published.phase());
        drop(state);
        drop(lists);
        wake_all(&views);
        // These gauges may never be refreshed again, and must not show a cache that is gone.
        self.metrics.set(CacheGauges::default());
    }

    /// Returns the version up to which every view is complete.
    pub fn head(&self) -> Option<ResourceVersion> {
        *self.head.borrow()
    }

    /// Waits until the cache has reached `version`, for at most `limit`.
    pub async fn reached(&self, version: ResourceVersion, limit: Duration) -> Result<(), Refusal> {
        let mut head = self.head.subscribe();
        let reached = head.wait_for(|head| head.is_none_or(|head| head >= version));
        if tokio::time::timeout(limit, reached).await.is_ok() {
            return Ok(());
        }
        self.lock().published.state().map_or(Ok(()), |cached| cached.check_reached(version))
    }

    /// Returns the state, for maintenance of the cache, which does not count as use of it; `None`
    /// before the first list.
    pub fn state(&self) -> Option<(Store, ResourceVersion)> {
        self.lock().published.state().map(|state| (state.store.clone(), state.version))
    }

    /// Returns the gate for requests that pin state.
    pub fn gate(&self) -> &Gate {
        &self.gate
    }

    /// Returns the version that a backfill has to reach, and the objects that it can share; `None`
    /// while there is no state.
    pub fn position(&self) -> Option<CachePosition> {
        let state = self.lock();
        let CachedState { epoch, store, version, .. } = state.published.state()?;
        Some(CachePosition { epoch: *epoch, version: *version, store: store.clone() })
    }

    /// Returns how the cached history continues from `version`; `None` in another epoch.
    pub fn continues_from(&self, epoch: u64, version: ResourceVersion) -> Option<Continuation> {
        let state = self.lock();
        let CachedState { history, version: head, .. } = state.published.state_of(epoch)?;
        let can_resume = history.can_resume_from(version, *head);
        let can_resume_after = history.can_resume_from(version.end(), *head);
        Some(Continuation { can_resume, can_resume_after, head: *head })
    }

    /// Continues a copy of the history of this epoch, as [`kubefan_cache::History::copy`]; `None`
    /// if another history has started since.
    pub fn copy_history(&self, epoch: u64, copy: &mut HistoryCopy, entries_max: usize) -> Option<bool> {
        self.lock().published.copy_history(epoch, copy, entries_max)
    }

    /// Returns the limits of the history.
    pub fn limits(&self) -> RingLimits {
        self.limits
    }
}

impl HubState {
    /// Returns the commit; or the start of a new history if the commit is a list below a version
    /// that was proved before the list began: etcd was restored from a backup.
    fn or_new_history(&self, commit: Commit) -> Commit {
        let at = commit.version.whole();
        match (&commit.change, self.served_ahead_before_list.map(ResourceVersion::whole)) {
            (Change::Record(HistoryRecord::Gap(gap)), Some(proved)) if gap.is_lossy && at < proved => {
                let because = format!("a state at version {proved} was followed by a list at {at}");
                Commit { change: Change::Start { because }, ..commit }
            }
            _ => commit,
        }
    }
}

fn close_all(views: &[Arc<View>], end: &StreamEnd) {
    for view in views {
        view.close(end);
    }
}

fn wake_all(views: &[Arc<View>]) {
    for view in views {
        view.wake();
    }
}
