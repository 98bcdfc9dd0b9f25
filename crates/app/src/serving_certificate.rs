//! The certificate of the data port and the admin port: from files, or managed.

use std::sync::Arc;

use kubefan_managed_tls::{Keeper, ManagedOptions, ManagedTls};
use kubefan_server::{
    status_report::Readiness,
    transport::{certificate::Certificate, tls, tls_options::TlsOptions},
};
use kubefan_telemetry::metrics::Metrics;
use rand::{SeedableRng, rngs::StdRng};
use rustls::server::ResolvesServerCert;
use tokio_rustls::TlsAcceptor;
use tracing::info;

use super::{clock::wall_clock, component::Shared, failure::AppError, seed::seed};
use crate::config::{ServeConfig, TlsSource};

/// The source of the certificate.
#[derive(Clone)]
pub(super) enum ServingCertificate {
    /// Files.
    Files(Arc<Certificate>),
    /// The managed Secret.
    Managed(Arc<ManagedTls>, ManagedOptions),
}

/// The TLS acceptors that use it.
#[derive(Clone)]
pub(super) struct Acceptors {
    /// Acceptor of the data port.
    pub(super) data: TlsAcceptor,
    /// Acceptor of the admin port, where probes are answered before there is a managed certificate.
    pub(super) admin: TlsAcceptor,
}

impl ServingCertificate {
    /// Reads the files. The managed Secret is read later, because the apiserver may be away.
    pub(super) fn new(config: &ServeConfig, metrics: &Metrics) -> Result<Option<Self>, AppError> {
        Ok(match &config.serving.tls {
            None => None,
            Some(TlsSource::Files(files)) => {
                Some(Self::Files(Certificate::read(files, wall_clock, metrics.certificate_expiration())?))
            }
            Some(TlsSource::Managed(options)) => {
                Some(Self::Managed(ManagedTls::unread(options.secret.clone()), options.clone()))
            }
        })
    }

    pub(super) fn acceptors(&self, config: &ServeConfig, asks_for_certificates: bool) -> Result<Acceptors, AppError> {
        let min_version = config.serving.tls_min_version;
        let cipher_suites = config.serving.tls_cipher_suites.clone();
        let options = TlsOptions { min_version, cipher_suites };
        let accept = |certificate: Arc<dyn ResolvesServerCert>| {
            tls::acceptor(certificate, &options, asks_for_certificates).map_err(AppError::TlsOptions)
        };
        Ok(match self {
            Self::Files(certificate) => {
                let data = accept(certificate.clone())?;
                Acceptors { admin: data.clone(), data }
            }
            Self::Managed(managed, _) => {
                let stand_in = managed.or_stand_in().map_err(AppError::TlsOptions)?;
                Acceptors { data: accept(managed.clone())?, admin: accept(stand_in)? }
            }
        })
    }

    /// Returns the managed certificate, if it is managed.
    pub(super) fn managed(&self) -> Option<&Arc<ManagedTls>> {
        match self {
            Self::Files(_) => None,
            Self::Managed(managed, _) => Some(managed),
        }
    }

    /// Reads it again now.
    pub(super) fn reload(&self) {
        match self {
            Self::Files(certificate) => certificate.reload(),
            Self::Managed(managed, _) => {
                managed.look_now();
                info!("the managed certificate is looked at again");
            }
        }
    }

    /// Follows the files, or keeps the managed certificate, until kubefan stops.
    pub(super) fn keep(&self, shared: Shared<'_>) {
        match self {
            Self::Files(certificate) => {
                let certificate = certificate.clone();
                shared.spawn(async move { certificate.follow().await });
            }
            Self::Managed(managed, options) => {
                let random = StdRng::seed_from_u64(seed());
                let upstream = shared.upstream.clone();
                let managed = managed.clone();
                let options = options.clone();
                let metrics = shared.metrics.managed_tls();
                let keeper = Keeper::new(upstream, options, managed, wall_clock, random, metrics);
                shared.spawn(keeper.run());
            }
        }
    }
}

/// Adds the managed certificate to the readiness of the caches.
pub(super) fn with_certificate(managed: Option<&Arc<ManagedTls>>, (is_ready, mut lines): Readiness) -> Readiness {
    let Some((has_certificate, line)) = managed.map(|managed| managed.readiness()) else { return (is_ready, lines) };
    lines.insert(0, (has_certificate, line));
    (is_ready && has_certificate, lines)
}
