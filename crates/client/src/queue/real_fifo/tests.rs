use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
};

use futures::{FutureExt, future::join};

use super::*;
use crate::{
    queue::testing::{
        added, apply, deleted, deleted_unknown, known, object, state, state_with_undecodable, text, updated,
    },
    store::Indexer,
};

fn fifo(objects: &[(&str, u32)]) -> (RealFifo<u32>, Arc<Indexer<u32>>) {
    let known = known(objects);
    (RealFifo::new(known.clone()), known)
}

/// Pops one batch, without applying it.
fn pop(fifo: &RealFifo<u32>) -> String {
    let mut popped = String::new();
    assert!(fifo.try_pop(|deltas, _| popped = text(&deltas)), "nothing is queued");
    popped
}

fn pop_all(fifo: &RealFifo<u32>) -> Vec<String> {
    let mut popped = Vec::new();
    while fifo.try_pop(|deltas, _| popped.push(text(&deltas))) {}
    popped
}

#[test]
fn every_change_is_delivered_in_arrival_order_across_objects() {
    let (fifo, _) = fifo(&[]);
    for change in [added("a", 1), added("b", 2), updated("a", 3), deleted("b", 2), added("c", 4)] {
        fifo.apply(change);
    }
    assert_eq!(fifo.len(), 5);
    assert_eq!(pop_all(&fifo), ["Added a=1", "Added b=2", "Updated a=3", "Deleted b=2", "Added c=4"]);
    assert!(fifo.is_empty());
}

#[test]
fn a_late_change_of_a_queued_object_does_not_jump_the_line() {
    let (fifo, _) = fifo(&[]);
    for c in [added("foo", 10), added("bar", 1), added("foo", 11), added("zab", 30)] {
        fifo.apply(c);
    }
    assert_eq!(pop(&fifo), "Added foo=10");
    fifo.apply(added("foo", 14));
    assert_eq!(pop_all(&fifo), ["Added bar=1", "Added foo=11", "Added zab=30", "Added foo=14"]);
}

#[test]
fn a_double_delete_is_delivered_twice() {
    let (fifo, _) = fifo(&[]);
    for change in [deleted("a", 1), deleted("a", 1)] {
        fifo.apply(change);
    }
    assert_eq!(pop_all(&fifo), ["Deleted a=1", "Deleted a=1"]);
}

#[test]
fn the_deletion_of_an_unknown_object_is_delivered() {
    let (fifo, _) = fifo(&[]);
    fifo.apply(deleted("a", 1));
    assert_eq!(pop_all(&fifo), ["Deleted a=1"]);
}

#[test]
fn a_replacement_keeps_a_queued_delete_so_that_a_recreated_object_is_told_apart() {
    let (fifo, _) = fifo(&[("foo", 1)]);
    fifo.apply(deleted("foo", 1));
    fifo.replace(state(&[("foo", 2)]));
    assert_eq!(pop_all(&fifo), ["Deleted foo=1", "Replaced foo=2"]);
}

#[test]
fn a_replacement_delivers_missing_known_objects_as_deleted_with_their_last_known_state_first() {
    let (fifo, _) = fifo(&[("bar", 6), ("baz", 7), ("foo", 5)]);
    fifo.replace(state(&[("foo", 8), ("new", 9)]));
    assert_eq!(pop_all(&fifo), ["Gone bar=6, Gone baz=7, Replaced foo=8, Replaced new=9"]);
}

#[test]
fn a_replacement_deletes_queued_objects_with_their_last_queued_state_before_known_ones() {
    let (fifo, _) = fifo(&[("a", 5), ("z", 7)]);
    for change in [added("z", 10), added("q", 1), updated("q", 2)] {
        fifo.apply(change);
    }
    fifo.replace(state(&[]));
    assert_eq!(pop_all(&fifo), ["Added z=10", "Added q=1", "Updated q=2", "Gone z=10, Gone q=2, Gone a=5"]);
}

#[test]
fn a_replacement_adds_no_second_delete_to_a_queued_one() {
    let (fifo, _) = fifo(&[("bar", 6), ("baz", 7)]);
    fifo.apply(deleted("baz", 10));
    fifo.apply(deleted_unknown("bar", 6));
    fifo.replace(state(&[("foo", 5)]));
    assert_eq!(pop_all(&fifo), ["Deleted baz=10", "Gone bar=6", "Replaced foo=5"]);
}

