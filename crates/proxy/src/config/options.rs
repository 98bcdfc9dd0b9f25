//! What `serve` may be given, by flag, environment or file, and how that becomes a [`ServeConfig`].

use std::{collections::HashSet, path::PathBuf, time};

use serde::Deserialize;

use super::{
    ByteSize, CacheCompression, ConfigError, ConsistentReads, Duration, FormConfig, ListenAddress, LogFormat,
    MEMORY_BYTES_MIN, OnDemandConfig, PassthroughConfig, PassthroughMode, PeerConfig, PeersName, ProtobufMode,
    RingConfig, ServeConfig, TlsFiles, UpstreamConfig, WatchListMode,
};
use crate::upstream::{passthrough::Credentials, settings::UpstreamSettings};
use kubefan_model::selector::FieldSelector;

/// What `kubefan serve` takes, as flags, environment and file; all optional. Keys in the file are the field names in camelCase.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, clap::Args)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct ServeOptions {
    /// Where gRPC and the Kubernetes API are served: IP:PORT, :PORT or unix:PATH. Port 0 lets the system choose.
    #[arg(long, env = "KUBEFAN_LISTEN", help_heading = "Serving", value_name = "ADDRESS")]
    pub listen: Option<ListenAddress>,
    /// Where health and metrics are served.
    #[arg(long, env = "KUBEFAN_ADMIN_LISTEN", help_heading = "Serving", value_name = "ADDRESS")]
    pub admin_listen: Option<ListenAddress>,
    /// Serve an address that other machines can reach. Until authorization exists, whoever can reach it reads everything cached.
    #[arg(long, env = "KUBEFAN_INSECURE", help_heading = "Serving", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub insecure: Option<bool>,
    /// Serve over TLS with this certificate chain (PEM). Read again when it has changed.
    #[arg(long, env = "KUBEFAN_TLS_CERT_FILE", help_heading = "Serving", value_name = "FILE")]
    pub tls_cert_file: Option<PathBuf>,
    /// The certificate's private key (PEM).
    #[arg(long, env = "KUBEFAN_TLS_PRIVATE_KEY_FILE", help_heading = "Serving", value_name = "FILE")]
    pub tls_private_key_file: Option<PathBuf>,
    /// Connections served at a time; more are closed at once.
    #[arg(long, env = "KUBEFAN_CONNECTIONS_MAX", help_heading = "Serving", value_name = "COUNT")]
    pub connections_max: Option<usize>,
    /// Watches served from caches at a time, over gRPC and HTTP, and lists over gRPC; more are told to come back later (over HTTP 429).
    #[arg(long, env = "KUBEFAN_SUBSCRIBERS_MAX", help_heading = "Serving", value_name = "COUNT")]
    pub subscribers_max: Option<usize>,
    /// Lists and single objects answered from caches over HTTP at a time; more are told to come back later (429).
    #[arg(long, env = "KUBEFAN_READS_MAX", help_heading = "Serving", value_name = "COUNT")]
    pub reads_max: Option<usize>,
    /// Streams per connection (HTTP/2 SETTINGS_MAX_CONCURRENT_STREAMS).
    #[arg(long, env = "KUBEFAN_MAX_CONCURRENT_STREAMS", help_heading = "Serving", value_name = "COUNT")]
    pub max_concurrent_streams: Option<u32>,
    /// The longest request taken.
    #[arg(long, env = "KUBEFAN_MAX_MESSAGE_SIZE", help_heading = "Serving", value_name = "SIZE")]
    pub max_message_size: Option<ByteSize>,
    /// A connection that was silent for this long gets an HTTP/2 PING.
    #[arg(long, env = "KUBEFAN_KEEPALIVE_INTERVAL", help_heading = "Serving", value_name = "DURATION")]
    pub keepalive_interval: Option<Duration>,
    /// A connection that does not answer a PING for this long is closed.
    #[arg(long, env = "KUBEFAN_KEEPALIVE_TIMEOUT", help_heading = "Serving", value_name = "DURATION")]
    pub keepalive_timeout: Option<Duration>,
    /// A snapshot, a list or an answer that is passed on of which its reader takes next to nothing in this long ends, because it keeps
    /// memory or a place; a megabyte is always enough. Watches and logs wait.
    #[arg(long, env = "KUBEFAN_SNAPSHOT_STALL_TIMEOUT", help_heading = "Serving", value_name = "DURATION")]
    pub snapshot_stall_timeout: Option<Duration>,
    /// Snapshots, lists and catch-ups sent at a time; the others wait for their turn.
    #[arg(long, env = "KUBEFAN_SNAPSHOTS_MAX", help_heading = "Serving", value_name = "COUNT")]
    pub snapshots_max: Option<usize>,
    /// How long a snapshot waits for its turn before its reader is told to come back.
    #[arg(long, env = "KUBEFAN_SNAPSHOT_QUEUE_TIMEOUT", help_heading = "Serving", value_name = "DURATION")]
    pub snapshot_queue_timeout: Option<Duration>,
    /// What the process may take in memory; near it, kubefan keeps less and lets fewer snapshots in
    /// [default: 80% of the limit of its cgroup, if there is one]
    #[arg(long, env = "KUBEFAN_MEMORY_MAX", help_heading = "Serving", value_name = "SIZE")]
    pub memory_max: Option<ByteSize>,
    /// On SIGTERM, streams have this long to end.
    #[arg(long, env = "KUBEFAN_DRAIN_TIMEOUT", help_heading = "Serving", value_name = "DURATION")]
    pub drain_timeout: Option<Duration>,
    /// Under load, events wait for more for up to this long and are sent together; an idle server sends at once. 0s: never wait.
    #[arg(long, env = "KUBEFAN_COALESCE_MAX", help_heading = "Serving", value_name = "DURATION")]
    pub coalesce_max: Option<Duration>,
    /// Refuse lists, gets and new watches (UNAVAILABLE) when the apiserver has not proved the state for this long; streams that are
    /// open go on. At least 90s more than --upstream-idle-timeout [default: never]
    #[arg(long, env = "KUBEFAN_MAX_STALENESS", help_heading = "Serving", value_name = "DURATION")]
    pub max_staleness: Option<Duration>,
    /// Over HTTP, answer consistent lists and watches (resourceVersion unset) from the cache once the apiserver has proved it to be fresh,
    /// or pass them all on to the apiserver.
    #[arg(long, env = "KUBEFAN_CONSISTENT_READS", help_heading = "Serving", value_name = "BY", value_enum)]
    pub consistent_reads: Option<ConsistentReads>,
    /// A consistent list of at least so much JSON waits for a proof that takes a second or two; a smaller one goes to the apiserver
    /// unless the cache is proved at once. 0: all wait.
    #[arg(long, env = "KUBEFAN_CONSISTENT_LIST_BYTES_MIN", help_heading = "Serving", value_name = "SIZE")]
    pub consistent_list_bytes_min: Option<ByteSize>,
    /// The kubeconfig, instead of $KUBECONFIG, ~/.kube/config or the pod's service account.
    #[arg(long, env = "KUBEFAN_KUBECONFIG", help_heading = "Upstream", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig, instead of its current one.
    #[arg(long, env = "KUBEFAN_CONTEXT", help_heading = "Upstream", value_name = "NAME")]
    pub context: Option<String>,
    /// Cache only the objects this matches, such as spec.nodeName=node-1 in a sidecar.
    #[arg(long, env = "KUBEFAN_UPSTREAM_FIELD_SELECTOR", help_heading = "Upstream", value_name = "SELECTOR")]
    pub upstream_field_selector: Option<String>,
    /// How the initial state is read: by WatchList where the apiserver has it, or always by paged LIST.
    #[arg(long, env = "KUBEFAN_WATCH_LIST", help_heading = "Upstream", value_name = "MODE", value_enum)]
    pub watch_list: Option<WatchListMode>,
    /// Objects per page of a LIST.
    #[arg(long, env = "KUBEFAN_PAGE_SIZE", help_heading = "Upstream", value_name = "COUNT")]
    pub page_size: Option<u32>,
    /// A watch that brings nothing for this long, not even the bookmark that comes about once a minute, is started again.
    #[arg(long, env = "KUBEFAN_UPSTREAM_IDLE_TIMEOUT", help_heading = "Upstream", value_name = "DURATION")]
    pub upstream_idle_timeout: Option<Duration>,
    /// The longest a request other than a watch may take.
    #[arg(long, env = "KUBEFAN_REQUEST_TIMEOUT", help_heading = "Upstream", value_name = "DURATION")]
    pub request_timeout: Option<Duration>,
    /// How often a changed schema or server version is looked for, after which the resource is listed again.
    #[arg(long, env = "KUBEFAN_SCHEMA_CHECK_INTERVAL", help_heading = "Upstream", value_name = "DURATION")]
    pub schema_check_interval: Option<Duration>,
    /// How often each cache is compared with the apiserver's metadata at the same version, and listed again if it differs. 0s: never.
    #[arg(long, env = "KUBEFAN_SELF_CHECK_INTERVAL", help_heading = "Upstream", value_name = "DURATION")]
    pub self_check_interval: Option<Duration>,
    /// Exit when the apiserver cannot be reached at the start, instead of trying again.
    #[arg(long, env = "KUBEFAN_REQUIRE_UPSTREAM", help_heading = "Upstream", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub require_upstream: Option<bool>,
    /// Cache this resource from the start; any name kubectl takes. May be repeated, or a list with commas.
    #[arg(
        long = "resource",
        value_delimiter = ',',
        env = "KUBEFAN_RESOURCE",
        help_heading = "Cache",
        value_name = "NAME"
    )]
    pub resources: Option<Vec<String>>,
    /// Cache this namespace only, each with versions of its own. May be repeated, or a list with commas.
    #[arg(
        long = "namespace",
        short = 'n',
        value_delimiter = ',',
        env = "KUBEFAN_NAMESPACE",
        help_heading = "Cache",
        value_name = "NAME"
    )]
    pub namespaces: Option<Vec<String>>,
    /// Keep the objects cached packed: less memory, more work for each snapshot, list and get. Past events always are.
    #[arg(long, env = "KUBEFAN_CACHE_COMPRESSION", help_heading = "Cache", value_name = "METHOD", value_enum)]
    pub cache_compression: Option<CacheCompression>,
    /// Bytes of past events kept per resource, in packed form [default: a tenth of the cached JSON, at least 8Mi]
    #[arg(long, env = "KUBEFAN_RING_BYTES_MAX", help_heading = "Cache", value_name = "SIZE")]
    pub ring_bytes_max: Option<ByteSize>,
    /// Past events kept per resource.
    #[arg(long, env = "KUBEFAN_RING_EVENTS_MAX", help_heading = "Cache", value_name = "COUNT")]
    pub ring_events_max: Option<usize>,
    /// How long past events are kept.
    #[arg(long, env = "KUBEFAN_RING_AGE_MAX", help_heading = "Cache", value_name = "DURATION")]
    pub ring_age_max: Option<Duration>,
    /// Bytes of what is remembered of older events, so that who comes back from far gets each change once instead of everything
    /// [default: a twentieth of the cached JSON, at least 4Mi]
    #[arg(long, env = "KUBEFAN_RESIDUE_BYTES_MAX", help_heading = "Cache", value_name = "SIZE")]
    pub residue_bytes_max: Option<ByteSize>,
    /// Cache other resources when a reader asks for them [default: true if --listen is a loopback address or a Unix socket]
    #[arg(long, env = "KUBEFAN_ON_DEMAND", help_heading = "On demand", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub on_demand: Option<bool>,
    /// Resources cached on demand at a time.
    #[arg(long, env = "KUBEFAN_ON_DEMAND_RESOURCES_MAX", help_heading = "On demand", value_name = "COUNT")]
    pub on_demand_resources_max: Option<usize>,
    /// Objects that one resource cached on demand may have.
    #[arg(long, env = "KUBEFAN_ON_DEMAND_OBJECTS_MAX", help_heading = "On demand", value_name = "COUNT")]
    pub on_demand_objects_max: Option<usize>,
    /// Bytes that all resources cached on demand may have.
    #[arg(long, env = "KUBEFAN_ON_DEMAND_BYTES_MAX", help_heading = "On demand", value_name = "SIZE")]
    pub on_demand_bytes_max: Option<ByteSize>,
    /// A resource cached on demand that nobody reads for this long is let go.
    #[arg(long, env = "KUBEFAN_ON_DEMAND_IDLE_TIMEOUT", help_heading = "On demand", value_name = "DURATION")]
    pub on_demand_idle_timeout: Option<Duration>,
    /// With whose credentials requests that are not answered from the cache go on to the apiserver: the caller's, kubefan's own (only on a
    /// loopback address or a Unix socket: whoever can reach it is kubefan), or not at all.
    #[arg(long, env = "KUBEFAN_PASSTHROUGH", help_heading = "Passthrough", value_name = "MODE", value_enum)]
    pub passthrough: Option<PassthroughMode>,
    /// Requests passed on at a time, watches too; more are told to come back (429).
    #[arg(long, env = "KUBEFAN_PASSTHROUGH_MAX", help_heading = "Passthrough", value_name = "COUNT")]
    pub passthrough_max: Option<usize>,
    /// GatePermit exec, attach, port-forward and websockets on too.
    #[arg(long, env = "KUBEFAN_PASSTHROUGH_UPGRADES", help_heading = "Passthrough", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub passthrough_upgrades: Option<bool>,
    /// Cache objects of built-in types as protobuf too, once a client asks for it; with off such requests go upstream.
    #[arg(long, env = "KUBEFAN_PROTOBUF", help_heading = "On demand", value_name = "MODE", value_enum)]
    pub protobuf: Option<ProtobufMode>,
    /// Bytes that all objects cached as protobuf may have; requests for what finds no room go upstream.
    #[arg(long, env = "KUBEFAN_PROTOBUF_BYTES_MAX", help_heading = "On demand", value_name = "SIZE")]
    pub protobuf_bytes_max: Option<ByteSize>,
    /// Cache what `kubectl get` prints too, as the apiserver's own tables, once a client asks for it: one more watch and copy of the objects
    /// for each such resource. Without it such requests go upstream.
    #[arg(long, env = "KUBEFAN_CACHE_TABLES", help_heading = "On demand", num_args = 0..=1, require_equals = true, default_missing_value = "true", value_name = "BOOL")]
    pub cache_tables: Option<bool>,
    /// Bytes that all cached tables may have; requests for what finds no room go upstream.
    #[arg(long, env = "KUBEFAN_CACHE_TABLES_BYTES_MAX", help_heading = "On demand", value_name = "SIZE")]
    pub cache_tables_bytes_max: Option<ByteSize>,
    /// Where other replicas may take over what is cached, over mutual TLS: IP:PORT or :PORT. Off unless given.
    #[arg(long, env = "KUBEFAN_PEER_LISTEN", help_heading = "Peers", value_name = "ADDRESS")]
    pub peer_listen: Option<ListenAddress>,
    /// Begin with what another replica holds, history included: a name whose addresses are the replicas. Checked against the apiserver; else, and without it, every start lists.
    #[arg(long, env = "KUBEFAN_PEERS", help_heading = "Peers", value_name = "NAME:PORT")]
    pub peers: Option<PeersName>,
    /// Begin by listing, whatever --peers says.
    #[arg(long, env = "KUBEFAN_COLD", help_heading = "Peers", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub cold: Option<bool>,
    /// This replica's certificate chain among its peers (PEM), for server and client authentication, with the name of --peers. Read for each connection.
    #[arg(long, env = "KUBEFAN_PEER_CERT_FILE", help_heading = "Peers", value_name = "FILE")]
    pub peer_cert_file: Option<PathBuf>,
    /// That certificate's private key (PEM).
    #[arg(long, env = "KUBEFAN_PEER_KEY_FILE", help_heading = "Peers", value_name = "FILE")]
    pub peer_key_file: Option<PathBuf>,
    /// The CA of the replicas' certificates (PEM). Whoever has one of its certificates can read everything cached.
    #[arg(long, env = "KUBEFAN_PEER_CA_FILE", help_heading = "Peers", value_name = "FILE")]
    pub peer_ca_file: Option<PathBuf>,
    /// How long a start with what another replica holds may take, its check included; then it lists.
    #[arg(long, env = "KUBEFAN_PEER_TIMEOUT", help_heading = "Peers", value_name = "DURATION")]
    pub peer_timeout: Option<Duration>,
    /// The most that is taken over of one resource, uncompressed [default: half of --memory-max; 4Gi where there is none]
    #[arg(long, env = "KUBEFAN_PEER_TRANSFER_BYTES_MAX", help_heading = "Peers", value_name = "SIZE")]
    pub peer_transfer_bytes_max: Option<ByteSize>,
    /// How log lines on stderr look.
    #[arg(long, env = "KUBEFAN_LOG_FORMAT", help_heading = "Logging", value_name = "FORMAT", value_enum)]
    pub log_format: Option<LogFormat>,
    /// What is logged: off, error, warn or info, also per module as in crate::upstream=warn,info.
    #[arg(long, env = "KUBEFAN_LOG_LEVEL", help_heading = "Logging", value_name = "LEVEL")]
    pub log_level: Option<String>,
    #[serde(rename = "apiVersion")]
    #[arg(skip)]
    pub(super) file_api_version: Option<String>,
    #[serde(rename = "kind")]
    #[arg(skip)]
    pub(super) file_kind: Option<String>,
}

