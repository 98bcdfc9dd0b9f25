//! Streams of typed events, for programs that read changes in a loop instead of in handlers.
//!
//! The stream drives its reflector itself: nothing is listed or watched unless the stream is read.
//! So there is no task and no queue that could grow. While events wait to be read, the watch is not
//! read further, and the connection's flow control slows the server down.

mod changed;

use std::{
    collections::VecDeque,
    fmt,
    future::pending,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use futures::{FutureExt, Stream, StreamExt, future::BoxFuture, stream};

use crate::{
    error::ClientError,
    lister_watcher::{ListOptions, ListPage, ListerWatcher, WatchEvents},
    object::{Decode, Object, ObjectKey},
    reflector::{Reflector, ReflectorError},
    store::{Change, Indexer, Replacement, Store},
};

pub use changed::changed_only;

/// A change of the objects of a resource. kube-rs' `watcher::Event` has the same shape; the
/// variants here also carry versions, and keep together changes that are only true together.
#[derive(Debug)]
pub enum InformerEvent<K> {
    /// A complete state starts. Each of its objects follows as [`Self::Replaced`].
    ReplaceBegin,
    /// An object of the complete state.
    Replaced(Arc<Object<K>>),
    /// The state is complete. Objects that it does not have are gone, except the undecodable ones.
    ReplaceEnd {
        /// Objects of the state that could not be decoded. Keep their last known state.
        undecodable: Vec<ObjectKey>,
        /// The version of the state.
        resource_version: String,
    },
    /// One object changed.
    Changed(Change<K>),
    /// Several changes that are only true together: an interrupted watch has caught up.
    Batch(Vec<Change<K>>),
    /// Everything at or below this version has been returned.
    Advanced {
        /// The version.
        resource_version: String,
    },
}

impl<K> InformerEvent<K> {
    /// The objects that the event brings in a new state.
    pub fn objects(self) -> Vec<Arc<Object<K>>> {
        match self {
            Self::Replaced(object) => vec![object],
            Self::Changed(change) => current(change).into_iter().collect(),
            Self::Batch(changes) => changes.into_iter().filter_map(current).collect(),
            Self::ReplaceBegin | Self::ReplaceEnd { .. } | Self::Advanced { .. } => Vec::new(),
        }
    }
}

impl<K> Clone for InformerEvent<K> {
    fn clone(&self) -> Self {
        match self {
            Self::ReplaceBegin => Self::ReplaceBegin,
            Self::Replaced(object) => Self::Replaced(object.clone()),
            Self::ReplaceEnd { undecodable, resource_version } => {
                Self::ReplaceEnd { undecodable: undecodable.clone(), resource_version: resource_version.clone() }
            }
            Self::Changed(change) => Self::Changed(change.clone()),
            Self::Batch(changes) => Self::Batch(changes.clone()),
            Self::Advanced { resource_version } => Self::Advanced { resource_version: resource_version.clone() },
        }
    }
}

fn current<K>(change: Change<K>) -> Option<Arc<Object<K>>> {
    match change {
        Change::Added(object) | Change::Updated(object) => Some(object),
        Change::Deleted(_) => None,
    }
}

type Item<K> = Result<InformerEvent<K>, ReflectorError>;

/// Lists and watches one resource, as a stream: kube-rs' `watcher`. It never ends. After an error,
/// which is an item of the stream, it continues by itself, with the delays of a [`Reflector`].
///
/// ```
/// use futures::StreamExt;
/// use kubefan_client::{FakeListWatch, Indexer, objects, reflect, watcher};
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let pods = FakeListWatch::new();
/// pods.put("default/web", r#"{"spec":{"nodeName":"n1"}}"#);
///
/// let store = Indexer::<serde_json::Value>::new();
/// let mut changed = objects(reflect(store.clone(), watcher(pods)));
/// let pod = changed.next().await.unwrap().unwrap();
/// assert_eq!((pod.name(), pod["spec"]["nodeName"].as_str()), ("web", Some("n1")));
/// # }
/// ```
pub fn watcher<K: Decode>(source: impl ListerWatcher) -> Watcher<K> {
    watcher_with(source, |reflector| reflector)
}

/// Like [`watcher`]. `build` sets the options of the reflector, such as a transform. A resync
/// period has no effect, because the stream has no objects of its own.
pub fn watcher_with<K: Decode>(
    source: impl ListerWatcher,
    build: impl FnOnce(Reflector<K>) -> Reflector<K>,
) -> Watcher<K> {
    let queue = Arc::new(Queue::default());
    let gated = Gated { source, queue: queue.clone() };
    let errors = queue.clone();
    let reflector =
        Reflector::new(gated, queue.clone()).on_error(move |error| errors.lock().push_back(Err(error.clone())));
    let reflector = build(reflector);
    Watcher { queue, running: async move { reflector.run(pending::<()>()).await }.boxed() }
}

/// The stream of [`watcher`]. Dropping it ends the watch.
pub struct Watcher<K> {
    queue: Arc<Queue<K>>,
    running: BoxFuture<'static, ()>,
}

impl<K: Decode> Stream for Watcher<K> {
    type Item = Item<K>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Item<K>>> {
        let this = self.get_mut();
        if let Some(item) = this.queue.pop() {
            return Poll::Ready(Some(item));
        }
        if this.running.as_mut().poll(context).is_ready() {
            // It runs until a future completes that never does.
            this.running = pending().boxed();
        }
        this.queue.pop().map_or(Poll::Pending, |item| Poll::Ready(Some(item)))
    }
}

impl<K> fmt::Debug for Watcher<K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Watcher").finish_non_exhaustive()
    }
}

