//! What a stream is sent before it reads the log: a snapshot, a catch-up, or events from before the cache began.
//!
//! It pins the state that it was made from, so one that makes no progress is ended by the server.

use std::sync::Arc;

use crate::{
    cache::{Backfill, Expired, Store},
    fanout::{
        hub::core::Hub,
        send::{
            encoder::DeltaBases,
            frame::{FrameWriter, Sink, control},
            frame_buf::FrameBuf,
        },
        stream_end::StreamEnd,
        subscribe::catch_up::{CHANGES_MAX, CatchUp},
        views::{log::entries, shared_snapshot::SharedSnapshotReader, view::View},
    },
};
use kubefan_common::{
    planted::{self, Bug},
    proto::v1alpha1::ResolvedResource,
};
use kubefan_model::{ObjectKey, ResourceVersion};

/// What is sent, and what after it.
pub(in crate::fanout) struct Backlog {
    part: BacklogPart,
    /// Objects so far.
    sent: usize,
    /// What follows before the log.
    then: Option<Box<Backlog>>,
}

pub(in crate::fanout) enum BacklogPart {
    /// The state, object by object.
    Objects { head: SnapshotHeader, store: Store, last: Option<ObjectKey> },
    /// The state in compressed chunks.
    Chunks { head: SnapshotHeader, chunks: SharedSnapshotReader, next: usize },
    /// What changed, each object once.
    CatchUp { catch_up: Box<CatchUp>, begun: bool },
    /// Events from before the cache began, after this version; the subscriber was told of another one last.
    Backfill { backfill: Arc<Backfill>, after: ResourceVersion, told: ResourceVersion },
}

/// How a snapshot begins.
pub(in crate::fanout) struct SnapshotHeader {
    pub(in crate::fanout) version: ResourceVersion,
    /// The resource and the cluster, taken when it begins.
    pub(in crate::fanout) begin: Option<(ResolvedResource, Option<String>)>,
    pub(in crate::fanout) restarted_from: Option<ResourceVersion>,
    /// A watch over HTTP asked to be told where the state ends.
    pub(in crate::fanout) marks_end: bool,
}

/// What a turn gave.
#[derive(Default)]
pub(in crate::fanout) struct BacklogBatch {
    pub(in crate::fanout) pieces: FrameBuf,
    /// The version to come back with from now on, where there is one.
    pub(in crate::fanout) resume: Option<ResourceVersion>,
    pub(in crate::fanout) complete: bool,
}

/// Why a prelude cannot go on. Nothing of it was sent then.
pub(in crate::fanout) enum BacklogError {
    /// The history that it needs is gone.
    Expired(Expired),
    /// The view has ended.
    Ended(StreamEnd),
}

impl Backlog {
    pub(in crate::fanout) fn new(part: BacklogPart) -> Self {
        Self { part, sent: 0, then: None }
    }

    pub(in crate::fanout) fn followed_by(mut self, then: Option<Self>) -> Self {
        self.then = then.map(Box::new);
        self
    }

    /// What comes after it.
    pub(in crate::fanout) fn into_next(self) -> Option<Box<Self>> {
        self.then
    }

