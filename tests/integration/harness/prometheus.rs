//! A real Prometheus: it scrapes each second, evaluates rules, and answers queries. It stops when
//! dropped.

use std::{collections::BTreeMap, fs, net::SocketAddr, path::PathBuf, process::Command};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    assets,
    process::{Process, free_port},
    wait,
};

/// A target of a job, under the label `instance`.
pub(crate) struct Target {
    pub(crate) job: &'static str,
    pub(crate) instance: &'static str,
    pub(crate) addr: SocketAddr,
}

/// A running Prometheus.
pub(crate) struct Prometheus {
    process: Process,
    url: String,
    http: reqwest::Client,
    _dir: TempDir,
}

impl Prometheus {
    /// Starts one with these rules, a text in YAML, and waits until it is ready.
    pub(crate) async fn start(rules: &str, targets: &[Target]) -> Prometheus {
        let mut jobs = BTreeMap::<_, Vec<Value>>::new();
        for Target { job, instance, addr } in targets {
            let labels = json!({ "instance": instance });
            jobs.entry(*job).or_default().push(json!({ "targets": [addr.to_string()], "labels": labels }));
        }
        let jobs = jobs.iter().map(|(job, targets)| json!({ "job_name": job, "static_configs": targets }));
        // JSON is YAML.
        let config = json!({
            "global": { "scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s" },
            "rule_files": ["rules.yaml"],
            "scrape_configs": jobs.collect::<Vec<_>>(),
        });
        Prometheus::start_with(&config.to_string(), rules, &[]).await
    }

    /// Starts one with a configuration, which may name the file `rules.yaml` with these rules, and
    /// with environment variables.
    pub(crate) async fn start_with(config: &str, rules: &str, variables: &[(String, String)]) -> Prometheus {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = |name: &str| -> PathBuf { dir.path().join(name) };
        fs::write(path("prometheus.yaml"), config).unwrap();
        fs::write(path("rules.yaml"), rules).unwrap();
        let address = format!("127.0.0.1:{}", free_port());
        let mut command = Command::new(assets::prometheus().join("prometheus"));
        command.envs(variables.iter().cloned());
        command.args([
            format!("--config.file={}", path("prometheus.yaml").display()),
            format!("--storage.tsdb.path={}", path("data").display()),
            format!("--web.listen-address={address}"),
            "--log.level=warn".to_owned(),
        ]);
        let process = Process::spawn("prometheus", &mut command, &path("log"));
        let http = reqwest::Client::builder().no_proxy().build().unwrap();
        let prometheus = Prometheus { process, url: format!("http://{address}"), http, _dir: dir };
        let ready = wait::try_until(wait::SOON, || async {
            let answer = prometheus.http.get(format!("{}/-/ready", prometheus.url)).send().await.ok()?;
            answer.status().is_success().then_some(())
        });
        assert!(ready.await.is_some(), "Prometheus is not ready:\n{}", prometheus.process.log());
        prometheus
    }

    /// Returns its output.
    pub(crate) fn printed(&self) -> String {
        self.process.log()
    }

    /// The labels of the targets that relabeling dropped, as discovered.
    pub(crate) async fn dropped_targets(&self) -> Vec<Value> {
        let targets = self.get("targets", &[("state", "dropped")]).await;
        targets["droppedTargets"].as_array().unwrap().iter().map(|target| target["discoveredLabels"].clone()).collect()
    }

    /// The alerts that fire now: their labels, `alertname` included.
    pub(crate) async fn firing(&self) -> Vec<Value> {
        let alerts = self.get("alerts", &[]).await;
        let alerts = alerts["alerts"].as_array().unwrap().iter();
        alerts.filter(|alert| alert["state"] == "firing").map(|alert| alert["labels"].clone()).collect()
    }

    /// The value of the only series of an expression, if there is one now.
    pub(crate) async fn value(&self, expression: &str) -> Option<f64> {
        let data = self.get("query", &[("query", expression)]).await;
        data["result"][0]["value"][1].as_str()?.parse().ok()
    }

    /// The series of an expression in the last `seconds`, each with its values.
    pub(crate) async fn series(&self, expression: &str, seconds: u64) -> Vec<Value> {
        let now: f64 = self.value("vector(time())").await.expect("Prometheus knows the time");
        let start = (now - seconds as f64).to_string();
        let end = now.to_string();
        let query = [("query", expression), ("start", &*start), ("end", &*end), ("step", "5")];
        self.get("query_range", &query).await["result"].as_array().unwrap().clone()
    }

    async fn get(&self, path: &str, query: &[(&str, &str)]) -> Value {
        let mut url = reqwest::Url::parse(&format!("{}/api/v1/{path}", self.url)).unwrap();
        url.query_pairs_mut().extend_pairs(query);
        let answer = self.http.get(url).send().await.expect("Prometheus answers").text().await.unwrap();
        let answer: Value = serde_json::from_str(&answer).expect("JSON");
        assert_eq!(answer["status"], "success", "{query:?}: {answer}");
        answer["data"].clone()
    }
}
