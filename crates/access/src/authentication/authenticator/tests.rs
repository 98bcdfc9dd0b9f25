//! The identity of a caller, by the credentials of its request.

use http::{HeaderMap, header};
use kubefan_telemetry::metrics::Metrics;
use kubefan_upstream::UpstreamError;
use serde_json::{Value, json};
use tokio::time::advance;

use super::*;
use crate::review::fake::FakeReviews;

const SECOND: Duration = Duration::from_secs(1);
const NOW_SECONDS: u64 = 1_800_000_000;

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(NOW_SECONDS)
}

fn options() -> AuthenticationOptions {
    AuthenticationOptions {
        api_audiences: Vec::new(),
        token_ttl: 10 * SECOND,
        outage_grace: 600 * SECOND,
        anonymous: false,
        ignored_extra: vec!["pod".to_owned()],
        queue: QueueLimits { per_second: 1000, burst: 1000, in_flight_max: 10, waiting_max: 10, wait_timeout: SECOND },
    }
}

/// Knows every token that begins with `good`, by its text.
fn review(body: &Value) -> Value {
    let token = body["spec"]["token"].as_str().unwrap();
    let user = json!({ "username": token, "extra": { "pod": [token], "role": ["r"] } });
    let audiences = body["spec"].get("audiences").cloned().unwrap_or_default();
    if token.starts_with("good") || token.starts_with("e30.") {
        json!({ "status": { "authenticated": true, "user": user, "audiences": audiences } })
    } else {
        json!({ "status": { "authenticated": false, "error": "invalid bearer token" } })
    }
}

struct World {
    authenticator: Authenticator,
    fake: FakeReviews,
}

impl World {
    fn new(options: AuthenticationOptions) -> Self {
        let fake = FakeReviews::new(review);
        let metrics = Metrics::new(prometheus::Registry::new()).unwrap();
        let authenticator = Authenticator::new(fake.upstream(), options, [7; KEY_BYTES], now, metrics.access());
        Self { authenticator, fake }
    }

    async fn user(&self, presented: &Presented) -> Result<Arc<KnownCaller>, Denial> {
        match self.authenticator.authenticate(presented).await? {
            Caller::Known(caller) => Ok(caller),
            Caller::Any => panic!("callers are distinguished"),
        }
    }

    async fn name(&self, presented: &Presented) -> Result<String, Denial> {
        self.user(presented).await.map(|caller| caller.identity.user.clone())
    }
}

fn bearing(token: &str) -> Presented {
    let mut headers = HeaderMap::new();
    headers.insert(header::AUTHORIZATION, format!("Bearer {token}").parse().unwrap());
    Presented::new(&headers, false, false, Holder::new(1, None))
}

fn nothing() -> Presented {
    Presented::new(&HeaderMap::new(), false, false, Holder::new(1, None))
}

fn certificate(user: &str) -> Option<CertificateVerdict> {
    let identity = Identity { user: user.to_owned(), ..Identity::default() };
    Some(CertificateVerdict::Known(KnownCaller::new(identity, None)))
}

