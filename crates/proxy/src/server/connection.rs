//! One HTTP/2 connection, driven by one task: requests in, watches out, and one flush at the end of each pass.
//!
//! A pass takes the streams whose bells rang, gives each a batch as far as its window reaches, lets HTTP/2 make frames of them, and
//! writes what came of it to the socket at once. So an event costs a connection one wake-up and one write, however many of its streams
//! hear of it. A socket that takes nothing stops the pass before anything more is taken from a subscription.

use std::{
    collections::BTreeMap,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
};

use ::http::{Request, Response, header};
use futures::{FutureExt, future::BoxFuture};
use h2::{
    RecvStream,
    server::{self, SendResponse},
};
use prost::Message;
use tokio::{task::JoinSet, time::Instant};

use super::{
    Server, bridge, call,
    coalescer::{Coalescer, Flusher, coalesce},
    deadlines::Deadlines,
    http,
    keepalive::Keepalive,
    limits::{self, PASS_BYTES_MAX, PASS_REQUESTS_MAX},
    listen::Peer,
    payload::Payload,
    reader::{Opened, Speech},
    status,
    stream::{Turn, WatchStream},
};
use crate::{
    fanout::{Catalog, ConnectionWaker, ReadyStreams, StreamEnd, StreamWaker},
    telemetry::metrics::ConnectionEnd,
};
use kubefan_common::proto::v1alpha1::WatchRequest;
use kubefan_model::Media;

/// The path of a watch.
const WATCH: &str = "/kubefan.v1alpha1.WatchService/Watch";

/// The number that the connection itself has among its streams.
const CONNECTION: u32 = 0;

/// What a connection is made over.
pub trait Io: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static {}

impl<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static> Io for T {}

/// A watch that a request has led to.
struct Begun {
    opened: Opened,
    respond: SendResponse<Payload>,
    deadline_at: Option<Instant>,
}

/// The task of one connection.
pub struct Connection<C, T> {
    server: Arc<Server<C>>,
    peer: Peer,
    http2: server::Connection<Coalescer<T>, Payload>,
    flusher: Flusher<T>,
    alarm: Arc<Alarm>,
    waker: Waker,
    seldom: Arc<Seldom>,
    line: Arc<ConnectionWaker>,
    streams: BTreeMap<u32, Box<WatchStream>>,
    /// Those that may have something to send.
    queue: ReadyStreams,
    rung: ReadyStreams,
    /// Requests that are being answered; watches among them until they have begun.
    requests: JoinSet<Option<Begun>>,
    deadlines: Deadlines,
    keepalive: Option<Keepalive>,
    /// `None` once it has come.
    drain: Option<BoxFuture<'static, ()>>,
}

impl<C: Catalog, T: Io> Connection<C, T> {
    /// Greets the peer, which has begun to speak HTTP/2.
    pub async fn begin(server: Arc<Server<C>>, io: T, peer: Peer) -> Result<Self, h2::Error> {
        let (half, flusher) = coalesce(io);
        let mut http2 = server::Builder::new()
            .initial_window_size(limits::RECEIVE_WINDOW_BYTES)
            .initial_connection_window_size(limits::RECEIVE_WINDOW_BYTES)
            .max_frame_size(limits::RECEIVE_FRAME_BYTES_MAX)
            .max_header_list_size(limits::HEADER_LIST_BYTES_MAX)
            .max_concurrent_streams(server.options.max_concurrent_streams)
            .max_concurrent_reset_streams(limits::RESET_STREAMS_MAX)
            .max_pending_accept_reset_streams(limits::PENDING_RESET_STREAMS_MAX)
            .max_local_error_reset_streams(Some(limits::ERROR_RESET_STREAMS_MAX))
            .max_send_buffer_size(limits::BATCH_BYTES_MAX)
            .handshake(half)
            .await?;
        let options = &server.options;
        let keepalive = http2
            .ping_pong()
            .map(|ping_pong| Keepalive::new(ping_pong, options.keepalive_interval, options.keepalive_timeout));
        let mut deadlines = Deadlines::default();
        keepalive.iter().for_each(|keepalive| deadlines.push(keepalive.due_at(), CONNECTION));
        let line = ConnectionWaker::new();
        let alarm = Arc::new(Alarm { line: line.clone(), quiet: AtomicBool::new(false) });
        let waker = Waker::from(alarm.clone());
        let seldom = Arc::new(Seldom { line: line.clone(), woke: AtomicBool::new(true) });
        let drain = Some(server.drain.clone().cancelled_owned().boxed());
        Ok(Self {
            server,
            peer,
            http2,
            flusher,
            alarm,
            waker,
            seldom,
            line,
            streams: BTreeMap::new(),
            queue: ReadyStreams::new(),
            rung: ReadyStreams::new(),
            requests: JoinSet::new(),
            deadlines,
            keepalive,
            drain,
        })
    }

