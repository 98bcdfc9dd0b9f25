//! One seed: builds its world, runs it, and collects the result.

use std::{cell::RefCell, collections::BTreeMap, time::Duration};

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::{
    concurrent_lists, draw,
    faults::{ALL_STALLED, Faults},
    history::{History, Interface, Recorder},
    informer::{self, ApiserverUse, InformerHistory, InformerRecorder, InformerSpec, RunningInformer},
    oracle::{self, Facts, Guarantee, Violation},
    reader, schema, subscriber,
    tally::{STRAIGHT_STATES, STRAIGHT_WATCHES, straight, tally, tally_informers},
    truth::Truth,
    upstream::{FAILED_LIST, REFUSED_STATES, REFUSED_WATCHES},
    workload::Workload,
    world::World,
};

/// The options that all seeds share.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// The minimum number of writes of pods.
    pub(crate) writes: usize,
    /// Maximum number of times that the cluster is restored from a backup.
    pub(crate) rewinds: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options { writes: 520, rewinds: 1 }
    }
}

/// The longest silence: in this time after all faults have healed every subscriber must have
/// received the writes from before. It covers two backoffs of kubefan in a row (39 s each: one
/// until upstream is back, one after its 410) and one of a client.
const SILENCE_MAX: Duration = Duration::from_secs(120);
/// Time in which subscribers and informers must be up to date after the last fault. A cache whose
/// watch is silent, because it was lost, notices that after up to 90 s. A client that has failed
/// often waits up to 60 s (30 s and as much jitter, as client-go), and as long again if it is then
/// refused.
const CONVERGENCE_MAX: Duration = Duration::from_secs(240);
/// Minimum length of a calm in the middle of a seed: the longest silence, and writes in it.
const CALM: Duration = Duration::from_secs(160);

/// With so few permits for snapshots, or fewer, the programs of a seed may refuse one another.
const PERMITS_FEW: usize = 2;

/// The longest time from the end of all faults until every subscriber has the bytes of the last
/// schema: two checks that notice it, a list that is repeated after a failure, and a change that
/// brings the difference.
const SCHEMA_SETTLES: Duration = Duration::from_secs(160);

/// The most lists of all caches for one change of the schema: two forms in each of two replicas,
/// and at most two that fail before the one that does not, because lists never fail for longer than
/// two minutes and each is a minute after the last.
const REREADS_MAX: u64 = 2 * 2 * 3;
/// Number of times that such a list is requested again at once if its request fails.
const REREAD_RETRIES_MAX: u64 = 3;
/// The most reads for subscribers that resume that fail in a seed. Lists fail for two minutes at
/// most, and a cache pauses after four reads in a row, however many subscribers ask.
const FAILED_READS_MAX: u64 = 60;

/// Tells the generator of the informers that also read from the apiserver from the others.
const APISERVER_USE: u64 = 0x6661_6c6c_6261_636b;

