//! A watch that outlives its connection.
//!
//! It keeps the last `resume_version` and nothing else, and comes back with it: exactly what happened in between follows. The
//! version of an object is never used for that, because it does not say what the selector has already seen.

use std::time::Duration;

use futures::Stream;
use rand::{SeedableRng, rngs::SmallRng};
use tokio::time::{Instant, sleep_until, timeout_at};
use tonic::Streaming;

use super::{error::ClientError, list_watch::ListWatch};
use crate::{
    backoff::{Backoff, BackoffOptions},
    proto::v1alpha1::{Event, ResolvedResource, Target, WatchRequest, WatchResponse, watch_response::Message},
};

/// The server ends a watch at its timeout; one that did not so long after it is not waited for.
const TIMEOUT_GRACE: Duration = Duration::from_secs(2);

/// What to do when the version to resume from is no longer held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnExpired {
    /// End with the error: the caller decides.
    Fail,
    /// Say so ([`WatchItem::Restarted`]) and start over with a snapshot, as informers do.
    #[default]
    Restart,
}

/// How to watch.
#[derive(Debug, Clone, Default)]
pub struct WatchOptions {
    /// The version to resume from; empty starts with a snapshot.
    pub resource_version: String,
    /// The watch ends after this, over all its connections; whole seconds, at least one.
    pub timeout: Option<Duration>,
    /// How long the server may be silent when the version moves; unset leaves it to the server (60 s).
    pub bookmark_interval: Option<Duration>,
    /// What to do when the version to resume from is no longer held.
    pub on_expired: OnExpired,
    /// The waits between tries.
    pub backoff: BackoffOptions,
    /// Decides the jitter, for simulations; unset means by chance.
    pub seed: Option<u64>,
}

/// What a watch tells.
#[derive(Debug, Clone, PartialEq)]
pub enum WatchItem {
    /// A snapshot starts: the events up to `SnapshotEnd` are the whole state and replace what was known before. It comes again
    /// when the connection breaks inside it.
    SnapshotBegin {
        /// The version of the state.
        resource_version: String,
        /// The resource as kubefan resolved it.
        resource: Option<ResolvedResource>,
    },
    /// The snapshot is complete.
    SnapshotEnd {
        /// The number of objects that were sent.
        object_count: i64,
    },
    /// An object was added, modified or deleted.
    Event(Event),
    /// A marked gap starts: the events up to `GapEnd` lead to the state after it. It may come again after a break inside it.
    GapBegin {
        /// Up to this version the stream was exact.
        resource_version: String,
        /// Why.
        reason: String,
    },
    /// The marked gap is complete.
    GapEnd,
    /// Time has passed; [`WatchStream::resume_version`] has moved.
    Bookmark,
    /// The connection broke; another try follows by itself.
    Disconnected {
        /// Why.
        error: ClientError,
        /// When the next try comes.
        retry_in: Duration,
    },
    /// The connection is back; what follows joins what came before without a gap.
    Reconnected {
        /// Resumed after this version; empty where the watch starts over with its snapshot, which had not been complete.
        from: String,
    },
    /// The version to resume from is no longer held; a snapshot follows ([`OnExpired::Restart`]).
    Restarted {
        /// The server's word.
        error: ClientError,
    },
}

/// A running watch. Dropping it ends it.
#[derive(Debug)]
pub struct WatchStream {
    client: ListWatch,
    target: Target,
    options: WatchOptions,
    resume_version: String,
    /// Set by the first read.
    deadline: Option<Instant>,
    backoff: Backoff,
    rng: SmallRng,
    broken: bool,
    state: State,
}

#[derive(Debug)]
enum State {
    Waiting(Option<Instant>),
    Open(Box<Streaming<WatchResponse>>),
    Ended,
}

impl WatchStream {
    pub(super) fn new(client: ListWatch, target: Target, options: WatchOptions) -> Self {
        Self {
            client,
            target,
            resume_version: options.resource_version.clone(),
            deadline: None,
            backoff: Backoff::new(options.backoff.clone()),
            rng: options.seed.map_or_else(generator, SmallRng::seed_from_u64),
            broken: false,
            state: State::Waiting(None),
            options,
        }
    }

    /// The version to come back with: everything at or below it was returned by [`Self::next`]. Empty before the first
    /// snapshot is complete.
    pub fn resume_version(&self) -> &str {
        &self.resume_version
    }

