//! Applies the deltas of the queue to the store, then hands them to the handlers.
//!
//! One lock covers both steps, and adding a handler takes it, too. So a late handler gets exactly
//! the state before its first change, and no handler hears of a state that the store does not have.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{runtime::Handle, sync::watch, task::AbortHandle, time::Instant};

use super::{
    error::InformerError,
    handler::{EventHandler, Notification},
    registration::{HandlerOptions, HandlerQueue, Registration, drive},
};
use crate::{
    object::Object,
    queue::{Delta, RealFifo},
    reflector::{Observers, ReflectorError},
    store::{Change, Deleted, IndexWriter, Indexer, Replacement, Store},
    version::number,
};

/// The shortest resync period, as in client-go.
const RESYNC_PERIOD_MIN: Duration = Duration::from_secs(1);

/// The store side of an informer.
pub(super) struct Processor<K> {
    fifo: RealFifo<K>,
    indexer: Indexer<K>,
    handlers: Mutex<Handlers<K>>,
    observers: Observers,
    recreated_as_two_calls: AtomicBool,
    synced: watch::Sender<bool>,
    /// The version of the store, as far as it is a number.
    version: watch::Sender<u64>,
    stopped: watch::Sender<bool>,
}

struct Handlers<K> {
    list: Vec<Listener<K>>,
    default_resync: Duration,
    /// Interval of the check for handlers that are due for a resync. Fixed by the start.
    resync_check: Option<Duration>,
    started: bool,
}

struct Listener<K> {
    queue: Arc<HandlerQueue<K>>,
    task: AbortHandle,
    /// Zero: never.
    resync_period: Duration,
    next_resync: Instant,
    /// Gets updates that change no version. As in client-go true until the first check for a
    /// resync, then only while the handler is due for one.
    is_syncing: bool,
}

