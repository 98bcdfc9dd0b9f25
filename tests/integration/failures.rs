//! What happens to subscribers when upstream fails: they stay connected, inexact spans are marked,
//! and the final state is right.

use futures::future::join_all;
use kubefan_common::proto::v1alpha1::ResourceState;
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
        a_crd_can_be_deleted_and_created_again, a_changed_schema_causes_a_relist;
    apiserver: a_read_denied_by_the_apiserver_is_denied_to_subscribers;
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

async fn a_crd_can_be_deleted_and_created_again() {
    let api = ApiServer::start(Options::default()).await;
    let widgets = "/apis/kubefan.example.com/v1/namespaces/default/widgets";
    let widget =
        |name: &str| json!({ "apiVersion": "kubefan.example.com/v1", "kind": "Widget", "metadata": { "name": name } });
    let kubefan = Kubefan::start(&api, &["--resource", "widgets.kubefan.example.com"]).await;
    let mut client = connect(kubefan.grpc_addr).await;
    let target = || Query::default().target("widgets.kubefan.example.com");
    let status = Watch::start(&mut client, target(), "").await.err().unwrap();
    assert_eq!(status.code(), Code::NotFound, "{status}");

    for round in ["first", "second"] {
        api.create_crd("kubefan.example.com", "widgets", "Widget").await;
        let created = version_of(&api.create(widgets, &widget(round)).await);
        let mut watch = wait::until("the resource to be served", wait::SOON, || async {
            Watch::start(&mut connect(kubefan.grpc_addr).await, target(), "").await.ok()
        })
        .await;
        watch.until(created).await;
        assert_eq!(watch.state.keys().collect::<Vec<_>>(), [&format!("default/{round}")]);

        api.delete_crd("kubefan.example.com", "widgets").await;
        let status = tokio::time::timeout(wait::SOON, async {
            loop {
                match watch.step().await {
                    Ok(step) => assert!(step.is_some(), "a stream ends with a reason"),
                    Err(status) => return status,
                }
            }
        });
        let status = status.await.expect("the stream did not end");
        assert_eq!(status.code(), Code::NotFound);
        assert!(status.message().contains("widgets.kubefan.example.com"), "{status}");
        assert!(watch.state.is_empty(), "the deletes of its objects come before the end");
    }
}

async fn a_changed_schema_causes_a_relist() {
    let api = ApiServer::start(Options::default()).await;
    api.create_crd("kubefan.example.com", "gadgets", "Gadget").await;
    let gadgets = "/apis/kubefan.example.com/v1/namespaces/default/gadgets";
    let gadget = json!({ "apiVersion": "kubefan.example.com/v1", "kind": "Gadget", "metadata": { "name": "g" } });
    let created = api.create(gadgets, &gadget).await;
    let args = ["--resource", "gadgets.kubefan.example.com", "--schema-check-interval", "1s"];
    let kubefan = Kubefan::start(&api, &args).await;
    let mut client = connect(kubefan.grpc_addr).await;
    let mut watch = Watch::start(&mut client, Query::default().target("gadgets"), "").await.unwrap();
    watch.until(version_of(&created)).await;

    // A schema default changes what reads return, without a write to the object.
    let schema = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true,
        "properties": { "color": { "type": "string", "default": "blue" } } });
    let patch = json!([{ "op": "replace", "path": "/spec/versions/0/schema/openAPIV3Schema", "value": schema }]);
    api.json_patch("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/gadgets.kubefan.example.com", &patch).await;
    let defaulted = tokio::time::timeout(wait::SOON, async {
        while !watch.state["default/g"].contains(r#""color":"blue""#) {
            watch.step().await.unwrap();
        }
    });
    defaulted.await.expect("the new bytes did not arrive");
    assert!(!watch.gaps.is_empty(), "inside a marked gap");
}

async fn a_read_denied_by_the_apiserver_is_denied_to_subscribers() {
    let api = ApiServer::shared().await;
    let kubefan = Kubefan::spawn(&api.kubeconfig_for(crate::harness::apiserver::NOBODY), &["--resource", "pods"]).await;
    let mut client = connect(kubefan.grpc_addr).await;
    let status = wait::until("the apiserver's answer", wait::SOON, || {
        let mut client = client.clone();
        async move {
            let status = Watch::start(&mut client, Query::default().target("pods"), "").await.err()?;
            (status.code() == Code::PermissionDenied).then_some(status)
        }
    })
    .await;
    // Which account kubefan has is not for readers.
    assert!(status.message().contains("kubefan cannot") && !status.message().contains("nobody"), "{status}");
    let (code, ready) = kubefan.admin("/readyz?verbose").await.unwrap();
    assert!(!code.is_success() && ready.contains("pods forbidden"), "{ready}");
    let resources =
        client.list_resources(kubefan_common::proto::v1alpha1::ListResourcesRequest {}).await.unwrap().into_inner();
    assert_eq!(resources.resources[0].state(), ResourceState::Forbidden);
}
