//! Warm start: a new replica takes state and history from a peer, serves every resume as that peer
//! did, and asks upstream only for names and versions. If the peer's state is wrong, from another
//! cluster, incomplete or too slow, the replica starts cold.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use futures::{StreamExt, future::BoxFuture};
use hyper_util::rt::TokioIo;
use kubefan_common::proto::v1alpha1::{
    Target, TransferRequest, peer_service_client::PeerServiceClient, peer_service_server::PeerServiceServer,
};
use kubefan_informers::{CacheCatalog, Registry};
use kubefan_peer::{Dial, FoundPeers, NoTransferLog, PeerError, Peers, TransferService};
use kubefan_sim::apiserver::{SimApiserver, SimOptions, Verb};
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tonic::{
    Code,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};
use tower::service_fn;

use crate::{
    harness::{
        apiserver::ApiServer,
        kubefan::Kubefan,
        network::{Network, RecordedRequest, answer},
        objects::version_of,
        pki::{Authority, IssuedPem},
        process::free_port,
        record::{Query, Watch, assert_equal, connect, place},
        rig::{PODS, Rig, Setup, churn, pod, pods, stage, target},
        tests, wait,
    },
    upstream_faults::{bookmark, expired},
};

tests! {
    apiserver: a_warm_start_between_processes_needs_their_certificates;
    paused: a_warm_replica_serves_every_resume_like_the_first, a_peer_state_that_lost_an_event_is_rejected,
        a_peer_state_with_wrong_labels_is_rejected, a_peer_without_the_clusters_present_state_sends_none,
        slow_broken_and_absent_peers_are_skipped, peers_that_cannot_be_reached_or_found_at_first_are_asked_again,
        changes_during_a_transfer_are_not_lost;
}

/// Behaviour of a peer.
#[derive(Clone)]
pub(crate) enum Peer {
    Healthy(Arc<Registry>),
    /// The peer answers nothing.
    Silent,
    /// The connection breaks after this many bytes.
    Breaking(Arc<Registry>, u64),
    /// The peer refuses connections.
    Absent,
    /// Nothing answers at the peer's address until the third connection.
    Late(Arc<Registry>),
}

/// Peers in memory, each at its own address.
#[derive(Clone)]
struct Memory {
    peers: Vec<Peer>,
    /// The peers that were asked for a connection, in order.
    dialled: Arc<Mutex<Vec<usize>>>,
    /// The look-ups that find the first peer alone, because the name of the others fails.
    failing: Arc<AtomicUsize>,
}

impl Memory {
    fn of(peers: Vec<Peer>) -> Memory {
        Memory { peers, dialled: Arc::default(), failing: Arc::default() }
    }
}

fn serve(registry: Arc<Registry>, io: DuplexStream) {
    let service = PeerServiceServer::new(TransferService::new(CacheCatalog(registry), Arc::new(NoTransferLog)));
    let incoming = futures::stream::iter([Ok::<_, std::io::Error>(io)]).chain(futures::stream::pending());
    tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming));
}

impl Dial for Memory {
    fn find(&self) -> BoxFuture<'_, FoundPeers> {
        let addresses = (1..=self.peers.len()).map(|i| SocketAddr::from(([192, 0, 2, i as u8], 7445)));
        let is_failing = self.failing.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok();
        let found = if is_failing {
            let failed = PeerError::Resolve { name: "others:7445".to_owned(), message: "try again".to_owned() };
            FoundPeers { addresses: addresses.take(1).collect(), failed: Some(failed) }
        } else {
            FoundPeers { addresses: addresses.collect(), failed: None }
        };
        Box::pin(std::future::ready(found))
    }

    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, Result<Channel, PeerError>> {
        let SocketAddr::V4(v4) = address else { unreachable!() };
        let number = usize::from(v4.ip().octets()[3]) - 1;
        let mut dialled = self.dialled.lock().unwrap();
        dialled.push(number);
        let before = dialled.iter().filter(|dialled| **dialled == number).count() - 1;
        drop(dialled);
        let peer = self.peers[number].clone();
        Box::pin(async move {
            let (ours, theirs) = tokio::io::duplex(16 << 10);
            match peer {
                Peer::Late(_) if before < 2 => return Err(PeerError::Unreachable("no route to host".to_owned())),
                Peer::Healthy(registry) | Peer::Late(registry) => serve(registry, theirs),
                Peer::Silent => drop(tokio::spawn(async move {
                    let _held = theirs;
                    std::future::pending::<()>().await;
                })),
                Peer::Breaking(registry, bytes) => {
                    let (inner, outer) = tokio::io::duplex(16 << 10);
                    serve(registry, outer);
                    tokio::spawn(async move {
                        let (from, mut to) = tokio::io::split(inner);
                        let mut from = from.take(bytes);
                        let (mut up, mut down) = tokio::io::split(theirs);
                        tokio::select! {
                            _ = tokio::io::copy(&mut from, &mut down) => {}
                            _ = tokio::io::copy(&mut up, &mut to) => {}
                        }
                        let _ = down.shutdown().await;
                    });
                }
                Peer::Absent => return Err(PeerError::Connect("connection refused".to_owned())),
            }
            let mut io = Some(TokioIo::new(ours));
            let once = service_fn(move |_| std::future::ready(io.take().ok_or(std::io::Error::other("once"))));
            let channel = Endpoint::from_static("http://peer.test").connect_with_connector(once).await;
            channel.map_err(|error| PeerError::Connect(error.to_string()))
        })
    }
}

