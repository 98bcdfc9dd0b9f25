//! The limit of open files, and the number of connections that fit within it.
//!
//! A process without a free descriptor can open no file and accept no connection, on any of its
//! ports. So the data port takes fewer connections than there are descriptors, and leaves the rest
//! to the admin port, to the peers and to the connections to upstream.

use kubefan_server::{
    admin_port::{CONNECTIONS_MAX as ADMIN_CONNECTIONS_MAX, FILES_RESERVED},
    kube::forward::long_requests_max,
    transport::limits::HEADER_LIST_BYTES_MAX,
};
use kubefan_upstream::passthrough::connections_max as passthrough_connections_max;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{info, warn};

use crate::config::ServeConfig;

/// The connections of the data port if nothing else limits them.
pub const CONNECTIONS_MAX: usize = 50_000;

/// Memory of a connection before its caller is known: the headers of a request
/// (`server::transport::limits::HEADER_LIST_BYTES_MAX`).
const CONNECTION_BYTES: usize = HEADER_LIST_BYTES_MAX as usize;

/// Descriptors for listeners, peers, certificates, credential plugins and the connections of
/// kubefan's own lists and watches.
const OTHER_FILES_MAX: usize = 128;

/// Raises the limit of open files to the highest that this process may set. Returns the limit in
/// effect; `None` if there is none.
pub(super) fn raise() -> Option<usize> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = current != maximum && setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok();
    let limit = if raised { maximum } else { current };
    limit.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Returns the highest limit of open files that this process may set; `None` if there is none.
pub fn highest() -> Option<usize> {
    getrlimit(Resource::Nofile).maximum.map(|limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// Logs the limit of open files and the limit of connections, which is `given` or less.
pub(super) fn log(open_files: Option<usize>, connections_max: usize, given: Option<usize>) {
    match open_files {
        Some(open_files) => info!(open_files, connections_max, "the limit of open files"),
        None => info!(connections_max, "the number of open files is not limited"),
    }
    if given.is_some_and(|given| given > connections_max) {
        warn!(
            given,
            connections_max,
            "limits.connectionsMax is lowered to what the limit of open files leaves; raise that limit (ulimit -n)"
        );
    }
}

/// Returns the maximum number of connections of the data port: the configured one, otherwise as
/// many as memory (in bytes) allows. It is at most the limit of open files less kubefan's own
/// files, or half of that limit, whichever is more.
pub fn connections_max(config: &ServeConfig, open_files: Option<usize>, memory_max: Option<usize>) -> usize {
    let wanted = config.serving.connections_max.unwrap_or_else(|| {
        let in_memory = memory_max.map_or(CONNECTIONS_MAX, |bytes| bytes / CONNECTION_BYTES);
        CONNECTIONS_MAX.min(in_memory.max(1))
    });
    let Some(open_files) = open_files else { return wanted };
    let own = OTHER_FILES_MAX + ADMIN_CONNECTIONS_MAX + FILES_RESERVED + forwarding_files(config);
    let fitting = open_files.saturating_sub(own).max(open_files / 2).max(1);
    wanted.min(fitting)
}

/// Returns the maximum number of connections that forwarded requests open.
fn forwarding_files(config: &ServeConfig) -> usize {
    if config.access.credentials().is_none() {
        return 0;
    }
    let requests_max = config.passthrough.requests_max;
    let sessions_max = if config.passthrough.upgrades { long_requests_max(requests_max) } else { 0 };
    passthrough_connections_max(requests_max, sessions_max)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Access;

    fn with(given: Option<usize>) -> ServeConfig {
        let mut config = ServeConfig::default();
        config.serving.connections_max = given;
        config
    }

    fn fitting(given: Option<usize>, open_files: Option<usize>) -> usize {
        connections_max(&with(given), open_files, None)
    }

    #[test]
    fn the_headers_of_all_connections_fit_into_memory_unless_their_number_is_given() {
        let of = |given, memory_max| connections_max(&with(given), None, Some(memory_max));
        assert_eq!(of(None, 64 << 20), 1024);
        assert_eq!(of(None, 64 << 30), CONNECTIONS_MAX);
        assert_eq!(of(Some(5000), 64 << 20), 5000);
    }

    #[test]
    fn the_connections_of_the_data_port_leave_descriptors_to_everything_else() {
        assert_eq!(fitting(None, None), CONNECTIONS_MAX);
        assert_eq!(fitting(Some(70_000), None), 70_000);
        assert_eq!(fitting(None, Some(1 << 20)), CONNECTIONS_MAX);
        assert_eq!(fitting(Some(70_000), Some(1 << 20)), 70_000);
        let of_1024 = fitting(None, Some(1024));
        assert!((512..1024 - OTHER_FILES_MAX).contains(&of_1024), "{of_1024}");
        assert_eq!(fitting(Some(7), Some(1024)), 7);
        assert_eq!(fitting(Some(1024), Some(1024)), of_1024, "more than there are descriptors");
        assert_eq!(fitting(None, Some(256)), 128, "at least half");
        assert_eq!(fitting(None, Some(1)), 1);
    }

    #[test]
    fn sessions_that_are_passed_on_have_a_descriptor_each() {
        let mut config = ServeConfig::default();
        let without = connections_max(&config, Some(4096), None);
        config.passthrough.upgrades = true;
        assert_eq!(connections_max(&config, Some(4096), None), without - 800);
        config.access = Access::LocalCacheOnly;
        assert!(connections_max(&config, Some(4096), None) > without);
    }
}
