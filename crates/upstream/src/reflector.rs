//! Lists and watches one resource in one scope: a state machine with a single step function.
//!
//! # The problem
//!
//! A list gives the state at one version, and a watch gives the changes after it. Either can fail
//! at any moment, and the failures differ: some lose nothing, some make the known version useless,
//! and some look like a quiet resource. Nested loops with a retry at each level hide which failure
//! leads where. Here the position is one value of `ListWatchState`. [`Reflector::step`] sends one
//! request or reads one event, and every failure sets the state from which the next step continues.
//! The caller's only decision is when to call `step` again.
//!
//! # The states
//!
//! | State | What is known | The next step |
//! |---|---|---|
//! | `Empty` | nothing usable, and how the next list is requested | starts a watch-list or a paged list |
//! | `Paging` | part of a list | requests the next page, or one that failed again |
//! | `WatchListing` | part of a watch-list | reads one initial event |
//! | `Listed` | everything up to a version, and whether the cluster may be below it | opens a watch from that version |
//! | `Watching` | everything up to a version | reads one event or bookmark |
//! | `Rereading` | the same, and part of a list at an earlier version | the same, or reads a page |
//!
//! ```text
//!    ┌──────────── the version or an object is lost ────────────┐
//!    ▼                                                          │
//!  Empty ──▶ Paging ───── last page ─────▶ Listed ── opened ──▶ Watching
//!    │                                       ▲                  │ ▲
//!    │                                       └── ended, broken ─┘ │
//!    └─────▶ WatchListing ── bookmark ends the initial events ────┘
//! ```
//!
//! A step takes the state out and leaves `Empty` in its place. A step that fails without setting
//! another state therefore restarts the list. This default is right, because half a list is
//! useless: objects deleted before it would never be noticed.
//!
//! # The failures
//!
//! Each failure has a single arm in the code, and leads to one state:
//!
//! - A failed first page or watch-list leads to `Empty`. The relist retains the reason of the list
//!   it replaces.
//! - A later page that fails for a moment (429, 5xx, a broken connection) stays in `Paging`: the
//!   next step requests the same page again, and the pages before it are kept. client-go's REST
//!   client does the same. After several failures in a row the list starts over.
//! - A continue token that expires (410 between pages) leads to `Empty`, and the next list is a
//!   single response without pages, because that cannot expire. client-go's pager does the same.
//!   If that fails too (it may be too long or too slow), the list after it has pages again.
//! - A server that refuses `sendInitialEvents` (400 or 422) leads to `Paging`, and watch-lists are
//!   not tried again. An initial event above the size limit also ends the use of watch-lists,
//!   because a page may be larger, and so does a message that a watch-list cannot contain, because
//!   the server ignores the parameter. Both lead to `Empty`.
//! - A watch-list that fails otherwise leads to `Empty`, and the next list is a paged one. Some
//!   servers never complete a watch-list: etcd without progress notifications, for example.
//! - A watch that ends normally, falls silent or breaks leads to `Listed` at the last version.
//!   Nothing is lost, so the next watch continues from there, or from below it if more events of
//!   that version may come. A connection can be half open or the resource quiet; if the former,
//!   opening the next watch fails.
//! - A watch that ends within a second without a new version also leads to `Listed`, but as an
//!   error, so that the caller backs off. Otherwise a broken server would be asked in a tight loop.
//! - A watch from an expired version (410, as a response or as an ERROR event) leads to `Empty`:
//!   events are missing, and only a list reveals their result.
//! - An event above the size limit, or one that cannot be parsed, leads to `Empty`. Skipping it
//!   would lose a change, and a new watch would receive it again.
//! - 403 and 404 on a watch lead to `Empty`, because nothing is known about the time until access
//!   or the resource returns.
//!
//! # Reading again beside a watch
//!
//! After a change of the schema the same versions of objects may have other bytes, which no event
//! shows. [`Reflector::reread`] lists the objects at exactly the version that the open watch has
//! reached. The watch is read meanwhile, so nothing is lost or late. If the list keeps failing, the
//! watch continues as if there had been none. If the watch ends, the list is given up. If upstream
//! cannot list that version, an ordinary list follows.
//!
//! # Several events at one version
//!
//! Upstream may send several events at one version, and a watch from a version gets none of that
//! version. So after an event the next watch starts below its version, and the cache drops the
//! repeated events. A later event, a bookmark or a list completes a version: the position is at its
//! end.
//!
//! # Doubt
//!
//! A new watch can fail without any error: an apiserver answers a watch from a version that it has
//! not reached with silence. If etcd was restored from a backup, the cluster's versions went back,
//! and the watch would stay silent while the cache serves state that no longer exists. A watch that
//! replaces an earlier one, or follows a paged list, therefore starts in doubt: the step then
//! queries the cluster's version with a consistent read. A lower version than the known one becomes
//! [`Update::WentBack`] and leads to `Empty`. An equal version proves that the cache is fresh. If
//! there is no answer, the watch is dropped, and the next one is opened only after a query that
//! succeeds: otherwise each attempt would open a watch at an apiserver that fails every consistent
//! read.
//!
//! Other rules follow client-go's reflector (`tools/cache/reflector.go`). The reflector emits
//! [`Update`]s in upstream's order, and knows neither caches nor subscribers. The parser determines
//! the encoding: JSON, protobuf or Tables.

