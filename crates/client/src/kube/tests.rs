use std::time::Duration;

use k8s_openapi::{
    NamespaceResourceScope, Resource as _,
    api::core::v1::{ConfigMap, Node},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube_runtime::{Controller, WatchStreamExt, controller::Action, reflector, reflector::ObjectRef};
use serde::Deserialize;
use tokio::sync::mpsc;

use super::*;
use crate::{ApiStatus, FakeListWatch, RawObject, WatchEventKind};

fn config_map(value: &str) -> String {
    format!(r#"{{"metadata":{{"labels":{{"a":"b"}}}},"data":{{"key":"{value}"}}}}"#)
}

fn value_of(store: &reflector::Store<ConfigMap>, name: &str) -> Option<String> {
    store.get(&ObjectRef::new(name).within("default")).and_then(|map| map.data.as_ref()?.get("key").cloned())
}

#[tokio::test(start_paused = true)]
async fn the_reflector_of_kube_rs_follows_a_source_of_this_library() {
    let fake = FakeListWatch::new();
    fake.put("default/one", config_map("1"));
    fake.put("default/two", config_map("2"));
    let (store, writer) = reflector::store::<ConfigMap>();
    let mut touched = Box::pin(reflector(writer, watcher_events(fake.clone())).touched_objects());
    let mut next = async || touched.next().await.unwrap().map(|map| map.metadata.name.unwrap());
    assert_eq!((next().await.unwrap().as_str(), next().await.unwrap().as_str()), ("one", "two"));
    fake.put("default/one", config_map("3"));
    fake.delete("default/two");
    assert_eq!((next().await.unwrap().as_str(), next().await.unwrap().as_str()), ("one", "two"));
    assert_eq!((value_of(&store, "one").as_deref(), store.len()), (Some("3"), 1));

    // The metadata comes from the event, because a projection may leave it out.
    let one = store.get(&ObjectRef::new("one").within("default")).unwrap();
    assert_eq!(one.metadata.resource_version.as_deref(), Some("4"));
    assert_eq!(one.metadata.uid.as_deref(), Some("uid-2"));

    // An error does not end the stream, and a relist removes objects that are gone.
    fake.delete_unseen("default/one");
    fake.put("default/three", config_map("3"));
    fake.fail_watches(ApiStatus::new(410, "Expired", "too old").into());
    assert_eq!(next().await.unwrap(), "three");
    let error = next().await.unwrap_err();
    assert!(matches!(&error, Error::WatchError(status) if status.code == 410), "{error}");
    assert_eq!(next().await.unwrap(), "three");
    fake.put("default/three", config_map("4"));
    assert_eq!(next().await.unwrap(), "three");
    assert_eq!((value_of(&store, "three").as_deref(), store.len()), (Some("4"), 1));
}

#[tokio::test(start_paused = true)]
async fn a_deletion_without_a_last_state_removes_the_object() {
    let fake = FakeListWatch::new();
    fake.put("n1", "{}");
    let (store, writer) = reflector::store::<Node>();
    let mut touched = Box::pin(reflector(writer, watcher_events(fake.clone())).touched_objects());
    touched.next().await.unwrap().unwrap();
    fake.put("n1", "{}");
    touched.next().await.unwrap().unwrap();
    assert_eq!(store.len(), 1);
    fake.send(WatchEventKind::DeletedFinalStateUnknown("n1".into()));
    let deleted = touched.next().await.unwrap().unwrap();
    assert_eq!((deleted.metadata.name.as_deref(), deleted.metadata.namespace), (Some("n1"), None));
    assert!(store.is_empty());
}

/// A custom resource whose spec is required.
#[derive(Debug, Clone, Deserialize)]
struct Widget {
    metadata: ObjectMeta,
    spec: u64,
}

impl k8s_openapi::Resource for Widget {
    const API_VERSION: &'static str = "example.com/v1";
    const GROUP: &'static str = "example.com";
    const KIND: &'static str = "Widget";
    const VERSION: &'static str = "v1";
    const URL_PATH_SEGMENT: &'static str = "widgets";
    type Scope = NamespaceResourceScope;
}

impl k8s_openapi::Metadata for Widget {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[tokio::test(start_paused = true)]
async fn a_type_that_needs_more_than_metadata_is_deleted_with_its_last_state() {
    assert_eq!(Widget::KIND, "Widget");
    let fake = FakeListWatch::new();
    fake.put("a/1", r#"{"metadata":{},"spec":1}"#);
    let mut events = Box::pin(watcher_events::<Widget>(fake.clone()));
    for _ in 0..3 {
        events.next().await.unwrap().unwrap();
    }
    let object = RawObject { key: "a/2".into(), uid: "".into(), resource_version: "9".into(), json: "{}".into() };
    fake.send(WatchEventKind::Added(RawObject { json: r#"{"metadata":{},"spec":2}"#.into(), ..object.clone() }));
    fake.send(WatchEventKind::Modified(object));
    for key in ["a/1", "a/2", "a/9"] {
        fake.send(WatchEventKind::DeletedFinalStateUnknown(key.into()));
    }
    fake.send(WatchEventKind::Bookmark.at("10"));
    fake.put("a/3", r#"{"metadata":{},"spec":3}"#);
    let mut texts = Vec::new();
    while texts.len() < 5 {
        texts.push(match events.next().await.unwrap() {
            Ok(Event::Apply(widget)) => format!("apply {}", widget.spec),
            Ok(Event::Delete(widget)) => format!("delete {}", widget.spec),
            Ok(event) => format!("{event:?}"),
            Err(error) => error.to_string().split(" at ").next().unwrap_or_default().to_owned(),
        });
    }
    assert_eq!(
        texts,
        ["apply 2", "error returned by apiserver during watch: a/2", "delete 1", "delete 2", "apply 3"],
        "an object that was never known is not deleted"
    );
}

#[tokio::test(start_paused = true)]
async fn a_controller_of_kube_rs_reconciles_the_objects_of_a_source_of_this_library() {
    let fake = FakeListWatch::new();
    fake.put("default/one", config_map("1"));
    let (store, writer) = reflector::store::<ConfigMap>();
    let changed = reflector(writer, watcher_events(fake.clone())).applied_objects();
    let (sender, mut reconciled) = mpsc::channel(10);
    let reconcile = |map: Arc<ConfigMap>, sender: Arc<mpsc::Sender<String>>| async move {
        let value = map.data.as_ref().and_then(|data| data.get("key").cloned()).unwrap_or_default();
        let name = map.metadata.name.clone().unwrap_or_default();
        drop(sender.send(format!("{name}={value}")).await);
        Ok::<_, std::convert::Infallible>(Action::await_change())
    };
    let failed = |_: Arc<ConfigMap>, _: &std::convert::Infallible, _: Arc<mpsc::Sender<String>>| {
        Action::requeue(Duration::from_secs(1))
    };
    let controller = Controller::for_stream(changed, store).run(reconcile, failed, Arc::new(sender));
    tokio::spawn(controller.for_each(|_| std::future::ready(())));
    assert_eq!(reconciled.recv().await.unwrap(), "one=1");
    fake.put("default/one", config_map("2"));
    assert_eq!(reconciled.recv().await.unwrap(), "one=2");
    fake.put("default/two", config_map("1"));
    assert_eq!(reconciled.recv().await.unwrap(), "two=1");
}
