//! A server for tests of programs that use informers.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream};
use tokio::sync::{Notify, mpsc};

use crate::{
    error::{ApiStatus, ClientError},
    lister_watcher::{ListOptions, ListPage, ListerWatcher, WatchEvent, WatchEventKind, WatchEvents},
    object::{ObjectKey, RawObject},
};

/// The limit of events that a watch has not read yet. A watch that is further behind ends, as an
/// apiserver ends it.
const WATCH_EVENTS_MAX: usize = 10_000;

/// A list or a watch that a [`FakeListWatch`] was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FakeRequest {
    /// A list.
    List(ListOptions),
    /// A watch.
    Watch(ListOptions),
}

/// A [`ListerWatcher`] over objects in memory, for tests. Clones share the objects.
///
/// The fake behaves like an apiserver: each change has the next resource version and goes to every
/// open watch, a watch resumes from any version that [`Self::compact`] has not removed, and errors
/// can be ordered for the next requests.
///
/// ```
/// use kubefan_client::{FakeListWatch, ListerWatcher, ListOptions};
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let fake = FakeListWatch::new();
/// fake.put("default/web", r#"{"metadata":{"namespace":"default","name":"web"}}"#);
/// let page = fake.list(ListOptions::default()).await.unwrap();
/// assert_eq!((page.objects[0].key.name(), page.resource_version.as_str()), ("web", "2"));
/// # }
/// ```
#[derive(Clone, Default)]
pub struct FakeListWatch(Arc<Fake>);

#[derive(Default)]
struct Fake {
    state: Mutex<FakeState>,
    requested: Notify,
}

struct FakeState {
    version: u64,
    objects: BTreeMap<ObjectKey, RawObject>,
    history: Vec<(u64, WatchEventKind)>,
    /// History is complete after this version.
    compacted: u64,
    watches: Vec<mpsc::Sender<Result<WatchEvent, ClientError>>>,
    list_errors: VecDeque<ClientError>,
    watch_errors: VecDeque<ClientError>,
    requests: Vec<FakeRequest>,
    watch_list: bool,
    page_size: usize,
}

impl Default for FakeState {
    fn default() -> Self {
        Self {
            version: 1,
            objects: BTreeMap::new(),
            history: Vec::new(),
            compacted: 0,
            watches: Vec::new(),
            list_errors: VecDeque::new(),
            watch_errors: VecDeque::new(),
            requests: Vec::new(),
            watch_list: true,
            page_size: usize::MAX,
        }
    }
}

impl FakeState {
    fn send(&mut self, event: &WatchEvent) {
        self.watches.retain(|watch| watch.try_send(Ok(event.clone())).is_ok());
    }

    fn change(&mut self, kind: WatchEventKind) {
        self.history.push((self.version, kind.clone()));
        let event = kind.at(&self.version.to_string());
        self.send(&event);
    }
}

impl FakeListWatch {
    /// Returns a server without objects, at resource version 1.
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, FakeState> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates an object or changes it, and sends the event. Returns the new resource version. The
    /// uid stays the same until the object is deleted.
    pub fn put(&self, key: &str, json: impl Into<String>) -> u64 {
        let mut state = self.state();
        state.version += 1;
        let version = state.version;
        let key = ObjectKey::from(key);
        let before = state.objects.get(&key).map(|object| object.uid.clone());
        let object = RawObject {
            key: key.clone(),
            uid: before.clone().unwrap_or_else(|| format!("uid-{version}").into()),
            resource_version: version.to_string().into(),
            json: json.into().into(),
        };
        state.objects.insert(key, object.clone());
        state.change(match before {
            None => WatchEventKind::Added(object),
            Some(_) => WatchEventKind::Modified(object),
        });
        version
    }

    /// Deletes an object, and sends the event. Returns the new resource version, or `None` if there
    /// is no such object.
    pub fn delete(&self, key: &str) -> Option<u64> {
        let mut state = self.state();
        let mut object = state.objects.remove(key)?;
        state.version += 1;
        object.resource_version = state.version.to_string().into();
        state.change(WatchEventKind::Deleted(object));
        Some(state.version)
    }

    /// Sends an event to every open watch that is not part of the history, such as a bookmark or a
    /// batch.
    pub fn send(&self, event: impl Into<WatchEvent>) {
        self.state().send(&event.into());
    }

    /// Sends a bookmark at the current version.
    pub fn bookmark(&self) {
        let version = self.resource_version();
        self.send(WatchEventKind::Bookmark.at(&version.to_string()));
    }

    /// Ends every open watch, as after the server's timeout.
    pub fn end_watches(&self) {
        self.state().watches.clear();
    }

    /// Ends every open watch with an error.
    pub fn fail_watches(&self, error: ClientError) {
        for watch in std::mem::take(&mut self.state().watches) {
            // A watch whose queue is full ends anyway.
            let _ = watch.try_send(Err(error.clone()));
        }
    }

