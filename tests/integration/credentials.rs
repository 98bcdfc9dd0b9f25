//! kubefan's credentials upstream: client certificates, tokens, token files that rotate and
//! credential plugins, each configured by a kubeconfig.

use std::path::Path;

use kubefan_proxy::upstream::{
    Upstream,
    client::{UpstreamOptions, Verb},
    settings::UpstreamSettings,
};
use kubefan_sim::apiserver::SimOptions;

use crate::harness::{
    apiserver::ApiServer,
    kubefan::{Kubefan, run},
    simulated::Simulated,
    tests,
};

tests! {
    apiserver: a_client_certificate_is_used;
    local: a_rotated_token_file_is_read_again_after_a_401, a_plugin_is_run_again_when_its_token_expires,
        a_failing_plugin_is_reported_without_its_output,
        no_caller_is_reviewed_by_an_apiserver_whose_certificate_is_not_checked;
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
    let ports = ["serve", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--passthrough=off"];
    let tls = ["--tls-cert-file=a", "--tls-private-key-file=b"];
    let ran = run(&[&ports[..], &tls, &[&*kubeconfig]].concat()).await;
    let says = ["insecure-skip-tls-verify", "--authorization-mode=Webhook"];
    crate::bad_input::assert_line("reviewer", &ran, 1, &says);
}

async fn a_failing_plugin_is_reported_without_its_output() {
    let simulated = strict().await;
    for (prints, exits) in [("very-secret", 3), ("very-secret", 0), (credential("very-secret", "x").as_str(), 0)] {
        let (kubeconfig, _) = plugin(&simulated, prints, exits);
        let ran = run(&[
            "serve",
            "--require-upstream",
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
