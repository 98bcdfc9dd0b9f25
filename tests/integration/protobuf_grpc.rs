//! Protobuf over gRPC. Lists, gets and watches have the bytes that the apiserver itself sends as
//! protobuf, through changes, deletes, resumes and a marked gap. What has no protobuf is refused
//! with the field at fault and a way out.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};

use bytes::{Buf, Bytes};
use kubefan_client::{
    Client, ClientOptions, Encoding, ListWatch, Object, OnExpired, Parts, Projection, RawProtobuf, ReadOptions,
    SharedInformer, WatchItem, WatchOptions, WatchStream,
};
use kubefan_common::proto::v1alpha1::{
    self, DeleteReason, Event, EventType, GetRequest, ListRequest, Target, WatchRequest,
};
use kubefan_model::{Media, protobuf};
use reqwest::header::ACCEPT;
use serde_json::{Value, json};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::harness::{
    apiserver::{ApiServer, Options},
    kubefan::Kubefan,
    link::Link,
    objects::{pod, version_of},
    record::connect,
    tests, wait,
};

tests! {
    apiserver full: protobuf_over_grpc_has_the_apiservers_own_bytes;
    apiserver: what_has_no_protobuf_is_refused_with_a_way_out;
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
    let metadata = protobuf::wire::bytes_field(message, protobuf::METADATA).unwrap().unwrap();
    let name = protobuf::wire::bytes_field(metadata, protobuf::META_NAME).unwrap().unwrap();
    String::from_utf8(name.to_vec()).unwrap()
}

/// The events of a watch of the apiserver after a version, up to now.
async fn upstream_watch(api: &ApiServer, path: &str, labels: &str, version: &str) -> Vec<(String, Bytes)> {
    let query = format!("watch=1&timeoutSeconds=2&resourceVersion={version}&labelSelector={labels}");
    let mut body = upstream(api, &format!("{path}?{query}"), Media::Protobuf.watch_accept()).await;
    let mut events = Vec::new();
    while body.has_remaining() {
        let len = body.get_u32() as usize;
        let frame = body.split_to(len);
        let event = protobuf::read_watch_event(&frame).unwrap();
        events.push((event.kind.to_owned(), Bytes::copy_from_slice(event.object)));
    }
    events
}

