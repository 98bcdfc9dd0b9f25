//! Decodes lists and watches of pods, in JSON and in protobuf. It shares no code with the encoders
//! under test.

use std::collections::BTreeMap;

use bytes::{Buf, Bytes, BytesMut};
use serde::Deserialize;
use serde_json::{Value, value::RawValue};

/// A page of a list. Its objects have the form that a watch gives them.
pub(crate) struct Page {
    pub(crate) version: u64,
    pub(crate) next: String,
    pub(crate) remaining: Option<u64>,
    pub(crate) items: Vec<Pod>,
}

/// A pod as it was received.
pub(crate) struct Pod {
    pub(crate) key: String,
    pub(crate) uid: String,
    pub(crate) version: u64,
    /// JSON with its type, or a protobuf message without its envelope.
    pub(crate) bytes: Bytes,
}

/// An event of a watch.
pub(crate) enum Message {
    /// ADDED, MODIFIED or DELETED.
    Event(String, Pod),
    Bookmark {
        version: u64,
        ends_state: bool,
    },
    Error(Failure),
}

/// A `v1.Status`.
pub(crate) struct Failure {
    pub(crate) code: u64,
    pub(crate) reason: String,
    pub(crate) message: String,
}

type Broken = String;

/// Splits the body of a watch into events.
#[derive(Default)]
pub(crate) struct Events {
    received: BytesMut,
}

impl Events {
    pub(crate) fn push(&mut self, data: &[u8]) {
        self.received.extend_from_slice(data);
    }

    /// The next event, if it has arrived completely.
    pub(crate) fn next(&mut self) -> Option<Result<Message, Broken>> {
        // A length of four bytes never begins with a brace: that would be an event of 2 GiB.
        if self.received.first() == Some(&b'{') {
            let end = self.received.iter().position(|byte| *byte == b'\n')?;
            let line = self.received.split_to(end + 1);
            return Some(json_event(&line[..end]));
        }
        let len = u32::from_be_bytes(*self.received.first_chunk()?) as usize;
        if self.received.len() < 4 + len {
            return None;
        }
        self.received.advance(4);
        Some(protobuf_event(&self.received.split_to(len)))
    }
}

fn number(text: &str) -> Result<u64, Broken> {
    text.parse().map_err(|_| format!("{text:?} is not a version"))
}

fn broken(error: serde_json::Error) -> Broken {
    error.to_string()
}

#[derive(Deserialize)]
struct JsonEvent<'a> {
    r#type: &'a str,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct JsonList<'a> {
    kind: &'a str,
    metadata: JsonListMeta,
    #[serde(borrow)]
    items: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct JsonListMeta {
    resource_version: String,
    #[serde(default)]
    r#continue: String,
    remaining_item_count: Option<u64>,
}

fn json_event(line: &[u8]) -> Result<Message, Broken> {
    let JsonEvent { r#type, object } = serde_json::from_slice(line).map_err(broken)?;
    Ok(match r#type {
        "BOOKMARK" => {
            let value: Value = serde_json::from_str(object.get()).map_err(broken)?;
            let version = value["metadata"]["resourceVersion"].as_str().unwrap_or_default();
            let ends = value["metadata"]["annotations"]["k8s.io/initial-events-end"].as_str();
            Message::Bookmark { version: number(version)?, ends_state: ends == Some("true") }
        }
        "ERROR" => Message::Error(json_failure(object.get().as_bytes())?),
        _ => Message::Event(r#type.to_owned(), json_pod(object.get().to_owned())?),
    })
}

fn json_failure(bytes: &[u8]) -> Result<Failure, Broken> {
    let value: Value = serde_json::from_slice(bytes).map_err(broken)?;
    let text = |name: &str| value[name].as_str().unwrap_or_default().to_owned();
    if text("kind") != "Status" {
        return Err(format!("a {} in place of a Status", text("kind")));
    }
    Ok(Failure { code: value["code"].as_u64().unwrap_or(0), reason: text("reason"), message: text("message") })
}

fn json_pod(json: String) -> Result<Pod, Broken> {
    let value: Value = serde_json::from_str(&json).map_err(broken)?;
    let text = |name: &str| value["metadata"][name].as_str().unwrap_or_default().to_owned();
    let key = format!("{}/{}", text("namespace"), text("name"));
    let uid = text("uid");
    let version = text("resourceVersion");
    Ok(Pod { key, uid, version: number(&version)?, bytes: json.into() })
}

/// Decodes a page of a list.
pub(crate) fn page(body: &[u8]) -> Result<Page, Broken> {
    if body.starts_with(MAGIC) {
        return protobuf_page(body);
    }
    let JsonList { kind, metadata, items } = serde_json::from_slice(body).map_err(broken)?;
    if kind != "PodList" {
        return Err(format!("a {kind} in place of a PodList"));
    }
    // The items of a list of a built-in type do not name their type.
    let typed = |item: &&RawValue| item.get().replacen('{', r#"{"kind":"Pod","apiVersion":"v1","#, 1);
    Ok(Page {
        version: number(&metadata.resource_version)?,
        next: metadata.r#continue,
        remaining: metadata.remaining_item_count,
        items: items.iter().map(|item| json_pod(typed(item))).collect::<Result<_, _>>()?,
    })
}

/// Decodes the body of a refusal, which may have either encoding.
pub(crate) fn failure(body: &[u8]) -> Result<Failure, Broken> {
    if body.starts_with(MAGIC) { protobuf_failure(body) } else { json_failure(body) }
}

const MAGIC: &[u8] = b"k8s\0";

/// A field's number, and its content: a varint or bytes.
type Field<'a> = (u64, u64, &'a [u8]);

/// The fields of a message.
fn fields(mut message: &[u8]) -> Result<Vec<Field<'_>>, Broken> {
    let mut fields = Vec::new();
    while !message.is_empty() {
        let tag = varint(&mut message)?;
        match tag & 7 {
            0 => fields.push((tag >> 3, varint(&mut message)?, &message[..0])),
            2 => {
                let len = varint(&mut message)? as usize;
                let bytes = message.split_off(..len).ok_or("a field is cut off")?;
                fields.push((tag >> 3, 0, bytes));
            }
            other => return Err(format!("wire type {other}")),
        }
    }
    Ok(fields)
}

