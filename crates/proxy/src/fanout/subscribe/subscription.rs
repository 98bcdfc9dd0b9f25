//! A subscriber's place: a prelude being sent, then a cursor into the view's log. It holds no queue of its own.

use std::{future::poll_fn, sync::Arc, task::Poll};

use tokio::time::Instant;

use crate::{
    cache::Expired,
    fanout::{
        gate::GatePermit,
        hub::core::Hub,
        send::{
            encoder::DeltaBases,
            frame::{Sink, control},
            frame_buf::FrameBuf,
        },
        stream_end::StreamEnd,
        subscribe::{
            backlog::{Backlog, BacklogError},
            options::{OnExpired, OnLag, Start, SubscribeOptions},
        },
        views::{
            log::{EntryKind, LogEntry},
            view::{LogReadError, LogRun, View},
        },
        wake::waker::{ReadyStreams, StreamWaker},
    },
    upstream::warnings::Warnings,
};
use kubefan_common::planted::{self, Bug};
use kubefan_model::ResourceVersion;

/// How much [`Subscription::next`] gives at most, in bytes: enough for full segments, little enough that a slow subscriber pins next to
/// nothing.
const BATCH_BYTES_MAX: usize = 64 << 10;

/// A live subscription. Dropping it unregisters it.
pub struct Subscription {
    hub: Arc<Hub>,
    view: Arc<View>,
    at_view: usize,
    bell: Arc<StreamWaker>,
    cursor: u64,
    /// What comes up to this version its client has from elsewhere.
    floor: Option<ResourceVersion>,
    /// Where it has last found nothing; see [`View::run`].
    waited: Option<u64>,
    holds: DeltaBases,
    /// In a box: most of its life a subscription has none.
    prelude: Option<Box<Backlog>>,
    /// Leave to send it.
    pass: Option<Arc<GatePermit>>,
    /// The last `resume_version` given out.
    resume: Option<ResourceVersion>,
    /// Something was sent.
    begun: bool,
    /// A gap was begun and not ended: what was sent is the state at no version.
    inside_gap: bool,
    on_lag: OnLag,
    on_expired: OnExpired,
    /// How it has ended; none where its subscriber let go of it.
    end: Option<StreamEnd>,
}

/// Where a subscription goes on. Made by the hub inside its critical section.
pub(in crate::fanout) struct StartPoint {
    pub(in crate::fanout) cursor: u64,
    /// What is sent before the log is read.
    pub(in crate::fanout) prelude: Option<Backlog>,
    /// Everything at or below this version was sent.
    pub(in crate::fanout) resume: Option<ResourceVersion>,
    /// Leave to send the prelude.
    pub(in crate::fanout) pass: Option<Arc<GatePermit>>,
}

impl Subscription {
    /// Made by the hub inside its critical section, which has counted it in.
    pub(in crate::fanout) fn new(
        hub: Arc<Hub>,
        view: Arc<View>,
        (at_view, bell): (usize, Arc<StreamWaker>),
        place: StartPoint,
        floor: Option<ResourceVersion>,
        terms: &SubscribeOptions,
    ) -> Self {
        let holds = match terms.start {
            Start::After(version) if !planted::is(Bug::HoldsAllAfterResume) => DeltaBases::Since(version),
            Start::After(_) | Start::Kept(_) | Start::Ahead(_) | Start::Snapshot | Start::Over(_) => DeltaBases::All,
        };
        let StartPoint { cursor, prelude, resume, pass } = place;
        let &SubscribeOptions { on_lag, on_expired, .. } = terms;
        let (prelude, waited, inside_gap, end) = (prelude.map(Box::new), None, false, None);
        Self {
            hub,
            view,
            at_view,
            bell,
            cursor,
            floor,
            waited,
            holds,
            prelude,
            pass,
            resume,
            begun: false,
            inside_gap,
            on_lag,
            on_expired,
            end,
        }
    }

    /// What readers of its cache are warned of, over HTTP.
    pub fn warnings(&self) -> Warnings {
        self.hub.warnings()
    }

    /// What is ready, at most about `bytes_max` bytes (one message may be larger). `None`: nothing now; the bell is armed, and rings
    /// when there is.
    pub fn take(&mut self, bytes_max: usize) -> Result<Option<FrameBuf>, StreamEnd> {
        let pieces = self.take_shared(bytes_max)?;
        Ok(pieces.map(|pieces| self.begin(pieces)))
    }

    /// What goes out first is not only what all are sent.
    fn begin(&mut self, mut pieces: FrameBuf) -> FrameBuf {
        if !std::mem::replace(&mut self.begun, true) {
            self.view.encoder().begin(&mut pieces);
        }
        pieces
    }

