//! `hostile`: honest subscribers receive changes at a rate, and an honest client lists every
//! second, first beside the attackers against a sink, then beside the same attackers against the
//! server.
//!
//! Each attack has a server of its own, so that none inherits the state that another left.

use std::{
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    task::JoinHandle,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};

use super::{Sample, Variant};
use crate::{
    BenchError, Protocol, ServerKind,
    child::ServerProcess,
    counters::Counters,
    figures::{Figure, Figures},
    hostile::{
        attack::Attack,
        attacker::{Order, run_process},
        sink,
    },
    latency::Ages,
    livez::Livez,
    process::Meter,
    rest::{Endpoint, RestClient},
    server_process::{READY_TIMEOUT, Run, Selection, Server},
    source::{Source, pods_path},
    tls::Certificate,
};

/// Changes per second, if the options set no rate.
const RATE: u32 = 50;
/// The server's limit of memory, in bytes.
const MEMORY_MAX: u64 = 256 << 20;
/// The time between two lists of the honest client.
const LIST_INTERVAL: Duration = Duration::from_secs(1);
/// A list that takes longer counts as refused.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);
/// So does a list that has taken longer when the attack ends: nothing was answered meanwhile.
const LIST_SLOW: Duration = Duration::from_secs(2);
/// The goals: the most that the 99th percentile may grow, the slowest answer of `/livez`, and the
/// most that is logged.
const P99_RATIO_MAX: f64 = 2.0;
const LIVEZ_MILLIS_MAX: f64 = 100.0;
const LOG_BYTES_PER_SECOND_MAX: f64 = 100_000.0;
/// Time in which the subscribers must receive the last changes after an attack.
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for which changes flow before the attack.
const WARM_UP: Duration = Duration::from_millis(500);

pub(super) async fn measure(
    run: &Run<'_>,
    source: &mut Source,
    attack: &'static Attack,
) -> Result<Vec<Sample>, BenchError> {
    if matches!(run.spec.kind, ServerKind::Apiserver { .. }) {
        // Its data port is also the port of its health.
        return Ok(Vec::new());
    }
    let directory = tempfile::tempdir()?;
    let certificate = attack.is_tls.then(|| Certificate::make(directory.path())).transpose()?;
    let run = Run { certificate: certificate.as_ref().or(run.certificate), ..*run };
    let flags: Vec<String> = attack.flags.iter().map(|flag| (*flag).to_owned()).collect();
    let flags = [vec![format!("--memory-max={MEMORY_MAX}")], flags].concat();
    let server = run.start_server_with(source, &flags).await?;
    let admin = server.admin_address().await?;
    let sink = ServerProcess::start("the sink", run.program, run.program, ["bench-sink"], sink::MARKER).await?;
    source.set_answers_reviews(true)?;
    let mut honest = Honest::start(&run, &server, source, admin).await?;

    honest.drive(source, sleep(WARM_UP)).await?.1?;
    let order = |target, admin| Order {
        target,
        admin,
        duration: run.options.duration,
        version: source.version(),
        cert_file: run.certificate.map(|certificate| certificate.cert_file.clone()),
    };
    let against_sink = order(sink.address, sink.address);
    let against_server = order(server.connector.address, admin);
    if attack.has_outage_of_reviews {
        source.set_answers_reviews(false)?;
    }
    if let (Some(per_second), Some(process)) = (attack.log_read_per_second, server.process()) {
        process.read_log_slowly(per_second);
    }
    let mut figures = Figures::default();
    let baseline = honest.beside(run.program, attack, against_sink, source).await?;
    figures.set(Figure::BaselineP99, baseline.p99_millis);
    figures.set(Figure::BaselineLivezMax, baseline.livez_millis);

    let meter = server.new_meter();
    let has_peak = meter.reset_peak().is_ok();
    let log_bytes = || server.process().map_or(0, ServerProcess::log_bytes);
    let logged_before = log_bytes();
    let began = Instant::now();
    let attacked = honest.beside(run.program, attack, against_server, source).await?;
    figures.set(Figure::LatencyP50, attacked.p50_millis);
    figures.set(Figure::LatencyP99, attacked.p99_millis);
    figures.set(Figure::LatencyP99Ratio, attacked.p99_millis / baseline.p99_millis);
    figures.set(Figure::Refused, attacked.refused as f64);
    figures.set(Figure::ListMax, attacked.list_millis);
    figures.set(Figure::LivezMax, attacked.livez_millis);
    let logged_per_second = (log_bytes() - logged_before) as f64 / began.elapsed().as_secs_f64();
    figures.set(Figure::LogRate, logged_per_second);
    let peak = peak_bytes(&meter, has_peak)?;
    figures.set(Figure::RssMax, peak as f64);
    figures.set(Figure::MemoryMax, MEMORY_MAX as f64);
    let is_met = attacked.p99_millis <= P99_RATIO_MAX * baseline.p99_millis
        && attacked.refused == 0
        && attacked.livez_millis <= LIVEZ_MILLIS_MAX
        && logged_per_second <= LOG_BYTES_PER_SECOND_MAX
        && peak <= MEMORY_MAX;
    figures.set(Figure::GoalsMet, f64::from(u8::from(is_met)));
    figures.set_note(attacked.note);
    Ok(vec![(Variant { name: attack.name, subscribers: run.options.honest, batch: None }, figures)])
}

