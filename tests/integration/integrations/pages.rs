//! Takes the configuration of the programs from docs/integrations, so that the pages show the
//! tested configuration.

use std::{fs, path::Path};

use serde_json::Value;

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/integrations");
const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The address of the server, its CA and the token, as the pages write them.
pub(super) const SERVER: &str = "https://kubefan.kubefan.svc";
pub(super) const CA_FILE: &str = "/etc/kubefan/ca.crt";
pub(super) const KUBECONFIG: &str = "/etc/kubefan/kubeconfig";
pub(super) const TOKEN_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

/// The blocks of a language on a page.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let path = Path::new(DOCS).join(page);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let parts: Vec<&str> = text.split("```").collect();
    let blocks = parts.iter().skip(1).step_by(2).filter_map(|block| block.strip_prefix(language)?.strip_prefix('\n'));
    blocks.map(str::to_owned).collect()
}

/// The YAML of a page that has this key at its top, as text and parsed.
pub(super) fn yaml(page: &str, key: &str) -> (String, Value) {
    let parsed = blocks(page, "yaml").into_iter().map(|block| {
        let value = serde_saphyr::from_str(&block).unwrap_or_else(|error| panic!("{page}: {error}:\n{block}"));
        (block, value)
    });
    let mut found = parsed.filter(|(_, value): &(String, Value)| !value[key].is_null());
    found.next().unwrap_or_else(|| panic!("{page} has no YAML with {key}"))
}

/// The kubeconfig of the pages.
pub(super) fn kubeconfig() -> String {
    let (_, map) = yaml("README.md", "data");
    map["data"]["kubeconfig"].as_str().expect("the ConfigMap has a kubeconfig").to_owned()
}

/// The `resources` that a page lets the chart cache, as flags take them.
pub(super) fn resources(page: &str) -> String {
    let (_, values) = yaml(page, "resources");
    let flags = values["resources"].as_array().expect("a list").iter().map(|entry| {
        let part = |before: &str, key: &str| match entry[key].as_str() {
            None | Some("") => String::new(),
            Some(value) => format!("{before}{value}"),
        };
        part("", "name") + &part(".", "group") + &part("=", "encoding")
    });
    flags.collect::<Vec<_>>().join(",")
}

/// Asserts that a page shows a part of a program: its blocks of `language` are all in the file.
#[track_caller]
pub(super) fn assert_shows(page: &str, language: &str, file: &str) {
    let source = fs::read_to_string(Path::new(ROOT).join(file)).unwrap();
    let lines = |text: &str| text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n");
    let source = lines(&source);
    let blocks = blocks(page, language);
    assert!(!blocks.is_empty(), "{page} shows nothing of {file}");
    for block in blocks {
        assert!(source.contains(&lines(&block)), "{file} has no\n{block}");
    }
}
