use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize},
    },
};

use futures::{StreamExt, stream};
use serde_json::Value;
use tokio::{sync::watch, time::sleep};

use super::*;
use crate::{
    ApiStatus, Change, FakeListWatch, FakeRequest, InformerEvent, Object, ReflectorError, WatchEvent, WatchEventKind,
    Watcher, watcher,
};

mod budgeted;
mod fleet;
mod herd;

const MINUTE: Duration = Duration::from_secs(60);

fn api_error(code: u16, retry_after: Option<Duration>) -> ClientError {
    let reason = format!("Reason{code}");
    let message = format!("status {code}");
    ClientError::Api(Box::new(ApiStatus { code, reason, message, retry_after, causes: Vec::new() }))
}

fn unreachable() -> ClientError {
    ClientError::Unreachable { address: "kubefan:7443".to_owned(), message: "Connection refused".to_owned() }
}

/// A kubefan that can disappear. Its objects are those of the fake server.
#[derive(Clone)]
struct Kubefan {
    objects: FakeListWatch,
    is_there: watch::Sender<bool>,
    /// Like GrpcListWatch: the watch reports broken connections, and reconnects.
    reconnects: bool,
    attempts: Arc<AtomicUsize>,
    /// Whether each watch ends at once, without an error.
    ends_watches: Arc<AtomicBool>,
    /// Named in each answer.
    budget: Option<FallbackBudget>,
    was_reached: Arc<AtomicBool>,
}

impl Kubefan {
    fn new(objects: FakeListWatch, reconnects: bool) -> Self {
        Self {
            objects,
            is_there: watch::Sender::new(true),
            reconnects,
            attempts: Arc::default(),
            ends_watches: Arc::default(),
            budget: None,
            was_reached: Arc::default(),
        }
    }

    fn set(&self, is_there: bool) {
        self.is_there.send_replace(is_there);
    }

    fn attempt(&self) -> Result<(), ClientError> {
        self.attempts.fetch_add(1, Ordering::Relaxed);
        if !*self.is_there.borrow() {
            return Err(unreachable());
        }
        self.was_reached.store(true, Ordering::Relaxed);
        Ok(())
    }

    async fn connect(self, options: ListOptions) -> Result<WatchEvents, ClientError> {
        self.attempt()?;
        let events = self.objects.watch(options).await?;
        let mut is_there = self.is_there.subscribe();
        let gone = async move { drop(is_there.wait_for(|is_there| !is_there).await) };
        Ok(events.take_until(gone).chain(stream::iter([Err(unreachable())])).boxed())
    }

    /// One long watch over several connections.
    fn reconnecting(self, options: ListOptions) -> WatchEvents {
        struct State {
            kubefan: Kubefan,
            options: ListOptions,
            events: Option<WatchEvents>,
            broken: bool,
        }
        let state = State { kubefan: self, options, events: None, broken: false };
        stream::unfold(state, |mut state| async move {
            loop {
                let error = match &mut state.events {
                    Some(events) => match events.next().await? {
                        Ok(event) => {
                            if let Some(version) = &event.resume_version {
                                state.options.resource_version.clone_from(version);
                                state.options.send_initial_events = false;
                            }
                            return Some((Ok(event), state));
                        }
                        Err(error) => error,
                    },
                    None => {
                        if state.broken {
                            sleep(Duration::from_secs(20)).await;
                        }
                        if state.kubefan.ends_watches.load(Ordering::Relaxed) {
                            state.kubefan.attempts.fetch_add(1, Ordering::Relaxed);
                            return None;
                        }
                        match state.kubefan.clone().connect(state.options.clone()).await {
                            Ok(events) => {
                                state.events = Some(events);
                                if std::mem::take(&mut state.broken) {
                                    return Some((Ok(WatchEventKind::Reconnected.into()), state));
                                }
                                continue;
                            }
                            Err(error) if error.is_retryable() => error,
                            Err(error) => return Some((Err(error), state)),
                        }
                    }
                };
                state.events = None;
                state.broken = true;
                return Some((Ok(WatchEvent::from(WatchEventKind::Disconnected(error))), state));
            }
        })
        .boxed()
    }
}

impl ListerWatcher for Kubefan {
    fn list(&self, options: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>> {
        async move {
            self.attempt()?;
            self.objects.list(options).await
        }
        .boxed()
    }

    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>> {
        if self.reconnects {
            std::future::ready(Ok(self.clone().reconnecting(options))).boxed()
        } else {
            self.clone().connect(options).boxed()
        }
    }

    fn watch_reconnects(&self) -> bool {
        self.reconnects
    }

    fn fallback_budget(&self) -> Option<FallbackBudget> {
        self.budget.filter(|_| self.was_reached.load(Ordering::Relaxed))
    }

    fn describe(&self) -> String {
        "pods from kubefan".to_owned()
    }
}

/// The apiserver: the same objects, with a record of its requests.
#[derive(Clone, Default)]
struct Apiserver {
    objects: FakeListWatch,
    requests: Arc<Mutex<Vec<(Instant, FakeRequest)>>>,
    errors: Arc<Mutex<Vec<ClientError>>>,
    is_expired: Arc<AtomicBool>,
}

impl Apiserver {
    fn note(&self, request: FakeRequest) {
        self.requests.lock().unwrap().push((Instant::now(), request));
    }

