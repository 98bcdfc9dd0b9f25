//! Limits that keep slow clients from harming others: calls without a request, readers that drip,
//! and readers that stop.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use h2::{
    RecvStream, SendStream,
    client::{self, ResponseFuture, SendRequest},
};
use http::Request;
use kubefan_common::proto::v1alpha1::{Target, watch_service_client::WatchServiceClient};
use kubefan_telemetry::metrics::ConnectionEnd;
use reqwest::{Body, Client, ClientBuilder, StatusCode};
use serde_json::json;
use tokio::{
    io::AsyncWriteExt,
    net::{TcpSocket, TcpStream},
    task::JoinSet,
    time::Instant,
};
use tonic::{
    Code,
    transport::{Channel, Endpoint},
};
use tonic_types::StatusExt;

use crate::{
    connections::{RawConnection, rig, status},
    harness::{
        kubefan::Kubefan,
        pki::{Authority, write_server_files},
        record::{Watch, connect},
        rig::{PODS, pod, pods, target},
        servers::is_of_cache,
        simulated::Simulated,
        tests, wait,
    },
    memory::memory,
};

tests! {
    local: pending_calls_are_limited_and_leave_the_places_of_streams, the_number_of_streams_is_limited_with_those_of_reflection_and_health,
        a_live_watch_that_is_not_read_is_ended, selectors_beyond_the_limits_are_refused_or_passed_on,
        two_addresses_leave_a_stream_for_a_third,
        one_caller_leaves_a_forwarded_watch_for_another,
        the_service_accounts_of_a_namespace_leave_a_forwarded_watch_for_another,
        the_service_accounts_of_a_namespace_leave_a_forwarded_request_for_another;
    local alone: many_values_in_selectors_take_a_few_times_their_text;
    paused: a_call_without_a_request_is_ended, calls_without_a_request_do_not_hold_up_a_drain;
}

const SERVICE: &str = "/kubefan.v1alpha1.WatchService";

/// Sends the headers of a call and no message.
async fn call(requests: &SendRequest<Bytes>, path: &str) -> (ResponseFuture, SendStream<Bytes>) {
    let request = Request::post(format!("http://kubefan.test{path}"));
    let request = request.header("content-type", "application/grpc").header("te", "trailers").body(()).unwrap();
    requests.clone().ready().await.unwrap().send_request(request, false).unwrap()
}

/// The status that a call ends with.
async fn ended(response: ResponseFuture) -> tonic::Status {
    let response = response.await.unwrap();
    if response.headers().contains_key("grpc-status") {
        return status(response.headers());
    }
    let mut body: RecvStream = response.into_body();
    while let Some(data) = body.data().await {
        body.flow_control().release_capacity(data.unwrap().len()).unwrap();
    }
    status(&body.trailers().await.unwrap().expect("trailers"))
}

fn reason(status: &tonic::Status) -> String {
    status.get_details_error_info().unwrap_or_else(|| panic!("{status}")).reason
}

async fn a_call_without_a_request_is_ended() {
    let rig = rig().await;
    let raw = RawConnection::to(&rig).await;
    let start = Instant::now();
    for (method, so_far) in [("Watch", 10), ("List", 20), ("Get", 30)] {
        let (response, _request) = call(&raw.requests, &format!("{SERVICE}/{method}")).await;
        let status = ended(response).await;
        assert_eq!((status.code(), reason(&status)), (Code::DeadlineExceeded, "REQUEST_TIMEOUT".into()), "{method}");
        assert_eq!(start.elapsed().as_secs(), so_far, "{method}");
    }
}

async fn calls_without_a_request_do_not_hold_up_a_drain() {
    let rig = rig().await;
    let mut raw = RawConnection::to(&rig).await;
    let mut calls = Vec::new();
    for method in ["Watch", "List", "Get"] {
        calls.push(call(&raw.requests, &format!("{SERVICE}/{method}")).await);
    }
    // Its answer shows that the calls before it were read.
    raw.call("ListResources", &[], &[]).await;
    let start = Instant::now();
    rig.drain();
    for (response, _request) in calls {
        assert_eq!(reason(&ended(response).await), "DRAINING");
    }
    assert_eq!(raw.end.await.unwrap(), ConnectionEnd::Draining);
    assert!(start.elapsed().as_secs() < 1, "{:?}", start.elapsed());
}

async fn http2(address: SocketAddr) -> SendRequest<Bytes> {
    let (requests, connection) = client::handshake(TcpStream::connect(address).await.unwrap()).await.unwrap();
    tokio::spawn(connection);
    requests
}

