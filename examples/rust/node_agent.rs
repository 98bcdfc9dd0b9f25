//! Follows the pods of one node, as the kubelet does: after every change, the complete set of them.
//!
//! cargo run --example node_agent -- node-0
//!
//! Reads from kubefan on 127.0.0.1:7443, such as `cargo run -- demo --duration 0`.
//!
//! The complete set makes an agent simple. It compares the set with the pods that it runs, so a
//! deletion that it missed is only a pod that is missing in the next set.
use std::{error::Error, process::ExitCode, sync::Arc};

use kubefan_client::{Client, ClientOptions, ListWatch, Object, Reflector, UndeltaStore};
use serde::Deserialize;

/// The part of a pod that this agent reads. The rest is not decoded.
#[derive(Deserialize)]
struct Pod {
    #[serde(default)]
    status: Status,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Status {
    phase: String,
}

/// Gets every state of the node. A real agent would send it to its main loop.
fn set(pods: Vec<Arc<Object<Pod>>>) {
    let running = pods.iter().filter(|pod| pod.status.phase == "Running").count();
    let names: Vec<_> = pods.iter().map(|pod| pod.key().as_str()).collect();
    println!("SET {} pods, {running} running: {}", pods.len(), names.join(" "));
}

async fn run(node: &str, address: &str) -> Result<(), Box<dyn Error>> {
    let kubefan = Client::connect(address, &ClientOptions::default()).await?;
    let source = ListWatch::new(kubefan, "pods", "", &format!("spec.nodeName={node}")).drop_managed_fields();
    let reflector = Reflector::new(source, UndeltaStore::new(set)).on_error(|error| eprintln!("retrying: {error}"));
    reflector.run(async { drop(tokio::signal::ctrl_c().await) }).await;
    Ok(())
}

#[tokio::main]
async fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let Some(node) = args.next() else {
        eprintln!("usage: node_agent NODE [ADDRESS]");
        return ExitCode::from(2);
    };
    let address = args.next().unwrap_or_else(|| "127.0.0.1:7443".to_owned());
    if let Err(error) = run(&node, &address).await {
        eprintln!("error: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
