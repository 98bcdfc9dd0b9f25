//! The options of a reflector, its position, and the result of a step.

use std::{future::Future, pin::Pin, time::Duration};

use bytes::Bytes;
use kubefan_cache::{RelistReason, Update, warnings::Warnings};
use kubefan_common::planted::{self, Bug};
use kubefan_model::ResourceVersion;
use kubefan_telemetry::metrics::UpstreamWatchGuard;
use tokio::time::Instant;

use crate::{
    client::{BodyStream, lines::Lines},
    error::UpstreamError,
};

/// Options of a reflector.
#[derive(Debug, Clone, Copy)]
pub struct ReflectorOptions {
    /// Objects per page of a list.
    pub page_size: u32,
    /// Whether to request the initial state as a watch-list (`sendInitialEvents`), if the server
    /// supports it.
    pub watch_list: bool,
    /// The time without data after which a watch counts as dead. Bookmarks arrive about once a
    /// minute while the cluster's version advances.
    pub upstream_idle_timeout: Duration,
    /// The limit for one event, in bytes.
    pub line_bytes_max: usize,
}

/// Returns the further of two places of a watch. Within one version the later message counts:
/// another event shows that the version had not ended, which the cache treats as a fault. A
/// bookmark may be older than the last event, and going back to it would repeat events.
pub(super) fn further(reached: ResourceVersion, next: ResourceVersion) -> ResourceVersion {
    if next.whole() < reached.whole() { reached } else { next }
}

/// The position of the reflector. The documentation of this module describes the transitions.
pub(super) enum ListWatchState {
    /// Nothing usable is known. The next step lists, for `reason`.
    Empty { reason: RelistReason, form: ListForm },
    /// In a paged list.
    Paging(PagedList),
    /// In the initial events of a watch-list, started for `reason`.
    WatchListing { reason: RelistReason, watch: OpenWatch },
    /// Everything that was `reached` was emitted. The next step opens a watch from there.
    Listed { reached: ResourceVersion, doubt: Doubt },
    /// A watch is open, and everything that was `reached` was emitted.
    Watching { watch: OpenWatch, reached: ResourceVersion },
    /// A watch is open, and the objects are listed again.
    Rereading(Reread),
}

/// The form in which the next list is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum ListForm {
    /// A watch-list if the options and the server allow it, otherwise pages.
    #[default]
    WatchList,
    /// Pages, because a watch-list failed. Otherwise a server that never completes a watch-list
    /// (etcd without progress notifications, an extension apiserver that ignores the parameter)
    /// would never be read.
    Pages,
    /// One answer, because a continue token expired.
    Whole,
}

/// Whether the cluster may be below the version from which a watch is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Doubt {
    /// The cluster cannot be below the version.
    Never,
    /// The cluster may be below. Its version is queried after the watch was opened.
    AsksAfter,
    /// The cluster may be below, and the last query failed, so one comes before the watch too: if
    /// it failed again, the watch would be opened for nothing.
    AsksFirst,
}

/// The optional requests that the server has refused. They are not sent again.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RefusedRequests {
    /// Watch-lists: the server refused or ignored `sendInitialEvents`, or an object is too long for
    /// a line.
    pub(super) watch_list: bool,
    /// The query for the cluster's version. Without it only lists reveal that versions went back.
    pub(super) version_query: bool,
}

impl ListWatchState {
    /// Returns the state without usable data and without a memory of earlier lists.
    pub(super) fn empty(reason: RelistReason) -> Self {
        Self::Empty { reason, form: ListForm::default() }
    }

    /// Returns the state if a step fails and sets no other: the list starts over.
    pub(super) fn lost(&self) -> Self {
        Self::Empty { reason: self.relist_reason(), form: self.list_form() }
    }

    /// Returns the state after the failure of a watch that had `reached` a version or could not be
    /// opened from there. It continues from the version, in `doubt`, unless the error made the
    /// version useless.
    pub(super) fn after_watch(reached: ResourceVersion, doubt: Doubt, error: &UpstreamError) -> Self {
        match error {
            UpstreamError::Gone { .. } => Self::empty(RelistReason::Expired),
            // A new watch would send the same event again.
            UpstreamError::LineTooLong { .. } => Self::empty(RelistReason::LineTooLong),
            UpstreamError::NotFound { .. } => Self::empty(RelistReason::NotFound),
            UpstreamError::Forbidden { .. } => Self::empty(RelistReason::Forbidden),
            _ if planted::is(Bug::BrokenWatchTrusted) => Self::Listed { reached, doubt: Doubt::Never },
            _ => Self::Listed { reached, doubt },
        }
    }

