//! Runs many seeds on all cores, with one runtime per thread. Prints a line of progress and a table
//! of everything that was counted.

use std::{
    collections::BTreeMap,
    num::NonZero,
    process::ExitCode,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use super::{
    faults::{APISERVER_USE_KINDS, KINDS},
    http_transport::{ENDS_IN_GZIP, MOVES, SWITCHES, WATCHES_IN_GZIP},
    informer::FALLBACK_STARTS,
    seed::{Options, Report, run_seed},
};

/// A sweep of at least this many seeds must contain everything often enough.
const COVERAGE_SEEDS_MIN: u64 = 500;
/// The seeds that the minimum counts are for. Those of other sweeps are in proportion.
const COUNTED_SEEDS: u64 = 2000;
/// The minimum count of each entry of [`EXPECTED`].
const OFTEN: u64 = 1000;
/// The minimum count of each kind of fault, and of each entry of [`RARER`].
const FAULT_OFTEN: u64 = 200;
/// The minimum number of writes and faults of each seed.
const EVENTS_LEAST: u64 = 500;
const FAULTS_LEAST: u64 = 5;

/// Counts that must be high in a large sweep.
const EXPECTED: [&str; 32] = [
    "kubefan_resumes_total ring",
    "kubefan_resumes_total backfill",
    "kubefan_resumes_total expired",
    "kubefan_lags_total catch_up",
    "gaps",
    "catch-ups on lag",
    "restarts in the stream",
    "streams ended: history rewritten",
    "informers over Grpc: complete states",
    "informers over Grpc: gaps and catch-ups",
    "informers over Grpc: starts",
    "informers over Http1: complete states",
    "informers over Http2: complete states",
    "informers over Http2: failures",
    "deliveries with a projection",
    "deliveries with a projection, only changes",
    "kubefan_proofs_total held",
    "kubefan_requests_total kubefan 410 http list",
    "kubefan_snapshots_refused_total ",
    "reads over HTTP: 410 Expired",
    "reads over HTTP: 429 TooManyRequests",
    "reads over HTTP: 503 ServiceUnavailable",
    "reads over HTTP: ERROR 410 Expired",
    "reads over HTTP: bookmarks",
    "reads over HTTP: objects in JSON",
    "reads over HTTP: objects in protobuf",
    "reads over HTTP: states consistent",
    "reads over HTTP: states of any version",
    "streams ended: LIMIT_REACHED",
    "requests upstream: list of metadata",
    WATCHES_IN_GZIP,
    ENDS_IN_GZIP,
];

/// Counts that may be lower in a large sweep.
const RARER: [&str; 9] = [
    "catch-ups at the start",
    "kubefan_resumes_total residue",
    "kubefan_resumes_total restart",
    "kubefan_warm_starts_total failed",
    "kubefan_warm_starts_total warm",
    "reads over HTTP: states not older than",
    FALLBACK_STARTS,
    MOVES,
    SWITCHES,
];

#[derive(Default)]
struct Total {
    seeds: u64,
    counts: BTreeMap<String, u64>,
    failures: Vec<String>,
    poor: Vec<u64>,
    slowest: f64,
    /// The largest part of the proofs that were due, in percent.
    dearest: u64,
}

/// Runs `seeds` seeds, starting at `first`.
#[expect(clippy::disallowed_methods, reason = "the elapsed time is only printed")]
pub(crate) fn sweep(first: u64, seeds: u64) -> ExitCode {
    println!("{seeds} seeds; KUBEFAN_FIRST_SEED={first} plays the same ones again");
    let options = Options::default();
    let next = AtomicU64::new(first);
    let total = Mutex::new(Total::default());
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first.saturating_add(seeds) {
                        return;
                    }
                    let report = std::panic::catch_unwind(|| run_seed(seed, &options));
                    let mut total = total.lock().unwrap();
                    match report {
                        Ok(report) => total.add(&report),
                        Err(_) => {
                            total.seeds += 1;
                            total.failures.push(format!("seed {seed}: the simulation itself panicked (see above)"));
                        }
                    }
                    if total.seeds.is_multiple_of(50) || total.seeds == seeds {
                        let rate = total.seeds as f64 / began.elapsed().as_secs_f64();
                        eprint!(
                            "\r{} of {seeds} seeds, {rate:.1} per second, {} failed ",
                            total.seeds,
                            total.failures.len()
                        );
                    }
                }
            });
        }
    });
    eprintln!();
    let total = total.into_inner().unwrap();
    println!("{} seeds in {:.1} s", total.seeds, began.elapsed().as_secs_f64());
    for (name, count) in &total.counts {
        println!("  {count:>12}  {name}");
    }
    println!("  slowest to be quiet after the healing: {:.0} s", total.slowest);
    println!("  most proofs upstream, of those that were due: {} %", total.dearest);
    for failure in total.failures.iter().take(20) {
        println!("{failure}");
    }
    let mut ok = total.failures.is_empty();
    if !total.poor.is_empty() {
        println!("too few events or faults in seeds {:?}", total.poor);
        ok = false;
    }
    if seeds >= COVERAGE_SEEDS_MIN {
        let often = EXPECTED.iter().map(|name| ((*name).to_owned(), OFTEN));
        let faults = KINDS.iter().chain(&APISERVER_USE_KINDS).map(|kind| (format!("fault: {kind}"), FAULT_OFTEN));
        let rarer = RARER.iter().map(|name| ((*name).to_owned(), FAULT_OFTEN));
        for (name, least) in often.chain(faults).chain(rarer) {
            let count = total.counts.get(&name).copied().unwrap_or(0);
            let least = in_proportion(least, seeds);
            if count < least {
                println!("only {count} of: {name}");
                ok = false;
            }
        }
    }
    if seeds < COVERAGE_SEEDS_MIN {
        println!("  a sweep of {COVERAGE_SEEDS_MIN} seeds also checks how often everything happens");
    }
    println!("{}", if ok { "ok" } else { "FAILED" });
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The minimum count in a sweep of this size, less a margin for chance.
fn in_proportion(least: u64, seeds: u64) -> u64 {
    let expected = least as f64 * seeds as f64 / COUNTED_SEEDS as f64;
    (expected - 4.0 * expected.sqrt()).max(1.0) as u64
}

impl Total {
    fn add(&mut self, report: &Report) {
        self.seeds += 1;
        for (name, count) in &report.counts {
            *self.counts.entry(name.clone()).or_default() += count;
        }
        *self.counts.entry("writes".to_owned()).or_default() += report.writes;
        *self.counts.entry("faults".to_owned()).or_default() += report.faults;
        self.slowest = self.slowest.max(report.converged_in.as_secs_f64());
        let (proofs, due) = report.proofs();
        self.dearest = self.dearest.max(100 * proofs / due.max(1));
        if report.writes < EVENTS_LEAST || report.faults < FAULTS_LEAST {
            self.poor.push(report.seed);
        }
        self.failures.extend(report.failure());
    }
}
