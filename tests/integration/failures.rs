//! What happens to subscribers when upstream fails: they stay connected, inexact spans are marked,
//! and the final state is right.

use futures::future::join_all;
use serde_json::json;
use tonic::Code;

use crate::harness::{
    apiserver::{ApiServer, Options},
    kubefan::Kubefan,
    link::Link,
    objects::{pod, version_of},
    record::{Query, Recorded, Watch, assert_equal, connect, upstream_state, upstream_watch},
    tests, wait,
};

tests! {
    apiserver full: a_killed_apiserver_and_a_compacted_etcd_leave_a_marked_gap,
        a_crd_that_changes_goes_and_returns_is_followed;
}

const PODS: &str = "/api/v1/namespaces/default/pods";
const QUERIES: [Query; 3] = [
    Query { namespace: "", labels: "", fields: "" },
    Query { namespace: "default", labels: "stage=on", fields: "" },
    Query { namespace: "", labels: "stage!=on", fields: "spec.nodeName=" },
];

async fn stage(api: &ApiServer, name: &str, value: &str) -> u64 {
    let patch = json!({ "metadata": { "labels": { "stage": value } } });
    version_of(&api.patch(&format!("{PODS}/{name}"), &patch).await)
}

/// The events of the apiserver's own watch from a version on. A busy apiserver needs some of the
/// time to send them.
async fn upstream_after(api: &ApiServer, query: &Query, version: &str) -> Vec<Recorded> {
    upstream_watch(api, query, &format!("&resourceVersion={version}"), 10).await
}

async fn a_killed_apiserver_and_a_compacted_etcd_leave_a_marked_gap() {
    let api = ApiServer::start(Options::default()).await;
    for n in 0..20 {
        api.create(PODS, &pod(&format!("p{n}"))).await;
    }
    // A link that can be cut lies between kubefan and the apiserver, so that kubefan misses events.
    let link = Link::to(api.url().trim_start_matches("https://").parse().unwrap()).await;
    let text = std::fs::read_to_string(api.kubeconfig()).unwrap().replace(api.url(), &format!("https://{}", link.addr));
    let directory = tempfile::tempdir().unwrap();
    let kubeconfig = directory.path().join("kubeconfig");
    std::fs::write(&kubeconfig, text).unwrap();
    let kubefan = Kubefan::spawn(&kubeconfig, &["--resource", "pods"]).await;
    kubefan.ready().await;
    let mut watches = Vec::new();
    for query in &QUERIES {
        let mut watch = Watch::start(&mut connect(kubefan.grpc_addr).await, query.target("pods"), "").await.unwrap();
        watch.until_resumable().await;
        watches.push((query, watch));
    }
    let start = watches[0].1.resume_version.clone();
    let mut before = 0;
    for n in 0..20 {
        before = stage(&api, &format!("p{n}"), if n % 2 == 0 { "on" } else { "off" }).await;
    }
    for (_, watch) in &mut watches {
        watch.until(before).await;
    }
    let expected = join_all(watches.iter().map(|(query, _)| upstream_after(&api, query, &start))).await;

    link.cut();
    wait::until("kubefan to notice", wait::SOON, || async {
        let (_, ready) = kubefan.admin("/readyz?verbose").await?;
        ready.contains("pods stale").then_some(())
    })
    .await;
    assert!(
        kubefan.admin("/readyz").await.unwrap().0.is_success(),
        "it stays ready, because cached objects are still served"
    );
    let mut during = 0;
    for n in 0..10 {
        during = stage(&api, &format!("p{n}"), if n % 2 == 0 { "off" } else { "on" }).await;
    }
    api.delete(&format!("{PODS}/p11")).await;
    during = version_of(&api.create(PODS, &pod("q")).await).max(during);
    api.compact_etcd(during).await;
    api.kill9();
    api.restart().await;
    link.mend();
    for (_, watch) in &mut watches {
        watch.until(during).await;
    }
    let mut after = 0;
    for n in 12..20 {
        after = stage(&api, &format!("p{n}"), "on").await;
    }
    for (_, watch) in &mut watches {
        watch.until(after).await;
    }
    let gap_ends = watches.iter().map(|(query, watch)| (*query, &watch.gaps.last().unwrap().1));
    let exact = join_all(gap_ends.map(|(query, from)| upstream_after(&api, query, from))).await;
    for ((query, watch), (expected, exact)) in watches.iter().zip(expected.into_iter().zip(exact)) {
        let name = format!("{query:?}");
        assert_equal(&format!("{name}, before the kill"), &watch.events[..expected.len()], &expected);
        let known = watch.events.len().saturating_sub(exact.len());
        assert_equal(&format!("{name}, after the gap"), &watch.events[known..], &exact);
        assert_eq!(watch.state, upstream_state(&api, query).await, "{name}: the state");
    }
    assert!(watches.iter().all(|(_, watch)| watch.gaps.len() == 1), "each saw one marked gap");
}

async fn a_crd_that_changes_goes_and_returns_is_followed() {
    let api = ApiServer::shared().await;
    let group = format!("{}.example.com", api.unique("followed"));
    let (plural, resource) = ("widgets", format!("widgets.{group}"));
    let path = format!("/apis/{group}/v1/namespaces/default/{plural}");
    let crd = format!("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{resource}");
    let kubefan = Kubefan::start(&api, &["--resource", &resource, "--schema-check-interval", "1s"]).await;
    let mut client = connect(kubefan.grpc_addr).await;
    let target = || Query::default().target(&resource);
    let status = Watch::start(&mut client, target(), "").await.err().unwrap();
    assert_eq!(status.code(), Code::NotFound, "{status}");

    for round in ["first", "second"] {
        api.create_crd(&group, plural, "Widget").await;
        let widget =
            json!({ "apiVersion": format!("{group}/v1"), "kind": "Widget", "metadata": { "name": round } });
        let created = version_of(&api.create(&path, &widget).await);
        let mut watch = wait::until("the resource to be served", wait::SOON, || async {
            Watch::start(&mut connect(kubefan.grpc_addr).await, target(), "").await.ok()
        })
        .await;
        watch.until(created).await;
        let key = format!("default/{round}");
        assert_eq!(watch.state.keys().collect::<Vec<_>>(), [&key]);

        // A schema default changes what reads return, without a write to the object.
        let schema = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true,
            "properties": { "color": { "type": "string", "default": "blue" } } });
        let place = "/spec/versions/0/schema/openAPIV3Schema";
        api.json_patch(&crd, &json!([{ "op": "replace", "path": place, "value": schema }])).await;
        let defaulted = tokio::time::timeout(wait::SOON, async {
            while !watch.state[&key].contains(r#""color":"blue""#) {
                watch.step().await.unwrap();
            }
        });
        defaulted.await.expect("the new bytes did not arrive");
        assert!(!watch.gaps.is_empty(), "inside a marked gap");

        api.delete_crd(&group, plural).await;
        let status = tokio::time::timeout(wait::SOON, watch.end()).await.expect("the stream did not end");
        assert_eq!(status.code(), Code::NotFound);
        assert!(status.message().contains(&resource), "{status}");
        assert!(watch.state.is_empty(), "the deletes of its objects come before the end");
    }
}
