//! Subscribers that are informers of the client library: over gRPC, and over HTTP. Each is a
//! program with a store, an index and several handlers, one of them slow and one of them late, that
//! restarts now and then.

mod both_servers;
mod record;
mod source;

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use kubefan_client::{
    Backlog, Client, ClientOptions, Deleted, Encoding as WireEncoding, EventHandler, HandlerOptions, ListWatch,
    ListerWatcher, Object, ObjectKey, OnExpired, OnLag, RawJson, Registration, SharedInformer,
    http::{HttpClient, HttpListWatch, HttpListWatchOptions, HttpResource},
};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use tokio::time::{sleep, timeout};

use super::{
    history::Encoding,
    http_transport::{RequestOptions, Servers, Transport},
    selection::Selection,
    sides::Sides,
    subscriber::{self, ClientSettings},
    truth::read_place,
    world::World,
};

pub(crate) use both_servers::{ApiserverUse, FALLBACK_STARTS};
pub(crate) use record::{Call, InformerEntry, InformerHistory, InformerRecorder, Observed, SLOW, Stored};
use source::ObservedSource;

/// The protocol of an informer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Grpc,
    /// A connection for each request, each to the next replica, as behind a load balancer.
    Http1,
    /// One connection for all requests.
    Http2,
}

/// An informer and its requests.
#[derive(Clone, Debug)]
pub(crate) struct InformerSpec {
    /// Number of the informer among all subscribers of the seed.
    pub(crate) number: usize,
    pub(crate) selection: Selection,
    pub(crate) protocol: Protocol,
    pub(crate) apiserver: ApiserverUse,
    /// HTTP only: requests accept gzip.
    pub(crate) accepts_gzip: bool,
    /// gRPC only.
    pub(crate) encoding: Encoding,
    /// gRPC only: `on_lag` CONFLATE.
    pub(crate) conflates: bool,
    /// gRPC only: `on_expired` RESTART.
    pub(crate) restarts: bool,
    /// Whether it lists, and does not ask for the first state by a watch.
    pub(crate) lists: bool,
    pub(crate) page_size: u32,
    /// A new object under an old name is a deletion and an addition.
    pub(crate) recreated_as_two_calls: bool,
    /// The slow handler's calls are merged above this number.
    pub(crate) backlog: usize,
    /// The slow handler takes this long for each call.
    pub(crate) pace: Duration,
    /// The program runs for this long, then starts again without its state.
    pub(crate) lifetime: Duration,
}

/// The time in which a slow handler can be called for every object.
const ALL_CALLS_MAX: Duration = Duration::from_secs(30);

impl InformerSpec {
    /// Draws an informer. The first two of a seed use gRPC and HTTP.
    /// `codings` draws the content coding.
    pub(crate) fn draw(
        random: &mut Pcg64Mcg,
        codings: &mut Pcg64Mcg,
        number: usize,
        place: usize,
        objects: usize,
    ) -> InformerSpec {
        let http = [Protocol::Http1, Protocol::Http2];
        let any = [Protocol::Grpc, Protocol::Http1, Protocol::Http2];
        let encodings = [Encoding::Json, Encoding::Zstd, Encoding::Deltas];
        InformerSpec {
            number,
            selection: Selection::ALL[random.random_range(0..Selection::ALL.len())],
            protocol: match place {
                0 => Protocol::Grpc,
                1 => http[random.random_range(0..2)],
                _ => any[random.random_range(0..3)],
            },
            apiserver: ApiserverUse::Never,
            accepts_gzip: codings.random_bool(0.5),
            encoding: encodings[random.random_range(0..3)],
            conflates: random.random_bool(0.7),
            restarts: random.random_bool(0.5),
            lists: random.random_bool(0.3),
            page_size: [7, 50, 500][random.random_range(0..3)],
            recreated_as_two_calls: random.random_bool(0.3),
            backlog: random.random_range(2..30),
            pace: Duration::from_millis(random.random_range(1..400)).min(ALL_CALLS_MAX / objects as u32),
            lifetime: Duration::from_secs(random.random_range(60..1500)),
        }
    }