#[test]
fn a_replacement_deletes_an_object_that_was_recreated_in_the_queue() {
    let (fifo, _) = fifo(&[("bar", 6)]);
    fifo.apply(deleted("bar", 6));
    fifo.apply(added("bar", 100));
    fifo.replace(state(&[]));
    assert_eq!(pop_all(&fifo), ["Deleted bar=6", "Added bar=100", "Gone bar=100"]);
}

#[test]
fn a_second_replacement_deletes_objects_of_the_first_alone() {
    let (fifo, _) = fifo(&[("baz", 7)]);
    fifo.replace(state(&[("bar", 100), ("foo", 5)]));
    fifo.replace(state(&[("foo", 5)]));
    assert_eq!(pop_all(&fifo), ["Gone baz=7, Replaced bar=100, Replaced foo=5", "Gone bar=100, Replaced foo=5"]);
}

#[test]
fn a_known_object_that_cannot_be_read_is_deleted_without_a_state() {
    struct KeysOnly;
    impl KnownObjects<u32> for KeysOnly {
        fn keys(&self) -> Vec<ObjectKey> {
            vec!["a".into()]
        }

        fn get(&self, _key: &str) -> Option<Arc<crate::Object<u32>>> {
            None
        }
    }
    let fifo = RealFifo::new(Arc::new(KeysOnly));
    fifo.resync();
    assert!(fifo.is_empty());
    fifo.replace(state(&[]));
    assert_eq!(pop_all(&fifo), ["Gone a"]);
}

#[test]
fn a_replacement_deletes_no_undecodable_objects() {
    let (fifo, _) = fifo(&[("known", 1), ("gone", 2)]);
    fifo.apply(added("queued", 3));
    fifo.replace(state_with_undecodable(&[("foo", 4)], &["known", "queued", "never-seen"]));
    assert_eq!(pop_all(&fifo), ["Added queued=3", "Gone gone=2, Replaced foo=4"]);
}

#[test]
fn a_resync_delivers_known_objects_that_have_nothing_queued() {
    let (fifo, _) = fifo(&[("a", 1), ("b", 2), ("c", 3)]);
    fifo.apply(updated("b", 6));
    fifo.resync();
    assert_eq!(pop_all(&fifo), ["Updated b=6", "Sync a=1, Sync c=3"]);
}

#[test]
fn a_resync_delivers_no_object_whose_delete_is_queued() {
    let (fifo, _) = fifo(&[("foo", 5)]);
    fifo.apply(deleted("foo", 10));
    fifo.resync();
    assert_eq!(pop_all(&fifo), ["Deleted foo=10"]);
}

#[test]
fn a_resync_without_known_objects_queues_nothing() {
    let (fifo, _) = fifo(&[]);
    fifo.resync();
    assert!(!fifo.try_pop(|_, _| ()) && !fifo.has_synced());
}

#[test]
fn a_batch_is_delivered_as_one_unit_and_counted_by_deltas() {
    let (fifo, _) = fifo(&[]);
    fifo.apply_batch(vec![added("a", 1), deleted("b", 2)]);
    fifo.apply(added("c", 3));
    assert_eq!(fifo.len(), 3);
    assert_eq!(pop(&fifo), "Added a=1, Deleted b=2");
    assert_eq!(fifo.len(), 1);
    assert_eq!(pop(&fifo), "Added c=3");
}

#[test]
fn an_empty_batch_is_no_change() {
    let (fifo, _) = fifo(&[]);
    fifo.apply_batch(Vec::new());
    assert!(fifo.is_empty() && !fifo.has_synced());
    assert!(!fifo.try_pop(|_, _| panic!("nothing is queued")));
}

#[test]
fn a_new_queue_has_not_synced() {
    assert!(!fifo(&[]).0.has_synced());
}

#[test]
fn a_change_before_any_replacement_counts_as_synced() {
    for change in [added("a", 1), updated("a", 1), deleted("a", 1)] {
        let (fifo, _) = fifo(&[]);
        fifo.apply(change);
        assert!(fifo.has_synced());
        fifo.replace(state(&[("a", 1)]));
        assert!(fifo.has_synced());
        while fifo.try_pop(|_, is_in_initial_list| assert!(!is_in_initial_list)) {}
    }
}