/// Items that the reflector wrote and the reader has not read. One event of the watch fills it,
/// then the watch waits until it is empty.
struct Queue<K>(Mutex<VecDeque<Item<K>>>);

impl<K> Default for Queue<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K> Queue<K> {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Item<K>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pop(&self) -> Option<Item<K>> {
        self.lock().pop_front()
    }
}

impl<K: Send + Sync + 'static> Store<K> for Queue<K> {
    fn apply(&self, change: Change<K>) {
        self.lock().push_back(Ok(InformerEvent::Changed(change)));
    }

    fn apply_batch(&self, changes: Vec<Change<K>>) {
        self.lock().push_back(Ok(InformerEvent::Batch(changes)));
    }

    fn replace(&self, state: Replacement<K>) {
        let Replacement { objects, undecodable, resource_version } = state;
        let mut queue = self.lock();
        queue.push_back(Ok(InformerEvent::ReplaceBegin));
        queue.extend(objects.into_iter().map(|object| Ok(InformerEvent::Replaced(object))));
        queue.push_back(Ok(InformerEvent::ReplaceEnd { undecodable, resource_version }));
    }

    fn advance(&self, resource_version: &str) {
        let mut queue = self.lock();
        match queue.back_mut() {
            Some(Ok(InformerEvent::ReplaceEnd { resource_version: version, .. })) if version == resource_version => {}
            _ => queue.push_back(Ok(InformerEvent::Advanced { resource_version: resource_version.to_owned() })),
        }
    }
}

/// A source whose watches wait while there are events to be read.
struct Gated<S, K> {
    source: S,
    queue: Arc<Queue<K>>,
}

impl<S: ListerWatcher, K: Send + Sync + 'static> ListerWatcher for Gated<S, K> {
    fn list(&self, options: ListOptions) -> BoxFuture<'_, Result<ListPage, ClientError>> {
        self.source.list(options)
    }

    fn watch(&self, options: ListOptions) -> BoxFuture<'_, Result<WatchEvents, ClientError>> {
        let queue = self.queue.clone();
        let gate = |mut events: WatchEvents| {
            // Without a waker: the reader polls again after it has taken the last event.
            let next = move |context: &mut Context<'_>| {
                if queue.lock().is_empty() { events.poll_next_unpin(context) } else { Poll::Pending }
            };
            stream::poll_fn(next).boxed()
        };
        self.source.watch(options).map(|watch| watch.map(gate)).boxed()
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

/// Writes the events to a store, and then passes them on: kube-rs' `reflector`. The store has a
/// change before the reader does. It gets a complete state in one step, at its end.
pub fn reflect<K, S>(indexer: Indexer<K>, events: S) -> impl Stream<Item = Item<K>>
where
    K: Send + Sync + 'static,
    S: Stream<Item = Item<K>>,
{
    let mut objects = Vec::new();
    events.inspect(move |event| match event {
        Ok(InformerEvent::ReplaceBegin) => objects.clear(),
        Ok(InformerEvent::Replaced(object)) => objects.push(object.clone()),
        Ok(InformerEvent::ReplaceEnd { undecodable, resource_version }) => indexer.replace(Replacement {
            objects: std::mem::take(&mut objects),
            undecodable: undecodable.clone(),
            resource_version: resource_version.clone(),
        }),
        Ok(InformerEvent::Changed(change)) => indexer.apply(change.clone()),
        Ok(InformerEvent::Batch(changes)) => indexer.apply_batch(changes.clone()),
        Ok(InformerEvent::Advanced { resource_version }) => indexer.advance(resource_version),
        Err(_) => {}
    })
}

/// Reduces the events to the objects that were added, changed or listed: kube-rs'
/// `applied_objects`. Deletions are left out.
pub fn objects<K, S>(events: S) -> impl Stream<Item = Result<Arc<Object<K>>, ReflectorError>>
where
    S: Stream<Item = Item<K>>,
{
    events
        .map(|event| match event {
            Ok(event) => stream::iter(event.objects().into_iter().map(Ok).collect::<Vec<_>>()),
            Err(error) => stream::iter(vec![Err(error)]),
        })
        .flatten()
}

#[cfg(test)]
mod tests;
