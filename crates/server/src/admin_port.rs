//! The admin port: its thread, its connections and their limits.
//!
//! Kubernetes restarts a process whose `/livez` does not answer, so the answer must come under any
//! load, and must fail if the process is stuck. The port therefore has a thread and a runtime of
//! its own. It answers `/livez` there, without a lock that other threads hold for long, and
//! everything else in the runtime that does the work.
//!
//! Any client that reaches the port could occupy its connections. So a new connection always finds
//! a place: if there is none, the one that has been quiet for the longest is closed.

use std::{
    convert::Infallible,
    io,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    response::{IntoResponse, Response},
};
use futures::StreamExt;
use http::{Request, StatusCode, header};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use kubefan_access::AccessControl;
use tokio::{
    runtime::{Builder, Handle},
    sync::{Semaphore, oneshot},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use tonic::transport::server::Connected;
use tower::ServiceExt;

use super::{
    client_info::ClientInfo,
    transport::{
        http1::socket::{MonitoredSocket, Pace, ResponseNeeds},
        http2::connection::Io,
        limits::{HANDSHAKE_TIMEOUT, HEADER_LIST_BYTES_MAX},
        listen::{Connection, Listener},
        tls_handshake,
    },
    worker_check::{OBSERVATION_INTERVAL, WorkerCheck},
};

/// Connections at a time.
pub const CONNECTIONS_MAX: usize = 64;

/// File descriptors held for connections while the process has no others.
pub const FILES_RESERVED: usize = 8;

/// Time for a connection to send the headers of its next request.
const HEADERS_TIMEOUT: Duration = Duration::from_secs(10);

/// A client that reads too little of an answer in this time loses its connection.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum time of an answer, with its wait for a permit.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// Streams of an HTTP/2 connection.
const HTTP2_STREAMS_MAX: u32 = 8;

/// Concurrent answers, apart from those about liveness: to requests without credentials, and as
/// many to those with. The latter may wait for a review of their caller, and must not hold up
/// probes.
const ANSWERS_MAX: usize = 8;

/// Serves the port on a thread of its own until `stop` is cancelled, with `tls` over TLS: then
/// `access` knows the holders of client certificates. `router` answers in the current runtime,
/// whose workers `/livez` reports; its requests have the [`ClientInfo`]. The receiver gets the
/// reason of the end, or an error if the thread panicked.
///
/// # Errors
/// The system has no thread or no file descriptor left.
///
/// # Panics
/// Outside of a runtime.
pub fn serve(
    listener: Listener,
    tls: Option<TlsAcceptor>,
    access: Arc<AccessControl>,
    router: Router,
    stop: CancellationToken,
) -> io::Result<oneshot::Receiver<io::Result<()>>> {
    let (end, ended) = oneshot::channel();
    let port = Arc::new(Port {
        tls,
        access,
        router,
        workers: Handle::current(),
        answers: Arc::new(Semaphore::new(ANSWERS_MAX)),
        answers_to_callers: Arc::new(Semaphore::new(ANSWERS_MAX)),
        stuck: Mutex::default(),
    });
    let runtime = Builder::new_current_thread().enable_all().build()?;
    thread::Builder::new().name("kubefan-admin".to_owned()).spawn(move || {
        let served = runtime.block_on(stop.run_until_cancelled_owned(port.serve(listener)));
        let _ = end.send(served.unwrap_or(Ok(())));
    })?;
    Ok(ended)
}

/// State that all connections share.
struct Port {
    tls: Option<TlsAcceptor>,
    access: Arc<AccessControl>,
    router: Router,
    /// The runtime that does the work.
    workers: Handle,
    answers: Arc<Semaphore>,
    answers_to_callers: Arc<Semaphore>,
    /// The number of a worker that is stuck.
    stuck: Mutex<Option<usize>>,
}

impl Port {
    async fn serve(self: Arc<Self>, listener: Listener) -> io::Result<()> {
        let mut incoming = pin!(listener.into_current_runtime()?.incoming(FILES_RESERVED));
        let mut tasks = JoinSet::new();
        let mut places = Vec::new();
        tasks.spawn(self.clone().observe_workers());
        loop {
            let accepted = tokio::select! {
                biased;
                Some(_) = tasks.join_next() => continue,
                accepted = incoming.next() => accepted,
            };
            // The listener has logged the failure and waited.
            let Some(Ok(io)) = accepted else { continue };
            if let Some(quietest) = make_place(&mut places) {
                quietest.close.cancel();
                let _ = tasks.join_next().await;
            }
            let place = Arc::new(AdminConnection::default());
            places.push(place.clone());
            tasks.spawn(self.clone().connection(io, place));
        }
    }

    async fn observe_workers(self: Arc<Self>) {
        let mut check = WorkerCheck::new(self.workers.metrics());
        let mut ticks = interval(OBSERVATION_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            *lock(&self.stuck) = check.observe();
        }
    }

    async fn connection(self: Arc<Self>, io: Connection, place: Arc<AdminConnection>) {
        let client = io.connect_info();
        let needs = ResponseNeeds::default();
        let io = MonitoredSocket::new(io, needs.clone(), STALL_TIMEOUT);
        let close = place.clone();
        let served = async move {
            match self.tls.clone() {
                None => self.serve_http(io, client, needs, place).await,
                Some(tls) => {
                    let accepted = timeout(HANDSHAKE_TIMEOUT, tls_handshake::accept(io, tls)).await;
                    let Ok(Ok(io)) = accepted else { return };
                    let client = tls_handshake::client(&io, client, &self.access);
                    self.serve_http(io, client, needs, place).await;
                }
            }
        };
        close.close.run_until_cancelled(served).await;
    }

    async fn serve_http<T: Io>(
        self: Arc<Self>,
        io: T,
        client: ClientInfo,
        needs: ResponseNeeds,
        place: Arc<AdminConnection>,
    ) {
        let service = service_fn(move |request: Request<Incoming>| {
            let port = self.clone();
            let place = place.clone();
            needs.begin(Pace::Pinning);
            let mut request = request.map(|_| Body::empty());
            request.extensions_mut().insert(client.clone());
            async move {
                place.set_answering(true);
                let response = port.answer(request).await;
                place.set_answering(false);
                Ok::<_, Infallible>(response)
            }
        });
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADERS_TIMEOUT)
            .max_buf_size(HEADER_LIST_BYTES_MAX as usize);
        // For gRPC clients that have the address of this port: they get an answer that says so.
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(STALL_TIMEOUT)
            .max_header_list_size(HEADER_LIST_BYTES_MAX)
            .max_concurrent_streams(HTTP2_STREAMS_MAX);
        // A connection that fails concerns only its client.
        let _ = builder.serve_connection(TokioIo::new(io), service).await;
    }

    async fn answer(&self, request: Request<Body>) -> Response {
        if matches!(request.uri().path(), "/livez" | "/healthz") {
            return self.liveness();
        }
        let has_certificate = request.extensions().get().is_some_and(|client: &ClientInfo| client.has_certificate);
        let has_credentials = has_certificate || request.headers().contains_key(header::AUTHORIZATION);
        let answers = if has_credentials { &self.answers_to_callers } else { &self.answers };
        let router = self.router.clone();
        let answered = async {
            let permit = answers.clone().acquire_owned().await.ok()?;
            let answering = self.workers.spawn(async move {
                // Held by the task: a task that does not end occupies no more than its permit.
                let _permit = permit;
                router.oneshot(request).await
            });
            AbortOnDropHandle::new(answering).await.ok()
        };
        match timeout(ANSWER_TIMEOUT, answered).await {
            Ok(Some(Ok(response))) => response,
            Ok(None) | Err(_) => {
                let text = format!(
                    "kubefan has no answer within {ANSWER_TIMEOUT:?}: it is busy, or the apiserver does not tell who asks\n"
                );
                (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
            }
        }
    }

    /// Like the apiserver's: `ok`, or the failed check.
    fn liveness(&self) -> Response {
        match *lock(&self.stuck) {
            None => "ok".into_response(),
            Some(worker) => {
                let text = format!("[-]worker {worker} has been in one task for 30s\nlivez check failed\n");
                (StatusCode::INTERNAL_SERVER_ERROR, text).into_response()
            }
        }
    }
}

/// A connection in the eyes of the others.
struct AdminConnection {
    close: CancellationToken,
    activity: Mutex<Activity>,
}

/// Ordered: the connection to close first is least.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Activity {
    is_answering: bool,
    since: Instant,
}

