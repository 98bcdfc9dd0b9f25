//! The informer itself: its options, its run, and the conditions to wait for.

use std::{
    fmt,
    future::Future,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use kubefan_common::backoff::BackoffOptions;
use tokio::{runtime::Handle, task::JoinHandle, time::timeout};

use super::{
    error::InformerError,
    handler::{EventHandler, HandlerFuncs},
    lister::Lister,
    process::Processor,
    registration::{HandlerOptions, Registration},
};
use crate::{
    lister_watcher::ListerWatcher,
    object::Decode,
    reflector::{Observers, Reflector, ReflectorError, Transform},
    stats::{Counted, Counters, InformerStats},
    store::Indexer,
};

/// Time that [`SharedInformer::run`] waits at its end for running handler calls.
const HANDLER_GRACE: Duration = Duration::from_secs(5);

/// Keeps a store of one resource current, and calls handlers for each change. Clones are the same
/// informer.
///
/// ```
/// use kubefan_client::{FakeListWatch, SharedInformer};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let pods = FakeListWatch::new();
/// pods.put("default/web", r#"{"spec":{"nodeName":"n1"}}"#);
///
/// let informer = SharedInformer::<serde_json::Value>::new(pods);
/// informer.indexer().add_index("node", |pod| pod["spec"]["nodeName"].as_str().map(str::to_owned))?;
/// informer.add_event_handler(informer.handler().on_add(|pod, _| println!("new: {}", pod.key())))?;
/// let running = informer.spawn(std::future::pending::<()>())?;
/// informer.synced().await?;
/// assert_eq!(informer.indexer().by_index("node", "n1")?.len(), 1);
/// # running.abort();
/// # Ok(()) }
/// ```
pub struct SharedInformer<K>(Arc<Inner<K>>);

struct Inner<K> {
    /// Taken by the start.
    reflector: Mutex<Option<Reflector<K>>>,
    processor: Arc<Processor<K>>,
    observers: Observers,
    counters: Arc<Counters>,
    started: AtomicBool,
    description: String,
}

/// Options of an informer. [`SharedInformer::builder`] returns it.
pub struct InformerBuilder<K> {
    reflector: Reflector<K>,
    processor: Arc<Processor<K>>,
    counters: Arc<Counters>,
    description: String,
}

impl<K: Decode> InformerBuilder<K> {
    /// Changes each object before it is stored. An error is reported to the observers, and the
    /// previous state of that object stays.
    #[must_use]
    pub fn transform(mut self, transform: impl Into<Transform<K>>) -> Self {
        self.reflector = self.reflector.transform(transform);
        self
    }

    /// Stores a clone of each decoded value, which takes less memory: see [`Reflector::compact`].
    #[must_use]
    pub fn compact(mut self) -> Self
    where
        K: Clone,
    {
        self.reflector = self.reflector.compact();
        self
    }

    /// The resync period of handlers that name none. Default: never.
    #[must_use]
    pub fn resync_period(self, period: Duration) -> Self {
        self.processor.set_default_resync(period);
        self
    }

    /// An object that was deleted and created again under the same name between two states is
    /// reported as a deletion and an addition. Default: as one update, as client-go does. The uid
    /// tells the two objects apart, so this has no effect if a projection leaves it out.
    #[must_use]
    pub fn recreated_as_delete_and_add(self) -> Self {
        self.processor.set_recreated_as_two_calls();
        self
    }

    /// Accepts only objects of this `apiVersion` and `kind`: see [`Reflector::expect_kind`].
    #[must_use]
    pub fn expect_kind(mut self, api_version: &str, kind: &str) -> Self {
        self.reflector = self.reflector.expect_kind(api_version, kind);
        self
    }

    /// The objects in a page of a list: see [`Reflector::page_size`].
    #[must_use]
    pub fn page_size(mut self, objects: u32) -> Self {
        self.reflector = self.reflector.page_size(objects);
        self
    }

    /// The delays after errors: see [`Reflector::backoff`].
    #[must_use]
    pub fn backoff(mut self, backoff: BackoffOptions) -> Self {
        self.reflector = self.reflector.backoff(backoff);
        self
    }

    /// The seed of the jitter of retries, for simulations. Default: random.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.reflector = self.reflector.seed(seed);
        self
    }

    /// Returns the informer, not started.
    pub fn build(self) -> SharedInformer<K> {
        let Self { reflector, processor, counters, description } = self;
        SharedInformer(Arc::new(Inner {
            reflector: Mutex::new(Some(reflector)),
            observers: processor.observers().clone(),
            processor,
            counters,
            started: AtomicBool::new(false),
            description,
        }))
    }
}

