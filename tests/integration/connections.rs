//! Effects of one connection on its own streams, on other connections and on kubefan: slow readers,
//! resets, silence, many streams, garbage. Most tests speak HTTP/2 by hand, because client
//! libraries behave too well.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use h2::{
    RecvStream,
    client::{self, SendRequest},
};
use http::{HeaderMap, Request, Response};
use kubefan_common::proto::v1alpha1::{ListRequest, Target, WatchRequest, WatchResponse, watch_response};
use kubefan_server::ClientInfo;
use kubefan_telemetry::metrics::ConnectionEnd;
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
    local: connections_over_the_limit_are_closed_at_once;
    paused: an_unread_stream_blocks_no_other_and_a_reset_frees_it,
        every_stream_of_a_connection_gets_every_event_and_the_reason_of_a_drain,
        an_unread_snapshot_or_list_is_ended, bookmarks_follow_silence_on_each_stream_on_time,
        a_silent_client_is_dropped, a_call_ends_at_its_deadline, a_compressed_request_is_refused;
}

const CACHE: &str = "{group=\"\",media=\"json\",namespace=\"\",resource=\"pods\"}";

/// The metric of the streams that ended for a reason.
fn finished(reason: &str) -> String {
    let labels = format!(r#"group="",media="json",namespace="",reason="{reason}",resource="pods""#);
    format!("kubefan_subscriptions_finished_total{{{labels}}}")
}

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

pub(crate) fn served(rig: &Rig) -> (DuplexStream, JoinHandle<ConnectionEnd>) {
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

    pub(crate) async fn call(
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
        let response = self.call("Watch", &[], &request.encode_to_vec()).await;
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

async fn an_unread_stream_blocks_no_other_and_a_reset_frees_it() {
    let rig = large_rig().await;
    let mut raw = RawConnection::to(&rig).await;
    let mut idle = raw.watch(target("pods")).await;
    let mut read = raw.watch(target("pods")).await;
    assert_eq!(read.snapshot().await, 102);
    for number in 0..50 {
        rig.sim.update(&pods(), large(&format!("p{number}"), 'y')).unwrap();
    }
    read.until("p49").await;
    // kubefan gave the idle stream only as much as its window takes, and continues when it is read.
    let sent = rig.metric(&format!("kubefan_snapshot_objects_sent_total{CACHE}"));
    assert!(sent < 100.0 + 12.0, "{sent} objects were taken for a window of eight");
    assert_eq!(idle.snapshot().await, 102);
    idle.until("p49").await;

    // A stream that has read everything, and one that waits for window space.
    let stalled = raw.watch(target("pods")).await;
    drop(idle);
    drop(stalled);
    let subscribers = format!("kubefan_subscribers{CACHE}");
    rig.metric_becomes(&subscribers, 1.0).await;
    rig.sim.update(&pods(), large("p7", 'z')).unwrap();
    read.until("p7").await;
    drop(read);
    drop(raw.requests);
    rig.metric_becomes(&subscribers, 0.0).await;
    assert_eq!(raw.end.await.unwrap(), ConnectionEnd::Closed);
}

async fn every_stream_of_a_connection_gets_every_event_and_the_reason_of_a_drain() {
    const STREAMS: usize = 200;
    let rig = rig().await;
    let mut raw = RawConnection::to(&rig).await;
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        let mut stream = raw.watch(target("pods")).await;
        stream.snapshot().await;
        streams.push(stream);
    }
    let names: Vec<String> = (0..20).map(|n| format!("p{n}")).collect();
    for name in &names {
        rig.sim.create(&pods(), pod(name, "new")).unwrap();
    }
    for stream in &mut streams {
        for name in &names {
            let next = stream.next().await.unwrap().message;
            let Some(watch_response::Message::Event(event)) = next else { panic!("{next:?} instead of {name}") };
            assert_eq!(event.name, *name, "nothing lost, nothing repeated");
        }
    }
    rig.drain();
    for stream in &mut streams {
        let status = match stream.next().await {
            // The apiserver may have said since that the last version has no more events.
            Ok(WatchResponse { message: Some(watch_response::Message::Bookmark(_)), .. }) => stream.next().await,
            next => next,
        };
        let status = status.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        assert_eq!(status.get_details_error_info().unwrap().reason, "DRAINING");
    }
    assert_eq!(raw.end.await.unwrap(), ConnectionEnd::Draining);
    raw.driver.await.unwrap().unwrap();
    assert_eq!(rig.metric(&finished("draining")), STREAMS as f64);
}

async fn an_unread_snapshot_or_list_is_ended() {
    const IN_FLIGHT: &str = "kubefan_snapshots";
    let rig = large_rig().await;
    let watch = WatchRequest { target: Some(target("pods")), ..WatchRequest::default() }.encode_to_vec();
    let list = ListRequest { target: Some(target("pods")), ..ListRequest::default() }.encode_to_vec();
    for (method, request) in [("Watch", watch), ("List", list)] {
        let mut raw = RawConnection::to(&rig).await;
        let mut body = raw.call(method, &[], &request).await.into_body();
        assert_eq!(rig.metric(IN_FLIGHT), 1.0, "a {method} holds a permit of the gate");
        rig.metric_becomes(IN_FLIGHT, 0.0).await;
        // Messages that were already sent arrive first.
        while let Some(data) = body.data().await {
            body.flow_control().release_capacity(data.unwrap().len()).unwrap();
        }
        let status = status(&body.trailers().await.unwrap().expect("trailers"));
        assert_eq!(status.code(), Code::ResourceExhausted, "{method}: {status}");
        assert_eq!(status.get_details_error_info().unwrap().reason, "SNAPSHOT_STALLED", "{method}");
        assert!(status.get_details_retry_info().is_some(), "{method}");
    }
    assert_eq!(rig.metric(&finished("snapshot_stalled")), 1.0);
    assert_eq!(rig.metric(&format!("kubefan_subscribers{CACHE}")), 0.0);
}

async fn bookmarks_follow_silence_on_each_stream_on_time() {
    let rig = rig().await;
    let selecting = |labels: &str| Target { label_selector: labels.into(), ..target("pods") };
    let mut often = rig.watch(selecting("stage=never"), "").await.unwrap();
    often.until_resumable().await;
    let mut seldom = RawConnection::to(&rig).await.watch(selecting("stage=old")).await;
    seldom.snapshot().await;
    let start = tokio::time::Instant::now();
    let version = rig.sim.create(&pods(), pod("b", "new")).unwrap();
    often.until(version).await;
    assert!(start.elapsed() <= Duration::from_secs(2), "the interval is one second: {:?}", start.elapsed());
    let bookmark = seldom.next().await.unwrap();
    assert!(matches!(bookmark.message, Some(watch_response::Message::Bookmark(_))), "{bookmark:?}");
    assert_eq!((bookmark.resume_version, bookmark.version_is_complete), (version.to_string(), true));
    assert_eq!(start.elapsed().as_secs(), 3600);
}

async fn a_silent_client_is_dropped() {
    let rig = rig().await;
    let mut raw = RawConnection::to(&rig).await;
    raw.watch(target("pods")).await.snapshot().await;
    // A client that makes no calls, but answers PINGs, stays connected.
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(!raw.end.is_finished());
    let start = tokio::time::Instant::now();
    let settings = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    for (sent, end, seconds) in [
        (&b""[..], ConnectionEnd::Handshake, 10),
        (b"PRI * HT", ConnectionEnd::Handshake, 20),
        (settings, ConnectionEnd::Keepalive, 20 + 30 + 15),
    ] {
        let (mut silent, ended) = served(&rig);
        silent.write_all(sent).await.unwrap();
        assert_eq!((ended.await.unwrap(), start.elapsed().as_secs()), (end, seconds), "{sent:?}");
    }
}

async fn a_call_ends_at_its_deadline() {
    let rig = rig().await;
    let mut raw = RawConnection::to(&rig).await;
    let request = WatchRequest { target: Some(target("pods")), ..WatchRequest::default() }.encode_to_vec();
    let start = tokio::time::Instant::now();
    let response = raw.call("Watch", &[("grpc-timeout", "90S")], &request).await;
    let mut stream = RawStream { body: response.into_body(), buffer: BytesMut::new() };
    stream.snapshot().await;
    assert_eq!(stream.next().await.unwrap_err().code(), Code::DeadlineExceeded);
    assert_eq!(start.elapsed().as_secs(), 90);
}

async fn a_compressed_request_is_refused() {
    let rig = rig().await;
    let mut raw = RawConnection::to(&rig).await;
    let response = raw.call("Watch", &[("grpc-encoding", "gzip")], &[]).await;
    assert_eq!(status(response.headers()).code(), Code::Unimplemented);
    assert_eq!(response.headers()["grpc-accept-encoding"], "identity");
    assert!(response.into_body().is_end_stream(), "headers only");
}

async fn connections_over_the_limit_are_closed_at_once() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "limits.connectionsMax=1"]).await;
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
