//! The queue from the requests to the writer, with a limit.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::{
    sync::{
        OwnedSemaphorePermit, Semaphore,
        mpsc::{self, OwnedPermit},
        oneshot,
    },
    time::{Instant, timeout_at},
};

use kubefan_telemetry::metrics::AuditMetrics;

/// Time that a request waits for its record, if it waits for it. Then it is refused.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// The most bytes of records that wait. A record is one or two KiB, but a caller can make one of 32
/// KiB, and a queue of 10,000 of those would be 320 MiB.
const BYTES_MAX: usize = if cfg!(test) { 64 << 10 } else { 64 << 20 };

/// The wall clock, for timestamps.
pub type Clock = fn() -> SystemTime;

/// A record in the queue.
pub struct Line {
    /// The JSON, with a line feed.
    pub text: Vec<u8>,
    /// Receives whether it was written, if its request waits for that.
    pub written: Option<oneshot::Sender<bool>>,
    /// The room for the text, given back when the line is dropped.
    _room: OwnedSemaphorePermit,
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
    room: Arc<Semaphore>,
    /// Whether an answer waits for its record.
    pub(super) is_strict: bool,
    /// The time of records.
    pub(super) clock: Clock,
    metrics: AuditMetrics,
}

/// A place in the queue for a record that is waited for.
pub(super) struct QueueSlot {
    permit: OwnedPermit<Line>,
    room: OwnedSemaphorePermit,
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
        let room = Arc::new(Semaphore::new(BYTES_MAX));
        (Self { lines, room, is_strict, clock, metrics }, receiver)
    }

    /// Queues a record that is not waited for. Without room it is dropped and counted.
    pub(super) fn push(&self, text: Vec<u8>) {
        let line = take(&self.room, &text).map(|room| Line { text, written: None, _room: room });
        if line.is_none_or(|line| self.lines.try_send(line).is_err()) {
            self.metrics.dropped.inc();
        }
    }

    /// Waits for a place for a record of this many bytes whose request waits for it.
    pub(super) async fn place(&self, bytes: usize) -> Result<QueueSlot, NotRecorded> {
        let until = Instant::now() + WRITE_TIMEOUT;
        let reserved = async {
            let room = self.room.clone().acquire_many_owned(u32::try_from(bytes).ok()?).await.ok()?;
            Some((room, self.lines.clone().reserve_owned().await.ok()?))
        };
        let Ok(Some((room, permit))) = timeout_at(until, reserved).await else {
            self.metrics.rejected.inc();
            return Err(NotRecorded);
        };
        Ok(QueueSlot { permit, room, until, metrics: self.metrics.clone() })
    }
}

impl QueueSlot {
    /// Queues the record at once, and returns a future that waits until it is written.
    pub(super) fn write(self, text: Vec<u8>) -> impl Future<Output = Result<(), NotRecorded>> + Send + use<> {
        let Self { permit, room, until, metrics } = self;
        let (sender, receiver) = oneshot::channel();
        permit.send(Line { text, written: Some(sender), _room: room });
        async move {
            if let Ok(Ok(true)) = timeout_at(until, receiver).await {
                return Ok(());
            }
            metrics.rejected.inc();
            Err(NotRecorded)
        }
    }
}

/// Room for the bytes of a record, until its line is dropped.
fn take(room: &Arc<Semaphore>, text: &[u8]) -> Option<OwnedSemaphorePermit> {
    let bytes = u32::try_from(text.len()).ok()?;
    room.clone().try_acquire_many_owned(bytes).ok()
}
