//! The audit log: begins the records of requests, and ends with the last of them.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::HeaderValue;
use kubefan_telemetry::{
    metrics::AuditMetrics,
    traces::{RequestSpan, Traces},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::{task::JoinHandle, time::timeout};
use tokio_util::sync::CancellationToken;

use super::{
    log_writer::{self, Sink},
    queue::{Clock, Queue},
    record::AuditRecord,
    request_head::{RequestHead, id_of},
};

/// Time that a shutdown waits for the last requests to end.
const OPEN_REQUESTS_TIMEOUT: Duration = Duration::from_secs(2);
/// Time that it then waits for the rest of the queue to be written.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Begins records. Clones are the same log; the default writes nothing. A record also begins the
/// span of its request, so that both are complete together.
#[derive(Clone, Default)]
pub struct AuditLog {
    shared: Option<Arc<Shared>>,
    traces: Traces,
}

struct Shared {
    queue: Arc<Queue>,
    ids: Mutex<StdRng>,
}

/// The parts of an audit log.
pub struct Parts<S> {
    /// The destination of records.
    pub sink: S,
    /// The most records that wait to be written.
    pub records_max: usize,
    /// Whether an answer waits for its record, and is refused without it.
    pub is_strict: bool,
    /// The wall clock.
    pub clock: Clock,
    /// A random seed, which determines the IDs.
    pub seed: [u8; 32],
    /// The metrics.
    pub metrics: AuditMetrics,
}

/// The task that writes.
pub struct AuditWriter {
    task: JoinHandle<()>,
    closing: CancellationToken,
}

impl AuditLog {
    /// Starts a log and its writer.
    pub fn start<S: Sink>(parts: Parts<S>) -> (Self, AuditWriter) {
        let Parts { sink, records_max, is_strict, clock, seed, metrics } = parts;
        let (queue, lines) = Queue::new(records_max, is_strict, clock, metrics.clone());
        let closing = CancellationToken::new();
        let task = tokio::spawn(log_writer::run(lines, sink, closing.clone(), metrics));
        let ids = Mutex::new(StdRng::from_seed(seed));
        let shared = Some(Arc::new(Shared { queue: Arc::new(queue), ids }));
        (Self { shared, traces: Traces::default() }, AuditWriter { task, closing })
    }

    /// Makes the records of the log spans too.
    #[must_use]
    pub fn with_traces(self, traces: Traces) -> Self {
        Self { traces, ..self }
    }

    /// Whether requests have records: there is a log, or they are traced.
    pub fn is_on(&self) -> bool {
        self.shared.is_some() || self.traces.is_on()
    }

    /// Begins the record of a request.
    pub fn begin(&self, head: RequestHead<'_>) -> AuditRecord {
        let line = self.shared.as_ref().map(|shared| {
            let id = id_of(head.headers).unwrap_or_else(|| shared.next_id());
            (shared.queue.clone(), id)
        });
        let span = if self.traces.is_on() {
            self.traces.begin(head.headers, head.span_name(), head.span_attributes())
        } else {
            RequestSpan::default()
        };
        AuditRecord::new(line, span, head)
    }
}

impl Shared {
    /// A random UUID (version 4).
    fn next_id(&self) -> HeaderValue {
        let random: u128 = self.ids.lock().unwrap_or_else(PoisonError::into_inner).random();
        let bits = random & !(0xf << 76) & !(0x3 << 62) | 0x4 << 76 | 0x2 << 62;
        let hex = format!("{bits:032x}");
        let text = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
        HeaderValue::try_from(text).expect("hexadecimal digits are visible")
    }
}

impl AuditWriter {
    /// Waits until everything is written: at most two seconds for the requests that are still
    /// open, and then at most two for the rest of the queue. All copies of the log must be dropped
    /// before.
    pub async fn finish(mut self) {
        if timeout(OPEN_REQUESTS_TIMEOUT, &mut self.task).await.is_err() {
            self.closing.cancel();
            if timeout(FLUSH_TIMEOUT, &mut self.task).await.is_err() {
                tracing::warn!("the last records of the audit log were not written in time");
            }
        }
    }
}
