//! The requests of a reflector, by the answers of a scripted server.

use std::{collections::VecDeque, convert::Infallible, sync::Mutex};

use http_body_util::{BodyExt, Full};
use kubefan_model::{GroupVersionResource, Scope, fields::FieldTable};
use kubefan_telemetry::metrics::{Metrics, WatchPurpose};
use rand::{SeedableRng, rngs::StdRng};
use tower::{BoxError, service_fn, util::BoxCloneSyncService};

use super::*;
use crate::client::UpstreamOptions;

const PAGE: &str = r#"{"kind":"PodList","metadata":{"resourceVersion":"5","continue":"token"},"items":[]}"#;
const LAST_PAGE: &str = r#"{"kind":"PodList","metadata":{"resourceVersion":"5"},"items":[]}"#;
const ITEM: &str = r#"{"type":"ADDED","object":{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a","namespace":"b","uid":"u","resourceVersion":"3"}}}"#;
const MODIFIED: &str = r#"{"type":"MODIFIED","object":{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a","namespace":"b","uid":"u","resourceVersion":"3"}}}"#;
const ITEMS_END: &str = r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"5","annotations":{"k8s.io/initial-events-end":"true"}}}}"#;
const EMPTY: &str = "";
/// The answer to the query for the cluster's version.
const VERSION: &str = LAST_PAGE;
const LINE_BYTES_MAX: usize = 1000;

type Answer = (u16, String);

fn ok(body: impl Into<String>) -> Answer {
    (200, body.into())
}

fn failed(code: u16) -> Answer {
    (code, "{}".to_owned())
}

