//! Turns an object's JSON into an object of the store: decoding, the check of its kind, the
//! transform.

use std::{
    error::Error,
    marker::PhantomData,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use serde::Deserialize;

use crate::{
    object::{Decode, Object, RawObject},
    panics::panic_message,
};
use kubefan_common::text::without_value;

/// The reason why a transform refuses an object.
pub type TransformError = Box<dyn Error + Send + Sync>;

/// A function that changes each object before the store gets it: client-go's `TransformFunc`.
/// Converts from a closure.
pub struct Transform<K>(Arc<TransformFn<K>>);

type TransformFn<K> = dyn Fn(Object<K>) -> Result<Object<K>, TransformError> + Send + Sync;

impl<K, F> From<F> for Transform<K>
where
    F: Fn(Object<K>) -> Result<Object<K>, TransformError> + Send + Sync + 'static,
{
    fn from(function: F) -> Self {
        Self(Arc::new(function))
    }
}

impl<K> Clone for Transform<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K> std::fmt::Debug for Transform<K> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Transform")
    }
}

pub(super) struct Decoder<K> {
    pub(super) transform: Option<Transform<K>>,
    /// Makes a copy that takes less memory.
    pub(super) compact: Option<fn(&K) -> K>,
    /// apiVersion and kind.
    pub(super) expected: Option<(String, String)>,
    _value: PhantomData<fn() -> K>,
}

impl<K> Default for Decoder<K> {
    fn default() -> Self {
        Self { transform: None, compact: None, expected: None, _value: PhantomData }
    }
}

/// The fields of an object that say its type.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TypeMeta {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
}

impl<K: Decode> Decoder<K> {
    /// Decodes an object. The error is the reason.
    ///
    /// The type's and the program's code may panic on an object that another user of the cluster
    /// wrote. That must not end the informer.
    pub(super) fn decode(&self, raw: &RawObject) -> Result<Arc<Object<K>>, String> {
        catch_unwind(AssertUnwindSafe(|| self.try_decode(raw)))
            .unwrap_or_else(|panic| Err(format!("panicked: {}", panic_message(&*panic))))
    }

    fn try_decode(&self, raw: &RawObject) -> Result<Arc<Object<K>>, String> {
        if let Some((api_version, kind)) = &self.expected {
            let found: TypeMeta = raw.parse().map_err(|error| without_value(&error))?;
            let unknown = found.kind.is_empty() && found.api_version.is_empty();
            if !unknown && (found.kind != *kind || found.api_version != *api_version) {
                return Err(format!("expected {api_version} {kind}, got {} {}", found.api_version, found.kind));
            }
        }
        let value = K::decode(raw).map_err(|error| without_value(&error))?;
        let object = Object::new(raw.key.clone(), raw.uid.clone(), raw.resource_version.clone(), value);
        let object = match &self.transform {
            None => object,
            Some(transform) => transform.0(object).map_err(|error| format!("transform: {error}"))?,
        };
        Ok(Arc::new(match self.compact {
            None => object,
            Some(compact) => object.map(|value| compact(&value)),
        }))
    }
}
