//! A cache as readers see it: the state and its history, and whether they may be served.
//!
//! Plain data. `kubefan_fanout::Hub` owns the lock around it, and changes the views of it in the
//! same critical section.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use kubefan_model::{ResourceVersion, event::WatchEvent, object::ObjectParser, selection::Selection};
use tokio::time::Instant;

use super::{
    budget::Share,
    column_build::ColumnBuild,
    columns::{ColumnState, Columns, DueColumn},
    equality_term::{Column, Term},
    history::{History, HistoryCopy},
    refusal::Refusal,
    ring::{HistoryRecord, RingLimits},
    store::Store,
    tenant_bytes::Tenant,
    warnings::Warnings,
    writer::{Change, Commit},
};

/// Whether a resource is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The first list is not complete.
    Syncing,
    /// The first list is not complete, and upstream has said why.
    Failing,
    /// Served; the upstream watch is live.
    Synced,
    /// Served from the cache; the upstream watch is being started again.
    Stale,
    /// The apiserver does not serve it.
    NotFound,
    /// The apiserver denies it.
    Forbidden,
    /// The resource cannot be cached.
    NotCached,
}

impl Phase {
    /// Whether readers are answered.
    pub fn serves(self) -> bool {
        matches!(self, Self::Synced | Self::Stale)
    }

    /// The name in logs, readyz and the status page.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Syncing | Self::Failing => "syncing",
            Self::Synced => "synced",
            Self::Stale => "stale",
            Self::NotFound => "not found",
            Self::Forbidden => "forbidden",
            Self::NotCached => "not cached",
        }
    }
}

/// The objects at one version, and the history that leads to them.
pub struct CachedState {
    /// Names this history: it grows with each history that does not follow from the one before.
    pub epoch: u64,
    /// The objects.
    pub store: Store,
    /// The recent changes.
    pub history: History,
    /// The version of the objects.
    pub version: ResourceVersion,
    /// The last version that brought other bytes of unchanged objects.
    pub reencoded: Option<ResourceVersion>,
}

impl CachedState {
    /// Checks that the state has reached a version.
    ///
    /// # Errors
    /// [`Refusal::Future`].
    pub fn check_reached(&self, requested: ResourceVersion) -> Result<(), Refusal> {
        if self.version < requested {
            return Err(Refusal::Future { requested, current: self.version });
        }
        Ok(())
    }

    /// Moves on to another store, which differs by these events.
    fn follow(&mut self, store: Store, version: ResourceVersion, events: &[Arc<WatchEvent>], columns: &mut Columns) {
        let before = std::mem::replace(&mut self.store, store);
        self.version = version;
        if !self.store.follow(before, events) {
            for column in columns.lose() {
                self.unindex(&column);
            }
        }
    }

    /// The parts of its indexes: columns with their memory, in bytes.
    fn indexes(&self) -> impl Iterator<Item = (&Column, usize)> {
        self.store.postings().sizes().chain(self.history.steps().sizes())
    }

    fn unindex(&mut self, column: &Column) {
        self.store.postings_mut().remove(column);
        self.history.steps_mut().remove(column);
    }
}

/// Effect of a commit on the published state.
pub enum Applied {
    /// The same history continues. These records were evicted from its ring, oldest first.
    Continued(Vec<HistoryRecord>),
    /// A history began that does not follow from the one before.
    NewEpoch {
        /// Reason for subscribers of the history before.
        because: String,
        /// Whether there was one.
        replaced: bool,
    },
}

/// The state that readers are served from, for one resource and scope.
pub struct PublishedCache {
    /// The resource's full name.
    resource: String,
    limits: RingLimits,
    parser: Arc<ObjectParser>,
    wall_clock: fn() -> SystemTime,
    phase: Phase,
    message: String,
    /// The answer of upstream to the first list, while it fails.
    cause: String,
    warnings: Warnings,
    synced_since: Option<SystemTime>,
    state: Option<CachedState>,
    epochs: u64,
    proven_at: Option<Instant>,
    /// Time of the request for the list that the state is from.
    listed_at: Option<Instant>,
    staleness_max: Option<Duration>,
    /// Whether the state was saved by the process before, and upstream has not confirmed it.
    is_unconfirmed: bool,
    lists: u64,
    columns: Columns,
    /// Counts the memory of the indexes.
    indexes: Share,
}

