//! `kubefan serve` from outside: TLS, Unix sockets, health, reflection, limits, and a shutdown that
//! ends every stream with a reason to reconnect.

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

use crate::{
    bad_input::assert_line,
    harness::{
        kubefan::{Kubefan, run, run_with},
        pki::{Authority, IssuedPem},
        record::{Watch, connect},
        rig::target,
        simulated::{Simulated, json},
        tests, tools, wait,
    },
};

tests! {
    python: grpcio_without_tls_gets_the_reason_and_does_not_retry;
    local: a_data_port_with_a_certificate_accepts_only_tls, a_data_port_without_a_certificate_accepts_no_tls,
        an_expired_certificate_is_reported_and_renewed_under_500_streams, a_unix_socket_is_served_and_removed,
        a_termination_ends_every_stream_with_its_reason, a_termination_waits_no_longer_than_the_drain_timeout,
        health_covers_each_resource_before_its_sync_and_in_an_outage,
        reflection_describes_the_service_to_clients_of_either_version,
        flags_override_the_environment_which_overrides_the_file, a_misspelt_resource_gets_a_suggestion_at_once;
}

async fn a_data_port_with_a_certificate_accepts_only_tls() {
    let simulated = Simulated::start().await;
    let authority = Authority::new();
    let files = Files::new(&simulated, &authority);
    files.write(authority.server());
    let kubefan = files.kubefan(&simulated).await;
    let address = kubefan.grpc_addr.to_string();
    let mut watch =
        Watch::start(&mut connect_tls(&kubefan, &authority).await.unwrap(), target("pods"), "").await.unwrap();
    watch.until_resumable().await;

    let secure = format!("https://{address}");
    let got = run(&["get", "pods", "-o", "name", "--server", &secure, "--ca-file", &files.ca]).await;
    assert_eq!((got.code, got.stdout.lines().count()), (Some(0), 3), "{got:?}");
    let untrusted =
        "no trusted CA has signed the server's certificate; the CA file must contain the CA that has (--ca-file)";
    let key = &files.key;
    for (args, says) in [
        (&["--server", &*secure][..], format!("cannot reach kubefan at {secure}: {untrusted}")),
        (
            &["--server", &address],
            format!("cannot reach kubefan at {address}: the server needs TLS on this port; use an https:// address"),
        ),
        (
            &["--server", &secure, "--ca-file", key],
            format!("CA file {key}: it contains a private key and no certificate"),
        ),
    ] {
        assert_line(&args.join(" "), &run(&[&["get", "pods"], args].concat()).await, 1, &[&says]);
    }
    let plain = reqwest::Client::builder().no_proxy().http1_only().build().unwrap();
    let refused = plain.get(format!("http://{address}/api")).send().await.unwrap();
    let code = refused.status();
    let text = refused.text().await.unwrap();
    assert_eq!((code.as_u16(), text.lines().count()), (400, 1), "{text}");
    assert!(text.contains("use https://"), "{text}");
    watch.until(simulated.create("last")).await;
}

/// grpcio sends a call again on a new connection, at once and for ever, if a GOAWAY says that it
/// was not processed.
async fn grpcio_without_tls_gets_the_reason_and_does_not_retry() {
    const PROGRAM: &str = "import sys, grpc\n\
        call = grpc.insecure_channel(sys.argv[1]).unary_unary('/kubefan.v1alpha1.WatchService/ListResources')\n\
        try: call(b'', timeout=60)\n\
        except grpc.RpcError as error: print(error.code().name, error.details())\n";
    const CONNECTIONS_MAX: f64 = 3.0;
    let requirements = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/python/requirements.txt");
    let python = tools::python("example-python", requirements.as_ref());
    let simulated = Simulated::start().await;
    let authority = Authority::new();
    let files = Files::new(&simulated, &authority);
    files.write(authority.server());
    let kubefan = files.kubefan(&simulated).await;
    let mut command = tokio::process::Command::new(python);
    command.args(["-c", PROGRAM, &kubefan.grpc_addr.to_string()]).kill_on_drop(true);
    let output = command.output().await.unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.starts_with("UNAVAILABLE a plaintext request was sent to an HTTPS port"), "{output:?}");
    let started = kubefan.metric("kubefan_connections_started_total").await.unwrap();
    assert!(started <= CONNECTIONS_MAX, "{started} connections");
}

