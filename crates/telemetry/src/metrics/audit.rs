//! The metrics of the audit log.

use prometheus::{Error, IntCounter};

use super::register::Registrar;

/// The metrics of the audit log.
#[derive(Clone)]
pub struct AuditMetrics {
    /// Records that were written.
    pub written: IntCounter,
    /// Records that were not.
    pub dropped: IntCounter,
    /// Attempts to write that failed.
    pub write_errors: IntCounter,
    /// Requests that were refused because their record could not be written.
    pub rejected: IntCounter,
}

impl AuditMetrics {
    pub(super) fn new(register: &Registrar<'_>) -> Result<Self, Error> {
        Ok(Self {
            written: register.counter("kubefan_audit_event_total", "Records written to the audit log.")?,
            dropped: register.counter(
                "kubefan_audit_dropped_total",
                "Records of the audit log that were dropped because the queue was full, or the last ones before the end could \
                 not be written.",
            )?,
            write_errors: register
                .counter("kubefan_audit_write_errors_total", "Attempts to write to the audit log that failed.")?,
            rejected: register.counter(
                "kubefan_audit_requests_rejected_total",
                "Requests refused because their record could not be written, with --audit-log-mode=blocking-strict.",
            )?,
        })
    }
}
