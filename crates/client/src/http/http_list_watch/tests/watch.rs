use std::io::Write;

use futures::StreamExt;

use super::{
    server::{Received, Server},
    *,
};
use crate::{
    http::HttpClientOptions,
    lister_watcher::{WatchEvent, WatchEventKind},
};

/// All events until the stream ends.
pub(super) async fn collect(mut events: WatchEvents) -> Vec<Result<WatchEvent, ClientError>> {
    let mut all = Vec::new();
    while let Some(event) = events.next().await {
        all.push(event);
    }
    all
}

/// An event as one word: its kind, the object's key, and the version to resume from.
fn word(event: &Result<WatchEvent, ClientError>) -> String {
    let Ok(WatchEvent { kind, resume_version }) = event else {
        return format!("error:{}", event.as_ref().unwrap_err());
    };
    let kind = match kind {
        WatchEventKind::Added(object) => format!("added:{}", object.key),
        WatchEventKind::Modified(object) => format!("modified:{}", object.key),
        WatchEventKind::Deleted(object) => format!("deleted:{}", object.key),
        WatchEventKind::Unreadable(message) => format!("unreadable:{message}"),
        other => format!("{other:?}"),
    };
    format!("{kind}@{}", resume_version.as_deref().unwrap_or("-"))
}

fn line(event: &str, name: &str, version: u32) -> String {
    format!(
        r#"{{"type":"{event}","object":{{"kind":"Pod","apiVersion":"v1","metadata":{{"name":"{name}","namespace":"x","uid":"u","resourceVersion":"{version}"}}}}}}"#
    ) + "\n"
}

fn bookmark(version: u32, annotations: &str) -> String {
    format!(
        r#"{{"type":"BOOKMARK","object":{{"kind":"Pod","apiVersion":"v1","metadata":{{"resourceVersion":"{version}","creationTimestamp":null{annotations}}}}}}}"#
    ) + "\n"
}

const INITIAL_EVENTS_END: &str = r#","annotations":{"k8s.io/initial-events-end":"true"}"#;

async fn words(answer: Answer, options: ListOptions) -> Vec<String> {
    let (source, _) = pods(vec![answer], HttpListWatchOptions::default());
    let events = source.unwrap().watch(options).await.unwrap();
    collect(events).await.iter().map(word).collect()
}

fn initial_events() -> ListOptions {
    ListOptions { send_initial_events: true, ..ListOptions::default() }
}

#[tokio::test]
async fn events_carry_the_version_to_resume_from() {
    let body = [line("ADDED", "a", 5), line("MODIFIED", "a", 6), bookmark(8, ""), line("DELETED", "a", 9)].concat();
    let got =
        words(Answer::ok(&body), ListOptions { resource_version: "4".to_owned(), ..ListOptions::default() }).await;
    assert_eq!(got, ["added:x/a@5", "modified:x/a@6", "Bookmark@8", "deleted:x/a@9"]);
}

#[tokio::test]
async fn the_initial_events_form_a_snapshot_that_ends_at_the_marked_bookmark() {
    let body = [
        line("ADDED", "a", 7),
        bookmark(8, ""),
        line("ADDED", "b", 5),
        bookmark(9, INITIAL_EVENTS_END),
        line("MODIFIED", "b", 10),
        bookmark(11, ""),
    ];
    let got = words(Answer::ok(&body.concat()), initial_events()).await;
    let expected = ["SnapshotBegin@-", "added:x/a@-", "added:x/b@-", "SnapshotEnd@9", "modified:x/b@10", "Bookmark@11"];
    assert_eq!(got, expected);
    let cut = words(Answer::ok(&body[..3].concat()), initial_events()).await;
    assert_eq!(cut, expected[..3], "a watch that ends before the bookmark has no snapshot end");
}

#[tokio::test]
async fn changes_before_the_end_of_the_initial_events_become_a_part_of_the_snapshot() {
    let body = [
        line("ADDED", "a", 3),
        line("ADDED", "b", 5),
        line("ADDED", "c", 4),
        line("MODIFIED", "b", 6),
        line("DELETED", "a", 7),
        line("DELETED", "c", 8),
        line("ADDED", "c", 9),
        bookmark(9, INITIAL_EVENTS_END),
        line("DELETED", "b", 10),
    ];
    let got = words(Answer::ok(&body.concat()), initial_events()).await;
    let objects = ["SnapshotBegin@-", "added:x/a@-", "added:x/b@-", "added:x/c@-"];
    assert_eq!(got[..4], objects);
    let changes =
        ["modified:x/b@-", "deleted:x/a@-", "deleted:x/c@-", "added:x/c@-", "SnapshotEnd@9", "deleted:x/b@10"];
    assert_eq!(got[4..], changes);
}