#[test]
fn an_empty_first_replacement_counts_as_synced_at_once() {
    let (fifo, _) = fifo(&[]);
    fifo.replace(state(&[]));
    assert!(fifo.has_synced() && fifo.is_empty());
}

#[test]
fn a_queue_has_synced_once_its_first_replacement_is_processed() {
    let (fifo, _) = fifo(&[]);
    fifo.replace(state(&[("a", 1), ("b", 2)]));
    assert!(!fifo.has_synced());
    fifo.try_pop(|_, _| assert!(!fifo.has_synced(), "not before the consumer has applied it"));
    assert!(fifo.has_synced());
}

#[test]
fn deletions_by_the_first_replacement_belong_to_the_initial_list() {
    let (fifo, _) = fifo(&[("bar", 6)]);
    fifo.replace(state(&[]));
    assert!(!fifo.has_synced());
    assert!(fifo.try_pop(|deltas, is_in_initial_list| {
        assert_eq!((text(&deltas).as_str(), is_in_initial_list), ("Gone bar=6", true));
    }));
    assert!(fifo.has_synced());
}

#[test]
fn a_resync_before_the_first_replacement_belongs_to_the_initial_list() {
    let (fifo, _) = fifo(&[("a", 1)]);
    fifo.resync();
    assert!(!fifo.has_synced());
    fifo.replace(state(&[("a", 2)]));
    for expected in ["Sync a=1", "Replaced a=2"] {
        assert!(!fifo.has_synced());
        assert!(fifo.try_pop(|deltas, is_in_initial_list| {
            assert_eq!((text(&deltas).as_str(), is_in_initial_list), (expected, true));
        }));
    }
    assert!(fifo.has_synced());
}

#[test]
fn changes_behind_the_first_replacement_are_not_in_the_initial_list() {
    let (fifo, _) = fifo(&[]);
    fifo.replace(state(&[("a", 1)]));
    fifo.apply(added("b", 2));
    fifo.replace(state(&[("c", 3)]));
    let mut initial = Vec::new();
    while fifo.try_pop(|_, is_in_initial_list| initial.push(is_in_initial_list)) {}
    assert_eq!(initial, [true, false, false]);
}

#[test]
fn an_object_in_process_is_deleted_by_a_replacement_that_lacks_it() {
    let (fifo, known) = fifo(&[]);
    fifo.apply(added("a", 1));
    fifo.try_pop(|deltas, _| {
        // The reflector relists before the consumer has stored the object.
        fifo.replace(state(&[]));
        apply(&known, &deltas);
    });
    assert_eq!(pop_all(&fifo), ["Gone a=1"]);
}

#[test]
fn an_object_whose_delete_is_in_process_is_not_deleted_again() {
    let (fifo, known) = fifo(&[("a", 1)]);
    fifo.apply(deleted("a", 1));
    fifo.try_pop(|deltas, _| {
        fifo.replace(state(&[]));
        fifo.resync();
        apply(&known, &deltas);
    });
    assert!(fifo.is_empty());
}

#[test]
fn a_resync_leaves_out_an_object_in_process() {
    let (fifo, known) = fifo(&[("a", 1), ("b", 2)]);
    fifo.apply(updated("a", 5));
    fifo.try_pop(|deltas, _| {
        fifo.resync();
        apply(&known, &deltas);
    });
    assert_eq!(pop_all(&fifo), ["Sync b=2"]);
}

#[test]
fn producers_and_readers_are_not_blocked_by_the_consumer() {
    let (fifo, _) = fifo(&[]);
    fifo.apply(added("a", 1));
    assert!(fifo.try_pop(|_, _| {
        std::thread::scope(|scope| scope.spawn(|| fifo.apply(added("b", 2))).join().unwrap());
        assert_eq!(fifo.len(), 1);
    }));
    assert_eq!(pop(&fifo), "Added b=2");
}

#[test]
fn two_consumers_never_process_at_the_same_time() {
    let (fifo, _) = fifo(&[]);
    fifo.apply(added("a", 1));
    fifo.apply(added("b", 2));
    assert!(fifo.try_pop(|_, _| assert!(!fifo.try_pop(|_, _| panic!("a second consumer")))));
    assert_eq!(pop(&fifo), "Added b=2");
}