    fn count(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

impl ListerWatcher for Apiserver {
    fn list(&self, options: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>> {
        self.note(FakeRequest::List(options.clone()));
        self.objects.list(options)
    }

    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>> {
        self.note(FakeRequest::Watch(options.clone()));
        let error = self.errors.lock().unwrap().pop();
        let error = error.or_else(|| self.is_expired.load(Ordering::Relaxed).then(|| api_error(410, None)));
        match error {
            Some(error) => std::future::ready(Err(error)).boxed(),
            None => self.objects.watch(options),
        }
    }

    fn describe(&self) -> String {
        "pods from the apiserver".to_owned()
    }
}

struct World {
    kubefan: Kubefan,
    apiserver: Apiserver,
    source: WithFallback,
    events: Watcher<Value>,
    /// The client's place in the spread.
    phase: Duration,
}

impl World {
    fn new(reconnects: bool, policy: Fallback) -> Self {
        let apiserver = Apiserver::default();
        let kubefan = Kubefan::new(apiserver.objects.clone(), reconnects);
        let phase = match &policy {
            Fallback::Never | Fallback::Budgeted(_) => Duration::ZERO,
            Fallback::Paced(options) => options.phase(),
        };
        let source = WithFallback::new(kubefan.clone(), apiserver.clone(), policy);
        let events = watcher(source.clone());
        Self { kubefan, apiserver, source, events, phase }
    }

    fn paced(reconnects: bool) -> Self {
        Self::new(reconnects, Fallback::Paced(PacedOptions::new("node-17")))
    }

    fn put(&self, key: &str) {
        self.apiserver.objects.put(key, "{}");
    }

    /// Reads for this long, and returns the changes.
    async fn read_for(&mut self, time: Duration) -> Vec<String> {
        let mut changes = Vec::new();
        let end = sleep(time);
        tokio::pin!(end);
        loop {
            let event = tokio::select! {
                biased;
                () = &mut end => return changes,
                event = self.events.next() => event.unwrap(),
            };
            match event {
                Ok(InformerEvent::Changed(change)) => changes.push(text(&change)),
                Ok(InformerEvent::Replaced(object)) => changes.push(format!("state {}", name(&object))),
                Err(ReflectorError::Client(_)) | Ok(_) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Reads until just after the client's moment. It must be called when the outage starts.
    async fn read_until_fallback(&mut self) -> Vec<String> {
        self.read_for(MINUTE + self.phase + Duration::from_secs(1)).await
    }
}

fn name(object: &Object<Value>) -> String {
    format!("{}@{}", object.key(), object.resource_version())
}

fn text(change: &Change<Value>) -> String {
    match change {
        Change::Added(object) => format!("add {}", name(object)),
        Change::Updated(object) => format!("update {}", name(object)),
        Change::Deleted(deleted) => format!("delete {}", deleted.key()),
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_fallback_the_apiserver_gets_no_request() {
    for reconnects in [true, false] {
        let mut world = World::new(reconnects, Fallback::default());
        world.read_for(MINUTE).await;
        world.kubefan.set(false);
        world.put("a/1");
        assert_eq!(world.read_for(500 * MINUTE).await, [""; 0]);
        assert_eq!(world.apiserver.count(), 0);
        world.kubefan.set(true);
        assert_eq!(world.read_for(2 * MINUTE).await, ["add a/1@2"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_watches_the_apiserver_from_its_version_at_its_moment_and_returns() {
    for reconnects in [true, false] {
        let mut world = World::paced(reconnects);
        world.put("a/1");
        assert_eq!(world.read_for(MINUTE).await, ["state a/1@2"]);
        world.kubefan.set(false);
        world.put("a/2");
        assert_eq!(world.read_for(MINUTE + world.phase - Duration::from_secs(1)).await, [""; 0]);
        assert_eq!(world.apiserver.count(), 0);
        assert_eq!(world.read_for(Duration::from_secs(2)).await, ["add a/2@3"]);
        let request = world.apiserver.requests.lock().unwrap()[0].1.clone();
        assert!(
            matches!(&request, FakeRequest::Watch(options) if options.resource_version == "2"
                && !options.send_initial_events),
            "{request:?}"
        );
        world.put("a/1");
        assert_eq!(world.read_for(MINUTE).await, ["update a/1@4"]);
        assert!(world.source.gone_for().is_some());

        world.kubefan.set(true);
        assert_eq!(world.read_for(2 * MINUTE).await, [""; 0], "nothing is repeated");
        assert_eq!(world.source.gone_for(), None);
        assert_eq!(world.apiserver.objects.open_watches(), 1, "the apiserver's watch was dropped");
        world.put("a/2");
        assert_eq!(world.read_for(MINUTE).await, ["update a/2@5"], "and nothing is lost");
        assert_eq!((world.apiserver.count(), world.source.apiserver_watches()), (1, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_short_outage_makes_no_request_and_the_next_one_counts_from_its_own_start() {
    let mut world = World::paced(true);
    world.read_for(MINUTE).await;
    world.kubefan.set(false);
    world.read_for(world.phase / 2).await;
    world.kubefan.set(true);
    world.put("a/1");
    assert_eq!(world.read_for(MINUTE).await, ["add a/1@2"]);
    world.kubefan.set(false);
    world.read_for(MINUTE + world.phase - Duration::from_secs(1)).await;
    assert_eq!(world.apiserver.count(), 0);
    world.read_for(Duration::from_secs(2)).await;
    assert_eq!(world.apiserver.count(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_asks_for_patience_ends_the_fallback_for_the_outage() {
    let soon = Some(Duration::from_secs(1));
    for error in [api_error(429, None), api_error(503, soon), api_error(403, None)] {
        let mut world = World::paced(true);
        world.read_for(MINUTE).await;
        world.kubefan.set(false);
        world.apiserver.errors.lock().unwrap().push(error);
        world.read_for(900 * MINUTE).await;
        assert_eq!(world.apiserver.count(), 1);
        // The next outage is a new one.
        world.kubefan.set(true);
        world.read_for(2 * MINUTE).await;
        world.kubefan.set(false);
        world.read_until_fallback().await;
        assert_eq!(world.apiserver.count(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn an_apiserver_that_fails_is_asked_again_at_the_next_moment_only() {
    let mut world = World::paced(true);
    world.read_for(MINUTE).await;
    world.kubefan.set(false);
    world.apiserver.errors.lock().unwrap().push(api_error(500, None));
    world.read_until_fallback().await;
    world.read_for(199 * MINUTE).await;
    assert_eq!(world.apiserver.count(), 1);
    world.put("a/1");
    assert_eq!(world.read_for(MINUTE).await, ["add a/1@2"]);
    assert_eq!(world.apiserver.count(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_expired_version_does_not_lead_to_a_list_of_the_apiserver() {
    for reconnects in [true, false] {
        let mut world = World::paced(reconnects);
        world.put("a/1");
        world.read_for(MINUTE).await;
        world.kubefan.set(false);
        world.apiserver.is_expired.store(true, Ordering::Relaxed);
        world.read_for(900 * MINUTE).await;
        let requests = world.apiserver.requests.lock().unwrap().clone();
        assert_eq!(requests.len(), 1);
        assert!(matches!(&requests[0].1, FakeRequest::Watch(options) if !options.send_initial_events));
        world.put("a/2");
        world.kubefan.set(true);
        assert_eq!(world.read_for(2 * MINUTE).await, ["add a/2@3"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_without_a_version_waits_for_kubefan() {
    for reconnects in [true, false] {
        let mut world = World::paced(reconnects);
        world.put("a/1");
        world.kubefan.set(false);
        assert_eq!(world.read_for(500 * MINUTE).await, [""; 0]);
        assert_eq!(world.apiserver.count(), 0);
        world.kubefan.set(true);
        assert_eq!(world.read_for(2 * MINUTE).await, ["state a/1@2"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_kubefan_that_answers_with_its_own_error_is_not_gone() {
    let mut world = World::paced(false);
    world.read_for(MINUTE).await;
    let not_synced = api_error(503, Some(Duration::from_secs(1)));
    for _ in 0..1_000 {
        world.apiserver.objects.fail_next_watch(not_synced.clone());
    }
    world.apiserver.objects.fail_watches(not_synced);
    world.read_for(200 * MINUTE).await;
    assert_eq!(world.apiserver.count(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_version_that_expired_at_kubefan_meanwhile_leads_to_a_list_of_kubefan() {
    let mut world = World::paced(false);
    world.put("a/1");
    world.read_for(MINUTE).await;
    world.kubefan.set(false);
    world.read_for(MINUTE).await;
    world.apiserver.objects.delete_unseen("a/1");
    world.put("a/2");
    world.kubefan.set(true);
    assert_eq!(world.read_for(2 * MINUTE).await, ["state a/2@4"]);
    assert_eq!(world.apiserver.count(), 0);
}
