//! Keeps a store equal to a server's state: list and watch, for ever.
//!
//! The hazard is a store that silently differs. So a version counts only after everything at or
//! below it is in the store, a snapshot or a batch that breaks off has no effect, and only a server
//! that says "expired" makes the reflector give its version up.
//!
//! The main difference to client-go's `Reflector`: after a broken watch it watches again from its
//! last version, where client-go lists again. A list costs the server more, and tells nothing that
//! the watch does not.

mod decoder;
mod observers;
mod reflector_run;
mod session;

use std::{
    fmt,
    future::{Future, pending},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use kubefan_common::backoff::{Backoff, BackoffOptions};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, sleep};

use crate::{error::ClientError, lister_watcher::ListerWatcher, object::Decode, random::generator, store::Store};

use self::session::Session;
pub use self::{
    decoder::{Transform, TransformError},
    observers::{Observers, ReflectorError},
};

/// The objects of a page, if the server lists in pages: as client-go's pager.
const PAGE_SIZE: u32 = 500;

/// Lists and watches one resource, and writes its state to a [`Store`]: client-go's `Reflector`.
pub struct Reflector<K> {
    source: Arc<dyn ListerWatcher>,
    store: Arc<dyn Store<K>>,
    decoder: decoder::Decoder<K>,
    observers: Observers,
    resync_period: Option<Duration>,
    backoff: BackoffOptions,
    page_size: u32,
    seed: Option<u64>,
    session: Mutex<Session>,
}

impl<K: Decode> Reflector<K> {
    /// Returns a reflector that has not started.
    pub fn new(source: impl ListerWatcher, store: impl Store<K>) -> Self {
        Self {
            source: Arc::new(source),
            store: Arc::new(store),
            decoder: decoder::Decoder::default(),
            observers: Observers::default(),
            resync_period: None,
            backoff: BackoffOptions::default(),
            page_size: PAGE_SIZE,
            seed: None,
            session: Mutex::default(),
        }
    }

    /// Calls [`Store::resync`] once per period. It never contacts the server. Default: never.
    #[must_use]
    pub fn resync_period(mut self, period: Duration) -> Self {
        self.resync_period = (!period.is_zero()).then_some(period);
        self
    }

    /// Changes each object before the store gets it, such as to remove fields. An error is
    /// reported, and the store keeps its previous state of that object.
    #[must_use]
    pub fn transform(mut self, transform: impl Into<Transform<K>>) -> Self {
        self.decoder.transform = Some(transform.into());
        self
    }

    /// Stores a clone of each decoded value, and drops the original. Lists grow as they are
    /// decoded, so they have room for more elements than they get; a clone has no spare room. A Pod
    /// of k8s-openapi takes a seventh less memory then, and its decoding more CPU time. It gains
    /// nothing for types without `Vec`s.
    #[must_use]
    pub fn compact(mut self) -> Self
    where
        K: Clone,
    {
        self.decoder.compact = Some(K::clone);
        self
    }

    /// Accepts only objects with this `apiVersion` and `kind`, for types that decode from anything:
    /// client-go's expected type. An object without the two fields, as in a list, is accepted.
    #[must_use]
    pub fn expect_kind(mut self, api_version: &str, kind: &str) -> Self {
        self.decoder.expected = Some((api_version.to_owned(), kind.to_owned()));
        self
    }

    /// Calls `observer` with each error. Any number of observers may be added.
    #[must_use]
    pub fn on_error(self, observer: impl Fn(&ReflectorError) + Send + Sync + 'static) -> Self {
        self.observers.add(observer);
        self
    }

    /// Reports errors to these observers, too.
    #[must_use]
    pub(crate) fn observers(mut self, observers: Observers) -> Self {
        self.observers = observers;
        self
    }

    /// The delays after errors. Default: client-go's, 800 ms to 30 s, doubled, with jitter, and
    /// reset after two minutes without an error.
    #[must_use]
    pub fn backoff(mut self, backoff: BackoffOptions) -> Self {
        self.backoff = backoff;
        self
    }

    /// The objects in a page of a list. Default: 500. 0 requests everything at once.
    #[must_use]
    pub fn page_size(mut self, objects: u32) -> Self {
        self.page_size = objects;
        self
    }

    /// The seed of the jitter, for simulations. Default: random.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// The version up to which the store is complete. Empty before the first list.
    pub fn last_sync_resource_version(&self) -> String {
        self.session.lock().unwrap_or_else(PoisonError::into_inner).version.clone()
    }

    /// Lists and watches until `stop` completes. Errors are reported to the observers and retried.
    /// It may be called again, and then continues from the last version.
    pub async fn run(&self, stop: impl Future) {
        tokio::select! {
            biased;
            _ = stop => {}
            () = self.run_forever() => {}
        }
    }

    /// One round: the state if it is not known or expired, then one watch until it ends.
    ///
    /// # Errors
    /// The error that ended the round. It is also reported to the observers.
    pub async fn list_and_watch(&self) -> Result<(), ClientError> {
        let mut resync = self.resync();
        let result = self.round(&mut resync).await;
        if let Err(error) = &result {
            self.observers.report(&ReflectorError::Client(error.clone()));
        }
        result
    }

    async fn run_forever(&self) {
        let mut backoff = Backoff::new(self.backoff.clone());
        let mut random = generator(self.seed);
        let mut resync = self.resync();
        loop {
            let Err(error) = self.round(&mut resync).await else { continue };
            self.observers.report(&ReflectorError::Client(error.clone()));
            let delay = backoff.next_delay(Instant::now(), error.retry_after(), &mut random);
            sleep(delay).await;
        }
    }

    fn resync(&self) -> Resync {
        Resync(self.resync_period.map(|period| {
            let mut interval = interval_at(Instant::now() + period, period);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            interval
        }))
    }
}

/// The timer of resyncs, if there are any.
struct Resync(Option<Interval>);

impl Resync {
    async fn tick(&mut self) {
        match &mut self.0 {
            Some(interval) => drop(interval.tick().await),
            None => pending().await,
        }
    }

    /// The next tick is one period from now. Called after a resync: a tick that came early relative
    /// to a late one would find no handler due, and they would wait for another period.
    fn restart(&mut self) {
        if let Some(interval) = &mut self.0 {
            interval.reset();
        }
    }
}

impl<K> fmt::Debug for Reflector<K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Reflector").field("source", &self.source.describe()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