    /// Whether some of its states and events have versions of the apiserver, which have no places.
    pub(crate) fn reads_over_http(&self) -> bool {
        self.protocol != Protocol::Grpc || self.apiserver != ApiserverUse::Never
    }

    /// Whether the objects' bytes are in canonical form.
    pub(crate) fn canonical(&self) -> bool {
        self.protocol == Protocol::Grpc && self.encoding == Encoding::Deltas
    }
}

impl std::fmt::Display for InformerSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let InformerSpec { number, selection, protocol, apiserver, accepts_gzip, encoding, .. } = self;
        match protocol {
            Protocol::Grpc => write!(f, "informer {number} ({selection:?}, gRPC, {encoding:?}")?,
            Protocol::Http1 | Protocol::Http2 => {
                let gzip = if *accepts_gzip { ", gzip" } else { "" };
                write!(f, "informer {number} ({selection:?}, {protocol:?}{gzip}")?;
            }
        }
        match apiserver {
            ApiserverUse::Never => write!(f, ")"),
            ApiserverUse::FallsBack => write!(f, ", falls back)"),
            ApiserverUse::Moves => write!(f, ", moves)"),
        }
    }
}

/// The name of the index of every informer.
const INDEX: &str = "namespace and node";

/// An informer that runs, and its observations so far. Clones are the same informer.
#[derive(Clone)]
pub(crate) struct RunningInformer {
    pub(crate) recorder: InformerRecorder,
    current: Arc<Mutex<Option<Life>>>,
}

/// The program around an informer, from its start to its end.
#[derive(Clone)]
struct Life {
    informer: SharedInformer<RawJson>,
    handlers: Vec<Registration>,
    /// The slow handler is inside a call.
    is_busy: Arc<AtomicBool>,
}

impl RunningInformer {
    pub(crate) fn new(recorder: InformerRecorder) -> RunningInformer {
        RunningInformer { recorder, current: Arc::default() }
    }

    /// Reads the whole store, as a program may do at any moment.
    pub(crate) fn read(&self) {
        let current = self.current.lock().unwrap().clone();
        if let Some(Life { informer, .. }) = current {
            let index = check_index(&informer);
            self.recorder.note(Observed::Read { snapshot: informer.indexer().snapshot(), index });
        }
    }

    /// Whether the store has this version, and no handler has anything left to do.
    pub(crate) fn has_all(&self, version: u64) -> bool {
        let current = self.current.lock().unwrap();
        current.as_ref().is_some_and(|Life { informer, handlers, is_busy }| {
            let reached = read_place(&informer.resource_version()).unwrap_or(0);
            reached >= version
                && informer.longest_backlog() == 0
                && !is_busy.load(Ordering::Relaxed)
                && handlers.iter().all(Registration::has_synced)
        })
    }
}

/// Compares the index with a scan of the store.
fn check_index(informer: &SharedInformer<RawJson>) -> Result<(), String> {
    let indexer = informer.indexer();
    let mut scanned: BTreeMap<String, Vec<ObjectKey>> = BTreeMap::new();
    for object in indexer.list() {
        for value in index(&object) {
            scanned.entry(value).or_default().push(object.key().clone());
        }
    }
    let mut values = indexer.index_values(INDEX).map_err(|error| error.to_string())?;
    values.sort();
    if !values.iter().eq(scanned.keys()) {
        return Err(format!("the index has the values {values:?}, and the objects {:?}", scanned.keys()));
    }
    for (value, scanned) in scanned {
        let keys = indexer.index_keys(INDEX, &value).map_err(|error| error.to_string())?;
        if keys != scanned {
            return Err(format!("the index has {keys:?} under {value}, and the store {scanned:?}"));
        }
    }
    Ok(())
}

