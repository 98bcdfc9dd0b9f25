//! Objects as the library receives and stores them.
//!
//! A decoded value need not know its own name: [`Object`] carries the key, the uid and the resource
//! version beside it. So any type that serde can deserialize works, without a trait for its
//! metadata, and so do projections that leave the metadata out.

use std::{borrow::Borrow, fmt, ops::Deref, sync::Arc};

use bytes::Bytes;
use prost::Message;
use serde::de::{DeserializeOwned, Error};

/// The key of an object: `namespace/name`, or `name` for cluster-scoped resources, as client-go's
/// `MetaNamespaceKeyFunc` makes it. Clones share the text.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey(Arc<str>);

impl ObjectKey {
    /// Returns the key of an object. An empty namespace means a cluster-scoped object.
    pub fn new(namespace: &str, name: &str) -> Self {
        if namespace.is_empty() { Self(name.into()) } else { Self(format!("{namespace}/{name}").into()) }
    }

    /// The namespace; empty for a cluster-scoped object.
    pub fn namespace(&self) -> &str {
        self.0.split_once('/').map_or("", |(namespace, _)| namespace)
    }

    /// The name.
    pub fn name(&self) -> &str {
        self.0.split_once('/').map_or(&self.0, |(_, name)| name)
    }

    /// The whole key.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Takes a whole key, `namespace/name` or `name`.
impl From<&str> for ObjectKey {
    fn from(key: &str) -> Self {
        Self(key.into())
    }
}

impl Borrow<str> for ObjectKey {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl fmt::Debug for ObjectKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, formatter)
    }
}

/// An object as a server sent it, not yet decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawObject {
    /// Key of the object.
    pub key: ObjectKey,
    /// `metadata.uid` of the object. Empty if the server did not send it.
    pub uid: Box<str>,
    /// Version of the object. For a deleted object, the version of the deletion.
    pub resource_version: Box<str>,
    /// The object as JSON; with [`Encoding::Protobuf`](crate::Encoding::Protobuf) as protobuf in
    /// its envelope. It may be a part of a network buffer: copy it to keep it for long.
    pub json: Bytes,
}

/// The start of protobuf objects. JSON never starts with it.
const PROTOBUF_MAGIC: &[u8] = b"k8s\0";

impl RawObject {
    /// Parses the object's JSON.
    ///
    /// # Errors
    /// serde's error. For an object in protobuf, an error that names the way to read it.
    pub(crate) fn parse<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        self.check_json()?;
        serde_json::from_slice(&self.json)
    }

    fn check_json(&self) -> Result<(), serde_json::Error> {
        if self.json.starts_with(PROTOBUF_MAGIC) {
            return Err(serde_json::Error::custom(
                "the object is protobuf (Encoding::Protobuf), and this type reads JSON: read it as RawProtobuf, or request \
                 another encoding",
            ));
        }
        Ok(())
    }
}

/// A decoded object with its metadata. Dereferences to the value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object<K> {
    key: ObjectKey,
    uid: Box<str>,
    resource_version: Box<str>,
    value: K,
}

impl<K> Object<K> {
    /// Returns an object. `uid` and `resource_version` may be empty if they are unknown.
    pub fn new(key: ObjectKey, uid: impl Into<Box<str>>, resource_version: impl Into<Box<str>>, value: K) -> Self {
        Self { key, uid: uid.into(), resource_version: resource_version.into(), value }
    }

    /// The key.
    pub fn key(&self) -> &ObjectKey {
        &self.key
    }

    /// The namespace; empty for a cluster-scoped object.
    pub fn namespace(&self) -> &str {
        self.key.namespace()
    }

    /// The name.
    pub fn name(&self) -> &str {
        self.key.name()
    }

    /// The `metadata.uid`. Empty if the server did not send it.
    pub fn uid(&self) -> &str {
        &self.uid
    }

    /// The version of this state. It is here even if a projection removed it from the value.
    pub fn resource_version(&self) -> &str {
        &self.resource_version
    }

    /// The value.
    pub fn value(&self) -> &K {
        &self.value
    }

    /// Returns the value alone.
    pub fn into_value(self) -> K {
        self.value
    }

    /// Replaces the value, for transforms. Key, uid and version stay.
    pub fn map<T>(self, convert: impl FnOnce(K) -> T) -> Object<T> {
        let Self { key, uid, resource_version, value } = self;
        Object { key, uid, resource_version, value: convert(value) }
    }

    /// Whether both are states of one object, not of two objects that had the same name one after
    /// the other. True if a uid is unknown.
    pub fn is_same_object(&self, other: &Self) -> bool {
        self.key == other.key && (self.uid == other.uid || self.uid.is_empty() || other.uid.is_empty())
    }
}

impl<K> Deref for Object<K> {
    type Target = K;

    fn deref(&self) -> &K {
        &self.value
    }
}

/// An object's JSON, not parsed. Takes the least memory of all types.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawJson(Box<[u8]>);

impl RawJson {
    /// The JSON text.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Parses the JSON.
    ///
    /// # Errors
    /// serde's error, if the JSON does not fit the type.
    pub fn parse<'a, T: serde::Deserialize<'a>>(&'a self) -> Result<T, serde_json::Error> {
        serde_json::from_slice(&self.0)
    }
}