    /// Returns the version from which a watch continues. `None` without a complete list, and while
    /// the objects are listed again.
    pub(super) fn reached(&self) -> Option<ResourceVersion> {
        match self {
            Self::Listed { reached, .. } | Self::Watching { reached, .. } => Some(*reached),
            Self::Empty { .. } | Self::Paging(_) | Self::WatchListing { .. } | Self::Rereading(_) => None,
        }
    }

    /// Returns the form of the list that follows if this state is discarded.
    pub(super) fn list_form(&self) -> ListForm {
        match self {
            Self::Empty { form, .. } => *form,
            Self::Paging(list) => list.form,
            Self::WatchListing { .. } | Self::Listed { .. } | Self::Watching { .. } | Self::Rereading(_) => {
                ListForm::default()
            }
        }
    }

    /// Returns the reason for the relist if this state is lost. A lost list passes its own reason
    /// on.
    pub(super) fn relist_reason(&self) -> RelistReason {
        match self {
            Self::Empty { reason, .. } | Self::Paging(PagedList { reason, .. }) | Self::WatchListing { reason, .. } => {
                *reason
            }
            Self::Rereading(Reread { reason, .. }) => *reason,
            Self::Listed { .. } | Self::Watching { .. } => RelistReason::Interrupted,
        }
    }
}

/// Time after the first failure of a page in which it may be requested again; then the list starts
/// over. If etcd was restored from a backup meanwhile, the next page would come from another
/// history than the pages before: a restored cluster refuses the token only until it has reached
/// the token's version again.
const PAGE_FAILING_MAX: Duration = Duration::from_secs(60);

/// The position in a paged list.
pub(super) struct PagedList {
    /// Reason of the list.
    pub(super) reason: RelistReason,
    /// The form of this list, and of the one that replaces it if it is discarded: in pages or
    /// whole.
    pub(super) form: ListForm,
    /// The continue token. `None` before the first page.
    pub(super) next: Option<String>,
    /// The version of the first page.
    pub(super) version: Option<ResourceVersion>,
    /// Failures of the next page in a row, and the time of the first.
    pub(super) failures: Option<(usize, Instant)>,
}

impl PagedList {
    /// Creates a list from its first page.
    pub(super) fn new(reason: RelistReason, form: ListForm) -> Self {
        let form = if form == ListForm::Whole { form } else { ListForm::Pages };
        Self { reason, form, next: None, version: None, failures: None }
    }

    /// Whether one answer has all objects.
    pub(super) fn is_whole(&self) -> bool {
        self.form == ListForm::Whole
    }

    /// Returns the state after the next page has failed: the list continues with the same page, or
    /// starts over.
    pub(super) fn after_failure(mut self, error: &UpstreamError, now: Instant) -> ListWatchState {
        // A single answer for all objects may be too long or too slow, so it is tried once. These
        // failures say nothing about that.
        if !matches!(error, UpstreamError::TooManyRequests { .. } | UpstreamError::Unreachable { .. }) {
            self.form = ListForm::Pages;
        }
        if error.is_passing() && self.page_may_be_retried(now) {
            return ListWatchState::Paging(self);
        }
        if matches!(error, UpstreamError::Gone { .. }) && self.next.is_some() {
            // etcd compacted the version of the pages meanwhile. A list without pages cannot expire
            // (client-go's pager does the same).
            return ListWatchState::Empty { reason: RelistReason::ContinueExpired, form: ListForm::Whole };
        }
        ListWatchState::Empty { reason: self.reason, form: self.form }
    }

    /// Whether the next page still belongs to the pages before. The wait after a failure may have
    /// been as long as an outage.
    pub(super) fn may_continue(&self, now: Instant) -> bool {
        self.failures.is_none_or(|(_, first)| now.duration_since(first) < PAGE_FAILING_MAX)
    }

    /// Notes a failure of the next page. Returns whether it may be requested again.
    fn page_may_be_retried(&mut self, now: Instant) -> bool {
        let (count, first) = self.failures.unwrap_or((0, now));
        self.failures = Some((count + 1, first));
        self.next.is_some() && self.may_continue(now)
    }
}

/// The answer to the request of a page.
pub(super) type PageResult = Result<(Bytes, Warnings), UpstreamError>;
/// The request of a page; it is sent when it is polled.
pub(super) type PageRequest = Pin<Box<dyn Future<Output = PageResult> + Send>>;

