//! Schema changes: objects get other bytes without a new version, while the upstream watch is
//! whole. No event is missed, and only subscribers that select such an object have to start over.

use std::time::Duration;

use bytes::Buf;
use kubefan_cache::StreamEnd;
use kubefan_fanout::{Catalog, ConnectionWaker, Start, StreamWaker, Subscription};
use kubefan_model::{
    Media,
    format::Format,
    projection::Projection,
    selection::Selection,
    selector::{FieldSelector, LabelSelector},
};
use serde_json::{Value, json};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep},
};

use crate::{
    freshness::write_configmap,
    harness::{
        network::{answer, answer_with},
        objects::version_of,
        record::Watch,
        rig::{PODS, Rig, Setup, cache_of, pod, pods, versions},
        tests,
    },
    history::other_cluster,
    informer_start::HttpWatch,
    relists::object,
    upstream_faults::{line, relists_for, synced, write},
};

tests! {
    paused: a_schema_change_that_leaves_all_bytes_is_not_seen,
        a_schema_change_ends_only_the_http_watches_that_select_changed_bytes,
        a_schema_change_at_a_compacted_version_leaves_a_gap, events_arrive_while_the_list_for_the_schema_fails,
        a_watch_that_ends_during_the_list_for_the_schema_is_opened_again_at_once,
        a_watch_that_starts_while_other_bytes_wait_for_a_version_has_them,
        an_event_out_of_order_during_the_list_for_the_schema_is_not_forgotten_while_another_cluster_answers;
}

/// Waits until that many lists because of a schema have begun.
async fn listed(rig: &Rig, lists: f64) {
    let begun = || relists_for(rig, "schema_changed");
    rig.until(|| begun() == lists, || format!("{} lists", begun())).await;
}

/// A default of the new schema.
fn with_priority(pod: &mut Value) {
    pod["spec"]["priority"] = json!(0);
}

/// Changes the bytes of all pods, and waits until the list for it has begun.
async fn change_all(rig: &Rig) {
    rig.sim.change_schema(&pods(), with_priority).unwrap();
    listed(rig, 1.0).await;
}

/// Checks that one marked gap has brought the other bytes.
async fn assert_renewed(rig: &Rig, watch: &Watch) {
    assert_eq!(watch.state, rig.truth(PODS).await, "with the other bytes");
    assert_eq!(watch.gap_reasons, ["schema_changed"]);
    assert_eq!(relists_for(rig, "schema_changed"), 1.0, "one list, in one piece");
}

/// Two checks in a row must agree, so a change is noticed within three of these.
fn setup() -> Setup {
    Setup { schema_check_interval: Duration::from_secs(10), ..Setup::of(&["pods"]) }
}

/// A watch over HTTP from now on.
async fn http_watch(rig: &Rig, labels: &str) -> Subscription {
    let served = rig.catalog.find(cache_of("pods", Media::Json)).await.unwrap();
    let labels = LabelSelector::parse(labels).unwrap();
    let fields = FieldSelector::default();
    let selection =
        Selection::bind("", "", labels, &fields, &served.fields, served.parser.clone(), &served.gvr).unwrap();
    let start = Start::Resume(served.hub.head().unwrap());
    let format = Format::http(Media::Json, Projection::default());
    served.hub.subscribe(selection, format, start, StreamWaker::new(&ConnectionWaker::new(), 0)).unwrap()
}

/// The versions of the events up to this one.
async fn until(watch: &mut Subscription, last: u64) -> Result<Vec<u64>, StreamEnd> {
    let mut versions = Vec::new();
    while versions.last() != Some(&last) {
        let mut frames = watch.next().await?;
        let lines = frames.copy_to_bytes(frames.remaining());
        let events = serde_json::Deserializer::from_slice(&lines).into_iter::<Value>();
        versions.extend(events.map(|event| version_of(&event.expect("an event")["object"])));
    }
    Ok(versions)
}

async fn a_schema_change_that_leaves_all_bytes_is_not_seen() {
    let (rig, mut watch, _) = synced(setup()).await;
    let mut http = http_watch(&rig, "").await;
    rig.sim.change_schema(&pods(), |_| {}).unwrap();
    let during = rig.sim.create(&pods(), pod("b", "new")).unwrap();
    listed(&rig, 1.0).await;
    let after = rig.sim.create(&pods(), pod("c", "new")).unwrap();
    watch.until(after).await;
    assert_eq!(versions(&watch.events), [during, after]);
    assert_eq!(watch.gaps, []);
    assert_eq!(until(&mut http, after).await, Ok(vec![during, after]));
}

async fn a_schema_change_ends_only_the_http_watches_that_select_changed_bytes() {
    let (rig, mut watch, _) = synced(setup()).await;
    let off = rig.sim.create(&pods(), pod("off", "off")).unwrap();
    watch.until(off).await;
    let mut changed = http_watch(&rig, "stage=first").await;
    let mut unchanged = http_watch(&rig, "stage=off").await;
    let default = |pod: &mut Value| {
        if pod["metadata"]["labels"]["stage"] == "first" {
            pod["spec"]["priority"] = json!(0);
        }
    };
    rig.sim.change_schema(&pods(), default).unwrap();
    listed(&rig, 1.0).await;
    let first = rig.sim.create(&pods(), pod("off-2", "off")).unwrap();
    let second = rig.sim.create(&pods(), pod("off-3", "off")).unwrap();
    watch.until(second).await;
    assert_eq!(watch.gap_reasons, ["schema_changed"]);
    assert_eq!(watch.state, rig.truth(PODS).await, "with the other bytes");
    assert!(matches!(until(&mut changed, second).await, Err(StreamEnd::Expired(_))));
    assert_eq!(until(&mut unchanged, second).await, Ok(vec![first, second]));
}

