//! One watch on an HTTP/2 connection: its subscription, its HTTP/2 stream, its timers, and its end.
//!
//! Bytes are taken from the subscription only as far as the HTTP/2 window allows, so a subscriber
//! that does not read keeps its cursor and pins almost nothing. Dropping a stream ends its
//! subscription at once.

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
use kubefan_cache::StreamEnd;
use kubefan_fanout::ConnectionWaker;
use tokio::time::Instant;

use super::payload::Payload;
use crate::{
    grpc::{audited, status},
    kube,
    transport::{
        limits::BATCH_BYTES_MAX,
        open_connections::{CountedWatch, EndReason, OpenConnection},
        unread::{ObservedReader, Readers},
        watch_timers::{Due, WatchTimers},
    },
    watch::{OpenedWatch, WatchProtocol},
};

/// The longest bookmark, in bytes: a version of 20 digits and its message; an event of a Kubernetes
/// watch also contains names.
const BOOKMARK_BYTES_MAX: usize = 40;
const BOOKMARK_EVENT_BYTES_MAX: usize = 512;

/// Delay before a stream that was asked to end, but is not current, checks again.
const END_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A watch that is being sent.
pub struct WatchStream {
    opened: OpenedWatch,
    send: SendStream<Payload>,
    waker: Arc<Http2Waker>,
    timers: WatchTimers,
    /// Whether it waits for the client's window.
    stalled: bool,
    /// Client of the stream, once the stream has waited for a window.
    reader: Option<ObservedReader>,
    /// The time from which it ends because it was asked to, and the reason.
    ending: Option<(Instant, EndReason)>,
    _counted: CountedWatch,
    /// Whether it is in the connection's ready queue.
    pub queued: bool,
}

/// The result of a stream's turn.
pub enum Turn {
    /// There may be more to send.
    More,
    /// There is nothing to send, or no window for it. The connection is woken when that changes.
    Waits,
    /// The subscription has ended.
    Ended(StreamEnd),
    /// The subscriber has gone away.
    Gone,
}

impl WatchStream {
    /// A watch on a stream whose headers were sent.
    pub fn new(
        opened: OpenedWatch,
        send: SendStream<Payload>,
        connection: &OpenConnection,
        connection_waker: &Arc<ConnectionWaker>,
        deadline_at: Option<Instant>,
        stall_timeout: Duration,
    ) -> Self {
        let counted = connection.watch(opened.movable());
        let id = send.stream_id().as_u32();
        let waker =
            Arc::new(Http2Waker { connection_waker: connection_waker.clone(), stream: id, ..Http2Waker::default() });
        let interval = opened.bookmark_interval;
        let timeout_at = opened.timeout_at;
        let bookmark_before_end = opened.protocol != WatchProtocol::Grpc;
        let mut timers = WatchTimers::new(interval, timeout_at, deadline_at, stall_timeout, bookmark_before_end);
        if opened.subscription.in_backlog() {
            timers.begin_backlog(Instant::now());
        }
        let stalled = false;
        let reader = None;
        let ending = None;
        let queued = false;
        Self { opened, send, waker, timers, stalled, reader, ending, _counted: counted, queued }
    }

    /// Reason from outside to end the watch.
    pub fn end(&self) -> Option<StreamEnd> {
        self.opened.end()
    }

    /// Sends a batch, as far as the window allows, and subtracts its bytes from `budget`. Without a
    /// window, the client is one of the `readers` that may be given up.
    pub fn turn(&mut self, now: Instant, budget: &mut usize, readers: &Arc<Readers>) -> Turn {
        if let Some(end) = self.end() {
            return Turn::Ended(end);
        }
        // h2 would wake us for the window that is requested here, which is read below anyway.
        self.waker.muted.store(true, Ordering::Relaxed);
        let turn = self.send_batch(now, budget);
        self.waker.muted.store(false, Ordering::Relaxed);
        match turn {
            Turn::Waits | Turn::More if self.is_gone() => Turn::Gone,
            // Window that another task added while the waker was muted.
            Turn::Waits if self.stalled && self.send.capacity() > 0 => Turn::More,
            Turn::Waits if self.is_given_up(readers) => Turn::Ended(ObservedReader::end()),
            turn => turn,
        }
    }

