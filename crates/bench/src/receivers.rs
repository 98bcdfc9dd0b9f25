//! The subscribers: HTTP/2 connections by the h2 crate and raw ones for the floor, on threads of their own, which count what comes.
//!
//! They stand on the machine that is measured, so they do as little as a subscriber can: no decoding, no copies, one task per
//! connection, windows so large that the server is not held up.

use std::{
    future::{pending, poll_fn},
    ops::Range,
    pin::{Pin, pin},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use bytes::{BufMut, Bytes, BytesMut};
use futures::{FutureExt, StreamExt, stream::FuturesUnordered};
use h2::{RecvStream, client::SendRequest};
use http::{HeaderMap, Method, Request};
use tokio::{
    io::{AsyncRead, ReadBuf},
    sync::{Semaphore, SemaphorePermit},
    time::sleep,
};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    board::Board,
    link::Connector,
    messages::{Kind, Messages},
    rest::Endpoint,
};

/// Connections of a thread that are being opened at a time: more would overflow the listener's backlog.
const OPENING_MAX: usize = 64;
/// A server that is not ready is asked again after so long, as long as the phase lasts.
const RETRY_DELAY: Duration = Duration::from_millis(50);
/// What a receiver of the floor reads at a time.
const RAW_READ_BYTES: usize = 256 << 10;
/// gRPC's UNAVAILABLE.
pub(super) const UNAVAILABLE: &str = "14";

/// How much a server may send before it is told to go on, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// Of a stream.
    pub stream: u32,
    /// Of a connection.
    pub connection: u32,
    /// The largest frame.
    pub frame: u32,
}

impl Windows {
    /// Like kubefan's own client: windows that do not hold the server up, and large frames.
    pub const KUBEFAN: Self = Self { stream: 2 << 20, connection: 16 << 20, frame: 1 << 20 };
    /// Like Go's `net/http`, and so client-go: large windows, and the smallest frames that there are.
    pub const GO: Self = Self { stream: 4 << 20, connection: 1 << 30, frame: 16_384 };
    /// What HTTP/2 starts with, and many clients leave it at.
    pub const HTTP2: Self = Self { stream: 65_535, connection: 65_535, frame: 16_384 };
}

/// What a subscriber asks for.
pub(super) type RequestOf = Arc<dyn Fn(usize) -> Bytes + Send + Sync>;

/// Where a watch of an apiserver is asked for.
pub(super) type PathOf = Arc<dyn Fn(usize) -> String + Send + Sync>;

/// What is spoken.
#[derive(Clone)]
pub(super) enum Wire {
    /// Watches of the contract; the request of each stream is given by its number. `has_snapshot`: a stream is ready once it has
    /// its snapshot, else as soon as it is open.
    Grpc { request: RequestOf, has_snapshot: bool, windows: Windows },
    /// Watches of an apiserver: a line per event; so many lines are the initial state.
    Http { endpoint: Endpoint, path: PathOf, initial: u64, windows: Windows },
    /// The floor: messages of this many bytes and nothing around them. `ready_bytes` of them, per connection, are the initial state.
    Raw { message_bytes: u64, ready_bytes: u64 },
}

/// What all receivers of a set share.
struct Plan {
    connector: Connector,
    wire: Wire,
    streams_per_connection: usize,
    board: Arc<Board>,
}

/// A set of running receivers. Dropping it ends them and closes their connections.
pub(super) struct Receivers {
    stop: Option<DropGuard>,
    threads: Vec<JoinHandle<()>>,
}

impl Receivers {
    /// Starts receivers for every subscriber of the board.
    pub(super) fn start(
        connector: Connector,
        wire: Wire,
        streams_per_connection: usize,
        threads: usize,
        board: &Arc<Board>,
    ) -> Self {
        let stop = CancellationToken::new();
        let plan = Arc::new(Plan { connector, wire, streams_per_connection, board: board.clone() });
        let threads = (0..threads)
            .map(|thread| {
                let (plan, stop) = (plan.clone(), stop.clone());
                std::thread::spawn(move || run(&plan, thread, threads, stop))
            })
            .collect();
        Self { stop: Some(stop.drop_guard()), threads }
    }
}

impl Drop for Receivers {
    fn drop(&mut self) {
        drop(self.stop.take());
        for thread in self.threads.drain(..) {
            // Ends within a turn of its event loop; a panic in it was printed already.
            let _ = thread.join();
        }
    }
}