/// The position in a list beside an open watch.
pub(super) struct Reread {
    /// Reason of the list.
    pub(super) reason: RelistReason,
    /// The version of the list.
    pub(super) at: ResourceVersion,
    /// The continue token. `None` before the first page.
    pub(super) next: Option<String>,
    /// Failures of the page in a row.
    pub(super) failures: usize,
    /// The request of the page.
    pub(super) request: PageRequest,
    /// The watch.
    pub(super) watch: OpenWatch,
    /// Place that the watch has reached.
    pub(super) reached: ResourceVersion,
}

/// Input that was received on the open requests of a state.
pub(super) enum Input {
    /// The state has no open request.
    Nothing,
    /// The next page.
    Page(PageResult),
    /// The next line of the watch.
    Line(Result<Option<Bytes>, UpstreamError>),
}

impl Input {
    /// Returns the line of a watch; its end if there is no line.
    pub(super) fn line(self) -> Result<Option<Bytes>, UpstreamError> {
        if let Self::Line(line) = self { line } else { Ok(None) }
    }
}

impl Reread {
    /// Returns the state without the list.
    pub(super) fn without_list(self) -> ListWatchState {
        ListWatchState::Watching { watch: self.watch, reached: self.reached }
    }
}

impl ListWatchState {
    /// Returns the action of the next step if no update is pending.
    pub(super) fn next_step(&self) -> NextStep {
        match self {
            Self::Empty { .. } | Self::Paging(_) => NextStep::RequestList,
            Self::WatchListing { .. } => NextStep::ReadList,
            Self::Listed { .. } => NextStep::OpenWatch,
            Self::Watching { .. } | Self::Rereading(_) => NextStep::ReadWatch,
        }
    }

    /// Waits for the next input. Cancel-safe.
    pub(super) async fn input(&mut self) -> Input {
        match self {
            Self::Watching { watch, .. } => Input::Line(watch.lines.next_line().await),
            Self::Rereading(Reread { request, watch, .. }) => tokio::select! {
                biased;
                page = request => Input::Page(page),
                line = watch.lines.next_line() => Input::Line(line),
            },
            _ => Input::Nothing,
        }
    }
}

/// A watch whose response has started.
pub(super) struct OpenWatch {
    pub(super) lines: Lines<BodyStream>,
    pub(super) opened: Instant,
    /// Whether it has delivered a version beyond its start.
    pub(super) advanced: bool,
    pub(super) _guard: UpstreamWatchGuard,
}

/// The action of a reflector's next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextStep {
    /// The step returns an update that was read before.
    ReturnUpdate,
    /// The step requests a list, or a page of one.
    RequestList,
    /// The step reads from a list that upstream sends.
    ReadList,
    /// The step opens a watch.
    OpenWatch,
    /// The step reads from the open watch, and from a list beside it if there is one.
    ReadWatch,
}

/// The result of a step.
pub enum ReflectorEvent {
    /// An update for the cache.
    Update {
        /// The update.
        update: Update,
        /// The time at which its line was read; for the start of a list, the time of the request.
        received: Instant,
    },
    /// A watch was opened, so upstream is reachable and answers.
    Watching {
        /// The time of a consistent read that found the cluster at the watch's starting version, if
        /// there was one. The cache was fresh then.
        proven_at: Option<Instant>,
    },
    /// Proof of another kubefan: its version was current at `at`, and everything up to it was
    /// emitted.
    Proved {
        /// Latest time at which it was current.
        at: Instant,
    },
    /// The watch ended normally, or was silent for too long. The next step opens another.
    Ended {
        /// The label in metrics: `timeout` for a normal end, or `idle`.
        reason: &'static str,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_starts_below_a_version_that_may_have_more_events() {
        let event = |number| ResourceVersion::new(number).unwrap();
        let bookmark = |number| event(number).end();
        for (reached, expected) in [
            (bookmark(9), 9),
            (further(bookmark(9), event(10)), 9),
            (further(event(8), event(10)), 9),
            (further(event(10), bookmark(10)), 10),
            (further(event(10), bookmark(9)), 9),
            (further(bookmark(10), event(10)), 9),
            (event(1), 1),
        ] {
            assert_eq!(reached.read_from(), event(expected), "{reached:?}");
        }
    }

