//! The send path: one HTTP/2 connection, driven by one task in passes.
//!
//! The problem: an event goes to thousands of streams on thousands of connections. If each stream
//! had a task, an event would cost a wake-up, a lock and a write per stream.
//!
//! The choice: one task per connection works in passes. A pass takes the streams that were woken,
//! gives each a turn to send one batch as far as its window allows, lets h2 turn the batches into
//! frames, and writes all frames to the socket with one flush (see [`super::coalescer`]). So an
//! event costs a connection one wake-up and one write, however many of its streams get it. A pass
//! has a budget, so a connection with much to send does not starve the others, and streams that had
//! no turn come first in the next pass. While the socket is not writable, nothing is taken from any
//! subscription: a slow client keeps its cursors and pins almost nothing.
//!
//! Reasons for h2 instead of tonic or hyper: they run a task or a body per stream, poll it before
//! they know whether the window has room, and flush per frame. Their cost per message exceeds that
//! of the system call, and they hide the window and resets, which decide here how much is taken
//! from a subscription and when it ends.
//!
//! Wake-ups: subscriptions and stream windows wake one stream through the connection's
//! [`ConnectionWaker`]; h2 and the socket wake the whole task ([`IoWaker`]); the timer and the
//! requests to end ([`EndRequests`]) have a waker of their own ([`TimerWaker`]), because most
//! passes need not look at them.

