//! The backlog of a stream, which is sent before the view's log: a snapshot, a catch-up, or a
//! backfill.
//!
//! A backlog pins the state that it is made from. The server ends a stream whose backlog makes no
//! progress.

use std::sync::Arc;

use kubefan_cache::{Backfill, Store, sliced_scan::SLICE_TESTS};
use kubefan_common::{
    planted::{self, Bug},
    proto::v1alpha1::ResolvedResource,
    when_planted,
};
use kubefan_model::{ObjectKey, ResourceVersion};

use super::catch_up::{CHANGES_MAX, CatchUp};
use crate::{
    hub::{HistoryError, Hub},
    send::{
        control,
        encoder::DeltaBases,
        frame::{FrameWriter, Sink},
        frame_buf::FrameBuf,
        log_entry::LogEntry,
    },
    views::{
        shared_snapshot::{ChunkFrame, SharedSnapshotReader, TakenChunk},
        view::{View, comparison_cost},
    },
};

/// One part of a backlog, and the parts after it.
pub(super) struct Backlog {
    part: BacklogPart,
    /// Objects and events sent so far.
    sent: usize,
    /// Sent after this part and before the log.
    then: Option<Box<Backlog>>,
}

pub(super) enum BacklogPart {
    /// The state, object by object.
    Objects { header: SnapshotHeader, store: Store, last: Option<ObjectKey> },
    /// The state in compressed chunks.
    Chunks { header: SnapshotHeader, chunks: SharedSnapshotReader, next: usize },
    /// The changed objects, each once.
    CatchUp { catch_up: Box<CatchUp>, is_started: bool },
    /// The events of a backfill after the version `after`. Events up to `sent_up_to` were sent.
    Backfill { backfill: Arc<Backfill>, after: ResourceVersion, sent_up_to: ResourceVersion },
}

/// Start and end of a snapshot.
pub(super) struct SnapshotHeader {
    pub(super) version: ResourceVersion,
    /// The resource and the cluster, taken when the start is sent.
    pub(super) begin: Option<(ResolvedResource, Option<String>)>,
    pub(super) restarted_from: Option<ResourceVersion>,
    /// A watch over HTTP asked for a bookmark where the state ends.
    pub(super) marks_end: bool,
}

/// The next messages of a backlog.
pub(super) struct BacklogBatch {
    pub(super) frames: FrameBuf,
    /// The version to resume from once they are received; `None` if it stays the one before.
    pub(super) resume: Option<ResourceVersion>,
    /// Whether this part has no more messages.
    pub(super) is_complete: bool,
    /// A slice of the work is done: other tasks should run before the next one.
    pub(super) yields: bool,
}

impl Backlog {
    pub(super) fn new(part: BacklogPart) -> Self {
        Self { part, sent: 0, then: None }
    }

    pub(super) fn followed_by(mut self, then: Option<Self>) -> Self {
        self.then = then.map(Box::new);
        self
    }

    /// Returns the end of a backfill: the version up to which it was read. `None` for other parts.
    pub(super) fn backfilled_up_to(&self) -> Option<ResourceVersion> {
        match &self.part {
            BacklogPart::Backfill { backfill, .. } => Some(backfill.reached),
            _ => None,
        }
    }

    /// Returns the next part.
    pub(super) fn into_next(self) -> Option<Box<Self>> {
        self.then
    }

    /// The next messages, about `bytes_max` bytes of them. Nothing was sent if it fails.
    pub(super) fn take(
        &mut self,
        bytes_max: usize,
        hub: &Hub,
        view: &View,
        bases: DeltaBases,
    ) -> Result<BacklogBatch, HistoryError> {
        let before = self.sent;
        let sent = &mut self.sent;
        let batch = match &mut self.part {
            BacklogPart::Objects { header, store, last } => {
                let batch = take_objects(header, store, last, bytes_max, hub, view, sent);
                hub.metrics().snapshot_sent(*sent - before, batch.frames.len());
                return Ok(batch);
            }
            BacklogPart::Chunks { header, chunks, next } => {
                let batch = take_chunks(header, chunks, next, bytes_max, view, sent);
                hub.metrics().snapshot_sent(*sent - before, batch.frames.len());
                return Ok(batch);
            }
            BacklogPart::CatchUp { catch_up, is_started } => {
                take_catch_up(catch_up, is_started, bytes_max, hub, view, sent)?
            }
            BacklogPart::Backfill { backfill, after, sent_up_to } => {
                take_backfill(backfill, after, sent_up_to, bytes_max, view, bases, sent)?
            }
        };
        // Not counted as snapshots: operators rely on a count of zero to mean that none was sent.
        hub.metrics().sent(batch.frames.messages(), batch.frames.len(), None);
        Ok(batch)
    }
}

fn take_objects(
    header: &mut SnapshotHeader,
    store: &Store,
    last: &mut Option<ObjectKey>,
    bytes_max: usize,
    hub: &Hub,
    view: &View,
    sent: &mut usize,
) -> BacklogBatch {
    let encoder = view.encoder();
    let mut frames = encoder.writer(bytes_max);
    header.write_begin(&mut frames);
    let mut scan = store.scan(view.selection(), last.as_ref(), SLICE_TESTS);
    let mut is_full = false;
    while !is_full && let Some(object) = scan.next() {
        encoder.object(object, &mut frames);
        *sent += 1;
        is_full = frames.len() >= bytes_max;
    }
    let is_complete = scan.is_complete();
    let tested = scan.tested().cloned();
    *last = tested.or(last.take());
    when_planted!(SnapshotEndsAtHead => header.version = hub.head().unwrap_or(header.version));
    let resume = is_complete.then(|| header.write_end(*sent, &mut frames));
    let yields = !is_complete && !is_full;
    BacklogBatch { frames: frames.finish(), resume, is_complete, yields }
}

