//! A test of the oracle: it must find every planted bug, under the name of a guarantee that the bug
//! breaks. `crates/common/src/planted/bugs.rs` lists the bugs and where they are. They were written
//! without knowledge of the oracle's code.
//!
//! In the build of `tests/simulation/planted/build`, the simulation checks every planted bug,
//! unless `KUBEFAN_PLANTED_BUG=none` asks for a sweep or `KUBEFAN_SEED` for one seed. For each bug
//! it first plays the seed in `planted/seeds.txt`, which found it when that file was written. The
//! world of a seed changes with the code. If the seed no longer finds the bug, it plays seeds until
//! one does.

use std::{
    num::NonZero,
    process::ExitCode,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use kubefan_common::planted::{self, Bug};

use self::recorded::RecordedSeeds;
use super::{
    oracle::Violation,
    seed::{Options, run_seed},
};

mod recorded;

/// The number of seeds in which a bug must appear.
const SEEDS_MAX: u64 = 1000;
/// To renew a seed, the check compares the first three seeds that find the bug, within the first
/// [`SEEDS_COMPARED`], and records the fastest.
const FINDS_COMPARED: usize = 3;
const SEEDS_COMPARED: u64 = 40;
/// The value of `KUBEFAN_PLANTED_BUGS` in a build with the patches.
const PATCHED: &str = "patched";

/// A violation that a seed reports.
struct Find {
    seed: u64,
    violation: Violation,
    took: Duration,
}

impl Find {
    /// Whether the bug breaks the guarantee that is reported.
    fn is_named(&self, bug: Bug) -> bool {
        let named = format!("{:?}", self.violation.guarantee);
        bug.breaks().split(", ").any(|broken| broken == named)
    }

    fn print(&self, bug: Bug) {
        let named = format!("{:?}", self.violation.guarantee);
        println!("{:<28} {:>5}  {named:<14} {}", bug.name(), self.seed, bug.breaks());
    }
}

/// Plants each bug, or only the bug in `KUBEFAN_PLANTED_BUG`. The check fails if no seed finds a
/// bug, or if it is reported under a guarantee that it does not break.
pub(crate) fn check(seeds: Option<u64>) -> ExitCode {
    let is_renewing = std::env::var_os("KUBEFAN_RENEW_SEEDS").is_some_and(|value| !value.is_empty());
    match check_each(seeds.unwrap_or(SEEDS_MAX), is_renewing) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(2)
        }
    }
}

/// Returns whether every bug was found as it must be.
fn check_each(seeds_max: u64, is_renewing: bool) -> Result<bool, String> {
    let bugs = chosen()?;
    let mut recorded = RecordedSeeds::read()?;
    if is_renewing {
        // Without the names that are unknown.
        recorded.write()?;
    } else {
        recorded.check()?;
    }
    println!("{:<28} {:>5}  {:<14} BREAKS", "BUG", "SEED", "VIOLATED");
    let stale = play_recorded(&bugs, &recorded);
    let mut missed = 0;
    let mut misnamed = 0;
    for bug in &stale {
        if let Some(seed) = recorded.seed(*bug) {
            println!("{:<28} {seed:>5}  STALE: this recorded seed no longer finds it", bug.name());
        }
        let finds = search(*bug, seeds_max, if is_renewing { FINDS_COMPARED } else { 1 });
        match finds.first() {
            Some(first) => {
                first.print(*bug);
                if !first.is_named(*bug) {
                    println!("  misnamed: {}", first.violation);
                    misnamed += 1;
                }
            }
            None => {
                println!("{:<28} {:>5}  {:<14} {}", bug.name(), "-", "NOT FOUND", bug.breaks());
                missed += 1;
            }
        }
        let named = finds.iter().filter(|find| find.is_named(*bug));
        recorded.replace(*bug, named.min_by_key(|find| find.took).map(|find| find.seed));
        if is_renewing {
            recorded.write()?;
        }
    }
    println!("{} found, {missed} missed, {misnamed} misnamed", bugs.len() - missed);
    if !is_renewing && !stale.is_empty() {
        println!("{} recorded seeds no longer find their bug, so the check is slow: {}", stale.len(), recorded::RENEW);
    }
    Ok(missed == 0 && misnamed == 0)
}

/// The bugs to plant.
fn chosen() -> Result<Vec<Bug>, String> {
    let only = std::env::var("KUBEFAN_PLANTED_BUG").ok();
    let bugs = Bug::ALL.iter().copied().filter(|bug| only.as_ref().is_none_or(|only| only == bug.name()));
    let bugs: Vec<_> = bugs.collect();
    let is_patched = option_env!("KUBEFAN_PLANTED_BUGS") == Some(PATCHED);
    match bugs.iter().find(|bug| Bug::IN_PATCHES.contains(bug)) {
        Some(bug) if !is_patched => {
            Err(format!("{} is in a patch, which this build lacks: use tests/simulation/planted/build", bug.name()))
        }
        _ if bugs.is_empty() => Err(format!("KUBEFAN_PLANTED_BUG={} is not a bug", only.unwrap_or_default())),
        _ => Ok(bugs),
    }
}

/// Plays the recorded seed of each bug. Returns the bugs that it does not find, or not under a
/// guarantee that they break.
fn play_recorded(bugs: &[Bug], recorded: &RecordedSeeds) -> Vec<Bug> {
    let next = Mutex::new(bugs.iter().copied());
    let stale = Mutex::new(Vec::new());
    let take = || next.lock().expect("no holder panics").next();
    on_each_core(|| {
        while let Some(bug) = take() {
            let find = recorded.seed(bug).and_then(|seed| play(bug, seed));
            match find.filter(|find| find.is_named(bug)) {
                Some(find) => find.print(bug),
                None => stale.lock().expect("no holder panics").push(bug),
            }
        }
    });
    stale.into_inner().expect("no holder panics")
}

/// Plays seeds until enough of them report a violation, or one does after the first
/// [`SEEDS_COMPARED`]. Returns them, the lowest first.
fn search(bug: Bug, seeds_max: u64, finds_wanted: usize) -> Vec<Find> {
    let next = AtomicU64::new(1);
    let finds = Mutex::new(Vec::new());
    on_each_core(|| {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            let wanted = if seed > SEEDS_COMPARED { 1 } else { finds_wanted };
            if seed > seeds_max || finds.lock().expect("no holder panics").len() >= wanted {
                return;
            }
            let find = play(bug, seed);
            finds.lock().expect("no holder panics").extend(find);
        }
    });
    let mut finds = finds.into_inner().expect("no holder panics");
    finds.sort_by_key(|find| find.seed);
    finds
}

/// Plays one seed with a bug on this thread, and if it reports a violation, without the bug: a seed
/// that fails without it shows nothing.
#[expect(clippy::disallowed_methods, reason = "the elapsed time chooses between seeds that find the same bug")]
fn play(bug: Bug, seed: u64) -> Option<Find> {
    planted::plant(Some(bug));
    let began = Instant::now();
    let report = run_seed(seed, &Options::default());
    planted::plant(None);
    let violation = report.first_violation()?.clone();
    let took = began.elapsed();
    let without = run_seed(seed, &Options::default());
    without.first_violation().is_none().then_some(Find { seed, violation, took })
}

/// Does the same on every core, and waits for all.
fn on_each_core(work: impl Fn() + Sync) {
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(&work);
        }
    });
}
