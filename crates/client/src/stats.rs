//! Figures of an informer's work so far.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use futures::{FutureExt, StreamExt, future::BoxFuture};
use tokio::time::Instant;

use crate::{
    error::ClientError,
    lister_watcher::{ListOptions, ListPage, ListerWatcher, WatchEvent, WatchEventKind, WatchEvents},
    reflector::ReflectorError,
};

/// The numbers of one informer. Counts start at zero with the informer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct InformerStats {
    /// Lists that were started. The pages of one list count once.
    pub lists: u64,
    /// Watches that were started, with those that start with the state.
    pub watches: u64,
    /// Complete states that arrived in a watch.
    pub snapshots: u64,
    /// Events that arrived in watches. The objects of snapshots count as added.
    pub events: EventCounts,
    /// Errors that were reported.
    pub errors: ErrorCounts,
    /// The version up to which the store is complete. Empty before the first list.
    pub resource_version: String,
    /// The objects in the store.
    pub objects: usize,
    /// The calls that wait for handlers, of the handler with the most.
    pub longest_backlog: usize,
    /// The time since the last event or bookmark of a watch. `None` before the first one. On a
    /// quiet resource it reaches the bookmark interval, about a minute. More means a watch that is
    /// stuck, or broken.
    pub since_last_event: Option<Duration>,
}

/// Events of watches, by type.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EventCounts {
    /// Objects that are new.
    pub added: u64,
    /// Objects that changed.
    pub modified: u64,
    /// Objects that were deleted.
    pub deleted: u64,
    /// Events that only moved the version.
    pub bookmarks: u64,
}

/// Reported errors, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ErrorCounts {
    /// Failed lists and watches, and broken connections, but not expired versions.
    pub requests: u64,
    /// Versions that the server no longer had.
    pub expired: u64,
    /// Objects that could not be decoded, or that a transform refused.
    pub undecodable: u64,
    /// Events without readable metadata.
    pub unreadable: u64,
    /// Handlers that panicked, or fell behind their limit.
    pub handlers: u64,
}

/// Counters of an informer, which the source, the observer and the readers share.
#[derive(Debug)]
pub(crate) struct Counters {
    created: Instant,
    lists: AtomicU64,
    watches: AtomicU64,
    snapshots: AtomicU64,
    added: AtomicU64,
    modified: AtomicU64,
    deleted: AtomicU64,
    bookmarks: AtomicU64,
    requests: AtomicU64,
    expired: AtomicU64,
    undecodable: AtomicU64,
    unreadable: AtomicU64,
    handlers: AtomicU64,
    /// Milliseconds from `created`, plus one. 0: none yet.
    last_event: AtomicU64,
}

impl Counters {
    pub(crate) fn new() -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            created: Instant::now(),
            lists: zero(),
            watches: zero(),
            snapshots: zero(),
            added: zero(),
            modified: zero(),
            deleted: zero(),
            bookmarks: zero(),
            requests: zero(),
            expired: zero(),
            undecodable: zero(),
            unreadable: zero(),
            handlers: zero(),
            last_event: zero(),
        }
    }

    /// Returns the counts. Those that only the store and the handlers know are left empty.
    pub(crate) fn stats(&self) -> InformerStats {
        let get = |count: &AtomicU64| count.load(Relaxed);
        let last_event = get(&self.last_event).checked_sub(1).map(|at| self.created + Duration::from_millis(at));
        InformerStats {
            lists: get(&self.lists),
            watches: get(&self.watches),
            snapshots: get(&self.snapshots),
            events: EventCounts {
                added: get(&self.added),
                modified: get(&self.modified),
                deleted: get(&self.deleted),
                bookmarks: get(&self.bookmarks),
            },
            errors: ErrorCounts {
                requests: get(&self.requests),
                expired: get(&self.expired),
                undecodable: get(&self.undecodable),
                unreadable: get(&self.unreadable),
                handlers: get(&self.handlers),
            },
            since_last_event: last_event.map(|at| Instant::now().saturating_duration_since(at)),
            ..InformerStats::default()
        }
    }

    fn note_event(&self, event: &WatchEvent) {
        let count = match &event.kind {
            WatchEventKind::Added(_) => &self.added,
            WatchEventKind::Modified(_) => &self.modified,
            WatchEventKind::Deleted(_) | WatchEventKind::DeletedFinalStateUnknown(_) => &self.deleted,
            WatchEventKind::Bookmark => &self.bookmarks,
            WatchEventKind::SnapshotEnd => &self.snapshots,
            // A broken connection is not a sign of life.
            WatchEventKind::Disconnected(_) => return,
            _ => return self.note_time(),
        };
        count.fetch_add(1, Relaxed);
        self.note_time();
    }

    fn note_time(&self) {
        let millis = Instant::now().saturating_duration_since(self.created).as_millis();
        self.last_event.store(u64::try_from(millis).unwrap_or(u64::MAX).saturating_add(1), Relaxed);
    }

    pub(crate) fn note_error(&self, error: &ReflectorError) {
        let count = match error {
            ReflectorError::Client(error) if error.is_expired() => &self.expired,
            ReflectorError::Client(_) => &self.requests,
            ReflectorError::Undecodable { .. } => &self.undecodable,
            ReflectorError::Unreadable(_) => &self.unreadable,
            ReflectorError::HandlerPanicked(_) | ReflectorError::HandlerOverflowed(_) => &self.handlers,
        };
        count.fetch_add(1, Relaxed);
    }
}

