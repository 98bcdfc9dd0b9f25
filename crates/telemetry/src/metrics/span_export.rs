//! The metrics of the export of spans.

use prometheus::{Error, IntCounter};

use super::register::Registrar;

/// The metrics of the export of spans.
#[derive(Debug, Clone)]
pub struct TraceMetrics {
    /// Spans that the collector has taken.
    pub exported: IntCounter,
    /// Spans that found no room in the queue.
    pub dropped: IntCounter,
    /// Spans that the collector did not take.
    pub failed: IntCounter,
}

impl TraceMetrics {
    pub(super) fn new(register: &Registrar<'_>) -> Result<Self, Error> {
        Ok(Self {
            exported: register.counter("kubefan_trace_spans_exported_total", "Spans that the collector has taken.")?,
            dropped: register
                .counter("kubefan_trace_spans_dropped_total", "Spans that were dropped because the queue was full.")?,
            failed: register.counter(
                "kubefan_trace_spans_failed_total",
                "Spans that were lost because the collector did not take them in time.",
            )?,
        })
    }
}
