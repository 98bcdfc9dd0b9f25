//! The simulation tests of `cargo test`: a few random seeds, each twice, the named cases, and
//! tests that the oracle and the decoder of gzip bodies can fail.

mod gzip_decoder_detects_faults;
mod informer_check_detects_faults;
mod named_cases;
mod oracle_detects_faults;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

use super::seed::{Options, run_seed};

/// The number of seeds that run twice.
const SEEDS: u64 = 10;

/// Runs the tests, with the seeds from `first` on.
pub(crate) fn run(first: u64) -> ExitCode {
    let arguments = Arguments::from_args();
    if !arguments.list {
        println!("{SEEDS} seeds; KUBEFAN_FIRST_SEED={first} plays the same ones again");
    }
    let twice = |number| {
        let name = format!("two_runs_of_a_seed_give_the_same_histories::{number:02}");
        Trial::test(name, move || twice(first + number))
    };
    let tests = (0..SEEDS)
        .map(twice)
        .chain(named_cases::trials())
        .chain(oracle_detects_faults::trials())
        .chain(informer_check_detects_faults::trials())
        .chain(gzip_decoder_detects_faults::trials());
    libtest_mimic::run(&arguments, tests.collect()).exit_code()
}

/// Two runs of one seed are equal to the last byte and millisecond, and break no guarantee.
fn twice(seed: u64) -> Result<(), Failed> {
    let options = Options::default();
    let first = run_seed(seed, &options);
    let second = run_seed(seed, &options);
    if let Some(failure) = first.failure() {
        return Err(format!("{failure}\nKUBEFAN_SEED={seed} plays it again").into());
    }
    if first.digests() == second.digests() && first.story == second.story {
        return Ok(());
    }
    let differs = first.histories.iter().zip(&second.histories).find_map(|(a, b)| {
        let at = a.entries.iter().zip(&b.entries).position(|(a, b)| a != b)?;
        Some(format!("{}, entry {at}:\n{}\n{}", a.spec, a.entries[at], b.entries[at]))
    });
    Err(format!("seed {seed} gave two different histories: {}", differs.unwrap_or_default()).into())
}