/// A setup with a small ring, so that much history is conflated.
pub(crate) fn small_ring() -> Setup {
    let mut setup = Setup::of(&["pods"]);
    setup.registry.ring.ring_events_max = 12;
    setup
}

pub(crate) fn with_peers(peers: Vec<Peer>) -> Setup {
    with_peers_in_memory(&Memory::of(peers))
}

fn with_peers_in_memory(peers: &Memory) -> Setup {
    let peers = Peers::new(Arc::new(peers.clone()), Duration::from_secs(30), 1 << 30);
    Setup { peers: Some(peers), ..small_ring() }
}

pub(crate) fn warm_starts(rig: &Rig, result: &str) -> f64 {
    rig.of_pods("kubefan_warm_starts_total", &format!("result=\"{result}\""))
}

fn warm_starts_in_all(rig: &Rig) -> f64 {
    rig.of_pods("kubefan_warm_starts_total", "")
}

/// A kubefan without peers that is synced.
async fn started(sim: &SimApiserver) -> Rig {
    Rig::synced(sim.clone(), small_ring()).await
}

/// Waits until a kubefan has sent everything so far.
async fn up_to_date(rig: &Rig) {
    let mut watch = rig.watch_all("pods").await;
    watch.until(rig.sim.revision()).await;
}

/// The requests for objects: lists, and watches with initial events. Lists for metadata or for an
/// exact version are not counted.
fn object_lists(rig: &Rig) -> Vec<String> {
    let lists = rig.asked(PODS).into_iter().filter(|asked| !asked.is_metadata_only).map(|asked| asked.path);
    let of_objects = |path: &String| {
        let continued = !path.contains("watch=1") && !path.contains("Exact") && !path.contains("fieldSelector");
        path.contains("sendInitialEvents") || continued
    };
    lists.filter(of_objects).collect()
}

