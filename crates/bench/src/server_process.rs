//! One run of one server: starts the server under test as a new process, waits until it has synced,
//! subscribes to it, and measures the floor for the same load.

use std::{net::SocketAddr, path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use kubefan_app::config::settings;
use kubefan_common::{
    encoding::Encoding,
    proto::v1alpha1::{self, ProjectionType, Target, WatchRequest},
};
use kubefan_upstream::client::encode_query;
use prost::Message;
use tempfile::NamedTempFile;
use tokio::time::{Instant, sleep};

use super::{
    BenchError, BenchOptions, Projection, Protocol, ServerKind, ServerSpec,
    child::ServerProcess,
    connector::Connector,
    counters::Counters,
    figures::Figures,
    floor::Floor,
    load::{Load, LoadResult, Trigger, drive},
    process::Meter,
    receivers::{HttpWatches, ReceiverKind, Receivers},
    rest::Endpoint,
    source::{Source, pods_path},
    tls::Certificate,
};

/// Time limit for a server to list all pods.
const SYNC_TIMEOUT: Duration = Duration::from_secs(180);
/// Time limit for all subscribers to connect and receive their initial state.
pub(super) const READY_TIMEOUT: Duration = Duration::from_secs(180);
/// Memory counts as settled if it has changed by less than one percent for this long.
const SETTLED: Duration = Duration::from_secs(1);
/// Longer than the 10 s after which allocators return unused memory.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(15);
const SETTLE_INTERVAL: Duration = Duration::from_millis(100);

/// The inputs of one run with one server.
pub(super) struct Run<'a> {
    pub(super) options: &'a BenchOptions,
    pub(super) spec: &'a ServerSpec,
    pub(super) certificate: Option<&'a Certificate>,
    pub(super) endpoint: Option<&'a Endpoint>,
    /// The path of this program, which also runs the floor.
    pub(super) program: &'a Path,
}

/// The server under test.
pub(super) struct Server {
    pub(super) connector: Connector,
    pub(super) meter: Meter,
    pid: u32,
    /// The version at which the server had synced. It may be later than the last change made by the
    /// benchmark, because a cluster has other writers.
    version: u64,
    /// Set if subscribers use HTTP.
    endpoint: Option<Endpoint>,
    /// Set if the benchmark started the server. Dropping it kills the process.
    process: Option<ServerProcess>,
    /// The configuration file, which the process looks at again and again.
    _file: Option<NamedTempFile>,
}

/// The pods that a subscriber selects.
#[derive(Debug, Clone, Default)]
pub(super) struct Selection {
    pub(super) name: String,
    pub(super) labels: String,
    pub(super) fields: String,
}

impl Server {
    /// A version that the server can resume from. A subscriber that does so receives all later
    /// changes.
    pub(super) fn version(&self, source: &Source) -> u64 {
        self.version.max(source.version())
    }

    /// The server's HTTP endpoint.
    pub(super) fn http_endpoint(&self) -> Endpoint {
        self.endpoint.clone().unwrap_or_else(|| Endpoint::without_credentials(self.connector.clone()))
    }

    /// The address of the server's admin port.
    ///
    /// # Errors
    /// If the benchmark did not start the server.
    pub(super) async fn admin_address(&self) -> Result<SocketAddr, BenchError> {
        match &self.process {
            Some(process) => process.admin_address().await,
            None => Err(BenchError::NotStarted),
        }
    }

    /// The process, if the benchmark started it.
    pub(super) fn process(&self) -> Option<&ServerProcess> {
        self.process.as_ref()
    }

    /// A second meter, for use while `self.meter` is borrowed.
    pub(super) fn new_meter(&self) -> Meter {
        Meter::new(self.pid)
    }
}

