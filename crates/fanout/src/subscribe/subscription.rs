//! A live subscription: a backlog that is being sent, then a cursor into the view's log. It has no
//! queue of its own.

use std::{future::poll_fn, sync::Arc, task::Poll};

use bytes::Bytes;
use kubefan_admission::{fair_share::Holder, gate::GatePermit};
use kubefan_cache::{Expired, OnExpired, OnLag, sliced_scan::SLICE_TESTS, stream_end::StreamEnd, warnings::Warnings};
use kubefan_common::{
    planted::{self, Bug},
    unless_planted,
};
use kubefan_gzip::Piece;
use kubefan_model::{ResourceVersion, format::ContentCoding};
use kubefan_telemetry::metrics::Resume;
use tokio::time::Instant;

use super::{
    backlog::Backlog,
    options::{Start, SubscribeOptions},
    progress::{Observer, Progress},
    start_point::{Lagging, StartPoint},
};
use crate::{
    hub::{HistoryError, Hub},
    send::{
        control,
        encoder::DeltaBases,
        frame::Sink,
        frame_buf::FrameBuf,
        log_entry::{EntryKind, LogEntry},
    },
    views::{
        log::Cursor,
        log_run::{LogReadError, LogRun},
        plain_position::BodyChecksum,
        segments::SEGMENT_BYTES,
        view::{View, comparison_cost},
    },
    wake::{ReadyStreams, StreamWaker},
};

/// The approximate size of a batch of one subscription, in bytes: enough for full network segments,
/// and little enough that a slow subscriber pins almost nothing.
pub const BATCH_BYTES_MAX: usize = 64 << 10;
/// Bytes of events whose compression takes as long as a slice of tests: a millisecond.
const COMPRESSED_BYTES_OF_SLICE: usize = 2 * SEGMENT_BYTES;

/// A live subscription. Dropping it unregisters it.
pub struct Subscription {
    hub: Arc<Hub>,
    view: Arc<View>,
    /// Index of the waker among those of the view.
    waker_id: usize,
    waker: Arc<StreamWaker>,
    cursor: Cursor,
    /// Events up to this version are skipped. Either the client has them from elsewhere, or its
    /// first state is that of this version, which the cache had not reached when it was proved.
    floor: Option<ResourceVersion>,
    /// The cursor at which it last found nothing. The view counts each waiting subscription once
    /// per cursor, and frees a segment when all of them wait behind it.
    waited: Option<Cursor>,
    bases: DeltaBases,
    /// Boxed, because a subscription has none for most of its life.
    backlog: Option<Box<Backlog>>,
    /// The holder that takes its permits, and whose tenant its log may be charged to.
    holder: Option<Holder>,
    /// The permit to send the backlog.
    permit: Option<Arc<GatePermit>>,
    /// The last version to resume from that was sent.
    resume: Option<ResourceVersion>,
    /// Position of the subscription, for observers; `way` is the way of its start.
    progress: Arc<Progress>,
    way: Option<Resume>,
    /// Something was sent.
    is_started: bool,
    /// The checksum of what was sent, in a gzip body.
    checksum: BodyChecksum,
    /// Other tasks should run before more frames are made.
    must_yield: bool,
    /// There was nothing to send because other tasks should run.
    has_yielded: bool,
    /// The start of a gap was sent and not its end: the client holds the state at no version.
    inside_gap: bool,
    on_lag: OnLag,
    on_expired: OnExpired,
    /// End of the subscription; `None` if its subscriber dropped it.
    end: Option<StreamEnd>,
}

/// A view that a subscription has joined, and where it starts there.
pub(super) struct JoinedView {
    pub(super) view: Arc<View>,
    /// The id of the waker in the view.
    pub(super) waker_id: usize,
    pub(super) waker: Arc<StreamWaker>,
    pub(super) start: StartPoint,
    /// The permit to send the backlog.
    pub(super) permit: Option<Arc<GatePermit>>,
    /// Events up to this version are skipped.
    pub(super) floor: Option<ResourceVersion>,
    /// The way in which it resumes, if it does.
    pub(super) way: Option<Resume>,
}