async fn a_warm_replica_serves_every_resume_like_the_first() {
    for (compression, gap) in [(false, false), (true, false), (false, true)] {
        let sim = small_ring().sim();
        churn(&sim, 0, 20);
        let first = Rig::synced(sim.clone(), Setup { cache_compression: compression, ..small_ring() }).await;
        let mut places = vec![format!("{}.end", sim.revision())];
        for round in 0..30 {
            places.push(churn(&sim, 20 + round, 1).to_string());
        }
        up_to_date(&first).await;
        if gap {
            first.network.refuse(true);
            first.cut().await;
            churn(&sim, 60, 5);
            first.fault(Verb::Watch, expired(), 1);
            first.network.refuse(false);
            up_to_date(&first).await;
            places.push(format!("{}.end", sim.revision()));
        }
        churn(&sim, 80, 4);
        up_to_date(&first).await;
        let peers = vec![Peer::Healthy(first.registry.clone())];
        let second = Rig::synced(sim.clone(), Setup { cache_compression: compression, ..with_peers(peers) }).await;
        assert_eq!(warm_starts(&second, "warm"), 1.0);
        assert_eq!(object_lists(&second), Vec::<String>::new(), "the objects come from the peer");
        assert_eq!(second.watch_all("pods").await.state, first.truth(PODS).await);
        for target in [target("pods"), stage("on"), stage("off"), Target { name: "pod-3".into(), ..target("pods") }] {
            let mut resumes = Vec::new();
            for place in &places {
                let open = async |rig: &Rig| rig.watch(target.clone(), place).await.unwrap();
                resumes.push((place, open(&first).await, open(&second).await));
            }
            let last = churn(&sim, 90, 6);
            for (from, ours, theirs) in &mut resumes {
                ours.until(last).await;
                theirs.until(last).await;
                let what = format!("{target:?} from {from}");
                assert_equal(&what, &theirs.events, &ours.events);
                // The first may know that the last version has no more events.
                let spans = |watch: &Watch| {
                    let spans = watch.catch_ups.iter().chain(&watch.gaps);
                    spans.map(|(from, to)| (place(from), place(to).0)).collect::<Vec<_>>()
                };
                assert_eq!(spans(theirs), spans(ours), "{what}");
                assert_eq!(theirs.state, ours.state, "{what}");
                assert!(theirs.snapshot.is_empty() && theirs.restarted_from.is_empty(), "{what}");
            }
        }
        let resumed = |rig: &Rig, way: &str| rig.of_pods("kubefan_resumes_total", &format!("result=\"{way}\""));
        for way in ["ring", "residue", "backfill"] {
            assert_eq!(resumed(&second, way), resumed(&first, way), "{way}");
        }
        assert!(resumed(&second, "ring") > 0.0 && resumed(&second, "residue") > 0.0);
        assert_eq!(resumed(&second, "backfill"), 0.0, "no resume needs upstream");
        assert_eq!(object_lists(&second), Vec::<String>::new());
    }
}

/// A kubefan that missed writes while it was cut off, but believes to be up to date.
async fn deceived(sim: &SimApiserver) -> Rig {
    sim.create(&pods(), pod("ghost", "on")).unwrap();
    let rig = started(sim).await;
    let mut watch = rig.watch_all("pods").await;
    rig.network.refuse(true);
    rig.cut().await;
    sim.delete(&pods(), "default", "ghost").unwrap();
    sim.create(&pods(), pod("lost", "on")).unwrap();
    let seen = bookmark(sim.revision());
    rig.network.answer_once(RecordedRequest::is_watch_path, answer(200, vec![seen], true));
    rig.network.refuse(false);
    watch.until(sim.revision()).await;
    rig
}

async fn a_peer_state_that_lost_an_event_is_rejected() {
    for (has_lost, is_compacted, result) in
        [(true, false, "unconfirmed"), (false, true, "warm"), (true, true, "unconfirmed")]
    {
        let sim = small_ring().sim();
        churn(&sim, 0, 20);
        let first = if has_lost { deceived(&sim).await } else { started(&sim).await };
        let network = Network::to(sim.clone());
        // Without its version, the state is compared with the present one.
        network.rule(move |path| {
            let gone = json!({ "kind": "Status", "code": 410, "reason": "Expired", "message": "too old" });
            let is_refused = is_compacted && path.contains("resourceVersionMatch=Exact");
            is_refused.then(|| answer(410, vec![gone.to_string()], false))
        });
        let second = Rig::over(network, sim, with_peers(vec![Peer::Healthy(first.registry.clone())]));
        second.ready().await;
        assert_eq!(
            (warm_starts(&second, result), warm_starts_in_all(&second)),
            (1.0, 1.0),
            "{has_lost} {is_compacted}"
        );
        assert_eq!(object_lists(&second).len(), usize::from(has_lost), "a cold start lists");
        assert_eq!(second.watch_all("pods").await.state, second.truth(PODS).await);
    }
}

