//! Informers of several resources, started and stopped together.

use std::{
    any::{Any, TypeId},
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::future::{BoxFuture, join_all, try_join_all};
use tokio::{sync::watch, task::JoinHandle};

use super::{
    error::InformerError,
    shared_informer::{InformerBuilder, SharedInformer},
};
use crate::{
    list_watch::{Connection, ListWatch},
    object::Decode,
};

type Tweak = Arc<dyn Fn(ListWatch) -> ListWatch + Send + Sync>;

/// Makes informers over one connection, one for each resource and type: client-go's
/// `SharedInformerFactory`. Dropping it leaves the started informers running.
pub struct SharedInformerFactory {
    connection: Connection,
    namespace: String,
    tweak: Option<Tweak>,
    resync_period: Duration,
    state: Mutex<StartedInformers>,
    stop: watch::Sender<bool>,
}

#[derive(Default)]
struct StartedInformers {
    informers: HashMap<(String, TypeId), Entry>,
    tasks: Vec<JoinHandle<()>>,
}

/// An informer without its type.
struct Entry {
    informer: Box<dyn Any + Send>,
    started: bool,
    run: Box<dyn Fn(watch::Receiver<bool>) -> BoxFuture<'static, ()> + Send>,
    synced: Box<dyn Fn() -> BoxFuture<'static, Result<(), InformerError>> + Send>,
}

impl SharedInformerFactory {
    /// Returns a factory without informers, for all namespaces.
    pub fn new(connection: impl Into<Connection>) -> Self {
        Self {
            connection: connection.into(),
            namespace: String::new(),
            tweak: None,
            resync_period: Duration::ZERO,
            state: Mutex::default(),
            stop: watch::Sender::new(false),
        }
    }

    /// Limits all informers to one namespace.
    #[must_use]
    pub fn namespace(mut self, namespace: &str) -> Self {
        namespace.clone_into(&mut self.namespace);
        self
    }

    /// Changes the reads of each informer, such as by a label selector: client-go's
    /// `WithTweakListOptions`.
    #[must_use]
    pub fn tweak_list_options(mut self, tweak: impl Fn(ListWatch) -> ListWatch + Send + Sync + 'static) -> Self {
        self.tweak = Some(Arc::new(tweak));
        self
    }

    /// The default resync period of the handlers. Default: never.
    #[must_use]
    pub fn resync_period(mut self, period: Duration) -> Self {
        self.resync_period = period;
        self
    }

    /// The informer of a resource, such as `pods` or `deployments.apps`, decoded as `K`. The same
    /// call returns the same informer.
    pub fn informer<K: Decode>(&self, resource: &str) -> SharedInformer<K> {
        self.informer_with(resource, |builder| builder)
    }

    /// Like [`Self::informer`]. If the informer does not exist yet, `build` sets its options.
    pub fn informer_with<K: Decode>(
        &self,
        resource: &str,
        build: impl FnOnce(InformerBuilder<K>) -> InformerBuilder<K>,
    ) -> SharedInformer<K> {
        let key = (resource.to_owned(), TypeId::of::<K>());
        let known = |state: &StartedInformers| {
            state.informers.get(&key).and_then(|entry| entry.informer.downcast_ref::<SharedInformer<K>>()).cloned()
        };
        if let Some(informer) = known(&self.state()) {
            return informer;
        }
        // Without the lock: these functions are the caller's, and may use the factory.
        let mut source = ListWatch::new(self.connection.clone(), resource, &self.namespace, "");
        if let Some(tweak) = &self.tweak {
            source = tweak(source);
        }
        let informer = build(SharedInformer::builder(source).resync_period(self.resync_period)).build();
        let mut state = self.state();
        if let Some(first) = known(&state) {
            return first;
        }
        state.informers.insert(key, Entry::new(informer.clone()));
        informer
    }

    /// Starts all informers that are not started yet. May be called again after more were made.
    ///
    /// # Errors
    /// [`InformerError::Stopped`] after [`Self::shutdown`], and [`InformerError::NoRuntime`]
    /// outside of a tokio runtime.
    pub fn start(&self) -> Result<(), InformerError> {
        let runtime = tokio::runtime::Handle::try_current().map_err(|_| InformerError::NoRuntime)?;
        let mut state = self.state();
        if *self.stop.borrow() {
            return Err(InformerError::Stopped);
        }
        let StartedInformers { informers, tasks } = &mut *state;
        for entry in informers.values_mut().filter(|entry| !entry.started) {
            entry.started = true;
            tasks.push(runtime.spawn((entry.run)(self.stop.subscribe())));
        }
        Ok(())
    }

    /// Waits until every started informer has its first state.
    ///
    /// # Errors
    /// [`InformerError::Stopped`] if an informer stops before.
    pub async fn wait_for_cache_sync(&self) -> Result<(), InformerError> {
        let synced: Vec<_> =
            self.state().informers.values().filter(|entry| entry.started).map(|entry| (entry.synced)()).collect();
        try_join_all(synced).await.map(drop)
    }

    /// Stops all informers, and waits until they have ended. Final.
    pub async fn shutdown(&self) {
        self.stop.send_replace(true);
        let tasks = std::mem::take(&mut self.state().tasks);
        join_all(tasks).await;
    }

    fn state(&self) -> MutexGuard<'_, StartedInformers> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn new<K: Decode>(informer: SharedInformer<K>) -> Self {
        let running = informer.clone();
        let waiting = informer.clone();
        Self {
            informer: Box::new(informer),
            started: false,
            run: Box::new(move |mut stop| {
                let informer = running.clone();
                Box::pin(async move {
                    // The factory starts each informer once. If the caller has started it already,
                    // there is nothing to do.
                    let stopped = async move {
                        if stop.wait_for(|stop| *stop).await.is_err() {
                            // The factory was dropped, which stops nothing.
                            std::future::pending::<()>().await;
                        }
                    };
                    let _ = informer.run(stopped).await;
                })
            }),
            synced: Box::new(move || {
                let informer = waiting.clone();
                Box::pin(async move { informer.synced().await })
            }),
        }
    }
}

impl fmt::Debug for SharedInformerFactory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("SharedInformerFactory")
            .field("informers", &self.state().informers.len())
            .finish_non_exhaustive()
    }
}