#[tokio::test]
async fn every_split_into_chunks_gives_the_same_events() {
    let body = [line("ADDED", "a", 5), bookmark(9, INITIAL_EVENTS_END), line("DELETED", "é", 10)].concat();
    let whole = words(Answer::ok(&body), initial_events()).await;
    assert_eq!(whole.len(), 4);
    for at in 0..=body.len() {
        let (head, tail) = body.as_bytes().split_at(at);
        assert_eq!(words(Answer::chunks(200, &[head, tail]), initial_events()).await, whole, "split at {at}");
    }
    let bytes: Vec<[u8; 1]> = body.bytes().map(|byte| [byte]).collect();
    assert_eq!(words(Answer::chunks(200, &bytes), initial_events()).await, whole);
}

#[tokio::test]
async fn an_error_event_ends_the_watch_with_its_status() {
    let status = r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"too old resource version: 5 (120)","reason":"Expired","code":410}}"#;
    let (source, _) =
        pods(vec![Answer::ok(&format!("{}{status}\n", line("ADDED", "a", 5)))], HttpListWatchOptions::default());
    let events = collect(source.unwrap().watch(ListOptions::default()).await.unwrap()).await;
    assert_eq!(events.len(), 2);
    let error = events[1].as_ref().unwrap_err();
    assert!(error.is_expired() && error.to_string() == "too old resource version: 5 (120)", "{error}");
    let got = words(Answer::ok("{\"type\":\"ERROR\",\"object\":{}}\n"), ListOptions::default()).await;
    assert!(got[0].contains("an ERROR event without a Status"), "{got:?}");
}

#[tokio::test]
async fn an_object_without_readable_metadata_is_reported_and_the_watch_continues() {
    let body = [
        "{\"type\":\"ADDED\",\"object\":{\"kind\":\"Pod\"}}\n".to_owned(),
        "{\"type\":\"SPLIT\",\"object\":{}}\n".to_owned(),
        "{\"type\":\"BOOKMARK\",\"object\":{\"metadata\":{}}}\n".to_owned(),
        line("ADDED", "a", 5),
    ];
    let got = words(Answer::ok(&body.concat()), ListOptions::default()).await;
    assert_eq!(got.len(), 4, "{got:?}");
    assert!(got[0].starts_with("unreadable:an ADDED event: the object has no metadata.name"), "{got:?}");
    assert!(got[1].starts_with("unreadable:an event of unknown type \"SPLIT\""), "{got:?}");
    assert!(got[2].starts_with("unreadable:a BOOKMARK event: missing field"), "{got:?}");
    assert_eq!(got[3], "added:x/a@5");
}