mod cluster_version;
pub(super) mod codec;
mod error;
mod page_limit;
mod pages;
mod reread;
mod state;
mod target;
mod watch_list;

use std::{collections::VecDeque, sync::Arc, time::Duration};

use bytes::Bytes;
use kubefan_cache::{RelistReason, Update, warnings::Warnings};
use kubefan_common::planted::{self, Bug};
use kubefan_model::{Media, ResourceVersion, object::ObjectParser};
use kubefan_telemetry::metrics::UpstreamWatchGuard;
use rand::{RngExt, rngs::StdRng};
use tokio::time::Instant;

pub use crate::reflector::{
    error::ReflectorError,
    state::{NextStep, ReflectorEvent, ReflectorOptions},
    target::Target,
};
use crate::{
    client::{Upstream, Verb, encode_query, lines::LineOptions},
    error::UpstreamError,
    reflector::{
        cluster_version::version_path,
        codec::{WatchMessage, read_event, read_page},
        error::WATCH_SHORT,
        page_limit::PageLimit,
        state::{Doubt, ListForm, ListWatchState, OpenWatch, PagedList, RefusedRequests, Reread, further},
    },
};

/// The requested duration of a watch: a random time between this and twice this, as in client-go.
const WATCH_TIMEOUT_LEAST: Duration = Duration::from_secs(300);
/// The requested duration of a backfill watch. It is the shortest that the apiserver closes with a
/// bookmark, which proves that no event is missing: the apiserver sends that bookmark two seconds
/// before the end, and checks for due bookmarks about once a second.
const BACKFILL_WATCH_SECONDS: u64 = 3;

/// A list and watch of one [`Target`].
pub struct Reflector {
    upstream: Upstream,
    target: Target,
    parser: Arc<ObjectParser>,
    options: ReflectorOptions,
    open_watch: Arc<dyn Fn() -> UpstreamWatchGuard + Send + Sync>,
    random: StdRng,
    state: ListWatchState,
    /// The warnings in the last answer.
    warnings: Warnings,
    /// Updates that were read but not yet returned.
    ready: VecDeque<(Update, Instant)>,
    refused: RefusedRequests,
    /// Number of objects of the next page.
    page_limit: PageLimit,
    /// Set for a backfill: read only the events after this version, without a standing watch.
    backfills_from: Option<ResourceVersion>,
}

impl Reflector {
    /// Creates a reflector that starts with a list. `open_watch` counts a watch until its guard is
    /// dropped.
    pub fn new(
        upstream: Upstream,
        target: Target,
        parser: Arc<ObjectParser>,
        options: ReflectorOptions,
        open_watch: Arc<dyn Fn() -> UpstreamWatchGuard + Send + Sync>,
        random: StdRng,
    ) -> Self {
        Self {
            upstream,
            target,
            parser,
            options,
            open_watch,
            random,
            state: ListWatchState::empty(RelistReason::Initial),
            warnings: Warnings::default(),
            ready: VecDeque::new(),
            refused: RefusedRequests::default(),
            page_limit: PageLimit::new(options.page_size),
            backfills_from: None,
        }
    }

    /// Turns this into a backfill: a short watch of the events after `version`, preceded by the
    /// state at that version if `with_state`. Drop the reflector after any error, unless it is
    /// [within that list](Self::is_within_list).
    pub fn for_backfill(mut self, version: ResourceVersion, with_state: bool) -> Self {
        self.state = if with_state {
            // Only a list in pages can return the state at an older version.
            ListWatchState::Empty { reason: RelistReason::Backfill, form: ListForm::Pages }
        } else {
            ListWatchState::Listed { reached: version.end(), doubt: Doubt::Never }
        };
        self.backfills_from = Some(version);
        self
    }

    /// Discards the known state. The next step lists, for `reason`.
    pub fn relist(&mut self, reason: RelistReason) {
        self.ready.clear();
        self.state = ListWatchState::Empty { reason, form: self.state.list_form() };
    }

    /// Discards everything read after `version`. The next step continues from there, in doubt.
    pub fn resume_from(&mut self, version: ResourceVersion) {
        self.ready.clear();
        self.state = ListWatchState::Listed { reached: version, doubt: Doubt::AsksAfter };
    }

