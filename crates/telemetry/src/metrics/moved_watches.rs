//! The metrics of rebalancing.

use prometheus::{Error, Gauge, IntCounter, IntGauge};

use super::register::Registrar;

/// The metrics of rebalancing.
#[derive(Clone)]
pub struct RebalanceMetrics {
    watches: IntGauge,
    share: Gauge,
    moved: IntCounter,
}

impl RebalanceMetrics {
    pub(super) fn new(register: &Registrar<'_>) -> Result<Self, Error> {
        Ok(Self {
            watches: register.int_gauge(
                "kubefan_rebalance_watches",
                "Watches of this replica when it last compared itself with the others.",
            )?,
            share: register.gauge(
                "kubefan_rebalance_share",
                "Watches that this replica would then have if all ready replicas had as many; its own number while nothing \
                 may be moved.",
            )?,
            moved: register
                .counter("kubefan_rebalanced_total", "Watches that were asked to move to replicas that have fewer.")?,
        })
    }

    /// Sets the watches of this replica and its share.
    pub fn set(&self, watches: u64, share: f64) {
        self.watches.set(i64::try_from(watches).unwrap_or(i64::MAX));
        self.share.set(share);
    }

    /// Counts watches that were asked to move.
    pub fn moved(&self, watches: usize) {
        self.moved.inc_by(watches as u64);
    }
}
