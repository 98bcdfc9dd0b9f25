//! Callers with client certificates, beyond the verdicts that `authorization` compares with the
//! apiserver's: forged certificates, their end, and CAs that change under live streams.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    sync::Arc,
    time::{Duration, SystemTime},
};

use kubefan_common::proto::v1alpha1::{
    Target, WatchRequest, WatchResponse, watch_response, watch_service_client::WatchServiceClient,
};
use rcgen::ExtendedKeyUsagePurpose;
use reqwest::{Client, StatusCode};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    sign::{CertifiedKey, SingleCertAndKey},
};
use serde_json::{Value, json};
use tonic::{
    Code, Streaming,
    transport::{Certificate, ClientTlsConfig, Endpoint, Identity},
};

use crate::harness::{
    apiserver::{ApiServer, NOBODY},
    kubefan::{Kubefan, run},
    pki::{Authority, named},
    rbac::ServiceAccount,
    tests, wait,
};

tests! {
    apiserver: a_forged_certificate_is_refused, a_certificate_and_a_token_are_one_identity,
        a_bundle_replaced_under_live_streams_ends_none, streams_outlive_the_rotation_of_their_certificate,
        a_stream_ends_with_its_certificate,
        with_passthrough_kubefan_refuses_what_it_cannot_forward_in_the_words_of_the_apiserver,
        without_the_right_to_read_the_cas_kubefan_says_so_once_and_takes_no_certificate;
    local: cas_that_cannot_be_used_are_named_at_the_start;
}

/// A certificate with its key, both PEM.
type Pair = (String, String);

/// kubefan with a bundle of CAs of its own, in front of the shared control plane.
struct World {
    api: ApiServer,
    kubefan: Kubefan,
    namespace: String,
    authority: Authority,
    ca_file: PathBuf,
    _dir: tempfile::TempDir,
}

impl World {
    async fn start(args: &[&str]) -> World {
        let (api, authority, dir) = (ApiServer::shared().await, Authority::new(), tempfile::tempdir().unwrap());
        let namespace = api.namespace("certified").await;
        let ca_file = dir.path().join("clients.crt");
        std::fs::write(&ca_file, &authority.ca_pem).unwrap();
        let (cert, key) = api.server_certificate();
        let fixed = [
            "--authorization-mode=Webhook",
            "--resource=configmaps",
            "--tls-cert-file",
            cert.to_str().unwrap(),
            "--tls-private-key-file",
            key.to_str().unwrap(),
            "--client-ca-file",
            ca_file.to_str().unwrap(),
        ];
        let kubefan = Kubefan::start(&api, &[&fixed[..], args].concat()).await;
        World { api, kubefan, namespace, authority, ca_file, _dir: dir }
    }

    fn master(&self) -> Pair {
        self.authority.client("master", "system:masters")
    }

    fn url(&self) -> String {
        let addr = self.kubefan.grpc_addr;
        format!("https://{addr}/api/v1/namespaces/{}/configmaps?resourceVersion=0", self.namespace)
    }

    fn client(&self, pair: &Pair) -> Client {
        let ca = std::fs::read(self.api.ca_pem_path()).unwrap();
        let ca = reqwest::Certificate::from_pem(&ca).unwrap();
        let identity = reqwest::Identity::from_pem(format!("{}{}", pair.0, pair.1).as_bytes()).unwrap();
        Client::builder().tls_certs_only([ca]).no_proxy().identity(identity).build().unwrap()
    }

    async fn grpc(&self, pair: &Pair) -> WatchServiceClient<tonic::transport::Channel> {
        let ca = Certificate::from_pem(std::fs::read(self.api.ca_pem_path()).unwrap());
        let tls = ClientTlsConfig::new().ca_certificate(ca).identity(Identity::from_pem(&pair.0, &pair.1));
        let endpoint = Endpoint::from_shared(format!("https://{}", self.kubefan.grpc_addr)).unwrap();
        WatchServiceClient::new(endpoint.tls_config(tls).unwrap().connect().await.unwrap())
    }

    /// Watches configmaps on new connections, with so many streams on each.
    async fn streams(&self, pair: &Pair, connections: usize, streams: usize) -> Vec<Streaming<WatchResponse>> {
        let mut all = Vec::new();
        for _ in 0..connections {
            let mut client = self.grpc(pair).await;
            for _ in 0..streams {
                let (resource, namespace) = ("configmaps".to_owned(), self.namespace.clone());
                let target = Some(Target { resource, namespace, ..Target::default() });
                let opened = client.watch(WatchRequest { target, ..WatchRequest::default() }).await;
                all.push(opened.unwrap().into_inner());
            }
        }
        all
    }

