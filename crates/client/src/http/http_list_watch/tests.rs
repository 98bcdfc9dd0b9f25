mod discovery;
mod server;
mod watch;

use server::{Answer, Scripted};

use super::*;

const PODS: &str = r#"{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"9"},"items":[]}"#;

/// A lister and watcher of pods, without discovery, over scripted answers.
fn pods(answers: Vec<Answer>, options: HttpListWatchOptions) -> (Result<HttpListWatch, ClientError>, Arc<Scripted>) {
    let transport = Arc::new(Scripted::new(answers));
    let resource = HttpResource::Path { api: "api/v1".to_owned(), resource: "pods".to_owned() };
    (HttpListWatch::new(HttpClient::from_transport(transport.clone()), resource, options), transport)
}

/// The path, query and `Accept` header of the one request that these options cause.
async fn list_request(options: HttpListWatchOptions, list: ListOptions) -> (String, &'static str) {
    let (source, transport) = pods(vec![Answer::ok(PODS)], options);
    source.unwrap().list(list).await.unwrap();
    transport.requests().remove(0)
}

async fn watch_request(options: HttpListWatchOptions, watch: ListOptions) -> (String, &'static str) {
    let (source, transport) = pods(vec![Answer::ok("")], options);
    drop(source.unwrap().watch(watch).await.unwrap());
    transport.requests().remove(0)
}

fn seeded() -> HttpListWatchOptions {
    HttpListWatchOptions { seed: Some(1), ..HttpListWatchOptions::default() }
}

#[tokio::test]
async fn each_option_of_a_list_is_in_its_query() {
    let list = |list| list_request(HttpListWatchOptions::default(), list);
    let default = ListOptions::default();
    assert_eq!(list(default.clone()).await, ("/api/v1/pods".to_owned(), "application/json"));
    let any = ListOptions { resource_version: "0".to_owned(), limit: 500, ..default.clone() };
    assert_eq!(list(any).await.0, "/api/v1/pods?limit=500&resourceVersion=0");
    let next =
        ListOptions { continue_token: "a+b/=".to_owned(), resource_version: "7".to_owned(), limit: 2, ..default };
    assert_eq!(list(next).await.0, "/api/v1/pods?limit=2&continue=a%2Bb%2F%3D", "a token contains the version");
    let options = HttpListWatchOptions {
        namespace: "team-a".to_owned(),
        label_selector: "app in (a,b),tier!=é".to_owned(),
        field_selector: "spec.nodeName=node&1".to_owned(),
        ..HttpListWatchOptions::default()
    };
    assert_eq!(
        list_request(options, ListOptions::default()).await.0,
        "/api/v1/namespaces/team-a/pods?labelSelector=app+in+%28a%2Cb%29%2Ctier%21%3D%C3%A9\
         &fieldSelector=spec.nodeName%3Dnode%261"
    );
}

#[tokio::test]
async fn a_page_that_leads_to_itself_is_an_error() {
    let page = r#"{"kind":"PodList","metadata":{"resourceVersion":"9","continue":"next"},"items":[]}"#;
    let (source, _) = pods(vec![Answer::ok(page), Answer::ok(page)], HttpListWatchOptions::default());
    let source = source.unwrap();
    let ListPage { continue_token, .. } = source.list(ListOptions::default()).await.unwrap();
    let next = ListOptions { continue_token, ..ListOptions::default() };
    let error = source.list(next).await.unwrap_err();
    assert!(error.to_string().contains("leads to the same page"), "{error}");
}

#[tokio::test]
async fn each_option_of_a_watch_is_in_its_query() {
    let base = "/api/v1/pods?watch=true&allowWatchBookmarks=true";
    let watch = |watch| watch_request(seeded(), watch);
    let timeout = Some(Duration::from_millis(1500));
    let resume = ListOptions { resource_version: "7".to_owned(), timeout, ..ListOptions::default() };
    assert_eq!(watch(resume).await, (format!("{base}&resourceVersion=7&timeoutSeconds=2"), "application/json"));
    let initial = ListOptions { send_initial_events: true, timeout: Some(Duration::ZERO), ..ListOptions::default() };
    let expected = format!("{base}&timeoutSeconds=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan");
    assert_eq!(watch(initial).await.0, expected);
    let forever = ListOptions { timeout: Some(Duration::MAX), ..ListOptions::default() };
    assert!(watch(forever).await.0.ends_with("&timeoutSeconds=31536000"));
}

