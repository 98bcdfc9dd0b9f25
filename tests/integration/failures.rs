//! A real apiserver that fails, and a resource of one that changes, goes and returns: subscribers
//! stay connected, inexact spans are marked, and the final state is right.

use std::collections::BTreeMap;

use futures::future::join_all;
use serde_json::{Value, json};
use tonic::Code;

use crate::harness::{
    apiserver::{ApiServer, Options},
    kubefan::Kubefan,
    link::Link,
    objects::{pod, version_of},
    record::{Query, Recorded, Versions, Watch, assert_equal, connect, place, query, upstream_initial, upstream_watch},
    tests, wait,
};

tests! {
    apiserver slow_faults: a_killed_apiserver_and_a_compacted_etcd_leave_a_marked_gap,
        a_crd_that_changes_goes_and_returns_is_followed;
}

const PODS: &str = "/api/v1/namespaces/default/pods";
const QUERIES: [Query; 3] =
    [query("", "", ""), query("default", "stage=on", ""), query("", "stage!=on", "spec.nodeName=")];

async fn stage(api: &ApiServer, name: &str, value: &str) -> u64 {
    let patch = json!({ "metadata": { "labels": { "stage": value } } });
    version_of(&api.patch(&format!("{PODS}/{name}"), &patch).await)
}

/// The events of the apiserver's own watch from a version on.
async fn upstream_after(api: &ApiServer, query: &Query, version: &str) -> Vec<Recorded> {
    let (start, _) = place(version);
    let end = version_of(&api.get_json(&format!("{PODS}?limit=1")).await);
    upstream_watch(api, query, Versions { start, end }, 10).await
}

/// The apiserver's objects by key, in the bytes that a watch sends.
async fn upstream_state(api: &ApiServer, query: &Query) -> BTreeMap<String, String> {
    let key = |object: &str| {
        let metadata = serde_json::from_str::<Value>(object).expect("JSON")["metadata"].take();
        let text = |field: &str| metadata[field].as_str().unwrap_or_default().to_owned();
        format!("{}/{}", text("namespace"), text("name"))
    };
    let events = upstream_initial(api, query).await;
    events.into_iter().map(|event| (key(&event.object), event.object)).collect()
}

async fn a_killed_apiserver_and_a_compacted_etcd_leave_a_marked_gap() {
    let api = ApiServer::start(Options::default()).await;
    for n in 0..20 {
        api.create(PODS, &pod(&format!("p{n}"))).await;
    }
    // The link is cut so that kubefan misses events.
    let link = Link::to(api.addr()).await;
    let kubeconfig = api.kubeconfig_to(&format!("https://{}", link.addr));
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
    assert!(expected.iter().all(|events| events.len() >= 10), "each selector has events");

    link.cut();
    wait::until("kubefan to notice", wait::SOON, || async {
        let (_, ready) = kubefan.admin("/readyz?verbose").await?;
        ready.contains("pods stale").then_some(())
    })
    .await;
    let ready = kubefan.admin("/readyz").await.unwrap().0.is_success();
    assert!(ready, "it stays ready, because cached objects are still served");
    for n in 0..10 {
        stage(&api, &format!("p{n}"), if n % 2 == 0 { "off" } else { "on" }).await;
    }
    api.delete(&format!("{PODS}/p11")).await;
    let during = version_of(&api.create(PODS, &pod("q")).await);
    api.compact_etcd(during).await;
    api.kill9();
    api.restart().await;
    link.mend();
    for (_, watch) in &mut watches {
        watch.until(during).await;
    }
    let mut after = 0;
    for n in 12..20 {
        after = stage(&api, &format!("p{n}"), if n % 2 == 0 { "off" } else { "on" }).await;
    }
    for (_, watch) in &mut watches {
        watch.until(after).await;
        assert_eq!(watch.gaps.len(), 1, "each saw one marked gap");
    }
    let gap_ends = watches.iter().map(|(query, watch)| (*query, &watch.gaps[0].1));
    let exact = join_all(gap_ends.map(|(query, from)| upstream_after(&api, query, from))).await;
    for ((query, watch), (expected, exact)) in watches.iter().zip(expected.into_iter().zip(exact)) {
        let name = format!("{query:?}");
        assert!(exact.len() >= 4, "{name}: events after the gap");
        let (got_before, got_after) = watch.events.split_at(expected.len().min(watch.events.len()));
        assert_equal(&format!("{name}, before the kill"), got_before, &expected);
        assert_equal(&format!("{name}, after the gap"), got_after, &exact);
        assert_eq!(watch.state, upstream_state(&api, query).await, "{name}: the state");
    }
}

async fn a_crd_that_changes_goes_and_returns_is_followed() {
    let api = ApiServer::shared().await;
    let group = format!("{}.example.com", api.unique("followed"));
    let plural = "widgets";
    let resource = format!("widgets.{group}");
    let path = format!("/apis/{group}/v1/namespaces/default/{plural}");
    let crd = format!("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{resource}");
    let kubefan = Kubefan::start(&api, &["--resource", &resource, "tuning.schemaCheckInterval=1s"]).await;
    let mut client = connect(kubefan.grpc_addr).await;
    let target = || Query::default().target(&resource);
    let status = Watch::start(&mut client, target(), "").await.err().unwrap();
    assert_eq!(status.code(), Code::NotFound, "{status}");

    for round in ["first", "second"] {
        api.create_crd(&group, plural, "Widget").await;
        let widget = json!({ "apiVersion": format!("{group}/v1"), "kind": "Widget", "metadata": { "name": round } });
        let created = version_of(&api.create(&path, &widget).await);
        let mut watch = wait::until("the resource to be served", wait::SOON, || async {
            Watch::start(&mut connect(kubefan.grpc_addr).await, target(), "").await.ok()
        })
        .await;
        watch.until(created).await;
        let key = format!("default/{round}");
        assert_eq!(watch.state.keys().collect::<Vec<_>>(), [&key]);

        // A schema default changes the results of reads, without a write to the object.
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
