//! Configuration: plain data, validated once, every default named in one place ([`ServeConfig::default`]). What is given by flag
//! goes before the environment, that before the file, that before the default.
//!
//! It guards against a configuration that means something else than its author thinks: contradictions, zeros and misspelt names
//! are errors that name the flag and the way out, before anything is started.

pub mod file;
pub mod options;
pub mod peers;
pub mod units;

use std::{path::PathBuf, time};

use serde::Deserialize;

pub use crate::server::transport::listen_address::{self as listen, ListenAddress};
pub use crate::server::transport::tls::TlsFiles;
pub use options::ServeOptions;
pub use peers::{PeerConfig, PeerFiles, PeersName};
pub use units::{ByteSize, Duration};

pub use crate::telemetry::LogFormat;

use crate::upstream::{passthrough::Credentials, settings::UpstreamSettings};
use kubefan_model::selector::FieldSelector;

pub use crate::caches::memory_pressure::MEMORY_BYTES_MIN;

/// How the initial state is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum WatchListMode {
    /// By WatchList where the apiserver has it, else by LIST.
    Auto,
    /// By LIST.
    Never,
}

/// Whether the objects cached are kept packed. What they replaced is kept packed in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum CacheCompression {
    /// As they came: nothing is spent on reading them.
    Off,
    /// By zstd with a dictionary of the resource's own: a fifth of the memory, and some 5 µs for each object that is read.
    Zstd,
}

/// How a read is answered that must not be stale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ConsistentReads {
    /// From the cache, once upstream has proved it to be fresh.
    Probe,
    /// By upstream.
    Upstream,
}

/// What happens to requests that are not answered from the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum PassthroughMode {
    /// They go on with the caller's credentials.
    Caller,
    /// They go on with kubefan's credentials.
    #[serde(rename = "self")]
    #[value(name = "self")]
    Own,
    /// They are refused.
    Off,
}

/// Whether objects are cached as protobuf too, for those who ask for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ProtobufMode {
    /// Once somebody asks for it, and for as long as somebody does.
    On,
    /// Never: such requests go upstream.
    Off,
}

/// Everything `serve` needs to know, concrete and free of contradictions.
#[derive(Debug, Clone, PartialEq)]
pub struct ServeConfig {
    /// The data port.
    pub listen: ListenAddress,
    /// The port for health and metrics.
    pub admin_listen: ListenAddress,
    /// TLS for the data port.
    pub tls: Option<TlsFiles>,
    /// Connections to the data port at a time.
    pub connections_max: usize,
    /// Streams at a time, over all connections.
    pub subscribers_max: usize,
    /// Lists and single objects answered from caches over HTTP at a time.
    pub reads_max: usize,
    /// Streams at a time, per connection.
    pub max_concurrent_streams: u32,
    /// The longest request.
    pub message_bytes_max: usize,
    /// HTTP/2 PING after this silence.
    pub keepalive_interval: time::Duration,
    /// The connection is closed when the PING is not answered for so long.
    pub keepalive_timeout: time::Duration,
    /// A snapshot that makes too little progress in so long ends.
    pub snapshot_stall_timeout: time::Duration,
    /// Snapshots, lists and catch-ups that are sent at a time.
    pub snapshots_max: usize,
    /// How long others wait for their turn.
    pub snapshot_queue_timeout: time::Duration,
    /// What the process may take in memory, in bytes; `None`: four fifths of the limit of its cgroup, if that has one.
    pub memory_bytes_max: Option<u64>,
    /// Streams have so long to end when the process is to stop.
    pub drain_timeout: time::Duration,
    /// How long events may wait for more under load.
    pub coalesce_max: time::Duration,
    /// Beyond this age of upstream's last proof nobody reads; `None`: whatever the age.
    pub staleness_max: Option<time::Duration>,
    /// How reads are answered that must not be stale.
    pub consistent_reads: ConsistentReads,
    /// From so many bytes of JSON on, a consistent list waits for a proof that takes a second or two.
    pub consistent_list_bytes_min: usize,
    /// How to reach the apiserver.
    pub upstream: UpstreamConfig,
    /// Cached from the start, by any name kubectl takes; no two texts are equal.
    pub resources: Vec<String>,
    /// The scopes; empty for the whole cluster.
    pub namespaces: Vec<String>,
    /// How the objects cached are kept.
    pub cache_compression: CacheCompression,
    /// What is kept of the past.
    pub ring: RingConfig,
    /// Limits of what readers may start; `None` where they may not.
    pub on_demand: Option<OnDemandConfig>,
    /// How requests that are not answered from the cache go on; `None` where they do not.
    pub passthrough: Option<PassthroughConfig>,
    /// Limits of what is cached as protobuf; `None` where nothing is.
    pub protobuf: Option<FormConfig>,
    /// Limits of the tables that are cached; `None` where none are.
    pub tables: Option<FormConfig>,
    /// Other replicas.
    pub peer: PeerConfig,
    /// How log lines look.
    pub log_format: LogFormat,
    /// A filter as tracing-subscriber's `EnvFilter` takes it.
    pub log_level: String,
}

