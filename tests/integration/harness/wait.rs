//! Waits for a condition instead of sleeping for a fixed time. A test that sleeps is slow, flaky,
//! or both.

use std::{future::Future, time::Duration};

use tokio::time::{Instant, sleep, timeout_at};

/// Time limit of steps that take milliseconds on an idle machine and seconds on a busy one.
pub(crate) const SOON: Duration = Duration::from_secs(30);

const POLL_INTERVAL: Duration = Duration::from_millis(25);

/// Polls `probe` until it returns a value. Panics with `what` after `at_most`.
pub(crate) async fn until<T, F>(what: &str, at_most: Duration, probe: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    try_until(at_most, probe).await.unwrap_or_else(|| panic!("waited {} s for {what}", at_most.as_secs_f32()))
}

/// Like [`until`]; `None` after the deadline.
pub(crate) async fn try_until<T, F>(at_most: Duration, mut probe: impl FnMut() -> F) -> Option<T>
where
    F: Future<Output = Option<T>>,
{
    let deadline = Instant::now() + at_most;
    loop {
        if let Some(value) = timeout_at(deadline, probe()).await.ok()? {
            return Some(value);
        }
        if Instant::now() >= deadline {
            return None;
        }
        sleep(POLL_INTERVAL).await;
    }
}
