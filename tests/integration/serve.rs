//! `kubefan serve` from outside: TLS, Unix sockets, health, reflection, limits, and a shutdown that
//! ends every stream with a reason to reconnect.

use std::{process::Command, time::Duration};

use kubefan_common::proto::v1alpha1::{WatchRequest, watch_service_client::WatchServiceClient};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::{
    Code, Status,
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
use tonic_reflection::pb::{
    v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    },
    v1alpha,
};
use tonic_types::StatusExt;

use crate::harness::{
    kubefan::{Kubefan, run},
    pki::Authority,
    record::{Watch, connect},
    rig::target,
    simulated::Simulated,
    tests, tools, wait,
};

tests! {
    python: grpcio_without_tls_gets_the_reason_and_does_not_retry;
    local: a_data_port_with_a_certificate_accepts_only_tls, a_data_port_without_a_certificate_accepts_no_tls,
        an_expired_certificate_is_reported_by_both_sides, a_hangup_reads_the_certificate_again_and_ends_nothing,
        a_certificate_is_rotated_under_500_streams_and_ends_none, a_unix_socket_is_served_and_removed,
        a_termination_ends_every_stream_with_its_reason, a_termination_waits_no_longer_than_the_drain_timeout,
        a_health_watch_does_not_delay_the_shutdown, health_covers_each_resource_before_its_sync_and_in_an_outage,
        reflection_describes_the_service, reflection_answers_clients_of_the_old_version,
        the_number_of_streams_is_limited, a_timeout_ends_a_watch_cleanly, ports_chosen_by_the_system_are_printed,
        flags_override_the_environment_which_overrides_the_file,
        both_names_of_a_variable_are_taken_and_a_misspelt_one_is_named, a_misspelt_resource_gets_a_suggestion_at_once;
}

async fn a_data_port_with_a_certificate_accepts_only_tls() {
    let simulated = Simulated::start().await;
    let authority = Authority::new();
    let (certificate, key) = authority.server();
    let file = |name: &str, text: &str| {
        let path = simulated.dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (certificate, key) = (file("server.pem", &certificate), file("server-key.pem", &key));
    let ca = file("ca.pem", &authority.ca_pem);
    let kubefan =
        simulated.kubefan(&["--resource=pods", "--tls-cert-file", &certificate, "--tls-private-key-file", &key]).await;
    let address = kubefan.grpc_addr;

    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&authority.ca_pem));
    let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap().tls_config(tls).unwrap();
    let mut client = WatchServiceClient::new(endpoint.connect().await.unwrap());
    let mut watch = Watch::start(&mut client, target("pods"), "").await.unwrap();
    let version = simulated.create("later");
    watch.until(version).await;
    assert_eq!(watch.state.len(), 4);

    let secure = format!("https://{address}");
    let got = run(&["get", "pods", "-o", "name", "--server", &secure, "--ca-file", &ca]).await;
    assert_eq!((got.code, got.stdout.lines().count()), (Some(0), 4), "{got:?}");
    let stranger = run(&["get", "pods", "--server", &secure]).await;
    assert_eq!(stranger.code, Some(1), "an authority that is not trusted: {stranger:?}");
    assert_eq!(
        stranger.stderr,
        format!(
            "error: cannot reach kubefan at {secure}: no trusted CA has signed the server's certificate; the CA file must contain the \
             CA that has (--ca-file)\n"
        )
    );
    let mistaken = run(&["get", "pods", "--server", &secure, "--ca-file", &key]).await;
    assert_eq!(mistaken.code, Some(1), "a key: {mistaken:?}");
    let says = format!("CA file {key}: it contains a private key and no certificate");
    assert!(mistaken.stderr.contains(&says) && mistaken.stderr.lines().count() == 1, "{mistaken:?}");
    let plain = run(&["get", "pods", "--server", &address.to_string()]).await;
    assert_eq!(plain.code, Some(1), "no TLS: {plain:?}");
    assert_eq!(
        plain.stderr,
        format!(
            "error: cannot reach kubefan at {address}: the server needs TLS on this port; use an https:// address\n"
        )
    );
    let plain = reqwest::Client::builder().no_proxy().http1_only().build().unwrap();
    let refused = plain.get(format!("http://{address}/api")).send().await.unwrap();
    let (code, text) = (refused.status(), refused.text().await.unwrap());
    assert_eq!((code.as_u16(), text.lines().count()), (400, 1), "{text}");
    assert!(text.contains("use https://"), "{text}");
    let version = simulated.create("last");
    watch.until(version).await;
}