fn varint(message: &mut &[u8]) -> Result<u64, Broken> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let byte = *message.split_off_first().ok_or("a number is cut off")?;
        number |= u64::from(byte & 127) << shift;
        if byte < 128 {
            return Ok(number);
        }
    }
    Err("a number of more than ten bytes".to_owned())
}

fn bytes_of(message: &[u8], number: u64) -> Result<&[u8], Broken> {
    Ok(fields(message)?.into_iter().find(|field| field.0 == number).map_or(&[][..], |field| field.2))
}

fn text_of(message: &[u8], number: u64) -> Result<String, Broken> {
    Ok(String::from_utf8_lossy(bytes_of(message, number)?).into_owned())
}

/// The kind and the message in an envelope.
fn open(bytes: &[u8]) -> Result<(String, &[u8]), Broken> {
    let unknown = bytes.strip_prefix(MAGIC).ok_or("no envelope")?;
    Ok((text_of(bytes_of(unknown, 1)?, 2)?, bytes_of(unknown, 2)?))
}

fn protobuf_event(event: &[u8]) -> Result<Message, Broken> {
    let object = bytes_of(bytes_of(event, 2)?, 1)?;
    let kind = text_of(event, 1)?;
    if kind == "ERROR" {
        return Ok(Message::Error(protobuf_failure(object)?));
    }
    let (of, message) = open(object)?;
    if of != "Pod" {
        return Err(format!("a {of} in place of a Pod"));
    }
    if kind == "BOOKMARK" {
        let metadata = bytes_of(message, 1)?;
        let ends_state = map_of(metadata, 12)?.get("k8s.io/initial-events-end").is_some_and(|text| text == "true");
        return Ok(Message::Bookmark { version: number(&text_of(metadata, 6)?)?, ends_state });
    }
    Ok(Message::Event(kind, protobuf_pod(message)?))
}

fn protobuf_failure(bytes: &[u8]) -> Result<Failure, Broken> {
    let (kind, message) = open(bytes)?;
    if kind != "Status" {
        return Err(format!("a {kind} in place of a Status"));
    }
    let code = fields(message)?.into_iter().find(|field| field.0 == 6).map_or(0, |field| field.1);
    Ok(Failure { code, reason: text_of(message, 4)?, message: text_of(message, 3)? })
}

fn protobuf_page(body: &[u8]) -> Result<Page, Broken> {
    let (kind, list) = open(body)?;
    if kind != "PodList" {
        return Err(format!("a {kind} in place of a PodList"));
    }
    let metadata = bytes_of(list, 1)?;
    let items = fields(list)?.into_iter().filter(|field| field.0 == 2).map(|field| protobuf_pod(field.2));
    Ok(Page {
        version: number(&text_of(metadata, 2)?)?,
        next: text_of(metadata, 3)?,
        remaining: fields(metadata)?.into_iter().find(|field| field.0 == 4).map(|field| field.1),
        items: items.collect::<Result<_, _>>()?,
    })
}

fn protobuf_pod(message: &[u8]) -> Result<Pod, Broken> {
    let metadata = bytes_of(message, 1)?;
    let key = format!("{}/{}", text_of(metadata, 3)?, text_of(metadata, 1)?);
    let uid = text_of(metadata, 5)?;
    let version = number(&text_of(metadata, 6)?)?;
    Ok(Pod { key, uid, version, bytes: Bytes::copy_from_slice(message) })
}

fn map_of(message: &[u8], number: u64) -> Result<BTreeMap<String, String>, Broken> {
    let entries = fields(message)?.into_iter().filter(|field| field.0 == number);
    entries.map(|field| Ok((text_of(field.2, 1)?, text_of(field.2, 2)?))).collect()
}

/// Whether a pod's message has the content of its JSON, at `version`.
pub(crate) fn is_same(json: &Value, version: u64, message: &[u8]) -> bool {
    let same = || -> Result<bool, Broken> {
        let text = |pointer: &str| json.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let map = |name: &str| -> BTreeMap<String, String> {
            let map = json["metadata"][name].as_object().into_iter().flatten();
            map.map(|(key, value)| (key.clone(), value.as_str().unwrap_or_default().to_owned())).collect()
        };
        let metadata = bytes_of(message, 1)?;
        let spec = bytes_of(message, 2)?;
        let status = bytes_of(message, 3)?;
        Ok(text_of(metadata, 1)? == text("/metadata/name")
            && text_of(metadata, 3)? == text("/metadata/namespace")
            && text_of(metadata, 5)? == text("/metadata/uid")
            && text_of(metadata, 6)? == version.to_string()
            && map_of(metadata, 11)? == map("labels")
            && map_of(metadata, 12)? == map("annotations")
            && text_of(spec, 10)? == text("/spec/nodeName")
            && text_of(bytes_of(spec, 2)?, 1)? == text("/spec/containers/0/name")
            && text_of(status, 1)? == text("/status/phase")
            && text_of(status, 3)? == text("/status/message"))
    };
    same().unwrap_or(false)
}
