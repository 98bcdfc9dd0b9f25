//! The metrics of the fallback to the apiserver while the kubefan at `--upstream` is away.

use prometheus::{Error, IntCounter, IntCounterVec, IntGauge};

use super::register::Registrar;

/// The metrics of the fallback.
#[derive(Clone)]
pub struct FallbackMetrics {
    active: IntGauge,
    changes: IntCounterVec,
    starts: IntCounter,
}

impl FallbackMetrics {
    pub(super) fn new(register: &Registrar<'_>) -> Result<Self, Error> {
        let changes = register.counters(
            "kubefan_fallback_changes_total",
            "Changes of the server of lists and watches, by the server that they go to since.",
            &["to"],
        )?;
        for to in ["apiserver", "kubefan"] {
            changes.with_label_values(&[to]);
        }
        Ok(Self {
            active: register.int_gauge(
                "kubefan_fallback_active",
                "1 while the next kubefan is away, so that lists and watches start at the apiserver.",
            )?,
            changes,
            starts: register.counter(
                "kubefan_fallback_starts_total",
                "Lists and watches that caches have started at the apiserver in place of the next kubefan.",
            )?,
        })
    }

    /// Notes that lists and watches go to another server.
    pub fn changed(&self, is_away: bool) {
        self.active.set(i64::from(is_away));
        self.changes.with_label_values(&[if is_away { "apiserver" } else { "kubefan" }]).inc();
    }

    /// Counts a start at the apiserver.
    pub fn started(&self) {
        self.starts.inc();
    }
}
