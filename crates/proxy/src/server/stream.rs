//! One watch on a connection: its subscription, the HTTP/2 stream that it is sent on, its clocks, and how it ends.
//!
//! Nothing is taken from the subscription that HTTP/2 has no window for, so a subscriber that does not read keeps its place and pins
//! next to nothing. Dropping a stream ends its subscription at once, which is how a subscriber that went away is noticed.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Wake, Waker},
    time::Duration,
};

use bytes::{Buf, Bytes};
use h2::SendStream;
use tokio::time::Instant;

use super::{
    clocks::{Clocks, Tick},
    http,
    limits::BATCH_BYTES_MAX,
    payload::Payload,
    reader::{Opened, Speech},
    status,
};
use crate::fanout::{ConnectionWaker, StreamEnd};
use kubefan_common::planted::{self, Bug};

/// The longest bookmark: a version of 20 digits, and what is around it; over HTTP names too.
const BOOKMARK_BYTES_MAX: usize = 40;
const BOOKMARK_EVENT_BYTES_MAX: usize = 512;

/// A watch that is being sent.
pub struct WatchStream {
    opened: Opened,
    send: SendStream<Payload>,
    notice: Arc<Notice>,
    clocks: Clocks,
    /// Whether it waits for a window.
    stalled: bool,
    /// Whether it is in the connection's queue already.
    pub queued: bool,
}

/// What a turn of a stream came to.
pub enum Turn {
    /// There may be more to send.
    More,
    /// There is nothing to send now, or no room for it; the line rings when that changes.
    Waits,
    /// The subscription has ended.
    Ended(StreamEnd),
    /// The subscriber has gone away.
    Gone,
}

impl WatchStream {
    /// A stream that has sent its headers.
    pub fn new(
        opened: Opened,
        send: SendStream<Payload>,
        line: &Arc<ConnectionWaker>,
        deadline_at: Option<Instant>,
        stall_timeout: Duration,
    ) -> Self {
        let id = send.stream_id().as_u32();
        let notice = Arc::new(Notice { line: line.clone(), stream: id, ..Notice::default() });
        let tells_end = opened.speech != Speech::Grpc;
        let clocks = Clocks::new(opened.bookmark_interval, opened.timeout_at, deadline_at, stall_timeout, tells_end);
        let (stalled, queued) = (false, false);
        Self { opened, send, notice, clocks, stalled, queued }
    }

    /// Sends a batch, as far as there is something and HTTP/2 has room for it; takes what it sent from `budget`.
    pub fn turn(&mut self, now: Instant, budget: &mut usize) -> Turn {
        // HTTP/2 tells us of the room that we are just asking for; we see it anyway.
        self.notice.quiet.store(true, Ordering::Relaxed);
        let turn = self.send_batch(now, budget);
        self.notice.quiet.store(false, Ordering::Relaxed);
        match turn {
            Turn::Waits | Turn::More if self.is_gone() => Turn::Gone,
            // Room that came from another task while it was quiet here.
            Turn::Waits if self.stalled && self.send.capacity() > 0 => Turn::More,
            turn => turn,
        }
    }

    /// Whether the subscriber has gone away; if not, the line rings when it has.
    pub fn is_gone(&mut self) -> bool {
        let listens = self.notice.listens.swap(true, Ordering::Relaxed);
        !listens && {
            let waker = Waker::from(self.notice.clone());
            self.send.poll_reset(&mut Context::from_waker(&waker)).is_ready()
        }
    }

    fn send_batch(&mut self, now: Instant, budget: &mut usize) -> Turn {
        self.send.reserve_capacity(BATCH_BYTES_MAX);
        let mut room = self.send.capacity();
        self.stalled = room == 0;
        if self.stalled {
            // What was reserved is waited for.
            return Turn::Waits;
        }
        let turn = loop {
            if room == 0 {
                break Turn::More;
            }
            match self.opened.subscription.take(room) {
                Ok(Some(pieces)) => {
                    let sent = pieces.remaining();
                    if self.send.send_data(Payload::FrameBuf(pieces), false).is_err() {
                        break Turn::Gone;
                    }
                    let in_backlog = self.opened.subscription.in_backlog();
                    self.clocks.sent(now, sent, in_backlog);
                    room = room.saturating_sub(sent);
                    // A batch of a snapshot is this connection's own memory; one of the log is shared.
                    let weight = if in_backlog { 2 } else { 1 };
                    *budget = budget.saturating_sub(weight * sent);
                }
                Ok(None) => break Turn::Waits,
                Err(end) => break Turn::Ended(end),
            }
        };
        // Room that is not used would be missing elsewhere: the connection's window is for all its streams.
        self.send.reserve_capacity(0);
        turn
    }

    /// When it must be looked at, whatever happens; `None`: never.
    pub fn due_at(&self, now: Instant) -> Option<Instant> {
        self.clocks.due_at(now, self.opened.subscription.in_backlog())
    }

    /// Looks at its clocks; tells if it ends.
    pub fn tick(&mut self, now: Instant) -> Option<StreamEnd> {
        match self.clocks.tick(now, self.opened.subscription.in_backlog()) {
            Tick::Nothing => {}
            Tick::End(end) => return Some(end),
            Tick::Bookmark => {
                // One that waits for a window would find a bookmark after each of its intervals.
                let has_room = !self.stalled && self.has_room_for_bookmark();
                if (has_room || planted::is(Bug::EarlyBookmark))
                    && let Some(bookmark) = self.opened.subscription.bookmark()
                {
                    // Fails where the stream is gone, which its notice tells.
                    let _ = self.send.send_data(Payload::FrameBuf(bookmark), false);
                }
            }
        }
        None
    }

    fn has_room_for_bookmark(&mut self) -> bool {
        let bytes_max = match self.opened.speech {
            Speech::Grpc => BOOKMARK_BYTES_MAX,
            Speech::Http(_) => BOOKMARK_EVENT_BYTES_MAX,
        };
        self.send.reserve_capacity(bytes_max);
        let has_room = self.send.capacity() >= bytes_max;
        self.send.reserve_capacity(0);
        has_room
    }

    /// Ends it: the subscriber is told why, after what is still on its way to it.
    pub fn finish(mut self, end: StreamEnd) {
        // Both fail where the stream is gone.
        let _ = match self.opened.speech {
            Speech::Grpc => self.send.send_trailers(status::trailers(status::ended(&end))),
            Speech::Http(media) => {
                let word = http::status::last_word(&end).map_or_else(Bytes::new, |failure| failure.event(media));
                self.send.send_data(Payload::Bytes(word), true)
            }
        };
        self.opened.subscription.ended(end);
    }
}

/// How HTTP/2 tells that a stream was reset or has room again: as the subscription does, on the line.
#[derive(Default)]
struct Notice {
    line: Arc<ConnectionWaker>,
    stream: u32,
    listens: AtomicBool,
    quiet: AtomicBool,
}

impl Wake for Notice {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.listens.store(false, Ordering::Relaxed);
        if !self.quiet.load(Ordering::Relaxed) {
            self.line.mark_ready(self.stream);
        }
    }
}
