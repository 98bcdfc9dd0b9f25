//! The configuration of the demo.

use std::time::Duration;

use kubefan_app::config::ServeConfig;

/// Approximate number of pods per node.
const PODS_PER_NODE: usize = 50;

/// Configuration of the demo.
#[derive(Debug, Clone)]
pub struct DemoOptions {
    /// Number of pods.
    pub objects: usize,
    /// Number of subscribers.
    pub subscribers: usize,
    /// Changes per second.
    pub rate: u32,
    /// Time from the first subscriber to the last change; `None` for no end.
    pub duration: Option<Duration>,
    /// Seed of the pods and their changes.
    pub seed: u64,
    /// kubefan's configuration. Its upstream settings are ignored.
    pub serve: ServeConfig,
}

impl Default for DemoOptions {
    fn default() -> Self {
        let mut serve = ServeConfig::default();
        serve.cache.resources = vec!["pods".into()];
        Self { objects: 5_000, subscribers: 300, rate: 200, duration: Some(Duration::from_secs(30)), seed: 1, serve }
    }
}

impl DemoOptions {
    /// Number of nodes that the pods run on.
    pub(super) fn nodes(&self) -> usize {
        self.objects.div_ceil(PODS_PER_NODE).max(1)
    }
}
