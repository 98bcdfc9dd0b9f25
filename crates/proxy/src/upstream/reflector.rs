//! One list and watch of one resource and scope, as a state machine with one step function.
//!
//! The parser decides whether it is read as JSON, as protobuf or as tables. It gives [`Update`]s in upstream's order and knows nothing of caches or subscribers. Where it stands is a value of `State`;
//! every failure leaves it in the state that the next step can go on from, so that retrying is the caller's only decision. The
//! rules are those of client-go's reflector (`tools/cache/reflector.go`).

use std::{collections::VecDeque, sync::Arc, time::Duration};

use bytes::Bytes;
use rand::{Rng, RngExt};
use tokio::time::Instant;

use super::{
    client::{BodyStream, Upstream, Verb, encode_query},
    cluster_version::version_path,
    codec::{Page, Told, read_event, read_page},
    error::UpstreamError,
    lines::{LineOptions, Lines},
    warnings::Warnings,
};
use crate::{cache::Update, telemetry::metrics::UpstreamWatchGuard};
use kubefan_model::{
    GroupVersionResource, Media, ResourceVersion, Scope,
    event::EventType,
    object::{ObjectError, ObjectParser},
};

/// What is listed and watched.
#[derive(Debug, Clone)]
pub struct Target {
    /// The resource.
    pub gvr: GroupVersionResource,
    /// Its kind, which list items lack.
    pub kind: String,
    /// Whether its objects have a namespace.
    pub namespaced: bool,
    /// The whole cluster, or one namespace.
    pub scope: Scope,
    /// Narrows what is cached; empty for everything.
    pub field_selector: String,
}

/// How it is done.
#[derive(Debug, Clone, Copy)]
pub struct ReflectorOptions {
    /// Objects per page of a list.
    pub page_size: u32,
    /// Whether the initial state is asked for as a watch (`sendInitialEvents`), where the server has it.
    pub watch_list: bool,
    /// The longest silence of a watch; bookmarks come about once a minute while the cluster's version moves.
    pub upstream_idle_timeout: Duration,
    /// The longest event, in bytes.
    pub line_bytes_max: usize,
}

/// How long a watch is asked to last: a random time between this and its double, as client-go asks.
const WATCH_TIMEOUT_LEAST: Duration = Duration::from_secs(300);
/// How long a watch for a look at the past is asked to last: the least that is closed with a bookmark, which tells that no event is missing
/// (the apiserver sends it two seconds before the end, and looks for those that are due once a second or so).
const BACKFILL_WATCH_SECONDS: u64 = 3;
/// A watch that ends sooner than this and has brought nothing new is a fault, not a timeout: without this a broken server would be
/// asked in a tight loop (`VeryShortWatchError` in client-go, which a bookmark that says nothing new gets past).
const WATCH_SHORT: Duration = Duration::from_secs(1);

/// Why a list begins when the cluster's version is below the one reached.
const REWRITTEN: &str = "rewritten";

