//! A watch that outlives its connection.
//!
//! It keeps the last `resume_version` and nothing else, and comes back with it: exactly what happened in between follows. The
//! version of an object is never used for that, because it does not say what the selector has already seen.
//!
//! Compressed chunks and deltas become plain events here. A delta that does not fit ends the stream: the watch resumes from its last
//! `resume_version` and says that it kept nothing, so that the server sends that very event again, in full. (To get the object by
//! itself would give its newest state, and skip the ones before it.)

use std::{collections::VecDeque, time::Duration};

use futures::Stream;
use rand::{SeedableRng, rngs::SmallRng};
use tokio::time::{Instant, sleep_until, timeout_at};
use tonic::Streaming;

use super::{
    error::ClientError,
    kept::{Kept, KeptError},
    list_watch::ListWatch,
    projection::Projection,
};
use kubefan_common::encoding::Encoding;
use kubefan_common::{
    backoff::{Backoff, BackoffOptions},
    encoding::{chunk, delta},
    planted::{self, Bug},
    proto::v1alpha1::{self, Event, ResolvedResource, Target, WatchRequest, WatchResponse, watch_response::Message},
};

/// The server ends a watch at its timeout; one that did not so long after it is not waited for.
const TIMEOUT_GRACE: Duration = Duration::from_secs(2);

/// What to do when nothing leads on from the version to resume from. (What `--help` shows of it has no links.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum OnExpired {
    /// End with the error
    Fail,
    /// Start over with a snapshot, and say so
    #[default]
    Restart,
}

/// What to do when the stream has fallen behind the events that are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum OnLag {
    /// As if nothing led on from there
    Expire,
    /// Go on with a marked catch-up, each change once
    #[default]
    Conflate,
}

/// How many bytes of objects a watch with deltas keeps, unless it is told otherwise.
pub const KEPT_BYTES_MAX: usize = 1 << 30;

/// How to watch.
#[derive(Debug, Clone)]
pub struct WatchOptions {
    /// The version to resume from; empty starts with a snapshot.
    pub resource_version: String,
    /// Of which cluster that version is, where it came with the version; empty: not known. A version means nothing in another cluster,
    /// which may answer at the same address one day.
    pub cluster: String,
    /// The watch ends after this, over all its connections; whole seconds, at least one.
    pub timeout: Option<Duration>,
    /// How long the server may be silent when the version moves; unset leaves it to the server (60 s).
    pub bookmark_interval: Option<Duration>,
    /// What of each object is sent.
    pub projection: Projection,
    /// Changes that leave what is sent as it was are not told. Needs a projection that leaves something out, or deltas.
    pub only_changes: bool,
    /// How objects travel. Events carry whole objects all the same; with deltas the watch keeps a copy of each.
    pub encoding: Encoding,
    /// With deltas, the bytes of objects that are kept at most; above it the watch goes on without deltas.
    pub kept_bytes_max: usize,
    /// What to do when the version to resume from is no longer held.
    pub on_expired: OnExpired,
    /// What to do when the stream has fallen behind the events that are held.
    pub on_lag: OnLag,
    /// The waits between tries.
    pub backoff: BackoffOptions,
    /// Decides the jitter, for simulations; unset means by chance.
    pub seed: Option<u64>,
}

