//! Bad input gets the right status code and one clear line that names the mistake and the remedy.
//! It causes no panic and disturbs no other request. All tests use the real binary; the harness
//! checks every kubefan for panics when it ends.

use std::{net::SocketAddr, time::Duration};

use kubefan_common::proto::v1alpha1::{
    GetRequest, ListRequest, Target, WatchRequest, WatchResponse, watch_service_client::WatchServiceClient,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tonic::{Code, Request, Status, transport::Channel};
use tonic_types::StatusExt;

use crate::harness::{
    kubefan::{Kubefan, Ran, run},
    process::closed_port,
    record::{Query, Watch, connect},
    rig::target,
    simulated::Simulated,
    tests,
};

tests! {
    local: unknown_resources_are_refused_with_a_suggestion, bad_selectors_are_refused_with_the_byte_offset,
        bad_versions_are_refused, invalid_names_are_refused, invalid_durations_are_refused, invalid_gets_are_refused,
        garbage_on_the_data_port_disturbs_no_subscriber, a_request_that_is_too_long_is_refused,
        an_unknown_method_is_refused, the_command_line_reports_mistakes, the_client_prints_the_servers_error,
        the_admin_port_refuses_bad_requests;
}

/// Checks for exactly one line on stderr that has all of these parts, and the exit code.
pub(crate) fn assert_line(what: &str, ran: &Ran, code: i32, has: &[&str]) {
    assert_eq!(ran.code, Some(code), "{what}: {ran:?}");
    assert_eq!(ran.stdout, "", "{what}: errors do not go to stdout");
    let lines: Vec<&str> = ran.stderr.lines().collect();
    assert_eq!(lines.len(), 1, "{what}: not one line: {}", ran.stderr);
    for part in has {
        assert!(ran.stderr.contains(part), "{what}: {part:?} is not in {}", ran.stderr);
    }
    assert!(!ran.stderr.trim_end().contains(|c: char| c.is_control()), "{what}: {:?}", ran.stderr);
    assert!(ran.stderr.len() < 1000, "{what}: {}", ran.stderr);
}

/// A subscriber that the bad requests must not disturb.
struct HealthySubscriber {
    watch: Watch,
    writes: u32,
}

impl HealthySubscriber {
    async fn of(kubefan: &Kubefan) -> HealthySubscriber {
        let mut watch = Watch::start(&mut connect(kubefan.grpc_addr).await, target("pods"), "").await.unwrap();
        watch.until_resumable().await;
        HealthySubscriber { watch, writes: 0 }
    }

    /// Writes once and checks that the subscriber gets exactly this event.
    async fn gets_the_next_event(&mut self, simulated: &Simulated) {
        self.writes += 1;
        let version = simulated.stage("a", &format!("s{}", self.writes));
        self.watch.until(version).await;
        assert_eq!(self.watch.events.len() as u32, self.writes, "nothing lost, nothing repeated");
    }
}

pub(crate) async fn assert_a_subscriber_gets_events(simulated: &Simulated, kubefan: &Kubefan) {
    HealthySubscriber::of(kubefan).await.gets_the_next_event(simulated).await;
}

/// A simulated apiserver, kubefan with pods, a subscriber, and a client for the bad requests.
async fn with_subscriber() -> (Simulated, Kubefan, HealthySubscriber, WatchServiceClient<Channel>) {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let subscriber = HealthySubscriber::of(&kubefan).await;
    let client = connect(kubefan.grpc_addr).await;
    (simulated, kubefan, subscriber, client)
}

/// Checks a refusal: its code, the field at fault, and an ErrorInfo with a reason.
fn assert_refused(what: &str, status: &Status, code: Code, field: &str, has: &str) {
    assert_eq!(status.code(), code, "{what}: {status:?}");
    assert!(status.message().contains(has), "{what}: {has:?} is not in {}", status.message());
    assert!(!status.message().contains(|c: char| c.is_control()), "{what}: one line: {:?}", status.message());
    let info = status.get_details_error_info().unwrap_or_else(|| panic!("{what}: no ErrorInfo"));
    assert_eq!(info.domain, "kubefan.dev", "{what}");
    assert!(!info.reason.is_empty(), "{what}");
    let named = status.get_details_bad_request().map(|bad| bad.field_violations[0].field.clone()).unwrap_or_default();
    assert_eq!(named, field, "{what}: the field at fault");
}

async fn watch_error(client: &mut WatchServiceClient<Channel>, request: WatchRequest) -> Status {
    match client.watch(request).await {
        Err(status) => status,
        Ok(response) => panic!("the request was served: {:?}", response.into_inner().message().await),
    }
}

fn watch_of(target: Target) -> WatchRequest {
    WatchRequest { target: Some(target), ..WatchRequest::default() }
}

async fn unknown_resources_are_refused_with_a_suggestion() {
    let (simulated, _kubefan, mut subscriber, mut client) = with_subscriber().await;
    let cases = [
        ("podz", "did you mean \"pods\"?"),
        ("deploymnets", "did you mean \"deployments.apps\"?"),
        ("xyzzy", "kubectl api-resources"),
    ];
    for (name, has) in cases {
        let status = watch_error(&mut client, watch_of(target(name))).await;
        assert_refused(name, &status, Code::NotFound, "", has);
        assert!(status.message().contains(&format!("{name:?}")), "{status}");
    }
    let other_group = Target { group: "apps".into(), version: "v1".into(), ..target("pods") };
    let status = watch_error(&mut client, watch_of(other_group)).await;
    assert_refused("another group", &status, Code::NotFound, "", "pods.v1.apps");
    assert_refused(
        "none",
        &watch_error(&mut client, watch_of(target(""))).await,
        Code::InvalidArgument,
        "target.resource",
        "required",
    );
    let nothing = watch_error(&mut client, WatchRequest::default()).await;
    assert_refused("no target", &nothing, Code::InvalidArgument, "target.resource", "required");
    subscriber.gets_the_next_event(&simulated).await;
}

async fn bad_selectors_are_refused_with_the_byte_offset() {
    let (simulated, _kubefan, mut subscriber, mut client) = with_subscriber().await;
    let labels = [
        ("a in (b", 7),
        ("a=b,,c=d", 4),
        ("=x", 0),
        ("a in b", 5),
        ("a b", 2),
        ("!", 1),
        ("a=-", 2),
        ("app=web;tier=db", 4),
    ];
    for (text, place) in labels {
        let selector = Target { label_selector: text.into(), ..target("pods") };
        let status = watch_error(&mut client, watch_of(selector)).await;
        let place = format!("(at byte {place})");
        assert_refused(text, &status, Code::InvalidArgument, "target.label_selector", &place);
    }
    let fields = [
        ("spec.nodeName", "(at byte 0)"),
        ("status.phase=Running,metadata.name", "(at byte 21)"),
        (r"metadata.name=a\b", "(at byte "),
        ("spec.color=red", "field label not supported: \"spec.color\"; pods can be selected by metadata.name"),
    ];
    for (text, has) in fields {
        let selector = Target { field_selector: text.into(), ..target("pods") };
        let status = watch_error(&mut client, watch_of(selector)).await;
        assert_refused(text, &status, Code::InvalidArgument, "target.field_selector", has);
    }
    let long = Target { label_selector: "a=b,".repeat(6000) + "a=b", ..target("pods") };
    let status = watch_error(&mut client, watch_of(long)).await;
    assert_refused("long", &status, Code::InvalidArgument, "target.label_selector", "the maximum is 16384");
    let deep = Target { label_selector: "(".repeat(16_000), ..target("pods") };
    assert_eq!(watch_error(&mut client, watch_of(deep)).await.code(), Code::InvalidArgument);
    subscriber.gets_the_next_event(&simulated).await;
}

async fn bad_versions_are_refused() {
    let (simulated, _kubefan, mut subscriber, mut client) = with_subscriber().await;
    for text in ["abc", "-1", "1.5", "01", " 7", "99999999999999999999999", "7\n8", "0x10"] {
        let request = WatchRequest { resource_version: text.into(), ..watch_of(target("pods")) };
        let status = watch_error(&mut client, request).await;
        assert_refused(text, &status, Code::InvalidArgument, "resource_version", &format!("{text:?}"));
        let list =
            ListRequest { target: Some(target("pods")), resource_version: text.into(), ..ListRequest::default() };
        assert_eq!(client.list(list).await.err().unwrap().code(), Code::InvalidArgument);
    }
    let future = WatchRequest { resource_version: "999999999".into(), ..watch_of(target("pods")) };
    let status = watch_error(&mut client, future).await;
    assert_refused("the future", &status, Code::OutOfRange, "", "version 999999999 belongs to another history");
    let list =
        ListRequest { target: Some(target("pods")), resource_version: "999999999".into(), ..ListRequest::default() };
    let status = client.list(list).await.err().unwrap();
    assert_refused("a list from the future", &status, Code::Unavailable, "", "too large resource version");
    subscriber.gets_the_next_event(&simulated).await;
}

async fn invalid_names_are_refused() {
    let (simulated, _kubefan, mut subscriber, mut client) = with_subscriber().await;
    let bad = [
        "../../secrets",
        "pods/status",
        "pods%2Fstatus",
        "a\nb",
        "a\0b",
        "a b",
        "a?watch=1",
        "a#b",
        "\u{1b}[31m",
        "\u{85}x",
    ];
    type Set = fn(&mut Target, String);
    let set: [(&str, Set); 5] = [
        ("target.group", |target, name| target.group = name),
        ("target.version", |target, name| target.version = name),
        ("target.resource", |target, name| target.resource = name),
        ("target.namespace", |target, name| target.namespace = name),
        ("target.name", |target, name| target.name = name),
    ];
    for (field, set) in set {
        for name in bad {
            let mut target = target("pods");
            set(&mut target, name.to_owned());
            let status = watch_error(&mut client, watch_of(target)).await;
            assert_refused(&format!("{field} {name:?}"), &status, Code::InvalidArgument, field, "");
        }
        let mut long = target("pods");
        set(&mut long, "x".repeat(10_000));
        let status = watch_error(&mut client, watch_of(long)).await;
        assert_refused(field, &status, Code::InvalidArgument, field, "longer than");
        assert!(status.message().len() < 1000, "a refusal does not repeat a long value");
    }
    for odd in ["..", ".", "...", "-", ".pods", "pods..apps", &"x.".repeat(200)] {
        let status = watch_error(&mut client, watch_of(target(odd))).await;
        assert!([Code::NotFound, Code::InvalidArgument].contains(&status.code()), "{odd}: {status}");
        assert!(status.message().len() < 1000 && status.get_details_error_info().is_some(), "{status:?}");
    }
    subscriber.gets_the_next_event(&simulated).await;
}

async fn invalid_durations_are_refused() {
    let (simulated, _kubefan, mut subscriber, mut client) = with_subscriber().await;
    for seconds in [-1, i64::MIN] {
        let request = WatchRequest { timeout_seconds: seconds, ..watch_of(target("pods")) };
        let status = watch_error(&mut client, request).await;
        assert_refused("timeout", &status, Code::InvalidArgument, "timeout_seconds", &seconds.to_string());
    }
    for (seconds, nanos) in [(0, 0), (0, 999_999_999), (-5, 0), (0, -1), (i64::MIN, i32::MIN), (-1, i32::MAX)] {
        let bookmark_interval = Some(prost_types::Duration { seconds, nanos });
        let request = WatchRequest { bookmark_interval, ..watch_of(target("pods")) };
        let status = watch_error(&mut client, request).await;
        assert_refused("bookmarks", &status, Code::InvalidArgument, "bookmark_interval", "");
    }
    // The longest durations are accepted and mean "very long".
    for (timeout_seconds, seconds) in [(i64::MAX, i64::MAX), (1 << 40, 1 << 40)] {
        let bookmark_interval = Some(prost_types::Duration { seconds, nanos: 0 });
        let request = WatchRequest { bookmark_interval, timeout_seconds, ..watch_of(target("pods")) };
        let mut stream = client.watch(request).await.unwrap().into_inner();
        assert!(stream.message().await.unwrap().is_some());
    }
    subscriber.gets_the_next_event(&simulated).await;
}

async fn invalid_gets_are_refused() {
    let (simulated, _kubefan, mut subscriber, mut client) = with_subscriber().await;
    let get = |target: Target| GetRequest { target: Some(target), ..GetRequest::default() };
    let named =
        |namespace: &str, name: &str| Target { namespace: namespace.into(), name: name.into(), ..target("pods") };
    let cases = [
        (named("default", ""), "target.name", "required"),
        (named("", "a"), "target.namespace", "required"),
        (Target { label_selector: "a=b".into(), ..named("default", "a") }, "target", "selectors are not allowed"),
    ];
    for (target, field, has) in cases {
        let status = client.get(get(target)).await.unwrap_err();
        assert_refused(field, &status, Code::InvalidArgument, field, has);
    }
    let status = client.get(get(named("default", "nope"))).await.unwrap_err();
    assert_refused("no such pod", &status, Code::NotFound, "", "pods \"nope\" not found");
    assert_eq!(status.get_details_error_info().unwrap().reason, "OBJECT_NOT_FOUND");
    let node = Target { namespace: "default".into(), name: "n".into(), ..target("nodes") };
    assert_refused(
        "a node",
        &client.get(get(node)).await.unwrap_err(),
        Code::InvalidArgument,
        "target.namespace",
        "not namespaced",
    );
    subscriber.gets_the_next_event(&simulated).await;
}

/// Sends bytes. Returns everything that comes back within a second or until the other side closes.
async fn send(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // The other side may close before everything is written.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let _ = tokio::time::timeout(Duration::from_secs(1), stream.read_to_end(&mut answer)).await;
    answer
}

async fn garbage_on_the_data_port_disturbs_no_subscriber() {
    let (simulated, kubefan, mut subscriber, mut client) = with_subscriber().await;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let random: Vec<u8> = (0u32..5000).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let inputs: [Vec<u8>; 9] = [
        random.clone(),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        b"POST /kubefan.v1alpha1.WatchService/Watch HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n\0\0\0\0\0"
            .to_vec(),
        // The start of a TLS handshake.
        [&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3][..], &random[..500]].concat(),
        preface[..10].to_vec(),
        [&preface[..], &random].concat(),
        // A frame that claims 16 MiB.
        [&preface[..], &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat(),
        // A header block that never ends.
        [&preface[..], &[0, 0, 0, 4, 0, 0, 0, 0, 0], &[0, 0, 4, 1, 0, 0, 0, 0, 1, 0x82, 0x86, 0x84, 0x41].repeat(100)]
            .concat(),
        Vec::new(),
    ];
    for bytes in &inputs {
        send(kubefan.grpc_addr, bytes).await;
        subscriber.gets_the_next_event(&simulated).await;
    }
    // Silent connections disturb no other one.
    let mut idle = Vec::new();
    for _ in 0..200 {
        idle.push(TcpStream::connect(kubefan.grpc_addr).await.unwrap());
    }
    subscriber.gets_the_next_event(&simulated).await;

    // Valid gRPC frames with a body that is no request.
    for body in [&[0, 0, 0, 0, 3, 0xff, 0xff, 0xff][..], &[1, 0, 0, 0, 0], &[0, 0, 0, 0, 9, 1], &[]] {
        let http = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
        let url = format!("http://{}/kubefan.v1alpha1.WatchService/Watch", kubefan.grpc_addr);
        let answer = http
            .post(url)
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(body.to_vec())
            .send()
            .await
            .unwrap();
        let status = Status::from_header_map(answer.headers()).unwrap();
        assert_refused(&format!("{body:?}"), &status, Code::InvalidArgument, "", "the request cannot be decoded");
    }
    subscriber.gets_the_next_event(&simulated).await;
    assert!(client.list_resources(kubefan_common::proto::v1alpha1::ListResourcesRequest {}).await.is_ok());
}

async fn a_request_that_is_too_long_is_refused() {
    let (simulated, _kubefan, mut subscriber, mut client) = with_subscriber().await;
    let long = Target { label_selector: "x".repeat(1 << 20), ..target("pods") };
    let status = watch_error(&mut client, watch_of(long.clone())).await;
    // Not OUT_OF_RANGE, which means that a version is too old.
    assert_refused("a watch", &status, Code::ResourceExhausted, "", "--max-message-size");
    let status = client.list(ListRequest { target: Some(long), ..ListRequest::default() }).await.err().unwrap();
    assert_refused("a list", &status, Code::ResourceExhausted, "", "--max-message-size");
    subscriber.gets_the_next_event(&simulated).await;
}

async fn an_unknown_method_is_refused() {
    let (simulated, kubefan, mut subscriber, _client) = with_subscriber().await;
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", kubefan.grpc_addr))
        .unwrap()
        .connect()
        .await
        .unwrap();
    for path in ["/kubefan.v1alpha1.WatchService/Wtach", "/kubefan.v9.WatchService/Watch", "/nothing", "/"] {
        let mut grpc = tonic::client::Grpc::new(channel.clone());
        grpc.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::<WatchRequest, WatchResponse>::default();
        let path: http::uri::PathAndQuery = path.parse().unwrap();
        let status = grpc.unary(Request::new(WatchRequest::default()), path, codec).await.unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented, "{status}");
    }
    subscriber.gets_the_next_event(&simulated).await;
}