#[tokio::test(start_paused = true)]
async fn a_token_is_reviewed_once_while_the_answer_counts() {
    let world = World::new(options());
    for _ in 0..3 {
        assert_eq!(world.name(&bearing("good")).await.as_deref(), Ok("good"));
        assert!(matches!(world.name(&bearing("bad")).await, Err(Denial::Unauthenticated(_))));
    }
    let taken = world.fake.taken();
    assert_eq!(taken.len(), 2);
    assert_eq!(taken[0]["spec"], json!({ "token": "good" }), "for the apiserver's own audience");
    advance(10 * SECOND).await;
    world.name(&bearing("good")).await.unwrap();
    assert_eq!(world.fake.taken().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn ignored_extras_are_left_out_and_the_group_of_the_authenticated_is_added() {
    let world = World::new(options());
    let identity = world.user(&bearing("good")).await.unwrap().identity.clone();
    assert_eq!((identity.extra.len(), identity.extra["role"][0].as_str()), (1, "r"));
    assert_eq!(identity.groups, ["system:authenticated"]);
}

#[tokio::test(start_paused = true)]
async fn an_audience_of_kubefans_own_is_asked_for() {
    let world = World::new(AuthenticationOptions { api_audiences: vec!["kubefan".to_owned()], ..options() });
    assert_eq!(world.name(&bearing("good")).await.as_deref(), Ok("good"));
    assert_eq!(world.fake.taken()[0]["spec"]["audiences"], json!(["kubefan"]));
}

#[tokio::test(start_paused = true)]
async fn a_token_comes_before_a_certificate_and_a_bad_one_fails_the_request() {
    let world = World::new(AuthenticationOptions { anonymous: true, ..options() });
    let with = |presented: Presented| presented.with_certificate(certificate("by-certificate"));
    assert_eq!(world.name(&with(nothing())).await.as_deref(), Ok("by-certificate"));
    assert_eq!(world.name(&with(bearing("good"))).await.as_deref(), Ok("good"));
    assert!(matches!(world.name(&with(bearing("bad"))).await, Err(Denial::Unauthenticated(_))));
    assert!(matches!(world.name(&bearing("bad")).await, Err(Denial::Unauthenticated(_))), "not anonymous");
    assert_eq!(world.name(&nothing()).await.as_deref(), Ok("system:anonymous"));
    let strict = World::new(options());
    assert!(matches!(strict.name(&nothing()).await, Err(Denial::Unauthenticated(_))));
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_must_not_be_used_fails_the_request_and_one_that_says_nothing_is_anonymous() {
    let with = |verdict: CertificateVerdict| nothing().with_certificate(Some(verdict));
    let refused = CertificateVerdict::Refused("a");
    let unread = CertificateVerdict::Unavailable("b");
    let says_nothing = CertificateVerdict::Nothing("c");
    for anonymous in [false, true] {
        let world = World::new(AuthenticationOptions { anonymous, ..options() });
        assert_eq!(world.name(&with(refused.clone())).await, Err(Denial::Certificate("a")));
        assert_eq!(world.name(&with(unread.clone())).await, Err(Denial::Unavailable("b")));
        let expected = if anonymous { Ok("system:anonymous".to_owned()) } else { Err(Denial::Certificate("c")) };
        assert_eq!(world.name(&with(says_nothing.clone())).await, expected);
        // A token counts alone.
        let both = bearing("good").with_certificate(Some(refused.clone()));
        assert_eq!(world.name(&both).await.as_deref(), Ok("good"));
        assert!(matches!(world.name(&nothing()).await, Ok(_) | Err(Denial::Unauthenticated(_))));
    }
}

#[tokio::test(start_paused = true)]
async fn a_token_that_others_could_read_is_not_taken() {
    let world = World::new(options());
    let exposed = Presented { is_exposed: true, ..bearing("good") };
    assert_eq!(world.name(&exposed).await, Err(Denial::Unauthenticated(EXPOSED)));
    assert_eq!(world.fake.taken().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_token_is_known_until_it_expires_also_in_an_outage() {
    let world = World::new(AuthenticationOptions { token_ttl: 3600 * SECOND, ..options() });
    use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
    let payload = json!({ "exp": NOW_SECONDS + 60 }).to_string();
    let jwt = bearing(&format!("e30.{}.x", BASE64_URL_SAFE_NO_PAD.encode(payload)));
    assert!(world.user(&jwt).await.unwrap().expires_at.is_some());
    world.fake.fails_with(Some(UpstreamError::Reset { message: "x".into() }));
    advance(59 * SECOND).await;
    assert!(world.user(&jwt).await.is_ok());
    advance(SECOND).await;
    assert!(matches!(world.user(&jwt).await, Err(Denial::Unavailable(_))));
}

#[tokio::test(start_paused = true)]
async fn in_an_outage_known_tokens_stay_known_and_new_ones_are_refused() {
    let world = World::new(options());
    world.name(&bearing("good")).await.unwrap();
    world.fake.fails_with(Some(UpstreamError::Server { code: 503, message: "x".into(), retry_after: None }));
    advance(600 * SECOND).await;
    assert_eq!(world.name(&bearing("good")).await.as_deref(), Ok("good"));
    assert_eq!(world.name(&bearing("good2")).await, Err(Denial::Unavailable(UNAVAILABLE)));
    let message = "User \"system:serviceaccount:kubefan:kubefan\" cannot".to_owned();
    world.fake.fails_with(Some(UpstreamError::Forbidden { message }));
    advance(SECOND).await;
    assert_eq!(world.name(&bearing("good")).await, Err(Denial::Unavailable(UNAVAILABLE)), "no outage");
}

#[test]
fn an_accepted_token_takes_the_share_of_its_tenant() {
    let asker = Holder::new(1, None);
    let of = |user: &str| {
        let identity = Identity { user: user.to_owned(), ..Identity::default() };
        TokenVerdict(Some(KnownCaller::of_token(identity, &[], None))).holder(asker).tenant()
    };
    assert_eq!(of("system:serviceaccount:a:one"), of("system:serviceaccount:a:two"));
    assert_ne!(of("system:serviceaccount:a:one"), of("system:serviceaccount:b:one"));
    assert_eq!(TokenVerdict(None).holder(asker).tenant(), None);
}