macro_rules! overlay {
    ($upper:ident over $lower:ident: $($field:ident),* $(,)?) => {
        // Without `..`, so that a new field that is forgotten here does not compile.
        ServeOptions { $($field: $upper.$field.or($lower.$field)),* }
    };
}

impl ServeOptions {
    /// These options, completed by `lower` where they are not set. A list replaces a list.
    pub fn overlay(self, lower: Self) -> Self {
        overlay!(self over lower: listen, admin_listen, insecure, tls_cert_file, tls_private_key_file, connections_max, subscribers_max, reads_max, max_concurrent_streams, max_message_size, keepalive_interval, keepalive_timeout, snapshot_stall_timeout, snapshots_max, snapshot_queue_timeout, memory_max, drain_timeout, coalesce_max, max_staleness, consistent_reads, consistent_list_bytes_min, kubeconfig, context, upstream_field_selector, watch_list, page_size, upstream_idle_timeout, request_timeout, schema_check_interval, self_check_interval, require_upstream, resources, namespaces, cache_compression, ring_bytes_max, ring_events_max, ring_age_max, residue_bytes_max, on_demand, on_demand_resources_max, on_demand_objects_max, on_demand_bytes_max, on_demand_idle_timeout, protobuf, protobuf_bytes_max, cache_tables, cache_tables_bytes_max, passthrough, passthrough_max, passthrough_upgrades, peer_listen, peers, cold, peer_cert_file, peer_key_file, peer_ca_file, peer_timeout, peer_transfer_bytes_max, log_format, log_level, file_api_version, file_kind)
    }