/// The namespace, and the node if there is one.
fn index(object: &Object<RawJson>) -> Vec<String> {
    const FIELD: &str = r#""nodeName":""#;
    let json = std::str::from_utf8(object.as_bytes()).unwrap_or_default();
    let node = json.split_once(FIELD).and_then(|(_, rest)| rest.split_once('"')).map(|(node, _)| node.to_owned());
    [object.namespace().to_owned()].into_iter().chain(node).collect()
}

/// Runs an informer for ever, as a program that restarts.
pub(crate) async fn run(
    world: Arc<World>,
    spec: InformerSpec,
    settings: ClientSettings,
    running: RunningInformer,
    mut random: Pcg64Mcg,
) {
    sleep(settings.start_after).await;
    let turn = Arc::new(AtomicUsize::new(settings.first_replica));
    loop {
        let mut source = source(&world, &spec, &settings, &turn, random.random());
        if spec.apiserver == ApiserverUse::FallsBack {
            let seed = random.random();
            source = both_servers::with_fallback(source, &world, &spec, &settings, &running.recorder, seed);
        }
        let source = ObservedSource::new(source, world.clone(), spec.clone(), running.recorder.clone());
        let mut builder = SharedInformer::builder(source).seed(random.random()).page_size(spec.page_size);
        if spec.recreated_as_two_calls {
            builder = builder.recreated_as_delete_and_add();
        }
        let informer = builder.build();
        informer.indexer().add_index(INDEX, index).unwrap();
        running.recorder.note(Observed::Started);
        let life = Life { informer: informer.clone(), handlers: Vec::new(), is_busy: Arc::default() };
        let program = Program { world: &world, spec: &spec, running: &running, life: life.clone() };
        *running.current.lock().unwrap() = Some(life);
        program.add(0, Backlog::default());
        program.add(SLOW, Backlog::Conflate(spec.backlog));
        let late = fork(&mut random);
        let reads = fork(&mut random);
        let _ = timeout(spec.lifetime, async {
            tokio::select! {
                biased;
                never = program.read_now_and_then(reads) => never,
                ended = informer.run(std::future::pending::<()>()) => panic!("an informer has ended by itself: {ended:?}"),
                never = program.add_late(late) => never,
            }
        })
        .await;
        *running.current.lock().unwrap() = None;
        world.controls[spec.number].stay_away().await;
        sleep(Duration::from_millis(random.random_range(50..1500))).await;
    }
}

fn fork(random: &mut Pcg64Mcg) -> Pcg64Mcg {
    Pcg64Mcg::seed_from_u64(random.random())
}

/// Returns the source of an informer.
fn source(
    world: &Arc<World>,
    spec: &InformerSpec,
    settings: &ClientSettings,
    turn: &Arc<AtomicUsize>,
    seed: u64,
) -> Arc<dyn ListerWatcher> {
    let target = spec.selection.target();
    if spec.protocol == Protocol::Grpc {
        let channel = subscriber::channel(world, spec.number, settings, turn);
        let client = Client::from_channel(channel, "kubefan.test", &ClientOptions::default());
        let encoding = match spec.encoding {
            Encoding::Json => WireEncoding::Json,
            Encoding::Zstd => WireEncoding::Zstd,
            Encoding::Deltas => WireEncoding::ZstdDelta,
        };
        let list_watch = ListWatch::new(client, "pods", &target.namespace, &target.field_selector)
            .label_selector(&target.label_selector)
            .encoding(encoding)
            .bookmark_interval(settings.bookmark_interval)
            .tweak_grpc(|options| {
                options.on_lag = if spec.conflates { OnLag::Conflate } else { OnLag::Expire };
                options.on_expired = if spec.restarts { OnExpired::Restart } else { OnExpired::Fail };
                options.seed = Some(seed);
            });
        return Arc::new(list_watch);
    }
    let moves = spec.apiserver == ApiserverUse::Moves;
    let servers = if moves { Servers::Both(Sides::new(seed)) } else { Servers::Replicas };
    let is_http2 = spec.protocol == Protocol::Http2;
    let options = RequestOptions { is_http2, accepts_gzip: spec.accepts_gzip, servers };
    http_source(world, spec, settings, turn, seed, options)
}

