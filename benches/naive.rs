//! The obvious implementation, for comparison: tonic, a broadcast channel, and one prost message
//! per subscriber and event. It uses kubefan's protocol and upstream client, so `kubefan bench
//! --against` shows the benefit of everything else.
//!
//! It has no selectors and cannot resume from past versions. A subscriber that falls too far behind
//! loses its stream.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    path::PathBuf,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use clap::{Parser, Subcommand};
use futures::{Stream, StreamExt, future::BoxFuture, stream};
use kubefan_cache::Update;
use kubefan_common::proto::{
    WATCH_PATH,
    v1alpha1::{Event, EventType as Kind, SnapshotBegin, SnapshotEnd, WatchRequest, WatchResponse, watch_response},
};
use kubefan_model::{
    GroupVersionResource, Media, ResourceVersion, Scope,
    event::EventType,
    fields::FieldTable,
    object::{Object, ObjectParser},
};
use kubefan_telemetry::metrics::{Metrics, WatchPurpose};
use kubefan_upstream::{
    Reflector, Upstream,
    client::UpstreamOptions,
    lines::LINE_BYTES_MAX,
    reflector::{ReflectorEvent, ReflectorOptions, Target},
    settings::UpstreamSettings,
};
use rand::{SeedableRng, rngs::StdRng};
use tokio::{net::TcpListener, sync::broadcast, time::sleep};
use tokio_stream::wrappers::{BroadcastStream, errors::BroadcastStreamRecvError};
use tonic::{
    Request, Response, Status,
    body::Body,
    server::{Grpc, NamedService, ServerStreamingService},
    transport::{Identity, Server, ServerTlsConfig, server::TcpIncoming},
};
use tonic_prost::ProstCodec;

#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Events that a subscriber may be behind.
const LAG_EVENTS_MAX: usize = 4096;
/// Delay between two attempts to reach the apiserver.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// A naive server of kubefan's protocol, for comparison: kubefan bench --against PROGRAM
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Passed by `cargo bench`
    #[arg(long, global = true, hide = true)]
    bench: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Accepts the flags of kubefan serve that kubefan bench uses
    Serve {
        #[arg(long)]
        kubeconfig: PathBuf,
        #[arg(long)]
        listen: String,
        /// Accepted and ignored
        #[arg(long)]
        admin_listen: Option<String>,
        /// Accepted and ignored
        #[arg(long)]
        ring_events_max: Option<usize>,
        /// Accepted and ignored
        #[arg(long)]
        authorization_mode: Option<String>,
        /// Only pods are supported
        #[arg(long, value_parser = ["pods"])]
        resource: String,
        #[arg(long, requires = "tls_private_key_file")]
        tls_cert_file: Option<PathBuf>,
        #[arg(long)]
        tls_private_key_file: Option<PathBuf>,
    },
}

/// The objects, and the channel to the subscribers.
struct Hub {
    state: Mutex<State>,
    events: broadcast::Sender<(u64, WatchResponse)>,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Event>,
    /// `None` until the first list is complete.
    version: Option<u64>,
}

