//! An operator with controller-runtime, in tests/operator. For each Service it writes a ConfigMap
//! with the addresses of its pods. The copies of a server elect a leader; all of them watch.

use std::process::Command;

use serde_json::json;

use super::{Program, Server, Setting, View, compare, pages};
use crate::harness::{apiserver::ApiServer, assets, process::Process, tests};

tests! {
    programs slow_programs: an_operator_that_reads_through_kubefan_writes_the_same,
        an_operator_with_kubefan_as_its_server_writes_the_same;
    local: the_page_of_controller_runtime_shows_the_operator;
}

const PAGE: &str = "controller-runtime.md";
const FILE: &str = "tests/operator/main.go";

async fn an_operator_that_reads_through_kubefan_writes_the_same() {
    run("an operator that writes to the apiserver", true).await;
}

async fn an_operator_with_kubefan_as_its_server_writes_the_same() {
    run("an operator that also writes through kubefan", false).await;
}

async fn the_page_of_controller_runtime_shows_the_operator() {
    pages::assert_shows(PAGE, "go", FILE);
}

async fn run(title: &str, writes_direct: bool) {
    let program = assets::operator();
    let mut setting = Setting::start(PAGE).await;
    for server in ["direct", "through"] {
        setting.world.api.create("/api/v1/namespaces", &json!({ "metadata": { "name": output(server) } })).await;
    }
    compare(title, &mut setting, &["pod", "service"], async |setting: &Setting, server: &Server| {
        let mut command = Command::new(&program);
        // The token of the account whose requests are counted, at either server.
        let api = &setting.world.api;
        let writes = if writes_direct {
            api.kubeconfig_to_with_token(api.url(), &server.token)
        } else {
            server.kubeconfig.clone()
        };
        command.args(["-agent", "operator", "-leader", "operator", "-output", &output(server.account)]);
        command.arg("-server").arg(writes).arg("-reads").arg(&server.kubeconfig);
        let process = Process::spawn("the operator", &mut command, &setting.file("operator"));
        Operator { process, api: api.handle(), output: output(server.account) }
    })
    .await;
}

fn output(account: &str) -> String {
    format!("output-{account}")
}

struct Operator {
    process: Process,
    api: ApiServer,
    output: String,
}

impl Program for Operator {
    /// The ConfigMaps, once this copy has the state too.
    async fn view(&self) -> Option<View> {
        if !self.process.log().contains("caches synced") {
            return None;
        }
        let list = self.api.get_json(&format!("/api/v1/namespaces/{}/configmaps", self.output)).await;
        let lines = list["items"].as_array().unwrap().iter().map(|item| {
            let parts = (&item["metadata"]["name"], &item["metadata"]["annotations"], &item["data"]);
            json!(parts).to_string()
        });
        Some(lines.collect())
    }

    fn marks(view: &View) -> View {
        let mut marks = View::new();
        for line in view {
            let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
            let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
            let [namespace, name] = ["namespace", "name"].map(|key| text(&line[1][format!("operator.example/{key}")]));
            for (key, value) in line[2].as_object().into_iter().flatten() {
                let value = text(value);
                // A Service of the apiserver's own has no change.
                if value.is_empty() {
                    continue;
                }
                marks.insert(match value.split_once(' ') {
                    Some((_, change)) => format!("pod {namespace} {key} {change}"),
                    None => format!("service {namespace} {name} {value}"),
                });
            }
        }
        marks
    }

    fn log(&self) -> String {
        self.process.log()
    }
}