    /// Creates a configmap, and waits until each stream has shown it.
    async fn all_see(&self, streams: &mut [Streaming<WatchResponse>], name: &str) {
        let path = format!("/api/v1/namespaces/{}/configmaps", self.namespace);
        self.api.create(&path, &json!({ "metadata": { "name": name } })).await;
        for stream in streams {
            let shown = async {
                loop {
                    let message = stream.message().await.expect("the stream lives").expect("the stream lives").message;
                    if matches!(message, Some(watch_response::Message::Event(event)) if event.name == name) {
                        return;
                    }
                }
            };
            tokio::time::timeout(wait::SOON, shown).await.expect("the event arrives");
        }
    }

    /// Replaces the bundle, and has kubefan read it.
    fn trust(&self, authorities: &[&Authority]) {
        let pem: String = authorities.iter().map(|authority| authority.ca_pem.as_str()).collect();
        let renewed = self.ca_file.with_extension("new");
        std::fs::write(&renewed, pem).unwrap();
        std::fs::rename(renewed, &self.ca_file).unwrap();
        self.kubefan.process.hang_up();
    }

    async fn becomes(&self, client: impl Fn() -> Client, expected: StatusCode) {
        wait::until(&format!("{expected}"), wait::SOON, || async {
            (client().get(self.url()).send().await.unwrap().status() == expected).then_some(())
        })
        .await;
    }
}

async fn status(client: &Client, url: &str) -> (StatusCode, String) {
    let answer = client.get(url).send().await.unwrap();
    let status = answer.status();
    let body: Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap_or_default();
    (status, body["message"].as_str().unwrap_or_default().to_owned())
}

/// The answer to a request with this certificate and this key, which need not belong together.
fn asked_with(addr: SocketAddr, ca: &[u8], certificate: &str, key: &str, path: &str) -> std::io::Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca).unwrap()).unwrap();
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let key = rustls::crypto::ring::sign::any_supported_type(&key).unwrap();
    let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
    let presents = SingleCertAndKey::from(CertifiedKey::new(chain, key));
    let config = ClientConfig::builder().with_root_certificates(roots).with_client_cert_resolver(Arc::new(presents));
    let name = ServerName::from(addr.ip());
    let mut session = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut socket = TcpStream::connect(addr)?;
    socket.set_read_timeout(Some(wait::SOON))?;
    let mut io = rustls::Stream::new(&mut session, &mut socket);
    write!(io, "GET {path} HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    io.read_to_string(&mut answer)?;
    Ok(answer)
}

async fn a_forged_certificate_is_refused() {
    let world = World::start(&["--passthrough=off"]).await;
    let (master, ca) = (world.master(), std::fs::read(world.api.ca_pem_path()).unwrap());
    let path = format!("/api/v1/namespaces/{}/configmaps?resourceVersion=0", world.namespace);
    let addr = world.kubefan.grpc_addr;
    let ask = async |certificate: &str, key: &str| {
        let (ca, certificate, key, path) = (ca.clone(), certificate.to_owned(), key.to_owned(), path.clone());
        tokio::task::spawn_blocking(move || asked_with(addr, &ca, &certificate, &key, &path)).await.unwrap()
    };
    let own = ask(&master.0, &master.1).await.unwrap();
    assert!(own.starts_with("HTTP/1.1 200 "), "{own}");
    // A copy of the certificate, without its key.
    let thief = world.authority.client("thief", "thieves");
    let stolen = ask(&master.0, &thief.1).await;
    assert!(stolen.is_err(), "{stolen:?}");
    // A CA with the name of the right one and another key.
    let forger = Authority::new();
    let forged = forger.client("master", "system:masters");
    let forged = ask(&forged.0, &forged.1).await.unwrap();
    assert!(forged.starts_with("HTTP/1.1 401 ") && forged.contains("not of a CA that kubefan trusts"), "{forged}");
    // The holder of a client certificate is no CA.
    let signer = world.authority.client("thief", "thieves");
    let not_signed = ask(&signer.0, &master.1).await;
    assert!(not_signed.is_err(), "{not_signed:?}");
    let (_, metrics) = world.kubefan.admin("/metrics").await.unwrap();
    assert!(metrics.contains("kubefan_authentication_attempts_total{result=\"failure\"} 1"), "{metrics}");
}