impl PublishedCache {
    /// A cache without state, of `resource`, whose objects `parser` reads. `wall_clock` gives the
    /// time to show in the status; `indexes` counts the memory of its indexes.
    pub fn new(
        resource: String,
        limits: RingLimits,
        parser: Arc<ObjectParser>,
        wall_clock: fn() -> SystemTime,
        indexes: Share,
    ) -> Self {
        Self {
            resource,
            limits,
            parser,
            wall_clock,
            phase: Phase::Syncing,
            message: "the first list has not started".to_owned(),
            cause: String::new(),
            warnings: Warnings::default(),
            synced_since: None,
            state: None,
            epochs: 0,
            proven_at: None,
            listed_at: None,
            staleness_max: None,
            is_unconfirmed: false,
            lists: 0,
            columns: Columns::default(),
            indexes,
        }
    }

    /// Applies a commit. `log_share` is the share of history, from 0 to 1, that the views' logs
    /// have room for.
    pub fn apply(&mut self, commit: Commit, received: Instant, log_share: f64) -> Applied {
        let Commit { store, version, change } = commit;
        if self.state.is_none() {
            self.synced_since = Some((self.wall_clock)());
        }
        self.message.clear();
        self.phase = Phase::Synced;
        self.is_unconfirmed = false;
        match (change, &mut self.state) {
            (Change::Record(record), Some(state)) => {
                state.follow(store, version, record.events(), &mut self.columns);
                if matches!(&record, HistoryRecord::Gap(gap) if !gap.is_lossy) {
                    state.reencoded = Some(version);
                }
                state.history.push(record, received);
            }
            (Change::Version, Some(state)) => state.follow(store, version, &[], &mut self.columns),
            (change, state) => {
                let new_history = || History::new(self.limits, version, self.parser.clone());
                let (history, because) = match change {
                    Change::Restored(history) => {
                        (*history, "it was taken over from a peer or a saved state".to_owned())
                    }
                    Change::Start { because } => (new_history(), because),
                    Change::Record(_) | Change::Version => (new_history(), String::new()),
                };
                self.epochs += 1;
                self.columns.reset();
                let before =
                    state.replace(CachedState { epoch: self.epochs, store, history, version, reencoded: None });
                return Applied::NewEpoch { because, replaced: before.is_some() };
            }
        }
        Applied::Continued(self.evict(received, log_share))
    }

    /// Starts with a state that the process before has saved, as stale: upstream has proved it at
    /// `proven_at`, if that is known, and has not confirmed it since.
    pub fn start_unconfirmed(&mut self, commit: Commit, proven_at: Option<Instant>, message: String) {
        self.apply(commit, Instant::now(), 1.0);
        self.proven_at = proven_at;
        self.trouble(message);
        self.is_unconfirmed = true;
    }

    /// Records that upstream has confirmed the state. It stays stale until its watch is live.
    /// Returns false if there is none.
    pub fn confirmed(&mut self) -> bool {
        std::mem::take(&mut self.is_unconfirmed)
    }

    /// Limits history to a `share`, from 0 to 1, of its usual size. Returns the records evicted
    /// from the ring, oldest first.
    pub fn shrink(&mut self, share: f64, now: Instant, log_share: f64) -> Vec<HistoryRecord> {
        if let Some(state) = &mut self.state {
            state.history.limit_to(share);
        }
        self.evict(now, log_share)
    }

    /// Shortens history to its limits, and to the share of it that the views' logs have room for.
    /// Returns the records evicted from the ring, oldest first.
    pub fn evict(&mut self, now: Instant, log_share: f64) -> Vec<HistoryRecord> {
        let Some(state) = &mut self.state else { return Vec::new() };
        let evicted = state.history.evict(now, state.store.json_bytes(), log_share);
        self.count_indexes();
        if self.indexes.budget().is_over()
            && let Some(state) = &mut self.state
            && let Some(column) = self.columns.to_drop(state.indexes())
        {
            state.unindex(&column);
            self.columns.set(&column, ColumnState::TooLarge, now);
            self.count_indexes();
        }
        evicted
    }

