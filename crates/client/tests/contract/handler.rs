//! A handler of an informer that logs its calls, and behaves as the script says.

use std::sync::Arc;

use kubefan_client::{Deleted, EventHandler, Indexer, ObjectKey};
use serde_json::Value;
use tokio::sync::watch;

use crate::{
    object::{Thing, format, format_deleted},
    script::{Log, option},
};

pub(crate) struct Recorder {
    name: String,
    log: Log,
    /// Set if each line shows the content of the store.
    store: Option<Indexer<Value>>,
    panics_at: String,
    /// Turns true when calls may continue.
    released: watch::Receiver<bool>,
}

impl Recorder {
    /// Returns the handler, and a sender that releases its calls.
    pub(crate) fn new(
        name: &str,
        log: &Log,
        store: &Indexer<Value>,
        arguments: &[&str],
    ) -> (Self, watch::Sender<bool>) {
        let (release, released) = watch::channel(option(arguments, "blocked").is_none());
        let recorder = Self {
            name: name.to_owned(),
            log: log.clone(),
            store: option(arguments, "reads-store").map(|_| store.clone()),
            panics_at: option(arguments, "panics-at").unwrap_or_default().to_owned(),
            released,
        };
        (recorder, release)
    }

    async fn called(&mut self, key: &ObjectKey, last_known: Option<&Arc<Thing>>, mut line: String) {
        if let Some(store) = &self.store {
            let stored = store.get(key.as_str()).map_or("nothing".to_owned(), |object| format(&object));
            line += &format!(", store has {stored}");
        }
        self.log.add(&self.name, line);
        // The sender is dropped at the end of the script.
        let _ = self.released.wait_for(|released| *released).await;
        let at = last_known.map(|object| format(object));
        assert!(at.is_none_or(|at| at != self.panics_at), "the script says so");
    }
}

impl EventHandler<Value> for Recorder {
    async fn on_add(&mut self, object: Arc<Thing>, is_in_initial_list: bool) {
        let initial = if is_in_initial_list { " initial" } else { "" };
        self.called(object.key(), Some(&object), format!("add {}{initial}", format(&object))).await;
    }

    async fn on_update(&mut self, old: Arc<Thing>, new: Arc<Thing>) {
        self.called(new.key(), Some(&new), format!("update {} -> {}", format(&old), format(&new))).await;
    }

    async fn on_delete(&mut self, deleted: Deleted<Value>) {
        let line = format!("delete {}", format_deleted(&deleted));
        self.called(deleted.key(), deleted.last_known(), line).await;
    }
}