impl Subscription {
    /// Called inside the critical section of the hub that made the start point and joined the view.
    pub(super) fn new(hub: Arc<Hub>, joined: JoinedView, options: &SubscribeOptions) -> Self {
        let JoinedView { view, waker_id, waker, start, permit, floor, way } = joined;
        let StartPoint { cursor, backlog, resume } = start;
        let &SubscribeOptions { on_lag, on_expired, holder, .. } = options;
        let bases = match options.start {
            // Unless it starts again with a snapshot.
            Start::Resume(version) if resume.is_some() && !planted::is(Bug::DeltasWithoutBases) => {
                DeltaBases::ChangedSince(version)
            }
            Start::Resume(_) | Start::ResumeWithObjects(_) | Start::Await(_) | Start::Snapshot => DeltaBases::All,
        };
        let progress = Progress::at(cursor, resume, backlog.is_some());
        let backlog = backlog.map(Box::new);
        let waited = None;
        let is_started = false;
        let inside_gap = false;
        let end = None;
        Self {
            hub,
            view,
            waker_id,
            waker,
            cursor,
            floor,
            waited,
            bases,
            backlog,
            holder,
            permit,
            resume,
            progress,
            way,
            is_started,
            checksum: BodyChecksum::default(),
            must_yield: false,
            has_yielded: false,
            inside_gap,
            on_lag,
            on_expired,
            end,
        }
    }

    /// Returns the warnings to readers of its cache, over HTTP.
    pub fn warnings(&self) -> Warnings {
        self.hub.warnings()
    }

    /// Returns the content coding of its bytes, over HTTP.
    pub fn coding(&self) -> ContentCoding {
        self.view.encoder().format().coding()
    }

    /// The messages that are ready, at most about `bytes_max` bytes (one message may be larger).
    /// `None`: nothing now; the waker is armed and wakes when there is.
    pub fn take(&mut self, bytes_max: usize) -> Result<Option<FrameBuf>, StreamEnd> {
        self.has_yielded = false;
        let mut frames = self.take_shared(bytes_max)?;
        if let Some(frames) = &mut frames {
            self.begin(frames);
        }
        self.show(frames.as_ref());
        Ok(frames)
    }

    /// Whether [`Self::take`] had nothing because it has worked for long, and is woken at once.
    pub fn has_yielded(&self) -> bool {
        self.has_yielded
    }

