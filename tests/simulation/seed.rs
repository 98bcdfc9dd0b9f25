//! One seed: builds its world, runs it, and collects the result.

use std::{cell::RefCell, collections::BTreeMap, sync::Arc, time::Duration};

use kubefan_sim::apiserver::{SimApiserver, SimOptions};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::{
    faults::Faults,
    history::{Encoding, History, Observation, Recorder, Spec},
    informer::{self, InformerHistory, InformerRecorder, InformerSpec, Observed, RunningInformer},
    node::{Node, NodeOptions},
    oracle::{self, Guarantee, Violation},
    selection::Selection,
    subscriber::{self, ClientSettings},
    truth::Truth,
    upstream::Transport,
    workload::Workload,
    world::World,
};

/// The options that all seeds share.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// The minimum number of writes of pods.
    pub(crate) writes: usize,
    /// How often the cluster is restored from a backup, at most.
    pub(crate) rewinds: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options { writes: 520, rewinds: 1 }
    }
}

/// The time in which every subscriber must be up to date after all faults have healed.
const CONVERGENCE_MAX: Duration = Duration::from_secs(600);

/// The result of a seed.
pub(crate) struct Report {
    pub(crate) seed: u64,
    pub(crate) truth: Truth,
    pub(crate) histories: Vec<History>,
    /// Their numbers follow those of the other subscribers.
    pub(crate) informers: Vec<InformerHistory>,
    pub(crate) violations: Vec<(usize, Violation)>,
    /// Panics of tasks. Otherwise they would go unnoticed.
    pub(crate) panics: Vec<String>,
    pub(crate) story: Vec<(Duration, String)>,
    pub(crate) counts: BTreeMap<String, u64>,
    pub(crate) faults: u64,
    pub(crate) writes: u64,
    /// The time from the end of all faults until every subscriber was up to date.
    pub(crate) converged_in: Duration,
}

impl Report {
    /// The first failure; `None` if there was none.
    pub(crate) fn failure(&self) -> Option<String> {
        let seed = self.seed;
        let panicked = self.panics.first().map(|panic| format!("seed {seed}: a task panicked: {panic}"));
        let violated = self.violations.first().map(|(_, violation)| format!("seed {seed}: {violation}"));
        // After a restore a replica may differ from upstream until it notices. That is not a
        // failure.
        let needless = self.counts.get("kubefan_relists_total self_check").filter(|_| self.truth.epochs.len() == 1);
        let needless = needless.filter(|count| **count > 0);
        let needless =
            needless.map(|count| format!("seed {seed}: {count} relists by the self-check, which no fault explains"));
        panicked.or(violated).or(needless)
    }

    /// Hashes that differ between two runs that differ.
    pub(crate) fn digests(&self) -> Vec<u64> {
        let informers = self.informers.iter().map(InformerHistory::digest);
        self.histories.iter().map(History::digest).chain(informers).collect()
    }
}

/// Runs one seed on this thread.
pub(crate) fn run_seed(seed: u64, options: &Options) -> Report {
    let (mut report, panics) = run_paused(run(seed, options));
    report.panics = panics;
    report
}

/// Runs a world on this thread with its own paused clock. Returns its result and the panics of its
/// tasks.
pub(crate) fn run_paused<T>(world: impl Future<Output = T>) -> (T, Vec<String>) {
    // Clears the panics of an earlier world that panicked itself.
    PANICS.take();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let done = runtime.block_on(world);
    drop(runtime);
    (done, PANICS.take())
}

thread_local! {
    /// The panics on this thread. All tasks of a seed run on one thread.
    static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Records panics from now on, for [`Report::panics`].
pub(crate) fn remember_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        PANICS.with_borrow_mut(|panics| panics.push(panic.to_string()));
        before(panic);
    }));
}

/// A world without subscribers, with its replicas not started.
fn world(random: &mut Pcg64Mcg, subscribers: usize) -> Arc<World> {
    let one_of = |random: &mut Pcg64Mcg, all: &[usize]| all[random.random_range(0..all.len())];
    let sim = SimOptions {
        window_events_max: one_of(random, &[60, 300, 10_000]),
        bookmark_interval: Duration::from_secs(random.random_range(5..60)),
        seed: random.random(),
        ..SimOptions::default()
    };
    let options = NodeOptions {
        ring_events_max: one_of(random, &[16, 32, 64, 256, 100_000]),
        ring_age_max: Duration::from_secs(one_of(random, &[20, 300, 86_400]) as u64),
        residue_bytes_max: [None, Some(2000), Some(20_000)][random.random_range(0..3)],
        watch_list: random.random_bool(0.5),
        page_size: one_of(random, &[7, 50, 500]) as u32,
        coalesce_max: Duration::from_millis(one_of(random, &[0, 0, 5]) as u64),
        cache_compression: random.random_bool(0.3),
        upstream_idle_timeout: Duration::from_secs(random.random_range(30..=90)),
        seed: random.random(),
    };
    let world = replicas(sim, &options, subscribers);
    world.note(format!("{options:?}"));
    world
}