async fn a_certificate_and_a_token_are_one_identity() {
    let world = World::start(&["--passthrough=off"]).await;
    let nobody = world.authority.client(NOBODY, "nobodies");
    let ask = async |pair: &Pair, token: &str| {
        let request = world.client(pair).get(world.url()).bearer_auth(token);
        request.send().await.unwrap().status()
    };
    let master = world.master();
    assert_eq!(ask(&nobody, &world.api.admin_token()).await, StatusCode::OK);
    assert_eq!(ask(&master, &format!("token-of-{NOBODY}")).await, StatusCode::FORBIDDEN);
    assert_eq!(ask(&master, "no-such-token").await, StatusCode::UNAUTHORIZED);
    assert_eq!(status(&world.client(&master), &world.url()).await.0, StatusCode::OK);
    assert_eq!(status(&world.client(&nobody), &world.url()).await.0, StatusCode::FORBIDDEN);
}

async fn a_bundle_replaced_under_live_streams_ends_none() {
    let world = World::start(&["--passthrough=off"]).await;
    let (master, other) = (world.master(), Authority::new());
    let mut streams = world.streams(&master, 5, 10).await;
    let kept = world.client(&master);
    assert_eq!(status(&kept, &world.url()).await.0, StatusCode::OK);
    world.all_see(&mut streams, "before").await;
    world.trust(&[&other]);
    world.becomes(|| world.client(&master), StatusCode::UNAUTHORIZED).await;
    world.all_see(&mut streams, "replaced").await;
    assert_eq!(status(&kept, &world.url()).await.0, StatusCode::UNAUTHORIZED, "a live connection");
    let refused = world.client(&master);
    let (code, message) = status(&refused, &world.url()).await;
    assert_eq!(code, StatusCode::UNAUTHORIZED);
    assert!(message.contains("not of a CA that kubefan trusts"), "{message}");
    // A broken bundle changes nothing.
    std::fs::write(&world.ca_file, &other.ca_pem[..100]).unwrap();
    world.kubefan.process.hang_up();
    wait::until("a warning", wait::SOON, || async {
        world.kubefan.process.log().contains("the renewed CAs of clients cannot be used").then_some(())
    })
    .await;
    let newcomer = other.client("master", "system:masters");
    assert_eq!(status(&world.client(&newcomer), &world.url()).await.0, StatusCode::OK);
    // A connection that was refused is known when its CA is trusted again.
    world.trust(&[&other, &world.authority]);
    world.becomes(|| refused.clone(), StatusCode::OK).await;
    assert_eq!(status(&kept, &world.url()).await.0, StatusCode::OK, "so is one that was known before");
    world.all_see(&mut streams, "both").await;
}

async fn streams_outlive_the_rotation_of_their_certificate() {
    let world = World::start(&["--passthrough=off"]).await;
    let (old, new) = (world.master(), world.master());
    let mut streams = world.streams(&old, 1, 5).await;
    streams.extend(world.streams(&new, 1, 5).await);
    world.all_see(&mut streams, "rotated").await;
}

#[expect(clippy::disallowed_methods, reason = "a certificate ends by the wall clock")]
async fn a_stream_ends_with_its_certificate() {
    let world = World::start(&["--passthrough=off"]).await;
    let mut params = named("master", "system:masters");
    // Its streams must be open before it ends, also on a busy machine.
    params.not_after = (SystemTime::now() + Duration::from_secs(30)).into();
    let short = world.authority.issue(params, &[ExtendedKeyUsagePurpose::ClientAuth]);
    let mut long = world.streams(&world.master(), 1, 1).await;
    let client = world.client(&short);
    assert_eq!(status(&client, &world.url()).await.0, StatusCode::OK);
    let mut ends = world.streams(&short, 1, 1).await;
    let end = async {
        loop {
            match ends[0].message().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("it ended without a reason"),
                Err(status) => break status,
            }
        }
    };
    let end = tokio::time::timeout(2 * wait::SOON, end).await.expect("the watch ends");
    assert!(end.message().contains("client certificate of this stream has expired"), "{end:?}");
    let (code, message) = status(&client, &world.url()).await;
    assert_eq!(code, StatusCode::UNAUTHORIZED);
    assert!(message.contains("has expired"), "{message}");
    let target = Some(Target { resource: "configmaps".to_owned(), ..Target::default() });
    let refused = world.grpc(&short).await.watch(WatchRequest { target, ..WatchRequest::default() }).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused:?}");
    world.all_see(&mut long, "afterwards").await;
}

