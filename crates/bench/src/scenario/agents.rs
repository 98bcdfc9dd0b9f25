//! `agents`: one agent per node watches the pods of its node, first from scratch, then after an
//! outage: changes pass, more than the server's history keeps whole, and all agents come back with
//! the versions that they had at its start, in its middle and near its end.

use std::time::Duration;

use tokio::time::Instant;

use super::{Sample, Variant};
use crate::{
    BenchError, ServerKind,
    figures::{Figure, Figures},
    latency::ChangeTimes,
    node_agents::{AgentProtocol, Agents, AllLive},
    process::Meter,
    server_process::{Run, Server},
    source::{Source, pods_path},
};

/// Changes during the outage, unless there are fewer pods: at 28 a second they are three minutes.
const CHANGES_MAX: usize = 5000;
/// Changes that are made before the server has to have received them all.
const CHANGES_AT_ONCE: usize = 500;
/// Set on a pod of each node at the end of the outage.
const ANNOTATION: &str = "example.com/agents";

pub(super) async fn measure(run: &Run<'_>, source: &mut Source) -> Result<Vec<Sample>, BenchError> {
    let protocols = match run.spec.kind {
        ServerKind::Apiserver { .. } => &[AgentProtocol::Json, AgentProtocol::Protobuf][..],
        _ => &[AgentProtocol::Grpc, AgentProtocol::Json, AgentProtocol::Protobuf],
    };
    let mut samples = Vec::new();
    for (number, protocol) in protocols.iter().enumerate() {
        // Every round has a mark of its own, because the pods keep the marks.
        let mark = MARKS[number];
        samples.extend(measure_protocol(run, source, *protocol, mark).await?);
    }
    Ok(samples)
}

const MARKS: [&str; 3] = ["kubefan-bench-mark-1", "kubefan-bench-mark-2", "kubefan-bench-mark-3"];

async fn measure_protocol(
    run: &Run<'_>,
    source: &mut Source,
    protocol: AgentProtocol,
    mark: &'static str,
) -> Result<Vec<Sample>, BenchError> {
    let changes = source.objects().clamp(1, CHANGES_MAX);
    let server = run.start_server_with(source, &[format!("limits.ringEventsMax={}", changes / 2 + 1)]).await?;
    let agents = Agents {
        protocol,
        endpoint: server.http_endpoint(),
        namespace: source.namespace().to_owned(),
        path: pods_path(source.namespace()),
        mark,
    };
    // The first agent may have to wait for a cache of its encoding.
    agents.go_live([(0, None)]).await?;
    let nodes = 0..run.options.nodes;
    let (live, from_scratch) = measured(&server, agents.go_live(nodes.map(|node| (node, None)))).await?;
    drop(live);

    let times = ChangeTimes::default();
    let mut versions = vec![server.version(source)];
    let mut remaining = changes;
    while remaining > 0 {
        let count = remaining.min(CHANGES_AT_ONCE);
        source.make_changes(count, &times).await?;
        remaining -= count;
        versions.push(source.version());
    }
    let kept = [versions[0], versions[versions.len() / 2], versions[versions.len() - 1]];
    let nodes = source.annotate_each_node(ANNOTATION, mark).await?;
    // From scratch, so that it ends at the last version.
    let probe = nodes.last().map(|node| (*node, Some(kept[2])));
    agents.go_live(probe).await?;
    let returning = nodes.into_iter().map(|node| (node, Some(kept[node % kept.len()])));
    let (_live, after_outage) = measured(&server, agents.go_live(returning)).await?;
    let names = match protocol {
        AgentProtocol::Grpc => ["gRPC, from scratch", "gRPC, after an outage"],
        AgentProtocol::Json => ["JSON, from scratch", "JSON, after an outage"],
        AgentProtocol::Protobuf => ["protobuf, from scratch", "protobuf, after an outage"],
    };
    let variant = |name, batch| Variant { name, subscribers: run.options.nodes, batch };
    Ok(vec![(variant(names[0], None), from_scratch), (variant(names[1], Some(changes)), after_outage)])
}

/// The figures of a set of agents.
async fn measured(
    server: &Server,
    going_live: impl Future<Output = Result<AllLive, BenchError>>,
) -> Result<(AllLive, Figures), BenchError> {
    let mut meter: Meter = server.new_meter();
    let cpu = meter.cpu_nanos()?;
    let start = Instant::now();
    let mut live = going_live.await?;
    let elapsed = start.elapsed();
    let cpu = meter.cpu_nanos()? - cpu;
    live.took.sort_unstable();
    let mut figures = Figures::default();
    figures.set(Figure::CpuPerClient, cpu as f64 / 1e6 / live.took.len() as f64);
    figures.set(Figure::Seconds, elapsed.as_secs_f64());
    let millis = |percent: usize| {
        let took = live.took.get((live.took.len() * percent / 100).min(live.took.len().saturating_sub(1)));
        took.map_or(f64::NAN, Duration::as_secs_f64) * 1e3
    };
    figures.set(Figure::LatencyP50, millis(50));
    figures.set(Figure::LatencyP99, millis(99));
    figures.set(Figure::Restarted, live.restarted as f64);
    Ok((live, figures))
}
