use futures::FutureExt;
use serde_json::Value;

use super::*;
use crate::{FakeListWatch, WatchEventKind};

fn text(item: &Item<Value>) -> String {
    let change = |change: &Change<Value>| match change {
        Change::Added(object) => format!("add {}", object.key()),
        Change::Updated(object) => format!("update {}", object.key()),
        Change::Deleted(deleted) => format!("delete {}", deleted.key()),
    };
    match item {
        Ok(InformerEvent::ReplaceBegin) => "replace".to_owned(),
        Ok(InformerEvent::Replaced(object)) => format!("with {}", object.key()),
        Ok(InformerEvent::ReplaceEnd { resource_version, .. }) => format!("at {resource_version}"),
        Ok(InformerEvent::Changed(one)) => change(one),
        Ok(InformerEvent::Batch(changes)) => changes.iter().map(change).collect::<Vec<_>>().join(" and "),
        Ok(InformerEvent::Advanced { resource_version }) => format!("version {resource_version}"),
        Err(error) => format!("error: {error}"),
    }
}

/// Reads all items that are ready.
fn ready_items<S: Stream<Item = Item<Value>> + Unpin>(events: &mut S) -> Vec<String> {
    let mut items = Vec::new();
    while let Some(Some(item)) = events.next().now_or_never() {
        items.push(text(&item));
    }
    items
}

fn broken() -> ClientError {
    ClientError::Unreachable { address: "a".to_owned(), message: "reset".to_owned() }
}

#[tokio::test(start_paused = true)]
async fn a_stream_has_the_state_first_and_then_each_change_with_its_version() {
    let fake = FakeListWatch::new();
    fake.put("a/1", "{}");
    let mut events = watcher::<Value>(fake.clone());
    assert!(fake.requests().is_empty(), "nothing is requested before the first read");
    assert_eq!(ready_items(&mut events), ["replace", "with a/1", "at 2"]);
    fake.put("a/1", "{}");
    fake.delete("a/1");
    assert_eq!(ready_items(&mut events), ["update a/1", "version 3", "delete a/1", "version 4"]);
    fake.fail_watches(broken());
    assert_eq!(ready_items(&mut events), ["error: cannot reach kubefan at a: reset"]);
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    fake.put("a/2", "{}");
    assert_eq!(ready_items(&mut events), ["add a/2", "version 5"]);
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_stops_reading_stops_the_watch_after_one_event() {
    let fake = FakeListWatch::new();
    let mut events = watcher::<Value>(fake.clone());
    ready_items(&mut events);
    for _ in 0..50 {
        fake.put("a/1", "{}");
    }
    assert_eq!(text(&events.next().await.unwrap()), "add a/1");
    assert_eq!(events.queue.lock().len(), 1, "only the version of the first event waits");
    assert_eq!(ready_items(&mut events).len(), 99, "and nothing was lost");
}

#[tokio::test(start_paused = true)]
async fn a_store_has_a_change_before_the_reader_does() {
    let fake = FakeListWatch::new();
    fake.put("a/1", "{}");
    let store = Indexer::new();
    let mut events = Box::pin(reflect(store.clone(), watcher::<Value>(fake.clone())));
    assert_eq!(ready_items(&mut events).len(), 3);
    assert_eq!((store.len(), store.resource_version().as_str()), (1, "2"));
    fake.delete("a/1");
    assert_eq!(text(&events.next().await.unwrap()), "delete a/1");
    assert!(store.is_empty());
    fake.bookmark();
    ready_items(&mut events);
    assert_eq!(store.resource_version(), "3");
}

#[tokio::test(start_paused = true)]
async fn a_batch_is_one_event() {
    let fake = FakeListWatch::new();
    let store = Indexer::new();
    let mut events = Box::pin(reflect(store.clone(), watcher::<Value>(fake.clone())));
    ready_items(&mut events);
    let object = |key: &str| crate::RawObject {
        key: key.into(),
        uid: "".into(),
        resource_version: "9".into(),
        json: "{}".into(),
    };
    fake.send(WatchEventKind::BatchBegin);
    fake.send(WatchEventKind::Added(object("a/1")));
    fake.send(WatchEventKind::Added(object("a/2")));
    assert!(ready_items(&mut events).is_empty() && store.is_empty());
    fake.send(WatchEventKind::BatchEnd.at("9"));
    assert_eq!(ready_items(&mut events), ["add a/1 and add a/2", "version 9"]);
    assert_eq!(store.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn objects_pass_only_if_the_value_of_the_predicate_changed() {
    let fake = FakeListWatch::new();
    fake.put("a/1", r#"{"generation":1}"#);
    fake.put("a/2", r#"{"generation":1}"#);
    let generation = |object: &Object<Value>| object["generation"].as_i64();
    let mut events = Box::pin(changed_only(watcher::<Value>(fake.clone()), generation));
    assert_eq!(ready_items(&mut events), ["replace", "with a/1", "with a/2", "at 3"]);
    fake.put("a/1", r#"{"generation":1,"status":"x"}"#);
    assert_eq!(ready_items(&mut events), ["version 4"]);
    fake.put("a/1", r#"{"generation":2}"#);
    assert_eq!(ready_items(&mut events), ["update a/1", "version 5"]);
    fake.delete("a/1");
    fake.put("a/1", r#"{"generation":2}"#);
    assert_eq!(ready_items(&mut events), ["delete a/1", "version 6", "add a/1", "version 7"]);

    // A relist passes new and changed objects, and forgets those that are gone.
    fake.delete_unseen("a/2");
    fake.fail_watches(crate::ApiStatus::new(410, "Expired", "too old").into());
    assert_eq!(ready_items(&mut events), ["error: too old"]);
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    assert_eq!(ready_items(&mut events), ["replace", "at 8"]);
    fake.put("a/2", r#"{"generation":1}"#);
    assert_eq!(ready_items(&mut events), ["add a/2", "version 9"]);
}

#[tokio::test(start_paused = true)]
async fn the_objects_alone_come_without_deletions() {
    let fake = FakeListWatch::new();
    fake.put("a/1", "{}");
    let mut stream = Box::pin(objects(watcher::<Value>(fake.clone())));
    assert_eq!(stream.next().await.unwrap().unwrap().key().as_str(), "a/1");
    fake.delete("a/1");
    fake.put("a/2", "{}");
    assert_eq!(stream.next().await.unwrap().unwrap().key().as_str(), "a/2");
}
