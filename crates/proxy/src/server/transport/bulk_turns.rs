//! Turns at sending what does not fit into one pass.
//!
//! The hazard is a thousand subscribers that resume at once, each with megabytes of history to
//! send. Every one of them is a task that is always ready, and an event for anybody else waits
//! behind all of them. So a connection that has more to send after a pass needs a turn for the
//! next one. A few connections have one at a time; the others are not scheduled. Addresses take
//! turns, and then the connections of an address. A connection that sends what has just happened
//! needs none.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use futures::task::AtomicWaker;

use crate::fanout::{Holder, fair_queue::FairQueue};

/// The turns of one process.
pub struct BulkTurns(Mutex<State>);

struct State {
    /// Nothing is queued while any is free.
    free: usize,
    queue: FairQueue<Arc<Waiting>>,
}

#[derive(Default)]
struct Waiting {
    is_granted: AtomicBool,
    waker: AtomicWaker,
}

/// The turns of one connection.
pub struct BulkTurn {
    turns: Arc<BulkTurns>,
    holder: Holder,
    place: Place,
}

enum Place {
    /// It neither has a turn nor waits for one.
    Idle,
    /// It waits, under this number.
    Queued(u64, Arc<Waiting>),
    /// It has a turn.
    Turn,
}

impl BulkTurns {
    /// As many turns at a time.
    pub fn new(turns_max: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State { free: turns_max.max(1), queue: FairQueue::default() })))
    }

    /// Twice as many turns at a time as there are threads, so that no thread waits for one.
    pub fn by_threads() -> Arc<Self> {
        Self::new(2 * std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// The turns of a connection.
    pub fn of(self: &Arc<Self>, holder: Holder) -> BulkTurn {
        BulkTurn { turns: self.clone(), holder, place: Place::Idle }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self) {
        let mut state = self.lock();
        match state.queue.pop(|_| true, |_| true) {
            None => state.free += 1,
            Some((_, next)) => {
                next.is_granted.store(true, Ordering::Release);
                drop(state);
                next.waker.wake();
            }
        }
    }
}

impl BulkTurn {
    /// Begins a turn, or continues the one that was begun. The task is woken when it can begin.
    pub fn poll_begin(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &self.place {
            Place::Turn => return Poll::Ready(()),
            Place::Queued(_, waiting) => {
                waiting.waker.register(cx.waker());
                if !waiting.is_granted.load(Ordering::Acquire) {
                    return Poll::Pending;
                }
                self.place = Place::Turn;
                return Poll::Ready(());
            }
            Place::Idle => {}
        }
        let mut state = self.turns.lock();
        if state.free > 0 {
            state.free -= 1;
            self.place = Place::Turn;
            return Poll::Ready(());
        }
        let waiting = Arc::new(Waiting::default());
        waiting.waker.register(cx.waker());
        let number = state.queue.push(Some(self.holder), waiting.clone());
        self.place = Place::Queued(number, waiting);
        Poll::Pending
    }

    /// Ends the turn, or the wait for one.
    pub fn end(&mut self) {
        match std::mem::replace(&mut self.place, Place::Idle) {
            Place::Idle => {}
            Place::Turn => self.turns.give_back(),
            Place::Queued(number, waiting) => {
                self.turns.lock().queue.remove(Some(self.holder), number);
                // It may have been granted before it was removed.
                if waiting.is_granted.load(Ordering::Acquire) {
                    self.turns.give_back();
                }
            }
        }
    }
}

impl Drop for BulkTurn {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use futures::task::noop_waker;

    use super::*;

    fn connection(turns: &Arc<BulkTurns>, number: u64, last_byte: u8) -> BulkTurn {
        turns.of(Holder::new(number, Some(IpAddr::from([127, 0, 0, last_byte]))))
    }

    fn begins(turn: &mut BulkTurn) -> bool {
        turn.poll_begin(&mut Context::from_waker(&noop_waker())).is_ready()
    }

    #[test]
    fn addresses_take_turns_at_sending_in_bulk() {
        let turns = BulkTurns::new(1);
        let mut many: Vec<_> = (0..3).map(|number| connection(&turns, number, 1)).collect();
        assert!(begins(&mut many[0]) && !begins(&mut many[1]) && !begins(&mut many[2]));
        let mut other = connection(&turns, 9, 2);
        assert!(!begins(&mut other));
        many[0].end();
        assert!(begins(&mut many[1]) && !begins(&mut many[2]) && !begins(&mut other));
        assert!(!begins(&mut many[0]), "it waits again, behind the others");
        many[1].end();
        assert!(begins(&mut other), "the next address");
        other.end();
        assert!(begins(&mut many[2]) && !begins(&mut many[0]));
    }

    #[test]
    fn connections_that_close_take_no_turn_with_them() {
        let turns = BulkTurns::new(1);
        let mut last = connection(&turns, 4, 2);
        let [mut begun, mut granted, mut queued] = [1, 2, 3].map(|number| connection(&turns, number, 1));
        assert!(begins(&mut begun) && !begins(&mut granted) && !begins(&mut queued));
        drop(begun);
        drop(granted);
        assert!(begins(&mut queued));
        assert!(!begins(&mut last));
        drop(queued);
        assert!(begins(&mut last));
        last.end();
        assert_eq!(turns.lock().free, 1);
    }
}
