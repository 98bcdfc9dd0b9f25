//! The limits of the Kubernetes API over HTTP: partial caches, the number of requests, foreign web
//! pages, and unread answers.

use std::{net::SocketAddr, time::Duration};

use kubefan_model::GroupVersionResource;
use kubefan_sim::apiserver::SimOptions;
use reqwest::{Client, Response, StatusCode};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream, UnixStream},
};

use crate::{
    connections::RawConnection,
    freshness::write_configmap,
    harness::{
        kubefan::Kubefan,
        network::answer,
        objects::version_of,
        record::{Watch, connect},
        rig::{Rig, Setup, pod, pods, target},
        servers::is_cached,
        simulated::Simulated,
        tests,
    },
};

tests! {
    local: a_partial_cache_answers_only_requests_for_its_part, without_passthrough_reads_start_caches_and_are_proved,
        with_passthrough_only_informers_start_a_cache, requests_above_a_limit_are_429,
        requests_are_counted_for_both_protocols, a_web_page_of_another_host_cannot_read,
        an_unread_answer_releases_its_resources, open_watches_do_not_delay_the_shutdown;
    paused: an_unproved_read_is_503_and_a_later_one_succeeds;
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
    let args = ["--resource=pods", "--upstream-field-selector=spec.nodeName=n1"];
    let kubefan = simulated.kubefan(&args).await;
    let shut = simulated.kubefan(&[&args[..], &["--access=local-cache-only"]].concat()).await;
    let all = format!("{PODS}?{ANY}");
    let part = format!("{all}&fieldSelector=spec.nodeName%3Dn1");
    for (path, cached, expected) in [
        (all.clone(), false, &["here", "there"][..]),
        (format!("{all}&fieldSelector=spec.nodeName%3Dn2"), false, &["there"]),
        (part.clone(), true, &["here"]),
        (format!("{part},metadata.name%3Dthere"), true, &[]),
    ] {
        let response = get(&kubefan, &path).await;
        assert_eq!((is_cached(&response), names(response).await), (cached, owned(expected)), "{path}");
        let response = get(&shut, &path).await;
        if cached {
            assert_eq!(names(response).await, owned(expected), "{path}");
        } else {
            let status = refused(response, StatusCode::BAD_REQUEST).await;
            assert!(status["message"].as_str().unwrap().contains("spec.nodeName=n1"), "{path}: {status}");
        }
        let watch = format!("{path}&watch=1&timeoutSeconds=1");
        let response = get(&kubefan, &watch).await;
        assert_eq!((response.status(), is_cached(&response)), (StatusCode::OK, cached), "{watch}");
        let expected = if cached { StatusCode::OK } else { StatusCode::BAD_REQUEST };
        assert_eq!(get(&shut, &watch).await.status(), expected, "{watch}");
    }
    let object = |name: &str| format!("/api/v1/namespaces/default/pods/{name}?{ANY}");
    for name in ["here", "there"] {
        let response = get(&kubefan, &object(name)).await;
        assert_eq!((response.status(), is_cached(&response)), (StatusCode::OK, false), "{name} may have moved");
    }
    assert_eq!(json_of(get(&shut, &object("here")).await).await["metadata"]["name"], "here");
    // The pod may exist, so a 404 would be wrong.
    let status = refused(get(&shut, &object("there")).await, StatusCode::SERVICE_UNAVAILABLE).await;
    assert!(status["message"].as_str().unwrap().contains("--upstream-field-selector"), "{status}");
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| name.to_string()).collect()
}

async fn without_passthrough_reads_start_caches_and_are_proved() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--on-demand", "--access=local-cache-only"]).await;
    let configmaps = GroupVersionResource::new("", "v1", "configmaps");
    // The cluster's version advances and the pods' does not, so a look-up alone proves nothing
    // about pods.
    let elsewhere = json!({ "metadata": { "namespace": "default", "name": "elsewhere" } });
    let version = simulated.sim.create(&configmaps, elsewhere).unwrap();
    let list = json_of(get(&kubefan, PODS).await).await;
    assert!(version_of(&list) >= version && list["items"].as_array().unwrap().len() == 3, "{list}");
    simulated.create("new");
    let object = |resource: &str, name: &str| format!("/api/v1/namespaces/default/{resource}/{name}");
    for (resource, name) in [("pods", "new"), ("configmaps", "elsewhere")] {
        let found = json_of(get(&kubefan, &object(resource, name)).await).await;
        assert_eq!(found["metadata"]["name"], name, "{found}");
    }
    let status = refused(get(&kubefan, &object("pods", "none")).await, StatusCode::NOT_FOUND).await;
    assert_eq!(status["details"]["name"], "none", "{status}");
    // Without passthrough, kubefan ignores that this client wants indented JSON.
    let curl = client().get(format!("http://{}{PODS}?{ANY}", kubefan.grpc_addr)).header("user-agent", "curl/8");
    assert_eq!(curl.send().await.unwrap().status(), StatusCode::OK);
}

