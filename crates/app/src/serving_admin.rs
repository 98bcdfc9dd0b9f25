//! The admin port: metrics, probes, the status page and the commands of operators.

use std::{io, sync::Arc};

use kubefan_access::AccessControl;
use kubefan_informers::{CacheCatalog, Registry};
use kubefan_managed_tls::ManagedTls;
use kubefan_server::{
    admin::{self, Admin},
    admin_access::Details,
    admin_port,
    subscribers::Subscribers,
    transport::listen::Listener,
};
use tokio_rustls::TlsAcceptor;

use super::{
    callers, component::Shared, ending::ServerTask, failure::AppError, sampling::sample,
    serving_certificate::with_certificate,
};

/// The admin port, before it serves.
pub(super) struct AdminPort {
    pub(super) listener: Listener,
    /// `None` without TLS.
    pub(super) tls: Option<TlsAcceptor>,
    /// `None` if the certificate is not managed.
    pub(super) managed: Option<Arc<ManagedTls>>,
}

impl AdminPort {
    /// Serves until kubefan stops, also during the drain.
    ///
    /// # Errors
    /// If the server cannot be set up.
    pub(super) fn build(
        self,
        shared: Shared<'_>,
        registry: &Arc<Registry>,
        access: &Arc<AccessControl>,
        subscribers: Arc<Subscribers>,
    ) -> Result<ServerTask, AppError> {
        let Self { listener, tls, managed } = self;
        let refreshed = registry.clone();
        let ready = registry.clone();
        let details = callers::admin_details(shared.config);
        let tls = tls.filter(|_| details == Details::Authorized && matches!(listener, Listener::Tcp(_)));
        let router = admin::router(Admin {
            access: callers::admin_access(shared.config, access),
            catalog: Arc::new(CacheCatalog(registry.clone())),
            subscribers,
            history: sample(shared, registry, access.switches()),
            registry: shared.metrics.registry().clone(),
            refresh: Box::new(move || refreshed.refresh_gauges()),
            readiness: Box::new(move || with_certificate(managed.as_ref(), ready.readiness())),
        });
        let failed = |error: io::Error| AppError::Server { what: "the admin server", message: error.to_string() };
        let stop = shared.stops.stop.clone();
        let ended = admin_port::serve(listener, tls, access.clone(), router, stop).map_err(failed)?;
        Ok(tokio::spawn(async move {
            let ended = ended.await.unwrap_or_else(|_| Err(io::Error::other("its thread has panicked")));
            ended.map_err(|error| error.to_string())
        }))
    }
}
