//! The alerts, their runbook and the dashboard in the chart's `files`: they name metrics that
//! exist, promtool's unit tests pass, and every alert has an entry.

use std::{collections::BTreeSet, process::Command};

use serde_json::Value;

use crate::{
    harness::{assets, tests},
    metrics::documented,
};

tests! {
    apiserver slow_deploy: promtool_accepts_the_rules_and_their_unit_tests_pass;
    local slow_deploy: rules_and_dashboard_name_metrics_that_exist, each_alert_has_a_runbook_entry_and_a_unit_test,
        every_panel_says_what_it_shows;
}

pub(crate) const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/helm/kubefan/files");

pub(crate) fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The panels with queries.
pub(crate) fn panels() -> Vec<Value> {
    let dashboard: Value = serde_json::from_str(&read(&format!("{FOLDER}/dashboard.json"))).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    panels.iter().filter(|panel| panel["type"] != "row").cloned().collect()
}

/// The names of the alerts.
pub(crate) fn alerts() -> BTreeSet<String> {
    let rules = read(&format!("{FOLDER}/alerts.yaml"));
    rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).map(str::to_owned).collect()
}

/// The words of a text that are names of kubefan's metrics.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words.filter(|word| word.starts_with("kubefan_") || word.starts_with("process_")).map(str::to_owned).collect()
}

async fn rules_and_dashboard_name_metrics_that_exist() {
    let documented = documented();
    let named = ["alerts.yaml", "dashboard.json"].map(|file| metrics_in(&read(&format!("{FOLDER}/{file}"))));
    for name in named.iter().flatten() {
        let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
        assert!(documented.contains_key(base), "docs/metrics.md does not have {base}");
    }
    let missing: Vec<_> =
        documented.keys().filter(|name| name.starts_with("kubefan_") && !metrics_shown(&named[1], name)).collect();
    assert_eq!(missing, Vec::<&String>::new(), "the dashboard shows every metric of kubefan");
}

fn metrics_shown(shown: &BTreeSet<String>, name: &str) -> bool {
    shown.contains(name) || shown.contains(&format!("{name}_bucket"))
}

async fn each_alert_has_a_runbook_entry_and_a_unit_test() {
    let alerts = alerts();
    let runbook = read(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/runbook.md"));
    let entries = runbook.lines().filter_map(|line| line.strip_prefix("### ")).map(str::to_owned);
    assert_eq!(entries.collect::<BTreeSet<_>>(), alerts);
    let rules = read(&format!("{FOLDER}/alerts.yaml"));
    let urls: BTreeSet<_> = rules.lines().filter_map(|line| line.trim().strip_prefix("runbook_url: ")).collect();
    let anchors: BTreeSet<_> = urls.iter().map(|url| url.rsplit_once('#').unwrap().1.to_owned()).collect();
    assert_eq!(anchors, alerts.iter().map(|alert| alert.to_lowercase()).collect());
    let pages: BTreeSet<_> = urls.iter().map(|url| url.rsplit_once('#').unwrap().0).collect();
    assert_eq!(pages.len(), 1, "{pages:?}");
    let tested = read(&format!("{FOLDER}/alerts_test.yaml"));
    let tested = tested.lines().filter_map(|line| line.trim().strip_prefix("- name: ")).map(str::to_owned);
    assert_eq!(tested.collect::<BTreeSet<_>>(), alerts);
}

async fn every_panel_says_what_it_shows() {
    let panels = panels();
    assert!(panels.len() > 30, "{}", panels.len());
    for panel in panels {
        let text = |pointer| panel.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        assert!(!text("/title").is_empty() && text("/description").ends_with('.'), "{panel}");
        assert!(!text("/fieldConfig/defaults/unit").is_empty(), "{panel}");
        for target in panel["targets"].as_array().unwrap() {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{panel}");
        }
    }
}

async fn promtool_accepts_the_rules_and_their_unit_tests_pass() {
    let promtool = assets::prometheus().join("promtool");
    for arguments in [["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]] {
        let output = Command::new(&promtool).args(arguments).current_dir(FOLDER).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{arguments:?}: {}{}", text(&output.stdout), text(&output.stderr));
    }
}
