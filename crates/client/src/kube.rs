//! kube-rs' `reflector` and `Controller` over any source of this library. Needs the feature
//! `kube-runtime`.
//!
//! A program that calls `watcher(api, config)` calls [`watcher_events`] instead. The rest stays as
//! it is:
//!
//! ```
//! use futures::StreamExt;
//! use kube_runtime::{WatchStreamExt, reflector};
//! use kubefan_client::{FakeListWatch, kube::watcher_events};
//! # use k8s_openapi::api::core::v1::ConfigMap;
//! # #[tokio::main(flavor = "current_thread")] async fn main() {
//! # let source = FakeListWatch::new();
//! # source.put("default/settings", r#"{"metadata":{"namespace":"default","name":"settings"}}"#);
//! // With a kubefan: let source = ListWatch::new(client, "configmaps", "", "");
//! let (store, writer) = reflector::store::<ConfigMap>();
//! let events = watcher_events(source);
//! let mut changed = Box::pin(reflector(writer, events).applied_objects());
//! let first = changed.next().await.unwrap().unwrap();
//! assert_eq!(first.metadata.name.as_deref(), Some("settings"));
//! # drop(store);
//! # }
//! ```

use std::{collections::HashMap, fmt::Debug, sync::Arc};

use futures::{Stream, StreamExt, stream};
use kube_core::{Resource, Status};
use kube_runtime::watcher::{Error, Event};
use serde::de::DeserializeOwned;

use crate::{
    error::ClientError,
    lister_watcher::ListerWatcher,
    object::{Object, ObjectKey},
    reflector::{Reflector, ReflectorError},
    store::{Change, Deleted},
    streams::{InformerEvent, watcher_with},
};

/// Lists and watches one resource, with kube-rs' events: a replacement for
/// `kube_runtime::watcher(api, config)`.
///
/// It continues by itself after an error, with delays, so it needs no backoff around it. Namespace,
/// name, uid and resource version are set in each object's metadata if a projection left them out.
/// Changes that are only true together arrive one by one, because kube-rs has no batches.
///
/// An object that cannot be decoded is an error of the stream, and the stream continues. In kube-rs
/// it would be missing after a new list.
///
/// Some deletions arrive without the object's last state. Then the event has an object with
/// metadata only, if the type can be deserialized from that, as k8s-openapi's can. For other types,
/// such as a custom resource with a required spec, a copy of each object stays in memory for this.
pub fn watcher_events<K>(source: impl ListerWatcher) -> impl Stream<Item = Result<Event<K>, Error>> + Send
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
{
    watcher_events_with(source, |reflector| reflector)
}

/// Like [`watcher_events`]. `build` sets the options of the reflector, such as a transform.
pub fn watcher_events_with<K>(
    source: impl ListerWatcher,
    build: impl FnOnce(Reflector<K>) -> Reflector<K>,
) -> impl Stream<Item = Result<Event<K>, Error>> + Send
where
    K: Resource + DeserializeOwned + Clone + Debug + Send + Sync + 'static,
{
    let mut convert = Convert::new();
    watcher_with(source, build)
        .map(move |event| {
            stream::iter(match event {
                Ok(event) => convert.events(event).into_iter().map(Ok).collect(),
                Err(error) => vec![Err(watch_error(&error))],
            })
        })
        .flatten()
}

struct Convert<K> {
    /// The last state of each object, if the type needs more than metadata.
    last: Option<HashMap<ObjectKey, K>>,
    /// The last state of each object of a complete state that has not ended.
    replacing: HashMap<ObjectKey, K>,
}

impl<K> Convert<K>
where
    K: Resource + DeserializeOwned + Clone,
{
    fn new() -> Self {
        let needs_states = metadata_only::<K>(&ObjectKey::from("name")).is_none();
        Self { last: needs_states.then(HashMap::new), replacing: HashMap::new() }
    }

    fn events(&mut self, event: InformerEvent<K>) -> Vec<Event<K>> {
        match event {
            InformerEvent::ReplaceBegin => {
                self.replacing.clear();
                vec![Event::Init]
            }
            InformerEvent::Replaced(object) => {
                let key = object.key().clone();
                let value = with_metadata(object);
                if self.last.is_some() {
                    self.replacing.insert(key, value.clone());
                }
                vec![Event::InitApply(value)]
            }
            InformerEvent::ReplaceEnd { undecodable, .. } => {
                let mut events = Vec::new();
                if let Some(last) = &mut self.last {
                    let mut states = std::mem::take(&mut self.replacing);
                    for (key, value) in undecodable.iter().filter_map(|key| last.remove_entry(key)) {
                        events.push(Event::InitApply(value.clone()));
                        states.insert(key, value);
                    }
                    *last = states;
                }
                events.push(Event::InitDone);
                events
            }
            InformerEvent::Changed(change) => self.change(change).into_iter().collect(),
            InformerEvent::Batch(changes) => changes.into_iter().filter_map(|change| self.change(change)).collect(),
            InformerEvent::Advanced { .. } => Vec::new(),
        }
    }

    fn change(&mut self, change: Change<K>) -> Option<Event<K>> {
        match change {
            Change::Added(object) | Change::Updated(object) => {
                let key = object.key().clone();
                let value = with_metadata(object);
                if let Some(last) = &mut self.last {
                    last.insert(key, value.clone());
                }
                Some(Event::Apply(value))
            }
            Change::Deleted(deleted) => {
                let last = self.last.as_mut().and_then(|last| last.remove(deleted.key()));
                match deleted {
                    Deleted::Known(object) => Some(Event::Delete(with_metadata(object))),
                    // Without a last state, the reader was never given the object.
                    Deleted::FinalStateUnknown(unknown) => {
                        last.or_else(|| metadata_only(&unknown.key)).map(Event::Delete)
                    }
                }
            }
        }
    }
}

/// Returns an object with nothing but its key. `None` if the type needs more.
fn metadata_only<K: Resource + DeserializeOwned>(key: &ObjectKey) -> Option<K> {
    let metadata = match key.namespace() {
        "" => serde_json::json!({ "name": key.name() }),
        namespace => serde_json::json!({ "name": key.name(), "namespace": namespace }),
    };
    serde_json::from_value(serde_json::json!({ "metadata": metadata })).ok()
}

/// The value, with the metadata that kube-rs reads.
fn with_metadata<K: Resource + Clone>(object: Arc<Object<K>>) -> K {
    let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let key = object.key().clone();
    let uid = some(object.uid());
    let version = some(object.resource_version());
    // The stream's queue has given up its share, so nothing is copied.
    let mut value = Arc::try_unwrap(object).map_or_else(|shared| shared.value().clone(), Object::into_value);
    let metadata = value.meta_mut();
    metadata.name.get_or_insert_with(|| key.name().to_owned());
    metadata.namespace = metadata.namespace.take().or_else(|| some(key.namespace()));
    metadata.uid = metadata.uid.take().or(uid);
    metadata.resource_version = version.or(metadata.resource_version.take());
    value
}

fn watch_error(error: &ReflectorError) -> Error {
    let status = match error {
        ReflectorError::Client(ClientError::Api(status)) => {
            Status::failure(&status.message, &status.reason).with_code(status.code)
        }
        ReflectorError::Client(error) => {
            let code = if error.is_expired() { 410 } else { 503 };
            Status::failure(&error.to_string(), error.reason()).with_code(code)
        }
        error => Status::failure(&error.to_string(), "Undecodable"),
    };
    Error::WatchError(status.boxed())
}

#[cfg(test)]
mod tests;
