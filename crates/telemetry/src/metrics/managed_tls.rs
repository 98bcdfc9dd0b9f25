//! The metrics of the managed certificate.

use prometheus::{Error, Gauge, IntCounterVec};

use super::register::Registrar;

/// The metrics of the managed certificate.
#[derive(Clone)]
pub struct ManagedTlsMetrics {
    /// The end of the serving certificate, in seconds since 1970.
    pub certificate_expiration: Gauge,
    /// The end of the CA that signs, in seconds since 1970.
    pub ca_expiration: Gauge,
    failures: IntCounterVec,
}

impl ManagedTlsMetrics {
    pub(super) fn new(register: &Registrar<'_>, certificate_expiration: Gauge) -> Result<Self, Error> {
        let ca_expiration = register.gauge(
            "kubefan_managed_ca_expiration_timestamp_seconds",
            "End of the validity of the managed CA that signs, in seconds since 1970; inf without --tls-managed-secret.",
        )?;
        ca_expiration.set(f64::INFINITY);
        let failures = register.counters(
            "kubefan_managed_certificate_failures_total",
            "Failures to read or update the managed Secret, its copies and the ConfigMaps of its CA.",
            &["operation", "object"],
        )?;
        for operation in ["read", "update"] {
            for object in ["secret", "configmap", "copy"] {
                failures.with_label_values(&[operation, object]);
            }
        }
        Ok(Self { certificate_expiration, ca_expiration, failures })
    }

    /// An object could not be read or updated: `secret`, `configmap` or `copy`.
    pub fn failed(&self, is_update: bool, object: &str) {
        self.failures.with_label_values(&[if is_update { "update" } else { "read" }, object]).inc();
    }
}
