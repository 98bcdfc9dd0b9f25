//! The rebalancing of this replica with its peers, by the configuration.

use std::sync::Arc;

use kubefan_access::AccessControl;
use kubefan_informers::Registry;
use kubefan_peer::{DnsDial, Load, LoadSource, Loads, tls::PeerTls};
use kubefan_server::{
    fallback_budget::FallbackBudget, rebalance::Rebalancer, transport::open_connections::OpenConnections,
};
use rand::{SeedableRng, rngs::SmallRng};

use super::{component::Shared, seed::seed};

/// The rebalancing with the peers, before it starts.
pub(super) struct Rebalancing {
    pub(super) tls: PeerTls,
    /// The port where this replica serves peers.
    pub(super) own_port: Option<u16>,
    pub(super) connections: Arc<OpenConnections>,
    pub(super) budget: Arc<FallbackBudget>,
    pub(super) access: Arc<AccessControl>,
}

impl Rebalancing {
    /// Starts to move watches to the peers, until the drain. Returns the load that this replica
    /// reports to its peers; `None` if it does not take part.
    pub(super) fn build(self, shared: Shared<'_>, registry: &Arc<Registry>) -> Option<LoadSource> {
        if !shared.config.peer.rebalance {
            return None;
        }
        let own = self.load(shared, registry.clone());
        let Self { tls, own_port, connections, budget, access } = self;
        if let Some(peers) = shared.config.peer.peers.clone() {
            let loads = Loads::new(Arc::new(DnsDial::new(peers.into(), tls, own_port)), own().instance);
            let reviewer = access.reviews().then(|| shared.upstream.clone());
            let random = SmallRng::seed_from_u64(seed());
            let own = own.clone();
            let percent = shared.config.peer.rebalance_percent;
            let rebalancer = Rebalancer { connections, own, loads, budget, percent, reviewer };
            let drain = shared.stops.drain.clone();
            tokio::spawn(rebalancer.run(shared.metrics.rebalance().clone(), random, drain));
        }
        Some(own)
    }

    fn load(&self, shared: Shared<'_>, registry: Arc<Registry>) -> LoadSource {
        let instance = seed();
        let connections = self.connections.clone();
        let access = self.access.clone();
        let drain = shared.stops.drain.clone();
        Arc::new(move || Load {
            watches: connections.watches() as u64,
            clients: connections.clients() as u64,
            is_ready: registry.readiness().0 && !drain.is_cancelled(),
            is_draining: drain.is_cancelled(),
            authorizes: access.is_answered(),
            instance,
        })
    }
}
