//! Options of a measurement: the scenarios, the servers and the load.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use super::{BenchError, Encoding, Protocol, Windows, hostile::attack::Attack};

/// Default rate of `paced` and `stalled`, in changes per second.
const RATE: u32 = 200;
/// Longest warm-up before a measurement. It otherwise takes a quarter of the measured time.
const WARM_UP_MAX: Duration = Duration::from_millis(1000);

/// The scenarios of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Scenario {
    /// Every subscriber receives every change, at full speed
    Fanout,
    /// Every subscriber receives every change, at a fixed rate: latencies
    Paced,
    /// The initial state, for one client and for many at once
    Snapshot,
    /// The cost of an event that few of many watchers match
    Selectors,
    /// Memory per subscriber, before and after load
    Idle,
    /// All subscribers disconnect, changes continue, all reconnect at once
    ResumeStorm,
    /// Some subscribers stop reading under load: the latencies of the others, and memory
    Stalled,
    /// Lists of all pods by many clients at once, over HTTP
    List,
    /// Attacks, one after the other: what honest subscribers notice. Only if named
    Hostile,
    /// Agents that watch the pods of their own nodes: from scratch, and after an outage. Only if
    /// named
    Agents,
    /// The cost of knowing callers and their rights, over TLS. Only if named
    Access,
}

impl Scenario {
    /// The scenarios that run if none is named, in this order.
    pub const DEFAULT: [Self; 8] = [
        Self::Fanout,
        Self::Paced,
        Self::Snapshot,
        Self::Selectors,
        Self::Idle,
        Self::ResumeStorm,
        Self::Stalled,
        Self::List,
    ];

    /// The name on the command line and in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fanout => "fanout",
            Self::Paced => "paced",
            Self::Snapshot => "snapshot",
            Self::Selectors => "selectors",
            Self::Idle => "idle",
            Self::ResumeStorm => "resume-storm",
            Self::Stalled => "stalled",
            Self::List => "list",
            Self::Hostile => "hostile",
            Self::Agents => "agents",
            Self::Access => "access",
        }
    }

    /// One line for the header of the table.
    pub fn description(self) -> &'static str {
        match self {
            Self::Fanout => "every subscriber receives every change, at full speed",
            Self::Paced => "every subscriber receives every change, at a rate",
            Self::Snapshot => "the initial state; a delivery is one object",
            Self::Selectors => "the cost of an event that few of many watchers match",
            Self::Idle => "memory per subscriber",
            Self::ResumeStorm => "all subscribers reconnect at once after missing BATCH changes",
            Self::Stalled => "some subscribers stop reading; the others receive every change, at a rate",
            Self::Hostile => {
                "honest subscribers and a list a second beside attacks, and beside the same attacks against a sink"
            }
            Self::Agents => {
                "agents watch the pods of their own nodes: from scratch, and after an outage of BATCH changes"
            }
            Self::Access => {
                "selective lists and watches over HTTP, with and without reviews of their callers; a client is a request"
            }
            Self::List => "lists of all pods over HTTP; a delivery is one object",
        }
    }
}

/// The part of each object that the server sends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Projection {
    /// The whole object
    #[default]
    Full,
    /// PartialObjectMetadata
    Metadata,
}

impl Projection {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Metadata => "metadata",
        }
    }
}

/// A server to measure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerSpec {
    /// Name of the server in the reports.
    pub name: String,
    /// The way to start or reach it.
    pub kind: ServerKind,
}

/// The way to start or reach a server under test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerKind {
    /// A program that takes the flags of `kubefan serve`. It is started anew for each run.
    Program(PathBuf),
    /// A server that is already running.
    Running {
        /// Data port of the server, without TLS.
        address: SocketAddr,
        /// Process id of the server, on this machine.
        pid: u32,
    },
    /// The apiserver of [`BenchOptions::kubeconfig`] as a watch server, over HTTP/2. The cost
    /// of the writes is measured without watchers and subtracted.
    Apiserver {
        /// Process id of the apiserver, on this machine.
        pid: u32,
    },
}

