//! Samples the metrics for the status page.

use std::sync::Arc;

use kubefan_telemetry::{
    last_hour::{History, SAMPLE_INTERVAL},
    metrics::Metrics,
};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use kubefan_informers::Registry;

/// Samples until `stop` is cancelled.
pub(super) fn sample(registry: &Arc<Registry>, metrics: &Arc<Metrics>, stop: &CancellationToken) -> Arc<History> {
    let history = Arc::new(History::new(Instant::now()));
    let sampled = history.clone();
    let registry = registry.clone();
    let metrics = metrics.clone();
    tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
        let mut ticks = interval(SAMPLE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            registry.refresh_gauges();
            sampled.sample(&metrics.registry().gather(), Instant::now());
        }
    }));
    history
}