/// An object in Kubernetes protobuf, not decoded, as
/// [`Encoding::Protobuf`](crate::Encoding::Protobuf) brings it. The library has no protobuf types
/// of Kubernetes; decode [`Self::message`] with those that prost generates from its `.proto` files.
///
/// Not for a source that falls back to the apiserver's watch: that has JSON, which is no
/// `RawProtobuf`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawProtobuf(Box<[u8]>);

/// `runtime.Unknown` of Kubernetes.
#[derive(Clone, PartialEq, Message)]
struct Envelope {
    #[prost(message, optional, tag = "1")]
    type_meta: Option<TypeMeta>,
    #[prost(bytes = "bytes", tag = "2")]
    raw: Bytes,
}

#[derive(Clone, PartialEq, Message)]
struct TypeMeta {
    #[prost(string, tag = "1")]
    api_version: String,
    #[prost(string, tag = "2")]
    kind: String,
}

/// The content of a [`RawProtobuf`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProtobufMessage {
    /// The `apiVersion`, such as `v1`.
    pub api_version: String,
    /// The kind, such as `Pod`.
    pub kind: String,
    /// The object as a message of that type, such as `k8s.io.api.core.v1.Pod`.
    pub message: Bytes,
}

impl RawProtobuf {
    /// The whole bytes: `k8s\0` and the envelope, as the apiserver sends them.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The type and the message in the envelope.
    ///
    /// # Errors
    /// prost's error, if the envelope is malformed.
    pub fn message(&self) -> Result<ProtobufMessage, prost::DecodeError> {
        let Envelope { type_meta, raw } = Envelope::decode(&self.0[PROTOBUF_MAGIC.len()..])?;
        let TypeMeta { api_version, kind } = type_meta.unwrap_or_default();
        Ok(ProtobufMessage { api_version, kind, message: raw })
    }
}

/// A type that objects are decoded to. Every type that serde can deserialize from any input has it:
/// k8s-openapi's types, structs of custom resources, `serde_json::Value`. So have [`RawJson`] and
/// [`RawProtobuf`]. Objects of [`Encoding::Protobuf`](crate::Encoding::Protobuf) can only be read
/// by [`RawProtobuf`], and by types of your own that implement this trait.
pub trait Decode: Sized + Send + Sync + 'static {
    /// Decodes the value.
    ///
    /// # Errors
    /// serde's error. The informer reports it, keeps the previous state of that object, and
    /// continues.
    fn decode(raw: &RawObject) -> Result<Self, serde_json::Error>;
}

impl<T: DeserializeOwned + Send + Sync + 'static> Decode for T {
    fn decode(raw: &RawObject) -> Result<Self, serde_json::Error> {
        raw.parse()
    }
}

impl Decode for RawProtobuf {
    fn decode(raw: &RawObject) -> Result<Self, serde_json::Error> {
        if raw.json.starts_with(PROTOBUF_MAGIC) {
            Ok(Self(raw.json.as_ref().into()))
        } else {
            Err(serde_json::Error::custom(
                "the object is JSON: request it with Encoding::Protobuf, over gRPC, to read it as RawProtobuf",
            ))
        }
    }
}

impl Decode for RawJson {
    fn decode(raw: &RawObject) -> Result<Self, serde_json::Error> {
        raw.check_json()?;
        // Copied: a slice would keep the whole network buffer in memory.
        Ok(Self(raw.json.as_ref().into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_the_form_of_client_go() {
        let pod = ObjectKey::new("default", "web-0");
        assert_eq!((pod.as_str(), pod.namespace(), pod.name()), ("default/web-0", "default", "web-0"));
        let node = ObjectKey::new("", "node-1");
        assert_eq!((node.as_str(), node.namespace(), node.name()), ("node-1", "", "node-1"));
        assert_eq!(ObjectKey::from("default/web-0"), pod);
    }

    #[test]
    fn protobuf_is_read_as_raw_protobuf_and_every_other_type_says_so() {
        let envelope = Envelope {
            type_meta: Some(TypeMeta { api_version: "v1".into(), kind: "Pod".into() }),
            raw: Bytes::from_static(b"message"),
        };
        let protobuf = [PROTOBUF_MAGIC, &envelope.encode_to_vec()].concat();
        let of = |bytes: &[u8]| RawObject {
            key: "a/b".into(),
            uid: "u".into(),
            resource_version: "1".into(),
            json: Bytes::copy_from_slice(bytes),
        };
        let raw = of(&protobuf);
        let read = RawProtobuf::decode(&raw).unwrap();
        assert_eq!(read.as_bytes(), protobuf);
        let ProtobufMessage { api_version, kind, message } = read.message().unwrap();
        assert_eq!((&*api_version, &*kind, &*message), ("v1", "Pod", &b"message"[..]));
        let refused = [serde_json::Value::decode(&raw).err(), RawJson::decode(&raw).err()];
        for error in &refused {
            assert!(error.as_ref().unwrap().to_string().contains("RawProtobuf"));
        }
        let json = of(b"{}");
        assert!(RawProtobuf::decode(&json).unwrap_err().to_string().contains("Encoding::Protobuf"));
        assert_eq!(RawJson::decode(&json).unwrap().as_bytes(), b"{}");
    }

    #[test]
    fn an_unknown_uid_does_not_tell_two_objects_apart() {
        let object = |uid: &str| Object::new(ObjectKey::new("a", "b"), uid, "1", ());
        assert!(object("x").is_same_object(&object("x")) && object("x").is_same_object(&object("")));
        assert!(!object("x").is_same_object(&object("y")));
    }
}
