//! Runs the real helm on the chart in `deploy/helm`.

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
};

use serde_json::Value;

use super::assets;

/// The chart.
pub(crate) const CHART: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/helm/kubefan");

/// Runs helm: (whether it succeeded, stdout, stderr). Without a kubeconfig it finds no cluster.
pub(crate) async fn run(kubeconfig: Option<&Path>, args: &[&str]) -> (bool, String, String) {
    static HELM: OnceLock<PathBuf> = OnceLock::new();
    let home = assets::target_dir().join("tmp/helm");
    let output = tokio::process::Command::new(HELM.get_or_init(assets::helm))
        .env_clear()
        .env("HOME", &home)
        .env("KUBECONFIG", kubeconfig.unwrap_or(Path::new("/nonexistent")))
        .args(args)
        .kill_on_drop(true)
        .output()
        .await
        .expect("helm starts");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

/// Runs helm and returns its output. Panics if it fails.
pub(crate) async fn helm(kubeconfig: Option<&Path>, args: &[&str]) -> String {
    let (ok, stdout, stderr) = run(kubeconfig, args).await;
    assert!(ok, "helm {}: {stderr}{stdout}", args.join(" "));
    stdout
}

/// The manifests of the chart.
pub(crate) async fn template(release: &str, namespace: &str, args: &[&str]) -> String {
    helm(None, &[&["template", release, CHART, "--namespace", namespace], args].concat()).await
}

/// The objects in a file of several documents.
pub(crate) fn objects(yaml: &str) -> Vec<Value> {
    let documents = yaml.split("\n---\n").map(|text| text.strip_prefix("---\n").unwrap_or(text));
    let read =
        |text: &str| -> Value { serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}:\n{text}")) };
    documents.filter(|text| text.lines().any(|line| line.starts_with("kind:"))).map(read).collect()
}

/// The object of this kind and name.
pub(crate) fn named<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let found = objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    found.unwrap_or_else(|| panic!("no {kind} {name}"))
}
