//! The limits of the Kubernetes API over HTTP: partial caches, the number of requests, foreign web
//! pages, and unread answers.

use std::{net::SocketAddr, time::Duration};

use kubefan_model::GroupVersionResource;
use kubefan_sim::apiserver::{Fault, FaultRule, SimOptions, Verb};
use reqwest::{Client, Response, StatusCode};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream, UnixStream},
};

use crate::harness::{
    kubefan::Kubefan,
    record::{Watch, connect},
    rig::{pod, pods, target},
    servers::is_cached,
    simulated::Simulated,
    tests,
};

tests! {
    local: a_partial_cache_answers_only_requests_for_its_part,
        a_partial_cache_refuses_other_requests_without_passthrough, consistent_reads_are_proved_without_passthrough,
        an_unproved_read_is_503_and_a_later_one_succeeds, reads_above_the_limit_are_429,
        watches_above_the_limit_are_429, requests_are_counted_for_both_protocols,
        a_web_page_of_another_host_cannot_read, an_unread_answer_releases_its_resources,
        a_disconnect_is_noticed_behind_a_pipelined_request, with_passthrough_only_informers_start_a_cache,
        reads_start_caches_without_passthrough, open_watches_do_not_delay_the_shutdown;
}

const PODS: &str = "/api/v1/pods";
const ANY: &str = "resourceVersion=0";

fn client() -> Client {
    Client::builder().no_proxy().build().unwrap()
}

async fn get(kubefan: &Kubefan, path: &str) -> Response {
    client().get(format!("http://{}{path}", kubefan.grpc_addr)).send().await.unwrap()
}

async fn json_of(response: Response) -> Value {
    let text = response.text().await.unwrap();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

async fn names(response: Response) -> Vec<String> {
    let list = json_of(response).await;
    let items = list["items"].as_array().unwrap_or_else(|| panic!("{list}"));
    items.iter().map(|item| item["metadata"]["name"].as_str().unwrap().to_owned()).collect()
}

/// Asserts this code and returns the Status.
async fn refused(response: Response, code: StatusCode) -> Value {
    assert_eq!(response.status(), code);
    let status = json_of(response).await;
    assert_eq!((&status["kind"], &status["code"]), (&json!("Status"), &json!(code.as_u16())), "{status}");
    status
}

fn on_node(name: &str, node: &str) -> Value {
    let mut pod = pod(name, "new");
    pod["spec"]["nodeName"] = json!(node);
    pod
}

/// Two nodes with a pod each.
async fn two_nodes() -> Simulated {
    let simulated = Simulated::with(SimOptions::default()).await;
    for (name, node) in [("here", "n1"), ("there", "n2")] {
        simulated.sim.create(&pods(), on_node(name, node)).unwrap();
    }
    simulated
}

async fn a_partial_cache_answers_only_requests_for_its_part() {
    let simulated = two_nodes().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "--upstream-field-selector=spec.nodeName=n1"]).await;
    let part = format!("{PODS}?{ANY}&fieldSelector=spec.nodeName%3Dn1");
    for (path, cached, expected) in [
        (format!("{PODS}?{ANY}"), false, &["here", "there"][..]),
        (format!("{PODS}?{ANY}&fieldSelector=spec.nodeName%3Dn2"), false, &["there"]),
        (part.clone(), true, &["here"]),
        (format!("{part},metadata.name%3Dthere"), true, &[]),
    ] {
        let response = get(&kubefan, &path).await;
        assert_eq!(
            (is_cached(&response), names(response).await),
            (cached, expected.to_vec().iter().map(|name| name.to_string()).collect()),
            "{path}"
        );
    }
    for name in ["here", "there"] {
        let response = get(&kubefan, &format!("/api/v1/namespaces/default/pods/{name}?{ANY}")).await;
        assert_eq!(
            (response.status(), is_cached(&response)),
            (StatusCode::OK, false),
            "{name}: the pod may have moved to another node"
        );
    }
    for (path, cached) in [(format!("{PODS}?{ANY}&watch=1"), false), (format!("{part}&watch=1"), true)] {
        let mut watch = get(&kubefan, &path).await;
        assert_eq!((watch.status(), is_cached(&watch)), (StatusCode::OK, cached), "{path}");
        assert!(watch.chunk().await.unwrap().is_some());
    }
}