    /// Returns the version up to which everything was emitted. `None` if the next step lists, or
    /// within a list.
    pub(super) fn reached(&self) -> Option<ResourceVersion> {
        self.state.reached()
    }

    /// Returns the reason of the list that follows if the state is discarded.
    pub(super) fn relist_reason(&self) -> RelistReason {
        self.state.relist_reason()
    }

    /// Returns upstream's warnings for readers of the resource.
    pub fn warnings(&self) -> &Warnings {
        &self.warnings
    }

    /// Returns the action of the next step.
    pub fn next_step(&self) -> NextStep {
        if self.ready.is_empty() { self.state.next_step() } else { NextStep::ReturnUpdate }
    }

    /// Whether a list is in progress and has read a page, also if the next one has just failed.
    pub fn is_within_list(&self) -> bool {
        matches!(&self.state, ListWatchState::Paging(list) if list.next.is_some())
    }

    /// Advances the resume version, after a proof that no events lie in between.
    pub fn advance_to(&mut self, version: ResourceVersion) {
        if let ListWatchState::Watching { reached, .. }
        | ListWatchState::Listed { reached, .. }
        | ListWatchState::Rereading(Reread { reached, .. }) = &mut self.state
        {
            *reached = further(*reached, version.end());
        }
    }

    /// Performs one step: one request, or one line of a watch. After an error the next step
    /// continues from the last valid state.
    ///
    /// Cancel-safe if it [reads from the watch](NextStep::ReadWatch). Otherwise drop the reflector
    /// if a step is dropped.
    pub async fn step(&mut self) -> Result<ReflectorEvent, ReflectorError> {
        loop {
            if let Some((update, received)) = self.ready.pop_front() {
                return Ok(ReflectorEvent::Update { update, received });
            }
            let input = self.state.input().await;
            let lost = self.state.lost();
            return match std::mem::replace(&mut self.state, lost) {
                ListWatchState::Empty { reason, form: ListForm::WatchList }
                    if self.options.watch_list && !self.refused.watch_list =>
                {
                    self.start_watch_list(reason).await
                }
                ListWatchState::Empty { reason, form } => Ok(self.start_paging(reason, form)),
                ListWatchState::Paging(list) if !list.may_continue(Instant::now()) => {
                    Ok(self.start_paging(list.reason, list.form))
                }
                ListWatchState::Paging(list) => self.page(list).await,
                ListWatchState::WatchListing { reason, watch } => self.read_watch_list(reason, watch).await,
                ListWatchState::Listed { reached, doubt } => self.start_watch(reached, doubt).await,
                ListWatchState::Watching { watch, reached } => self.read_watch(watch, reached, input.line()),
                ListWatchState::Rereading(reread) => match self.read_beside(reread, input)? {
                    Some(step) => Ok(step),
                    None => continue,
                },
            };
        }
    }

    fn start_paging(&mut self, reason: RelistReason, form: ListForm) -> ReflectorEvent {
        self.state = ListWatchState::Paging(PagedList::new(reason, form));
        ReflectorEvent::Update { update: Update::ListBegin { reason }, received: Instant::now() }
    }