/// grpcio sends a call again on a new connection, at once and for ever, if a GOAWAY says that it
/// was not processed.
async fn grpcio_without_tls_gets_the_reason_and_does_not_retry() {
    const PROGRAM: &str = "import sys, grpc\n\
        call = grpc.insecure_channel(sys.argv[1]).unary_unary('/kubefan.v1alpha1.WatchService/ListResources')\n\
        try: call(b'', timeout=60)\n\
        except grpc.RpcError as error: print(error.code().name, error.details())\n";
    const CONNECTIONS_MAX: u64 = 3;
    let requirements = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/python/requirements.txt");
    let python = tools::python("example-python", requirements.as_ref());
    let (simulated, authority) = (Simulated::start().await, Authority::new());
    let files = Files::new(&simulated, &authority);
    files.write(authority.server());
    let kubefan = files.kubefan(&simulated).await;
    let mut command = tokio::process::Command::new(python);
    command.args(["-c", PROGRAM, &kubefan.grpc_addr.to_string()]).kill_on_drop(true);
    let output = command.output().await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.starts_with("UNAVAILABLE a plaintext request was sent to an HTTPS port"), "{output:?}");
    let (_, metrics) = kubefan.admin("/metrics").await.unwrap();
    let started = metrics.lines().find_map(|line| line.strip_prefix("kubefan_connections_started_total "));
    assert!(started.unwrap().parse::<u64>().unwrap() <= CONNECTIONS_MAX, "{metrics}");
}

async fn a_data_port_without_a_certificate_accepts_no_tls() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let secure = format!("https://{}", kubefan.grpc_addr);
    let got = run(&["get", "pods", "--server", &secure]).await;
    assert_eq!(got.code, Some(1), "{got:?}");
    assert_eq!(
        got.stderr,
        format!(
            "error: cannot reach kubefan at {secure}: the server does not speak TLS on this port; use an address without https://\n"
        )
    );
    // The start of a ClientHello.
    let mut stream = tokio::net::TcpStream::connect(kubefan.grpc_addr).await.unwrap();
    stream.write_all(b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.0 400 Bad Request\r\n") && answer.contains("--tls-cert-file"), "{answer}");
}

/// Paths of the files of a certificate, its key and its CA.
struct Files {
    certificate: String,
    key: String,
    ca: String,
}

impl Files {
    fn new(simulated: &Simulated, authority: &Authority) -> Files {
        let path = |name: &str| simulated.dir.path().join(name).to_str().unwrap().to_owned();
        let files = Files { certificate: path("tls.crt"), key: path("tls.key"), ca: path("ca.pem") };
        std::fs::write(&files.ca, &authority.ca_pem).unwrap();
        files
    }

    fn write(&self, (certificate, key): (String, String)) {
        std::fs::write(&self.key, key).unwrap();
        std::fs::write(&self.certificate, certificate).unwrap();
    }

    async fn kubefan(&self, simulated: &Simulated) -> Kubefan {
        let tls = ["--tls-cert-file", &self.certificate, "--tls-private-key-file", &self.key];
        simulated.kubefan(&[&["--resource=pods"], &tls[..]].concat()).await
    }
}

const EXPIRATION: &str = "kubefan_serving_certificate_expiration_timestamp_seconds";

