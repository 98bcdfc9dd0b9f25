//! `kubefan check` names every fault with its step and its remedy, before it does harm.

use std::{fs, path::Path};

use serde_json::Value;

use crate::harness::{
    apiserver::ApiServer,
    kubefan::{Kubefan, Ran, run, run_with},
    pki::{Authority, IssuedPem},
    process::closed_port,
    rbac::ServiceAccount,
    simulated::{Simulated, json, kubeconfig},
    tests,
};

tests! {
    apiserver: an_administrators_configuration_is_fine, missing_rights_are_named_with_the_rule_that_grants_them,
        a_ca_and_a_token_of_another_cluster_are_told_apart;
    local: each_step_to_the_apiserver_is_named, an_invalid_configuration_is_one_finding,
        unusable_certificates_are_found_before_clients_fail, a_port_in_use_names_its_process,
        names_that_match_nothing_are_named, peers_are_reached_although_no_cache_is_copied_from_them;
}

/// Runs the check with ports of its own and returns its report.
async fn check(kubeconfig: &Path, args: &[&str]) -> (Ran, Value) {
    let own = ["check", "-o", "json", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--kubeconfig"];
    let ran = run(&[&own[..], &[kubeconfig.to_str().unwrap()], args].concat()).await;
    let report = json(&ran.stdout);
    let worst = report["result"].as_str().unwrap().to_owned();
    assert_eq!(ran.code, Some(i32::from(worst == "error")), "{ran:?}");
    (ran, report)
}

/// The findings of a group.
fn findings<'a>(report: &'a Value, group: &str) -> Vec<&'a Value> {
    let groups = report["groups"].as_array().unwrap();
    let group = groups.iter().find(|found| found["name"] == group);
    group.map(|group| group["checks"].as_array().unwrap().iter().collect()).unwrap_or_default()
}

#[track_caller]
fn assert_finding(report: &Value, group: &str, check: &str, result: &str, text: &str) {
    let found = findings(report, group).into_iter().filter(|finding| finding["check"] == check);
    let is_it = |finding: &Value| {
        let line = format!("{}; {}", finding["message"].as_str().unwrap(), finding["remedy"].as_str().unwrap());
        finding["result"] == result && line.contains(text)
    };
    assert!(found.into_iter().any(is_it), "no {result} about {check} with {text:?} in {group}: {report:#}");
}

async fn an_administrators_configuration_is_fine() {
    let api = ApiServer::shared().await;
    let (ran, report) = check(&api.kubeconfig(), &["--resource=pods,deploy,nodes", "--memory-max=1Gi"]).await;
    assert_eq!((ran.code, &report["errors"]), (Some(0), &Value::from(0)), "{report:#}");
    assert_finding(&report, "apiserver", "TLS", "ok", "verified");
    assert_finding(&report, "apiserver", "version", "ok", "v1.35");
    assert_finding(&report, "apiserver", "clock", "ok", "within");
    assert_finding(&report, "apiserver", "cluster", "ok", "kube-system has the uid");
    assert_finding(&report, "apiserver", "credentials", "ok", "knows kubefan as");
    assert_finding(&report, "resources", "deployments.apps", "ok", "can be listed and watched");
    let kubeconfig = api.kubeconfig();
    let args = ["check", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--resource=pods", "--kubeconfig"];
    let printed = run(&[&args[..], &[kubeconfig.to_str().unwrap()]].concat()).await;
    assert_eq!((printed.code, printed.stderr.as_str()), (Some(0), ""), "{printed:?}");
    assert!(printed.stdout.contains("\nresources\n  ok       pods: can be listed and watched"), "{}", printed.stdout);
    assert!(!printed.stdout.contains('\x1b'), "colour is for terminals: {}", printed.stdout);
}

async fn missing_rights_are_named_with_the_rule_that_grants_them() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("check").await;
    let account = ServiceAccount::create(&api, &namespace, "kubefan").await;
    let authority = Authority::new();
    let dir = tempfile::tempdir().unwrap();
    let files = write(dir.path(), authority.server());
    let tls = [format!("--tls-cert-file={}", files.certificate), format!("--tls-private-key-file={}", files.key)];
    let args = ["--resource=pods,services", tls[0].as_str(), tls[1].as_str(), "--access=authorized-impersonate"];
    let kubeconfig = account.kubeconfig().await;
    let (_, report) = check(&kubeconfig, &args).await;
    assert_eq!(report["result"], "error");
    let rule = "{ apiGroups: [\"\"], resources: [pods], verbs: [list, watch] } by a ClusterRole";
    assert_finding(&report, "resources", "pods", "error", rule);
    assert_finding(&report, "resources", "services", "error", "resources: [services]");
    assert_finding(&report, "apiserver", "cluster", "warning", "get the namespace kube-system");
    let reviews = "create tokenreviews.authentication.k8s.io";
    assert_finding(&report, "rights", reviews, "error", "system:auth-delegator");
    assert_finding(&report, "rights", "impersonate users", "error", "--access=authorized-impersonate");
    account.may_read_pods().await;
    account.may_review().await;
    let (_, report) = check(&kubeconfig, &args).await;
    assert_finding(&report, "resources", "pods", "ok", "can be listed and watched");
    assert_finding(&report, "resources", "services", "error", "may not list and watch");
    assert_finding(&report, "rights", reviews, "ok", "allowed");
    let (_, report) = check(&kubeconfig, &["--resource=services", "--namespace", &namespace]).await;
    let in_namespace = format!("services in {namespace}");
    assert_finding(&report, "resources", &in_namespace, "error", "verbs: [list, watch] } by a Role");
}

