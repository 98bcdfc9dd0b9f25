//! The options of the data port, from the configuration.

use crate::{config::ServeConfig, server::ServerOptions};

impl From<&ServeConfig> for ServerOptions {
    fn from(config: &ServeConfig) -> Self {
        Self {
            connections_max: config.connections_max,
            subscribers_max: config.subscribers_max,
            reads_max: config.reads_max,
            max_concurrent_streams: config.max_concurrent_streams,
            message_bytes_max: config.message_bytes_max,
            keepalive_interval: config.keepalive_interval,
            keepalive_timeout: config.keepalive_timeout,
            snapshot_stall_timeout: config.snapshot_stall_timeout,
            consistent_list_bytes_min: config.consistent_list_bytes_min,
            narrowed_by: config.upstream.field_selector.clone().unwrap_or_default(),
            is_guarded: config.tls.is_none() && config.listen.is_local(),
        }
    }
}
