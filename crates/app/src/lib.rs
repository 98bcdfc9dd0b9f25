//! Wiring: creates the parts of the proxy from the configuration, connects them, and stops them in
//! order. It decides nothing else; policies about caches are in [`kubefan_informers`].

mod auditing;
mod cache_registry;
mod callers;
mod clock;
pub mod config;
mod ending;
mod failure;
mod live_settings;
pub mod mode_names;
pub mod open_files;
mod peer_records;
pub mod peers;
mod rebalancing;
pub mod reload;
mod sampling;
mod server_options;
mod serving_certificate;

#[cfg(test)]
#[path = "../../../fuzz/checks.rs"]
mod fuzz;

use std::{
    collections::HashMap,
    convert::Infallible,
    future::Future,
    io,
    pin::pin,
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures::{FutureExt, Stream, StreamExt};
use kubefan_access::{AccessControl, BoundObject, Switches, TrustedCas, authentication::certificate::cluster};
use kubefan_audit::AuditLog;
use kubefan_common::proto::DESCRIPTORS;
use kubefan_fanout::Catalog;
use kubefan_informers::{
    CacheCatalog, Registry,
    memory_pressure::{self, MemoryBudget},
};
use kubefan_managed_tls::ManagedTls;
use kubefan_server::{
    Server, ServerOptions,
    admin::{self, Admin},
    admin_access::Details,
    admin_port,
    grpc::health,
    kube::{
        cross_origin::AllowedOrigins,
        forward::{ForwardOptions, Forwarder},
        kube_upstream::KubeUpstream,
    },
    subscribers::Subscribers,
    transport::listen::{Bound, Listener},
};
use kubefan_telemetry::{
    metrics::Metrics,
    traces::{Exporter, TraceError, Traces},
};
use kubefan_upstream::{
    Source, Upstream,
    client::{ConnectionLimits, UpstreamObserver, UpstreamOptions, Verb},
    kubefan_client::KubefanClient,
    passthrough::{Credentials, Passthrough, PassthroughOptions, check_reviewer},
};
use prometheus::Registry as PrometheusRegistry;
use tokio::{sync::Notify, time::timeout};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tracing::{info, warn};

pub use self::failure::AppError;
use self::{
    auditing::Audit,
    cache_registry::registry,
    clock::{unix_time, wall_clock},
    ending::{ServerTask, until_drained},
    failure::chain,
    reload::WatchedFile,
    serving_certificate::{Acceptors, ServingCertificate, with_certificate},
};
use crate::config::{AuthorizationMode, PassthroughConfig, ServeConfig, SourceSettings};

/// kubefan's version.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A kubefan whose ports are bound, but which does not serve yet.
pub struct App {
    config: ServeConfig,
    upstream: Upstream,
    source: Source,
    forwarder: Option<Arc<Forwarder>>,
    metrics: Arc<Metrics>,
    data: Listener,
    admin: Listener,
    peer: Option<Listener>,
    tls: Option<Acceptors>,
    certificate: Option<ServingCertificate>,
    client_cas: Option<Arc<TrustedCas>>,
    audit: Audit,
    traces: Traces,
    exporter: Option<Exporter>,
    /// `None` if the configuration never changes.
    watched: Option<(WatchedFile, Arc<Notify>)>,
}

/// Binds, prints the addresses to stderr, and serves until `shutdown` completes and every stream
/// has ended, or the drain timeout has passed. Each item of `reloads` reads the configuration file,
/// the certificate and the CAs of clients again, and opens the audit log again. `watched` is the
/// file that `config` is from; its changes are applied. Raises the process's limit of open files.
pub async fn run(
    mut config: ServeConfig,
    watched: Option<WatchedFile>,
    shutdown: impl Future<Output = ()> + Send,
    reloads: impl Stream<Item = ()> + Send,
) -> Result<(), AppError> {
    let (open_files, given) = (open_files::raise(), config.serving.connections_max);
    let memory_max = memory_pressure::resident_max(memory_given(&config));
    let connections_max = open_files::connections_max(given, (open_files, memory_max), &config.passthrough);
    config.serving.connections_max = Some(connections_max);
    let mut shutdown = pin!(shutdown);
    // A credential plugin or the apiserver may keep a start waiting.
    let mut app = tokio::select! {
        bound = App::bind(config) => bound?,
        () = &mut shutdown => return Ok(()),
    };
    // Only now: a start that fails prints one line.
    open_files::log(open_files, connections_max, given);
    let (data, admin) = app.bound()?;
    eprintln!("kubefan: serving gRPC and the Kubernetes API on {data}");
    eprintln!("kubefan: serving admin on {admin}");
    if let Some(peers) = app.bound_for_peers()? {
        eprintln!("kubefan: serving peers on {peers}");
    }
    let read_file = Arc::new(Notify::new());
    app.watched = watched.map(|watched| (watched, read_file.clone()));
    let is_watched = app.watched.is_some();
    let (certificate, client_cas) = (app.certificate.clone(), app.client_cas.clone());
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
                client_cas.iter().for_each(|cas| cas.reload());
            }
            None if is_watched => {}
            None => info!("nothing to read again: the data port has no certificate, and there is no --config"),
        }
    });
    let reloading = reloading.then(|()| std::future::pending::<Infallible>());
    tokio::select! {
        served = app.serve(shutdown) => served,
        never = reloading => match never {},
    }
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
        if config.callers.mode == AuthorizationMode::Webhook {
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
        let passthrough = match config.passthrough {
            PassthroughConfig { credentials: Some(credentials), requests_max, allows_insecure_upstream, .. } => {
                let options = PassthroughOptions { credentials, requests_max, allows_insecure_upstream, connection };
                Some(Passthrough::from_settings(config.upstream.settings.clone(), options).await?)
            }
            PassthroughConfig { credentials: None, .. } => None,
        };
        Self::bind_with((upstream, source), passthrough, config).await
    }

    /// Like [`Self::bind`], with an existing client of the apiserver instead of the configured one,
    /// and without passthrough.
    pub async fn bind_to(upstream: Upstream, config: ServeConfig) -> Result<Self, AppError> {
        Self::bind_with((upstream.clone(), Source::apiserver(upstream)), None, config).await
    }

    /// `source` is where the caches list and watch.
    async fn bind_with(
        (upstream, source): (Upstream, Source),
        passthrough: Option<Passthrough>,
        config: ServeConfig,
    ) -> Result<Self, AppError> {
        let metrics = Arc::new(Metrics::new(PrometheusRegistry::new())?);
        let client_cas = callers::client_cas(&config, wall_clock)?;
        // If callers use their own credentials upstream, the TLS server asks for certificates too,
        // so that it can explain to their owners why a certificate cannot be forwarded.
        let explains = passthrough.as_ref().is_some_and(|passthrough| passthrough.credentials() == Credentials::Caller);
        let asks_for_certificates = explains || client_cas.is_some();
        let certificate = ServingCertificate::new(&config, &metrics)?;
        let accept = |certificate: &ServingCertificate| certificate.acceptors(&config, asks_for_certificates);
        let tls = certificate.as_ref().map(accept).transpose()?;
        let forwarding = ForwardOptions {
            upgrades: config.passthrough.upgrades,
            hosts: config.serving.allowed_hosts.clone(),
            per_identity_max: config.passthrough.requests_max_per_identity,
        };
        #[expect(clippy::disallowed_methods, reason = "randomness enters here; code below takes it as a parameter")]
        let number = rand::random();
        let forwarder =
            passthrough.map(|passthrough| Arc::new(Forwarder::new(passthrough, forwarding, number, metrics.clone())));
        peers::files(&config).map(|files| files.check()).transpose()?;
        let counted = metrics.clone();
        let observer: UpstreamObserver = Arc::new(move |verb, code| match code {
            Some(code) => counted.upstream_request(verb.as_str(), code.as_str()),
            None => counted.upstream_request(verb.as_str(), "error"),
        });
        let (upstream, source) = (upstream.with_observer(observer.clone()), source.with_observer(observer));
        if config.upstream.required {
            upstream.get(Verb::Get, "/version").await.map_err(AppError::Upstream)?;
        }
        let mode = config.serving.listen_mode;
        let data = Listener::bind(&config.serving.listen, "--listen", mode).await?;
        let admin = Listener::bind(&config.serving.admin_listen, "--admin-listen", mode).await?;
        let peer = match &config.peer.listen {
            Some(address) => Some(Listener::bind(address, "--peer-listen", mode).await?),
            None => None,
        };
        #[expect(clippy::disallowed_methods, reason = "randomness enters here; code below takes it as a parameter")]
        let seed = rand::random();
        let path = config.audit.path.clone().unwrap_or_default();
        let audit = auditing::start(&config.audit, wall_clock, seed, &metrics);
        let audit = audit.map_err(|error| AppError::Audit { path, error })?;
        let traces = config.traces.settings.as_ref();
        let is_foreign = traces.is_some_and(|settings| settings.is_foreign);
        let traces = traces.map(|settings| Traces::start(settings, VERSION, metrics.traces().clone()));
        let (traces, exporter) = match traces.transpose() {
            Err(error @ TraceError::Endpoint { .. }) if is_foreign => {
                warn!(%error, "no traces: this address of OTEL_EXPORTER_OTLP_ENDPOINT cannot be used");
                (None, None)
            }
            traces => traces?.unzip(),
        };
        Ok(Self {
            config,
            upstream,
            source,
            forwarder,
            metrics,
            data,
            admin,
            peer,
            tls,
            certificate,
            client_cas,
            audit,
            traces: traces.unwrap_or_default(),
            exporter,
            watched: None,
        })
    }

    /// The metrics that `/metrics` serves.
    pub fn metrics(&self) -> &PrometheusRegistry {
        self.metrics.registry()
    }

    /// The addresses of the data port and the admin port.
    pub fn bound(&self) -> Result<(Bound, Bound), AppError> {
        let failed = |error: io::Error| AppError::Server { what: "listening", message: error.to_string() };
        Ok((self.data.bound().map_err(failed)?, self.admin.bound().map_err(failed)?))
    }

    /// The address of the port for peers. `None` if there is none.
    pub fn bound_for_peers(&self) -> Result<Option<Bound>, AppError> {
        let failed = |error: io::Error| AppError::Server { what: "listening", message: error.to_string() };
        self.peer.as_ref().map(Listener::bound).transpose().map_err(failed)
    }

    /// Serves until `shutdown` completes or a port fails. Then every stream ends with a status that
    /// makes clients reconnect, within the drain timeout.
    pub async fn serve(self, shutdown: impl Future<Output = ()> + Send) -> Result<(), AppError> {
        let own_port = self.bound_for_peers()?.and_then(|bound| bound.port());
        let Self {
            config,
            upstream,
            source,
            forwarder,
            metrics,
            data,
            admin,
            peer,
            tls,
            certificate,
            client_cas,
            audit,
            traces,
            exporter,
            watched,
        } = self;
        let Audit { log, writer, .. } = audit;
        let log = log.with_traces(traces);
        // The writer ends with the last copy of the log.
        let peer_log = peer.is_some().then(|| log.clone());
        let (stop, drain) = (CancellationToken::new(), CancellationToken::new());
        // Stops everything that this function started, however it returns.
        let _stop_all = (stop.clone().drop_guard(), drain.clone().drop_guard());
        let budget = MemoryBudget::new(memory_given(&config));
        let memory_max = budget.as_ref().map(|budget| budget.bytes_max);
        // First, because a warm start needs it.
        certificate.iter().for_each(|certificate| certificate.keep(&upstream, &metrics, &stop));
        let managed = certificate.as_ref().and_then(ServingCertificate::managed).cloned();
        let peer_tls = peers::tls(&config, managed.as_ref());
        let peers = peers::warm_start_peers(&config, peer_tls.clone(), own_port, memory_max);
        let lists_and_watches_at = source.name().to_owned();
        let registry = registry(&config, (&upstream, source), peers, memory_max, &metrics, &stop);
        let informers = tokio::spawn(registry.clone().run());
        #[expect(clippy::disallowed_methods, reason = "randomness enters here; code below takes it as a parameter")]
        let key = rand::random();
        if let Some(cas) = client_cas.clone().filter(|cas| !cas.is_of_file()) {
            tokio::spawn(stop.clone().run_until_cancelled_owned(cluster::follow(upstream.clone(), cas)));
        }
        let caches = CacheCatalog(registry.clone());
        let exists = Arc::new(move |object: &BoundObject| caches.exists(&object.gvr(), &object.key, &object.uid));
        let modes = config.modes.modes.clone();
        let switches = if watched.is_some() { Switches::new(modes) } else { Switches::fixed(modes) };
        let control = (wall_clock as fn() -> SystemTime, key, switches.clone());
        let access = callers::control(&config.callers, &upstream, client_cas, exists, control, &metrics);
        let reloaded = registry.clone();
        let origins = Some(Arc::new(AllowedOrigins::new(upstream.clone())));
        let parts = (access.clone(), log, KubeUpstream { forwarder, origins });
        let (server, mut data) =
            serve_data(data, tls.as_ref().map(|tls| tls.data.clone()), parts, &config, &registry, &metrics, &drain)?;
        let (watches, connections, reader) =
            (server.subscribers().clone(), server.connections().clone(), server.reader().clone());
        let mut admin = serve_admin(
            (admin, tls.map(|tls| tls.admin)),
            managed,
            (&access, watches),
            &config,
            &registry,
            &metrics,
            &stop,
        )?;
        let set_places: live_settings::SetPlaces =
            Box::new(move |subscribers_max, reads_max| reader.set_places(subscribers_max, reads_max));
        match budget {
            Some(budget) => {
                let end_unread = move || server.readers().end_some();
                let keep_within = memory_pressure::keep_within(registry.clone(), metrics.clone(), budget, end_unread);
                tokio::spawn(stop.clone().run_until_cancelled_owned(keep_within));
            }
            // It has a copy of the log, whose writer ends with the last one.
            None => drop(server),
        }
        if let (Some(listener), Some(log), Some(tls)) = (peer, peer_log, peer_tls) {
            let load = rebalancing::load(&config, &registry, &connections, &access, &drain);
            peers::serve(listener, tls.clone(), (CacheCatalog(registry.clone()), log, load.clone()), &metrics, &stop);
            rebalancing::start(&config, (tls, own_port), (connections, access, &upstream), load, &metrics, &drain);
        }
        let (named, modes) = (registry.clone(), config.modes.modes.clone());
        let warning = async move { mode_names::warn_of_unmatched(&modes, named.discovery()).await };
        tokio::spawn(stop.clone().run_until_cancelled_owned(warning));
        metrics.reload().started(unix_time());
        if let Some((file, asked)) = watched {
            let apply = live_settings::apply(switches, reloaded, set_places);
            let following = file.follow(asked, metrics.reload().clone(), unix_time, apply);
            tokio::spawn(stop.clone().run_until_cancelled_owned(following));
        }
        info!(apiserver = upstream.server(), lists_and_watches_at, "started");

        let drain_timeout = config.serving.drain_timeout;
        let ended = until_drained(shutdown, &mut data, &mut admin, &drain, drain_timeout).await;
        stop.cancel();
        if let Some(writer) = writer {
            writer.finish().await;
        }
        if let Some(exporter) = exporter {
            exporter.finish().await;
        }
        // Short, because the tasks end as soon as they are cancelled.
        let _ = timeout(Duration::from_secs(2), informers).await;
        if !admin.is_finished() {
            let _ = timeout(Duration::from_secs(2), admin).await;
        }
        ended
    }
}

