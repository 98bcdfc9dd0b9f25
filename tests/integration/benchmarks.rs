//! The figures of docs/benchmarks.md that need a real kube-apiserver. They are printed and not
//! checked, because they depend on the machine. `benches/run-all` runs them.

use std::{fs, path::Path};

use kubefan_sim::workload::{Workload, WorkloadOptions};

use crate::{
    clients::{Both, kubefan_at},
    harness::{
        apiserver::{ApiServer, Options},
        kubefan, load, tests,
    },
    quiet::{
        Table,
        cluster::{Background, write},
        timed,
        upstream_requests::objects_sent,
    },
};

tests! {
    apiserver large: subscribers_over_grpc_beside_kube_apiserver, clients_over_http_beside_kube_apiserver,
        selectors_and_agents_beside_kube_apiserver, kubectl_beside_kube_apiserver;
}

/// The clock ticks of `/proc/PID/stat` in a second, the same on all of Linux' usual architectures.
const TICKS_PER_SECOND: f64 = 100.0;
/// Changes a second while kubectl lists.
const BUSY_RATE: u32 = 20;

/// Runs these commands of `kubefan bench` beside an apiserver, and prints their tables.
async fn measure(commands: &[&str]) {
    let api = ApiServer::start(Options::default()).await;
    let kubeconfig = api.kubeconfig();
    let pid = api.pid().to_string();
    let cluster = ["--kubeconfig", kubeconfig.to_str().unwrap(), "--apiserver-pid", &pid, "--tls"];
    for command in commands {
        let mut bench = tokio::process::Command::new(kubefan::binary());
        bench.arg("bench").args(command.split_whitespace()).args(cluster).kill_on_drop(true);
        let ran = bench.output().await.unwrap();
        assert!(ran.status.success(), "{command}: {}", String::from_utf8_lossy(&ran.stderr));
        println!("\nkubefan bench {command}\n{}", String::from_utf8_lossy(&ran.stdout));
    }
}

async fn subscribers_over_grpc_beside_kube_apiserver() {
    measure(&[
        "fanout --batch 32 --objects 500 --duration 3s --runs 5",
        "fanout --batch 32 --objects 500 --duration 3s --runs 5 --encoding zstd-delta",
        "paced --rate 20 --objects 500 --duration 3s --runs 5",
        "paced --rate 20 --objects 500 --duration 3s --runs 5 --encoding zstd-delta",
        "snapshot --objects 2000 --clients 20 --runs 5",
        "snapshot --objects 2000 --clients 20 --runs 5 --encoding zstd",
    ])
    .await;
}

async fn clients_over_http_beside_kube_apiserver() {
    measure(&[
        "fanout --batch 32 --objects 500 --duration 3s --runs 5 --protocol http",
        "paced --rate 20 --objects 500 --duration 3s --runs 5 --protocol http",
        "snapshot --objects 2000 --clients 20 --runs 5 --protocol http",
        "list --objects 2000 --clients 20 --runs 5 --protocol http",
        "fanout --batch 32 --objects 500 --duration 3s --runs 5 --protocol http --encoding gzip",
        "snapshot --objects 2000 --clients 20 --runs 5 --protocol http --encoding gzip",
        "snapshot --objects 2000 --clients 20 --runs 5 --protocol http --encoding protobuf-gzip",
        "list --objects 2000 --clients 20 --runs 5 --protocol http --encoding gzip",
    ])
    .await;
}

async fn selectors_and_agents_beside_kube_apiserver() {
    measure(&["selectors --objects 1000 --runs 5", "agents --nodes 500 --objects 10000 --runs 1"]).await;
}

async fn kubectl_beside_kube_apiserver() {
    let api = ApiServer::start(Options::default()).await;
    let mut workload = Workload::new(11, WorkloadOptions::default());
    load::populate(&api, &mut workload).await;
    let both = Both::start(api, &["--resource", "pods"]).await;
    let with_tables = kubefan_at(&both.api, "127.0.0.1:0", &["--resource", "pods", "--cache-tables"]).await;
    let pods = both.api.get_json("/api/v1/namespaces/team-0/pods?limit=1").await;
    let busy_path =
        format!("/api/v1/namespaces/team-0/pods/{}", pods["items"][0]["metadata"]["name"].as_str().unwrap());
    let columns = ["command", "resource", "through", "s (median, range)", "CPU of the apiserver, s", "objects sent"];
    let mut table = Table::new("kubectl with 10,000 pods", &columns);
    for (command, pairs) in [(&["get", "pods", "-A"][..], 5), (&["get", "pods", "-A", "-o", "json"], 3)] {
        for is_busy in [false, true] {
            let path = busy_path.clone();
            let writes = is_busy.then(|| write(&both.api, BUSY_RATE, move |_| path.clone()));
            let servers = [
                ("straight", both.servers[0].kubeconfig.clone()),
                ("kubefan", both.servers[1].kubeconfig.clone()),
                ("kubefan --cache-tables", both.api.kubeconfig_to(&format!("https://{}", with_tables.grpc_addr))),
            ];
            let mut samples: Vec<Vec<Sample>> = servers.iter().map(|_| Vec::new()).collect();
            for _ in 0..pairs {
                for ((_, kubeconfig), samples) in servers.iter().zip(&mut samples) {
                    samples.push(sample(&both.api, kubeconfig, command).await);
                }
            }
            drop::<Option<Background>>(writes);
            for ((name, _), samples) in servers.iter().zip(&samples) {
                let resource = if is_busy { "busy" } else { "quiet" };
                let seconds = spread(samples, |sample| sample.seconds);
                let cpu = spread(samples, |sample| sample.apiserver_cpu);
                let objects = spread(samples, |sample| sample.objects);
                table.row(&[&command.join(" "), &resource, name, &seconds, &cpu, &objects]);
            }
        }
    }
    println!("{table}");
}

/// One run of kubectl.
struct Sample {
    seconds: f64,
    /// CPU seconds of the apiserver meanwhile, those for writes included.
    apiserver_cpu: f64,
    /// Pods that the apiserver has sent meanwhile.
    objects: f64,
}

async fn sample(api: &ApiServer, kubeconfig: &Path, command: &[&str]) -> Sample {
    let objects_before = objects_sent(api, "pods").await;
    let cpu_before = cpu_seconds(api.pid());
    let ((ok, _, error), seconds) = timed(api.try_kubectl(kubeconfig, command)).await;
    assert!(ok, "{error}");
    let apiserver_cpu = cpu_seconds(api.pid()) - cpu_before;
    Sample { seconds, apiserver_cpu, objects: objects_sent(api, "pods").await - objects_before }
}

/// The CPU time of a process, user and system.
pub(crate) fn cpu_seconds(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // The name of the program, in brackets, may contain spaces; user and system time are the 14th
    // and 15th field of all.
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / TICKS_PER_SECOND
}

/// The median of a figure, and its range.
fn spread(samples: &[Sample], figure: fn(&Sample) -> f64) -> String {
    let mut figures: Vec<f64> = samples.iter().map(figure).collect();
    figures.sort_by(f64::total_cmp);
    format!("{:.2} ({:.2}–{:.2})", figures[figures.len() / 2], figures[0], figures[figures.len() - 1])
}