fn run(plan: &Arc<Plan>, thread: usize, threads: usize, stop: CancellationToken) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return plan.board.fail(error.to_string()),
    };
    let subscribers = plan.board.subscribers();
    runtime.block_on(async {
        let opening = Arc::new(Semaphore::new(OPENING_MAX));
        for first in (0..subscribers).step_by(plan.streams_per_connection).skip(thread).step_by(threads) {
            let streams = first..(first + plan.streams_per_connection).min(subscribers);
            let (plan, opening) = (plan.clone(), opening.clone());
            tokio::spawn(async move {
                if let Err(message) = connection(&plan, streams, &opening).await {
                    plan.board.fail(message);
                }
            });
        }
        stop.cancelled().await;
    });
}

/// One connection, to its end. It has none unless the server ends it.
async fn connection(plan: &Plan, streams: Range<usize>, opening: &Semaphore) -> Result<(), String> {
    let board = &plan.board;
    let permit = opening.acquire().await.map_err(|error| error.to_string())?;
    match &plan.wire {
        Wire::Raw { message_bytes, ready_bytes } => {
            let link = plan.connector.tcp(board).await.map_err(|error| format!("connecting: {error}"))?;
            drop(permit);
            raw(link, streams, *message_bytes, *ready_bytes, board).await
        }
        Wire::Grpc { request, has_snapshot, windows } => {
            let watch = |send, stream| grpc(send, stream, request, *has_snapshot, board);
            http2(plan, streams, permit, *windows, watch).await
        }
        Wire::Http { endpoint, path, initial, windows } => {
            let watch = |send, stream| lines(send, stream, endpoint, path(stream), *initial, board);
            http2(plan, streams, permit, *windows, watch).await
        }
    }
}

/// One HTTP/2 connection and the watches on it.
async fn http2<F: Future<Output = Result<(), String>>>(
    plan: &Plan,
    streams: Range<usize>,
    permit: SemaphorePermit<'_>,
    windows: Windows,
    watch: impl Fn(SendRequest<Bytes>, usize) -> F,
) -> Result<(), String> {
    let link = plan.connector.connect(&plan.board).await.map_err(|error| format!("connecting: {error}"))?;
    let (send, connection) = h2::client::Builder::new()
        .initial_window_size(windows.stream)
        .initial_connection_window_size(windows.connection)
        .max_frame_size(windows.frame)
        .enable_push(false)
        .handshake::<_, Bytes>(link)
        .await
        .map_err(|error| format!("HTTP/2: {error}"))?;
    let streams = async {
        let mut open: FuturesUnordered<_> = streams.map(|stream| watch(send.clone(), stream)).collect();
        // Every request is under way or waits for its turn.
        drop(permit);
        match open.next().await {
            Some(ended) => ended,
            None => pending().await,
        }
    };
    // One task for both, so that frames are handed on in the turn that reads them.
    tokio::select! {
        biased;
        ended = connection => match ended {
            Ok(()) => Err("the server closed a connection".to_owned()),
            Err(error) => Err(format!("HTTP/2: {error}")),
        },
        ended = streams => ended,
    }
}

/// One watch of an apiserver.
async fn lines(
    send: SendRequest<Bytes>,
    stream: usize,
    endpoint: &Endpoint,
    path: String,
    initial: u64,
    board: &Board,
) -> Result<(), String> {
    let failed = |error: h2::Error| format!("watch: {error}");
    let request = endpoint.request(Method::GET, &path, None).map_err(|error| error.to_string())?;
    let mut send = send.ready().await.map_err(failed)?;
    let (head, mut body) = send.send_request(request, true).map_err(failed)?.0.await.map_err(failed)?.into_parts();
    if !head.status.is_success() {
        return Err(format!("the apiserver answered {}", head.status));
    }
    let mut missing = initial;
    if missing == 0 {
        board.ready_one();
    }
    while let Some(data) = body.data().await {
        let mut count = 0;
        let mut next = Some(data);
        while let Some(data) = next {
            let data = data.map_err(failed)?;
            // Cannot fail: so much was just received.
            let _ = body.flow_control().release_capacity(data.len());
            count += memchr::memchr_iter(b'\n', &data).count() as u64;
            next = body.data().now_or_never().flatten();
        }
        let of_state = count.min(missing);
        missing -= of_state;
        board.add_objects(of_state);
        if of_state > 0 && missing == 0 {
            board.ready_one();
        }
        if count > of_state {
            board.receive(stream, count - of_state);
        }
    }
    Err("a watch ended".to_owned())
}

