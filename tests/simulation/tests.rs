//! What `cargo test` runs: a few seeds, each twice.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

use super::seed::{Options, run_seed};

/// Runs the tests.
pub(crate) fn run() -> ExitCode {
    let arguments = Arguments::from_args();
    let seeds =
        (1..=20).map(|seed| Trial::test(format!("seed_{seed:02}_gives_the_same_histories_twice"), move || twice(seed)));
    libtest_mimic::run(&arguments, seeds.collect()).exit_code()
}

fn twice(seed: u64) -> Result<(), Failed> {
    let options = Options::default();
    let (first, second) = (run_seed(seed, &options), run_seed(seed, &options));
    if let Some((_, violation)) = first.violations.first() {
        return Err(format!("seed {seed}: {violation}\nKUBEFAN_SEED={seed} plays it again").into());
    }
    let differs = first.histories.iter().zip(&second.histories).find_map(|(a, b)| {
        let at = a.entries.iter().zip(&b.entries).position(|(a, b)| a != b)?;
        Some(format!("{}, entry {at}:\n{}\n{}", a.spec, a.entries[at], b.entries[at]))
    });
    if first.digests() != second.digests() {
        return Err(format!("seed {seed} gave two histories: {}", differs.unwrap_or_default()).into());
    }
    Ok(())
}
