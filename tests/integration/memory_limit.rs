//! kubefan under a real limit of memory: clients that read nothing, many selectors and many
//! projections must not get it killed. Where the system lets a test make no control group, the test
//! says so and checks nothing.

use std::{io::Write, net::Ipv4Addr};

use kubefan_common::proto::v1alpha1::{Projection, ProjectionType, WatchRequest};
use serde_json::json;
use tokio::{
    io::AsyncWriteExt,
    net::{TcpSocket, TcpStream},
};

use crate::harness::{
    Test,
    kubefan::Kubefan,
    memory_cgroup::MemoryCgroup,
    record::{Query, Watch, connect},
    rig::{pod, pods, target},
    simulated::Simulated,
    tests, wait,
};

pub(crate) const TESTS: &[Test] = tests! {
    local: a_limit_of_memory_kills_nothing_however_clients_behave;
};

/// The limit. kubefan's own budget is four fifths of it. A debug build needs a fifth.
const LIMIT_BYTES: u64 = 192 << 20;
/// Clients that read nothing. Each lets the kernel hold about half a megabyte.
const UNREAD: usize = 200;
/// Watches with a selector and a projection of their own.
const VIEWS: usize = 300;
/// Objects, each of 8 KiB.
const OBJECTS: usize = 100;
/// How often each object changes.
const ROUNDS: usize = 60;

/// A watch of everything that is never read, with little room at the client.
async fn unread(port: u16) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4 << 10).unwrap();
    let mut client = socket.connect((Ipv4Addr::LOCALHOST, port).into()).await.unwrap();
    let request = "GET /api/v1/pods?watch=1&resourceVersion=0 HTTP/1.1\r\nHost: localhost\r\nUser-Agent: test\r\n\r\n";
    client.write_all(request.as_bytes()).await.unwrap();
    client
}

fn large(name: &str, round: usize) -> serde_json::Value {
    let mut pod = pod(name, &format!("s{}", round % 7));
    pod["metadata"]["annotations"] = json!({ "filling": format!("{round:08}").repeat(1 << 10) });
    pod
}

async fn a_limit_of_memory_kills_nothing_however_clients_behave() {
    let Some(group) = MemoryCgroup::with_limit(LIMIT_BYTES) else {
        // Bypasses the capture of output, because a skipped test must be visible.
        let _ = writeln!(std::io::stderr(), "the limit of memory is not tested: no control group can be made here");
        return;
    };
    let simulated = Simulated::start().await;
    let names: Vec<String> = (0..OBJECTS).map(|number| format!("large-{number}")).collect();
    for name in &names {
        simulated.sim.create(&pods(), large(name, 0)).unwrap();
    }
    let args = ["--resource=pods"];
    let mut kubefan = Kubefan::spawn_after(&simulated.kubeconfig(), &group.enter(), &args).await;
    kubefan.ready().await;
    assert!(kubefan.process.log().contains("charged=true"), "{}", kubefan.process.log());

    let mut unread_clients = Vec::new();
    for _ in 0..UNREAD {
        unread_clients.push(unread(kubefan.grpc_addr.port()).await);
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
            ..WatchRequest::default()
        };
        // Refused while memory is short; those that are open stay.
        if let Ok(stream) = client.watch(request).await {
            views.push(stream);
        }
    }
    for round in 1..=ROUNDS {
        for name in &names {
            simulated.sim.update(&pods(), large(name, round)).unwrap();
        }
        wait::until("an answer about liveness", wait::SOON, || kubefan.admin("/livez")).await;
        assert_eq!((kubefan.process.exited(), group.killed()), (None, 0), "{}", kubefan.process.log());
    }
    drop((unread_clients, views));
    // A client that reads is served.
    let mut watch = wait::until("a watch", wait::SOON, || async {
        Watch::start(&mut connect(kubefan.grpc_addr).await, target("pods"), "").await.ok()
    })
    .await;
    watch.until_resumable().await;
    watch.until(simulated.stage("a", "last")).await;
    assert_eq!((kubefan.process.exited(), group.killed()), (None, 0), "{}", kubefan.process.log());
}
