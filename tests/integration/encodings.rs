//! All encodings give the same events. Against a real apiserver and across a broken connection, the
//! client library returns the same events with the same bytes, whether objects are sent as JSON, in
//! compressed snapshots, or as deltas.

use kubefan_client::{Client, ClientOptions, Encoding, Parts, Projection, WatchItem, WatchOptions, WatchStream};
use kubefan_common::proto::v1alpha1::{Event, Target};
use serde_json::json;

use crate::harness::{
    apiserver::ApiServer,
    kubefan::Kubefan,
    link::Link,
    objects::{pod, version_of},
    tests,
};

tests! {
    apiserver: every_encoding_gives_the_same_events_across_a_break,
        an_only_changes_watch_gets_only_changes_of_the_projection;
}

/// One subscriber and the events that it received.
struct Subscriber {
    watch: WatchStream,
    received: Vec<(i32, String, String, String)>,
}

impl Subscriber {
    async fn start(link: &Link, target: &Target, options: WatchOptions) -> Self {
        let client = Client::connect(&link.addr.to_string(), &ClientOptions::default()).await.unwrap();
        Self { watch: client.watch(target.clone(), options), received: Vec::new() }
    }

    /// Reads until `done` accepts an item.
    async fn until(&mut self, done: impl Fn(&WatchItem) -> bool) {
        loop {
            let item = self.watch.next().await.expect("the watch has ended").unwrap();
            let is_done = done(&item);
            if let WatchItem::Event(Event { r#type, name, resource_version, object, delta, .. }) = item {
                assert!(delta.is_none(), "the client returns whole objects");
                let object = String::from_utf8(object.to_vec()).unwrap();
                self.received.push((r#type, name, resource_version, object));
            }
            if is_done {
                return;
            }
        }
    }

    async fn until_version(&mut self, version: u64) {
        let version = version.to_string();
        self.until(|item| matches!(item, WatchItem::Event(event) if event.resource_version == version)).await;
    }
}

async fn every_encoding_gives_the_same_events_across_a_break() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("encodings").await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    for name in ["a", "b", "c", "d"] {
        api.create(&pods, &pod(name)).await;
    }
    let label = async |name: &str, stage: &str, note: usize| {
        let patch =
            json!({ "metadata": { "labels": { "stage": stage }, "annotations": { "note": note.to_string() } } });
        version_of(&api.patch(&format!("{pods}/{name}"), &patch).await)
    };
    label("a", "on", 0).await;
    let kubefan = Kubefan::start(&api, &["--resource", "pods"]).await;
    let link = Link::to(kubefan.grpc_addr).await;
    for labels in ["", "stage=on"] {
        let target = Target {
            resource: "pods".into(),
            namespace: namespace.clone(),
            label_selector: labels.into(),
            ..Target::default()
        };
        let mut subscribers = Vec::new();
        for encoding in [Encoding::Json, Encoding::Zstd, Encoding::ZstdDelta] {
            let projection = Projection { drop_managed_fields: true, ..Projection::default() };
            let options = WatchOptions { projection, encoding, ..WatchOptions::default() };
            let mut subscriber = Subscriber::start(&link, &target, options).await;
            subscriber.until(|item| matches!(item, WatchItem::SnapshotEnd { .. })).await;
            subscribers.push(subscriber);
        }
        let mut last = 0;
        for round in 0..12 {
            label("b", if round % 3 == 0 { "off" } else { "on" }, round).await;
            label("a", "on", round).await;
            last = label("c", if round % 2 == 0 { "on" } else { "other" }, round).await;
            if round == 5 {
                // The last event before the break is one that all subscribers get.
                last = label("a", "on", 100).await;
                for subscriber in &mut subscribers {
                    subscriber.until_version(last).await;
                }
                link.cut();
                for subscriber in &mut subscribers {
                    subscriber.until(|item| matches!(item, WatchItem::Disconnected { .. })).await;
                }
            }
            if round == 8 {
                link.mend();
            }
        }
        api.delete(&format!("{pods}/c")).await;
        api.create(&pods, &pod("c")).await;
        last = last.max(label("a", "on", 1000).await);
        for subscriber in &mut subscribers {
            subscriber.until_version(last).await;
        }
        let [json, zstd, deltas] = subscribers.as_slice() else { unreachable!() };
        assert!(json.received.len() > 24, "{}", json.received.len());
        assert_eq!(zstd.received, json.received, "{labels}");
        assert_eq!(deltas.received, json.received, "{labels}");
    }
}

async fn an_only_changes_watch_gets_only_changes_of_the_projection() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("only-changes").await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    api.create(&pods, &pod("a")).await;
    let kubefan = Kubefan::start(&api, &["--resource", "pods"]).await;
    let link = Link::to(kubefan.grpc_addr).await;
    let target = Target { resource: "pods".into(), namespace: namespace.clone(), ..Target::default() };
    let projection = Projection { parts: Parts::Fields(vec!["metadata.labels".to_owned()]), ..Projection::default() };
    let options = WatchOptions { projection, only_changes: true, ..WatchOptions::default() };
    let mut subscriber = Subscriber::start(&link, &target, options).await;
    subscriber.until(|item| matches!(item, WatchItem::SnapshotEnd { .. })).await;
    subscriber.received.clear();
    let patch = async |metadata| version_of(&api.patch(&format!("{pods}/a"), &json!({ "metadata": metadata })).await);
    patch(json!({ "annotations": { "note": "1" } })).await;
    let first = patch(json!({ "labels": { "stage": "on" } })).await;
    patch(json!({ "annotations": { "note": "2" } })).await;
    let second = patch(json!({ "labels": { "stage": "off" } })).await;
    subscriber.until_version(second).await;
    let expected = [(first, "on"), (second, "off")].map(|(version, stage)| {
        let object = format!(r#"{{"metadata":{{"labels":{{"app":"a","stage":"{stage}"}}}}}}"#);
        (2, "a".to_owned(), version.to_string(), object)
    });
    assert_eq!(subscriber.received, expected);
}
