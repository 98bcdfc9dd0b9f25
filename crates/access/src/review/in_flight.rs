//! One review for all who ask the same at the same time.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use futures::{
    FutureExt,
    future::{BoxFuture, Shared, WeakShared},
};

/// The answer that several wait for.
pub(super) type Flight<T> = Shared<BoxFuture<'static, T>>;

/// The reviews in flight, by key. It holds no more keys than there are callers and tasks that wait:
/// an answer that nothing waits for is given up.
pub(super) struct Flights<K, T: Clone>(Arc<Mutex<InFlight<K, T>>>);

struct InFlight<K, T: Clone> {
    under_way: HashMap<K, (u64, WeakShared<BoxFuture<'static, T>>)>,
    last: u64,
}

/// Removes a flight when it ends, however it ends.
struct Landing<K: Hash + Eq, T: Clone> {
    flights: Arc<Mutex<InFlight<K, T>>>,
    key: K,
    number: u64,
}

impl<K, T: Clone> Default for Flights<K, T> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(InFlight { under_way: HashMap::new(), last: 0 })))
    }
}

impl<K, T> Flights<K, T>
where
    K: Hash + Eq + Copy + Send + 'static,
    T: Clone + Send + Sync + 'static,
{
    /// Joins the flight of this key, or starts one with `ask`. Returns whether it has started one.
    /// A flight continues as long as something waits for it.
    pub(super) fn join(&self, key: K, ask: impl Future<Output = T> + Send + 'static) -> (Flight<T>, bool) {
        let mut state = lock(&self.0);
        if let Some(flight) = state.under_way.get(&key).and_then(|(_, flight)| flight.upgrade()) {
            return (flight, false);
        }
        state.last += 1;
        let landing = Landing { flights: self.0.clone(), key, number: state.last };
        let flight = async move {
            let _landing = landing;
            ask.await
        };
        let flight = flight.boxed().shared();
        if let Some(weak) = flight.downgrade() {
            let number = state.last;
            state.under_way.insert(key, (number, weak));
        }
        (flight, true)
    }
}

fn lock<K, T: Clone>(state: &Mutex<InFlight<K, T>>) -> MutexGuard<'_, InFlight<K, T>> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<K: Hash + Eq, T: Clone> Drop for Landing<K, T> {
    fn drop(&mut self) {
        let mut state = lock(&self.flights);
        if state.under_way.get(&self.key).is_some_and(|(number, _)| *number == self.number) {
            state.under_way.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use tokio::{task::yield_now, time::sleep};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn counting(asked: &Arc<AtomicUsize>) -> impl Future<Output = usize> + Send + 'static {
        let asked = asked.clone();
        async move {
            sleep(SECOND).await;
            asked.fetch_add(1, Ordering::Relaxed)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn all_who_ask_the_same_share_one_answer() {
        let flights = Arc::new(Flights::default());
        let asked = Arc::new(AtomicUsize::new(0));
        let join = |key| {
            let flights = flights.clone();
            let ask = counting(&asked);
            tokio::spawn(async move { flights.join(key, ask).0.await })
        };
        let first = join(1);
        let second = join(1);
        let other = join(2);
        yield_now().await;
        // The others continue without the first caller.
        first.abort();
        assert!(second.await.is_ok() && other.await.is_ok());
        assert_eq!(asked.load(Ordering::Relaxed), 2);
        join(1).await.unwrap();
        assert_eq!(asked.load(Ordering::Relaxed), 3, "a later one asks again");
        assert!(lock(&flights.0).under_way.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_nothing_waits_for_is_given_up() {
        let flights = Flights::default();
        let asked = Arc::new(AtomicUsize::new(0));
        assert!(tokio::time::timeout(SECOND / 2, flights.join(1, counting(&asked)).0).await.is_err());
        assert!(lock(&flights.0).under_way.is_empty());
        sleep(2 * SECOND).await;
        assert_eq!(asked.load(Ordering::Relaxed), 0);
    }
}
