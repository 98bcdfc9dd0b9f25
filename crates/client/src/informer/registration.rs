//! A handler's queue, its task, and the caller's handle of it.

use std::{
    fmt,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::FutureExt;
use tokio::{
    sync::{Notify, watch},
    task::coop::consume_budget,
};

use super::{
    backlog::{Backlog, BacklogQueue},
    error::{HandlerEnd, InformerError},
    handler::{EventHandler, Notification},
};
use crate::{
    panics::panic_message,
    reflector::{Observers, ReflectorError},
};

/// Options of a handler.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HandlerOptions {
    /// The handler gets every object again once per period, as an update from the object to itself.
    /// At least 1 s. Zero means never. `None` means the informer's default. After the informer has
    /// started, a period shorter than the shortest one at the start is raised to that. If there was
    /// none at the start, there are no resyncs.
    pub resync_period: Option<Duration>,
    /// Behaviour when the handler is behind.
    pub backlog: Backlog,
}

/// State that a handler's task and its registration share.
struct Status {
    synced: watch::Sender<bool>,
    /// Set to ask the task to end.
    ending: watch::Sender<Option<HandlerEnd>>,
    /// Set when the task has ended.
    ended: watch::Sender<Option<HandlerEnd>>,
}

impl Status {
    /// The first reason counts.
    fn end(&self, reason: HandlerEnd) {
        self.ending.send_if_modified(|ending| {
            let first = ending.is_none();
            if first {
                *ending = Some(reason);
            }
            first
        });
    }

    fn is_ending(&self) -> bool {
        self.ending.borrow().is_some()
    }
}

/// A handler that was added to an informer: client-go's `ResourceEventHandlerRegistration`.
/// Dropping it leaves the handler in place. Clones stand for the same handler.
#[derive(Clone)]
pub struct Registration(Arc<Status>);

impl Registration {
    /// Whether the handler has finished all calls of the initial list. False for ever if it ended
    /// before.
    pub fn has_synced(&self) -> bool {
        *self.0.synced.borrow()
    }

    /// Waits for [`Self::has_synced`].
    ///
    /// # Errors
    /// [`InformerError::Stopped`] if the informer stops before, [`InformerError::HandlerEnded`] if
    /// the handler ends for another reason.
    pub async fn synced(&self) -> Result<(), InformerError> {
        let mut synced = self.0.synced.subscribe();
        let mut ended = self.0.ended.subscribe();
        tokio::select! {
            biased;
            Ok(_) = synced.wait_for(|synced| *synced) => Ok(()),
            _ = ended.wait_for(Option::is_some) => Err(match self.ended().await {
                HandlerEnd::Stopped => InformerError::Stopped,
                end => InformerError::HandlerEnded(end),
            }),
        }
    }

    /// Removes the handler. When this returns, no call is under way and none follows. It waits for
    /// a call that is under way, however long that takes, so a handler must not remove itself this
    /// way: dropping the future still removes it.
    pub async fn remove(&self) {
        self.0.end(HandlerEnd::Removed);
        self.ended().await;
    }

    /// Waits until the handler gets no more calls, and returns why.
    pub async fn ended(&self) -> HandlerEnd {
        let mut ended = self.0.ended.subscribe();
        let ended = ended.wait_for(Option::is_some).await;
        ended.ok().and_then(|ended| ended.clone()).unwrap_or(HandlerEnd::Stopped)
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Registration").field("has_synced", &self.has_synced()).finish_non_exhaustive()
    }
}

/// The calls that wait for one handler. The informer pushes, the handler's task takes.
pub(super) struct HandlerQueue<K> {
    calls: Mutex<Calls<K>>,
    wake: Notify,
    status: Arc<Status>,
}

struct Calls<K> {
    backlog: BacklogQueue<K>,
    /// Additions of the initial list that are waiting or under way.
    initial: usize,
    /// The informer has pushed the whole initial list.
    all_pushed: bool,
}

