//! Tests of the client of the apiserver.

use std::{convert::Infallible, io::Write, sync::Mutex, time::Duration};

use flate2::{Compression, write::GzEncoder};
use futures::stream;
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use tokio::time::Instant;
use tower::{BoxError, service_fn, util::BoxCloneSyncService};

use super::*;

type Answer = http::Response<UpstreamBody>;

fn answer(code: u16, body: impl Into<Bytes>) -> Answer {
    let body = Full::new(body.into()).map_err(|never: Infallible| match never {}).boxed_unsync();
    http::Response::builder().status(code).body(body).unwrap()
}

fn upstream<F>(options: UpstreamOptions, respond: fn(http::Request<Bytes>) -> F) -> Upstream
where
    F: Future<Output = Result<Answer, BoxError>> + Send + 'static,
{
    let service = BoxCloneSyncService::new(service_fn(respond));
    Upstream::from_service(service, &Uri::from_static("https://u:p@sim.local:6443/prefix/"), options)
}

#[tokio::test]
async fn requests_ask_for_gzip_and_use_the_servers_path_prefix() {
    let upstream = upstream(UpstreamOptions::default(), |request| async move {
        assert_eq!(request.uri().to_string(), "https://sim.local:6443/prefix/api/v1/pods?limit=5");
        assert_eq!(request.headers()[header::ACCEPT_ENCODING], "gzip");
        assert!(request.headers()[header::USER_AGENT].to_str().unwrap().starts_with("kubefan/"));
        Ok(answer(200, r#"{"kind":"PodList"}"#))
    });
    let query = encode_query([("limit", "5")]);
    let value: serde_json::Value = upstream.get_json(Verb::List, &format!("/api/v1/pods{query}")).await.unwrap();
    assert_eq!(value["kind"], "PodList");
    assert_eq!(upstream.server(), "https://sim.local:6443");
}

#[tokio::test]
async fn secrets_are_asked_for_without_gzip() {
    let upstream = upstream(UpstreamOptions::default(), |request| async move {
        let is_plain = request.headers()[header::ACCEPT_ENCODING] == "identity";
        assert_eq!(is_plain, request.uri().path().contains("/secrets"), "{}", request.uri());
        Ok(answer(200, "{}\n"))
    });
    let plain = ["/api/v1/secrets?limit=5", "/api/v1/namespaces/a/secrets", "/api/v1/namespaces/a/secrets/b"];
    for path in
        plain.into_iter().chain(["/api/v1/pods?fieldSelector=metadata.name%3Dsecrets", "/apis/a/v1/externalsecrets"])
    {
        upstream.get(Verb::List, path).await.unwrap();
        upstream.stream(path, Media::Json).await.unwrap();
    }
}

#[tokio::test]
async fn a_server_on_this_machine_is_not_asked_for_gzip() {
    for base in ["http://127.0.0.1:8001", "https://localhost:6443", "https://[::1]:6443"] {
        let service = BoxCloneSyncService::new(service_fn(|request: http::Request<Bytes>| async move {
            assert_eq!(request.headers()[header::ACCEPT_ENCODING], "identity");
            Ok::<_, BoxError>(answer(200, "{}\n"))
        }));
        let upstream = Upstream::from_service(service, &base.parse().unwrap(), UpstreamOptions::default());
        upstream.get(Verb::List, "/list").await.unwrap();
        upstream.stream("/watch", Media::Json).await.unwrap();
    }
}

#[tokio::test]
async fn every_request_is_observed_once_with_its_status() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let observer = Arc::clone(&seen);
    let upstream = upstream(UpstreamOptions::default(), |request| async move {
        match request.uri().path() {
            "/prefix/ok" => Ok(answer(200, "{}")),
            "/prefix/forbidden" => Ok(answer(403, "no")),
            _ => Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into()),
        }
    })
    .with_observer(Arc::new(move |verb, code| {
        observer.lock().unwrap().push((verb.as_str(), code.map(|c| c.as_u16())))
    }));
    upstream.get(Verb::Get, "/ok").await.unwrap();
    assert_eq!(upstream.get(Verb::List, "/forbidden").await.unwrap_err().reason(), "forbidden");
    assert_eq!(upstream.stream("/down", Media::Json).await.err().unwrap().reason(), "unreachable");
    assert_eq!(*seen.lock().unwrap(), [("get", Some(200)), ("list", Some(403)), ("watch", None)]);
}

