//! The managed certificate: the chart's default install comes up with TLS, replicas agree on one CA
//! whatever changes others make to the Secret, and renewals and rotations end no stream and
//! surprise no client. The real kubefan, with the flags, the variables and the rights that the
//! chart renders.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use futures::future::join_all;
use kubefan_common::proto::v1alpha1::{
    Target, TransferRequest, WatchRequest, peer_service_client::PeerServiceClient,
    watch_service_client::WatchServiceClient,
};
use reqwest::{Method, StatusCode};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::Instant,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use crate::{
    chart::{apply, containers, flags, token},
    harness::{
        apiserver::ApiServer,
        helm::{self, named, objects},
        kubefan::{Kubefan, run_with},
        link::Link,
        objects::{pod, version_of},
        pki::{Authority, IssuedPem},
        process::free_port,
        rbac::settled,
        record::Watch,
        tests, wait,
    },
};

tests! {
    apiserver: three_replicas_have_one_ca_through_a_storm_of_conflicts,
        what_others_do_to_the_secret_is_mended_and_ends_no_stream,
        a_ca_is_rotated_under_streams_and_every_client_and_node_has_it_in_time,
        replicas_copy_caches_and_neither_a_client_nor_a_node_passes_for_one, check_reads_the_secret_and_writes_nothing,
        a_start_waits_for_the_apiserver_and_an_outage_later_changes_nothing;
}

/// The flag of helm for the form with a DaemonSet.
const NODE_FORM: &[&str] = &["--set=node.enabled=true"];

/// A renewal after 24 s, and the next CA after 51 s. Twelve seconds are left for a renewal, because
/// a busy apiserver can be late.
const SHORT_LIVES: &[&str] =
    &["tuning.tlsManagedLifetime=36s", "tuning.tlsManagedCaLifetime=92s", "tuning.tlsManagedCaOverlap=5s"];

/// The chart, installed in a namespace of its own.
struct Install<'a> {
    api: &'a ApiServer,
    namespace: String,
    name: String,
    kubeconfig: std::path::PathBuf,
    flags: Vec<String>,
    variables: Vec<(String, String)>,
    /// The configuration file that the flags name.
    _config: tempfile::TempDir,
}

