//! Resuming: a subscriber that returns with a resume version gets exactly the events that it
//! missed, or a refusal if the version cannot be served.

use kubefan_client::Client;
use serde_json::json;
use tonic::Code;
use tonic_types::StatusExt;

use crate::harness::{
    apiserver::ApiServer,
    kubefan::Kubefan,
    objects::{pod, version_of},
    record::{Query, Watch, assert_equal, connect},
    tests,
};

tests! {
    apiserver: a_returning_subscriber_gets_exactly_the_missed_events, a_resume_below_the_ring_gets_each_change_once,
        a_version_beyond_the_cluster_is_refused, a_watch_can_start_at_the_version_of_a_list;
}

async fn label(api: &ApiServer, path: &str, value: &str) -> u64 {
    version_of(&api.patch(path, &json!({ "metadata": { "labels": { "stage": value } } })).await)
}

async fn a_returning_subscriber_gets_exactly_the_missed_events() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("resume").await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    for name in ["a", "b", "c"] {
        api.create(&pods, &pod(name)).await;
    }
    let kubefan = Kubefan::start(&api, &["--resource", "pods"]).await;
    let mut client = connect(kubefan.grpc_addr).await;
    let query = Query { labels: "stage=on", ..Query::default() };
    let target = || kubefan_common::proto::v1alpha1::Target { namespace: namespace.clone(), ..query.target("pods") };

    let mut unbroken = Watch::start(&mut client, target(), "").await.unwrap();
    let mut leaver = Watch::start(&mut client, target(), "").await.unwrap();
    // A watch is open before its snapshot is taken, and the first event must be after both.
    unbroken.until_resumable().await;
    leaver.until_resumable().await;
    let first = label(&api, &format!("{pods}/a"), "on").await;
    unbroken.until(first).await;
    leaver.until(first).await;
    let left_at = leaver.resume_version.clone();
    drop(leaver);

    label(&api, &format!("{pods}/b"), "on").await;
    label(&api, &format!("{pods}/a"), "off").await;
    label(&api, &format!("{pods}/a"), "off-again").await;
    api.delete(&format!("{pods}/b")).await;
    let last = label(&api, &format!("{pods}/c"), "on").await;
    unbroken.until(last).await;

    let mut returned = Watch::start(&mut client, target(), &left_at).await.unwrap();
    returned.until(last).await;
    assert!(returned.snapshot.is_empty(), "no snapshot is sent again");
    assert_equal("after the return", &returned.events, &unbroken.events[1..]);
    assert!(returned.events.len() >= 4 && returned.left == 1, "{:?}", returned.events);
}

async fn a_resume_below_the_ring_gets_each_change_once() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("ring").await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    let created = version_of(&api.create(&pods, &pod("a")).await);
    let kubefan =
        Kubefan::start(&api, &["--resource", "pods", "--namespace", &namespace, "--ring-events-max", "3"]).await;
    let mut client = connect(kubefan.grpc_addr).await;
    let target =
        || kubefan_common::proto::v1alpha1::Target { namespace: namespace.clone(), ..Query::default().target("pods") };
    let mut watch = Watch::start(&mut client, target(), "").await.unwrap();
    watch.until(created).await;
    let old = watch.resume_version.clone();
    let mut versions = Vec::new();
    for stage in ["1", "2", "3", "4", "5"] {
        versions.push(label(&api, &format!("{pods}/a"), stage).await);
    }
    watch.until(versions[4]).await;

    let mut caught_up = Watch::start(&mut client, target(), &old).await.unwrap();
    caught_up.until(versions[4]).await;
    let [(from, to)] = caught_up.catch_ups.as_slice() else { panic!("one catch-up: {:?}", caught_up.catch_ups) };
    // A bookmark may have moved the cache on.
    let is_later = to.parse::<u64>().unwrap() >= versions[4];
    assert!(*from == old && is_later, "each change once, and marked: {from} to {to}");
    assert!(caught_up.events.is_empty() && caught_up.snapshot.is_empty());
    assert_eq!(caught_up.state, watch.state);

    let mut in_ring = Watch::start(&mut client, target(), &versions[1].to_string()).await.unwrap();
    in_ring.until(versions[4]).await;
    assert_eq!((in_ring.events.len(), in_ring.catch_ups.len()), (3, 0));
}

async fn a_version_beyond_the_cluster_is_refused() {
    let api = ApiServer::shared().await;
    let kubefan = Kubefan::start(&api, &["--resource", "nodes"]).await;
    let mut client = connect(kubefan.grpc_addr).await;
    let status = Watch::start(&mut client, Query::default().target("nodes"), "999999999").await.err().unwrap();
    assert_eq!(status.code(), Code::OutOfRange);
    assert!(
        status.message().starts_with("version 999999999 belongs to another history: the cluster has reached "),
        "{status}"
    );
    assert_eq!(status.get_details_error_info().unwrap().reason, "HISTORY_REWRITTEN");
}

async fn a_watch_can_start_at_the_version_of_a_list() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("list").await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    api.create(&pods, &pod("a")).await;
    let second = version_of(&api.create(&pods, &pod("b")).await);
    let kubefan = Kubefan::start(&api, &["--resource", "pods"]).await;
    let client = Client::connect(&kubefan.grpc_addr.to_string(), &kubefan_client::ClientOptions::default()).await;
    let client = client.unwrap();
    let target = kubefan_common::proto::v1alpha1::Target {
        namespace: namespace.clone(),
        label_selector: "app=b".into(),
        ..Query::default().target("po")
    };
    let list = client.list(target.clone(), second.to_string().as_str()).await.unwrap();
    let direct = api.get_json(&format!("{pods}/b")).await;
    assert_eq!(list.objects.len(), 1);
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&list.objects[0].object).unwrap(), direct);
    let changed = label(&api, &format!("{pods}/b"), "on").await;
    let mut grpc = connect(kubefan.grpc_addr).await;
    let mut watch = Watch::start(&mut grpc, target, &list.resource_version).await.unwrap();
    watch.until(changed).await;
    assert_eq!((watch.events.len(), watch.events[0].kind), (1, "MODIFIED"));
}
