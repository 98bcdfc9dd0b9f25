//! The task that writes records.
//!
//! All queued records are written at once, as one write, so a record waits only for the write
//! before it. The hazard is a disk that is full or slow. The service does not wait for it: the task
//! keeps the records that it could not write and tries again, and meanwhile the queue fills up and
//! drops.

use std::{io, time::Duration};

use kubefan_telemetry::metrics::AuditMetrics;
use tokio::{
    sync::mpsc,
    task::spawn_blocking,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

use super::queue::Line;

/// The most records that are written together.
pub(super) const RECORDS_MAX: usize = 400;
/// The time until the next attempt after a write has failed.
pub(super) const RETRY: Duration = Duration::from_secs(1);
/// Interval at which failures are logged.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// The destination of records.
pub trait Sink: Send + 'static {
    /// Appends whole lines. May block.
    ///
    /// # Errors
    /// Not all of the lines were written. If those that were cannot be cut off again, as on stdout,
    /// the next call starts a new line, and may repeat some.
    fn append(&mut self, lines: &[u8]) -> io::Result<()>;
}

/// Reports a failure, but not again and again.
struct Report {
    metrics: AuditMetrics,
    logged_at: Option<Instant>,
    is_failing: bool,
    dropped: u64,
}

impl Report {
    fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let is_due = self.logged_at.is_none_or(|at| now.saturating_duration_since(at) >= LOG_INTERVAL);
        if is_due {
            self.logged_at = Some(now);
        }
        is_due
    }

    fn failed(&mut self, error: &io::Error) {
        self.metrics.write_errors.inc();
        self.is_failing = true;
        if self.is_due() {
            tracing::error!(%error, "the audit log cannot be written; records without room in the queue are dropped");
        }
    }

    fn written(&mut self, records: usize) {
        self.metrics.written.inc_by(records as u64);
        if std::mem::take(&mut self.is_failing) {
            tracing::info!("the audit log is written again");
        }
        let dropped = self.metrics.dropped.get();
        if dropped > self.dropped && self.is_due() {
            tracing::warn!(
                records = dropped - self.dropped,
                "records of the audit log were dropped: the queue was full"
            );
            self.dropped = dropped;
        }
    }
}

/// Writes until the queue has been dropped everywhere, or `closing` is cancelled, and everything
/// queued is written.
pub async fn run<S: Sink>(mut lines: mpsc::Receiver<Line>, sink: S, closing: CancellationToken, metrics: AuditMetrics) {
    let mut sink = sink;
    let mut batch = Vec::new();
    let mut report = Report { metrics, logged_at: None, is_failing: false, dropped: 0 };
    loop {
        if batch.is_empty() {
            tokio::select! {
                biased;
                received = lines.recv_many(&mut batch, RECORDS_MAX) => if received == 0 { return },
                () = closing.cancelled(), if !lines.is_closed() => {
                    lines.close();
                    continue;
                }
            }
        }
        let text = batch.iter().map(|line: &Line| line.text.as_slice()).collect::<Vec<_>>().concat();
        let written = spawn_blocking(move || {
            let result = sink.append(&text);
            (sink, result)
        });
        // Fails if the runtime stops.
        let Ok((back, result)) = written.await else { return };
        sink = back;
        match result {
            Ok(()) => {
                report.written(batch.len());
                for written in batch.drain(..).filter_map(|line| line.written) {
                    // Fails if the request has ended meanwhile.
                    let _ = written.send(true);
                }
            }
            Err(error) => {
                report.failed(&error);
                // A request that waits is refused, so its record is not written later.
                let (waiting, kept) = batch.drain(..).partition(|line| line.written.is_some());
                batch = kept;
                let waiting: Vec<Line> = waiting;
                for written in waiting.into_iter().filter_map(|line| line.written) {
                    // Fails if the request has ended meanwhile.
                    let _ = written.send(false);
                }
                if closing.is_cancelled() || lines.is_closed() {
                    report.metrics.dropped.inc_by((batch.len() + lines.len()) as u64);
                    return;
                }
                tokio::select! {
                    () = sleep(RETRY) => {}
                    () = closing.cancelled() => lines.close(),
                }
                while batch.len() < RECORDS_MAX
                    && let Ok(line) = lines.try_recv()
                {
                    batch.push(line);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