#[tokio::test]
async fn a_broken_or_cut_off_event_ends_the_watch() {
    let got = words(Answer::ok(&format!("{}{{\"type\":\n", line("ADDED", "a", 5))), ListOptions::default()).await;
    assert!(got.len() == 2 && got[1].contains("does not answer as a Kubernetes API: an event of a watch"), "{got:?}");
    let whole = line("ADDED", "a", 5);
    let (source, _) = pods(vec![Answer::ok(whole.trim_end())], HttpListWatchOptions::default());
    let events = collect(source.unwrap().watch(ListOptions::default()).await.unwrap()).await;
    let error = events[0].as_ref().unwrap_err();
    assert!(error.is_unreachable() && error.to_string().contains("cut off inside an event"), "{error}");
    let options = HttpListWatchOptions { event_bytes_max: 50, ..HttpListWatchOptions::default() };
    let (source, _) = pods(vec![Answer::ok(&whole)], options);
    let events = collect(source.unwrap().watch(ListOptions::default()).await.unwrap()).await;
    assert!(word(&events[0]).contains("longer than 50 bytes"), "{events:?}");
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_outlives_its_timeout_by_thirty_seconds_is_dead() {
    let start = Instant::now();
    let options = ListOptions { timeout: Some(Duration::from_secs(60)), ..ListOptions::default() };
    let (source, _) = pods(vec![Answer::ok(&line("ADDED", "a", 5)).endless()], HttpListWatchOptions::default());
    let mut events = source.unwrap().watch(options).await.unwrap();
    assert!(events.next().await.unwrap().is_ok());
    let error = events.next().await.unwrap().unwrap_err();
    assert!(error.is_unreachable() && error.to_string().contains("idle"), "{error}");
    assert_eq!(start.elapsed(), Duration::from_secs(90));
    assert!(events.next().await.is_none());
}

#[tokio::test]
async fn a_real_server_is_listed_and_watched() {
    let watch = [line("ADDED", "a", 5), line("MODIFIED", "a", 6)].concat();
    let busy = Answer { retry_after: Some(Duration::from_secs(3)), ..Answer::new(429, "Too many requests") };
    let server = Server::new(vec![Answer::ok(PODS), busy, Answer::ok(&watch).endless()]).await;
    let options = HttpClientOptions { token: Some("t0ken".to_owned()), ..HttpClientOptions::default() };
    let path = HttpResource::Path { api: "apis/apps/v1".to_owned(), resource: "deployments".to_owned() };
    let options_of =
        HttpListWatchOptions { label_selector: "app=a b".to_owned(), seed: Some(1), ..HttpListWatchOptions::default() };
    let source = HttpListWatch::new(server.client(&options).await, path, options_of).unwrap();
    assert_eq!(source.describe(), format!("deployments from {}", server.address));
    assert_eq!(source.list(ListOptions::default()).await.unwrap().resource_version, "9");
    let error = source.list(ListOptions::default()).await.unwrap_err();
    assert_eq!(
        (error.retry_after(), error.to_string()),
        (Some(Duration::from_secs(3)), "Too many requests".to_owned())
    );
    let events = source.watch(ListOptions { timeout: Some(Duration::from_secs(60)), ..ListOptions::default() }).await;
    let got: Vec<_> = events.unwrap().take(2).map(|event| word(&event)).collect().await;
    assert_eq!(got, ["added:x/a@5", "modified:x/a@6"]);
    let expected = Received {
        path_and_query: "/apis/apps/v1/deployments?labelSelector=app%3Da+b".to_owned(),
        accept: "application/json".to_owned(),
        accept_encoding: "identity".to_owned(),
        authorization: Some("Bearer t0ken".to_owned()),
        user_agent: concat!("kubefan-client/", env!("CARGO_PKG_VERSION")).to_owned(),
    };
    assert_eq!(server.received()[0], expected);
    let refused = format!("http://{}", "127.0.0.1:1");
    let client = HttpClient::new(&refused, &options).await.unwrap();
    let error = client.transport().get("/api".to_owned(), JSON).await.unwrap_err();
    assert_eq!(error.to_string(), "cannot reach http://127.0.0.1:1: Connection refused");
}

/// A chunk of a body as a gzip member, as kube-apiserver 1.37 sends watches.
fn member(plain: &str) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(plain.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

#[tokio::test]
async fn lists_watches_and_errors_that_are_gzip_are_read() {
    let gzip = |answer: Answer| Answer { content_encoding: Some("gzip"), ..answer };
    let members = [line("ADDED", "a", 5), line("MODIFIED", "a", 6)].map(|line| member(&line));
    let cut = Answer::chunks(200, &[&members[0][..], &members[1][..20]]);
    let answers = vec![
        gzip(Answer::chunks(200, &[member(PODS)])),
        gzip(Answer::chunks(200, &members).endless()),
        gzip(cut),
        gzip(Answer::chunks(429, &[member("Too many requests")])),
        gzip(Answer::ok("not gzip")),
        Answer { content_encoding: Some("br"), ..Answer::ok(PODS) },
    ];
    let server = Server::new(answers).await;
    let path = HttpResource::Path { api: "api/v1".to_owned(), resource: "pods".to_owned() };
    let client = server.client(&HttpClientOptions::default()).await;
    let source = HttpListWatch::new(client, path, HttpListWatchOptions::default()).unwrap();
    let watch = async || {
        let events = source.watch(ListOptions::default()).await.unwrap();
        events.take(2).map(|event| word(&event)).collect::<Vec<_>>().await
    };
    assert_eq!(source.list(ListOptions::default()).await.unwrap().resource_version, "9");
    assert_eq!(watch().await, ["added:x/a@5", "modified:x/a@6"], "before the body ends");
    let error = source.watch(ListOptions::default()).await.unwrap().skip(1).next().await.unwrap().unwrap_err();
    assert!(error.is_unreachable() && error.to_string().contains("cut off"), "{error}");
    for problem in
        ["Too many requests", "broken gzip: incorrect header check", "encoding \"br\", which was not requested"]
    {
        let error = source.list(ListOptions::default()).await.unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
}

#[tokio::test]
async fn a_token_file_is_read_again_after_a_401() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    std::fs::write(&file, "old\n").unwrap();
    let unauthorized =
        || Answer::new(401, r#"{"kind":"Status","code":401,"reason":"Unauthorized","message":"Unauthorized"}"#);
    let answers = vec![Answer::ok(PODS), unauthorized(), Answer::ok(PODS), unauthorized()];
    let server = Server::new(answers).await;
    let options = HttpClientOptions { token_file: Some(file.clone()), ..HttpClientOptions::default() };
    let path = HttpResource::Path { api: "api/v1".to_owned(), resource: "pods".to_owned() };
    let source = HttpListWatch::new(server.client(&options).await, path, HttpListWatchOptions::default()).unwrap();
    source.list(ListOptions::default()).await.unwrap();
    std::fs::write(&file, "new\n").unwrap();
    source.list(ListOptions::default()).await.unwrap();
    let error = source.list(ListOptions::default()).await.unwrap_err();
    assert_eq!(error.reason(), "Unauthorized", "the file has no other token, so there is no further request");
    let tokens: Vec<_> = server.received().into_iter().map(|request| request.authorization.unwrap()).collect();
    assert_eq!(tokens, ["Bearer old", "Bearer old", "Bearer new", "Bearer new"]);
}
