//! The wall clock. No module below `app` reads it; they take it as a parameter.

use std::time::SystemTime;

/// Returns the current time, with which the validity of a certificate is compared.
#[expect(clippy::disallowed_methods, reason = "the time enters here; code below takes it as a parameter")]
pub(super) fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// Returns the wall clock in seconds since 1970.
pub(super) fn unix_time() -> f64 {
    wall_clock().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