impl<'a> Install<'a> {
    async fn new(api: &'a ApiServer) -> Install<'a> {
        Self::with(api, &[]).await
    }

    /// With flags of helm.
    async fn with(api: &'a ApiServer, args: &[&str]) -> Install<'a> {
        let namespace = api.namespace("managed").await;
        let text = helm::template(&namespace, &namespace, args).await;
        apply(api, &text, &[]).await;
        settled(api).await;
        let name = format!("{namespace}-kubefan");
        let rendered = objects(&text);
        let deployment = named(&rendered, "Deployment", &name);
        let kubeconfig = api.kubeconfig_with_token(&name, &token(api, &namespace, &name).await);
        let mut variables = variables(deployment, &namespace);
        // No resolver knows the name of the peers here. Tests give peers by flags.
        variables.retain(|(name, _)| !name.starts_with("KUBEFAN_PEER") && name != "KUBEFAN_REBALANCE");
        let config = tempfile::tempdir().unwrap();
        let flags = flags(deployment, &rendered, config.path());
        Install { api, namespace, name, kubeconfig, flags, variables, _config: config }
    }

    /// Starts a replica with further flags.
    async fn spawn(&self, more: &[&str]) -> Kubefan {
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
        Kubefan::spawn_with_variables(&self.kubeconfig, &flags, &self.variables).await
    }

    fn secret_path(&self) -> String {
        format!("/api/v1/namespaces/{}/secrets/{}-tls", self.namespace, self.name)
    }

    fn config_map_path(&self) -> String {
        format!("/api/v1/namespaces/{}/configmaps/kubefan-ca", self.namespace)
    }

    async fn secret(&self, key: &str) -> String {
        text(&self.api.get_json(&self.secret_path()).await["data"][key])
    }

    /// The CA as clients get it.
    async fn ca(&self) -> Option<String> {
        self.api.get_json(&self.config_map_path()).await["data"]["ca.crt"].as_str().map(str::to_owned)
    }

    /// Waits until the ConfigMap has the CAs of the Secret, and returns them.
    async fn published(&self) -> String {
        wait::until("the CA in the ConfigMap", wait::SOON, async || {
            let ca = self.ca().await?;
            (!ca.is_empty() && ca == self.secret("ca.crt").await).then_some(ca)
        })
        .await
    }

    /// The host name that clients connect to.
    fn host(&self) -> String {
        format!("{}.{}.svc", self.name, self.namespace)
    }

    /// No log and no page has a part of a key.
    async fn assert_no_secret(&self, kubefan: &Kubefan) {
        let mut shown = kubefan.process.log();
        for path in ["/metrics", "/readyz?verbose", "/status"] {
            shown += &kubefan.admin(path).await.unwrap().1;
        }
        for key in ["tls.key", "ca.key"] {
            let pem = self.secret(key).await;
            let line = pem.lines().nth(1).unwrap();
            assert!(line.len() > 30 && !shown.contains(line), "{key} is shown");
            assert!(!shown.contains(&BASE64_STANDARD.encode(&pem)[40..80]), "{key} is shown");
        }
    }
}

/// The variables of the container, as the kubelet sets them.
fn variables(deployment: &Value, namespace: &str) -> Vec<(String, String)> {
    let container = containers(deployment)[0];
    let of = |variable: &Value| {
        let value = variable["value"].as_str().unwrap_or(namespace).replace("$(POD_NAMESPACE)", namespace);
        (variable["name"].as_str().unwrap().to_owned(), value)
    };
    container["env"].as_array().unwrap().iter().map(of).collect()
}

fn text(base64: &Value) -> String {
    let bytes = BASE64_STANDARD.decode(base64.as_str().unwrap_or_default()).unwrap();
    String::from_utf8(bytes).unwrap()
}

fn count(pem: &str) -> usize {
    pem.matches("BEGIN CERTIFICATE").count()
}

/// Connects as a client that trusts this CA alone.
async fn connect(address: SocketAddr, ca: &str, host: &str) -> Result<TlsStream<TcpStream>, String> {
    let mut roots = RootCertStore::empty();
    for der in CertificateDer::pem_slice_iter(ca.as_bytes()) {
        roots.add(der.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
    let host = ServerName::try_from(host.to_owned()).unwrap();
    TlsConnector::from(Arc::new(config)).connect(host, stream).await.map_err(|error| error.to_string())
}

/// The certificate that a replica serves, which this CA must have signed.
async fn served(kubefan: &Kubefan, ca: &str, host: &str) -> CertificateDer<'static> {
    let stream = connect(kubefan.grpc_addr, ca, host).await.unwrap_or_else(|error| panic!("{host}: {error}"));
    stream.get_ref().1.peer_certificates().unwrap()[0].clone().into_owned()
}

async fn channel(address: SocketAddr, ca: &str, host: &str) -> Channel {
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)).domain_name(host);
    let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap();
    endpoint.tls_config(tls).unwrap().connect().await.unwrap()
}

/// A watch over gRPC of the pods of a namespace, as the administrator.
async fn watch(install: &Install<'_>, kubefan: &Kubefan, ca: &str) -> Watch {
    let mut client = WatchServiceClient::new(channel(kubefan.grpc_addr, ca, &install.host()).await);
    let target = Target { resource: "pods".into(), namespace: install.namespace.clone(), ..Target::default() };
    let mut request = tonic::Request::new(WatchRequest { target: Some(target), ..WatchRequest::default() });
    let bearer = format!("Bearer {}", install.api.admin_token());
    request.metadata_mut().insert("authorization", bearer.parse().unwrap());
    let mut watch = Watch::over(Box::pin(client.watch(request).await.unwrap().into_inner()), "");
    watch.until_resumable().await;
    watch
}

/// A watch over HTTP of the pods of a namespace, as the administrator.
async fn http_watch(install: &Install<'_>, kubefan: &Kubefan, ca: &str) -> TlsStream<TcpStream> {
    let mut stream = connect(kubefan.grpc_addr, ca, &install.host()).await.unwrap();
    let request = format!(
        "GET /api/v1/namespaces/{}/pods?watch=1&resourceVersion=0 HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {}\r\n\r\n",
        install.namespace,
        install.host(),
        install.api.admin_token()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    read_until(&mut stream, "HTTP/1.1 200 OK").await;
    stream
}

async fn read_until(stream: &mut TlsStream<TcpStream>, text: &str) {
    let mut read = String::new();
    let reading = async {
        while !read.contains(text) {
            let mut bytes = [0; 4096];
            let count = stream.read(&mut bytes).await.unwrap();
            assert_ne!(count, 0, "the stream ended before {text:?}: {read}");
            read += &String::from_utf8_lossy(&bytes[..count]);
        }
    };
    tokio::time::timeout(wait::SOON, reading).await.unwrap_or_else(|_| panic!("no {text:?} came"));
}

async fn create_pod(install: &Install<'_>, name: &str) -> u64 {
    let path = format!("/api/v1/namespaces/{}/pods", install.namespace);
    version_of(&install.api.create(&path, &pod(name)).await)
}

/// The line of the metrics with the reads of an object that have failed.
fn failures(object: &str) -> String {
    format!("kubefan_managed_certificate_failures_total{{object=\"{object}\",operation=\"read\"}}")
}

async fn logged(kubefan: &Kubefan, text: &str, times: usize) {
    let has = || async { (kubefan.process.log().matches(text).count() >= times).then_some(()) };
    wait::until(text, wait::SOON, has).await;
}

async fn three_replicas_have_one_ca_through_a_storm_of_conflicts() {
    let api = ApiServer::shared().await;
    let install = Install::new(&api).await;
    let storm = api.handle();
    let path = install.secret_path();
    let is_over = AtomicBool::new(false);
    // Another writer changes the Secret all the time. The pauses leave a slow replica a chance: it
    // gives up after some conflicts, until its next look.
    let writing = async {
        let mut number = 0;
        while !is_over.load(Ordering::Relaxed) {
            number += 1;
            let annotations = json!({ "storm": number.to_string() });
            storm.patch(&path, &json!({ "metadata": { "annotations": annotations } })).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        number
    };
    let starting = async {
        let replicas = join_all((0..3).map(|_| install.spawn(&[]))).await;
        join_all(replicas.iter().map(Kubefan::ready)).await;
        is_over.store(true, Ordering::Relaxed);
        replicas
    };
    let (writes, replicas) = futures::future::join(writing, starting).await;
    let secret = api.get_json(&path).await;
    assert_eq!(secret["metadata"]["annotations"]["storm"], writes.to_string(), "what others wrote is kept");
    let ca = install.published().await;
    assert_eq!(count(&ca), 1, "{ca}");
    let made: usize = replicas.iter().map(|kubefan| kubefan.process.log().matches("made a CA").count()).sum();
    assert_eq!(made, 1, "the others lost the conflict");
    let names = install.variables.iter().find(|(name, _)| name == "KUBEFAN_TLS_MANAGED_DNS_NAMES").unwrap();
    let names: Vec<&str> = names.1.split(',').collect();
    assert!(names.iter().any(|name| name.ends_with(".svc.cluster.local")), "{names:?}");
    for kubefan in &replicas {
        for name in &names {
            served(kubefan, &ca, &name.replace('*', "pod-1")).await;
        }
        assert!(connect(kubefan.grpc_addr, &ca, "other.example").await.is_err());
        let (_, verbose) = kubefan.admin("/readyz?verbose").await.unwrap();
        assert!(verbose.contains(&format!("[+]certificate of the Secret {}/", install.namespace)), "{verbose}");
        install.assert_no_secret(kubefan).await;
    }
    let end = replicas[0].metric("kubefan_serving_certificate_expiration_timestamp_seconds").await.unwrap();
    let ca_end = replicas[0].metric("kubefan_managed_ca_expiration_timestamp_seconds").await.unwrap();
    assert!(end.is_finite() && ca_end > end + 900.0 * 86_400.0, "{end} {ca_end}");
    // A restart takes over the existing certificate.
    let before = served(&replicas[0], &ca, &install.host()).await;
    let restarted = install.spawn(&[]).await;
    restarted.ready().await;
    assert_eq!(served(&restarted, &ca, &install.host()).await, before);
}

async fn what_others_do_to_the_secret_is_mended_and_ends_no_stream() {
    let api = ApiServer::shared().await;
    let install = Install::new(&api).await;
    let namespace = &install.namespace;
    let maps = format!("--tls-managed-ca-config-maps={namespace}/kubefan-ca,{namespace}/missing,default/kubefan-ca");
    let kubefan = install.spawn(&[&maps]).await;
    kubefan.ready().await;
    let first = install.published().await;
    // ConfigMaps that cannot be written are named, and harm nothing.
    logged(&kubefan, "the ConfigMap default/kubefan-ca cannot be read: the apiserver denies", 1).await;
    logged(&kubefan, &format!("the ConfigMap {namespace}/missing cannot be read"), 1).await;
    assert!(kubefan.metric(&failures("configmap")).await.unwrap() >= 2.0);
    let mut stream = watch(&install, &kubefan, &first).await;
    let path = install.secret_path();
    let host = install.host();
    // A unit test covers all foreign changes. One of these two keeps the CA and one does not.
    let IssuedPem { certificate, key } = Authority::new().server();
    let foreign = json!({ "tls.crt": BASE64_STANDARD.encode(certificate), "tls.key": BASE64_STANDARD.encode(key) });
    let harms = [("made a new certificate", 1, foreign, true), ("made a CA", 2, Value::Null, false)];
    for (what, times, data, keeps_ca) in harms {
        let before = install.published().await;
        api.patch(&path, &json!({ "data": data })).await;
        kubefan.process.hang_up();
        logged(&kubefan, what, times).await;
        let after = install.published().await;
        assert_eq!(after == before, keeps_ca, "{what}");
        wait::until(what, wait::SOON, async || connect(kubefan.grpc_addr, &after, &host).await.ok().map(drop)).await;
        install.assert_no_secret(&kubefan).await;
    }
    // Without the Secret, which kubefan may not create, the last certificate stays in use.
    let ca = install.published().await;
    let mut secret = api.get_json(&path).await;
    api.delete(&path).await;
    kubefan.process.hang_up();
    logged(&kubefan, "cannot be read: it does not exist, and kubefan does not create it", 1).await;
    served(&kubefan, &ca, &host).await;
    assert_eq!(kubefan.admin("/readyz").await.unwrap().0, StatusCode::OK);
    assert!(kubefan.metric(&failures("secret")).await.unwrap() >= 1.0);
    secret["metadata"] = json!({ "name": secret["metadata"]["name"] });
    secret["data"] = Value::Null;
    api.create(&format!("/api/v1/namespaces/{}/secrets", install.namespace), &secret).await;
    kubefan.process.hang_up();
    logged(&kubefan, "made a CA", 3).await;
    assert_ne!(install.published().await, ca);
    let version = create_pod(&install, "later").await;
    stream.until(version).await;
}

async fn a_start_waits_for_the_apiserver_and_an_outage_later_changes_nothing() {
    let api = ApiServer::shared().await;
    let mut install = Install::new(&api).await;
    let link = Link::to(api.addr()).await;
    let token = token(&api, &install.namespace, &install.name).await;
    install.kubeconfig = api.kubeconfig_to_with_token(&format!("https://{}", link.addr), &token);
    link.cut();
    let kubefan = install.spawn(&[]).await;
    let line = format!("[-]certificate of the Secret {}/", install.namespace);
    wait::until("the reason in /readyz", wait::SOON, async || {
        let (status, text) = kubefan.admin("/readyz").await?;
        let says = status == StatusCode::SERVICE_UNAVAILABLE && text.contains(&line) && text.contains("cannot reach");
        says.then_some(())
    })
    .await;
    assert!(connect(kubefan.grpc_addr, &Authority::new().ca_pem, &install.host()).await.is_err());
    link.mend();
    kubefan.ready().await;
    let ca = install.published().await;
    let before = served(&kubefan, &ca, &install.host()).await;
    link.cut();
    kubefan.process.hang_up();
    logged(&kubefan, "the managed certificate: the Secret", 2).await;
    assert_eq!(served(&kubefan, &ca, &install.host()).await, before);
    assert_eq!(kubefan.admin("/readyz").await.unwrap().0, StatusCode::OK);
    link.mend();
    logged(&kubefan, "it works again", 2).await;
    assert_eq!(served(&kubefan, &ca, &install.host()).await, before);
}

async fn a_ca_is_rotated_under_streams_and_every_client_and_node_has_it_in_time() {
    const OVERLAP: Duration = Duration::from_secs(5);
    /// Clients of this test hold a CA for up to this long.
    const HELD: Duration = Duration::from_secs(4);
    let api = ApiServer::shared().await;
    let install = Install::with(&api, NODE_FORM).await;
    let node = NodeSecret::of(&install);
    assert_eq!(node.data().await, Value::Null);
    for (verb, may) in [("get", true), ("update", true), ("patch", false), ("delete", false)] {
        let args = ["auth", "can-i", verb, &format!("secrets/{}", node.name), "-n", &install.namespace];
        assert_eq!(api.try_kubectl(&install.kubeconfig, &args).await.0, may, "{verb}");
    }
    let replicas = join_all((0..2).map(|_| install.spawn(SHORT_LIVES))).await;
    join_all(replicas.iter().map(Kubefan::ready)).await;
    let first = install.published().await;
    let mut streams = Vec::new();
    for kubefan in &replicas {
        streams.push(watch(&install, kubefan, &first).await);
    }
    let mut over_http = http_watch(&install, &replicas[0], &first).await;
    let logs = || replicas.iter().map(|kubefan| kubefan.process.log()).collect::<String>();
    let mut held = vec![(Instant::now(), first.clone())];
    let deadline = Instant::now() + 5 * wait::SOON;
    while !logs().contains("the next CA signs from now on") || held[0].1 == first {
        assert!(Instant::now() < deadline, "no rotation: {}", logs());
        held.push((Instant::now(), install.ca().await.unwrap()));
        // The last one stays, although reading it may have taken long.
        let old = held.iter().take_while(|(at, _)| at.elapsed() >= HELD).count();
        held.drain(..old.min(held.len() - 1));
        for kubefan in &replicas {
            let connected = connect(kubefan.grpc_addr, &held[0].1, &install.host()).await;
            let age = held[0].0.elapsed();
            // A slow connection may take longer than the overlap.
            assert!(connected.is_ok() || age >= OVERLAP, "with a CA of {age:?} ago: {connected:?}\n{}", logs());
        }
        if let Some(keys) = node.data().await.as_object() {
            assert_eq!(keys.keys().collect::<Vec<_>>(), ["ca.crt", "tls.crt", "tls.key"]);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(logs().matches("made a new certificate").count() >= 2, "renewed, and then by the next CA");
    assert_eq!(count(&install.ca().await.unwrap()), 2, "the first CA is still trusted");
    let last = install.secret("ca.key").await;
    assert_eq!(last.matches("BEGIN PRIVATE KEY").count(), 1, "the key of the first CA is deleted");
    let version = create_pod(&install, "after-the-rotation").await;
    for stream in &mut streams {
        stream.until(version).await;
    }
    read_until(&mut over_http, "after-the-rotation").await;
    node.is_kept(&replicas[0]).await;
}

/// The Secret that nodes serve with. It is one of their own, because a kubelet may read the whole
/// Secret of a pod.
struct NodeSecret<'a> {
    install: &'a Install<'a>,
    name: String,
    path: String,
}

impl<'a> NodeSecret<'a> {
    fn of(install: &'a Install<'a>) -> NodeSecret<'a> {
        let name = format!("{}-node-tls", install.name);
        NodeSecret { install, path: format!("/api/v1/namespaces/{}/secrets/{name}", install.namespace), name }
    }

    async fn data(&self) -> Value {
        self.install.api.get_json(&self.path).await["data"].take()
    }

    /// The Secret gets the certificate that the replica serves, foreign content is removed, and
    /// without it the replica serves as before.
    async fn is_kept(&self, kubefan: &Kubefan) {
        let NodeSecret { install, name, path } = self;
        let api = install.api;
        wait::until("the certificate of the Secret in the copy", wait::SOON, async || {
            let secret = api.get_json(&install.secret_path()).await;
            let copy = self.data().await;
            ["tls.crt", "tls.key", "ca.crt"].iter().all(|key| secret["data"][*key] == copy[*key]).then_some(())
        })
        .await;
        api.patch(path, &json!({ "data": { "ca.key": "a2V5" } })).await;
        wait::until("a copy without ca.key", wait::SOON, async || {
            self.data().await.get("ca.key").is_none().then_some(())
        })
        .await;
        api.delete(path).await;
        let namespace = &install.namespace;
        logged(kubefan, &format!("the Secret {namespace}/{name} cannot be read: it does not exist"), 1).await;
        assert!(kubefan.metric(&failures("copy")).await.unwrap() >= 1.0);
        assert_eq!(kubefan.admin("/readyz").await.unwrap().0, StatusCode::OK);
        let (_, verbose) = kubefan.admin("/readyz?verbose").await.unwrap();
        assert!(!verbose.contains("the last one is in use"), "the Secret itself can be read: {verbose}");
        install.assert_no_secret(kubefan).await;
    }
}

async fn replicas_copy_caches_and_neither_a_client_nor_a_node_passes_for_one() {
    let api = ApiServer::shared().await;
    let install = Install::new(&api).await;
    let port = free_port();
    let listen = format!("--peer-listen=127.0.0.1:{port}");
    let peers = format!("--peers=127.0.0.1:{port}");
    let first = install.spawn(&[&listen]).await;
    first.ready().await;
    let starts = async |of: &Kubefan, result: &str| {
        let labels = format!(r#"{{group="",media="json",namespace="",resource="pods",result="{result}"}}"#);
        of.metric(&format!("kubefan_warm_starts_total{labels}")).await
    };
    // A replica tries once. A busy apiserver may not confirm the copy in time, so there are three.
    let mut is_warm = false;
    for _ in 0..3 {
        let second = install.spawn(&[&peers]).await;
        second.ready().await;
        let warm = || async { (starts(&second, "warm").await == Some(1.0)).then_some(()) };
        is_warm = wait::try_until(wait::SOON, warm).await.is_some();
        let is_late = [starts(&second, "unconfirmed").await, starts(&second, "timeout").await].contains(&Some(1.0));
        if is_warm || !is_late {
            break;
        }
    }
    assert!(is_warm, "no replica has started from the cache of the first: {}", first.process.log());

    let ca = install.published().await;
    let refused = async || first.metric("kubefan_peers_refused_total").await.unwrap();
    assert_eq!(refused().await, 0.0);
    // A client that has the CA, and a node that has the serving certificate with its key.
    let identity = Identity::from_pem(install.secret("tls.crt").await, install.secret("tls.key").await);
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&ca)).domain_name("peer.kubefan.internal");
    for (has, tls) in [("only the CA", tls.clone()), ("the serving certificate", tls.identity(identity))] {
        let before = refused().await;
        let endpoint = Endpoint::from_shared(format!("https://127.0.0.1:{port}")).unwrap();
        let channel = endpoint.tls_config(tls).unwrap().connect_lazy();
        let request = TransferRequest { resource: "pods".into(), version: "v1".into(), ..Default::default() };
        let failed = PeerServiceClient::new(channel).transfer(request).await.unwrap_err();
        assert!(std::error::Error::source(&failed).is_some(), "{has}: the connection, not the service: {failed}");
        wait::until(has, wait::SOON, async || (refused().await > before).then_some(())).await;
    }
    // And a node that serves as a peer is not asked: its certificate lacks the name.
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: String| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let own = free_port();
    let node = [
        format!("--peer-listen=127.0.0.1:{own}"),
        format!("--peer-cert-file={}", file("crt", install.secret("tls.crt").await)),
        format!("--peer-key-file={}", file("key", install.secret("tls.key").await)),
        format!("--peer-ca-file={}", file("ca", ca.clone())),
    ];
    let node = install.spawn(&node.each_ref().map(String::as_str)).await;
    node.ready().await;
    let misled = install.spawn(&[&format!("--peers=127.0.0.1:{own}")]).await;
    misled.ready().await;
    wait::until("a failed warm start", wait::SOON, || async {
        (starts(&misled, "failed").await == Some(1.0)).then_some(())
    })
    .await;
}

async fn check_reads_the_secret_and_writes_nothing() {
    let api = ApiServer::shared().await;
    let install = Install::with(&api, NODE_FORM).await;
    let check = async || {
        let args = ["check", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--kubeconfig"];
        let flags: Vec<&str> = install.flags.iter().map(String::as_str).collect();
        let variables = install.variables.clone();
        let args = [&args[..], &[install.kubeconfig.to_str().unwrap()], &flags].concat();
        let ran = run_with(&args, |command| {
            command.envs(variables);
        })
        .await;
        ran.stdout
    };
    let printed = check().await;
    assert!(printed.contains("it has no CA that can be used; `kubefan serve` will make a new one"), "{printed}");
    let copy = format!("{}-node-tls", install.name);
    let rights = ["get secrets", "update secrets", "get configmaps kubefan-ca", "update configmaps kubefan-ca"];
    for right in [&rights[..], &[&format!("get secrets {copy}"), &format!("update secrets {copy}")]].concat() {
        assert!(printed.contains(&format!("ok       {right}")), "{right}: {printed}");
    }
    assert!(printed.contains("does not have the certificate yet"), "{printed}");
    assert_eq!(api.get_json(&install.secret_path()).await["data"], Value::Null, "nothing is written");
    let kubefan = install.spawn(&[]).await;
    kubefan.ready().await;
    install.published().await;
    let path = format!("/api/v1/namespaces/{}/secrets/{copy}", install.namespace);
    wait::until("the copy", wait::SOON, async || api.get_json(&path).await["data"].as_object().map(drop)).await;
    let printed = check().await;
    assert!(printed.contains("its CA until") && printed.contains("has the CA"), "{printed}");
    assert!(printed.contains("has the certificate"), "{printed}");
    assert!(!printed.contains("PRIVATE KEY"));
    api.delete(&install.secret_path()).await;
    let printed = check().await;
    assert!(printed.contains("error    Secret") && printed.contains("create it without data"), "{printed}");
    let (status, _) = api.request(Method::GET, &install.secret_path(), None).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
}