    /// Completes the options by the defaults and checks them.
    pub fn validate(self) -> Result<ServeConfig, ConfigError> {
        let default = ServeConfig::default();
        self.check_contradictions(&default)?;
        let peer_files = self.peer_files()?;
        let passthrough = self.passthrough(&default)?;
        let listen = self.listen.clone().unwrap_or(default.listen);
        let on_demand = self.on_demand.unwrap_or_else(|| listen.is_local());
        let limits = default.on_demand.expect("the defaults have limits, for the flags that change one of them");
        let resources =
            names("--resource", self.resources.unwrap_or_default(), is_resource_name, "no name of a resource")?;
        if resources.is_empty() && !on_demand {
            return Err(ConfigError::Contradiction(
                "nothing to serve: name what to cache with --resource, or let readers choose with --on-demand"
                    .to_owned(),
            ));
        }
        let idle_timeout = span("--upstream-idle-timeout", self.upstream_idle_timeout, default.upstream.idle_timeout)?;
        Ok(ServeConfig {
            listen,
            admin_listen: self.admin_listen.unwrap_or(default.admin_listen),
            tls: self
                .tls_cert_file
                .zip(self.tls_private_key_file)
                .map(|(cert_file, private_key_file)| TlsFiles { cert_file, private_key_file }),
            connections_max: at_least("--connections-max", self.connections_max, 1, default.connections_max)?,
            snapshots_max: at_least("--snapshots-max", self.snapshots_max, 1, default.snapshots_max)?,
            snapshot_queue_timeout: span(
                "--snapshot-queue-timeout",
                self.snapshot_queue_timeout,
                default.snapshot_queue_timeout,
            )?,
            memory_bytes_max: self
                .memory_max
                .map(|given| size("--memory-max", Some(given), MEMORY_BYTES_MIN, MEMORY_BYTES_MIN))
                .transpose()?,
            reads_max: at_least("--reads-max", self.reads_max, 1, default.reads_max)?,
            subscribers_max: at_least("--subscribers-max", self.subscribers_max, 1, default.subscribers_max)?,
            max_concurrent_streams: at_least(
                "--max-concurrent-streams",
                self.max_concurrent_streams,
                1,
                default.max_concurrent_streams,
            )?,
            message_bytes_max: usize::try_from(size(
                "--max-message-size",
                self.max_message_size,
                1 << 10,
                default.message_bytes_max as u64,
            )?)
            .unwrap_or(usize::MAX),
            keepalive_interval: span("--keepalive-interval", self.keepalive_interval, default.keepalive_interval)?,
            keepalive_timeout: span("--keepalive-timeout", self.keepalive_timeout, default.keepalive_timeout)?,
            snapshot_stall_timeout: span(
                "--snapshot-stall-timeout",
                self.snapshot_stall_timeout,
                default.snapshot_stall_timeout,
            )?,
            drain_timeout: self.drain_timeout.map_or(default.drain_timeout, |given| given.0),
            coalesce_max: self.coalesce_max.map_or(default.coalesce_max, |given| given.0),
            staleness_max: self.max_staleness.map(|given| staleness(given, idle_timeout)).transpose()?,
            consistent_reads: self.consistent_reads.unwrap_or(default.consistent_reads),
            consistent_list_bytes_min: self
                .consistent_list_bytes_min
                .map_or(default.consistent_list_bytes_min, |given| usize::try_from(given.0).unwrap_or(usize::MAX)),
            upstream: UpstreamConfig {
                settings: UpstreamSettings { kubeconfig: self.kubeconfig, context: self.context },
                field_selector: self.upstream_field_selector.map(check_field_selector).transpose()?,
                watch_list: self.watch_list.unwrap_or(default.upstream.watch_list),
                page_size: at_least("--page-size", self.page_size, 1, default.upstream.page_size)?,
                idle_timeout,
                request_timeout: span("--request-timeout", self.request_timeout, default.upstream.request_timeout)?,
                schema_check_interval: span(
                    "--schema-check-interval",
                    self.schema_check_interval,
                    default.upstream.schema_check_interval,
                )?,
                self_check_interval: match self.self_check_interval {
                    None => default.upstream.self_check_interval,
                    Some(given) if given.0.is_zero() => None,
                    given => Some(span("--self-check-interval", given, time::Duration::ZERO)?),
                },
                required: self.require_upstream.unwrap_or(default.upstream.required),
            },
            resources,
            namespaces: names(
                "--namespace",
                self.namespaces.unwrap_or_default(),
                is_namespace,
                "no name of a namespace",
            )?,
            cache_compression: self.cache_compression.unwrap_or(default.cache_compression),
            ring: RingConfig {
                bytes_max: self.ring_bytes_max.map(|given| size("--ring-bytes-max", Some(given), 1, 1)).transpose()?,
                events_max: at_least("--ring-events-max", self.ring_events_max, 1, default.ring.events_max)?,
                age_max: span("--ring-age-max", self.ring_age_max, default.ring.age_max)?,
                residue_bytes_max: self
                    .residue_bytes_max
                    .map(|given| size("--residue-bytes-max", Some(given), 1, 1))
                    .transpose()?,
            },
            on_demand: on_demand.then_some(OnDemandConfig {
                resources_max: at_least(
                    "--on-demand-resources-max",
                    self.on_demand_resources_max,
                    1,
                    limits.resources_max,
                )?,
                objects_max: at_least("--on-demand-objects-max", self.on_demand_objects_max, 1, limits.objects_max)?,
                bytes_max: size("--on-demand-bytes-max", self.on_demand_bytes_max, 1, limits.bytes_max)?,
                idle_timeout: span("--on-demand-idle-timeout", self.on_demand_idle_timeout, limits.idle_timeout)?,
            }),
            passthrough,
            protobuf: match self.protobuf.unwrap_or(ProtobufMode::On) {
                ProtobufMode::On => {
                    Some(form("--protobuf-bytes-max", self.protobuf_bytes_max, self.on_demand_idle_timeout)?)
                }
                ProtobufMode::Off => None,
            },
            tables: match self.cache_tables {
                Some(true) => {
                    Some(form("--cache-tables-bytes-max", self.cache_tables_bytes_max, self.on_demand_idle_timeout)?)
                }
                Some(false) | None => None,
            },
            peer: PeerConfig {
                listen: self.peer_listen,
                peers: self.peers.filter(|_| self.cold != Some(true)),
                files: peer_files,
                timeout: span("--peer-timeout", self.peer_timeout, default.peer.timeout)?,
                transfer_bytes_max: self
                    .peer_transfer_bytes_max
                    .map(|given| size("--peer-transfer-bytes-max", Some(given), 1 << 20, 1 << 20))
                    .transpose()?,
            },
            log_format: self.log_format.unwrap_or(default.log_format),
            log_level: self.log_level.unwrap_or(default.log_level),
        })
    }

