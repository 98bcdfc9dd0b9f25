//! The data port: the server of gRPC and of the Kubernetes API.

use std::{collections::HashMap, error::Error, sync::Arc};

use kubefan_access::AccessControl;
use kubefan_audit::AuditLog;
use kubefan_common::proto::DESCRIPTORS;
use kubefan_informers::{CacheCatalog, Registry};
use kubefan_server::{
    Server, ServerHandles,
    grpc::health,
    kube::{cross_origin::AllowedOrigins, forward::Forwarder, kube_upstream::KubeUpstream},
    transport::listen::Listener,
};
use tokio_rustls::TlsAcceptor;
use tonic::service::Routes;

use super::{
    component::Shared,
    ending::ServerTask,
    failure::{AppError, chain},
    server_options,
};

/// A server of the data port.
pub(super) type DataServer = Arc<Server>;

/// The data port, before it serves.
pub(super) struct DataPort {
    pub(super) listener: Listener,
    /// `None` without TLS.
    pub(super) tls: Option<TlsAcceptor>,
    /// The log of all requests.
    pub(super) audit: AuditLog,
    /// `None` without passthrough.
    pub(super) forwarder: Option<Arc<Forwarder>>,
    /// Maximum number of connections at a time.
    pub(super) connections_max: usize,
}

/// The data port that serves.
pub(super) struct DataPortHandle {
    pub(super) server: DataServer,
    pub(super) task: ServerTask,
}

impl DataPort {
    /// Serves until the drain.
    ///
    /// # Errors
    /// If the server cannot be set up.
    pub(super) fn build(
        self,
        shared: Shared<'_>,
        registry: &Arc<Registry>,
        access: &Arc<AccessControl>,
    ) -> Result<DataPortHandle, AppError> {
        let Self { listener, tls, audit, forwarder, connections_max } = self;
        let failed = |error: &dyn Error| AppError::Server { what: "the data port", message: chain(error) };
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
        let origins = Some(Arc::new(AllowedOrigins::new(shared.upstream.clone())));
        let upstream = KubeUpstream { forwarder, origins };
        // The health of a resource by its name would show that it is cached.
        let names_resources = !access.reviews();
        let catalog = Arc::new(CacheCatalog(registry.clone()));
        let options = server_options::from_config(shared.config, connections_max);
        let drain = shared.stops.drain.clone();
        let handles = ServerHandles {
            access: access.clone(),
            audit,
            upstream,
            metrics: shared.metrics.clone(),
            drain: drain.clone(),
        };
        let server = Server::new(catalog, others, options, handles);
        let registry = registry.clone();
        let serving = server.clone();
        let task = tokio::spawn(async move {
            let changes = registry.changes();
            let health = move || {
                let named = if names_resources { registry.health() } else { Default::default() };
                (registry.readiness().0, named)
            };
            let reported = health::report(&reporter, health(), &HashMap::new()).await;
            let following = tokio::spawn(health::follow(changes, health, reporter, reported, drain));
            serving.run(listener, tls).await;
            following.abort();
            Ok(())
        });
        Ok(DataPortHandle { server, task })
    }
}