impl<K: Decode> SharedInformer<K> {
    /// Returns an informer with default options. It does nothing until [`Self::run`].
    pub fn new(source: impl ListerWatcher) -> Self {
        Self::builder(source).build()
    }

    /// Returns the options of an informer.
    pub fn builder(source: impl ListerWatcher) -> InformerBuilder<K> {
        let description = source.describe();
        let observers = Observers::default();
        let counters = Arc::new(Counters::new());
        let counted = counters.clone();
        observers.add(move |error| counted.note_error(error));
        let source = Counted { source, counters: counters.clone() };
        let processor = Arc::new(Processor::new(observers.clone()));
        let reflector = Reflector::new(source, processor.clone()).observers(observers);
        InformerBuilder { reflector, processor, counters, description }
    }

    /// The store. Its objects must be treated as the state that the server reported: it is written
    /// only by the informer, although the type allows more.
    pub fn indexer(&self) -> &Indexer<K> {
        self.0.processor.indexer()
    }

    /// Reads the store by namespace and name.
    pub fn lister(&self) -> Lister<K> {
        Lister::new(self.indexer().clone())
    }

    /// Returns a handler without functions, for [`Self::add_event_handler`]. Its type is known
    /// here, so the closures need no types.
    pub fn handler(&self) -> HandlerFuncs<K> {
        HandlerFuncs::new()
    }

    /// Calls `handler` for each change. A handler that is added late first gets the current objects
    /// as additions of the initial list.
    ///
    /// # Errors
    /// [`InformerError::Stopped`], and [`InformerError::NoRuntime`] outside of a tokio runtime.
    pub fn add_event_handler(&self, handler: impl EventHandler<K>) -> Result<Registration, InformerError> {
        self.add_event_handler_with_options(handler, HandlerOptions::default())
    }

    /// Like [`Self::add_event_handler`], with a resync period and a limit of the handler's own.
    ///
    /// # Errors
    /// As [`Self::add_event_handler`].
    pub fn add_event_handler_with_options(
        &self,
        handler: impl EventHandler<K>,
        options: HandlerOptions,
    ) -> Result<Registration, InformerError> {
        self.0.processor.add(handler, options)
    }

    /// Calls `observer` with each error, such as a broken connection or an object that cannot be
    /// decoded: client-go's `SetWatchErrorHandler`, any number of times and at any time.
    pub fn on_error(&self, observer: impl Fn(&ReflectorError) + Send + Sync + 'static) {
        self.0.observers.add(observer);
    }