    /// The next item; `None` once the timeout has passed. After an error there is nothing more.
    ///
    /// Safe to cancel: nothing is lost or returned twice.
    pub async fn next(&mut self) -> Option<Result<WatchItem, ClientError>> {
        if self.deadline.is_none() {
            self.deadline = self.options.timeout.map(|timeout| Instant::now() + timeout);
        }
        loop {
            match &mut self.state {
                State::Ended => return None,
                State::Waiting(until) => {
                    if let Some(until) = *until {
                        let wake = self.deadline.map_or(until, |deadline| deadline.min(until));
                        sleep_until(wake).await;
                    }
                    let Some(request) = self.request() else {
                        self.state = State::Ended;
                        return None;
                    };
                    match self.client.service.watch(request).await {
                        Ok(response) => {
                            self.state = State::Open(Box::new(response.into_inner()));
                            if std::mem::take(&mut self.broken) {
                                return Some(Ok(WatchItem::Reconnected { from: self.resume_version.clone() }));
                            }
                        }
                        Err(status) => return Some(self.failed(&status)),
                    }
                }
                State::Open(stream) => match message_before(stream, self.deadline).await {
                    Ok(Some(response)) => match self.accept(response) {
                        Some(item) => return Some(Ok(item)),
                        // A message of a newer server; its resume version counts all the same.
                        None => continue,
                    },
                    Ok(None) if self.options.timeout.is_some() => self.state = State::Ended,
                    Ok(None) => return Some(self.failed(&tonic::Status::unavailable("the stream ended"))),
                    Err(status) => return Some(self.failed(&status)),
                },
            }
        }
    }

    /// The same as a [`Stream`].
    pub fn into_stream(self) -> impl Stream<Item = Result<WatchItem, ClientError>> + Send {
        futures::stream::unfold(self, |mut watch| async move { watch.next().await.map(|item| (item, watch)) })
    }

    /// The request for the rest of the watch; `None` where its time has passed.
    fn request(&self) -> Option<WatchRequest> {
        let timeout_seconds = match self.deadline {
            None => 0,
            Some(deadline) => {
                let rest = deadline.checked_duration_since(Instant::now()).filter(|rest| !rest.is_zero())?;
                i64::try_from(rest.as_millis().div_ceil(1000)).unwrap_or(i64::MAX)
            }
        };
        Some(WatchRequest {
            target: Some(self.target.clone()),
            resource_version: self.resume_version.clone(),
            timeout_seconds,
            bookmark_interval: self.options.bookmark_interval.and_then(|interval| interval.try_into().ok()),
            ..WatchRequest::default()
        })
    }

    fn accept(&mut self, response: WatchResponse) -> Option<WatchItem> {
        if !response.resume_version.is_empty() {
            self.resume_version = response.resume_version;
        }
        Some(match response.message? {
            Message::SnapshotBegin(begin) => {
                WatchItem::SnapshotBegin { resource_version: begin.resource_version, resource: begin.resource }
            }
            Message::SnapshotEnd(end) => WatchItem::SnapshotEnd { object_count: end.object_count },
            Message::Event(event) => WatchItem::Event(event),
            Message::GapBegin(begin) => {
                WatchItem::GapBegin { resource_version: begin.resource_version, reason: begin.reason }
            }
            Message::GapEnd(_) => WatchItem::GapEnd,
            Message::Bookmark(_) => WatchItem::Bookmark,
            // Only sent where it was asked for.
            Message::SnapshotChunk(_) => return None,
        })
    }

    fn failed(&mut self, status: &tonic::Status) -> Result<WatchItem, ClientError> {
        let error = self.client.error(status);
        let restart = error.is_expired() && self.options.on_expired == OnExpired::Restart;
        if !restart && !error.is_retryable() {
            self.state = State::Ended;
            return Err(error);
        }
        // A restart waits too: a ring that is too short must not make clients read snapshots in a loop.
        let retry_in = self.backoff.next_delay(Instant::now(), error.retry_after(), &mut self.rng);
        self.state = State::Waiting(Some(Instant::now() + retry_in));
        if restart {
            self.resume_version.clear();
            return Ok(WatchItem::Restarted { error });
        }
        self.broken = true;
        Ok(WatchItem::Disconnected { error, retry_in })
    }
}

/// The next message; a stream past its deadline counts as ended.
async fn message_before(
    stream: &mut Streaming<WatchResponse>,
    deadline: Option<Instant>,
) -> Result<Option<WatchResponse>, tonic::Status> {
    match deadline {
        None => stream.message().await,
        Some(deadline) => timeout_at(deadline + TIMEOUT_GRACE, stream.message()).await.unwrap_or(Ok(None)),
    }
}

/// Chance for jitter, where the caller gave no seed.
#[expect(clippy::disallowed_methods, reason = "a program that uses the client need not bring a generator")]
fn generator() -> SmallRng {
    SmallRng::from_rng(&mut rand::rng())
}

#[cfg(all(test, feature = "server"))]
mod tests;