    /// The next messages, about `bytes_max` bytes of them.
    pub(in crate::fanout) fn take(
        &mut self,
        bytes_max: usize,
        hub: &Hub,
        view: &View,
        holds: DeltaBases,
    ) -> Result<BacklogBatch, BacklogError> {
        let (selection, encoder) = (view.selection(), view.encoder());
        let mut taken = BacklogBatch { complete: true, ..BacklogBatch::default() };
        let before = self.sent;
        match &mut self.part {
            BacklogPart::Objects { head, store, last } => {
                let mut frames = encoder.writer(bytes_max);
                head.write(&mut frames);
                let mut written = None;
                for object in store.select(selection, last.as_ref()) {
                    if frames.len() >= bytes_max {
                        taken.complete = false;
                        break;
                    }
                    encoder.object(object, &mut frames);
                    self.sent += 1;
                    written = Some(object);
                }
                *last = written.map(|object| object.key().clone()).or(last.take());
                if planted::is(Bug::SnapshotEndsAtHead) {
                    head.version = hub.head().unwrap_or(head.version);
                }
                taken.end_of_snapshot(head, self.sent, &mut frames);
                taken.pieces = frames.finish();
            }
            BacklogPart::Chunks { head, chunks, next } => {
                let mut frames = encoder.writer(0);
                head.write(&mut frames);
                let (mut pieces, first) = (frames.finish(), *next);
                // At least one each time, whatever its size.
                taken.complete = loop {
                    if *next > first && pieces.len() >= bytes_max {
                        break false;
                    }
                    let Some((frame, count)) = chunks.frame(*next, selection, encoder) else { break true };
                    pieces.push(frame);
                    pieces.count(1);
                    self.sent += count;
                    *next += 1;
                };
                let mut frames = encoder.writer(0);
                taken.end_of_snapshot(head, self.sent, &mut frames);
                pieces.append(frames.finish());
                taken.pieces = pieces;
            }
            BacklogPart::CatchUp { catch_up, begun } => {
                while let Some(up_to) = catch_up.unread() {
                    let (part, rest) = hub.replaced(view, catch_up.from, up_to, CHANGES_MAX)?;
                    catch_up.read(part, rest, selection);
                }
                let mut frames = encoder.writer(bytes_max);
                if !std::mem::replace(begun, true) {
                    frames.message(&control::catch_up_begin(catch_up.from));
                }
                let (events, complete) = catch_up.write(bytes_max, selection, encoder, &mut frames);
                self.sent += events;
                taken.complete = complete;
                if complete {
                    frames.message(&control::catch_up_end(catch_up.to));
                    taken.resume = Some(catch_up.to);
                }
                taken.pieces = frames.finish();
            }
            BacklogPart::Backfill { backfill, after, told } => {
                // Without the state before them nothing is known that a delta could be made from.
                let has_bases = backfill.has_state || planted::is(Bug::DeltaOnWrongBase);
                let holds = if has_bases { holds } else { DeltaBases::Nothing };
                let mut frames = encoder.writer(0);
                for record in backfill.since(*after).map_err(BacklogError::Expired)? {
                    if frames.len() >= bytes_max {
                        taken.complete = false;
                        break;
                    }
                    for entry in entries(record, selection, None) {
                        if encoder.entry(&entry, holds, &mut frames).messages > 0 {
                            *told = entry.version;
                        }
                        self.sent += 1;
                    }
                    *after = record.version();
                }
                // What follows, another mark perhaps, begins where the subscriber knows that it is. Where there are no marks, the log does.
                if taken.complete && *told < backfill.reached && encoder.format().has_marks() {
                    frames.message(&control::bookmark(backfill.reached));
                }
                taken.resume = Some(if taken.complete { backfill.reached } else { *after });
                taken.pieces = frames.finish();
            }
        }
        match &self.part {
            BacklogPart::Objects { .. } | BacklogPart::Chunks { .. } => {
                hub.metrics().snapshot_sent(self.sent - before, taken.pieces.len());
            }
            // No snapshot: an operator who sees none sent wants to rely on it.
            BacklogPart::CatchUp { .. } | BacklogPart::Backfill { .. } => {
                hub.metrics().sent(taken.pieces.messages(), taken.pieces.len(), None);
            }
        }
        Ok(taken)
    }
}

impl SnapshotHeader {
    fn write(&mut self, frames: &mut FrameWriter<'_>) {
        if let Some((resource, cluster)) = self.begin.take() {
            frames.message(&control::snapshot_begin(self.version, resource, cluster, self.restarted_from));
        }
    }
}

impl BacklogBatch {
    fn end_of_snapshot(&mut self, head: &SnapshotHeader, sent: usize, frames: &mut FrameWriter<'_>) {
        if self.complete {
            frames.message(&control::snapshot_end(head.version, sent as u64));
            if head.marks_end {
                frames.initial_events_end(head.version);
            }
            self.resume = Some(head.version);
        }
    }
}