/// Returns a source over HTTP.
fn http_source(
    world: &Arc<World>,
    spec: &InformerSpec,
    settings: &ClientSettings,
    turn: &Arc<AtomicUsize>,
    seed: u64,
    options: RequestOptions,
) -> Arc<dyn ListerWatcher> {
    let target = spec.selection.target();
    let transport = Transport::new(world, spec.number, settings, turn, options);
    let options = HttpListWatchOptions {
        namespace: target.namespace,
        label_selector: target.label_selector,
        field_selector: target.field_selector,
        seed: Some(seed),
        ..HttpListWatchOptions::default()
    };
    let pods = HttpResource::Path { api: "api/v1".to_owned(), resource: "pods".to_owned() };
    Arc::new(HttpListWatch::new(HttpClient::from_transport(Arc::new(transport)), pods, options).unwrap())
}

/// One life of the program around an informer.
struct Program<'a> {
    world: &'a Arc<World>,
    spec: &'a InformerSpec,
    running: &'a RunningInformer,
    life: Life,
}

impl Program<'_> {
    fn add(&self, number: usize, backlog: Backlog) {
        let recorder = self.running.recorder.clone();
        let pace = (number == SLOW).then(|| {
            let number = self.spec.number;
            let each = self.spec.pace;
            Pace { world: self.world.clone(), number, each, is_busy: self.life.is_busy.clone() }
        });
        recorder.note(Observed::HandlerAdded(number));
        let handler = Handler { number, recorder, informer: self.life.informer.clone(), pace };
        let options = HandlerOptions { backlog, ..HandlerOptions::default() };
        let registration = self.life.informer.add_event_handler_with_options(handler, options).unwrap();
        if let Some(life) = &mut *self.running.current.lock().unwrap() {
            life.handlers.push(registration);
        }
    }

    /// Adds a handler some time after the start.
    async fn add_late(&self, mut random: Pcg64Mcg) -> Infallible {
        sleep(Duration::from_millis(random.random_range(1000..200_000))).await;
        self.add(2, Backlog::default());
        std::future::pending().await
    }

    async fn read_now_and_then(&self, mut random: Pcg64Mcg) -> Infallible {
        loop {
            sleep(Duration::from_millis(random.random_range(10..15_000))).await;
            self.running.read();
        }
    }
}

/// Records its calls.
struct Handler {
    number: usize,
    recorder: InformerRecorder,
    informer: SharedInformer<RawJson>,
    /// `None` if a call takes no time.
    pace: Option<Pace>,
}

/// Slowness of a handler. It also stalls whenever its subscriber does.
struct Pace {
    world: Arc<World>,
    number: usize,
    each: Duration,
    is_busy: Arc<AtomicBool>,
}

impl Handler {
    async fn called(&self, call: Call) {
        let stored = self.informer.indexer().get(call.key());
        self.recorder.note(Observed::Call { handler: self.number, call, stored });
        if let Some(Pace { world, number, each, is_busy }) = &self.pace {
            is_busy.store(true, Ordering::Relaxed);
            sleep(*each).await;
            world.controls[*number].pause().await;
            is_busy.store(false, Ordering::Relaxed);
        }
    }
}

impl EventHandler<RawJson> for Handler {
    async fn on_add(&mut self, object: Arc<Object<RawJson>>, _: bool) {
        self.called(Call::Add(object)).await;
    }

    async fn on_update(&mut self, old: Arc<Object<RawJson>>, new: Arc<Object<RawJson>>) {
        self.called(Call::Update(old, new)).await;
    }

    async fn on_delete(&mut self, deleted: Deleted<RawJson>) {
        self.called(Call::Delete(deleted)).await;
    }
}
