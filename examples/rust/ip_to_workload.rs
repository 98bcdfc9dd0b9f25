//! Answers which workload has an IP address, from an index over all pods.
//!
//! cargo run --example ip_to_workload -- --ip 10.128.4.51
//!
//! Reads from kubefan on 127.0.0.1:7443, such as `cargo run -- demo --duration 0`.
//!
//! Without `--ip` it reads addresses from standard input, one per line, and answers each from the
//! state at that moment. kubefan sends only the five fields that it needs, and only their changes.
use std::{collections::HashMap, error::Error, io::stdin, process::ExitCode, thread};

use kubefan_client::{Client, ClientOptions, Indexer, ListWatch, Object, Parts, Projection, SharedInformer};
use serde::Deserialize;
use tokio::{signal::ctrl_c, sync::oneshot};

const FIELDS: [&str; 5] = [
    "metadata.ownerReferences.kind",
    "metadata.ownerReferences.name",
    "metadata.labels.pod-template-hash",
    "status.phase",
    "status.podIPs.ip",
];

/// Everything has a default: kubefan leaves out the fields that a pod does not have.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Pod {
    metadata: Metadata,
    status: Status,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Metadata {
    labels: HashMap<String, String>,
    owner_references: Vec<Owner>,
}

#[derive(Deserialize)]
struct Owner {
    kind: String,
    name: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Status {
    phase: String,
    #[serde(rename = "podIPs")]
    pod_ips: Vec<PodIp>,
}

#[derive(Deserialize)]
struct PodIp {
    ip: String,
}

/// The index values of a pod. A pod that has finished has given its addresses back.
fn addresses(pod: &Object<Pod>) -> Vec<String> {
    if matches!(pod.status.phase.as_str(), "Succeeded" | "Failed") {
        return Vec::new();
    }
    pod.status.pod_ips.iter().map(|address| address.ip.clone()).collect()
}

/// The workload of a pod, such as `Deployment team-1/web`. A Deployment owns its pods through a
/// ReplicaSet, whose name is the Deployment's with the hash of the template.
fn workload(pod: &Object<Pod>) -> String {
    let Some(owner) = pod.metadata.owner_references.first() else { return format!("Pod {}", pod.key()) };
    let hash = pod.metadata.labels.get("pod-template-hash");
    let deployment = hash.and_then(|hash| owner.name.strip_suffix(hash)?.strip_suffix('-'));
    match deployment {
        Some(name) if owner.kind == "ReplicaSet" => format!("Deployment {}/{name}", pod.namespace()),
        _ => format!("{} {}/{}", owner.kind, pod.namespace(), owner.name),
    }
}

/// One line per pod: those on the network of their node share its address.
fn answer(pods: &Indexer<Pod>, ip: &str) -> Result<(), Box<dyn Error>> {
    let found = pods.by_index("ip", ip)?;
    if found.is_empty() {
        println!("{ip} no pod");
    }
    for pod in found {
        println!("{ip} {} (pod {})", workload(&pod), pod.name());
    }
    Ok(())
}

async fn run(address: &str, ip: Option<String>) -> Result<(), Box<dyn Error>> {
    let kubefan = Client::connect(address, &ClientOptions::default()).await?;
    let fields = Parts::Fields(FIELDS.map(str::to_owned).into());
    let source = ListWatch::new(kubefan, "pods", "", "")
        .projection(Projection { parts: fields, ..Projection::default() })
        .tweak_grpc(|watch| watch.only_changes = true);
    let informer = SharedInformer::<Pod>::new(source);
    informer.indexer().add_index("ip", addresses)?;
    informer.on_error(|error| eprintln!("retrying: {error}"));

    let questions = async {
        informer.synced().await?;
        let pods = informer.indexer();
        if let Some(ip) = ip {
            return answer(pods, &ip);
        }
        // A thread of its own, because a read from a terminal cannot be cancelled.
        let pods = pods.clone();
        let (done, ended) = oneshot::channel::<()>();
        thread::spawn(move || {
            for line in stdin().lines().map_while(Result::ok) {
                if let Err(error) = answer(&pods, line.trim()) {
                    eprintln!("error: {error}");
                }
            }
            drop(done);
        });
        let _ = ended.await;
        Ok(())
    };
    tokio::select! {
        answered = questions => answered,
        ran = informer.run(async { drop(ctrl_c().await) }) => Ok(ran?),
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let mut address = "127.0.0.1:7443".to_owned();
    let mut ip = None;
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        match (flag.as_str(), args.next()) {
            ("--ip", Some(value)) => ip = Some(value),
            ("--server", Some(value)) => address = value,
            _ => {
                eprintln!("usage: ip_to_workload [--ip IP] [--server ADDRESS]");
                return ExitCode::from(2);
            }
        }
    }
    if let Err(error) = run(&address, ip).await {
        eprintln!("error: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
