//! The calculator: the needs of a cluster that does not exist yet, or whose figures are known. The
//! model is that of docs/scale.md.

use clap::{Args, ValueEnum};
use serde::Serialize;

use kubefan_app::config::ByteSize;

use crate::cli::sizing::{
    CACHE_PER_JSON, COEFFICIENTS, CONNECTION_BYTES, Coefficient, DELTA_BYTES, Deliveries, INGEST_SECONDS,
    METADATA_BYTES, PROCESS_BYTES, RELIST_PER_JSON, cache_bytes, human_bytes, human_cores, human_count,
};

/// The figures of a cluster.
#[derive(Debug, Args)]
#[command(next_help_heading = "Without a cluster")]
pub(super) struct CalculatorArgs {
    /// Nodes
    #[arg(long, value_name = "COUNT")]
    nodes: Option<u64>,

    /// Pods
    #[arg(long, value_name = "COUNT")]
    pods: Option<u64>,

    /// Mean JSON size of a pod
    #[arg(long, value_name = "SIZE", default_value = "6k")]
    pod_bytes: ByteSize,

    /// Mean JSON size of a node
    #[arg(long, value_name = "SIZE", default_value = "10k")]
    node_bytes: ByteSize,

    /// Further cached objects
    #[arg(long, value_name = "COUNT")]
    objects: Option<u64>,

    /// Mean JSON size of a further object
    #[arg(long, value_name = "SIZE", default_value = "2k")]
    object_bytes: ByteSize,

    /// Changes of all cached objects per second
    #[arg(long, value_name = "RATE")]
    events_per_second: Option<f64>,

    /// Watches of all clients together
    #[arg(long, value_name = "COUNT")]
    subscribers: Option<u64>,

    /// The objects that a subscriber watches
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = Watched::All)]
    watching: Watched,

    /// The form of an event
    #[arg(long, value_enum, value_name = "FORM", default_value_t = Form::Json)]
    form: Form,

    /// Cores of a replica, for the time that an event waits under load
    #[arg(long, value_name = "COUNT")]
    cores: Option<f64>,

    /// Caches are packed (tuning.cacheCompression: zstd)
    #[arg(long)]
    packed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Watched {
    /// Everything
    All,
    /// The objects of one node
    Node,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// The whole object
    Json,
    /// Its metadata
    Metadata,
    /// The difference (ZSTD_DELTA)
    Delta,
}

/// The resources that the cluster needs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Sizing {
    replicas: u32,
    objects: u64,
    json_bytes: f64,
    subscribers: u64,
    deliveries_per_second: f64,
    network_bytes_per_second: f64,
    memory_per_replica: Memory,
    /// CPUs of all replicas together, if events gather for writes.
    cores_min: f64,
    /// CPUs of all replicas together, if each event is a write of its own.
    cores_max: f64,
    /// With --cores: the longest that an event waits. `None` also if the cores are too few.
    #[serde(skip_serializing_if = "Option::is_none")]
    event_wait_seconds_max: Option<f64>,
    #[serde(skip)]
    cores: Option<f64>,
    upstream: Upstream,
    /// The same subscribers at kube-apiserver.
    without_kubefan: WithoutKubefan,
    coefficients: &'static [Coefficient],
}

/// The resident memory of one replica, in bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Memory {
    process: f64,
    caches: f64,
    connections: f64,
    /// The sum.
    bytes: f64,
    /// While a cache is listed again.
    peak: f64,
}

/// Kubefan's load on the apiserver.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Upstream {
    /// For each cached resource.
    watches_per_resource: u32,
    events_per_second: f64,
    /// The lists of a replica that starts without a peer.
    bytes_per_start: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
struct WithoutKubefan {
    watches: u64,
    cores: f64,
}

impl CalculatorArgs {
    /// Whether a figure is given, so that no cluster is asked.
    pub(super) fn is_asked(&self) -> bool {
        let counts = [self.nodes, self.pods, self.objects, self.subscribers];
        counts.iter().any(Option::is_some) || self.events_per_second.is_some()
    }
}

