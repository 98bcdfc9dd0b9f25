//! The rebalancing of this replica with its peers, by the configuration.

use std::sync::Arc;

use kubefan_access::AccessControl;
use kubefan_informers::Registry;
use kubefan_peer::{DnsDial, Load, LoadSource, Loads, tls::PeerTls};
use kubefan_server::{rebalance::Rebalancer, transport::open_connections::OpenConnections};
use kubefan_telemetry::metrics::Metrics;
use kubefan_upstream::Upstream;
use rand::{SeedableRng, rngs::SmallRng};
use tokio_util::sync::CancellationToken;

use crate::config::ServeConfig;

/// What this replica tells its peers. `None` if it does not take part.
pub(super) fn load(
    config: &ServeConfig,
    registry: &Arc<Registry>,
    connections: &Arc<OpenConnections>,
    access: &Arc<AccessControl>,
    drain: &CancellationToken,
) -> Option<LoadSource> {
    config.peer.rebalance.then_some(())?;
    #[expect(clippy::disallowed_methods, reason = "randomness enters here; code below takes it as a parameter")]
    let instance = rand::random();
    let registry = registry.clone();
    let connections = connections.clone();
    let access = access.clone();
    let drain = drain.clone();
    Some(Arc::new(move || Load {
        watches: connections.watches() as u64,
        is_ready: registry.readiness().0 && !drain.is_cancelled(),
        is_draining: drain.is_cancelled(),
        authorizes: access.is_answered(),
        instance,
    }))
}

/// Starts to move watches to the peers, if `own` tells how many this replica has, until `drain` is
/// cancelled. `own_port` is the port where this replica serves peers.
pub(super) fn start(
    config: &ServeConfig,
    (tls, own_port): (PeerTls, Option<u16>),
    (connections, access, upstream): (Arc<OpenConnections>, Arc<AccessControl>, &Upstream),
    own: Option<LoadSource>,
    metrics: &Metrics,
    drain: &CancellationToken,
) {
    let (Some(own), Some(peers)) = (own, config.peer.peers.clone()) else { return };
    let loads = Loads::new(Arc::new(DnsDial::new(peers.into(), tls, own_port)), own().instance);
    let reviewer = access.reviews().then(|| upstream.clone());
    #[expect(clippy::disallowed_methods, reason = "randomness enters here; code below takes it as a parameter")]
    let random = SmallRng::seed_from_u64(rand::random());
    let rebalancer = Rebalancer { connections, own, loads, percent: config.peer.rebalance_percent, reviewer };
    tokio::spawn(rebalancer.run(metrics.rebalance().clone(), random, drain.clone()));
}
