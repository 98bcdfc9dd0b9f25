//! A subscriber's place: a snapshot being read, then a cursor into the view's log. It holds no queue of its own.

use std::{future::poll_fn, sync::Arc, task::Poll};

use tokio::time::Instant;

use super::{
    bell::{Bell, Rung},
    encoder::Holds,
    frame::{FrameWriter, Sink, control},
    generation::Joined,
    hub::Hub,
    log::LogEntry,
    outcome::StreamEnd,
    pieces::Pieces,
    view::{Run, RunError, View},
};
use crate::{
    cache::{Expired, Store},
    model::{ObjectKey, ResourceVersion},
    proto::v1alpha1::ResolvedResource,
};

/// Where a subscription starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// The state as a snapshot, then events.
    Snapshot,
    /// The events after this version.
    After(ResourceVersion),
    /// The same, for a client that has kept the bytes of every object it was sent: it can read deltas from the start.
    Kept(ResourceVersion),
}

/// How much [`Subscription::next`] gives at most, in bytes: enough for full segments, little enough that a slow subscriber pins next to
/// nothing.
const BATCH_BYTES_MAX: usize = 64 << 10;

/// A live subscription. Dropping it unregisters it.
pub struct Subscription {
    hub: Arc<Hub>,
    view: Arc<View>,
    place: usize,
    bell: Arc<Bell>,
    cursor: u64,
    /// Where it has last found nothing; see [`View::run`].
    waited: Option<u64>,
    holds: Holds,
    /// In a box: most of its life a subscription has none.
    snapshot: Option<Box<SnapshotCursor>>,
    /// The last `resume_version` given out.
    resume: Option<ResourceVersion>,
    /// How it has ended; none where its subscriber let go of it.
    end: Option<StreamEnd>,
}

/// Where the state is being read.
struct SnapshotCursor {
    version: ResourceVersion,
    /// Taken when the snapshot begins.
    resource: Option<ResolvedResource>,
    state: SnapshotState,
    sent: u64,
}

enum SnapshotState {
    Objects { store: Store, last: Option<ObjectKey> },
    Chunks { chunks: Joined, next: usize },
}

impl Subscription {
    /// Made by the hub inside its critical section, which has counted it in.
    pub(super) fn new(
        hub: Arc<Hub>,
        view: Arc<View>,
        (place, bell): (usize, Arc<Bell>),
        cursor: u64,
        start: SubscriptionStart,
    ) -> Self {
        let cursor_at = |version, resource, state| {
            let cursor = SnapshotCursor { version, resource: Some(resource), state, sent: 0 };
            (Some(Box::new(cursor)), None, Holds::All)
        };
        let (snapshot, resume, holds) = match start {
            SubscriptionStart::After { version, kept } => {
                (None, Some(version), if kept { Holds::All } else { Holds::Since(version) })
            }
            SubscriptionStart::Objects { store, version, resource } => {
                cursor_at(version, resource, SnapshotState::Objects { store, last: None })
            }
            SubscriptionStart::Chunks { chunks, version, resource } => {
                cursor_at(version, resource, SnapshotState::Chunks { chunks, next: 0 })
            }
        };
        Self { hub, view, place, bell, cursor, waited: None, holds, snapshot, resume, end: None }
    }

    /// What is ready, at most about `bytes_max` bytes (one message may be larger). `None`: nothing now; the bell is armed, and rings
    /// when there is.
    pub fn take(&mut self, bytes_max: usize) -> Result<Option<Pieces>, StreamEnd> {
        if let Some(pieces) = self.take_of_snapshot(bytes_max) {
            return Ok(Some(pieces));
        }
        // Nobody has rung since there was nothing.
        if self.waited.is_some() && self.bell.is_armed() {
            return Ok(None);
        }
        self.take_of_log(bytes_max)
    }

    /// As [`Self::take`], and waits until there is something. For a subscription that is alone on its line. Cancel-safe.
    pub async fn next(&mut self) -> Result<Pieces, StreamEnd> {
        poll_fn(|cx| {
            self.bell.line().register(cx.waker());
            self.bell.line().rung(&mut Rung::new());
            match self.take(BATCH_BYTES_MAX) {
                Ok(Some(pieces)) => Poll::Ready(Ok(pieces)),
                Ok(None) => Poll::Pending,
                Err(end) => Poll::Ready(Err(end)),
            }
        })
        .await
    }

    /// Says how it has ended, before it is dropped.
    pub fn ended(&mut self, end: StreamEnd) {
        self.end = Some(end);
    }

    /// Whether the state is still being sent.
    pub fn in_snapshot(&self) -> bool {
        self.snapshot.is_some()
    }