fn peak_bytes(meter: &Meter, has_peak: bool) -> std::io::Result<u64> {
    if has_peak { meter.peak_bytes() } else { meter.resident_bytes() }
}

/// Figures of the honest clients beside an attack, and the results of the attackers.
struct Noticed {
    p50_millis: f64,
    p99_millis: f64,
    list_millis: f64,
    livez_millis: f64,
    refused: u64,
    note: String,
}

/// The honest clients.
struct Honest {
    rate: u32,
    subscribers: [Arc<Counters>; 2],
    lists: Lists,
    livez: Livez,
    /// Changes so far.
    changes: u64,
    /// Kept for their `Drop`.
    _receivers: [crate::receivers::Receivers; 2],
}

impl Honest {
    async fn start(run: &Run<'_>, server: &Server, source: &Source, admin: SocketAddr) -> Result<Self, BenchError> {
        let times = Arc::default();
        let version = Some(server.version(source));
        let over_grpc = run.options.honest / 2;
        let counters = |count| Arc::new(Counters::with_times(count, true, Arc::clone(&times)));
        let subscribers = [counters(over_grpc), counters(run.options.honest - over_grpc)];
        let subscribe = |protocol, counters| {
            run.subscribe_over(protocol, server, source, counters, version, |_| Selection::default())
        };
        let receivers = [subscribe(Protocol::Grpc, &subscribers[0]), subscribe(Protocol::Http, &subscribers[1])];
        for counters in &subscribers {
            counters.all_ready(READY_TIMEOUT).await?;
        }
        let path = format!("{}?resourceVersion=0", pods_path(source.namespace()));
        // Its token matters only where callers are known.
        let endpoint = Endpoint::without_credentials(server.connector.clone()).with_token("honest");
        let lists = Lists::start(endpoint, path);
        let rate = run.options.rate.unwrap_or(RATE);
        let livez = Livez::start(admin);
        Ok(Self { rate, subscribers, lists, livez, changes: 0, _receivers: receivers })
    }