    fn paged(next: Option<&str>) -> PagedList {
        let list = PagedList::new(RelistReason::Initial, ListForm::default());
        PagedList { next: next.map(str::to_owned), ..list }
    }

    fn message() -> String {
        String::new()
    }

    fn busy() -> UpstreamError {
        UpstreamError::TooManyRequests { message: message(), retry_after: None }
    }

    fn broken() -> UpstreamError {
        UpstreamError::Server { code: 500, message: message(), retry_after: None }
    }

    fn gone() -> UpstreamError {
        UpstreamError::Gone { message: message() }
    }

    /// Returns a state in short.
    fn title(state: &ListWatchState) -> String {
        match state {
            ListWatchState::Empty { reason, form } => format!("{} as {form:?}", reason.as_str()),
            ListWatchState::Paging(_) => "the same page".to_owned(),
            ListWatchState::Listed { doubt, .. } => format!("{doubt:?}"),
            _ => "another state".to_owned(),
        }
    }

    #[test]
    fn a_failed_page_leads_to_the_same_page_or_to_another_list() {
        let whole = || PagedList::new(RelistReason::Expired, ListForm::Whole);
        let refused = || UpstreamError::Refused { code: 400, message: message() };
        let unreachable = || UpstreamError::Unreachable { server: message(), message: message() };
        for (list, error, expected) in [
            (paged(None), broken(), "initial as Pages"),
            (paged(None), gone(), "initial as Pages"),
            (paged(Some("token")), broken(), "the same page"),
            (paged(Some("token")), busy(), "the same page"),
            (paged(Some("token")), refused(), "initial as Pages"),
            (paged(Some("token")), gone(), "continue_expired as Whole"),
            (whole(), busy(), "expired as Whole"),
            (whole(), unreachable(), "expired as Whole"),
            (whole(), broken(), "expired as Pages"),
            (whole(), refused(), "expired as Pages"),
        ] {
            assert_eq!(title(&list.after_failure(&error, Instant::now())), expected, "{error}");
        }
    }

    #[test]
    fn a_failed_watch_leads_to_another_watch_or_to_a_list() {
        let reached = ResourceVersion::new(9).unwrap();
        let denied = UpstreamError::Forbidden { message: message() };
        let missing = UpstreamError::NotFound { message: message() };
        let too_long = UpstreamError::LineTooLong { line_bytes_max: 1 };
        for (doubt, error, expected) in [
            (Doubt::AsksAfter, broken(), "AsksAfter"),
            (Doubt::AsksFirst, busy(), "AsksFirst"),
            (Doubt::AsksAfter, gone(), "expired as WatchList"),
            (Doubt::AsksFirst, gone(), "expired as WatchList"),
            (Doubt::AsksAfter, too_long, "line_too_long as WatchList"),
            (Doubt::AsksAfter, missing, "not_found as WatchList"),
            (Doubt::AsksAfter, denied, "forbidden as WatchList"),
        ] {
            assert_eq!(title(&ListWatchState::after_watch(reached, doubt, &error)), expected, "{error}");
        }
    }

    #[test]
    fn a_list_that_is_discarded_passes_on_its_reason_and_how_it_is_requested() {
        let of = |reason, form| ListWatchState::Paging(PagedList::new(reason, form)).lost();
        assert_eq!(title(&of(RelistReason::Expired, ListForm::WatchList)), "expired as Pages");
        assert_eq!(title(&of(RelistReason::ContinueExpired, ListForm::Whole)), "continue_expired as Whole");
        let whole = ListWatchState::Empty { reason: RelistReason::ContinueExpired, form: ListForm::Whole };
        assert_eq!(title(&whole.lost()), "continue_expired as Whole");
        let listed = ListWatchState::Listed { reached: ResourceVersion::new(9).unwrap(), doubt: Doubt::Never };
        assert_eq!(title(&listed.lost()), "interrupted as WatchList");
    }

    #[test]
    fn a_page_is_retried_for_a_minute_and_then_the_list_starts_over() {
        let start = Instant::now();
        let mut list = paged(Some("token"));
        assert!(list.page_may_be_retried(start));
        assert!(list.page_may_be_retried(start + Duration::from_secs(59)));
        assert!(!list.page_may_be_retried(start + PAGE_FAILING_MAX));
        assert!(list.may_continue(start + Duration::from_secs(59)) && !list.may_continue(start + PAGE_FAILING_MAX));
        let mut first_page = paged(None);
        assert!(!first_page.page_may_be_retried(start));
    }
}
