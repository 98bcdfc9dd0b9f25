//! The reviews that are sent, and the effects of their answers.

use std::sync::Mutex;

use kubefan_common::proto::v1alpha1::Target;
use kubefan_telemetry::metrics::Metrics;
use kubefan_upstream::UpstreamError;
use serde_json::{Value, json};
use tokio::time::advance;

use super::*;
use crate::{authorization::attributes::ReadVerb, review::fake::FakeReviews};

const MINUTE: Duration = Duration::from_secs(60);

fn options() -> AuthorizationOptions {
    AuthorizationOptions {
        authorized_ttl: 5 * MINUTE,
        unauthorized_ttl: MINUTE / 2,
        outage_grace: 10 * MINUTE,
        always_allow_groups: vec!["system:masters".to_owned()],
        broad_first: true,
        queue: QueueLimits { per_second: 1000, burst: 1000, in_flight_max: 10, waiting_max: 10, wait_timeout: MINUTE },
    }
}

/// An authorizer over an apiserver that decides by `allows`, from the `resourceAttributes`.
struct World {
    authorizer: Authorizer,
    fake: FakeReviews,
}

impl World {
    fn new(options: AuthorizationOptions, allows: impl Fn(&Value) -> bool + Send + Sync + 'static) -> Self {
        let fake = FakeReviews::new(move |body| {
            let allowed = allows(&body["spec"]["resourceAttributes"]);
            json!({ "status": { "allowed": allowed, "reason": if allowed { "" } else { "no rule" } } })
        });
        let metrics = Metrics::new(prometheus::Registry::new()).unwrap();
        let webhook = WebhookAuthorizer::new(fake.upstream(), options, metrics.access());
        Self { authorizer: Authorizer::Webhook(Box::new(webhook)), fake }
    }

    async fn ask_as(&self, identity: Identity, read: Read) -> Result<(), Denial> {
        let caller = Caller::Known(KnownCaller::new(identity, None));
        self.authorizer.authorize(&caller, read, Holder::new(1, None)).await.map(drop)
    }

    async fn ask(&self, read: Read) -> Result<(), Denial> {
        self.ask_as(Identity { user: "x".to_owned(), ..Identity::default() }, read).await
    }

    /// The attributes in the reviews since the last call, as texts.
    fn asked(&self) -> Vec<String> {
        let of = |body: Value| {
            let attributes = &body["spec"]["resourceAttributes"];
            let text = |name: &str| attributes[name].as_str().unwrap_or_default().to_owned();
            let selects = attributes.get("fieldSelector").or(attributes.get("labelSelector")).is_some();
            format!("{} {}/{}{}", text("verb"), text("namespace"), text("name"), if selects { " selected" } else { "" })
        };
        self.fake.taken().into_iter().map(of).collect()
    }
}

fn pods(verb: ReadVerb, namespace: &str, fields: &str) -> Read {
    let own = str::to_owned;
    let target = Target {
        version: own("v1"),
        resource: own("pods"),
        namespace: own(namespace),
        field_selector: own(fields),
        ..Target::default()
    };
    Read::collection(verb, target)
}

fn is_forbidden(result: Result<(), Denial>) -> bool {
    matches!(result, Err(Denial::Forbidden(_)))
}

#[tokio::test(start_paused = true)]
async fn the_broad_right_serves_all_narrower_reads() {
    let world = World::new(options(), |attributes| attributes.get("namespace").is_none());
    world.ask(pods(ReadVerb::Watch, "a", "spec.nodeName=n1")).await.unwrap();
    world.ask(pods(ReadVerb::Watch, "a", "spec.nodeName=n2")).await.unwrap();
    world.ask(pods(ReadVerb::Watch, "b", "")).await.unwrap();
    assert_eq!(world.asked(), ["watch /"]);
    world.ask(pods(ReadVerb::List, "b", "")).await.unwrap();
    assert_eq!(world.asked(), ["list /"], "another verb");
}

