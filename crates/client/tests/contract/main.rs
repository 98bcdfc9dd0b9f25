//! The contract with client-go's `tools/cache`: scripts that run through this library and through
//! client-go, and must be observed to do the same.
//!
//! `scripts/` has the scripts, each with the promise as its name. The Go program in `client-go/`
//! runs them through client-go 0.35 and wrote `recorded.json`. Each script is a test here, which
//! compares this library with the recording. A script lists the steps where the library differs on
//! purpose, with the reason. `docs/informer-contract.md` shows them all as a table.
//!
//! With `KUBEFAN_CONTRACT_RECORD=1`, a test runs the Go program (it needs Go, and its modules from
//! the module proxy) and checks that the recording still matches client-go. With
//! `KUBEFAN_CONTRACT_RECORD=write`, it writes the recording and the table.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod factory;
mod handler;
mod informer;
mod late_resync;
mod object;
mod queues;
mod record;
mod reflector;
mod script;
mod server;
mod stores;

use script::{Log, Piece};

async fn check(name: &str) {
    let scripts = script::scripts();
    let script = scripts.iter().find(|script| script.name == name).expect("there is no script of this name");
    let log = Log::default();
    let mut piece: Box<dyn Piece> = match script.piece.as_str() {
        "key" => Box::new(stores::Keys),
        "store" | "expiration" => Box::new(stores::Stores::indexer()),
        "undelta" => Box::new(stores::Stores::undelta(&log)),
        "delta-fifo" => Box::new(queues::Queues::delta()),
        "real-fifo" => Box::new(queues::Queues::real()),
        "reflector" => Box::new(reflector::Reflectors::new(&log)),
        "informer" => Box::new(informer::Informers::new(&log)),
        "factory" => Box::new(factory::Factories::new(&log)),
        piece => panic!("unknown piece {piece}"),
    };
    let recording = script::run(script, piece.as_mut(), &log).await;
    let recordings = script::recordings();
    let client_go = recordings.get(name).expect("the script is not recorded: set KUBEFAN_CONTRACT_RECORD=write");
    script::compare(script, client_go, &recording);
}

/// A test for each script.
macro_rules! contract {
    ($($name:ident)*) => {
        const TESTS: &[&str] = &[$(stringify!($name)),*];

        $(
            #[tokio::test(start_paused = true)]
            async fn $name() {
                check(stringify!($name)).await;
            }
        )*
    };
}

