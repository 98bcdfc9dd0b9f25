//! Samples the metrics for the status page.

use std::sync::Arc;

use kubefan_informers::Registry;
use kubefan_telemetry::last_hour::{History, SAMPLE_INTERVAL};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::component::Shared;

/// Samples until kubefan stops.
pub(super) fn sample(shared: Shared<'_>, registry: &Arc<Registry>) -> Arc<History> {
    let history = Arc::new(History::new(Instant::now()));
    let sampled = history.clone();
    let registry = registry.clone();
    let metrics = shared.metrics.clone();
    shared.spawn(async move {
        let mut ticks = interval(SAMPLE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            registry.refresh_gauges();
            sampled.sample(&metrics.registry().gather(), Instant::now());
        }
    });
    history
}