    /// Returns its start: the way of its resume, or `snapshot`.
    pub fn way(&self) -> &'static str {
        self.way.map_or("snapshot", Resume::as_str)
    }

    /// Returns an observer of the subscription.
    pub fn observer(&self) -> Observer {
        Observer::new(&self.hub, &self.view, self.progress.clone(), self.way)
    }

    fn show(&self, sent: Option<&FrameBuf>) {
        if let Some(frames) = sent.filter(|frames| frames.pieces().plain_bytes > 0) {
            self.hub.metrics().gzip_sent(frames.pieces(), frames.len());
        }
        self.progress.moved(self.cursor, self.resume, self.backlog.is_some(), sent.map_or(0, FrameBuf::len));
    }

    /// Adds the parts to the first message that are not shared with other subscribers.
    fn begin(&mut self, frames: &mut FrameBuf) {
        if !std::mem::replace(&mut self.is_started, true) {
            self.view.encoder().begin(frames);
        }
    }

    /// Ends a body over HTTP, after an event that says why, if it is not empty. Nothing may be
    /// taken after it.
    pub fn end_body(&mut self, error_event: Bytes) -> FrameBuf {
        let mut frames = FrameBuf::default();
        if !self.view.encoder().is_gzip() {
            frames.push(error_event);
            return frames;
        }
        frames.push_piece(&Piece::stored(error_event));
        unless_planted!(GzipErrorNotCounted => self.checksum.add(frames.plain()));
        frames.push(Bytes::copy_from_slice(&kubefan_gzip::end(self.checksum.sum())));
        self.begin(&mut frames);
        frames
    }

    fn take_shared(&mut self, bytes_max: usize) -> Result<Option<FrameBuf>, StreamEnd> {
        loop {
            if std::mem::take(&mut self.must_yield) {
                // The connection's task runs again after the others.
                self.has_yielded = true;
                self.waker.arm();
                self.waker.wake();
                return Ok(None);
            }
            if let Some(backlog) = &mut self.backlog {
                match backlog.take(bytes_max, &self.hub, &self.view, self.bases) {
                    Ok(batch) => {
                        self.resume = batch.resume.or(self.resume);
                        self.must_yield = batch.yields;
                        if batch.is_complete {
                            // An apiserver with another schema may have sent the backfill, with
                            // other bytes of the same versions than the cache has.
                            if let Some(reached) = backlog.backfilled_up_to() {
                                self.bases = DeltaBases::ChangedSince(reached);
                            }
                            self.backlog = self.backlog.take().and_then(|backlog| backlog.into_next());
                            self.permit = self.permit.take().filter(|_| self.backlog.is_some());
                        }
                        if !batch.frames.is_empty() {
                            self.checksum.add(batch.frames.plain());
                            return Ok(Some(batch.frames));
                        }
                    }
                    Err(HistoryError::Ended(end)) => return Err(end),
                    Err(HistoryError::Expired(expired)) => self.lag(expired)?,
                }
                continue;
            }
            // There was nothing, and no wake-up since.
            if self.waited.is_some() && self.waker.is_armed() {
                return Ok(None);
            }
            match self.take_from_log(bytes_max) {
                Ok(None) if self.must_yield => {}
                Ok(frames) => return Ok(frames),
                Err(LogReadError::Ended(end)) => return Err(end),
                // The client may have a version inside the gap.
                Err(LogReadError::Gap(Expired { requested, oldest })) => {
                    let requested = self.resume.map_or(requested, |resume| resume.max(requested));
                    let expired = Expired { requested, oldest };
                    if !self.view.encoder().format().has_markers() {
                        return Err(expired.into());
                    }
                    self.floor = None;
                    self.lag(expired)?;
                }
                Err(LogReadError::Behind { oldest }) => {
                    self.lag(Expired { requested: self.resume.unwrap_or(oldest), oldest })?;
                }
            }
        }
    }

    /// Finds a new start point after it has fallen behind the retained events.
    fn lag(&mut self, expired: Expired) -> Result<(), StreamEnd> {
        let sent = self.resume.filter(|_| !self.inside_gap || planted::is(Bug::LaggingInsideGap));
        // If it lags while it sends a backlog, it keeps that permit for the next one.
        let permit = self.permit.take();
        let Self { on_lag, on_expired, holder, .. } = *self;
        let lagging = Lagging { sent, expired, on_lag, on_expired, holder, permit };
        let (start, permit) = self.hub.lagging(&self.view, lagging)?;
        // A snapshot replaces everything that was sent.
        if start.resume.is_none() {
            self.bases = DeltaBases::All;
        }
        self.cursor = start.cursor;
        self.backlog = start.backlog.map(Box::new);
        self.permit = permit;
        self.waited = None;
        self.inside_gap = false;
        Ok(())
    }

    /// As [`Self::take`], and waits until there is something. For a subscription that is alone on
    /// its connection waker. Cancel-safe.
    pub async fn next(&mut self) -> Result<FrameBuf, StreamEnd> {
        poll_fn(|cx| {
            self.waker.connection().register(cx.waker());
            self.waker.connection().take_ready(&mut ReadyStreams::new());
            match self.take(BATCH_BYTES_MAX) {
                Ok(Some(frames)) => Poll::Ready(Ok(frames)),
                Ok(None) => Poll::Pending,
                Err(end) => Poll::Ready(Err(end)),
            }
        })
        .await
    }

    /// Records how it has ended, before it is dropped.
    pub fn ended(&mut self, end: StreamEnd) {
        self.end = Some(end);
    }

    /// The version to resume from, if everything up to it was handed out. `None` inside a backlog
    /// or a gap.
    pub fn resume_version(&self) -> Option<ResourceVersion> {
        self.resume.filter(|_| self.backlog.is_none() && !self.inside_gap)
    }

    /// Whether something is still being sent that pins old state.
    pub fn in_backlog(&self) -> bool {
        self.backlog.is_some()
    }

    /// Whether something waits to be sent. If not, the waker is armed.
    pub fn is_behind(&mut self) -> bool {
        if self.backlog.is_some() || self.view.end() != self.cursor {
            return true;
        }
        let mut tests_left = SLICE_TESTS;
        let run = self.view.read(self.cursor, 0, &self.waker, &mut self.waited, &mut tests_left);
        !matches!(run, Ok(LogRun::Empty))
    }

    /// A bookmark, if everything has been sent and the version has moved since.
    pub fn bookmark(&mut self) -> Option<FrameBuf> {
        if self.backlog.is_some() {
            return None;
        }
        // The head is read before the log: every event up to it was in the log at that time, and
        // was sent if the log has no more. The head of another history is published only after the
        // view of this one has ended.
        let head = self.hub.head()?;
        let sent_all = self.view.is_read_up(self.cursor);
        (sent_all && self.resume.is_none_or(|resume| resume < head)).then(|| {
            self.resume = Some(head);
            let mut frames = self.view.encoder().writer(0);
            frames.message(&control::bookmark(head));
            let mut frames = frames.finish();
            self.checksum.add(frames.plain());
            self.begin(&mut frames);
            self.show(Some(&frames));
            frames
        })
    }

    fn take_from_log(&mut self, bytes_max: usize) -> Result<Option<FrameBuf>, LogReadError> {
        let mut frames = FrameBuf::default();
        let mut received = None;
        let view = self.view.clone();
        let mut tests_left = SLICE_TESTS;
        while frames.len() < bytes_max {
            if tests_left == 0 {
                self.must_yield = true;
                break;
            }
            self.skip_to_floor()?;
            let room = bytes_max - frames.len();
            match view.read(self.cursor, room, &self.waker, &mut self.waited, &mut tests_left) {
                Ok(LogRun::Empty) => break,
                // The floor was reached since: read again from there.
                Ok(_) | Err(LogReadError::Gap(_)) if self.floor.is_some() => {}
                Ok(LogRun::Passed(next)) => self.cursor = next,
                Ok(LogRun::Shared(segment)) => {
                    let had = frames.messages();
                    let is_new = !segment.is_encoded();
                    let taken = segment.take(self.cursor, room, view.encoder(), self.bases, &mut frames);
                    if is_new {
                        let cost = comparison_cost(taken.entries.len(), frames.messages() - had);
                        tests_left = tests_left.saturating_sub(cost);
                        let compression = segment.compressed_bytes().saturating_mul(SLICE_TESTS);
                        tests_left = tests_left.saturating_sub(compression / COMPRESSED_BYTES_OF_SLICE);
                    }
                    if let Some(plain) = taken.plain {
                        self.checksum.add_shared(plain);
                    }
                    received = received.or(self.advance(taken.entries, taken.end));
                }
                Ok(LogRun::Unshared(entries, end)) => {
                    let mut writer = view.encoder().writer(0);
                    for entry in &entries {
                        view.encoder().entry(entry, self.bases, &mut writer);
                    }
                    let written = writer.finish();
                    tests_left = tests_left.saturating_sub(comparison_cost(entries.len(), written.messages()));
                    self.checksum.add(written.plain());
                    frames.append(written);
                    received = received.or(self.advance(&entries, end));
                }
                // Messages already taken are sent first; the next call fails again.
                Err(_) if !frames.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        self.must_yield |= tests_left == 0;
        if frames.is_empty() {
            return Ok(None);
        }
        self.hub.metrics().sent(frames.messages(), frames.len(), received.map(|at| at.elapsed()));
        Ok(Some(frames))
    }

    /// Moves past the events up to the floor.
    ///
    /// # Errors
    /// If objects have other bytes since a version up to the floor.
    fn skip_to_floor(&mut self) -> Result<(), LogReadError> {
        let Some(floor) = self.floor else { return Ok(()) };
        let (cursor, reencoded, is_reached) = self.hub.cursor_past(&self.view, self.cursor, floor)?;
        self.cursor = cursor;
        // The client has the earlier bytes. This tests the selection, so it takes no lock.
        for gap in reencoded {
            let crossing = gap.crossing(self.view.selection());
            crossing.map_err(|Expired { requested, oldest }| {
                LogReadError::Gap(Expired { requested, oldest: oldest.max(floor) })
            })?;
        }
        self.floor = self.floor.filter(|_| !is_reached);
        Ok(())
    }

    /// Moves past entries, to `end`. Returns when the first of them was received.
    fn advance(&mut self, entries: &[LogEntry], end: Cursor) -> Option<Instant> {
        self.cursor = end;
        let is_inside = |entry: &LogEntry| matches!(entry.kind, EntryKind::GapBegin(_) | EntryKind::GapEvent(..));
        self.inside_gap = is_inside(entries.last()?);
        let boundary = entries.iter().rfind(|entry| !is_inside(entry));
        self.resume = boundary.map(|entry| entry.version).or(self.resume);
        entries.first()?.received
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let tenant = self.holder.as_ref().and_then(Holder::tenant);
        self.hub.leave(&self.view, self.waker_id, self.waited, tenant);
        self.hub.metrics().subscription_finished(self.end.as_ref().unwrap_or(&StreamEnd::Cancelled).as_str());
    }
}