contract! {
    a_key_is_namespace_and_name
    a_key_splits_into_namespace_and_name
    a_get_returns_the_stored_object_or_nothing
    an_add_of_a_stored_key_replaces_the_object
    an_update_of_an_unknown_key_stores_it
    a_delete_removes_one_object
    a_delete_of_an_unknown_key_does_nothing
    a_delete_of_unknown_final_state_removes_by_its_key
    a_replacement_drops_all_other_objects
    objects_of_equal_names_in_two_namespaces_are_two
    a_resync_of_a_store_changes_nothing
    an_index_has_an_object_under_each_of_its_values
    an_update_moves_an_object_in_the_index
    a_delete_removes_an_object_from_the_index
    an_object_without_values_is_in_no_index
    a_replacement_builds_the_indexes_again
    an_index_added_later_has_the_stored_objects
    a_second_index_of_the_same_name_is_refused
    a_query_of_an_unknown_index_is_refused
    several_indexes_have_their_own_values
    the_values_of_an_unknown_index
    an_add_pushes_the_complete_state
    an_update_pushes_the_complete_state
    a_delete_pushes_the_complete_state
    a_delete_of_an_unknown_key_pushes_too
    a_replacement_pushes_once
    a_resync_pushes_nothing
    an_entry_expires_after_its_time_to_live
    an_entry_as_old_as_the_time_to_live_is_still_valid
    a_list_omits_expired_entries
    the_keys_contain_expired_entries_until_they_are_read
    an_update_renews_an_entry
    a_time_to_live_of_zero_never_expires
    a_replacement_gives_all_entries_a_new_age
    a_delete_removes_an_entry
    changes_of_one_object_are_popped_together
    two_deletes_in_a_row_become_one
    a_known_final_state_wins_over_an_unknown_one
    a_delete_and_an_add_in_between_stay_distinct
    a_delete_of_an_object_that_is_neither_queued_nor_known_is_ignored
    a_replacement_queues_its_objects_as_replaced
    a_replacement_deletes_known_objects_that_it_lacks
    a_replacement_deletes_queued_objects_that_it_lacks
    a_replacement_does_not_delete_twice
    a_resync_queues_known_objects_that_are_not_queued
    the_queue_is_synced_when_the_first_replacement_is_popped
    an_empty_replacement_synchronizes_at_once
    a_queue_that_starts_with_an_add_is_synced
    deletions_of_the_first_replacement_count_until_synced
    a_closed_queue_delivers_the_rest_and_then_ends
    changes_are_popped_one_by_one_in_order_of_arrival
    two_deletes_in_a_row_stay_two
    a_delete_of_an_unknown_object_is_queued
    a_replacement_queues_deletions_first
    a_replacement_deletes_queued_objects_before_known_ones
    a_queued_deletion_is_not_repeated_by_a_replacement
    a_queued_deletion_stays_before_the_new_object_of_that_name
    a_resync_leaves_out_objects_that_are_queued
    the_fifo_is_synced_when_the_first_replacement_is_popped
    an_empty_replacement_synchronizes_the_fifo_at_once
    a_fifo_that_starts_with_an_add_is_synced
    changes_of_one_object_are_in_different_batches
    a_batch_ends_where_the_initial_state_ends
    a_closed_fifo_delivers_the_rest_and_then_ends
    a_reflector_lists_and_then_watches_from_the_version_of_the_list
    events_of_a_watch_are_written_to_the_store
    a_bookmark_moves_the_version_only
    a_watch_that_ends_resumes_from_the_last_version
    an_expired_watch_is_followed_by_a_list
    a_list_whose_version_is_expired_is_repeated_without_a_version
    a_list_whose_version_is_too_large_is_repeated_without_a_version
    each_expired_watch_is_followed_by_a_list
    a_failed_list_is_repeated_after_the_backoff
    a_refused_watch_is_repeated_without_a_list
    a_watch_refused_for_too_many_requests_is_repeated_without_a_list
    a_watch_that_fails_is_retried_after_the_backoff
    an_error_event_for_too_many_requests_continues_the_watch
    an_internal_error_event_is_retried_after_the_backoff
    a_watch_that_ends_at_once_is_retried_after_the_backoff
    a_list_in_pages_is_written_at_once
    a_page_that_has_expired_leads_to_a_list_without_pages
    a_reflector_of_a_server_with_pages_asks_for_pages_again
    an_event_that_cannot_be_read_is_left_out
    a_resync_happens_each_period_and_asks_no_server
    without_a_period_there_is_no_resync
    a_watch_list_is_written_at_its_bookmark
    a_watch_list_continues_as_the_watch
    a_watch_list_that_breaks_before_its_bookmark_has_no_effect
    a_server_without_watch_lists_is_listed
    an_expired_watch_is_followed_by_a_watch_list
    a_watch_list_whose_version_is_expired_is_repeated_without_a_version
    a_watch_list_that_is_refused_is_repeated_after_the_backoff
    a_watch_after_a_watch_list_resumes_without_a_snapshot
    one_round_ends_with_the_watch
    one_round_fails_with_the_list
    a_stopped_reflector_asks_and_writes_nothing
    a_relist_pushes_the_complete_state_once
    the_first_state_arrives_as_initial_adds
    the_first_list_arrives_as_initial_adds
    an_update_has_the_old_and_the_new_object
    a_delete_has_the_final_object
    an_added_event_of_a_known_object_is_an_update
    a_modified_event_of_an_unknown_object_is_an_add
    a_deleted_event_of_an_unknown_object_is_a_delete
    a_delete_and_create_under_one_name_are_two_calls_on_a_watch
    a_delete_and_create_under_one_name_are_an_update_after_a_relist
    a_relist_reports_what_has_changed
    a_missed_deletion_has_the_last_known_object
    after_a_relist_new_objects_are_not_initial
    an_unchanged_object_after_a_relist_is_an_update_without_resync
    an_unchanged_object_after_a_relist_goes_to_handlers_that_resync
    the_informer_is_synced_when_the_first_state_is_processed
    an_informer_of_an_empty_resource_is_synced
    an_informer_whose_list_fails_is_not_synced
    a_handler_is_synced_when_it_has_processed_the_first_state
    a_late_handler_gets_the_state_as_initial_adds
    a_late_handler_is_synced_when_it_has_processed_the_state
    a_late_handler_of_an_empty_store_is_synced
    a_late_handler_gets_nothing_twice
    a_removed_handler_gets_nothing_more
    a_handler_may_be_removed_twice
    a_handler_removed_before_the_start_gets_nothing
    a_handler_added_again_gets_the_state_again
    a_slow_handler_delays_no_other
    the_store_is_updated_before_the_handlers_are_called
    a_resync_repeats_every_object_as_an_update
    each_handler_has_its_own_resync_period
    a_handlers_period_shortens_that_of_the_informer_before_the_start
    a_late_handlers_period_is_not_below_that_of_the_informer
    a_period_is_at_least_one_second
    a_handlers_period_in_an_informer_without_one
    a_transform_runs_before_the_store_and_the_handlers
    the_objects_of_a_watch_list_are_transformed
    a_transform_is_not_repeated_by_a_resync
    a_missed_deletion_is_not_transformed_again
    an_event_that_cannot_be_transformed_is_left_out
    an_index_of_the_informer_follows_the_watch
    an_index_may_be_added_while_the_informer_runs
    the_version_of_the_informer_follows_events_and_bookmarks
    a_handler_after_the_stop_is_refused
    a_stopped_informer_calls_no_handler
    an_expired_watch_and_the_error_observers
    a_second_run_does_nothing
    an_error_of_the_list_is_reported
    a_filtering_handler_turns_updates_into_adds_and_deletes
    a_handler_that_panics_disturbs_no_other
    calls_of_one_handler_keep_their_order
    a_lister_lists_one_namespace
    a_lister_lists_all_namespaces
    a_lister_gets_by_namespace_and_name
    a_lister_sees_what_the_watch_brings
    a_deletion_of_the_watch_and_a_missed_one_differ
    an_object_that_appears_again_after_a_missed_deletion_is_an_add
    a_watch_that_resumes_calls_no_handler
    a_state_that_breaks_off_calls_no_handler
    a_handler_added_before_the_state_is_complete_is_synced_with_it
    a_bookmark_calls_no_handler
    one_resource_has_one_informer
    the_factory_starts_each_informer_once
    the_namespace_and_the_options_are_those_of_every_informer
    the_factory_waits_until_its_informers_are_synced
    the_wait_for_synced_informers_ends_at_its_limit
    the_factory_waits_only_for_informers_that_it_has_started
    the_resync_period_of_the_factory_is_the_default
    a_shut_down_factory_starts_nothing
}

#[test]
fn every_script_has_a_test_and_a_recording() {
    let scripts = script::scripts();
    let names: Vec<_> = scripts.iter().map(|script| script.name.as_str()).collect();
    assert_eq!(names, TESTS);
    let recordings = script::recordings();
    let mut recorded: Vec<_> = recordings.keys().map(String::as_str).collect();
    let mut sorted = names.clone();
    recorded.sort_unstable();
    sorted.sort_unstable();
    assert_eq!(sorted, recorded);
}