impl Hub {
    fn apply(&self, update: Update) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match update {
            // A list follows.
            Update::WentBack { .. } | Update::Conflated { .. } => {}
            Update::ListBegin { .. } => *state = State::default(),
            Update::ListItem(object) => {
                let event = event(Kind::Added, &object);
                drop(state.objects.insert(object.key().as_str().to_owned(), event));
            }
            Update::ListEnd(version) | Update::Bookmark(version) => state.version = Some(version.get()),
            Update::Event(kind, object) => {
                let key = object.key().as_str().to_owned();
                let version = object.version().get();
                let event = match kind {
                    EventType::Added => event(Kind::Added, &object),
                    EventType::Modified => event(Kind::Modified, &object),
                    EventType::Deleted => event(Kind::Deleted, &object),
                };
                match kind {
                    EventType::Deleted => drop(state.objects.remove(&key)),
                    _ => drop(state.objects.insert(key, Event { r#type: Kind::Added.into(), ..event.clone() })),
                }
                state.version = Some(version);
                // Fails if there are no subscribers, which is not an error.
                let _ = self.events.send((version, response(version, watch_response::Message::Event(event))));
            }
        }
    }

    fn watch(&self, request: WatchRequest) -> Result<WatchStream, Status> {
        let target = request.target.unwrap_or_default();
        if !(target.label_selector.is_empty() && target.field_selector.is_empty() && target.namespace.is_empty()) {
            return Err(Status::invalid_argument("selectors are not supported"));
        }
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let version = state.version.ok_or_else(|| Status::unavailable("not synced yet"))?;
        let after = ResourceVersion::parse_request(&request.resource_version)
            .map_err(|_| Status::invalid_argument("resource_version"))?
            .map_or(version, ResourceVersion::get);
        let mut snapshot = Vec::new();
        if request.resource_version.is_empty() {
            let begin = SnapshotBegin { resource_version: version.to_string(), ..SnapshotBegin::default() };
            snapshot.push(response(0, watch_response::Message::SnapshotBegin(begin)));
            let selected = state.objects.values().filter(|event| target.name.is_empty() || event.name == target.name);
            snapshot.extend(selected.map(|event| response(0, watch_response::Message::Event(event.clone()))));
            let end = SnapshotEnd { object_count: snapshot.len() as i64 - 1 };
            snapshot.push(response(version, watch_response::Message::SnapshotEnd(end)));
        } else if after < version {
            return Err(Status::out_of_range(format!("too old resource version: {after} ({version})")));
        }
        let live = BroadcastStream::new(self.events.subscribe()).filter_map(move |event| {
            std::future::ready(match event {
                Ok((version, response)) => (version > after).then_some(Ok(response)),
                Err(BroadcastStreamRecvError::Lagged(_)) => {
                    Some(Err(Status::out_of_range("the subscriber fell too far behind")))
                }
            })
        });
        Ok(Box::pin(stream::iter(snapshot.into_iter().map(Ok)).chain(live)))
    }
}

fn event(kind: Kind, object: &Object) -> Event {
    Event {
        r#type: kind.into(),
        namespace: object.key().namespace().to_owned(),
        name: object.key().name().to_owned(),
        uid: object.uid().to_owned(),
        resource_version: object.version().to_string(),
        object: object.bytes().clone(),
        ..Event::default()
    }
}

fn response(version: u64, message: watch_response::Message) -> WatchResponse {
    let resume_version = if version == 0 { String::new() } else { version.to_string() };
    WatchResponse { resume_version, message: Some(message), ..WatchResponse::default() }
}

type WatchStream = Pin<Box<dyn Stream<Item = Result<WatchResponse, Status>> + Send>>;

/// Implements only Watch, with tonic's codec.
#[derive(Clone)]
struct Service(Arc<Hub>);

impl ServerStreamingService<WatchRequest> for Service {
    type Response = WatchResponse;
    type ResponseStream = WatchStream;
    type Future = std::future::Ready<Result<Response<WatchStream>, Status>>;

    fn call(&mut self, request: Request<WatchRequest>) -> Self::Future {
        std::future::ready(self.0.watch(request.into_inner()).map(Response::new))
    }
}

impl tower::Service<http::Request<Body>> for Service {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            if request.uri().path() != WATCH_PATH {
                return Ok(Status::unimplemented("only Watch is implemented").into_http());
            }
            let mut grpc = Grpc::new(ProstCodec::<WatchResponse, WatchRequest>::default());
            Ok(grpc.server_streaming(service, request).await)
        })
    }
}

impl NamedService for Service {
    const NAME: &'static str = "kubefan.v1alpha1.WatchService";
}

/// Keeps the hub up to date. Never returns once started.
async fn reflect(upstream: Upstream, hub: Arc<Hub>) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let gvr = GroupVersionResource::new("", "v1", "pods");
    let parser = Arc::new(ObjectParser::new(&FieldTable::new(&gvr, true, &[])));
    let metrics = Arc::new(Metrics::new(prometheus::Registry::new())?).cache(
        &gvr,
        &Scope::Cluster,
        Media::Json,
        &kubefan_cache::StreamEnd::ALL,
    );
    let target =
        Target { gvr, kind: "Pod".to_owned(), scope: Scope::Cluster, namespaced: true, field_selector: String::new() };
    let options = ReflectorOptions {
        page_size: 500,
        watch_list: true,
        upstream_idle_timeout: Duration::from_secs(90),
        line_bytes_max: LINE_BYTES_MAX,
    };
    let counted = Arc::new(move || metrics.upstream_watch(WatchPurpose::Standing));
    let mut reflector = Reflector::new(upstream, target, parser, options, counted, StdRng::seed_from_u64(1));
    loop {
        match reflector.step().await {
            Ok(ReflectorEvent::Update { update, .. }) => hub.apply(update),
            Ok(_) => {}
            Err(error) => {
                eprintln!("upstream: {error}");
                sleep(RETRY_DELAY).await;
            }
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let Cli { command, .. } = Cli::parse();
    let Command::Serve { kubeconfig, listen, tls_cert_file, tls_private_key_file, .. } = command;
    let settings = UpstreamSettings { kubeconfig: Some(kubeconfig), context: None };
    let upstream = Upstream::from_settings(settings, UpstreamOptions::default()).await?;
    #[expect(clippy::disallowed_methods, reason = "a broadcast channel is the design that kubefan is compared with")]
    let (events, _) = broadcast::channel(LAG_EVENTS_MAX);
    let hub = Arc::new(Hub { state: Mutex::default(), events });
    let listener = TcpListener::bind(&listen).await?;
    eprintln!("kubefan: serving gRPC on {}", listener.local_addr()?);
    let mut server = Server::builder().max_concurrent_streams(1000);
    if let (Some(cert), Some(key)) = (tls_cert_file, tls_private_key_file) {
        let identity = Identity::from_pem(std::fs::read(cert)?, std::fs::read(key)?);
        server = server.tls_config(ServerTlsConfig::new().identity(identity))?;
    }
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    tokio::select! {
        result = reflect(upstream, hub.clone()) => result,
        result = server.add_service(Service(hub.clone())).serve_with_incoming(incoming) => Ok(result?),
    }
}