    /// The column that a selection is to be indexed by: of the term that is likely to have the most
    /// different values, unless its index has proved useless.
    pub fn column_for(&self, selection: &Selection) -> Option<Column> {
        let postings = self.state.as_ref()?.store.postings();
        let terms = Term::all(selection);
        let useful = terms.iter().find(|term| !postings.is_useless(term)).or(terms.first())?;
        Some(useful.column.clone())
    }

    fn count_indexes(&mut self) {
        self.indexes.set(self.state.as_ref().map_or(0, |state| state.indexes().map(|(_, bytes)| bytes).sum()));
    }

    /// Counts that a tenant uses a selection to read state or history. Returns the build of an
    /// index for it if one is to start now: one build serves all selections with its column.
    pub fn used(&mut self, selection: &Selection, tenant: Tenant, now: Instant) -> Option<ColumnBuild> {
        let DueColumn { column, replaced } = self.columns.used(self.column_for(selection)?, tenant, now)?;
        if let Some(replaced) = replaced {
            if let Some(state) = &mut self.state {
                state.unindex(&replaced);
            }
            self.count_indexes();
        }
        let state = self.state.as_mut()?;
        let CachedState { epoch, store, history, version, .. } = state;
        Some(ColumnBuild::start(column, selection.parser(), *epoch, *version, store, history, self.indexes.budget()))
    }

    /// Gives a build the next part of the history that it is of, if there still is that history.
    pub fn copy_for(&self, build: &mut ColumnBuild) -> Option<()> {
        self.state_of(build.epoch()).map(|state| build.copy(&state.history))
    }

    /// Adds a complete index. If the build was given up (`None`), or failed because too much has
    /// changed, the next use starts another.
    pub fn install(&mut self, column: &Column, build: Option<ColumnBuild>, now: Instant) {
        let Some(state) = &mut self.state else { return };
        let Some(build) = build.filter(|build| build.epoch() == state.epoch) else { return };
        // Memory may have run short since the build started.
        let installed = self.columns.is_open().then(|| build.install(&mut state.store, &mut state.history)).flatten();
        if installed != Some(true) {
            state.unindex(column);
        }
        self.columns.set(
            column,
            match installed {
                Some(true) => ColumnState::Indexed,
                Some(false) => ColumnState::TooLarge,
                None => ColumnState::Wanted,
            },
            now,
        );
        self.count_indexes();
    }