async fn a_peer_state_with_wrong_labels_is_rejected() {
    let sim = small_ring().sim();
    let version = sim.create(&pods(), pod("x", "on")).unwrap();
    let first = started(&sim).await;
    let held = first.truth(PODS).await.values().next().cloned().unwrap();
    for (stage, result) in [("on", "warm"), ("off", "unconfirmed")] {
        let network = Network::to(sim.clone());
        let mut metadata = serde_json::from_str::<serde_json::Value>(&held).unwrap()["metadata"].take();
        metadata["labels"]["stage"] = stage.into();
        let list =
            json!({ "metadata": { "resourceVersion": version.to_string() }, "items": [{ "metadata": metadata }] });
        // One list of the current state, and one of the exact version.
        let is_list =
            |path: &str| path.starts_with(PODS) && !path.contains("watch=") && !path.contains("fieldSelector=");
        let is_exact = |path: &str| path.contains("resourceVersionMatch=Exact");
        network.answer_once(move |path| is_list(path) && !is_exact(path), answer(200, vec![list.to_string()], false));
        network.answer_once(is_exact, answer(200, vec![list.to_string()], false));
        let second = Rig::over(network, sim.clone(), with_peers(vec![Peer::Healthy(first.registry.clone())]));
        second.ready().await;
        assert_eq!(warm_starts(&second, result), 1.0, "{result}");
    }
}

async fn a_peer_without_the_clusters_present_state_sends_none() {
    let sim = small_ring().sim();
    let other = SimApiserver::new(SimOptions { seed: 99, ..SimOptions::default() });
    for sim in [&sim, &other] {
        churn(sim, 0, 20);
    }
    let foreign = started(&other).await;
    let stale = started(&sim).await;
    stale.network.refuse(true);
    stale.cut().await;
    let unsynced = Rig::start(sim.clone(), small_ring());
    unsynced.network.refuse(true);
    for peers in [vec![&foreign], vec![&stale, &unsynced]] {
        let peers = peers.into_iter().map(|peer| Peer::Healthy(peer.registry.clone())).collect();
        let second = Rig::synced(sim.clone(), with_peers(peers)).await;
        assert_eq!(warm_starts(&second, "failed"), 1.0);
        assert_eq!(second.watch_all("pods").await.state, second.truth(PODS).await);
    }
}

async fn slow_broken_and_absent_peers_are_skipped() {
    let sim = small_ring().sim();
    for number in 0..400 {
        sim.create(&pods(), pod(&format!("many-{number}"), "on")).unwrap();
    }
    churn(&sim, 0, 40);
    let first = started(&sim).await;
    let good = || Peer::Healthy(first.registry.clone());
    let bad =
        || [Peer::Absent, Peer::Breaking(first.registry.clone(), 700), Peer::Breaking(first.registry.clone(), 2000)];
    for mut peers in [bad().to_vec(), vec![Peer::Silent]] {
        let bad = peers.len();
        peers.push(good());
        // Each seed asks the peers in another order; in one of a few seeds the healthy peer comes
        // last.
        let mut skipped = 0;
        for seed in 0.. {
            let memory = Memory::of(peers.clone());
            let warm = Rig::synced(sim.clone(), Setup { seed: Some(seed), ..with_peers_in_memory(&memory) }).await;
            assert_eq!(warm_starts(&warm, "warm"), 1.0, "whichever peer is asked first");
            skipped = memory.dialled.lock().unwrap().len() - 1;
            if skipped == bad || seed == 50 {
                break;
            }
        }
        assert_eq!(skipped, bad, "the healthy peer never came last");
    }
    for (peers, result) in
        [(bad().to_vec(), "failed"), (vec![Peer::Silent, Peer::Silent, Peer::Silent], "timeout"), (vec![], "alone")]
    {
        let start_time = tokio::time::Instant::now();
        let cold = Rig::synced(sim.clone(), with_peers(peers)).await;
        assert_eq!(warm_starts(&cold, result), 1.0, "{result}");
        assert!(start_time.elapsed() <= Duration::from_secs(31), "{:?}", start_time.elapsed());
        assert_eq!(cold.watch_all("pods").await.state, cold.truth(PODS).await);
    }
}

async fn peers_that_cannot_be_reached_or_found_at_first_are_asked_again() {
    let sim = small_ring().sim();
    churn(&sim, 0, 30);
    let first = started(&sim).await;
    let late = Memory::of(vec![Peer::Late(first.registry.clone())]);
    let unknown = Memory::of(vec![Peer::Absent, Peer::Healthy(first.registry.clone())]);
    unknown.failing.store(2, Relaxed);
    for memory in [late, unknown] {
        let warm = Rig::synced(sim.clone(), with_peers_in_memory(&memory)).await;
        assert_eq!(warm_starts(&warm, "warm"), 1.0);
        assert_eq!(memory.dialled.lock().unwrap().last(), Some(&(memory.peers.len() - 1)));
    }
}

