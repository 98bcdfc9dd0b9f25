//! The audit log, by the configuration.

use std::{io, path::Path};

use kubefan_audit::{
    AuditLog, AuditWriter, Parts,
    log_file::{LogFile, Reopen, Rotation, StandardOutput},
};
use kubefan_telemetry::metrics::Metrics;

use super::{clock::wall_clock, failure::AppError, seed::seed};
use crate::config::{AuditConfig, AuditMode, ServeConfig};

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

impl Audit {
    /// Opens the log and starts its writer.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub(super) fn build(config: &ServeConfig, metrics: &Metrics) -> Result<Self, AppError> {
        let Some(path) = &config.audit.path else { return Ok(Self::default()) };
        start(path, &config.audit, metrics).map_err(|error| AppError::Audit { path: path.clone(), error })
    }
}

fn start(path: &Path, config: &AuditConfig, metrics: &Metrics) -> io::Result<Audit> {
    let is_strict = config.mode == AuditMode::BlockingStrict;
    let metrics = metrics.audit().clone();
    let records_max = config.records_max;
    let clock = wall_clock;
    let seed = seed();
    if path == Path::new(STANDARD_OUTPUT) {
        let sink = StandardOutput::default();
        let (log, writer) = AuditLog::start(Parts { sink, records_max, is_strict, clock, seed, metrics });
        return Ok(Audit { log, writer: Some(writer), reopen: None });
    }
    let AuditConfig { bytes_max, backups_max, age_max, .. } = *config;
    let sink = LogFile::open(path.to_owned(), Rotation { bytes_max, backups_max, age_max }, clock)?;
    let reopen = Some(sink.reopen_handle());
    let (log, writer) = AuditLog::start(Parts { sink, records_max, is_strict, clock, seed, metrics });
    Ok(Audit { log, writer: Some(writer), reopen })
}
