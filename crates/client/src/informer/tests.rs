use std::{
    future::pending,
    sync::{Arc, Mutex as StdMutex},
    time::Duration,
};

use tokio::{
    sync::oneshot,
    task::{JoinHandle, yield_now},
    time::sleep,
};

use super::*;
use crate::{FakeListWatch, WatchEventKind, object::Object, store::Deleted};

type Value = serde_json::Value;
type Log = Arc<StdMutex<Vec<String>>>;

fn text_of_deleted(deleted: &Deleted<Value>) -> String {
    match deleted {
        Deleted::Known(object) => format!("- {}@{}", object.key(), object.resource_version()),
        Deleted::FinalStateUnknown(unknown) => {
            let last = unknown.last_known.as_ref().map_or("?", |object| object.resource_version());
            format!("-? {}@{last}", unknown.key)
        }
    }
}

/// A handler that writes its calls down.
fn recorder(log: &Log) -> HandlerFuncs<Value> {
    let added = log.clone();
    let updated = log.clone();
    let deleted = log.clone();
    HandlerFuncs::new()
        .on_add(move |object: Arc<Object<Value>>, initial| {
            let initial = if initial { " initial" } else { "" };
            added.lock().unwrap().push(format!("+ {}@{}{initial}", object.key(), object.resource_version()));
        })
        .on_update(move |old, new| {
            let text = format!("~ {} {}→{}", new.key(), old.resource_version(), new.resource_version());
            updated.lock().unwrap().push(text);
        })
        .on_delete(move |gone| deleted.lock().unwrap().push(text_of_deleted(&gone)))
}

fn take(log: &Log) -> Vec<String> {
    std::mem::take(&mut log.lock().unwrap())
}

/// Lets all tasks run as far as they can without time passing.
async fn settle() {
    for _ in 0..300 {
        yield_now().await;
    }
}

fn start(informer: &SharedInformer<Value>) -> JoinHandle<Result<(), InformerError>> {
    let informer = informer.clone();
    tokio::spawn(async move { informer.run(pending::<()>()).await })
}

struct World {
    fake: FakeListWatch,
    informer: SharedInformer<Value>,
    log: Log,
}

impl World {
    fn new(build: impl FnOnce(InformerBuilder<Value>) -> InformerBuilder<Value>) -> Self {
        let fake = FakeListWatch::new();
        let informer = build(SharedInformer::builder(fake.clone()).seed(1)).build();
        Self { fake, informer, log: Log::default() }
    }