async fn pending_calls_are_limited_and_leave_the_places_of_streams() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "limits.callsPendingMax=3", "limits.subscribersMax=1"]).await;
    let requests = http2(kubefan.grpc_addr).await;
    let silent =
        [call(&requests, &format!("{SERVICE}/Watch")).await, call(&requests, "/grpc.health.v1.Health/Check").await];
    let mut watch = Watch::start(&mut connect(kubefan.grpc_addr).await, target("pods"), "").await.unwrap();
    watch.until_resumable().await;
    let third = call(&requests, &format!("{SERVICE}/List")).await;
    let status = ended(call(&requests, &format!("{SERVICE}/Watch")).await.0).await;
    assert_eq!((status.code(), reason(&status)), (Code::ResourceExhausted, "LIMIT_REACHED".into()));
    assert!(status.message().contains("limits.callsPendingMax"), "{status}");
    kubefan.metric_becomes("kubefan_calls_pending", 3.0).await;
    drop(silent);
    drop(third);
    kubefan.metric_becomes("kubefan_calls_pending", 0.0).await;
}

async fn two_addresses_leave_a_stream_for_a_third() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "limits.subscribersMax=64"]).await;
    let mut greedy = Vec::new();
    for connection in 0..4 {
        let endpoint = Endpoint::from_shared(format!("http://{}", kubefan.grpc_addr)).unwrap();
        let endpoint = endpoint.local_address(Some([127, 0, 0, 2 + connection % 2].into()));
        let mut grpc = WatchServiceClient::new(endpoint.connect().await.unwrap());
        let status = loop {
            match Watch::start(&mut grpc, target("pods"), "").await {
                Ok(watch) => greedy.push(watch),
                Err(status) => break status,
            }
        };
        assert_eq!((status.code(), reason(&status)), (Code::ResourceExhausted, "LIMIT_REACHED".into()));
    }
    let honest = Watch::start(&mut connect(kubefan.grpc_addr).await, target("pods"), "").await;
    assert!(honest.is_ok(), "{} streams of two addresses leave none: {:?}", greedy.len(), honest.err());
}

/// A client of its own address: 127.0.0 and this byte.
fn client_at(last_byte: u8) -> ClientBuilder {
    Client::builder().local_address(IpAddr::from([127, 0, 0, last_byte])).no_proxy()
}

async fn one_caller_leaves_a_forwarded_watch_for_another() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "--on-demand=false", "limits.passthroughMax=80"]).await;
    let url = format!("http://{}/api/v1/configmaps?watch=1", kubefan.grpc_addr);
    let watch = async |last_byte: u8, token: &str| {
        let client = client_at(last_byte).http2_prior_knowledge().build().unwrap();
        client.get(&url).bearer_auth(token).send().await.unwrap()
    };
    let mut greedy = Vec::new();
    loop {
        // The apiserver reads a token up to the next space.
        let answer = watch(2 + greedy.len() as u8, &format!("greedy {}", greedy.len())).await;
        if answer.status() == StatusCode::TOO_MANY_REQUESTS {
            break;
        }
        assert_eq!(answer.status(), StatusCode::OK);
        greedy.push(answer);
    }
    let honest = watch(250, "honest").await;
    assert_eq!(honest.status(), StatusCode::OK, "{} watches of one caller leave none", greedy.len());
}

/// The service accounts of a greedy namespace.
const ACCOUNTS: u8 = 40;

/// kubefan with room for 80 forwarded requests, and clients by their address. It knows its callers:
/// to the simulated apiserver every token is the name of its user.
async fn with_known_callers(simulated: &Simulated) -> (Kubefan, impl Fn(u8) -> Client) {
    let authority = Authority::new();
    write_server_files(&authority, simulated.dir.path());
    let path = |name: &str| simulated.dir.path().join(name).to_str().unwrap().to_owned();
    let certificate = path("server.pem");
    let key = path("server-key.pem");
    let tls = ["--tls-cert-file", &certificate, "--tls-private-key-file", &key];
    let args = ["--resource=pods", "--on-demand=false", "limits.passthroughMax=80", "tuning.authenticationSkipLookup"];
    let kubefan = Kubefan::spawn_as_given(&simulated.kubeconfig(), &[&args[..], &tls].concat()).await;
    kubefan.ready().await;
    let ca = reqwest::Certificate::from_pem(authority.ca_pem.as_bytes()).unwrap();
    (kubefan, move |last_byte| client_at(last_byte).tls_certs_only([ca.clone()]).build().unwrap())
}