async fn a_partial_cache_refuses_other_requests_without_passthrough() {
    let simulated = two_nodes().await;
    let args = ["--resource=pods", "--upstream-field-selector=spec.nodeName=n1", "--passthrough=off"];
    let kubefan = simulated.kubefan(&args).await;
    for path in [format!("{PODS}?{ANY}"), format!("{PODS}?{ANY}&watch=1")] {
        let status = refused(get(&kubefan, &path).await, StatusCode::BAD_REQUEST).await;
        assert!(status["message"].as_str().unwrap().contains("spec.nodeName=n1"), "{status}");
    }
    assert_eq!(names(get(&kubefan, &format!("{PODS}?{ANY}&fieldSelector=spec.nodeName=n1")).await).await, ["here"]);
    let object = |name: &str| format!("/api/v1/namespaces/default/pods/{name}?{ANY}");
    let cached = json_of(get(&kubefan, &object("here")).await).await;
    assert_eq!(cached["metadata"]["name"], "here");
    let status = refused(get(&kubefan, &object("there")).await, StatusCode::SERVICE_UNAVAILABLE).await;
    assert!(
        status["message"].as_str().unwrap().contains("--upstream-field-selector"),
        "the pod may exist, so a 404 would be wrong: {status}"
    );
}

async fn consistent_reads_are_proved_without_passthrough() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "--passthrough=off"]).await;
    let configmaps = GroupVersionResource::new("", "v1", "configmaps");
    for round in 0..2 {
        let name = format!("new-{round}");
        simulated.create(&name);
        // The cluster's version advances and the pods' does not, so a look-up alone proves nothing
        // about pods.
        let elsewhere = json!({ "metadata": { "namespace": "default", "name": name } });
        let version = simulated.sim.create(&configmaps, elsewhere).unwrap();
        if round == 0 {
            let list = json_of(get(&kubefan, PODS).await).await;
            let reached: u64 = list["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
            assert!(reached >= version && list["items"].as_array().unwrap().len() == 4, "{list}");
        } else {
            let object = json_of(get(&kubefan, &format!("/api/v1/namespaces/default/pods/{name}")).await).await;
            assert_eq!(object["metadata"]["name"], *name, "{object}");
        }
    }
    let status = refused(get(&kubefan, "/api/v1/namespaces/default/pods/none").await, StatusCode::NOT_FOUND).await;
    assert_eq!(status["details"]["name"], "none", "{status}");
    // Without passthrough, kubefan ignores that this client wants indented JSON.
    let curl = client().get(format!("http://{}{PODS}?{ANY}", kubefan.grpc_addr)).header("user-agent", "curl/8");
    assert_eq!(curl.send().await.unwrap().status(), StatusCode::OK);
}

async fn an_unproved_read_is_503_and_a_later_one_succeeds() {
    let simulated = Simulated::start().await;
    // One list of metadata would prove the state of fewer objects.
    for number in 0..1_000 {
        simulated.create(&format!("many-{number}"));
    }
    let kubefan = simulated.kubefan(&["--resource=pods", "--passthrough=off"]).await;
    let mut attempts = 0..3;
    let status = loop {
        simulated.sim.clear_faults();
        simulated.sim.set_fault(FaultRule {
            fault: Fault::Silence,
            verb: Some(Verb::Watch),
            resource: Some(pods()),
            requests: 1,
        });
        let attempt = attempts.next().expect("a watch has only one first bookmark");
        let elsewhere = json!({ "metadata": { "namespace": "default", "name": format!("elsewhere-{attempt}") } });
        simulated.sim.create(&GroupVersionResource::new("", "v1", "configmaps"), elsewhere).unwrap();
        let answer = get(&kubefan, PODS).await;
        // The first bookmark of that watch also proves freshness.
        if answer.status() != StatusCode::OK {
            break refused(answer, StatusCode::SERVICE_UNAVAILABLE).await;
        }
    };
    assert!(status["message"].as_str().unwrap().contains("no bookmark"), "{status}");
    assert_eq!(names(get(&kubefan, PODS).await).await.len(), 1_003);
}

/// More than the sockets can buffer.
async fn large() -> Simulated {
    let simulated = Simulated::with(SimOptions::default()).await;
    for number in 0..240 {
        let mut large = pod(&format!("large-{number}"), "new");
        large["metadata"]["annotations"] = json!({ "x": "x".repeat(100_000) });
        simulated.sim.create(&pods(), large).unwrap();
    }
    simulated
}

/// Sends a request and does not read the answer.
async fn ask(address: SocketAddr, path: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(address).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).await.unwrap();
    stream
}

