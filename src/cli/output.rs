//! Prints objects as JSON, YAML or names in kubectl's format.

use std::io::{self, Write};

use clap::ValueEnum;
use serde::Serialize;
use serde_json::{Value, json, ser::PrettyFormatter};

use super::table::type_name;
use kubefan_client::{ResolvedResource, grpc::Object};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Format {
    /// JSON; a List if more than one object can match
    Json,
    /// YAML
    Yaml,
    /// TYPE/NAME
    Name,
}

/// Prints one object as a separate document.
pub(super) fn print_object(
    out: &mut impl Write,
    format: Format,
    resource: &ResolvedResource,
    object: &Object,
    managed_fields: bool,
) -> io::Result<()> {
    match format {
        Format::Name => writeln!(out, "{}/{}", type_name(resource), object.name),
        format => print_value(out, format, &value(object, managed_fields)),
    }
}

/// Prints a `v1` List of objects.
pub(super) fn print_list<'a>(
    out: &mut impl Write,
    format: Format,
    objects: impl Iterator<Item = &'a Object>,
    managed_fields: bool,
) -> io::Result<()> {
    let items: Vec<Value> = objects.map(|object| value(object, managed_fields)).collect();
    print_value(
        out,
        format,
        &json!({"apiVersion": "v1", "items": items, "kind": "List", "metadata": {"resourceVersion": ""}}),
    )
}

fn print_value(out: &mut impl Write, format: Format, value: &Value) -> io::Result<()> {
    if format == Format::Yaml {
        let text = serde_saphyr::to_string(value).map_err(io::Error::other)?;
        return out.write_all(text.as_bytes());
    }
    let mut serializer = serde_json::Serializer::with_formatter(&mut *out, PrettyFormatter::with_indent(b"    "));
    value.serialize(&mut serializer)?;
    writeln!(out)
}

/// The object as JSON. As in kubectl, it lacks metadata.managedFields unless `managed_fields` is
/// set.
fn value(object: &Object, managed_fields: bool) -> Value {
    let mut value: Value = serde_json::from_slice(&object.object).unwrap_or_default();
    if let (false, Some(metadata)) = (managed_fields, value["metadata"].as_object_mut()) {
        metadata.remove("managedFields");
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> Object {
        let body = r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a","managedFields":[{"x":1}],"labels":{"on":"true"}},"spec":{"containers":[{"name":"c"}]}}"#;
        Object { name: "a".into(), object: body.into(), ..Object::default() }
    }

    fn printed(print: impl FnOnce(&mut Vec<u8>) -> io::Result<()>) -> String {
        let mut out = Vec::new();
        print(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_list_is_printed_as_kubectl_prints_a_v1_list() {
        let text = printed(|out| print_list(out, Format::Json, [pod()].iter(), false));
        assert!(
            text.starts_with(
                "{\n    \"apiVersion\": \"v1\",\n    \"items\": [\n        {\n            \"apiVersion\": \"v1\","
            ),
            "{text}"
        );
        assert!(!text.contains("managedFields"));
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&value["kind"], &value["items"][0]["metadata"]["name"]), (&json!("List"), &json!("a")));
        let empty = printed(|out| print_list(out, Format::Json, [].iter(), false));
        assert!(empty.contains("\"items\": []"), "{empty}");
    }

    #[test]
    fn yaml_output_parses_back_to_the_same_object() {
        let text = printed(|out| print_object(out, Format::Yaml, &ResolvedResource::default(), &pod(), true));
        assert!(text.starts_with("apiVersion: v1\nkind: Pod\nmetadata:\n"), "{text}");
        let back: Value = serde_saphyr::from_str(&text).unwrap();
        assert_eq!(back, serde_json::from_slice::<Value>(&pod().object).unwrap());
    }

    #[test]
    fn names_are_printed_with_their_type() {
        let resource =
            ResolvedResource { kind: "Deployment".into(), group: "apps".into(), ..ResolvedResource::default() };
        let text = printed(|out| print_object(out, Format::Name, &resource, &pod(), false));
        assert_eq!(text, "deployment.apps/a\n");
    }
}
