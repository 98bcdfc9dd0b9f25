//! What one connection can do to its own streams, to other connections and to kubefan: slow
//! readers, resets, silence, many streams, garbage. Most tests speak HTTP/2 by hand, because client
//! libraries behave too well.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use h2::{
    RecvStream,
    client::{self, SendRequest},
};
use http::{HeaderMap, Request, Response};
use kubefan_common::proto::v1alpha1::{ListRequest, Target, WatchRequest, WatchResponse, watch_response};
use kubefan_proxy::{server::ClientInfo, telemetry::metrics::ConnectionEnd};
use prost::Message;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream},
    task::JoinHandle,
};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::harness::{
    record::{Watch, connect},
    rig::{Rig, Setup, pod, pods, target},
    simulated::Simulated,
    tests, wait,
};

tests! {
    local: connections_over_the_limit_are_closed_at_once, two_hundred_streams_on_one_connection_get_every_event;
    paused: an_unread_stream_does_not_block_others, a_reset_frees_the_subscription,
        a_drain_ends_every_stream_with_its_reason, an_unread_snapshot_is_ended, an_unread_list_is_ended,
        a_bookmark_follows_silence_on_each_stream, the_first_bookmark_after_a_snapshot_is_on_time,
        a_client_that_answers_no_ping_is_dropped, a_call_ends_at_its_deadline, a_compressed_request_is_refused,
        http1_requests_get_an_http1_answer, a_silent_connection_is_closed;
}

const CACHE: &str = "{group=\"\",media=\"json\",namespace=\"\",resource=\"pods\"}";

/// An object of 8 KiB.
pub(crate) fn large(name: &str, filling: char) -> serde_json::Value {
    let mut pod = pod(name, "new");
    pod["metadata"]["annotations"] = json!({ "filling": filling.to_string().repeat(8 << 10) });
    pod
}

/// An HTTP/2 connection without a gRPC library.
pub(crate) struct RawConnection {
    pub(crate) requests: SendRequest<Bytes>,
    /// The task that reads and writes the connection.
    driver: JoinHandle<Result<(), h2::Error>>,
    /// The reason that kubefan records for the end.
    pub(crate) end: JoinHandle<ConnectionEnd>,
}

fn served(rig: &Rig) -> (DuplexStream, JoinHandle<ConnectionEnd>) {
    let (ours, theirs) = tokio::io::duplex(64 << 10);
    (ours, tokio::spawn(rig.server.clone().serve(theirs, ClientInfo::default())))
}

impl RawConnection {
    /// Connects. Each stream has a window of 64 KiB; the connection's window never limits.
    pub(crate) async fn to(rig: &Rig) -> RawConnection {
        let (ours, end) = served(rig);
        let mut builder = client::Builder::new();
        builder.initial_window_size(64 << 10).initial_connection_window_size(1 << 30);
        let (requests, connection) = builder.handshake(ours).await.unwrap();
        RawConnection { requests, driver: tokio::spawn(connection), end }
    }