impl<K: Send + Sync + 'static> HandlerQueue<K> {
    pub(super) fn new(backlog: Backlog) -> Self {
        Self {
            calls: Mutex::new(Calls { backlog: BacklogQueue::new(backlog), initial: 0, all_pushed: false }),
            wake: Notify::new(),
            status: Arc::new(Status {
                synced: watch::Sender::new(false),
                ending: watch::Sender::new(None),
                ended: watch::Sender::new(None),
            }),
        }
    }

    /// Returns the guard that says that the handler has ended. The handler's task holds it.
    pub(super) fn end_on_drop(self: &Arc<Self>) -> EndOnDrop<K> {
        EndOnDrop(self.clone())
    }

    /// Whether the handler's task is over.
    pub(super) fn has_ended(&self) -> bool {
        self.status.ended.borrow().is_some()
    }

    pub(super) fn registration(&self) -> Registration {
        Registration(self.status.clone())
    }

    /// Whether the handler gets no more calls.
    pub(super) fn is_ending(&self) -> bool {
        self.status.is_ending()
    }

    /// Adds calls, in order. A handler that is too far behind ends: then returns its limit.
    pub(super) fn push(&self, calls: impl IntoIterator<Item = Notification<K>>) -> Option<usize> {
        if self.is_ending() {
            return None;
        }
        let mut waiting = self.lock();
        // The calls of one list come at once, and even a quick handler cannot take them meanwhile.
        // So only calls from before count.
        if let Some(limit) = waiting.backlog.overflow() {
            waiting.backlog = BacklogQueue::new(Backlog::Unbounded);
            self.status.end(HandlerEnd::Overflowed(limit));
            return Some(limit);
        }
        for call in calls {
            waiting.initial += usize::from(call.is_initial());
            let cancelled_initial = waiting.backlog.push(call);
            waiting.initial -= usize::from(cancelled_initial);
        }
        self.update_synced(&waiting);
        drop(waiting);
        self.wake.notify_one();
        None
    }

    /// The whole initial list was pushed.
    pub(super) fn set_all_pushed(&self) {
        let mut waiting = self.lock();
        waiting.all_pushed = true;
        self.update_synced(&waiting);
    }

    /// Asks the handler to end after the call that is under way.
    pub(super) fn stop(&self) {
        self.status.end(HandlerEnd::Stopped);
    }

    /// The number of calls that wait.
    pub(super) fn len(&self) -> usize {
        self.lock().backlog.len()
    }

    fn lock(&self) -> MutexGuard<'_, Calls<K>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update_synced(&self, waiting: &Calls<K>) {
        if waiting.all_pushed && waiting.initial == 0 && !self.is_ending() {
            self.status.synced.send_if_modified(|synced| !std::mem::replace(synced, true));
        }
    }

    async fn next(&self) -> Notification<K> {
        loop {
            // Bound first: the lock must not be held across the await.
            let call = self.lock().backlog.pop();
            match call {
                Some(call) => return call,
                None => self.wake.notified().await,
            }
        }
    }

    fn finished(&self, was_initial: bool) {
        if was_initial {
            let mut waiting = self.lock();
            waiting.initial -= 1;
            self.update_synced(&waiting);
        }
    }
}

/// Reports the end of the task, however it ended.
pub(super) struct EndOnDrop<K: Send + Sync + 'static>(Arc<HandlerQueue<K>>);

impl<K: Send + Sync + 'static> Drop for EndOnDrop<K> {
    fn drop(&mut self) {
        // An aborted task gave no reason.
        self.0.status.end(HandlerEnd::Stopped);
        self.0.lock().backlog = BacklogQueue::new(Backlog::Unbounded);
        let reason = self.0.status.ending.borrow().clone();
        self.0.status.ended.send_replace(reason);
    }
}

/// Makes the calls of one handler until it ends. `end` is an argument because a task may be dropped
/// before it runs for the first time. Reports a panic.
pub(super) async fn drive<K, H>(end: EndOnDrop<K>, mut handler: H, observers: Observers)
where
    K: Send + Sync + 'static,
    H: EventHandler<K>,
{
    let queue = end.0.clone();
    let mut ending = queue.status.ending.subscribe();
    loop {
        let call = tokio::select! {
            biased;
            _ = ending.wait_for(Option::is_some) => break,
            call = queue.next() => call,
        };
        let was_initial = call.is_initial();
        let made = async {
            match call {
                Notification::Add { object, is_in_initial_list } => handler.on_add(object, is_in_initial_list).await,
                Notification::Update { old, new } => handler.on_update(old, new).await,
                Notification::Delete(deleted) => handler.on_delete(deleted).await,
            }
        };
        if let Err(panic) = AssertUnwindSafe(made).catch_unwind().await {
            queue.status.end(HandlerEnd::Panicked(panic_message(&*panic)));
            break;
        }
        queue.finished(was_initial);
        // A handler that never waits would keep its thread as long as there are changes.
        consume_budget().await;
    }
    let reason = queue.status.ending.borrow().clone();
    drop(end);
    if let Some(HandlerEnd::Panicked(message)) = reason {
        observers.report(&ReflectorError::HandlerPanicked(message));
    }
}