/// An apiserver and two replicas in front of it, not started.
pub(crate) fn replicas(sim: SimOptions, options: &NodeOptions, subscribers: usize) -> Arc<World> {
    let sim = SimApiserver::new(SimOptions { clock: || "2026-01-01T00:00:00Z".to_owned(), ..sim });
    let node = |number: u64| {
        let options = NodeOptions { seed: options.seed.wrapping_add(number << 32), ..options.clone() };
        Node::new(options, Transport::to(sim.clone()))
    };
    let nodes = (0..2).map(node).collect();
    World::new(sim.clone(), nodes, subscribers)
}

fn spec(random: &mut Pcg64Mcg, number: usize) -> Spec {
    let encodings = [Encoding::Json, Encoding::Zstd, Encoding::Deltas];
    Spec {
        number,
        // The first subscribers have selectors that objects enter and leave in every seed.
        selection: match number {
            0 => Selection::Everything,
            1 => Selection::App("web"),
            2 => Selection::Node("node-0"),
            _ => Selection::ALL[random.random_range(0..Selection::ALL.len())],
        },
        encoding: encodings[random.random_range(0..encodings.len())],
        library: random.random_bool(0.4),
        conflates: random.random_bool(0.6),
        restarts: random.random_bool(0.5),
    }
}

fn settings(random: &mut Pcg64Mcg) -> ClientSettings {
    ClientSettings {
        start_after: Duration::from_millis(random.random_range(0..20_000)),
        window_bytes: [4 << 10, 16 << 10, 64 << 10][random.random_range(0..3)],
        bookmark_interval: Duration::from_millis(random.random_range(2000..20_000)),
        timeout_seconds: if random.random_bool(0.2) { random.random_range(5..60) } else { 0 },
        first_replica: random.random_range(0..2),
    }
}

async fn run(seed: u64, options: &Options) -> Report {
    let mut random = Pcg64Mcg::seed_from_u64(seed);
    let fork = |random: &mut Pcg64Mcg| Pcg64Mcg::seed_from_u64(random.random());
    let (subscribers, informers) = (random.random_range(8..=14), random.random_range(2..=3));
    let world = world(&mut random, subscribers + informers);
    let objects = random.random_range(30..90);
    let mut workload = Workload::new(fork(&mut random), objects);
    workload.populate(&world.sim, &mut world.truth.lock().unwrap());
    world.nodes.iter().for_each(|node| node.start());
    let mut faults = Faults::new(world.clone(), fork(&mut random), options.rewinds);

    let (mut recorders, mut tasks) = (Vec::new(), JoinSet::new());
    for number in 0..subscribers {
        let (spec, settings) = (spec(&mut random, number), settings(&mut random));
        world.note(format!("{spec}: {settings:?}"));
        let recorder = Recorder::new(spec.clone(), world.clock());
        recorders.push(recorder.clone());
        let (world, random) = (world.clone(), fork(&mut random));
        match spec.library {
            true => tasks.spawn(subscriber::library(world, spec, settings, recorder, random)),
            false => tasks.spawn(subscriber::generated(world, spec, settings, recorder, random)),
        };
    }

    let mut running = Vec::new();
    for place in 0..informers {
        let spec = InformerSpec::draw(&mut random, subscribers + place, place);
        let settings = settings(&mut random);
        world.note(format!("{spec:?}: {settings:?}"));
        let informer = RunningInformer::new(InformerRecorder::new(spec.clone(), world.clock()));
        running.push(informer.clone());
        tasks.spawn(informer::run(world.clone(), spec, settings, informer, fork(&mut random)));
    }

    let mut backed_up = 0;
    while workload.writes < options.writes || faults.count() < 6 {
        let burst = match random.random_range(0..10u32) {
            0..7 => 1,
            7..9 => random.random_range(2..6),
            _ => random.random_range(20..70),
        };
        for _ in 0..burst {
            workload.step(&world.sim, &mut world.truth.lock().unwrap());
        }
        if workload.writes >= backed_up + 40 {
            backed_up = workload.writes;
            faults.back_up();
        }
        if random.random_bool(0.15) {
            faults.inject().await;
        }
        faults.heal_due();
        sleep(Duration::from_millis(match random.random_range(0..10u32) {
            0..6 => random.random_range(1..50),
            6..9 => random.random_range(50..1000),
            _ => random.random_range(3000..20_000),
        }))
        .await;
    }

    faults.heal_all();
    let healed = Instant::now();
    workload.finish(&world.sim, &mut world.truth.lock().unwrap());
    let mut violations = judge_when_quiet(&world, &recorders, &running, healed).await;
    let converged_in = healed.elapsed();
    if !tasks.is_empty() && tasks.try_join_next().is_some() {
        panic!("a subscriber of seed {seed} has ended by itself");
    }
    drop(tasks);
    // What the informers received is a consequence of what other subscribers received, too.
    violations.sort_by_key(|(number, violation)| (*number >= subscribers, violation.entry, *number));

    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for node in &world.nodes {
        for (name, count) in node.counts() {
            *counts.entry(name).or_default() += count;
        }
    }
    let histories: Vec<_> = recorders.iter().map(Recorder::history).collect();
    let informers: Vec<_> = running.iter().map(|informer| informer.recorder.history()).collect();
    for (name, count) in tally(&histories).into_iter().chain(tally_informers(&informers)) {
        *counts.entry(name).or_default() += count;
    }
    for (kind, count) in faults.counts() {
        *counts.entry(format!("fault: {kind}")).or_default() += count;
    }
    Report {
        seed,
        truth: std::mem::replace(&mut world.truth.lock().unwrap(), Truth::new()),
        violations,
        panics: Vec::new(),
        story: std::mem::take(&mut world.story.lock().unwrap()),
        histories,
        informers,
        counts,
        faults: faults.count(),
        writes: workload.writes as u64,
        converged_in,
    }
}