async fn the_command_line_reports_mistakes() {
    let (_closed, address) = closed_port();
    let closed = address.to_string();
    let ran = run(&["get", "pods", "--server", &closed]).await;
    assert_line("no server", &ran, 1, &["cannot reach kubefan at", &closed, "kubefan serve"]);
    let cases: [(&[&str], &str); 6] = [
        (&["get", "pods/a", "b"], "\"b\""),
        (&["get", "po", "-A", "a"], "--namespace"),
        (&["get", "po", "a", "-l", "b=c"], "selector"),
        (&["get", "po", "--server", "ftp://x"], "ftp://x"),
        (&["watch", "po,svc"], "single type"),
        (&["get", "po", "--ca-file", "/no/such.pem", "--server", "https://127.0.0.1:1"], "/no/such.pem"),
    ];
    for (args, has) in cases {
        assert_line(&args.join(" "), &run(args).await, 1, &["error: ", has]);
    }
    for args in [
        &["get"][..],
        &["get", "po", "-o", "xml"],
        &["watch", "po", "--timeout", "-1s"],
        &["gte", "po"],
        &["get", "po", "-n", "a", "-A"],
    ] {
        let ran = run(args).await;
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{args:?}: {ran:?}");
        assert!(ran.stderr.starts_with("error: "), "{}", ran.stderr);
    }
}

