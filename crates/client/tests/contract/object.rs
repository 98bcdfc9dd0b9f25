//! The notation of objects in scripts: `namespace/name@version`, then `#uid`, then
//! `=colour+colour`.

use std::sync::Arc;

use kubefan_client::{Deleted, Indexer, Object, ObjectKey, RawObject};
use serde_json::{Value, json};

pub(crate) type Thing = Object<Value>;

/// Parses the notation, as a server sends the object.
pub(crate) fn raw(text: &str) -> RawObject {
    let (text, colors) = text.split_once('=').unwrap_or((text, ""));
    let (text, uid) = text.split_once('#').unwrap_or((text, ""));
    let (key, version) = text.split_once('@').unwrap();
    RawObject {
        key: ObjectKey::from(key),
        uid: uid.into(),
        resource_version: version.into(),
        json: serde_json::to_vec(&json!({ "colors": colors })).unwrap().into(),
    }
}

/// Parses the notation, decoded.
pub(crate) fn thing(text: &str) -> Arc<Thing> {
    let RawObject { key, uid, resource_version, json } = raw(text);
    Arc::new(Object::new(key, uid, resource_version, serde_json::from_slice(&json).unwrap()))
}

pub(crate) fn things(texts: &[&str]) -> Vec<Arc<Thing>> {
    texts.iter().map(|text| thing(text)).collect()
}

pub(crate) fn format(object: &Thing) -> String {
    let mut text = format!("{}@{}", object.key(), object.resource_version());
    if !object.uid().is_empty() {
        text += &format!("#{}", object.uid());
    }
    match object.value()["colors"].as_str() {
        Some("") | None => text,
        Some(colors) => format!("{text}={colors}"),
    }
}

pub(crate) fn format_all<'a>(objects: impl IntoIterator<Item = &'a Arc<Thing>>) -> String {
    words(objects.into_iter().map(|object| format(object)))
}

pub(crate) fn format_deleted(deleted: &Deleted<Value>) -> String {
    match deleted {
        Deleted::Known(object) => format(object),
        Deleted::FinalStateUnknown(unknown) => match &unknown.last_known {
            Some(object) => format!("{} unknown", format(object)),
            None => format!("{} unknown", unknown.key),
        },
    }
}

/// The texts in order, or `nothing`.
pub(crate) fn words(texts: impl IntoIterator<Item = impl ToString>) -> String {
    let mut texts: Vec<_> = texts.into_iter().map(|text| text.to_string()).collect();
    if texts.is_empty() {
        return "nothing".to_owned();
    }
    texts.sort();
    texts.join(" ")
}

pub(crate) fn colors(object: &Thing) -> Vec<String> {
    let colors = object.value()["colors"].as_str().unwrap_or_default();
    colors.split('+').filter(|color| !color.is_empty()).map(str::to_owned).collect()
}

/// A transform that appends a colour, so that a second pass over the same object shows. It refuses
/// the object whose key is named.
pub(crate) fn mark(fail: &str, object: Thing) -> Result<Thing, String> {
    if object.key().as_str() == fail {
        return Err(format!("cannot transform {fail}"));
    }
    Ok(object.map(|mut value| {
        let before = value["colors"].as_str().unwrap_or_default();
        let after = if before.is_empty() { "seen".to_owned() } else { format!("{before}+seen") };
        value["colors"] = after.into();
        value
    }))
}

/// Answers the steps that only read an indexer, and the step that adds an index.
pub(crate) fn read(indexer: &Indexer<Value>, command: &str, arguments: &[&str]) -> Vec<String> {
    let refused = || "refused".to_owned();
    let line = match (command, arguments) {
        ("get", [key]) => indexer.get(key).map_or("nothing".to_owned(), |object| format(&object)),
        ("list", []) => format_all(&indexer.list()),
        ("keys", []) => words(indexer.keys()),
        ("by-index", [name, value]) => {
            indexer.by_index(name, value).map_or_else(|_| refused(), |objects| format_all(&objects))
        }
        ("index-keys", [name, value]) => indexer.index_keys(name, value).map_or_else(|_| refused(), words),
        ("index-values", [name]) => indexer.index_values(name).map_or_else(|_| refused(), words),
        ("index", ["color"]) => return outcome(indexer.add_index("color", colors).is_ok()),
        ("index", ["namespace"]) => {
            return outcome(indexer.add_index("namespace", |object| vec![object.namespace().to_owned()]).is_ok());
        }
        _ => panic!("unknown step {command}"),
    };
    vec![line]
}

/// The answer of a step that may be refused.
pub(crate) fn outcome(accepted: bool) -> Vec<String> {
    if accepted { Vec::new() } else { vec!["refused".to_owned()] }
}
