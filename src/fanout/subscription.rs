//! A subscriber's place: a snapshot being read, then a cursor into the view's log. It holds no queue of its own.

use std::{collections::VecDeque, sync::Arc};

use tokio::time::Instant;

use super::{frame::Frame, hub::Hub, outcome::StreamEnd, view::View};
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
}

/// How much one call of [`Subscription::next`] gives at most, in bytes (one frame may be larger): enough for full segments, little
/// enough that a slow subscriber pins next to nothing.
const BATCH_BYTES_MAX: usize = 64 << 10;

/// A live subscription. Dropping it unregisters it.
pub struct Subscription {
    hub: Arc<Hub>,
    view: Arc<View>,
    cursor: u64,
    snapshot: Option<SnapshotCursor>,
    /// The last `resume_version` given out.
    resume: Option<ResourceVersion>,
}

struct SnapshotCursor {
    store: Store,
    version: ResourceVersion,
    /// Taken when the snapshot begins.
    resource: Option<ResolvedResource>,
    last: Option<ObjectKey>,
    sent: u64,
}

impl Subscription {
    /// Made by the hub inside its critical section, which has counted it in.
    pub(super) fn new(hub: Arc<Hub>, view: Arc<View>, cursor: u64, start: SubscriptionStart) -> Self {
        let (snapshot, resume) = match start {
            SubscriptionStart::After(version) => (None, Some(version)),
            SubscriptionStart::Snapshot { store, version, resource } => {
                let resource = Some(resource);
                (Some(SnapshotCursor { store, version, resource, last: None, sent: 0 }), None)
            }
        };
        Self { hub, view, cursor, snapshot, resume }
    }

    /// The next frames, in order; waits until there are some. Cancel-safe: what was not returned is returned next time.
    pub async fn next(&mut self) -> Result<VecDeque<Frame>, StreamEnd> {
        if let Some(frames) = self.next_of_snapshot() {
            return Ok(frames);
        }
        let view = self.view.clone();
        loop {
            let changed = view.changed();
            tokio::pin!(changed);
            // From here no wake-up is missed.
            changed.as_mut().enable();
            if let Some(frames) = self.take()? {
                return Ok(frames);
            }
            changed.await;
        }
    }

    /// A bookmark, if everything has been sent and the version has moved since.
    pub fn bookmark(&mut self) -> Option<Frame> {
        if self.snapshot.is_some() {
            return None;
        }
        // The head is read before the log: what was appended by then is at or below it, and was sent if the log has no more.
        let head = self.hub.head()?;
        let sent_all = self.view.state().log.end() == self.cursor;
        (sent_all && self.resume.is_none_or(|resume| resume < head)).then(|| {
            self.resume = Some(head);
            Frame::bookmark(head)
        })
    }

    fn take(&mut self) -> Result<Option<VecDeque<Frame>>, StreamEnd> {
        let mut frames = VecDeque::new();
        let (mut bytes, mut oldest) = (0, None);
        {
            let state = self.view.state();
            let Some(entries) = state.log.from(self.cursor) else {
                let requested = self.resume.unwrap_or(state.log.floor());
                return Err(Expired { requested, oldest: state.log.floor() }.into());
            };
            for entry in entries {
                bytes += entry.frame.len();
                if bytes > BATCH_BYTES_MAX && !frames.is_empty() {
                    bytes -= entry.frame.len();
                    break;
                }
                oldest = oldest.or(entry.received);
                frames.push_back(entry.frame.clone());
                self.resume = Some(entry.version);
            }
            if frames.is_empty() {
                return match &state.end {
                    Some(end) => Err(end.clone()),
                    None => Ok(None),
                };
            }
        }
        self.cursor += frames.len() as u64;
        self.hub.metrics().sent(frames.len(), bytes, oldest.map(|at: Instant| at.elapsed()));
        Ok(Some(frames))
    }

    fn next_of_snapshot(&mut self) -> Option<VecDeque<Frame>> {
        let snapshot = self.snapshot.as_mut()?;
        let (mut frames, mut bytes) = (VecDeque::new(), 0);
        if let Some(resource) = snapshot.resource.take() {
            frames.push_back(Frame::snapshot_begin(snapshot.version, resource));
        }
        let (mut last, mut objects) = (None, 0);
        let mut complete = true;
        for object in snapshot.store.select(self.view.selection(), snapshot.last.as_ref()) {
            if bytes >= BATCH_BYTES_MAX {
                complete = false;
                break;
            }
            let frame = Frame::snapshot_object(object);
            bytes += frame.len();
            objects += 1;
            last = Some(object.key().clone());
            frames.push_back(frame);
        }
        snapshot.sent += objects as u64;
        snapshot.last = last.or(snapshot.last.take());
        self.hub.metrics().snapshot_sent(objects, bytes);
        if complete {
            frames.push_back(Frame::snapshot_end(snapshot.version, snapshot.sent));
            self.resume = Some(snapshot.version);
            self.snapshot = None;
        }
        Some(frames)
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.hub.leave(&self.view);
    }
}

/// What the hub hands a new subscription.
pub(super) enum SubscriptionStart {
    Snapshot { store: Store, version: ResourceVersion, resource: ResolvedResource },
    After(ResourceVersion),
}
