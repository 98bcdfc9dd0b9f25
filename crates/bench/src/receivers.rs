//! The subscribers: HTTP/2 connections with the h2 crate, and TCP or TLS connections without HTTP/2
//! for the floor.
//! They run on threads of their own and count the messages and bytes.
//!
//! They share the machine with the server under test, so they do as little as possible: no copies,
//! no decoding except of one gzip body for all that receive the same, one task per connection, and
//! flow-control windows large enough that the server never waits.

use std::{
    future::{pending, poll_fn},
    ops::Range,
    pin::{Pin, pin},
    sync::Arc,
    thread::JoinHandle,
    time::Duration,
};

use bytes::Bytes;
use futures::{FutureExt, StreamExt, stream::FuturesUnordered};
use h2::{RecvStream, client::SendRequest};
use http::{HeaderMap, Method, Request};
use kubefan_common::proto::WATCH_PATH;
use tokio::{
    io::{AsyncRead, ReadBuf},
    sync::{Semaphore, SemaphorePermit},
    time::sleep,
};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    body::WatchBody,
    connector::Connector,
    counters::Counters,
    encoding::Encoding,
    messages::{MessageKind, MessageReader, framed},
    rest::Endpoint,
    shared_body::SharedBodies,
    windows::Windows,
};

/// Connections that one thread opens concurrently. More would overflow the listener's backlog.
const OPENING_MAX: usize = 64;
/// Delay before a watch that failed with UNAVAILABLE is opened again. The wait for readiness bounds
/// the number of attempts.
const RETRY_DELAY: Duration = Duration::from_millis(50);
/// Read buffer of a receiver of the floor, in bytes.
const RAW_READ_BYTES: usize = 256 << 10;
/// The gRPC status code UNAVAILABLE.
pub(super) const UNAVAILABLE: &str = "14";

/// The encoded request of a stream, by its number.
pub(super) type RequestOf = Arc<dyn Fn(usize) -> Bytes + Send + Sync>;

/// The URL path of a stream's watch, by its number.
pub(super) type PathOf = Arc<dyn Fn(usize) -> String + Send + Sync>;

/// The protocol of a set of receivers.
#[derive(Clone)]
pub(super) enum ReceiverKind {
    /// gRPC watches. With `has_snapshot` a stream is ready once it has its snapshot, otherwise as
    /// soon as it is open.
    Grpc { request: RequestOf, has_snapshot: bool, windows: Windows },
    /// HTTP watches.
    Http { watches: HttpWatches, windows: Windows },
    /// The floor: messages of `message_bytes` without framing. The first `ready_bytes` of each
    /// connection are the initial state.
    Raw { message_bytes: u64, ready_bytes: u64 },
}

/// The watches of a set of HTTP receivers.
#[derive(Clone)]
pub(super) struct HttpWatches {
    pub(super) endpoint: Endpoint,
    pub(super) path: PathOf,
    pub(super) encoding: Encoding,
    /// Number of events at the beginning of each watch that are the initial state.
    pub(super) initial: u64,
}

/// The configuration that all receivers of a set share.
struct ReceiverConfig {
    connector: Connector,
    kind: ReceiverKind,
    streams_per_connection: usize,
    counters: Arc<Counters>,
}

/// A set of running receivers. Dropping it stops them and closes their connections.
pub(super) struct Receivers {
    stop: Option<DropGuard>,
    threads: Vec<JoinHandle<()>>,
}

impl Receivers {
    /// Starts a receiver for every stream in `counters`.
    pub(super) fn start(
        connector: Connector,
        kind: ReceiverKind,
        streams_per_connection: usize,
        threads: usize,
        counters: &Arc<Counters>,
    ) -> Self {
        let stop = CancellationToken::new();
        let config = Arc::new(ReceiverConfig { connector, kind, streams_per_connection, counters: counters.clone() });
        let threads = (0..threads)
            .map(|thread| {
                let config = config.clone();
                let stop = stop.clone();
                std::thread::spawn(move || run_thread(&config, thread, threads, stop))
            })
            .collect();
        Self { stop: Some(stop.drop_guard()), threads }
    }
}

impl Drop for Receivers {
    fn drop(&mut self) {
        drop(self.stop.take());
        for thread in self.threads.drain(..) {
            // The thread stops at the next turn of its event loop. A panic in it has already been
            // printed.
            let _ = thread.join();
        }
    }
}

fn run_thread(config: &Arc<ReceiverConfig>, thread: usize, threads: usize, stop: CancellationToken) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return config.counters.fail(error.to_string()),
    };
    let subscribers = config.counters.subscribers();
    runtime.block_on(async {
        let opening = Arc::new(Semaphore::new(OPENING_MAX));
        // Not shared between threads, so that they do not wait for each other.
        let bodies = Arc::new(SharedBodies::default());
        for first in (0..subscribers).step_by(config.streams_per_connection).skip(thread).step_by(threads) {
            let streams = first..(first + config.streams_per_connection).min(subscribers);
            let config = config.clone();
            let opening = opening.clone();
            let bodies = bodies.clone();
            tokio::spawn(async move {
                if let Err(message) = run_connection(&config, streams, &opening, &bodies).await {
                    config.counters.fail(message);
                }
            });
        }
        stop.cancelled().await;
    });
}

