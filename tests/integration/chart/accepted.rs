//! Real apiservers of several releases accept everything that the chart and the overlays make: they
//! know every field, also in the kinds of other projects, whose own CRDs are loaded. Their pods
//! meet the restricted standard, but for the socket and the network of the host, and helm installs
//! each form.

use std::path::{Path, PathBuf};

use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use super::{VARIANTS, apply, containers};
use crate::harness::{
    apiserver::{ApiServer, Options},
    assets,
    helm::{self, CHART, objects},
    tests, tools,
};

tests! {
    apiserver slow_deploy: the_apiserver_accepts_every_form_and_variant;
    apiserver large: other_releases_accept_every_form_and_variant;
}

/// The kinds of other projects that the chart may create: the Go module that has the CRD, and its
/// file.
const FOREIGN: [(&str, &str); 4] = [
    (
        "github.com/prometheus-operator/prometheus-operator",
        "example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml",
    ),
    (
        "github.com/prometheus-operator/prometheus-operator",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
    ("github.com/cert-manager/cert-manager", "deploy/crds/cert-manager.io_certificates.yaml"),
    ("github.com/cert-manager/trust-manager", "deploy/crds/trust.cert-manager.io_bundles.yaml"),
];

/// The overlays, and their namespaces.
const OVERLAYS: [(&str, &str); 3] = [("cluster", "kubefan"), ("node", "kubefan"), ("sidecar", "node-agent")];

/// Flags of kubectl: nothing is stored, and fields that the apiserver does not know are errors.
const STRICT: [&str; 2] = ["--dry-run=server", "--validate=strict"];

async fn the_apiserver_accepts_every_form_and_variant() {
    let api = ApiServer::start(Options::default()).await;
    accepts_every_form_and_variant(&api).await;
}

async fn other_releases_accept_every_form_and_variant() {
    for program in [assets::kube_apiserver_before(), assets::kube_apiserver_next(), assets::kube_apiserver_newest()] {
        let api = ApiServer::start(Options::default().program(program)).await;
        accepts_every_form_and_variant(&api).await;
    }
}

async fn accepts_every_form_and_variant(api: &ApiServer) {
    let version = api.get_json("/version").await["gitVersion"].as_str().unwrap().to_owned();
    load_crds(api).await;
    for namespace in ["chart", "chart-a", "chart-b", "kubefan", "node-agent"] {
        let labels = json!({ "pod-security.kubernetes.io/enforce": "restricted" });
        api.create("/api/v1/namespaces", &json!({ "metadata": { "name": namespace, "labels": labels } })).await;
    }
    for (what, args) in VARIANTS {
        let what = format!("{what}, {version}");
        let text = helm::template("kubefan", "chart", &[*args, &["--kube-version", &version]].concat()).await;
        let made = objects(&text);
        all_are_accepted(&what, made.len(), &apply(api, &text, &STRICT).await);
        variables_are_defined_before_their_use(&what, &made);
        pods_are_restricted(api, &what, &made).await;
    }
    for (name, namespace) in OVERLAYS {
        let what = format!("the overlay {name}, {version}");
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/overlays").join(name);
        let dir = dir.to_str().unwrap();
        let made = objects(&api.kubectl(&["kustomize", dir]).await);
        assert!(made.iter().any(|object| object["metadata"]["namespace"] == namespace), "{what}: {made:?}");
        all_are_accepted(&what, made.len(), &api.kubectl(&[&["apply", "-k", dir][..], &STRICT].concat()).await);
        pods_are_restricted(api, &what, &made).await;
    }
    for form in ["node.enabled=false", "node.enabled=true"] {
        let kubeconfig = api.kubeconfig();
        let run =
            async |args: &[&str]| helm::helm(Some(&kubeconfig), &[args, &["--namespace", "chart"]].concat()).await;
        let installed = run(&["install", "kubefan", CHART, "--set", form]).await;
        assert!(installed.contains("STATUS: deployed"), "{form}, {version}: {installed}");
        run(&["uninstall", "kubefan"]).await;
    }
}

async fn load_crds(api: &ApiServer) {
    let versions = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/crds"));
    for (module, file) in FOREIGN {
        let path = tools::go_module(&versions, module).join(file);
        let path = path.to_str().unwrap();
        api.kubectl(&["create", "-f", path]).await;
        api.kubectl(&["wait", "--for=condition=Established", "--timeout=5m", "-f", path]).await;
    }
}

/// kubectl has written a line for each object.
fn all_are_accepted(what: &str, count: usize, applied: &str) {
    assert!(count >= 4, "{what}: {applied}");
    let accepted = applied.lines().filter(|line| line.ends_with("(server dry run)")).count();
    assert_eq!(accepted, count, "{what}: {applied}");
}

/// Kubernetes replaces `$(NAME)` only by variables that are earlier in the list.
pub(crate) fn variables_are_defined_before_their_use(what: &str, objects: &[Value]) {
    for container in objects.iter().flat_map(containers) {
        let mut defined = Vec::new();
        for variable in container["env"].as_array().into_iter().flatten() {
            let value = variable["value"].as_str().unwrap_or_default();
            let used = value.split("$(").skip(1).map(|rest| rest.split(')').next().unwrap());
            for name in used {
                assert!(defined.contains(&name), "{what}: {variable} uses {name}, which is not defined before");
            }
            defined.push(variable["name"].as_str().unwrap());
        }
    }
}

/// The apiserver takes the pods of all workloads, as their controllers would create them, into a
/// namespace that enforces the restricted standard; but none with a socket on the host or in its
/// network.
async fn pods_are_restricted(api: &ApiServer, what: &str, objects: &[Value]) {
    for workload in objects.iter().filter(|object| !containers(object).is_empty()) {
        let mut pod = workload["spec"]["template"].clone();
        pod["metadata"]["name"] = json!("as-the-controller-makes-it");
        let volumes = pod["spec"]["volumes"].as_array();
        let has_socket = volumes.is_some_and(|volumes| volumes.iter().any(|volume| !volume["hostPath"].is_null()));
        let has_network = pod["spec"]["hostNetwork"] == true;
        let on_the_host = has_socket || has_network;
        let pods = "/api/v1/namespaces/chart/pods?dryRun=All";
        let (status, answer) = api.request(Method::POST, pods, Some(("application/json", &pod))).await;
        let wanted = if on_the_host { StatusCode::FORBIDDEN } else { StatusCode::CREATED };
        assert_eq!(status, wanted, "{what}: {answer}");
        for (is_used, field, variant) in
            [(has_socket, "hostPath", "a socket on the host"), (has_network, "hostNetwork", "nodes without a network")]
        {
            if is_used {
                assert!(what.contains(variant), "{what}");
                assert!(answer["message"].as_str().unwrap().contains(field), "{what}: {answer}");
            }
        }
    }
}
