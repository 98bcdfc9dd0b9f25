use std::{fs, os::unix::fs::symlink, path::Path, sync::Mutex};

use kubefan_telemetry::metrics::Metrics;
use tempfile::TempDir;

use super::*;
use crate::config::ServeOptions;

const HEADER: &str = "apiVersion: kubefan.dev/v1alpha1\nkind: ServeConfiguration\nresources: [pods]\n";
const DENY: &str = "modes: [{resources: [pods], mode: Deny}]\n";

fn text(rest: &str) -> String {
    format!("{HEADER}{rest}")
}

fn watched(path: &Path) -> WatchedFile {
    WatchedFile::read(ConfigFile::new(path.to_owned(), ServeOptions::default())).unwrap()
}

fn steps(looks: &[(Seen, bool)]) -> Vec<String> {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("kubefan.yaml");
    fs::write(&path, text("")).unwrap();
    let mut file = watched(&path);
    let step = |(seen, asked): &(Seen, bool)| match file.step(seen.clone(), *asked) {
        FileChange::Apply(configured, changed) => {
            file.in_force = *configured;
            format!("apply {}", changed.join(","))
        }
        FileChange::Refuse(why) => format!("refuse {}", why.rsplit('/').next().unwrap()),
        other => format!("{other:?}").to_lowercase(),
    };
    looks.iter().map(step).collect()
}

#[test]
fn a_content_counts_when_two_looks_have_found_it() {
    let old = Ok(text(""));
    let new = Ok(text(DENY));
    let half = Ok(text("modes: []\n"));
    let by_itself = |seen: &Seen| (seen.clone(), false);
    let looks = [&old, &half, &new, &new, &new, &old, &new, &old, &old].map(by_itself);
    assert_eq!(steps(&looks), ["wait", "wait", "wait", "apply modes", "wait", "wait", "wait", "wait", "apply modes"]);
}

#[test]
fn a_request_to_reload_is_answered_at_once() {
    let asked = |rest: &str| (Ok(text(rest)), true);
    let refused = "refuse kubefan.yaml: line 4: unknown key \"mode\"; did you mean \"modes\"?";
    assert_eq!(
        steps(&[
            asked(""),
            asked(DENY),
            asked("mode: x\n"),
            asked("mode: x\n"),
            (Ok(text("mode: x\n")), false),
            asked(DENY)
        ]),
        ["same", "apply modes", refused, refused, "wait", "restored"]
    );
}

#[test]
fn a_setting_that_needs_a_restart_refuses_the_whole_file() {
    let both = format!("{DENY}limits:\n  passthroughMax: 7\nlisten: 127.0.0.1:1\n");
    assert_eq!(
        steps(&[(Ok(text(&both)), true), (Ok(text("")), true)]),
        [
            "refuse kubefan.yaml: listen, limits.passthroughMax cannot be changed without a restart; nothing of the file is applied: \
             restart kubefan, or undo this change",
            "restored"
        ]
    );
}

/// The applied changes, and the gauges, while a file is followed.
struct Followed {
    applied: Arc<Mutex<Vec<usize>>>,
    asked: Arc<Notify>,
    metrics: Metrics,
}

impl Followed {
    fn start(path: &Path) -> Self {
        let metrics = Metrics::new(prometheus::Registry::new()).unwrap();
        let applied = Arc::<Mutex<Vec<usize>>>::default();
        let asked = Arc::new(Notify::new());
        let rules = applied.clone();
        let reload = metrics.reload().clone();
        reload.started(1.0);
        let apply = move |_: &ServeConfig, config: &ServeConfig| {
            rules.lock().unwrap().push(config.modes.modes.rules().len());
        };
        tokio::spawn(watched(path).follow(asked.clone(), reload, || 7.0, apply));
        Self { applied, asked, metrics }
    }

    fn value(&self, name: &str) -> f64 {
        let families = self.metrics.registry().gather();
        families.iter().find(|family| family.name() == name).unwrap().get_metric()[0].get_gauge().get_value()
    }

    /// Waits until the last reload had this result, and as many changes are applied.
    async fn until(&self, successful: f64, applied: &[usize]) {
        let is_there = || {
            self.value("kubefan_config_last_reload_successful") == successful
                && *self.applied.lock().unwrap() == applied
        };
        // Each read is a blocking task, so it needs real time as well.
        while !is_there() {
            tokio::time::sleep(LOOK_INTERVAL / 2).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_file_that_changes_is_applied_or_refused_and_comes_back() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("kubefan.yaml");
    fs::write(&path, text("")).unwrap();
    let followed = Followed::start(&path);
    fs::write(&path, text(DENY)).unwrap();
    followed.until(1.0, &[1]).await;
    assert_eq!(followed.value("kubefan_config_last_reload_success_timestamp_seconds"), 7.0);
    fs::write(&path, text("modes: [{resources: [pods]}]\n")).unwrap();
    followed.until(0.0, &[1]).await;
    fs::write(&path, text(DENY)).unwrap();
    followed.until(1.0, &[1]).await;
    fs::remove_file(&path).unwrap();
    followed.asked.notify_one();
    followed.until(0.0, &[1]).await;
    fs::write(&path, text("")).unwrap();
    followed.until(1.0, &[1, 0]).await;
}

#[tokio::test(start_paused = true)]
async fn a_config_map_that_is_swapped_by_its_links_is_noticed() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    for (version, rest) in [("..1", ""), ("..2", DENY)] {
        fs::create_dir(at(version)).unwrap();
        fs::write(at(version).join("kubefan.yaml"), text(rest)).unwrap();
    }
    symlink("..1", at("..data")).unwrap();
    symlink("..data/kubefan.yaml", at("kubefan.yaml")).unwrap();
    let followed = Followed::start(&at("kubefan.yaml"));
    symlink("..2", at("..tmp")).unwrap();
    fs::rename(at("..tmp"), at("..data")).unwrap();
    followed.until(1.0, &[1]).await;
}