async fn an_expired_certificate_is_reported_by_both_sides() {
    let (simulated, authority) = (Simulated::start().await, Authority::new());
    let files = Files::new(&simulated, &authority);
    files.write(authority.expired_server());
    let kubefan = files.kubefan(&simulated).await;
    let log = kubefan.process.log();
    assert!(log.contains("WARN") && log.contains("has expired: it was valid until 2002-01-01T00:00:00Z"), "{log}");
    let (_, metrics) = kubefan.admin("/metrics").await.unwrap();
    assert!(metrics.contains(&format!("{EXPIRATION} 1009843200\n")), "{metrics}");
    let secure = format!("https://{}", kubefan.grpc_addr);
    let got = run(&["get", "pods", "--server", &secure, "--ca-file", &files.ca]).await;
    assert_eq!(got.code, Some(1), "{got:?}");
    let says = ["the server's certificate expired ", " days ago; it must be renewed\n"];
    assert!(says.iter().all(|text| got.stderr.contains(text)) && !got.stderr.contains("--ca-file"), "{got:?}");
}

async fn a_hangup_reads_the_certificate_again_and_ends_nothing() {
    let (simulated, authority) = (Simulated::start().await, Authority::new());
    let files = Files::new(&simulated, &authority);
    files.write(authority.expired_server());
    let kubefan = files.kubefan(&simulated).await;
    let logged = async |text: &str| {
        wait::until(text, wait::SOON, || async { kubefan.process.log().contains(text).then_some(()) }).await;
    };
    kubefan.process.hang_up();
    logged("the certificate of the data port was read again; it has not changed").await;
    files.write(authority.server());
    kubefan.process.hang_up();
    logged("the certificate of the data port was renewed").await;
    let secure = format!("https://{}", kubefan.grpc_addr);
    let got = run(&["get", "pods", "-o", "name", "--server", &secure, "--ca-file", &files.ca]).await;
    assert_eq!((got.code, got.stdout.lines().count()), (Some(0), 3), "{got:?}");

    let plain = simulated.kubefan(&["--resource=pods"]).await;
    let mut watch = Watch::start(&mut connect(plain.grpc_addr).await, target("pods"), "").await.unwrap();
    plain.process.hang_up();
    let has = || async { plain.process.log().contains("nothing to read again").then_some(()) };
    wait::until("the log line", wait::SOON, has).await;
    let version = simulated.create("later");
    watch.until(version).await;
}

async fn a_certificate_is_rotated_under_500_streams_and_ends_none() {
    const CONNECTIONS: usize = 10;
    const STREAMS: usize = 50;
    let (simulated, authority, next) = (Simulated::start().await, Authority::new(), Authority::new());
    let files = Files::new(&simulated, &authority);
    files.write(authority.server());
    let kubefan = files.kubefan(&simulated).await;
    let connection = async |authority: &Authority| {
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&authority.ca_pem));
        let endpoint = Endpoint::from_shared(format!("https://{}", kubefan.grpc_addr)).unwrap();
        endpoint.tls_config(tls).unwrap().connect().await.map(WatchServiceClient::new)
    };
    let mut watches = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut client = connection(&authority).await.unwrap();
        for _ in 0..STREAMS {
            let mut watch = Watch::start(&mut client, target("pods"), "").await.unwrap();
            watch.until_resumable().await;
            watches.push(watch);
        }
    }
    // Of another CA, so that a client knows which of them it gets.
    files.write(next.server());
    kubefan.process.hang_up();
    let renewed =
        || async { kubefan.process.log().contains("the certificate of the data port was renewed").then_some(()) };
    wait::until("the new certificate", wait::SOON, renewed).await;
    let version = simulated.create("later");
    for watch in &mut watches {
        watch.until(version).await;
    }
    assert!(connection(&authority).await.is_err(), "new connections get the new certificate");
    Watch::start(&mut connection(&next).await.unwrap(), target("pods"), "").await.unwrap().until(version).await;
}