    /// Makes changes while `work` runs. Returns its result, and the ages once all changes have been
    /// received.
    async fn drive<T>(
        &mut self,
        source: &mut Source,
        work: impl Future<Output = T>,
    ) -> Result<(T, Result<Ages, BenchError>), BenchError> {
        for counters in &self.subscribers {
            counters.ages.take();
        }
        let mut work = std::pin::pin!(work);
        let mut ticks = interval(Duration::from_secs(1) / self.rate);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let done = loop {
            tokio::select! {
                done = &mut work => break done,
                _ = ticks.tick() => {
                    self.changes += 1;
                    for counters in &self.subscribers {
                        counters.expect_received(self.changes * counters.subscribers() as u64);
                    }
                    source.make_changes(1, &self.subscribers[0].times).await?;
                }
            }
        };
        for counters in &self.subscribers {
            if let Err(error) = counters.all_received(DELIVERY_TIMEOUT).await {
                return Ok((done, Err(error)));
            }
        }
        let [first, second] = &self.subscribers;
        Ok((done, Ok(first.ages.take().and(&second.ages.take()))))
    }

    /// Measures the honest clients beside an attack.
    async fn beside(
        &mut self,
        program: &Path,
        attack: &Attack,
        order: Order,
        source: &mut Source,
    ) -> Result<Noticed, BenchError> {
        self.lists.take();
        self.livez.take_slowest_millis();
        let attacking = run_process(program, attack, order);
        let (received, ages) = self.drive(source, attacking).await?;
        // The error is that of a subscriber that lost its stream, or did not receive everything.
        let (ages, failure) = ages.map_or_else(|error| (None, Some(error)), |ages| (Some(ages), None));
        let lists = self.lists.take();
        let percentile = |percent| {
            let age = ages.as_ref().and_then(|ages| ages.percentile(percent));
            age.map_or(f64::NAN, |age| age.as_secs_f64() * 1e3)
        };
        let mut note = received?;
        for error in failure.iter().map(ToString::to_string).chain(lists.error) {
            note.push_str(&format!("; honest: {error}"));
        }
        Ok(Noticed {
            p50_millis: percentile(50),
            p99_millis: percentile(99),
            list_millis: lists.slowest.as_secs_f64() * 1e3,
            livez_millis: self.livez.take_slowest_millis(),
            refused: lists.failed + u64::from(failure.is_some()),
            note,
        })
    }
}

/// Results of the lists.
#[derive(Debug, Default)]
struct ListResults {
    failed: u64,
    slowest: Duration,
    error: Option<String>,
    /// Start of the list in flight.
    running: Option<Instant>,
}

impl ListResults {
    fn add_failure(&mut self, error: String) {
        self.failed += 1;
        self.error.get_or_insert(error);
    }
}

/// The honest client that lists every second.
struct Lists {
    results: Arc<Mutex<ListResults>>,
    task: JoinHandle<()>,
}

impl Lists {
    fn start(endpoint: Endpoint, path: String) -> Self {
        let results = Arc::default();
        let task = tokio::spawn(list(endpoint, path, Arc::clone(&results)));
        Self { results, task }
    }

    /// The results since the last call. The list in flight counts with the time that it has taken.
    fn take(&self) -> ListResults {
        let mut results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        let next = ListResults { running: results.running, ..ListResults::default() };
        let mut taken = std::mem::replace(&mut *results, next);
        let so_far = taken.running.map_or(Duration::ZERO, |start| start.elapsed());
        taken.slowest = taken.slowest.max(so_far);
        if so_far > LIST_SLOW {
            taken.add_failure(format!("a list has no end after {so_far:.1?}"));
        }
        taken
    }
}

impl Drop for Lists {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn list(endpoint: Endpoint, path: String, results: Arc<Mutex<ListResults>>) {
    let lock = || results.lock().unwrap_or_else(PoisonError::into_inner);
    let mut ticks = interval(LIST_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
        let start = Instant::now();
        lock().running = Some(start);
        let listing = async { RestClient::connect(endpoint.clone()).await?.download(&path).await };
        let listed = timeout(LIST_TIMEOUT, listing).await;
        let listed = listed.unwrap_or_else(|_| Err(BenchError::Cluster(format!("no list within {LIST_TIMEOUT:?}"))));
        let mut results = lock();
        results.running = None;
        results.slowest = results.slowest.max(start.elapsed());
        if let Err(failure) = listed {
            results.add_failure(failure.to_string());
        }
    }
}
