//! A watch that survives its connection.
//!
//! Every message that can be resumed from carries a `resume_version`. The watch stores the last
//! one, and reconnects with it: the server then sends exactly the changes in between. The watch
//! never resumes from an object's own resource version, because that does not say which changes the
//! selector has already covered.
//!
//! Compressed chunks and deltas become plain events here. If a delta does not fit its base, the
//! watch reconnects with its last `resume_version` and without `state_kept`, so that the server
//! sends the same event again with the whole object. (A Get would return the object's newest state
//! instead, and so skip the states before it.)
//!
//! A token ends sooner than a watch. kubefan then ends the stream, and the watch resumes with the
//! token that the file has by then.
//!
//! A server may ask a stream to continue on a new connection, because other replicas have fewer
//! streams or the connection is old. The watch does so at once, and its caller does not notice.

use std::{collections::VecDeque, time::Duration};

use futures::Stream;
use rand::rngs::SmallRng;
use tokio::time::{Instant, sleep_until, timeout_at};
use tonic::{Code, Streaming, codegen::http::HeaderValue};

pub use self::watch_options::{DELTA_BASE_BYTES_MAX, OnExpired, OnLag, WatchOptions};
use super::{
    client::{self, Client},
    delta_base::{DeltaBase, DeltaBaseError},
    projection::Projection,
};
use crate::{error::ClientError, random::generator, version};
use kubefan_common::{
    backoff::Backoff,
    encoding::{Encoding, chunk, delta},
    proto::v1alpha1::{self, Event, ResolvedResource, Target, WatchRequest, WatchResponse, watch_response::Message},
    reasons::ErrorReason,
};

/// The server ends a watch at its timeout. If it is this late, the client ends the watch itself.
const TIMEOUT_GRACE: Duration = Duration::from_secs(2);

/// The reasons of a stream that the server asks to continue on a new connection, at once.
const MOVED: [ErrorReason; 2] = [ErrorReason::Rebalanced, ErrorReason::ConnectionAge];

/// A stream that is moved sooner than this after it was opened has failed: otherwise a server that
/// moves every stream would be asked in a tight loop.
const MOVED_AFTER: Duration = Duration::from_secs(5);

/// An item of a watch.
#[derive(Debug, Clone, PartialEq)]
pub enum WatchItem {
    /// A snapshot starts. The events up to `SnapshotEnd` are the complete state and replace
    /// everything the caller knew. If the connection breaks inside it, a snapshot starts again.
    SnapshotBegin {
        /// The resource version of the state.
        resource_version: String,
        /// The resource as kubefan resolved it.
        resource: Option<ResolvedResource>,
        /// The version that history could not resume from, if that is why this snapshot is sent
        /// ([`OnExpired::Restart`]). Otherwise empty.
        restarted_from: String,
    },
    /// The snapshot is complete.
    SnapshotEnd {
        /// The number of objects sent.
        object_count: i64,
    },
    /// An object was added, modified or deleted.
    Event(Event),
    /// A marked gap starts: kubefan had to relist, and the single changes in between are unknown.
    /// The events up to `GapEnd` lead to the state after the gap. After a break inside it, the gap
    /// may start again.
    GapBegin {
        /// Up to this version the stream was exact.
        resource_version: String,
        /// Reason of the relist: a value of the `reason` label of `kubefan_relists_total`, such as
        /// `expired`.
        reason: String,
    },
    /// The gap is complete. The stream is exact again.
    GapEnd,
    /// A marked catch-up starts: the stream had fallen behind. The events up to `CatchUpEnd` lead
    /// to a later state and report each changed object once, in its latest state. After a break
    /// inside it, the catch-up may start again.
    CatchUpBegin {
        /// Up to this version the stream was exact.
        resource_version: String,
    },
    /// The catch-up is complete. The stream is exact again.
    CatchUpEnd,
    /// Only [`WatchStream::resume_version`] has moved.
    Bookmark,
    /// The connection broke. The watch retries by itself. If a `GapBegin` or `CatchUpBegin` was not
    /// closed, the caller must undo the events since then, or hold such events back until the end
    /// mark: an object that was added inside and has since been deleted is never reported as
    /// deleted.
    Disconnected {
        /// Reason of the break.
        error: ClientError,
        /// The delay before the next attempt.
        retry_in: Duration,
    },
    /// The connection is back. The next events continue without a loss, unless a mark says
    /// otherwise: a `CatchUpBegin`, or a `SnapshotBegin` with `restarted_from`. On a quiet watch it
    /// may take long until the next item.
    Reconnected {
        /// The version that the watch resumes after. Empty if the first snapshot was incomplete, so
        /// the watch starts over.
        from: String,
    },
    /// History cannot resume from the version, so a snapshot follows ([`OnExpired::Restart`]).
    Restarted {
        /// The server's error.
        error: ClientError,
    },
}

