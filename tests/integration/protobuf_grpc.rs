//! Protobuf over gRPC. Lists, gets and watches have the bytes that the apiserver itself sends as
//! protobuf, through changes, deletes, resumes and a marked gap.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};

use bytes::{Buf, Bytes};
use kubefan_client::{
    Client, ClientOptions, Encoding, ListWatch, Object, OnExpired, Parts, Projection, RawProtobuf, ReadOptions,
    SharedInformer, WatchItem, WatchOptions, WatchStream,
};
use kubefan_common::proto::v1alpha1::{DeleteReason, Event, EventType, Target};
use kubefan_model::{Media, protobuf};
use reqwest::header::ACCEPT;
use serde_json::{Value, json};

use crate::harness::{
    apiserver::{ApiServer, Options},
    kubefan::Kubefan,
    link::Link,
    objects::{pod, version_of},
    record::place,
    tests, wait,
};

tests! {
    apiserver slow_faults: protobuf_over_grpc_has_the_apiservers_own_bytes;
}

const PODS: &str = "/api/v1/namespaces/default/pods";
const NODES: &str = "/api/v1/nodes";
const PARTIAL: &str = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";

async fn upstream(api: &ApiServer, path: &str, accept: &str) -> Bytes {
    let request = api.client().get(format!("{}{path}", api.url())).header(ACCEPT, accept);
    let response = request.send().await.unwrap();
    assert!(response.status().is_success(), "{path}: {}", response.status());
    response.bytes().await.unwrap()
}

/// The objects of a list of the apiserver by name, each in its envelope.
async fn upstream_list(api: &ApiServer, path: &str) -> BTreeMap<String, Bytes> {
    let body = upstream(api, path, Media::Protobuf.accept()).await;
    let opened = protobuf::open(&body).unwrap();
    let kind = opened.kind.trim_end_matches("List");
    let item = |item: &&[u8]| (name_of(item), protobuf::enveloped("v1", kind, item));
    protobuf::read_list(opened.message).unwrap().items.iter().map(item).collect()
}

/// The name in an object's message.
fn name_of(message: &[u8]) -> String {
    metadata_of(message, protobuf::META_NAME)
}

/// A text in the metadata of an object's message.
fn metadata_of(message: &[u8], field: u32) -> String {
    let metadata = protobuf::wire::bytes_field(message, protobuf::METADATA).unwrap().unwrap();
    let text = protobuf::wire::bytes_field(metadata, field).unwrap().unwrap();
    String::from_utf8(text.to_vec()).unwrap()
}

/// The events of the apiserver after a version, at least up to `end`, a version of this path. A
/// watch ends with a bookmark; where the apiserver gets too little CPU, before it has sent all.
async fn upstream_watch(api: &ApiServer, path: &str, labels: &str, start: &str, end: u64) -> Vec<(String, Bytes)> {
    let mut events = Vec::new();
    let (mut reached, _) = place(start);
    while reached < end {
        let query = format!("watch=1&timeoutSeconds=3&allowWatchBookmarks=1&resourceVersion={reached}");
        let path = format!("{path}?{query}&labelSelector={labels}");
        let mut body = upstream(api, &path, Media::Protobuf.watch_accept()).await;
        while body.has_remaining() {
            let len = body.get_u32() as usize;
            let frame = body.split_to(len);
            let event = protobuf::read_watch_event(&frame).unwrap();
            let message = protobuf::open(event.object).unwrap().message;
            reached = metadata_of(message, protobuf::META_RESOURCE_VERSION).parse().unwrap();
            if event.kind != "BOOKMARK" {
                events.push((event.kind.to_owned(), Bytes::copy_from_slice(event.object)));
            }
        }
    }
    events
}

/// A watch of protobuf, with its messages so far.
struct Subscriber {
    watch: WatchStream,
    path: &'static str,
    labels: &'static str,
    /// The events outside of snapshots, as the apiserver names them.
    events: Vec<(String, Bytes)>,
    /// The last bytes of each object by its name.
    state: BTreeMap<String, Bytes>,
    /// The version and the number of events at each end of a gap.
    gaps: Vec<(String, usize)>,
    /// The number of deletes without a final state.
    unknown: usize,
}

impl Subscriber {
    async fn start(address: SocketAddr, path: &'static str, labels: &'static str, version: &str) -> Self {
        let target = Target { label_selector: labels.into(), ..target(path) };
        let options = WatchOptions {
            resource_version: version.into(),
            encoding: Encoding::Protobuf,
            on_expired: OnExpired::Fail,
            bookmark_interval: Some(Duration::from_secs(1)),
            ..WatchOptions::default()
        };
        let watch = client(address).await.watch(target, options);
        Self { watch, path, labels, events: Vec::new(), state: BTreeMap::new(), gaps: Vec::new(), unknown: 0 }
    }

