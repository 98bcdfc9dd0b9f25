//! Wiring: creates the components of the proxy from the configuration, connects them, and stops
//! them in order. It decides nothing else; policies about caches are in [`kubefan_informers`].
//!
//! | component | handle |
//! |---|---|
//! | `ServingCertificate` | the certificate, kept valid |
//! | `Ports` | the listeners |
//! | `Forwarding` | the forwarder of requests |
//! | `Audit`, `ExportedTraces` | the audit log and the traces, and their writers |
//! | `Caches` | the registry of all caches, and the task of the informers |
//! | `Saving` | the task that saves the states of the caches |
//! | `Callers` | the decisions about reads, and the modes in force |
//! | `DataPort` | the server, and its task |
//! | `AdminPort` | its task |
//! | `Rebalancing` | the load that peers may query |
//! | `PeerPort`, `LiveSettings`, `Memory` | none: they run until kubefan stops |

mod auditing;
mod cache_registry;
mod callers;
mod clock;
mod component;
pub mod config;
mod ending;
mod failure;
mod falling_back;
mod forwarding;
mod limits;
mod live_settings;
mod memory;
pub mod mode_names;
pub mod open_files;
mod peer_records;
pub mod peers;
mod ports;
mod rebalancing;
pub mod reload;
mod sampling;
mod saving;
mod seed;
pub mod server_options;
mod serving_admin;
mod serving_certificate;
mod serving_data;
mod tracing_export;

#[cfg(test)]
#[path = "../../../fuzz/checks.rs"]
mod fuzz;

use std::{convert::Infallible, future::Future, io, pin::pin, sync::Arc, time::Duration};

use futures::{FutureExt, Stream, StreamExt, future::OptionFuture};
use kubefan_access::TrustedCas;
use kubefan_audit::AuditWriter;
use kubefan_peer::saved::StateDir;
use kubefan_server::{
    kube::forward::Forwarder,
    transport::listen::{Bound, Listener},
};
use kubefan_telemetry::{metrics::Metrics, traces::Exporter};
use kubefan_upstream::{
    Source, Upstream,
    client::{ConnectionLimits, UpstreamObserver, UpstreamOptions, Verb},
    kubefan_client::KubefanClient,
    passthrough::{Credentials, Passthrough, PassthroughOptions, check_reviewer},
};
use prometheus::Registry as PrometheusRegistry;
use tokio::sync::Notify;
use tracing::{info, warn};

pub use self::failure::AppError;
use self::{
    auditing::Audit,
    cache_registry::{Caches, CachesHandle},
    callers::{Callers, CallersHandle},
    clock::wall_clock,
    component::Shared,
    ending::{ShutdownSteps, Stops, until_drained},
    falling_back::{Direct, Servers},
    forwarding::Forwarding,
    limits::Limits,
    live_settings::LiveSettings,
    peers::PeerPort,
    ports::Ports,
    rebalancing::Rebalancing,
    reload::WatchedFile,
    saving::Saving,
    serving_admin::AdminPort,
    serving_certificate::{Acceptors, ServingCertificate},
    serving_data::{DataPort, DataPortHandle},
    tracing_export::ExportedTraces,
};
use crate::config::{AuthorizationMode, PassthroughConfig, ServeConfig, SourceSettings};

/// Time for the cancelled tasks to end: short, because they end at once.
const TASK_END_TIMEOUT: Duration = Duration::from_secs(2);

/// A kubefan whose ports are bound, but which does not serve yet.
pub struct App {
    config: ServeConfig,
    upstream: Upstream,
    source: Source,
    /// A client of the kubefan at `--upstream` without a fallback, if `--kubeconfig` leads there.
    kubefan: Option<Upstream>,
    forwarder: Option<Arc<Forwarder>>,
    metrics: Arc<Metrics>,
    ports: Ports,
    tls: Option<Acceptors>,
    certificate: Option<ServingCertificate>,
    client_cas: Option<Arc<TrustedCas>>,
    audit: Audit,
    traces: ExportedTraces,
    state_dir: Option<StateDir>,
    /// `None` if the configuration never changes.
    watched: Option<(WatchedFile, Arc<Notify>)>,
}

