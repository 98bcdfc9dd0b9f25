//! Waits for a condition instead of for a time: a test that sleeps is either slow or flaky, most often both.

use std::{future::Future, time::Duration};

use tokio::time::{Instant, sleep, timeout_at};

/// For what happens in milliseconds on an idle machine and in seconds on a busy one.
pub(crate) const SOON: Duration = Duration::from_secs(30);

const POLL_INTERVAL: Duration = Duration::from_millis(25);

/// Asks `probe` until it gives a value; panics with `what` when it gave none by the deadline.
pub(crate) async fn until<T, F>(what: &str, at_most: Duration, probe: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    try_until(at_most, probe).await.unwrap_or_else(|| panic!("waited {} s in vain for {what}", at_most.as_secs_f32()))
}

/// Like [`until`], with `None` for a deadline that passed.
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