/// Paths of a certificate and its key.
struct Paths {
    certificate: String,
    key: String,
}

/// Writes a certificate and its key.
fn write(dir: &Path, issued: IssuedPem) -> Paths {
    let certificate = dir.join("tls.crt");
    let key = dir.join("tls.key");
    fs::write(&certificate, issued.certificate).unwrap();
    fs::write(&key, issued.key).unwrap();
    Paths { certificate: certificate.display().to_string(), key: key.display().to_string() }
}

async fn a_ca_and_a_token_of_another_cluster_are_told_apart() {
    let api = ApiServer::shared().await;
    let dir = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(api.kubeconfig()).unwrap();
    let ca = dir.path().join("ca.pem");
    let other = dir.path().join("config");
    fs::write(&ca, Authority::new().ca_pem).unwrap();
    let own_ca = api.ca_pem_path();
    fs::write(&other, text.replace(own_ca.to_str().unwrap(), ca.to_str().unwrap())).unwrap();
    let (_, report) = check(&other, &["--resource=pods"]).await;
    assert_finding(&report, "apiserver", "TCP", "ok", "accepts connections");
    assert_finding(&report, "apiserver", "TLS", "error", "certificate-authority");
    let wrong = api.kubeconfig_with_token("wrong-token", "not-a-token");
    let (ran, report) = check(&wrong, &["--resource=pods"]).await;
    assert_finding(&report, "apiserver", "credentials", "error", "renew the token");
    assert!(!ran.stdout.contains("not-a-token"), "{}", ran.stdout);
}

async fn each_step_to_the_apiserver_is_named() {
    let simulated = Simulated::start().await;
    let (_, report) = check(&simulated.kubeconfig(), &["--resource=pods", "--memory-max=1Gi"]).await;
    assert_finding(&report, "resources", "pods", "ok", "3 objects");
    let dir = tempfile::tempdir().unwrap();
    let (_closed, address) = closed_port();
    let closed = format!("http://{address}");
    let cases = [
        ("http://no-such-host.invalid:6443", "DNS", "cannot be resolved"),
        (closed.as_str(), "TCP", "refused"),
        (&format!("https://{}", simulated.addr), "TLS", "http"),
    ];
    for (server, step, text) in cases {
        let (_, report) = check(&kubeconfig(&dir, server, "{}"), &["--resource=pods"]).await;
        assert_finding(&report, "apiserver", step, "error", text);
        assert!(findings(&report, "resources").is_empty(), "{report:#}");
    }
    let (_, report) = check(Path::new("/does/not/exist"), &["--resource=pods"]).await;
    assert_finding(&report, "apiserver", "kubeconfig", "error", "/does/not/exist");
}

async fn an_invalid_configuration_is_one_finding() {
    let ran = run(&["check", "--listen=0.0.0.0:0", "--resource=pods", "--access=local"]).await;
    assert_eq!((ran.code, ran.stderr.as_str()), (Some(1), ""), "{ran:?}");
    let expected = "configuration\n  error    flags, environment and file: --listen 0.0.0.0:0 can be reached";
    assert!(ran.stdout.starts_with(expected) && ran.stdout.ends_with("1 error, 0 warnings\n"), "{ran:?}");
    let ran = run(&["check", "--drain-timeout=many"]).await;
    assert_eq!(ran.code, Some(2), "{ran:?}");
}