/// The result of a seed.
pub(crate) struct Report {
    pub(crate) seed: u64,
    pub(crate) truth: Truth,
    pub(crate) facts: Facts,
    pub(crate) histories: Vec<History>,
    /// Histories of informers, whose numbers follow those of the other subscribers.
    pub(crate) informers: Vec<InformerHistory>,
    pub(crate) violations: Vec<(usize, Violation)>,
    /// A request upstream that was not due.
    pub(crate) hasty: Option<Violation>,
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
        let violated = self.first_violation().map(|violation| format!("seed {seed}: {violation}"));
        // After a restore a replica may differ from upstream until it notices, without a failure.
        let needless = self.counts.get("kubefan_relists_total self_check").filter(|_| self.truth.epochs.len() == 1);
        let needless = needless.filter(|count| **count > 0);
        let needless =
            needless.map(|count| format!("seed {seed}: {count} relists by the self-check, which no fault explains"));
        panicked.or(violated).or(needless).or_else(|| self.costs_more())
    }

    /// The first violation of a subscriber, or else of the apiserver's cost.
    pub(crate) fn first_violation(&self) -> Option<&Violation> {
        self.violations.first().map(|(_, violation)| violation).or(self.hasty.as_ref())
    }

    /// Whether the replicas asked upstream for more states or watches than the same programs would
    /// have asked straight. Seven things are a replica's own: the first state of each cache when it
    /// starts, which programs that are rarely restarted do not need; a new watch after the drawn
    /// idle timeout, which is shorter than any program's; the lists for a new schema, because a
    /// program keeps the bytes that it has; requests that are refused, because a program that is
    /// served from a cache does not notice; reads for subscribers that resume that fail; watches of
    /// another cluster, which a program takes; and watches that expire in a seed in which all
    /// programs were stalled and asked for nothing.
    fn costs_more(&self) -> Option<String> {
        let sum = |names: &[&str]| names.iter().filter_map(|name| self.counts.get(*name)).sum::<u64>();
        let states = sum(&["requests upstream: list of pods", "requests upstream: watch of pods with the state"]);
        let watches = sum(&["requests upstream: watch of pods"]);
        let starts = sum(&["kubefan_relists_total initial"]);
        let idle = sum(&["kubefan_upstream_watch_restarts_total idle"]);
        let rereads = sum(&["kubefan_relists_total schema_changed"]);
        let failed = self.starting(&format!("requests upstream: {FAILED_LIST}"));
        let repeated = failed.min(FAILED_READS_MAX.max(REREAD_RETRIES_MAX * rereads));
        let refused = |class: &str| sum(&[&format!("requests upstream: {class}")]);
        let foreign = sum(&["kubefan_upstream_watch_restarts_total other_cluster"]);
        let were_stalled = self.counts.contains_key(&format!("fault: {ALL_STALLED}"));
        let unnoticed = if were_stalled { sum(&["kubefan_upstream_watch_restarts_total expired"]) } else { 0 };
        let states_max = starts + unnoticed + rereads + repeated + refused(REFUSED_STATES) + sum(&[STRAIGHT_STATES]);
        let watches_max =
            starts + unnoticed + idle + foreign + refused(REFUSED_WATCHES) + sum(&[STRAIGHT_STATES, STRAIGHT_WATCHES]);
        let seed = self.seed;
        let (proofs, explained) = self.proofs();
        if states > states_max || watches > watches_max {
            return Some(format!(
                "seed {seed}: {states} states and {watches} watches upstream, and straight {:?} at most",
                (states_max, watches_max)
            ));
        }
        let changes = self.truth.schemas as u64 - 1;
        // A cache that starts may learn its schema only after its list. A list ends early with its
        // watch, and follows a minute later.
        let rereads_max = REREADS_MAX * changes + starts + self.starting("kubefan_upstream_watch_restarts_total");
        if rereads > rereads_max {
            return Some(format!("seed {seed}: {rereads} lists for a new schema, and {rereads_max} at most are due"));
        }
        (proofs > explained).then(|| format!("seed {seed}: {proofs} proofs upstream, and {explained} at most are due"))
    }

    /// The sum of the counts whose names start so.
    fn starting(&self, name: &str) -> u64 {
        self.counts.iter().filter(|(known, _)| known.starts_with(name)).map(|(_, count)| *count).sum()
    }

    /// The lists of metadata and the look-ups of a version upstream, and how many are due at most:
    /// one of each for each request of a program, and for each watch upstream that ended.
    pub(crate) fn proofs(&self) -> (u64, u64) {
        let proofs = self.starting("requests upstream: list of metadata") + self.starting("requests upstream: look-up");
        let requests =
            self.starting("requests straight") + concurrent_lists::PROGRAMS * self.starting("fault: crowd of reads");
        (proofs, 2 * (requests + self.starting("kubefan_upstream_watch_restarts_total")))
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

async fn run(seed: u64, options: &Options) -> Report {
    let mut random = Pcg64Mcg::seed_from_u64(seed);
    let fork = |random: &mut Pcg64Mcg| Pcg64Mcg::seed_from_u64(random.random());
    let streams = random.random_range(8..=14);
    let readers = random.random_range(3..=5);
    let informers = random.random_range(2..=3);
    // A generator of its own: the rest of a seed does not depend on the content codings.
    let mut codings = Pcg64Mcg::seed_from_u64(!seed);
    let crowd = draw::Crowd::draw(&mut codings);
    // Their numbers follow each other: the streams over gRPC, the readers over HTTP, the informers.
    let subscribers: usize = streams + readers + if crowd.is_some() { draw::CROWD_READERS } else { 0 };
    // Neither does it depend on the informers that also read from the apiserver.
    let mut apiserver_use = Pcg64Mcg::seed_from_u64(seed.rotate_left(32) ^ APISERVER_USE);
    let users = draw::apiserver_users(&mut apiserver_use);
    let world = draw::world(&mut random, subscribers + informers + users.len(), crowd.as_ref());
    let objects = draw::objects(&mut random);
    let mut workload = Workload::new(fork(&mut random), objects);
    workload.populate(&world.sim, &mut world.truth.lock().unwrap());
    for node in &world.nodes {
        node.start();
    }
    // An apiserver that was restored cannot tell a client that its version is of another history.
    let rewinds = if users.is_empty() { options.rewinds } else { 0 };
    let mut faults = Faults::new(world.clone(), fork(&mut random), rewinds);

    let mut recorders = Vec::new();
    let mut tasks = JoinSet::new();
    for number in 0..subscribers {
        let spec = match &crowd {
            _ if number < streams => draw::spec(&mut random, number),
            Some(crowd) if number >= streams + readers => crowd.reader(&mut random, number),
            _ => draw::reader(&mut random, &mut codings, number),
        };
        let settings = draw::settings(&mut random);
        world.note(format!("{spec}: {settings:?}"));
        let recorder = Recorder::new(spec.clone(), world.clock());
        recorders.push(recorder.clone());
        let world = world.clone();
        let random = fork(&mut random);
        match spec.interface {
            Interface::Library => tasks.spawn(subscriber::library(world, spec, settings, recorder, random)),
            Interface::Generated => tasks.spawn(subscriber::generated(world, spec, settings, recorder, random)),
            Interface::Http(reads) => tasks.spawn(reader::run(world, spec, reads, settings, recorder, random)),
        };
    }

    let mut running = Vec::new();
    let mut inform = |spec: InformerSpec, random: &mut Pcg64Mcg| {
        let settings = draw::settings(random);
        world.note(format!("{spec:?}: {settings:?}"));
        let informer = RunningInformer::new(InformerRecorder::new(spec.clone(), world.clock()));
        running.push(informer.clone());
        tasks.spawn(informer::run(world.clone(), spec, settings, informer, fork(random)));
    };
    for place in 0..informers {
        let spec = InformerSpec::draw(&mut random, &mut codings, subscribers + place, place, objects);
        inform(spec, &mut random);
    }
    for (place, apiserver) in users.iter().enumerate() {
        let number = subscribers + informers + place;
        // Reads that move are reads over HTTP.
        let protocol = usize::from(*apiserver == ApiserverUse::Moves || apiserver_use.random_bool(0.5));
        let mut codings = fork(&mut apiserver_use);
        let spec = InformerSpec::draw(&mut apiserver_use, &mut codings, number, protocol, objects);
        inform(InformerSpec { apiserver: *apiserver, ..spec }, &mut apiserver_use);
    }

    let mut backed_up = 0;
    let mut calm_at = random.random_range(100..options.writes.max(101));
    let mut silences = Vec::new();
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
        if workload.writes >= calm_at {
            calm_at = usize::MAX;
            let silent = calm(&world, &mut faults, &mut workload, &recorders, &mut random).await;
            silences.extend(silent);
        }
        if random.random_bool(0.15) {
            faults.inject(&mut workload).await;
        }
        if !users.is_empty() && apiserver_use.random_bool(0.08) {
            let place = apiserver_use.random_range(0..users.len());
            faults.take_servers_away(subscribers + informers + place);
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
    if random.random_bool(0.3) {
        faults.change_schema(&mut workload).await;
        faults.heal_all();
    }
    let healed = Instant::now();
    workload.finish(&world.sim, &mut world.truth.lock().unwrap());
    let mut violations = judge_when_quiet(&world, &recorders, &running, healed).await;
    violations.append(&mut silences);
    let converged_in = healed.elapsed();
    violations.extend(judge_schema(&world, &mut workload, &recorders).await);
    if !tasks.is_empty() && tasks.try_join_next().is_some() {
        panic!("a subscriber of seed {seed} has ended by itself");
    }
    drop(tasks);
    // Events that the informers received are a consequence of those of other subscribers, too.
    violations.sort_by_key(|(number, violation)| (*number >= subscribers, violation.entry, *number));

    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for node in &world.nodes {
        for (name, count) in node.counts() {
            *counts.entry(name).or_default() += count;
        }
        for (class, count) in node.transport.requests() {
            *counts.entry(format!("requests upstream: {class}")).or_default() += count;
        }
    }
    let histories: Vec<_> = recorders.iter().map(Recorder::history).collect();
    let informers: Vec<_> = running.iter().map(|informer| informer.recorder.history()).collect();
    for (name, count) in
        tally(&histories).into_iter().chain(tally_informers(&informers)).chain(straight(&histories, &informers))
    {
        *counts.entry(name).or_default() += count;
    }
    for (name, count) in &*world.counts.lock().unwrap() {
        counts.insert((*name).to_owned(), *count);
    }
    for (kind, count) in faults.counts() {
        *counts.entry(format!("fault: {kind}")).or_default() += count;
    }
    Report {
        seed,
        facts: world.facts(),
        truth: std::mem::replace(&mut world.truth.lock().unwrap(), Truth::new()),
        violations,
        hasty: world.nodes.iter().find_map(|node| node.transport.hasty()).map(|text| Violation {
            guarantee: Guarantee::Bounded,
            text,
            entry: 0,
            at_end: false,
        }),
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

/// A time without faults in the middle of a seed, in which writes continue. Returns the subscribers
/// that heard nothing for too long, although there was something to hear.
async fn calm(
    world: &World,
    faults: &mut Faults,
    workload: &mut Workload,
    recorders: &[Recorder],
    random: &mut Pcg64Mcg,
) -> Vec<(usize, Violation)> {
    faults.heal_all();
    // After a restore a subscriber is silent until the cluster reaches its version again.
    if world.truth.lock().unwrap().epochs.len() > 1 {
        return Vec::new();
    }
    let began = Instant::now();
    let mut written = Vec::new();
    while began.elapsed() < CALM {
        let last: Vec<_> = {
            let mut truth = world.truth.lock().unwrap();
            workload.step(&world.sim, &mut truth);
            recorders.iter().map(|recorder| truth.last_seen_by(recorder.spec().selection)).collect()
        };
        written.push((Instant::now(), last));
        sleep(Duration::from_millis(random.random_range(1000..8000))).await;
    }
    // With few permits, readers refuse one another.
    if world.nodes[0].options().snapshots_max > PERMITS_FEW {
        *world.quiet.lock().unwrap() = Some(world.now() - began.elapsed() + SILENCE_MAX..world.now());
    }
    let Some((_, due)) = written.iter().rev().find(|(at, _)| at.elapsed() >= SILENCE_MAX) else { return Vec::new() };
    // With `only_changes` there may be nothing to hear, and each watch may end before its bookmark.
    let silent = recorders.iter().enumerate().filter(|(_, recorder)| !recorder.spec().projected.only_changes);
    let silent = silent.filter(|(number, recorder)| recorder.highest() < due[*number]);
    let silent = silent.map(|(number, recorder)| {
        let text = format!(
            "{} is at {} and heard nothing for {SILENCE_MAX:?} although no fault was active, and {} was written",
            recorder.spec(),
            recorder.reached(),
            due[number]
        );
        let entry = recorder.history().entries.len().saturating_sub(1);
        (number, Violation { guarantee: Guarantee::Convergent, text, entry, at_end: false })
    });
    silent.collect()
}

/// Waits until every replica has read the pods again with the last schema, while a few of them
/// change, and judges which bytes the subscribers have then.
async fn judge_schema(world: &World, workload: &mut Workload, recorders: &[Recorder]) -> Vec<(usize, Violation)> {
    if world.truth.lock().unwrap().schemas == 1 {
        return Vec::new();
    }
    let began = Instant::now();
    while began.elapsed() < SCHEMA_SETTLES {
        sleep(SCHEMA_SETTLES / 10).await;
        workload.step(&world.sim, &mut world.truth.lock().unwrap());
    }
    sleep(SCHEMA_SETTLES / 10).await;
    let schema = world.truth.lock().unwrap().schema;
    let judged = recorders.iter().enumerate();
    let judged = judged.map(|(number, recorder)| (number, schema::judge(&recorder.history(), schema)));
    let mut violations: Vec<_> = judged.filter_map(|(number, judged)| Some((number, judged.err()?))).collect();
    for node in 0..world.nodes.len() {
        violations.extend(schema::judge_replica(world, node, schema).await.err().map(|violation| (0, violation)));
    }
    violations
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
        for informer in informers {
            informer.read();
        }
        let truth = world.truth.lock().unwrap();
        let facts = world.facts();
        let judged = recorders.iter().enumerate().filter_map(|(number, recorder)| {
            let violation = oracle::judge(&truth, &facts, &recorder.history(), true).err()?;
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
