//! Several events at one version: a transaction of etcd has one revision, and objects that expire
//! with one lease are deleted in one. kubefan neither lists again for it nor loses one of them,
//! also if a watch breaks between two of them. Over HTTP it is as the apiserver.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use bytes::BytesMut;
use kubefan_client::{Client, ClientOptions, Encoding, WatchItem, WatchOptions};
use kubefan_common::proto::v1alpha1::{EventType, Target, WatchRequest};
use kubefan_model::{
    GroupVersionResource, Media,
    fields::FieldTable,
    object::{Object, ObjectParser},
    protobuf,
};
use kubefan_sim::apiserver::SimApiserver;
use reqwest::header::ACCEPT;
use serde_json::{Value, json};
use tokio::{
    sync::mpsc::{self, Sender},
    time::timeout,
};

use crate::{
    harness::{
        apiserver::{ApiServer, Options},
        kubefan::Kubefan,
        network::answer,
        rig::{PODS, Rig, Setup, pod, pods, target, versions},
        tests,
    },
    upstream_faults::{line, open_watches, relists, synced},
};

tests! {
    paused: deletes_at_one_version_are_events_of_their_own,
        a_watch_that_breaks_between_two_events_of_one_version_brings_the_rest,
        a_backfill_that_breaks_inside_a_version_that_was_listed_brings_the_rest,
        an_event_that_upstream_sends_twice_is_backfilled_once,
        a_tier_over_grpc_has_the_places_of_the_tier_before_it;
    apiserver slow_faults: events_that_expire_with_one_lease_are_each_deleted_once;
}

/// Deletes pods at one version, and returns it.
pub(crate) fn delete_together(sim: &SimApiserver, names: &[&str]) -> u64 {
    sim.at_one_version(|| {
        for name in names {
            sim.delete(&pods(), "default", name).unwrap();
        }
    });
    sim.revision()
}

/// The delete of an object at `version`, as a watch sends it.
pub(crate) fn delete_line(object: &[u8], version: u64) -> String {
    let mut object: Value = serde_json::from_slice(object).unwrap();
    object["metadata"]["resourceVersion"] = version.to_string().into();
    line("DELETED", &object)
}

fn create(sim: &SimApiserver, names: &[&str]) {
    for name in names {
        sim.create(&pods(), pod(name, "new")).unwrap();
    }
}

async fn deletes_at_one_version_are_events_of_their_own() {
    let (rig, mut watch, asked) = synced(Setup::of(&["pods"])).await;
    create(&rig.sim, &["b", "c", "d"]);
    let deleted = delete_together(&rig.sim, &["b", "c", "d"]);
    create(&rig.sim, &["e"]);
    let last = rig.sim.revision();
    watch.until(last).await;
    let seen = versions(&watch.events);
    assert_eq!(seen[3..], [deleted, deleted, deleted, last]);
    assert_eq!((relists(&rig), open_watches(&rig), rig.asked(PODS).len()), (1.0, 1.0, asked), "one list, one watch");
    // From every place in the version, and from the version itself.
    for (at, rest) in [(deleted.to_string(), 3), (format!("{deleted}.1"), 2), (format!("{deleted}.2"), 1)] {
        let mut resumed = rig.watch(target("pods"), &at).await.unwrap();
        resumed.until(last).await;
        assert_eq!(resumed.events, watch.events[watch.events.len() - rest..], "from {at}");
    }
}

async fn a_watch_that_breaks_between_two_events_of_one_version_brings_the_rest() {
    let (rig, mut watch, _) = synced(Setup::of(&["pods"])).await;
    create(&rig.sim, &["b", "c", "d"]);
    let before = rig.sim.revision();
    watch.until(before).await;
    let b = rig.sim.object(&pods(), "default", "b").unwrap();
    rig.network.refuse(true);
    rig.cut().await;
    let deleted = delete_together(&rig.sim, &["b", "c", "d"]);
    // The next watch has the first of the three deletes, and ends.
    rig.network.answer_once(|path| path.contains("watch=1"), answer(200, vec![delete_line(&b, deleted)], false));
    rig.network.refuse(false);
    watch.until(deleted).await;
    create(&rig.sim, &["e"]);
    watch.until(rig.sim.revision()).await;
    assert_eq!(versions(&watch.events)[3..], [deleted, deleted, deleted, rig.sim.revision()], "each of them once");
    assert_eq!((watch.gaps.len(), relists(&rig)), (0, 1.0));
    assert_eq!(watch.state, rig.truth(PODS).await);
}

