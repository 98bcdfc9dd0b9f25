//! Peers: starts without one, transfers that break off, and clients that are none.

use std::net::SocketAddr;

use kubefan_common::proto::v1alpha1::{TransferRequest, peer_service_client::PeerServiceClient};
use tempfile::TempDir;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::scene::{OFTEN, Ongoing, Scene, every, large, lively};
use crate::{
    harness::{
        kubefan::Kubefan,
        pki::{Authority, IssuedPem},
        rig::pods,
        simulated::Simulated,
    },
    peers::files,
};

/// A replica that others can start from.
struct First {
    kubefan: Kubefan,
    peers_at: SocketAddr,
    simulated: Simulated,
    authority: Authority,
    dir: TempDir,
    _writing: Ongoing,
}

impl First {
    async fn start() -> First {
        let (simulated, writing) = lively().await;
        for number in 0..128 {
            simulated.sim.create(&pods(), large(&format!("large-{number}"), 128 << 10)).unwrap();
        }
        let authority = Authority::new();
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let listen = ["--resource=pods", "--peer-listen=127.0.0.1:0", "tuning.peerAllowedNames=[127.0.0.1]"];
        let files = files(dir.path(), "first", &authority, &authority);
        let args: Vec<&str> = listen.into_iter().chain(files.iter().map(String::as_str)).collect();
        let kubefan = simulated.kubefan(&args).await;
        let log = kubefan.process.log();
        let address = log.lines().find_map(|line| line.strip_prefix("kubefan: serving peers on "));
        let peers_at = address.expect("the address is printed").trim().parse().unwrap();
        First { kubefan, peers_at, simulated, authority, dir, _writing: writing }
    }

    /// A replica that starts from this one.
    async fn second(&self, authority: &Authority) -> Kubefan {
        let peers = format!("--peers={}", self.peers_at);
        let files = files(self.dir.path(), "second", authority, &self.authority);
        let args: Vec<&str> = ["--resource=pods", &peers].into_iter().chain(files.iter().map(String::as_str)).collect();
        self.simulated.kubefan(&args).await
    }

    /// A connection to the port for peers.
    fn channel(&self, identity: Option<IssuedPem>) -> Channel {
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&self.authority.ca_pem))
            .domain_name("127.0.0.1");
        let tls = match identity {
            Some(IssuedPem { certificate, key }) => tls.identity(Identity::from_pem(certificate, key)),
            None => tls,
        };
        Endpoint::from_shared(format!("https://{}", self.peers_at)).unwrap().tls_config(tls).unwrap().connect_lazy()
    }
}

fn request() -> TransferRequest {
    TransferRequest { resource: "pods".into(), version: "v1".into(), ..TransferRequest::default() }
}

/// A request that names the cluster and the schema as this replica does, which its refusals tell.
async fn agreeing_request(channel: &Channel) -> TransferRequest {
    let mut request = request();
    loop {
        let Err(refused) = PeerServiceClient::new(channel.clone()).transfer(request.clone()).await else {
            return request;
        };
        let text = refused.message();
        let theirs = |what: &str| Some(text.split_once(what)?.1.split('"').next()?.to_owned());
        match (theirs("the cluster is \""), theirs("the schema is \"")) {
            (Some(cluster), _) if request.cluster.is_empty() => request.cluster = cluster,
            (_, Some(schema)) if request.schema.is_empty() => request.schema = schema,
            _ => panic!("{refused}"),
        }
    }
}

pub(super) async fn warm_starts(scene: Scene) {
    let first = First::start().await;
    let second = first.second(&Authority::new()).await;
    scene.scrape(&second);
    let firing = scene.fired("a replica with a certificate of another CA", &["KubefanWarmStartFailed"]).await;
    let log = second.process.log();
    assert!(log.contains("no warm start from this peer"), "{log}");
    drop(second);
    let second = first.second(&first.authority).await;
    firing.scene().scrape(&second);
    firing.resolved("restarted with a right one").await;
}

/// A peer that goes away in the middle of transfers.
pub(super) async fn transfers(scene: Scene) {
    let first = First::start().await;
    scene.scrape(&first.kubefan);
    let channel = first.channel(Some(first.authority.peer()));
    let request = agreeing_request(&channel).await;
    let receiving = every(OFTEN * 8, move || {
        let mut client = PeerServiceClient::new(channel.clone());
        let request = request.clone();
        async move {
            let mut transfer = client.transfer(request).await.expect("a transfer begins").into_inner();
            transfer.message().await.expect("it has a first message");
        }
    });
    let firing = scene.fired("a replica that ends while it receives", &["KubefanTransfersCutOff"]).await;
    drop(receiving);
    firing.resolved("it does not end any more").await;
}

pub(super) async fn strangers(scene: Scene) {
    let first = First::start().await;
    scene.scrape(&first.kubefan);
    let channel = first.channel(None);
    let asking = every(OFTEN, move || {
        let mut client = PeerServiceClient::new(channel.clone());
        async move { drop(client.transfer(request()).await) }
    });
    let firing = scene.fired("clients without a certificate of a peer", &["KubefanPeersRefused"]).await;
    drop(asking);
    firing.resolved("the port closed to them").await;
}
