//! kubefan's credentials upstream: client certificates, tokens, token files that rotate and
//! credential plugins, each configured by a kubeconfig.

use std::{net::SocketAddr, path::Path, sync::Arc};

use futures::future::join_all;
use kubefan_sim::apiserver::SimOptions;
use kubefan_upstream::{
    Upstream,
    client::{UpstreamOptions, Verb},
    settings::UpstreamSettings,
};
use rustls::{
    ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};
use tokio_rustls::TlsAcceptor;

use crate::harness::{
    apiserver::ApiServer,
    kubefan::{Kubefan, run},
    pki::{Authority, IssuedPem},
    simulated::Simulated,
    tests, wait,
};

tests! {
    apiserver: a_client_certificate_is_used;
    local: a_rotated_token_file_is_read_again_after_a_401, a_plugin_is_run_again_when_its_token_expires,
        a_failing_plugin_is_reported_without_its_output,
        no_caller_is_reviewed_by_an_apiserver_whose_certificate_is_not_checked,
        a_replaced_ca_is_trusted_before_a_request_fails,
        a_kubeconfig_that_leads_elsewhere_is_not_taken_over;
}

async fn serves_pods(kubefan: &Kubefan) {
    kubefan.ready().await;
    let got = run(&["get", "pods", "-A", "--server", &kubefan.grpc_addr.to_string()]).await;
    assert_eq!(got.code, Some(0), "{got:?}");
}

async fn a_client_certificate_is_used() {
    let api = ApiServer::shared().await;
    let kubeconfig = api.kubeconfig_with_certificate("kubefan-by-certificate", "system:masters");
    serves_pods(&Kubefan::spawn(&kubeconfig, &["--resource=pods"]).await).await;
}

fn settings(kubeconfig: &Path) -> UpstreamSettings {
    UpstreamSettings { kubeconfig: Some(kubeconfig.to_owned()), context: None }
}

async fn strict() -> Simulated {
    Simulated::with(SimOptions { bearer_token: Some("right".into()), ..SimOptions::default() }).await
}

async fn a_rotated_token_file_is_read_again_after_a_401() {
    let simulated = strict().await;
    let token = simulated.dir.path().join("token");
    std::fs::write(&token, "old").unwrap();
    let kubeconfig = simulated.kubeconfig_for(&format!("{{ tokenFile: {} }}", token.display()));
    let upstream = Upstream::from_settings(settings(&kubeconfig), UpstreamOptions::default()).await.unwrap();
    let error = upstream.get(Verb::Get, "/version").await.unwrap_err();
    assert_eq!(error.reason(), "unauthorized", "{error}");
    std::fs::write(&token, "right\n").unwrap();
    upstream.get(Verb::Get, "/version").await.unwrap();
}

/// A plugin that records each run in a file, prints `prints` and exits with `exits`.
fn plugin(simulated: &Simulated, prints: &str, exits: i32) -> (std::path::PathBuf, std::path::PathBuf) {
    let runs = simulated.dir.path().join("runs");
    let script = format!("echo run >> {}; cat <<'END'\n{prints}\nEND\nexit {exits}", runs.display());
    let path = simulated.dir.path().join("plugin.sh");
    std::fs::write(&path, script).unwrap();
    let entry = format!(
        "{{ exec: {{ apiVersion: client.authentication.k8s.io/v1, command: sh, args: ['{}'], interactiveMode: Never }} }}",
        path.display()
    );
    (simulated.kubeconfig_for(&entry), runs)
}

fn credential(token: &str, expires: &str) -> String {
    format!(
        r#"{{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential","status":{{"token":"{token}","expirationTimestamp":"{expires}"}}}}"#
    )
}

async fn a_plugin_is_run_again_when_its_token_expires() {
    let simulated = strict().await;
    for (expires, again) in [("2000-01-01T00:00:00Z", true), ("2999-01-01T00:00:00Z", false)] {
        let (kubeconfig, runs) = plugin(&simulated, &credential("right", expires), 0);
        let upstream = Upstream::from_settings(settings(&kubeconfig), UpstreamOptions::default()).await.unwrap();
        let count = || std::fs::read_to_string(&runs).unwrap().lines().count();
        upstream.get(Verb::Get, "/version").await.unwrap();
        let before = count();
        for _ in 0..3 {
            upstream.get(Verb::Get, "/version").await.unwrap();
        }
        assert_eq!(count() > before, again, "{expires}: {before} runs, then {}", count());
        std::fs::remove_file(runs).unwrap();
    }
    let (kubeconfig, _) = plugin(&simulated, &credential("right", "2999-01-01T00:00:00Z"), 0);
    simulated.create("a");
    serves_pods(&Kubefan::spawn(&kubeconfig, &["--resource=pods"]).await).await;
}

async fn no_caller_is_reviewed_by_an_apiserver_whose_certificate_is_not_checked() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = "{ server: 'https://127.0.0.1:1', insecure-skip-tls-verify: true }";
    let kubeconfig = dir.path().join("config");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{ name: c, cluster: {cluster} }}]\n\
         contexts: [{{ name: c, context: {{ cluster: c, user: u }} }}]\nusers: [{{ name: u, user: {{ token: t }} }}]\n"
    );
    std::fs::write(&kubeconfig, text).unwrap();
    let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
    let ports = ["serve", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--access=authorized-cache-only"];
    let tls = ["--tls-cert-file=a", "--tls-private-key-file=b"];
    let ran = run(&[&ports[..], &tls, &[&*kubeconfig]].concat()).await;
    let says = ["insecure-skip-tls-verify", "--access=authorized"];
    crate::bad_input::assert_line("reviewer", &ran, 1, &says);
}