/// A reflector of a server that gives these answers, one per request.
struct Scripted {
    reflector: Reflector,
    answers: Arc<Mutex<VecDeque<Answer>>>,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Scripted {
    fn new(watch_list: bool) -> Self {
        let answers = Arc::<Mutex<VecDeque<Answer>>>::default();
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let left = answers.clone();
        let seen = requests.clone();
        let service = service_fn(move |request: http::Request<Bytes>| {
            seen.lock().unwrap().push(title(request.uri().query().unwrap_or_default()));
            let (code, body) = left.lock().unwrap().pop_front().expect("an answer");
            let body = Full::new(Bytes::from(body)).map_err(|never: Infallible| match never {}).boxed_unsync();
            let answer = http::Response::builder().status(code).body(body).unwrap();
            async move { Ok::<_, BoxError>(answer) }
        });
        let service = BoxCloneSyncService::new(service);
        let upstream =
            Upstream::from_service(service, &http::Uri::from_static("http://upstream"), UpstreamOptions::default());
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let parser = Arc::new(ObjectParser::new(&FieldTable::new(&gvr, true, &[])).of("Pod", "v1"));
        let metrics = Arc::new(Metrics::new(prometheus::Registry::new()).unwrap());
        let metrics = metrics.cache(&gvr, &Scope::Cluster, parser.media(), &[]);
        let open_watch = Arc::new(move || metrics.upstream_watch(WatchPurpose::Standing));
        let target = Target {
            gvr,
            kind: "Pod".to_owned(),
            scope: Scope::Cluster,
            namespaced: true,
            field_selector: String::new(),
        };
        let options = ReflectorOptions {
            page_size: 2,
            watch_list,
            upstream_idle_timeout: Duration::from_secs(90),
            line_bytes_max: LINE_BYTES_MAX,
        };
        let random = StdRng::seed_from_u64(0);
        let reflector = Reflector::new(upstream, target, parser, options, open_watch, random);
        Self { reflector, answers, requests }
    }

    /// Steps until the server has given these answers, and until another request would follow.
    /// Returns the requests.
    async fn requests(&mut self, answers: impl IntoIterator<Item = Answer>) -> Vec<String> {
        self.answers.lock().unwrap().extend(answers);
        loop {
            let would_request = matches!(self.reflector.next_step(), NextStep::RequestList | NextStep::OpenWatch);
            if would_request && self.answers.lock().unwrap().is_empty() {
                return std::mem::take(&mut self.requests.lock().unwrap());
            }
            let _ = self.reflector.step().await;
        }
    }

    /// Returns a reflector that has listed in pages, and opens a watch next.
    async fn listed() -> Self {
        let mut scripted = Self::new(false);
        assert_eq!(scripted.requests([ok(LAST_PAGE)]).await, ["pages"]);
        scripted
    }
}

/// Returns a request in short.
fn title(query: &str) -> String {
    let parameter = |name: &str| query.split('&').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
    if parameter("sendInitialEvents").is_some() {
        "watch-list".to_owned()
    } else if parameter("watch").is_some() {
        format!("watch from {}", parameter("resourceVersion").unwrap_or_default())
    } else if parameter("fieldSelector").is_some() {
        "version".to_owned()
    } else if parameter("continue").is_some() {
        "next page".to_owned()
    } else if parameter("limit").is_some() {
        "pages".to_owned()
    } else {
        "whole".to_owned()
    }
}

fn complete_watch_list() -> Answer {
    ok(format!("{ITEM}\n{ITEMS_END}\n"))
}

#[tokio::test(start_paused = true)]
async fn a_watch_list_is_the_first_choice() {
    let mut scripted = Scripted::new(true);
    assert_eq!(scripted.requests([complete_watch_list()]).await, ["watch-list"]);
    scripted.reflector.relist(RelistReason::Expired);
    assert_eq!(scripted.requests([complete_watch_list()]).await, ["watch-list"]);
}

#[tokio::test(start_paused = true)]
async fn watch_lists_that_the_server_does_not_support_are_not_tried_again() {
    let too_long = ok(format!("{}{ITEM}\n", " ".repeat(LINE_BYTES_MAX)));
    let ignored = ok(format!("{MODIFIED}\n"));
    for refusal in [failed(400), failed(422), ignored, too_long] {
        let mut scripted = Scripted::new(true);
        assert_eq!(scripted.requests([refusal.clone()]).await, ["watch-list"], "{refusal:?}");
        assert_eq!(scripted.requests([ok(LAST_PAGE)]).await, ["pages"], "{refusal:?}");
        scripted.reflector.relist(RelistReason::Expired);
        assert_eq!(scripted.requests([ok(LAST_PAGE)]).await, ["pages"], "{refusal:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn after_a_watch_list_that_failed_the_next_lists_have_pages_until_one_is_complete() {
    let mut scripted = Scripted::new(true);
    assert_eq!(scripted.requests([ok(format!("{ITEM}\n"))]).await, ["watch-list"]);
    assert_eq!(scripted.requests([failed(500)]).await, ["pages"]);
    scripted.reflector.relist(RelistReason::Expired);
    assert_eq!(scripted.requests([ok(LAST_PAGE)]).await, ["pages"]);
    scripted.reflector.relist(RelistReason::Expired);
    assert_eq!(scripted.requests([complete_watch_list()]).await, ["watch-list"]);
}

#[tokio::test(start_paused = true)]
async fn a_watch_list_that_could_not_be_opened_or_was_discarded_is_tried_again() {
    let mut scripted = Scripted::new(true);
    assert_eq!(scripted.requests([failed(500)]).await, ["watch-list"]);
    scripted.answers.lock().unwrap().push_back(complete_watch_list());
    let begin = scripted.reflector.step().await;
    assert!(matches!(begin, Ok(ReflectorEvent::Update { update: Update::ListBegin { .. }, .. })));
    scripted.reflector.relist(RelistReason::Expired);
    assert_eq!(scripted.requests([complete_watch_list()]).await, ["watch-list", "watch-list"]);
}

#[tokio::test(start_paused = true)]
async fn after_an_expired_continue_token_one_list_has_no_pages() {
    for watch_list in [false, true] {
        let expired = async || {
            let mut scripted = Scripted::new(watch_list);
            if watch_list {
                assert_eq!(scripted.requests([ok(EMPTY)]).await, ["watch-list"]);
            }
            assert_eq!(scripted.requests([ok(PAGE), failed(410)]).await, ["pages", "next page"]);
            scripted
        };
        let mut scripted = expired().await;
        assert_eq!(scripted.requests([ok(LAST_PAGE)]).await, ["whole"]);
        scripted.reflector.relist(RelistReason::Expired);
        let next = if watch_list { complete_watch_list() } else { ok(LAST_PAGE) };
        assert_eq!(scripted.requests([next]).await, [if watch_list { "watch-list" } else { "pages" }]);

        // One that was discarded, or that the server was too busy for, says nothing about its size.
        let mut scripted = expired().await;
        scripted.reflector.relist(RelistReason::Expired);
        assert_eq!(scripted.requests([failed(429)]).await, ["whole"]);
        assert_eq!(scripted.requests([failed(504)]).await, ["whole"]);
        assert_eq!(scripted.requests([ok(LAST_PAGE)]).await, ["pages"]);

        let mut scripted = expired().await;
        assert_eq!(scripted.requests([ok("no list")]).await, ["whole"]);
        assert_eq!(scripted.requests([ok(LAST_PAGE)]).await, ["whole"], "it was sent as a whole");
    }
}

#[tokio::test(start_paused = true)]
async fn a_page_that_fails_for_a_moment_is_requested_again() {
    let mut scripted = Scripted::new(false);
    let requests = scripted.requests([ok(PAGE), failed(500), failed(429), ok(LAST_PAGE)]).await;
    assert_eq!(requests, ["pages", "next page", "next page", "next page"]);
    scripted.reflector.relist(RelistReason::Expired);
    assert_eq!(scripted.requests([failed(500), ok(LAST_PAGE)]).await, ["pages", "pages"]);
}

#[tokio::test(start_paused = true)]
async fn a_watch_in_doubt_is_followed_by_a_question_and_preceded_by_one_that_had_no_answer() {
    let mut scripted = Scripted::listed().await;
    assert_eq!(scripted.requests([ok(EMPTY), failed(500)]).await, ["watch from 5", "version"]);
    assert_eq!(scripted.requests([failed(500)]).await, ["version"]);
    let requests = scripted.requests([ok(VERSION), ok(EMPTY), ok(VERSION)]).await;
    assert_eq!(requests, ["version", "watch from 5", "version"]);
    assert_eq!(scripted.requests([ok(EMPTY), ok(VERSION)]).await, ["watch from 5", "version"]);
}

#[tokio::test(start_paused = true)]
async fn a_question_that_is_denied_counts_as_answered() {
    let mut scripted = Scripted::listed().await;
    assert_eq!(scripted.requests([ok(EMPTY), failed(500)]).await, ["watch from 5", "version"]);
    let requests = scripted.requests([failed(403), ok(EMPTY), failed(403)]).await;
    assert_eq!(requests, ["version", "watch from 5", "version"]);
    assert_eq!(scripted.requests([ok(EMPTY), ok(VERSION)]).await, ["watch from 5", "version"]);
}

#[tokio::test(start_paused = true)]
async fn a_question_that_the_server_refuses_is_not_asked_again() {
    let mut scripted = Scripted::listed().await;
    assert_eq!(scripted.requests([ok(EMPTY), failed(400)]).await, ["watch from 5", "version"]);
    assert_eq!(scripted.requests([ok(EMPTY)]).await, ["watch from 5"]);
    scripted.reflector.relist(RelistReason::Expired);
    assert_eq!(scripted.requests([ok(LAST_PAGE), ok(EMPTY)]).await, ["pages", "watch from 5"]);
}

#[tokio::test(start_paused = true)]
async fn a_cluster_below_the_version_leads_to_a_list() {
    let mut scripted = Scripted::listed().await;
    let lower = VERSION.replace('5', "4");
    assert_eq!(scripted.requests([ok(EMPTY), ok(lower)]).await, ["watch from 5", "version"]);
    assert_eq!(scripted.requests([ok(LAST_PAGE)]).await, ["pages"]);
}
