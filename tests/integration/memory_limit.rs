//! kubefan under a real limit of memory: clients that read nothing, wide gaps, many selectors and
//! many projections must not get it killed. The load passes the limit if nothing is done about it.
//! If the system lets a test make no control group, the test says so and checks nothing.

use std::net::Ipv4Addr;

use base64::{Engine, engine::general_purpose::STANDARD};
use kubefan_common::proto::v1alpha1::{Projection, ProjectionType, WatchRequest};
use rand::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;
use serde_json::json;
use tokio::{
    io::AsyncWriteExt,
    net::{TcpSocket, TcpStream},
};

use crate::harness::{
    kubefan::Kubefan,
    memory_cgroup::MemoryCgroup,
    record::{Query, Watch, connect},
    rig::{pod, pods, target},
    simulated::Simulated,
    skip, tests, wait,
};

tests! {
    local slow_faults: a_limit_of_memory_kills_nothing_however_clients_behave;
}

/// The limit. kubefan's own budget is four fifths of it. A debug build needs a third.
const LIMIT_BYTES: u64 = 128 << 20;
/// Watches over HTTP/1.1 that nothing is read of. Each lets the kernel hold about half a megabyte.
const UNREAD: usize = 100;
/// Watches with a selector and a projection of their own, which read nothing.
const VIEWS: usize = 200;
/// Objects, each of [`FILLING_BYTES`].
const OBJECTS: usize = 64;
const FILLING_BYTES: usize = 32 << 10;
/// Number of changes of each object. After each of them a client begins to list all objects and
/// reads nothing, so it pins a state of 2 MiB: together more than the limit.
const ROUNDS: usize = 80;
/// Rounds after which upstream is listed again, and the difference is a gap with every object.
const ROUNDS_PER_GAP: usize = 20;
/// The memory pressure step at which fewer snapshots are admitted.
const STEP_NARROWED: f64 = 3.0;

/// Sends a request whose answer is never read, with little room at the client.
pub(crate) async fn unread(port: u16, path: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4 << 10).unwrap();
    let mut client = socket.connect((Ipv4Addr::LOCALHOST, port).into()).await.expect("kubefan lives");
    let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nUser-Agent: test\r\n\r\n");
    client.write_all(request.as_bytes()).await.unwrap();
    client
}

/// An object that no compression makes much smaller.
fn large(name: &str, round: usize) -> serde_json::Value {
    let mut pod = pod(name, &format!("s{}", round % 7));
    let seed = name.bytes().fold(round as u64, |seed, byte| seed * 31 + u64::from(byte));
    let mut bytes = vec![0; FILLING_BYTES / 4 * 3];
    Pcg64Mcg::seed_from_u64(seed).fill_bytes(&mut bytes);
    pod["metadata"]["annotations"] = json!({ "filling": STANDARD.encode(bytes) });
    pod
}

async fn a_limit_of_memory_kills_nothing_however_clients_behave() {
    let Some(group) = MemoryCgroup::with_limit(LIMIT_BYTES) else {
        skip("no control group can be made here");
    };
    let simulated = Simulated::start().await;
    let names: Vec<String> = (0..OBJECTS).map(|number| format!("large-{number}")).collect();
    for name in &names {
        simulated.sim.create(&pods(), large(name, 0)).unwrap();
    }
    let args = ["--resource=pods", "tuning.snapshotStallTimeout=1h"];
    // The released binary has an allocator that gives free memory back. The one of a debug build
    // does so with large blocks.
    let shell = format!("{} && export MALLOC_MMAP_THRESHOLD_=16384", group.enter());
    let mut kubefan = Kubefan::spawn_after(&simulated.kubeconfig(), &shell, &args).await;
    kubefan.ready().await;
    assert!(kubefan.process.log().contains("charged=true"), "{}", kubefan.process.log());

    let port = kubefan.grpc_addr.port();
    // Watches without an initial state, which would need the permits of the lists below.
    let version = simulated.sim.revision();
    let mut unread_clients = Vec::new();
    for _ in 0..UNREAD {
        unread_clients.push(unread(port, &format!("/api/v1/pods?watch=1&resourceVersion={version}")).await);
    }
    let mut client = connect(kubefan.grpc_addr).await;
    let mut views = Vec::new();
    for number in 0..VIEWS {
        let selector = format!("stage notin (s{},x{number})", number % 7);
        let query = Query { labels: Box::leak(selector.into_boxed_str()), ..Query::default() };
        let path = format!("metadata.annotations.filling,metadata.labels.l{number}");
        let projection = Projection {
            r#type: ProjectionType::FieldMask.into(),
            paths: path.split(',').map(str::to_owned).collect(),
            ..Projection::default()
        };
        let request = WatchRequest {
            target: Some(query.target("pods")),
            projection: Some(projection),
            resource_version: version.to_string(),
            ..WatchRequest::default()
        };
        // Refused while memory is short; those that are open stay.
        if let Ok(stream) = client.watch(request).await {
            views.push(stream);
        }
    }
    let mut step_max = 0.0_f64;
    for round in 1..=ROUNDS {
        let is_gap = round % ROUNDS_PER_GAP == 0;
        if is_gap {
            simulated.sim.drop_connections();
        }
        for name in &names {
            simulated.sim.update(&pods(), large(name, round)).unwrap();
        }
        if is_gap {
            simulated.sim.compact();
        }
        unread_clients.push(unread(port, "/api/v1/pods?resourceVersion=0").await);
        wait::until("an answer about liveness", wait::SOON, || kubefan.admin("/livez")).await;
        step_max = step_max.max(kubefan.metric("kubefan_memory_pressure_step").await.unwrap_or(0.0));
        assert_eq!((kubefan.process.exited(), group.killed()), (None, 0), "{}", kubefan.process.log());
    }
    assert!(step_max >= STEP_NARROWED, "the load does not reach the limit: step {step_max}");
    drop(unread_clients);
    drop(views);
    // A client that reads is served. It starts over if its stream ends: after the last gap there
    // may be no memory for the history that it needs.
    let last = simulated.stage("a", "last");
    wait::until("a watch", wait::SOON, || async {
        let mut watch = Watch::start(&mut connect(kubefan.grpc_addr).await, target("pods"), "").await.ok()?;
        while watch.reached() < last {
            watch.step().await.ok()??;
        }
        Some(())
    })
    .await;
    assert_eq!((kubefan.process.exited(), group.killed()), (None, 0), "{}", kubefan.process.log());
}