async fn a_failing_plugin_is_reported_without_its_output() {
    let simulated = strict().await;
    for (prints, exits) in [("very-secret", 3), ("very-secret", 0), (credential("very-secret", "x").as_str(), 0)] {
        let (kubeconfig, _) = plugin(&simulated, prints, exits);
        let ran = run(&[
            "serve",
            "tuning.requireUpstream",
            "--resource=pods",
            "--listen=127.0.0.1:0",
            "--admin-listen=127.0.0.1:0",
            "--kubeconfig",
            kubeconfig.to_str().unwrap(),
        ])
        .await;
        assert_eq!((ran.code, ran.stderr.lines().count()), (Some(1), 1), "{ran:?}");
        assert!(!ran.stderr.contains("very-secret"), "{ran:?}");
    }
}

/// Ends TLS in front of a server, with a certificate that can be replaced.
struct TlsEnd {
    addr: SocketAddr,
    /// Configuration of which each connection has a clone.
    config: watch::Sender<Arc<ServerConfig>>,
    accepts: JoinHandle<()>,
}

impl TlsEnd {
    async fn of(authority: &Authority, server: SocketAddr) -> TlsEnd {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (config, current) = watch::channel(server_config(authority));
        let accepts = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let mut current = current.clone();
                tokio::spawn(async move {
                    let config = current.borrow_and_update().clone();
                    let Ok(mut client) = TlsAcceptor::from(config.clone()).accept(client).await else { return };
                    let mut server = TcpStream::connect(server).await.unwrap();
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                        _ = current.changed() => {}
                    }
                    // Until the client has noticed.
                    let _ = client.shutdown().await;
                    let _ = client.read_to_end(&mut Vec::new()).await;
                    drop(config);
                });
            }
        });
        TlsEnd { addr, config, accepts }
    }

    /// Serves with a certificate of another authority, and closes all connections so far.
    async fn replace(&self, authority: &Authority) {
        let old = self.config.send_replace(server_config(authority));
        let ended = async || (Arc::strong_count(&old) == 1).then_some(());
        wait::until("the clients to close their old connections", wait::SOON, ended).await;
    }
}

impl Drop for TlsEnd {
    fn drop(&mut self) {
        self.accepts.abort();
    }
}

fn server_config(authority: &Authority) -> Arc<ServerConfig> {
    let IssuedPem { certificate, key } = authority.server();
    let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    Arc::new(builder.with_single_cert(chain, key).unwrap())
}

/// A kubeconfig for this server, with its CA in a file.
fn with_ca_file(simulated: &Simulated, server: SocketAddr, ca: &Path) -> std::path::PathBuf {
    let kubeconfig = simulated.kubeconfig();
    let text = std::fs::read_to_string(&kubeconfig).unwrap();
    let cluster = format!("server: 'https://{server}', certificate-authority: '{}'", ca.display());
    let plain = format!("server: 'http://{}'", simulated.addr);
    assert!(text.contains(&plain), "{text}");
    let path = simulated.dir.path().join("with-ca");
    std::fs::write(&path, text.replace(&plain, &cluster)).unwrap();
    path
}

async fn a_replaced_ca_is_trusted_before_a_request_fails() {
    let simulated = Simulated::start().await;
    let authority = Authority::new();
    let ca = simulated.dir.path().join("ca.crt");
    std::fs::write(&ca, &authority.ca_pem).unwrap();
    let end = TlsEnd::of(&authority, simulated.addr).await;
    let kubeconfig = with_ca_file(&simulated, end.addr, &ca);
    let upstream = Upstream::from_settings(settings(&kubeconfig), UpstreamOptions::default()).await.unwrap();
    let kubefan = Kubefan::spawn(&kubeconfig, &["--resource=pods"]).await;
    kubefan.ready().await;
    let forwarded = format!("http://{}/version", kubefan.grpc_addr);
    for round in 1..4 {
        let authority = Authority::new();
        std::fs::write(&ca, &authority.ca_pem).unwrap();
        end.replace(&authority).await;
        for answer in join_all((0..4).map(|_| upstream.get(Verb::Get, "/version"))).await {
            assert!(answer.is_ok(), "in round {round}: {}", answer.unwrap_err());
        }
        for answer in join_all((0..4).map(|_| reqwest::get(&forwarded))).await {
            let answer = answer.unwrap();
            assert!(answer.status().is_success(), "in round {round}: {}", answer.text().await.unwrap());
        }
    }
}

async fn a_kubeconfig_that_leads_elsewhere_is_not_taken_over() {
    let simulated = strict().await;
    let other = strict().await;
    let kubeconfig = simulated.kubeconfig_for("{ token: wrong }");
    let upstream = Upstream::from_settings(settings(&kubeconfig), UpstreamOptions::default()).await.unwrap();
    let text = std::fs::read_to_string(other.kubeconfig_for("{ token: right }")).unwrap();
    std::fs::write(&kubeconfig, text).unwrap();
    for _ in 0..2 {
        let error = upstream.get(Verb::Get, "/version").await.unwrap_err();
        assert_eq!(error.reason(), "unauthorized", "a token for another server was sent here: {error}");
    }
}