/// A running watch. Drop it to end the watch.
#[derive(Debug)]
pub struct WatchStream {
    client: Client,
    target: Target,
    options: WatchOptions,
    resume_version: String,
    /// The cluster of `resume_version`, sent with it.
    cluster: String,
    /// The cluster of the version that the current snapshot ends with.
    next_cluster: Option<String>,
    /// Set by the first read.
    deadline: Option<Instant>,
    backoff: Backoff,
    rng: SmallRng,
    broken: bool,
    /// Time at which the last stream was opened.
    opened_at: Option<Instant>,
    /// Authorization header of the last request.
    sent: Option<HeaderValue>,
    /// `Some` if deltas are requested.
    delta_base: Option<DeltaBase>,
    /// Whether the delta base is the state at exactly `resume_version`, and not on the way to a
    /// later one.
    delta_base_is_current: bool,
    /// Events of a snapshot chunk that are not yet returned.
    chunk: VecDeque<Event>,
    /// The metadata `kubefan-fallback` of the last answer.
    fallback_budget: Option<String>,
    state: ConnectionState,
}

#[derive(Debug)]
enum ConnectionState {
    Waiting(Option<Instant>),
    Open(Box<Streaming<WatchResponse>>),
    Ended,
}

impl Client {
    /// Starts a watch: first the current state (unless [`WatchOptions::resource_version`] is set),
    /// then every change, for as long as the stream is read. Nothing is sent before the first read.
    pub fn watch(&self, target: Target, options: WatchOptions) -> WatchStream {
        WatchStream::new(self.clone(), target, options)
    }
}

impl WatchStream {
    fn new(client: Client, target: Target, options: WatchOptions) -> Self {
        Self {
            client,
            target,
            resume_version: options.resource_version.clone(),
            cluster: options.cluster.clone(),
            next_cluster: None,
            deadline: None,
            backoff: Backoff::new(options.backoff.clone()),
            rng: generator(options.seed),
            broken: options.reports_first_connection,
            opened_at: None,
            sent: None,
            delta_base: (options.encoding == Encoding::ZstdDelta)
                .then(|| DeltaBase::new(options.delta_base_bytes_max, delta::OBJECT_BYTES_MAX)),
            delta_base_is_current: false,
            chunk: VecDeque::new(),
            fallback_budget: None,
            state: ConnectionState::Waiting(None),
            options,
        }
    }

    /// The version to resume from: [`Self::next`] has returned every event at or below it. Empty
    /// until the first snapshot is complete.
    pub fn resume_version(&self) -> &str {
        &self.resume_version
    }

    /// The cluster of that version, for [`WatchOptions::cluster`]. Empty if it is unknown.
    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// The cluster that the last snapshot named, also before its end. Empty if it is unknown.
    pub fn snapshot_cluster(&self) -> &str {
        self.next_cluster.as_deref().unwrap_or(&self.cluster)
    }

    /// The number of clients, and of the requests that they may start at the apiserver while
    /// kubefan is away, as kubefan last told them (metadata `kubefan-fallback`). `None` if it told
    /// nothing.
    pub fn fallback_budget(&self) -> Option<&str> {
        self.fallback_budget.as_deref()
    }