impl Default for WatchOptions {
    fn default() -> Self {
        Self {
            resource_version: String::new(),
            cluster: String::new(),
            timeout: None,
            bookmark_interval: None,
            projection: Projection::default(),
            only_changes: false,
            encoding: Encoding::default(),
            kept_bytes_max: KEPT_BYTES_MAX,
            on_expired: OnExpired::default(),
            on_lag: OnLag::default(),
            backoff: BackoffOptions::default(),
            seed: None,
        }
    }
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
        /// The version from which nothing led on, where this snapshot stands for what came after it; else empty.
        restarted_from: String,
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
    /// A marked catch-up starts: the events up to `CatchUpEnd` lead to the state after it, each changed key once. It may come again
    /// after a break inside it.
    CatchUpBegin {
        /// Up to this version the stream was exact.
        resource_version: String,
    },
    /// The marked catch-up is complete.
    CatchUpEnd,
    /// Time has passed; [`WatchStream::resume_version`] has moved.
    Bookmark,
    /// The connection broke; another try follows by itself. What came since a `GapBegin` or `CatchUpBegin` whose end did not come is
    /// to be undone, or to be held back until its end: an object that was added there and is deleted by now is not told as deleted.
    Disconnected {
        /// Why.
        error: ClientError,
        /// When the next try comes.
        retry_in: Duration,
    },
    /// The connection is back. What follows joins what came before without a gap, unless it begins with a mark that says otherwise: a
    /// `CatchUpBegin`, or a `SnapshotBegin` with `restarted_from`. On a quiet watch it may be long until anything follows.
    Reconnected {
        /// Asked for what came after this version; empty where the watch starts over with its snapshot, which had not been complete.
        from: String,
    },
    /// There is nothing to resume from; a snapshot follows ([`OnExpired::Restart`]).
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
    /// Of which cluster it is; sent with it.
    cluster: String,
    /// Of which cluster the version is that the snapshot under way ends with.
    next_cluster: Option<String>,
    /// Set by the first read.
    deadline: Option<Instant>,
    backoff: Backoff,
    rng: SmallRng,
    broken: bool,
    /// With deltas: their bases.
    kept: Option<Kept>,
    /// What is kept is the state at `resume_version`, and not one on the way to the next.
    kept_fits: bool,
    /// Events of a snapshot chunk that were not returned yet.
    chunk: VecDeque<Event>,
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
            cluster: options.cluster.clone(),
            next_cluster: None,
            deadline: None,
            backoff: Backoff::new(options.backoff.clone()),
            rng: options.seed.map_or_else(generator, SmallRng::seed_from_u64),
            broken: false,
            kept: (options.encoding == Encoding::ZstdDelta)
                .then(|| Kept::new(options.kept_bytes_max, delta::OBJECT_BYTES_MAX)),
            kept_fits: false,
            chunk: VecDeque::new(),
            state: State::Waiting(None),
            options,
        }
    }

    /// The version to come back with: everything at or below it was returned by [`Self::next`]. Empty before the first
    /// snapshot is complete.
    pub fn resume_version(&self) -> &str {
        &self.resume_version
    }

    /// Of which cluster that version is ([`WatchOptions::cluster`]); empty where that is not known.
    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// The next item; `None` once the timeout has passed. After an error there is nothing more.
    ///
    /// Safe to cancel: nothing is lost or returned twice.
    pub async fn next(&mut self) -> Option<Result<WatchItem, ClientError>> {
        if self.deadline.is_none() {
            self.deadline = self.options.timeout.map(|timeout| Instant::now() + timeout);
        }
        loop {
            if let Some(event) = self.chunk.pop_front() {
                return Some(Ok(WatchItem::Event(event)));
            }
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
                            self.next_cluster = None;
                            if std::mem::take(&mut self.broken) {
                                return Some(Ok(WatchItem::Reconnected { from: self.resume_version.clone() }));
                            }
                        }
                        Err(status) => return Some(self.failed(&status)),
                    }
                }
                State::Open(stream) => match message_before(stream, self.deadline).await {
                    Ok(Some(response)) => match self.accept(response) {
                        Ok(Some(item)) => return Some(Ok(item)),
                        // A chunk, or a message of a newer server; its resume version counts all the same.
                        Ok(None) => continue,
                        Err(message) => return Some(Ok(self.undecodable(message))),
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
        // Without deltas after all, the same bytes: those that deltas are made of.
        let (encoding, canonical) = match (self.options.encoding, &self.kept) {
            (Encoding::Json, _) => (v1alpha1::Encoding::Unspecified, false),
            (Encoding::Zstd, _) => (v1alpha1::Encoding::Zstd, false),
            (Encoding::ZstdDelta, Some(_)) => (v1alpha1::Encoding::ZstdDelta, false),
            (Encoding::ZstdDelta, None) => (v1alpha1::Encoding::Zstd, true),
        };
        let drop_managed_fields = canonical || self.options.projection.drop_managed_fields;
        let projection = Projection { drop_managed_fields, ..self.options.projection.clone() };
        let projection = projection.message(self.options.only_changes);
        Some(WatchRequest {
            target: Some(self.target.clone()),
            resource_version: self.resume_version.clone(),
            cluster: self.cluster.clone(),
            timeout_seconds,
            bookmark_interval: self.options.bookmark_interval.and_then(|interval| interval.try_into().ok()),
            projection,
            encoding: encoding.into(),
            state_kept: self.kept_fits && self.kept.as_ref().is_some_and(Kept::is_whole),
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

    /// What a message tells; nothing where it only fills the chunk. Nothing has changed where it cannot be decoded.
    fn accept(&mut self, response: WatchResponse) -> Result<Option<WatchItem>, KeptError> {
        let item = match response.message {
            None => None,
            Some(Message::SnapshotBegin(begin)) => {
                self.kept.iter_mut().for_each(Kept::begin);
                let v1alpha1::SnapshotBegin { resource_version, resource, restarted_from, cluster } = begin;
                self.next_cluster = Some(cluster);
                Some(WatchItem::SnapshotBegin { resource_version, resource, restarted_from })
            }
            Some(Message::SnapshotEnd(end)) => {
                self.kept.iter_mut().for_each(Kept::end);
                Some(WatchItem::SnapshotEnd { object_count: end.object_count })
            }
            Some(Message::SnapshotChunk(chunk)) => {
                let mut events = VecDeque::from(chunk::decode(&chunk.zstd, chunk::CONTENT_BYTES_MAX)?);
                events.iter_mut().try_for_each(|event| self.resolve(event))?;
                self.chunk = events;
                None
            }
            Some(Message::Event(mut event)) => {
                self.resolve(&mut event)?;
                if planted::is(Bug::ClientKeepsObjectVersion) && response.resume_version.is_empty() {
                    self.resume_version.clone_from(&event.resource_version);
                }
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
        self.kept_fits = !response.resume_version.is_empty();
        if self.kept_fits {
            self.resume_version = response.resume_version;
            self.cluster = self.next_cluster.take().unwrap_or(std::mem::take(&mut self.cluster));
        }
        Ok(item)
    }

    fn resolve(&mut self, event: &mut Event) -> Result<(), KeptError> {
        match &mut self.kept {
            Some(kept) => kept.resolve(event),
            None if event.delta.is_some() => Err(KeptError::Missing),
            None => Ok(()),
        }
    }

    /// The message that could not be decoded is asked for again, in full: the resume version has not moved past it.
    fn undecodable(&mut self, error: KeptError) -> WatchItem {
        match error {
            KeptError::OverLimit(_) => self.kept = None,
            _ => self.kept.iter_mut().for_each(Kept::forget),
        }
        self.kept_fits = false;
        let retry_in = self.backoff.next_delay(Instant::now(), None, &mut self.rng);
        self.state = State::Waiting(Some(Instant::now() + retry_in));
        self.broken = true;
        let error = ClientError::Undecodable { address: self.client.address.clone(), message: error.to_string() };
        WatchItem::Disconnected { error, retry_in }
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
            self.cluster.clear();
            // What is kept stays: a snapshot says what of it is true.
            self.kept_fits = false;
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

#[cfg(test)]
mod tests;
