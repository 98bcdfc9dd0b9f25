//! One round of list and watch.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError},
    time::Duration,
};

use futures::StreamExt;
use tokio::{task::coop::consume_budget, time::Instant};
use tonic::Code;

use super::{Reflector, ReflectorError, Resync, session::Session};
use crate::{
    error::ClientError,
    lister_watcher::{ListOptions, WatchEvent, WatchEventKind, WatchEvents},
    object::{Decode, Object, ObjectKey, RawObject},
    store::{Change, Deleted, Replacement},
};

/// A watch that ends sooner, without an event, counts as failed. Otherwise a server that ends every
/// watch at once would be asked in a tight loop.
const SHORT_WATCH: Duration = Duration::from_secs(1);

/// Events that take effect at their end mark.
enum Unit<K> {
    Snapshot {
        replacement: Replacement<K>,
        /// Changes inside the snapshot: a server whose end mark comes late sends them before it.
        /// `None` for a deleted object.
        changed: BTreeMap<ObjectKey, Option<Arc<Object<K>>>>,
    },
    Batch(Vec<Change<K>>),
}

impl<K: Decode> Reflector<K> {
    pub(super) async fn round(&self, resync: &mut Resync) -> Result<(), ClientError> {
        let result = self.list_then_watch(resync).await;
        let Err(error) = &result else { return result };
        // A source that falls back may ask another server later, which refuses in the stream.
        if error.is_watch_list_unsupported() && !self.session(|session| session.is_known()) {
            self.session(|session| session.lists = true);
            return result;
        }
        let is_version_refused = error.is_expired() || error.is_resource_version_too_large();
        // A refused token is fixed by another token, and says nothing about the version.
        let is_final = !error.is_retryable() && error.code() != Code::Unauthenticated;
        if !is_version_refused && !is_final {
            return result;
        }
        // A server may refuse a version in the stream of a watch, too. As in client-go, an answer
        // that a retry cannot change leads to a new state.
        if self.session(|session| session.is_known()) {
            self.session(|session| session.expired = true);
        } else if is_version_refused {
            self.session(|session| session.unavailable = true);
        }
        result
    }

    fn session<R>(&self, access: impl FnOnce(&mut Session) -> R) -> R {
        access(&mut self.session.lock().unwrap_or_else(PoisonError::into_inner))
    }

    async fn list_then_watch(&self, resync: &mut Resync) -> Result<(), ClientError> {
        if !self.session(|session| session.is_known()) {
            // The server that answers may not have the last version: it is too old, or ahead of a
            // cluster that was restored from a backup. Then any consistent state is the newest.
            let watch = match self.first_state().await {
                Err(error) if error.is_expired() || error.is_resource_version_too_large() => {
                    self.session(|session| session.unavailable = true);
                    self.first_state().await?
                }
                watch => watch?,
            };
            if let Some(events) = watch {
                return self.follow(events, resync).await;
            }
        }
        let resource_version = self.session(|session| session.version.clone());
        let events = self.source.watch(ListOptions { resource_version, ..ListOptions::default() }).await?;
        self.follow(events, resync).await
    }

    /// Starts a watch-list, or lists if the server has no watch-lists.
    async fn first_state(&self) -> Result<Option<WatchEvents>, ClientError> {
        if self.source.supports_watch_list() && !self.session(|session| session.lists) {
            let resource_version = self.session(|session| session.minimum("")).to_owned();
            let options = ListOptions { resource_version, send_initial_events: true, ..ListOptions::default() };
            match self.source.watch(options).await {
                Err(error) if error.is_watch_list_unsupported() => self.session(|session| session.lists = true),
                events => return events.map(Some),
            }
        }
        self.list().await?;
        Ok(None)
    }

    /// Lists everything, and replaces the store's state.
    async fn list(&self) -> Result<(), ClientError> {
        let resource_version = self.session(|session| session.minimum("0"));
        // A page with a version is read from etcd, a whole list from the apiserver's watch cache:
        // see client-go's `Reflector.list`.
        let is_paged = matches!(resource_version.as_str(), "" | "0") || self.session(|session| session.pages);
        let limit = if is_paged { self.page_size } else { 0 };
        let mut options = ListOptions { resource_version, limit, ..ListOptions::default() };
        let mut replacement = self.empty();
        loop {
            let page = match self.source.list(options.clone()).await {
                // As client-go's pager: a token that expired between two pages leads to one list
                // without pages.
                Err(error) if error.is_expired() && !options.continue_token.is_empty() => {
                    options = ListOptions::default();
                    replacement = self.empty();
                    continue;
                }
                page => page?,
            };
            for raw in page.objects {
                self.collect(&raw, &mut replacement);
                consume_budget().await;
            }
            replacement.resource_version = page.resource_version;
            if page.continue_token.is_empty() {
                break;
            }
            self.session(|session| session.pages |= options.resource_version == "0");
            options.continue_token = page.continue_token;
            options.resource_version.clear();
        }
        self.replace(replacement);
        Ok(())
    }

