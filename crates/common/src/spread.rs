//! Spreads things evenly that must not happen at the same time.

/// The place of number `number`, from 0 to 1. Successive multiples of the golden ratio are spread
/// more evenly than random numbers.
pub fn spread(number: u64) -> f64 {
    const GOLDEN_RATIO: f64 = 0.618_033_988_749_894_9;
    (number as f64 * GOLDEN_RATIO).fract()
}
