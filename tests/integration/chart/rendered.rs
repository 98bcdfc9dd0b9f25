//! Files that are made from the chart or from the same source. `KUBEFAN_RENDER=1` writes them.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::harness::{
    apiserver::ApiServer,
    helm::{self, CHART, named, objects},
    tests,
};

tests! {
    apiserver slow_deploy: the_overlays_are_rendered_from_the_chart, kustomize_and_helm_make_the_same_objects,
        a_component_binds_the_account_of_the_overlays_namespace, the_template_of_the_sidecar_is_the_component,
        the_readme_lists_the_values, the_chart_installs_the_rules_and_the_dashboard, artifact_hub_understands_the_annotations;
}

/// The overlays of kustomize that are rendered from the chart.
const OVERLAYS: [&str; 2] = ["cluster", "node"];

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy")
}

fn overlay(name: &str) -> PathBuf {
    deploy().join("overlays").join(name)
}

/// Compares a file with the wanted text, or writes it.
fn must_be(path: &Path, wanted: &str) {
    if std::env::var_os("KUBEFAN_RENDER").is_some() {
        fs::write(path, wanted).unwrap();
    }
    let found = fs::read_to_string(path).unwrap_or_default();
    let first = found.lines().zip(wanted.lines()).find(|(found, wanted)| found != wanted);
    let path = path.display();
    assert!(
        found == wanted,
        "{path} differs at {first:?}: KUBEFAN_RENDER=1 cargo test --test integration chart::rendered -- --ignored writes it"
    );
}

/// Renders the chart with an overlay's values.
async fn render(overlay_name: &str) -> String {
    let values = overlay(overlay_name).join("values.yaml");
    helm::template("kubefan", "kubefan", &["--values", values.to_str().unwrap()]).await
}

/// The labels that only helm sets.
const OF_HELM: [&str; 2] = ["helm.sh/chart", "app.kubernetes.io/managed-by"];

async fn the_overlays_are_rendered_from_the_chart() {
    for name in OVERLAYS {
        let text = render(name).await;
        // The kustomization has the namespace, so that it can be another one. It sets it only where
        // there is none.
        let is_of_helm = |line: &str| {
            line.starts_with("# Source: ")
                || line.trim_start() == "namespace: kubefan"
                || OF_HELM.iter().any(|label| line.trim_start().starts_with(&format!("{label}:")))
        };
        let lines = text.lines().filter(|line| !is_of_helm(line)).map(|line| format!("{line}\n"));
        must_be(&overlay(name).join("kubefan.yaml"), &lines.collect::<String>());
    }
}

/// Objects by kind and name, without the labels of helm.
fn by_name(objects: Vec<Value>) -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    for mut object in objects {
        let labels = object["metadata"]["labels"].as_object_mut();
        if let Some(labels) = labels {
            labels.retain(|label, _| !OF_HELM.contains(&label.as_str()));
        }
        let name = format!("{} {}", object["kind"], object["metadata"]["name"]);
        assert!(found.insert(name.clone(), object).is_none(), "{name} is there twice");
    }
    found
}

async fn kustomize_and_helm_make_the_same_objects() {
    let api = ApiServer::shared().await;
    for (name, namespace) in OVERLAYS.into_iter().flat_map(|name| [(name, "kubefan"), (name, "elsewhere")]) {
        let dir = tempfile::tempdir().unwrap();
        for file in ["kubefan.yaml", "kustomization.yaml"] {
            let text = fs::read_to_string(overlay(name).join(file)).unwrap();
            let own = "metadata: { name: namespace, namespace: kubefan }";
            assert_eq!(text.contains(own), file == "kustomization.yaml");
            fs::write(dir.path().join(file), text.replace(own, &own.replace("kubefan", namespace))).unwrap();
        }
        let kustomized = api.kubectl(&["kustomize", dir.path().to_str().unwrap()]).await;
        let values = overlay(name).join("values.yaml");
        let rendered = helm::template("kubefan", namespace, &["--values", values.to_str().unwrap()]).await;
        let kustomized = by_name(objects(&kustomized));
        let rendered = by_name(objects(&rendered));
        assert!(rendered.len() >= 15, "{rendered:?}");
        assert_eq!(kustomized.keys().collect::<Vec<_>>(), rendered.keys().collect::<Vec<_>>());
        for (object, of_helm) in &rendered {
            assert_eq!(&kustomized[object], of_helm, "{object} in {namespace}");
        }
    }
}

