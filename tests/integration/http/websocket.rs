//! Compares watches over websockets with a real kube-apiserver, using a minimal client that reads
//! and writes raw frames. Also tests clients that violate the protocol.

use std::{net::SocketAddr, time::Duration};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::json;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use crate::harness::{
    apiserver::{ApiServer, Options},
    https::Https,
    kubefan::Kubefan,
    objects::version_of,
    simulated::Simulated,
    tests,
    wait::{SOON, until},
};

tests! {
    apiserver slow_programs: a_websocket_watch_sends_the_same_messages_as_the_apiserver,
        invalid_websocket_requests_are_refused;
    local: a_websocket_ends_with_the_close_code_of_its_reason,
        a_client_that_sends_pings_and_reads_no_answer_is_ended;
}

/// Time limit for every read and every shutdown.
const TIME_LIMIT: Duration = Duration::from_secs(30);

const TEXT: u8 = 1;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// The opcode and the payload of a frame.
type Frame = (u8, Vec<u8>);

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Names and values of headers. An empty value removes the header.
type Headers<'a> = &'a [(&'a str, &'a str)];

/// A client of one websocket.
struct Client {
    stream: Box<dyn Stream>,
    /// The head of the response.
    head: String,
}

impl Client {
    /// Sends an upgrade request. `headers` replace its default headers.
    async fn ask(stream: Box<dyn Stream>, path: &str, headers: Headers<'_>) -> Client {
        let key = STANDARD.encode([7; 16]);
        let mut all = vec![
            ("Host", "localhost"),
            ("Origin", "http://localhost"),
            ("Connection", "Upgrade"),
            ("Upgrade", "websocket"),
            ("Sec-WebSocket-Version", "13"),
            ("Sec-WebSocket-Key", &key),
        ];
        for (name, value) in headers {
            all.retain(|(known, _)| known != name);
            all.push((name, value));
        }
        let headers = all.iter().filter(|(_, value)| !value.is_empty());
        let headers: String = headers.map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let mut client = Client { stream, head: String::new() };
        client.stream.write_all(format!("GET {path} HTTP/1.1\r\n{headers}\r\n").as_bytes()).await.unwrap();
        while !client.head.ends_with("\r\n\r\n") {
            let byte = timeout(TIME_LIMIT, client.stream.read_u8()).await.expect("a head in time").unwrap();
            client.head.push(char::from(byte));
        }
        client
    }

    /// The value of a header; its name is compared without case.
    fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.find_map(|(known, value)| known.eq_ignore_ascii_case(name).then_some(value))
    }

    fn code(&self) -> u16 {
        self.head[9..12].parse().expect("a code")
    }

    async fn read(&mut self) -> Option<Frame> {
        let read = async {
            let first = self.stream.read_u8().await.ok()?;
            let second = self.stream.read_u8().await.ok()?;
            assert_eq!(first & 0xf0, 0x80, "a complete message without reserved bits");
            let length = match second {
                126 => u64::from(self.stream.read_u16().await.ok()?),
                127 => self.stream.read_u64().await.ok()?,
                length => u64::from(length),
            };
            let mut payload = vec![0; usize::try_from(length).unwrap()];
            self.stream.read_exact(&mut payload).await.ok()?;
            Some((first & 0x0f, payload))
        };
        timeout(TIME_LIMIT, read).await.expect("a frame or an end in time")
    }

    /// All frames until the end.
    async fn rest(&mut self) -> Vec<Frame> {
        let mut frames = Vec::new();
        while let Some(frame) = self.read().await {
            frames.push(frame);
        }
        frames
    }

    /// Writes a frame with a short payload. The mask is all zeros, so the payload is unchanged.
    async fn write(&mut self, first: u8, payload: &[u8]) {
        let frame = [&[first, 0x80 | payload.len() as u8, 0, 0, 0, 0][..], payload].concat();
        // The server may close the connection during the write.
        let _ = self.stream.write_all(&frame).await;
    }
}

async fn to_kubefan(address: SocketAddr) -> Box<dyn Stream> {
    Box::new(TcpStream::connect(address).await.unwrap())
}

async fn to_apiserver(api: &ApiServer) -> Box<dyn Stream> {
    let ca_pem = std::fs::read_to_string(api.ca_pem_path()).unwrap();
    let server = Https { addr: api.addr(), ca_pem: &ca_pem, identity: None };
    Box::new(server.connect(b"http/1.1").await)
}