impl Sizing {
    /// Calculates.
    ///
    /// # Errors
    /// A figure that makes no sense, in the user's terms.
    pub(super) fn of(args: &CalculatorArgs, replicas: u32) -> Result<Self, String> {
        let rate = args.events_per_second.unwrap_or(0.0);
        for (flag, given) in [("--events-per-second", args.events_per_second), ("--cores", args.cores)] {
            if given.is_some_and(|given| !given.is_finite() || given < 0.0) {
                return Err(format!("{flag} must not be negative"));
            }
        }
        let nodes = args.nodes.unwrap_or(0);
        let pods = args.pods.unwrap_or(0);
        if args.watching == Watched::Node && nodes == 0 {
            return Err("--watching=node needs --nodes: a subscriber gets its node's share of the events".to_owned());
        }
        let kinds =
            [(nodes, &args.node_bytes), (pods, &args.pod_bytes), (args.objects.unwrap_or(0), &args.object_bytes)];
        let objects = kinds.iter().fold(0_u64, |sum, (count, _)| sum.saturating_add(*count));
        let json_bytes: f64 = kinds.iter().map(|(count, bytes)| *count as f64 * bytes.0 as f64).sum();
        let message_bytes = match args.form {
            Form::Json if objects == 0 => args.pod_bytes.0 as f64,
            Form::Json => json_bytes / objects as f64,
            Form::Metadata => METADATA_BYTES.value,
            Form::Delta => DELTA_BYTES.value,
        };
        let subscribers = args.subscribers.unwrap_or(0);
        let rate_of_one = match args.watching {
            Watched::All => rate,
            Watched::Node => rate / nodes as f64,
        };
        let deliveries = Deliveries { per_second: subscribers as f64 * rate_of_one, message_bytes };
        let count = f64::from(replicas);
        let of_one = Deliveries { per_second: deliveries.per_second / count, ..deliveries };
        let ingestion = rate * count * INGEST_SECONDS.value;
        let wave = args.cores.and_then(|cores| of_one.wave(cores - rate * INGEST_SECONDS.value, rate_of_one));
        let caches = cache_bytes(json_bytes, args.packed);
        let connections = subscribers as f64 / count * CONNECTION_BYTES.value;
        let process = PROCESS_BYTES.value;
        let bytes = process + caches + connections;
        let peak = bytes + caches * (RELIST_PER_JSON.value / CACHE_PER_JSON.value - 1.0);
        Ok(Self {
            replicas,
            objects,
            json_bytes,
            subscribers,
            deliveries_per_second: deliveries.per_second,
            network_bytes_per_second: deliveries.bytes_per_second(),
            memory_per_replica: Memory { process, caches, connections, bytes, peak },
            cores_min: ingestion + deliveries.cores_min(),
            cores_max: ingestion + deliveries.cores_max(),
            event_wait_seconds_max: wave.map(|wave| wave.as_secs_f64()),
            cores: args.cores,
            upstream: Upstream {
                watches_per_resource: replicas,
                events_per_second: rate * count,
                bytes_per_start: json_bytes,
            },
            without_kubefan: WithoutKubefan { watches: subscribers, cores: deliveries.apiserver_cores() },
            coefficients: COEFFICIENTS,
        })
    }

    /// A line per need.
    pub(super) fn text(&self) -> String {
        let Memory { process, caches, connections, bytes, peak } = &self.memory_per_replica;
        let objects = human_count(self.objects as f64);
        let replicas = self.replicas;
        let mut lines = vec![
            ("cached", format!("{objects} objects, {} of JSON", human_bytes(self.json_bytes))),
            (
                "deliveries",
                format!("{}/s to {} subscribers", human_count(self.deliveries_per_second), self.subscribers),
            ),
            (
                "memory",
                format!(
                    "{} for each of {replicas} replicas: process {}, caches {}, connections {}; {} while it lists again",
                    human_bytes(*bytes),
                    human_bytes(*process),
                    human_bytes(*caches),
                    human_bytes(*connections),
                    human_bytes(*peak)
                ),
            ),
            (
                "CPU",
                format!(
                    "{} to {} cores, all replicas together: with less it falls behind, more has no effect",
                    human_cores(self.cores_min),
                    human_cores(self.cores_max)
                ),
            ),
        ];
        lines.extend(self.cores.map(|cores| ("latency", self.latency(cores))));
        lines.extend([
            ("network", format!("{}/s to the subscribers", human_bytes(self.network_bytes_per_second))),
            (
                "apiserver",
                format!(
                    "{} watches per resource, {} events/s together; a start without a peer lists {}",
                    self.upstream.watches_per_resource,
                    human_count(self.upstream.events_per_second),
                    human_bytes(self.upstream.bytes_per_start)
                ),
            ),
            (
                "without kubefan",
                format!(
                    "{} watches and {} cores of the apiserver",
                    self.without_kubefan.watches,
                    human_cores(self.without_kubefan.cores)
                ),
            ),
        ]);
        let lines = lines.into_iter().map(|(what, text)| format!("{what:<17}{text}\n"));
        let end = "\nA model from measurements (docs/sizing.md); measure with `kubefan bench` on the machine that will run it.\n";
        lines.chain([end.to_owned()]).collect()
    }