    /// Returns the next item, or `None` after the timeout. After an error the watch has ended.
    ///
    /// Cancel-safe: no item is lost or returned twice.
    ///
    /// # Errors
    /// The error of a call that a retry cannot fix, such as `PERMISSION_DENIED`, and with
    /// [`OnExpired::Fail`] an expired version ([`ClientError::is_expired`]). `UNAUTHENTICATED` is
    /// one of them, unless a [token file](crate::ClientOptions::token_file) has another token, or a
    /// token from it was accepted before. Other errors are reported as
    /// [`WatchItem::Disconnected`] and retried.
    pub async fn next(&mut self) -> Option<Result<WatchItem, ClientError>> {
        if self.deadline.is_none() {
            self.deadline = self.options.timeout.map(|timeout| Instant::now() + timeout);
        }
        loop {
            if let Some(event) = self.chunk.pop_front() {
                return Some(Ok(WatchItem::Event(event)));
            }
            match &mut self.state {
                ConnectionState::Ended => return None,
                ConnectionState::Waiting(until) => {
                    if let Some(until) = *until {
                        let wake = self.deadline.map_or(until, |deadline| deadline.min(until));
                        sleep_until(wake).await;
                    }
                    let Some(request) = self.request() else {
                        self.state = ConnectionState::Ended;
                        return None;
                    };
                    self.sent = match self.client.authorization().await {
                        Ok(token) => token,
                        Err(error) => return Some(self.failed(error)),
                    };
                    match self.client.service.watch(client::request(request, self.sent.clone())).await {
                        Ok(response) => {
                            self.client.note_budget(response.metadata());
                            let budget = response.metadata().get("kubefan-fallback");
                            self.fallback_budget = budget.and_then(|budget| budget.to_str().ok()).map(str::to_owned);
                            self.state = ConnectionState::Open(Box::new(response.into_inner()));
                            self.opened_at = Some(Instant::now());
                            self.next_cluster = None;
                            if std::mem::take(&mut self.broken) {
                                return Some(Ok(WatchItem::Reconnected { from: self.resume_version.clone() }));
                            }
                        }
                        Err(status) => {
                            let is_refused = status.code() == Code::Unauthenticated;
                            let token = &self.client.token;
                            if !is_refused || token.replacement(self.sent.as_ref()).await.is_none() {
                                return Some(self.failed(self.client.error(&status)));
                            }
                        }
                    }
                }
                ConnectionState::Open(stream) => match message_before(stream, self.deadline).await {
                    Ok(Some(response)) => match self.accept(response) {
                        Ok(Some(item)) => return Some(Ok(item)),
                        // A chunk, or an unknown message of a newer server. Its resume version
                        // counts anyway.
                        Ok(None) => continue,
                        Err(message) => return Some(Ok(self.undecodable(message))),
                    },
                    Ok(None) if self.options.timeout.is_some() => self.state = ConnectionState::Ended,
                    Ok(None) => {
                        let ended = tonic::Status::unavailable("the stream ended");
                        return Some(self.failed(self.client.error(&ended)));
                    }
                    Err(status) => {
                        let error = self.client.error(&status);
                        if !self.is_moved(&error) {
                            return Some(self.failed(error));
                        }
                        // Nothing was lost, and nothing has failed.
                        self.state = ConnectionState::Waiting(None);
                    }
                },
            }
        }
    }

    /// Converts the watch to a [`Stream`].
    pub fn into_stream(self) -> impl Stream<Item = Result<WatchItem, ClientError>> + Send {
        futures::stream::unfold(self, |mut watch| async move { watch.next().await.map(|item| (item, watch)) })
    }

    /// The request for the rest of the watch; `None` if the timeout has passed.
    fn request(&mut self) -> Option<WatchRequest> {
        let timeout_seconds = match self.deadline {
            None => 0,
            Some(deadline) => {
                let rest = deadline.checked_duration_since(Instant::now()).filter(|rest| !rest.is_zero())?;
                i64::try_from(rest.as_millis().div_ceil(1000)).unwrap_or(i64::MAX)
            }
        };
        if !self.delta_base_is_current {
            // It has parts of a span that broke off, and no later message needs to undo them.
            if let Some(base) = &mut self.delta_base {
                base.clear();
            }
        }
        // If deltas had to be given up, this requests the same bytes that the deltas produced: the
        // canonical form.
        let (encoding, canonical) = match (self.options.encoding, &self.delta_base) {
            (Encoding::ZstdDelta, None) => (Encoding::Zstd, true),
            (encoding, _) => (encoding, false),
        };
        let drop_managed_fields = canonical || self.options.projection.drop_managed_fields;
        let projection = Projection { drop_managed_fields, ..self.options.projection.clone() };
        let projection = projection.message(self.options.only_changes);
        let (resource_version, version_is_complete) = version::sent(&self.resume_version);
        Some(WatchRequest {
            target: Some(self.target.clone()),
            resource_version,
            version_is_complete,
            cluster: self.cluster.clone(),
            timeout_seconds,
            bookmark_interval: self.options.bookmark_interval.and_then(|interval| interval.try_into().ok()),
            projection,
            encoding: v1alpha1::Encoding::from(encoding).into(),
            state_kept: self.delta_base.as_ref().is_some_and(DeltaBase::is_complete),
            on_lag: match self.options.on_lag {
                OnLag::Expire => v1alpha1::OnLag::Expire.into(),
                OnLag::Conflate => v1alpha1::OnLag::Conflate.into(),
            },
            on_expired: match self.options.on_expired {
                OnExpired::Fail => v1alpha1::OnExpired::Fail.into(),
                OnExpired::Restart => v1alpha1::OnExpired::Restart.into(),
            },
        })
    }