/// A selector may have thousands of values, and to parse it takes longer than all else.
#[tokio::test(start_paused = true)]
async fn selectors_are_parsed_only_if_no_broad_right_is_known() {
    let world = World::new(options(), |attributes| attributes["namespace"] == "a");
    world.ask(pods(ReadVerb::List, "a", "spec.nodeName=n1")).await.unwrap();
    let known = pods(ReadVerb::List, "a", "spec.nodeName=n2");
    world.ask(known.clone()).await.unwrap();
    assert!(!known.spec().is_parsed(), "the right to the namespace is known");
    let unknown = pods(ReadVerb::List, "b", "spec.nodeName=n2");
    assert!(is_forbidden(world.ask(unknown.clone()).await));
    assert!(unknown.spec().is_parsed());
}

#[tokio::test(start_paused = true)]
async fn a_narrow_right_is_asked_for_last_and_then_known() {
    let world = World::new(options(), |attributes| attributes["fieldSelector"].is_object());
    let own = || pods(ReadVerb::Watch, "a", "spec.nodeName=n1");
    world.ask(own()).await.unwrap();
    assert_eq!(world.asked(), ["watch /", "watch a/", "watch a/ selected"]);
    advance(4 * MINUTE).await;
    world.ask(own()).await.unwrap();
    assert_eq!(world.asked(), [] as [&str; 0], "the refusals of the broad rights are older, and do not matter");
    assert!(is_forbidden(world.ask(pods(ReadVerb::Watch, "a", "")).await));
}

#[tokio::test(start_paused = true)]
async fn the_shortcut_can_be_turned_off() {
    let world = World::new(AuthorizationOptions { broad_first: false, ..options() }, |_| true);
    world.ask(pods(ReadVerb::Watch, "a", "spec.nodeName=n1")).await.unwrap();
    assert_eq!(world.asked(), ["watch a/ selected"]);
}

