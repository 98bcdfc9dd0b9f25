//! A inner value that notifies its receivers of changes, like tokio's `sync::watch`, with one
//! difference: receivers wake in the order in which they started to wait.
//!
//! tokio spreads waiters over several lists at random to reduce contention. The random order would
//! make a simulation run impossible to replay from its seed.

use std::{
    ops::Deref,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::sync::Notify;

/// The sender was dropped, so the value will not change again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the value will not change again")]
pub struct Closed;

#[derive(Debug)]
struct Inner<T> {
    /// The value, and the number of its changes.
    value: RwLock<(T, u64)>,
    changed: Notify,
    closed: AtomicBool,
}

impl<T> Inner<T> {
    fn read(&self) -> RwLockReadGuard<'_, (T, u64)> {
        self.value.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Changes the value.
#[derive(Debug)]
pub struct Sender<T>(Arc<Inner<T>>);

/// Waits for changes of the value. A clone has seen the same changes.
#[derive(Debug)]
pub struct Receiver<T> {
    inner: Arc<Inner<T>>,
    seen: u64,
}

/// A read lock on the value. It must not be held across an await.
pub struct Ref<'a, T>(RwLockReadGuard<'a, (T, u64)>);

impl<T> Deref for Ref<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.0
    }
}

impl<T: Default> Default for Sender<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Sender<T> {
    /// Creates a value without receivers.
    pub fn new(value: T) -> Self {
        let value = RwLock::new((value, 0));
        let changed = Notify::new();
        let closed = AtomicBool::new(false);
        Self(Arc::new(Inner { value, changed, closed }))
    }

    /// The current value.
    pub fn borrow(&self) -> Ref<'_, T> {
        Ref(self.0.read())
    }

    /// Replaces the value, and returns the old one.
    pub fn send_replace(&self, value: T) -> T {
        let mut before = value;
        self.send_modify(|now| std::mem::swap(now, &mut before));
        before
    }

    /// Changes the value.
    pub fn send_modify(&self, change: impl FnOnce(&mut T)) {
        self.send_if_modified(|value| {
            change(value);
            true
        });
    }

    /// Changes the value. `change` returns whether it modified the value, and so does this
    /// function.
    pub fn send_if_modified(&self, change: impl FnOnce(&mut T) -> bool) -> bool {
        let modified = {
            let mut value = self.0.value.write().unwrap_or_else(PoisonError::into_inner);
            let modified = change(&mut value.0);
            value.1 += u64::from(modified);
            modified
        };
        if modified {
            self.0.changed.notify_waiters();
        }
        modified
    }

    /// Creates a receiver that waits for changes after the current value.
    pub fn subscribe(&self) -> Receiver<T> {
        let seen = self.0.read().1;
        Receiver { inner: self.0.clone(), seen }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.closed.store(true, Ordering::SeqCst);
        self.0.changed.notify_waiters();
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), seen: self.seen }
    }
}

impl<T> Receiver<T> {
    /// The current value, without marking it as seen.
    pub fn borrow(&self) -> Ref<'_, T> {
        Ref(self.inner.read())
    }

    /// Marks the current value as seen.
    pub fn mark_unchanged(&mut self) {
        self.seen = self.inner.read().1;
    }

    /// Waits for an unseen change. Cancel-safe.
    ///
    /// # Errors
    /// [`Closed`] if the sender was dropped and there is no unseen change.
    pub async fn changed(&mut self) -> Result<(), Closed> {
        loop {
            // Registered before the version is read, so that no change is missed.
            let changed = self.inner.changed.notified();
            let closed = self.inner.closed.load(Ordering::SeqCst);
            let now = self.inner.read().1;
            if now != self.seen {
                self.seen = now;
                return Ok(());
            }
            if closed {
                return Err(Closed);
            }
            changed.await;
        }
    }

    /// Waits until the value satisfies `fits`, which may already be the case. Cancel-safe.
    ///
    /// # Errors
    /// [`Closed`] if the sender was dropped before the value did.
    pub async fn wait_for(&mut self, mut fits: impl FnMut(&T) -> bool) -> Result<T, Closed>
    where
        T: Clone,
    {
        loop {
            {
                let value = self.inner.read();
                if fits(&value.0) {
                    self.seen = value.1;
                    return Ok(value.0.clone());
                }
            }
            self.changed().await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[tokio::test]
    async fn receivers_wake_in_the_order_of_waiting() {
        let sender = Sender::new(0);
        let order = Arc::new(Mutex::new(Vec::new()));
        let mut waiting = tokio::task::JoinSet::new();
        for i in 0..50 {
            let mut receiver = sender.subscribe();
            let order = order.clone();
            waiting.spawn(async move {
                receiver.wait_for(|value| *value >= 2).await.unwrap();
                order.lock().unwrap().push(i);
            });
        }
        tokio::task::yield_now().await;
        sender.send_replace(1);
        tokio::task::yield_now().await;
        sender.send_replace(2);
        waiting.join_all().await;
        assert_eq!(*order.lock().unwrap(), (0..50).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn a_change_before_the_wait_is_reported_once() {
        let sender = Sender::new(0);
        let mut receiver = sender.subscribe();
        assert_eq!(sender.send_replace(1), 0);
        assert!(!sender.send_if_modified(|_| false));
        assert_eq!(receiver.changed().await, Ok(()));
        drop(sender);
        assert_eq!(receiver.changed().await, Err(Closed));
    }

    #[tokio::test]
    async fn a_value_set_before_the_sender_was_dropped_is_found() {
        let sender = Sender::new(1);
        let mut receiver = sender.subscribe();
        drop(sender);
        assert_eq!(receiver.wait_for(|value| *value == 1).await, Ok(1));
        assert!(receiver.wait_for(|value| *value == 2).await.is_err());
    }
}