    /// Reads until the subscriber has enough, and on to the end of a snapshot.
    async fn until(&mut self, is_enough: impl Fn(&Self) -> bool) {
        let mut in_snapshot = false;
        while in_snapshot || !is_enough(self) {
            match self.watch.next().await.expect("the watch has ended").unwrap() {
                WatchItem::SnapshotBegin { .. } => in_snapshot = true,
                WatchItem::SnapshotEnd { .. } => in_snapshot = false,
                WatchItem::GapEnd => self.gaps.push((self.watch.resume_version().to_owned(), self.events.len())),
                WatchItem::Event(event) => self.event(event, in_snapshot),
                _ => {}
            }
        }
    }

    fn event(&mut self, event: Event, in_snapshot: bool) {
        let opened = protobuf::open(&event.object).unwrap();
        assert_eq!(name_of(opened.message), event.name);
        let kind = match event.r#type() {
            EventType::Added => "ADDED",
            EventType::Modified => "MODIFIED",
            _ => "DELETED",
        };
        if event.delete_reason() == DeleteReason::FinalStateUnknown {
            assert_eq!(self.state.get(&event.name), Some(&event.object), "the last state that was seen");
            self.unknown += 1;
        }
        match event.r#type() {
            EventType::Deleted => self.state.remove(&event.name),
            _ => self.state.insert(event.name, event.object.clone()),
        };
        if !in_snapshot {
            self.events.push((kind.to_owned(), event.object));
        }
    }
}

async fn client(address: SocketAddr) -> Client {
    Client::connect(&address.to_string(), &ClientOptions::default()).await.unwrap()
}

fn target(path: &str) -> Target {
    let resource = path.rsplit('/').next().unwrap().to_owned();
    let namespace = if path == PODS { "default".to_owned() } else { String::new() };
    Target { resource, namespace, ..Target::default() }
}

/// Lists and gets through kubefan, not older than a version, compared with the apiserver's.
async fn assert_reads_are_equal(api: &ApiServer, client: &Client, version: u64) {
    for path in [PODS, NODES] {
        let read = ReadOptions {
            resource_version: version.to_string(),
            encoding: Encoding::Protobuf,
            ..ReadOptions::default()
        };
        let listed = client.list(target(path), read.clone()).await.unwrap();
        let listed: BTreeMap<_, _> = listed.objects.into_iter().map(|it| (it.name, it.object)).collect();
        assert_eq!(listed, upstream_list(api, path).await, "a list of {path}");
        for name in listed.keys().take(3) {
            let target = Target { name: name.clone(), ..target(path) };
            let whole = client.get(target.clone(), read.clone()).await.unwrap().object.unwrap();
            let own = format!("{path}/{name}");
            assert_eq!(whole.object, upstream(api, &own, Media::Protobuf.accept()).await, "a get of {own}");
            let projection = Projection { parts: Parts::Metadata, ..Projection::default() };
            let metadata = client.get(target, ReadOptions { projection, ..read.clone() }).await.unwrap();
            assert_eq!(metadata.object.unwrap().object, upstream(api, &own, PARTIAL).await, "metadata of {own}");
        }
    }
}

async fn change(api: &ApiServer, path: &str, name: &str, stage: &str) -> u64 {
    let patch = json!({ "metadata": { "labels": { "stage": stage } } });
    version_of(&api.patch(&format!("{path}/{name}"), &patch).await)
}

fn node(name: &str) -> Value {
    json!({ "metadata": { "name": name } })
}