#[tokio::test]
async fn the_headers_for_an_origin_are_those_of_any_answer_that_may_be_the_apiservers() {
    let upstream = upstream(UpstreamOptions::default(), |request| async move {
        let origin = request.headers()[header::ORIGIN].clone();
        let (code, allowed) = match origin.as_bytes() {
            b"https://allowed" => (200, origin),
            // The filter is in front of authorization.
            b"https://denied" => (403, origin),
            b"https://unknown" => return Ok(answer(200, "{}")),
            b"https://long" => (200, header::HeaderValue::try_from("x".repeat(5_000)).unwrap()),
            _ => (503, origin),
        };
        let mut answer = answer(code, "{}");
        answer.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        answer.headers_mut().insert(header::SERVER, "x".parse().unwrap());
        Ok(answer)
    });
    let headers = async |origin| upstream.cross_origin_headers(&header::HeaderValue::from_static(origin)).await;
    for origin in ["https://allowed", "https://denied"] {
        let headers = headers(origin).await.unwrap();
        assert_eq!((headers.len(), &headers[header::ACCESS_CONTROL_ALLOW_ORIGIN]), (1, &origin.parse().unwrap()));
    }
    assert!(headers("https://unknown").await.unwrap().is_empty());
    for origin in ["https://long", "https://of-a-gateway"] {
        assert!(headers(origin).await.is_err(), "{origin}");
    }
}

#[tokio::test]
async fn a_failure_does_not_clear_the_warnings_about_kubefan_itself() {
    const OWN: &str = r#"299 - "your token will expire""#;
    const OTHERS: &str = r#"299 - "v1 Endpoints is deprecated""#;
    let upstream = upstream(UpstreamOptions::default(), |request| async move {
        let (code, warnings): (_, &[_]) = match request.uri().path() {
            "/prefix/version" => (200, &[OWN]),
            "/prefix/down" => (503, &[]),
            _ => (200, &[OWN, OTHERS]),
        };
        let mut answer = answer(code, "{}");
        for warning in warnings {
            answer.headers_mut().append(header::WARNING, warning.parse().unwrap());
        }
        Ok(answer)
    });
    upstream.get(Verb::Get, "/version").await.unwrap();
    for _ in 0..2 {
        let (_, warnings) = upstream.get_media(Verb::List, "/list", Media::Json, usize::MAX).await.unwrap();
        let mut headers = HeaderMap::new();
        warnings.put(&mut headers);
        let forwarded: Vec<_> = headers.get_all(header::WARNING).into_iter().collect();
        assert_eq!(forwarded, [OTHERS]);
        upstream.get(Verb::Get, "/down").await.unwrap_err();
    }
}

fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

fn gzip_answer(code: u16, body: Vec<u8>) -> Answer {
    let mut answer = answer(code, body);
    answer.headers_mut().insert(header::CONTENT_ENCODING, "gzip".parse().unwrap());
    answer
}

#[tokio::test]
async fn an_answer_above_the_limit_is_refused() {
    let options = UpstreamOptions { body_bytes_max: 1000, ..UpstreamOptions::default() };
    let upstream = upstream(options, |request| async move {
        Ok(match request.uri().path() {
            "/prefix/plain" => answer(200, vec![b' '; 1001]),
            "/prefix/bomb" => gzip_answer(200, gzip(&vec![b' '; 100_000])),
            // Its members are longer than its plain bytes.
            _ => gzip_answer(200, (0..100).flat_map(|_| gzip(b"1234567890")).collect()),
        })
    });
    for path in ["/plain", "/bomb"] {
        let error = upstream.get(Verb::Get, path).await.unwrap_err();
        assert_eq!(error, UpstreamError::TooLarge { body_bytes_max: 1000 }, "{path}");
    }
    assert_eq!(upstream.get(Verb::Get, "/members").await.unwrap().len(), 1000);
}