/// Binds, prints the addresses to stderr, and serves until `shutdown` completes and every stream
/// has ended, or the drain timeout has passed. Each item of `reloads` reads the configuration file,
/// the certificate and the CAs of clients again, and opens the audit log again. `watched` is the
/// file that `config` is from; its changes are applied. Raises the process's limit of open files.
pub async fn run(
    config: ServeConfig,
    watched: Option<WatchedFile>,
    shutdown: impl Future<Output = ()> + Send,
    reloads: impl Stream<Item = ()> + Send,
) -> Result<(), AppError> {
    let open_files = open_files::raise();
    let mut shutdown = pin!(shutdown);
    // A credential plugin or the apiserver may keep a start waiting.
    let mut app = tokio::select! {
        bound = App::bind(config) => bound?,
        () = &mut shutdown => return Ok(()),
    };
    // Logged only now: a start that fails prints one line.
    let limits = Limits::new(&app.config, open_files);
    open_files::log(open_files, limits.connections_max, app.config.serving.connections_max);
    for option in &app.config.without_effect {
        warn!("{option}");
    }
    let (data, admin) = app.bound()?;
    eprintln!("kubefan: serving gRPC and the Kubernetes API on {data}");
    eprintln!("kubefan: serving admin on {admin}");
    if let Some(peers) = app.bound_for_peers()? {
        eprintln!("kubefan: serving peers on {peers}");
    }
    let read_file = Arc::new(Notify::new());
    app.watched = watched.map(|watched| (watched, read_file.clone()));
    let is_watched = app.watched.is_some();
    let certificate = app.certificate.clone();
    let client_cas = app.client_cas.clone();
    let audit_file = app.audit.reopen.clone();
    let reloading = reloads.for_each(async |()| {
        read_file.notify_one();
        if let Some(audit_file) = &audit_file {
            audit_file.reopen();
            info!("the audit log is opened again before the next record");
        }
        match &certificate {
            Some(certificate) => {
                certificate.reload();
                if let Some(cas) = &client_cas {
                    cas.reload();
                }
            }
            None if is_watched => {}
            None => info!("nothing to read again: the data port has no certificate, and there is no --config"),
        }
    });
    let reloading = reloading.then(|()| std::future::pending::<Infallible>());
    tokio::select! {
        served = app.serve_within(limits, shutdown) => served,
        never = reloading => match never {},
    }
}

/// Returns the observer that counts requests to upstream.
fn observer(metrics: &Arc<Metrics>) -> UpstreamObserver {
    let metrics = metrics.clone();
    Arc::new(move |verb, code| match code {
        Some(code) => metrics.upstream_request(verb.as_str(), code.as_str()),
        None => metrics.upstream_request(verb.as_str(), "error"),
    })
}

impl App {
    /// Reads credentials and certificates and binds all ports. Asks the apiserver only if the
    /// configuration requires it to be reachable.
    pub async fn bind(config: ServeConfig) -> Result<Self, AppError> {
        // With `--upstream`, reviews and forwarded requests go through that kubefan as well, by a
        // kubeconfig that may name it otherwise (deploy/overlays/node).
        let is_kubefan = config.upstream.source.is_some();
        let connection = if is_kubefan { ConnectionLimits::KUBEFAN } else { ConnectionLimits::APISERVER };
        let request_timeout = config.upstream.request_timeout;
        let options = UpstreamOptions { request_timeout, connection, ..UpstreamOptions::default() };
        if config.access.mode() == AuthorizationMode::Webhook {
            check_reviewer(&config.upstream.settings).await?;
        }
        let upstream = Upstream::from_settings(config.upstream.settings.clone(), options.clone()).await?;
        let source = match config.upstream.source.clone() {
            None => Source::apiserver(upstream.clone()),
            Some(SourceSettings::Http(settings)) => {
                let options = UpstreamOptions { connection: ConnectionLimits::KUBEFAN, ..options };
                Source::kubefan(Upstream::from_settings(settings, options).await?, upstream.clone())
            }
            Some(SourceSettings::Grpc(settings)) => {
                Source::grpc(KubefanClient::from_settings(settings).await?, upstream.clone())
            }
        };
        let PassthroughConfig { requests_max, allows_insecure_upstream, .. } = config.passthrough;
        let forwards = config.access.credentials().map(|credentials| PassthroughOptions {
            credentials,
            requests_max,
            allows_insecure_upstream,
            connection,
        });
        let direct = Direct::from_config(&config, &upstream, forwards.as_ref()).await?;
        let passthrough = match forwards {
            Some(options) => Some(Passthrough::from_settings(config.upstream.settings.clone(), options).await?),
            None => None,
        };
        Self::bind_with(Servers { upstream, source, passthrough, direct }, config).await
    }