/// Sends the same request to both servers; the apiserver comes first.
async fn both(api: &ApiServer, kubefan: &Kubefan, path: &str, headers: Headers<'_>) -> [Client; 2] {
    let token = format!("Bearer {}", api.admin_token());
    let headers = [headers, &[("Authorization", &token)]].concat();
    [
        Client::ask(to_apiserver(api).await, path, &headers).await,
        Client::ask(to_kubefan(kubefan.grpc_addr).await, path, &headers).await,
    ]
}

/// Removes bookmarks, because their versions and times are specific to each server.
fn events(frames: Vec<Frame>) -> Vec<Frame> {
    let is_bookmark = |payload: &[u8]| payload[..payload.len().min(20)].windows(8).any(|part| part == b"BOOKMARK");
    frames.into_iter().filter(|(_, payload)| !is_bookmark(payload)).collect()
}

/// Required match between the messages of two servers.
#[derive(Clone, Copy, PartialEq)]
enum Match {
    /// Equal messages in the same order.
    Exactly,
    /// Equal messages; the initial objects have no defined order.
    InAnyOrder,
    /// An error that names each server's oldest version.
    Expired,
}

async fn a_websocket_watch_sends_the_same_messages_as_the_apiserver() {
    let api = ApiServer::start(Options::default()).await;
    let ns = api.namespace("sockets").await;
    let path = format!("/api/v1/namespaces/{ns}/configmaps");
    let make = async |name: &str, stage: &str| {
        let text = "<ü&>".repeat(20_000);
        let object = json!({ "metadata": { "name": name, "labels": { "stage": stage } }, "data": { "text": text } });
        version_of(&api.create(&path, &object).await)
    };
    make("a", "on").await;
    // Remove the earlier history, also from the watch cache.
    api.compact_etcd(make("b", "off").await).await;
    api.restart().await;
    let then = make("c", "off").await;
    let kubefan = Kubefan::start(&api, &["--resource=configmaps", "--access=local-cache-only"]).await;
    let partial = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
    let protobuf = ("Accept", "application/vnd.kubernetes.protobuf");
    use Match::{Exactly, Expired, InAnyOrder};
    // The first watch must still be open when all others are and the changes are written. It sends
    // nothing after them, so it must end within the limit for a read.
    let after = format!("{path}?watch=1&timeoutSeconds=20&resourceVersion={then}");
    let state = format!("{path}?watch=1&timeoutSeconds=20");
    let cases: [(String, Headers, Match); 9] = [
        (after.clone(), &[], Exactly),
        (format!("{after}&labelSelector=stage%3Don&allowWatchBookmarks=true"), &[], Exactly),
        (after.clone(), &[("Accept", partial)], Exactly),
        (after, &[protobuf], Exactly),
        (format!("{state}&resourceVersion=0"), &[("Sec-WebSocket-Protocol", "base64.channel.k8s.io")], InAnyOrder),
        (state.clone(), &[("Sec-WebSocket-Protocol", "x"), ("Connection", "keep-alive, upgrade")], InAnyOrder),
        (state.clone(), &[protobuf], InAnyOrder),
        (format!("/api/v1/watch/namespaces/{ns}/configmaps?timeoutSeconds=20"), &[], InAnyOrder),
        (format!("{state}&resourceVersion=1"), &[], Expired),
    ];
    // The protobuf cache starts with the first request for it.
    until("protobuf to be cached", SOON, || async {
        let [_, mine] = both(&api, &kubefan, &state, &[protobuf]).await;
        (mine.code() == 101).then_some(())
    })
    .await;
    let mut watches = Vec::new();
    for (path, headers, _) in &cases {
        let clients = both(&api, &kubefan, path, headers).await;
        assert_eq!(clients[1].header("cache-status"), Some("kubefan; hit"), "{path}: {}", clients[1].head);
        for name in ["upgrade", "connection", "sec-websocket-accept", "sec-websocket-protocol"] {
            assert_eq!(clients[1].header(name), clients[0].header(name), "{path} {headers:?}");
        }
        watches.push(clients);
    }
    make("d", "on").await;
    api.patch(&format!("{path}/b"), &json!({ "metadata": { "labels": { "stage": "on" } } })).await;
    api.patch(&format!("{path}/a"), &json!({ "metadata": { "labels": { "stage": "off" } } })).await;
    api.delete(&format!("{path}/d")).await;
    let rest = |[mut direct, mut mine]: [Client; 2]| async move { tokio::join!(direct.rest(), mine.rest()) };
    // All are read at the same time, so that none waits unread for the others' ends.
    let received = futures::future::join_all(watches.into_iter().map(rest)).await;
    let mut seen = 0;
    for ((path, headers, expected_match), (direct, mine)) in cases.iter().zip(received) {
        let [mut direct, mut mine] = [events(direct), events(mine)];
        let opcode = if headers.contains(&protobuf) { BINARY } else { TEXT };
        let opcodes: Vec<_> = mine.iter().map(|(opcode, _)| *opcode).collect();
        assert_eq!(opcodes, [&vec![opcode; mine.len() - 1][..], &[CLOSE]].concat(), "{path} {headers:?}");
        seen += mine.len();
        if *expected_match == Expired {
            for all in [&direct, &mine] {
                let text = String::from_utf8(all[0].1.clone()).unwrap();
                let is = text.contains("too old resource version: 1 (") && text.contains(r#""code":410"#);
                assert!(is && text.ends_with("\n") && all.len() == 2, "{text}");
            }
            continue;
        }
        if *expected_match == InAnyOrder {
            direct.sort();
            mine.sort();
        }
        let text = |frames: &[Frame]| {
            let texts = frames.iter().map(|(opcode, payload)| (*opcode, String::from_utf8_lossy(payload).into_owned()));
            texts.map(|(opcode, text)| format!("{opcode} {text:.300}")).collect::<Vec<_>>().join("\n")
        };
        let theirs = text(&direct);
        let ours = text(&mine);
        assert!(mine == direct, "{path} {headers:?}\nthe apiserver:\n{theirs}\nkubefan:\n{ours}");
    }
    println!("{seen} messages were the same from both servers");
}

async fn invalid_websocket_requests_are_refused() {
    let api = ApiServer::shared().await;
    let ns = api.namespace("no-sockets").await;
    let kubefan = Kubefan::start(&api, &["--resource=configmaps"]).await;
    let path = format!("/api/v1/namespaces/{ns}/configmaps?watch=1");
    let cases: [(Headers, &str, u16); 8] = [
        (&[("Origin", "")], "", 403),
        (&[("Origin", "null")], "", 403),
        (&[("Sec-WebSocket-Key", "")], "", 400),
        (&[("Sec-WebSocket-Version", "8")], "", 400),
        (&[("Sec-WebSocket-Version", "")], "", 400),
        (&[("Sec-WebSocket-Protocol", "one, two")], "", 400),
        (&[], "&labelSelector=%3D%3D", 403),
        (&[], "&resourceVersion=x", 403),
    ];
    for (headers, query, code) in cases {
        let [direct, mine] = both(&api, &kubefan, &format!("{path}{query}"), headers).await;
        assert_eq!(mine.code(), code, "{headers:?}{query}: {}", mine.head);
        match query {
            "" => assert_eq!(direct.code(), code, "{headers:?}: {}", direct.head),
            // The error is upstream's to produce, but upgrades are not forwarded.
            _ => assert_ne!(direct.code(), 101, "{query}: {}", direct.head),
        }
    }
    // Upstream accepts a websocket of any origin.
    let [direct, mine] = both(&api, &kubefan, &path, &[("Origin", "https://evil.example")]).await;
    assert_eq!((direct.code(), mine.code()), (101, 403));
    // A request that is not a watch does not become a websocket. kubefan refuses it.
    let [direct, mine] = both(&api, &kubefan, &format!("/api/v1/namespaces/{ns}/configmaps"), &[]).await;
    assert_eq!((direct.code(), mine.code()), (200, 403));
}

/// Waits until kubefan has no open watch.
async fn wait_until_no_watch(kubefan: &Kubefan) {
    until("every stream to end", SOON, || async {
        (kubefan.metric_sum("kubefan_subscribers", "").await? == 0.0).then_some(())
    })
    .await;
}

const WATCH: &str = "/api/v1/pods?watch=1&resourceVersion=0";

async fn a_websocket_ends_with_the_close_code_of_its_reason() {
    let simulated = Simulated::start().await;
    let mut kubefan = simulated.kubefan(&["--resource=pods"]).await;
    // A client's messages are ignored, even when fragmented; a ping is answered.
    let mut client = open(&kubefan, 3).await;
    client.write(0x80 | TEXT, b"{}").await;
    client.write(TEXT, b"one").await;
    client.write(0x80, b" message").await;
    client.write(0x80 | PING, b"hello").await;
    assert_eq!(client.read().await.unwrap(), (PONG, b"hello".to_vec()));
    simulated.create("later");
    assert!(String::from_utf8(client.read().await.unwrap().1).unwrap().contains(r#""name":"later""#));
    client.write(0x80 | CLOSE, &1000u16.to_be_bytes()).await;
    assert_eq!(client.rest().await, [(CLOSE, 1000u16.to_be_bytes().to_vec())]);
    wait_until_no_watch(&kubefan).await;

    let cases: [(&str, u16, &[u8]); 8] = [
        ("an unmasked frame", 1002, b"\x81\x02hi"),
        ("another protocol", 1002, b"GET /api/v1/pods HTTP/1.1\r\nHost: x\r\n\r\n"),
        ("an invalid opcode", 1002, b"\x83\x80\0\0\0\0"),
        ("reserved bits", 1002, b"\xf1\x80\0\0\0\0"),
        ("a continuation without a message", 1002, b"\x80\x80\0\0\0\0"),
        ("a fragmented ping", 1002, b"\x09\x80\0\0\0\0"),
        ("text that is not UTF-8", 1007, b"\x81\x82\0\0\0\0\xff\xff"),
        ("a frame of eight exabytes", 1009, b"\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff\0\0\0\0"),
    ];
    let half = |first: u8| [&[first, 0x80 | 126, 0xea, 0x60, 0, 0, 0, 0][..], &[b'x'; 60_000]].concat();
    let fragments = [half(TEXT), half(0x80)].concat();
    let large = ("a message above the limit in fragments below it", 1009, &fragments[..]);
    for (name, code, bytes) in cases.into_iter().chain([large]) {
        let mut client = open(&kubefan, 4).await;
        // kubefan may close the connection during the write.
        let _ = client.stream.write_all(bytes).await;
        let frames = client.rest().await;
        assert_eq!(frames.first(), Some(&(CLOSE, code.to_be_bytes().to_vec())), "{name}: {frames:?}");
    }
    // Disconnects at various points of a frame.
    for bytes in [&b""[..], b"\x81", b"\x81\xfe\0", b"\x81\x85\0\0\0\0he"] {
        let mut client = open(&kubefan, 4).await;
        client.stream.write_all(bytes).await.unwrap();
    }
    simulated.create("last");
    wait_until_no_watch(&kubefan).await;

    let mut client = open(&kubefan, 5).await;
    kubefan.process.terminate();
    assert_eq!(client.read().await, Some((CLOSE, 1001u16.to_be_bytes().to_vec())), "going away");
    client.write(0x80 | CLOSE, &1001u16.to_be_bytes()).await;
    assert_eq!(client.rest().await, []);
    assert!(kubefan.process.ended(TIME_LIMIT).await.success());
}

/// Opens a watch that has sent this many pods.
async fn open(kubefan: &Kubefan, pods: usize) -> Client {
    let mut client = Client::ask(to_kubefan(kubefan.grpc_addr).await, WATCH, &[]).await;
    assert_eq!(client.code(), 101, "{}", client.head);
    for _ in 0..pods {
        assert_eq!(client.read().await.unwrap().0, TEXT);
    }
    client
}

async fn a_client_that_sends_pings_and_reads_no_answer_is_ended() {
    /// More than the sockets of both sides can buffer.
    const BYTES_MAX: usize = 32 << 20;
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "tuning.snapshotStallTimeout=5s"]).await;
    let mut client = open(&kubefan, 3).await;
    let ping = [&[0x80 | PING, 0x80 | 125, 0, 0, 0, 0][..], &[b'x'; 125]].concat();
    let pings = ping.repeat(1000);
    let mut sent = 0;
    while let Ok(()) = timeout(TIME_LIMIT, client.stream.write_all(&pings)).await.expect("an end in time") {
        sent += pings.len();
        assert!(sent < BYTES_MAX, "kubefan reads pings although nobody reads its answers");
    }
    println!("ended after {sent} bytes");
    wait_until_no_watch(&kubefan).await;
}