#[tokio::test]
async fn a_list_that_is_cut_off_or_in_another_encoding_is_an_error_with_its_status() {
    let upstream = upstream(UpstreamOptions::default(), |request| async move {
        let whole = gzip(br#"{"kind":"Status","code":403,"message":"because"}"#);
        Ok(match request.uri().path() {
            "/prefix/cut" => gzip_answer(200, whole[..whole.len() - 3].to_vec()),
            "/prefix/longer" => gzip_answer(200, [&whole[..], b"rest"].concat()),
            "/prefix/refused" => gzip_answer(403, whole),
            path => {
                let mut answer = answer(if path == "/prefix/br-refused" { 403 } else { 200 }, "x");
                answer.headers_mut().insert(header::CONTENT_ENCODING, "br".parse().unwrap());
                answer
            }
        })
    });
    let failures = [
        ("/cut", "reset"),
        ("/longer", "invalid_response"),
        ("/br", "invalid_response"),
        ("/refused", "forbidden"),
        ("/br-refused", "forbidden"),
    ];
    for (path, reason) in failures {
        let error = upstream.get(Verb::List, path).await.unwrap_err();
        assert_eq!(error.reason(), reason, "{path}: {error}");
        assert_eq!(error.to_string().contains("because"), path == "/refused", "{path}: {error}");
    }
}

/// kube-apiserver 1.37 sends a member per flush.
#[tokio::test]
async fn the_events_of_a_gzip_watch_arrive_with_their_members_and_meet_the_limit_of_a_line() {
    let upstream = upstream(UpstreamOptions::default(), |request| async move {
        let bomb = [&[b'x'; 100_000][..], b"\n"].concat();
        let last = match request.uri().query() {
            Some("cut") => gzip(b"{\"type\":3}\n")[..20].to_vec(),
            Some("bomb") => gzip(&bomb),
            _ => Vec::new(),
        };
        let chunks = [gzip(b"{\"type\":1}\n"), gzip(b"{\"type\":2}\n"), last];
        let chunks = stream::iter(chunks.map(|chunk| Ok(Frame::data(chunk.into()))));
        let mut answer = http::Response::new(BodyExt::boxed_unsync(StreamBody::new(chunks)));
        answer.headers_mut().insert(header::CONTENT_ENCODING, "gzip".parse().unwrap());
        Ok(answer)
    });
    let options = LineOptions { line_bytes_max: 50_000, ..LineOptions::default() };
    for (path, end) in [("/w?cut", Some("reset")), ("/w?bomb", Some("line_too_long")), ("/w?whole", None)] {
        let (mut lines, _) = upstream.watch(path, Media::Json, options).await.unwrap();
        assert_eq!(lines.next_line().await.unwrap().unwrap(), "{\"type\":1}");
        assert_eq!(lines.next_line().await.unwrap().unwrap(), "{\"type\":2}");
        let last = lines.next_line().await;
        assert_eq!(last.as_ref().err().map(UpstreamError::reason), end, "{path}: {last:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_never_completes_times_out() {
    let upstream = upstream(UpstreamOptions::default(), |_| async move {
        let body = StreamBody::new(stream::pending::<Result<Frame<Bytes>, BoxError>>());
        Ok(http::Response::new(BodyExt::boxed_unsync(body)))
    });
    let start = Instant::now();
    assert_eq!(upstream.get(Verb::List, "/x").await.unwrap_err().reason(), "timeout");
    assert_eq!(start.elapsed(), Duration::from_secs(60));
}

#[tokio::test]
async fn a_broken_watch_yields_its_lines_and_then_the_error() {
    let upstream = upstream(UpstreamOptions::default(), |_| async move {
        let chunks =
            [Ok(Frame::data(Bytes::from("{\"type\""))), Ok(Frame::data(Bytes::from(":1}\n"))), Err("gone".into())];
        Ok(http::Response::new(BodyExt::boxed_unsync(StreamBody::new(stream::iter(chunks)))))
    });
    let (mut lines, _) = upstream.watch("/w?watch=1", Media::Json, LineOptions::default()).await.unwrap();
    assert_eq!(lines.next_line().await.unwrap().unwrap(), "{\"type\":1}");
    assert_eq!(lines.next_line().await.unwrap_err().reason(), "reset");
}

#[tokio::test]
async fn a_refused_replacement_does_not_quote_the_servers_message() {
    let upstream = upstream(UpstreamOptions::default(), |request| async move {
        let code: u16 = request.uri().path().rsplit('/').next().unwrap().parse().unwrap();
        let body = serde_json::json!({
            "kind": "Status", "code": code, "reason": "x", "message": "SECRET", "details": { "retryAfterSeconds": 3 },
        });
        Ok(answer(code, body.to_string()))
    });
    for code in [302, 400, 401, 403, 404, 410, 413, 422, 429, 500, 503, 504] {
        let object = serde_json::json!({ "data": { "ca.key": "SECRET" } });
        let error = upstream.replace(&format!("/{code}"), &object).await.unwrap_err();
        assert!(!format!("{error} {error:?}").contains("SECRET"), "{code}: {error:?}");
        let read = upstream.get(Verb::Get, &format!("/{code}")).await.unwrap_err();
        assert_eq!((error.reason(), error.retry_after()), (read.reason(), read.retry_after()), "{code}");
    }
    assert_eq!(upstream.replace("/409", &serde_json::json!({})).await, Ok(false));
}

/// A balancer answers 503 for an apiserver that is gone, for as long as it is gone.
#[tokio::test(start_paused = true)]
async fn an_apiserver_that_is_not_ready_is_tried_in_the_end_and_never_serves() {
    let minute = Duration::from_secs(60);
    let unready = upstream(UpstreamOptions::default(), |_| async { Ok(answer(503, "")) });
    tokio::time::timeout(minute, unready.until_available()).await.unwrap();
    assert!(tokio::time::timeout(minute, unready.until_serving()).await.is_err());
    let denied = upstream(UpstreamOptions::default(), |_| async { Ok(answer(403, "")) });
    tokio::time::timeout(minute, denied.until_serving()).await.unwrap();
}

#[tokio::test]
async fn a_review_of_another_cluster_than_the_saved_one_does_not_count() {
    const KIND: review::ReviewKind = review::ReviewKind { path: "/reviews", api_version: "v1", kind: "Review" };
    let answering = |uid: &'static str| {
        let service = BoxCloneSyncService::new(service_fn(move |request: http::Request<Bytes>| async move {
            let of_cluster = request.uri().path().ends_with("/namespaces/kube-system");
            let review = r#"{"status":{"allowed":true}}"#.to_owned();
            let body = if of_cluster { format!(r#"{{"metadata":{{"uid":"{uid}"}}}}"#) } else { review };
            Ok::<_, BoxError>(answer(200, body))
        }));
        Upstream::from_service(service, &Uri::from_static("https://sim.local:6443/"), UpstreamOptions::default())
    };
    let ask = async |upstream: &Upstream| upstream.review::<serde_json::Value>(&KIND, &"spec").await;
    let other = answering("other");
    assert!(other.assume_cluster("saved"));
    let error = ask(&other).await.unwrap_err().to_string();
    assert!(error.contains("another cluster answers"), "{error}");
    let same = answering("saved");
    assert!(same.assume_cluster("saved"));
    assert_eq!(ask(&same).await.unwrap()["allowed"], true);
    assert!(!same.is_assumed(), "the check has confirmed it");
}