    fn take_shared(&mut self, bytes_max: usize) -> Result<Option<FrameBuf>, StreamEnd> {
        loop {
            if let Some(prelude) = &mut self.prelude {
                match prelude.take(bytes_max, &self.hub, &self.view, self.holds) {
                    Ok(taken) => {
                        self.resume = taken.resume.or(self.resume);
                        if taken.complete {
                            self.prelude = self.prelude.take().and_then(|prelude| prelude.into_next());
                            self.pass = self.pass.take().filter(|_| self.prelude.is_some());
                        }
                        if !taken.pieces.is_empty() {
                            return Ok(Some(taken.pieces));
                        }
                    }
                    Err(BacklogError::Ended(end)) => return Err(end),
                    Err(BacklogError::Expired(expired)) => self.lag(expired)?,
                }
                continue;
            }
            // Nobody has rung since there was nothing.
            if self.waited.is_some() && self.bell.is_armed() {
                return Ok(None);
            }
            match self.take_of_log(bytes_max) {
                Ok(pieces) => return Ok(pieces),
                Err(LogReadError::Ended(end)) => return Err(end),
                Err(LogReadError::Behind { oldest }) => {
                    self.lag(Expired { requested: self.resume.unwrap_or(oldest), oldest })?;
                }
            }
        }
    }

    /// It has fallen behind the events that are held.
    fn lag(&mut self, expired: Expired) -> Result<(), StreamEnd> {
        let sent = self.resume.filter(|_| !self.inside_gap || planted::is(Bug::LaggardInsideGap));
        // Where it lags inside of what it has leave for, that leave is good for what follows.
        let pass = self.pass.take();
        let place = self.hub.lagging(&self.view, sent, expired, (self.on_lag, self.on_expired), pass)?;
        // A snapshot leaves nothing of what was sent.
        if place.resume.is_none() {
            self.holds = DeltaBases::All;
        }
        (self.cursor, self.prelude, self.pass) = (place.cursor, place.prelude.map(Box::new), place.pass);
        (self.waited, self.inside_gap) = (None, false);
        Ok(())
    }

    /// As [`Self::take`], and waits until there is something. For a subscription that is alone on its line. Cancel-safe.
    pub async fn next(&mut self) -> Result<FrameBuf, StreamEnd> {
        poll_fn(|cx| {
            self.bell.line().register(cx.waker());
            self.bell.line().take_ready(&mut ReadyStreams::new());
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

    /// Whether something is still being sent that pins old state.
    pub fn in_backlog(&self) -> bool {
        self.prelude.is_some()
    }

    /// A bookmark, if everything has been sent and the version has moved since.
    pub fn bookmark(&mut self) -> Option<FrameBuf> {
        if self.prelude.is_some() {
            return None;
        }
        // The head is read before the log: what was appended by then is at or below it, and was sent if the log has no more. One of
        // another history is published after the view of this one was ended.
        let head = self.hub.head()?;
        let sent_all = self.view.open_end() == Some(self.cursor) || planted::is(Bug::EarlyBookmark);
        (sent_all && self.resume.is_none_or(|resume| resume < head)).then(|| {
            self.resume = Some(head);
            let mut frames = self.view.encoder().writer(0);
            frames.message(&control::bookmark(head));
            self.begin(frames.finish())
        })
    }

    fn take_of_log(&mut self, bytes_max: usize) -> Result<Option<FrameBuf>, LogReadError> {
        let (mut pieces, mut received) = (FrameBuf::default(), None);
        let view = self.view.clone();
        while pieces.len() < bytes_max {
            self.skip()?;
            let room = bytes_max - pieces.len();
            match view.run(self.cursor, room, &self.bell, &mut self.waited) {
                Ok(LogRun::Nothing) => break,
                // It has come since: looked at again, from where it is no longer before what the client has.
                Ok(_) if self.floor.is_some() => {}
                Ok(LogRun::Shared(block)) => {
                    let taken = block.take(self.cursor, room, view.encoder(), self.holds, &mut pieces);
                    received = received.or(self.pass(taken));
                }
                Ok(LogRun::Alone(entries)) => {
                    let mut frames = view.encoder().writer(0);
                    entries.iter().for_each(|entry| {
                        view.encoder().entry(entry, self.holds, &mut frames);
                    });
                    pieces.append(frames.finish());
                    received = received.or(self.pass(&entries));
                }
                // What was taken is sent first; the next call finds the same again.
                Err(_) if !pieces.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        if pieces.is_empty() {
            return Ok(None);
        }
        self.hub.metrics().sent(pieces.messages(), pieces.len(), received.map(|at| at.elapsed()));
        Ok(Some(pieces))
    }

    /// Moves past what its client has from elsewhere.
    fn skip(&mut self) -> Result<(), LogReadError> {
        let Some(floor) = self.floor else { return Ok(()) };
        let (cursor, reached) = self.hub.skip(&self.view, floor)?;
        self.cursor = cursor;
        self.floor = self.floor.filter(|_| !reached);
        Ok(())
    }

    /// Moves past entries; tells when the first of them was received.
    fn pass(&mut self, entries: &[LogEntry]) -> Option<Instant> {
        self.cursor += entries.len() as u64;
        let is_inside = |entry: &LogEntry| matches!(entry.kind, EntryKind::GapBegin(_) | EntryKind::GapEvent(..));
        self.inside_gap = is_inside(entries.last()?);
        let boundary = entries.iter().rfind(|entry| !is_inside(entry));
        self.resume = boundary.map(|entry| entry.version).or(self.resume);
        entries.first()?.received
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.hub.leave(&self.view, self.at_view, self.waited);
        self.hub.metrics().subscription_finished(self.end.as_ref().unwrap_or(&StreamEnd::Cancelled));
    }
}
