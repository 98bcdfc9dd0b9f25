//! A value that changes, and those who wait for it: tokio's `sync::watch`, but for one thing.
//!
//! Who waits is woken in the order in which the waiting began. tokio spreads its waiters over several lists, by chance, to save contention,
//! and then no seed decides who goes first: a run could not be played again.

use std::{
    ops::Deref,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::sync::Notify;

/// The sender is gone: there will be no other value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the value will not change any more")]
pub struct Closed;

#[derive(Debug)]
struct Shared<T> {
    /// With the number of its changes.
    value: RwLock<(T, u64)>,
    changed: Notify,
    closed: AtomicBool,
}

impl<T> Shared<T> {
    fn read(&self) -> RwLockReadGuard<'_, (T, u64)> {
        self.value.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The one who changes the value.
#[derive(Debug)]
pub struct Sender<T>(Arc<Shared<T>>);

/// One who waits for its changes. A clone has seen what this one has.
#[derive(Debug)]
pub struct Receiver<T> {
    shared: Arc<Shared<T>>,
    seen: u64,
}

/// The value, which does not change while this lives; not to be held across an await.
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
    /// A value that nobody waits for yet.
    pub fn new(value: T) -> Self {
        let (value, changed, closed) = (RwLock::new((value, 0)), Notify::new(), AtomicBool::new(false));
        Self(Arc::new(Shared { value, changed, closed }))
    }

    /// The value now.
    pub fn borrow(&self) -> Ref<'_, T> {
        Ref(self.0.read())
    }

    /// Puts another value in its place, and gives the one before.
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

    /// Changes the value where `change` says so, and tells whether it did.
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

    /// Waits for the changes after this one.
    pub fn subscribe(&self) -> Receiver<T> {
        let seen = self.0.read().1;
        Receiver { shared: self.0.clone(), seen }
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
        Self { shared: self.shared.clone(), seen: self.seen }
    }
}

impl<T> Receiver<T> {
    /// The value now. It does not count as seen.
    pub fn borrow(&self) -> Ref<'_, T> {
        Ref(self.shared.read())
    }

    /// What has changed until now counts as seen.
    pub fn mark_unchanged(&mut self) {
        self.seen = self.shared.read().1;
    }

    /// Waits for a change that was not seen. Cancel-safe.
    ///
    /// # Errors
    /// [`Closed`] where there will be none.
    pub async fn changed(&mut self) -> Result<(), Closed> {
        loop {
            // From here on a change is not missed.
            let changed = self.shared.changed.notified();
            let closed = self.shared.closed.load(Ordering::SeqCst);
            let now = self.shared.read().1;
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

    /// Waits for a value that fits, which it may already. Cancel-safe.
    ///
    /// # Errors
    /// [`Closed`] where it never will.
    pub async fn wait_for(&mut self, mut fits: impl FnMut(&T) -> bool) -> Result<T, Closed>
    where
        T: Clone,
    {
        loop {
            {
                let value = self.shared.read();
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
    async fn who_waits_is_woken_in_the_order_of_waiting() {
        let (sender, order) = (Sender::new(0), Arc::new(Mutex::new(Vec::new())));
        let mut waiting = tokio::task::JoinSet::new();
        for i in 0..50 {
            let (mut receiver, order) = (sender.subscribe(), order.clone());
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
    async fn a_change_before_the_wait_counts_and_is_seen_once() {
        let sender = Sender::new(0);
        let mut receiver = sender.subscribe();
        assert_eq!(sender.send_replace(1), 0);
        assert!(!sender.send_if_modified(|_| false));
        assert_eq!(receiver.changed().await, Ok(()));
        drop(sender);
        assert_eq!(receiver.changed().await, Err(Closed));
    }

    #[tokio::test]
    async fn a_value_that_came_before_the_end_is_found() {
        let sender = Sender::new(1);
        let mut receiver = sender.subscribe();
        drop(sender);
        assert_eq!(receiver.wait_for(|value| *value == 1).await, Ok(1));
        assert!(receiver.wait_for(|value| *value == 2).await.is_err());
    }
}
