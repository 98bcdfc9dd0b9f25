//! The section "Serving": the data port, the admin port and their limits.

use std::{net::IpAddr, path::PathBuf, time};

use ipnet::IpNet;
use kubefan_cache::budget::SELECTOR_BYTES_MAX;
use kubefan_fanout::hub::COALESCE_MAX;
use kubefan_informers::memory_pressure::MEMORY_BYTES_MIN;
use kubefan_managed_tls::ObjectName;
use kubefan_server::{
    kube::{
        allowed_hosts::{AllowedHosts, HostPattern},
        feature_gates::FeatureGates,
    },
    transport::{
        tls_options::{TlsVersion, cipher_suite},
        unix_socket::SocketMode,
    },
};
use rustls::CipherSuite;
use serde::Deserialize;

use super::{
    ByteSize, ConfigError, Duration, ListenAddress,
    managed_tls::{self, TlsSource},
    rules::{any, any_duration, at_least, optional, or_false, size_in_memory, unusable, wait, wait_or_never},
    section::section,
};

/// The answer to a read that must not be stale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ConsistentReads {
    /// From the cache, after upstream has proved that it is fresh.
    Probe,
    /// By upstream.
    Upstream,
}

kubefan_common::display_choice!(ConsistentReads);
section! {
    heading: "Serving";
    /// The options for serving, as given.
    options: ServingOptions;
    /// The settings for serving.
    config: ServingConfig {
        /// The certificate of the data port; `None`: plaintext.
        tls: Option<TlsSource>, tls_source;
    }

    /// Serve gRPC and the Kubernetes API here: IP:PORT, :PORT or unix:PATH. Port 0 lets the system
    /// choose.
    listen("ADDRESS"): ListenAddress = loopback(7443) => listen: ListenAddress, any;
    /// Serve health and metrics here.
    admin_listen("ADDRESS"): ListenAddress = loopback(7444) => admin_listen: ListenAddress, any;
    /// The rights of the files of Unix sockets (--listen, --admin-listen), in octal. A client needs
    /// the right to write.
    listen_mode("MODE"): SocketMode = SocketMode::default() => listen_mode: SocketMode, any;
    /// Without TLS, also answer HTTP requests that name this host: NAME, *.DOMAIN or *. Addresses,
    /// localhost and, off loopback, Services are always answered. Another name could be that of a
    /// web page that a browser shows. Repeat it, or separate names by commas.
    #[arg(value_delimiter = ',')]
    allowed_hosts("NAME"): Vec<String> => allowed_hosts: AllowedHosts, host_names;
    /// Believe the X-Forwarded-For of proxies at this address or in this network (CIDR): their
    /// clients have limits and shares of their own, except of connections. Repeat it, or separate
    /// networks by commas.
    #[arg(value_delimiter = ',')]
    trusted_proxies("NETWORK"): Vec<String> => trusted_proxies: Vec<IpNet>, networks;
    /// Serve over TLS with this certificate chain (PEM). It is read again when it changes.
    tls_cert_file("FILE"): PathBuf;
    /// The private key of the certificate (PEM).
    tls_private_key_file("FILE"): PathBuf;
    /// Serve over TLS with a certificate that kubefan itself makes and renews, with its own CA, in
    /// this Secret. The Secret must exist, may be empty, and kubefan needs the rights to get and
    /// update it. All replicas share it. Peers use it too, unless --peer-cert-file is given.
    tls_managed_secret("NAMESPACE/NAME"): ObjectName;
    /// The DNS names that the managed certificate is for. Repeat it, or separate names by commas.
    #[arg(value_delimiter = ',')]
    tls_managed_dns_names("NAME"): Vec<String>;
    /// Write the managed CA to these ConfigMaps, as ca.crt, for clients. They must exist, and
    /// kubefan needs the rights to get and update them. Repeat it, or separate names by commas.
    #[arg(value_delimiter = ',')]
    tls_managed_ca_config_maps("NAMESPACE/NAME"): Vec<ObjectName>;
    /// Write the managed certificate, its key and the CA to these Secrets, without the CA's key:
    /// for servers that must not hold that, such as a kubefan on each node. They must exist, and
    /// kubefan needs the rights to get and update them. Repeat it, or separate names by commas.
    #[arg(value_delimiter = ',')]
    tls_managed_copies("NAMESPACE/NAME"): Vec<ObjectName>;
    /// The oldest version of TLS that clients may use.
    tls_min_version("VERSION"): TlsVersion = TlsVersion::Tls12 => tls_min_version: TlsVersion, any;
    /// Memory budget of the process. Close to it, kubefan retains less history and starts fewer
    /// snapshots [default: 80% of the limit of its cgroup, if there is one]
    memory_max("SIZE"): ByteSize => memory_bytes_max: Option<usize>, optional(size_in_memory(MEMORY_BYTES_MIN));
    /// On SIGTERM, streams have this long to end. They end one after the other in the first three
    /// quarters of it, or faster if they are few.
    // Well below the 30 s that a pod is given.
    drain_timeout("DURATION"): Duration = Duration::from_secs(10) => drain_timeout: time::Duration, any_duration;
    /// Refuse lists, gets and new watches (UNAVAILABLE) if the apiserver has not proved the state
    /// for this long; open streams continue. At least 90s more than tuning.upstreamIdleTimeout
    /// [default: never]
    max_staleness("DURATION"): Duration => staleness_max: Option<time::Duration>, optional(any_duration);

    [keys]
    /// Connections at a time; more are closed at once, and the last ones are reserved for
    /// addresses with few. Lower it to protect a small pod; raise it together with the limit of
    /// open files if connections are refused.
    /// [default: 50000, or as many as the limit of open files leaves, and one per 64Ki of
    /// --memory-max]
    limits.connections_max("COUNT"): usize => connections_max: Option<usize>, optional(at_least(1));
    /// Watches served from caches at a time, over gRPC and HTTP, and all other streams over gRPC;
    /// more are asked to retry later (over HTTP 429). Raise it, with memory, if subscribers are
    /// refused; lower it to protect a small replica.
    limits.subscribers_max("COUNT"): usize = 50_000 => subscribers_max: usize, at_least(1);
    /// Watches and streams of one identity at a time: a pod by its token, another user, or an
    /// address where the user is not known. Set it if one program opens more watches than it needs.
    /// [default: no limit]
    limits.subscribers_max_per_identity("COUNT"): usize
        => subscribers_max_per_identity: Option<usize>, optional(at_least(1));
    /// gRPC calls at a time whose request has not arrived yet; more are asked to retry later. Each
    /// has 10s to send its request. Raise it only if many thousand clients connect at the same
    /// moment and are refused.
    limits.calls_pending_max("COUNT"): usize = 10_000 => calls_pending_max: usize, at_least(1);
    /// Memory of requests that wait for the verdict about their caller
    /// (--access=authorized); more are asked to retry later (over HTTP 429). Raise it if
    /// requests are refused while the apiserver answers reviews slowly.
    limits.pending_requests_memory_max("SIZE"): ByteSize = ByteSize(64 << 20)
        => pending_bytes_max: usize, size_in_memory(1 << 20);
    /// Reads served from caches at a time: lists and single objects over HTTP, and unary calls of
    /// the watch service over gRPC; more are asked to retry later (over HTTP 429). Lower it if
    /// bursts of lists take too much CPU or memory; raise it if they are refused although both are
    /// idle.
    limits.reads_max("COUNT"): usize = 5_000 => reads_max: usize, at_least(1);
    /// Reads of one identity at a time. Set it if one program lists again and again.
    /// [default: no limit]
    limits.reads_max_per_identity("COUNT"): usize => reads_max_per_identity: Option<usize>, optional(at_least(1));
    /// Terms of a label selector and a field selector together; a request with more is refused, or
    /// over HTTP forwarded to the apiserver. Raise it if a program of yours needs longer selectors
    /// than the default allows.
    // A term is tested for every object and many events.
    limits.selector_terms_max("COUNT"): usize = 100 => selector_terms_max: usize, at_least(1);
    /// Values of a label selector in all its sets together, as in `app in (a,b)`; a request with
    /// more is refused, or over HTTP forwarded to the apiserver. Raise it if a program of yours
    /// selects by longer sets than the default allows.
    limits.selector_values_max("COUNT"): usize = 2000 => selector_values_max: usize, at_least(1);
    /// Memory of the selectors of all streams and reads, and of the field masks of streams; one
    /// that finds no room is asked to retry later (over HTTP 429). At most an eighth of the memory
    /// budget. Raise it, with memory, if many thousand streams have long selectors of their own.
    limits.selector_memory_max("SIZE"): ByteSize = ByteSize(SELECTOR_BYTES_MAX as u64)
        => selector_bytes_max: usize, size_in_memory(1 << 20);
    /// Streams per connection (HTTP/2 SETTINGS_MAX_CONCURRENT_STREAMS). Raise it for a client that
    /// multiplexes more streams over one connection, lower it to spread clients over connections.
    limits.max_concurrent_streams("COUNT"): u32 = 1000 => max_concurrent_streams: u32, at_least(1);
    /// The longest request. Raise it if a legitimate selector or projection does not fit.
    // A request is a target and a version: anything long is a mistake or an attack.
    limits.max_message_size("SIZE"): ByteSize = ByteSize(64 << 10) => message_bytes_max: usize, size_in_memory(1 << 10);
    /// Snapshots, lists and catch-ups sent at a time; the others wait. Lower it if initial states
    /// take too much memory at once, raise it if they wait although CPU and network are idle.
    limits.snapshots_max("COUNT"): usize = 256 => snapshots_max: usize, at_least(1);
    /// End connections of about this age, so that clients choose a replica again: up to a tenth
    /// less or more, gRPC streams with a status that asks clients to resume at once, requests and
    /// watches over HTTP by themselves. 0s: never. Set it, to about an hour, if clients stay on few
    /// replicas after a scale-up and no peers even them out.
    limits.connection_age_max("DURATION"): Duration = Duration::from_secs(0)
        => connection_age_max: Option<time::Duration>, wait_or_never;
    /// Requests per second that all clients together may start at the apiserver while no kubefan
    /// can be reached, of clients that turn to it then. Answers tell them this rate, and how many
    /// clients share it. Lower it if the apiserver has little to spare; raise it if clients then
    /// wait too long for their turn.
    // A client has one start per window of clients / rate: 2,000 clients have one in 40 s.
    limits.fallback_starts_per_second("COUNT"): u32 = 50 => fallback_starts_per_second: u32, at_least(1);
    /// Validity of a managed certificate. It is renewed after two thirds of this time.
    /// Shorten it if your rules demand shorter lives.
    tuning.tls_managed_lifetime("DURATION"): Duration, default: Duration(managed_tls::DEFAULT_LIFETIMES.certificate);
    /// Validity of a managed CA. The next one is made before its end, in time for
    /// tuning.tlsManagedLifetime and twice tuning.tlsManagedCaOverlap. At least twice as long as
    /// these together. Shorten it if your rules demand shorter lives.
    tuning.tls_managed_ca_lifetime("DURATION"): Duration, default: Duration(managed_tls::DEFAULT_LIFETIMES.ca);
    /// Time that a new managed CA is published before it signs a certificate. Clients must read the
    /// CA again within this time. Lengthen it if some clients read the CA less often.
    tuning.tls_managed_ca_overlap("DURATION"): Duration, default: Duration(managed_tls::DEFAULT_LIFETIMES.overlap);
    /// Use only these cipher suites of TLS 1.2, by their names in Go. Those of TLS 1.3 are always
    /// on. Set it if your rules forbid some of them.
    /// [default: all that kubefan has]
    tuning.tls_cipher_suites("NAME"): Vec<String> => tls_cipher_suites: Vec<CipherSuite>, cipher_suites;
    /// Send an HTTP/2 PING on a connection that was silent for this long. Shorten it if a balancer
    /// in between closes silent connections earlier.
    tuning.keepalive_interval("DURATION"): Duration = Duration::from_secs(30) => keepalive_interval: time::Duration, wait;
    /// Close a connection that does not answer a PING within this time. Lengthen it on networks
    /// that stall for longer.
    tuning.keepalive_timeout("DURATION"): Duration = Duration::from_secs(15) => keepalive_timeout: time::Duration, wait;
    /// End a snapshot, a list or a forwarded response if the client reads almost nothing in this
    /// time, because it occupies memory or a permit. A megabyte is always enough, and needed on
    /// average after twice this time. A watch over HTTP/1.1 ends if nothing is read while events
    /// wait. Logs and sessions wait. Lengthen it for clients on very slow links.
    tuning.snapshot_stall_timeout("DURATION"): Duration = Duration::from_secs(30)
        => snapshot_stall_timeout: time::Duration, wait;
    /// The longest that a snapshot waits to start before its client is asked to retry. Lengthen it
    /// if clients would rather wait than retry.
    tuning.snapshot_queue_timeout("DURATION"): Duration = Duration::from_secs(10)
        => snapshot_queue_timeout: time::Duration, wait;
    /// Under load, collect events for up to this long and send them together; an idle server sends
    /// at once. 0s: never wait. Lower it if latency under load counts more than CPU.
    tuning.coalesce_max("DURATION"): Duration = Duration(COALESCE_MAX) => coalesce_max: time::Duration, any_duration;
    /// Over HTTP, answer consistent lists and watches (resourceVersion unset) from the cache after
    /// the apiserver has proved that it is fresh, or forward them all to the apiserver. Choose
    /// upstream to rule out the proof of freshness as a cause.
    tuning.consistent_reads("probe or upstream"): ConsistentReads = ConsistentReads::Probe => consistent_reads: ConsistentReads, any;
    /// A consistent list of at least this much JSON waits for a proof, which takes a second or two;
    /// a smaller one goes to the apiserver unless the cache is proved at once. 0: all wait. Lower
    /// it to spare the apiserver more lists, raise it if clients need large lists without a wait.
    // 16Mi are about 3,500 pods. Listing them costs the apiserver a quarter of a second of CPU
    // time, fifty times as much as a proof.
    tuning.consistent_list_bytes_min("SIZE"): ByteSize = ByteSize(16 << 20)
        => consistent_list_bytes_min: usize, size_in_memory(0);
    /// Answer alpha features of the apiserver from the caches, also if the apiserver lacks them:
    /// ShardedListAndWatch=true (shardSelector), ManagedFieldsOptOut=true
    /// (drop=metadata.managedFields in Accept). Requests that the caches cannot answer get a 400.
    /// Set it if clients use one of these before the apiserver has it.
    /// [default: all are false]
    tuning.feature_gates("NAME=BOOL"): Vec<String> => feature_gates: FeatureGates, gates;
    /// While a self-check has found a difference, or memory is short (kubefan_alarm), let the
    /// apiserver answer reads, as with mode Passthrough for every resource. Clients with a fallback
    /// then leave kubefan. Set it while the first programs move to kubefan.
    tuning.passthrough_on_alarm("BOOL"): bool => passthrough_on_alarm: bool, or_false;
    /// Over HTTP, compress watches, and lists and objects of 128 KiB or more, for clients that
    /// accept gzip. Turn it off if kubefan's CPU time costs more than bytes on the network.
    tuning.gzip("BOOL"): bool = true => gzip: bool, any;
}