use std::{
    collections::BTreeMap,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use futures::FutureExt;
use h2::{
    RecvStream,
    server::{self, SendResponse},
};
use http::{Request, Response, header};
use kubefan_cache::StreamEnd;
use kubefan_common::proto::WATCH_PATH;
use kubefan_fanout::{ConnectionWaker, ReadyStreams, StreamWaker};
use kubefan_telemetry::metrics::ConnectionEnd;
use tokio::{task::JoinSet, time::Instant};

use super::{
    arrival::Arrival,
    coalescer::{Coalescer, Flusher, coalesce},
    deadlines::Deadlines,
    keepalive::Keepalive,
    payload::Payload,
    requests::{self, StartedWatch},
    respond,
    wakers::{IoWaker, TimerWaker},
    watch_stream::{Turn, WatchStream},
};
use crate::{
    client_info::ClientInfo,
    grpc::{audited, call},
    kube::answer::WatchHeaders,
    transport::{
        limits::{self, PASS_BYTES_MAX, PASS_REQUESTS_MAX},
        open_connections::{EndReason, EndRequest, EndRequests, OpenConnection},
        services::Services,
    },
    watch::WatchProtocol,
};

/// The owner number of the connection itself, among the stream numbers.
const CONNECTION: u32 = 0;

/// The byte stream under a connection.
pub trait Io: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static {}

impl<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static> Io for T {}

/// The task of one connection.
pub struct Connection<T> {
    services: Arc<Services>,
    client: ClientInfo,
    http2: server::Connection<Coalescer<T>, Payload>,
    flusher: Flusher<T>,
    io_waker: Arc<IoWaker>,
    /// `io_waker` as a `Waker`.
    waker: Waker,
    timer_waker: Arc<TimerWaker>,
    connection_waker: Arc<ConnectionWaker>,
    streams: BTreeMap<u32, Box<WatchStream>>,
    /// Streams that may have something to send, in the order of their turns.
    ready: ReadyStreams,
    /// Streams that were woken since the last pass; empty between passes.
    woken: ReadyStreams,
    /// Requests that are being answered, including watches that are not open yet.
    requests: JoinSet<Option<StartedWatch>>,
    deadlines: Deadlines,
    keepalive: Option<Keepalive>,
    open: OpenConnection,
    end_requests: EndRequests,
    /// Reason why the connection takes no more requests.
    ending: Option<EndReason>,
}

impl<T: Io> Connection<T> {
    /// Performs the HTTP/2 handshake.
    pub async fn handshake(services: Arc<Services>, io: T, client: ClientInfo) -> Result<Self, h2::Error> {
        let open = services.connections.open();
        let (half, flusher) = coalesce(io);
        let mut http2 = server::Builder::new()
            .initial_window_size(limits::RECEIVE_WINDOW_BYTES)
            .initial_connection_window_size(limits::RECEIVE_WINDOW_BYTES)
            .max_frame_size(limits::RECEIVE_FRAME_BYTES_MAX)
            .max_header_list_size(limits::HEADER_LIST_BYTES_MAX)
            .max_concurrent_streams(services.options.max_concurrent_streams)
            .max_concurrent_reset_streams(limits::RESET_STREAMS_MAX)
            .max_pending_accept_reset_streams(limits::PENDING_RESET_STREAMS_MAX)
            .max_local_error_reset_streams(Some(limits::ERROR_RESET_STREAMS_MAX))
            .max_send_buffer_size(limits::BATCH_BYTES_MAX)
            .handshake(half)
            .await?;
        let options = &services.options;
        let keepalive = http2
            .ping_pong()
            .map(|ping_pong| Keepalive::new(ping_pong, options.keepalive_interval, options.keepalive_timeout));
        let mut deadlines = Deadlines::default();
        if let Some(keepalive) = &keepalive {
            deadlines.push(keepalive.due_at(), CONNECTION);
        }
        let connection_waker = ConnectionWaker::new();
        let io_waker = IoWaker::new(connection_waker.clone());
        let waker = Waker::from(io_waker.clone());
        let timer_waker = TimerWaker::new(connection_waker.clone());
        let end_requests = open.end_requests();
        Ok(Self {
            services,
            client,
            http2,
            flusher,
            io_waker,
            waker,
            timer_waker,
            connection_waker,
            streams: BTreeMap::new(),
            ready: ReadyStreams::new(),
            woken: ReadyStreams::new(),
            requests: JoinSet::new(),
            deadlines,
            keepalive,
            open,
            end_requests,
            ending: None,
        })
    }

    fn poll_pass(&mut self, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        let waker = self.waker.clone();
        let http2 = &mut Context::from_waker(&waker);
        self.connection_waker.register(cx.waker());
        let mut budget = PASS_BYTES_MAX;
        loop {
            // This pass itself flushes the data that it hands to h2, so that must not cause another
            // pass.
            self.io_waker.set_muted(true);
            self.poll_requests(cx);
            let gone = self.poll_timer_and_end_requests();
            self.send(&mut budget);
            self.io_waker.set_muted(false);
            if gone.is_ready() {
                return Poll::Ready(ConnectionEnd::Keepalive);
            }
            match self.poll_http2(http2) {
                Err(end) => return Poll::Ready(end),
                // New request tasks were spawned; polling their set again lets them wake this task.
                Ok(1..PASS_REQUESTS_MAX) => {}
                Ok(_) => break,
            }
        }
        if let Poll::Ready(Err(_)) = self.flusher.poll_flush(http2) {
            return Poll::Ready(ConnectionEnd::Closed);
        }
        if !self.ready.is_empty() && !self.flusher.is_blocked() {
            // The budget is used up; another pass sends the rest.
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Polls the timer and the requests to end if one of them has woken the task. `Ready` if the
    /// client is gone.
    fn poll_timer_and_end_requests(&mut self) -> Poll<()> {
        if !self.timer_waker.take() {
            return Poll::Pending;
        }
        let waker = Waker::from(self.timer_waker.clone());
        let mut cx = Context::from_waker(&waker);
        self.poll_end_requests(&mut cx);
        self.poll_deadlines(&mut cx)
    }

    /// On a request to end: stops accepting requests (GOAWAY), and ends the watches one after the
    /// other with the reason.
    fn poll_end_requests(&mut self, cx: &mut Context<'_>) {
        while let Poll::Ready(EndRequest { reason, over, .. }) = self.end_requests.poll_next(cx) {
            self.ending = Some(reason);
            self.http2.graceful_shutdown();
            let now = Instant::now();
            let count = u32::try_from(self.streams.len()).unwrap_or(u32::MAX);
            for (before, (id, stream)) in (0..).zip(&mut self.streams) {
                let at = now + over.mul_f64(f64::from(before) / f64::from(count));
                stream.end_from(at, reason);
                self.deadlines.push(at, *id);
            }
        }
    }

    /// Handles the deadlines that have passed. `Ready` if the client is gone.
    fn poll_deadlines(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while let Poll::Ready(owner) = self.deadlines.poll_next(cx) {
            let now = Instant::now();
            if owner == CONNECTION {
                let Some(keepalive) = &mut self.keepalive else { continue };
                if keepalive.tick(now).is_ready() {
                    return Poll::Ready(());
                }
                self.deadlines.push(keepalive.due_at(), CONNECTION);
            } else if let Some(stream) = self.streams.get_mut(&owner) {
                match stream.tick(now) {
                    None => self.deadlines.push(stream.due_at(now), owner),
                    Some(end) => self.finish(owner, end),
                }
            }
        }
        Poll::Pending
    }

    /// Starts to send the watches that were opened.
    fn poll_requests(&mut self, cx: &mut Context<'_>) {
        // A task that panicked has dropped its stream, which resets it.
        while let Poll::Ready(Some(answered)) = self.requests.poll_join_next(cx) {
            if let Ok(Some(started)) = answered {
                self.start(started);
            }
        }
    }

    /// Sends the headers of a watch and adds its stream.
    fn start(&mut self, started: StartedWatch) {
        let StartedWatch { opened, mut respond, deadline_at } = started;
        let mut response = Response::new(());
        match opened.protocol {
            WatchProtocol::Grpc => drop(response.headers_mut().insert(header::CONTENT_TYPE, call::CONTENT_TYPE)),
            WatchProtocol::Kube(media) => {
                WatchHeaders::of(&opened, media).put(response.headers_mut());
            }
        }
        self.services.budget.put(response.headers_mut());
        opened.record.put_id(response.headers_mut());
        let Ok(send) = respond.send_response(response, false) else { return };
        let id = send.stream_id().as_u32();
        let stall_timeout = self.services.options.snapshot_stall_timeout;
        let mut stream =
            Box::new(WatchStream::new(opened, send, &self.open, &self.connection_waker, deadline_at, stall_timeout));
        match self.ending {
            Some(EndReason::Draining) => return stream.finish(StreamEnd::Draining),
            Some(reason) => stream.end_from(Instant::now(), reason),
            None => {}
        }
        stream.queued = true;
        self.ready.push(id);
        self.deadlines.push(stream.due_at(Instant::now()), id);
        self.timer_waker.mark();
        self.streams.insert(id, stream);
        let streams = &self.streams;
        self.deadlines.remove_dead(streams.len(), |owner| owner == CONNECTION || streams.contains_key(&owner));
    }

    fn finish(&mut self, id: u32, end: StreamEnd) {
        if let Some(stream) = self.streams.remove(&id) {
            stream.finish(end);
        }
    }

    /// Gives the woken streams their turns, until the budget is used up.
    fn send(&mut self, budget: &mut usize) {
        let blocked = self.flusher.is_blocked();
        self.connection_waker.take_ready(&mut self.woken);
        for id in self.woken.drain(..) {
            let Some(stream) = self.streams.get_mut(&id) else { continue };
            if !std::mem::replace(&mut stream.queued, true) {
                self.ready.push(id);
            }
            // Its turn may be far away, so its end is noticed here.
            let end = if blocked { stream.end() } else { None };
            if let Some(end) = end {
                if let Some(stream) = self.streams.remove(&id) {
                    stream.finish(end.clone());
                }
            } else if blocked && stream.is_gone() {
                self.streams.remove(&id);
            }
        }
        if blocked || self.ready.is_empty() {
            return;
        }
        let now = Instant::now();
        while *budget > 0 && !self.ready.is_empty() {
            let mut round = std::mem::take(&mut self.ready).into_iter();
            for id in &mut round {
                let Some(stream) = self.streams.get_mut(&id) else { continue };
                stream.queued = false;
                match stream.turn(now, budget, &self.services.readers) {
                    Turn::More => {
                        stream.queued = true;
                        self.ready.push(id);
                    }
                    Turn::Waits => {}
                    Turn::Ended(end) => self.finish(id, end),
                    Turn::Gone => drop(self.streams.remove(&id)),
                }
                if *budget == 0 {
                    break;
                }
            }
            // Streams that had no turn are first in the next pass.
            self.ready.insert_many(0, round);
        }
    }

    /// Lets h2 read from the socket and write frames. Returns the number of new requests, or the
    /// end of the connection.
    fn poll_http2(&mut self, cx: &mut Context<'_>) -> Result<usize, ConnectionEnd> {
        let mut accepted = 0;
        let result = loop {
            match self.http2.poll_accept(cx) {
                Poll::Pending => break Ok(accepted),
                Poll::Ready(Some(Ok((request, respond)))) => {
                    self.answer(request, respond);
                    accepted += 1;
                    if accepted == PASS_REQUESTS_MAX {
                        cx.waker().wake_by_ref();
                        break Ok(accepted);
                    }
                }
                Poll::Ready(Some(Err(error))) if !error.is_io() => {
                    tracing::debug!(%error, peer = ?self.client.address, "a client violated the HTTP/2 protocol");
                    break Err(ConnectionEnd::Error);
                }
                Poll::Ready(_) => {
                    break Err(self.ending.map_or(ConnectionEnd::Closed, EndReason::connection_end));
                }
            }
        };
        if self.flusher.take_received()
            && let Some(keepalive) = &mut self.keepalive
        {
            keepalive.received(Instant::now(), cx);
        }
        result
    }

    /// Starts the task that answers a request.
    fn answer(&mut self, mut request: Request<RecvStream>, mut respond: SendResponse<Payload>) {
        let services = self.services.clone();
        if services.drain.is_cancelled() {
            // The request is refused, and the next one belongs on another connection.
            self.http2.graceful_shutdown();
        }
        let client = self.client.of_request(request.headers());
        request.extensions_mut().insert(client.clone());
        if call::is_any_grpc(&request) {
            let mut record = audited::begin(&services.audit, &mut request);
            let arrival = match Arrival::new(&services.pending, client.holder()) {
                Ok(arrival) => arrival,
                Err(status) => {
                    record.refused(audited::outcome(&status));
                    let mut response = status.into_http();
                    record.put_id(response.headers_mut());
                    // Fails only if the stream is gone.
                    let _ = respond.send_response(response, true);
                    return;
                }
            };
            if call::is_grpc(&request) && request.uri().path() == WATCH_PATH {
                let waker = self.connection_waker.clone();
                let opened = requests::open_grpc_watch(services, client, waker, request, respond, arrival, record);
                self.requests.spawn(opened);
            } else {
                let answered = respond::serve_router(services, client.holder(), request, respond, arrival, record);
                self.requests.spawn(answered.map(|()| None));
            }
        } else {
            let stream_waker = StreamWaker::new(&self.connection_waker, respond.stream_id().as_u32());
            self.requests.spawn(requests::answer_kube(services, stream_waker, client.holder(), request, respond));
        }
    }
}

impl<T: Io> Future for Connection<T> {
    type Output = ConnectionEnd;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        self.get_mut().poll_pass(cx)
    }
}