fn memory_given(config: &ServeConfig) -> Option<usize> {
    config.serving.memory_bytes_max.map(|given| usize::try_from(given).unwrap_or(usize::MAX))
}

type DataServer = Arc<Server<CacheCatalog>>;

fn serve_admin(
    (listener, tls): (Listener, Option<TlsAcceptor>),
    managed: Option<Arc<ManagedTls>>,
    (access, subscribers): (&Arc<AccessControl>, Arc<Subscribers>),
    config: &ServeConfig,
    registry: &Arc<Registry>,
    metrics: &Arc<Metrics>,
    stop: &CancellationToken,
) -> Result<ServerTask, AppError> {
    let (refreshed, ready) = (registry.clone(), registry.clone());
    let details = callers::admin_details(config);
    let tls = tls.filter(|_| details == Details::Authorized && matches!(listener, Listener::Tcp(_)));
    let router = admin::router(Admin {
        access: callers::admin_access(config, access),
        catalog: CacheCatalog(registry.clone()),
        subscribers,
        history: sampling::sample(registry, metrics, stop),
        registry: metrics.registry().clone(),
        refresh: Box::new(move || refreshed.refresh_gauges()),
        readiness: Box::new(move || with_certificate(managed.as_ref(), ready.readiness())),
    });
    let failed = |error: io::Error| AppError::Server { what: "the admin server", message: error.to_string() };
    let ended = admin_port::serve(listener, tls, access.clone(), router, stop.clone()).map_err(failed)?;
    Ok(tokio::spawn(async move {
        let ended = ended.await.unwrap_or_else(|_| Err(io::Error::other("its thread has panicked")));
        ended.map_err(|error| error.to_string())
    }))
}