#[tokio::test(start_paused = true)]
async fn permissions_and_refusals_count_for_their_times() {
    let world = World::new(options(), |attributes| attributes["namespace"] == "a");
    let get = |namespace: &str| {
        let own = str::to_owned;
        let target = Target { resource: own("pods"), namespace: own(namespace), name: own("p"), ..Target::default() };
        Read::object(target)
    };
    for (namespace, ttl) in [("a", 5 * MINUTE), ("b", MINUTE / 2)] {
        let allowed = world.ask(get(namespace)).await.is_ok();
        assert_eq!((allowed, world.asked().len()), (namespace == "a", 1));
        advance(ttl - Duration::from_millis(1)).await;
        assert_eq!((world.ask(get(namespace)).await.is_ok(), world.asked().len()), (allowed, 0));
        advance(Duration::from_millis(1)).await;
        assert_eq!((world.ask(get(namespace)).await.is_ok(), world.asked().len()), (allowed, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_has_the_reason_and_the_exact_read() {
    let world = World::new(options(), |_| false);
    let Err(Denial::Forbidden(forbidden)) = world.ask(pods(ReadVerb::List, "a", "")).await else { panic!("allowed") };
    assert_eq!(
        forbidden.message(),
        r#"User "x" cannot list resource "pods" in API group "" in the namespace "a": no rule"#
    );
}

#[tokio::test(start_paused = true)]
async fn extras_and_groups_are_sent_and_are_a_part_of_the_key() {
    let world = World::new(options(), |_| true);
    let extra = |value: &str| [("scopes".to_owned(), vec![value.to_owned()])].into();
    let of = |value: &str| Identity {
        user: "x".to_owned(),
        uid: "1".to_owned(),
        groups: vec!["g".to_owned()],
        extra: extra(value),
    };
    world.ask_as(of("a"), pods(ReadVerb::List, "", "")).await.unwrap();
    let sent = world.fake.taken().remove(0);
    let spec = json!({
        "resourceAttributes": { "verb": "list", "version": "v1", "resource": "pods" },
        "user": "x", "uid": "1", "groups": ["g"], "extra": { "scopes": ["a"] },
    });
    assert_eq!(sent["spec"], spec);
    world.ask_as(of("b"), pods(ReadVerb::List, "", "")).await.unwrap();
    assert_eq!(world.asked().len(), 1, "another user");
}

#[tokio::test(start_paused = true)]
async fn members_of_some_groups_are_not_reviewed_and_strangers_are_refused() {
    let world = World::new(options(), |_| false);
    let groups = vec!["system:masters".to_owned()];
    let admin = Identity { user: "admin".to_owned(), groups, ..Identity::default() };
    world.ask_as(admin, pods(ReadVerb::List, "", "")).await.unwrap();
    let asked = world.authorizer.authorize(&Caller::Any, pods(ReadVerb::List, "", ""), Holder::new(1, None)).await;
    assert!(matches!(asked, Err(Denial::Unauthenticated(_))));
    assert_eq!(world.asked(), [] as [&str; 0]);
}

#[tokio::test(start_paused = true)]
async fn an_expired_credential_is_refused_although_the_verdict_is_known() {
    let world = World::new(options(), |_| true);
    let expires_at = Some(tokio::time::Instant::now() + MINUTE);
    let caller = Caller::Known(KnownCaller::new(Identity::default(), expires_at));
    let ask = || world.authorizer.authorize(&caller, pods(ReadVerb::List, "", ""), Holder::new(1, None));
    assert!(ask().await.is_ok());
    advance(MINUTE).await;
    assert!(matches!(ask().await, Err(Denial::Unauthenticated(_))));
}

#[tokio::test(start_paused = true)]
async fn the_verdict_about_large_attributes_is_kept() {
    let world = World::new(AuthorizationOptions { broad_first: false, ..options() }, |_| true);
    let selector = format!("spec.nodeName={}", "n".repeat(13_000));
    for _ in 0..2 {
        world.ask(pods(ReadVerb::List, "", &selector)).await.unwrap();
    }
    assert_eq!(world.asked().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_not_a_plain_yes_refuses() {
    for status in [
        json!({ "allowed": false }),
        json!({ "allowed": true, "denied": true }),
        json!({ "allowed": false, "conditionsChain": [{ "conditions": [{ "effect": "Allow" }] }] }),
    ] {
        let fake = FakeReviews::new(move |_| json!({ "status": status.clone() }));
        let metrics = Metrics::new(prometheus::Registry::new()).unwrap();
        let webhook = WebhookAuthorizer::new(fake.upstream(), options(), metrics.access());
        let world = World { authorizer: Authorizer::Webhook(Box::new(webhook)), fake };
        assert!(is_forbidden(world.ask(pods(ReadVerb::List, "", "")).await));
    }
    let fake = FakeReviews::new(|_| json!({ "kind": "Unknown" }));
    let metrics = Metrics::new(prometheus::Registry::new()).unwrap();
    let webhook = WebhookAuthorizer::new(fake.upstream(), options(), metrics.access());
    let world = World { authorizer: Authorizer::Webhook(Box::new(webhook)), fake };
    assert!(matches!(world.ask(pods(ReadVerb::List, "", "")).await, Err(Denial::Unavailable(_))));
}

#[tokio::test(start_paused = true)]
async fn in_an_outage_the_narrow_right_counts_although_the_broad_one_is_unknown() {
    let world = World::new(options(), |attributes| attributes["fieldSelector"].is_object());
    let own = || pods(ReadVerb::Watch, "a", "spec.nodeName=n1");
    world.ask(own()).await.unwrap();
    let answer = Arc::new(Mutex::new(Some(UpstreamError::Reset { message: "x".into() })));
    world.fake.fails_with(answer.lock().unwrap().clone());
    // Beyond the grace of the refusals, and within that of the permission.
    advance(12 * MINUTE).await;
    world.ask(own()).await.unwrap();
    let denial = world.ask(pods(ReadVerb::Watch, "a", "")).await.unwrap_err();
    assert!(matches!(denial, Denial::Unavailable(_)), "{denial:?}");
    advance(3 * MINUTE).await;
    assert!(matches!(world.ask(own()).await, Err(Denial::Unavailable(_))));
}

fn outage() -> Option<UpstreamError> {
    Some(UpstreamError::Reset { message: "x".into() })
}

fn is_unavailable(result: Result<(), Denial>) -> bool {
    matches!(result, Err(Denial::Unavailable(_)))
}

#[tokio::test(start_paused = true)]
async fn in_an_outage_callers_that_may_watch_may_list_the_same() {
    for fields in ["", "spec.nodeName=n1"] {
        let world = World::new(options(), move |attributes| {
            attributes["namespace"] == "a" && attributes["fieldSelector"].is_object() != fields.is_empty()
        });
        world.ask(pods(ReadVerb::Watch, "a", fields)).await.unwrap();
        world.fake.fails_with(outage());
        world.ask(pods(ReadVerb::List, "a", fields)).await.unwrap();
        advance(14 * MINUTE).await;
        world.ask(pods(ReadVerb::List, "a", fields)).await.unwrap();
        let object = Target { name: "p".to_owned(), ..pods(ReadVerb::List, "a", "").target().clone() };
        assert!(is_unavailable(world.ask(Read::object(object)).await), "a get");
        assert!(is_unavailable(world.ask(pods(ReadVerb::List, "", fields)).await), "a broader list");
        assert!(is_unavailable(world.ask(pods(ReadVerb::List, "b", fields)).await), "another namespace");
        let other = Identity { user: "y".to_owned(), ..Identity::default() };
        assert!(is_unavailable(world.ask_as(other, pods(ReadVerb::List, "a", fields)).await), "another user");
        advance(MINUTE).await;
        assert!(is_unavailable(world.ask(pods(ReadVerb::List, "a", fields)).await), "the grace is over");
    }
}

#[tokio::test(start_paused = true)]
async fn in_an_outage_the_right_to_watch_all_counts_for_a_list_of_a_part_and_the_right_to_list_for_no_watch() {
    let world = World::new(options(), |_| true);
    world.ask(pods(ReadVerb::Watch, "", "")).await.unwrap();
    world.fake.fails_with(outage());
    world.fake.taken();
    world.ask(pods(ReadVerb::List, "a", "spec.nodeName=n1")).await.unwrap();
    assert_eq!(world.asked(), ["list /"]);
    world.ask(pods(ReadVerb::List, "a", "spec.nodeName=n2")).await.unwrap();
    assert_eq!(world.asked(), [] as [&str; 0], "the outage is known");

    let world = World::new(options(), |_| true);
    world.ask(pods(ReadVerb::List, "", "")).await.unwrap();
    world.fake.fails_with(outage());
    assert!(is_unavailable(world.ask(pods(ReadVerb::Watch, "", "")).await));
}

#[tokio::test(start_paused = true)]
async fn the_right_to_watch_counts_for_a_list_only_in_an_outage_with_a_grace_and_never_against_a_refusal() {
    let may_watch = |attributes: &Value| attributes["verb"] == "watch";
    let list = || pods(ReadVerb::List, "a", "spec.nodeName=n1");
    let world = World::new(options(), may_watch);
    world.ask(pods(ReadVerb::Watch, "", "")).await.unwrap();
    assert!(is_forbidden(world.ask(list()).await), "no outage");
    world.fake.fails_with(outage());
    assert!(is_forbidden(world.ask(list()).await), "the refusals count");
    advance(MINUTE).await;
    assert!(is_forbidden(world.ask(list()).await), "in the grace too");
    for (failure, outage_grace) in
        [(outage(), Duration::ZERO), (Some(UpstreamError::Forbidden { message: "x".into() }), 10 * MINUTE)]
    {
        let world = World::new(AuthorizationOptions { outage_grace, ..options() }, may_watch);
        world.ask(pods(ReadVerb::Watch, "", "")).await.unwrap();
        world.fake.fails_with(failure);
        assert!(is_unavailable(world.ask(list()).await), "no outage, or no grace");
    }
}

#[tokio::test(start_paused = true)]
async fn no_text_names_kubefans_own_account() {
    let world = World::new(options(), |_| true);
    let message = r#"User "system:serviceaccount:kubefan:kubefan" cannot create resource"#.to_owned();
    world.fake.fails_with(Some(UpstreamError::Forbidden { message }));
    let denial = world.ask(pods(ReadVerb::List, "", "")).await.unwrap_err();
    assert!(!format!("{denial:?}").contains("serviceaccount"), "{denial:?}");
}