async fn protobuf_over_grpc_has_the_apiservers_own_bytes() {
    let api = ApiServer::start(Options::default()).await;
    for n in 0..12 {
        api.create(PODS, &pod(&format!("p{n}"))).await;
        api.create(NODES, &node(&format!("n{n}"))).await;
    }
    // A link that can be cut lies between kubefan and the apiserver, so that kubefan misses events.
    let link = Link::to(api.addr()).await;
    let kubeconfig = api.kubeconfig_to(&format!("https://{}", link.addr));
    // Pods are cached as protobuf only. The protobuf of nodes is cached because the watch asks for
    // it.
    let kubefan = Kubefan::spawn(&kubeconfig, &["--resource", "pods=protobuf", "--resource", "nodes"]).await;
    kubefan.ready().await;
    let mut subscribers = Vec::new();
    for (path, labels) in [(PODS, ""), (PODS, "stage=on"), (NODES, ""), (NODES, "stage!=on")] {
        let mut subscriber = Subscriber::start(kubefan.grpc_addr, path, labels, "").await;
        subscriber.until(|read| !read.watch.resume_version().is_empty()).await;
        subscribers.push(subscriber);
    }
    let source = ListWatch::new(client(kubefan.grpc_addr).await, "pods", "default", "").encoding(Encoding::Protobuf);
    let informer = SharedInformer::<RawProtobuf>::new(source);
    let running = informer.spawn(std::future::pending::<()>()).unwrap();
    informer.synced().await.unwrap();
    let starts: Vec<_> = subscribers.iter().map(|subscriber| subscriber.watch.resume_version().to_owned()).collect();
    let written_between = async |round: usize| {
        let mut last = 0;
        for n in 0..8 {
            let stage = if n % 2 == round % 2 { "on" } else { "off" };
            change(&api, PODS, &format!("p{n}"), stage).await;
            last = change(&api, NODES, &format!("n{n}"), stage).await;
        }
        for (path, name, object) in [(PODS, "p5", pod("p5")), (NODES, "n5", node("n5"))] {
            api.delete(&format!("{path}/{name}")).await;
            last = last.max(version_of(&api.create(path, &object).await));
        }
        // Both resources reach a version at or above the last of the other.
        change(&api, PODS, "p0", "on").await.max(last)
    };
    let middle = written_between(0).await;
    let middle = change(&api, NODES, "n0", "off").await.max(middle);
    let last_of_pods = written_between(1).await;
    let last = change(&api, NODES, "n0", "end").await;
    let client = client(kubefan.grpc_addr).await;
    assert_reads_are_equal(&api, &client, last).await;

    let fresh = Kubefan::start(&api, &["--resource", "pods=protobuf", "--resource", "nodes"]).await;
    for (subscriber, start) in subscribers.iter_mut().zip(&starts) {
        let path = subscriber.path;
        let labels = subscriber.labels;
        let what = format!("{path} {labels}");
        let end = if path == PODS { last_of_pods } else { last };
        let expected = upstream_watch(&api, path, labels, start, end).await;
        assert!(expected.len() > 10, "{what}: {}", expected.len());
        subscriber.until(|read| read.events.len() >= expected.len()).await;
        assert_eq!(subscriber.events, expected, "{what}");
        // From the history of this kubefan, and from the apiserver's history, which a kubefan reads
        // that has just started.
        let middle = middle.to_string();
        let expected = upstream_watch(&api, path, labels, &middle, end).await;
        for address in [kubefan.grpc_addr, fresh.grpc_addr] {
            let mut resumed = Subscriber::start(address, path, labels, &middle).await;
            resumed.until(|read| read.events.len() >= expected.len()).await;
            assert_eq!(resumed.events, expected, "{what}, resumed");
        }
    }

    link.cut();
    wait::until("kubefan to notice", wait::SOON, || async {
        let (_, ready) = kubefan.admin("/readyz?verbose").await?;
        (ready.contains("pods (protobuf) stale") && ready.contains("nodes stale")).then_some(())
    })
    .await;
    for (path, prefix) in [(PODS, "p"), (NODES, "n")] {
        for n in 0..6 {
            change(&api, path, &format!("{prefix}{n}"), if n % 2 == 0 { "off" } else { "on" }).await;
        }
        api.delete(&format!("{path}/{prefix}11")).await;
        api.delete(&format!("{path}/{prefix}0")).await;
    }
    let q = version_of(&api.create(PODS, &pod("q")).await);
    let during = version_of(&api.create(NODES, &node("q")).await).max(q);
    api.compact_etcd(during).await;
    api.kill9();
    api.restart().await;
    link.mend();
    for subscriber in &mut subscribers {
        subscriber.until(|read| !read.gaps.is_empty()).await;
    }
    let mut last_of_pods = 0;
    let mut last = 0;
    for n in 6..10 {
        last_of_pods = change(&api, PODS, &format!("p{n}"), "after").await;
        last = change(&api, NODES, &format!("n{n}"), "after").await;
    }
    assert_reads_are_equal(&api, &client, last).await;
    for subscriber in &mut subscribers {
        let path = subscriber.path;
        let labels = subscriber.labels;
        let what = format!("{path} {labels}");
        let [(from, before)] = subscriber.gaps.as_slice() else { panic!("{what}: {:?}", subscriber.gaps) };
        let from = from.clone();
        let before = *before;
        let end = if path == PODS { last_of_pods } else { last };
        let expected = upstream_watch(&api, path, labels, &from, end).await;
        subscriber.until(|read| read.events.len() >= before + expected.len()).await;
        assert_eq!(subscriber.events[before..], expected, "{what}, after the gap");
        let selected = upstream_list(&api, &format!("{path}?labelSelector={labels}")).await;
        assert_eq!(subscriber.state, selected, "{what}: the state");
        assert!(subscriber.unknown > 0 || !labels.is_empty(), "{what}: objects were deleted in the gap");
    }
    let pods = upstream_list(&api, PODS).await;
    wait::until("the informer to have the same pods", wait::SOON, || async {
        let pod = |pod: &Arc<Object<RawProtobuf>>| (pod.name().to_owned(), Bytes::copy_from_slice(pod.as_bytes()));
        (informer.indexer().list().iter().map(pod).collect::<BTreeMap<_, _>>() == pods).then_some(())
    })
    .await;
    let any = &informer.indexer().list()[0];
    let message = any.message().unwrap();
    assert_eq!((&*message.api_version, &*message.kind), ("v1", "Pod"));
    assert_eq!(name_of(&message.message), any.name());
    running.abort();
}
