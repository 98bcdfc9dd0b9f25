//! State that all connections of the data port share: the two APIs, the router for other gRPC
//! calls, and the options.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    response::{IntoResponse, Response},
};
use http::{Request, StatusCode};
use ipnet::IpNet;
use kubefan_access::AccessControl;
use kubefan_admission::PermitLimits;
use kubefan_audit::AuditLog;
use kubefan_common::proto::v1alpha1::watch_service_server::WatchServiceServer;
use kubefan_fanout::Catalog;
use kubefan_model::selector::FieldSelector;
use kubefan_telemetry::metrics::Metrics;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tower::util::MapResponseLayer;

use super::{
    early_answer::DiscardPlaces,
    http2::arrival::PendingCalls,
    open_connections::{EndingOptions, OpenConnections},
    unread::Readers,
};
use crate::{
    fallback_budget::FallbackBudget,
    grpc::{call, service::Service, status},
    kube::{
        api::{KubeApi, KubeApiOptions},
        feature_gates::FeatureGates,
        guard::Guard,
        kube_upstream::KubeUpstream,
    },
    reader::{Reader, ReaderLimits},
    selector_limits::SelectorLimits,
};

/// Options of the data port.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Maximum number of open connections.
    pub connections_max: usize,
    /// Maximum number of gRPC calls whose request has not arrived yet.
    pub calls_pending_max: usize,
    /// Maximum number of open streams, over all connections.
    pub subscribers_max: PermitLimits,
    /// Maximum number of lists and gets over HTTP, and of unary calls of the watch service, that
    /// are being answered.
    pub reads_max: PermitLimits,
    /// Maximum number of open streams of one connection.
    pub max_concurrent_streams: u32,
    /// Times after which connections end.
    pub ending: EndingOptions,
    /// The memory of requests that wait for the verdict about their caller, in bytes.
    pub pending_bytes_max: usize,
    /// Limits of selectors.
    pub selectors: SelectorLimits,
    /// Random, so that the ids of streams are not those of another replica.
    pub ids_seed: u32,
    /// The longest gRPC request, in bytes.
    pub message_bytes_max: usize,
    /// An HTTP/2 PING is sent after this silence.
    pub keepalive_interval: Duration,
    /// The connection is closed if nothing arrives for this long after a PING.
    pub keepalive_timeout: Duration,
    /// A response that pins a snapshot is ended if too little of it is read in this time.
    pub snapshot_stall_timeout: Duration,
    /// A consistent list of at least this many bytes of JSON waits a second or two for a freshness
    /// proof.
    pub consistent_list_bytes_min: usize,
    /// The alpha parts of the Kubernetes API that are on.
    pub feature_gates: FeatureGates,
    /// Whether responses over HTTP are compressed for clients that accept gzip.
    pub gzip: bool,
    /// Requests that all clients together may start at the apiserver per second while kubefan is
    /// away. `None` if this server does not know all clients.
    pub fallback_starts_per_second: Option<u32>,
    /// Proxies whose `X-Forwarded-For` names their clients.
    pub trusted_proxies: Vec<IpNet>,
    /// The field selector of the caches; objects that it does not select are not cached.
    pub narrowed_by: FieldSelector,
    /// Refuses requests that a browser could be tricked into sending. `None` with TLS, where the
    /// certificate prevents that.
    pub guard: Option<Guard>,
}

/// The components that the data port uses.
pub struct ServerHandles {
    /// The rights of callers.
    pub access: Arc<AccessControl>,
    /// The audit log, which records every request.
    pub audit: AuditLog,
    /// The upstream of requests that are not served from a cache. Without a forwarder they are
    /// refused.
    pub upstream: KubeUpstream,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// Cancelled when every stream must end.
    pub drain: CancellationToken,
}

/// State that all connections share.
pub struct Services {
    /// Admission, and the reads of both APIs.
    pub reader: Arc<Reader>,
    /// The gRPC API.
    pub grpc: Service,
    /// The Kubernetes API.
    pub kube: KubeApi,
    /// All gRPC services. Plain gRPC watches bypass it.
    pub router: Router,
    /// The options.
    pub options: ServerOptions,
    /// Places of gRPC calls whose request has not arrived yet.
    pub pending: PendingCalls,
    /// The readers of the sockets and streams.
    pub readers: Arc<Readers>,
    /// Places of requests that were answered before their bodies were read.
    pub discards: DiscardPlaces,
    /// Begins the records of gRPC calls; the Kubernetes API begins its own.
    pub audit: AuditLog,
    /// The open connections.
    pub connections: Arc<OpenConnections>,
    /// The budget that answers tell their clients.
    pub budget: Arc<FallbackBudget>,
    /// Cancelled when no more requests are taken and every stream must end.
    pub drain: CancellationToken,
}

impl Services {
    /// The services for `catalog` and the gRPC services `others`.
    pub fn new(catalog: Arc<dyn Catalog>, others: Routes, options: ServerOptions, handles: ServerHandles) -> Self {
        let ServerHandles { access, audit, upstream, metrics, drain } = handles;
        let reader = Arc::new(Reader::new(
            catalog,
            access,
            drain.clone(),
            ReaderLimits {
                subscribers_max: options.subscribers_max,
                reads_max: options.reads_max,
                pending_bytes_max: options.pending_bytes_max,
                selectors: options.selectors,
                ids_seed: options.ids_seed,
            },
        ));
        let kube_options = KubeApiOptions {
            consistent_list_bytes_min: options.consistent_list_bytes_min,
            feature_gates: options.feature_gates,
            gzip: options.gzip,
            narrowed_by: options.narrowed_by.clone(),
            guard: options.guard.clone(),
        };
        let calls_pending = metrics.calls_pending();
        let grpc = Service::new(reader.clone(), metrics.clone());
        let connections = OpenConnections::new(options.ending);
        let counted = connections.clone();
        let own_clients = Arc::new(move || counted.clients());
        let budget = Arc::new(FallbackBudget::new(own_clients, options.fallback_starts_per_second));
        let kube = KubeApi::new(reader.clone(), upstream, kube_options, budget.clone(), audit.clone(), metrics);
        let routed = WatchServiceServer::new(grpc.clone()).max_decoding_message_size(options.message_bytes_max);
        let router = others.add_service(routed).into_axum_router();
        let replace_status = MapResponseLayer::new(status::replace_library_status);
        let router = router.fallback(not_found).layer(replace_status).with_state(());
        let pending = PendingCalls::new(options.calls_pending_max, calls_pending);
        let readers = Readers::new();
        let discards = DiscardPlaces::default();
        Self { reader, grpc, kube, router, options, pending, readers, discards, audit, connections, budget, drain }
    }
}

/// The answer to a request that no service takes.
async fn not_found(request: Request<axum::body::Body>) -> Response {
    if call::is_any_grpc(&request) {
        return status::no_such_method(request.uri().path()).into_http::<axum::body::Body>().into_response();
    }
    (StatusCode::NOT_FOUND, "nothing is served here; this port serves gRPC and the Kubernetes API\n").into_response()
}