/// Runs one connection. It returns only if the server closes the connection or a watch, or on an
/// error.
async fn run_connection(
    config: &ReceiverConfig,
    streams: Range<usize>,
    opening: &Semaphore,
    bodies: &SharedBodies,
) -> Result<(), String> {
    let counters = &config.counters;
    let permit = opening.acquire().await.map_err(|error| error.to_string())?;
    match &config.kind {
        ReceiverKind::Raw { message_bytes, ready_bytes } => {
            let transport = config.connector.connect(counters).await.map_err(|error| format!("connecting: {error}"))?;
            drop(permit);
            receive_raw(transport, streams, *message_bytes, *ready_bytes, counters).await
        }
        ReceiverKind::Grpc { request, has_snapshot, windows } => {
            let watch = |send, stream| receive_grpc(send, stream, request, *has_snapshot, counters);
            run_http2(config, streams, permit, *windows, watch).await
        }
        ReceiverKind::Http { watches, windows } => {
            let watch = |send, stream| receive_http(send, stream, watches, bodies, counters);
            run_http2(config, streams, permit, *windows, watch).await
        }
    }
}

/// Runs one HTTP/2 connection and the watches on it.
async fn run_http2<F: Future<Output = Result<(), String>>>(
    config: &ReceiverConfig,
    streams: Range<usize>,
    permit: SemaphorePermit<'_>,
    windows: Windows,
    watch: impl Fn(SendRequest<Bytes>, usize) -> F,
) -> Result<(), String> {
    let transport = config.connector.connect(&config.counters).await.map_err(|error| format!("connecting: {error}"))?;
    let (send, connection) = h2::client::Builder::new()
        .initial_window_size(windows.stream)
        .initial_connection_window_size(windows.connection)
        .max_frame_size(windows.frame)
        .enable_push(false)
        .handshake::<_, Bytes>(transport)
        .await
        .map_err(|error| format!("HTTP/2: {error}"))?;
    let streams = async {
        let mut open: FuturesUnordered<_> = streams.map(|stream| watch(send.clone(), stream)).collect();
        // This connection is established, so another one may be opened.
        drop(permit);
        match open.next().await {
            Some(ended) => ended,
            None => pending().await,
        }
    };
    // One task polls both, so frames are processed in the same poll that reads them.
    tokio::select! {
        biased;
        ended = connection => match ended {
            Ok(()) => Err("the server closed a connection".to_owned()),
            Err(error) => Err(format!("HTTP/2: {error}")),
        },
        ended = streams => ended,
    }
}

/// Runs one watch over HTTP.
async fn receive_http(
    send: SendRequest<Bytes>,
    stream: usize,
    watches: &HttpWatches,
    bodies: &SharedBodies,
    counters: &Counters,
) -> Result<(), String> {
    let failed = |error: h2::Error| format!("watch: {error}");
    let path = (watches.path)(stream);
    let mut request = watches.endpoint.request(Method::GET, &path, None).map_err(|error| error.to_string())?;
    watches.encoding.accept_watch(request.headers_mut());
    let mut send = send.ready().await.map_err(failed)?;
    let (head, mut body) = send.send_request(request, true).map_err(failed)?.0.await.map_err(failed)?.into_parts();
    if !head.status.is_success() {
        return Err(format!("the apiserver answered {}", head.status));
    }
    let mut events = WatchBody::new(watches.encoding, &head.headers, bodies, &path)?;
    let mut missing = watches.initial;
    if missing == 0 {
        counters.stream_ready();
    }
    while let Some(data) = body.data().await {
        let mut count = 0;
        let mut bytes = 0;
        let mut next = Some(data);
        while let Some(data) = next {
            let data = data.map_err(failed)?;
            // Cannot fail: this many bytes were just received.
            let _ = body.flow_control().release_capacity(data.len());
            bytes += data.len() as u64;
            count += events.read(&data)?;
            next = body.data().now_or_never().flatten();
        }
        counters.add_body_bytes(bytes);
        let of_initial = count.min(missing);
        missing -= of_initial;
        counters.add_objects(of_initial);
        if of_initial > 0 && missing == 0 {
            counters.stream_ready();
        }
        if count > of_initial {
            counters.receive(stream, count - of_initial);
        }
    }
    Err("a watch ended".to_owned())
}

