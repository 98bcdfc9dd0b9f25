//! The metrics of the configuration file.

use prometheus::{Error, Gauge, IntCounterVec, IntGauge};

use super::register::Registrar;

/// The metrics of the configuration file.
#[derive(Clone)]
pub struct ReloadMetrics {
    successful: IntGauge,
    success_timestamp: Gauge,
    reloads: IntCounterVec,
}

impl ReloadMetrics {
    pub(super) fn new(register: &Registrar<'_>) -> Result<Self, Error> {
        let metrics = Self {
            successful: register.int_gauge(
                "kubefan_config_last_reload_successful",
                "Whether the configuration file is in force as it is now: 1, or 0 if it was refused.",
            )?,
            success_timestamp: register.gauge(
                "kubefan_config_last_reload_success_timestamp_seconds",
                "When the configuration in force was read, in seconds since 1970.",
            )?,
            reloads: register.counters(
                "kubefan_config_reloads_total",
                "Changes of the configuration file that were read, by result.",
                &["result"],
            )?,
        };
        for result in ["success", "failure"] {
            metrics.reloads.with_label_values(&[result]);
        }
        Ok(metrics)
    }

    /// A configuration came into force at this time, in seconds since 1970.
    pub fn started(&self, now: f64) {
        self.successful.set(1);
        self.success_timestamp.set(now);
    }

    /// A change was applied at this time, in seconds since 1970.
    pub fn succeeded(&self, now: f64) {
        self.started(now);
        self.reloads.with_label_values(&["success"]).inc();
    }

    /// A change was refused.
    pub fn failed(&self) {
        self.successful.set(0);
        self.reloads.with_label_values(&["failure"]).inc();
    }
}