async fn the_client_prints_the_servers_error() {
    let (simulated, kubefan, mut subscriber, _client) = with_subscriber().await;
    let server = kubefan.grpc_addr.to_string();
    let cases: [(&[&str], &[&str]); 9] = [
        (&["get", "podz"], &["Error from server (NotFound): ", "did you mean \"pods\"?"]),
        (&["watch", "podz"], &["Error from server (NotFound): ", "did you mean \"pods\"?"]),
        (&["get", "po", "-l", "a in (b"], &["Error from server (BadRequest): ", "(at byte 7)"]),
        (&["watch", "po", "-l", "a in (b"], &["Error from server (BadRequest): ", "(at byte 7)"]),
        (&["get", "po", "--field-selector", "spec.color=red"], &["Error from server (BadRequest): ", "spec.color"]),
        (&["get", "po", "--resource-version", "x"], &["Error from server (BadRequest): ", "\"x\""]),
        (&["watch", "po", "--resource-version", "x"], &["Error from server (BadRequest): ", "\"x\""]),
        (&["get", "po", "nope"], &["Error from server (NotFound): ", "\"nope\" not found"]),
        (&["get", "po/../secrets"], &["error: "]),
    ];
    for (args, has) in cases {
        assert_line(&args.join(" "), &run(&[args, &["--server", &server]].concat()).await, 1, has);
    }
    subscriber.gets_the_next_event(&simulated).await;
    let plain = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = plain.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = plain.accept().await {
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").await;
        }
    });
    let ran = run(&["get", "po", "--server", &address]).await;
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.lines().count() == 1 && ran.stderr.contains(&address), "{}", ran.stderr);
}

async fn the_admin_port_refuses_bad_requests() {
    let (simulated, kubefan, mut subscriber, _client) = with_subscriber().await;
    for path in ["/nope", "/metrics/../../etc/passwd", "/readyz/x", "/%00"] {
        assert_eq!(kubefan.admin(path).await.unwrap().0, 404, "{path}");
    }
    let url = format!("http://{}/metrics", kubefan.admin_addr);
    assert_eq!(reqwest::Client::new().post(url).body("x").send().await.unwrap().status(), 405);
    send(kubefan.admin_addr, &[0xff; 4000]).await;
    send(kubefan.admin_addr, b"GET /livez HTTP/1.1\r\n").await;
    assert!(kubefan.admin("/livez?x=%zz").await.unwrap().0.is_success());
    // The status page must escape names.
    let odd = Query::default().target("<script>alert(1)</script>");
    assert!(Watch::start(&mut connect(kubefan.grpc_addr).await, odd, "").await.is_err());
    assert!(!kubefan.admin("/").await.unwrap().1.contains("<script>alert"));
    subscriber.gets_the_next_event(&simulated).await;
}