    async fn start_watch(&mut self, reached: ResourceVersion, doubt: Doubt) -> Result<ReflectorEvent, ReflectorError> {
        let from = if planted::is(Bug::ResumedWithinVersion) { reached.whole() } else { reached.read_from() };
        let from = from.to_string();
        let least = WATCH_TIMEOUT_LEAST.as_secs();
        let timeout = match self.backfills_from {
            Some(_) => BACKFILL_WATCH_SECONDS,
            None => self.random.random_range(least..2 * least),
        };
        let timeout = timeout.to_string();
        let query = [
            ("watch", "1"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", from.as_str()),
            ("timeoutSeconds", timeout.as_str()),
        ];
        // A backfill needs no answer: it starts behind the cache's own version.
        let doubt = if self.backfills_from.is_some() { Doubt::Never } else { doubt };
        if doubt == Doubt::AsksFirst {
            self.current_version(reached).await?;
        }
        let watch = match self.open(&query).await {
            Ok(watch) => watch,
            Err(error) => return Err(self.watch_failed(reached, Doubt::AsksAfter, error)),
        };
        // The query follows the watch: between an answer and a later watch etcd could be restored.
        let asked_at = Instant::now();
        let current = if doubt == Doubt::Never { None } else { self.current_version(reached).await? };
        if let Some(current) = current.filter(|current| *current < reached.whole()) {
            // Unlike a watch, a consistent read is never behind, whichever apiserver answers.
            self.state = ListWatchState::empty(RelistReason::Rewritten);
            return Ok(ReflectorEvent::Update { update: Update::WentBack { reached: current }, received: asked_at });
        }
        self.state = ListWatchState::Watching { watch, reached };
        let is_proven = current == Some(reached.whole()) && reached.is_end();
        Ok(ReflectorEvent::Watching { proven_at: is_proven.then_some(asked_at) })
    }

    /// Returns the cluster's version, for a watch that continues from the version `reached`. `None`
    /// if the server does not allow the query.
    async fn current_version(&mut self, reached: ResourceVersion) -> Result<Option<ResourceVersion>, ReflectorError> {
        if self.refused.version_query {
            return Ok(None);
        }
        match self.cluster_version().await? {
            Ok(current) => Ok(Some(current)),
            Err(UpstreamError::Refused { message, .. }) => {
                tracing::warn!(resource = %self.target.gvr, message, "upstream refuses the query for the cluster's version");
                self.refused.version_query = true;
                Ok(None)
            }
            // If kubefan lacks the right, the watch itself reports the problem, if there is one.
            Err(UpstreamError::Forbidden { .. } | UpstreamError::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.watch_failed(reached, Doubt::AsksFirst, error)),
        }
    }

    /// Queries the cluster's version. For Tables, the answer also shows whether the columns have
    /// changed since the cached rows were read, which a quiet watch would not show.
    async fn cluster_version(&mut self) -> Result<Result<ResourceVersion, UpstreamError>, ReflectorError> {
        let media = self.parser.media();
        if media != Media::Table {
            return Ok(self.upstream.cluster_version(&self.target).await);
        }
        match self.upstream.get_media(Verb::List, &version_path(&self.target, media.query()), media, usize::MAX).await {
            Ok((body, _)) => Ok(Ok(read_page(&self.parser, &self.target, &body)?.version)),
            Err(error) => Ok(Err(error)),
        }
    }

    fn read_watch(
        &mut self,
        mut watch: OpenWatch,
        reached: ResourceVersion,
        line: Result<Option<Bytes>, UpstreamError>,
    ) -> Result<ReflectorEvent, ReflectorError> {
        let line = match line {
            Ok(Some(line)) => line,
            Ok(None) => {
                self.state = ListWatchState::Listed { reached, doubt: Doubt::AsksAfter };
                let short = !watch.advanced && watch.opened.elapsed() < WATCH_SHORT;
                return if short {
                    Err(ReflectorError::VeryShortWatch)
                } else {
                    Ok(ReflectorEvent::Ended { reason: "timeout" })
                };
            }
            // Either the connection is half open, or the resource is quiet: an apiserver sends no
            // bookmark until the version has advanced beyond the watch's start. In the first case,
            // opening the next watch fails.
            Err(UpstreamError::Idle { .. }) => {
                self.state = ListWatchState::Listed { reached, doubt: Doubt::AsksAfter };
                return Ok(ReflectorEvent::Ended { reason: "idle" });
            }
            Err(error) => return Err(self.watch_failed(reached, Doubt::AsksAfter, error)),
        };
        let received = Instant::now();
        let (next, update) = match read_event(&self.parser, &line) {
            Ok(WatchMessage::Event(kind, object)) => (object.version(), Update::Event(kind, object)),
            Ok(WatchMessage::Bookmark { version, .. }) => (version.end(), Update::Bookmark(version.end())),
            Err(ReflectorError::Watch(error)) => return Err(self.watch_failed(reached, Doubt::AsksAfter, error)),
            Err(error) => {
                // Skipping the object would lose a change, and a new watch would send it again.
                // Only a list helps.
                self.state = ListWatchState::empty(RelistReason::BrokenObject);
                return Err(error);
            }
        };
        watch.advanced |= next.whole() > reached.whole();
        self.state = ListWatchState::Watching { watch, reached: further(reached, next) };
        Ok(ReflectorEvent::Update { update, received })
    }

    fn watch_failed(&mut self, reached: ResourceVersion, doubt: Doubt, error: UpstreamError) -> ReflectorError {
        self.state = ListWatchState::after_watch(reached, doubt, &error);
        ReflectorError::Watch(error)
    }

    async fn open(&mut self, query: &[(&str, &str)]) -> Result<OpenWatch, UpstreamError> {
        let options = LineOptions {
            line_bytes_max: self.options.line_bytes_max,
            idle_timeout: Some(self.options.upstream_idle_timeout),
            ..LineOptions::default()
        };
        let (lines, warnings) = self.upstream.watch(&self.path(query), self.parser.media(), options).await?;
        self.warnings = warnings;
        Ok(OpenWatch { lines, opened: Instant::now(), advanced: false, _guard: (self.open_watch)() })
    }

    fn path(&self, query: &[(&str, &str)]) -> String {
        let Target { gvr, scope, field_selector, .. } = &self.target;
        let selector = [("fieldSelector", field_selector.as_str())];
        gvr.collection_path(scope)
            + &encode_query(query.iter().copied().chain(selector).chain(self.parser.media().query()))
    }
}

#[cfg(test)]
mod tests;