    fn record(&self) -> Registration {
        self.informer.add_event_handler(recorder(&self.log)).unwrap()
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_gets_the_initial_list_and_then_every_change_in_order() {
    let world = World::new(|builder| builder);
    world.fake.put("a/1", "{}");
    let registration = world.record();
    assert!(!registration.has_synced());
    start(&world.informer);
    world.informer.synced().await.unwrap();
    registration.synced().await.unwrap();
    assert_eq!(take(&world.log), ["+ a/1@2 initial"]);
    world.fake.put("a/2", "{}");
    world.fake.put("a/1", "{}");
    world.fake.delete("a/2");
    settle().await;
    assert_eq!(take(&world.log), ["+ a/2@3", "~ a/1 2→4", "- a/2@5"]);
}

#[tokio::test(start_paused = true)]
async fn an_empty_initial_list_syncs_too() {
    let world = World::new(|builder| builder);
    let registration = world.record();
    start(&world.informer);
    registration.synced().await.unwrap();
    assert!(world.informer.has_synced() && take(&world.log).is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_store_has_the_object_before_a_handler_hears_of_it() {
    let world = World::new(|builder| builder);
    let indexer = world.informer.indexer().clone();
    let seen = Log::default();
    let log = seen.clone();
    let handler = HandlerFuncs::new().on_add(move |object: Arc<Object<Value>>, _| {
        let stored = indexer.get(object.key().as_str()).is_some();
        log.lock().unwrap().push(format!("{} {stored}", object.key()));
    });
    world.informer.add_event_handler(handler).unwrap();
    start(&world.informer);
    world.informer.synced().await.unwrap();
    world.fake.put("a/1", "{}");
    settle().await;
    assert_eq!(take(&seen), ["a/1 true"]);
}

#[tokio::test(start_paused = true)]
async fn a_late_handler_first_gets_the_current_objects_as_initial() {
    let world = World::new(|builder| builder);
    world.fake.put("a/1", "{}");
    world.fake.put("a/2", "{}");
    start(&world.informer);
    world.informer.synced().await.unwrap();
    world.fake.delete("a/1");
    settle().await;
    let registration = world.record();
    assert!(!registration.has_synced(), "no call was made yet");
    world.fake.put("a/2", "{}");
    registration.synced().await.unwrap();
    settle().await;
    assert_eq!(take(&world.log), ["+ a/2@3 initial", "~ a/2 3→5"]);
}

#[tokio::test(start_paused = true)]
async fn objects_that_vanish_between_two_lists_are_deleted_with_an_unknown_state() {
    let world = World::new(|builder| builder);
    world.fake.put("a/1", "{}");
    world.fake.put("a/2", "{}");
    let _registration = world.record();
    start(&world.informer);
    world.informer.synced().await.unwrap();
    settle().await;
    take(&world.log);
    world.fake.delete_unseen("a/1");
    world.fake.end_watches();
    world.fake.wait_for_requests(3).await;
    settle().await;
    assert_eq!(take(&world.log), ["-? a/1@2", "~ a/2 3→3"]);
    assert_eq!(world.informer.indexer().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_object_created_again_is_one_update_or_by_choice_a_deletion_and_an_addition() {
    for (two_calls, expected) in [(false, vec!["~ a/1 2→4"]), (true, vec!["-? a/1@2", "+ a/1@4"])] {
        let world = World::new(|builder| if two_calls { builder.recreated_as_delete_and_add() } else { builder });
        world.fake.put("a/1", "{}");
        let _registration = world.record();
        start(&world.informer);
        world.informer.synced().await.unwrap();
        settle().await;
        take(&world.log);
        world.fake.end_watches();
        world.fake.delete_unseen("a/1");
        world.fake.put("a/1", "{}");
        world.fake.compact();
        world.fake.wait_for_requests(3).await;
        settle().await;
        assert_eq!(take(&world.log), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_is_visible_in_one_step() {
    let world = World::new(|builder| builder);
    world.fake.put("a/1", "{}");
    start(&world.informer);
    world.informer.synced().await.unwrap();
    let _registration = world.record();
    settle().await;
    take(&world.log);
    let raw = |key: &str, version: &str| crate::RawObject {
        key: key.into(),
        uid: "".into(),
        resource_version: version.into(),
        json: "{}".into(),
    };
    let before = world.informer.indexer().snapshot();
    world.fake.send(WatchEventKind::BatchBegin);
    world.fake.send(WatchEventKind::Added(raw("a/2", "8")));
    world.fake.send(WatchEventKind::DeletedFinalStateUnknown("a/1".into()));
    world.fake.send(WatchEventKind::DeletedFinalStateUnknown("a/9".into()));
    settle().await;
    assert_eq!(world.informer.indexer().snapshot().len(), before.len());
    assert!(take(&world.log).is_empty());
    world.fake.send(WatchEventKind::BatchEnd.at("9"));
    settle().await;
    assert_eq!(take(&world.log), ["+ a/2@8", "-? a/1@2"]);
    assert_eq!(world.informer.resource_version(), "9");
}

#[tokio::test(start_paused = true)]
async fn each_handler_has_its_own_resync_period() {
    let world = World::new(|builder| builder);
    world.fake.put("a/1", "{}");
    let often = Log::default();
    let never = Log::default();
    let options = |seconds| HandlerOptions { resync_period: Some(Duration::from_secs(seconds)), ..Default::default() };
    world.informer.add_event_handler_with_options(recorder(&often), options(10)).unwrap();
    world.informer.add_event_handler_with_options(recorder(&world.log), options(30)).unwrap();
    world.informer.add_event_handler(recorder(&never)).unwrap();
    start(&world.informer);
    world.informer.synced().await.unwrap();
    sleep(Duration::from_secs(65)).await;
    let resyncs = |log: &Log| take(log).iter().filter(|call| *call == "~ a/1 2→2").count();
    assert_eq!((resyncs(&often), resyncs(&world.log), resyncs(&never)), (6, 2, 0));
    assert_eq!(world.fake.requests().len(), 1, "a resync asks the server nothing");
}

#[tokio::test(start_paused = true)]
async fn a_removed_handler_gets_no_more_calls() {
    let world = World::new(|builder| builder);
    let registration = world.record();
    start(&world.informer);
    world.informer.synced().await.unwrap();
    registration.remove().await;
    assert_eq!(registration.ended().await, HandlerEnd::Removed);
    world.fake.put("a/1", "{}");
    settle().await;
    assert!(take(&world.log).is_empty());
    assert_eq!(world.informer.indexer().len(), 1);
}

/// Signals its first call, and then never returns.
struct Stuck(Option<oneshot::Sender<()>>);

impl EventHandler<Value> for Stuck {
    async fn on_add(&mut self, _: Arc<Object<Value>>, _: bool) {
        if let Some(called) = self.0.take() {
            called.send(()).unwrap();
        }
        pending::<()>().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_never_returns_delays_no_other_and_fills_no_memory() {
    let world = World::new(|builder| builder);
    let (called, was_called) = oneshot::channel();
    let options = HandlerOptions { backlog: Backlog::Conflate(100), ..Default::default() };
    world.informer.add_event_handler_with_options(Stuck(Some(called)), options).unwrap();
    let _registration = world.record();
    start(&world.informer);
    world.informer.synced().await.unwrap();
    world.fake.put("a/0", "{}");
    was_called.await.unwrap();
    for round in 0..5_000 {
        world.fake.put(&format!("a/{}", round % 40), "{}");
        if round % 50 == 0 {
            settle().await;
        }
    }
    settle().await;
    assert_eq!(take(&world.log).len(), 5_001);
    assert!(world.informer.longest_backlog() <= 101, "{}", world.informer.longest_backlog());
}

#[tokio::test(start_paused = true)]
async fn stopping_does_not_wait_for_ever_for_a_handler() {
    let world = World::new(|builder| builder);
    let (called, was_called) = oneshot::channel();
    let stuck = world.informer.add_event_handler(Stuck(Some(called))).unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let informer = world.informer.clone();
    let running = tokio::spawn(async move { informer.run(async { drop(stopped.await) }).await });
    world.informer.synced().await.unwrap();
    world.fake.put("a/1", "{}");
    was_called.await.unwrap();
    stop.send(()).unwrap();
    assert_eq!(running.await.unwrap(), Ok(()));
    assert_eq!(stuck.ended().await, HandlerEnd::Stopped);
    assert_eq!(world.informer.add_event_handler(HandlerFuncs::new()).unwrap_err(), InformerError::Stopped);
    assert_eq!(world.informer.run(pending::<()>()).await, Err(InformerError::AlreadyStarted));
    assert_eq!(world.informer.indexer().len(), 1, "the store can still be read");
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_a_handler_ends_that_handler_with_a_report_and_nothing_else() {
    let world = World::new(|builder| builder);
    let reports = Log::default();
    let log = reports.clone();
    world.informer.on_error(move |error| log.lock().unwrap().push(error.to_string()));
    let panics = HandlerFuncs::new().on_add(|_: Arc<Object<Value>>, _| panic!("no such luck"));
    world.fake.put("a/1", "{}");
    let broken = world.informer.add_event_handler(panics).unwrap();
    let _registration = world.record();
    start(&world.informer);
    world.informer.synced().await.unwrap();
    assert_eq!(broken.ended().await, HandlerEnd::Panicked("no such luck".to_owned()));
    let end = HandlerEnd::Panicked("no such luck".to_owned());
    assert_eq!(broken.synced().await, Err(InformerError::HandlerEnded(end)));
    assert!(!broken.has_synced(), "its initial list was not handled");
    world.fake.put("a/1", "{}");
    settle().await;
    assert_eq!(take(&world.log), ["+ a/1@2 initial", "~ a/1 2→3"]);
    assert_eq!(take(&reports), ["an event handler panicked, and gets no more calls: no such luck"]);
}

#[tokio::test(start_paused = true)]
async fn a_handler_above_its_hard_limit_ends_with_a_report() {
    let world = World::new(|builder| builder);
    let reports = Log::default();
    let log = reports.clone();
    world.informer.on_error(move |error| log.lock().unwrap().push(error.to_string()));
    let (called, was_called) = oneshot::channel();
    let options = HandlerOptions { backlog: Backlog::StopWithReport(3), ..Default::default() };
    let registration = world.informer.add_event_handler_with_options(Stuck(Some(called)), options).unwrap();
    start(&world.informer);
    world.informer.synced().await.unwrap();
    world.fake.put("a/0", "{}");
    was_called.await.unwrap();
    for _ in 0..4 {
        world.fake.put("a/0", "{}");
        settle().await;
    }
    assert_eq!(registration.ended().await, HandlerEnd::Overflowed(3));
    assert_eq!(take(&reports), ["an event handler was 3 calls behind, its limit, and gets no more calls"]);
}

#[tokio::test(start_paused = true)]
async fn a_list_that_is_longer_than_a_hard_limit_ends_no_handler() {
    let world = World::new(|builder| builder);
    for number in 0..50 {
        world.fake.put(&format!("a/{number}"), "{}");
    }
    let options = HandlerOptions { backlog: Backlog::StopWithReport(10), ..Default::default() };
    let registration = world.informer.add_event_handler_with_options(recorder(&world.log), options).unwrap();
    start(&world.informer);
    registration.synced().await.unwrap();
    assert_eq!(take(&world.log).len(), 50);
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_a_transform_or_an_index_concerns_one_object_only() {
    let panics = |object: Object<Value>| if object.name() == "bad" { panic!("not this one") } else { Ok(object) };
    let world = World::new(|builder| builder.transform(panics));
    let reports = Log::default();
    let log = reports.clone();
    world.informer.on_error(move |error| log.lock().unwrap().push(error.to_string()));
    world.informer.on_error(|_| panic!("an observer, too"));
    world.informer.indexer().add_index("first", |object| [object["list"][0].as_str().unwrap().to_owned()]).unwrap();
    start(&world.informer);
    world.informer.synced().await.unwrap();
    world.fake.put("a/bad", "{}");
    world.fake.put("a/empty", "{}");
    world.fake.put("a/good", r#"{"list":["x"]}"#);
    settle().await;
    assert_eq!(world.informer.indexer().len(), 2);
    assert_eq!(world.informer.indexer().index_keys("first", "x").unwrap().len(), 1);
    assert_eq!(take(&reports), ["a/bad at version 2: panicked: not this one"]);
}

#[tokio::test(start_paused = true)]
async fn waiting_for_a_version_ends_when_the_store_has_it() {
    let world = World::new(|builder| builder);
    start(&world.informer);
    world.informer.synced().await.unwrap();
    let limit = Duration::from_secs(5);
    let informer = world.informer.clone();
    let waiting = tokio::spawn(async move { informer.wait_until("2", limit).await });
    settle().await;
    assert!(!waiting.is_finished());
    world.fake.put("a/1", "{}");
    assert_eq!(waiting.await.unwrap(), Ok(()));
    assert!(world.informer.indexer().get("a/1").is_some());
    let error = world.informer.wait_until("77", limit).await.unwrap_err();
    assert_eq!(error.to_string(), "version 77 has not arrived after 5s; the store is at version 2");
    world.fake.send(WatchEventKind::Bookmark.at("80"));
    assert_eq!(world.informer.wait_until("77", limit).await, Ok(()), "a bookmark counts");
    let error = world.informer.wait_until("abc", limit).await.unwrap_err();
    assert_eq!(error.to_string(), "\"abc\" is not a resource version that can be compared");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_run_stops_the_informer() {
    let world = World::new(|builder| builder);
    let registration = world.record();
    let running = start(&world.informer);
    world.informer.synced().await.unwrap();
    running.abort();
    assert_eq!(registration.ended().await, HandlerEnd::Stopped);
    assert!(world.informer.is_stopped());
    assert_eq!(world.informer.wait_until("99", Duration::from_secs(9)).await, Err(InformerError::Stopped));
}

#[tokio::test(start_paused = true)]
async fn a_filtered_handler_gets_an_addition_when_an_object_begins_to_pass_and_a_deletion_when_it_ceases() {
    let world = World::new(|builder| builder);
    let passes = |object: &Object<Value>| object["ready"] == true;
    world.informer.add_event_handler(FilteredHandler::new(passes, recorder(&world.log))).unwrap();
    start(&world.informer);
    world.informer.synced().await.unwrap();
    for ready in [false, true, true, false, false] {
        world.fake.put("a/1", format!("{{\"ready\":{ready}}}"));
        settle().await;
    }
    world.fake.delete("a/1");
    settle().await;
    assert_eq!(take(&world.log), ["+ a/1@3", "~ a/1 3→4", "- a/1@4"]);
}

#[test]
fn a_handler_outside_of_a_runtime_is_an_error_and_no_panic() {
    let informer = SharedInformer::<Value>::new(FakeListWatch::new());
    assert_eq!(informer.add_event_handler(HandlerFuncs::new()).unwrap_err(), InformerError::NoRuntime);
}
