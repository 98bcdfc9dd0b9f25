//! Writes: validation, and the fields that the server fills in.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::{
    object::Object,
    resource::{CRD_GROUP, SelectableField, SimResource},
    server::Inner,
    status::{Cause, Status},
    store::Collection,
};
use kubefan_model::{GroupVersionResource, ObjectKey};

/// The part of an object that a write replaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    /// Everything. The in-process API writes this.
    All,
    /// Everything but the status.
    Main,
    /// The status alone.
    Status,
}

impl Inner {
    /// Stores a new object. Fills in the uid, creation time and generation if they are missing.
    pub(super) fn create(&self, collection: &Collection, mut value: Value) -> Result<Arc<Object>, Status> {
        let gvr = &collection.resource.gvr;
        check_type(&collection.resource, &value)?;
        let metadata = metadata(&mut value)?;
        if let Some(prefix) = metadata.get("generateName").and_then(Value::as_str)
            && text(metadata, "name").is_empty()
        {
            let suffix: String = self.uid().chars().filter(|c| *c != '-').take(5).collect();
            let name = format!("{prefix}{suffix}");
            metadata.insert("name".into(), name.into());
        }
        check_name(&collection.resource, text(metadata, "name"))?;
        if !text(metadata, "resourceVersion").is_empty() {
            return Err(Status::internal("resourceVersion should not be set on objects to be created"));
        }
        let namespace = text(metadata, "namespace").to_owned();
        if collection.resource.namespaced {
            let namespaces = self.store.collection(&GroupVersionResource::new("", "v1", "namespaces"));
            if namespaces.is_none_or(|collection| collection.get(&ObjectKey::new("", &namespace)).is_none()) {
                return Err(Status::not_found("", "namespaces", &namespace));
            }
        } else {
            metadata.remove("namespace");
        }
        metadata.entry("uid").or_insert_with(|| self.uid().into());
        metadata.entry("creationTimestamp").or_insert_with(|| (self.options.clock)().into());
        if collection.resource.counts_generation() {
            metadata.entry("generation").or_insert_with(|| 1.into());
        }
        let crd = is_crd(gvr).then(|| custom_resource(&value)).transpose()?;
        let object = self.store.create(collection, value)?;
        self.counters.writes.inc();
        if let Some(resource) = crd {
            self.store.add(resource);
        }
        Ok(object)
    }

    /// Replaces an object by the result of `change`.
    pub(super) fn update(
        &self,
        collection: &Collection,
        key: &ObjectKey,
        part: Part,
        change: impl FnOnce(&Value) -> Result<Value, Status>,
    ) -> Result<Arc<Object>, Status> {
        let gvr = &collection.resource.gvr;
        let mut before = 0;
        let object = self.store.update(collection, key, |previous| {
            before = previous.version;
            let old = previous.value();
            let mut new = change(&old)?;
            check_type(&collection.resource, &new)?;
            check_preconditions(gvr, previous, metadata(&mut new)?)?;
            let mut new = match part {
                Part::Status => {
                    let status = new.get("status").cloned();
                    put(old.clone(), "status", status)
                }
                Part::Main if collection.resource.status_subresource => put(new, "status", old.get("status").cloned()),
                Part::Main | Part::All => new,
            };
            let counts = collection.resource.counts_generation() && !same_spec(&new, &old);
            let new_metadata = metadata(&mut new)?;
            for field in ["name", "namespace", "uid", "creationTimestamp", "generation"] {
                match old["metadata"].get(field) {
                    Some(value) => drop(new_metadata.insert(field.to_owned(), value.clone())),
                    None => drop(new_metadata.remove(field)),
                }
            }
            if counts {
                let generation = old["metadata"]["generation"].as_i64().unwrap_or_default() + 1;
                new_metadata.insert("generation".into(), generation.into());
            }
            Ok(new)
        })?;
        if object.version != before {
            self.counters.writes.inc();
        }
        Ok(object)
    }

    /// Deletes an object immediately: finalizers and graceful deletion are not simulated.
    pub(super) fn delete(&self, collection: &Collection, key: &ObjectKey) -> Result<Arc<Object>, Status> {
        if is_crd(&collection.resource.gvr)
            && let Some(object) = collection.get(key)
            && let Ok(resource) = custom_resource(&object.value())
        {
            self.store.remove(&resource.gvr);
        }
        let object = self.store.delete(collection, key)?;
        self.counters.writes.inc();
        Ok(object)
    }
}