async fn a_unix_socket_is_served_and_removed() {
    let simulated = Simulated::start().await;
    let path = simulated.dir.path().join("kubefan.sock");
    let socket = format!("unix:{}", path.display());
    let mut kubefan = simulated.kubefan_at(&socket).await;
    let got = run(&["get", "pods", "-o", "name", "--server", &socket]).await;
    assert_eq!((got.code, got.stdout.as_str()), (Some(0), "pod/a\npod/b\npod/c\n"), "{got:?}");
    // On a local address readers choose what is cached.
    let got = run(&["get", "ns", "default", "-o", "name", "--server", &socket]).await;
    assert_eq!(got.stdout, "namespace/default\n", "{got:?}");
    kubefan.process.terminate();
    assert_eq!(kubefan.process.ended(wait::SOON).await.code(), Some(0));
    assert!(!path.exists(), "the socket's file is removed");
}

async fn end_of(watch: &mut Watch) -> Option<Status> {
    loop {
        match watch.step().await {
            Ok(Some(_)) => {}
            Ok(None) => return None,
            Err(status) => return Some(status),
        }
    }
}

async fn a_termination_ends_every_stream_with_its_reason() {
    let simulated = Simulated::start().await;
    let mut kubefan = simulated.kubefan(&["--resource=pods", "--drain-timeout=20s"]).await;
    let mut watches = Vec::new();
    for n in 0..20 {
        let mut client = connect(kubefan.grpc_addr).await;
        // No short bookmark interval, because a bookmark would wake the stream anyway.
        let request = WatchRequest { target: Some(target("pods")), ..WatchRequest::default() };
        let mut watch = Watch::over(Box::pin(client.watch(request).await.unwrap().into_inner()), "");
        // One stream has not read its snapshot yet.
        if n > 0 {
            watch.until_resumable().await;
        }
        watches.push((client, watch));
    }
    kubefan.process.terminate();
    for (_, watch) in &mut watches {
        let status = end_of(watch).await.expect("the stream ended without a status");
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        assert_eq!(status.get_details_error_info().unwrap().reason, "DRAINING");
        assert!(status.get_details_retry_info().unwrap().retry_delay.is_some());
    }
    assert_eq!(kubefan.process.ended(wait::SOON).await.code(), Some(0), "{}", kubefan.process.log());
    assert!(tokio::net::TcpStream::connect(kubefan.grpc_addr).await.is_err());
}

async fn a_termination_waits_no_longer_than_the_drain_timeout() {
    let simulated = Simulated::start().await;
    let mut kubefan = simulated.kubefan(&["--resource=pods", "--drain-timeout=2s"]).await;
    // Sends half a request and stops.
    let mut stream = tokio::net::TcpStream::connect(kubefan.grpc_addr).await.unwrap();
    let settings = [0u8, 0, 0, 4, 0, 0, 0, 0, 0];
    // HEADERS of a POST without END_STREAM: a call whose message never arrives.
    let headers = [
        &[0u8, 0, 60, 1, 4, 0, 0, 0, 1, 0x83, 0x86, 0x04, 39][..],
        b"/kubefan.v1alpha1.WatchService/WatchAll",
        &[0x01, 1, b'x', 0x0f, 0x10, 11][..],
        b"application",
    ]
    .concat();
    stream.write_all(&[&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &settings, &headers].concat()).await.unwrap();
    let mut watch = Watch::start(&mut connect(kubefan.grpc_addr).await, target("pods"), "").await.unwrap();
    watch.until_resumable().await;
    kubefan.process.terminate();
    assert_eq!(end_of(&mut watch).await.unwrap().code(), Code::Unavailable);
    assert_eq!(kubefan.process.ended(wait::SOON).await.code(), Some(0), "{}", kubefan.process.log());
    assert!(kubefan.process.log().contains("did not end within the drain timeout"), "{}", kubefan.process.log());
}

fn channel_to(kubefan: &Kubefan) -> Channel {
    Endpoint::from_shared(format!("http://{}", kubefan.grpc_addr)).unwrap().connect_lazy()
}