/// A watch of protobuf, with what it was sent so far.
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

    /// Reads up to a version.
    async fn until(&mut self, version: u64) {
        let mut in_snapshot = false;
        while self.watch.resume_version().parse().unwrap_or(0) < version {
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
        subscriber.until(1).await;
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
    let last = written_between(1).await;
    let last = change(&api, NODES, "n0", "end").await.max(last);
    let client = client(kubefan.grpc_addr).await;
    assert_reads_are_equal(&api, &client, last).await;

    let fresh = Kubefan::start(&api, &["--resource", "pods=protobuf", "--resource", "nodes"]).await;
    for (subscriber, start) in subscribers.iter_mut().zip(&starts) {
        let (path, labels) = (subscriber.path, subscriber.labels);
        let what = format!("{path} {labels}");
        let expected = upstream_watch(&api, path, labels, start).await;
        let end = expected.len();
        assert!(end > 10, "{what}: {end}");
        subscriber.read_events(end).await;
        assert_eq!(subscriber.events, expected, "{what}");
        // From the history of this kubefan, and from that of the apiserver, which one that has just
        // started reads.
        let middle = middle.to_string();
        let expected = upstream_watch(&api, path, labels, &middle).await;
        for address in [kubefan.grpc_addr, fresh.grpc_addr] {
            let mut resumed = Subscriber::start(address, path, labels, &middle).await;
            resumed.read_events(expected.len()).await;
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
        while subscriber.gaps.is_empty() {
            let next = subscriber.watch.resume_version().parse::<u64>().unwrap() + 1;
            subscriber.until(next).await;
        }
    }
    let mut after = 0;
    for n in 6..10 {
        change(&api, PODS, &format!("p{n}"), "after").await;
        after = change(&api, NODES, &format!("n{n}"), "after").await;
    }
    assert_reads_are_equal(&api, &client, after).await;
    for subscriber in &mut subscribers {
        let (path, labels) = (subscriber.path, subscriber.labels);
        let what = format!("{path} {labels}");
        let [(from, before)] = subscriber.gaps.as_slice() else { panic!("{what}: {:?}", subscriber.gaps) };
        let (from, before) = (from.clone(), *before);
        let expected = upstream_watch(&api, path, labels, &from).await;
        subscriber.read_events(before + expected.len()).await;
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

impl Subscriber {
    /// Reads until it has so many events.
    async fn read_events(&mut self, count: usize) {
        while self.events.len() < count {
            let next = self.watch.resume_version().parse::<u64>().unwrap_or(0) + 1;
            self.until(next).await;
        }
    }
}

async fn what_has_no_protobuf_is_refused_with_a_way_out() {
    let api = ApiServer::shared().await;
    let group = format!("{}.example.com", api.unique("protobuf"));
    api.create_crd(&group, "gadgets", "Gadget").await;
    let name = format!("gadgets.{group}");
    let namespace = api.namespace("protobuf").await;
    let objects = format!("/apis/{group}/v1/namespaces/{namespace}/gadgets");
    let gadget = json!({ "apiVersion": format!("{group}/v1"), "kind": "Gadget", "metadata": { "name": "a" } });
    api.create(&objects, &gadget).await;
    let kubefan = Kubefan::start(&api, &["--resource", "configmaps", "--resource", &name]).await;
    let on_demand = Kubefan::start(&api, &["--resource", "configmaps", "--on-demand"]).await;
    let without = Kubefan::start(&api, &["--resource", "configmaps", "--protobuf=off"]).await;

    // Every way to name it, in a kubefan that caches it and in one that would.
    let named = Target { resource: name, namespace: namespace.clone(), name: "a".into(), ..Target::default() };
    let (version, resource) = ("v1".to_owned(), "gadgets".to_owned());
    let full = Target { group: group.clone(), version, resource, ..named.clone() };
    for address in [kubefan.grpc_addr, on_demand.grpc_addr] {
        for target in [&named, &full] {
            for status in refusals(address, target, v1alpha1::Projection::default()).await {
                let violations = status.get_details_bad_request().unwrap().field_violations;
                assert_eq!((status.code(), &*violations[0].field), (Code::InvalidArgument, "encoding"), "{status}");
                assert!(status.message().contains("gadgets"), "{status}");
                assert!(status.message().contains("ENCODING_JSON"), "{status}");
            }
            let served = client(address).await.get(target.clone(), "").await.unwrap();
            assert!(served.object.unwrap().object.starts_with(b"{"), "JSON is served");
        }
    }
    let configmaps =
        Target { resource: "configmaps".into(), namespace, name: "kube-root-ca.crt".into(), ..Target::default() };
    for status in refusals(without.grpc_addr, &configmaps, v1alpha1::Projection::default()).await {
        assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
        assert!(status.message().contains("--protobuf=off"), "{status}");
    }
    let dropping = v1alpha1::Projection { drop_managed_fields: true, ..Default::default() };
    for status in refusals(kubefan.grpc_addr, &configmaps, dropping).await {
        let violations = status.get_details_bad_request().unwrap().field_violations;
        assert_eq!(violations[0].field, "projection.drop_managed_fields", "{status}");
    }
}

/// What a watch, a list and a get of an object as protobuf are refused with.
async fn refusals(address: SocketAddr, target: &Target, projection: v1alpha1::Projection) -> [Status; 3] {
    let mut client = connect(address).await;
    let (encoding, projection) = (v1alpha1::Encoding::Protobuf.into(), Some(projection));
    let target = Some(target.clone());
    let watch = WatchRequest { target: target.clone(), projection: projection.clone(), encoding, ..Default::default() };
    let list = ListRequest { target: target.clone(), projection: projection.clone(), encoding, ..Default::default() };
    let get = GetRequest { target, projection, encoding, ..Default::default() };
    [
        client.watch(watch).await.expect_err("a watch"),
        client.list(list).await.expect_err("a list"),
        client.get(get).await.expect_err("a get"),
    ]
}
