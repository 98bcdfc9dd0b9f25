//! The list and watch behaviour of a kube-apiserver, one row per guarantee.
//!
//! The rows know only a base URL and an HTTP client. The same rows run against the simulated and
//! against a real apiserver, because a simulator that is more lenient than the real server would
//! prove nothing. Each row creates its own namespace or resource, so rows can share a server and
//! run in parallel.

use kubefan_sim::apiserver::{SimApiserver, SimOptions};
use tokio::net::TcpListener;

use self::api::Api;
use crate::harness::{apiserver::ApiServer, tests};

mod api;
mod custom;
pub(crate) mod faults;
mod list;
mod refusals;
mod watch;
mod write;

/// Calls a macro with some arguments and the path of every row.
macro_rules! for_each_row {
    ($with:ident $($arguments:tt)*) => {
        $with! {
            [$($arguments)*]
            list::a_list_without_version_sees_every_finished_write
            list::a_list_item_of_a_built_in_type_has_no_kind
            list::version_match_and_limit_decide_which_state_is_listed
            list::a_list_of_metadata_has_the_same_names_and_versions
            list::a_future_version_is_waited_for
            list::all_pages_have_the_version_of_the_first
            list::objects_are_in_etcd_key_order
            list::selectors_select_matching_objects
            watch::a_watch_without_version_starts_with_the_current_state
            watch::initial_events_end_with_a_bookmark
            watch::a_watch_from_a_version_sends_only_later_events_up_to_its_timeout
            watch::entering_a_label_selector_is_added_and_leaving_it_is_deleted
            watch::entering_a_field_selector_is_added_and_leaving_it_is_deleted
            watch::a_watch_sends_only_its_namespace_and_name
            watch::a_bookmark_precedes_the_timeout
            watch::the_deprecated_watch_path_starts_with_the_current_state
            custom::a_custom_object_has_sorted_keys
            custom::selectable_fields_of_a_custom_resource_select
            custom::a_version_older_than_the_resource_is_expired
            custom::removing_a_resource_deletes_its_objects_and_ends_its_watches
            custom::a_bookmark_proves_that_nothing_was_missed
            custom::discovery_lists_the_served_resources
            write::a_write_without_changes_sends_no_event
            write::status_changes_only_through_its_subresource
        }
    };
}

/// Registers one test per row. `$server` starts the server and keeps it alive while the row runs.
macro_rules! rows {
    ([$title:literal $needs:ident $server:path] $($module:ident::$row:ident)*) => {
        $(tests!(@one [$needs] concat!("conformance::", $title, "::", stringify!($row)), async {
            let (_server, api) = $server().await;
            $module::$row(&api).await;
        });)*
    };
}
for_each_row!(rows "simulated" local simulated);
for_each_row!(rows "real" apiserver real);

/// A simulated apiserver for one row.
async fn simulated() -> (SimApiserver, Api) {
    simulated_with(SimOptions::default()).await
}

async fn simulated_with(options: SimOptions) -> (SimApiserver, Api) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base_url = format!("http://{}", listener.local_addr().unwrap());
    let sim = SimApiserver::new(options);
    tokio::spawn(sim.clone().serve(listener, std::future::pending()));
    (sim, Api { base_url, client: reqwest::Client::new() })
}

/// The real apiserver, which rows share.
async fn real() -> (ApiServer, Api) {
    let server = ApiServer::shared().await;
    let api = Api { base_url: server.url().to_owned(), client: server.client() };
    (server, api)
}
