//! The queue from the requests to the writer, with a limit.

use std::time::{Duration, SystemTime};

use tokio::{
    sync::{
        mpsc::{self, OwnedPermit},
        oneshot,
    },
    time::{Instant, timeout_at},
};

use crate::telemetry::metrics::AuditMetrics;

/// How long a request waits for its record, if it waits for it. Then it is refused.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// The wall clock, for timestamps.
pub type Clock = fn() -> SystemTime;

/// A record in the queue.
pub struct Line {
    /// The JSON, with a line feed.
    pub text: Vec<u8>,
    /// Receives whether it was written, if its request waits for that.
    pub written: Option<oneshot::Sender<bool>>,
}

/// A record could not be written, and the mode demands it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "kubefan cannot write its audit log now, and with --audit-log-mode=blocking-strict it answers only what is recorded; \
     kubefan's own log says why"
)]
pub struct NotRecorded;

/// The queue, for requests. The writer ends once it is dropped everywhere.
pub struct Queue {
    lines: mpsc::Sender<Line>,
    /// Whether an answer waits for its record.
    pub(super) is_strict: bool,
    /// The time of records.
    pub(super) clock: Clock,
    metrics: AuditMetrics,
}

/// A place in the queue for a record that is waited for.
pub(super) struct Place {
    permit: OwnedPermit<Line>,
    until: Instant,
    metrics: AuditMetrics,
}

impl Queue {
    /// A queue for `records_max` records, and its other end.
    pub fn new(
        records_max: usize,
        is_strict: bool,
        clock: Clock,
        metrics: AuditMetrics,
    ) -> (Self, mpsc::Receiver<Line>) {
        let (lines, receiver) = mpsc::channel(records_max);
        (Self { lines, is_strict, clock, metrics }, receiver)
    }

    /// Queues a record that is not waited for. Without room it is dropped and counted.
    pub(super) fn push(&self, text: Vec<u8>) {
        if self.lines.try_send(Line { text, written: None }).is_err() {
            self.metrics.dropped.inc();
        }
    }

    /// A place for a record that is waited for.
    pub(super) async fn place(&self) -> Result<Place, NotRecorded> {
        let until = Instant::now() + WRITE_TIMEOUT;
        match timeout_at(until, self.lines.clone().reserve_owned()).await {
            Ok(Ok(permit)) => Ok(Place { permit, until, metrics: self.metrics.clone() }),
            _ => {
                self.metrics.rejected.inc();
                Err(NotRecorded)
            }
        }
    }
}

impl Place {
    /// Queues the record at once, and returns what waits until it is written.
    pub(super) fn write(self, text: Vec<u8>) -> impl Future<Output = Result<(), NotRecorded>> + Send + use<> {
        let (sender, receiver) = oneshot::channel();
        let Self { permit, until, metrics } = self;
        permit.send(Line { text, written: Some(sender) });
        async move {
            if let Ok(Ok(true)) = timeout_at(until, receiver).await {
                return Ok(());
            }
            metrics.rejected.inc();
            Err(NotRecorded)
        }
    }
}
