//! The audit log, by the configuration.

use std::{io, path::Path, time::SystemTime};

use kubefan_audit::{
    AuditLog, AuditWriter, Parts,
    log_file::{LogFile, Reopen, Rotation, StandardOutput},
};
use kubefan_telemetry::metrics::Metrics;

use crate::config::{AuditConfig, AuditMode};

/// The file name that stands for standard output.
const STANDARD_OUTPUT: &str = "-";

/// The audit log of one kubefan; the default is none.
#[derive(Default)]
pub(super) struct Audit {
    /// Begins records.
    pub(super) log: AuditLog,
    /// Writes them.
    pub(super) writer: Option<AuditWriter>,
    /// Requests to open the file again.
    pub(super) reopen: Option<Reopen>,
}

/// Opens the log and starts its writer. `clock` is the wall clock, and `seed` must be random.
///
/// # Errors
/// If the file cannot be opened.
pub(super) fn start(
    config: &AuditConfig,
    clock: fn() -> SystemTime,
    seed: [u8; 32],
    metrics: &Metrics,
) -> io::Result<Audit> {
    let Some(path) = &config.path else { return Ok(Audit::default()) };
    let is_strict = config.mode == AuditMode::BlockingStrict;
    let metrics = metrics.audit().clone();
    let records_max = config.records_max;
    if path == Path::new(STANDARD_OUTPUT) {
        let sink = StandardOutput::default();
        let (log, writer) = AuditLog::start(Parts { sink, records_max, is_strict, clock, seed, metrics });
        return Ok(Audit { log, writer: Some(writer), reopen: None });
    }
    let AuditConfig { bytes_max, backups_max, age_max, .. } = *config;
    let sink = LogFile::open(path.clone(), Rotation { bytes_max, backups_max, age_max }, clock)?;
    let reopen = Some(sink.reopen_handle());
    let (log, writer) = AuditLog::start(Parts { sink, records_max, is_strict, clock, seed, metrics });
    Ok(Audit { log, writer: Some(writer), reopen })
}