    fn passthrough(&self, default: &ServeConfig) -> Result<Option<PassthroughConfig>, ConfigError> {
        let listen = self.listen.as_ref().unwrap_or(&default.listen);
        let default = default.passthrough.as_ref().expect("the default is to pass on");
        let credentials = match self.passthrough {
            None => default.credentials,
            Some(PassthroughMode::Caller) => Credentials::Caller,
            Some(PassthroughMode::Own) if listen.is_local() => Credentials::Own,
            Some(PassthroughMode::Own) => {
                return Err(ConfigError::Contradiction(format!(
                    "--passthrough=self with --listen {listen}: other machines could reach it, and whoever reaches it would act as \
                     kubefan; listen on 127.0.0.1 or on unix:PATH, or let callers use their own credentials (--passthrough=caller)"
                )));
            }
            Some(PassthroughMode::Off) => {
                let given = [
                    ("--passthrough-max", self.passthrough_max.is_some()),
                    ("--passthrough-upgrades", self.passthrough_upgrades == Some(true)),
                ];
                return match given.iter().find(|(_, given)| *given) {
                    Some((flag, _)) => Err(ConfigError::Contradiction(format!(
                        "{flag} has no effect with --passthrough=off; give one of them"
                    ))),
                    None => Ok(None),
                };
            }
        };
        Ok(Some(PassthroughConfig {
            credentials,
            requests_max: at_least("--passthrough-max", self.passthrough_max, 1, default.requests_max)?,
            upgrades: self.passthrough_upgrades.unwrap_or(default.upgrades),
        }))
    }

