use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn fields(json: &str) -> [String; 4] {
    let Metadata { namespace, name, uid, resource_version } = read(json.as_bytes()).unwrap();
    [namespace, name, uid, resource_version].map(Cow::into_owned)
}

#[test]
fn metadata_is_found_in_every_order_of_fields() {
    let expected = ["a", "b", "u", "7"];
    let pod =
        r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"b","namespace":"a","uid":"u","resourceVersion":"7"}}"#;
    assert_eq!(fields(pod), expected);
    let custom = r#"{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"annotations":{"name":"x"},
        "managedFields":[{"fieldsV1":{"f:metadata":{"f:name":{}}},"metadata":{"uid":"y"}}],
        "name":"b","namespace":"a","ownerReferences":[{"name":"z","uid":"z"}],"resourceVersion":"7","uid":"u"},
        "spec":{"metadata":{"name":"no"}}}"#;
    assert_eq!(fields(custom), expected);
    let last = r#"{"spec":{"template":{"metadata":{"name":"no","uid":"no"}},"metadata":[1,{"metadata":{}}]},"status":null,
        "metadata":{"uid":"u","resourceVersion":"7","namespace":"a","name":"b"}}"#;
    assert_eq!(fields(last), expected);
}

#[test]
fn a_cluster_scoped_object_has_no_namespace() {
    assert_eq!(fields(r#"{"metadata":{"name":"n","uid":"u","resourceVersion":"7"},"x":1}"#), ["", "n", "u", "7"]);
    assert_eq!(fields(r#"{"metadata":{"name":"n","namespace":null}}"#), ["", "n", "", ""]);
    let raw = raw_object(Bytes::from_static(br#"{"metadata":{"name":"n","resourceVersion":"7"}}"#)).unwrap();
    assert_eq!((raw.key.as_str(), &*raw.resource_version, &*raw.uid), ("n", "7", ""));
}

#[test]
fn escapes_in_keys_and_values_are_read() {
    let json = r#"{"meta\u0064ata":{"n\u0061me":"b\"\u00e9","namespace":"a\\","uid":"u","resourceVersion":"7"}}"#;
    assert_eq!(fields(json), ["a\\", "b\"é", "u", "7"]);
}

#[test]
fn nothing_after_the_four_fields_is_read() {
    assert_eq!(
        fields(r#"{"metadata":{"name":"b","namespace":"a","uid":"u","resourceVersion":"7",broken"#),
        ["a", "b", "u", "7"]
    );
    assert_eq!(fields(r#"{"metadata":{"name":"b"},broken"#), ["", "b", "", ""]);
}

#[test]
fn an_object_without_readable_metadata_is_an_error() {
    for json in [
        "",
        "{",
        "null",
        "[]",
        r#"{"kind":"Pod"}"#,
        r#"{"metadata":null}"#,
        r#"{"metadata":{"uid":"u"}}"#,
        r#"{"metadata":{"name":7}}"#,
        r#"{"metadata":{"name":"a""#,
        r#"{"metadata":{"name":""}}"#,
    ] {
        assert!(read(json.as_bytes()).is_err(), "{json}");
    }
}

/// Any JSON that is not too deep, with the interesting names often.
fn any_json() -> impl Strategy<Value = Value> {
    let name = prop_oneof![
        Just("metadata".to_owned()),
        Just("name".to_owned()),
        Just("uid".to_owned()),
        Just("kind".to_owned()),
        ".{0,5}"
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,8}".prop_map(Value::from)
    ];
    leaf.prop_recursive(3, 24, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((name.clone(), inner), 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect()))
        ]
    })
}

/// The JSON text of an object with its members in the given order.
fn object_text(members: &[(String, String)]) -> String {
    let members: Vec<_> = members.iter().map(|(key, value)| format!("{}:{value}", json!(key))).collect();
    format!("{{{}}}", members.join(", "))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_early_end_gives_the_same_as_a_full_parse(
        texts in prop::collection::vec(prop::option::weighted(0.9, ".{1,9}"), 4),
        extra in prop::collection::vec(("[a-fx]{1,6}", any_json()), 0..6),
        around in prop::collection::vec(("[g-kx]{1,6}", any_json()), 0..6),
        order in any::<prop::sample::Index>(),
        seed in prop::collection::vec(any::<u32>(), 16),
    ) {
        let shuffle = |mut members: Vec<(String, String)>| {
            members.sort();
            members.dedup_by(|a, b| a.0 == b.0);
            let mut keyed: Vec<_> = members.into_iter().enumerate().collect();
            keyed.sort_by_key(|(index, _)| seed[*index]);
            keyed.into_iter().map(|(_, member)| member).collect::<Vec<_>>()
        };
        let text = |members: Vec<(String, Value)>| {
            members.into_iter().map(|(key, value)| (key, value.to_string())).collect::<Vec<_>>()
        };
        let names = ["namespace", "name", "uid", "resourceVersion"];
        let mut metadata = text(extra);
        metadata.extend(names.iter().zip(&texts).filter_map(|(name, text)| {
            text.as_ref().map(|text| ((*name).to_owned(), json!(text).to_string()))
        }));
        let metadata = object_text(&shuffle(metadata));
        let mut object = shuffle(text(around));
        object.insert(order.index(object.len() + 1), ("metadata".to_owned(), metadata));
        let object = object_text(&object);

        let full: Value = serde_json::from_str(&object).unwrap();
        let field = |name: &str| full["metadata"][name].as_str().unwrap_or_default().to_owned();
        match read(object.as_bytes()) {
            Ok(Metadata { namespace, name, uid, resource_version }) => {
                let read = [namespace, name, uid, resource_version].map(Cow::into_owned);
                prop_assert_eq!(read, names.map(field));
            }
            Err(_) => prop_assert!(field("name").is_empty()),
        }
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(json in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = read(&json);
        let _ = read_event(&json.clone().into());
        let _ = read_page(&json.into());
    }
}

#[test]
fn items_are_slices_of_the_page_and_have_the_lists_kind() {
    let page = Bytes::from_static(
        br#"{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"9","continue":"next"},
            "items":[{"metadata":{"name":"a"}},{"apiVersion":"v1","kind":"Pod","metadata":{"name":"b"}},{}]}"#,
    );
    let read = read_page(&page).unwrap();
    assert_eq!((read.resource_version.as_str(), read.continue_token.as_str(), read.items.len()), ("9", "next", 3));
    assert_eq!(&read.items[0][..], br#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a"}}"#);
    assert_eq!(&read.items[1][..], br#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"b"}}"#);
    assert!(page.as_ptr_range().contains(&read.items[1].as_ptr()), "not copied");
}

#[test]
fn an_empty_list_may_have_null_items() {
    for items in ["null", "[]"] {
        let json = format!(r#"{{"metadata":{{"resourceVersion":"9"}},"items":{items}}}"#);
        let page = read_page(&json.into()).unwrap();
        assert!(page.items.is_empty() && page.continue_token.is_empty());
    }
    assert!(read_page(&Bytes::from_static(b"{}")).is_err());
}
