//! The random numbers of retries and timeouts.

use std::time::Duration;

use rand::{RngExt, SeedableRng, rngs::SmallRng};

/// A watch without a timeout of its own gets a random one from this to twice as much, as
/// in client-go: then not all watches of a restarted server end at once.
const WATCH_TIMEOUT_MIN_SECONDS: u64 = 5 * 60;

/// Returns a generator: of this seed, as in simulations, or of a random one.
#[expect(clippy::disallowed_methods, reason = "a program that uses the client need not bring a generator")]
pub(crate) fn generator(seed: Option<u64>) -> SmallRng {
    seed.map_or_else(|| SmallRng::from_rng(&mut rand::rng()), SmallRng::seed_from_u64)
}

/// Returns a random timeout for a watch whose caller set none.
pub(crate) fn watch_timeout(random: &mut SmallRng) -> Duration {
    Duration::from_secs(random.random_range(WATCH_TIMEOUT_MIN_SECONDS..=2 * WATCH_TIMEOUT_MIN_SECONDS))
}
