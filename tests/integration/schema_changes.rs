//! Schema changes: objects get other bytes without a new version, while the upstream watch is
//! whole. No event is missed, and only those who select such an object have to start over.

use std::time::Duration;

use bytes::Buf;
use kubefan_model::{
    Media,
    format::Format,
    projection::Projection,
    selection::Selection,
    selector::{FieldSelector, LabelSelector},
};
use kubefan_proxy::fanout::{Catalog, ConnectionWaker, Start, StreamEnd, StreamWaker, Subscription};
use serde_json::{Value, json};

use crate::{
    harness::{
        Test,
        objects::version_of,
        rig::{PODS, Rig, Setup, pod, pods, versions},
        tests,
    },
    upstream_faults::{relists_for, synced},
};

pub(crate) const TESTS: &[Test] = tests! {
    paused: a_schema_change_that_leaves_all_bytes_is_not_seen,
        a_schema_change_ends_only_the_http_watches_that_select_changed_bytes,
        a_schema_change_at_a_compacted_version_leaves_a_gap;
};

const RELISTS: &str =
    r#"kubefan_relists_total{group="",media="json",namespace="",reason="schema_changed",resource="pods"}"#;

/// Two checks in a row must agree, so a change is noticed within three of these.
fn setup() -> Setup {
    Setup { schema_check_interval: Duration::from_secs(10), ..Setup::of(&["pods"]) }
}

/// A watch over HTTP from now on.
async fn http_watch(rig: &Rig, labels: &str) -> Subscription {
    let served = rig.registry.find("", "v1", "pods", "", Media::Json).await.unwrap();
    let (labels, fields) = (LabelSelector::parse(labels).unwrap(), FieldSelector::default());
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
    rig.metric_becomes(RELISTS, 1.0).await;
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
    let (mut changed, mut unchanged) = (http_watch(&rig, "stage=first").await, http_watch(&rig, "stage=off").await);
    let default = |pod: &mut Value| {
        if pod["metadata"]["labels"]["stage"] == "first" {
            pod["spec"]["priority"] = json!(0);
        }
    };
    rig.sim.change_schema(&pods(), default).unwrap();
    rig.metric_becomes(RELISTS, 1.0).await;
    let first = rig.sim.create(&pods(), pod("off-2", "off")).unwrap();
    let second = rig.sim.create(&pods(), pod("off-3", "off")).unwrap();
    watch.until(second).await;
    assert_eq!(watch.gap_reasons, ["schema_changed"]);
    assert_eq!(watch.state, rig.truth(PODS).await, "with the other bytes");
    assert!(matches!(until(&mut changed, second).await, Err(StreamEnd::Expired(_))));
    assert_eq!(until(&mut unchanged, second).await, Ok(vec![first, second]));
}

async fn a_schema_change_at_a_compacted_version_leaves_a_gap() {
    let (rig, mut watch, _) = synced(setup()).await;
    let mut http = http_watch(&rig, "stage=none").await;
    // The version of the cluster advances, and that of the pods does not.
    let configmaps = kubefan_model::GroupVersionResource::new("", "v1", "configmaps");
    rig.sim.create(&configmaps, json!({ "metadata": { "namespace": "default", "name": "other" } })).unwrap();
    rig.sim.compact_etcd();
    rig.sim.change_schema(&pods(), |_| {}).unwrap();
    rig.metric_becomes(RELISTS, 2.0).await;
    let after = rig.sim.create(&pods(), pod("b", "new")).unwrap();
    watch.until(after).await;
    assert_eq!(watch.gap_reasons, ["schema_changed"]);
    assert!(matches!(until(&mut http, after).await, Err(StreamEnd::Expired(_))), "something may have come and gone");
    assert_eq!(relists_for(&rig, "initial"), 1.0);
}