/// How the apiserver is reached and asked.
#[derive(Debug, Clone, PartialEq)]
pub struct UpstreamConfig {
    /// Where it is.
    pub settings: UpstreamSettings,
    /// Narrows every list and watch.
    pub field_selector: Option<FieldSelector>,
    /// How the initial state is read.
    pub watch_list: WatchListMode,
    /// Objects per page.
    pub page_size: u32,
    /// The longest silence on a watch.
    pub idle_timeout: time::Duration,
    /// The longest wait for an answer.
    pub request_timeout: time::Duration,
    /// How often schema and server version are compared.
    pub schema_check_interval: time::Duration,
    /// How often each cache is compared with upstream; `None`: never.
    pub self_check_interval: Option<time::Duration>,
    /// Exit when the apiserver cannot be reached at the start.
    pub required: bool,
}

/// What is kept of the past, per resource and scope.
#[derive(Debug, Clone, PartialEq)]
pub struct RingConfig {
    /// Bytes, previous objects included, packed; `None`: a tenth of the cached JSON, at least
    /// [`RingLimits::BYTES_LEAST`](crate::cache::RingLimits::BYTES_LEAST).
    pub bytes_max: Option<u64>,
    /// Events.
    pub events_max: usize,
    /// Age.
    pub age_max: time::Duration,
    /// Bytes of what is remembered of older changes; `None`: a twentieth of the cached JSON, at least
    /// [`RingLimits::RESIDUE_BYTES_LEAST`](crate::cache::RingLimits::RESIDUE_BYTES_LEAST).
    pub residue_bytes_max: Option<u64>,
}

/// Limits of what readers may start.
#[derive(Debug, Clone, PartialEq)]
pub struct OnDemandConfig {
    /// Resources at a time.
    pub resources_max: usize,
    /// Objects of each.
    pub objects_max: usize,
    /// Bytes of all.
    pub bytes_max: u64,
    /// Unused for so long, a resource is let go.
    pub idle_timeout: time::Duration,
}

/// How requests that are not answered from the cache go on upstream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassthroughConfig {
    /// With whose credentials.
    pub credentials: Credentials,
    /// Requests at a time.
    pub requests_max: usize,
    /// Exec, attach, port-forward and websockets too.
    pub upgrades: bool,
}

/// Limits of what is cached in another form than JSON.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FormConfig {
    /// Bytes of all objects of all resources.
    pub bytes_max: u64,
    /// Unused for so long, a resource is let go: as long as one that is cached on demand.
    pub idle_timeout: time::Duration,
}

/// Of each form.
impl Default for FormConfig {
    fn default() -> Self {
        Self { bytes_max: 512 << 20, idle_timeout: time::Duration::from_secs(10 * 60) }
    }
}

/// The one place that names the defaults.
impl Default for ServeConfig {
    fn default() -> Self {
        let seconds = time::Duration::from_secs;
        Self {
            listen: ListenAddress::Tcp(([127, 0, 0, 1], 7443).into()),
            admin_listen: ListenAddress::Tcp(([127, 0, 0, 1], 7444).into()),
            tls: None,
            connections_max: 50_000,
            subscribers_max: 50_000,
            reads_max: 5_000,
            snapshots_max: 256,
            snapshot_queue_timeout: seconds(10),
            memory_bytes_max: None,
            max_concurrent_streams: 1000,
            // Requests are a target and a version: anything long is a mistake or an attack.
            message_bytes_max: 64 << 10,
            keepalive_interval: seconds(30),
            keepalive_timeout: seconds(15),
            snapshot_stall_timeout: seconds(30),
            // Well below the 30 s that a pod is given.
            drain_timeout: seconds(10),
            coalesce_max: crate::fanout::hub::COALESCE_MAX,
            staleness_max: None,
            consistent_reads: ConsistentReads::Probe,
            // Some 3,500 pods: a quarter of a second of the apiserver's CPU time, fifty times that of a proof.
            consistent_list_bytes_min: 16 << 20,
            upstream: UpstreamConfig {
                settings: UpstreamSettings::default(),
                field_selector: None,
                watch_list: WatchListMode::Auto,
                page_size: 500,
                // The apiserver sends a bookmark about once a minute while anything changes.
                idle_timeout: seconds(90),
                request_timeout: seconds(60),
                schema_check_interval: seconds(30),
                self_check_interval: Some(seconds(5 * 60)),
                required: false,
            },
            resources: Vec::new(),
            namespaces: Vec::new(),
            cache_compression: CacheCompression::Off,
            ring: RingConfig {
                bytes_max: None,
                events_max: 100_000,
                age_max: seconds(15 * 60),
                residue_bytes_max: None,
            },
            on_demand: Some(OnDemandConfig {
                resources_max: 16,
                objects_max: 100_000,
                bytes_max: 512 << 20,
                idle_timeout: seconds(10 * 60),
            }),
            passthrough: Some(PassthroughConfig {
                credentials: Credentials::Caller,
                requests_max: 1000,
                upgrades: false,
            }),
            protobuf: Some(FormConfig::default()),
            // Who has an apiserver to spare reads tables there: they cost a third copy of the objects.
            tables: None,
            peer: PeerConfig {
                listen: None,
                peers: None,
                files: None,
                // Within the patience of a rollout; a large cluster's pods take some seconds.
                timeout: seconds(30),
                transfer_bytes_max: None,
            },
            log_format: LogFormat::Text,
            log_level: "info".to_owned(),
        }
    }
}