impl<K: Send + Sync + 'static> Processor<K> {
    pub(super) fn new(observers: Observers) -> Self {
        let indexer = Indexer::new();
        Self {
            fifo: RealFifo::new(Arc::new(indexer.clone())),
            indexer,
            handlers: Mutex::new(Handlers {
                list: Vec::new(),
                default_resync: Duration::ZERO,
                resync_check: None,
                started: false,
            }),
            observers,
            recreated_as_two_calls: AtomicBool::new(false),
            synced: watch::Sender::new(false),
            version: watch::Sender::new(0),
            stopped: watch::Sender::new(false),
        }
    }

    pub(super) fn indexer(&self) -> &Indexer<K> {
        &self.indexer
    }

    pub(super) fn observers(&self) -> &Observers {
        &self.observers
    }

    pub(super) fn set_default_resync(&self, period: Duration) {
        let period = if period.is_zero() { period } else { period.max(RESYNC_PERIOD_MIN) };
        let mut handlers = self.lock();
        handlers.default_resync = period;
        handlers.lower_resync_check(period);
    }

    pub(super) fn set_recreated_as_two_calls(&self) {
        self.recreated_as_two_calls.store(true, Ordering::Relaxed);
    }

    pub(super) fn add(
        &self,
        handler: impl EventHandler<K>,
        options: HandlerOptions,
    ) -> Result<Registration, InformerError> {
        let runtime = Handle::try_current().map_err(|_| InformerError::NoRuntime)?;
        let mut handlers = self.lock();
        if self.is_stopped() {
            return Err(InformerError::Stopped);
        }
        let mut resync_period = options.resync_period.unwrap_or(handlers.default_resync);
        if !resync_period.is_zero() {
            resync_period = resync_period.max(RESYNC_PERIOD_MIN);
            handlers.lower_resync_check(resync_period);
        }
        let queue = Arc::new(HandlerQueue::new(options.backlog));
        let current = self.indexer.snapshot();
        let current = current.iter().cloned().map(|object| Notification::Add { object, is_in_initial_list: true });
        queue.push(current);
        if self.has_synced() {
            queue.set_all_pushed();
        }
        let registration = queue.registration();
        let task = runtime.spawn(drive(queue.end_on_drop(), handler, self.observers.clone())).abort_handle();
        let next_resync = Instant::now() + resync_period;
        handlers.list.push(Listener { queue, task, resync_period, next_resync, is_syncing: true });
        Ok(registration)
    }

    /// Fixes how often resyncs are checked, and returns it.
    pub(super) fn start(&self) -> Option<Duration> {
        let mut handlers = self.lock();
        handlers.started = true;
        let now = Instant::now();
        for listener in &mut handlers.list {
            listener.next_resync = now + listener.resync_period;
        }
        handlers.resync_check
    }

    /// Ends all handlers after the calls that are under way. Final.
    pub(super) fn stop(&self) {
        let handlers = self.lock();
        self.stopped.send_replace(true);
        for listener in &handlers.list {
            listener.queue.stop();
        }
    }

    pub(super) async fn handlers_ended(&self) {
        let registrations: Vec<_> = self.lock().list.iter().map(|listener| listener.queue.registration()).collect();
        for registration in registrations {
            registration.ended().await;
        }
    }

    /// Ends calls that are still under way, at the point where they wait.
    pub(super) fn abort_handlers(&self) {
        for listener in self.lock().list.drain(..) {
            listener.task.abort();
        }
    }

    pub(super) fn is_stopped(&self) -> bool {
        *self.stopped.borrow()
    }

    pub(super) fn has_synced(&self) -> bool {
        *self.synced.borrow()
    }

    pub(super) async fn synced(&self) -> Result<(), InformerError> {
        self.wait(self.synced.subscribe(), |synced| *synced).await
    }

    /// Waits until the store has this version.
    pub(super) async fn reached(&self, version: u64) -> Result<(), InformerError> {
        self.wait(self.version.subscribe(), |reached| *reached >= version).await
    }

    /// The calls that wait for handlers, of the handler with the most.
    pub(super) fn longest_backlog(&self) -> usize {
        self.lock().list.iter().map(|listener| listener.queue.len()).max().unwrap_or(0)
    }

    async fn wait<T>(
        &self,
        mut value: watch::Receiver<T>,
        condition: impl FnMut(&T) -> bool,
    ) -> Result<(), InformerError> {
        let mut stopped = self.stopped.subscribe();
        tokio::select! {
            biased;
            Ok(_) = value.wait_for(condition) => Ok(()),
            _ = stopped.wait_for(|stopped| *stopped) => Err(InformerError::Stopped),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Handlers<K>> {
        self.handlers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Processes all that is queued.
    fn drain(&self) {
        while self.fifo.try_pop(|deltas, is_in_initial_list| self.process(deltas, is_in_initial_list)) {}
        if !self.has_synced() && self.fifo.has_synced() {
            let handlers = self.lock();
            self.synced.send_replace(true);
            for listener in &handlers.list {
                listener.queue.set_all_pushed();
            }
        }
    }

    fn process(&self, deltas: Vec<Delta<K>>, is_in_initial_list: bool) {
        let mut handlers = self.lock();
        // An ending listener stays until its last call is over, so that a stop can abort it.
        handlers.list.retain(|listener| !listener.queue.has_ended());
        let mut notifications = Vec::with_capacity(deltas.len());
        self.indexer.write_batch(|store| {
            for delta in deltas {
                self.store(store, delta, is_in_initial_list, &mut notifications);
            }
        });
        let Some((last, rest)) = handlers.list.split_last() else { return };
        let push =
            |listener: &Listener<K>| listener.push(notifications.iter().filter(|call| listener.wants(call)).cloned());
        let mut overflowed: Vec<_> = rest.iter().filter_map(push).collect();
        overflowed.extend(last.push(notifications.into_iter().filter(|call| last.wants(call))));
        drop(handlers);
        // Without the lock, because observers are the program's code.
        for limit in overflowed {
            self.observers.report(&ReflectorError::HandlerOverflowed(limit));
        }
    }

    /// Applies a delta to the store, and adds the calls that it means.
    fn store(
        &self,
        store: &mut IndexWriter<'_, K>,
        delta: Delta<K>,
        is_in_initial_list: bool,
        notifications: &mut Vec<Notification<K>>,
    ) {
        match delta {
            Delta::Added(new) | Delta::Updated(new) | Delta::Replaced(new) | Delta::Sync(new) => {
                match store.insert(new.clone()) {
                    None => notifications.push(Notification::Add { object: new, is_in_initial_list }),
                    Some(old) if self.recreated_as_two_calls.load(Ordering::Relaxed) && !old.is_same_object(&new) => {
                        notifications.push(Notification::Delete(final_state_unknown(old)));
                        notifications.push(Notification::Add { object: new, is_in_initial_list });
                    }
                    Some(old) => notifications.push(Notification::Update { old, new }),
                }
            }
            Delta::Deleted(deleted) => {
                let last = store.remove(deleted.key().as_str());
                match (deleted, last) {
                    (Deleted::Known(object), _) => notifications.push(Notification::Delete(Deleted::Known(object))),
                    (Deleted::FinalStateUnknown(_), Some(last)) => {
                        notifications.push(Notification::Delete(final_state_unknown(last)));
                    }
                    // Never known here, and unknown there: nothing was deleted for the handlers.
                    (Deleted::FinalStateUnknown(_), None) => {}
                }
            }
        }
    }
}

impl<K> Handlers<K> {
    fn lower_resync_check(&mut self, period: Duration) {
        if !self.started && !period.is_zero() {
            self.resync_check = Some(self.resync_check.map_or(period, |check| check.min(period)));
        }
    }
}

impl<K: Send + Sync + 'static> Listener<K> {
    /// Adds calls. If the handler is too far behind, ends it and returns its limit.
    fn push(&self, calls: impl IntoIterator<Item = Notification<K>>) -> Option<usize> {
        let limit = self.queue.push(calls)?;
        // Its call under way may never return.
        self.task.abort();
        Some(limit)
    }

    fn wants(&self, call: &Notification<K>) -> bool {
        match call {
            Notification::Update { old, new } => self.is_syncing || old.resource_version() != new.resource_version(),
            _ => true,
        }
    }
}

fn final_state_unknown<K>(last: Arc<Object<K>>) -> Deleted<K> {
    Deleted::unknown(last.key().clone(), Some(last))
}

impl<K: Send + Sync + 'static> Store<K> for Processor<K> {
    fn apply(&self, change: Change<K>) {
        self.fifo.apply(change);
        self.drain();
    }

    fn apply_batch(&self, changes: Vec<Change<K>>) {
        self.fifo.apply_batch(changes);
        self.drain();
    }

    fn replace(&self, state: Replacement<K>) {
        self.fifo.replace(state);
        self.drain();
    }

    fn advance(&self, resource_version: &str) {
        self.indexer.advance(resource_version);
        if let Some(version) = number(resource_version) {
            self.version.send_replace(version);
        }
    }

    fn resync(&self) {
        let now = Instant::now();
        let mut any = false;
        for listener in &mut self.lock().list {
            listener.is_syncing = !listener.resync_period.is_zero() && listener.next_resync <= now;
            if listener.is_syncing {
                listener.next_resync = now + listener.resync_period;
                any = true;
            }
        }
        if any {
            self.fifo.resync();
            self.drain();
        }
    }
}