#[test]
fn a_panic_of_the_consumer_does_not_stop_the_queue() {
    let (fifo, _) = fifo(&[]);
    fifo.replace(state(&[("a", 1)]));
    fifo.apply(added("b", 2));
    let panicked = catch_unwind(AssertUnwindSafe(|| fifo.try_pop(|_, _| panic!("consumer"))));
    assert!(panicked.is_err() && fifo.has_synced());
    assert_eq!(pop_all(&fifo), ["Added b=2"]);
}

#[tokio::test]
async fn pop_waits_for_a_change() {
    let (fifo, _) = fifo(&[]);
    let mut popped = String::new();
    {
        let mut pop = pin!(fifo.pop(|deltas, _| popped = text(&deltas)));
        assert!((&mut pop).now_or_never().is_none());
        fifo.apply(added("a", 1));
        assert!(pop.await);
    }
    assert_eq!(popped, "Added a=1");
}

#[tokio::test]
async fn a_waiting_pop_ends_when_the_queue_is_closed() {
    let (fifo, _) = fifo(&[]);
    let mut pop = pin!(fifo.pop(|_, _| panic!("nothing is queued")));
    assert!((&mut pop).now_or_never().is_none());
    fifo.close();
    assert!(!pop.await && fifo.is_closed());
}

#[tokio::test]
async fn a_closed_queue_still_delivers_its_items() {
    let (fifo, _) = fifo(&[]);
    fifo.apply(added("a", 1));
    fifo.close();
    assert!(fifo.pop(|deltas, _| assert_eq!(text(&deltas), "Added a=1")).await);
    assert!(!fifo.pop(|_, _| ()).await);
}

#[tokio::test]
async fn two_waiting_consumers_get_each_batch_once() {
    let (fifo, _) = fifo(&[]);
    let mut first = Vec::new();
    let mut second = Vec::new();
    {
        let pops = join(fifo.pop(|deltas, _| first = deltas), fifo.pop(|deltas, _| second = deltas));
        let mut pops = pin!(pops);
        assert!((&mut pops).now_or_never().is_none());
        fifo.apply(added("a", 1));
        fifo.apply(added("b", 2));
        assert_eq!(pops.await, (true, true));
    }
    first.extend(second);
    assert_eq!(text(&first), "Added a=1, Added b=2");
}

#[tokio::test]
async fn waiting_for_the_sync_ends_with_the_first_replacement_or_the_close() {
    let (fifo, _) = fifo(&[]);
    {
        let mut synced = pin!(fifo.synced());
        assert!((&mut synced).now_or_never().is_none());
        fifo.replace(state(&[("a", 1)]));
        assert!((&mut synced).now_or_never().is_none());
        fifo.try_pop(|_, _| ());
        assert!(synced.await);
    }
    let (closed, _) = self::fifo(&[]);
    closed.close();
    assert!(!closed.synced().await);
}

#[test]
fn the_queue_retains_no_object_after_its_processing() {
    let (fifo, _) = fifo(&[]);
    let object = object("a", 1);
    fifo.apply(Change::Added(object.clone()));
    assert!(fifo.try_pop(|deltas, _| drop(deltas)));
    assert_eq!(Arc::strong_count(&object), 1);
}

#[test]
fn a_consumer_beside_a_relisting_reflector_ends_with_the_last_state() {
    const NAMES: [&str; 4] = ["a", "b", "c", "d"];
    for seed in 0..200_u32 {
        let (fifo, known) = fifo(&[]);
        let last: Vec<(&str, u32)> = NAMES.into_iter().map(|name| (name, seed)).take(seed as usize % 4).collect();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for step in 0..20 {
                    let name = NAMES[(seed + step) as usize % 4];
                    match (seed / 4 + step) % 5 {
                        0 => fifo.apply(deleted(name, step)),
                        1 => fifo.replace(state(&[(name, step)])),
                        2 => fifo.resync(),
                        _ => fifo.apply(added(name, step)),
                    }
                }
                fifo.replace(state(&last));
                fifo.close();
            });
            scope.spawn(|| {
                while !(fifo.is_closed() && fifo.is_empty()) {
                    fifo.try_pop(|deltas, _| apply(&known, &deltas));
                }
            });
        });
        let stored: Vec<_> = known.list().iter().map(|object| (object.name().to_owned(), *object.value())).collect();
        let expected: Vec<_> = last.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        assert_eq!(stored, expected, "seed {seed}");
    }
}