/// Applies a JSON merge patch (RFC 7386, `application/merge-patch+json`).
pub(super) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(target) = target else { return };
    for (key, value) in patch {
        if value.is_null() {
            target.remove(key);
        } else {
            merge(target.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

fn put(mut object: Value, key: &str, value: Option<Value>) -> Value {
    if let Some(fields) = object.as_object_mut() {
        match value {
            Some(value) => drop(fields.insert(key.to_owned(), value)),
            None => drop(fields.remove(key)),
        }
    }
    object
}

/// Whether the objects are equal apart from type, metadata and status.
fn same_spec(new: &Value, old: &Value) -> bool {
    let spec = |(key, _): &(&String, &Value)| !matches!(key.as_str(), "kind" | "apiVersion" | "metadata" | "status");
    let new = new.as_object().into_iter().flatten().filter(spec);
    new.eq(old.as_object().into_iter().flatten().filter(spec))
}

fn metadata(value: &mut Value) -> Result<&mut Map<String, Value>, Status> {
    let object =
        value.as_object_mut().ok_or_else(|| Status::bad_request("the object provided is not a JSON object"))?;
    let metadata = object.entry("metadata").or_insert_with(|| json!({}));
    metadata.as_object_mut().ok_or_else(|| Status::bad_request("metadata is not a JSON object"))
}

fn text<'a>(metadata: &'a Map<String, Value>, field: &str) -> &'a str {
    metadata.get(field).and_then(Value::as_str).unwrap_or_default()
}

/// Checks `kind` and `apiVersion`. Both may be missing, but must not be those of another resource.
fn check_type(resource: &SimResource, value: &Value) -> Result<(), Status> {
    let kind = value["kind"].as_str().unwrap_or(&resource.kind);
    let expected = resource.gvr.api_version();
    let version = value["apiVersion"].as_str().unwrap_or(&expected);
    if kind == resource.kind && version == expected {
        return Ok(());
    }
    let why = format!("{kind} in version \"{version}\" cannot be handled as a {}", resource.kind);
    Err(Status::bad_request(why))
}

fn check_name(resource: &SimResource, name: &str) -> Result<(), Status> {
    let invalid = |reason, message: String| {
        let causes = vec![Cause { reason, message, field: "metadata.name" }];
        Err(Status::invalid(&resource.gvr.group, &resource.kind, name, causes))
    };
    if name.is_empty() {
        return invalid("FieldValueRequired", "Required value: name or generateName is required".into());
    }
    let label = |part: &str| {
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        !part.is_empty() && part.bytes().all(inner) && !part.starts_with('-') && !part.ends_with('-')
    };
    if name.len() <= 253 && name.split('.').all(label) {
        return Ok(());
    }
    let rule = concat!(
        "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end ",
        "with an alphanumeric character (e.g. 'example.com', regex used for validation is ",
        r"'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
    );
    invalid("FieldValueInvalid", format!("Invalid value: {name:?}: {rule}"))
}

fn check_preconditions(gvr: &GroupVersionResource, previous: &Object, new: &Map<String, Value>) -> Result<(), Status> {
    let conflict = |why: &str| Err(Status::conflict(&gvr.group, &gvr.resource, previous.key.name(), why));
    let version = text(new, "resourceVersion");
    if !version.is_empty() && version != previous.version.to_string() {
        let why = "the object has been modified; please apply your changes to the latest version and try again";
        return conflict(why);
    }
    let uid = text(new, "uid");
    if !uid.is_empty() && uid != &*previous.uid {
        let key = format!("/registry/{}/{}", gvr.resource, previous.key);
        return conflict(&format!(
            "StorageError: invalid object, Code: 4, Key: {key}, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: \
             UID in precondition: {uid}, UID in object meta: {}",
            previous.uid
        ));
    }
    Ok(())
}

fn is_crd(gvr: &GroupVersionResource) -> bool {
    gvr.group == CRD_GROUP && gvr.resource == "customresourcedefinitions"
}

/// The resource that a CustomResourceDefinition defines, by its first version.
fn custom_resource(crd: &Value) -> Result<SimResource, Status> {
    let spec = &crd["spec"];
    let version = &spec["versions"][0];
    let required = |value: &Value, field: &'static str| {
        value.as_str().filter(|text| !text.is_empty()).map(str::to_owned).ok_or_else(|| {
            let causes = vec![Cause { reason: "FieldValueRequired", message: "Required value".into(), field }];
            let name = crd["metadata"]["name"].as_str().unwrap_or_default();
            Status::invalid(CRD_GROUP, "CustomResourceDefinition", name, causes)
        })
    };
    let names = &spec["names"];
    let kind = required(&names["kind"], "spec.names.kind")?;
    let texts = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(|text| text.as_str().map(str::to_owned)).collect()
    };
    let fields = version["selectableFields"].as_array().into_iter().flatten();
    let fields = fields.filter_map(|field| field["jsonPath"].as_str()?.strip_prefix('.').map(str::to_owned));
    Ok(SimResource {
        singular: names["singular"].as_str().map_or_else(|| kind.to_lowercase(), str::to_owned),
        short_names: texts(&names["shortNames"]),
        categories: texts(&names["categories"]),
        namespaced: spec["scope"] == "Namespaced",
        selectable_fields: fields.map(SelectableField::text).collect(),
        status_subresource: version["subresources"].get("status").is_some(),
        ..SimResource::custom(
            &required(&spec["group"], "spec.group")?,
            &required(&version["name"], "spec.versions")?,
            &required(&names["plural"], "spec.names.plural")?,
            &kind,
        )
    })
}

/// Removes the metadata fields that only the server may set.
pub(super) fn fresh(mut value: Value) -> Value {
    if let Some(metadata) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        for field in ["uid", "creationTimestamp", "generation", "deletionTimestamp"] {
            metadata.remove(field);
        }
    }
    value
}
