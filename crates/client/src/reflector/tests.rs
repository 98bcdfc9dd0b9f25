use std::sync::Mutex as StdMutex;

use futures::StreamExt;

use super::*;
use crate::{
    ApiStatus, FakeListWatch, FakeRequest, Indexer, ListOptions, Object, RawObject, WatchEventKind,
    store::{Change, Replacement},
};

/// A store that records the calls.
#[derive(Clone, Default)]
struct Recorded(Arc<StdMutex<Vec<String>>>);

impl Recorded {
    fn note(&self, text: String) {
        self.0.lock().unwrap().push(text);
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

fn text(change: &Change<serde_json::Value>) -> String {
    match change {
        Change::Added(object) => format!("add {}", object.key()),
        Change::Updated(object) => format!("update {}", object.key()),
        Change::Deleted(deleted) => format!("delete {}", deleted.key()),
    }
}

impl Store<serde_json::Value> for Recorded {
    fn apply(&self, change: Change<serde_json::Value>) {
        self.note(text(&change));
    }

    fn apply_batch(&self, changes: Vec<Change<serde_json::Value>>) {
        self.note(format!("batch of {}", changes.iter().map(text).collect::<Vec<_>>().join(", ")));
    }

    fn replace(&self, state: Replacement<serde_json::Value>) {
        let keys: Vec<_> = state.objects.iter().map(|object| object.key().to_string()).collect();
        self.note(format!("replace at {} with {}", state.resource_version, keys.join(" ")));
    }

    fn resync(&self) {
        self.note("resync".to_owned());
    }
}

fn expired() -> ClientError {
    ApiStatus::new(410, "Expired", "too old").into()
}

fn broken() -> ClientError {
    ClientError::Unreachable { address: "a".to_owned(), message: "reset".to_owned() }
}

struct World {
    fake: FakeListWatch,
    store: Recorded,
    errors: Arc<StdMutex<Vec<String>>>,
    reflector: Arc<Reflector<serde_json::Value>>,
}

impl World {
    fn new(
        fake: FakeListWatch,
        build: impl FnOnce(Reflector<serde_json::Value>) -> Reflector<serde_json::Value>,
    ) -> Self {
        let store = Recorded::default();
        let errors = Arc::new(StdMutex::new(Vec::new()));
        let observed = errors.clone();
        let reflector = Reflector::new(fake.clone(), store.clone())
            .seed(1)
            .on_error(move |error| observed.lock().unwrap().push(error.to_string()));
        Self { fake, store, errors, reflector: Arc::new(build(reflector)) }
    }

    /// Starts the reflector. It ends with the returned task.
    fn start(&self) -> tokio::task::JoinHandle<()> {
        let reflector = self.reflector.clone();
        tokio::spawn(async move { reflector.run(pending::<()>()).await })
    }

    /// Lets the reflector handle everything that is there, without a pass of time.
    async fn settle(&self) {
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }
}

fn requests(fake: &FakeListWatch) -> Vec<String> {
    let watch = |options: &ListOptions| {
        if options.send_initial_events {
            format!("watch-list {:?}", options.resource_version)
        } else {
            format!("watch {:?}", options.resource_version)
        }
    };
    let name = |request: &FakeRequest| match request {
        FakeRequest::List(options) => {
            format!("list {:?} {}", options.resource_version, options.continue_token).trim_end().to_owned()
        }
        FakeRequest::Watch(options) => watch(options),
    };
    fake.requests().iter().map(name).collect()
}

#[tokio::test(start_paused = true)]
async fn a_watch_list_brings_the_state_and_then_the_events() {
    let world = World::new(FakeListWatch::new(), |reflector| reflector);
    world.fake.put("a/1", "{}");
    let _running = world.start();
    world.settle().await;
    world.fake.put("a/1", "{}");
    world.fake.delete("a/1");
    world.settle().await;
    assert_eq!(world.store.take(), ["replace at 2 with a/1", "update a/1", "delete a/1"]);
    assert_eq!(world.reflector.last_sync_resource_version(), "4");
    assert_eq!(requests(&world.fake), ["watch-list \"\""]);
}

#[tokio::test(start_paused = true)]
async fn a_server_without_watch_lists_is_listed_in_pages_and_watched() {
    let world = World::new(FakeListWatch::new(), |reflector| reflector.page_size(2));
    for key in ["a/1", "a/2", "a/3"] {
        world.fake.put(key, "{}");
    }
    world.fake.set_watch_list(false);
    let _running = world.start();
    world.settle().await;
    assert_eq!(world.store.take(), ["replace at 4 with a/1 a/2 a/3"]);
    assert_eq!(requests(&world.fake), ["watch-list \"\"", "list \"0\"", "list \"\" a/2", "watch \"4\""]);
    world.fake.compact();
    world.fake.fail_watches(expired());
    world.fake.wait_for_requests(7).await;
    let again = requests(&world.fake).split_off(4);
    assert_eq!(again, ["list \"4\"", "list \"\" a/2", "watch \"4\""], "no watch-list again");
}

#[tokio::test(start_paused = true)]
async fn a_broken_watch_resumes_from_the_last_version_without_a_list() {
    let world = World::new(FakeListWatch::new(), |reflector| reflector);
    let _running = world.start();
    world.fake.wait_for_requests(1).await;
    world.fake.put("a/1", "{}");
    world.settle().await;
    world.fake.fail_watches(broken());
    world.settle().await;
    world.fake.put("a/2", "{}");
    world.fake.wait_for_requests(2).await;
    world.settle().await;
    assert_eq!(world.store.take(), ["replace at 1 with ", "add a/1", "add a/2"]);
    assert_eq!(requests(&world.fake), ["watch-list \"\"", "watch \"2\""]);
    assert_eq!(*world.errors.lock().unwrap(), ["cannot reach kubefan at a: reset"]);
}

#[tokio::test(start_paused = true)]
async fn a_refused_token_leads_to_no_new_state_and_a_missing_right_does() {
    let refused = (401, "Unauthorized");
    let forbidden = (403, "Forbidden");
    for ((code, reason), then) in [(refused, "watch \"2\""), (forbidden, "watch-list \"2\"")] {
        let world = World::new(FakeListWatch::new(), |reflector| reflector);
        world.fake.put("a/1", "{}");
        let _running = world.start();
        world.settle().await;
        world.fake.fail_watches(ApiStatus::new(code, reason, reason).into());
        world.settle().await;
        assert_eq!(requests(&world.fake).len(), 1, "not at once: {reason}");
        sleep(Duration::from_secs(2)).await;
        assert_eq!(requests(&world.fake), ["watch-list \"\"", then], "{reason}");
        assert_eq!(world.errors.lock().unwrap().len(), 1, "{reason}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_bookmark_moves_the_version_that_the_next_watch_resumes_from() {
    let world = World::new(FakeListWatch::new(), |reflector| reflector);
    let _running = world.start();
    world.fake.wait_for_requests(1).await;
    world.fake.send(WatchEventKind::Bookmark.at("77"));
    world.settle().await;
    world.fake.end_watches();
    world.fake.wait_for_requests(2).await;
    assert_eq!(requests(&world.fake)[1], "watch \"77\"");
}

#[tokio::test(start_paused = true)]
async fn an_expired_version_leads_to_a_state_not_older_than_it() {
    let world = World::new(FakeListWatch::new(), |reflector| reflector);
    world.fake.put("a/1", "{}");
    let _running = world.start();
    world.fake.wait_for_requests(1).await;
    world.fake.delete_unseen("a/1");
    world.fake.fail_watches(broken());
    world.fake.wait_for_requests(3).await;
    world.settle().await;
    assert_eq!(requests(&world.fake), ["watch-list \"\"", "watch \"2\"", "watch-list \"2\""]);
    assert_eq!(world.store.take(), ["replace at 2 with a/1", "replace at 3 with "]);
}

#[tokio::test(start_paused = true)]
async fn a_state_that_cannot_be_as_new_as_the_last_version_is_read_consistently_at_once() {
    let world = World::new(FakeListWatch::new(), |reflector| reflector);
    let _running = world.start();
    world.fake.wait_for_requests(1).await;
    world.fake.fail_watches(expired());
    let message = "Timeout: Too large resource version: 1, current: 0".to_owned();
    let too_large = ApiStatus::new(504, "Timeout", &message);
    world.fake.fail_next_watch(ClientError::Api(Box::new(too_large)));
    world.fake.wait_for_requests(3).await;
    assert_eq!(requests(&world.fake), ["watch-list \"\"", "watch-list \"1\"", "watch-list \"\""]);
}

#[tokio::test(start_paused = true)]
async fn a_continue_token_that_expires_leads_to_one_list_without_pages() {
    let world = World::new(FakeListWatch::new(), |reflector| reflector.page_size(1));
    world.fake.set_watch_list(false);
    for key in ["a/1", "a/2"] {
        world.fake.put(key, "{}");
    }
    let fake = world.fake.clone();
    let second_page = Expiring(fake.clone());
    let reflector = Reflector::new(second_page, world.store.clone()).page_size(1);
    tokio::spawn(async move { reflector.run(pending::<()>()).await });
    fake.wait_for_requests(4).await;
    world.settle().await;
    assert_eq!(world.store.take(), ["replace at 3 with a/1 a/2"]);
}

/// Fails every list that continues another one.
struct Expiring(FakeListWatch);

impl ListerWatcher for Expiring {
    fn list(&self, options: ListOptions) -> futures::future::BoxFuture<'_, Result<crate::ListPage, ClientError>> {
        if options.continue_token.is_empty() {
            return self.0.list(options);
        }
        Box::pin(std::future::ready(Err(expired())))
    }

    fn watch(&self, options: ListOptions) -> futures::future::BoxFuture<'_, Result<crate::WatchEvents, ClientError>> {
        self.0.watch(options)
    }

    fn describe(&self) -> String {
        self.0.describe()
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_takes_effect_at_its_end_and_not_at_all_if_it_breaks_off() {
    let world = World::new(FakeListWatch::new(), |reflector| reflector);
    let _running = world.start();
    world.fake.wait_for_requests(1).await;
    let object =
        |name: &str| RawObject { key: name.into(), uid: "".into(), resource_version: "9".into(), json: "{}".into() };
    world.fake.send(WatchEventKind::BatchBegin);
    world.fake.send(WatchEventKind::Added(object("a")));
    world.fake.send(WatchEventKind::Disconnected(broken()));
    world.fake.send(WatchEventKind::BatchBegin);
    world.fake.send(WatchEventKind::Added(object("b")));
    world.fake.send(WatchEventKind::DeletedFinalStateUnknown("c".into()));
    world.settle().await;
    assert_eq!(world.store.take(), ["replace at 1 with "]);
    assert_eq!(world.reflector.last_sync_resource_version(), "1");
    world.fake.send(WatchEventKind::BatchEnd.at("9"));
    world.settle().await;
    assert_eq!(world.store.take(), ["batch of add b, delete c"]);
    assert_eq!(world.reflector.last_sync_resource_version(), "9");
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_that_breaks_off_leaves_the_store_as_it_was() {
    let world = World::new(FakeListWatch::new(), |reflector| reflector);
    let _running = world.start();
    world.fake.wait_for_requests(1).await;
    world.fake.send(WatchEventKind::SnapshotBegin);
    world.fake.end_watches();
    world.fake.wait_for_requests(2).await;
    assert_eq!(world.store.take(), ["replace at 1 with "]);
    assert_eq!(requests(&world.fake)[1], "watch \"1\"");
}

#[tokio::test(start_paused = true)]
async fn an_object_that_cannot_be_decoded_is_reported_and_keeps_its_previous_state() {
    let fake = FakeListWatch::new();
    fake.put("a/1", "1");
    let indexer = Indexer::<u64>::new();
    let errors = Arc::new(StdMutex::new(Vec::new()));
    let observed = errors.clone();
    let reflector = Reflector::new(fake.clone(), indexer.clone())
        .on_error(move |error| observed.lock().unwrap().push(error.to_string()));
    tokio::spawn(async move { reflector.run(pending::<()>()).await });
    fake.wait_for_requests(1).await;
    fake.put("a/1", "\"text\"");
    fake.put("a/2", "2");
    while indexer.get("a/2").is_none() {
        tokio::task::yield_now().await;
    }
    assert_eq!(indexer.get("a/1").map(|object| *object.value()), Some(1));
    let errors = errors.lock().unwrap();
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(errors[0].starts_with("a/1 at version 3: invalid type, expected u64"), "{errors:?}");
}

#[tokio::test(start_paused = true)]
async fn a_transform_changes_the_object_before_the_store_gets_it() {
    let fake = FakeListWatch::new();
    fake.put("a/1", "1");
    let indexer = Indexer::<u64>::new();
    let double = |object: Object<u64>| Ok(object.map(|value| value * 2));
    let reflector = Reflector::new(fake.clone(), indexer.clone()).transform(double);
    tokio::spawn(async move { reflector.run(pending::<()>()).await });
    while indexer.is_empty() {
        tokio::task::yield_now().await;
    }
    assert_eq!(indexer.get("a/1").map(|object| *object.value()), Some(2));
}

#[tokio::test(start_paused = true)]
async fn a_compact_object_has_no_spare_room() {
    for compact in [false, true] {
        let fake = FakeListWatch::new();
        fake.put("a/1", "[1,2,3]");
        let indexer = Indexer::<Vec<u64>>::new();
        let mut reflector = Reflector::new(fake.clone(), indexer.clone());
        if compact {
            reflector = reflector.compact();
        }
        tokio::spawn(async move { reflector.run(pending::<()>()).await });
        while indexer.is_empty() {
            tokio::task::yield_now().await;
        }
        let object = indexer.get("a/1").unwrap();
        assert_eq!(*object.value(), [1, 2, 3]);
        assert_eq!(object.value().capacity() == 3, compact);
    }
}

#[tokio::test(start_paused = true)]
async fn an_object_of_another_kind_is_refused() {
    let fake = FakeListWatch::new();
    fake.put("a", r#"{"apiVersion":"v1","kind":"Node"}"#);
    fake.put("b", r#"{"apiVersion":"v1","kind":"Pod"}"#);
    let world = World::new(fake, |reflector| reflector.expect_kind("v1", "Pod"));
    let _running = world.start();
    world.settle().await;
    assert_eq!(world.store.take(), ["replace at 3 with b"]);
    assert_eq!(*world.errors.lock().unwrap(), ["a at version 2: expected v1 Pod, got v1 Node"]);
}

#[tokio::test(start_paused = true)]
async fn a_resync_comes_once_per_period_and_asks_the_server_nothing() {
    let world = World::new(FakeListWatch::new(), |reflector| reflector.resync_period(Duration::from_secs(30)));
    let _running = world.start();
    world.settle().await;
    tokio::time::sleep(Duration::from_secs(65)).await;
    assert_eq!(world.store.take(), ["replace at 1 with ", "resync", "resync"]);
    assert_eq!(requests(&world.fake).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn watches_that_end_at_once_are_retried_ever_more_slowly() {
    let world = World::new(FakeListWatch::new(), |reflector| reflector);
    let _running = world.start();
    let started = Instant::now();
    for count in 1..=5 {
        world.fake.wait_for_requests(count).await;
        world.fake.end_watches();
    }
    // The first watch-list had events. Then 0.8, 1.6 and 3.2 s, each with up to as much again.
    assert!(started.elapsed() >= Duration::from_millis(5_600), "{:?}", started.elapsed());
    assert!(world.errors.lock().unwrap().iter().all(|error| error.contains("ended at once")));
}

/// Begins every first state and ends it before it is complete, as a server does that shuts down.
struct Incomplete(FakeListWatch);

impl ListerWatcher for Incomplete {
    fn list(&self, options: ListOptions) -> futures::future::BoxFuture<'_, Result<crate::ListPage, ClientError>> {
        self.0.list(options)
    }

    fn watch(&self, options: ListOptions) -> futures::future::BoxFuture<'_, Result<crate::WatchEvents, ClientError>> {
        Box::pin(async move { Ok(self.0.watch(options).await?.take(2).boxed()) })
    }

    fn describe(&self) -> String {
        self.0.describe()
    }
}

#[tokio::test(start_paused = true)]
async fn a_first_state_that_breaks_off_is_requested_again_ever_more_slowly() {
    let fake = FakeListWatch::new();
    fake.put("a/1", "{}");
    let reflector = Reflector::new(Incomplete(fake.clone()), Indexer::<serde_json::Value>::new()).seed(1);
    tokio::spawn(async move { reflector.run(pending::<()>()).await });
    let started = Instant::now();
    fake.wait_for_requests(4).await;
    assert!(started.elapsed() >= Duration::from_millis(2_400), "{:?}", started.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_object_that_was_not_decodable_and_then_deleted_inside_a_snapshot_is_gone() {
    let fake = FakeListWatch::new();
    fake.put("a", "1");
    let indexer = Indexer::<u64>::new();
    let reflector = Reflector::new(fake.clone(), indexer.clone());
    tokio::spawn(async move { reflector.run(pending::<()>()).await });
    fake.wait_for_requests(1).await;
    let bad = RawObject { key: "a".into(), uid: "".into(), resource_version: "9".into(), json: "{}".into() };
    fake.send(WatchEventKind::SnapshotBegin);
    fake.send(WatchEventKind::Added(bad.clone()));
    fake.send(WatchEventKind::Deleted(bad));
    fake.send(WatchEventKind::SnapshotEnd.at("12"));
    while indexer.resource_version() != "12" {
        tokio::task::yield_now().await;
    }
    assert!(indexer.is_empty());
}

#[tokio::test(start_paused = true)]
async fn one_round_returns_the_error_that_ended_it() {
    let world = World::new(FakeListWatch::new(), |reflector| reflector);
    world.fake.fail_next_watch(broken());
    assert_eq!(world.reflector.list_and_watch().await, Err(broken()));
    assert_eq!(world.errors.lock().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn changes_before_the_end_of_a_snapshot_belong_to_it() {
    let world = World::new(FakeListWatch::new(), |reflector| reflector);
    let _running = world.start();
    world.fake.wait_for_requests(1).await;
    let object =
        |name: &str| RawObject { key: name.into(), uid: "".into(), resource_version: "9".into(), json: "{}".into() };
    world.fake.send(WatchEventKind::SnapshotBegin);
    for name in ["a", "b", "c"] {
        world.fake.send(WatchEventKind::Added(object(name)));
    }
    world.fake.send(WatchEventKind::Modified(object("a")));
    world.fake.send(WatchEventKind::Deleted(object("b")));
    world.fake.send(WatchEventKind::Deleted(object("d")));
    world.fake.send(WatchEventKind::Added(object("d")));
    world.fake.send(WatchEventKind::SnapshotEnd.at("12"));
    world.settle().await;
    assert_eq!(world.store.take(), ["replace at 1 with ", "replace at 12 with c a d"]);
}