async fn with_passthrough_kubefan_refuses_what_it_cannot_forward_in_the_words_of_the_apiserver() {
    let world = World::start(&[]).await;
    let (master, stranger) = (world.client(&world.master()), world.authority.client("stranger", "strangers"));
    assert_eq!(status(&master, &world.url()).await.0, StatusCode::OK);
    let (code, message) = status(&world.client(&stranger), &world.url()).await;
    assert_eq!(code, StatusCode::FORBIDDEN);
    assert!(message.contains("User \"stranger\" cannot list resource \"configmaps\""), "{message}");
    let foreign = Authority::new().client("master", "system:masters");
    let (code, message) = status(&world.client(&foreign), &world.url()).await;
    assert_eq!(code, StatusCode::UNAUTHORIZED);
    assert!(message.contains("not of a CA that kubefan trusts"), "{message}");
    for client in [&master, &world.client(&foreign)] {
        let (code, message) = status(client, &format!("https://{}/version", world.kubefan.grpc_addr)).await;
        assert_eq!(code, StatusCode::UNAUTHORIZED);
        assert!(message.contains("client certificate cannot be forwarded"), "{message}");
    }
}

/// kubefan as a service account that may read the cached resource and create reviews.
async fn without_the_right_to_read_the_cas_kubefan_says_so_once_and_takes_no_certificate() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("no-cas").await;
    let account = ServiceAccount::create(&api, &namespace, "proxy").await;
    account.may_read_pods().await;
    account.may_review().await;
    let kubeconfig = account.kubeconfig().await;
    let (cert, key) = api.server_certificate();
    let args = [
        "--resource=pods",
        "--passthrough=off",
        "--authorization-mode=Webhook",
        "--tls-cert-file",
        cert.to_str().unwrap(),
        "--tls-private-key-file",
        key.to_str().unwrap(),
    ];
    let (certificate, key) = api.authority().client("master", "system:masters");
    let identity = || reqwest::Identity::from_pem(format!("{certificate}{key}").as_bytes()).unwrap();
    let ca = reqwest::Certificate::from_pem(&std::fs::read(api.ca_pem_path()).unwrap()).unwrap();
    let client = Client::builder().tls_certs_only([ca]).no_proxy().identity(identity()).build().unwrap();
    const ROLE: &str = "extension-apiserver-authentication-reader";
    for skips in [false, true] {
        let skip: &[&str] = if skips { &["--authentication-skip-lookup"] } else { &[] };
        let kubefan = Kubefan::spawn(&kubeconfig, &[&args[..], skip].concat()).await;
        kubefan.ready().await;
        let url = format!("https://{}/api/v1/pods?resourceVersion=0", kubefan.grpc_addr);
        let message = wait::until("the lookup", wait::SOON, || async {
            let (code, message) = status(&client, &url).await;
            (code == StatusCode::UNAUTHORIZED).then_some(message)
        })
        .await;
        let log = kubefan.process.log();
        assert_eq!(log.matches(ROLE).count(), usize::from(!skips), "{log}");
        assert_eq!(message.contains("kubefan trusts no CA of client certificates"), !skips, "{message}");
    }
}

async fn cas_that_cannot_be_used_are_named_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (cert, key) = Authority::new().server();
    let kubeconfig = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
        clusters: [{ name: c, cluster: { server: 'https://127.0.0.1:1' } }]\n\
        contexts: [{ name: c, context: { cluster: c, user: u } }]\nusers: [{ name: u, user: { token: t } }]\n";
    let args = [
        "serve".to_owned(),
        "--listen=127.0.0.1:0".to_owned(),
        "--admin-listen=127.0.0.1:0".to_owned(),
        "--authorization-mode=Webhook".to_owned(),
        format!("--kubeconfig={}", file("config", kubeconfig)),
        format!("--tls-cert-file={}", file("tls.crt", &cert)),
        format!("--tls-private-key-file={}", file("tls.key", &key)),
    ];
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    for (path, expected) in [
        (file("empty", ""), "it contains no certificate of a CA"),
        (file("server", &cert), "it contains no certificate of a CA"),
        ("/nonexistent/ca.crt".to_owned(), "cannot read it"),
    ] {
        let ran = run(&[&args[..], &["--client-ca-file", &path]].concat()).await;
        crate::bad_input::assert_line("client CAs", &ran, 1, &["--client-ca-file", &path, expected]);
    }
}
