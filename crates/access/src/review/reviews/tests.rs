//! Verdicts over time: fresh, shared, in an outage, and replaced.

use std::sync::atomic::{AtomicUsize, Ordering};

use futures::FutureExt;
use kubefan_telemetry::metrics::Metrics;
use prometheus::Registry;
use tokio::time::{advance, sleep};

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const FRESH: Duration = Duration::from_secs(10);
const GRACE: Duration = Duration::from_secs(600);

impl Outcome for bool {
    fn is_positive(&self) -> bool {
        *self
    }

    fn ends_at(&self) -> Option<Instant> {
        None
    }
}

/// The reviews, and the current answer of the apiserver.
struct World {
    reviews: Reviews<u8, bool>,
    asked: Arc<AtomicUsize>,
    answer: Arc<Mutex<Result<bool, UpstreamError>>>,
}

impl World {
    fn new() -> Self {
        let queue =
            QueueLimits { per_second: 1000, burst: 1000, in_flight_max: 10, waiting_max: 10, wait_timeout: SECOND };
        let metrics = Metrics::new(Registry::new()).unwrap();
        let options = ReviewsOptions { entries_max: 10, outage_grace: GRACE, queue };
        let reviews = Reviews::new(options, metrics.access().reviews_of_tokens());
        Self { reviews, asked: Arc::default(), answer: Arc::new(Mutex::new(Ok(true))) }
    }

    fn answers(&self, answer: Result<bool, UpstreamError>) {
        *self.answer.lock().unwrap() = answer;
    }

    fn review(&self) -> Review<bool> {
        let asked = self.asked.clone();
        let answer = self.answer.clone();
        let answer = async move {
            asked.fetch_add(1, Ordering::Relaxed);
            let answer = answer.lock().unwrap().clone();
            answer.map(|verdict| (verdict, FRESH))
        };
        Review { bytes: Box::new(|| 100), answer: answer.boxed() }
    }

    async fn verdict(&self, key: u8) -> Result<bool, ReviewError> {
        self.reviews.verdict(key, Holder::new(1, None), self.review()).await
    }

