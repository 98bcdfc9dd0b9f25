use std::pin::pin;

use futures::FutureExt;

use super::*;
use crate::{
    queue::testing::{added, apply, deleted, deleted_unknown, known, state, state_with_undecodable, text, updated},
    store::Indexer,
};

fn fifo(objects: &[(&str, u32)]) -> (DeltaFifo<u32>, Arc<Indexer<u32>>) {
    let known = known(objects);
    (DeltaFifo::new(Some(known.clone())), known)
}

fn pop_all(fifo: &DeltaFifo<u32>) -> Vec<String> {
    let mut popped = Vec::new();
    while fifo.try_pop(|deltas, _| popped.push(text(&deltas))) {}
    popped
}

fn apply_all(fifo: &DeltaFifo<u32>, changes: impl IntoIterator<Item = Change<u32>>) {
    for change in changes {
        fifo.apply(change);
    }
}

#[test]
fn all_deltas_of_an_object_are_delivered_at_once_oldest_first() {
    let (fifo, _) = fifo(&[]);
    apply_all(&fifo, [added("a", 1), updated("a", 2), deleted("a", 3), added("a", 4)]);
    assert_eq!(fifo.len(), 1);
    assert_eq!(pop_all(&fifo), ["Added a=1, Updated a=2, Deleted a=3, Added a=4"]);
    assert!(fifo.is_empty());
}

#[test]
fn objects_come_in_the_order_in_which_they_were_first_queued() {
    let (fifo, _) = fifo(&[]);
    apply_all(&fifo, [added("foo", 10), added("bar", 1), added("foo", 11), added("zab", 30)]);
    assert!(fifo.try_pop(|deltas, _| assert_eq!(text(&deltas), "Added foo=10, Added foo=11")));
    fifo.apply(added("foo", 14));
    assert_eq!(pop_all(&fifo), ["Added bar=1", "Added zab=30", "Added foo=14"]);
}

#[test]
fn a_double_delete_is_merged_and_keeps_the_richer_state() {
    let (fifo, _) = fifo(&[("a", 1), ("b", 1)]);
    apply_all(&fifo, [deleted_unknown("a", 1), deleted("a", 2)]);
    apply_all(&fifo, [deleted("b", 2), deleted_unknown("b", 1)]);
    assert_eq!(pop_all(&fifo), ["Deleted a=2", "Deleted b=2"]);
}

#[test]
fn the_first_of_two_deletes_with_a_known_state_stays() {
    let (fifo, _) = fifo(&[("a", 1)]);
    apply_all(&fifo, [deleted("a", 1), deleted("a", 2)]);
    assert_eq!(pop_all(&fifo), ["Deleted a=1"]);
}

#[test]
fn the_second_of_two_deletes_with_an_unknown_state_stays() {
    let (fifo, _) = fifo(&[("a", 1)]);
    apply_all(&fifo, [deleted_unknown("a", 1), deleted_unknown("a", 2)]);
    assert_eq!(pop_all(&fifo), ["Gone a=2"]);
}

#[test]
fn only_deletes_that_follow_each_other_are_merged() {
    let (fifo, _) = fifo(&[("a", 1)]);
    apply_all(&fifo, [updated("a", 1), updated("a", 1), deleted("a", 2), added("a", 3), deleted("a", 3)]);
    assert_eq!(pop_all(&fifo), ["Updated a=1, Updated a=1, Deleted a=2, Added a=3, Deleted a=3"]);
}

#[test]
fn the_deletion_of_an_object_that_is_neither_known_nor_queued_is_ignored() {
    let (fifo, _) = fifo(&[("known", 1)]);
    apply_all(&fifo, [added("queued", 2), deleted("queued", 2), deleted("known", 1), deleted("unknown", 3)]);
    assert_eq!(pop_all(&fifo), ["Added queued=2, Deleted queued=2", "Deleted known=1"]);
}

#[test]
fn without_known_objects_only_queued_objects_can_be_deleted() {
    let fifo = DeltaFifo::new(None);
    apply_all(&fifo, [added("queued", 2), deleted("queued", 2), deleted("other", 1)]);
    assert_eq!(pop_all(&fifo), ["Added queued=2, Deleted queued=2"]);
    fifo.apply(deleted("queued", 2));
    assert!(fifo.is_empty());
}

#[test]
fn a_replacement_delivers_its_objects_first_and_then_the_deletions() {
    let (fifo, _) = fifo(&[("bar", 6), ("foo", 5)]);
    fifo.replace(state(&[("foo", 8), ("new", 9)]));
    assert_eq!(pop_all(&fifo), ["Replaced foo=8", "Replaced new=9", "Gone bar=6"]);
}

#[test]
fn a_replacement_is_added_to_a_queued_delete() {
    let (fifo, _) = fifo(&[("foo", 1)]);
    fifo.apply(deleted("foo", 1));
    fifo.replace(state(&[("foo", 2)]));
    assert_eq!(pop_all(&fifo), ["Deleted foo=1, Replaced foo=2"]);
}

#[test]
fn a_replacement_deletes_queued_objects_with_their_newest_queued_state() {
    let (fifo, _) = fifo(&[("baz", 7)]);
    apply_all(&fifo, [added("baz", 10), updated("baz", 11)]);
    fifo.replace(state(&[("foo", 5)]));
    assert_eq!(pop_all(&fifo), ["Added baz=10, Updated baz=11, Gone baz=11", "Replaced foo=5"]);
}

#[test]
fn a_replacement_does_not_override_the_state_of_a_queued_delete() {
    let (fifo, _) = fifo(&[("bar", 6), ("baz", 7)]);
    apply_all(&fifo, [deleted("baz", 10), deleted_unknown("bar", 6)]);
    fifo.replace(state(&[]));
    assert_eq!(pop_all(&fifo), ["Deleted baz=10", "Gone bar=6"]);
}