/// Where the reflector stands.
enum State {
    /// Nothing is known, or what is known is too old: list.
    Empty { reason: &'static str },
    /// In the middle of a paged list, begun because of `reason`.
    Paging { reason: &'static str, next: Option<String>, version: Option<ResourceVersion> },
    /// Receiving the initial state as a watch, begun because of `reason`.
    WatchListing { reason: &'static str, watch: OpenWatch },
    /// Everything up to `version` was told; the next step watches from there. In doubt it first asks how far the cluster is: from a
    /// version that upstream has not reached a watch would be silent, not refused.
    Listed { version: ResourceVersion, in_doubt: bool },
    /// Watching.
    Watching { watch: OpenWatch, version: ResourceVersion },
}

impl State {
    /// Why a list has to begin if this state is lost: what began it is still the reason.
    fn relist_reason(&self) -> &'static str {
        match self {
            Self::Empty { reason } | Self::Paging { reason, .. } | Self::WatchListing { reason, .. } => reason,
            Self::Listed { .. } | Self::Watching { .. } => "interrupted",
        }
    }
}

struct OpenWatch {
    lines: Lines<BodyStream>,
    opened: Instant,
    /// It has brought a version beyond the one it started from.
    moved: bool,
    _counted: UpstreamWatchGuard,
}

/// What a step gave.
pub enum Step {
    /// Something for the cache; `received` is when its line was read.
    Update {
        /// What upstream said.
        update: Update,
        /// When; for the begin of a list, when it was asked for.
        received: Instant,
    },
    /// A watch was opened: upstream is reachable and answers.
    Watching {
        /// As of then, a consistent read has found the cluster at the version from which the watch goes on.
        proven_at: Option<Instant>,
    },
    /// The watch ended as agreed, or was silent for too long; the next step opens another.
    Ended {
        /// Which of the two, as a metric's label: `timeout` or `idle`.
        reason: &'static str,
    },
}

/// Why a step failed. The phase is named, because it tells what was not reached.
#[derive(Debug, thiserror::Error)]
pub enum ReflectorError {
    /// Listing failed.
    #[error("list: {0}")]
    List(#[source] UpstreamError),
    /// Opening or reading a watch failed.
    #[error("watch: {0}")]
    Watch(#[source] UpstreamError),
    /// An object could not be read.
    #[error("upstream sent a broken object: {0}")]
    Object(#[from] ObjectError),
    /// The watch ended at once and brought nothing new.
    #[error("the watch ended within {WATCH_SHORT:?} and brought nothing new")]
    VeryShortWatch,
}

impl ReflectorError {
    /// The upstream error, where it was one.
    pub fn upstream(&self) -> Option<&UpstreamError> {
        match self {
            Self::List(error) | Self::Watch(error) => Some(error),
            Self::Object(_) | Self::VeryShortWatch => None,
        }
    }

    /// The label in metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::List(error) | Self::Watch(error) => error.reason(),
            Self::Object(_) => "broken_object",
            Self::VeryShortWatch => "very_short_watch",
        }
    }
}

/// One standing list and watch.
pub struct Reflector<R> {
    upstream: Upstream,
    target: Target,
    parser: Arc<ObjectParser>,
    options: ReflectorOptions,
    open_watch: Arc<dyn Fn() -> UpstreamWatchGuard + Send + Sync>,
    random: R,
    state: State,
    /// What the last answer said of the resource.
    warnings: Warnings,
    /// Read but not yet given out.
    ready: VecDeque<(Update, Instant)>,
    /// The server has refused `sendInitialEvents`, or an object is too long for a line.
    watch_list_refused: bool,
    /// Receiving the initial state as a watch has failed: the next state comes by a list, or a server that cannot do the former
    /// (etcd without progress notifications, an extension apiserver that ignores the wish) would never be read.
    list_next: bool,
    /// The server does not take the question how far the cluster is; then only its lists tell that versions went back.
    question_refused: bool,
    /// A page expired under way: the next list is asked for in one piece.
    unpaged: bool,
    /// It only reads what came after this version, and has no standing watch.
    backfills_from: Option<ResourceVersion>,
}

impl<R: Rng> Reflector<R> {
    /// A reflector that begins with a list. `open_watch` counts a watch for as long as its guard lives.
    pub fn new(
        upstream: Upstream,
        target: Target,
        parser: Arc<ObjectParser>,
        options: ReflectorOptions,
        open_watch: Arc<dyn Fn() -> UpstreamWatchGuard + Send + Sync>,
        random: R,
    ) -> Self {
        Self {
            upstream,
            target,
            parser,
            options,
            open_watch,
            random,
            state: State::Empty { reason: "initial" },
            warnings: Warnings::default(),
            ready: VecDeque::new(),
            watch_list_refused: false,
            list_next: false,
            question_refused: false,
            unpaged: false,
            backfills_from: None,
        }
    }

    /// The same for a short look at the past: it reads what came after `version`, where the state at that version comes first if it is
    /// asked for. Whoever uses it lets go of it after any error.
    pub fn backfilling(mut self, version: ResourceVersion, with_state: bool) -> Self {
        self.state = match with_state {
            true => State::Empty { reason: "backfill" },
            false => State::Listed { version, in_doubt: false },
        };
        // Only a list gives the state of an older version.
        self.watch_list_refused = true;
        self.backfills_from = Some(version);
        self
    }

    /// Forgets what is known: the next step lists, because of `reason`.
    pub fn relist(&mut self, reason: &'static str) {
        self.ready.clear();
        self.state = State::Empty { reason };
    }

    /// Forgets what was read after `version`: the next step goes on from there.
    pub fn go_on_from(&mut self, version: ResourceVersion) {
        self.ready.clear();
        self.state = State::Listed { version, in_doubt: true };
    }

    /// What upstream warns of whoever reads the resource.
    pub fn warnings(&self) -> &Warnings {
        &self.warnings
    }

    /// Whether the next step reads on in the watch that is open: nothing else is under way.
    pub fn is_watching(&self) -> bool {
        matches!(self.state, State::Watching { .. }) && self.ready.is_empty()
    }

    /// Takes it that nothing has changed up to `version`: what follows goes on from there.
    pub fn nothing_until(&mut self, reached: ResourceVersion) {
        if let State::Watching { version, .. } | State::Listed { version, .. } = &mut self.state {
            *version = reached.max(*version);
        }
    }

    /// Does one step: a request, or one line of a watch. After an error the next step goes on from the last state that is
    /// known to be good. Not cancel-safe: drop the reflector if a step is dropped.
    pub async fn step(&mut self) -> Result<Step, ReflectorError> {
        if let Some((update, received)) = self.ready.pop_front() {
            return Ok(Step::Update { update, received });
        }
        let lost = State::Empty { reason: self.state.relist_reason() };
        match std::mem::replace(&mut self.state, lost) {
            State::Empty { reason } if self.options.watch_list && !self.watch_list_refused && !self.list_next => {
                self.begin_watch_list(reason).await
            }
            State::Empty { reason } => {
                self.state = State::Paging { reason, next: None, version: None };
                Ok(Step::Update { update: Update::ListBegin { reason }, received: Instant::now() })
            }
            State::Paging { reason, next, version } => self.page(reason, next, version).await,
            State::WatchListing { reason, watch } => self.watch_list(reason, watch).await,
            State::Listed { version, in_doubt } => self.begin_watch(version, in_doubt).await,
            State::Watching { watch, version } => self.watch(watch, version).await,
        }
    }

    async fn begin_watch_list(&mut self, reason: &'static str) -> Result<Step, ReflectorError> {
        let query = [
            ("watch", "1"),
            ("sendInitialEvents", "true"),
            ("resourceVersionMatch", "NotOlderThan"),
            ("allowWatchBookmarks", "true"),
        ];
        let begun = Instant::now();
        match self.open(&query).await {
            Ok(watch) => {
                self.state = State::WatchListing { reason, watch };
                Ok(Step::Update { update: Update::ListBegin { reason }, received: begun })
            }
            // A server without the feature refuses the parameter (422), or the request (400) if it is older than the parameter.
            Err(UpstreamError::Refused { code: 400 | 422, message }) => {
                tracing::info!(resource = %self.target.gvr, message, "upstream has no WatchList; listing instead");
                self.watch_list_refused = true;
                self.state = State::Paging { reason, next: None, version: None };
                Ok(Step::Update { update: Update::ListBegin { reason }, received: Instant::now() })
            }
            Err(error) => Err(ReflectorError::List(error)),
        }
    }

    /// Any failure before the bookmark that ends the initial state means to begin again: half a state is none.
    async fn watch_list(&mut self, reason: &'static str, mut watch: OpenWatch) -> Result<Step, ReflectorError> {
        // Unless this line turns out to be a good one.
        self.list_next = true;
        let line = match watch.lines.next_line().await {
            Ok(Some(line)) => line,
            Ok(None) => return Err(ReflectorError::List(ended_early())),
            Err(error) => {
                // A list's page may be longer than a line: only a list gets past this object.
                self.watch_list_refused |= matches!(error, UpstreamError::LineTooLong { .. });
                return Err(ReflectorError::List(error));
            }
        };
        let received = Instant::now();
        let update = match read_event(&self.parser, &line).map_err(ReflectorError::into_list)? {
            Told::Event(EventType::Added, object) => Update::ListItem(object),
            Told::Bookmark { version, ends_initial_state: true } => {
                self.list_next = false;
                self.state = State::Watching { watch, version };
                self.ready.push_back((Update::ListEnd(version), received));
                return Ok(Step::Watching { proven_at: None });
            }
            // A server that ignores the parameters would send the state without an end, or events of a plain watch.
            Told::Event(..) | Told::Bookmark { .. } => {
                self.watch_list_refused = true;
                return Err(ReflectorError::List(UpstreamError::invalid(
                    "initial state was asked for as a watch; got events",
                )));
            }
        };
        self.list_next = false;
        self.state = State::WatchListing { reason, watch };
        Ok(Step::Update { update, received })
    }

    async fn page(
        &mut self,
        reason: &'static str,
        mut next: Option<String>,
        mut version: Option<ResourceVersion>,
    ) -> Result<Step, ReflectorError> {
        // Until there is something to give: with a selector a page may be empty and not the last.
        loop {
            let asked = next;
            let body = self.get_page(asked.as_deref()).await.map_err(ReflectorError::List)?;
            let received = Instant::now();
            let Page { version: page_version, next: following, objects } =
                read_page(&self.parser, &self.target, &body)?;
            let list_version = *version.get_or_insert(page_version);
            self.ready = objects.into_iter().map(|object| (Update::ListItem(object), received)).collect();
            next = following;
            // It would be asked for without end.
            if next.is_some() && next == asked {
                let error = UpstreamError::invalid("a page of a list is followed by itself");
                self.ready.clear();
                return Err(ReflectorError::List(error));
            }
            if next.is_none() {
                (self.unpaged, self.list_next) = (false, false);
                self.ready.push_back((Update::ListEnd(list_version), received));
            }
            if let Some((update, received)) = self.ready.pop_front() {
                self.state = match next {
                    Some(_) => State::Paging { reason, next, version },
                    None => State::Listed { version: list_version, in_doubt: false },
                };
                return Ok(Step::Update { update, received });
            }
        }
    }

    async fn get_page(&mut self, next: Option<&str>) -> Result<Bytes, UpstreamError> {
        let limit = self.options.page_size.to_string();
        let limit = Some(("limit", limit.as_str())).filter(|_| !self.unpaged);
        let mut query: Vec<_> = limit.into_iter().chain(next.map(|next| ("continue", next))).collect();
        let exact = self.backfills_from.filter(|_| next.is_none()).map(|version| version.to_string());
        if let Some(version) = &exact {
            query.extend([("resourceVersion", version.as_str()), ("resourceVersionMatch", "Exact")]);
        }
        let path = self.path(&query);
        let result = self.upstream.get_media(Verb::List, &path, self.parser.media()).await;
        let result = result.map(|(body, warnings)| {
            self.warnings = warnings;
            body
        });
        if let Err(error) = &result {
            // The pages' version was compacted under way: one unpaged list cannot expire (client-go's pager does the same).
            let expired = matches!(error, UpstreamError::Gone { .. }) && next.is_some();
            if expired {
                self.unpaged = true;
                self.state = State::Empty { reason: "continue_expired" };
            }
        }
        result
    }

    async fn begin_watch(&mut self, version: ResourceVersion, in_doubt: bool) -> Result<Step, ReflectorError> {
        let mut proven_at = None;
        // What is looked at in the past is behind what the cache itself was told.
        if in_doubt && !self.question_refused && self.backfills_from.is_none() {
            let asked_at = Instant::now();
            match self.cluster_version().await? {
                Ok(reached) if reached < version => {
                    // Unlike a watch, a consistent read is never behind, whichever apiserver answers it.
                    self.state = State::Empty { reason: REWRITTEN };
                    return Ok(Step::Update { update: Update::WentBack { reached }, received: asked_at });
                }
                Ok(reached) => proven_at = (reached == version).then_some(asked_at),
                Err(UpstreamError::Refused { message, .. }) => {
                    tracing::warn!(resource = %self.target.gvr, message, "upstream does not tell the cluster's version");
                    self.question_refused = true;
                }
                // Where this may not be asked, the watch itself tells what is wrong, if anything is.
                Err(UpstreamError::Forbidden { .. } | UpstreamError::NotFound { .. }) => {}
                Err(error) => return Err(self.watch_failed(version, error)),
            }
        }
        let from = version.to_string();
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
        match self.open(&query).await {
            Ok(watch) => {
                self.state = State::Watching { watch, version };
                Ok(Step::Watching { proven_at })
            }
            Err(error) => Err(self.watch_failed(version, error)),
        }
    }

    /// How far the cluster is. In a table that also tells whether the columns are still those of the rows that are held: a quiet watch
    /// would not.
    async fn cluster_version(&mut self) -> Result<Result<ResourceVersion, UpstreamError>, ReflectorError> {
        let media = self.parser.media();
        if media != Media::Table {
            return Ok(self.upstream.cluster_version(&self.target).await);
        }
        match self.upstream.get_media(Verb::List, &version_path(&self.target, media.query()), media).await {
            Ok((body, _)) => Ok(Ok(read_page(&self.parser, &self.target, &body)?.version)),
            Err(error) => Ok(Err(error)),
        }
    }

    async fn watch(&mut self, mut watch: OpenWatch, version: ResourceVersion) -> Result<Step, ReflectorError> {
        let line = match watch.lines.next_line().await {
            Ok(Some(line)) => line,
            Ok(None) => {
                self.state = State::Listed { version, in_doubt: true };
                let short = !watch.moved && watch.opened.elapsed() < WATCH_SHORT;
                return if short { Err(ReflectorError::VeryShortWatch) } else { Ok(Step::Ended { reason: "timeout" }) };
            }
            // A half-open connection, or a resource that is quiet: an apiserver sends no bookmark before the version has moved beyond
            // the one that the watch began with. If it is the former, opening the next watch fails.
            Err(UpstreamError::Idle { .. }) => {
                self.state = State::Listed { version, in_doubt: true };
                return Ok(Step::Ended { reason: "idle" });
            }
            Err(error) => return Err(self.watch_failed(version, error)),
        };
        let received = Instant::now();
        let (reached, update) = match read_event(&self.parser, &line) {
            Ok(Told::Event(kind, object)) => (object.version(), Update::Event(kind, object)),
            Ok(Told::Bookmark { version, .. }) => (version, Update::Bookmark(version)),
            Err(ReflectorError::Watch(error)) => return Err(self.watch_failed(version, error)),
            Err(error) => {
                // Going on after it would lose a change; the same line would come again: only a list gets past it.
                self.state = State::Empty { reason: "broken_object" };
                return Err(error);
            }
        };
        watch.moved |= reached > version;
        // A bookmark may be older than what was told; going back to it would repeat events.
        self.state = State::Watching { watch, version: version.max(reached) };
        Ok(Step::Update { update, received })
    }

    /// Goes on from the last version, unless that is too old.
    fn watch_failed(&mut self, version: ResourceVersion, error: UpstreamError) -> ReflectorError {
        self.state = match &error {
            UpstreamError::Gone { .. } => State::Empty { reason: "expired" },
            // The event would come again as long.
            UpstreamError::LineTooLong { .. } => State::Empty { reason: "line_too_long" },
            UpstreamError::NotFound { .. } => State::Empty { reason: "not_found" },
            UpstreamError::Forbidden { .. } => State::Empty { reason: "forbidden" },
            _ => State::Listed { version, in_doubt: true },
        };
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
        Ok(OpenWatch { lines, opened: Instant::now(), moved: false, _counted: (self.open_watch)() })
    }

    fn path(&self, query: &[(&str, &str)]) -> String {
        let Target { gvr, scope, field_selector, .. } = &self.target;
        let selector = Some(("fieldSelector", field_selector.as_str())).filter(|(_, selector)| !selector.is_empty());
        gvr.collection_path(scope)
            + &encode_query(query.iter().copied().chain(selector).chain(self.parser.media().query()))
    }
}

impl ReflectorError {
    fn into_list(self) -> Self {
        match self {
            Self::Watch(error) => Self::List(error),
            other => other,
        }
    }
}

fn ended_early() -> UpstreamError {
    UpstreamError::Reset { message: "the watch ended before the initial state was complete".to_owned() }
}