/// Runs one watch over gRPC.
async fn receive_grpc(
    send: SendRequest<Bytes>,
    stream: usize,
    request: &RequestOf,
    has_snapshot: bool,
    counters: &Counters,
) -> Result<(), String> {
    let mut body = loop {
        match open_watch(send.clone(), request(stream)).await? {
            Some(body) => break body,
            None => sleep(RETRY_DELAY).await,
        }
    };
    let mut state = GrpcWatch { messages: MessageReader::default(), is_ready: !has_snapshot, in_snapshot: false };
    if state.is_ready {
        counters.stream_ready();
    }
    while let Some(data) = body.data().await {
        let mut read = Received::default();
        let mut next = Some(data);
        // All data that has already arrived counts as one read.
        while let Some(data) = next {
            let data = data.map_err(|error| format!("stream: {error}"))?;
            // Cannot fail: this many bytes were just received.
            let _ = body.flow_control().release_capacity(data.len());
            read.bytes += data.len() as u64;
            state.read(&data, counters, &mut read)?;
            next = body.data().now_or_never().flatten();
        }
        counters.add_body_bytes(read.bytes);
        if read.objects > 0 {
            counters.add_objects(read.objects);
        }
        if read.live > 0 {
            counters.receive(stream, read.live);
        }
    }
    let trailers = body.trailers().await.map_err(|error| format!("stream: {error}"))?;
    Err(trailers
        .map_or_else(|| "a watch ended".to_owned(), |trailers| format!("a watch ended: {}", grpc_status(&trailers))))
}

/// Opens a watch over gRPC. Returns `None` if the server is not ready yet.
pub(super) async fn open_watch(send: SendRequest<Bytes>, message: Bytes) -> Result<Option<RecvStream>, String> {
    let failed = |error: h2::Error| format!("request: {error}");
    let request = Request::post(format!("http://localhost{WATCH_PATH}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .map_err(|error| error.to_string())?;
    let mut send = send.ready().await.map_err(failed)?;
    let (response, mut body) = send.send_request(request, false).map_err(failed)?;
    body.send_data(framed(&message), true).map_err(failed)?;
    let (head, body) = response.await.map_err(failed)?.into_parts();
    match head.headers.get("grpc-status") {
        None if head.status.is_success() => Ok(Some(body)),
        None => Err(format!("the server answered {}", head.status)),
        Some(code) if code == UNAVAILABLE => Ok(None),
        Some(_) => Err(format!("the server refused a watch: {}", grpc_status(&head.headers))),
    }
}

/// The gRPC status code and message, for error texts.
pub(super) fn grpc_status(headers: &HeaderMap) -> String {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    format!("status {} {}", text("grpc-status"), text("grpc-message"))
}

/// The numbers of what one read has brought.
#[derive(Default)]
struct Received {
    /// Live events.
    live: u64,
    /// Objects of the snapshot.
    objects: u64,
    /// Bytes of the body.
    bytes: u64,
}

/// The state of a gRPC watch.
struct GrpcWatch {
    messages: MessageReader,
    is_ready: bool,
    in_snapshot: bool,
}

impl GrpcWatch {
    /// Adds what `data` contains to `received`.
    fn read(&mut self, data: &[u8], counters: &Counters, received: &mut Received) -> Result<(), String> {
        let Self { messages, is_ready, in_snapshot } = self;
        let mut ready = || {
            if !std::mem::replace(is_ready, true) {
                counters.stream_ready();
            }
        };
        let mut gap = false;
        messages.read(data, |kind, version| match kind {
            MessageKind::SnapshotBegin => *in_snapshot = true,
            MessageKind::SnapshotEnd => {
                *in_snapshot = false;
                let version = version.and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
                counters.set_version(version.unwrap_or_default());
                ready();
            }
            MessageKind::Event if *in_snapshot => received.objects += 1,
            MessageKind::Event => received.live += 1,
            MessageKind::GapBegin => gap = true,
            MessageKind::Other => {}
        });
        if gap { Err("the server announced a gap: it has relisted".to_owned()) } else { Ok(()) }
    }
}

/// Runs one connection of the floor. It carries the bytes of as many streams as one connection of
/// the server.
async fn receive_raw(
    transport: impl AsyncRead,
    streams: Range<usize>,
    message_bytes: u64,
    ready_bytes: u64,
    counters: &Counters,
) -> Result<(), String> {
    let mut transport = pin!(transport);
    let mut buffer = vec![0; RAW_READ_BYTES];
    let mut bytes = 0;
    let mut counted = 0;
    let mut is_ready = false;
    loop {
        if !is_ready && bytes >= ready_bytes {
            is_ready = true;
            for _ in streams.clone() {
                counters.stream_ready();
            }
        }
        let count = poll_fn(|cx| {
            let mut read = ReadBuf::new(&mut buffer);
            Pin::new(&mut transport).as_mut().poll_read(cx, &mut read).map_ok(|()| read.filled().len())
        });
        match count.await {
            Ok(0) => return Err("the floor closed a connection".to_owned()),
            Ok(count) => bytes += count as u64,
            Err(error) => return Err(format!("the floor: {error}")),
        }
        // The floor writes one message for each stream of the connection together, so count only
        // complete rounds.
        let complete = bytes.saturating_sub(ready_bytes) / (message_bytes * streams.len() as u64);
        if complete > counted {
            for stream in streams.clone() {
                counters.receive(stream, complete - counted);
            }
            counted = complete;
        }
    }
}
