//! The options of the data port, from the configuration and from the pod that kubefan runs in.

use std::fs;

use kubefan_admission::PermitLimits;
use kubefan_server::{
    ServerOptions, kube::guard::Guard, selector_limits::SelectorLimits, transport::open_connections::EndingOptions,
};

use super::seed::seed;
use crate::config::{ListenAddress, ServeConfig};

/// The part of the drain timeout in which streams end. In the rest, clients read the remaining
/// data.
const DRAIN_SPREAD: f64 = 0.75;

/// Returns the options of the data port. It takes at most `connections_max` connections.
pub fn from_config(config: &ServeConfig, connections_max: usize) -> ServerOptions {
    ServerOptions {
        ids_seed: seed(),
        connections_max,
        calls_pending_max: config.serving.calls_pending_max,
        subscribers_max: subscribers_max(config),
        reads_max: reads_max(config),
        pending_bytes_max: config.serving.pending_bytes_max,
        selectors: SelectorLimits {
            terms_max: config.serving.selector_terms_max,
            values_max: config.serving.selector_values_max,
        },
        ending: EndingOptions {
            drain_spread_max: config.serving.drain_timeout.mul_f64(DRAIN_SPREAD),
            connection_age_max: config.serving.connection_age_max,
        },
        max_concurrent_streams: config.serving.max_concurrent_streams,
        message_bytes_max: config.serving.message_bytes_max,
        keepalive_interval: config.serving.keepalive_interval,
        keepalive_timeout: config.serving.keepalive_timeout,
        snapshot_stall_timeout: config.serving.snapshot_stall_timeout,
        consistent_list_bytes_min: config.serving.consistent_list_bytes_min,
        feature_gates: config.serving.feature_gates,
        gzip: config.serving.gzip,
        // A kubefan behind another one does not know the clients of its neighbours.
        fallback_starts_per_second: config
            .upstream
            .source
            .is_none()
            .then_some(config.serving.fallback_starts_per_second),
        trusted_proxies: config.serving.trusted_proxies.clone(),
        narrowed_by: config.upstream.field_selector.clone().unwrap_or_default(),
        guard: config.serving.tls.is_none().then(|| guard(config, &config.serving.listen)),
    }
}

/// Returns the maximum number of streams that are served at a time.
pub(super) fn subscribers_max(config: &ServeConfig) -> PermitLimits {
    let serving = &config.serving;
    PermitLimits { all: serving.subscribers_max, per_identity: serving.subscribers_max_per_identity }
}

/// Returns the maximum number of lists and gets that are served at a time.
pub(super) fn reads_max(config: &ServeConfig) -> PermitLimits {
    PermitLimits { all: config.serving.reads_max, per_identity: config.serving.reads_max_per_identity }
}

/// Returns the hosts that requests to a port may name. Off loopback, they may also name a Service.
/// If `/etc/resolv.conf` cannot be read, the cluster's domain is the usual one.
pub(super) fn guard(config: &ServeConfig, listen: &ListenAddress) -> Guard {
    let hosts = config.serving.allowed_hosts.clone();
    let is_loopback = listen.is_local();
    let hosts = if is_loopback {
        hosts
    } else {
        hosts.with_services(&fs::read_to_string("/etc/resolv.conf").unwrap_or_default())
    };
    Guard { hosts, is_loopback }
}