    /// Applies a message and returns its item; `None` if the message only adds to `chunk` or is
    /// unknown. If it cannot be decoded, `resume_version` does not move.
    fn accept(&mut self, response: WatchResponse) -> Result<Option<WatchItem>, DeltaBaseError> {
        let item = match response.message {
            None => None,
            Some(Message::SnapshotBegin(begin)) => {
                if let Some(base) = &mut self.delta_base {
                    base.begin_snapshot();
                }
                let v1alpha1::SnapshotBegin { resource_version, resource, restarted_from, cluster } = begin;
                self.next_cluster = Some(cluster);
                Some(WatchItem::SnapshotBegin { resource_version, resource, restarted_from })
            }
            Some(Message::SnapshotEnd(end)) => {
                if let Some(base) = &mut self.delta_base {
                    base.end_snapshot();
                }
                Some(WatchItem::SnapshotEnd { object_count: end.object_count })
            }
            Some(Message::SnapshotChunk(chunk)) => {
                let mut events = VecDeque::from(chunk::decode(&chunk.zstd, chunk::CONTENT_BYTES_MAX)?);
                for event in &mut events {
                    self.resolve(event)?;
                }
                self.chunk = events;
                None
            }
            Some(Message::Event(mut event)) => {
                self.resolve(&mut event)?;
                Some(WatchItem::Event(event))
            }
            Some(Message::GapBegin(begin)) => {
                Some(WatchItem::GapBegin { resource_version: begin.resource_version, reason: begin.reason })
            }
            Some(Message::GapEnd(_)) => Some(WatchItem::GapEnd),
            Some(Message::CatchUpBegin(begin)) => {
                Some(WatchItem::CatchUpBegin { resource_version: begin.resource_version })
            }
            Some(Message::CatchUpEnd(_)) => Some(WatchItem::CatchUpEnd),
            Some(Message::Bookmark(_)) => Some(WatchItem::Bookmark),
        };
        self.delta_base_is_current = !response.resume_version.is_empty();
        if self.delta_base_is_current {
            self.resume_version = version::received(response.resume_version, response.version_is_complete);
            self.cluster = self.next_cluster.take().unwrap_or(std::mem::take(&mut self.cluster));
        }
        Ok(item)
    }

    fn resolve(&mut self, event: &mut Event) -> Result<(), DeltaBaseError> {
        match &mut self.delta_base {
            Some(delta_base) => delta_base.resolve(event),
            None if event.delta.is_some() => Err(DeltaBaseError::Missing),
            None => Ok(()),
        }
    }

    /// Handles an undecodable message: reconnects, so that the server sends it again with whole
    /// objects. The resume version has not moved past it.
    fn undecodable(&mut self, error: DeltaBaseError) -> WatchItem {
        if let DeltaBaseError::OverLimit(_) = error {
            self.delta_base = None;
        }
        self.delta_base_is_current = false;
        let retry_in = self.backoff.next_delay(Instant::now(), None, &mut self.rng);
        self.state = ConnectionState::Waiting(Some(Instant::now() + retry_in));
        self.broken = true;
        let error = ClientError::Undecodable { address: self.client.address.clone(), message: error.to_string() };
        WatchItem::Disconnected { error, retry_in }
    }

    /// Whether the server asks the stream to continue on a new connection.
    fn is_moved(&self, error: &ClientError) -> bool {
        let was_open = self.opened_at.is_some_and(|at| at.elapsed() >= MOVED_AFTER);
        was_open && MOVED.iter().any(|reason| error.reason() == *reason)
    }

    fn failed(&mut self, error: ClientError) -> Result<WatchItem, ClientError> {
        let restart = error.is_expired() && self.options.on_expired == OnExpired::Restart;
        let is_refused = error.code() == Code::Unauthenticated;
        if is_refused || error.reason() == ErrorReason::Reauthenticate {
            self.client.token.expire(self.sent.as_ref());
        }
        // The file may get another token. A token that was never accepted is a mistake, though.
        let may_login = is_refused && self.opened_at.is_some() && self.client.token.may_change();
        if !restart && !may_login && !error.is_retryable() {
            self.state = ConnectionState::Ended;
            return Err(error);
        }
        // A restart is delayed too: otherwise, with a ring that is too short, clients would read
        // snapshots in a tight loop.
        let retry_in = self.backoff.next_delay(Instant::now(), error.retry_after(), &mut self.rng);
        let limit = self.options.not_synced_delay_max.filter(|_| error.is_not_synced());
        let retry_in = limit.map_or(retry_in, |limit| retry_in.min(limit.max(error.retry_after().unwrap_or_default())));
        self.state = ConnectionState::Waiting(Some(Instant::now() + retry_in));
        if restart {
            self.resume_version.clear();
            self.cluster.clear();
            self.delta_base_is_current = false;
            return Ok(WatchItem::Restarted { error });
        }
        self.broken = true;
        Ok(WatchItem::Disconnected { error, retry_in })
    }
}

/// The next message. A stream past its deadline counts as ended.
async fn message_before(
    stream: &mut Streaming<WatchResponse>,
    deadline: Option<Instant>,
) -> Result<Option<WatchResponse>, tonic::Status> {
    match deadline {
        None => stream.message().await,
        Some(deadline) => timeout_at(deadline + TIMEOUT_GRACE, stream.message()).await.unwrap_or(Ok(None)),
    }
}

mod watch_options;

#[cfg(test)]
mod tests;
