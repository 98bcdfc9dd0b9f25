//! Parsing, and packed objects compared with unpacked ones.

use std::sync::{Arc, LazyLock};

use super::*;
use crate::{GroupVersionResource, ResourceVersion, fields::FieldTable, packer::Packer};

fn pods() -> (GroupVersionResource, FieldTable) {
    let gvr = GroupVersionResource::new("", "v1", "pods");
    let table = FieldTable::new(&gvr, true, &[]);
    (gvr, table)
}

const POD: &str = r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"web-1","namespace":"default","uid":"u-1","resourceVersion":"99","labels":{"app":"web","tier":"front"}},"spec":{"nodeName":"n1","hostNetwork":true},"status":{"phase":"Run\u006eing"}}"#;

#[test]
fn parsing_reads_the_routing_values_and_leaves_the_bytes_unchanged() {
    let (gvr, table) = pods();
    let parser = ObjectParser::new(&table);
    let pod = parser.parse(POD.as_bytes()).unwrap();
    assert_eq!((pod.key().as_str(), pod.uid(), pod.version().get()), ("default/web-1", "u-1", 99));
    assert_eq!((pod.label("tier"), pod.label("none")), (Some("front"), None));
    let field = |name| parser.field(&pod, table.resolve(name, &gvr).unwrap()).into_owned();
    assert_eq!(field("spec.nodeName"), "n1");
    assert_eq!(field("spec.host"), "n1");
    assert_eq!(field("spec.hostNetwork"), "true");
    assert_eq!(field("status.phase"), "Running", "escapes are resolved");
    assert_eq!(field("status.podIP"), "");
    assert_eq!(field("metadata.name"), "web-1");
    assert_eq!(pod.bytes(), POD.as_bytes());
}