impl Run<'_> {
    /// Starts the server unless it is already running, and waits until it has synced the pods.
    pub(super) async fn start_server(&self, source: &Source) -> Result<Server, BenchError> {
        self.start_server_with(source, &[]).await
    }

    /// Like [`Self::start_server`], with additional flags, and settings such as
    /// `limits.ringEventsMax=5`. A server that is already running keeps its own.
    pub(super) async fn start_server_with(&self, source: &Source, flags: &[String]) -> Result<Server, BenchError> {
        let mut server = match &self.spec.kind {
            ServerKind::Program(program) => self.start(program, source, flags).await?,
            ServerKind::Running { address, pid } => {
                let connector = Connector { address: *address, tls: None };
                Server {
                    connector,
                    meter: Meter::new(*pid),
                    pid: *pid,
                    version: 0,
                    endpoint: None,
                    process: None,
                    _file: None,
                }
            }
            ServerKind::Apiserver { pid } => {
                let Some(endpoint) = self.endpoint.cloned() else {
                    return Err(BenchError::Cluster("measuring an apiserver needs a kubeconfig".to_owned()));
                };
                let connector = endpoint.connector.clone();
                let endpoint = Some(endpoint);
                return Ok(Server {
                    connector,
                    meter: Meter::new(*pid),
                    pid: *pid,
                    version: 0,
                    endpoint,
                    process: None,
                    _file: None,
                });
            }
        };
        // This selects no pod, so its empty snapshot arrives once the server has synced.
        let counters = Arc::new(Counters::new(1, false));
        let none = Selection { name: "none".to_owned(), ..Selection::default() };
        let _probe = self.subscribe(&server, source, &counters, None, move |_| none.clone());
        counters.all_ready(SYNC_TIMEOUT).await?;
        server.version = counters.version();
        if self.options.protocol == Protocol::Http {
            server.endpoint = Some(Endpoint::without_credentials(server.connector.clone()));
        }
        Ok(server)
    }

    async fn start(&self, program: &Path, source: &Source, flags: &[String]) -> Result<Server, BenchError> {
        let mut args = vec!["serve".into(), "--kubeconfig".into(), source.kubeconfig().as_os_str().to_owned()];
        args.extend(["--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--resource=pods"].map(Into::into));
        let (given, flags): (Vec<&str>, Vec<&str>) =
            flags.iter().map(String::as_str).partition(|flag| settings::is_setting(flag));
        args.extend(flags.iter().map(Into::into));
        let file = (!given.is_empty()).then(|| write(&settings::text_of(&given))).transpose()?;
        args.extend(file.iter().flat_map(|file| ["--config".into(), file.path().as_os_str().to_owned()]));
        if let Some(certificate) = self.certificate {
            args.extend(certificate.server_args());
            // The delivery is measured, not the reviews of callers.
            if !flags.iter().any(|flag| flag.starts_with("--access")) {
                args.push("--access=local".into());
            }
        }
        let name = &self.spec.name;
        let process = ServerProcess::start(name, self.program, program, args, "kubefan: serving gRPC ").await?;
        let tls = self.certificate.map(|certificate| certificate.client.clone());
        let connector = Connector { address: process.address, tls };
        let pid = process.pid;
        Ok(Server {
            connector,
            meter: Meter::new(pid),
            pid,
            version: 0,
            endpoint: None,
            process: Some(process),
            _file: file,
        })
    }

    /// Starts one subscriber per stream in `counters`: from `version`, or with a snapshot if it is
    /// `None`.
    pub(super) fn subscribe(
        &self,
        server: &Server,
        source: &Source,
        counters: &Arc<Counters>,
        version: Option<u64>,
        selection: impl Fn(usize) -> Selection + Send + Sync + 'static,
    ) -> Receivers {
        let protocol = if server.endpoint.is_some() { Protocol::Http } else { Protocol::Grpc };
        self.subscribe_over(protocol, server, source, counters, version, selection)
    }

    /// Like [`Self::subscribe`], over this protocol.
    pub(super) fn subscribe_over(
        &self,
        protocol: Protocol,
        server: &Server,
        source: &Source,
        counters: &Arc<Counters>,
        version: Option<u64>,
        selection: impl Fn(usize) -> Selection + Send + Sync + 'static,
    ) -> Receivers {
        let options = self.options;
        let namespace = source.namespace().to_owned();
        let kind = match protocol {
            Protocol::Http => {
                let path = move |stream| watch_path(&namespace, &selection(stream), version);
                let initial = if version.is_none() { source.objects() as u64 } else { 0 };
                let watches = HttpWatches {
                    endpoint: server.http_endpoint(),
                    path: Arc::new(path),
                    encoding: options.encoding,
                    initial,
                };
                ReceiverKind::Http { watches, windows: options.windows }
            }
            Protocol::Grpc => {
                let projection = options.projection;
                let encoding = options.encoding.grpc();
                let request = move |stream| request(&namespace, selection(stream), version, projection, encoding);
                let has_snapshot = version.is_none();
                ReceiverKind::Grpc { request: Arc::new(request), has_snapshot, windows: options.windows }
            }
        };
        self.receivers(server.connector.clone(), kind, counters)
    }

    /// The CPU time per change, in microseconds, of an apiserver that has no watchers. 0 for every
    /// other server, because changes are not written to it.
    pub(super) async fn write_cost(
        &self,
        load: Load,
        source: &mut Source,
        server: &mut Server,
    ) -> Result<f64, BenchError> {
        if !matches!(self.spec.kind, ServerKind::Apiserver { .. }) {
            return Ok(0.0);
        }
        let no_subscribers = Counters::new(0, false);
        let duration = self.options.duration;
        let load_result = drive(load, Trigger::Source(source), &mut server.meter, &no_subscribers, 0, duration).await?;
        Ok(load_result.cpu_micros_per_event())
    }

    fn receivers(&self, connector: Connector, kind: ReceiverKind, counters: &Arc<Counters>) -> Receivers {
        Receivers::start(connector, kind, self.options.streams_per_connection, self.options.receiver_threads, counters)
    }

    /// Starts a floor process and prepares its receivers, which start when the returned function is
    /// called. The floor sends `initial` messages to each subscriber as soon as it connects.
    pub(super) async fn start_floor(
        &self,
        subscribers: usize,
        message_bytes: u64,
        initial: u64,
    ) -> Result<(Floor, Meter, Arc<Counters>, impl FnOnce() -> Receivers), BenchError> {
        let mut floor = Floor::start(self.program, self.certificate).await?;
        let counters = Arc::new(Counters::new(subscribers, true));
        let streams = self.options.streams_per_connection.min(subscribers) as u64;
        if initial > 0 {
            floor.send(initial * message_bytes * streams).await?;
        }
        let tls = self.certificate.map(|certificate| certificate.client.clone());
        let connector = Connector { address: floor.process.address, tls };
        let meter = Meter::new(floor.process.pid);
        let own = counters.clone();
        let kind = ReceiverKind::Raw { message_bytes, ready_bytes: 0 };
        let start = move || self.receivers(connector, kind, &own);
        Ok((floor, meter, counters, start))
    }

    /// Measures the floor under the same load as a server, and adds its CPU time to `figures`.
    pub(super) async fn measure_floor(
        &self,
        load: Load,
        subscribers: usize,
        load_result: &LoadResult,
        figures: &mut Figures,
    ) -> Result<(), BenchError> {
        let bytes = floor_message_bytes(load_result.bytes());
        let (mut floor, mut meter, counters, start) = self.start_floor(subscribers, bytes, 0).await?;
        let _receivers = start();
        counters.all_ready(READY_TIMEOUT).await?;
        let order = bytes * self.options.streams_per_connection.min(subscribers) as u64;
        let warm_up = self.options.warm_up();
        let duration = self.options.duration;
        let deliveries = subscribers as u64;
        drive(load, Trigger::Floor(&mut floor, order), &mut meter, &counters, deliveries, warm_up).await?;
        let floor = drive(load, Trigger::Floor(&mut floor, order), &mut meter, &counters, deliveries, duration).await?;
        figures.set_floor(floor.cpu_micros());
        Ok(())
    }
}

