//! The deadlines of all streams of one connection, behind one timer.
//!
//! A timer per stream would be reset with every message. Here an entry is never moved: when it
//! expires, its owner checks whether something is really due, and otherwise adds a later entry.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::time::{Instant, Sleep, sleep_until};

/// Deadlines, each with the number of its owner.
#[derive(Default)]
pub struct Deadlines {
    heap: BinaryHeap<Reverse<(Instant, u32)>>,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Deadlines {
    /// Adds a deadline.
    pub fn push(&mut self, at: Instant, owner: u32) {
        self.heap.push(Reverse((at, owner)));
    }

    /// Returns the owner of the next expired entry. `Pending` wakes the task when one expires.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<u32> {
        let Some(Reverse((first, owner))) = self.heap.peek().copied() else { return Poll::Pending };
        while first > Instant::now() {
            let sleep = self.sleep.get_or_insert_with(|| Box::pin(sleep_until(first)));
            if first < sleep.deadline() || sleep.is_elapsed() {
                sleep.as_mut().reset(first);
            }
            if sleep.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
        self.heap.pop();
        Poll::Ready(owner)
    }

    /// Drops the entries of owners that are gone, once those are the majority.
    pub fn remove_dead(&mut self, live: usize, is_live: impl Fn(u32) -> bool) {
        if self.heap.len() > 2 * live + 16 {
            self.heap.retain(|Reverse((_, owner))| is_live(*owner));
            self.heap.shrink_to_fit();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, time::Duration};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn owners_are_returned_in_the_order_of_their_deadlines() {
        let start = Instant::now();
        let mut deadlines = Deadlines::default();
        for (seconds, owner) in [(30, 1), (10, 2), (20, 3)] {
            deadlines.push(start + Duration::from_secs(seconds), owner);
        }
        for (seconds, owner) in [(10, 2), (20, 3)] {
            assert_eq!(poll_fn(|cx| deadlines.poll_next(cx)).await, owner);
            assert_eq!(start.elapsed().as_secs(), seconds);
        }
        // Earlier than the deadline that the timer was set to.
        deadlines.push(start + Duration::from_secs(25), 4);
        assert_eq!(poll_fn(|cx| deadlines.poll_next(cx)).await, 4);
        assert_eq!(poll_fn(|cx| deadlines.poll_next(cx)).await, 1);
        assert_eq!(start.elapsed().as_secs(), 30);
    }

    #[test]
    fn entries_of_dead_owners_are_removed() {
        let mut deadlines = Deadlines::default();
        for owner in 0..1000 {
            deadlines.push(Instant::now(), owner);
            deadlines.remove_dead(1, |live| live == owner);
        }
        assert!(deadlines.heap.len() <= 18);
    }
}
