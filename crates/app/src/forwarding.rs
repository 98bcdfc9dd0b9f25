//! The requests that are forwarded upstream, by the configuration.

use std::sync::Arc;

use kubefan_server::kube::forward::{ForwardOptions, Forwarder};
use kubefan_telemetry::metrics::Metrics;
use kubefan_upstream::passthrough::Passthrough;

use super::seed::seed;
use crate::config::ServeConfig;

/// Forwards requests that no cache answers.
pub(super) struct Forwarding {
    /// The client of the apiserver.
    pub(super) passthrough: Passthrough,
}

impl Forwarding {
    /// Returns the forwarder.
    pub(super) fn build(self, config: &ServeConfig, metrics: &Arc<Metrics>) -> Arc<Forwarder> {
        let options = ForwardOptions {
            upgrades: config.passthrough.upgrades,
            hosts: config.serving.allowed_hosts.clone(),
            per_identity_max: config.passthrough.requests_max_per_identity,
            is_to_kubefan: config.upstream.forwards_to_kubefan(),
        };
        Arc::new(Forwarder::new(self.passthrough, options, seed(), metrics.clone()))
    }
}
