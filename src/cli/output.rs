//! Prints objects as JSON, YAML or names in kubectl's format.

use std::io::{self, IsTerminal, Write};

use clap::ValueEnum;
use serde::Serialize;
use serde_json::{Value, ser::PrettyFormatter, value::RawValue};

use super::{
    table::type_name,
    visible::{EscapedJson, visible, visible_lines},
};
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
        Format::Name => writeln!(out, "{}", visible(&format!("{}/{}", type_name(resource), object.name))),
        Format::Json => print_json(out, &shown(object, managed_fields)?),
        Format::Yaml => {
            let shown = shown(object, managed_fields)?;
            shown.check_depth()?;
            print_yaml(out, &shown)
        }
    }
}

/// Prints a `v1` List of objects.
pub(super) fn print_list<'a>(
    out: &mut impl Write,
    format: Format,
    objects: impl Iterator<Item = &'a Object>,
    managed_fields: bool,
) -> io::Result<()> {
    let items = objects.map(|object| shown(object, managed_fields)).collect::<io::Result<Vec<_>>>()?;
    let list = List { api_version: "v1", items, kind: "List", metadata: ListMetadata { resource_version: "" } };
    match format {
        Format::Yaml => {
            for item in &list.items {
                item.check_depth()?;
            }
            print_yaml(out, &list)
        }
        Format::Json | Format::Name => print_json(out, &list),
    }
}

/// A `v1` List.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct List<'a> {
    api_version: &'static str,
    items: Vec<Shown<'a>>,
    kind: &'static str,
    metadata: ListMetadata,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ListMetadata {
    resource_version: &'static str,
}

/// An object to print.
#[derive(Serialize)]
#[serde(untagged)]
enum Shown<'a> {
    Value(Value),
    /// The object as it is, because it is nested deeper than serde_json makes values of.
    Raw(&'a RawValue),
}

impl Shown<'_> {
    /// Whether YAML has a form for it.
    ///
    /// # Errors
    /// If the object is nested too deep.
    fn check_depth(&self) -> io::Result<()> {
        match self {
            Self::Value(_) => Ok(()),
            Self::Raw(_) => Err(io::Error::other("an object is nested too deep for YAML; use -o json")),
        }
    }
}

fn print_json(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let escaped = EscapedJson(&mut *out);
    let mut serializer = serde_json::Serializer::with_formatter(escaped, PrettyFormatter::with_indent(b"    "));
    value.serialize(&mut serializer)?;
    writeln!(out)
}

fn print_yaml(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let text = serde_saphyr::to_string(value).map_err(io::Error::other)?;
    // YAML has no escapes outside of quotes. A file gets the text as it is.
    if io::stdout().is_terminal() {
        out.write_all(visible_lines(&text).as_bytes())
    } else {
        out.write_all(text.as_bytes())
    }
}

/// The object as JSON. As in kubectl, it lacks metadata.managedFields unless `managed_fields` is
/// set.
///
/// # Errors
/// The object is not JSON.
fn shown(object: &Object, managed_fields: bool) -> io::Result<Shown<'_>> {
    let Ok(mut value) = serde_json::from_slice::<Value>(&object.object) else {
        let raw = serde_json::from_slice(&object.object).map(Shown::Raw);
        return raw.map_err(|error| io::Error::other(format!("{:?} is not JSON: {error}", object.name)));
    };
    if !managed_fields && let Some(metadata) = value["metadata"].as_object_mut() {
        metadata.remove("managedFields");
    }
    Ok(Shown::Value(value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// An object that serde_json makes no value of.
    fn deep() -> Object {
        let object = format!("{{\"spec\":{}1{}}}", "[".repeat(200), "]".repeat(200));
        Object { name: "deep".into(), object: object.into(), ..Object::default() }
    }

    #[test]
    fn an_object_that_is_nested_deep_is_printed_whole() {
        let resource = ResolvedResource::default();
        let one = printed(|out| print_object(out, Format::Json, &resource, &deep(), false));
        assert_eq!(one.trim_end().as_bytes(), deep().object);
        let list = printed(|out| print_list(out, Format::Json, [deep(), pod()].iter(), false));
        assert!(list.contains(one.trim_end()) && list.contains("\"containers\""), "{list}");
        let error = print_object(&mut Vec::new(), Format::Yaml, &resource, &deep(), false).unwrap_err();
        assert!(error.to_string().contains("use -o json"), "{error}");
        let error = print_list(&mut Vec::new(), Format::Yaml, [pod(), deep()].iter(), false).unwrap_err();
        assert!(error.to_string().contains("use -o json"), "{error}");
        let broken = Object { name: "odd".into(), object: "{".into(), ..Object::default() };
        let error = print_object(&mut Vec::new(), Format::Json, &resource, &broken, false).unwrap_err();
        assert!(error.to_string().contains("\"odd\" is not JSON"), "{error}");
    }

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