fn take_chunks(
    header: &mut SnapshotHeader,
    chunks: &SharedSnapshotReader,
    next: &mut usize,
    bytes_max: usize,
    view: &View,
    sent: &mut usize,
) -> BacklogBatch {
    let encoder = view.encoder();
    let mut begin = encoder.writer(0);
    header.write_begin(&mut begin);
    let mut frames = begin.finish();
    let first = *next;
    // At least one chunk each time, however large.
    let (is_complete, yields) = loop {
        if *next > first && frames.len() >= bytes_max {
            break (false, false);
        }
        match chunks.frame(*next, view.selection(), encoder) {
            ChunkFrame::Chunk(TakenChunk { encoded, objects, is_new }) => {
                encoded.append_to(objects, is_new, &mut frames);
                *sent += objects;
                *next += 1;
                // Compressing a chunk takes as long as a task may run.
                if is_new {
                    break (false, true);
                }
            }
            ChunkFrame::Later => break (false, true),
            ChunkFrame::End => break (true, false),
        }
    };
    let mut end = encoder.writer(0);
    let resume = is_complete.then(|| header.write_end(*sent, &mut end));
    frames.append(end.finish());
    BacklogBatch { frames, resume, is_complete, yields }
}

fn take_catch_up(
    catch_up: &mut CatchUp,
    is_started: &mut bool,
    bytes_max: usize,
    hub: &Hub,
    view: &View,
    sent: &mut usize,
) -> Result<BacklogBatch, HistoryError> {
    let selection = view.selection();
    let encoder = view.encoder();
    if let Some(up_to) = catch_up.unread() {
        let steps_max = CHANGES_MAX.min(SLICE_TESTS / selection.tests()).max(1);
        let (part, rest) = hub.prior_steps(view, catch_up.from, up_to, steps_max)?;
        catch_up.read(part, rest);
    }
    if !catch_up.compare(selection) {
        let frames = encoder.writer(0).finish();
        return Ok(BacklogBatch { frames, resume: None, is_complete: false, yields: true });
    }
    let mut frames = encoder.writer(bytes_max);
    if !std::mem::replace(is_started, true) {
        frames.message(&control::catch_up_begin(catch_up.from));
    }
    let (events, is_complete) = catch_up.write(bytes_max, selection, encoder, &mut frames);
    *sent += events;
    let resume = is_complete.then_some(catch_up.to);
    if is_complete {
        frames.message(&control::catch_up_end(catch_up.to));
    }
    let yields = !is_complete && frames.len() < bytes_max;
    Ok(BacklogBatch { frames: frames.finish(), resume, is_complete, yields })
}

fn take_backfill(
    backfill: &Backfill,
    after: &mut ResourceVersion,
    sent_up_to: &mut ResourceVersion,
    bytes_max: usize,
    view: &View,
    bases: DeltaBases,
    sent: &mut usize,
) -> Result<BacklogBatch, HistoryError> {
    let encoder = view.encoder();
    let mut is_complete = true;
    // Without the state before its events, a backfill has no bases to make deltas from.
    let has_bases = backfill.has_state || planted::is(Bug::DeltaOnWrongBase);
    let bases = if has_bases { bases } else { DeltaBases::None };
    let mut frames = encoder.writer(0);
    let mut is_full = false;
    let mut tests_left = SLICE_TESTS;
    for record in backfill.since(*after).map_err(HistoryError::Expired)? {
        is_full = frames.len() >= bytes_max;
        if is_full || tests_left == 0 {
            is_complete = false;
            break;
        }
        tests_left = tests_left.saturating_sub(2 * view.selection().tests());
        // A backfill is one unbroken watch, so it has no gaps.
        for entry in record.events().iter().filter_map(|event| LogEntry::replayed(event, view.selection())) {
            let messages = encoder.entry(&entry, bases, &mut frames).messages;
            if messages > 0 {
                *sent_up_to = entry.version;
            }
            tests_left = tests_left.saturating_sub(comparison_cost(1, messages));
            *sent += 1;
        }
        *after = record.version();
    }
    // A gap or catch-up that follows starts at a version that the subscriber must have been sent. A
    // format without gap markers is followed by the log alone.
    if is_complete && *sent_up_to < backfill.reached && encoder.format().has_markers() {
        frames.message(&control::bookmark(backfill.reached));
    }
    let resume = Some(if is_complete { backfill.reached } else { *after });
    let yields = !is_complete && !is_full;
    Ok(BacklogBatch { frames: frames.finish(), resume, is_complete, yields })
}

impl SnapshotHeader {
    fn write_begin(&mut self, frames: &mut FrameWriter<'_>) {
        if let Some((resource, cluster)) = self.begin.take() {
            frames.message(&control::snapshot_begin(self.version, resource, cluster, self.restarted_from));
        }
    }

    /// Writes the end of a snapshot of this many objects. Returns the version to resume from.
    fn write_end(&self, objects: usize, frames: &mut FrameWriter<'_>) -> ResourceVersion {
        frames.message(&control::snapshot_end(self.version, objects as u64));
        if self.marks_end {
            frames.initial_events_end(self.version);
        }
        self.version
    }
}
