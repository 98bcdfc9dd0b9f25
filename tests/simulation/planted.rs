//! A test of the oracle: it must find every planted bug, under the name of a guarantee that the bug
//! breaks. `crates/common/src/planted/bugs.rs` lists the bugs and where they are. They were written
//! without knowledge of the oracle's code.
//!
//! If built with `KUBEFAN_PLANTED_BUGS=1`, the simulation does only this: for each bug it plays
//! seeds until one reports a violation.

use std::{
    num::NonZero,
    process::ExitCode,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use kubefan_common::planted::{self, Bug};

use super::{
    oracle::Violation,
    seed::{Options, run_seed},
};

/// The number of seeds in which a bug must appear.
const SEEDS_MAX: u64 = 1000;

/// Plants each bug in turn, or only the bug in `KUBEFAN_PLANTED_BUG`. The check fails if no seed
/// finds a bug, or if it is reported under a guarantee that it does not break.
pub(crate) fn check(seeds: Option<u64>) -> ExitCode {
    let only = std::env::var("KUBEFAN_PLANTED_BUG").ok();
    let bugs = Bug::ALL.iter().filter(|bug| only.as_ref().is_none_or(|only| only == bug.name()));
    let (mut found, mut missed, mut misnamed) = (0, 0, 0);
    println!("{:<28} {:>5}  {:<14} BREAKS", "BUG", "SEED", "VIOLATED");
    for bug in bugs {
        planted::plant(Some(*bug));
        match first_violation(seeds.unwrap_or(SEEDS_MAX)) {
            Some((seed, violation)) => {
                let named = format!("{:?}", violation.guarantee);
                println!("{:<28} {seed:>5}  {named:<14} {}", bug.name(), bug.breaks());
                found += 1;
                if !bug.breaks().split(", ").any(|broken| broken == named) {
                    println!("  misnamed: {violation}");
                    misnamed += 1;
                }
            }
            None => {
                println!("{:<28} {:>5}  {:<14} {}", bug.name(), "-", "NOT FOUND", bug.breaks());
                missed += 1;
            }
        }
    }
    planted::plant(None);
    println!("{found} found, {missed} missed, {misnamed} misnamed");
    if missed == 0 && misnamed == 0 && found > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Plays seeds until one reports a violation. Returns the lowest such seed and its violation.
fn first_violation(seeds: u64) -> Option<(u64, Violation)> {
    let options = Options::default();
    let (next, found) = (AtomicU64::new(1), Mutex::new(None::<(u64, Violation)>));
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                while found.lock().expect("no holder panics").is_none() {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed > seeds {
                        return;
                    }
                    let report = run_seed(seed, &options);
                    if let Some(violation) = report.first_violation() {
                        let mut found = found.lock().expect("no holder panics");
                        if found.as_ref().is_none_or(|(known, _)| seed < *known) {
                            *found = Some((seed, violation.clone()));
                        }
                    }
                }
            });
        }
    });
    found.into_inner().expect("no holder panics")
}