impl Default for AdminConnection {
    fn default() -> Self {
        Self {
            close: CancellationToken::new(),
            activity: Mutex::new(Activity { is_answering: false, since: Instant::now() }),
        }
    }
}

impl AdminConnection {
    fn set_answering(&self, is_answering: bool) {
        *lock(&self.activity) = Activity { is_answering, since: Instant::now() };
    }
}

/// Forgets the connections that have ended. If there are too many others, removes and returns the
/// one that must be closed: one without a request before one with a request, and the quietest of
/// them.
fn make_place(places: &mut Vec<Arc<AdminConnection>>) -> Option<Arc<AdminConnection>> {
    places.retain(|place| Arc::strong_count(place) > 1);
    if places.len() < CONNECTIONS_MAX {
        return None;
    }
    let (quietest, _) = places.iter().enumerate().min_by_key(|(_, place)| *lock(&place.activity))?;
    Some(places.swap_remove(quietest))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{SocketAddr, TcpStream},
        sync::mpsc::sync_channel,
    };

    use axum::routing::get;

    use super::*;
    use crate::transport::{listen_address::ListenAddress, unix_socket::SocketMode};

    /// A port whose work is done by a runtime with one worker.
    fn port() -> (tokio::runtime::Runtime, SocketAddr, tokio_util::sync::DropGuard) {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let stop = CancellationToken::new();
        let address = runtime.block_on(async {
            let any = ListenAddress::Tcp(([127, 0, 0, 1], 0).into());
            let listener = Listener::bind(&any, "--admin-listen", SocketMode::default()).await.unwrap();
            let port = listener.bound().unwrap().port().unwrap();
            let router = Router::new().route("/page", get(|| async { "a page" }));
            serve(listener, None, Arc::new(AccessControl::always_allow()), router, stop.clone()).unwrap();
            ([127, 0, 0, 1], port).into()
        });
        (runtime, address, stop.drop_guard())
    }

    fn answer(address: SocketAddr, path: &str) -> String {
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes()).unwrap();
        let mut text = String::new();
        client.read_to_string(&mut text).unwrap();
        text
    }

    #[test]
    fn liveness_is_answered_while_every_worker_is_blocked() {
        let (runtime, address, _stop) = port();
        assert!(answer(address, "/page").ends_with("a page"));
        let (started, has_started) = sync_channel(0);
        let (release, released) = sync_channel::<()>(0);
        runtime.spawn(async move {
            started.send(()).unwrap();
            let _ = released.recv();
        });
        has_started.recv().unwrap();
        assert!(answer(address, "/livez").ends_with("\r\n\r\nok"));
        assert!(answer(address, "/healthz").ends_with("\r\n\r\nok"));
        drop(release);
        assert!(answer(address, "/page").ends_with("a page"));
        assert!(answer(address, "/none").starts_with("HTTP/1.1 404 "));
    }

    #[test]
    fn a_new_client_is_answered_however_many_are_silent() {
        let (_runtime, address, _stop) = port();
        let mut in_use = TcpStream::connect(address).unwrap();
        let silent: Vec<_> = (0..CONNECTIONS_MAX).map(|_| TcpStream::connect(address).unwrap()).collect();
        assert!(answer(address, "/livez").ends_with("\r\n\r\nok"));
        assert_eq!(in_use.read(&mut [0]).unwrap(), 0, "the quietest was closed");
        drop(silent);
    }

    #[test]
    fn a_place_is_taken_from_the_quietest_without_a_request() {
        let mut places: Vec<Arc<AdminConnection>> = (0..CONNECTIONS_MAX).map(|_| Arc::default()).collect();
        let others = places.clone();
        others[0].set_answering(true);
        others[1].set_answering(true);
        others[1].set_answering(false);
        let taken = make_place(&mut places).unwrap();
        assert!(Arc::ptr_eq(&taken, &others[2]));
        assert!(make_place(&mut places).is_none(), "one is free");
        drop(others);
        drop(taken);
        assert!(make_place(&mut places).is_none() && places.is_empty());
    }

    #[test]
    fn a_stuck_worker_fails_the_check() {
        let runtime = Builder::new_current_thread().build().unwrap();
        let router = Router::new();
        let workers = runtime.handle().clone();
        let access = Arc::new(AccessControl::always_allow());
        let answers = Arc::new(Semaphore::new(1));
        let answers_to_callers = answers.clone();
        let port = Port { tls: None, access, router, workers, answers, answers_to_callers, stuck: Mutex::default() };
        assert_eq!(port.liveness().status(), StatusCode::OK);
        *lock(&port.stuck) = Some(3);
        assert_eq!(port.liveness().status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
}
