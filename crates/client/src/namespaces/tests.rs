use std::{
    future::pending,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use super::*;
use crate::{FakeListWatch, FakeRequest, HandlerFuncs, SharedInformer};

type Value = serde_json::Value;

/// An informer of the namespaces `a` and `b`, each with a server of its own.
struct World {
    a: FakeListWatch,
    b: FakeListWatch,
    informer: SharedInformer<Value>,
    calls: Arc<Mutex<Vec<String>>>,
}

impl World {
    fn new() -> Self {
        let a = FakeListWatch::new();
        let b = FakeListWatch::new();
        let source = |name: &str| if name == "a" { a.clone() } else { b.clone() };
        let informer = SharedInformer::<Value>::new(Namespaces::new(["b", "a", "b"], source).seed(1));
        let calls: Arc<Mutex<Vec<String>>> = Arc::default();
        let note = |calls: &Arc<Mutex<Vec<String>>>, text: String| {
            calls.lock().unwrap_or_else(PoisonError::into_inner).push(text);
        };
        let on_add = calls.clone();
        let on_update = calls.clone();
        let on_delete = calls.clone();
        let handler = HandlerFuncs::<Value>::new()
            .on_add(move |object, initial| note(&on_add, format!("add {} {initial}", object.key())))
            .on_update(move |_, new| note(&on_update, format!("update {}", new.key())))
            .on_delete(move |deleted| note(&on_delete, format!("delete {}", deleted.key())));
        informer.add_event_handler(handler).unwrap();
        let running = informer.clone();
        tokio::spawn(async move { running.run(pending::<()>()).await });
        Self { a, b, informer, calls }
    }

    /// Lets everything that is ready take effect, without a pass of time.
    async fn settle(&self) -> Vec<String> {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        std::mem::take(&mut self.calls.lock().unwrap())
    }
}

fn expired() -> ClientError {
    ApiStatus::new(410, "Expired", "too old").into()
}

#[tokio::test(start_paused = true)]
async fn an_informer_of_several_namespaces_has_synced_when_all_have() {
    let a = FakeListWatch::new();
    let b = FakeListWatch::new();
    a.put("a/1", "{}");
    // An expired first state is requested again at once, the second time after a delay.
    b.fail_next_watch(expired());
    b.fail_next_watch(expired());
    let source = |name: &str| if name == "a" { a.clone() } else { b.clone() };
    let informer = SharedInformer::<Value>::new(Namespaces::new(["a", "b"], source));
    let _running = informer.spawn(pending::<()>()).unwrap();
    a.wait_for_requests(1).await;
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    a.put("a/2", "{}");
    assert!(!informer.has_synced(), "namespace b has no state yet");
    informer.synced().await.unwrap();
    assert_eq!(informer.indexer().len(), 2, "the change while b was missing is part of the first state");
}

#[tokio::test(start_paused = true)]
async fn the_changes_of_each_namespace_arrive_and_the_version_is_the_lowest() {
    let world = World::new();
    world.a.put("a/1", "{}");
    world.informer.synced().await.unwrap();
    assert_eq!(world.settle().await, ["add a/1 true"]);
    world.b.put("b/1", "{}");
    world.a.put("a/1", "{}");
    assert_eq!(world.settle().await.len(), 2);
    assert_eq!(world.informer.resource_version(), "2", "b is at 2, a is at 3");
    world.b.delete("b/1");
    world.b.put("b/2", "{}");
    world.settle().await;
    assert_eq!(world.informer.resource_version(), "3", "b is at 4, a is at 3");
}

#[tokio::test(start_paused = true)]
async fn a_relist_of_one_namespace_deletes_nothing_in_the_others() {
    let world = World::new();
    for key in ["a/1", "a/2", "a/3"] {
        world.a.put(key, "{}");
    }
    world.b.put("b/1", "{}");
    world.informer.synced().await.unwrap();
    world.settle().await;
    world.a.delete_unseen("a/1");
    world.a.end_watches();
    world.a.fail_next_watch(expired());
    world.a.wait_for_requests(3).await;
    assert_eq!(world.settle().await, ["delete a/1"], "unchanged objects are not reported again");
    assert_eq!(
        world.informer.indexer().keys().iter().map(|key| key.as_str()).collect::<Vec<_>>(),
        ["a/2", "a/3", "b/1"]
    );
    assert_eq!(world.b.requests().len(), 1, "b was not asked again");
}

#[tokio::test(start_paused = true)]
async fn an_error_of_one_namespace_does_not_interrupt_the_others() {
    let world = World::new();
    world.informer.synced().await.unwrap();
    let broken = ClientError::Unreachable { address: "a".to_owned(), message: "reset".to_owned() };
    world.a.fail_watches(broken.clone());
    world.a.fail_next_watch(broken);
    world.b.put("b/1", "{}");
    assert_eq!(world.settle().await, ["add b/1 false"]);
    world.a.put("a/1", "{}");
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(world.settle().await, ["add a/1 false"]);
    assert!(
        world
            .a
            .requests()
            .iter()
            .skip(1)
            .all(|request| { matches!(request, FakeRequest::Watch(options) if !options.send_initial_events) })
    );
}

#[tokio::test(start_paused = true)]
async fn no_namespaces_are_an_empty_state_and_an_empty_name_means_all() {
    let none = SharedInformer::<Value>::new(Namespaces::new([""; 0], |_| FakeListWatch::new()));
    let running = none.clone();
    tokio::spawn(async move { running.run(pending::<()>()).await });
    none.synced().await.unwrap();
    assert!(none.indexer().is_empty());
    let all = Namespaces::new(["a", "", "b"], |name| {
        assert_eq!(name, "");
        FakeListWatch::new()
    });
    assert_eq!(all.sources.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_list_has_the_objects_of_all_namespaces_at_the_lowest_version() {
    let a = FakeListWatch::new();
    let b = FakeListWatch::new();
    a.set_page_size(1);
    for key in ["a/1", "a/2"] {
        a.put(key, "{}");
    }
    b.put("b/1", "{}");
    let both = Namespaces::new(["a", "b"], |name| if name == "a" { a.clone() } else { b.clone() });
    let page = both.list(ListOptions::default()).await.unwrap();
    assert_eq!((page.objects.len(), page.resource_version.as_str()), (3, "2"));
    let resumed = both.watch(ListOptions { resource_version: "2".to_owned(), ..ListOptions::default() }).await;
    assert!(resumed.err().unwrap().is_expired());
}