    fn check_contradictions(&self, default: &ServeConfig) -> Result<(), ConfigError> {
        let contradiction = |text: String| Err(ConfigError::Contradiction(text));
        let listen = self.listen.as_ref().unwrap_or(&default.listen);
        let admin_listen = self.admin_listen.as_ref().unwrap_or(&default.admin_listen);
        if !listen.is_local() && self.insecure != Some(true) {
            return contradiction(format!(
                "--listen {listen} can be reached by other machines, and until authorization exists whoever can reach it reads \
                 everything cached; listen on 127.0.0.1 or on unix:PATH, or accept this with --insecure"
            ));
        }
        if listen == admin_listen && !matches!(listen, ListenAddress::Tcp(address) if address.port() == 0) {
            return contradiction(format!("--listen and --admin-listen are both {listen}; give each its own address"));
        }
        let ports = [("--listen", listen), ("--admin-listen", admin_listen)];
        let fixed = |address: &&ListenAddress| !matches!(address, ListenAddress::Tcp(address) if address.port() == 0);
        if let Some(peers) = self.peer_listen.as_ref().filter(fixed)
            && let Some((flag, _)) = ports.iter().find(|(_, other)| *other == peers)
        {
            return contradiction(format!("{flag} and --peer-listen are both {peers}; give each its own address"));
        }
        match (&self.tls_cert_file, &self.tls_private_key_file) {
            (Some(_), None) => return contradiction("--tls-cert-file needs --tls-private-key-file".to_owned()),
            (None, Some(_)) => return contradiction("--tls-private-key-file needs --tls-cert-file".to_owned()),
            _ => {}
        }
        if self.cache_tables != Some(true) && self.cache_tables_bytes_max.is_some() {
            return contradiction("--cache-tables-bytes-max has no effect without --cache-tables; add it".to_owned());
        }
        if self.protobuf == Some(ProtobufMode::Off) && self.protobuf_bytes_max.is_some() {
            return contradiction(
                "--protobuf-bytes-max has no effect with --protobuf=off; give only one of them".to_owned(),
            );
        }
        let limits = [
            ("--on-demand-resources-max", self.on_demand_resources_max.is_some()),
            ("--on-demand-objects-max", self.on_demand_objects_max.is_some()),
            ("--on-demand-bytes-max", self.on_demand_bytes_max.is_some()),
            ("--on-demand-idle-timeout", self.on_demand_idle_timeout.is_some()),
        ];
        let on_demand = self.on_demand.unwrap_or_else(|| listen.is_local());
        if self.consistent_reads == Some(ConsistentReads::Upstream) && self.passthrough == Some(PassthroughMode::Off) {
            return contradiction(
                "--consistent-reads=upstream needs a way upstream, and --passthrough=off leaves none; give only one of them"
                    .to_owned(),
            );
        }
        match limits.iter().find(|(_, given)| *given) {
            Some((flag, _)) if !on_demand => {
                contradiction(format!("{flag} has no effect without --on-demand; give both or neither"))
            }
            _ => Ok(()),
        }
    }
}

