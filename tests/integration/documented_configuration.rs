//! Every block of code on the pages is tried. This test lists the languages and the tests that try
//! them, and tries the YAML itself: values with the chart, objects with an apiserver, parts of
//! containers in a pod, kubefan's own configuration and flags with kubefan, Prometheus' with
//! promtool.
//!
//! A block that nothing can try stands after `<!-- excerpt: REASON -->`.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use reqwest::Method;
use serde_json::{Value, json};

use crate::harness::{
    apiserver::ApiServer,
    assets,
    helm::{self, CHART},
    kubefan::run,
    tests,
};

tests! {
    apiserver slow_release: every_documented_configuration_is_accepted;
    local slow_release: every_block_has_a_test_or_is_an_excerpt;
}

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The languages of blocks, and the tests that take them from all pages.
const LANGUAGES: [(&str, &str); 9] = [
    ("console", "tests/integration/documented_commands.rs"),
    ("go", "clients/go/integration/pages_test.go"),
    ("js", "clients/typescript/tests/integration/pages.test.ts"),
    ("python", "clients/python/tests/integration/test_pages.py"),
    ("rust", "tests/integration/examples/pages.rs"),
    ("sh", "tests/integration/documented_commands.rs"),
    ("toml", "tests/integration/examples/pages.rs"),
    ("ts", "clients/typescript/tests/integration/pages.test.ts"),
    ("yaml", "tests/integration/documented_configuration.rs"),
];
/// Output of a program, or a formula.
const TEXT: &str = "text";

/// YAML that other tests take from its page: the page, a key at its top, and the test. An empty key
/// is a list.
const ELSEWHERE: [(&str, &str, &str); 1] = [("docs/clients.md", "", "tests/integration/examples/pages.rs")];
/// Pages with other TOML than `examples/pages.rs` takes have none that is not an excerpt.
const TOML: [&str; 2] = ["docs/clients-rust.md", "docs/informers.md"];

/// A block of a page.
pub(crate) struct Block {
    /// The page and the line.
    pub(crate) place: String,
    pub(crate) page: String,
    pub(crate) language: String,
    pub(crate) text: String,
    /// The reason why nothing tries it.
    excerpt: Option<String>,
}

/// The pages for users: README.md, docs/ and the READMEs of the clients.
fn pages() -> Vec<String> {
    let mut found = vec!["README.md".to_owned()];
    let mut folders = vec![PathBuf::from("docs"), PathBuf::from("clients")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(Path::new(ROOT).join(&folder)).unwrap() {
            let entry = entry.unwrap();
            let path = folder.join(entry.file_name());
            // Links lead out of the source tree: to installed packages.
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file() && path.extension().is_some_and(|extension| extension == "md") {
                found.push(path.display().to_string());
            }
        }
    }
    found.sort();
    found
}

pub(crate) fn blocks() -> Vec<Block> {
    pages().iter().flat_map(|page| blocks_of(page)).collect()
}

pub(crate) fn blocks_of(page: &str) -> Vec<Block> {
    let text = fs::read_to_string(Path::new(ROOT).join(page)).unwrap();
    let mut found = Vec::new();
    let mut before = "";
    let mut lines = text.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        let place = format!("{page}:{}", index + 1);
        if let Some(language) = line.strip_prefix("```") {
            let text = lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```");
            found.push(Block {
                page: page.to_owned(),
                language: language.to_owned(),
                text: text.map(|line| format!("{line}\n")).collect(),
                excerpt: before
                    .strip_prefix("<!-- excerpt: ")
                    .and_then(|rest| rest.strip_suffix(" -->"))
                    .map(str::to_owned),
                place,
            });
        } else {
            // The tests of the languages read only fences at the start of a line.
            assert!(!line.trim_start().starts_with("```"), "{place}: write this block without indentation");
            assert!(!before.starts_with("<!-- excerpt: "), "{place}: the reason of an excerpt stands before its block");
        }
        before = line;
    }
    found
}

async fn every_block_has_a_test_or_is_an_excerpt() {
    let mut used = BTreeSet::new();
    for Block { place, page, language, excerpt, .. } in blocks() {
        if let Some(reason) = excerpt {
            assert!(reason.len() > 10, "{place}: say why nothing can try it");
            continue;
        }
        if language == TEXT {
            continue;
        }
        let test = LANGUAGES.iter().find(|(name, _)| *name == language);
        let (name, test) = test.unwrap_or_else(|| panic!("{place}: no test takes blocks of {language:?}"));
        assert!(Path::new(ROOT).join(test).exists(), "{place}: there is no {test}");
        assert!(language != "toml" || TOML.contains(&&*page), "{place}: no test takes this block");
        used.insert(*name);
    }
    assert_eq!(used, LANGUAGES.iter().map(|(name, _)| *name).collect(), "no page has a block of some languages");
}

