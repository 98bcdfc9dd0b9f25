//! Bad input gets the right status code and one clear line that names the mistake and the remedy.
//! It causes no panic and disturbs no other request. The harness checks every kubefan for panics
//! when it ends; within this process a panic breaks the connection.

use std::{net::SocketAddr, time::Duration};

use http::Request;
use kubefan_common::proto::v1alpha1::{GetRequest, ListRequest, Target, WatchRequest};
use prost::Message;
use reqwest::Method;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::{
    connections::{RawConnection, status},
    harness::{
        apiserver::ApiServer,
        kubefan::{Kubefan, Ran, run},
        pki::{Authority, write_server_files},
        process::closed_port,
        record::{Query, Watch, connect},
        rig::{Rig, Setup, on_demand, pod, pods, target},
        servers::{Servers, is_cached},
        simulated::Simulated,
        tests,
    },
};

tests! {
    local: garbage_on_either_port_disturbs_no_subscriber, the_command_line_reports_mistakes,
        invalid_server_names_do_not_fill_the_log,
        the_client_prints_the_servers_error;
    paused: bad_watches_are_refused_and_disturb_no_subscriber, bad_reads_are_refused, an_unknown_method_is_refused,
        the_longest_durations_are_accepted;
    apiserver: an_object_that_is_not_utf8_stops_no_cache;
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

/// A subscriber that bad requests must not disturb.
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

/// A simulated apiserver, kubefan with pods, and a subscriber.
async fn with_subscriber() -> (Simulated, Kubefan, HealthySubscriber) {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let subscriber = HealthySubscriber::of(&kubefan).await;
    (simulated, kubefan, subscriber)
}

/// A kubefan in this process, with one pod.
async fn rig() -> Rig {
    let setup = Setup::of(&["pods"]).on_demand(on_demand());
    let sim = setup.sim();
    sim.create(&pods(), pod("a", "new")).unwrap();
    Rig::synced(sim, setup).await
}

/// A request, and the refusal that it must get.
struct Refused<R> {
    what: String,
    request: R,
    code: Code,
    /// The field at fault.
    field: &'static str,
    /// Part of the message.
    has: String,
}

impl<R> Refused<R> {
    /// The request is invalid in this field.
    fn invalid(field: &'static str, what: impl Into<String>, request: R, has: impl Into<String>) -> Refused<R> {
        Refused { what: what.into(), request, code: Code::InvalidArgument, field, has: has.into() }
    }

    /// The request is refused with another code.
    fn with(code: Code, what: impl Into<String>, request: R, has: impl Into<String>) -> Refused<R> {
        Refused { code, ..Refused::invalid("", what, request, has) }
    }

    /// Checks the code, the field at fault, and an ErrorInfo with a reason.
    fn assert(&self, status: &Status) {
        let Refused { what, has, .. } = self;
        assert_eq!(status.code(), self.code, "{what}: {status:?}");
        assert!(status.message().contains(has.as_str()), "{what}: {has:?} is not in {}", status.message());
        assert!(!status.message().contains(|c: char| c.is_control()), "{what}: one line: {:?}", status.message());
        assert!(status.message().len() < 1000, "{what}: a refusal does not repeat a long value");
        let info = status.get_details_error_info().unwrap_or_else(|| panic!("{what}: no ErrorInfo"));
        assert_eq!(info.domain, "kubefan.dev", "{what}");
        assert!(!info.reason.is_empty(), "{what}");
        let bad = status.get_details_bad_request();
        let named = bad.map(|bad| bad.field_violations[0].field.clone()).unwrap_or_default();
        assert_eq!(named, self.field, "{what}: the field at fault");
    }
}

fn watch_of(target: Target) -> WatchRequest {
    WatchRequest { target: Some(target), ..WatchRequest::default() }
}

/// Texts that are no versions.
const BAD_VERSIONS: [&str; 8] = ["abc", "-1", "1.05", "01", " 7", "99999999999999999999999", "7\n8", "0x10"];

async fn bad_watches_are_refused_and_disturb_no_subscriber() {
    let rig = rig().await;
    let mut subscriber = rig.watch_all("pods").await;
    let rows = [unknown_resources(), bad_selectors(), bad_versions(), bad_names(), bad_durations()];
    for row in rows.into_iter().flatten() {
        let Err(status) = rig.send(row.request.clone()).await else { panic!("{}: it was served", row.what) };
        row.assert(&status);
    }
    for odd in ["..", ".", "...", "-", ".pods", "pods..apps", &"x.".repeat(200)] {
        let Err(status) = rig.watch(target(odd), "").await else { panic!("{odd}: it was served") };
        assert!([Code::NotFound, Code::InvalidArgument].contains(&status.code()), "{odd}: {status}");
        assert!(status.message().len() < 1000 && status.get_details_error_info().is_some(), "{status:?}");
    }
    subscriber.until(rig.sim.update(&pods(), pod("a", "later")).unwrap()).await;
    assert_eq!(subscriber.events.len(), 1, "nothing lost, nothing repeated");
}

fn unknown_resources() -> Vec<Refused<WatchRequest>> {
    let unknown = |target: Target, has: &str| Refused::with(Code::NotFound, has, watch_of(target), has);
    vec![
        unknown(target("podz"), "\"podz\"; did you mean \"pods\"?"),
        unknown(target("deploymnets"), "\"deploymnets\"; did you mean \"deployments.apps\"?"),
        unknown(target("xyzzy"), "\"xyzzy\""),
        unknown(target("xyzzy"), "kubectl api-resources"),
        unknown(Target { group: "apps".into(), version: "v1".into(), ..target("pods") }, "pods.v1.apps"),
        Refused::invalid("target.resource", "an empty name", watch_of(target("")), "required"),
        Refused::invalid("target.resource", "no target", WatchRequest::default(), "required"),
    ]
}

fn bad_selectors() -> Vec<Refused<WatchRequest>> {
    let by_labels = |text: &str, has: &str| {
        let target = Target { label_selector: text.into(), ..target("pods") };
        let what = text.chars().take(20).collect::<String>();
        Refused::invalid("target.label_selector", what, watch_of(target), has)
    };
    let by_fields = |text: &str, has: &str| {
        let target = Target { field_selector: text.into(), ..target("pods") };
        Refused::invalid("target.field_selector", text, watch_of(target), has)
    };
    let unsupported = "field label not supported: \"spec.color\"; pods can be selected by metadata.name";
    let too_long = Target { label_selector: "x".repeat(1 << 20), ..target("pods") };
    vec![
        by_labels("a in (b", "(at byte 7)"),
        by_labels("a=b,,c=d", "(at byte 4)"),
        by_labels("app=web;tier=db", "(at byte 4)"),
        by_labels(&("a=b,".repeat(6000) + "a=b"), "the maximum is 16384"),
        by_labels(&"(".repeat(16_000), ""),
        by_fields("status.phase=Running,metadata.name", "(at byte 21)"),
        by_fields("spec.color=red", unsupported),
        // Not OUT_OF_RANGE, which means that a version is too old.
        Refused::with(Code::ResourceExhausted, "a long request", watch_of(too_long), "limits.maxMessageSize"),
    ]
}

fn bad_versions() -> Vec<Refused<WatchRequest>> {
    let of = |text: &str| WatchRequest { resource_version: text.into(), ..watch_of(target("pods")) };
    let bad = |text: &str| Refused::invalid("resource_version", text, of(text), format!("{text:?}"));
    let future = "version 999999999 belongs to another history";
    let mut rows: Vec<_> = BAD_VERSIONS.map(bad).into();
    rows.push(Refused::with(Code::OutOfRange, "the future", of("999999999"), future));
    rows
}

fn bad_names() -> Vec<Refused<WatchRequest>> {
    let bad = ["../../secrets", "pods/status", "pods%2Fstatus", "a\nb", "a\0b", "a b", "a?watch=1", "a#b"];
    let bad = bad.into_iter().chain(["\u{1b}[31m", "\u{85}x"]);
    type Set = fn(&mut Target, String);
    let set: [(&str, Set); 5] = [
        ("target.group", |target, name| target.group = name),
        ("target.version", |target, name| target.version = name),
        ("target.resource", |target, name| target.resource = name),
        ("target.namespace", |target, name| target.namespace = name),
        ("target.name", |target, name| target.name = name),
    ];
    let mut rows = Vec::new();
    for (field, set) in set {
        let with = |name: String| {
            let mut target = target("pods");
            set(&mut target, name);
            watch_of(target)
        };
        rows.extend(
            bad.clone().map(|name| Refused::invalid(field, format!("{field} {name:?}"), with(name.into()), "")),
        );
        rows.push(Refused::invalid(field, format!("long {field}"), with("x".repeat(10_000)), "longer than"));
    }
    rows
}

fn bad_durations() -> Vec<Refused<WatchRequest>> {
    let mut rows = Vec::new();
    for seconds in [-1, i64::MIN] {
        let request = WatchRequest { timeout_seconds: seconds, ..watch_of(target("pods")) };
        rows.push(Refused::invalid("timeout_seconds", "a timeout", request, seconds.to_string()));
    }
    for (seconds, nanos) in [(0, 0), (0, 999_999_999), (-5, 0), (0, -1), (i64::MIN, i32::MIN), (-1, i32::MAX)] {
        let bookmark_interval = Some(prost_types::Duration { seconds, nanos });
        let request = WatchRequest { bookmark_interval, ..watch_of(target("pods")) };
        rows.push(Refused::invalid("bookmark_interval", format!("{seconds} s and {nanos} ns"), request, ""));
    }
    rows
}

async fn the_longest_durations_are_accepted() {
    let rig = rig().await;
    for seconds in [i64::MAX, 1 << 40] {
        let bookmark_interval = Some(prost_types::Duration { seconds, nanos: 0 });
        let request = WatchRequest { bookmark_interval, timeout_seconds: seconds, ..watch_of(target("pods")) };
        assert!(rig.send(request).await.unwrap().step().await.unwrap().is_some());
    }
}

async fn bad_reads_are_refused() {
    let rig = rig().await;
    let list_at = |version: &str, target: Target| {
        let resource_version = version.to_owned();
        ListRequest { target: Some(target), resource_version, ..ListRequest::default() }
    };
    let bad =
        |text: &str| Refused::invalid("resource_version", text, list_at(text, target("pods")), format!("{text:?}"));
    let mut lists: Vec<_> = BAD_VERSIONS.map(bad).into();
    let too_large = "too large resource version";
    lists.push(Refused::with(Code::Unavailable, "the future", list_at("999999999", target("pods")), too_large));
    let long = Target { label_selector: "x".repeat(1 << 20), ..target("pods") };
    lists.push(Refused::with(Code::ResourceExhausted, "a long list", list_at("", long), "limits.maxMessageSize"));
    for row in lists {
        row.assert(&rig.list_request(row.request.clone()).await.unwrap_err());
    }

    let get = |resource: &str, namespace: &str, name: &str| {
        let target = Target { namespace: namespace.into(), name: name.into(), ..target(resource) };
        GetRequest { target: Some(target), ..GetRequest::default() }
    };
    let mut selected = get("pods", "default", "a");
    selected.target.as_mut().unwrap().label_selector = "a=b".to_owned();
    let gets = [
        Refused::invalid("target.name", "no name", get("pods", "default", ""), "required"),
        Refused::invalid("target.namespace", "no namespace", get("pods", "", "a"), "required"),
        Refused::invalid("target", "a selector", selected, "selectors are not allowed"),
        Refused::invalid("target.namespace", "of a node", get("nodes", "default", "n"), "not namespaced"),
        Refused::with(Code::NotFound, "no such pod", get("pods", "default", "nope"), "pods \"nope\" not found"),
    ];
    let mut raw = RawConnection::to(&rig).await;
    for row in gets {
        let answer = raw.call("Get", &[], &row.request.encode_to_vec()).await;
        let refused = status(answer.headers());
        row.assert(&refused);
        let reason = refused.get_details_error_info().unwrap().reason;
        assert_eq!(reason == "OBJECT_NOT_FOUND", row.code == Code::NotFound, "{}: {reason}", row.what);
    }
}

async fn an_unknown_method_is_refused() {
    let rig = rig().await;
    let mut raw = RawConnection::to(&rig).await;
    for path in ["/kubefan.v1alpha1.WatchService/Wtach", "/kubefan.v9.WatchService/Watch", "/nothing", "/"] {
        let request = Request::post(format!("http://kubefan.test{path}")).header("content-type", "application/grpc");
        let (answer, _) = raw.requests.send_request(request.header("te", "trailers").body(()).unwrap(), true).unwrap();
        assert_eq!(status(answer.await.unwrap().headers()).code(), Code::Unimplemented, "{path}");
    }
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

async fn garbage_on_either_port_disturbs_no_subscriber() {
    let (simulated, kubefan, mut subscriber) = with_subscriber().await;
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
    let http = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    for body in [&[0, 0, 0, 0, 3, 0xff, 0xff, 0xff][..], &[1, 0, 0, 0, 0], &[0, 0, 0, 0, 9, 1], &[]] {
        let url = format!("http://{}/kubefan.v1alpha1.WatchService/Watch", kubefan.grpc_addr);
        let request = http.post(url).header("content-type", "application/grpc").header("te", "trailers");
        let answer = request.body(body.to_vec()).send().await.unwrap();
        Refused::invalid("", format!("{body:?}"), (), "the request cannot be decoded")
            .assert(&status(answer.headers()));
    }
    subscriber.gets_the_next_event(&simulated).await;

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
    let (simulated, kubefan, mut subscriber) = with_subscriber().await;
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

/// A TLS ClientHello with this server name.
fn client_hello(name: &[u8]) -> Vec<u8> {
    let sized = |bytes: usize, content: &[u8]| {
        let length = (content.len() as u32).to_be_bytes();
        [&length[4 - bytes..], content].concat()
    };
    let extension = [&[0, 0][..], &sized(2, &sized(2, &[&[0][..], &sized(2, name)].concat()))].concat();
    let body = [&[3, 3][..], &[7; 32], &[0], &[0, 2, 0x13, 1], &[1, 0], &sized(2, &extension)].concat();
    let handshake = [&[1][..], &sized(3, &body)].concat();
    handshake.chunks(16 << 10).flat_map(|part| [&[22, 3, 1][..], &sized(2, part)].concat()).collect()
}

async fn invalid_server_names_do_not_fill_the_log() {
    const CONNECTIONS: usize = 50;
    let simulated = Simulated::start().await;
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    write_server_files(&authority, dir.path());
    let file = |flag: &str, name: &str| format!("{flag}={}", dir.path().join(name).display());
    let cert = file("--tls-cert-file", "server.pem");
    let key = file("--tls-private-key-file", "server-key.pem");
    let kubefan = simulated.kubefan(&["--resource=pods", &cert, &key, "--access=local"]).await;
    let before = kubefan.process.log().len();
    let hello = client_hello(&b"not a name ".repeat(5000));
    for _ in 0..CONNECTIONS {
        send(kubefan.grpc_addr, &hello).await;
    }
    let log = kubefan.process.log().split_off(before);
    assert!(!log.contains("not a name not a name"), "the log has the names of clients: {log:.500}");
    assert!(log.len() < 100 * CONNECTIONS, "{} bytes: {log:.500}", log.len());
}

/// kube-apiserver stores the fields of managers as they are sent, and sends them so.
async fn an_object_that_is_not_utf8_stops_no_cache() {
    const FIELDS: &[u8] = b"{\"f:data\":{\"f:a\xff\xe2\x82\":{}}}";
    let api = ApiServer::shared().await;
    let namespace = api.namespace("not-utf8").await;
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    let servers = Servers::start(api.handle(), &["--resource=configmaps"]).await;
    let mut watch =
        Watch::start(&mut connect(servers.kubefan.grpc_addr).await, target("configmaps"), "").await.unwrap();
    watch.until_resumable().await;

    let manager = r#"{"metadata":{"name":"broken","managedFields":[{"manager":"m","operation":"Update","apiVersion":"v1","fieldsType":"FieldsV1","fieldsV1":"#;
    let object = [manager.as_bytes(), FIELDS, b"}]}}"].concat();
    let request = api.client().post(format!("{}{path}", api.url())).header("content-type", "application/json");
    let created = request.body(object).send().await.unwrap();
    assert_eq!(created.status(), 201);
    let broken = created.bytes().await.unwrap();
    assert!(broken.windows(FIELDS.len()).any(|part| part == FIELDS), "the apiserver sends what it got: {broken:?}");
    let whole = api.create(&path, &json!({ "metadata": { "name": "whole" } })).await;
    watch.until(whole["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap()).await;

    // A new kubefan lists it.
    for servers in [servers, Servers::start(api.handle(), &["--resource=configmaps"]).await] {
        let list = servers.through(Method::GET, &format!("{path}?resourceVersion=0")).send().await.unwrap();
        assert!(is_cached(&list));
        let list = list.text().await.unwrap();
        // Go's encoding/json makes one character of each byte, and client-go uses that.
        assert!(list.contains("\"f:a\u{fffd}\u{fffd}\u{fffd}\":{}"), "{list}");
    }
    api.delete(&format!("{path}/broken")).await;
}