    fn latency(&self, cores: f64) -> String {
        match self.event_wait_seconds_max {
            Some(seconds) if seconds >= 0.001 => {
                format!("with {cores} cores per replica an event waits at most {:.0} ms", seconds * 1000.0)
            }
            Some(_) => format!("with {cores} cores per replica an event waits less than a millisecond"),
            None if self.deliveries_per_second == 0.0 => "nothing is delivered".to_owned(),
            None => format!("{cores} cores per replica are too few: it falls behind"),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        args: CalculatorArgs,
    }

    fn sizing(words: &[&str], replicas: u32) -> Result<Sizing, String> {
        Sizing::of(&Only::parse_from(["estimate"].iter().chain(words)).args, replicas)
    }

    /// The cluster of docs/scale.md: 25,000 agents, 150,000 pods.
    const SCALE: [&str; 3] = ["--pods=150000", "--events-per-second=200", "--subscribers=25000"];

    #[test]
    fn the_page_about_scale_has_the_same_figures() {
        let json = sizing(&[&SCALE[..], &["--cores=32"]].concat(), 1).unwrap();
        assert_eq!((json.json_bytes, json.deliveries_per_second), (9e8, 5e6));
        assert!((17.0..19.0).contains(&json.cores_min), "{json:?}");
        assert!((0.035..0.05).contains(&json.event_wait_seconds_max.unwrap()), "{json:?}");
        assert!((0.8e9..0.9e9).contains(&json.memory_per_replica.connections), "{json:?}");
        let metadata = sizing(&[&SCALE[..], &["--form=metadata"]].concat(), 1).unwrap();
        assert!((1.5..2.5).contains(&metadata.cores_min), "{metadata:?}");
        let delta = sizing(&[&SCALE[..], &["--form=delta", "--packed"]].concat(), 1).unwrap();
        assert!((1.2..1.6).contains(&delta.cores_min), "{delta:?}");
        assert!((0.18e9..0.2e9).contains(&delta.memory_per_replica.caches), "{delta:?}");
    }

    #[test]
    fn an_agent_that_watches_its_node_gets_its_share() {
        let node = ["--nodes=5000", "--watching=node"];
        let sizing_of = sizing(&[&SCALE[..], &node].concat(), 2).unwrap();
        assert_eq!(sizing_of.deliveries_per_second, 1000.0);
        assert!(sizing_of.cores_max < 0.06, "{sizing_of:?}");
        assert!(sizing(&[&SCALE[..], &["--watching=node"]].concat(), 2).unwrap_err().contains("--nodes"));
    }

    #[test]
    fn figures_that_make_no_sense_are_refused_and_huge_ones_do_not_overflow() {
        assert!(sizing(&["--events-per-second=NaN"], 1).is_err());
        assert!(sizing(&["--events-per-second=-1"], 1).is_err());
        let most = u64::MAX.to_string();
        let huge = sizing(&["--pods", &most, "--nodes", &most, "--subscribers", &most], u32::MAX).unwrap();
        assert!(huge.text().contains("objects"));
        assert!(sizing(&["--pods=0"], 1).unwrap().text().contains("0 B of JSON"));
        assert!(sizing(&[&SCALE[..], &["--cores=1"]].concat(), 1).unwrap().text().contains("too few"));
    }
}