async fn reads_above_the_limit_are_429() {
    let simulated = large().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "--reads-max=1"]).await;
    let unread = ask(kubefan.grpc_addr, &format!("{PODS}?{ANY}")).await;
    let list = r#"kubefan_requests_inflight{protocol="http",verb="list"}"#;
    kubefan.metric_becomes(list, 1.0).await;
    for path in [format!("{PODS}?{ANY}"), format!("/api/v1/namespaces/default/pods/large-1?{ANY}")] {
        let response = get(&kubefan, &path).await;
        assert_eq!(response.headers()["retry-after"], "1");
        let status = refused(response, StatusCode::TOO_MANY_REQUESTS).await;
        assert_eq!(
            (&status["reason"], &status["details"]["retryAfterSeconds"]),
            (&json!("TooManyRequests"), &json!(1))
        );
        assert!(status["message"].as_str().unwrap().contains("--reads-max"), "{status}");
    }
    for verb in ["list", "get"] {
        let line = format!(
            r#"kubefan_requests_total{{answered_by="kubefan",code="429",protocol="http",resource="pods",verb="{verb}"}}"#
        );
        assert_eq!(kubefan.metric(&line).await, Some(1.0), "{line}");
    }
    // Watches and forwarded requests have separate limits.
    assert_eq!(get(&kubefan, &format!("{PODS}?{ANY}&watch=1")).await.status(), StatusCode::OK);
    assert_eq!(get(&kubefan, "/version").await.status(), StatusCode::OK);
    drop(unread);
    kubefan.metric_becomes(list, 0.0).await;
    assert_eq!(get(&kubefan, &format!("{PODS}?{ANY}&limit=1")).await.status(), StatusCode::OK);
}

async fn watches_above_the_limit_are_429() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "--subscribers-max=2"]).await;
    let path = format!("{PODS}?{ANY}&watch=1");
    let _over_http = get(&kubefan, &path).await;
    let _over_grpc = Watch::start(&mut connect(kubefan.grpc_addr).await, target("pods"), "").await.unwrap();
    let response = get(&kubefan, &path).await;
    assert_eq!(response.headers()["retry-after"], "1");
    let status = refused(response, StatusCode::TOO_MANY_REQUESTS).await;
    assert!(status["message"].as_str().unwrap().contains("--subscribers-max"), "{status}");
    assert_eq!(
        get(&kubefan, &format!("{PODS}?{ANY}")).await.status(),
        StatusCode::OK,
        "a list does not count as a watch"
    );
}