async fn an_unproved_read_is_503_and_a_later_one_succeeds() {
    let setup = Setup::of(&["pods"]);
    let sim = setup.sim();
    // One list of metadata would prove the state of fewer objects.
    for number in 0..1_100 {
        sim.create(&pods(), pod(&format!("p{number}"), "new")).unwrap();
    }
    let rig = Rig::synced(sim, setup).await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    write_configmap(&rig.sim);
    let is_probe = |path: &str| path.starts_with(PODS) && path.contains("watch=1");
    rig.network.answer_once(is_probe, answer(200, Vec::new(), true));
    let mut raw = RawConnection::to(&rig).await;
    for (code, text) in [(503, "no bookmark"), (200, r#""name":"p999""#)] {
        let request = http::Request::get(format!("http://localhost{PODS}")).body(()).unwrap();
        let response = raw.requests.send_request(request, true).unwrap().0.await.unwrap();
        assert_eq!(response.status(), code);
        let mut body = response.into_body();
        let mut read = Vec::new();
        while let Some(data) = body.data().await {
            let data = data.unwrap();
            body.flow_control().release_capacity(data.len()).unwrap();
            read.extend_from_slice(&data);
        }
        let read = String::from_utf8(read).unwrap();
        assert!(read.contains(text), "{code}: {read:.300}");
    }
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

/// Sends a request with further headers and does not read the answer.
async fn ask(address: SocketAddr, path: &str, headers: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(address).await.unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n").as_bytes()).await.unwrap();
    stream
}

/// Asserts a 429 that names this flag.
async fn over_limit(kubefan: &Kubefan, path: &str, flag: &str) {
    let response = get(kubefan, path).await;
    assert_eq!(response.headers()["retry-after"], "1", "{path}");
    let status = refused(response, StatusCode::TOO_MANY_REQUESTS).await;
    let details = (&status["reason"], &status["details"]["retryAfterSeconds"]);
    assert_eq!(details, (&json!("TooManyRequests"), &json!(1)), "{path}");
    assert!(status["message"].as_str().unwrap().contains(flag), "{path}: {status}");
}

async fn requests_above_a_limit_are_429() {
    let simulated = large().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "limits.readsMax=1", "limits.subscribersMax=2"]).await;
    let all = format!("{PODS}?{ANY}");
    let watch = format!("{PODS}?{ANY}&watch=1");
    let unread = ask(kubefan.grpc_addr, &all, "").await;
    let list = r#"kubefan_requests_inflight{protocol="http",verb="list"}"#;
    kubefan.metric_becomes(list, 1.0).await;
    for path in [&all, &format!("/api/v1/namespaces/default/pods/large-1?{ANY}")] {
        over_limit(&kubefan, path, "limits.readsMax").await;
    }
    for verb in ["list", "get"] {
        let refused = requests("kubefan", "429", "http", "pods", verb);
        assert_eq!(kubefan.metric(&refused).await, Some(1.0), "{refused}");
    }
    // Watches and forwarded requests have separate limits. The limit of watches is for both
    // protocols.
    let over_http = get(&kubefan, &watch).await;
    assert_eq!(over_http.status(), StatusCode::OK);
    assert_eq!(get(&kubefan, "/version").await.status(), StatusCode::OK);
    let _over_grpc = Watch::start(&mut connect(kubefan.grpc_addr).await, target("pods"), "").await.unwrap();
    over_limit(&kubefan, &watch, "limits.subscribersMax").await;
    drop(unread);
    kubefan.metric_becomes(list, 0.0).await;
    assert_eq!(get(&kubefan, &format!("{all}&limit=1")).await.status(), StatusCode::OK);
}