#[test]
fn a_missing_field_has_the_zero_value_of_its_type() {
    let (gvr, table) = pods();
    let parser = ObjectParser::new(&table);
    let pod = parser.parse(br#"{"metadata":{"name":"x","resourceVersion":"1"},"spec":null,"status":7}"#).unwrap();
    assert_eq!(parser.field(&pod, table.resolve("spec.hostNetwork", &gvr).unwrap()), "false");
    assert_eq!(pod.key().as_str(), "x");
}

#[test]
fn a_list_item_gets_the_bytes_that_a_watch_sends() {
    let parser = ObjectParser::new(&pods().1);
    let item = POD.replace(r#""kind":"Pod","apiVersion":"v1","#, "");
    assert_eq!(parser.from_list_item(item.as_bytes(), "Pod", "v1").unwrap().bytes(), POD.as_bytes());
    assert_eq!(parser.from_list_item(POD.as_bytes(), "Pod", "v1").unwrap().bytes(), POD.as_bytes());
}

#[test]
fn a_custom_object_with_keys_before_its_kind_is_unchanged() {
    let parser = ObjectParser::new(&pods().1);
    let item = r#"{"allowAll":true,"apiVersion":"v1","kind":"X","metadata":{"name":"x","resourceVersion":"1"}}"#;
    assert_eq!(parser.from_list_item(item.as_bytes(), "X", "v1").unwrap().bytes(), item.as_bytes());
}

#[test]
fn a_name_may_contain_escaped_characters() {
    let parser = ObjectParser::new(&pods().1);
    let role = parser.parse(br#"{"metadata":{"name":"a\u0026b","resourceVersion":"1"}}"#).unwrap();
    assert_eq!(role.key().name(), "a&b");
}

#[test]
fn bytes_at_replaces_only_the_resource_version() {
    let parser = ObjectParser::new(&pods().1);
    let pod = parser.parse(POD.as_bytes()).unwrap();
    let moved = pod.bytes_at(ResourceVersion::new(1000).unwrap());
    assert_eq!(moved, POD.replace("\"99\"", "\"1000\"").as_bytes());
}

#[test]
fn invalid_objects_are_refused() {
    let parser = ObjectParser::new(&pods().1);
    for json in ["", "{", "[]", "7", r#"{"metadata":{"name":"x"}}"#, r#"{"metadata":{"resourceVersion":"1"}}"#] {
        assert!(parser.parse(json.as_bytes()).is_err(), "{json}");
    }
    let trailing = format!("{POD} x");
    assert!(parser.parse(trailing.as_bytes()).is_err());
}

/// One packer without a dictionary, and one with.
static PACKERS: LazyLock<[Arc<Packer>; 2]> = LazyLock::new(|| {
    let parser = ObjectParser::new(&pods().1);
    let samples: Vec<_> = (0..50)
        .map(|n| Arc::new(parser.parse(POD.replace("web-1", &format!("web-{n}")).as_bytes()).unwrap()))
        .collect();
    let trained = Packer::new(samples.iter().map(|sample| sample.bytes()));
    assert!(trained.has_dictionary());
    [Arc::default(), Arc::new(trained)]
});

#[test]
fn a_packed_object_gives_the_same_bytes_at_any_version() {
    let parser = ObjectParser::new(&pods().1);
    let json = POD.replace("\"status\"", &format!("\"data\":\"{}\",\"status\"", "abc ".repeat(500)));
    let plain = Arc::new(parser.parse(json.as_bytes()).unwrap());
    for packer in &*PACKERS {
        let packed = plain.packed(packer);
        assert!(packed.is_packed() && packed.cost_bytes() < plain.cost_bytes() / 2);
        assert_eq!((packed.bytes(), packed.json_len()), (plain.bytes(), json.len()));
        let version = ResourceVersion::new(1000).unwrap();
        assert_eq!(packed.bytes_at(version), plain.bytes_at(version));
        assert!(Arc::ptr_eq(&packed.packed(packer), &packed));
    }
}

#[test]
fn an_object_that_packing_makes_no_smaller_stays_unpacked() {
    let parser = ObjectParser::new(&pods().1);
    let plain = Arc::new(parser.parse(br#"{"metadata":{"name":"x","resourceVersion":"1"}}"#).unwrap());
    assert!(Arc::ptr_eq(&plain.packed(&Arc::default()), &plain));
}

proptest::proptest! {
    #[test]
    fn a_packed_object_matches_selectors_like_the_unpacked_one(
        labels in proptest::collection::btree_map("[a-z]{1,40}(/[a-z]{1,5})?", "[a-zA-Z0-9]{0,63}", 0..12),
        uid in "[0-9a-f]{0,36}",
        node in "\\PC{0,200}",
        phase in "(Running|Pend\"ing)?",
        version in 1..u64::MAX,
    ) {
        let (gvr, table) = pods();
        let parser = ObjectParser::new(&table);
        let json = serde_json::json!({
            "metadata": {"name": "x", "namespace": "ns", "uid": uid, "resourceVersion": version.to_string(), "labels": labels},
            "spec": {"nodeName": node, "hostNetwork": true, "filler": "filler ".repeat(1000)},
            "status": {"phase": phase},
        });
        let plain = Arc::new(parser.parse(json.to_string().as_bytes()).unwrap());
        for packer in &*PACKERS {
            let packed = plain.packed(packer);
            proptest::prop_assert!(packed.is_packed());
            proptest::prop_assert_eq!((packed.key(), packed.uid(), packed.version()), (plain.key(), plain.uid(), plain.version()));
            proptest::prop_assert!(packed.labels().eq(plain.labels()) && plain.labels().count() == labels.len());
            for label in labels.keys().map(String::as_str).chain(["none"]) {
                proptest::prop_assert_eq!(packed.label(label), plain.label(label));
            }
            for field in ["metadata.name", "spec.nodeName", "spec.host", "spec.hostNetwork", "status.phase", "status.podIPs", "status.podIP"] {
                let field = table.resolve(field, &gvr).unwrap();
                proptest::prop_assert_eq!(parser.field(&packed, field), parser.field(&plain, field));
            }
            proptest::prop_assert_eq!(packed.bytes(), plain.bytes());
        }
    }
}