async fn a_backfill_that_breaks_inside_a_version_that_was_listed_brings_the_rest() {
    let setup = Setup::of(&["pods"]);
    let sim = setup.sim();
    create(&sim, &["b", "c", "d"]);
    let before = sim.revision();
    let b = sim.object(&pods(), "default", "b").unwrap();
    let deleted = delete_together(&sim, &["b", "c", "d"]);
    // The cache has listed at the version of the deletes. The first watch of the backfill has one
    // of them, and ends.
    let rig = Rig::synced(sim, setup).await;
    rig.network
        .answer_once(|path| path.contains("timeoutSeconds=3"), answer(200, vec![delete_line(&b, deleted)], false));
    let mut watch = rig.watch(target("pods"), &before.to_string()).await.unwrap();
    create(&rig.sim, &["e"]);
    watch.until(rig.sim.revision()).await;
    assert_eq!(versions(&watch.events), [deleted, deleted, deleted, rig.sim.revision()], "each of them once");
    assert_eq!((watch.gaps.len(), relists(&rig)), (0, 1.0));
}

async fn an_event_that_upstream_sends_twice_is_backfilled_once() {
    let setup = Setup::of(&["pods"]);
    let sim = setup.sim();
    create(&sim, &["b", "c"]);
    let [b, c] = ["b", "c"].map(|name| sim.object(&pods(), "default", name).unwrap());
    let deleted = delete_together(&sim, &["b", "c"]);
    let rig = Rig::synced(sim, setup).await;
    let [b, c] = [b, c].map(|object| delete_line(&object, deleted));
    let lines = vec![b.clone(), b, c];
    rig.network.answer_once(|path| path.contains("timeoutSeconds=3"), answer(200, lines, false));
    // The client has the first event of the version.
    let request = rig.request(target("pods"), &deleted.to_string());
    let mut watch = rig.send(WatchRequest { version_is_complete: Some(false), ..request }).await.unwrap();
    create(&rig.sim, &["d"]);
    watch.until(rig.sim.revision()).await;
    assert_eq!(versions(&watch.events), [deleted, rig.sim.revision()], "one event of the version is left");
    assert_eq!((watch.gaps.len(), relists(&rig)), (0, 1.0));
}

async fn a_tier_over_grpc_has_the_places_of_the_tier_before_it() {
    let (front, _, _) = synced(Setup::of(&["pods"])).await;
    let (rig, link) = Rig::behind(&front, Setup::of(&["pods"]));
    rig.ready().await;
    let mut watch = rig.watch_all("pods").await;
    create(&front.sim, &["b", "c", "d", "e"]);
    let first = delete_together(&front.sim, &["b", "c"]);
    watch.until(first).await;
    link.cut();
    let second = delete_together(&front.sim, &["d", "e"]);
    link.mend();
    create(&front.sim, &["f"]);
    let last = front.sim.revision();
    watch.until(last).await;
    assert_eq!(versions(&watch.events)[4..], [first, first, second, second, last]);
    assert_eq!((watch.gaps.len(), watch.state.clone()), (0, front.truth(PODS).await));
    for tier in [&front, &rig] {
        let mut resumed = tier.watch(target("pods"), &format!("{second}.1")).await.unwrap();
        resumed.until(last).await;
        assert_eq!(versions(&resumed.events), [last]);
    }
}

/// Lifetime of Events. Those that are written within a twentieth of it share a lease.
const TTL_SECONDS: u64 = 60;
/// Maximum time of a delete. etcd revokes leases that have expired twice a second.
const DELETED_WITHIN: Duration = Duration::from_secs(4 * TTL_SECONDS);
const BURSTS: usize = 3;
const EVENTS: usize = 20;
/// More than each watch sees, so that none waits for another.
const CHANGES_MAX: usize = 10 * BURSTS * EVENTS;
const PATH: &str = "/api/v1/namespaces/default/events";

/// A change that a watch has sent: its type, the object's name and its version.
type Change = (String, String, u64);

fn event(name: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "involvedObject": { "kind": "Pod", "namespace": "default", "name": "web" },
        "reason": "Tested", "message": "text", "type": "Normal",
    })
}

/// The changes of a watch over HTTP.
async fn http(kubefan: &Kubefan, media: Media, version: &str, changes: Sender<Change>) {
    let url = format!("http://{}{PATH}?watch=1&resourceVersion={version}", kubefan.grpc_addr);
    let request = reqwest::Client::new().get(url).header(ACCEPT, media.watch_accept());
    let mut response = request.send().await.unwrap();
    assert!(response.status().is_success(), "{}", response.status());
    let mut body = BytesMut::new();
    tokio::spawn(async move {
        while let Ok(Some(data)) = response.chunk().await {
            body.extend_from_slice(&data);
            while let Some((kind, object)) = split(&mut body, media) {
                if kind == "BOOKMARK" {
                    continue;
                }
                let change = (kind, object.key().name().to_owned(), object.version().get());
                if changes.send(change).await.is_err() {
                    return;
                }
            }
        }
    });
}

