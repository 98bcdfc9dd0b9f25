//! Converts protobuf answers to JSON with the objects' names and bytes, so that one comparison
//! works for both encodings.

use kubefan_model::protobuf::{
    self, META_NAME, META_NAMESPACE, META_RESOURCE_VERSION, METADATA, Malformed, Status,
    wire::{Fields, Value as Field, bytes_field},
};
use serde_json::{Value, json};

/// The content type of an object, a list or a watch.
pub(super) const CONTENT_TYPE: &str = "application/vnd.kubernetes.protobuf";

/// A body as JSON, or an error message.
pub(super) fn text(content_type: &str, body: &[u8]) -> String {
    let text =
        if content_type.ends_with(";stream=watch") { events(body) } else { whole(body).map(|value| value.to_string()) };
    text.unwrap_or_else(|error| format!("{error}: {}", hex(body)))
}

fn events(mut body: &[u8]) -> Result<String, Malformed> {
    let mut lines = String::new();
    while let Some((length, rest)) = body.split_first_chunk::<4>() {
        let Some((event, rest)) = rest.split_at_checked(u32::from_be_bytes(*length) as usize) else {
            lines += &format!("INCOMPLETE: {}\n", hex(rest));
            break;
        };
        let event = protobuf::read_watch_event(event)?;
        lines += &format!("{}\n", json!({ "type": event.kind, "object": whole(event.object)? }));
        body = rest;
    }
    Ok(lines)
}

fn whole(body: &[u8]) -> Result<Value, Malformed> {
    if let Some(read) = Status::read(body) {
        // Its bytes vary with the masked parts. They match if both servers write every field.
        let is_complete = read.to_bytes() == body;
        let Status { status, message, reason, details, code, .. } = read;
        let details = format!("{details:?}");
        return Ok(json!({
            "kind": "Status", "status": status, "message": message, "reason": reason, "details": details, "code": code,
            "complete": is_complete,
        }));
    }
    let opened = protobuf::open(body)?;
    let mut value = object(opened.message)?;
    value["kind"] = opened.kind.into();
    // The bytes of the envelope, which must match for every kind.
    value["envelope"] = hex(&body[..body.len() - opened.message.len()]).into();
    if opened.kind.ends_with("List") {
        let list = protobuf::read_list(opened.message)?;
        let protobuf::ListMeta { resource_version, next, remaining_item_count, .. } = list.meta;
        let mut metadata = json!({ "resourceVersion": resource_version, "continue": next });
        if let Some(remaining) = remaining_item_count {
            metadata["remainingItemCount"] = remaining.into();
        }
        let items: Result<Vec<_>, _> = list.items.into_iter().map(object).collect();
        // The envelope is left out, because its length varies with the masked parts.
        value = json!({ "kind": opened.kind, "metadata": metadata, "items": items? });
    }
    Ok(value)
}

/// An object. For bookmarks only the metadata matters.
fn object(message: &[u8]) -> Result<Value, Malformed> {
    let metadata = bytes_field(message, METADATA)?.unwrap_or_default();
    let mut value = json!({ "metadata": {}, "bytes": hex(message) });
    for (name, number) in
        [("name", META_NAME), ("namespace", META_NAMESPACE), ("resourceVersion", META_RESOURCE_VERSION)]
    {
        let text = bytes_field(metadata, number)?.unwrap_or_default();
        value["metadata"][name] = String::from_utf8_lossy(text).into();
    }
    for field in Fields::of(metadata) {
        let field = field?;
        if let (META_ANNOTATIONS, Field::Bytes(entry)) = (field.number, field.value) {
            let text =
                |number| Ok(String::from_utf8_lossy(bytes_field(entry, number)?.unwrap_or_default()).into_owned());
            value["metadata"]["annotations"][text(protobuf::ENTRY_KEY)?] = text(protobuf::ENTRY_VALUE)?.into();
        }
    }
    Ok(value)
}

/// The field number of `metadata.annotations`.
const META_ANNOTATIONS: u32 = 12;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