    /// Applies the events of a watch until it ends.
    async fn follow(&self, mut events: WatchEvents, resync: &mut Resync) -> Result<(), ClientError> {
        let started = Instant::now();
        let mut unit = None;
        let mut received = false;
        // A source may say by itself that a snapshot begins, before the server has sent anything.
        let is_begin = |event: &WatchEvent| event.kind == WatchEventKind::SnapshotBegin;
        loop {
            let event = tokio::select! {
                // The resync first: events that are always ready must not keep it away.
                biased;
                () = resync.tick() => {
                    self.store.resync();
                    resync.restart();
                    continue;
                }
                event = events.next() => event,
            };
            match event {
                Some(event) => {
                    let event = event?;
                    received |= !is_begin(&event);
                    self.accept(event, &mut unit);
                }
                // The next round asks for everything again: once immediately, as client-go, then
                // after the backoff.
                None if matches!(unit, Some(Unit::Snapshot { .. })) => {
                    let first = self.session(|session| !std::mem::replace(&mut session.broke_off, true));
                    return if first && received {
                        Ok(())
                    } else {
                        Err(self.broken("the watch ended before its first state was complete"))
                    };
                }
                None if !received && started.elapsed() < SHORT_WATCH => {
                    return Err(self.broken("the watch ended at once, without an event"));
                }
                None => return Ok(()),
            }
            // Events may be ready for a long time. Other tasks of this thread get their turn.
            consume_budget().await;
        }
    }

    fn broken(&self, message: &str) -> ClientError {
        ClientError::Unreachable { address: self.source.describe(), message: message.to_owned() }
    }

    fn accept(&self, event: WatchEvent, unit: &mut Option<Unit<K>>) {
        match event.kind {
            WatchEventKind::SnapshotBegin => {
                *unit = Some(Unit::Snapshot { replacement: self.empty(), changed: BTreeMap::new() });
            }
            WatchEventKind::BatchBegin => *unit = Some(Unit::Batch(Vec::new())),
            WatchEventKind::SnapshotEnd | WatchEventKind::BatchEnd => match unit.take() {
                Some(Unit::Snapshot { mut replacement, changed }) => {
                    if !changed.is_empty() {
                        replacement.objects.retain(|object| !changed.contains_key(object.key()));
                        replacement.undecodable.retain(|key| !changed.contains_key(key));
                        replacement.objects.extend(changed.into_values().flatten());
                    }
                    replacement.resource_version = event.resume_version.unwrap_or_default();
                    return self.replace(replacement);
                }
                Some(Unit::Batch(changes)) => self.store.apply_batch(changes),
                // An end without a beginning says nothing.
                None => return,
            },
            WatchEventKind::Disconnected(error) => {
                *unit = None;
                self.observers.report(&ReflectorError::Client(error));
            }
            WatchEventKind::Unreadable(message) => self.observers.report(&ReflectorError::Unreadable(message)),
            WatchEventKind::Bookmark | WatchEventKind::Reconnected => {}
            WatchEventKind::Added(raw) => match unit {
                Some(Unit::Snapshot { replacement, changed }) if !changed.contains_key(&raw.key) => {
                    self.collect(&raw, replacement);
                }
                _ => self.change(self.decode(&raw).map(Change::Added), unit),
            },
            WatchEventKind::Modified(raw) => self.change(self.decode(&raw).map(Change::Updated), unit),
            WatchEventKind::Deleted(raw) => {
                let deleted = match self.decode(&raw) {
                    Some(object) => Deleted::Known(object),
                    None => Deleted::unknown(raw.key, None),
                };
                self.change(Some(Change::Deleted(deleted)), unit);
            }
            WatchEventKind::DeletedFinalStateUnknown(key) => {
                self.change(Some(Change::Deleted(Deleted::unknown(key, None))), unit);
            }
        }
        if let Some(version) = event.resume_version {
            self.advance(version);
        }
    }

    fn change(&self, change: Option<Change<K>>, unit: &mut Option<Unit<K>>) {
        match (change, unit) {
            (None, _) => {}
            (Some(change), Some(Unit::Batch(changes))) => {
                changes.push(change);
            }
            (Some(Change::Added(object) | Change::Updated(object)), Some(Unit::Snapshot { changed, .. })) => {
                changed.insert(object.key().clone(), Some(object));
            }
            (Some(Change::Deleted(deleted)), Some(Unit::Snapshot { changed, .. })) => {
                changed.insert(deleted.key().clone(), None);
            }
            (Some(change), _) => self.store.apply(change),
        }
    }

    /// The decoded object, or `None` after a report.
    fn decode(&self, raw: &RawObject) -> Option<Arc<Object<K>>> {
        let decoded = self.decoder.decode(raw);
        decoded
            .map_err(|message| {
                self.observers.report(&ReflectorError::Undecodable {
                    key: raw.key.clone(),
                    resource_version: raw.resource_version.to_string(),
                    message,
                });
            })
            .ok()
    }

    fn collect(&self, raw: &RawObject, replacement: &mut Replacement<K>) {
        match self.decode(raw) {
            Some(object) => replacement.objects.push(object),
            None => replacement.undecodable.push(raw.key.clone()),
        }
    }

    fn empty(&self) -> Replacement<K> {
        Replacement { objects: Vec::new(), undecodable: Vec::new(), resource_version: String::new() }
    }

    fn replace(&self, replacement: Replacement<K>) {
        let version = replacement.resource_version.clone();
        self.store.replace(replacement);
        self.session(Session::set_replaced);
        self.advance(version);
    }

    fn advance(&self, version: String) {
        self.store.advance(&version);
        self.session(|session| session.version = version);
    }
}