async fn changes_during_a_transfer_are_not_lost() {
    let sim = small_ring().sim();
    churn(&sim, 0, 30);
    let first = started(&sim).await;
    let second = Rig::start(sim.clone(), with_peers(vec![Peer::Healthy(first.registry.clone())]));
    let mut from = 30;
    let changing = async {
        loop {
            churn(&sim, from, 1);
            from += 1;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        () = changing => {}
        () = second.ready() => {}
    }
    assert_eq!(warm_starts(&second, "warm"), 1.0);
    let mut watch = second.watch_all("pods").await;
    watch.until(churn(&sim, from, 5)).await;
    assert_eq!(watch.state, second.truth(PODS).await);
    assert_eq!(object_lists(&second), Vec::<String>::new());
}

/// Writes a replica's certificate `of` one authority, its key, and the CA that it trusts. Returns
/// the flags that name them.
pub(crate) fn files(dir: &std::path::Path, name: &str, of: &Authority, trusts: &Authority) -> Vec<String> {
    files_of(dir, name, of.peer(), trusts)
}

fn files_of(dir: &std::path::Path, name: &str, issued: IssuedPem, trusts: &Authority) -> Vec<String> {
    let IssuedPem { certificate, key } = issued;
    let texts = [("cert", certificate), ("key", key), ("ca", trusts.ca_pem.clone())];
    let write = |(what, text): (&str, String)| {
        let path = dir.join(format!("{name}-{what}.pem"));
        std::fs::write(&path, text).unwrap();
        format!("--peer-{what}-file={}", path.display())
    };
    texts.into_iter().map(write).collect()
}

/// The sum of a metric's lines that contain `label`.
async fn sum(kubefan: &Kubefan, name: &str, label: &str) -> f64 {
    kubefan.metric_sum(name, label).await.expect("metrics are served")
}

async fn a_warm_start_between_processes_needs_their_certificates() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("peers").await;
    let collection = format!("/api/v1/namespaces/{namespace}/configmaps");
    let write = async |round: usize| {
        let stage = ["on", "off"][round % 2];
        let map = json!({ "metadata": { "name": format!("map-{round}"), "labels": { "stage": stage } } });
        version_of(&api.create(&collection, &map).await)
    };
    write(0).await;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let ours = Authority::new();
    let others = Authority::new();
    let log = dir.path().join("audit.log");
    let cache = ["--resource=configmaps".to_owned(), format!("--namespace={namespace}")];
    let start = async |args: &[&[String]]| {
        let args = [&[&cache[..]], args].concat().concat();
        Kubefan::start(&api, &args.iter().map(String::as_str).collect::<Vec<_>>()).await
    };
    let warm_starts = async |kubefan: &Kubefan, result: &str| {
        sum(kubefan, "kubefan_warm_starts_total", &format!("result=\"{result}")).await
    };
    let first = start(&[
        &files(dir.path(), "first", &ours, &ours),
        &[
            "--peer-listen=127.0.0.1:0".to_owned(),
            "tuning.peerAllowedNames=[kubefan.test, 127.0.0.1]".to_owned(),
            format!("--audit-log-path={}", log.display()),
        ],
    ])
    .await;
    let printed = first.process.log();
    let address = printed.lines().find_map(|line| line.strip_prefix("kubefan: serving peers on "));
    let peers_at = address.expect("the address is printed").trim().parse::<SocketAddr>().unwrap().port();
    let peers = [format!("--peers=127.0.0.1:{peers_at}")];
    let left_at = write(1).await;
    let mut last = left_at;
    for round in 2..12 {
        last = write(round).await;
    }
    let query = Query { labels: "stage=on", ..Query::default() };
    let target = Target { namespace: namespace.clone(), ..query.target("configmaps") };
    let resume = async |kubefan: &Kubefan| {
        let mut client = connect(kubefan.grpc_addr).await;
        let mut watch = Watch::start(&mut client, target.clone(), &left_at.to_string()).await.unwrap();
        watch.until(last).await;
        watch.assert_exact("from the ring");
        watch.events
    };
    let expected = resume(&first).await;
    assert_eq!(expected.len(), 5);

    let mut second = start(&[&files(dir.path(), "second", &ours, &ours), &peers]).await;
    // A replica tries once, and a busy apiserver may not confirm the copy in time.
    for _ in 0..2 {
        if warm_starts(&second, "unconfirmed").await + warm_starts(&second, "timeout").await == 0.0 {
            break;
        }
        second = start(&[&files(dir.path(), "second", &ours, &ours), &peers]).await;
    }
    assert_eq!(warm_starts(&second, "warm").await, 1.0, "{}", second.process.log());
    assert_equal("on the second", &resume(&second).await, &expected);
    // The transfer is on record, with the name in the certificate.
    let record = wait::until("the record of the transfer", wait::SOON, || async {
        let text = std::fs::read_to_string(&log).unwrap();
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let records = whole.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        records.into_iter().find(|record| {
            record["stage"] == "ResponseComplete" && record["requestURI"] == "/kubefan.v1alpha1.PeerService/Transfer"
        })
    })
    .await;
    assert_eq!((&record["user"]["username"], &record["verb"]), (&json!("kubefan"), &json!("list")), "{record}");
    assert_eq!((&record["objectRef"]["namespace"], &record["sourceIPs"]), (&json!(namespace), &json!(["127.0.0.1"])));
    let initial = async |kubefan: &Kubefan| sum(kubefan, "kubefan_relists_total", r#"reason="initial""#).await;
    let rings = sum(&second, "kubefan_resumes_total", r#"result="ring""#).await;
    assert_eq!((initial(&second).await, rings), (0.0, 1.0), "from the state and history of the first replica");

    let cold = start(&[&files(dir.path(), "cold", &ours, &ours), &peers, &["tuning.cold".to_owned()]]).await;
    // A list that the apiserver interrupts is begun again.
    assert!(initial(&cold).await >= 1.0 && warm_starts(&cold, "").await == 0.0);
    // A replica with a certificate of another CA, and one that trusts another CA.
    for (name, of, trusts) in [("stranger", &others, &ours), ("doubter", &ours, &others)] {
        let third = start(&[&files(dir.path(), name, of, trusts), &peers]).await;
        assert_eq!(warm_starts(&third, "failed").await, 1.0, "{name}");
        assert!(third.process.log().contains("no warm start from this peer"), "{}", third.process.log());
    }
    // And one with another name, by a certificate of the right CA.
    let before = sum(&first, "kubefan_peers_refused_total", "").await;
    let usages = [ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let other = ours.issue(CertificateParams::new(["other.test".to_owned()]).unwrap(), &usages);
    let misnamed = start(&[&files_of(dir.path(), "misnamed", other, &ours), &peers]).await;
    assert_eq!(warm_starts(&misnamed, "failed").await, 1.0);
    let refused = sum(&first, "kubefan_peers_refused_total", "").await;
    assert!(refused > before, "{}", first.process.log());
    let own = free_port();
    let own = [format!("--peers=127.0.0.1:{own}"), format!("--peer-listen=127.0.0.1:{own}")];
    let alone = start(&[&files(dir.path(), "alone", &ours, &ours), &own]).await;
    assert_eq!(warm_starts(&alone, "alone").await, 1.0, "it finds itself: {}", alone.process.log());
    assert_eq!(sum(&alone, "kubefan_peers_refused_total", "").await, 0.0, "it is no stranger to itself");

    // Without a client certificate, in plain text, and on the port for subscribers.
    let request = || TransferRequest { resource: "configmaps".into(), version: "v1".into(), ..Default::default() };
    let ca = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&ours.ca_pem)).domain_name("127.0.0.1");
    let endpoint = |scheme: &str, port: u16| Endpoint::from_shared(format!("{scheme}://127.0.0.1:{port}")).unwrap();
    let anonymous = endpoint("https", peers_at).tls_config(ca).unwrap().connect_lazy();
    let plain = endpoint("http", peers_at).connect_lazy();
    for channel in [anonymous, plain] {
        let refused = PeerServiceClient::new(channel).transfer(request()).await.unwrap_err();
        assert!(std::error::Error::source(&refused).is_some(), "the connection, not the service: {refused}");
    }
    let data = endpoint("http", first.grpc_addr.port()).connect_lazy();
    let refused = PeerServiceClient::new(data).transfer(request()).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
}