#[tokio::test]
async fn a_watch_without_a_timeout_gets_a_random_one_of_five_to_ten_minutes() {
    let (source, transport) = pods((0..50).map(|_| Answer::ok("")).collect(), seeded());
    let source = source.unwrap();
    for _ in 0..50 {
        drop(source.watch(ListOptions::default()).await.unwrap());
    }
    let seconds = |(path, _): (String, _)| -> u64 { path.split_once("timeoutSeconds=").unwrap().1.parse().unwrap() };
    let mut seconds: Vec<u64> = transport.requests().into_iter().map(seconds).collect();
    assert!(seconds.iter().all(|seconds| (300..=600).contains(seconds)), "{seconds:?}");
    seconds.dedup();
    assert!(seconds.len() > 10, "{seconds:?}");
}

#[tokio::test]
async fn metadata_only_is_asked_of_the_server() {
    let projection = Projection { parts: Parts::Metadata, ..Projection::default() };
    let options = HttpListWatchOptions { projection, ..HttpListWatchOptions::default() };
    let (_, accept) = list_request(options.clone(), ListOptions::default()).await;
    assert!(accept.starts_with("application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"), "{accept}");
    let (_, accept) = watch_request(options, ListOptions::default()).await;
    assert!(accept.starts_with("application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"), "{accept}");
}

#[tokio::test]
async fn invalid_options_are_refused_before_any_request() {
    let refused = |options| {
        let (source, transport) = pods(Vec::new(), options);
        assert!(transport.requests().is_empty());
        let error = source.unwrap_err();
        assert_eq!(error.reason(), "BadRequest");
        error.to_string()
    };
    let projection = Projection { parts: Parts::Fields(vec!["spec".to_owned()]), ..Projection::default() };
    let message = refused(HttpListWatchOptions { projection, ..HttpListWatchOptions::default() });
    assert!(message.contains("needs kubefan's gRPC API"), "{message}");
    for namespace in ["a/b", "..", "a?b", "a%2f", "é"] {
        let options = HttpListWatchOptions { namespace: namespace.to_owned(), ..HttpListWatchOptions::default() };
        assert!(refused(options).contains("is not a namespace"));
    }
    for (api, resource) in
        [("apis/v1", "pods"), ("api/v1/x", "pods"), ("/api/v1", "pods"), ("api/v1", "pods/log"), ("api/..", "pods")]
    {
        let client = HttpClient::from_transport(Arc::new(Scripted::new(Vec::new())));
        let path = HttpResource::Path { api: api.to_owned(), resource: resource.to_owned() };
        let error = HttpListWatch::new(client, path, HttpListWatchOptions::default()).unwrap_err();
        assert!(error.to_string().contains("is not a resource"), "{error}");
    }
}

