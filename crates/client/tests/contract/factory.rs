//! A factory of informers as the piece of scripts.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{
    FutureExt, StreamExt,
    future::{BoxFuture, LocalBoxFuture},
    stream,
};
use kubefan_client::{
    ClientError, Connection, ListOptions, ListPage, ListerWatcher, SharedInformer, SharedInformerFactory, Target,
    WatchEventKind, WatchEvents,
};
use serde_json::Value;
use tokio::{sync::watch, time::timeout};

use crate::{
    handler::Recorder,
    object::{outcome, raw},
    script::{Log, Piece, option, parse_duration},
};

/// Time that scripts wait for the informers of a factory.
const WAIT: Duration = Duration::from_secs(10);

pub(crate) struct Factories {
    log: Log,
    factory: Option<SharedInformerFactory>,
    /// Resources whose watches send nothing.
    mute: Arc<Mutex<Vec<String>>>,
    informers: BTreeMap<String, SharedInformer<Value>>,
    started: Vec<String>,
    /// Keeps the handlers free.
    releases: HashMap<String, watch::Sender<bool>>,
}

/// One object in each resource.
struct Source {
    log: Log,
    target: Target,
    mute: bool,
}

impl ListerWatcher for Source {
    fn list(&self, _: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>> {
        panic!("the informers use watch-lists");
    }

    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>> {
        let Target { resource, namespace, label_selector, .. } = &self.target;
        let mut line = if options.send_initial_events { "watch-list" } else { "watch" }.to_owned();
        if !namespace.is_empty() {
            line += &format!(" namespace={namespace}");
        }
        if !label_selector.is_empty() {
            line += &format!(" labels={label_selector}");
        }
        self.log.add(&format!("server of {resource}"), line);
        let state = [
            WatchEventKind::SnapshotBegin.into(),
            WatchEventKind::Added(raw("ns/a@5")).into(),
            WatchEventKind::SnapshotEnd.at("10"),
        ];
        let sent = if self.mute { 0 } else { state.len() };
        let events = stream::iter(state.into_iter().take(sent).map(Ok)).chain(stream::pending()).boxed();
        async { Ok(events) }.boxed()
    }

    fn describe(&self) -> String {
        self.target.resource.clone()
    }
}

impl Factories {
    pub(crate) fn new(log: &Log) -> Self {
        Self {
            log: log.clone(),
            factory: None,
            mute: Arc::default(),
            informers: BTreeMap::new(),
            started: Vec::new(),
            releases: HashMap::new(),
        }
    }

    fn create(&self, arguments: &[&str]) -> SharedInformerFactory {
        let log = self.log.clone();
        let mute = self.mute.clone();
        let connection = Connection::custom(move |target| {
            let mute = mute.lock().unwrap().contains(&target.resource);
            Arc::new(Source { log: log.clone(), target: target.clone(), mute })
        });
        let mut factory = SharedInformerFactory::new(connection);
        if let Some(namespace) = option(arguments, "namespace") {
            factory = factory.namespace(namespace);
        }
        if option(arguments, "tweak").is_some() {
            factory = factory.tweak_list_options(|source| source.label_selector("app"));
        }
        if let Some(period) = option(arguments, "resync") {
            factory = factory.resync_period(parse_duration(period));
        }
        factory
    }

    fn factory(&self) -> &SharedInformerFactory {
        self.factory.as_ref().unwrap()
    }

    fn informer(&mut self, resource: &str) -> Vec<String> {
        let informer = self.factory().informer::<Value>(resource);
        let seen = self.informers.insert(resource.to_owned(), informer.clone()).is_some();
        // The name of an index is taken if it is the same informer.
        let same = informer.indexer().add_index("seen", |_| None).is_err();
        if seen { vec![format!("same as before: {same}")] } else { Vec::new() }
    }

    async fn wait(&self) -> Vec<String> {
        let waited = timeout(WAIT, self.factory().wait_for_cache_sync()).await;
        let synced = |resource: &String| self.informers[resource].has_synced();
        assert_eq!(matches!(waited, Ok(Ok(()))), self.started.iter().all(synced));
        self.started.iter().map(|resource| format!("{resource}: {}", synced(resource))).collect()
    }
}

impl Piece for Factories {
    fn step<'a>(&'a mut self, command: &'a str, arguments: &'a [&'a str]) -> LocalBoxFuture<'a, Vec<String>> {
        async move {
            match (command, arguments) {
                ("new", _) => self.factory = Some(self.create(arguments)),
                ("mute", _) => {
                    self.mute.lock().unwrap().extend(arguments.iter().map(|resource| (*resource).to_owned()));
                }
                ("informer", [resource]) => return self.informer(resource),
                ("handler", [resource]) => {
                    let informer = self.factory().informer::<Value>(resource);
                    let (recorder, release) = Recorder::new(resource, &self.log, informer.indexer(), &[]);
                    self.releases.insert((*resource).to_owned(), release);
                    return outcome(informer.add_event_handler(recorder).is_ok());
                }
                ("start", []) => {
                    self.started = self.informers.keys().cloned().collect();
                    // After a shutdown it is refused. client-go's does nothing.
                    let _ = self.factory().start();
                }
                ("wait-for-cache-sync", []) => return self.wait().await,
                // client-go stops by the channel that it was started with, and the shutdown waits.
                ("stop", []) => {}
                ("shutdown", []) => {
                    self.factory().shutdown().await;
                    self.log.add("factory", "shut down");
                }
                _ => panic!("unknown step {command}"),
            }
            Vec::new()
        }
        .boxed_local()
    }
}