fn is_for_the_schema(path: &str) -> bool {
    path.contains("resourceVersionMatch=Exact")
}

async fn events_arrive_while_the_list_for_the_schema_fails() {
    for (form, code) in [("silence", 200), ("a failure", 503)] {
        let (rig, mut watch, before) = synced(setup()).await;
        rig.network.answer_once(is_for_the_schema, answer(code, Vec::new(), code == 200));
        change_all(&rig).await;
        for number in 0..5 {
            let name = format!("b-{number}");
            let written_at = Instant::now();
            let written = rig.sim.create(&pods(), pod(&name, "new")).unwrap();
            watch.until(written).await;
            assert!(written_at.elapsed() < Duration::from_secs(1), "{form}: {name} after {:?}", written_at.elapsed());
            assert!(rig.readyz().contains("pods synced"), "{form}: {}", rig.readyz());
            sleep(Duration::from_secs(1)).await;
        }
        // The request fails in the end and is sent again.
        sleep(Duration::from_secs(90)).await;
        let last = rig.sim.create(&pods(), pod("last", "new")).unwrap();
        watch.until(last).await;
        assert_renewed(&rig, &watch).await;
        let exact = rig.asked(PODS)[before..].iter().filter(|asked| is_for_the_schema(&asked.path)).count();
        assert_eq!(exact, 2, "{form}: one that failed and one");
    }
}

async fn a_watch_that_ends_during_the_list_for_the_schema_is_opened_again_at_once() {
    let (rig, mut watch, _) = synced(setup()).await;
    rig.network.answer_once(is_for_the_schema, answer(200, Vec::new(), true));
    change_all(&rig).await;
    rig.cut().await;
    let written_at = Instant::now();
    let written = rig.sim.create(&pods(), pod("b", "new")).unwrap();
    watch.until(written).await;
    assert!(written_at.elapsed() < Duration::from_secs(3), "after {:?}", written_at.elapsed());
    listed(&rig, 2.0).await;
    sleep(Duration::from_secs(1)).await;
    watch.until(rig.sim.create(&pods(), pod("c", "new")).unwrap()).await;
    assert_eq!(watch.state, rig.truth(PODS).await, "with the other bytes");
}

/// Only a list restores the state after an event out of order. Continuing the watch would trust it.
async fn an_event_out_of_order_during_the_list_for_the_schema_is_not_forgotten_while_another_cluster_answers() {
    let both = Setup { schema_check_interval: Duration::from_secs(10), ..Setup::of(&["pods", "configmaps"]) };
    let (rig, mut watch, _) = synced(both).await;
    let written = write(&rig, "b");
    watch.until(written[2]).await;
    let (events, forged) = mpsc::channel(1);
    let is_watch_of_pods = |path: &str| path.starts_with(PODS) && path.contains("watch=1");
    rig.network.answer_once(is_watch_of_pods, answer_with(forged));
    rig.cut().await;
    rig.readyz_has("pods synced").await;
    rig.network.answer_once(is_for_the_schema, answer(200, Vec::new(), true));
    change_all(&rig).await;
    // The cache of configmaps finds the other cluster. The forged watch of the pods stays open.
    rig.network.connect_to(other_cluster());
    rig.sim.drop_connections();
    rig.readyz_has("configmaps stale: another cluster answers").await;
    events.send(line("MODIFIED", &object("a", written[0]))).await.unwrap();
    rig.readyz_has("pods stale: another cluster answers").await;
    let during = rig.sim.create(&pods(), pod("c", "new")).unwrap();
    rig.network.connect_to(rig.sim.clone());
    let listed = || relists_for(&rig, "out_of_order");
    rig.until(|| listed() == 1.0, || format!("{} lists", listed())).await;
    watch.until(during).await;
    assert_eq!(watch.state, rig.truth(PODS).await);
}

async fn a_watch_that_starts_while_other_bytes_wait_for_a_version_has_them() {
    let (rig, _watch, _) = synced(setup()).await;
    sleep(Duration::from_secs(20)).await;
    change_all(&rig).await;
    sleep(Duration::from_secs(1)).await;
    let version = write_configmap(&rig.sim);
    let mut watch = HttpWatch::informer_of(&rig, PODS, "").await;
    assert!(watch.initial().await.1 >= version);
    let later = rig.sim.create(&pods(), pod("later", "new")).unwrap();
    assert_eq!(watch.next().await, Some(("ADDED".to_owned(), "later".to_owned(), later)));
}

async fn a_schema_change_at_a_compacted_version_leaves_a_gap() {
    let (rig, mut watch, _) = synced(setup()).await;
    let mut http = http_watch(&rig, "stage=none").await;
    // The version of the cluster advances, and that of the pods does not.
    write_configmap(&rig.sim);
    rig.sim.compact_etcd();
    rig.sim.change_schema(&pods(), |_| {}).unwrap();
    listed(&rig, 2.0).await;
    let after = rig.sim.create(&pods(), pod("b", "new")).unwrap();
    watch.until(after).await;
    assert_eq!(watch.gap_reasons, ["schema_changed"]);
    assert!(matches!(until(&mut http, after).await, Err(StreamEnd::Expired(_))), "something may have come and gone");
    assert_eq!(relists_for(&rig, "initial"), 1.0);
}
