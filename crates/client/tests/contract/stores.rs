//! Keys and stores as pieces of scripts.

use std::sync::Arc;

use futures::{FutureExt, future::LocalBoxFuture};
use kubefan_client::{
    Change, Deleted, DeletedFinalStateUnknown, ExpirationCache, Indexer, ObjectKey, Replacement, Store, UndeltaStore,
};
use serde_json::Value;

use crate::{
    object::{Thing, format, format_all, raw, read, thing, things, words},
    script::{Log, Piece, option, parse_duration},
};

pub(crate) struct Keys;

impl Piece for Keys {
    fn step<'a>(&'a mut self, command: &'a str, arguments: &'a [&'a str]) -> LocalBoxFuture<'a, Vec<String>> {
        let line = match command {
            "key-of" => {
                let key = raw(arguments[0]).key;
                ObjectKey::new(key.namespace(), key.name()).to_string()
            }
            "split" => {
                let key = ObjectKey::from(arguments[0]);
                format!("namespace={} name={}", key.namespace(), key.name())
            }
            _ => panic!("unknown step {command}"),
        };
        async { vec![line] }.boxed_local()
    }
}

/// A store with the readers that scripts need.
pub(crate) struct Stores {
    store: Arc<dyn Store<Value>>,
    reader: Reader,
}

enum Reader {
    Indexer(Indexer<Value>),
    Expiration(Arc<ExpirationCache<Value>>),
}

impl Stores {
    pub(crate) fn indexer() -> Self {
        let indexer = Indexer::new();
        Self { store: Arc::new(indexer.clone()), reader: Reader::Indexer(indexer) }
    }

    pub(crate) fn undelta(log: &Log) -> Self {
        let (store, reader) = undelta(log);
        Self { store, reader: Reader::Indexer(reader) }
    }
}

/// A store that logs each complete state, and the objects for reading.
pub(crate) fn undelta(log: &Log) -> (Arc<dyn Store<Value>>, Indexer<Value>) {
    let log = log.clone();
    let push = move |objects: Vec<Arc<Thing>>| log.add("push", format_all(&objects));
    let store = UndeltaStore::new(push);
    let reader = store.indexer().clone();
    (Arc::new(store), reader)
}

/// The change that a step makes to a store or a queue.
pub(crate) fn change(command: &str, arguments: &[&str]) -> Option<Change<Value>> {
    Some(match command {
        "add" => Change::Added(thing(arguments[0])),
        "update" => Change::Updated(thing(arguments[0])),
        "delete" => Change::Deleted(Deleted::Known(thing(arguments[0]))),
        "delete-unknown" => {
            let last_known = arguments[0].contains('@').then(|| thing(arguments[0]));
            let key = last_known.as_ref().map_or_else(|| arguments[0].into(), |object| object.key().clone());
            Change::Deleted(Deleted::FinalStateUnknown(DeletedFinalStateUnknown { key, last_known }))
        }
        _ => return None,
    })
}

pub(crate) fn replacement(arguments: &[&str]) -> Replacement<Value> {
    let resource_version = arguments[0].to_owned();
    Replacement { objects: things(&arguments[1..]), undecodable: Vec::new(), resource_version }
}

impl Piece for Stores {
    fn step<'a>(&'a mut self, command: &'a str, arguments: &'a [&'a str]) -> LocalBoxFuture<'a, Vec<String>> {
        async move {
            if let Some(change) = change(command, arguments) {
                self.store.apply(change);
                return Vec::new();
            }
            match (command, &self.reader) {
                ("new", _) => {
                    let cache = Arc::new(ExpirationCache::with_ttl(parse_duration(option(arguments, "ttl").unwrap())));
                    *self = Self { store: cache.clone(), reader: Reader::Expiration(cache) };
                }
                ("replace", _) => self.store.replace(replacement(arguments)),
                ("resync", _) => self.store.resync(),
                (_, Reader::Indexer(indexer)) => return read(indexer, command, arguments),
                ("get", Reader::Expiration(cache)) => {
                    return vec![cache.get(arguments[0]).map_or("nothing".to_owned(), |object| format(&object))];
                }
                ("list", Reader::Expiration(cache)) => return vec![format_all(&cache.list())],
                ("keys", Reader::Expiration(cache)) => return vec![words(cache.keys())],
                _ => panic!("unknown step {command}"),
            }
            Vec::new()
        }
        .boxed_local()
    }
}
