//! The deterministic simulation: apiserver, kubefans and subscribers in one process on a clock that stands still, with faults, all
//! drawn from one seed; and the oracle that judges what every subscriber was told.
//!
//! `KUBEFAN_SEEDS=N` sweeps N seeds (from `KUBEFAN_FIRST_SEED` on, or 1), `KUBEFAN_SEED=K` plays one and tells its story. docs/reliability.md says more.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod faults;
mod history;
mod link;
mod node;
mod oracle;
#[cfg(planted_bugs)]
mod planted;
mod replay;
mod seed;
mod selection;
mod subscriber;
mod sweep;
mod tests;
mod truth;
mod upstream;
mod workload;
mod world;

fn main() -> std::process::ExitCode {
    let number = |name: &str| {
        std::env::var(name).ok().map(|text| {
            text.parse().unwrap_or_else(|_| {
                eprintln!("{name}={text:?} is no number");
                std::process::exit(2)
            })
        })
    };
    seed::remember_panics();
    #[cfg(planted_bugs)]
    if number("KUBEFAN_SEED").is_none() {
        return planted::check(number("KUBEFAN_SEEDS"));
    }
    match (number("KUBEFAN_SEED"), number("KUBEFAN_SEEDS")) {
        (Some(seed), _) => replay::replay(seed),
        (None, Some(seeds)) => sweep::sweep(number("KUBEFAN_FIRST_SEED").unwrap_or(1), seeds),
        (None, None) => tests::run(),
    }
}