async fn a_component_binds_the_account_of_the_overlays_namespace() {
    let dir = tempfile::tempdir().unwrap();
    for file in [
        "overlays/cluster/kubefan.yaml",
        "components/impersonation/kustomization.yaml",
        "components/impersonation/impersonate.yaml",
    ] {
        let copy = dir.path().join(file);
        fs::create_dir_all(copy.parent().unwrap()).unwrap();
        fs::copy(deploy().join(file), copy).unwrap();
    }
    let kustomization = fs::read_to_string(overlay("cluster").join("kustomization.yaml")).unwrap();
    let kustomization = kustomization.replace("namespace: kubefan }", "namespace: elsewhere }");
    let path = dir.path().join("overlays/cluster");
    fs::write(
        path.join("kustomization.yaml"),
        format!("{kustomization}\ncomponents: [../../components/impersonation]\n"),
    )
    .unwrap();
    let kustomized = ApiServer::shared().await.kubectl(&["kustomize", path.to_str().unwrap()]).await;
    let binding = &by_name(objects(&kustomized))["\"ClusterRoleBinding\" \"kubefan-impersonate\""];
    assert_eq!(binding["subjects"][0]["namespace"], "elsewhere", "{binding}");
}

/// A chart of an agent that includes kubefan's templates.
const AGENT: &str = r#"
apiVersion: apps/v1
kind: DaemonSet
metadata: { name: agent }
spec:
  template:
    spec:
      initContainers:
        - {{- include "kubefan.sidecar" .Values.sidecar | nindent 10 }}
      volumes:
        {{- include "kubefan.sidecarVolumes" .Values.sidecar | nindent 8 }}
"#;