async fn the_service_accounts_of_a_namespace_leave_a_forwarded_watch_for_another() {
    let simulated = Simulated::start().await;
    let (kubefan, client) = with_known_callers(&simulated).await;
    let url = format!("https://{}/api/v1/configmaps?watch=1", kubefan.grpc_addr);
    let watch = async |client: &Client, token: &str| client.get(&url).bearer_auth(token).send().await.unwrap();
    let mut held = Vec::new();
    let mut refused = 0;
    // Each in turn, until each was refused once more.
    for number in (0..ACCOUNTS).cycle() {
        let account = client(2 + number);
        let answer = watch(&account, &format!("system:serviceaccount:greedy:{number}")).await;
        if answer.status() == StatusCode::OK {
            held.push((account, answer));
            refused = 0;
            continue;
        }
        assert_eq!(answer.status(), StatusCode::TOO_MANY_REQUESTS);
        refused += 1;
        if refused == ACCOUNTS {
            break;
        }
    }
    let honest = watch(&client(250), "system:serviceaccount:honest:a").await;
    assert_eq!(honest.status(), StatusCode::OK, "{} watches of one namespace leave none", held.len());
}

async fn the_service_accounts_of_a_namespace_leave_a_forwarded_request_for_another() {
    let simulated = Simulated::start().await;
    let (kubefan, client) = with_known_callers(&simulated).await;
    let url = format!("https://{}/api/v1/namespaces/default/configmaps", kubefan.grpc_addr);
    let mut writes = JoinSet::new();
    let refused = Arc::new(AtomicUsize::new(0));
    for number in 0..3 * ACCOUNTS {
        // Its body never ends.
        let body = Body::wrap_stream(futures::stream::pending::<Result<Bytes, std::io::Error>>());
        let token = format!("system:serviceaccount:greedy:{}", number % ACCOUNTS);
        let write = client(2 + number % ACCOUNTS).post(&url).bearer_auth(token).body(body);
        let refused = refused.clone();
        writes.spawn(async move {
            let answer = write.send().await.unwrap();
            assert_eq!(answer.status(), StatusCode::TOO_MANY_REQUESTS);
            refused.fetch_add(1, Ordering::SeqCst);
        });
    }
    let all_arrived = || async {
        let held = kubefan.metric("kubefan_passthrough_requests").await? as usize;
        (held + refused.load(Ordering::SeqCst) == usize::from(3 * ACCOUNTS)).then_some(held)
    };
    let held = wait::until("each write has a place or none", wait::SOON, all_arrived).await;
    let version = format!("https://{}/version", kubefan.grpc_addr);
    let honest = client(250).get(version).bearer_auth("system:serviceaccount:honest:a").send().await.unwrap();
    assert_eq!(honest.status(), StatusCode::OK, "{held} writes of one namespace leave none");
}

async fn the_number_of_streams_is_limited_with_those_of_reflection_and_health() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "limits.subscribersMax=2"]).await;
    let requests = http2(kubefan.grpc_addr).await;
    let mut held = Vec::new();
    // A watch of the overall health, and a list of all services.
    for (path, message, ends) in [
        ("/grpc.health.v1.Health/Watch", &[0; 5][..], true),
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", &[0, 0, 0, 0, 2, 0x3a, 0], false),
    ] {
        let (response, mut request) = call(&requests, path).await;
        request.send_data(Bytes::from_static(message), ends).unwrap();
        let response = response.await.unwrap();
        assert!(!response.headers().contains_key("grpc-status"), "{path}: {response:?}");
        held.push((response, request));
    }
    let mut client = connect(kubefan.grpc_addr).await;
    let refused = Watch::start(&mut client, target("pods"), "").await;
    let Err(status) = refused else { panic!("a third stream was served") };
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert!(status.message().contains("limits.subscribersMax"), "{status}");
    assert!(status.get_details_retry_info().unwrap().retry_delay.is_some());
    let status = ended(call(&requests, "/grpc.health.v1.Health/Watch").await.0).await;
    assert!(status.message().contains("limits.subscribersMax"), "{status}");
    drop(held);
    becomes_served(&client, target("pods")).await;
}

async fn a_live_watch_that_is_not_read_is_ended() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "tuning.snapshotStallTimeout=1s"]).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut unread = socket.connect(kubefan.grpc_addr).await.unwrap();
    let watch =
        format!("GET {PODS}?resourceVersion={}&watch=1 HTTP/1.1\r\nHost: localhost\r\n\r\n", simulated.sim.revision());
    unread.write_all(watch.as_bytes()).await.unwrap();
    let subscribers = r#"kubefan_subscribers{group="",media="json",namespace="",resource="pods"}"#;
    kubefan.metric_becomes(subscribers, 1.0).await;
    // More than the sockets can buffer.
    for number in 0..240 {
        let mut large = pod("a", "new");
        large["metadata"]["annotations"] = json!({ "x": format!("{number}").repeat(40_000) });
        simulated.sim.update(&pods(), large).unwrap();
    }
    kubefan.metric_becomes(subscribers, 0.0).await;
    kubefan.metric_becomes("kubefan_connections", 0.0).await;
    drop(unread);
}