/// Writes a configuration file.
fn write(text: &str) -> Result<NamedTempFile, BenchError> {
    let file = NamedTempFile::with_suffix(".yaml")?;
    std::fs::write(file.path(), text)?;
    Ok(file)
}

/// The size of one message of the floor in bytes, at least 1.
pub(super) fn floor_message_bytes(bytes: f64) -> u64 {
    bytes.round().max(1.0) as u64
}

/// Waits until a process's memory has settled. Returns its resident memory in bytes.
pub(super) async fn settled_memory(meter: &Meter) -> Result<u64, BenchError> {
    let start = Instant::now();
    let mut last = meter.resident_bytes()?;
    let mut since = start;
    while start.elapsed() < SETTLE_TIMEOUT && since.elapsed() < SETTLED {
        sleep(SETTLE_INTERVAL).await;
        let now = meter.resident_bytes()?;
        if now.abs_diff(last) > last / 100 {
            last = now;
            since = Instant::now();
        }
    }
    Ok(meter.resident_bytes()?)
}

/// The encoded gRPC request of one watch.
fn request(
    namespace: &str,
    selection: Selection,
    version: Option<u64>,
    projection: Projection,
    encoding: Encoding,
) -> Bytes {
    let target = Target {
        resource: "pods".to_owned(),
        namespace: namespace.to_owned(),
        name: selection.name,
        label_selector: selection.labels,
        field_selector: selection.fields,
        ..Target::default()
    };
    let has_version = version.is_some();
    let is_delta = encoding == Encoding::ZstdDelta;
    let resource_version = version.map(|version| version.to_string()).unwrap_or_default();
    let projection = (projection == Projection::Metadata)
        .then(|| v1alpha1::Projection { r#type: ProjectionType::Metadata.into(), ..v1alpha1::Projection::default() });
    WatchRequest {
        target: Some(target),
        resource_version,
        projection,
        encoding: v1alpha1::Encoding::from(encoding).into(),
        // A client that has read the state says so. Otherwise the server would send the first
        // change of every object in full instead of as a delta.
        state_kept: has_version && is_delta,
        ..WatchRequest::default()
    }
    .encode_to_vec()
    .into()
}

/// The URL path of one watch over HTTP. Without a version it requests the initial events in the
/// watch, as informers do.
fn watch_path(namespace: &str, selection: &Selection, version: Option<u64>) -> String {
    let version = version.map(|version| version.to_string());
    let start = match &version {
        Some(version) => vec![("resourceVersion", &**version)],
        None => vec![
            ("resourceVersion", "0"),
            ("sendInitialEvents", "true"),
            ("resourceVersionMatch", "NotOlderThan"),
            ("allowWatchBookmarks", "true"),
        ],
    };
    let selectors = [("labelSelector", &*selection.labels), ("fieldSelector", &*selection.fields)];
    let selectors = selectors.into_iter().filter(|(_, text)| !text.is_empty());
    let query = encode_query([("watch", "1")].into_iter().chain(start).chain(selectors));
    format!("{}{query}", pods_path(namespace))
}