    /// Drops the indexes that no selection has used for long. `standing` are the selections of open
    /// views.
    pub fn drop_unused_indexes<'a>(&mut self, standing: impl Iterator<Item = &'a Selection>, now: Instant) {
        for selection in standing {
            self.columns.retain(selection, now);
        }
        for column in self.columns.forget_unused(now) {
            if let Some(state) = &mut self.state {
                state.unindex(&column);
            }
        }
        self.count_indexes();
    }

    /// Allows indexes by labels and fields, or drops and forbids them.
    pub fn open_indexes(&mut self, open: bool) {
        self.columns.open(open);
        if !open {
            for column in self.columns.lose() {
                if let Some(state) = &mut self.state {
                    state.unindex(&column);
                }
            }
            self.count_indexes();
        }
    }

    /// Records that the upstream watch is down, or why there is no state yet. The cached state is
    /// still served.
    pub fn trouble(&mut self, message: String) {
        self.message = message;
        self.phase = if self.state.is_some() { Phase::Stale } else { Phase::Syncing };
    }

    /// Records a failure as [`Self::trouble`] does, with the `cause` that upstream has named.
    pub fn failing(&mut self, message: String, cause: String) {
        self.trouble(message);
        if self.state.is_none() {
            self.phase = Phase::Failing;
            self.cause = cause;
        }
    }

    /// Records that the upstream watch is live again.
    pub fn live(&mut self) {
        if self.state.is_some() {
            self.message.clear();
            self.phase = Phase::Synced;
            self.is_unconfirmed = false;
        }
    }

    /// Forgets the state.
    pub fn close(&mut self, phase: Phase, message: String) {
        self.phase = phase;
        self.message = message;
        self.state = None;
        self.is_unconfirmed = false;
        self.proven_at = None;
        self.listed_at = None;
        self.synced_since = None;
        self.count_indexes();
    }

    /// Records that upstream proved, as of `at`, that the version reached is current.
    pub fn proved(&mut self, at: Instant) {
        self.proven_at = self.proven_at.max(Some(at));
    }

    /// Records a complete, consistent list whose first request was sent at `at`. It is a proof too.
    pub fn listed(&mut self, at: Instant) {
        self.listed_at = self.listed_at.max(Some(at));
        self.proved(at);
    }

    /// Whether upstream was listed consistently after `at`: then a reader that came at that time
    /// needs no other proof.
    pub fn is_listed_after(&self, at: Instant) -> bool {
        self.state.is_some() && self.listed_at.is_some_and(|listed_at| listed_at > at)
    }

    /// Refuses readers once the last proof is older than `staleness_max`; `None`: never.
    pub fn limit_staleness(&mut self, staleness_max: Option<Duration>) {
        self.staleness_max = staleness_max;
    }

    /// Counts a list of upstream that has started.
    pub fn listing(&mut self) {
        self.lists += 1;
    }

    /// Replaces the warnings to readers over HTTP.
    pub fn warn(&mut self, warnings: &Warnings) {
        self.warnings = warnings.clone();
    }

    /// Warnings to readers over HTTP.
    pub fn warnings(&self) -> &Warnings {
        &self.warnings
    }

    /// The number of upstream lists that have started.
    pub fn lists(&self) -> u64 {
        self.lists
    }

    /// Whether it is served.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Reason why the resource is not served, or the last error upstream; may be empty.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The time since which it is served.
    pub fn synced_since(&self) -> Option<SystemTime> {
        self.synced_since
    }

    /// The time of the last proof; `None` if upstream never proved the version.
    pub fn proven_at(&self) -> Option<Instant> {
        self.proven_at
    }

    /// The age of the last proof; `None` if upstream never proved the version.
    pub fn age(&self, now: Instant) -> Option<Duration> {
        self.proven_at.map(|at| now.saturating_duration_since(at))
    }

    /// Whether the state was saved by the process before, and upstream has not confirmed it.
    pub fn is_unconfirmed(&self) -> bool {
        self.is_unconfirmed
    }

    /// The state, whether it may be served or not; `None` before the first list.
    pub fn state(&self) -> Option<&CachedState> {
        self.state.as_ref()
    }

    /// The state of this epoch; `None` if another history has started since.
    pub fn state_of(&self, epoch: u64) -> Option<&CachedState> {
        self.state.as_ref().filter(|state| state.epoch == epoch)
    }

    /// Continues a copy of the history of this epoch, as [`History::copy`]; `None` if another
    /// history has started since.
    pub fn copy_history(&self, epoch: u64, copy: &mut HistoryCopy, entries_max: usize) -> Option<bool> {
        Some(self.state_of(epoch)?.history.copy(copy, entries_max))
    }

    /// The state, for a reader.
    ///
    /// # Errors
    /// The reason why it may not be served.
    pub fn serving(&self, now: Instant) -> Result<&CachedState, Refusal> {
        match (self.phase, &self.state) {
            (_, Some(state)) => match (self.age(now), self.staleness_max) {
                (age, Some(staleness_max)) if age.is_none_or(|age| age > staleness_max) => {
                    let resource = self.resource.clone();
                    let message = self.message.clone();
                    Err(Refusal::Stale { resource, age, staleness_max, message })
                }
                _ => Ok(state),
            },
            (Phase::NotFound, None) => Err(Refusal::NotFound(self.message.clone())),
            (Phase::Forbidden, None) => Err(Refusal::Forbidden(self.message.clone())),
            (Phase::NotCached, None) => Err(Refusal::NotCached(self.message.clone())),
            (Phase::Failing, None) => {
                Err(Refusal::Failing { resource: self.resource.clone(), cause: self.cause.clone() })
            }
            (_, None) => Err(Refusal::NotSynced { resource: self.resource.clone(), message: self.message.clone() }),
        }
    }
}

#[cfg(test)]
mod tests;
