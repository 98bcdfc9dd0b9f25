//! What every scenario needs for one run: the server under test as a fresh process, synced, and ways to subscribe to it.

use std::{path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use prost::Message;
use tokio::time::{Instant, sleep};

use super::{
    BenchError, BenchOptions, Contender, ContenderKind, Projection, Protocol,
    board::Board,
    child::ServerProcess,
    figures::Figures,
    floor::Floor,
    link::Connector,
    load::{Driven, Load, Trigger, drive},
    process::Meter,
    receivers::{Receivers, Wire},
    rest::Endpoint,
    source::Source,
    tls::Certificate,
};
use kubefan_common::proto::v1alpha1::{self, ProjectionType, Target, WatchRequest};
use kubefan_model::format::Encoding;
use kubefan_proxy::upstream::client::encode_query;

/// For a server to have listed everything.
const SYNC_TIMEOUT: Duration = Duration::from_secs(180);
/// For every subscriber to be connected and to have its initial state.
pub(super) const READY_TIMEOUT: Duration = Duration::from_secs(180);
/// Memory is taken for settled when it has not moved by a hundredth for this long.
const SETTLED: Duration = Duration::from_secs(1);
/// Allocators give memory back after 10 s.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(15);
const SETTLE_INTERVAL: Duration = Duration::from_millis(100);

/// One run of one server.
pub(super) struct Stage<'a> {
    pub(super) options: &'a BenchOptions,
    pub(super) contender: &'a Contender,
    pub(super) certificate: Option<&'a Certificate>,
    pub(super) endpoint: Option<&'a Endpoint>,
    /// This program, which also is the floor.
    pub(super) program: &'a Path,
}

/// The server under test.
pub(super) struct Server {
    pub(super) connector: Connector,
    pub(super) meter: Meter,
    pid: u32,
    /// Of the state it began with, which may be later than the last change made here: others write too.
    version: u64,
    /// Where it is spoken to over HTTP.
    endpoint: Option<Endpoint>,
    /// Ends with this, if it is ours.
    #[expect(dead_code, reason = "held for its end")]
    process: Option<ServerProcess>,
}

/// What a subscriber selects.
#[derive(Debug, Clone, Default)]
pub(super) struct Selection {
    pub(super) name: String,
    pub(super) labels: String,
    pub(super) fields: String,
}

impl Server {
    /// What a subscriber that is to hear of all later changes starts from: one that the server can go on from.
    pub(super) fn version(&self, source: &Source) -> u64 {
        self.version.max(source.version())
    }

    /// How it is spoken to over HTTP.
    pub(super) fn http(&self) -> Endpoint {
        self.endpoint.clone().unwrap_or_else(|| Endpoint::open(self.connector.clone()))
    }

    /// A meter of its own, for where the server itself is lent.
    pub(super) fn meter_again(&self) -> Meter {
        Meter::new(self.pid)
    }
}