async fn selectors_beyond_the_limits_are_refused_or_passed_on() {
    let simulated = Simulated::start().await;
    let absent = |count: usize| (0..count).map(|number| format!("!k{number}")).collect::<Vec<_>>().join(",");
    let open = simulated.kubefan(&["--resource=pods"]).await;
    let mut grpc = connect(open.grpc_addr).await;
    let with = |count| Target { label_selector: absent(count), ..target("pods") };
    assert!(Watch::start(&mut grpc, with(100), "").await.is_ok());
    let Err(status) = Watch::start(&mut grpc, with(101), "").await else { panic!("it was served") };
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("limits.selectorTermsMax"), "{status}");
    let shut = simulated.kubefan(&["--resource=pods", "--access=local-cache-only"]).await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    for (kubefan, count, code, is_cached) in
        [(&open, 100, 200, true), (&open, 101, 200, false), (&shut, 100, 200, true), (&shut, 101, 400, false)]
    {
        let url = format!("http://{}{PODS}?resourceVersion=0&labelSelector={}", kubefan.grpc_addr, absent(count));
        let answer = client.get(url).send().await.unwrap();
        let found = (answer.status().as_u16(), is_of_cache(answer.headers()));
        assert_eq!(found, (code, is_cached), "{count} terms");
    }
}

async fn many_values_in_selectors_take_a_few_times_their_text() {
    const WATCHES: usize = 500;
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "limits.subscribersMax=2000"]).await;
    let mut grpc = connect(kubefan.grpc_addr).await;
    // No two selectors have a value in common.
    let long = |number: usize| {
        let values = (0..2000).map(|value| format!("{number:03}{value:04}")).collect::<Vec<_>>().join(",");
        Target { label_selector: format!("app in ({values})"), ..target("pods") }
    };
    let first = Watch::start(&mut grpc, long(0), "").await.unwrap();
    let before = memory(&kubefan, "VmRSS");
    let mut watches = vec![first];
    for number in 1..WATCHES {
        watches.push(Watch::start(&mut grpc, long(number), "").await.unwrap());
    }
    let text_bytes = long(0).label_selector.len() * (WATCHES - 1);
    let taken = memory(&kubefan, "VmRSS") - before;
    println!("{taken} bytes resident for {text_bytes} of text");
    // An idle watch takes some ten KiB itself.
    assert!(taken < 6 * text_bytes + WATCHES * (20 << 10), "{taken} bytes for {text_bytes} of text");
    drop(watches);
    let few = simulated.kubefan(&["--resource=pods", "limits.selectorMemoryMax=1Mi"]).await;
    let mut grpc = connect(few.grpc_addr).await;
    let mut served = Vec::new();
    let status = loop {
        match Watch::start(&mut grpc, long(served.len()), "").await {
            Ok(watch) => served.push(watch),
            Err(status) => break status,
        }
    };
    assert!(served.len() > 10 && served.len() < 64, "{} are within a mebibyte", served.len());
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("limits.selectorMemoryMax"), "{status}");
    assert!(status.get_details_retry_info().is_some(), "{status:?}");
    // The last of it is for other connections.
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let mut of_others = Vec::new();
    let refused = loop {
        let selector = long(900 + of_others.len()).label_selector;
        let url = format!("http://{}{PODS}?watch=1&labelSelector={selector}", few.grpc_addr);
        let answer = client.get(url).send().await.unwrap();
        if !answer.status().is_success() {
            break answer;
        }
        of_others.push(answer);
    };
    assert!(!of_others.is_empty(), "one connection takes all");
    assert_eq!((refused.status().as_u16(), refused.headers().contains_key("retry-after")), (429, true));
    drop(served);
    becomes_served(&grpc, long(999)).await;
}

/// Waits for the place of a stream that has ended.
async fn becomes_served(grpc: &WatchServiceClient<Channel>, target: Target) {
    let start = || {
        let mut grpc = grpc.clone();
        let target = target.clone();
        async move { Watch::start(&mut grpc, target, "").await.ok() }
    };
    wait::until("a place for a stream", wait::SOON, start).await;
}