/// Options of a measurement.
#[derive(Debug, Clone)]
pub struct BenchOptions {
    /// The scenarios to run, in this order.
    pub scenarios: Vec<Scenario>,
    /// Number of subscribers (watch streams). Some scenarios set their own number instead.
    pub subscribers: usize,
    /// Streams per connection. At least 1.
    pub streams_per_connection: usize,
    /// Changes per burst. Each size is measured separately. Each at least 1.
    pub batches: Vec<usize>,
    /// Numbers of pods, each measured separately; empty for 1,000, or 10,000 in `snapshot`, `list`,
    /// `agents` and `access`.
    pub objects: Vec<usize>,
    /// Approximate JSON size of a pod in bytes; `None` for the workload's own, 3 to 6 kB.
    pub object_bytes: Option<usize>,
    /// Changes per second in `paced` and `stalled` (`None`: 200), in `hostile` (`None`: 50) and
    /// during `snapshot` (`None`: no changes).
    pub rate: Option<u32>,
    /// Time for which each load is measured.
    pub duration: Duration,
    /// Number of repetitions. At least 1.
    pub runs: usize,
    /// Concurrent clients in `snapshot` and `list`. At least 1.
    pub clients: usize,
    /// Numbers of views by `spec.nodeName` in `selectors`. Each is measured separately.
    pub views: Vec<usize>,
    /// Changes that each subscriber misses in `resume-storm`.
    pub missed: usize,
    /// Subscribers that stop reading in `stalled`; `None` for one in twenty.
    pub stalled: Option<usize>,
    /// Nodes in `agents`, with an agent each, and in `access`.
    pub nodes: usize,
    /// The attacks of `hostile`; empty for all.
    pub attacks: Vec<&'static Attack>,
    /// Honest subscribers in `hostile`, half of them over gRPC and half over HTTP.
    pub honest: usize,
    /// Use TLS between server and subscribers.
    pub tls: bool,
    /// The protocol between subscribers and kubefan. An apiserver is always measured over HTTP.
    pub protocol: Protocol,
    /// The encoding of objects. It has an effect with `protocol` and `scenarios`
    /// ([`Self::check`]).
    pub encoding: Encoding,
    /// The part of each object that is sent.
    pub projection: Projection,
    /// The flow-control windows of the subscribers.
    pub windows: Windows,
    /// Threads that run the subscribers. At least 1.
    pub receiver_threads: usize,
    /// The servers to measure, in alternation.
    pub servers: Vec<ServerSpec>,
    /// A real apiserver to create the pods in, instead of a simulated one. It cannot be combined
    /// with `object_bytes`.
    pub kubeconfig: Option<PathBuf>,
    /// The path of this program, which also runs the floor as a separate process.
    pub program: PathBuf,
    /// Seed of the workload. The same seed produces the same pods and changes.
    pub seed: u64,
}

impl Default for BenchOptions {
    fn default() -> Self {
        Self {
            scenarios: Scenario::DEFAULT.to_vec(),
            subscribers: 1_000,
            streams_per_connection: 1,
            batches: vec![1, 32],
            objects: Vec::new(),
            object_bytes: None,
            rate: None,
            duration: Duration::from_secs(2),
            runs: 3,
            clients: 50,
            views: vec![100, 1_000],
            missed: 500,
            stalled: None,
            nodes: 1_000,
            attacks: Vec::new(),
            honest: 200,
            tls: false,
            protocol: Protocol::Grpc,
            encoding: Encoding::Json,
            projection: Projection::Full,
            windows: Windows::KUBEFAN,
            receiver_threads: 1,
            servers: Vec::new(),
            kubeconfig: None,
            program: PathBuf::new(),
            seed: 1,
        }
    }
}

impl BenchOptions {
    /// Checks that subscribers can ask for the encoding, and that the scenarios use it.
    ///
    /// # Errors
    /// If the encoding would have no effect.
    pub fn check(&self) -> Result<(), BenchError> {
        let Some(needed) = self.encoding.protocol() else { return Ok(()) };
        let encoding = self.encoding.as_str();
        if needed != self.protocol {
            return Err(BenchError::EncodingOfProtocol { encoding, protocol: needed.as_str() });
        }
        let has_its_own = |scenario: &&Scenario| matches!(scenario, Scenario::Agents | Scenario::Access);
        match self.scenarios.iter().find(has_its_own).filter(|_| needed == Protocol::Http) {
            Some(scenario) => Err(BenchError::EncodingOfScenario { encoding, scenario: scenario.as_str() }),
            None => Ok(()),
        }
    }

    pub(super) fn warm_up(&self) -> Duration {
        (self.duration / 4).min(WARM_UP_MAX)
    }

    pub(super) fn stalled(&self) -> usize {
        self.stalled.unwrap_or_else(|| self.subscribers.div_ceil(20))
    }

    pub(super) fn paced_rate(&self) -> u32 {
        self.rate.unwrap_or(RATE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_encoding_that_would_have_no_effect_is_refused() {
        let refused = |encoding, protocol, scenarios: &[Scenario]| {
            let options = BenchOptions { encoding, protocol, scenarios: scenarios.to_vec(), ..BenchOptions::default() };
            options.check().err().map(|error| error.to_string()).unwrap_or_default()
        };
        for encoding in [Encoding::Gzip, Encoding::ProtobufGzip] {
            assert_eq!(refused(encoding, Protocol::Http, &Scenario::DEFAULT), "");
            assert!(refused(encoding, Protocol::Grpc, &Scenario::DEFAULT).contains("needs --protocol http"));
            assert!(refused(encoding, Protocol::Http, &[Scenario::Fanout, Scenario::Agents]).contains("agents"));
        }
        for encoding in [Encoding::Zstd, Encoding::ZstdDelta] {
            assert_eq!(refused(encoding, Protocol::Grpc, &[Scenario::Fanout, Scenario::Agents]), "");
            assert!(refused(encoding, Protocol::Http, &Scenario::DEFAULT).contains("needs --protocol grpc"));
        }
        for protocol in [Protocol::Grpc, Protocol::Http] {
            assert_eq!(refused(Encoding::Json, protocol, &[Scenario::Access]), "");
            assert_eq!(refused(Encoding::Protobuf, protocol, &Scenario::DEFAULT), "");
        }
    }
}
