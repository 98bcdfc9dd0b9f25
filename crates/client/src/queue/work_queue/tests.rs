use std::{
    pin::pin,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    task::Poll,
};

use futures::{FutureExt, future::join_all, poll};
use tokio::{sync::Semaphore, time::advance};

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn queue(items: &[&'static str]) -> WorkQueue<&'static str> {
    let queue = WorkQueue::new();
    for item in items {
        queue.add(*item);
    }
    queue
}

/// The next item, if there is one now.
fn try_get(queue: &WorkQueue<&'static str>) -> Option<WorkItem<&'static str>> {
    queue.get().now_or_never().flatten()
}

/// Takes and finishes all items that are queued now.
fn take_all(queue: &WorkQueue<&'static str>) -> Vec<&'static str> {
    std::iter::from_fn(|| try_get(queue).map(|item| *item)).collect()
}

#[tokio::test]
async fn items_come_in_the_order_in_which_they_were_added() {
    let queue = queue(&["c", "a", "b"]);
    assert_eq!(queue.len(), 3);
    assert_eq!(take_all(&queue), ["c", "a", "b"]);
    assert!(queue.is_empty());
}

#[tokio::test]
async fn an_item_that_is_added_several_times_is_processed_once() {
    let queue = queue(&["a", "b", "a", "a"]);
    assert_eq!(queue.len(), 2);
    assert_eq!(take_all(&queue), ["a", "b"]);
}

#[tokio::test]
async fn an_item_that_is_added_while_it_is_processed_is_queued_again_once_it_is_done() {
    let queue = queue(&["a"]);
    let item = try_get(&queue).unwrap();
    queue.add("a");
    queue.add("a");
    assert!(try_get(&queue).is_none(), "two workers must not process the same item");
    assert_eq!(queue.len(), 0);
    item.done();
    assert_eq!(take_all(&queue), ["a"]);
}

#[tokio::test]
async fn a_finished_item_is_not_queued_again_by_itself() {
    let queue = queue(&["a"]);
    try_get(&queue).unwrap().done();
    assert!(queue.is_empty() && try_get(&queue).is_none());
    queue.add("a");
    assert_eq!(take_all(&queue), ["a"]);
}

#[tokio::test]
async fn a_worker_that_panics_leaves_its_item_done() {
    let queue = queue(&["a"]);
    let worker = tokio::spawn({
        let queue = queue.clone();
        async move {
            let _item = queue.get().await;
            queue.add("a");
            panic!("worker");
        }
    });
    assert!(worker.await.unwrap_err().is_panic());
    assert_eq!(take_all(&queue), ["a"]);
}

#[tokio::test]
async fn a_waiting_worker_gets_an_item_when_it_is_added() {
    let queue = queue(&[]);
    let mut get = pin!(queue.get());
    assert!(poll!(&mut get).is_pending());
    queue.add("a");
    assert_eq!(*get.await.unwrap(), "a");
}

#[tokio::test]
async fn a_waiting_worker_gets_the_item_that_was_added_while_it_was_processed() {
    let queue = queue(&["a"]);
    let item = try_get(&queue).unwrap();
    queue.add("a");
    let mut get = pin!(queue.get());
    assert!(poll!(&mut get).is_pending());
    drop(item);
    assert_eq!(*get.await.unwrap(), "a");
}

#[tokio::test]
async fn every_waiting_worker_gets_an_item() {
    let queue = queue(&[]);
    let workers: Vec<_> = (0..3)
        .map(|_| {
            let queue = queue.clone();
            tokio::spawn(async move { queue.get().await })
        })
        .collect();
    tokio::task::yield_now().await;
    for item in ["a", "b", "c"] {
        queue.add(item);
    }
    let mut items: Vec<_> = join_all(workers).await.into_iter().map(|item| *item.unwrap().unwrap()).collect();
    items.sort_unstable();
    assert_eq!(items, ["a", "b", "c"]);
}

#[tokio::test]
async fn a_cancelled_wait_loses_no_item() {
    let queue = queue(&[]);
    let mut first = Box::pin(queue.get());
    let mut second = pin!(queue.get());
    assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending());
    queue.add("a");
    drop(first);
    assert_eq!(*second.await.unwrap(), "a");
}

#[tokio::test]
async fn two_items_that_come_before_two_workers_wait_wake_both() {
    let queue = queue(&[]);
    let mut first = pin!(queue.get());
    let mut second = pin!(queue.get());
    assert!(poll!(&mut first).is_pending());
    queue.add("a");
    queue.add("b");
    let Poll::Ready(Some(taken)) = poll!(&mut second) else { panic!("an item is queued") };
    assert_eq!((*taken, *first.await.unwrap()), ("a", "b"));
}

#[tokio::test(start_paused = true)]
async fn a_delayed_item_is_queued_when_its_delay_has_passed() {
    let queue = queue(&[]);
    queue.add_after("a", SECOND);
    advance(SECOND - Duration::from_millis(1)).await;
    assert_eq!(queue.len(), 0);
    advance(Duration::from_millis(1)).await;
    assert_eq!(queue.len(), 1);
    assert_eq!(take_all(&queue), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn a_waiting_worker_gets_a_delayed_item_when_it_is_due() {
    let queue = queue(&[]);
    let start = Instant::now();
    queue.add_after("a", SECOND);
    assert_eq!(*queue.get().await.unwrap(), "a");
    assert!(start.elapsed() >= SECOND);
}

#[tokio::test(start_paused = true)]
async fn delayed_items_come_in_the_order_in_which_they_are_due() {
    let queue = queue(&[]);
    queue.add_after("third", SECOND * 3);
    queue.add_after("first", SECOND);
    queue.add_after("second", SECOND * 2);
    queue.add_after("also second", SECOND * 2);
    let mut items = Vec::new();
    for _ in 0..4 {
        items.push(*queue.get().await.unwrap());
    }
    assert_eq!(items, ["first", "second", "also second", "third"]);
}

#[tokio::test(start_paused = true)]
async fn an_item_that_is_delayed_twice_comes_once_at_the_earlier_time() {
    for delays in [[SECOND, SECOND * 60], [SECOND * 60, SECOND]] {
        let queue = queue(&[]);
        for delay in delays {
            queue.add_after("a", delay);
        }
        advance(SECOND).await;
        assert_eq!(take_all(&queue), ["a"]);
        advance(SECOND * 120).await;
        assert!(queue.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiting_worker_notices_a_shorter_delay() {
    let queue = queue(&[]);
    queue.add_after("late", SECOND * 3600);
    let start = Instant::now();
    let mut get = pin!(queue.get());
    assert!(poll!(&mut get).is_pending());
    queue.add_after("early", SECOND);
    assert_eq!(*get.await.unwrap(), "early");
    assert!(start.elapsed() < SECOND * 3600);
}

#[tokio::test(start_paused = true)]
async fn a_delayed_item_that_is_queued_already_is_processed_once() {
    let queue = queue(&["a"]);
    queue.add_after("a", SECOND);
    advance(SECOND).await;
    assert_eq!(take_all(&queue), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn adding_a_delayed_item_now_does_not_cancel_its_delay() {
    let queue = queue(&[]);
    queue.add_after("a", SECOND);
    queue.add("a");
    assert_eq!(take_all(&queue), ["a"]);
    advance(SECOND).await;
    assert_eq!(take_all(&queue), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn a_delayed_item_that_is_due_while_it_is_processed_is_queued_again() {
    let queue = queue(&["a"]);
    let item = try_get(&queue).unwrap();
    queue.add_after("a", SECOND);
    advance(SECOND).await;
    assert!(try_get(&queue).is_none());
    drop(item);
    assert_eq!(take_all(&queue), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn a_delay_of_zero_queues_at_once_and_an_endless_one_never() {
    let queue = queue(&[]);
    queue.add_after("never", Duration::MAX);
    queue.add_after("now", Duration::ZERO);
    assert_eq!(take_all(&queue), ["now"]);
}

#[tokio::test(start_paused = true)]
async fn retries_are_delayed_by_the_rate_limiter_until_forgotten() {
    let queue = queue(&[]);
    let start = Instant::now();
    let mut delays = Vec::new();
    for _ in 0..3 {
        let before = start.elapsed();
        queue.add_rate_limited("a");
        drop(queue.get().await);
        delays.push((start.elapsed() - before).as_millis());
    }
    assert_eq!(delays, [5, 10, 20]);
    assert_eq!(queue.num_requeues(&"a"), 3);
    queue.forget(&"a");
    assert_eq!(queue.num_requeues(&"a"), 0);
}

#[tokio::test]
async fn a_shut_down_queue_ignores_new_items() {
    let queue = queue(&["a"]);
    queue.shut_down();
    queue.add("b");
    queue.add_after("c", Duration::ZERO);
    queue.add_rate_limited("d");
    assert!(queue.is_shutting_down());
    assert_eq!(queue.len(), 1);
}

#[tokio::test]
async fn workers_finish_the_queue_after_a_shutdown_and_then_end() {
    let queue = queue(&["a", "b"]);
    queue.shut_down();
    assert_eq!(*queue.get().await.unwrap(), "a");
    assert_eq!(*queue.get().await.unwrap(), "b");
    assert!(queue.get().await.is_none());
}

#[tokio::test]
async fn a_shutdown_ends_waiting_workers() {
    let queue = queue(&[]);
    let mut first = pin!(queue.get());
    let mut second = pin!(queue.get());
    assert!(poll!(&mut first).is_pending() && poll!(&mut second).is_pending());
    queue.shut_down();
    assert!(first.await.is_none() && second.await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_drops_delayed_items_that_are_not_due() {
    let queue = queue(&[]);
    queue.add_after("due", SECOND);
    queue.add_after("late", SECOND * 2);
    advance(SECOND).await;
    queue.shut_down();
    advance(SECOND * 60).await;
    assert_eq!(take_all(&queue), ["due"]);
    assert!(queue.get().await.is_none());
}

#[tokio::test]
async fn a_drain_waits_until_queued_and_processed_items_are_done() {
    let queue = queue(&["a", "b"]);
    let item = try_get(&queue).unwrap();
    let mut drain = pin!(queue.shut_down_with_drain());
    assert!(poll!(&mut drain).is_pending());
    drop(item);
    assert!(poll!(&mut drain).is_pending(), "b is still queued");
    let item = queue.get().await.unwrap();
    assert!(poll!(&mut drain).is_pending(), "b is still processed");
    drop(item);
    drain.await;
    assert!(queue.get().await.is_none());
}

#[tokio::test]
async fn a_drain_waits_for_an_item_that_is_to_be_processed_again() {
    let queue = queue(&["a"]);
    let item = try_get(&queue).unwrap();
    queue.add("a");
    let mut drain = pin!(queue.shut_down_with_drain());
    assert!(poll!(&mut drain).is_pending());
    drop(item);
    assert!(poll!(&mut drain).is_pending());
    queue.get().await.unwrap().done();
    drain.await;
}

#[tokio::test]
async fn a_drain_of_an_idle_queue_ends_at_once() {
    queue(&[]).shut_down_with_drain().await;
}

#[tokio::test]
async fn a_shutdown_stops_a_drain_that_waits() {
    let queue = queue(&["a"]);
    let item = try_get(&queue).unwrap();
    let mut drain = pin!(queue.shut_down_with_drain());
    assert!(poll!(&mut drain).is_pending());
    queue.shut_down();
    drain.await;
    drop(item);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn parallel_workers_process_every_item_and_none_twice_at_a_time() {
    const ITEMS: usize = 50;
    let queue: WorkQueue<usize> = WorkQueue::new();
    let counts: Arc<[AtomicUsize; ITEMS]> = Arc::new([const { AtomicUsize::new(0) }; ITEMS]);
    let busy: Arc<[AtomicBool; ITEMS]> = Arc::new([const { AtomicBool::new(false) }; ITEMS]);
    let retried = Arc::new(Semaphore::new(0));
    let workers: Vec<_> = (0..8)
        .map(|_| {
            let queue = queue.clone();
            let counts = counts.clone();
            let busy = busy.clone();
            let retried = retried.clone();
            tokio::spawn(async move {
                while let Some(item) = queue.get().await {
                    assert!(!busy[*item].swap(true, Ordering::SeqCst), "two workers have item {}", *item);
                    match counts[*item].fetch_add(1, Ordering::SeqCst) {
                        0 => queue.add(*item),
                        1 => retried.add_permits(1),
                        _ => {}
                    }
                    tokio::task::yield_now().await;
                    busy[*item].store(false, Ordering::SeqCst);
                }
            })
        })
        .collect();
    for round in 0..20 {
        for item in 0..ITEMS {
            if (item + round) % 3 == 0 {
                queue.add_after(item, Duration::from_micros(item as u64));
            } else {
                queue.add(item);
            }
        }
        tokio::task::yield_now().await;
    }
    // The queue ignores retries after its shutdown, so each item must have had its retry.
    drop(retried.acquire_many(ITEMS as u32).await.unwrap());
    queue.shut_down_with_drain().await;
    assert!(queue.is_empty() && busy.iter().all(|busy| !busy.load(Ordering::SeqCst)));
    for worker in join_all(workers).await {
        worker.unwrap();
    }
}
