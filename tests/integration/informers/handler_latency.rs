//! One of ten handlers never returns. The other nine must get every call, as soon as without it,
//! and the calls that wait for it must stay below a limit.
//!
//! Two informers of the same objects run side by side, one of them with the stuck handler, so that
//! both get each change at the same time. `-- --nocapture` shows the latencies from a change to the
//! call, and the ratio of the two informers. No test asserts them: they depend on the machine.

use std::{
    collections::HashMap,
    future::{Future, pending, ready},
    sync::{Arc, Mutex},
    time::Duration,
};

use kubefan_client::{
    Backlog, Client, ClientOptions, EventHandler, FakeListWatch, HandlerOptions, ListWatch, ListerWatcher, Object,
    SharedInformer,
};
use serde_json::{Value, json};
use tokio::{sync::watch, time::Instant};

use crate::harness::{
    apiserver::{ApiServer, Options},
    kubefan::Kubefan,
    objects::{pod, version_of},
    tests, wait,
};

tests! {
    apiserver full: a_stuck_handler_delays_no_other_handler_of_real_pods;
    local: a_stuck_handler_delays_no_other_handler_of_many_changes;
}

const HANDLERS: usize = 10;
const PODS: usize = 50;
/// Calls that may wait for a handler before they are merged.
const WAITING_MAX: usize = 100;

async fn a_stuck_handler_delays_no_other_handler_of_real_pods() {
    let api = ApiServer::start(Options::default()).await;
    let kubefan = Kubefan::start(&api, &["--resource", "pods"]).await;
    for number in 0..PODS {
        api.create("/api/v1/namespaces/default/pods", &pod(&format!("p{number}"))).await;
    }
    let mut sides = Vec::new();
    for has_stuck in [false, true] {
        let client = Client::connect(&kubefan.grpc_addr.to_string(), &ClientOptions::default()).await.unwrap();
        sides.push(Side::start(ListWatch::new(client, "pods", "", ""), has_stuck).await);
    }
    let mut changes = Changes::default();
    for change in 0..600 {
        let path = format!("/api/v1/namespaces/default/pods/p{}", change % PODS);
        let patch = json!({ "metadata": { "labels": { "change": change.to_string() } } });
        let start = Instant::now();
        let version = version_of(&api.patch(&path, &patch).await);
        changes.insert(version.to_string(), start);
    }
    compare("pods over gRPC, with the request to the apiserver", &sides, &changes).await;
}

async fn a_stuck_handler_delays_no_other_handler_of_many_changes() {
    let fake = FakeListWatch::new();
    for number in 0..PODS {
        fake.put(&format!("default/p{number}"), "{}");
    }
    let sides = [Side::start(fake.clone(), false).await, Side::start(fake.clone(), true).await];
    let mut changes = Changes::default();
    for change in 0..5_000 {
        let start = Instant::now();
        let version = fake.put(&format!("default/p{}", change % PODS), format!("{{\"change\":{change}}}"));
        changes.insert(version.to_string(), start);
        // The next change follows when both informers have this one, so that latencies are not
        // those of a queue of changes.
        for side in &sides {
            side.informer.wait_until(&version.to_string(), wait::SOON).await.unwrap();
        }
    }
    compare("a source in this process", &sides, &changes).await;
}

/// When each version was written.
type Changes = HashMap<String, Instant>;

/// The versions that a handler got, and when.
type Log = Vec<(String, Instant)>;

/// An informer and its handlers that return.
struct Side {
    informer: SharedInformer<Value>,
    handlers: Vec<Arc<Mutex<Log>>>,
    calls: watch::Receiver<usize>,
}

impl Side {
    async fn start(source: impl ListerWatcher, has_stuck: bool) -> Side {
        let informer = SharedInformer::<Value>::new(source);
        let (sender, calls) = watch::channel(0);
        let options = HandlerOptions { backlog: Backlog::Conflate(WAITING_MAX), ..HandlerOptions::default() };
        if has_stuck {
            informer.add_event_handler_with_options(Stuck, options.clone()).unwrap();
        }
        let (mut handlers, mut registrations) = (Vec::new(), Vec::new());
        for _ in usize::from(has_stuck)..HANDLERS {
            let log = Arc::new(Mutex::new(Vec::new()));
            let timed = Timed { log: log.clone(), calls: sender.clone() };
            let options = HandlerOptions { backlog: Backlog::Unbounded, ..HandlerOptions::default() };
            registrations.push(informer.add_event_handler_with_options(timed, options).unwrap());
            handlers.push(log);
        }
        tokio::spawn({
            let informer = informer.clone();
            async move { informer.run(pending::<()>()).await }
        });
        for registration in registrations {
            registration.synced().await.unwrap();
        }
        Side { informer, handlers, calls }
    }

    /// The latencies of all handlers that return, sorted. Waits until each has every change.
    async fn latencies(&self, changes: &Changes) -> Vec<Duration> {
        let all = changes.len() * self.handlers.len();
        let mut calls = self.calls.clone();
        let arrived = tokio::time::timeout(wait::SOON, calls.wait_for(|calls| *calls >= all)).await;
        assert!(arrived.is_ok(), "{} calls instead of {all}", *self.calls.borrow());
        let mut latencies = Vec::with_capacity(all);
        for handler in &self.handlers {
            let handler = handler.lock().unwrap();
            assert_eq!(handler.len(), changes.len(), "each change is one call");
            latencies.extend(handler.iter().map(|(version, at)| at.duration_since(changes[version])));
        }
        latencies.sort();
        latencies
    }
}

async fn compare(what: &str, sides: &[Side], changes: &Changes) {
    let [without, with] = sides else { panic!("two sides") };
    let (without_stuck, with_stuck) = (without.latencies(changes).await, with.latencies(changes).await);
    for (name, percent) in [("p50", 50), ("p99", 99)] {
        let of = |latencies: &[Duration]| latencies[latencies.len() * percent / 100].as_secs_f64() * 1e6;
        let (without, with) = (of(&without_stuck), of(&with_stuck));
        println!("{what}: {name} {without:.0} µs without, {with:.0} µs with a stuck handler: {:.2}", with / without);
    }
    wait::until("an empty backlog after the last call", wait::SOON, || async {
        (without.informer.longest_backlog() == 0).then_some(())
    })
    .await;
    // Above the limit, at most two calls wait for each object.
    let waiting = with.informer.longest_backlog();
    println!("{what}: {waiting} of {} calls wait for the stuck handler", changes.len() + PODS);
    assert!((WAITING_MAX / 2..=WAITING_MAX + 2 * PODS).contains(&waiting), "{waiting}");
}

/// A handler that never returns.
struct Stuck;

impl EventHandler<Value> for Stuck {
    fn on_add(&mut self, _: Arc<Object<Value>>, _: bool) -> impl Future<Output = ()> + Send {
        pending()
    }
}

/// A handler that writes down when it got each update.
struct Timed {
    log: Arc<Mutex<Log>>,
    calls: watch::Sender<usize>,
}

impl EventHandler<Value> for Timed {
    fn on_update(&mut self, _: Arc<Object<Value>>, new: Arc<Object<Value>>) -> impl Future<Output = ()> + Send {
        self.log.lock().unwrap().push((new.resource_version().to_owned(), Instant::now()));
        self.calls.send_modify(|calls| *calls += 1);
        ready(())
    }
}
