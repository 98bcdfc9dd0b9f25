//! What a kube-apiserver does with lists and watches, one row per promise.
//!
//! The rows know only a base URL and an HTTP client. They run against the simulated apiserver below, and the same rows run
//! against a real one: a simulator that is kinder than the real thing would prove nothing. A row makes a namespace or a resource
//! of its own, so that rows can share a server and run at the same time.

use kubefan_sim::apiserver::{SimApiserver, SimOptions};
use tokio::net::TcpListener;

use self::api::Api;
use crate::harness::{Needs, Test, apiserver::ApiServer};

mod api;
mod custom;
pub(crate) mod faults;
mod list;
mod watch;
mod write;

/// Calls a macro with some arguments and the path of every row.
macro_rules! for_each_row {
    ($with:ident $($arguments:tt)*) => {
        $with! {
            [$($arguments)*]
            list::a_list_without_version_sees_every_finished_write
            list::a_list_item_of_a_built_in_type_has_no_kind
            list::an_empty_list_has_items
            list::version_zero_ignores_the_limit
            list::a_version_means_not_older
            list::a_version_with_a_limit_means_exactly
            list::an_exact_list_is_the_state_of_then
            list::a_list_of_metadata_has_the_same_names_and_versions
            list::not_older_than_with_a_limit_pages
            list::a_version_from_the_future_is_waited_for_then_504
            list::contradictions_are_refused_with_422
            list::parameters_that_cannot_be_read_are_refused_with_400
            list::pages_keep_the_version_of_the_first
            list::a_page_of_a_selection_does_not_count_the_rest
            list::a_continue_token_is_checked
            list::a_token_at_the_latest_state_goes_on
            list::keys_are_in_etcds_order
            list::label_selectors_select
            list::field_selectors_select
            list::a_get_has_versions_too
            list::what_is_not_there_is_404
            watch::a_watch_without_version_starts_with_the_state
            watch::the_initial_state_ends_with_a_bookmark
            watch::a_watch_from_a_version_has_only_what_came_later
            watch::a_watch_from_the_future_is_silent
            watch::an_initial_state_from_the_future_is_an_error_event
            watch::contradictions_are_refused
            watch::without_initial_events_a_watch_starts_now
            watch::a_watch_ends_when_its_time_is_up
            watch::what_enters_and_leaves_a_selector_is_added_and_deleted
            watch::what_enters_and_leaves_a_field_selector_is_added_and_deleted
            watch::a_watch_sees_its_namespace_and_name_only
            watch::a_bookmark_comes_before_the_end
            watch::the_old_watch_path_starts_with_the_state
            custom::a_custom_object_has_sorted_keys
            custom::a_custom_resources_selectable_fields_select
            custom::what_is_older_than_the_resource_is_too_old
            custom::a_removed_resource_deletes_ends_and_is_404_until_it_is_back
            custom::a_bookmark_proves_that_nothing_was_missed
            custom::discovery_names_what_is_served
            write::writes_that_cannot_be_are_refused
            write::a_write_that_changes_nothing_is_no_event
            write::a_status_is_written_apart
            write::the_workload_is_accepted
        }
    };
}

/// One test per row, in a list of its own; `$server` starts what is asked, and keeps it for as long as the row runs.
macro_rules! rows {
    ([$list:ident $title:literal $needs:ident $server:path] $($module:ident::$row:ident)*) => {
        pub(crate) const $list: &[Test] = &[$(Test {
            name: concat!("conformance::", $title, "::", stringify!($row)),
            needs: Needs::$needs,
            run: || Box::pin(async {
                let (_server, api) = $server().await;
                $module::$row(&api).await;
            }),
        }),*];
    };
}
for_each_row!(rows SIMULATED "simulated" Nothing simulated);
for_each_row!(rows REAL "real" ApiServer real);

/// A simulated apiserver of the row's own.
async fn simulated() -> (SimApiserver, Api) {
    simulated_with(SimOptions::default()).await
}

async fn simulated_with(options: SimOptions) -> (SimApiserver, Api) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base_url = format!("http://{}", listener.local_addr().unwrap());
    let sim = SimApiserver::new(options);
    tokio::spawn(sim.clone().serve(listener, std::future::pending()));
    (sim, Api { base_url, client: reqwest::Client::new(), bearer: None })
}

/// The real one, which rows share.
async fn real() -> (ApiServer, Api) {
    let server = ApiServer::shared().await;
    let api = Api { base_url: server.url().to_owned(), client: server.client(), bearer: None };
    (server, api)
}