#[test]
fn a_replacement_without_known_objects_deletes_queued_objects() {
    let fifo = DeltaFifo::new(None);
    fifo.apply(added("baz", 10));
    fifo.replace(state(&[("foo", 5)]));
    assert_eq!(pop_all(&fifo), ["Added baz=10, Gone baz=10", "Replaced foo=5"]);
}

#[test]
fn a_replacement_deletes_no_undecodable_objects() {
    let (fifo, _) = fifo(&[("known", 1), ("gone", 2)]);
    fifo.apply(added("queued", 3));
    fifo.replace(state_with_undecodable(&[("foo", 4)], &["known", "queued"]));
    assert_eq!(pop_all(&fifo), ["Added queued=3", "Replaced foo=4", "Gone gone=2"]);
}

#[test]
fn a_resync_delivers_known_objects_that_have_nothing_queued() {
    let (fifo, _) = fifo(&[("a", 1), ("b", 2), ("c", 3)]);
    apply_all(&fifo, [updated("b", 6), deleted("c", 3)]);
    fifo.resync();
    assert_eq!(pop_all(&fifo), ["Updated b=6", "Deleted c=3", "Sync a=1"]);
}

#[test]
fn a_resync_without_known_objects_does_nothing() {
    let fifo = DeltaFifo::<u32>::new(None);
    fifo.resync();
    assert!(fifo.is_empty() && !fifo.has_synced());
}

#[test]
fn a_queue_has_synced_once_all_objects_of_the_first_replacement_are_processed() {
    let (fifo, _) = fifo(&[("gone", 3)]);
    fifo.replace(state(&[("a", 1), ("b", 2)]));
    for _ in 0..3 {
        assert!(!fifo.has_synced());
        assert!(fifo.try_pop(|_, is_in_initial_list| assert!(is_in_initial_list && !fifo.has_synced())));
    }
    assert!(fifo.has_synced());
    fifo.replace(state(&[("c", 1)]));
    assert!(fifo.has_synced());
    while fifo.try_pop(|_, is_in_initial_list| assert!(!is_in_initial_list)) {}
}

#[test]
fn an_object_that_is_listed_twice_counts_once_for_the_sync() {
    let (fifo, _) = fifo(&[]);
    fifo.replace(state(&[("a", 1), ("a", 2)]));
    assert_eq!(pop_all(&fifo), ["Replaced a=1, Replaced a=2"]);
    assert!(fifo.has_synced());
}

#[test]
fn a_change_before_any_replacement_counts_as_synced_even_if_it_is_ignored() {
    for change in [added("a", 1), updated("a", 1), deleted("a", 1)] {
        let (fifo, _) = fifo(&[]);
        assert!(!fifo.has_synced());
        fifo.apply(change);
        assert!(fifo.has_synced());
    }
}

#[test]
fn an_empty_first_replacement_counts_as_synced_at_once() {
    let (fifo, _) = fifo(&[]);
    fifo.replace(state(&[]));
    assert!(fifo.has_synced());
}

#[test]
fn changes_to_queued_initial_objects_belong_to_the_initial_list() {
    let (fifo, _) = fifo(&[]);
    fifo.replace(state(&[("a", 1)]));
    fifo.apply(updated("a", 2));
    fifo.apply(added("b", 3));
    let mut popped = Vec::new();
    while fifo.try_pop(|deltas, is_in_initial_list| popped.push((text(&deltas), is_in_initial_list))) {}
    assert_eq!(popped, [("Replaced a=1, Updated a=2".to_owned(), true), ("Added b=3".to_owned(), false)]);
}

#[test]
fn an_object_in_process_can_be_deleted_and_replaced() {
    for relist in [false, true] {
        let (fifo, known) = fifo(&[]);
        fifo.apply(added("a", 1));
        fifo.try_pop(|deltas, _| {
            if relist {
                fifo.replace(state(&[]))
            } else {
                fifo.apply(deleted("a", 2))
            }
            apply(&known, &deltas);
        });
        assert_eq!(pop_all(&fifo), [if relist { "Gone a=1" } else { "Deleted a=2" }]);
    }
}

#[test]
fn an_object_whose_delete_is_in_process_is_gone_for_the_producers() {
    let (fifo, known) = fifo(&[("a", 1)]);
    fifo.apply(deleted("a", 1));
    fifo.try_pop(|deltas, _| {
        fifo.apply(deleted("a", 1));
        fifo.resync();
        fifo.replace(state(&[]));
        apply(&known, &deltas);
    });
    assert!(fifo.is_empty());
}

#[tokio::test]
async fn a_waiting_pop_gets_a_change_and_ends_when_the_queue_is_closed() {
    let (fifo, _) = fifo(&[]);
    {
        let mut pop = pin!(fifo.pop(|deltas, _| assert_eq!(text(&deltas), "Added a=1")));
        assert!((&mut pop).now_or_never().is_none());
        fifo.apply(added("a", 1));
        assert!(pop.await);
    }
    let mut pop = pin!(fifo.pop(|_, _| panic!("nothing is queued")));
    assert!((&mut pop).now_or_never().is_none());
    fifo.close();
    assert!(!pop.await && fifo.is_closed());
}

#[tokio::test]
async fn a_closed_queue_still_delivers_its_items() {
    let (fifo, _) = fifo(&[]);
    fifo.apply_batch(vec![added("a", 1), added("b", 2)]);
    fifo.close();
    assert!(fifo.pop(|deltas, _| assert_eq!(text(&deltas), "Added a=1")).await);
    assert!(fifo.pop(|deltas, _| assert_eq!(text(&deltas), "Added b=2")).await);
    assert!(!fifo.pop(|_, _| ()).await);
}