fn serve_data(
    listener: Listener,
    tls: Option<TlsAcceptor>,
    (access, audit, upstream): (Arc<AccessControl>, AuditLog, KubeUpstream),
    config: &ServeConfig,
    registry: &Arc<Registry>,
    metrics: &Arc<Metrics>,
    drain: &CancellationToken,
) -> Result<(DataServer, ServerTask), AppError> {
    let failed = |error: &dyn std::error::Error| AppError::Server { what: "the data port", message: chain(error) };
    let (reporter, health_service) = tonic_health::server::health_reporter();
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // The types of the details of a status.
            .register_encoded_file_descriptor_set(tonic_types::pb::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET)
            .include_reflection_service(false)
    };
    let v1 = reflection().build_v1().map_err(|error| failed(&error))?;
    // grpcio and older releases of grpcurl ask for this version only.
    let v1alpha = reflection().build_v1alpha().map_err(|error| failed(&error))?;
    let others = Routes::new(health_service).add_service(v1).add_service(v1alpha);
    let catalog = Arc::new(CacheCatalog(registry.clone()));
    let options = ServerOptions::from(config);
    // The health of a resource by its name would show that it is cached.
    let names_resources = !access.reviews();
    let server = Server::new(catalog, others, options, (access, audit), upstream, metrics.clone(), drain.clone());
    let (registry, drain) = (registry.clone(), drain.clone());
    Ok((
        server.clone(),
        tokio::spawn(async move {
            let changes = registry.changes();
            let health = move || {
                let named = if names_resources { registry.health() } else { Default::default() };
                (registry.readiness().0, named)
            };
            let reported = health::report(&reporter, health(), &HashMap::new()).await;
            let following = tokio::spawn(health::follow(changes, health, reporter, reported, drain));
            server.run(listener, tls).await;
            following.abort();
            Ok(())
        }),
    ))
}
