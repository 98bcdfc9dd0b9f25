//! Prometheus discovers targets of all roles that read objects of their own.

use super::{Program, Server, Setting, View, compare, pages};
use crate::harness::{prometheus::Prometheus, tests};

tests! {
    programs slow_programs: prometheus_discovers_the_same_targets_through_kubefan;
}

const PAGE: &str = "prometheus.md";
/// Each role shows the kind of objects after which it is named.
const ROLES: [&str; 5] = ["pod", "service", "endpointslice", "node", "ingress"];

async fn prometheus_discovers_the_same_targets_through_kubefan() {
    let mut setting = Setting::start(PAGE).await;
    let [one, all] = compare("Prometheus", &mut setting, &ROLES, Prometheus::of).await;
    all.assert_nothing_was_proved(&one);
}

impl Prometheus {
    /// One with the page's environment, and its job for each role. Relabeling drops every target,
    /// so none is scraped.
    async fn of(_: &Setting, server: &Server) -> Prometheus {
        let (page, _) = pages::yaml(PAGE, "scrape_configs");
        let (head, job) = page.split_once("\n- job_name: pods\n").expect("the page has a job");
        let jobs = ROLES.map(|role| {
            let job = job.replace("role: pod", &format!("role: {role}"));
            format!("\n- job_name: {role}\n  relabel_configs: [{{ action: drop }}]\n{job}")
        });
        let config = server.configured(&(head.to_owned() + &jobs.concat()));
        let (_, container) = pages::yaml(PAGE, "env");
        let variables = container["env"].as_array().unwrap().iter().map(|variable| {
            let text = |key: &str| variable[key].as_str().unwrap().to_owned();
            (text("name"), text("value"))
        });
        Prometheus::start_with(&config, "", &variables.collect::<Vec<_>>()).await
    }
}

impl Program for Prometheus {
    async fn view(&self) -> Option<View> {
        Some(self.dropped_targets().await.iter().map(ToString::to_string).collect())
    }

    fn marks(view: &View) -> View {
        let targets = view.iter().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
        let mark = |target: serde_json::Value| {
            let kind = target["job"].as_str()?.to_owned();
            let label = |name: String| target[format!("__meta_kubernetes_{name}")].as_str().map(str::to_owned);
            let change = label(format!("{kind}_label_change"))?;
            let namespace = label("namespace".to_owned()).unwrap_or_default();
            Some(format!("{kind} {namespace} {} {change}", label(format!("{kind}_name"))?))
        };
        targets.filter_map(mark).collect()
    }

    fn log(&self) -> String {
        self.printed()
    }
}