/// A source that counts.
pub(crate) struct Counted<S> {
    pub(crate) source: S,
    pub(crate) counters: Arc<Counters>,
}

impl<S: ListerWatcher> ListerWatcher for Counted<S> {
    fn list(&self, options: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>> {
        if options.continue_token.is_empty() {
            self.counters.lists.fetch_add(1, Relaxed);
        }
        self.source.list(options)
    }

    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>> {
        self.counters.watches.fetch_add(1, Relaxed);
        let counters = self.counters.clone();
        let count = |events: WatchEvents| {
            let note = move |event: &Result<WatchEvent, ClientError>| {
                if let Ok(event) = event {
                    counters.note_event(event);
                }
            };
            events.inspect(note).boxed()
        };
        self.source.watch(options).map(|watch| watch.map(count)).boxed()
    }

    fn supports_watch_list(&self) -> bool {
        self.source.supports_watch_list()
    }

    fn watch_reconnects(&self) -> bool {
        self.source.watch_reconnects()
    }

    fn describe(&self) -> String {
        self.source.describe()
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;
    use crate::{ApiStatus, FakeListWatch, HandlerFuncs, SharedInformer};

    #[tokio::test(start_paused = true)]
    async fn an_informer_counts_its_requests_events_and_errors() {
        let fake = FakeListWatch::new();
        fake.put("a/1", "1");
        let informer = SharedInformer::<u64>::new(fake.clone());
        informer.add_event_handler(HandlerFuncs::new().on_update(|_, _| panic!("boom"))).unwrap();
        assert_eq!(informer.stats(), InformerStats::default());
        let running = informer.clone();
        tokio::spawn(async move { running.run(pending::<()>()).await });
        informer.synced().await.unwrap();
        fake.put("a/2", "\"text\"");
        fake.put("a/1", "2");
        fake.bookmark();
        informer.wait_until("4", Duration::from_secs(1)).await.unwrap();
        tokio::time::sleep(Duration::from_secs(7)).await;
        let stats = informer.stats();
        assert_eq!((stats.lists, stats.watches, stats.snapshots, stats.objects), (0, 1, 1, 1));
        assert_eq!(stats.events, EventCounts { added: 2, modified: 1, deleted: 0, bookmarks: 1 });
        assert_eq!(stats.errors, ErrorCounts { undecodable: 1, handlers: 1, ..ErrorCounts::default() });
        assert_eq!(stats.resource_version, "4");
        assert_eq!(stats.since_last_event, Some(Duration::from_secs(7)));

        fake.compact();
        fake.set_watch_list(false);
        fake.fail_watches(ApiStatus::new(410, "Expired", "too old").into());
        fake.wait_for_requests(4).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let stats = informer.stats();
        assert_eq!((stats.lists, stats.watches, stats.errors.expired), (1, 3, 1));
    }
}