async fn the_template_of_the_sidecar_is_the_component() {
    let dir = tempfile::tempdir().unwrap();
    let write = |file: &str, text: &str| {
        let path = dir.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let dependency = format!("dependencies: [{{ name: kubefan, version: 0.2.0, repository: \"file://{CHART}\" }}]");
    write("Chart.yaml", &format!("apiVersion: v2\nname: agent\nversion: 1.0.0\n{dependency}\n"));
    let sidecar = r#"{ image: "kubefan:0.2.0", resources: [pods], args: ["--upstream-field-selector=spec.nodeName=$(NODE_NAME)"] }"#;
    write("values.yaml", &format!("kubefan: {{ cluster: {{ enabled: false }} }}\nsidecar: {sidecar}\n"));
    write("templates/agent.yaml", AGENT);
    let chart = dir.path().to_str().unwrap();
    helm::helm(None, &["dependency", "build", "--skip-refresh", chart]).await;
    let rendered = objects(&helm::helm(None, &["template", "agent", chart]).await);
    // The chart itself installs nothing.
    assert_eq!(rendered.len(), 1, "{rendered:?}");
    let component = fs::read_to_string(deploy().join("components/sidecar/sidecar.yaml")).unwrap();
    let component = objects(&component);
    let of_helm = &rendered[0]["spec"]["template"]["spec"];
    let of_kustomize = &component[0]["spec"]["template"]["spec"];
    for part in ["initContainers", "volumes"] {
        assert_eq!(of_helm[part], of_kustomize[part], "{part}");
    }
    let api = ApiServer::shared().await;
    let example = objects(&api.kubectl(&["kustomize", overlay("sidecar").to_str().unwrap()]).await);
    let pod = &named(&example, "DaemonSet", "agent")["spec"]["template"]["spec"];
    assert_eq!(pod["initContainers"], of_helm["initContainers"]);
    // Only the sidecar has a token.
    assert_eq!(pod["automountServiceAccountToken"], false);
    let mounts = pod["containers"][0]["volumeMounts"].as_array().unwrap();
    assert_eq!(mounts.iter().map(|mount| mount["name"].as_str().unwrap()).collect::<Vec<_>>(), ["kubefan-socket"]);
}

/// The rows of the table: each value with its path, its default and the comment above it.
fn table(values: &str) -> String {
    let mut rows = String::from("| value | default | meaning |\n|---|---|---|\n");
    let mut path: Vec<(usize, &str)> = Vec::new();
    let mut meaning = String::new();
    let mut described = false;
    let mut lines = values.lines().peekable();
    while let Some(line) = lines.next() {
        let text = line.trim_start();
        let depth = line.len() - text.len();
        if let Some(comment) = text.strip_prefix('#') {
            let comment = comment.trim();
            match comment.strip_prefix("-- ") {
                Some(start) => {
                    meaning = start.to_owned();
                    described = true;
                }
                None if described => meaning = format!("{meaning} {comment}"),
                None => {}
            }
            continue;
        }
        let Some((key, value)) = text.split_once(':') else { continue };
        path.retain(|(outer, _)| *outer < depth);
        path.push((depth, key));
        let mut default = value.trim().to_owned();
        if default.is_empty() {
            let mut items = Vec::new();
            while let Some(item) = lines.next_if(|line| line.trim_start().starts_with("- ")) {
                items.push(item.trim_start().trim_start_matches("- "));
            }
            default = if items.is_empty() { String::new() } else { format!("[{}]", items.join(", ")) };
        }
        if !default.is_empty() || described {
            let name = path.iter().map(|(_, key)| *key).collect::<Vec<_>>().join(".");
            let default = if default.is_empty() { default } else { format!("`{default}`") };
            rows += &format!("| `{name}` | {default} | {} |\n", meaning.replace('|', "\\|"));
        }
        meaning = String::new();
        described = false;
    }
    rows
}

async fn the_readme_lists_the_values() {
    let chart = Path::new(CHART);
    let readme = fs::read_to_string(chart.join("README.md")).unwrap();
    let (before, rest) = readme.split_once("<!-- values -->\n").expect("README.md has the start of the table");
    let (_, after) = rest.split_once("<!-- end of values -->\n").expect("README.md has the end of the table");
    let rows = table(&fs::read_to_string(chart.join("values.yaml")).unwrap());
    assert!(rows.contains("| `cluster.replicas` | `2` |"), "{rows}");
    must_be(&chart.join("README.md"), &format!("{before}<!-- values -->\n{rows}<!-- end of values -->\n{after}"));
}

async fn the_chart_installs_the_rules_and_the_dashboard() {
    let args = ["--set=monitoring.prometheusRule.enabled=true,monitoring.dashboard.enabled=true"];
    let rendered = objects(&helm::template("kubefan", "kubefan", &args).await);
    let file = |name: &str| fs::read_to_string(Path::new(CHART).join("files").join(name)).unwrap();
    let rules: Value = serde_saphyr::from_str(&file("alerts.yaml")).unwrap();
    assert_eq!(named(&rendered, "PrometheusRule", "kubefan-alerts")["spec"], rules);
    let dashboard = &named(&rendered, "ConfigMap", "kubefan-dashboard")["data"]["kubefan.json"];
    assert_eq!(dashboard.as_str().unwrap().trim_end(), file("dashboard.json").trim_end());
}

/// As its documentation of annotations in Helm charts says.
async fn artifact_hub_understands_the_annotations() {
    let chart = fs::read_to_string(Path::new(CHART).join("Chart.yaml")).unwrap();
    let chart: Value = serde_saphyr::from_str(&chart).unwrap();
    for version in ["version", "appVersion"] {
        assert_eq!(chart[version], env!("CARGO_PKG_VERSION"));
    }
    let annotation = |name: &str| chart["annotations"][format!("artifacthub.io/{name}")].as_str().unwrap();
    assert_eq!((annotation("category"), annotation("license")), ("networking", env!("CARGO_PKG_LICENSE")));
    for flag in ["operator", "prerelease", "containsSecurityUpdates"] {
        assert!(["true", "false"].contains(&annotation(flag)), "{flag}");
    }
    let changes: Vec<Value> = serde_saphyr::from_str(annotation("changes")).unwrap();
    assert!(!changes.is_empty());
    for change in changes {
        let kind = change["kind"].as_str().unwrap();
        assert!(["added", "changed", "deprecated", "removed", "fixed", "security"].contains(&kind), "{change}");
        assert!(!change["description"].as_str().unwrap().is_empty(), "{change}");
    }
}
