//! Randomness. No module below `app` makes any; they take it as a parameter.

use rand::distr::{Distribution, StandardUniform};

/// Returns a random value, such as the seed of a generator.
#[expect(clippy::disallowed_methods, reason = "randomness enters here; code below takes it as a parameter")]
pub(super) fn seed<T>() -> T
where
    StandardUniform: Distribution<T>,
{
    rand::random()
}