    /// Like [`Self::bind`], with an existing client of the apiserver instead of the configured one,
    /// and without passthrough.
    pub async fn bind_to(upstream: Upstream, config: ServeConfig) -> Result<Self, AppError> {
        let source = Source::apiserver(upstream.clone());
        Self::bind_with(Servers { upstream, source, passthrough: None, direct: None }, config).await
    }

    /// Binds all ports. Caches list and watch at the source of `servers`.
    async fn bind_with(servers: Servers, config: ServeConfig) -> Result<Self, AppError> {
        let metrics = Arc::new(Metrics::new(PrometheusRegistry::new())?);
        let (servers, kubefan) = servers.observed(&observer(&metrics)).with_fallback(&config, &metrics);
        let Servers { upstream, source, passthrough, .. } = servers;
        let client_cas = callers::client_cas(&config, wall_clock)?;
        // If callers use their own credentials upstream, the TLS server asks for certificates too,
        // so that it can explain to their owners why a certificate cannot be forwarded.
        let explains = passthrough.as_ref().is_some_and(|passthrough| passthrough.credentials() == Credentials::Caller);
        let asks_for_certificates = explains || client_cas.is_some();
        let certificate = ServingCertificate::new(&config, &metrics)?;
        let accept = |certificate: &ServingCertificate| certificate.acceptors(&config, asks_for_certificates);
        let tls = certificate.as_ref().map(accept).transpose()?;
        let forwarder = passthrough.map(|passthrough| Forwarding { passthrough }.build(&config, &metrics));
        peers::files(&config).map(|files| files.check()).transpose()?;
        if config.upstream.required {
            upstream.get(Verb::Get, "/version").await.map_err(AppError::Upstream)?;
        }
        let ports = Ports::build(&config).await?;
        let audit = Audit::build(&config, &metrics)?;
        let traces = ExportedTraces::build(&config, &metrics)?;
        let state_dir = saving::open(&config)?;
        Ok(Self {
            config,
            upstream,
            source,
            kubefan,
            forwarder,
            metrics,
            ports,
            tls,
            certificate,
            client_cas,
            audit,
            traces,
            state_dir,
            watched: None,
        })
    }

    /// Returns the metrics that `/metrics` serves.
    pub fn metrics(&self) -> &PrometheusRegistry {
        self.metrics.registry()
    }

    /// Returns the addresses of the data port and the admin port.
    pub fn bound(&self) -> Result<(Bound, Bound), AppError> {
        let failed = |error: io::Error| AppError::Server { what: "listening", message: error.to_string() };
        Ok((self.ports.data.bound().map_err(failed)?, self.ports.admin.bound().map_err(failed)?))
    }

    /// Returns the address of the port for peers. `None` if there is none.
    pub fn bound_for_peers(&self) -> Result<Option<Bound>, AppError> {
        let failed = |error: io::Error| AppError::Server { what: "listening", message: error.to_string() };
        self.ports.peer.as_ref().map(Listener::bound).transpose().map_err(failed)
    }

    /// Serves until `shutdown` completes or a port fails. Then every stream ends with a status that
    /// makes clients reconnect, within the drain timeout.
    pub async fn serve(self, shutdown: impl Future<Output = ()> + Send) -> Result<(), AppError> {
        let limits = Limits::new(&self.config, None);
        self.serve_within(limits, shutdown).await
    }