async fn a_data_port_without_a_certificate_accepts_no_tls() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let secure = format!("https://{}", kubefan.grpc_addr);
    let says = "the server does not speak TLS on this port; use an address without https://";
    let got = run(&["get", "pods", "--server", &secure]).await;
    assert_line("TLS", &got, 1, &[&format!("error: cannot reach kubefan at {secure}: {says}")]);
    // The start of a ClientHello.
    let mut stream = tokio::net::TcpStream::connect(kubefan.grpc_addr).await.unwrap();
    stream.write_all(b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.0 400 Bad Request\r\n") && answer.contains("--tls-cert-file"), "{answer}");

    let mut watch = Watch::start(&mut connect(kubefan.grpc_addr).await, target("pods"), "").await.unwrap();
    kubefan.process.hang_up();
    logged(&kubefan, "nothing to read again").await;
    watch.until(simulated.create("later")).await;
}

/// Waits until kubefan has printed a text.
async fn logged(kubefan: &Kubefan, text: &str) {
    wait::until(text, wait::SOON, || async { kubefan.process.log().contains(text).then_some(()) }).await;
}

/// Connects with TLS, and trusts the CA.
async fn connect_tls(
    kubefan: &Kubefan,
    authority: &Authority,
) -> Result<WatchServiceClient<Channel>, tonic::transport::Error> {
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&authority.ca_pem));
    let endpoint = Endpoint::from_shared(format!("https://{}", kubefan.grpc_addr)).unwrap();
    endpoint.tls_config(tls).unwrap().connect().await.map(WatchServiceClient::new)
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

    fn write(&self, issued: IssuedPem) {
        std::fs::write(&self.key, issued.key).unwrap();
        std::fs::write(&self.certificate, issued.certificate).unwrap();
    }

    async fn kubefan(&self, simulated: &Simulated) -> Kubefan {
        let tls = ["--tls-cert-file", &self.certificate, "--tls-private-key-file", &self.key];
        simulated.kubefan(&[&["--resource=pods"], &tls[..]].concat()).await
    }
}

async fn an_expired_certificate_is_reported_and_renewed_under_500_streams() {
    const CONNECTIONS: usize = 10;
    const STREAMS: usize = 50;
    let simulated = Simulated::start().await;
    let authority = Authority::new();
    let next = Authority::new();
    let files = Files::new(&simulated, &authority);
    files.write(authority.expired_server());
    let kubefan = files.kubefan(&simulated).await;
    let log = kubefan.process.log();
    assert!(log.contains("WARN") && log.contains("has expired: it was valid until 2002-01-01T00:00:00Z"), "{log}");
    let expiration = kubefan.metric("kubefan_serving_certificate_expiration_timestamp_seconds").await;
    assert_eq!(expiration, Some(1_009_843_200.0));
    let secure = format!("https://{}", kubefan.grpc_addr);
    let got = run(&["get", "pods", "--server", &secure, "--ca-file", &files.ca]).await;
    assert_line("expired", &got, 1, &["the server's certificate expired ", " days ago; it must be renewed\n"]);
    assert!(!got.stderr.contains("--ca-file"), "{got:?}");
    kubefan.process.hang_up();
    logged(&kubefan, "the certificate of the data port was read again; it has not changed").await;

    let renewals = async |count: usize| {
        let renewed = || kubefan.process.log().matches("the certificate of the data port was renewed").count();
        wait::until("a renewal", wait::SOON, || async { (renewed() == count).then_some(()) }).await;
    };
    files.write(authority.server());
    kubefan.process.hang_up();
    renewals(1).await;
    let mut watches = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut client = connect_tls(&kubefan, &authority).await.unwrap();
        for _ in 0..STREAMS {
            let mut watch = Watch::start(&mut client, target("pods"), "").await.unwrap();
            watch.until_resumable().await;
            watches.push(watch);
        }
    }
    // The new certificate has another CA, so that a client sees which of them it gets.
    files.write(next.server());
    kubefan.process.hang_up();
    renewals(2).await;
    let version = simulated.create("later");
    for watch in &mut watches {
        watch.until(version).await;
    }
    assert!(connect_tls(&kubefan, &authority).await.is_err(), "new connections get the new certificate");
    let mut client = connect_tls(&kubefan, &next).await.unwrap();
    Watch::start(&mut client, target("pods"), "").await.unwrap().until(version).await;
}

