//! Cuts `metadata.managedFields` and kubectl's last-applied annotation out of an object's JSON.
//!
//! They are often half of an object, and few programs read them. The rest of the JSON keeps its
//! bytes and order.

use std::{collections::BTreeMap, ops::Range};

use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

/// The annotation in which `kubectl apply` stores the whole object.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The parts to cut out of an object.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Cuts {
    pub(super) managed_fields: bool,
    pub(super) last_applied: bool,
}

/// The members of a JSON object, as slices of it.
type Members<'a> = BTreeMap<String, &'a RawValue>;

/// Returns the JSON without the parts to cut. JSON that cannot be parsed is returned unchanged: the
/// decoding of the object reports it.
pub(super) fn apply(json: Bytes, cuts: Cuts) -> Bytes {
    if cuts == Cuts::default() {
        return json;
    }
    let ranges = ranges(&json, cuts).unwrap_or_default();
    if ranges.is_empty() {
        return json;
    }
    let mut rest = Vec::with_capacity(json.len() - ranges.iter().map(Range::len).sum::<usize>());
    let mut start = 0;
    for range in ranges {
        rest.extend_from_slice(&json[start..range.start]);
        start = range.end;
    }
    rest.extend_from_slice(&json[start..]);
    rest.into()
}

/// The ranges to cut, in order and without overlap: they lie in different objects.
fn ranges(json: &[u8], cuts: Cuts) -> Option<Vec<Range<usize>>> {
    #[derive(Deserialize)]
    struct Object<'a> {
        #[serde(borrow, default)]
        metadata: Option<&'a RawValue>,
    }
    let Object { metadata } = serde_json::from_slice(json).ok()?;
    let metadata: Members<'_> = serde_json::from_str(metadata?.get()).ok()?;
    let mut ranges = Vec::new();
    if cuts.managed_fields {
        ranges.extend(metadata.get("managedFields").and_then(|value| member(json, "managedFields", value)));
    }
    if cuts.last_applied
        && let Some(annotations) = metadata.get("annotations")
        && let Ok(annotations) = serde_json::from_str::<Members<'_>>(annotations.get())
    {
        ranges.extend(annotations.get(LAST_APPLIED).and_then(|value| member(json, LAST_APPLIED, value)));
    }
    ranges.sort_by_key(|range| range.start);
    Some(ranges)
}

/// The range of a member of an object: its key, its value, and one comma if there is one. `None` if
/// the key is written with escapes, which servers do not do.
fn member(json: &[u8], key: &str, value: &RawValue) -> Option<Range<usize>> {
    let text = value.get();
    let value_start = (text.as_ptr() as usize).checked_sub(json.as_ptr() as usize)?;
    let value_end = value_start + text.len();
    let before = json.get(..value_start)?.trim_ascii_end().strip_suffix(b":")?.trim_ascii_end();
    let before = before.strip_suffix(b"\"")?.strip_suffix(key.as_bytes())?.strip_suffix(b"\"")?;
    let start = before.trim_ascii_end();
    if let Some(start) = start.strip_suffix(b",") {
        return Some(start.len()..value_end);
    }
    let after = json.get(value_end..)?;
    let comma = after.len() - after.trim_ascii_start().len();
    let end = if after.get(comma) == Some(&b',') { value_end + comma + 1 } else { value_end };
    Some(before.len()..end)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    const BOTH: Cuts = Cuts { managed_fields: true, last_applied: true };

    fn cut(json: &str, cuts: Cuts) -> String {
        String::from_utf8(apply(json.to_owned().into(), cuts).to_vec()).unwrap()
    }

    #[test]
    fn only_the_named_parts_are_cut_and_the_other_bytes_stay() {
        let json = concat!(
            r#"{ "metadata" : { "managedFields" : [ {} ] , "name":"a","annotations":{"x":"\u0031","#,
            r#""kubectl.kubernetes.io/last-applied-configuration":"{}"} },"#,
            r#""managedFields":1,"spec":{"metadata":{"managedFields":2}}}"#
        );
        assert_eq!(
            cut(json, BOTH),
            r#"{ "metadata" : {  "name":"a","annotations":{"x":"\u0031"} },"managedFields":1,"spec":{"metadata":{"managedFields":2}}}"#
        );
        let managed = cut(json, Cuts { managed_fields: true, last_applied: false });
        assert!(managed.contains("last-applied") && !managed.contains("[ {} ]"), "{managed}");
        let applied = cut(json, Cuts { managed_fields: false, last_applied: true });
        assert!(!applied.contains("last-applied") && applied.contains("[ {} ]"), "{applied}");
    }

    #[test]
    fn an_object_without_these_parts_is_not_copied() {
        for json in [r#"{"metadata":{"name":"a","annotations":null}}"#, "{}", "[]", "{", r#"{"metadata":null}"#] {
            let bytes = Bytes::from_static(json.as_bytes());
            assert_eq!(apply(bytes.clone(), BOTH).as_ptr(), bytes.as_ptr(), "{json}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn the_rest_is_what_removing_the_members_leaves(
            before in prop::collection::vec("[a-c]", 0..3),
            after in prop::collection::vec("[x-z]", 0..3),
            text in ".{0,10}",
            space in "[ \n\t]{0,2}",
            pretty in any::<bool>(),
        ) {
            // serde_json orders members by name.
            let name = |names: &[String], prefix: &str| -> Vec<String> {
                names.iter().map(|name| format!("{prefix}{name}")).collect()
            };
            let mut metadata = json!({});
            let mut annotations = json!({});
            for key in name(&before, "a").into_iter().chain(name(&after, "z")) {
                metadata[&key] = json!({ "managedFields": text });
                annotations[&key] = json!(text);
            }
            annotations[LAST_APPLIED] = json!(text);
            metadata["managedFields"] = json!([{ "x": text }]);
            metadata["annotations"] = annotations;
            let mut object = json!({ "metadata": metadata, "spec": { "managedFields": text } });
            let written = if pretty { serde_json::to_string_pretty(&object) } else { serde_json::to_string(&object) };
            let written = written.unwrap().replace("\"managedFields\":", &format!("\"managedFields\"{space}:{space}"));
            prop_assume!(!text.contains("managedFields"));
            let rest: Value = serde_json::from_str(&cut(&written, BOTH)).unwrap();
            object["metadata"].as_object_mut().unwrap().remove("managedFields");
            object["metadata"]["annotations"].as_object_mut().unwrap().remove(LAST_APPLIED);
            prop_assert_eq!(rest, object);
        }
    }
}