    /// Runs until `stop` completes. Then each handler finishes the call that is under way, within
    /// 5 s, and gets no more. Dropping the future stops the informer, too. A stopped informer stays
    /// stopped; its store can still be read.
    ///
    /// # Errors
    /// [`InformerError::AlreadyStarted`] at the second call.
    pub async fn run(&self, stop: impl Future) -> Result<(), InformerError> {
        let reflector = self.0.reflector.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut reflector) = reflector else { return Err(InformerError::AlreadyStarted) };
        self.0.started.store(true, Ordering::Release);
        let stopped = StopOnDrop(&self.0.processor);
        if let Some(period) = self.0.processor.start() {
            reflector = reflector.resync_period(period);
        }
        reflector.run(stop).await;
        drop(stopped);
        // A handler that never returns must not keep the program from ending.
        let _ = timeout(HANDLER_GRACE, self.0.processor.handlers_ended()).await;
        self.0.processor.abort_handlers();
        Ok(())
    }

    /// Runs like [`Self::run`], on a task of its own. To drop the handle leaves it running.
    ///
    /// # Errors
    /// [`InformerError::NoRuntime`] outside of a tokio runtime.
    pub fn spawn<S>(&self, stop: S) -> Result<JoinHandle<Result<(), InformerError>>, InformerError>
    where
        S: Future + Send + 'static,
        S::Output: Send,
    {
        let runtime = Handle::try_current().map_err(|_| InformerError::NoRuntime)?;
        let informer = self.clone();
        Ok(runtime.spawn(async move { informer.run(stop).await }))
    }

    /// Whether the informer was started.
    pub fn is_started(&self) -> bool {
        self.0.started.load(Ordering::Acquire)
    }

    /// Whether the informer has stopped.
    pub fn is_stopped(&self) -> bool {
        self.0.processor.is_stopped()
    }

    /// Whether the store has the state of the first list. Handlers may still be behind: each has
    /// its own [`Registration::has_synced`].
    pub fn has_synced(&self) -> bool {
        self.0.processor.has_synced()
    }

    /// Waits for [`Self::has_synced`].
    ///
    /// # Errors
    /// [`InformerError::Stopped`] if the informer stops before.
    pub async fn synced(&self) -> Result<(), InformerError> {
        self.0.processor.synced().await
    }

    /// The version up to which the store is complete: client-go's `LastSyncResourceVersion`. Empty
    /// before the first list.
    pub fn resource_version(&self) -> String {
        self.indexer().resource_version()
    }

    /// The calls that wait for handlers, of the handler with the most. A number that stays high
    /// means a handler that is slower than the changes.
    pub fn longest_backlog(&self) -> usize {
        self.0.processor.longest_backlog()
    }

    /// Returns figures of the informer's work so far.
    pub fn stats(&self) -> InformerStats {
        InformerStats {
            resource_version: self.resource_version(),
            objects: self.indexer().len(),
            longest_backlog: self.longest_backlog(),
            ..self.0.counters.stats()
        }
    }

    /// Waits until the store has everything up to `resource_version`, such as the version that a
    /// write returned: "my own write has arrived".
    ///
    /// The version of the store moves with events and bookmarks. With a selector, a write that does
    /// not match moves it only with the next bookmark, after up to the watch's bookmark interval
    /// (60 s by default). Versions of one cluster can be compared, whether they come from an
    /// apiserver or from any kubefan of it. A version of another resource type may never arrive if
    /// the cluster stores that type in another etcd, as it often does events.
    ///
    /// # Errors
    /// [`InformerError::Timeout`] after `limit`: the write may still arrive.
    /// [`InformerError::Stopped`] if the informer stops. [`InformerError::IncomparableVersion`] if
    /// the version is not a number.
    pub async fn wait_until(&self, resource_version: &str, limit: Duration) -> Result<(), InformerError> {
        let wanted: u64 =
            resource_version.parse().map_err(|_| InformerError::IncomparableVersion(resource_version.to_owned()))?;
        match timeout(limit, self.0.processor.reached(wanted)).await {
            Ok(result) => result,
            Err(_) => Err(InformerError::Timeout {
                wanted: resource_version.to_owned(),
                reached: self.resource_version(),
                waited: limit,
            }),
        }
    }
}

struct StopOnDrop<'a, K: Decode>(&'a Processor<K>);

impl<K: Decode> Drop for StopOnDrop<'_, K> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl<K> Clone for SharedInformer<K> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K> fmt::Debug for SharedInformer<K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("SharedInformer").field("source", &self.0.description).finish_non_exhaustive()
    }
}

impl<K> fmt::Debug for InformerBuilder<K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("InformerBuilder").field("source", &self.description).finish_non_exhaustive()
    }
}