    /// Like [`Self::verdict`], from an apiserver that needs this long.
    async fn verdict_after(&self, delay: Duration, key: u8) -> Result<bool, ReviewError> {
        let Review { bytes, answer } = self.review();
        let slow = async move {
            sleep(delay).await;
            answer.await
        };
        let review = Review { bytes, answer: slow.boxed() };
        self.reviews.verdict(key, Holder::new(1, None), review).await
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

fn unreachable() -> UpstreamError {
    UpstreamError::Unreachable { server: "https://h".into(), message: "refused".into() }
}

#[tokio::test(start_paused = true)]
async fn a_verdict_is_asked_for_once_while_it_counts() {
    let world = World::new();
    assert_eq!(world.verdict(1).await, Ok(true));
    advance(FRESH - SECOND).await;
    assert_eq!((world.verdict(1).await, world.asked()), (Ok(true), 1));
    world.answers(Ok(false));
    advance(SECOND).await;
    assert_eq!((world.verdict(1).await, world.asked()), (Ok(false), 2));
}

#[tokio::test(start_paused = true)]
async fn in_an_outage_known_callers_keep_their_verdict_for_the_grace_and_new_ones_get_none() {
    let outages = [
        unreachable(),
        UpstreamError::Reset { message: "x".into() },
        UpstreamError::Timeout { message: "x".into(), retry_after: None },
        UpstreamError::Server { code: 503, message: "x".into(), retry_after: None },
    ];
    for outage in outages {
        let world = World::new();
        assert_eq!(world.verdict(1).await, Ok(true));
        world.answers(Err(outage.clone()));
        advance(FRESH).await;
        assert_eq!(world.verdict(1).await, Ok(true), "{outage}");
        assert_eq!(world.verdict(2).await, Err(ReviewError::Outage), "{outage}");
        advance(GRACE - SECOND).await;
        assert_eq!(world.verdict(1).await, Ok(true), "{outage}");
        advance(SECOND).await;
        assert_eq!(world.verdict(1).await, Err(ReviewError::Outage), "{outage}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_refuses_kubefan_is_no_outage() {
    let message = || "x".to_owned();
    for refusal in [
        UpstreamError::Auth { message: message() },
        UpstreamError::Forbidden { message: message() },
        UpstreamError::TooManyRequests { message: message(), retry_after: None },
        UpstreamError::NotFound { message: message() },
        UpstreamError::Tls { server: message(), message: message() },
    ] {
        let world = World::new();
        assert_eq!(world.verdict(1).await, Ok(true));
        world.answers(Err(refusal.clone()));
        advance(FRESH).await;
        assert_eq!(world.verdict(1).await, Err(ReviewError::Refused), "{refusal}");
    }
}

#[tokio::test(start_paused = true)]
async fn during_an_outage_the_apiserver_is_asked_once_a_second() {
    let world = World::new();
    assert_eq!(world.verdict(1).await, Ok(true));
    world.answers(Err(unreachable()));
    advance(FRESH).await;
    for _ in 0..100 {
        assert_eq!(world.verdict(1).await, Ok(true));
    }
    assert_eq!(world.asked(), 2);
    advance(OUTAGE_PAUSE).await;
    world.answers(Ok(false));
    assert_eq!((world.verdict(1).await, world.asked()), (Ok(false), 3), "the outage has ended");
}

#[tokio::test(start_paused = true)]
async fn only_the_first_failure_of_an_outage_is_news() {
    let Reviews { shared, .. } = World::new().reviews;
    for _ in 0..2 {
        assert!(shared.begins_outage(true));
        assert!(!shared.begins_outage(true), "the apiserver is asked again each second");
        assert!(!shared.begins_outage(false));
    }
}

/// The apiserver neither refuses connections nor answers, as a process that is stopped.
#[tokio::test(start_paused = true)]
async fn an_apiserver_that_hangs_delays_known_callers_by_a_second() {
    let world = World::new();
    assert_eq!(world.verdict(1).await, Ok(true));
    world.answers(Err(unreachable()));
    advance(FRESH).await;
    assert_eq!(world.verdict(1).await, Ok(true));
    for _ in 0..3 {
        advance(OUTAGE_PAUSE).await;
        let began = Instant::now();
        assert_eq!(world.verdict_after(10 * SECOND, 1).await, Ok(true));
        assert_eq!(began.elapsed(), RETURN_TIMEOUT);
        assert_eq!(world.verdict(1).now_or_never(), Some(Ok(true)), "it is not asked again at once");
    }
    sleep(10 * SECOND).await;
    world.answers(Ok(false));
    assert_eq!(world.verdict(1).await, Ok(false), "the outage has ended");
}

#[tokio::test(start_paused = true)]
async fn the_answer_of_a_slow_apiserver_counts_when_it_comes() {
    let world = World::new();
    assert_eq!(world.verdict(1).await, Ok(true));
    world.answers(Err(unreachable()));
    advance(FRESH).await;
    assert_eq!(world.verdict(1).await, Ok(true));
    world.answers(Ok(false));
    advance(OUTAGE_PAUSE).await;
    assert_eq!(world.verdict_after(3 * SECOND, 1).await, Ok(true), "the last one, after a second");
    sleep(3 * SECOND).await;
    assert_eq!(world.reviews.known(&1), Some(false));
}

/// Otherwise callers with old verdicts would keep them although the apiserver answers.
#[tokio::test(start_paused = true)]
async fn an_outage_that_another_review_has_ended_does_not_come_back() {
    let world = World::new();
    assert_eq!((world.verdict(1).await, world.verdict(2).await), (Ok(true), Ok(true)));
    world.answers(Err(unreachable()));
    advance(FRESH).await;
    assert_eq!(world.verdict(1).await, Ok(true));
    advance(OUTAGE_PAUSE).await;
    world.answers(Ok(false));
    let (slow, fast) = tokio::join!(world.verdict_after(3 * SECOND, 1), world.verdict_after(SECOND / 2, 2));
    assert_eq!((slow, fast), (Ok(false), Ok(false)), "both have the new verdict");
    assert!(!world.reviews.is_away() && world.reviews.is_answered());
}

/// A replica without callers asks nothing more: it must not keep the others from rebalancing.
#[tokio::test(start_paused = true)]
async fn a_failure_counts_for_a_minute() {
    let world = World::new();
    assert!(world.reviews.is_answered());
    world.answers(Err(unreachable()));
    assert!(world.verdict(1).await.is_err());
    advance(UNANSWERED_FOR - SECOND).await;
    assert!(!world.reviews.is_answered());
    advance(SECOND).await;
    assert!(world.reviews.is_answered());
}

#[tokio::test(start_paused = true)]
async fn a_fresh_verdict_replaces_the_one_in_the_cache() {
    let world = World::new();
    assert_eq!(world.verdict(1).await, Ok(true));
    world.answers(Ok(false));
    assert_eq!(world.verdict(1).await, Ok(true), "from the cache");
    assert_eq!(world.reviews.new_verdict(1, Holder::new(1, None), world.review()).await, Ok(false));
    assert_eq!((world.verdict(1).await, world.asked()), (Ok(false), 2));
    assert_eq!((world.reviews.known(&1), world.reviews.known(&2)), (Some(false), None));
}

#[tokio::test(start_paused = true)]
async fn large_questions_do_not_hold_up_others() {
    let world = World::new();
    let large = (0..10).map(|key| {
        let answer = sleep(FRESH).map(|()| Ok((true, FRESH)));
        let review = Review { bytes: Box::new(|| LARGE_BYTES), answer: answer.boxed() };
        world.reviews.verdict(key, Holder::new(1, None), review)
    });
    let mut large = futures::future::join_all(large);
    assert!(futures::poll!(&mut large).is_pending(), "as many as may be in flight");
    assert_eq!(world.verdict(10).now_or_never(), Some(Ok(true)));
}

#[tokio::test(start_paused = true)]
async fn a_question_is_measured_only_to_be_sent() {
    let world = World::new();
    let measured = Arc::new(AtomicUsize::new(0));
    world.answers(Ok(false));
    for _ in 0..3 {
        let counted = measured.clone();
        let bytes = Box::new(move || counted.fetch_add(1, Ordering::Relaxed));
        let review = Review { bytes, ..world.review() };
        assert_eq!(world.reviews.verdict(1, Holder::new(1, None), review).await, Ok(false));
    }
    assert_eq!(measured.load(Ordering::Relaxed), 1, "the refusal is kept");
}