    /// Whether the stream is to be ended because it waits for its client and memory is short.
    fn is_given_up(&mut self, readers: &Arc<Readers>) -> bool {
        let waits = self.stalled && self.opened.subscription.is_behind();
        if !waits {
            if let Some(reader) = &self.reader {
                reader.reads();
            }
            return false;
        }
        let waker = Waker::from(self.waker.clone());
        self.reader.get_or_insert_with(|| readers.observe()).is_given_up(&waker)
    }

    /// Whether the subscriber has gone away. If not, the connection is woken when it does.
    pub fn is_gone(&mut self) -> bool {
        let registered = self.waker.registered.swap(true, Ordering::Relaxed);
        !registered && {
            let waker = Waker::from(self.waker.clone());
            self.send.poll_reset(&mut Context::from_waker(&waker)).is_ready()
        }
    }

    fn send_batch(&mut self, now: Instant, budget: &mut usize) -> Turn {
        self.send.reserve_capacity(BATCH_BYTES_MAX);
        let mut window = self.send.capacity();
        self.stalled = window == 0;
        if self.stalled {
            // h2 wakes the stream once the reserved window is there.
            return Turn::Waits;
        }
        let turn = loop {
            if window == 0 {
                break Turn::More;
            }
            match self.opened.subscription.take(window) {
                Ok(Some(pieces)) => {
                    let sent = pieces.remaining();
                    if self.send.send_data(Payload::FrameBuf(pieces), false).is_err() {
                        break Turn::Gone;
                    }
                    let in_backlog = self.opened.subscription.in_backlog();
                    self.timers.sent(now, sent, in_backlog);
                    // There was window, so its client reads, although this uses it up again.
                    if let Some(reader) = &self.reader {
                        reader.reads();
                    }
                    window = window.saturating_sub(sent);
                    // A batch of the backlog is memory of this connection; a batch of the log is
                    // shared.
                    let weight = if in_backlog { 2 } else { 1 };
                    *budget = budget.saturating_sub(weight * sent);
                }
                Ok(None) => {
                    // A yield counts like a batch: all streams of a connection share one task.
                    if self.opened.subscription.has_yielded() {
                        *budget = budget.saturating_sub(BATCH_BYTES_MAX);
                    }
                    break Turn::Waits;
                }
                Err(end) => break Turn::Ended(end),
            }
        };
        // Unused window is returned: all streams share the connection's window.
        self.send.reserve_capacity(0);
        turn
    }

    /// Time of the next call of [`Self::tick`].
    pub fn due_at(&self, now: Instant) -> Instant {
        let timers = self.timers.due_at(now, self.opened.subscription.in_backlog());
        self.ending.map_or(timers, |(at, _)| timers.min(at))
    }

    /// Asks the watch to end from `at` on, if the reason ends watches like this one.
    pub fn end_from(&mut self, at: Instant, reason: EndReason) {
        if reason.ends(self.opened.movable()) {
            self.ending = Some((at, reason));
        }
    }

    /// Ends a watch that was asked to end, or looks again later: at a drain at once, otherwise when
    /// it is current, so that its client resumes from memory, and over HTTP not right after its
    /// state. A last bookmark carries the version to the client.
    fn asked_end(&mut self, now: Instant) -> Option<StreamEnd> {
        let (_, reason) = self.ending.filter(|(at, _)| *at <= now)?;
        let is_current = !self.stalled && !self.opened.subscription.is_behind();
        let again_at = if is_current { self.may_move_at(now) } else { now + END_RETRY_INTERVAL };
        if again_at > now && reason != EndReason::Draining {
            self.ending = Some((again_at, reason));
            return None;
        }
        if is_current && (self.opened.bookmark_interval.is_some() || self.opened.protocol == WatchProtocol::Grpc) {
            self.send_bookmark();
        }
        Some(reason.stream_end())
    }

    fn may_move_at(&self, now: Instant) -> Instant {
        match self.opened.protocol {
            WatchProtocol::Grpc => now,
            WatchProtocol::Kube(_) => self.timers.may_move_at(),
        }
    }

    /// Handles the timers that are due. Returns a reason if the watch ends.
    pub fn tick(&mut self, now: Instant) -> Option<StreamEnd> {
        if let Some(end) = self.asked_end(now) {
            return Some(end);
        }
        match self.timers.tick(now, self.opened.subscription.in_backlog()) {
            Due::Nothing => {}
            Due::End(end) => return Some(end),
            Due::Bookmark => self.send_bookmark(),
        }
        None
    }

