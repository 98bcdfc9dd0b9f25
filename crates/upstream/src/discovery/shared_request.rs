//! A request whose answer callers share: at most one at a time, and at most one in an interval.

use std::time::Duration;

use tokio::{
    sync::Mutex,
    time::{Instant, sleep_until},
};

use crate::error::UpstreamError;

/// The last attempt, and the time until the next one.
pub(super) struct SharedRequest<T> {
    interval_min: Duration,
    // Locked during a request.
    last: Mutex<Last<T>>,
}

struct Last<T> {
    attempt: Option<Attempt<T>>,
    /// Earliest start of the next request. Set before a request too: its caller may drop it.
    not_before: Option<Instant>,
}

struct Attempt<T> {
    asked_at: Instant,
    result: Result<T, UpstreamError>,
}

impl<T: Clone> SharedRequest<T> {
    /// A request that is sent at most once in an interval, or later if the apiserver asks for that.
    pub(super) fn new(interval_min: Duration) -> Self {
        Self { interval_min, last: Mutex::new(Last { attempt: None, not_before: None }) }
    }

    /// The answer to the last request, or to a new one if that may be sent now.
    pub(super) async fn recent(&self, ask: impl Future<Output = Result<T, UpstreamError>>) -> Result<T, UpstreamError> {
        loop {
            let mut last = self.last.lock().await;
            let Some(not_before) = last.not_before.filter(|not_before| Instant::now() < *not_before) else {
                return self.ask(&mut last, ask).await;
            };
            if let Some(attempt) = &last.attempt {
                return attempt.result.clone();
            }
            drop(last);
            sleep_until(not_before).await;
        }
    }

    /// The answer to a request that was sent at `since` or later. Waits until one may be sent,
    /// unless the last one has failed.
    pub(super) async fn since(
        &self,
        since: Instant,
        ask: impl Future<Output = Result<T, UpstreamError>>,
    ) -> Result<T, UpstreamError> {
        loop {
            let mut last = self.last.lock().await;
            if let Some(attempt) = last.attempt.as_ref().filter(|attempt| attempt.asked_at >= since) {
                return attempt.result.clone();
            }
            let Some(not_before) = last.not_before.filter(|not_before| Instant::now() < *not_before) else {
                return self.ask(&mut last, ask).await;
            };
            if let Some(Attempt { result: Err(error), .. }) = &last.attempt {
                return Err(error.clone());
            }
            // Others must not wait for it.
            drop(last);
            sleep_until(not_before).await;
        }
    }

    async fn ask(
        &self,
        last: &mut Last<T>,
        ask: impl Future<Output = Result<T, UpstreamError>>,
    ) -> Result<T, UpstreamError> {
        let asked_at = Instant::now();
        last.not_before = Some(asked_at + self.interval_min);
        let result = ask.await;
        let asked_for = result.as_ref().err().and_then(UpstreamError::retry_after).unwrap_or_default();
        last.not_before = Some(Instant::now() + self.interval_min.max(asked_for));
        last.attempt = Some(Attempt { asked_at, result: result.clone() });
        result
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::future::join_all;
    use tokio::time::{advance, sleep, timeout};

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(2);

    struct Server {
        request: SharedRequest<usize>,
        asked: AtomicUsize,
        fails: bool,
    }

    impl Server {
        fn new(fails: bool) -> Self {
            Self { request: SharedRequest::new(INTERVAL), asked: AtomicUsize::new(0), fails }
        }

        async fn ask(&self) -> Result<usize, UpstreamError> {
            sleep(Duration::from_millis(10)).await;
            let number = 1 + self.asked.fetch_add(1, Ordering::Relaxed);
            if self.fails { Err(UpstreamError::NotFound { message: "no".to_owned() }) } else { Ok(number) }
        }

        async fn recent(&self) -> Result<usize, UpstreamError> {
            self.request.recent(self.ask()).await
        }

        async fn since(&self, since: Instant) -> Result<usize, UpstreamError> {
            self.request.since(since, self.ask()).await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn callers_share_one_request_in_an_interval() {
        let server = Server::new(false);
        let all = join_all((0..100).map(|_| server.recent())).await;
        assert!(all.iter().all(|answer| *answer == Ok(1)), "{all:?}");
        advance(INTERVAL).await;
        assert_eq!(server.recent().await, Ok(2));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_to_an_earlier_request_does_not_count() {
        let server = Server::new(false);
        let began = Instant::now();
        assert_eq!(server.since(began).await, Ok(1));
        assert_eq!(server.since(began).await, Ok(1), "it was sent since");
        let now = Instant::now();
        let (all, recent) = tokio::join!(join_all((0..100).map(|_| server.since(now))), server.recent());
        assert!(all.iter().all(|answer| *answer == Ok(2)), "{all:?}");
        assert_eq!(recent, Ok(1), "it does not wait for them");
        assert!(now.elapsed() >= INTERVAL && now.elapsed() < 2 * INTERVAL, "{:?}", now.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_its_caller_drops_counts() {
        let server = Server::new(false);
        let began = Instant::now();
        for _ in 0..100 {
            assert!(timeout(Duration::from_millis(1), server.recent()).await.is_err());
        }
        assert_eq!(server.recent().await, Ok(1));
        assert!(began.elapsed() >= INTERVAL, "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_is_not_waited_out() {
        let server = Server::new(true);
        assert!(server.recent().await.is_err());
        let now = Instant::now();
        assert!(server.since(now).await.is_err());
        assert_eq!((now.elapsed(), server.asked.load(Ordering::Relaxed)), (Duration::ZERO, 1));
    }
}