fn at_least<T: PartialOrd + std::fmt::Display>(
    flag: &'static str,
    given: Option<T>,
    least: T,
    default: T,
) -> Result<T, ConfigError> {
    match given {
        Some(value) if value < least => {
            Err(ConfigError::Value { flag, value: value.to_string(), problem: format!("must be at least {least}") })
        }
        given => Ok(given.unwrap_or(default)),
    }
}

fn size(flag: &'static str, given: Option<ByteSize>, least: u64, default: u64) -> Result<u64, ConfigError> {
    at_least(flag, given, ByteSize(least), ByteSize(default)).map(|size| size.0)
}

/// The limits of another form than JSON; it is let go like what is cached on demand.
fn form(
    flag: &'static str,
    bytes_max: Option<ByteSize>,
    idle_timeout: Option<Duration>,
) -> Result<FormConfig, ConfigError> {
    let default = FormConfig::default();
    Ok(FormConfig {
        bytes_max: size(flag, bytes_max, 1, default.bytes_max)?,
        idle_timeout: span("--on-demand-idle-timeout", idle_timeout, default.idle_timeout)?,
    })
}

/// A duration that is waited for: shorter than a second it would be a busy loop or cut off every answer, longer than a day a timer's overflow.
fn span(flag: &'static str, given: Option<Duration>, default: time::Duration) -> Result<time::Duration, ConfigError> {
    let (least, most) = (time::Duration::from_secs(1), time::Duration::from_secs(24 * 3600));
    match given {
        Some(value) if value.0 < least || value.0 > most => {
            Err(ConfigError::Value { flag, value: value.to_string(), problem: "must be from 1s to 24h".to_owned() })
        }
        given => Ok(given.map_or(default, |value| value.0)),
    }
}