/// One watch.
async fn grpc(
    send: SendRequest<Bytes>,
    stream: usize,
    request: &RequestOf,
    has_snapshot: bool,
    board: &Board,
) -> Result<(), String> {
    let mut body = loop {
        match open(send.clone(), request(stream)).await? {
            Some(body) => break body,
            None => sleep(RETRY_DELAY).await,
        }
    };
    let mut state = Watch { messages: Messages::default(), is_ready: !has_snapshot, in_snapshot: false };
    if state.is_ready {
        board.ready_one();
    }
    while let Some(data) = body.data().await {
        let mut counts = (0, 0);
        let mut next = Some(data);
        // All that has come is one read.
        while let Some(data) = next {
            let data = data.map_err(|error| format!("stream: {error}"))?;
            // Cannot fail: so much was just received.
            let _ = body.flow_control().release_capacity(data.len());
            state.read(&data, board, &mut counts)?;
            next = body.data().now_or_never().flatten();
        }
        let (live, objects) = counts;
        if objects > 0 {
            board.add_objects(objects);
        }
        if live > 0 {
            board.receive(stream, live);
        }
    }
    let trailers = body.trailers().await.map_err(|error| format!("stream: {error}"))?;
    Err(trailers.map_or_else(|| "a watch ended".to_owned(), |trailers| format!("a watch ended: {}", status(&trailers))))
}

/// Opens a watch; `None` where the server is not ready for it.
pub(super) async fn open(send: SendRequest<Bytes>, message: Bytes) -> Result<Option<RecvStream>, String> {
    let failed = |error: h2::Error| format!("request: {error}");
    let request = Request::post("http://localhost/kubefan.v1alpha1.WatchService/Watch")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .map_err(|error| error.to_string())?;
    let mut send = send.ready().await.map_err(failed)?;
    let (response, mut body) = send.send_request(request, false).map_err(failed)?;
    let mut framed = BytesMut::with_capacity(message.len() + 5);
    framed.put_u8(0);
    framed.put_u32(message.len() as u32);
    framed.put(message);
    body.send_data(framed.freeze(), true).map_err(failed)?;
    let (head, body) = response.await.map_err(failed)?.into_parts();
    match head.headers.get("grpc-status") {
        None if head.status.is_success() => Ok(Some(body)),
        None => Err(format!("the server answered {}", head.status)),
        Some(code) if code == UNAVAILABLE => Ok(None),
        Some(_) => Err(format!("the server refused a watch: {}", status(&head.headers))),
    }
}

/// What a server says of the end, for people.
pub(super) fn status(headers: &HeaderMap) -> String {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    format!("status {} {}", text("grpc-status"), text("grpc-message"))
}

/// Where a watch stands.
struct Watch {
    messages: Messages,
    is_ready: bool,
    in_snapshot: bool,
}

impl Watch {
    /// Adds live events and objects of the snapshot to `counts`.
    fn read(&mut self, data: &[u8], board: &Board, counts: &mut (u64, u64)) -> Result<(), String> {
        let Self { messages, is_ready, in_snapshot } = self;
        let mut ready = || {
            if !std::mem::replace(is_ready, true) {
                board.ready_one();
            }
        };
        let mut gap = false;
        messages.read(data, |kind, version| match kind {
            Kind::SnapshotBegin => *in_snapshot = true,
            Kind::SnapshotEnd => {
                *in_snapshot = false;
                let version = version.and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
                board.set_version(version.unwrap_or_default());
                ready();
            }
            Kind::Event if *in_snapshot => counts.1 += 1,
            Kind::Event => counts.0 += 1,
            Kind::GapBegin => gap = true,
            Kind::Other => {}
        });
        if gap { Err("the server marked a gap: it has listed again".to_owned()) } else { Ok(()) }
    }
}

/// One connection of the floor, which stands for as many streams as one of the server's does.
async fn raw(
    link: impl AsyncRead,
    streams: Range<usize>,
    message_bytes: u64,
    ready_bytes: u64,
    board: &Board,
) -> Result<(), String> {
    let mut link = pin!(link);
    let mut buffer = vec![0; RAW_READ_BYTES];
    let (mut bytes, mut counted, mut is_ready) = (0, 0, false);
    loop {
        if !is_ready && bytes >= ready_bytes {
            is_ready = true;
            streams.clone().for_each(|_| board.ready_one());
        }
        let count = poll_fn(|cx| {
            let mut read = ReadBuf::new(&mut buffer);
            Pin::new(&mut link).as_mut().poll_read(cx, &mut read).map_ok(|()| read.filled().len())
        });
        match count.await {
            Ok(0) => return Err("the floor closed a connection".to_owned()),
            Ok(count) => bytes += count as u64,
            Err(error) => return Err(format!("the floor: {error}")),
        }
        // A whole message of every stream at a time: they are written at once.
        let complete = bytes.saturating_sub(ready_bytes) / (message_bytes * streams.len() as u64);
        if complete > counted {
            streams.clone().for_each(|stream| board.receive(stream, complete - counted));
            counted = complete;
        }
    }
}