/// Waits until every subscriber is up to date, and judges all histories.
async fn judge_when_quiet(
    world: &World,
    recorders: &[Recorder],
    informers: &[RunningInformer],
    healed: Instant,
) -> Vec<(usize, Violation)> {
    loop {
        sleep(Duration::from_secs(1)).await;
        let late = healed.elapsed() > CONVERGENCE_MAX;
        let has_all = {
            let truth = world.truth.lock().unwrap();
            recorders.iter().all(|recorder| recorder.reached() >= truth.last_seen_by(recorder.spec().selection))
                && informers
                    .iter()
                    .all(|informer| informer.has_all(truth.last_seen_by(informer.recorder.spec().selection)))
        };
        if !late && !has_all {
            continue;
        }
        informers.iter().for_each(RunningInformer::read);
        let truth = world.truth.lock().unwrap();
        let judged = recorders.iter().enumerate().filter_map(|(number, recorder)| {
            let violation = oracle::judge(&truth, &recorder.history(), true).err()?;
            Some((number, violation))
        });
        let judged_informers = informers.iter().filter_map(|informer| {
            let history = informer.recorder.history();
            let is_behind = !informer.has_all(truth.last_seen_by(history.spec.selection));
            Some((history.spec.number, oracle::judge_informer(&truth, &history, true, is_behind).err()?))
        });
        let judged: Vec<_> = judged.chain(judged_informers).collect();
        let only_late =
            judged.iter().all(|(_, violation)| violation.guarantee == Guarantee::Convergent && violation.at_end);
        if late || judged.is_empty() || !only_late {
            return judged;
        }
    }
}

fn tally_informers(histories: &[InformerHistory]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for history in histories {
        let by = format!("{:?}", history.spec.protocol);
        for entry in &history.entries {
            let name = match &entry.what {
                Observed::Started => "starts",
                Observed::HandlerAdded(_) => continue,
                Observed::Complete => "complete states",
                Observed::Batch => "gaps and catch-ups",
                Observed::Failed(_) => "failures",
                Observed::Call { .. } => "calls of handlers",
                Observed::Read { .. } => "reads of the store",
            };
            *counts.entry(format!("informers over {by}: {name}")).or_default() += 1;
        }
    }
    counts
}

fn tally(histories: &[History]) -> BTreeMap<String, u64> {
    let mut counts = BTreeMap::new();
    for history in histories {
        let mut opened = false;
        for entry in &history.entries {
            let name = match &entry.what {
                Observation::Opened { from: Some(_), .. } => "streams resumed",
                Observation::Opened { from: None, .. } => "streams from a snapshot",
                Observation::SnapshotBegin { restarted_from: Some(_), .. } => "restarts in the stream",
                Observation::SnapshotBegin { .. } => "snapshots",
                Observation::GapBegin { .. } => "gaps",
                Observation::CatchUpBegin { .. } if opened => "catch-ups at the start",
                Observation::CatchUpBegin { .. } => "catch-ups on lag",
                Observation::Event(_) => "deliveries",
                Observation::Bookmark => "bookmarks",
                Observation::Ended { reason, .. } if reason == "HISTORY_REWRITTEN" => {
                    "streams ended: history rewritten"
                }
                Observation::Ended { reason, .. } if reason == "RESOURCE_VERSION_TOO_OLD" => "streams ended: too old",
                Observation::Ended { code, reason, .. } => {
                    let why = if reason.is_empty() { code } else { reason };
                    *counts.entry(format!("streams ended: {why}")).or_default() += 1;
                    opened = false;
                    continue;
                }
                _ => "other",
            };
            *counts.entry(name.to_owned()).or_default() += 1;
            opened = matches!(entry.what, Observation::Opened { .. });
        }
    }
    counts.remove("other");
    counts
}