async fn a_unix_socket_is_served_and_removed() {
    let simulated = Simulated::start().await;
    let path = simulated.dir.path().join("kubefan.sock");
    let socket = format!("unix:{}", path.display());
    let mut kubefan = simulated.kubefan_at(&socket).await;
    let got = run(&["get", "pods", "-o", "name", "--server", &socket]).await;
    assert_eq!((got.code, got.stdout.as_str()), (Some(0), "pod/a\npod/b\npod/c\n"), "{got:?}");
    // On a local address readers choose the cached resources.
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
    let mut kubefan = simulated.kubefan(&["--resource=pods", "--drain-timeout=10m"]).await;
    let mut probe = HealthClient::new(channel_to(&kubefan));
    let mut health = probe.watch(HealthCheckRequest { service: "pods".into() }).await.unwrap().into_inner();
    assert_eq!(health.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
    let mut watches = Vec::new();
    for n in 0..3 {
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
    let mut last = ServingStatus::Serving;
    while let Ok(Some(response)) = health.message().await {
        last = response.status();
    }
    assert_ne!(last, ServingStatus::Serving, "a health probe gets the change first");
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
    let got = run(&["get", "pods", "-o", "name", "--server", &kubefan.grpc_addr.to_string()]).await;
    assert_eq!((got.code, got.stdout.lines().count()), (Some(0), 3), "{got:?}");
}

async fn reflection_describes_the_service_to_clients_of_either_version() {
    let simulated = Simulated::start().await;
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let mut client = ServerReflectionClient::new(channel_to(&kubefan));
    let ask = |question| ServerReflectionRequest { host: String::new(), message_request: Some(question) };
    let symbols = ["kubefan.v1alpha1.WatchService.Watch", "google.rpc.ErrorInfo", "google.rpc.RetryInfo"];
    let files = symbols.map(|symbol| MessageRequest::FileContainingSymbol(symbol.to_owned()));
    let questions = [MessageRequest::ListServices(String::new())].into_iter().chain(files);
    let requests = futures::stream::iter(questions.map(ask).collect::<Vec<_>>());
    let mut answers = client.server_reflection_info(requests).await.unwrap().into_inner();
    let Some(MessageResponse::ListServicesResponse(list)) = answers.message().await.unwrap().unwrap().message_response
    else {
        panic!("no list of services");
    };
    let mut names: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
    names.sort();
    let [health, service] = ["grpc.health.v1.Health", "kubefan.v1alpha1.WatchService"];
    let reflection = ["grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"];
    assert_eq!(names, [health, reflection[0], reflection[1], service]);
    for symbol in symbols {
        let answer = answers.message().await.unwrap().unwrap().message_response;
        let Some(MessageResponse::FileDescriptorResponse(files)) = answer else { panic!("{symbol}: {answer:?}") };
        assert!(!files.file_descriptor_proto.is_empty(), "{symbol}");
    }

    let mut client = v1alpha::server_reflection_client::ServerReflectionClient::new(channel_to(&kubefan));
    let requests = symbols.map(|symbol| v1alpha::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(v1alpha::server_reflection_request::MessageRequest::FileContainingSymbol(symbol.into())),
    });
    let mut answers = client.server_reflection_info(futures::stream::iter(requests)).await.unwrap().into_inner();
    for symbol in symbols {
        let answer = answers.message().await.unwrap().unwrap().message_response;
        let is_file =
            matches!(answer, Some(v1alpha::server_reflection_response::MessageResponse::FileDescriptorResponse(_)));
        assert!(is_file, "{symbol}: {answer:?}");
    }
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
    let variables = [
        ("KUBEFAN_CONFIG", file.to_str().unwrap()),
        // The second name of KUBEFAN_RESOURCE.
        ("KUBEFAN_RESOURCES", "pods,services"),
        ("KUBEFAN_MEMORYMAX", "7"),
        ("KUBEFAN_PORT", "tcp://10.0.0.1:7443"),
    ];
    let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let kubefan = Kubefan::spawn_with_variables(&simulated.kubeconfig(), &["--log-level=info"], &variables).await;
    kubefan.ready().await;
    let (_, ready) = kubefan.admin("/readyz?verbose").await.unwrap();
    let resources: Vec<_> = ready.lines().filter_map(|line| Some(line.split_once(" synced; proven ")?.0)).collect();
    assert_eq!(resources, ["[+]pods", "[+]services"], "the environment goes before the file: {ready}");
    let printed = kubefan.process.log();
    let logged = printed.lines().filter(|line| !line.starts_with("kubefan: ")).map(json).collect::<Vec<_>>();
    assert!(logged.iter().any(|line| line["level"] == "INFO"), "the flag goes before the file: {printed}");
    assert!(printed.contains("KUBEFAN_MEMORYMAX is ignored; did you mean KUBEFAN_MEMORY_MAX?"), "{printed}");
    assert_eq!(printed.matches(" is ignored").count(), 1, "{printed}");

    let ran = run_with(&["serve"], |command| {
        command.env("KUBEFAN_RESOURCE", "pods").env("KUBEFAN_RESOURCES", "nodes");
    })
    .await;
    assert_line("both names", &ran, 1, &["KUBEFAN_RESOURCE and KUBEFAN_RESOURCES mean the same"]);
}
