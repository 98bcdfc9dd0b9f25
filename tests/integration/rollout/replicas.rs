//! The replicas of kubefan, each a process with a place of its own: the same ports and certificate
//! after a restart, as a peer finds it under the same name.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use tempfile::TempDir;
use tokio::time::sleep;

use super::{
    By, Setup,
    service::{Balancer, Endpoints},
};
use crate::harness::{
    kubefan::{self, Kubefan},
    pki::{Authority, IssuedPem},
    process::free_port,
    wait,
};

/// A drain ends by its time limit, and by the end of the last stream.
const DRAINED_AT_MOST: Duration = Duration::from_secs(60);

/// The replicas compare themselves about every 2 seconds.
const SAID_AT_MOST: Duration = Duration::from_secs(60);

/// A release of kubefan.
#[derive(Clone)]
pub(super) enum Release {
    /// The release of this source tree.
    This,
    /// An older binary. It knows neither rebalancing nor several names of peers.
    Before(PathBuf),
}

struct Replica {
    kubefan: Kubefan,
    /// Lists upstream that are counted already.
    listed: f64,
}

/// The places of the replicas, some of them empty.
pub(super) struct Replicas {
    setup: Setup,
    places: Vec<Place>,
    pub(super) endpoints: Endpoints,
    /// A peer for replicas that know only one name.
    any_peer: Balancer,
    peers: Endpoints,
    /// Full lists of upstream, and starts from a peer's caches, since the last look.
    lists: f64,
    warm_starts: f64,
    _files: TempDir,
}

struct Place {
    peer_address: SocketAddr,
    tls: Vec<String>,
    replica: Option<Replica>,
}

impl Replicas {
    /// Empty places.
    pub(super) async fn new(setup: Setup, places: usize) -> Replicas {
        let files = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory is created");
        let authority = Authority::new();
        let place = |number: usize| {
            let IssuedPem { certificate, key } = authority.peer();
            let texts = [("cert", certificate), ("key", key), ("ca", authority.ca_pem.clone())];
            let write = |(what, text): (&str, String)| {
                let path = files.path().join(format!("{number}-{what}.pem"));
                std::fs::write(&path, text).expect("the file is written");
                format!("--peer-{what}-file={}", path.display())
            };
            let tls = texts.map(write).into();
            Place { peer_address: SocketAddr::from(([127, 0, 0, 1], free_port())), tls, replica: None }
        };
        let places = (0..places).map(place).collect();
        let peers = Endpoints::none();
        Replicas {
            setup,
            places,
            endpoints: Endpoints::none(),
            any_peer: Balancer::to(peers.clone()).await,
            peers,
            lists: 0.0,
            warm_starts: 0.0,
            _files: files,
        }
    }