/// The metric that counts requests.
fn requests(by: &str, code: &str, protocol: &str, resource: &str, verb: &str) -> String {
    let labels =
        format!(r#"answered_by="{by}",code="{code}",protocol="{protocol}",resource="{resource}",verb="{verb}""#);
    format!("kubefan_requests_total{{{labels}}}")
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
    for (by, code, protocol, resource, verb) in [
        ("cache", "200", "http", "pods", "list"),
        ("cache", "200", "http", "pods", "get"),
        ("cache", "404", "http", "pods", "get"),
        ("upstream", "200", "http", "pods", "get"),
        ("upstream", "200", "http", "other", "list"),
        ("upstream", "200", "http", "other", "get"),
        ("cache", "200", "http", "pods", "watch"),
        ("cache", "OK", "grpc", "pods", "watch"),
        ("kubefan", "NOT_FOUND", "grpc", "other", "watch"),
    ] {
        let line = requests(by, code, protocol, resource, verb);
        assert_eq!(kubefan.metric(&line).await, Some(1.0), "{line}");
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
    let http2 = || Client::builder().no_proxy().http2_prior_knowledge();
    let image = ("sec-fetch-site", "cross-site");
    // The owner of a host name chooses the address it resolves to.
    for client in [Client::builder().no_proxy().http1_only(), http2()] {
        let client = client.resolve("evil.example", kubefan.grpc_addr).resolve("localhost", kubefan.grpc_addr);
        let client = client.build().unwrap();
        for (host, header, is_allowed) in [
            ("localhost", None, true),
            ("localhost", Some(("origin", "http://localhost:3000")), true),
            ("localhost", Some(("origin", "https://evil.example")), false),
            ("127.0.0.1", Some(("origin", "null")), false),
            ("127.0.0.1", Some(image), false),
            ("evil.example", None, false),
        ] {
            for path in [&*format!("{PODS}?{ANY}"), "/version"] {
                let request = client.get(format!("http://{host}:{port}{path}"));
                let request = header.iter().fold(request, |request, (name, value)| request.header(*name, *value));
                let response = request.send().await.unwrap();
                if is_allowed {
                    assert_eq!(response.status(), StatusCode::OK, "{host} {header:?} {path}");
                    continue;
                }
                let status = refused(response, StatusCode::FORBIDDEN).await;
                let message = status["message"].as_str().unwrap();
                let is_named = host != "evil.example" || message.contains(host);
                assert!(is_named && message.contains("127.0.0.1"), "{host} {header:?} {path}: {status}");
            }
        }
    }
    // The refusal of a HEAD has no body; HTTP/2 would treat one as a broken stream.
    let page = http2().resolve("evil.example", kubefan.grpc_addr).build().unwrap();
    let head = page.head(format!("http://evil.example:{port}/version")).send().await.unwrap();
    assert_eq!((head.status(), head.bytes().await.unwrap().len()), (StatusCode::FORBIDDEN, 0));
    // A web page cannot send gRPC.
    let check = page.post(format!("http://evil.example:{port}/grpc.health.v1.Health/Check")).body(vec![0; 5]);
    let answer = check.header("content-type", "application/grpc").header("te", "trailers").send().await.unwrap();
    let content_type = answer.headers()["content-type"].to_str().unwrap();
    assert_eq!((answer.status(), content_type), (StatusCode::OK, "application/grpc"));
    // On every address, the names of Services and those that a flag allows are known.
    let args = ["--access=insecure", "--resource=pods", "--allowed-hosts=kubefan.example,*.corp.example"];
    let open = Kubefan::spawn_at(&simulated.kubeconfig(), "0.0.0.0:0", &args).await;
    open.ready().await;
    for (host, code) in [
        ("evil.example", StatusCode::FORBIDDEN),
        ("kubefan.example:7443", StatusCode::OK),
        ("a.corp.example", StatusCode::OK),
        ("kubefan.kubefan.svc", StatusCode::OK),
    ] {
        let url = format!("http://127.0.0.1:{}{PODS}?{ANY}", open.grpc_addr.port());
        assert_eq!(client().get(url).header("host", host).send().await.unwrap().status(), code, "{host}");
    }
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
    let kubefan = simulated.kubefan(&["--resource=pods", "tuning.snapshotStallTimeout=5s"]).await;
    let websocket = "Origin: http://localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                     Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    for (query, headers, gauge) in [
        ("", "", "kubefan_snapshots"),
        ("&pretty=1", "", "kubefan_passthrough_requests"),
        ("&watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan", "", "kubefan_snapshots"),
        ("&watch=1", websocket, "kubefan_snapshots"),
    ] {
        // kubefan must close the connection even though the client's side stays open.
        let unread = ask(kubefan.grpc_addr, &format!("{PODS}?{ANY}{query}"), headers).await;
        kubefan.metric_becomes(gauge, 1.0).await;
        kubefan.metric_becomes(gauge, 0.0).await;
        kubefan.metric_becomes("kubefan_connections", 0.0).await;
        drop(unread);
    }
    kubefan.metric_becomes(r#"kubefan_requests_inflight{protocol="http",verb="list"}"#, 0.0).await;
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
    drop(http1);
    drop(http2);
    assert!(kubefan.process.ended(Duration::from_secs(60)).await.success());
}