/// Takes the next event of a watch from the received bytes.
fn split(body: &mut BytesMut, media: Media) -> Option<(String, Object)> {
    let gvr = GroupVersionResource::new("", "v1", "events");
    let fields = FieldTable::new(&gvr, true, &[]);
    if media == Media::Protobuf {
        let len = u32::from_be_bytes(body.first_chunk::<4>().copied()?) as usize;
        let frame = (body.len() >= 4 + len).then(|| body.split_to(4 + len).split_off(4))?;
        let read = protobuf::read_watch_event(&frame).expect("an event");
        let parser = ObjectParser::protobuf(&gvr, &fields).expect("events have protobuf");
        let object = parser.parse(read.object).unwrap_or_else(|error| panic!("{}: {error}", read.kind));
        return Some((read.kind.to_owned(), object));
    }
    let end = body.iter().position(|byte| *byte == b'\n')?;
    let line: Value = serde_json::from_slice(&body.split_to(end + 1)).expect("a line is JSON");
    assert_ne!(line["type"], "ERROR", "{line}");
    let object = ObjectParser::new(&fields).parse(line["object"].to_string().as_bytes()).expect("an object");
    Some((line["type"].as_str().unwrap_or_default().to_owned(), object))
}

/// The changes of a watch over gRPC, which breaks and resumes after every third.
async fn grpc(kubefan: &Kubefan, encoding: Encoding, changes: Sender<Change>) {
    let client = Client::connect(&kubefan.grpc_addr.to_string(), &ClientOptions::default()).await.unwrap();
    let target = Target { resource: "events".into(), namespace: "default".into(), ..Target::default() };
    tokio::spawn(async move {
        let mut from = String::new();
        let mut cluster = String::new();
        let mut seen = 0;
        loop {
            let options = WatchOptions {
                resource_version: from.clone(),
                cluster: cluster.clone(),
                encoding,
                ..WatchOptions::default()
            };
            let mut watch = client.watch(target.clone(), options);
            let mut in_snapshot = from.is_empty();
            while let Some(item) = watch.next().await {
                match item.unwrap() {
                    WatchItem::SnapshotEnd { .. } => in_snapshot = false,
                    WatchItem::SnapshotBegin { .. } => assert!(in_snapshot, "it starts over"),
                    WatchItem::GapBegin { reason, .. } => panic!("a gap: {reason}"),
                    WatchItem::Event(event) if !in_snapshot => {
                        let kind = match event.r#type() {
                            EventType::Added => "ADDED",
                            EventType::Modified => "MODIFIED",
                            _ => "DELETED",
                        };
                        let version = event.resource_version.parse().unwrap();
                        if changes.send((kind.to_owned(), event.name, version)).await.is_err() {
                            return;
                        }
                        seen += 1;
                        if seen % 3 == 0 {
                            break;
                        }
                    }
                    _ => {}
                }
            }
            from = watch.resume_version().to_owned();
            cluster = watch.cluster().to_owned();
        }
    });
}

async fn events_that_expire_with_one_lease_are_each_deleted_once() {
    let api = ApiServer::start(Options::default().flag(&format!("--event-ttl={TTL_SECONDS}s"))).await;
    let kubefan = Kubefan::start(&api, &["--resource", "events=json+protobuf"]).await;
    kubefan.ready().await;
    let first = api.create(PATH, &event("first")).await;
    let start = first["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    let mut watches = Vec::new();
    for media in [Media::Json, Media::Protobuf] {
        let (sender, receiver) = mpsc::channel(CHANGES_MAX);
        http(&kubefan, media, &start, sender).await;
        watches.push((format!("HTTP, {}", media.as_str()), receiver));
    }
    for encoding in [Encoding::Zstd, Encoding::Protobuf] {
        let (sender, receiver) = mpsc::channel(CHANGES_MAX);
        grpc(&kubefan, encoding, sender).await;
        watches.push((format!("gRPC, {encoding:?}"), receiver));
    }
    let mut expected = BTreeSet::new();
    for burst in 0..BURSTS {
        for number in 0..EVENTS {
            let name = format!("burst-{burst}-{number}");
            api.create(PATH, &event(&name)).await;
            expected.insert(name);
        }
    }
    for (what, changes) in &mut watches {
        let mut deleted = BTreeMap::new();
        let mut last = 0;
        while deleted.len() < expected.len() {
            let change = timeout(DELETED_WITHIN, changes.recv()).await;
            let (kind, name, version) = change.unwrap_or_else(|_| panic!("{what}: {} deletes", deleted.len())).unwrap();
            assert!(version >= last, "{what}: {name} at {version} after {last}");
            last = version;
            if kind == "DELETED" && name != "first" {
                assert!(deleted.insert(name.clone(), version).is_none(), "{what}: {name} is deleted twice");
            }
        }
        assert!(deleted.keys().eq(&expected), "{what}");
        let versions: BTreeSet<_> = deleted.values().collect();
        assert!(versions.len() < expected.len() / 2, "{what}: the deletes share versions: {versions:?}");
    }
    let lists = kubefan.metric_lines("kubefan_relists_total").await.expect("metrics are served");
    let again: Vec<_> = lists.iter().filter(|line| !line.contains(r#"reason="initial""#)).collect();
    assert!(again.is_empty(), "nothing was listed again: {again:?}");
}