    /// Starts a replica and adds it to the Service once it is ready.
    pub(super) async fn start(&mut self, place: usize, release: &Release) {
        let names: Vec<String> = self.places.iter().map(|place| place.peer_address.to_string()).collect();
        let at = &self.places[place];
        let mut args = vec![
            "--resource=configmaps".to_owned(),
            format!("--namespace={}", self.setup.namespace),
            format!("--peer-listen={}", at.peer_address),
        ];
        args.extend(at.tls.clone());
        let program = match release {
            Release::This => {
                args.push(format!("--peers={}", names.join(",")));
                args.push("--rebalance".to_owned());
                args.push(format!("tuning.rebalancePercent={}", self.setup.rebalance_percent));
                args.extend(self.setup.flags.clone());
                kubefan::binary().into()
            }
            Release::Before(binary) => {
                args.push(format!("--peers={}", self.any_peer.addr));
                binary.clone()
            }
        };
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let kubefan = Kubefan::spawn_program(&program, &self.setup.kubeconfig, &args).await;
        kubefan.ready().await;
        self.warm_starts += sum(&kubefan, "kubefan_warm_starts_total", r#"result="warm""#).await;
        self.endpoints.add(kubefan.grpc_addr);
        self.peers.add(at.peer_address);
        self.places[place].replica = Some(Replica { kubefan, listed: 0.0 });
    }

    /// Asks a replica to exit, as the kubelet does, and waits for it. A balancer has already
    /// forgotten it, because the chart lets a pod wait first; resolvers still remember it.
    pub(super) async fn stop(&mut self, place: usize) {
        self.count_lists().await;
        let mut replica = self.places[place].replica.take().expect("a replica runs there");
        let address = replica.kubefan.grpc_addr;
        match self.setup.by {
            By::Balancer => {
                self.withdraw(place, address).await;
                replica.kubefan.process.terminate();
            }
            By::Name => {
                replica.kubefan.process.terminate();
                self.withdraw(place, address).await;
            }
        }
        let status = replica.kubefan.process.ended(DRAINED_AT_MOST).await;
        assert!(status.success(), "{status}: {}", replica.kubefan.process.log());
    }

    /// Kills a replica. The Service learns of it a moment later.
    pub(super) async fn kill(&mut self, place: usize) {
        self.count_lists().await;
        let mut replica = self.places[place].replica.take().expect("a replica runs there");
        replica.kubefan.process.kill9();
        self.withdraw(place, replica.kubefan.grpc_addr).await;
    }

    async fn withdraw(&self, place: usize, address: SocketAddr) {
        self.peers.remove(self.places[place].peer_address);
        sleep(self.setup.withdrawn_after).await;
        self.endpoints.remove(address);
    }

    /// The watches of each replica that runs.
    pub(super) async fn watches(&self) -> Vec<f64> {
        self.each("kubefan_subscribers").await
    }

    /// The watches that each replica that runs has asked to move.
    pub(super) async fn moved(&self) -> Vec<f64> {
        self.each("kubefan_rebalanced_total").await
    }

    /// The connections to the port for peers that each replica that runs has refused.
    pub(super) async fn refused_peers(&self) -> Vec<f64> {
        self.each("kubefan_peers_refused_total").await
    }

    /// The sum of a metric's lines, of each replica that runs.
    async fn each(&self, metric: &str) -> Vec<f64> {
        let mut sums = Vec::new();
        for replica in self.places.iter().filter_map(|place| place.replica.as_ref()) {
            sums.push(sum(&replica.kubefan, metric, "").await);
        }
        sums
    }

    /// Waits until a replica logs this about rebalancing.
    pub(super) async fn says(&self, what: &str) {
        let said = wait::try_until(SAID_AT_MOST, || async { self.logs().contains(what).then_some(()) });
        assert!(said.await.is_some(), "no replica logs {what:?}:\n{}", self.logs());
    }

    /// Full lists of upstream and starts from a peer's caches, since this was last asked.
    pub(super) async fn starts(&mut self) -> (f64, f64) {
        self.count_lists().await;
        (std::mem::take(&mut self.lists), std::mem::take(&mut self.warm_starts))
    }

    /// Returns the replicas' log lines about rebalancing and warm starts.
    pub(super) fn logs(&self) -> String {
        let replicas = self.places.iter().filter_map(|place| place.replica.as_ref());
        let lines = replicas.enumerate().flat_map(|(number, replica)| {
            let log = replica.kubefan.process.log();
            let told = log.lines().filter(|line| line.contains("rebalanc") || line.contains("warm start"));
            told.map(|line| format!("{number}: {line}")).collect::<Vec<_>>()
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    async fn count_lists(&mut self) {
        for replica in self.places.iter_mut().filter_map(|place| place.replica.as_mut()) {
            let listed = sum(&replica.kubefan, "kubefan_relists_total", "").await;
            self.lists += listed - replica.listed;
            replica.listed = listed;
        }
    }
}

/// The sum of a metric's lines that contain `label`.
async fn sum(kubefan: &Kubefan, metric: &str, label: &str) -> f64 {
    kubefan.metric_sum(metric, label).await.expect("metrics are served")
}