async fn health_of(kubefan: &Kubefan, service: &str) -> Result<ServingStatus, Code> {
    let mut client = HealthClient::new(channel_to(kubefan));
    let request = HealthCheckRequest { service: service.to_owned() };
    client.check(request).await.map(|response| response.into_inner().status()).map_err(|status| status.code())
}

async fn a_health_watch_does_not_delay_the_shutdown() {
    let simulated = Simulated::start().await;
    let mut kubefan = simulated.kubefan(&["--resource=pods", "--drain-timeout=10m"]).await;
    let mut client = HealthClient::new(channel_to(&kubefan));
    let mut health = client.watch(HealthCheckRequest { service: "pods".into() }).await.unwrap().into_inner();
    assert_eq!(health.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    let start_time = tokio::time::Instant::now();
    kubefan.process.terminate();
    let mut last = ServingStatus::Serving;
    while let Ok(Some(response)) = health.message().await {
        last = response.status();
    }
    assert_ne!(last, ServingStatus::Serving, "a health probe gets the change first");
    assert_eq!(kubefan.process.ended(wait::SOON).await.code(), Some(0));
    assert!(start_time.elapsed() < Duration::from_secs(300), "not at the drain timeout");
}

async fn health_covers_each_resource_before_its_sync_and_in_an_outage() {
    let mut simulated = Simulated::start().await;
    simulated.stop().await;
    let kubefan = Kubefan::spawn(&simulated.kubeconfig(), &["--resource=po,deployments.apps"]).await;
    let all = ["", "kubefan.v1alpha1.WatchService", "po", "deployments.apps"];
    for service in all {
        assert_eq!(health_of(&kubefan, service).await, Ok(ServingStatus::NotServing), "{service:?} before the sync");
    }
    assert_eq!(health_of(&kubefan, "nonsense").await, Err(Code::NotFound));
    let mut client = HealthClient::new(channel_to(&kubefan));
    let mut changes = client.watch(HealthCheckRequest { service: "po".into() }).await.unwrap().into_inner();
    assert_eq!(changes.message().await.unwrap().unwrap().status(), ServingStatus::NotServing);

    simulated.resume().await;
    kubefan.ready().await;
    while changes.message().await.unwrap().expect("the health watch has ended").status() != ServingStatus::Serving {}
    for service in all.into_iter().chain(["pods"]) {
        wait::until("health to be serving", wait::SOON, || async {
            (health_of(&kubefan, service).await == Ok(ServingStatus::Serving)).then_some(())
        })
        .await;
    }

    simulated.stop().await;
    wait::until("kubefan to notice", wait::SOON, || async {
        kubefan.admin("/readyz?verbose").await.filter(|(_, text)| text.contains("po stale"))
    })
    .await;
    for service in all {
        assert_eq!(health_of(&kubefan, service).await, Ok(ServingStatus::Serving), "{service:?} in an outage");
    }
    assert!(kubefan.admin("/readyz").await.unwrap().0.is_success());
    let got = run(&["get", "po", "-o", "name", "--server", &kubefan.grpc_addr.to_string()]).await;
    assert_eq!((got.code, got.stdout.lines().count()), (Some(0), 3), "cached objects are served: {got:?}");
    // Other names too, which only the configuration can resolve now.
    let start_time = tokio::time::Instant::now();
    let got = run(&["get", "pods", "-o", "name", "--server", &kubefan.grpc_addr.to_string()]).await;
    assert_eq!((got.code, got.stdout.lines().count()), (Some(0), 3), "after {:?}: {got:?}", start_time.elapsed());
}

async fn reflection_describes_the_service() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let mut client = ServerReflectionClient::new(channel_to(&kubefan));
    let ask = |question| ServerReflectionRequest { host: String::new(), message_request: Some(question) };
    let questions = [
        MessageRequest::ListServices(String::new()),
        MessageRequest::FileContainingSymbol("kubefan.v1alpha1.WatchService.Watch".into()),
        MessageRequest::FileContainingSymbol("google.rpc.ErrorInfo".into()),
    ];
    let requests = futures::stream::iter(questions.map(ask));
    let mut answers = client.server_reflection_info(requests).await.unwrap().into_inner();
    let Some(MessageResponse::ListServicesResponse(list)) = answers.message().await.unwrap().unwrap().message_response
    else {
        panic!("no list of services");
    };
    let mut names: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
    names.sort();
    assert_eq!(
        names,
        [
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
            "kubefan.v1alpha1.WatchService"
        ]
    );
    for _ in 0..2 {
        let Some(MessageResponse::FileDescriptorResponse(files)) =
            answers.message().await.unwrap().unwrap().message_response
        else {
            panic!("no file");
        };
        assert!(!files.file_descriptor_proto.is_empty());
    }
}