/// A resource that was quiet since it was listed is asked about after the idle timeout, and its bookmark comes about a minute later:
/// below that it would look stale although all is well.
fn staleness(given: Duration, idle_timeout: time::Duration) -> Result<time::Duration, ConfigError> {
    const BOOKMARK: time::Duration = time::Duration::from_secs(90);
    let (least, most) = (idle_timeout + BOOKMARK, time::Duration::from_secs(24 * 3600).max(idle_timeout + BOOKMARK));
    if given.0 < least || given.0 > most {
        let (least, most) = (Duration(least), Duration(most));
        let problem = format!(
            "must be from {least} to {most}: a quiet resource is proved by bookmarks, about once a minute, the first of them after \
             --upstream-idle-timeout; with less it would look stale"
        );
        return Err(ConfigError::Value { flag: "--max-staleness", value: given.to_string(), problem });
    }
    Ok(given.0)
}

fn names(
    flag: &'static str,
    given: Vec<String>,
    is_name: fn(&str) -> bool,
    otherwise: &str,
) -> Result<Vec<String>, ConfigError> {
    let mut seen = HashSet::new();
    for name in &given {
        let problem = if !is_name(name) {
            otherwise.to_owned()
        } else if !seen.insert(name.to_lowercase()) {
            "given twice; once is enough".to_owned()
        } else {
            continue;
        };
        return Err(ConfigError::Value { flag, value: name.clone(), problem });
    }
    Ok(given)
}

fn is_resource_name(name: &str) -> bool {
    let label = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    // "pods.v1." is how kubectl writes the core group with a version.
    name.len() <= 316 && name.strip_suffix('.').unwrap_or(name).split('.').all(label)
}

/// RFC 1123 label, as Kubernetes wants it of a namespace.
fn is_namespace(name: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&name.len()) && name.bytes().all(inner) && !name.starts_with('-') && !name.ends_with('-')
}

