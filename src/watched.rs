//! A value that changes, and those who wait for it.
//!
//! As tokio's `watch`, but for one thing: who waits is woken in the order in which the waiting began. tokio's spreads its waiters over
//! lists by chance, to save contention, and then no seed decides who goes first.

use std::sync::{Mutex, PoisonError};

use tokio::sync::{Notify, futures::Notified};

/// A value that changes.
#[derive(Debug, Default)]
pub struct Watched<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T: Copy> Watched<T> {
    /// A value that nobody waits for yet.
    pub fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Notify::new() }
    }

    /// The value now.
    pub fn get(&self) -> T {
        *self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes it and wakes everybody.
    pub fn set(&self, value: T) {
        *self.value.lock().unwrap_or_else(PoisonError::into_inner) = value;
        self.changed.notify_waiters();
    }

    /// Completes with the next change after this call, whenever it is first polled.
    pub fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Waits until the value fits, which it may already.
    pub async fn wait_for(&self, fits: impl Fn(T) -> bool) -> T {
        loop {
            let changed = self.changed();
            let value = self.get();
            if fits(value) {
                return value;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn who_waits_is_woken_in_the_order_of_waiting() {
        let (watched, order) = (Arc::new(Watched::new(0)), Arc::new(Mutex::new(Vec::new())));
        let mut waiting = tokio::task::JoinSet::new();
        for i in 0..50 {
            let (watched, order) = (watched.clone(), order.clone());
            waiting.spawn(async move {
                watched.wait_for(|value| value >= 2).await;
                order.lock().unwrap().push(i);
            });
        }
        tokio::task::yield_now().await;
        watched.set(1);
        tokio::task::yield_now().await;
        watched.set(2);
        waiting.join_all().await;
        assert_eq!(*order.lock().unwrap(), (0..50).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn a_change_between_the_call_and_the_first_poll_counts() {
        let watched = Watched::new(0);
        let changed = watched.changed();
        watched.set(1);
        changed.await;
    }
}
