//! Rebalancing: after a scale-up or a rolling update, replicas with more than their share of the
//! watches ask some of their clients to come back, and a balancer spreads those over all replicas.
//!
//! A watch lasts for as long as its connection, so without this a new replica stays empty, and the
//! last one of a rolling update, too. The hazard is that a moved client finds no replica that takes
//! it. So nothing moves while a replica drains or is of a version that does not take part, and
//! while it cannot be asked about callers' rights.

mod balance;
mod rebalance_check;

use std::{sync::Arc, time::Duration};

use kubefan_peer::{Load, LoadSource, Loads, PeerLoad};
use kubefan_telemetry::metrics::RebalanceMetrics;
use kubefan_upstream::Upstream;
use rand::{RngExt, rngs::SmallRng};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::balance::{Balance, Change, Decision};
use super::{fallback_budget::FallbackBudget, transport::open_connections::OpenConnections};

/// About how often the replicas are asked.
const ASK_INTERVAL: Duration = Duration::from_secs(2);
/// The part of it that intervals vary by, so that replicas do not decide together.
const ASK_JITTER: f64 = 0.2;
/// Time for the apiserver to answer a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Evens out the watches of this replica with those of the others.
pub struct Rebalancer {
    /// The watches of this replica.
    pub connections: Arc<OpenConnections>,
    /// The load of this replica.
    pub own: LoadSource,
    /// The load of the other replicas.
    pub loads: Loads,
    /// The budget of all replicas' clients.
    pub budget: Arc<FallbackBudget>,
    /// The most that is moved in a second, in percent of the watches.
    pub percent: u32,
    /// The apiserver, which reviews callers; `None` without reviews.
    pub reviewer: Option<Upstream>,
}

impl Rebalancer {
    /// Moves watches until `drain` is cancelled.
    pub async fn run(self, metrics: RebalanceMetrics, mut random: SmallRng, drain: CancellationToken) {
        drain.run_until_cancelled(self.rebalance(&metrics, &mut random)).await;
    }

    async fn rebalance(mut self, metrics: &RebalanceMetrics, random: &mut SmallRng) {
        let mut balance = Balance::new(f64::from(self.percent));
        let mut unknown = false;
        loop {
            sleep(ASK_INTERVAL.mul_f64(1.0 + ASK_JITTER * random.random_range(-1.0..1.0))).await;
            let peers = self.loads.ask().await;
            if let Err(error) = &peers
                && !std::mem::replace(&mut unknown, true)
            {
                warn!(%error, "the other replicas are not known, so no watches are moved (--rebalance)");
            }
            unknown &= peers.is_err();
            if let Ok(peers) = &peers {
                self.budget.set_other_clients(clients_of(peers));
            }
            let own = (self.own)();
            let others = peers.ok().and_then(|peers| takers(own, &peers));
            let least = self.connections.least_movable();
            let decision = balance.decide(Instant::now(), own.watches, others.as_deref(), least);
            metrics.set(own.watches, decision.share);
            log(own.watches, decision);
            if decision.watches > 0 && self.can_ask().await {
                let asked = self.connections.rebalance(usize::try_from(decision.watches).unwrap_or(usize::MAX));
                balance.moved(&asked);
                metrics.moved(asked.iter().sum());
            }
        }
    }

    /// Whether the apiserver can be asked now about callers' rights.
    async fn can_ask(&self) -> bool {
        match &self.reviewer {
            Some(upstream) => timeout(PROBE_TIMEOUT, upstream.until_serving()).await.is_ok(),
            None => true,
        }
    }
}

/// The watches of each other replica that takes new ones; `None` while nothing may be moved.
fn takers(own: Load, peers: &[PeerLoad]) -> Option<Vec<u64>> {
    let mut all = vec![own];
    for peer in peers {
        match peer {
            PeerLoad::Known(load) => all.push(*load),
            // A rolling update is under way.
            PeerLoad::Unknown => return None,
        }
    }
    let may_move = own.is_ready && all.iter().all(|load| load.authorizes && !load.is_draining);
    may_move.then(|| all[1..].iter().filter(|load| load.is_ready).map(|load| load.watches).collect())
}

/// Returns the number of the other replicas' clients. An older version tells only its watches: too
/// many clients only make each of them slower.
fn clients_of(peers: &[PeerLoad]) -> u64 {
    let clients = |peer: &PeerLoad| match peer {
        PeerLoad::Known(Load { clients: 0, watches, .. }) => *watches,
        PeerLoad::Known(load) => load.clients,
        PeerLoad::Unknown => 0,
    };
    peers.iter().map(clients).fold(0, u64::saturating_add)
}

fn log(watches: u64, Decision { share, change, .. }: Decision) {
    let share = share.round();
    match change {
        Some(Change::Begins) => info!(watches, share, "rebalancing begins: other replicas have fewer watches"),
        Some(Change::Ends) => info!(watches, share, "rebalancing ends"),
        Some(Change::Holds) => info!(
            watches,
            "rebalancing stops: a replica drains, is not ready or of another version, or callers cannot be authorized"
        ),
        Some(Change::Pauses(pause)) => {
            warn!(
                watches,
                share,
                ?pause,
                "rebalancing pauses: the clients came back here; they may not know the other replicas"
            );
        }
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(watches: u64) -> Load {
        Load { watches, is_ready: true, is_draining: false, authorizes: true, instance: 0, clients: 0 }
    }

    #[test]
    fn the_clients_of_all_other_replicas_share_the_budget() {
        let told = PeerLoad::Known(Load { clients: 3, ..load(7) });
        let older = PeerLoad::Known(load(20));
        assert_eq!(clients_of(&[told, PeerLoad::Unknown, older]), 23);
        assert_eq!(clients_of(&[]), 0);
    }

    #[test]
    fn nothing_moves_while_a_moved_client_could_find_no_replica() {
        let known = |load| PeerLoad::Known(load);
        let ready = load(7);
        let unready = Load { is_ready: false, ..load(9) };
        let draining = Load { is_draining: true, ..load(9) };
        let mute = Load { authorizes: false, ..load(9) };
        assert_eq!(takers(ready, &[known(load(1)), known(load(2))]), Some(vec![1, 2]));
        assert_eq!(takers(ready, &[known(unready), known(load(2))]), Some(vec![2]), "it has no share");
        assert_eq!(takers(ready, &[]), Some(vec![]));
        for own in [unready, draining, mute] {
            assert_eq!(takers(own, &[known(ready)]), None, "{own:?}");
        }
        for peer in [known(draining), known(mute), PeerLoad::Unknown] {
            assert_eq!(takers(ready, &[known(ready), peer]), None, "{peer:?}");
        }
    }
}