fn loopback(port: u16) -> ListenAddress {
    ListenAddress::Tcp(([127, 0, 0, 1], port).into())
}

fn host_names(flag: &'static str, given: Option<Vec<String>>) -> Result<AllowedHosts, ConfigError> {
    let parse = |name: &String| name.parse::<HostPattern>().map_err(|error| unusable(flag, name, error.to_string()));
    Ok(AllowedHosts::new(given.unwrap_or_default().iter().map(parse).collect::<Result<_, _>>()?))
}

fn gates(flag: &'static str, given: Option<Vec<String>>) -> Result<FeatureGates, ConfigError> {
    let mut gates = FeatureGates::default();
    for text in given.iter().flatten() {
        gates.set(text).map_err(|problem| unusable(flag, text, problem))?;
    }
    Ok(gates)
}

fn networks(flag: &'static str, given: Option<Vec<String>>) -> Result<Vec<IpNet>, ConfigError> {
    let network = |text: &String| text.parse().ok().or_else(|| Some(IpNet::from(text.parse::<IpAddr>().ok()?)));
    let problem = "neither an address nor a network; write it like 10.0.0.7 or 10.0.0.0/8";
    let parse = |text: &String| network(text).ok_or_else(|| unusable(flag, text, problem));
    given.iter().flatten().map(parse).collect()
}

fn tls_source(options: &ServingOptions) -> Result<Option<TlsSource>, ConfigError> {
    managed_tls::source(&managed_tls::Given {
        secret: options.tls_managed_secret.clone(),
        dns_names: options.tls_managed_dns_names.clone(),
        ca_config_maps: options.tls_managed_ca_config_maps.clone(),
        copies: options.tls_managed_copies.clone(),
        lifetime: options.tls_managed_lifetime,
        ca_lifetime: options.tls_managed_ca_lifetime,
        ca_overlap: options.tls_managed_ca_overlap,
        cert_file: options.tls_cert_file.clone(),
        private_key_file: options.tls_private_key_file.clone(),
    })
}

fn cipher_suites(flag: &'static str, given: Option<Vec<String>>) -> Result<Vec<CipherSuite>, ConfigError> {
    let suite = |name: &String| cipher_suite(name).map_err(|problem| unusable(flag, name, problem));
    given.iter().flatten().map(suite).collect()
}