/// Checks the form only; which fields a resource has, the apiserver knows best.
fn check_field_selector(selector: String) -> Result<FieldSelector, ConfigError> {
    let bad = selector.split(',').find(|term| {
        let field = term.split(['=', '!']).next().unwrap_or_default();
        field.trim().is_empty() || !(term.contains('='))
    });
    let problem = match (bad, FieldSelector::parse(&selector)) {
        (Some(term), _) => format!("{term:?} is no term of a field selector; write it like spec.nodeName=node-1"),
        (None, Err(error)) => error.to_string(),
        (None, Ok(selector)) => return Ok(selector),
    };
    Err(ConfigError::Value { flag: "--upstream-field-selector", problem, value: selector })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(options: ServeOptions) -> String {
        options.validate().unwrap_err().to_string()
    }

    #[test]
    fn no_options_at_all_are_the_defaults() {
        assert_eq!(ServeOptions::default().validate(), Ok(ServeConfig::default()));
    }

    #[test]
    fn what_is_given_above_goes_before_what_is_given_below() {
        let upper = ServeOptions { page_size: Some(7), resources: Some(vec!["pods".into()]), ..Default::default() };
        let lower = ServeOptions {
            page_size: Some(9),
            ring_events_max: Some(11),
            resources: Some(vec!["nodes".into(), "services".into()]),
            ..Default::default()
        };
        let config = upper.overlay(lower).validate().unwrap();
        assert_eq!((config.upstream.page_size, config.ring.events_max), (7, 11));
        assert_eq!(config.resources, ["pods"]);
    }

    #[test]
    fn other_machines_are_let_in_only_with_insecure_and_choose_resources_only_with_on_demand() {
        let open = || ServeOptions {
            listen: Some(":7443".parse().unwrap()),
            resources: Some(vec!["pods".into()]),
            ..Default::default()
        };
        assert!(
            problem(open())
                .starts_with("--listen [::]:7443 can be reached by other machines, and until authorization exists")
        );
        let config = ServeOptions { insecure: Some(true), ..open() }.validate().unwrap();
        assert_eq!(config.on_demand, None);
        let config = ServeOptions { insecure: Some(true), on_demand: Some(true), ..open() }.validate().unwrap();
        assert_eq!(config.on_demand, ServeConfig::default().on_demand);
        let config =
            ServeOptions { admin_listen: Some("0.0.0.0:7444".parse().unwrap()), ..Default::default() }.validate();
        assert!(config.is_ok(), "health and metrics may be seen");
    }

    #[test]
    fn requests_are_passed_on_with_the_callers_credentials_unless_it_is_said_otherwise() {
        let mode = |mode, listen: &str| {
            let listen = Some(listen.parse().unwrap());
            ServeOptions { passthrough: mode, listen, ..Default::default() }.validate().unwrap().passthrough
        };
        let credentials = |given, listen| mode(given, listen).map(|passthrough| passthrough.credentials);
        assert_eq!(credentials(None, "127.0.0.1:0"), Some(Credentials::Caller));
        assert_eq!(credentials(Some(PassthroughMode::Own), "[::1]:0"), Some(Credentials::Own));
        assert_eq!(credentials(Some(PassthroughMode::Own), "unix:/run/kubefan.sock"), Some(Credentials::Own));
        assert_eq!(mode(Some(PassthroughMode::Off), "127.0.0.1:0"), None);
    }

    #[test]
    fn each_contradiction_names_its_flags() {
        let file = || Some(PathBuf::from("x.pem"));
        let cases = [
            (
                ServeOptions { tls_cert_file: file(), ..Default::default() },
                "--tls-cert-file needs --tls-private-key-file",
            ),
            (
                ServeOptions { tls_private_key_file: file(), ..Default::default() },
                "--tls-private-key-file needs --tls-cert-file",
            ),
            (
                ServeOptions { listen: Some("127.0.0.1:7444".parse().unwrap()), ..Default::default() },
                "--listen and --admin-listen are both 127.0.0.1:7444",
            ),
            (
                ServeOptions { on_demand: Some(false), ..Default::default() },
                "nothing to serve: name what to cache with --resource",
            ),
            (
                ServeOptions { on_demand: Some(false), on_demand_objects_max: Some(5), ..Default::default() },
                "--on-demand-objects-max has no effect without --on-demand",
            ),
            (
                ServeOptions {
                    listen: Some(":7443".parse().unwrap()),
                    insecure: Some(true),
                    on_demand: Some(true),
                    passthrough: Some(PassthroughMode::Own),
                    ..Default::default()
                },
                "--passthrough=self with --listen [::]:7443",
            ),
            (
                ServeOptions {
                    passthrough: Some(PassthroughMode::Off),
                    consistent_reads: Some(ConsistentReads::Upstream),
                    ..Default::default()
                },
                "--consistent-reads=upstream needs a way upstream, and --passthrough=off leaves none",
            ),
            (
                ServeOptions {
                    passthrough: Some(PassthroughMode::Off),
                    passthrough_max: Some(5),
                    ..Default::default()
                },
                "--passthrough-max has no effect with --passthrough=off",
            ),
        ];
        for (options, expected) in cases {
            let problem = problem(options);
            assert!(problem.starts_with(expected), "{problem}");
        }
    }

    #[test]
    fn a_value_that_cannot_be_meant_is_named_with_its_flag() {
        let list = |names: &[&str]| Some(names.iter().map(|name| name.to_string()).collect());
        let cases = [
            (
                ServeOptions { resources: list(&["pods", "Pods"]), ..Default::default() },
                "--resource \"Pods\": given twice",
            ),
            (
                ServeOptions { resources: list(&["a/b"]), ..Default::default() },
                "--resource \"a/b\": no name of a resource",
            ),
            (
                ServeOptions { namespaces: list(&["Default"]), ..Default::default() },
                "--namespace \"Default\": no name of a namespace",
            ),
            (ServeOptions { page_size: Some(0), ..Default::default() }, "--page-size \"0\": must be at least 1"),
            (
                ServeOptions { max_message_size: Some(ByteSize(3)), ..Default::default() },
                "--max-message-size \"3\": must be at least 1Ki",
            ),
            (
                ServeOptions { ring_age_max: Some("10ms".parse().unwrap()), ..Default::default() },
                "--ring-age-max \"10ms\": must be from 1s to 24h",
            ),
            (
                ServeOptions { max_staleness: Some("2m".parse().unwrap()), ..Default::default() },
                "--max-staleness \"2m\": must be from 3m to 24h: a quiet resource",
            ),
            (
                ServeOptions { upstream_field_selector: Some("spec.nodeName".into()), ..Default::default() },
                "--upstream-field-selector \"spec.nodeName\": \"spec.nodeName\" is no term of a field selector",
            ),
            (
                ServeOptions { upstream_field_selector: Some("spec.nodeName=a=b".into()), ..Default::default() },
                "--upstream-field-selector \"spec.nodeName=a=b\": invalid field selector: unescaped character",
            ),
        ];
        for (options, expected) in cases {
            let problem = problem(options);
            assert!(problem.starts_with(expected), "{problem}");
        }
        let enough = ServeOptions { max_staleness: Some("3m".parse().unwrap()), ..Default::default() };
        assert_eq!(enough.validate().unwrap().staleness_max, Some(time::Duration::from_secs(180)));
        for good in ["pods", "pods.v1.", "widgets.v1.example.com", "Pod"] {
            assert!(is_resource_name(good), "{good}");
        }
        for bad in ["", ".", "a..b", "a b", "../x"] {
            assert!(!is_resource_name(bad), "{bad}");
        }
    }
}