async fn reflection_answers_clients_of_the_old_version() {
    use v1alpha::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let mut client = ServerReflectionClient::new(channel_to(&kubefan));
    for symbol in ["kubefan.v1alpha1.WatchService", "google.rpc.RetryInfo"] {
        let question = MessageRequest::FileContainingSymbol(symbol.to_owned());
        let request = ServerReflectionRequest { host: String::new(), message_request: Some(question) };
        let requests = futures::stream::iter([request]);
        let mut answers = client.server_reflection_info(requests).await.unwrap().into_inner();
        let answer = answers.message().await.unwrap().unwrap().message_response;
        assert!(matches!(answer, Some(MessageResponse::FileDescriptorResponse(_))), "{symbol}: {answer:?}");
    }
}

async fn the_number_of_streams_is_limited() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods", "--subscribers-max=2"]).await;
    let mut client = connect(kubefan.grpc_addr).await;
    let mut first = Watch::start(&mut client, target("pods"), "").await.unwrap();
    let second = Watch::start(&mut client, target("pods"), "").await.unwrap();
    let status = Watch::start(&mut client, target("pods"), "").await.err().unwrap();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert!(status.message().contains("--subscribers-max"), "{status}");
    assert!(status.get_details_retry_info().unwrap().retry_delay.is_some());
    drop(second);
    wait::until("the slot of the ended stream", wait::SOON, || {
        let mut client = client.clone();
        async move { Watch::start(&mut client, target("pods"), "").await.ok() }
    })
    .await;
    let version = simulated.create("later");
    first.until(version).await;
}

async fn a_timeout_ends_a_watch_cleanly() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let request = WatchRequest { target: Some(target("pods")), timeout_seconds: 5, ..WatchRequest::default() };
    let start_time = tokio::time::Instant::now();
    let mut stream = connect(kubefan.grpc_addr).await.watch(request).await.unwrap().into_inner();
    let mut messages = 0;
    while stream.message().await.unwrap().is_some() {
        messages += 1;
    }
    assert_eq!(messages, 5, "a snapshot of three");
    assert!(start_time.elapsed() >= Duration::from_secs(5));
    let server = kubefan.grpc_addr.to_string();
    let watched = run(&["watch", "pods", "--timeout=5s", "-o", "name", "--server", &server]).await;
    assert_eq!((watched.code, watched.stdout.lines().count()), (Some(0), 3), "{watched:?}");
    let version = watched.stderr.trim().rsplit('=').next().unwrap().to_owned();
    assert!(watched.stderr.starts_with("to continue from here: --resource-version="), "{watched:?}");
    simulated.create("later");
    let more =
        run(&["watch", "pods", "--timeout=5s", "-o", "name", "--server", &server, "--resource-version", &version])
            .await;
    assert_eq!(more.stdout, "pod/later\n", "{more:?}");
}

async fn ports_chosen_by_the_system_are_printed() {
    let simulated = Simulated::start().await;
    let first = simulated.kubefan(&["--resource=pods"]).await;
    let second = simulated.kubefan(&["--resource=pods"]).await;
    let ports = [first.grpc_addr, first.admin_addr, second.grpc_addr, second.admin_addr].map(|address| address.port());
    assert!(ports.iter().all(|port| *port != 0), "{ports:?}");
    assert_eq!(ports.iter().collect::<std::collections::HashSet<_>>().len(), 4);
}