#[tokio::test]
async fn a_list_is_read_page_by_page() {
    let page = |next: &str, name: &str| {
        Answer::ok(&format!(
            r#"{{"kind":"PodList","apiVersion":"v1","metadata":{{"resourceVersion":"9","continue":"{next}"}},"items":[
                {{"metadata":{{"name":"{name}","namespace":"x","uid":"u","resourceVersion":"5"}}}}]}}"#
        ))
    };
    let (source, transport) = pods(vec![page("t1", "a"), page("", "b")], HttpListWatchOptions::default());
    let source = source.unwrap();
    let first = source.list(ListOptions { limit: 1, ..ListOptions::default() }).await.unwrap();
    assert_eq!((first.resource_version.as_str(), first.continue_token.as_str()), ("9", "t1"));
    let object = &first.objects[0];
    assert_eq!((object.key.as_str(), &*object.uid, &*object.resource_version), ("x/a", "u", "5"));
    assert!(object.json.starts_with(br#"{"kind":"Pod","apiVersion":"v1","metadata""#));
    let next = ListOptions { limit: 1, continue_token: first.continue_token, ..ListOptions::default() };
    let second = source.list(next).await.unwrap();
    assert_eq!((second.objects[0].key.as_str(), second.continue_token.as_str()), ("x/b", ""));
    assert_eq!(transport.requests()[1].0, "/api/v1/pods?limit=1&continue=t1");
}

#[tokio::test]
async fn the_servers_errors_keep_their_meaning() {
    let expired =
        r#"{"kind":"Status","code":410,"reason":"Expired","message":"The provided continue parameter is too old"}"#;
    let answers = vec![
        Answer::new(410, expired),
        Answer {
            retry_after: Some(Duration::from_secs(7)),
            ..Answer::new(429, "Too many requests, please try again later.\n")
        },
        Answer::new(
            422,
            r#"{"kind":"Status","code":422,"reason":"Invalid","message":"sendInitialEvents is forbidden"}"#,
        ),
        Answer::new(302, ""),
        Answer::ok("<html>"),
        Answer::ok(r#"{"metadata":{},"items":[{"spec":1}]}"#),
    ];
    let (source, _) = pods(answers, HttpListWatchOptions::default());
    let source = source.unwrap();
    let list = || async { source.list(ListOptions::default()).await.unwrap_err() };
    assert!(list().await.is_expired());
    let busy = list().await;
    assert_eq!((busy.retry_after(), busy.reason()), (Some(Duration::from_secs(7)), "TooManyRequests"));
    assert!(busy.is_retryable() && busy.to_string().contains("try again later"));
    assert!(source.watch(ListOptions::default()).await.err().unwrap().is_watch_list_unsupported());
    for expected in ["HTTP status 302", "the list at /api/v1/pods: expected value", "item 0 of the list"] {
        let error = list().await.to_string();
        assert!(
            error.starts_with("http://scripted does not answer as a Kubernetes API: ") && error.contains(expected),
            "{error}"
        );
    }
    assert_eq!(list().await.to_string(), "cannot reach http://scripted: no answer left");
}

#[tokio::test(start_paused = true)]
async fn a_list_without_an_end_meets_its_limits() {
    let (source, _) = pods(vec![Answer::ok("{").endless()], HttpListWatchOptions::default());
    let error = source.unwrap().list(ListOptions::default()).await.unwrap_err();
    assert!(error.is_unreachable() && error.to_string().contains("no complete answer within 120s"), "{error}");
    for chunks in [vec![PODS], vec![&PODS[..20], &PODS[20..]]] {
        let options = HttpListWatchOptions { page_bytes_max: 40, ..HttpListWatchOptions::default() };
        let (source, _) = pods(vec![Answer::chunks(200, &chunks)], options);
        let error = source.unwrap().list(ListOptions::default()).await.unwrap_err();
        assert!(error.to_string().contains("longer than 40 bytes"), "{error}");
    }
}

#[tokio::test]
async fn managed_fields_are_cut_out_of_lists_and_watches() {
    let pod = r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a","managedFields":[{"manager":"m"}]}}"#;
    let list =
        format!(r#"{{"kind":"PodList","apiVersion":"v1","metadata":{{"resourceVersion":"9"}},"items":[{pod}]}}"#);
    let event = format!("{{\"type\":\"ADDED\",\"object\":{pod}}}\n");
    let projection = Projection { drop_managed_fields: true, ..Projection::default() };
    let options = HttpListWatchOptions { projection, ..HttpListWatchOptions::default() };
    let (source, _) = pods(vec![Answer::ok(&list), Answer::ok(&event)], options);
    let source = source.unwrap();
    let expected = r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a"}}"#;
    assert_eq!(source.list(ListOptions::default()).await.unwrap().objects[0].json, expected);
    let events = watch::collect(source.watch(ListOptions::default()).await.unwrap()).await;
    let Ok(crate::WatchEvent { kind: crate::WatchEventKind::Added(object), .. }) = &events[0] else {
        panic!("{events:?}")
    };
    assert_eq!(object.json, expected);
}