    async fn call(&mut self, headers: &[(&'static str, &str)], message: &[u8]) -> Response<RecvStream> {
        self.call_method("Watch", headers, message).await
    }

    pub(crate) async fn call_method(
        &mut self,
        method: &str,
        headers: &[(&'static str, &str)],
        message: &[u8],
    ) -> Response<RecvStream> {
        let mut request = Request::post(format!("http://kubefan.test/kubefan.v1alpha1.WatchService/{method}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut requests = self.requests.clone().ready().await.unwrap();
        let (response, mut send) = requests.send_request(request.body(()).unwrap(), false).unwrap();
        let mut body = BytesMut::new();
        body.put_u8(0);
        body.put_u32(message.len() as u32);
        body.put_slice(message);
        send.send_data(body.freeze(), true).unwrap();
        response.await.unwrap()
    }

    pub(crate) async fn watch(&mut self, target: Target) -> RawStream {
        let bookmark_interval = Some(prost_types::Duration { seconds: 3600, nanos: 0 });
        let request = WatchRequest { target: Some(target), bookmark_interval, ..WatchRequest::default() };
        let response = self.call(&[], &request.encode_to_vec()).await;
        assert_eq!((response.status().as_u16(), response.headers().get("grpc-status")), (200, None));
        RawStream { body: response.into_body(), buffer: BytesMut::new() }
    }
}

/// The gRPC messages of one stream.
pub(crate) struct RawStream {
    body: RecvStream,
    buffer: BytesMut,
}

impl RawStream {
    /// The next message, or the status at the end.
    pub(crate) async fn next(&mut self) -> Result<WatchResponse, Status> {
        loop {
            if let Some((prefix, rest)) = self.buffer.split_at_checked(5) {
                let length = u32::from_be_bytes(prefix[1..].try_into().unwrap()) as usize;
                if rest.len() >= length {
                    let message = self.buffer.split_to(5 + length).split_off(5);
                    return Ok(WatchResponse::decode(message).unwrap());
                }
            }
            match self.body.data().await {
                Some(data) => {
                    let data = data.map_err(|error| Status::unknown(error.to_string()))?;
                    self.body.flow_control().release_capacity(data.len()).unwrap();
                    self.buffer.extend_from_slice(&data);
                }
                None => return Err(status(&self.body.trailers().await.unwrap().expect("trailers"))),
            }
        }
    }

    /// Reads to the end of the snapshot. Returns the number of messages.
    pub(crate) async fn snapshot(&mut self) -> usize {
        let mut count = 0;
        loop {
            count += 1;
            if let Some(watch_response::Message::SnapshotEnd(_)) = self.next().await.unwrap().message {
                return count;
            }
        }
    }

    /// Reads up to the event of this object.
    pub(crate) async fn until(&mut self, name: &str) {
        loop {
            match self.next().await.unwrap().message {
                Some(watch_response::Message::Event(event)) if event.name == name => return,
                _ => {}
            }
        }
    }
}

pub(crate) fn status(headers: &HeaderMap) -> Status {
    Status::from_header_map(headers).expect("a status")
}

pub(crate) async fn rig() -> Rig {
    let setup = Setup::of(&["pods"]);
    let sim = setup.sim();
    sim.create(&pods(), pod("a", "new")).unwrap();
    Rig::synced(sim, setup).await
}

/// A rig whose snapshot is larger than a stream's window.
async fn large_rig() -> Rig {
    let setup = Setup::of(&["pods"]);
    let sim = setup.sim();
    for number in 0..100 {
        sim.create(&pods(), large(&format!("p{number}"), 'x')).unwrap();
    }
    Rig::synced(sim, setup).await
}

async fn an_unread_stream_does_not_block_others() {
    let rig = large_rig().await;
    let mut raw = RawConnection::to(&rig).await;
    let mut idle = raw.watch(target("pods")).await;
    let mut read = raw.watch(target("pods")).await;
    assert_eq!(read.snapshot().await, 102);
    for number in 0..50 {
        rig.sim.update(&pods(), large(&format!("p{number}"), 'y')).unwrap();
    }
    read.until("p49").await;
    // kubefan gave the idle stream only what its window takes, and continues when it is read.
    let sent = rig.metric(&format!("kubefan_snapshot_objects_sent_total{CACHE}"));
    assert!(sent < 100.0 + 12.0, "{sent} objects were taken for a window of eight");
    assert_eq!(idle.snapshot().await, 102);
    idle.until("p49").await;
}

async fn a_reset_frees_the_subscription() {
    let rig = large_rig().await;
    let mut raw = RawConnection::to(&rig).await;
    let mut stays = raw.watch(target("pods")).await;
    let read = raw.watch(target("pods")).await;
    // This one waits for window space too.
    let stalled = raw.watch(target("pods")).await;
    assert_eq!(stays.snapshot().await, 102);
    drop((read, stalled));
    rig.metric_becomes(&format!("kubefan_subscribers{CACHE}"), 1.0).await;
    rig.sim.update(&pods(), large("p7", 'y')).unwrap();
    stays.until("p7").await;
    drop(stays);
    drop(raw.requests);
    rig.metric_becomes(&format!("kubefan_subscribers{CACHE}"), 0.0).await;
    assert_eq!(raw.end.await.unwrap(), ConnectionEnd::Closed);
}

async fn a_drain_ends_every_stream_with_its_reason() {
    let rig = rig().await;
    let mut raw = RawConnection::to(&rig).await;
    let mut streams = Vec::new();
    for _ in 0..50 {
        let mut stream = raw.watch(target("pods")).await;
        stream.snapshot().await;
        streams.push(stream);
    }
    rig.drain();
    for stream in &mut streams {
        let status = stream.next().await.unwrap_err();
        assert_eq!(
            (status.code(), status.get_details_error_info().unwrap().reason),
            (Code::Unavailable, "DRAINING".into())
        );
    }
    assert_eq!(raw.end.await.unwrap(), ConnectionEnd::Draining);
    raw.driver.await.unwrap().unwrap();
    let finished = "kubefan_subscriptions_finished_total{group=\"\",media=\"json\",namespace=\"\",reason=\"draining\",resource=\"pods\"}";
    assert_eq!(rig.metric(finished), 50.0);
}

async fn an_unread_snapshot_is_ended() {
    let rig = large_rig().await;
    let mut raw = RawConnection::to(&rig).await;
    let mut stalled = raw.watch(target("pods")).await;
    let finished = "kubefan_subscriptions_finished_total{group=\"\",media=\"json\",namespace=\"\",reason=\"snapshot_stalled\",resource=\"pods\"}";
    rig.metric_becomes(finished, 1.0).await;
    assert_eq!(rig.metric(&format!("kubefan_subscribers{CACHE}")), 0.0);
    // Messages that were already sent arrive first.
    let status = loop {
        if let Err(status) = stalled.next().await {
            break status;
        }
    };
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert_eq!(status.get_details_error_info().unwrap().reason, "SNAPSHOT_STALLED");
    assert!(status.get_details_retry_info().is_some());
}

async fn an_unread_list_is_ended() {
    const IN_FLIGHT: &str = "kubefan_snapshots";
    let rig = large_rig().await;
    let mut raw = RawConnection::to(&rig).await;
    let request = ListRequest { target: Some(target("pods")), ..ListRequest::default() };
    let response = raw.call_method("List", &[], &request.encode_to_vec()).await;
    assert_eq!(rig.metric(IN_FLIGHT), 1.0, "it holds a permit of the gate");
    rig.metric_becomes(IN_FLIGHT, 0.0).await;
    let mut body = response.into_body();
    while let Some(data) = body.data().await {
        body.flow_control().release_capacity(data.unwrap().len()).unwrap();
    }
    let status = status(&body.trailers().await.unwrap().expect("trailers"));
    assert_eq!(status.get_details_error_info().unwrap().reason, "SNAPSHOT_STALLED", "{status}");
}

async fn a_bookmark_follows_silence_on_each_stream() {
    let rig = rig().await;
    let mut often = rig.watch_all("pods").await;
    let mut raw = RawConnection::to(&rig).await;
    let some = Target { label_selector: "stage=old".into(), ..target("pods") };
    let mut seldom = raw.watch(some).await;
    seldom.snapshot().await;
    let start = tokio::time::Instant::now();
    let version = rig.sim.create(&pods(), pod("b", "new")).unwrap();
    often.until(version).await;
    let bookmark = seldom.next().await.unwrap();
    assert!(matches!(bookmark.message, Some(watch_response::Message::Bookmark(_))), "{bookmark:?}");
    assert_eq!(bookmark.resume_version, version.to_string());
    assert_eq!(start.elapsed().as_secs(), 3600);
}

async fn the_first_bookmark_after_a_snapshot_is_on_time() {
    let rig = rig().await;
    let nothing = Target { label_selector: "stage=never".into(), ..target("pods") };
    let mut quiet = rig.watch(nothing, "").await.unwrap();
    quiet.until_resumable().await;
    let start = tokio::time::Instant::now();
    let version = rig.sim.create(&pods(), pod("b", "new")).unwrap();
    quiet.until(version).await;
    assert!(start.elapsed() <= Duration::from_secs(2), "the interval is one second: {:?}", start.elapsed());
}

async fn a_client_that_answers_no_ping_is_dropped() {
    let rig = rig().await;
    let start = tokio::time::Instant::now();
    let mut raw = RawConnection::to(&rig).await;
    raw.watch(target("pods")).await.snapshot().await;
    // From now on the client task runs without any calls.
    let RawConnection { requests, driver, end } = raw;
    let io = tokio::spawn(async move {
        let _held = (requests, driver);
        std::future::pending::<()>().await;
    });
    // A client that answers PINGs stays connected.
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(!end.is_finished());
    io.abort();

    let (mut silent, end) = served(&rig);
    silent.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
    let start = start.max(tokio::time::Instant::now());
    assert_eq!(end.await.unwrap(), ConnectionEnd::Keepalive);
    assert_eq!(start.elapsed().as_secs(), 30 + 15);
}

async fn a_call_ends_at_its_deadline() {
    let rig = rig().await;
    let mut raw = RawConnection::to(&rig).await;
    let request = WatchRequest { target: Some(target("pods")), ..WatchRequest::default() }.encode_to_vec();
    let start = tokio::time::Instant::now();
    let response = raw.call(&[("grpc-timeout", "90S")], &request).await;
    let mut stream = RawStream { body: response.into_body(), buffer: BytesMut::new() };
    stream.snapshot().await;
    assert_eq!(stream.next().await.unwrap_err().code(), Code::DeadlineExceeded);
    assert_eq!(start.elapsed().as_secs(), 90);
}

async fn a_compressed_request_is_refused() {
    let rig = rig().await;
    let mut raw = RawConnection::to(&rig).await;
    let response = raw.call(&[("grpc-encoding", "gzip")], &[]).await;
    assert_eq!(status(response.headers()).code(), Code::Unimplemented);
    assert_eq!(response.headers()["grpc-accept-encoding"], "identity");
    assert!(response.into_body().is_end_stream(), "headers only");
}

async fn http1_requests_get_an_http1_answer() {
    let rig = rig().await;
    let answer = async |request: &str| {
        let (mut ours, _end) = served(&rig);
        ours.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        ours.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let plain = answer("GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await;
    assert!(plain.starts_with("HTTP/1.1 404 ") && plain.contains(r#""kind":"Status""#), "{plain}");
    let grpc = "Content-Type: application/grpc\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    let grpc = answer(&format!("POST /kubefan.v1alpha1.WatchService/Watch HTTP/1.1\r\nHost: x\r\n{grpc}")).await;
    assert!(grpc.starts_with("HTTP/1.1 505 ") && grpc.contains("HTTP/2"), "{grpc}");
}

async fn a_silent_connection_is_closed() {
    let rig = rig().await;
    let start = tokio::time::Instant::now();
    let (_nothing, first) = served(&rig);
    let (mut little, second) = served(&rig);
    little.write_all(b"PRI * HT").await.unwrap();
    assert_eq!(first.await.unwrap(), ConnectionEnd::Handshake);
    assert_eq!(second.await.unwrap(), ConnectionEnd::Handshake);
    assert_eq!(start.elapsed().as_secs(), 10);
}

async fn connections_over_the_limit_are_closed_at_once() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "--connections-max=1"]).await;
    let mut watch = Watch::start(&mut connect(kubefan.grpc_addr).await, target("pods"), "").await.unwrap();
    watch.until_resumable().await;
    let mut second = tokio::net::TcpStream::connect(kubefan.grpc_addr).await.unwrap();
    assert_eq!(second.read(&mut [0; 1]).await.unwrap_or(0), 0);
    let version = simulated.stage("a", "later");
    watch.until(version).await;
    let (_, metrics) = kubefan.admin("/metrics").await.unwrap();
    assert!(metrics.contains("kubefan_connections_finished_total{reason=\"refused\"} 1"), "{metrics}");
    assert!(metrics.contains("kubefan_connections 1\n"), "{metrics}");
    // The freed connection slot can be used again.
    drop(watch);
    wait::until("a free connection", wait::SOON, || async {
        let mut client = connect(kubefan.grpc_addr).await;
        Watch::start(&mut client, target("pods"), "").await.ok()
    })
    .await;
}

async fn two_hundred_streams_on_one_connection_get_every_event() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let mut client = connect(kubefan.grpc_addr).await;
    let mut watches = Vec::new();
    for _ in 0..200 {
        let mut watch = Watch::start(&mut client, target("pods"), "").await.unwrap();
        watch.until_resumable().await;
        watches.push(watch);
    }
    let versions: Vec<u64> = (0..20).map(|n| simulated.stage("a", &format!("s{n}"))).collect();
    for watch in &mut watches {
        watch.until(versions[19]).await;
        assert_eq!(watch.events.len(), 20, "nothing lost, nothing repeated");
    }
    let (_, metrics) = kubefan.admin("/metrics").await.unwrap();
    assert!(metrics.contains("kubefan_connections 1\n"), "{metrics}");
}