    fn poll_pass(&mut self, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        let waker = self.waker.clone();
        let http2 = &mut Context::from_waker(&waker);
        self.line.register(cx.waker());
        let mut budget = PASS_BYTES_MAX;
        loop {
            // What is handed to HTTP/2 from here on is seen to by this pass, and is no reason for another.
            self.alarm.quiet.store(true, Ordering::SeqCst);
            self.poll_requests(cx);
            let gone = self.poll_seldom();
            self.send(&mut budget);
            self.alarm.quiet.store(false, Ordering::SeqCst);
            if gone.is_ready() {
                return Poll::Ready(ConnectionEnd::Keepalive);
            }
            match self.poll_http2(http2) {
                Err(end) => return Poll::Ready(end),
                // The tasks of new requests have just been made, and are to wake us.
                Ok(1..PASS_REQUESTS_MAX) => {}
                Ok(_) => break,
            }
        }
        if let Poll::Ready(Err(_)) = self.flusher.poll_flush(http2) {
            return Poll::Ready(ConnectionEnd::Closed);
        }
        if !self.queue.is_empty() && !self.flusher.is_blocked() {
            // There is more to send than one pass may.
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Looks at the clocks and at kubefan's end, where one of them has woken us. `Ready`: the peer is gone.
    fn poll_seldom(&mut self) -> Poll<()> {
        if !self.seldom.woke.swap(false, Ordering::SeqCst) {
            return Poll::Pending;
        }
        let waker = Waker::from(self.seldom.clone());
        let mut cx = Context::from_waker(&waker);
        self.poll_drain(&mut cx);
        self.poll_clocks(&mut cx)
    }

    /// When kubefan drains: no more requests, and every watch is told.
    fn poll_drain(&mut self, cx: &mut Context<'_>) {
        if self.drain.as_mut().is_some_and(|drain| drain.poll_unpin(cx).is_ready()) {
            self.drain = None;
            self.http2.graceful_shutdown();
            while let Some((_, stream)) = self.streams.pop_first() {
                stream.finish(StreamEnd::Draining);
            }
        }
    }

    /// `Ready`: the peer is gone.
    fn poll_clocks(&mut self, cx: &mut Context<'_>) -> Poll<()> {
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
                    None => {
                        if let Some(due_at) = stream.due_at(now) {
                            self.deadlines.push(due_at, owner);
                        }
                    }
                    Some(end) => self.finish(owner, end),
                }
            }
        }
        Poll::Pending
    }

    /// Takes the watches that have begun.
    fn poll_requests(&mut self, cx: &mut Context<'_>) {
        // One that panicked let go of its stream, which resets it.
        while let Poll::Ready(Some(answered)) = self.requests.poll_join_next(cx) {
            if let Ok(Some(begun)) = answered {
                self.start(begun);
            }
        }
    }

    fn start(&mut self, begun: Begun) {
        let Begun { opened, mut respond, deadline_at } = begun;
        let mut response = Response::new(());
        match opened.speech {
            Speech::Grpc => drop(response.headers_mut().insert(header::CONTENT_TYPE, call::CONTENT_TYPE)),
            Speech::Http(media) => http::watch_headers(media, &opened.subscription.warnings(), response.headers_mut()),
        }
        let Ok(send) = respond.send_response(response, false) else { return };
        let id = send.stream_id().as_u32();
        let stall_timeout = self.server.options.snapshot_stall_timeout;
        let mut stream = Box::new(WatchStream::new(opened, send, &self.line, deadline_at, stall_timeout));
        if self.drain.is_none() {
            return stream.finish(StreamEnd::Draining);
        }
        stream.queued = true;
        self.queue.push(id);
        if let Some(due_at) = stream.due_at(Instant::now()) {
            self.deadlines.push(due_at, id);
        }
        self.seldom.woke.store(true, Ordering::SeqCst);
        self.streams.insert(id, stream);
        let streams = &self.streams;
        self.deadlines.tidy(streams.len(), |owner| owner == CONNECTION || streams.contains_key(&owner));
    }

    fn finish(&mut self, id: u32, end: StreamEnd) {
        if let Some(stream) = self.streams.remove(&id) {
            stream.finish(end);
        }
    }

    /// Gives each stream that has something its turn.
    fn send(&mut self, budget: &mut usize) {
        let blocked = self.flusher.is_blocked();
        self.line.take_ready(&mut self.rung);
        for id in self.rung.drain(..) {
            let Some(stream) = self.streams.get_mut(&id) else { continue };
            if !std::mem::replace(&mut stream.queued, true) {
                self.queue.push(id);
            }
            // Its turn may be long in coming.
            if blocked && stream.is_gone() {
                self.streams.remove(&id);
            }
        }
        if blocked || self.queue.is_empty() {
            return;
        }
        let now = Instant::now();
        while *budget > 0 && !self.queue.is_empty() {
            let mut round = std::mem::take(&mut self.queue).into_iter();
            for id in &mut round {
                let Some(stream) = self.streams.get_mut(&id) else { continue };
                stream.queued = false;
                match stream.turn(now, budget) {
                    Turn::More => {
                        stream.queued = true;
                        self.queue.push(id);
                    }
                    Turn::Waits => {}
                    Turn::Ended(end) => self.finish(id, end),
                    Turn::Gone => drop(self.streams.remove(&id)),
                }
                if *budget == 0 {
                    break;
                }
            }
            // Who had no turn is the next to have one.
            self.queue.insert_many(0, round);
        }
    }

    /// Lets HTTP/2 read, and write what it was handed; tells how many requests came, or that the connection has ended.
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
                    tracing::debug!(%error, peer = ?self.peer.address, "a connection broke the protocol");
                    break Err(ConnectionEnd::Error);
                }
                Poll::Ready(_) if self.drain.is_none() => break Err(ConnectionEnd::Draining),
                Poll::Ready(_) => break Err(ConnectionEnd::Closed),
            }
        };
        if self.flusher.heard()
            && let Some(keepalive) = &mut self.keepalive
        {
            keepalive.heard(Instant::now(), cx);
        }
        result
    }

    /// Begins to answer a request.
    fn answer(&mut self, mut request: Request<RecvStream>, respond: SendResponse<Payload>) {
        if call::is_grpc(&request) && request.uri().path() == WATCH {
            self.requests.spawn(open(self.server.clone(), self.line.clone(), request, respond));
        } else if http::is_kubernetes(&request) {
            request.extensions_mut().insert(self.peer);
            let bell = StreamWaker::new(&self.line, respond.stream_id().as_u32());
            self.requests.spawn(answer(self.server.clone(), bell, request, respond));
        } else {
            request.extensions_mut().insert(self.peer);
            let stall_timeout = self.server.options.snapshot_stall_timeout;
            let answered = bridge::serve(request, respond, self.server.router.clone(), stall_timeout);
            self.requests.spawn(answered.map(|()| None));
        }
    }
}