    /// A bookmark, if everything has been sent and the version has moved since.
    pub fn bookmark(&mut self) -> Option<Pieces> {
        if self.snapshot.is_some() {
            return None;
        }
        // The head is read before the log: what was appended by then is at or below it, and was sent if the log has no more.
        let head = self.hub.head()?;
        let sent_all = self.view.end() == self.cursor;
        (sent_all && self.resume.is_none_or(|resume| resume < head)).then(|| {
            self.resume = Some(head);
            let mut frames = FrameWriter::default();
            frames.message(&control::bookmark(head));
            frames.finish()
        })
    }

    fn take_of_log(&mut self, bytes_max: usize) -> Result<Option<Pieces>, StreamEnd> {
        let (mut pieces, mut received) = (Pieces::default(), None);
        let view = self.view.clone();
        while pieces.len() < bytes_max {
            let room = bytes_max - pieces.len();
            match view.run(self.cursor, room, &self.bell, &mut self.waited) {
                Ok(Run::Nothing) => break,
                Ok(Run::Shared(block)) => {
                    let taken = block.take(self.cursor, room, view.encoder(), self.holds, &mut pieces);
                    received = received.or(self.pass(taken));
                }
                Ok(Run::Alone(entries)) => {
                    let mut frames = FrameWriter::default();
                    entries.iter().for_each(|entry| {
                        view.encoder().entry(entry, self.holds, &mut frames);
                    });
                    pieces.append(frames.finish());
                    received = received.or(self.pass(&entries));
                }
                // What was taken is sent first; the next call finds the same again.
                Err(_) if !pieces.is_empty() => break,
                Err(RunError::Ended(end)) => return Err(end),
                Err(RunError::Behind { oldest }) => {
                    return Err(Expired { requested: self.resume.unwrap_or(oldest), oldest }.into());
                }
            }
        }
        if pieces.is_empty() {
            return Ok(None);
        }
        self.hub.metrics().sent(pieces.messages(), pieces.len(), received.map(|at| at.elapsed()));
        Ok(Some(pieces))
    }

    /// Moves past entries; tells when the first of them was received.
    fn pass(&mut self, entries: &[LogEntry]) -> Option<Instant> {
        self.cursor += entries.len() as u64;
        self.resume = entries.last().map(|entry| entry.version).or(self.resume);
        entries.first()?.received
    }

    fn take_of_snapshot(&mut self, bytes_max: usize) -> Option<Pieces> {
        let snapshot = self.snapshot.as_mut()?;
        let mut frames = match &snapshot.state {
            SnapshotState::Objects { .. } => FrameWriter::with_capacity(bytes_max),
            SnapshotState::Chunks { .. } => FrameWriter::default(),
        };
        if let Some(resource) = snapshot.resource.take() {
            frames.message(&control::snapshot_begin(snapshot.version, resource, None));
        }
        let (selection, encoder) = (self.view.selection(), self.view.encoder());
        let mut objects = 0;
        let (mut pieces, complete) = match &mut snapshot.state {
            SnapshotState::Objects { store, last } => {
                let (mut taken, mut complete) = (None, true);
                for object in store.select(selection, last.as_ref()) {
                    if frames.len() >= bytes_max {
                        complete = false;
                        break;
                    }
                    encoder.object(object, &mut frames);
                    objects += 1;
                    taken = Some(object);
                }
                *last = taken.map(|object| object.key().clone()).or(last.take());
                (Pieces::default(), complete)
            }
            SnapshotState::Chunks { chunks, next } => {
                let mut pieces = std::mem::take(&mut frames).finish();
                let mut complete = false;
                // At least one each time, whatever its size.
                while objects == 0 || pieces.len() < bytes_max {
                    let Some((frame, count)) = chunks.frame(*next, selection, encoder) else {
                        complete = true;
                        break;
                    };
                    pieces.push(frame);
                    pieces.count(1);
                    objects += count;
                    *next += 1;
                }
                (pieces, complete)
            }
        };
        snapshot.sent += objects as u64;
        if complete {
            frames.message(&control::snapshot_end(snapshot.version, snapshot.sent));
            self.resume = Some(snapshot.version);
            self.snapshot = None;
        }
        pieces.append(frames.finish());
        self.hub.metrics().snapshot_sent(objects, pieces.len());
        Some(pieces)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.hub.leave(&self.view, self.place, self.waited);
        self.hub.metrics().subscription_finished(self.end.as_ref().unwrap_or(&StreamEnd::Cancelled));
    }
}

/// What the hub hands a new subscription.
pub(super) enum SubscriptionStart {
    Objects { store: Store, version: ResourceVersion, resource: ResolvedResource },
    Chunks { chunks: Joined, version: ResourceVersion, resource: ResolvedResource },
    After { version: ResourceVersion, kept: bool },
}