    /// The next list fails with this error. Several calls count one after the other.
    pub fn fail_next_list(&self, error: ClientError) {
        self.state().list_errors.push_back(error);
    }

    /// The next watch fails with this error. Several calls count one after the other.
    pub fn fail_next_watch(&self, error: ClientError) {
        self.state().watch_errors.push_back(error);
    }

    /// Forgets all history: a watch from an older version than the current one is expired.
    pub fn compact(&self) {
        let mut state = self.state();
        state.compacted = state.version;
        state.history.clear();
    }

    /// Deletes an object without an event, and forgets all history, so that only a new list shows
    /// it. A watcher that was away for too long sees the same.
    pub fn delete_unseen(&self, key: &str) {
        let mut state = self.state();
        state.objects.remove(key);
        state.version += 1;
        drop(state);
        self.compact();
    }

    /// Whether the server knows `sendInitialEvents`. True at first.
    pub fn set_watch_list(&self, supported: bool) {
        self.state().watch_list = supported;
    }

    /// The most objects in a page of a list. Unlimited at first.
    pub fn set_page_size(&self, objects: usize) {
        self.state().page_size = objects.max(1);
    }

    /// The current resource version.
    pub fn resource_version(&self) -> u64 {
        self.state().version
    }

    /// All requests so far.
    pub fn requests(&self) -> Vec<FakeRequest> {
        self.state().requests.clone()
    }

    /// The number of open watches.
    pub fn open_watches(&self) -> usize {
        let mut state = self.state();
        state.watches.retain(|watch| !watch.is_closed());
        state.watches.len()
    }

    /// Waits until there were this many requests.
    pub async fn wait_for_requests(&self, count: usize) {
        loop {
            let requested = self.0.requested.notified();
            if self.state().requests.len() >= count {
                return;
            }
            requested.await;
        }
    }

    fn note(&self, state: &mut FakeState, request: FakeRequest) {
        state.requests.push(request);
        self.0.requested.notify_waiters();
    }

    fn start_list(&self, options: ListOptions) -> Result<ListPage, ClientError> {
        let mut state = self.state();
        self.note(&mut state, FakeRequest::List(options.clone()));
        if let Some(error) = state.list_errors.pop_front() {
            return Err(error);
        }
        let limit = if options.limit == 0 { usize::MAX } else { options.limit as usize }.min(state.page_size);
        let rest: Vec<_> =
            state.objects.values().filter(|object| object.key.as_str() > options.continue_token.as_str()).collect();
        let more = rest.len() > limit;
        let objects: Vec<_> = rest.into_iter().take(limit).cloned().collect();
        let continue_token =
            objects.last().filter(|_| more).map_or_else(String::new, |object| object.key.as_str().to_owned());
        Ok(ListPage { resource_version: state.version.to_string(), objects, continue_token })
    }

    fn start_watch(&self, options: ListOptions) -> Result<WatchEvents, ClientError> {
        let mut state = self.state();
        self.note(&mut state, FakeRequest::Watch(options.clone()));
        if let Some(error) = state.watch_errors.pop_front() {
            return Err(error);
        }
        let mut first: Vec<Result<WatchEvent, ClientError>> = Vec::new();
        if options.send_initial_events {
            if !state.watch_list {
                return Err(api_error(
                    422,
                    "Invalid",
                    "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch".to_owned(),
                ));
            }
            first.push(Ok(WatchEventKind::SnapshotBegin.into()));
            first.extend(state.objects.values().cloned().map(|object| Ok(WatchEventKind::Added(object).into())));
            first.push(Ok(WatchEventKind::SnapshotEnd.at(&state.version.to_string())));
        } else {
            let from: u64 = options.resource_version.parse().unwrap_or(state.version);
            if from < state.compacted {
                return Err(api_error(
                    410,
                    "Expired",
                    format!("too old resource version: {from} ({})", state.compacted),
                ));
            }
            let later = state.history.iter().filter(|(version, _)| *version > from);
            first.extend(later.map(|(version, kind)| Ok(kind.clone().at(&version.to_string()))));
        }
        let (sender, receiver) = mpsc::channel(WATCH_EVENTS_MAX);
        state.watches.push(sender);
        let later = stream::unfold(receiver, |mut events| async { Some((events.recv().await?, events)) });
        Ok(stream::iter(first).chain(later).boxed())
    }
}

fn api_error(code: u16, reason: &str, message: String) -> ClientError {
    ApiStatus::new(code, reason, &message).into()
}

impl ListerWatcher for FakeListWatch {
    fn list(&self, options: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>> {
        std::future::ready(self.start_list(options)).boxed()
    }

    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>> {
        std::future::ready(self.start_watch(options)).boxed()
    }

    fn describe(&self) -> String {
        "objects of the fake server".to_owned()
    }
}

impl std::fmt::Debug for FakeListWatch {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("FakeListWatch").field("version", &self.resource_version()).finish_non_exhaustive()
    }
}