impl<C: Catalog, T: Io> Future for Connection<C, T> {
    type Output = ConnectionEnd;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<ConnectionEnd> {
        self.get_mut().poll_pass(cx)
    }
}

/// Opens the watch that a request asks for; a refusal is its whole response.
async fn open<C: Catalog>(
    server: Arc<Server<C>>,
    line: Arc<ConnectionWaker>,
    request: Request<RecvStream>,
    mut respond: SendResponse<Payload>,
) -> Option<Begun> {
    let (head, mut body) = request.into_parts();
    let deadline_at = call::deadline_at(&head.headers);
    let bell = StreamWaker::new(&line, respond.stream_id().as_u32());
    let opening = pin!(async {
        let Some(message) = call::message(&head.headers, &mut body, server.options.message_bytes_max).await? else {
            return Ok(None);
        };
        let request = WatchRequest::decode(message).map_err(|error| status::malformed(&error.to_string()))?;
        server.service.open(request, bell).await.map(Some)
    });
    let opened = tokio::select! {
        biased;
        opened = call::within(deadline_at, opening) => opened.unwrap_or_else(|| Err(status::deadline_exceeded())),
        _ = poll_fn(|cx| respond.poll_reset(cx)) => return None,
    };
    match opened {
        Ok(opened) => opened.map(|opened| Begun { opened, respond, deadline_at }),
        Err(status) => {
            // Fails where the stream is gone.
            let _ = respond.send_response(status.into_http(), true);
            None
        }
    }
}

/// Answers a request of the Kubernetes API: a watch begins, all else is its whole response.
async fn answer<C: Catalog>(
    server: Arc<Server<C>>,
    bell: StreamWaker,
    request: Request<RecvStream>,
    mut respond: SendResponse<Payload>,
) -> Option<Begun> {
    let request = request.map(|body| axum::body::Body::new(bridge::RequestBody::from(body)));
    let answering = Box::pin(server.front.answer(request, bell));
    let answer = tokio::select! {
        biased;
        answer = answering => answer,
        _ = poll_fn(|cx| respond.poll_reset(cx)) => return None,
    };
    match answer {
        http::Answer::Watch(opened) => Some(Begun { opened, respond, deadline_at: None }),
        http::Answer::Read(response) => {
            let stall_timeout = Some(server.options.snapshot_stall_timeout);
            bridge::respond(response, respond, (None, stall_timeout), Speech::Http(Media::Json)).await;
            None
        }
        http::Answer::PassedOn(response) => {
            bridge::respond(response, respond, (None, None), Speech::Http(Media::Json)).await;
            None
        }
    }
}

/// How HTTP/2 and the socket wake the connection's task.
struct Alarm {
    line: Arc<ConnectionWaker>,
    quiet: AtomicBool,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // What comes from elsewhere in a quiet moment is not lost: HTTP/2 is polled after it.
        if !self.quiet.load(Ordering::SeqCst) {
            self.line.wake();
        }
    }
}

/// How the timer and the signal to drain wake it. They lie in memory that an ordinary pass does not touch: with a thousand connections
/// that is a good part of what a pass costs.
struct Seldom {
    line: Arc<ConnectionWaker>,
    /// Since they were last looked at, or there is something new to look at.
    woke: AtomicBool,
}

impl Wake for Seldom {
    fn wake(self: Arc<Self>) {
        self.woke.store(true, Ordering::SeqCst);
        self.line.wake();
    }
}