impl Stage<'_> {
    /// Starts the server where it does not run yet, and waits until it serves the pods.
    pub(super) async fn server(&self, source: &Source) -> Result<Server, BenchError> {
        self.server_with(source, &[]).await
    }

    /// The same with flags of the scenario's own. One that runs already has those it was started with.
    pub(super) async fn server_with(&self, source: &Source, flags: &[String]) -> Result<Server, BenchError> {
        let mut server = match &self.contender.kind {
            ContenderKind::Program(program) => self.start(program, source, flags).await?,
            ContenderKind::Running { address, pid } => {
                let connector = Connector { address: *address, tls: None };
                Server { connector, meter: Meter::new(*pid), pid: *pid, version: 0, endpoint: None, process: None }
            }
            ContenderKind::Apiserver { pid } => {
                let Some(endpoint) = self.endpoint.cloned() else {
                    return Err(BenchError::Cluster("it needs a kubeconfig".to_owned()));
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
                });
            }
        };
        // A snapshot of nothing is there once everything is.
        let board = Arc::new(Board::new(1, false));
        let none = Selection { name: "none".to_owned(), ..Selection::default() };
        let _probe = self.subscribe(&server, source, &board, None, move |_| none.clone());
        board.all_ready(SYNC_TIMEOUT).await?;
        server.version = board.version();
        if self.options.protocol == Protocol::Http {
            server.endpoint = Some(Endpoint::open(server.connector.clone()));
        }
        Ok(server)
    }

    async fn start(&self, program: &Path, source: &Source, flags: &[String]) -> Result<Server, BenchError> {
        let mut args = vec!["serve".into(), "--kubeconfig".into(), source.kubeconfig().as_os_str().to_owned()];
        args.extend(["--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--resource=pods"].map(Into::into));
        args.extend(flags.iter().map(Into::into));
        if let Some(certificate) = self.certificate {
            args.extend(["--tls-cert-file".into(), certificate.cert_file.as_os_str().to_owned()]);
            args.extend(["--tls-private-key-file".into(), certificate.key_file.as_os_str().to_owned()]);
        }
        let name = &self.contender.name;
        let process = ServerProcess::start(name, self.program, program, args, "kubefan: serving gRPC ").await?;
        let tls = self.certificate.map(|certificate| certificate.client.clone());
        let connector = Connector { address: process.address, tls };
        let pid = process.pid;
        Ok(Server { connector, meter: Meter::new(pid), pid, version: 0, endpoint: None, process: Some(process) })
    }

    /// Subscribes as many as the board has, from a version or with a snapshot.
    pub(super) fn subscribe(
        &self,
        server: &Server,
        source: &Source,
        board: &Arc<Board>,
        version: Option<u64>,
        selection: impl Fn(usize) -> Selection + Send + Sync + 'static,
    ) -> Receivers {
        let (options, namespace) = (self.options, source.namespace().to_owned());
        let wire = match &server.endpoint {
            Some(endpoint) => {
                let path = move |stream| watch_path(&namespace, &selection(stream), version);
                let initial = if version.is_none() { source.objects() as u64 } else { 0 };
                Wire::Http { endpoint: endpoint.clone(), path: Arc::new(path), initial, windows: options.windows }
            }
            None => {
                let (projection, encoding) = (options.projection, options.encoding);
                let request = move |stream| request(&namespace, selection(stream), version, projection, encoding);
                let has_snapshot = version.is_none();
                Wire::Grpc { request: Arc::new(request), has_snapshot, windows: options.windows }
            }
        };
        self.receivers(server.connector.clone(), wire, board)
    }

    /// What a change costs the server that is written to, while nobody watches, in microseconds; nothing for all others.
    pub(super) async fn write_cost(
        &self,
        load: Load,
        source: &mut Source,
        server: &mut Server,
    ) -> Result<f64, BenchError> {
        if !matches!(self.contender.kind, ContenderKind::Apiserver { .. }) {
            return Ok(0.0);
        }
        let nobody = Board::new(0, false);
        let duration = self.options.duration;
        let driven = drive(load, Trigger::Source(source), &mut server.meter, &nobody, 0, duration).await?;
        Ok(driven.cpu_micros_per_event())
    }

    fn receivers(&self, connector: Connector, wire: Wire, board: &Arc<Board>) -> Receivers {
        Receivers::start(connector, wire, self.options.streams_per_connection, self.options.receiver_threads, board)
    }

    /// A floor with as many subscribers, and its receivers. `initial` messages are sent to each as soon as it connects, and are
    /// not waited for here.
    pub(super) async fn floor(
        &self,
        subscribers: usize,
        message_bytes: u64,
        initial: u64,
    ) -> Result<(Floor, Meter, Arc<Board>, impl FnOnce() -> Receivers), BenchError> {
        let mut floor = Floor::start(self.program).await?;
        let board = Arc::new(Board::new(subscribers, true));
        let streams = self.options.streams_per_connection.min(subscribers) as u64;
        if initial > 0 {
            floor.send(initial * message_bytes * streams).await?;
        }
        let connector = Connector { address: floor.process.address, tls: None };
        let (meter, own) = (Meter::new(floor.process.pid), board.clone());
        let wire = Wire::Raw { message_bytes, ready_bytes: 0 };
        let start = move || self.receivers(connector, wire, &own);
        Ok((floor, meter, board, start))
    }

    /// What the floor takes for the same load as a server was driven with, in microseconds per delivery.
    pub(super) async fn floor_driven(
        &self,
        load: Load,
        subscribers: usize,
        driven: &Driven,
        figures: &mut Figures,
    ) -> Result<(), BenchError> {
        let bytes = whole_bytes(driven.bytes());
        let (mut floor, mut meter, board, start) = self.floor(subscribers, bytes, 0).await?;
        let _receivers = start();
        board.all_ready(READY_TIMEOUT).await?;
        let order = bytes * self.options.streams_per_connection.min(subscribers) as u64;
        let (warm_up, duration) = (self.options.warm_up(), self.options.duration);
        let deliveries = subscribers as u64;
        drive(load, Trigger::Floor(&mut floor, order), &mut meter, &board, deliveries, warm_up).await?;
        let floor = drive(load, Trigger::Floor(&mut floor, order), &mut meter, &board, deliveries, duration).await?;
        figures.set_floor(floor.cpu_micros());
        Ok(())
    }
}

/// What a delivery of the floor has: at least a byte.
pub(super) fn whole_bytes(bytes: f64) -> u64 {
    bytes.round().max(1.0) as u64
}

/// Waits until a process's memory no longer moves; its resident bytes then.
pub(super) async fn settled(meter: &Meter) -> Result<u64, BenchError> {
    let start = Instant::now();
    let (mut last, mut since) = (meter.resident_bytes()?, start);
    while start.elapsed() < SETTLE_TIMEOUT && since.elapsed() < SETTLED {
        sleep(SETTLE_INTERVAL).await;
        let now = meter.resident_bytes()?;
        if now.abs_diff(last) > last / 100 {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(meter.resident_bytes()?)
}

/// The request of one watch.
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
    let (has_version, is_delta) = (version.is_some(), encoding == Encoding::ZstdDelta);
    let resource_version = version.map(|version| version.to_string()).unwrap_or_default();
    let projection = (projection == Projection::Metadata)
        .then(|| v1alpha1::Projection { r#type: ProjectionType::Metadata.into(), ..v1alpha1::Projection::default() });
    let encoding = match encoding {
        Encoding::Json => v1alpha1::Encoding::Unspecified,
        Encoding::Zstd => v1alpha1::Encoding::Zstd,
        Encoding::ZstdDelta => v1alpha1::Encoding::ZstdDelta,
    };
    WatchRequest {
        target: Some(target),
        resource_version,
        projection,
        encoding: encoding.into(),
        // As a client says that has read the state: else the first change of every object would come in full.
        state_kept: has_version && is_delta,
        ..WatchRequest::default()
    }
    .encode_to_vec()
    .into()
}

/// The same over HTTP. Without a version it sends the initial state as a watch, which is how informers ask for it.
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
    match namespace {
        "" => format!("/api/v1/pods{query}"),
        namespace => format!("/api/v1/namespaces/{namespace}/pods{query}"),
    }
}