    fn send_bookmark(&mut self) {
        // A stalled stream would otherwise collect a bookmark per interval.
        if !self.stalled
            && self.has_window_for_bookmark()
            && let Some(bookmark) = self.opened.subscription.bookmark()
        {
            // Fails only if the stream is gone, which its waker reports.
            let _ = self.send.send_data(Payload::FrameBuf(bookmark), false);
        }
    }

    fn has_window_for_bookmark(&mut self) -> bool {
        let bytes_max = match self.opened.protocol {
            WatchProtocol::Grpc => BOOKMARK_BYTES_MAX,
            WatchProtocol::Kube(_) => BOOKMARK_EVENT_BYTES_MAX,
        };
        self.send.reserve_capacity(bytes_max);
        let has_window = self.send.capacity() >= bytes_max;
        self.send.reserve_capacity(0);
        has_window
    }

    /// Ends the watch. The subscriber gets the reason after all bytes that were sent before.
    pub fn finish(mut self, end: StreamEnd) {
        let record = &mut self.opened.record;
        // Both fail only if the stream is gone.
        let _ = match self.opened.protocol {
            WatchProtocol::Grpc => {
                let status = status::ended(&end, self.opened.subscription.resume_version());
                record.ended(end.as_str(), status.as_ref().map(audited::outcome));
                self.send.send_trailers(status::trailers(status))
            }
            WatchProtocol::Kube(media) => {
                record.ended(end.as_str(), None);
                let error = kube::status::watch_error(&end).map_or_else(Bytes::new, |failure| failure.event(media));
                let last = self.opened.subscription.end_body(error);
                self.send.send_data(Payload::FrameBuf(last), true)
            }
        };
        self.opened.subscription.ended(end);
    }
}

/// Wakes the connection for its stream when h2 reports a reset or a larger window, as the
/// subscription does for new events.
#[derive(Default)]
struct Http2Waker {
    connection_waker: Arc<ConnectionWaker>,
    stream: u32,
    /// Whether h2 has this waker for resets.
    registered: AtomicBool,
    muted: AtomicBool,
}

impl Wake for Http2Waker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.registered.store(false, Ordering::Relaxed);
        if !self.muted.load(Ordering::Relaxed) {
            self.connection_waker.mark_ready(self.stream);
        }
    }
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use tokio::io::duplex;

    use super::*;
    use crate::{
        kube::api::tests::opened_watch,
        transport::{
            limits::WATCH_AGE_MIN,
            open_connections::{EndingOptions, OpenConnections},
        },
    };

    const STALL: Duration = Duration::from_secs(30);

    /// A stream of a connection whose client takes everything.
    async fn send_stream() -> SendStream<Payload> {
        let (near, far) = duplex(64 << 10);
        tokio::spawn(async move {
            let (mut send, http2) = h2::client::handshake(far).await.unwrap();
            tokio::spawn(http2);
            let (answer, _body) = send.send_request(Request::new(()), true).unwrap();
            let _answer = answer.await;
            std::future::pending::<()>().await;
        });
        let mut http2 = h2::server::Builder::new().handshake::<_, Payload>(near).await.unwrap();
        let (_, mut respond) = http2.accept().await.unwrap().unwrap();
        let send = respond.send_response(Response::new(()), false).unwrap();
        tokio::spawn(async move { while http2.accept().await.is_some() {} });
        send
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_ends_some_time_after_its_state_and_at_once_at_a_drain() {
        let all = OpenConnections::new(EndingOptions::default());
        for state in ["", "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan"] {
            let waker = ConnectionWaker::new();
            let opened = opened_watch(state, &waker).await;
            let send = send_stream().await;
            let mut stream = WatchStream::new(opened, send, &all.open(), &waker, None, STALL);
            let sent = Instant::now() + Duration::from_millis(500);
            let mut budget = BATCH_BYTES_MAX;
            assert!(matches!(stream.turn(sent, &mut budget, &Readers::new()), Turn::Waits), "{state}");
            let start = if state.is_empty() { Instant::now() } else { sent };
            stream.end_from(sent, EndReason::Rebalanced);
            assert!(stream.tick(sent).is_none(), "{state}");
            assert_eq!(stream.due_at(sent), start + WATCH_AGE_MIN, "{state}");
            stream.end_from(sent, EndReason::Draining);
            assert!(matches!(stream.tick(sent), Some(StreamEnd::Draining)), "{state}");
            stream.end_from(sent, EndReason::Rebalanced);
            assert!(matches!(stream.tick(start + WATCH_AGE_MIN), Some(StreamEnd::Rebalanced)), "{state}");
        }
    }
}