    async fn serve_within(self, limits: Limits, shutdown: impl Future<Output = ()> + Send) -> Result<(), AppError> {
        let own_port = self.bound_for_peers()?.and_then(|bound| bound.port());
        let Self { config, upstream, source, metrics, tls, certificate, audit: Audit { log, writer, .. }, .. } = self;
        // Dropping it stops all tasks, on every return.
        let stops = Stops::default();
        let shared = Shared { config: &config, upstream: &upstream, metrics: &metrics, stops: &stops };
        let ExportedTraces { traces, exporter } = self.traces;
        let log = log.with_traces(traces);
        let ports = self.ports;
        // The writer ends with the last copy of the log.
        let peer_log = ports.peer.is_some().then(|| log.clone());
        let Limits { connections_max, memory } = limits;
        // The certificate first, because a warm start needs it.
        if let Some(certificate) = &certificate {
            certificate.keep(shared);
        }
        let managed = certificate.as_ref().and_then(ServingCertificate::managed).cloned();
        let peer_tls = peers::tls(&config, managed.as_ref());
        let peers = peers::warm_start_peers(&config, peer_tls.clone(), own_port, memory.bytes_max());
        let lists_and_watches_at = source.name().to_owned();
        shared.spawn(source.clone().keep_probing(self.kubefan));
        let transfer_bytes_max = peers::transfer_bytes_max(&config, memory.bytes_max());
        let saved = self.state_dir.map(|dir| saving::saved_states(dir, transfer_bytes_max));
        let caches = Caches { source, peers, saved, memory_bytes_max: memory.bytes_max() };
        let CachesHandle { registry, informers } = caches.build(shared);
        let saving = Saving::build(&config, &registry);
        let modes_change = self.watched.is_some() || config.serving.passthrough_on_alarm;
        let callers = Callers { client_cas: self.client_cas, modes_change };
        let CallersHandle { access, switches } = callers.build(shared, &registry);
        let (data_tls, admin_tls) = tls.map(|tls| (tls.data, tls.admin)).unzip();
        let forwarder = self.forwarder;
        let data = DataPort { listener: ports.data, tls: data_tls, audit: log, forwarder, connections_max };
        let DataPortHandle { server, task: mut data } = data.build(shared, &registry, &access)?;
        let admin = AdminPort { listener: ports.admin, tls: admin_tls, managed };
        let mut admin = admin.build(shared, &registry, &access, server.subscribers().clone())?;
        if let (Some(listener), Some(log), Some(tls)) = (ports.peer, peer_log, peer_tls) {
            let connections = server.connections().clone();
            let budget = server.fallback_budget().clone();
            let rebalancing = Rebalancing { tls: tls.clone(), own_port, connections, budget, access };
            let load = rebalancing.build(shared, &registry);
            PeerPort { listener, tls, log, load }.build(shared, &registry);
        }
        let reader = server.reader().clone();
        LiveSettings { watched: self.watched, switches, reader }.build(shared, &registry);
        memory.build(shared, &registry, server.readers().clone());
        // The server has a copy of the audit log, too; the task of the data port drops the other.
        drop(server);
        info!(apiserver = upstream.server(), lists_and_watches_at, "started");

        let ended = until_drained(shutdown, &mut data, &mut admin, &stops.drain, config.serving.drain_timeout).await;
        // The caches forget their states when they stop.
        OptionFuture::from(saving.map(Saving::finish)).await;
        stops.stop.cancel();
        let steps = ShutdownSteps::default()
            .then("the audit log", OptionFuture::from(writer.map(AuditWriter::finish)).map(drop))
            .then("the export of traces", OptionFuture::from(exporter.map(Exporter::finish)).map(drop))
            .then_within(TASK_END_TIMEOUT, "the informers", informers.map(drop))
            .then_within(TASK_END_TIMEOUT, "the admin port", async move {
                if !admin.is_finished() {
                    let _ = admin.await;
                }
            });
        steps.run().await;
        ended
    }
}