async fn unusable_certificates_are_found_before_clients_fail() {
    let simulated = Simulated::start().await;
    let authority = Authority::new();
    let dir = tempfile::tempdir().unwrap();
    let Paths { certificate, key } = write(dir.path(), authority.expired_server());
    let args = [
        format!("--tls-cert-file={certificate}"),
        format!("--tls-private-key-file={key}"),
        "--access=local".to_owned(),
        "--resource=pods".to_owned(),
    ];
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (_, report) = check(&simulated.kubeconfig(), &args).await;
    assert_finding(&report, "certificates", "data port", "error", "has expired: it was valid until 2002-01-01");
    write(dir.path(), authority.server());
    let (_, report) = check(&simulated.kubeconfig(), &args).await;
    assert_finding(&report, "certificates", "data port", "ok", "for 127.0.0.1, localhost");
    fs::write(dir.path().join("tls.key"), authority.server().key).unwrap();
    let (_, report) = check(&simulated.kubeconfig(), &args).await;
    assert_finding(&report, "certificates", "data port", "error", "its own key");
}

async fn a_port_in_use_names_its_process() {
    let simulated = Simulated::start().await;
    let kubefan = Kubefan::spawn(&simulated.kubeconfig(), &["--resource=pods"]).await;
    let kubeconfig = simulated.kubeconfig();
    let listen = kubefan.grpc_addr.to_string();
    let admin = simulated.addr.to_string();
    let args = ["--resource=pods", "--listen", &listen, "--admin-listen", &admin, "--kubeconfig"];
    let ran = run(&[&["check", "-o", "json"], &args[..], &[kubeconfig.to_str().unwrap()]].concat()).await;
    let report = json(&ran.stdout);
    assert_finding(&report, "ports", "--listen", "warning", "in use by a kubefan that runs");
    assert_finding(&report, "ports", "--admin-listen", "error", "choose another address");
}

async fn names_that_match_nothing_are_named() {
    let simulated = Simulated::start().await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("kubefan.yaml");
    let rules = "modes: [{resources: [po, pods, \"*\"], mode: Deny}, {resources: [podz], mode: Deny}]";
    fs::write(&file, format!("apiVersion: kubefan.dev/v1alpha1\nkind: ServeConfiguration\n{rules}\n")).unwrap();
    let config = format!("--config={}", file.display());
    let (_, report) = check(&simulated.kubeconfig(), &["--resource=podz,pods", &config]).await;
    assert_finding(&report, "resources", "podz", "error", "did you mean \"pods\"?");
    assert_finding(&report, "resources", "pods", "ok", "can be listed and watched");
    let of_modes: Vec<_> = findings(&report, "resources").into_iter().filter(|one| one["check"] == "modes").collect();
    let [short, misspelt] = &of_modes[..] else { panic!("{report:#}") };
    for (finding, name) in [(short, "po"), (misspelt, "podz")] {
        assert_eq!(finding["result"], "warning");
        let message = format!("no resource is called {name:?}, so its rule matches nothing; did you mean \"pods\"?");
        assert_eq!(finding["message"], message);
    }

    let kubeconfig = simulated.kubeconfig();
    let args = ["check", "--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--kubeconfig"];
    let ran = run_with(&[&args[..], &[kubeconfig.to_str().unwrap()]].concat(), |command| {
        command.env("KUBEFAN_RESORCE", "pods");
    })
    .await;
    let line = "warning  environment: KUBEFAN_RESORCE is ignored; did you mean KUBEFAN_RESOURCE?";
    assert!(ran.code == Some(0) && ran.stdout.contains(line), "{ran:?}");
}

async fn peers_are_reached_although_no_cache_is_copied_from_them() {
    let simulated = Simulated::start().await;
    let authority = Authority::new();
    let dir = tempfile::tempdir().unwrap();
    let Paths { certificate, key } = write(dir.path(), authority.peer());
    let ca = dir.path().join("ca.crt");
    fs::write(&ca, &authority.ca_pem).unwrap();
    let (_closed, address) = closed_port();
    let address = address.to_string();
    let args = [
        format!("--peers={address}"),
        format!("--peer-cert-file={certificate}"),
        format!("--peer-key-file={key}"),
        format!("--peer-ca-file={}", ca.display()),
    ];
    let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
    args.extend(["--resource=pods", "--peer-listen=127.0.0.1:0", "tuning.cold", "--rebalance"]);
    let (_, report) = check(&simulated.kubeconfig(), &args).await;
    assert_finding(&report, "peers", &address, "warning", "cannot be reached");
}
