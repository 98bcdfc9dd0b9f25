//! Projections by example, and compared with a reference that decodes the JSON.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use proptest::prelude::*;
use serde_json::Value;

use super::*;

fn full(managed: bool, applied: bool) -> Projection {
    Projection::new(Parts::Full, managed, applied).unwrap()
}

fn metadata() -> Projection {
    Projection::new(Parts::Metadata, false, false).unwrap()
}

fn try_fields(paths: &[&str]) -> Result<Projection, InvalidMask> {
    let paths: Vec<String> = paths.iter().map(|path| path.to_string()).collect();
    Projection::new(Parts::Fields(&paths), false, false)
}

fn fields(paths: &[&str]) -> Projection {
    try_fields(paths).unwrap()
}

fn applied(projection: &Projection, json: &str) -> String {
    String::from_utf8(projection.apply(json.as_bytes()).to_vec()).unwrap()
}

const POD: &str = r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"web","resourceVersion":"7","labels":{"app":"web"},"annotations":{"kubectl.kubernetes.io/last-applied-configuration":"{\"x\":1}\n","example.com/on":"yes"},"managedFields":[{"manager":"m"}]},"spec":{"nodeName":"n1","containers":[{"name":"a","image":"i:1"},{"name":"b"}],"volumes":[]},"status":{"phase":"Running"}}"#;

#[test]
fn a_full_object_is_unchanged() {
    assert!(full(false, false).is_identity());
    assert_eq!(applied(&Projection::default(), POD), POD);
}

