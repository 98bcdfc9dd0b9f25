//! The section "Audit log". Names are those of kube-apiserver.

use std::{path::PathBuf, time};

use serde::Deserialize;

use super::{
    ConfigError,
    rules::{any, at_least, optional, unusable},
    section::section,
};

/// Whether an answer waits for its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum AuditMode {
    /// Answers do not wait. Records that find no room in the queue are dropped.
    Batch,
    /// Answers wait. Without its record a request is refused.
    BlockingStrict,
}

kubefan_common::display_choice!(AuditMode);
section! {
    heading: "Audit log";
    /// The records of requests, as given.
    options: AuditOptions;
    /// The records of requests.
    config: AuditConfig {}

    /// Record every request in this file, as JSON lines in the form of kube-apiserver (Event of
    /// audit.k8s.io/v1, level Metadata): who asked for what, and how it was answered. -: stdout.
    /// SIGHUP opens the file again [default: no audit log]
    audit_log_path("FILE"): PathBuf => path: Option<PathBuf>, optional(any);
    /// Write records in the background (batch), or answer a request only when its record is
    /// written, and refuse it if that fails (blocking-strict).
    audit_log_mode("MODE"): AuditMode = AuditMode::Batch => mode: AuditMode, any;

    [keys]
    /// Megabytes of the file before it is rotated. Set it by the disk space for the log.
    limits.audit_log_maxsize("MB"): u64 = 100 => bytes_max: u64, megabytes;
    /// Rotated files that are kept. 0: all. Set it by the disk space for the log.
    limits.audit_log_maxbackup("COUNT"): usize = 10 => backups_max: Option<usize>, unless_zero;
    /// Days that rotated files are kept. 0: no limit. Set it by the retention that your rules
    /// allow or require.
    limits.audit_log_maxage("DAYS"): u32 = 0 => age_max: Option<time::Duration>, days;
    /// Records that wait to be written. More are dropped (batch), or their requests wait
    /// (blocking-strict). One has about 1 KiB, at most about 32 KiB. Raise it if
    /// kubefan_audit_dropped_total grows in bursts.
    limits.audit_log_batch_buffer_size("COUNT"): usize = 10_000 => records_max: usize, records;
}

fn megabytes(flag: &'static str, given: u64) -> Result<u64, ConfigError> {
    let bytes = at_least(1)(flag, given)?.checked_mul(1 << 20);
    bytes.ok_or_else(|| unusable(flag, given, "is more than a file can have"))
}

fn unless_zero(_: &'static str, given: usize) -> Result<Option<usize>, ConfigError> {
    Ok(Some(given).filter(|given| *given > 0))
}

fn days(_: &'static str, given: u32) -> Result<Option<time::Duration>, ConfigError> {
    Ok(Some(time::Duration::from_secs(u64::from(given) * 24 * 3600)).filter(|age| !age.is_zero()))
}

fn records(flag: &'static str, given: usize) -> Result<usize, ConfigError> {
    const MOST: usize = 1_000_000;
    match at_least(1)(flag, given)? {
        given if given > MOST => Err(unusable(flag, given, format!("must be at most {MOST}: they are kept in memory"))),
        given => Ok(given),
    }
}
