//! The deterministic simulation. An apiserver, two kubefans and their subscribers run in one
//! process with a paused clock. Faults and writes are drawn from one seed, and an oracle judges the
//! history of every subscriber.
//!
//! `KUBEFAN_SEEDS=N` sweeps N seeds (starting at `KUBEFAN_FIRST_SEED` or a random one).
//! `KUBEFAN_SEED=K` plays one seed and prints its story. See docs/reliability.md.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod concurrent_lists;
mod draw;
mod faults;
mod gzip_decoder;
mod history;
mod http_transport;
mod informer;
mod link;
mod node;
mod oracle;
mod peering;
#[cfg(planted_bugs)]
mod planted;
mod projection;
mod reader;
mod replay;
mod schema;
mod seed;
mod selection;
mod sides;
mod subscriber;
mod sweep;
mod tally;
mod tests;
mod truth;
mod upstream;
mod workload;
mod world;

fn main() -> std::process::ExitCode {
    let number = |name: &str| {
        std::env::var(name).ok().map(|text| {
            text.parse().unwrap_or_else(|_| {
                eprintln!("{name}={text:?} is not a number");
                std::process::exit(2)
            })
        })
    };
    seed::remember_panics();
    #[cfg(planted_bugs)]
    if number("KUBEFAN_SEED").is_none() && std::env::var("KUBEFAN_PLANTED_BUG").as_deref() != Ok("none") {
        return planted::check(number("KUBEFAN_SEEDS"));
    }
    let first = number("KUBEFAN_FIRST_SEED").unwrap_or_else(random_seed);
    match (number("KUBEFAN_SEED"), number("KUBEFAN_SEEDS")) {
        (Some(seed), _) => replay::replay(seed),
        (None, Some(seeds)) => sweep::sweep(first, seeds),
        (None, None) => tests::run(first),
    }
}

#[expect(clippy::disallowed_methods, reason = "it is printed, and KUBEFAN_FIRST_SEED plays it again")]
fn random_seed() -> u64 {
    rand::random::<u32>().into()
}
