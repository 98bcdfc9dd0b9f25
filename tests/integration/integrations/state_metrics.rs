//! kube-state-metrics with all resources that it watches by default.

use std::process::Command;

use super::{Program, Server, Setting, View, compare, pages};
use crate::harness::{
    assets,
    process::{Process, free_port},
    tests,
};

tests! {
    programs slow_programs: kube_state_metrics_serves_the_same_metrics_through_kubefan;
}

const PAGE: &str = "kube-state-metrics.md";
const KINDS: [&str; 5] = ["pod", "service", "endpointslice", "node", "ingress"];
/// Shows the labels with the numbers of changes.
const LABELS: &str = "--metric-labels-allowlist=pods=[change],services=[change],endpointslices=[change],\
                      nodes=[change],ingresses=[change]";

async fn kube_state_metrics_serves_the_same_metrics_through_kubefan() {
    let mut setting = Setting::start(PAGE).await;
    let [one, all] = compare("kube-state-metrics", &mut setting, &KINDS, StateMetrics::start).await;
    all.assert_nothing_was_proved(&one);
}

struct StateMetrics {
    process: Process,
    port: u16,
}

impl StateMetrics {
    async fn start(setting: &Setting, server: &Server) -> StateMetrics {
        let port = free_port();
        let own = free_port();
        let (_, page) = pages::yaml(PAGE, "args");
        let args = page["args"].as_array().unwrap().iter().map(|arg| server.configured(arg.as_str().unwrap()));
        let mut command = Command::new(assets::kube_state_metrics());
        command.args(args).args(["--host=127.0.0.1", "--telemetry-host=127.0.0.1", LABELS]);
        command.args([format!("--port={port}"), format!("--telemetry-port={own}")]);
        StateMetrics {
            process: Process::spawn("kube-state-metrics", &mut command, &setting.file("state-metrics")),
            port,
        }
    }
}

impl Program for StateMetrics {
    /// Metrics of kube-state-metrics without those of leases, which the apiserver renews all the
    /// time.
    async fn view(&self) -> Option<View> {
        let answer = reqwest::get(format!("http://127.0.0.1:{}/metrics", self.port)).await.ok()?;
        let text = answer.text().await.ok()?;
        let ours = |line: &&str| line.starts_with("kube_") && !line.starts_with("kube_lease_");
        Some(text.lines().filter(ours).map(str::to_owned).collect())
    }

    fn marks(view: &View) -> View {
        let mark = |line: &String| {
            let (kind, labels) = line.strip_prefix("kube_")?.split_once("_labels{")?;
            let label = |name: &str| {
                let label = labels.split(',').find_map(|label| label.strip_prefix(name)?.strip_prefix("=\""));
                label.and_then(|value| value.split('"').next())
            };
            let namespace = label("namespace").unwrap_or_default();
            Some(format!("{kind} {namespace} {} {}", label(kind)?, label("label_change")?))
        };
        view.iter().filter_map(mark).collect()
    }

    fn log(&self) -> String {
        self.process.log()
    }
}