/// A configuration that cannot be meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("--config {}: {message}", .file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What is wrong, with the line.
        message: String,
    },
    /// A value cannot be used.
    #[error("{flag} {value:?}: {problem}")]
    Value {
        /// The flag; environment and file use the same name in their own spelling.
        flag: &'static str,
        /// What was given.
        value: String,
        /// Why not, and what to do.
        problem: String,
    },
    /// Two settings contradict each other, or one needs another.
    #[error("{0}")]
    Contradiction(String),
}

/// The defaults as `--help` shows them, by the names of [`ServeOptions`]' fields.
pub fn default_texts() -> Vec<(&'static str, String)> {
    let default = ServeConfig::default();
    let limits = default.on_demand.expect("the defaults have limits");
    let passthrough = default.passthrough.expect("the default is to pass on");
    let span = |duration| Duration(duration).to_string();
    vec![
        ("listen", default.listen.to_string()),
        ("admin_listen", default.admin_listen.to_string()),
        ("connections_max", default.connections_max.to_string()),
        ("subscribers_max", default.subscribers_max.to_string()),
        ("reads_max", default.reads_max.to_string()),
        ("snapshots_max", default.snapshots_max.to_string()),
        ("snapshot_queue_timeout", span(default.snapshot_queue_timeout)),
        ("max_concurrent_streams", default.max_concurrent_streams.to_string()),
        ("max_message_size", ByteSize(default.message_bytes_max as u64).to_string()),
        ("keepalive_interval", span(default.keepalive_interval)),
        ("keepalive_timeout", span(default.keepalive_timeout)),
        ("snapshot_stall_timeout", span(default.snapshot_stall_timeout)),
        ("drain_timeout", span(default.drain_timeout)),
        ("coalesce_max", span(default.coalesce_max)),
        ("consistent_reads", "probe".to_owned()),
        ("consistent_list_bytes_min", ByteSize(default.consistent_list_bytes_min as u64).to_string()),
        ("watch_list", "auto".to_owned()),
        ("page_size", default.upstream.page_size.to_string()),
        ("upstream_idle_timeout", span(default.upstream.idle_timeout)),
        ("request_timeout", span(default.upstream.request_timeout)),
        ("schema_check_interval", span(default.upstream.schema_check_interval)),
        ("self_check_interval", span(default.upstream.self_check_interval.unwrap_or_default())),
        ("cache_compression", "off".to_owned()),
        ("ring_events_max", default.ring.events_max.to_string()),
        ("ring_age_max", span(default.ring.age_max)),
        ("on_demand_resources_max", limits.resources_max.to_string()),
        ("on_demand_objects_max", limits.objects_max.to_string()),
        ("on_demand_bytes_max", ByteSize(limits.bytes_max).to_string()),
        ("on_demand_idle_timeout", span(limits.idle_timeout)),
        ("passthrough", "caller".to_owned()),
        ("passthrough_max", passthrough.requests_max.to_string()),
        ("protobuf", "on".to_owned()),
        ("protobuf_bytes_max", ByteSize(FormConfig::default().bytes_max).to_string()),
        ("cache_tables", default.tables.is_some().to_string()),
        ("cache_tables_bytes_max", ByteSize(FormConfig::default().bytes_max).to_string()),
        ("peer_timeout", span(default.peer.timeout)),
        ("log_format", "text".to_owned()),
        ("log_level", default.log_level),
    ]
}