async fn both_names_of_a_variable_are_taken_and_a_misspelt_one_is_named() {
    let simulated = Simulated::start().await;
    let log = simulated.dir.path().join("log");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubefan"));
    command
        .args(["serve", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0"])
        .env("KUBEFAN_RESOURCES", "pods,services")
        .env("KUBEFAN_PAGESIZE", "7")
        .env("KUBEFAN_PORT", "tcp://10.0.0.1:7443")
        .env("KUBECONFIG", simulated.kubeconfig());
    let process = crate::harness::process::Process::spawn("kubefan", &mut command, &log);
    let printed = wait::until("both resources", wait::SOON, || async {
        let printed = process.log();
        (printed.matches("synced").count() >= 2).then_some(printed)
    })
    .await;
    assert!(printed.contains("KUBEFAN_PAGESIZE is ignored; did you mean KUBEFAN_PAGE_SIZE?"), "{printed}");
    assert_eq!(printed.matches(" is ignored").count(), 1, "{printed}");
    let ran = crate::harness::kubefan::run_with(&["serve"], |command| {
        command.env("KUBEFAN_RESOURCE", "pods").env("KUBEFAN_RESOURCES", "nodes");
    })
    .await;
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("KUBEFAN_RESOURCE and KUBEFAN_RESOURCES mean the same"), "{ran:?}");
}

async fn a_misspelt_resource_gets_a_suggestion_at_once() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pdos"]).await;
    let meant = "the apiserver has no resource \"pdos\"; did you mean \"pods\"?";
    let (_, ready) = kubefan.admin("/readyz?verbose").await.unwrap();
    assert!(ready.contains(meant), "{ready}");
    let log = kubefan.process.log();
    assert_eq!(log.matches(meant).count(), 1, "{log}");
}

async fn flags_override_the_environment_which_overrides_the_file() {
    let simulated = Simulated::start().await;
    let file = simulated.dir.path().join("kubefan.yaml");
    let text = "apiVersion: kubefan.dev/v1alpha1\nkind: ServeConfiguration\nresources: [nodes]\nlogFormat: json\nlogLevel: warn\n";
    std::fs::write(&file, text).unwrap();
    let log = simulated.dir.path().join("log");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubefan"));
    command
        .args(["serve", "--listen=127.0.0.1:0", "--log-level=info"])
        .env("KUBEFAN_ADMIN_LISTEN", "127.0.0.1:0")
        .env("KUBEFAN_CONFIG", &file)
        .env("KUBEFAN_RESOURCE", "pods,services")
        .env("KUBECONFIG", simulated.kubeconfig());
    let process = crate::harness::process::Process::spawn("kubefan", &mut command, &log);
    let admin = wait::until("its address", wait::SOON, || async {
        let printed = process.log();
        printed.lines().find_map(|line| line.strip_prefix("kubefan: serving admin on ").map(str::to_owned))
    })
    .await;
    let ready = wait::until("readiness", wait::SOON, || async {
        let answer = reqwest::get(format!("http://{admin}/readyz?verbose")).await.ok()?;
        let ready = answer.status().is_success();
        answer.text().await.ok().filter(|_| ready)
    })
    .await;
    let resources: Vec<_> = ready.lines().filter_map(|line| line.split_once(" synced; proven ")).collect();
    let names: Vec<_> = resources.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["[+]pods", "[+]services"], "the environment goes before the file: {ready}");
    let printed = process.log();
    let lines: Vec<_> = printed.lines().filter(|line| !line.starts_with("kubefan: ")).collect();
    assert!(!lines.is_empty(), "the flag goes before the file");
    for line in lines {
        assert!(serde_json::from_str::<serde_json::Value>(line).is_ok_and(|line| line["level"] == "INFO"), "{line}");
    }
}