async fn every_documented_configuration_is_accepted() {
    let api = ApiServer::shared().await;
    let values = fs::read_to_string(Path::new(CHART).join("values.yaml")).unwrap();
    let values: Value = serde_saphyr::from_str(&values).unwrap();
    let keys: BTreeSet<String> = values.as_object().unwrap().keys().cloned().collect();
    let mut forms = BTreeSet::new();
    for block in blocks().into_iter().filter(|block| block.language == "yaml" && block.excerpt.is_none()) {
        let Block { place, page, text, .. } = &block;
        let value: Value = serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{place}: {error}"));
        let has = |key: &str| !value[key].is_null();
        let found = value.as_object().map(|map| map.keys().cloned().collect::<BTreeSet<_>>()).unwrap_or_default();
        let form = if let Some((.., test)) =
            ELSEWHERE.iter().find(|(name, key, _)| name == page && (key.is_empty() || has(key)))
        {
            assert!(Path::new(ROOT).join(test).exists(), "{place}: there is no {test}");
            "elsewhere"
        } else if value["kind"] == "ServeConfiguration" {
            kubefan_reads(place, text).await;
            "configuration of kubefan"
        } else if value["kind"] == "Kustomization" {
            let file = fs::read_to_string(Path::new(ROOT).join("deploy/overlays/sidecar/kustomization.yaml")).unwrap();
            assert!(file.contains(text), "{place}: deploy/overlays/sidecar is otherwise");
            "kustomization"
        } else if has("kind") {
            is_accepted(&api, place, &value).await;
            "object"
        } else if has("scrape_configs") {
            promtool_reads(place, text);
            "configuration of Prometheus"
        } else if !found.is_empty() && found.is_subset(&keys) {
            the_chart_takes(&api, place, page, text).await;
            "values"
        } else if ["args", "env", "containers"].iter().any(|key| has(key)) {
            is_accepted(&api, place, &pod(&value)).await;
            "part of a pod"
        } else {
            panic!("{place}: nothing here can try this block; try it, or mark it as an excerpt");
        };
        forms.insert(form);
    }
    let all = [
        "configuration of Prometheus",
        "configuration of kubefan",
        "elsewhere",
        "kustomization",
        "object",
        "part of a pod",
        "values",
    ];
    assert_eq!(forms, all.into(), "these forms are on the pages");
}

/// A pod with this part: of a pod, or of a container.
fn pod(part: &Value) -> Value {
    let mut spec = if part["containers"].is_null() { json!({ "containers": [part] }) } else { part.clone() };
    for container in spec["containers"].as_array_mut().expect("a list") {
        for key in ["name", "image"] {
            if container[key].is_null() {
                container[key] = json!("program");
            }
        }
    }
    json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "program" }, "spec": spec })
}

/// An apiserver knows every field, and kubefan every flag of its containers.
async fn is_accepted(api: &ApiServer, place: &str, object: &Value) {
    if let Some(namespace) = object["metadata"]["namespace"].as_str() {
        make_namespace(api, namespace).await;
    }
    let file = file_of(&object.to_string());
    let applied =
        api.kubectl(&["apply", "--dry-run=server", "--validate=strict", "-f", file.path().to_str().unwrap()]).await;
    assert!(applied.trim_end().ends_with("(server dry run)"), "{place}: {applied}");
    for container in object["spec"]["template"]["spec"]["containers"].as_array().into_iter().flatten() {
        if container["image"].as_str().is_some_and(|image| image.contains("/kubefan:")) {
            let args: Vec<String> = serde_json::from_value(container["args"].clone()).unwrap();
            let args: Vec<&str> = args.iter().map(String::as_str).chain(["--help"]).collect();
            let ran = run(&args).await;
            assert_eq!(ran.code, Some(0), "{place}: {ran:?}");
        }
    }
}

async fn make_namespace(api: &ApiServer, name: &str) {
    let namespace = json!({ "metadata": { "name": name } });
    let (status, answer) =
        api.request(Method::POST, "/api/v1/namespaces", Some(("application/json", &namespace))).await;
    assert!(status.is_success() || status == reqwest::StatusCode::CONFLICT, "{answer}");
}

/// The chart renders it, and an apiserver accepts the objects that the pages of deployments
/// install.
async fn the_chart_takes(api: &ApiServer, place: &str, page: &str, text: &str) {
    let file = file_of(text);
    let rendered = helm::template("kubefan", "kubefan", &["-f", file.path().to_str().unwrap()]).await;
    let objects = helm::objects(&rendered);
    let daemon_sets = objects.iter().filter(|object| object["kind"] == "DaemonSet").count();
    assert_eq!(daemon_sets > 0, text.contains("\nnode:"), "{place}");
    if !page.starts_with("docs/deployments/") {
        return;
    }
    for object in &objects {
        if let Some(namespace) = object["metadata"]["namespace"].as_str() {
            make_namespace(api, namespace).await;
        }
    }
    let file = file_of(&rendered);
    let args = ["apply", "--dry-run=server", "--validate=strict", "-f", file.path().to_str().unwrap()];
    let applied = api.kubectl(&args).await;
    assert_eq!(applied.matches("(server dry run)").count(), objects.len(), "{place}: {applied}");
}

/// Checks that kubefan reads a file. A thing that the machine lacks, such as the certificate, is
/// another finding. A file without an address fits any: it is read with callers known.
async fn kubefan_reads(place: &str, text: &str) {
    let file = file_of(text);
    let args = ["check", "--config", file.path().to_str().unwrap()];
    let known = ["--listen=unix:kubefan.sock", "--access=authorized"];
    let more = if text.contains("\nlisten: ") { &[][..] } else { &known };
    let ran = run(&[&args[..], more].concat()).await;
    assert!(ran.stdout.contains("  ok       flags, environment and file: "), "{place}: {ran:?}");
}

fn promtool_reads(place: &str, text: &str) {
    // The files that it names are those of a container.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prometheus.yaml");
    fs::write(&file, text).unwrap();
    let mut promtool = Command::new(assets::prometheus().join("promtool"));
    let checked = promtool.args(["check", "config", "--syntax-only"]).arg(&file).output().unwrap();
    assert!(checked.status.success(), "{place}: {checked:?}");
}

fn file_of(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
    fs::write(file.path(), text).unwrap();
    file
}