async fn requests_are_counted_for_both_protocols() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "--on-demand=false"]).await;
    let object = "/api/v1/namespaces/default/pods";
    for path in [
        format!("{PODS}?{ANY}"),
        format!("{object}/a?{ANY}"),
        format!("{object}/none?{ANY}"),
        format!("{object}/a/status"),
        "/api/v1/namespaces/default/configmaps".to_owned(),
        "/version".to_owned(),
    ] {
        get(&kubefan, &path).await.bytes().await.unwrap();
    }
    let _watch = get(&kubefan, &format!("{PODS}?{ANY}&watch=1")).await;
    let mut grpc = connect(kubefan.grpc_addr).await;
    let _other = Watch::start(&mut grpc, target("pods"), "").await.unwrap();
    assert!(Watch::start(&mut grpc, target("unicorns"), "").await.is_err());
    let count = async |by: &str, code: &str, protocol: &str, resource: &str, verb: &str| {
        let line = format!(
            r#"kubefan_requests_total{{answered_by="{by}",code="{code}",protocol="{protocol}",resource="{resource}",verb="{verb}"}}"#
        );
        (kubefan.metric(&line).await, line)
    };
    for (by, code, protocol, resource, verb, expected) in [
        ("cache", "200", "http", "pods", "list", 1.0),
        ("cache", "200", "http", "pods", "get", 1.0),
        ("cache", "404", "http", "pods", "get", 1.0),
        ("upstream", "200", "http", "pods", "get", 1.0),
        ("upstream", "200", "http", "other", "list", 1.0),
        ("upstream", "200", "http", "other", "get", 1.0),
        ("cache", "200", "http", "pods", "watch", 1.0),
        ("cache", "OK", "grpc", "pods", "watch", 1.0),
        ("kubefan", "NOT_FOUND", "grpc", "other", "watch", 1.0),
    ] {
        let (got, line) = count(by, code, protocol, resource, verb).await;
        assert_eq!(got, Some(expected), "{line}");
    }
    for (by, verb, expected) in [("cache", "get", Some(2.0)), ("upstream", "get", Some(2.0)), ("cache", "watch", None)]
    {
        let labels = format!(r#"{{answered_by="{by}",protocol="http",verb="{verb}"}}"#);
        let timed = kubefan.metric(&format!("kubefan_request_duration_seconds_count{labels}")).await;
        assert_eq!(timed, expected, "{labels}");
    }
    kubefan.metric_becomes(r#"kubefan_requests_inflight{protocol="http",verb="watch"}"#, 0.0).await;
}

async fn a_web_page_of_another_host_cannot_read() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let port = kubefan.grpc_addr.port();
    let http1 = || Client::builder().no_proxy().http1_only();
    let http2 = || Client::builder().no_proxy().http2_prior_knowledge();
    // The owner of a host name chooses the address it resolves to.
    for client in [http1(), http2()] {
        let client = client.resolve("evil.example", kubefan.grpc_addr).resolve("localhost", kubefan.grpc_addr);
        let client = client.build().unwrap();
        for path in [format!("{PODS}?{ANY}"), "/version".to_owned()] {
            for host in ["localhost", "127.0.0.1"] {
                let url = format!("http://{host}:{port}{path}");
                assert_eq!(client.get(&url).send().await.unwrap().status(), StatusCode::OK, "{url}");
                let own = client.get(&url).header("origin", "http://localhost:3000").send().await.unwrap();
                assert_eq!(own.status(), StatusCode::OK, "{url}");
                for origin in ["https://evil.example", "null"] {
                    let page = client.get(&url).header("origin", origin).send().await.unwrap();
                    refused(page, StatusCode::FORBIDDEN).await;
                }
            }
            let rebound = client.get(format!("http://evil.example:{port}{path}")).send().await.unwrap();
            let status = refused(rebound, StatusCode::FORBIDDEN).await;
            let message = status["message"].as_str().unwrap();
            assert!(message.contains("evil.example") && message.contains("127.0.0.1"), "{status}");
        }
    }
    // The refusal of a HEAD has no body; HTTP/2 would treat one as a broken stream.
    let url = format!("http://evil.example:{port}/version");
    let client = http2().resolve("evil.example", kubefan.grpc_addr).build().unwrap();
    let head = client.head(&url).send().await.unwrap();
    assert_eq!((head.status(), head.bytes().await.unwrap().len()), (StatusCode::FORBIDDEN, 0));
    // A web page cannot send gRPC.
    let grpc = http2().resolve("kubefan.example", kubefan.grpc_addr).build().unwrap();
    let check = grpc.post(format!("http://kubefan.example:{port}/grpc.health.v1.Health/Check")).body(vec![0; 5]);
    let answer = check.header("content-type", "application/grpc").header("te", "trailers").send().await.unwrap();
    assert_eq!(
        (answer.status(), &answer.headers()["content-type"]),
        (StatusCode::OK, &"application/grpc".parse().unwrap())
    );
    // A web page cannot reach a Unix socket either.
    let path = simulated.dir.path().join("kubefan.sock");
    let _kubefan = simulated.kubefan_at(&format!("unix:{}", path.display())).await;
    let mut stream = UnixStream::connect(&path).await.unwrap();
    let request = format!("GET {PODS}?{ANY} HTTP/1.1\r\nHost: kubefan\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

async fn an_unread_answer_releases_its_resources() {
    let simulated = large().await;
    // For this time the metrics below show the answer.
    let kubefan = simulated.kubefan(&["--resource=pods", "--snapshot-stall-timeout=5s"]).await;
    let inflight = r#"kubefan_requests_inflight{protocol="http",verb="list"}"#;
    for (path, gauge) in [
        (format!("{PODS}?{ANY}"), "kubefan_snapshots"),
        (format!("{PODS}?{ANY}&pretty=1"), "kubefan_passthrough_requests"),
        (format!("{PODS}?{ANY}&watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan"), "kubefan_snapshots"),
    ] {
        // kubefan must close the connection even though the client's side stays open.
        let unread = ask(kubefan.grpc_addr, &path).await;
        kubefan.metric_becomes(gauge, 1.0).await;
        kubefan.metric_becomes(gauge, 0.0).await;
        kubefan.metric_becomes("kubefan_connections", 0.0).await;
        drop(unread);
    }
    kubefan.metric_becomes(inflight, 0.0).await;
}

async fn a_disconnect_is_noticed_behind_a_pipelined_request() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "--on-demand=false"]).await;
    let subscribers = r#"kubefan_subscribers{group="",media="json",namespace="",resource="pods"}"#;
    for (path, open) in [(PODS, subscribers), ("/api/v1/configmaps", "kubefan_passthrough_requests")] {
        let watch = format!("GET {path}?{ANY}&watch=1 HTTP/1.1\r\nHost: localhost\r\n\r\n");
        let mut stream = TcpStream::connect(kubefan.grpc_addr).await.unwrap();
        stream.write_all(format!("{watch}GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).await.unwrap();
        kubefan.metric_becomes(open, 1.0).await;
        // Read everything, so that the client's close is orderly and only polling the socket
        // reveals it.
        let mut read = String::new();
        let has_all = |read: &str| read.contains(if path == PODS { r#""name":"c""# } else { "\r\n\r\n" });
        while !has_all(&read) {
            let mut some = [0; 4096];
            let count = stream.read(&mut some).await.unwrap();
            read += &String::from_utf8_lossy(&some[..count]);
        }
        drop(stream);
        kubefan.metric_becomes(open, 0.0).await;
    }
    // A client that disconnects while reading is not counted as a failure.
    let mut watch = get(&kubefan, &format!("{PODS}?{ANY}&watch=1")).await;
    assert!(watch.chunk().await.unwrap().is_some());
    drop(watch);
    kubefan.metric_becomes(r#"kubefan_connections_finished_total{reason="closed"}"#, 3.0).await;
}

async fn with_passthrough_only_informers_start_a_cache() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--on-demand"]).await;
    for path in [
        PODS.to_owned(),
        format!("{PODS}?{ANY}&labelSelector=a"),
        format!("/api/v1/namespaces/default/pods?{ANY}"),
        format!("/api/v1/namespaces/default/pods/a?{ANY}"),
    ] {
        let response = get(&kubefan, &path).await;
        assert_eq!((response.status(), is_cached(&response)), (StatusCode::OK, false), "{path}");
    }
    let synced =
        |resource: &str| format!(r#"kubefan_synced{{group="",media="json",namespace="",resource="{resource}"}}"#);
    assert_eq!(kubefan.metric(&synced("pods")).await, None);
    let watch = get(&kubefan, &format!("{PODS}?{ANY}&watch=1")).await;
    assert!(is_cached(&watch));
    assert_eq!(kubefan.metric(&synced("pods")).await, Some(1.0));
    assert!(is_cached(&get(&kubefan, &format!("{PODS}?{ANY}")).await), "an existing cache is used");
    // An informer begins with such a list: the cache's own list takes its place.
    let list = get(&kubefan, &format!("/api/v1/configmaps?{ANY}&limit=500")).await;
    assert_eq!((list.status(), is_cached(&list)), (StatusCode::OK, true));
    assert_eq!(kubefan.metric(&synced("configmaps")).await, Some(1.0));
}

async fn reads_start_caches_without_passthrough() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--on-demand", "--passthrough=off"]).await;
    assert_eq!(names(get(&kubefan, &format!("{PODS}?{ANY}")).await).await, ["a", "b", "c"]);
    let configmap = GroupVersionResource::new("", "v1", "configmaps");
    simulated.sim.create(&configmap, json!({ "metadata": { "namespace": "default", "name": "x" } })).unwrap();
    let object = json_of(get(&kubefan, &format!("/api/v1/namespaces/default/configmaps/x?{ANY}")).await).await;
    assert_eq!(object["metadata"]["name"], "x", "{object}");
}

async fn open_watches_do_not_delay_the_shutdown() {
    let simulated = Simulated::start().await;
    let mut kubefan = simulated.kubefan(&["--resource=pods", "--on-demand=false", "--drain-timeout=10m"]).await;
    let http1 = Client::builder().no_proxy().http1_only().build().unwrap();
    let http2 = Client::builder().no_proxy().http2_prior_knowledge().build().unwrap();
    let mut watches = Vec::new();
    for (client, path) in
        [(&http1, PODS), (&http1, "/api/v1/configmaps"), (&http2, PODS), (&http2, "/api/v1/configmaps")]
    {
        let url = format!("http://{}{path}?{ANY}&watch=1", kubefan.grpc_addr);
        let watch = client.get(&url).send().await.unwrap();
        assert_eq!((watch.status(), is_cached(&watch)), (StatusCode::OK, path == PODS));
        watches.push(watch);
    }
    kubefan.process.terminate();
    for mut watch in watches {
        // The stream must end without an error, so that the client resumes elsewhere.
        while watch.chunk().await.unwrap().is_some() {}
    }
    drop((http1, http2));
    assert!(kubefan.process.ended(Duration::from_secs(60)).await.success());
}
