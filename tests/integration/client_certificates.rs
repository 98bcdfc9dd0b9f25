//! Callers with client certificates, beyond the verdicts that `authorization` compares with the
//! apiserver's: CAs that change under live streams, CAs that kubefan may not read, and requests
//! that it cannot forward.

use std::path::PathBuf;

use kubefan_common::proto::v1alpha1::{
    Target, WatchRequest, WatchResponse, watch_response, watch_service_client::WatchServiceClient,
};
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use tonic::{
    Streaming,
    transport::{Certificate, ClientTlsConfig, Endpoint, Identity},
};

use crate::harness::{
    apiserver::ApiServer,
    kubefan::Kubefan,
    pki::{Authority, IssuedPem},
    rbac::ServiceAccount,
    tests, wait,
};

tests! {
    apiserver: certificates_and_their_cas_are_rotated_under_live_streams,
        with_passthrough_kubefan_refuses_what_it_cannot_forward_in_the_words_of_the_apiserver,
        without_the_right_to_read_the_cas_kubefan_says_so_once_and_takes_no_certificate;
}

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
        let api = ApiServer::shared().await;
        let authority = Authority::new();
        let dir = tempfile::tempdir().unwrap();
        let namespace = api.namespace("certified").await;
        let ca_file = dir.path().join("clients.crt");
        std::fs::write(&ca_file, &authority.ca_pem).unwrap();
        let fixed = ["--resource=configmaps", "--client-ca-file", ca_file.to_str().unwrap()];
        let kubefan = Kubefan::spawn_over_tls(&api, &api.kubeconfig(), &[&fixed[..], args].concat()).await;
        kubefan.ready().await;
        World { api, kubefan, namespace, authority, ca_file, _dir: dir }
    }

    fn master(&self) -> IssuedPem {
        self.authority.client("master", "system:masters")
    }

    fn url(&self) -> String {
        let addr = self.kubefan.grpc_addr;
        format!("https://{addr}/api/v1/namespaces/{}/configmaps?resourceVersion=0", self.namespace)
    }

    fn client(&self, issued: &IssuedPem) -> Client {
        client(&self.api, issued)
    }

    async fn grpc(&self, issued: &IssuedPem) -> WatchServiceClient<tonic::transport::Channel> {
        let ca = Certificate::from_pem(std::fs::read(self.api.ca_pem_path()).unwrap());
        let tls =
            ClientTlsConfig::new().ca_certificate(ca).identity(Identity::from_pem(&issued.certificate, &issued.key));
        let endpoint = Endpoint::from_shared(format!("https://{}", self.kubefan.grpc_addr)).unwrap();
        WatchServiceClient::new(endpoint.tls_config(tls).unwrap().connect().await.unwrap())
    }

    /// Watches configmaps on new connections, with this many streams on each.
    async fn streams(&self, issued: &IssuedPem, connections: usize, streams: usize) -> Vec<Streaming<WatchResponse>> {
        let mut all = Vec::new();
        for _ in 0..connections {
            let mut client = self.grpc(issued).await;
            for _ in 0..streams {
                let resource = "configmaps".to_owned();
                let namespace = self.namespace.clone();
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

/// A client that trusts the apiserver and kubefan, and has this certificate.
fn client(api: &ApiServer, issued: &IssuedPem) -> Client {
    let ca = reqwest::Certificate::from_pem(&std::fs::read(api.ca_pem_path()).unwrap()).unwrap();
    let identity = reqwest::Identity::from_pem(format!("{}{}", issued.certificate, issued.key).as_bytes()).unwrap();
    Client::builder().tls_certs_only([ca]).no_proxy().identity(identity).build().unwrap()
}

async fn status(client: &Client, url: &str) -> (StatusCode, String) {
    let answer = client.get(url).send().await.unwrap();
    let status = answer.status();
    let body: Value = serde_json::from_slice(&answer.bytes().await.unwrap()).unwrap_or_default();
    (status, body["message"].as_str().unwrap_or_default().to_owned())
}

async fn certificates_and_their_cas_are_rotated_under_live_streams() {
    let world = World::start(&["--access=authorized-cache-only"]).await;
    let master = world.master();
    let renewed = world.master();
    let other = Authority::new();
    let mut streams = world.streams(&master, 5, 10).await;
    streams.extend(world.streams(&renewed, 1, 5).await);
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

async fn with_passthrough_kubefan_refuses_what_it_cannot_forward_in_the_words_of_the_apiserver() {
    let world = World::start(&[]).await;
    let master = world.client(&world.master());
    let stranger = world.authority.client("stranger", "strangers");
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
    let client = client(&api, &api.authority().client("master", "system:masters"));
    const ROLE: &str = "extension-apiserver-authentication-reader";
    for skips in [false, true] {
        let skip: &[&str] = if skips { &["tuning.authenticationSkipLookup"] } else { &[] };
        let args = [&["--resource=pods", "--access=authorized-cache-only"], skip].concat();
        let kubefan = Kubefan::spawn_over_tls(&api, &kubeconfig, &args).await;
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
