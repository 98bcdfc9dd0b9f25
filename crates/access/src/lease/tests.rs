//! Streams whose rights change.

use std::sync::{
    Mutex,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use kubefan_common::proto::v1alpha1::Target;
use kubefan_telemetry::metrics::Metrics;
use kubefan_upstream::UpstreamError;
use serde_json::json;
use tokio::{task::yield_now, time::advance};

use super::*;
use crate::{
    AccessOptions, Identity,
    authentication::{
        AuthenticationOptions,
        caller::{Caller, KnownCaller},
        presented::Presented,
    },
    authorization::{AuthorizationOptions, attributes::ReadVerb},
    review::{QueueLimits, fake::FakeReviews},
};

const SECOND: Duration = Duration::from_secs(1);
const INTERVAL: Duration = Duration::from_secs(300);

/// Access to an apiserver that allows everything while the flag is set.
struct World {
    access: Arc<AccessControl>,
    fake: FakeReviews,
    allows: Arc<AtomicBool>,
    woken: Arc<AtomicUsize>,
    /// Whether the pods of all tokens are deleted.
    missing: Arc<AtomicBool>,
}

impl World {
    fn new(age_max: Option<Duration>) -> Self {
        let allows = Arc::new(AtomicBool::new(true));
        let allowed = allows.clone();
        let fake = FakeReviews::new(move |_| json!({ "status": { "allowed": allowed.load(Ordering::Relaxed) } }));
        let queue =
            QueueLimits { per_second: 1000, burst: 1000, in_flight_max: 10, waiting_max: 10, wait_timeout: SECOND };
        let outage_grace = 600 * SECOND;
        let authentication = AuthenticationOptions {
            api_audiences: Vec::new(),
            token_ttl: SECOND,
            outage_grace,
            anonymous: false,
            ignored_extra: Vec::new(),
            queue,
        };
        let authorization = AuthorizationOptions {
            authorized_ttl: INTERVAL,
            unauthorized_ttl: SECOND,
            outage_grace,
            always_allow_groups: Vec::new(),
            broad_first: true,
            queue,
        };
        let streams = StreamOptions { reauthorize_interval: INTERVAL, age_max };
        let options = AccessOptions { authentication, authorization, streams };
        let clock = || std::time::SystemTime::UNIX_EPOCH;
        let metrics = Metrics::new(prometheus::Registry::new()).unwrap();
        let access = AccessControl::webhook(&fake.upstream(), options, [7; 32], clock, metrics.access());
        Self { access: Arc::new(access), fake, allows, woken: Arc::default(), missing: Arc::default() }
    }

    async fn stream(&self, user: &str, expires_at: Option<Instant>) -> Lease {
        self.stream_of(Identity { user: user.to_owned(), ..Identity::default() }, expires_at).await
    }

    async fn stream_of(&self, identity: Identity, expires_at: Option<Instant>) -> Lease {
        let caller = Caller::Known(KnownCaller::of_token(identity, &[], expires_at));
        let target = Target { version: "v1".to_owned(), resource: "pods".to_owned(), ..Target::default() };
        let holder = Holder::new(1, None);
        let presented = Presented::new(&http::HeaderMap::new(), false, false, holder);
        let read = Read::collection(ReadVerb::Watch, target);
        let read = self.access.authorize(&caller, read, &presented).await.unwrap();
        let woken = self.woken.clone();
        let missing = self.missing.clone();
        let exists = move |object: &BoundObject| match object.resource {
            "pods" => Some(!missing.load(Ordering::Relaxed)),
            _ => None,
        };
        Lease::start(&self.access, read, &GroupVersionResource::new("", "v1", "pods"), holder, exists, move || {
            woken.fetch_add(1, Ordering::Relaxed);
        })
    }

    fn woken(&self) -> usize {
        self.woken.load(Ordering::Relaxed)
    }
}

/// Lets time pass, so that every timer fires in its turn.
async fn pass(time: Duration) {
    for _ in 0..time.as_secs() {
        advance(SECOND).await;
        yield_now().await;
    }
    for _ in 0..100 {
        yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_when_its_right_is_gone_and_is_woken_for_it() {
    let world = World::new(None);
    let lease = world.stream("a", None).await;
    pass(3 * INTERVAL + 10 * SECOND).await;
    assert_eq!((lease.end(), world.woken()), (None, 0));
    assert_eq!(world.fake.taken().len(), 4, "one at the start, and then once in an interval");
    world.allows.store(false, Ordering::Relaxed);
    pass(INTERVAL).await;
    assert!(matches!(lease.end(), Some(StreamEnd::Revoked(text)) if text.contains("User \"a\" cannot watch")));
    assert_eq!(world.woken(), 1);
    assert!(world.stream_is_refused("a").await, "the verdict in the cache was replaced");
}

impl World {
    async fn stream_is_refused(&self, user: &str) -> bool {
        let identity = Identity { user: user.to_owned(), ..Identity::default() };
        let caller = Caller::Known(KnownCaller::new(identity, None));
        let target = Target { version: "v1".to_owned(), resource: "pods".to_owned(), ..Target::default() };
        let presented = Presented::new(&http::HeaderMap::new(), false, false, Holder::new(1, None));
        let read = Read::collection(ReadVerb::Watch, target);
        self.access.authorize(&caller, read, &presented).await.is_err()
    }
}

#[tokio::test(start_paused = true)]
async fn streams_of_one_user_share_their_reviews() {
    let world = World::new(None);
    let leases = Mutex::new(Vec::new());
    for _ in 0..100 {
        let lease = world.stream("a", None).await;
        leases.lock().unwrap().push(lease);
    }
    world.fake.taken();
    pass(INTERVAL).await;
    let reviews = world.fake.taken().len();
    assert!(reviews <= 10, "{reviews} reviews of 100 streams");
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_with_its_token_and_at_its_greatest_age() {
    let world = World::new(Some(100 * SECOND));
    let expiring = world.stream("a", Some(Instant::now() + 10 * SECOND)).await;
    let lasting = world.stream("b", None).await;
    pass(9 * SECOND).await;
    assert!(expiring.end().is_none() && lasting.end().is_none());
    pass(SECOND).await;
    assert!(matches!(expiring.end(), Some(StreamEnd::Reauthenticate(why)) if why.contains("token")));
    assert!(lasting.end().is_none());
    pass(90 * SECOND).await;
    assert!(matches!(lasting.end(), Some(StreamEnd::Reauthenticate(why)) if why.contains("limits.streamAgeMax")));
}

#[tokio::test(start_paused = true)]
async fn an_outage_within_the_grace_ends_no_stream() {
    let world = World::new(None);
    let lease = world.stream("a", None).await;
    world.fake.fails_with(Some(UpstreamError::Reset { message: "x".into() }));
    // The last verdict counts for the grace.
    pass(3 * INTERVAL).await;
    assert!(lease.end().is_none());
    world.allows.store(false, Ordering::Relaxed);
    world.fake.fails_with(None);
    pass(2 * RETRY).await;
    assert!(matches!(lease.end(), Some(StreamEnd::Revoked(_))), "after the outage the right is reviewed soon");
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_if_its_right_cannot_be_reviewed_for_too_long() {
    // The apiserver answers, but gives kubefan no verdict.
    let world = World::new(None);
    let lease = world.stream("a", None).await;
    world.fake.fails_with(Some(UpstreamError::Forbidden { message: "x".into() }));
    pass(INTERVAL).await;
    assert!(lease.end().is_none());
    pass(INTERVAL + 2 * RETRY).await;
    assert_eq!(lease.end(), Some(StreamEnd::Reauthenticate(UNREVIEWED)));
}

#[tokio::test(start_paused = true)]
async fn reviews_end_with_the_stream() {
    let world = World::new(None);
    drop(world.stream("a", None).await);
    world.fake.taken();
    pass(2 * INTERVAL).await;
    assert_eq!((world.fake.taken().len(), world.woken()), (0, 0));
}

/// The user of a token that is bound to a pod.
fn of_a_pod() -> Identity {
    let extra = [("pod-name", "p"), ("pod-uid", "u")]
        .map(|(key, value)| (format!("authentication.kubernetes.io/{key}"), vec![value.to_owned()]));
    Identity { user: "system:serviceaccount:n:a".to_owned(), extra: extra.into(), ..Identity::default() }
}

#[tokio::test(start_paused = true)]
async fn a_stream_ends_when_its_pod_is_deleted_and_others_continue() {
    let world = World::new(None);
    let lease = world.stream_of(of_a_pod(), None).await;
    let other = world.stream("b", None).await;
    pass(2 * LOOKUP_INTERVAL).await;
    assert_eq!((lease.end(), world.woken()), (None, 0));
    world.missing.store(true, Ordering::Relaxed);
    pass(LOOKUP_INTERVAL).await;
    assert_eq!((lease.end(), other.end()), (Some(StreamEnd::Reauthenticate(UNBOUND)), None));
    assert_eq!(world.woken(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_its_cache_does_not_have_yet_is_not_deleted() {
    let world = World::new(None);
    world.missing.store(true, Ordering::Relaxed);
    let lease = world.stream_of(of_a_pod(), None).await;
    pass(5 * LOOKUP_INTERVAL).await;
    world.missing.store(false, Ordering::Relaxed);
    pass(LOOKUP_INTERVAL).await;
    assert_eq!((lease.end(), world.woken()), (None, 0));
}
