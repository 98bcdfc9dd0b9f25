//! Limits: memory, open files, connections, handshakes and certificates.

use std::{
    fs,
    path::Path,
    time::{Duration, SystemTime},
};

use kubefan_sim::apiserver::SimOptions;
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose};
use serde_json::json;

use super::scene::{OFTEN, Scene, asks, every, large, lively};
use crate::{
    harness::{
        apiserver::ApiServer,
        kubefan::Kubefan,
        pki::{Authority, IssuedPem},
        rig::pods,
        simulated::Simulated,
    },
    memory_limit::unread,
};

const HOUR: Duration = Duration::from_secs(3600);

/// A memory budget that kubefan's state alone fills.
pub(super) async fn memory(scene: Scene) {
    let simulated =
        Simulated::with(SimOptions { bookmark_interval: Duration::from_secs(1), ..SimOptions::default() }).await;
    for number in 0..128 {
        simulated.sim.create(&pods(), large(&format!("large-{number}"), 512 << 10)).unwrap();
    }
    let kubefan = simulated.kubefan(&["--resource=pods"]).await;
    let resident = kubefan.metric("process_resident_memory_bytes").await.unwrap() as u64;
    drop(kubefan);
    let with = |bytes: u64| format!("--memory-max={bytes}");
    let kubefan = simulated.kubefan(&["--resource=pods", &with(resident / 100 * 97)]).await;
    scene.scrape(&kubefan);
    let firing = scene
        .fired("a memory budget below what the caches take", &["KubefanMemoryPressure", "KubefanMemoryExhausted"])
        .await;
    drop(kubefan);
    let kubefan = simulated.kubefan(&["--resource=pods", &with(resident * 2)]).await;
    firing.scene().scrape(&kubefan);
    firing.resolved("a larger budget").await;
}

/// More open files than eight tenths of the limit.
pub(super) async fn files(scene: Scene) {
    let (simulated, _writing) = lively().await;
    let shell = "ulimit -n 2048";
    let kubefan =
        Kubefan::spawn_after(&simulated.kubeconfig(), shell, &["--resource=pods", "--access=local-cache-only"]).await;
    kubefan.ready().await;
    scene.scrape(&kubefan);
    let mut clients = Vec::new();
    let own = kubefan.metric("process_open_fds").await.unwrap();
    // More than eight tenths, and few enough for limits.connectionsMax, which leaves 200 files
    // free.
    for _ in 0..(1_700.0 - own) as usize {
        clients.push(unread(kubefan.grpc_addr.port(), "/api/v1/pods?watch=1&resourceVersion=0").await);
    }
    let firing = scene
        .fired("1,700 of 2,048 open files, by watches on connections of their own", &["KubefanOpenFilesNearLimit"])
        .await;
    drop(clients);
    firing.resolved("the clients went to other replicas").await;
}

/// The managed certificate, with a ConfigMap for its CA that does not exist.
pub(super) async fn managed_certificate(scene: Scene) {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("managed-alert").await;
    let [secrets, maps] = ["secrets", "configmaps"].map(|kind| format!("/api/v1/namespaces/{namespace}/{kind}"));
    let named = |name: &str| json!({ "metadata": { "name": name } });
    api.create(&secrets, &named("kubefan-tls")).await;
    let args = [
        format!("--tls-managed-secret={namespace}/kubefan-tls"),
        format!("--tls-managed-ca-config-maps={namespace}/kubefan-ca"),
        "--tls-managed-dns-names=kubefan.test".to_owned(),
        // The shorter it is, the more often kubefan looks at both.
        "tuning.tlsManagedCaOverlap=1m".to_owned(),
        "--resource=pods".to_owned(),
    ];
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let kubefan = Kubefan::spawn_as_given(&api.kubeconfig(), &args).await;
    kubefan.ready().await;
    scene.scrape(&kubefan);
    let firing = scene.fired("a ConfigMap for the CA that does not exist", &["KubefanManagedCertificateFailing"]).await;
    api.create(&maps, &named("kubefan-ca")).await;
    firing.resolved("the ConfigMap created").await;
}

pub(super) async fn connections(scene: Scene) {
    let (_simulated, kubefan, _writing) = scene.begin(&["limits.connectionsMax=4"]).await;
    let port = kubefan.grpc_addr.port();
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(unread(port, "/api/v1/pods?watch=1&resourceVersion=0").await);
    }
    let _more = every(OFTEN, move || async move { drop(tokio::net::TcpStream::connect(("127.0.0.1", port)).await) });
    let firing = scene.fired("more connections than limits.connectionsMax", &["KubefanConnectionsRefused"]).await;
    drop(held);
    firing.resolved("the client that had them ended").await;
}

/// Writes a certificate for loopback that ends after this time, and its key.
#[expect(clippy::disallowed_methods, reason = "certificates end by the wall clock")]
fn write_certificate(dir: &Path, authority: &Authority, valid: Duration) {
    let mut params = CertificateParams::new(["127.0.0.1".to_owned()]).unwrap();
    params.not_after = (SystemTime::now() + valid).into();
    let IssuedPem { certificate, key } = authority.issue(params, &[ExtendedKeyUsagePurpose::ServerAuth]);
    fs::write(dir.join("tls.key"), key).unwrap();
    fs::write(dir.join("tls.crt"), certificate).unwrap();
}

/// A certificate that ends today, and clients that speak plaintext.
pub(super) async fn certificate(scene: Scene) {
    let (simulated, _writing) = lively().await;
    let authority = Authority::new();
    let dir = simulated.dir.path();
    write_certificate(dir, &authority, 12 * HOUR);
    let file = |flag: &str, name: &str| format!("--{flag}={}", dir.join(name).display());
    let kubefan = simulated
        .kubefan(&[
            "--resource=pods",
            &file("tls-cert-file", "tls.crt"),
            &file("tls-private-key-file", "tls.key"),
            "--access=local-cache-only",
        ])
        .await;
    scene.scrape(&kubefan);
    let plaintext = asks(OFTEN, reqwest::Client::new(), format!("http://{}/", kubefan.grpc_addr));
    let alerts = ["KubefanCertificateExpiring", "KubefanCertificateExpiresSoon", "KubefanHandshakesFailing"];
    let firing = scene.fired("a certificate of twelve hours, clients in plaintext", &alerts).await;
    write_certificate(dir, &authority, 24 * 365 * HOUR);
    drop(plaintext);
    firing.resolved("a new certificate, the clients ended").await;
}
