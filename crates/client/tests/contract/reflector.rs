//! A reflector as the piece of scripts.

use std::sync::Arc;

use futures::{FutureExt, future::LocalBoxFuture};
use kubefan_client::{Change, Indexer, Reflector, Replacement, Store};
use serde_json::Value;
use tokio::sync::watch;

use crate::{
    object::{format, format_all, format_deleted, read},
    script::{Log, Piece, option, parse_duration},
    server::{Server, shown},
    stores::undelta,
};

/// A reflector that writes to a store, which logs the calls.
pub(crate) struct Reflectors {
    log: Log,
    running: Option<Running>,
    stop: watch::Sender<bool>,
}

struct Running {
    server: Server,
    reader: Indexer<Value>,
    reflector: Arc<Reflector<Value>>,
}

struct LoggedStore {
    store: Arc<dyn Store<Value>>,
    log: Log,
}

impl Store<Value> for LoggedStore {
    fn apply(&self, change: Change<Value>) {
        let line = match &change {
            Change::Added(object) => format!("add {}", format(object)),
            Change::Updated(object) => format!("update {}", format(object)),
            Change::Deleted(deleted) => format!("delete {}", format_deleted(deleted)),
        };
        self.log.add("store", line);
        self.store.apply(change);
    }

    fn replace(&self, state: Replacement<Value>) {
        self.log.add("store", format!("replace rv={} {}", state.resource_version, format_all(&state.objects)));
        self.store.replace(state);
    }

    fn resync(&self) {
        self.log.add("store", "resync");
        self.store.resync();
    }
}

impl Reflectors {
    pub(crate) fn new(log: &Log) -> Self {
        Self { log: log.clone(), running: None, stop: watch::channel(false).0 }
    }

    fn create(&self, arguments: &[&str]) -> Running {
        let server = Server::new(&self.log, &[arguments, &["requests"]].concat());
        let (store, reader) = if option(arguments, "undelta").is_some() {
            undelta(&self.log)
        } else {
            let indexer = Indexer::new();
            (Arc::new(indexer.clone()) as Arc<dyn Store<Value>>, indexer)
        };
        let mut reflector = Reflector::new(server.clone(), LoggedStore { store, log: self.log.clone() });
        if let Some(period) = option(arguments, "resync") {
            reflector = reflector.resync_period(parse_duration(period));
        }
        Running { server, reader, reflector: Arc::new(reflector) }
    }
}

impl Piece for Reflectors {
    fn step<'a>(&'a mut self, command: &'a str, arguments: &'a [&'a str]) -> LocalBoxFuture<'a, Vec<String>> {
        async move {
            if command == "new" {
                self.running = Some(self.create(arguments));
                return Vec::new();
            }
            let Running { server, reader, reflector } = self.running.as_ref().unwrap();
            if server.step(command, arguments) {
                return Vec::new();
            }
            let reflector = reflector.clone();
            let mut stopped = self.stop.subscribe();
            let log = self.log.clone();
            match command {
                "start" => drop(tokio::spawn(async move {
                    reflector.run(async move { drop(stopped.wait_for(|stopped| *stopped).await) }).await;
                })),
                "list-and-watch" => drop(tokio::spawn(async move {
                    let ended = reflector.list_and_watch().await.is_ok();
                    log.add("returned", if ended { "ended" } else { "failed" });
                })),
                "stop" => drop(self.stop.send(true)),
                "version" => return vec![shown(&reflector.last_sync_resource_version()).to_owned()],
                _ => return read(reader, command, arguments),
            }
            Vec::new()
        }
        .boxed_local()
    }
}