#[test]
fn the_canonical_form_leaves_out_only_the_version_and_the_managed_fields() {
    let expected = POD.replace(r#""resourceVersion":"7","#, "").replace(r#","managedFields":[{"manager":"m"}]"#, "");
    assert_eq!(applied(&full(true, false), POD), expected);
    assert_eq!(full(true, false), Projection::default().canonical());
    let spaced = r#"{ "metadata" : { "resourceVersion" : "7" , "name" : "a" , "uid" : 7 } , "spec" : 1 }"#;
    assert_eq!(applied(&full(true, false), spaced), r#"{"metadata":{"name" : "a" , "uid" : 7},"spec" : 1}"#);
}

#[test]
fn dropping_the_last_applied_annotation_also_drops_an_empty_map() {
    let out = applied(&full(false, true), POD);
    assert!(out.contains(r#""annotations":{"example.com/on":"yes"}"#), "{out}");
    let only = r#"{"metadata":{"name":"a","annotations":{"kubectl.kubernetes.io/last-applied-configuration":"x"}}}"#;
    assert_eq!(applied(&full(false, true), only), r#"{"metadata":{"name":"a"}}"#);
    assert_eq!(full(false, true), full(true, true), "both are canonical");
}

#[test]
fn metadata_is_sent_as_a_partial_object_metadata() {
    let expected = r#"{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"name":"web","labels":{"app":"web"},"annotations":{"kubectl.kubernetes.io/last-applied-configuration":"{\"x\":1}\n","example.com/on":"yes"}}}"#;
    assert_eq!(applied(&metadata(), POD), expected);
    assert_eq!(applied(&metadata(), expected), expected);
}

#[test]
fn a_field_mask_keeps_its_fields_in_the_order_of_the_object() {
    let out = applied(&fields(&["status.phase", "spec.containers.image", "metadata.labels", "spec.nodeName"]), POD);
    assert_eq!(
        out,
        r#"{"metadata":{"labels":{"app":"web"}},"spec":{"nodeName":"n1","containers":[{"image":"i:1"},{}]},"status":{"phase":"Running"}}"#
    );
    assert_eq!(
        applied(&fields(&[r"metadata.annotations.example\.com/on"]), POD),
        r#"{"metadata":{"annotations":{"example.com/on":"yes"}}}"#
    );
    assert_eq!(applied(&fields(&["metadata.annotations.example", "spec.volumes.name", "kind.x"]), POD), "{}");
    assert_eq!(applied(&fields(&["a.b"]), r#"{"a":[1,{"c":1},null,[{"b":1}],{"b":[]}]}"#), r#"{"a":[{},{"b":[]}]}"#);
}

#[test]
fn a_mask_of_the_metadata_is_canonical_too() {
    let out = applied(&fields(&["metadata"]), POD);
    assert!(
        out.contains("example.com/on") && !out.contains("resourceVersion") && !out.contains("managedFields"),
        "{out}"
    );
    assert_ne!(fields(&["metadata"]), metadata(), "only one calls itself a PartialObjectMetadata");
}

#[test]
fn names_are_compared_without_escapes() {
    let json = r#"{"m\u0065tadata":{"n\"":1,"resource\u0056ersion":"1"}}"#;
    assert_eq!(applied(&full(true, false), json), r#"{"m\u0065tadata":{"n\"":1}}"#);
    assert_eq!(applied(&fields(&["metadata.n\""]), json), r#"{"m\u0065tadata":{"n\"":1}}"#);
}

#[test]
fn equal_requests_are_equal() {
    assert_eq!(fields(&["a", "b.c"]), fields(&["b.c", "a.x", "a", "b.c", "b.c.d"]));
    assert_eq!(fields(&["b.c.d", "b.c"]), fields(&["b.c"]));
    assert_ne!(fields(&["a.b"]), fields(&[r"a\.b"]));
    let with_drop = |paths: &[&str]| {
        let paths: Vec<String> = paths.iter().map(|path| path.to_string()).collect();
        Projection::new(Parts::Fields(&paths), true, true).unwrap()
    };
    assert_eq!(with_drop(&["spec"]), fields(&["spec"]), "there is nothing to drop");
    assert_ne!(with_drop(&["metadata"]), fields(&["metadata"]));
}

#[test]
fn an_invalid_mask_is_refused_and_its_path_is_named() {
    let deep = vec!["a"; PATH_NAMES_MAX + 1].join(".");
    let long = "a".repeat(PATH_BYTES_MAX + 1);
    for path in [
        "",
        ".",
        "a.",
        ".a",
        "a..b",
        r"a\b",
        r"a\",
        &deep,
        &long,
        "metadata.resourceVersion",
        "metadata.managedFields.x",
    ] {
        let error = try_fields(&["spec", path]).unwrap_err();
        assert!(matches!(&error, InvalidMask::Path { .. }), "{path}");
        assert!(error.to_string().contains(&format!("{:?}", path.chars().take(128).collect::<String>())), "{error}");
    }
    assert_eq!(try_fields(&[]), Err(InvalidMask::Empty));
    assert_eq!(try_fields(&vec!["a"; PATHS_MAX + 1]), Err(InvalidMask::TooMany(PATHS_MAX + 1)));
    let last_applied = [r"metadata.annotations.kubectl\.kubernetes\.io/last-applied-configuration".to_owned()];
    assert!(Projection::new(Parts::Fields(&last_applied), false, true).is_err());
    assert!(Projection::new(Parts::Fields(&last_applied), false, false).is_ok());
}

#[test]
fn deeply_nested_values_do_not_overflow_the_stack() {
    let deep = |open: &str, close: &str| format!(r#"{{"a":{}1{}}}"#, open.repeat(100_000), close.repeat(100_000));
    for json in [deep("[", "]"), deep(r#"{"a":"#, "}")] {
        assert_eq!(applied(&full(true, false), &json), json);
        assert_eq!(applied(&fields(&["a"]), &json), json);
        assert_eq!(applied(&fields(&["a.b"]), &json), "{}");
    }
}

#[test]
fn a_difference_is_seen_only_by_projections_that_keep_it() {
    let seen =
        |after: &str, projection: &Projection| Difference::new(POD.as_bytes(), after.as_bytes()).may_change(projection);
    let sees = |after: &str, expected: &[&str]| {
        let masks = ["metadata.labels", "metadata.annotations.other", "spec.containers.image", "status.phase", "spec"];
        let seen: Vec<_> = masks.into_iter().filter(|mask| seen(after, &fields(&[mask]))).collect();
        assert_eq!(seen, expected, "{after}");
    };
    sees(POD, &[]);
    sees(&POD.replace("Running", "Failed"), &["status.phase"]);
    sees(&POD.replace(r#""name":"b""#, r#""name":"c""#), &["spec"]);
    sees(&POD.replace("i:1", "i:2"), &["spec.containers.image", "spec"]);
    sees(&POD.replace(r#","labels":{"app":"web"}"#, ""), &["metadata.labels"]);
    sees(&POD.replace(r#""volumes":[]"#, r#""volumes":[1]"#), &["spec"]);
    let managed = POD.replace(r#""resourceVersion":"7""#, r#""resourceVersion":"8""#).replace(r#""m""#, r#""n""#);
    sees(&managed, &[]);
    assert!(!seen(&managed, &full(true, false)) && seen(&managed, &Projection::default()));
}

/// Key names that projections treat specially, and some others.
const KEYS: [&str; 10] =
    ["metadata", "annotations", "resourceVersion", "managedFields", LAST_APPLIED, "kind", "a", "b", "a.b", "\"\\"];

fn key() -> impl Strategy<Value = String> {
    proptest::sample::select(&KEYS).prop_map(str::to_owned)
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[a\"\\\\é{}\\[\\]:,]{0,4}".prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 48, 6, |inner| {
        prop_oneof![
            1 => prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            4 => prop::collection::btree_map(key(), inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// The part of a decoded value that the paths keep.
fn masked(value: &Value, paths: &[Vec<String>]) -> Option<Value> {
    if paths.iter().any(Vec::is_empty) {
        return Some(value.clone());
    }
    let Value::Object(map) = value else {
        let Value::Array(list) = value else { return None };
        let objects = list.iter().filter(|element| element.is_object());
        let list: Vec<Value> =
            objects.map(|object| masked(object, paths).unwrap_or(Value::Object(Default::default()))).collect();
        return (!list.is_empty()).then_some(Value::Array(list));
    };
    let mut out = serde_json::Map::new();
    for (key, value) in map {
        let under: Vec<_> = paths.iter().filter(|path| path[0] == *key).map(|path| path[1..].to_vec()).collect();
        if let Some(value) = (!under.is_empty()).then(|| masked(value, &under)).flatten() {
            out.insert(key.clone(), value);
        }
    }
    (!out.is_empty()).then_some(Value::Object(out))
}

/// Removes the field at a path, and the maps that become empty by that.
fn without(value: &mut Value, path: &[&str]) {
    let Value::Object(map) = value else { return };
    if path.len() == 1 {
        map.remove(path[0]);
    } else if let Some(inner) = map.get_mut(path[0]) {
        without(inner, &path[1..]);
        if inner.as_object().is_some_and(serde_json::Map::is_empty) {
            map.remove(path[0]);
        }
    }
}

fn reference(value: &Value, paths: Option<&[String]>, drop_last_applied: bool) -> Value {
    let mut value = match paths {
        None => value.clone(),
        Some(paths) => {
            let paths: Vec<_> = paths.iter().map(|path| names(path).unwrap()).collect();
            masked(value, &paths).unwrap_or(Value::Object(Default::default()))
        }
    };
    // A field that a path names exactly is kept whole, even if it is empty. Only maps that became
    // empty are removed.
    let drop_fields = |value: &mut Value| {
        without(value, &RESOURCE_VERSION);
        without(value, &MANAGED_FIELDS);
        if drop_last_applied {
            without(value, &LAST_APPLIED_PATH);
        }
    };
    drop_fields(&mut value);
    value
}

fn paths() -> impl Strategy<Value = Option<Vec<String>>> {
    let name = prop_oneof![Just("metadata"), Just("annotations"), Just("a"), Just("b"), Just("a\\.b"), Just("\"\\\\")];
    let path = prop::collection::vec(name, 1..4).prop_map(|names| names.join("."));
    prop::option::of(prop::collection::vec(path, 1..4))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_projection_equals_the_decoding_reference(value in value(), paths in paths(), applied in any::<bool>(), pretty in any::<bool>()) {
        let object = serde_json::json!({"metadata": value, "a": value});
        for value in [&object, &value] {
            let json = if pretty { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) }.unwrap();
            let parts = paths.as_deref().map_or(Parts::Full, Parts::Fields);
            let projection = Projection::new(parts, true, applied).unwrap();
            let out = projection.apply(json.as_bytes());
            if value.is_object() {
                let decoded: Value = serde_json::from_slice(&out).unwrap();
                prop_assert_eq!(&decoded, &reference(value, paths.as_deref(), applied));
                prop_assert_eq!(projection.apply(&out), out, "projecting twice changes nothing");
            } else {
                prop_assert!(out.is_empty() || serde_json::from_slice::<Value>(&out).is_ok());
            }
        }
    }

    #[test]
    fn a_projection_of_which_no_difference_is_seen_gives_the_same_bytes(
        before in value(), other in value(), paths in paths(), applied in any::<bool>(), pretty in any::<bool>(),
    ) {
        let text = |value: &Value| if pretty { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) }.unwrap();
        let object = |metadata: &Value, a: &Value| text(&serde_json::json!({"metadata": metadata, "a": [a, {"b": a}], "b": before}));
        let projection = Projection::new(paths.as_deref().map_or(Parts::Full, Parts::Fields), true, applied).unwrap();
        let first = object(&before, &before);
        for second in [object(&before, &other), object(&other, &before), object(&before, &before), text(&other)] {
            let difference = Difference::new(first.as_bytes(), second.as_bytes());
            if !difference.may_change(&projection) {
                prop_assert_eq!(projection.apply(first.as_bytes()), projection.apply(second.as_bytes()));
            }
        }
    }

    #[test]
    fn any_bytes_are_accepted_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..64), cut in 0..POD.len(), paths in paths()) {
        let projection = Projection::new(paths.as_deref().map_or(Parts::Metadata, Parts::Fields), false, true).unwrap();
        for json in [&bytes[..], &POD.as_bytes()[..cut]] {
            prop_assert!(projection.apply(json).is_empty() || serde_json::from_slice::<Value>(json).is_ok());
            full(true, true).apply(json);
        }
    }
}
