//! The wall clock. No module below `app` reads it; they take it as a parameter.

use std::time::SystemTime;

/// The clock that the time of a certificate is compared with.
#[expect(clippy::disallowed_methods, reason = "the time enters here; code below takes it as a parameter")]
pub(super) fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// The wall clock in seconds since 1970.
pub(super) fn unix_time() -> f64 {
    wall_clock().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
