//! Tokens of service accounts, signed with keys made here.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, SystemTime},
};

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use bytes::Bytes;
use http::{HeaderMap, Response, header};
use http_body_util::{BodyExt, Full};
use kubefan_telemetry::metrics::Metrics;
use kubefan_upstream::client::{UpstreamBody, UpstreamOptions};
use ring::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair},
};
use serde_json::{Value, json};
use tokio::{task::yield_now, time::advance};
use tower::{BoxError, service_fn, util::BoxCloneSyncService};

use super::*;

const NOW_SECONDS: u64 = 1_800_000_000;
const ISSUER: &str = "https://kubernetes.default.svc";

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(NOW_SECONDS)
}

fn encoded(bytes: impl AsRef<[u8]>) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(bytes)
}

/// Signs tokens, as an issuer does.
struct Signer {
    pair: EcdsaKeyPair,
    id: &'static str,
}

impl Signer {
    fn new(id: &'static str) -> Self {
        let random = SystemRandom::new();
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, pkcs8.as_ref(), &random).unwrap();
        Self { pair, id }
    }

    fn web_key(&self) -> Value {
        let point = self.pair.public_key().as_ref();
        let x = encoded(&point[1..33]);
        let y = encoded(&point[33..]);
        json!({ "use": "sig", "kty": "EC", "kid": self.id, "crv": "P-256", "alg": "ES256", "x": x, "y": y })
    }

    fn sign(&self, claims: &Value) -> String {
        let header = json!({ "alg": "ES256", "kid": self.id });
        let signed = format!("{}.{}", encoded(header.to_string()), encoded(claims.to_string()));
        let signature = self.pair.sign(&SystemRandom::new(), signed.as_bytes()).unwrap();
        format!("{signed}.{}", encoded(signature))
    }
}

/// An apiserver that tells its keys, and the answers that it has given.
fn issuer(keys: Vec<Value>, answers: Arc<AtomicUsize>) -> Upstream {
    let service = service_fn(move |request: http::Request<Bytes>| {
        let answer = match request.uri().path() {
            "/.well-known/openid-configuration" => json!({ "issuer": ISSUER, "jwks_uri": "https://elsewhere" }),
            "/openid/v1/jwks" => json!({ "keys": keys }),
            other => panic!("{other}"),
        };
        answers.fetch_add(1, Ordering::Relaxed);
        async move {
            let body = Full::new(Bytes::from(answer.to_string()));
            let body: UpstreamBody = body.map_err(|never: std::convert::Infallible| match never {}).boxed_unsync();
            Ok::<_, BoxError>(Response::new(body))
        }
    });
    let base = http::Uri::from_static("https://sim.local:6443");
    Upstream::from_service(BoxCloneSyncService::new(service), &base, UpstreamOptions::default())
}

fn claims() -> Value {
    json!({
        "iss": ISSUER,
        "sub": "system:serviceaccount:team:agent",
        "aud": ["kubefan", "other"],
        "exp": NOW_SECONDS + 60,
        "nbf": NOW_SECONDS,
        "iat": NOW_SECONDS,
        "jti": "id",
        "kubernetes.io": {
            "namespace": "team",
            "serviceaccount": { "name": "agent", "uid": "of-account" },
            "pod": { "name": "p", "uid": "of-pod" },
            "node": { "name": "n", "uid": "of-node" },
        },
    })
}

struct World {
    signer: Signer,
    accounts: ServiceAccounts,
    answers: Arc<AtomicUsize>,
}

impl World {
    /// A world where exactly the objects with these uids exist.
    fn new(uids: &'static [&'static str]) -> Self {
        let signer = Signer::new("key");
        let answers = Arc::default();
        let keys = vec![signer.web_key(), json!({ "kty": "oct", "kid": "bad", "k": "AAAA" })];
        let exists: Exists = Arc::new(move |object| Some(uids.contains(&object.uid.as_str())));
        let metrics = Metrics::new(prometheus::Registry::new()).unwrap();
        let upstream = issuer(keys, Arc::clone(&answers));
        let accounts = ServiceAccounts::new(upstream, exists, metrics.access());
        Self { signer, accounts, answers }
    }

    fn check(&self, token: &str) -> Option<Arc<KnownCaller>> {
        let mut headers = HeaderMap::new();
        headers.insert(header::AUTHORIZATION, format!("Bearer {token}").parse().unwrap());
        let token = BearerToken::of(&headers, false).unwrap();
        self.accounts.caller(&token, &["kubefan".to_owned()], &[], now)
    }

    fn check_claims(&self, claims: &Value) -> Option<Arc<KnownCaller>> {
        self.check(&self.signer.sign(claims))
    }

    /// Returns the world after the keys were read.
    async fn ready(self) -> Self {
        assert!(self.check_claims(&claims()).is_none(), "no request waits for the keys");
        settle().await;
        self
    }

    fn answers(&self) -> usize {
        self.answers.swap(0, Ordering::Relaxed)
    }
}

/// Lets the reads of keys end.
async fn settle() {
    for _ in 0..100 {
        yield_now().await;
    }
}

const ALL: &[&str] = &["of-account", "of-pod"];

#[tokio::test(start_paused = true)]
async fn a_token_whose_objects_exist_is_known_as_a_review_would_know_it() {
    let world = World::new(ALL).ready().await;
    let caller = world.check_claims(&claims()).unwrap();
    let identity = serde_json::to_value(&caller.identity).unwrap();
    let expected = json!({
        "username": "system:serviceaccount:team:agent",
        "uid": "of-account",
        "groups": ["system:serviceaccounts", "system:serviceaccounts:team", "system:authenticated"],
        "extra": {
            "authentication.kubernetes.io/credential-id": ["JTI=id"],
            "authentication.kubernetes.io/node-name": ["n"],
            "authentication.kubernetes.io/node-uid": ["of-node"],
            "authentication.kubernetes.io/pod-name": ["p"],
            "authentication.kubernetes.io/pod-uid": ["of-pod"],
        },
    });
    assert_eq!(identity, expected);
    assert!(!caller.is_expired());
    advance(Duration::from_secs(60)).await;
    assert!(caller.is_expired());
}

#[tokio::test(start_paused = true)]
async fn unproved_tokens_go_to_a_review() {
    let world = World::new(ALL).ready().await;
    let with = |pointer: &str, value: Value| {
        let mut changed = claims();
        let (parent, name) = pointer.rsplit_once('/').unwrap();
        changed.pointer_mut(parent).unwrap()[name] = value;
        changed
    };
    for (pointer, value) in [
        ("/iss", json!("https://elsewhere")),
        ("/sub", json!("system:serviceaccount:team:other")),
        ("/aud", json!("other")),
        ("/aud", json!([])),
        ("/exp", json!(NOW_SECONDS)),
        ("/exp", json!(-1)),
        ("/exp", json!("soon")),
        ("/nbf", json!(NOW_SECONDS + 1)),
        ("/kubernetes.io", json!({})),
        ("/kubernetes.io/serviceaccount/uid", json!("of-an-older-one")),
        ("/kubernetes.io/serviceaccount/uid", json!("")),
        ("/kubernetes.io/pod/uid", json!("of-an-older-one")),
        ("/kubernetes.io/secret", json!({ "name": "s", "uid": "of-secret" })),
    ] {
        assert!(world.check_claims(&with(pointer, value.clone())).is_none(), "{pointer} {value}");
    }
    let of_node = with("/kubernetes.io/pod", Value::Null);
    assert!(world.check_claims(&of_node).is_none(), "the node does not exist");
    assert!(world.check_claims(&with("/aud", json!("kubefan"))).is_some(), "one audience");
    let other = Signer::new("key");
    assert!(world.check(&other.sign(&claims())).is_none(), "the same ID, another key");
    let token = world.signer.sign(&claims());
    let none = format!("{}{}", encoded(r#"{"alg":"none","kid":"key"}"#), &token[token.find('.').unwrap()..]);
    assert!(world.check(&none).is_none());
    assert!(world.check(&token).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_does_not_know_proves_nothing() {
    let mut world = World::new(ALL).ready().await;
    world.accounts.exists = Arc::new(|_| None);
    assert!(world.check_claims(&claims()).is_none());
}

#[tokio::test(start_paused = true)]
async fn the_keys_are_read_once_a_minute_at_most_and_count_for_ten() {
    let world = World::new(ALL).ready().await;
    assert_eq!(world.answers(), 2);
    let made_up = Signer::new("made-up").sign(&claims());
    for _ in 0..100 {
        assert!(world.check(&made_up).is_none());
        settle().await;
    }
    assert_eq!(world.answers(), 0);
    advance(Duration::from_secs(60)).await;
    world.check(&made_up);
    settle().await;
    assert_eq!(world.answers(), 2);
    advance(Duration::from_secs(600)).await;
    assert!(world.check_claims(&claims()).is_none(), "a key may have been withdrawn since");
    settle().await;
    assert!(world.check_claims(&claims()).is_some());
}

/// Made with OpenSSL. Its private key was not kept.
const RSA_MODULUS: &str = "szaEEweg_zA-15Gk90hUi5kdXDv6I05J0T9OHX1-o_rWb9jJ_htFB5_EyolgdsLBkXishkgAM3nFN0esiJXhZsJrSo7TdrTBX3ZDeL1wWOkxtl\
    mp5BJSs4uMphj6IAJ-vHghlCDCEcTcStuCQkiWHxEmv-oMgdje7Q9kj2coOqubtGqTEx_MzFgPAuMBn_l1OF42BvBkH6VWOxevQakPwip3aoWV\
    9ybel3TGjOxUvLdbLWuLNHVy9Hmn3FxJLzjUrm_yH4sXuro0PZKrFdzZsvHBl4WFiKyYqXAnsRQiWG6T4Jcs04ztSRTj56fzvw87CyJ_ui3ky8\
    wVs_cdn_JbKw";
const SIGNED_WITH_RSA: [&str; 2] = [
    "eyJhbGciOiJSUzI1NiIsImtpZCI6InJzYSJ9.e30.kSBudoQIM5tvWALfMV4Kl9s-pcGmlR7X2rqyLqTTJ6btnUkCxyaANA-4_SUOX0W2SMUsR\
    cvpxpFRDBZK40aSN1HauBjFlGi4t6GoMMM0zM8z1XTLgk5ib-F97YXrFV1KMbESo5yBvBm90ojlWl0LRQPv9a43aanRBt10h3jfR_XnIc4QTbl\
    M3C-ZZNP51V8us0oE6KDXBRfZniSskJKfCPetX2dUOj6hEfnydNNJ7ODWqeDb_HHThsi6PYH8VsL8JJIe4uGqSc_Sp2fHFm9oZNPTX_CH2r5Ra\
    QL1J4oA266An01Rpeq74speudtklTYtG-uSbDHphakuGd_0aANROQ",
    "eyJhbGciOiJSUzUxMiIsImtpZCI6InJzYSJ9.e30.sEu6NGGtUFUeVnKgoyqUklG3xObz_ugbB0dnZCkTrXQWDoNqU_aTvDz_1apETgdzAnit4\
    f2bvrEfKkTHJCJjFUcMLcbzj5_n5fwUtlMDDxz5FPOm1Aw_xyvoZZxfYSslRABQJGT53CgXo72Y16fgeRc2jXaZ8fPsXeZJSplxjLfqNwvdg13\
    cQWpfMQoyJ-MHreK5Kk4PjuMB6cLn66zjEasI8X06GEEKSIFidutIJfirpqLDv85SLCzTnS5-SEkXJRf8F48cuDALfWcHyFLx9piBhvQHdW6aW\
    zGOFmUHUaQcUEOi_JOcUrAmNlmv4SqHLVcUHXGrfhYu8gtMoK6Ulw",
];

#[test]
fn a_key_of_rsa_verifies_what_its_own_algorithm_has_signed() {
    let keys = |alg: Value| {
        let key = json!({ "kty": "RSA", "kid": "rsa", "use": "sig", "n": RSA_MODULUS, "e": "AQAB", "alg": alg });
        SigningKeys::of_json(ISSUER.to_owned(), json!({ "keys": [key] }).to_string().as_bytes()).unwrap()
    };
    let verifies = |keys: &SigningKeys, token: &str| keys.verified(&JsonWebToken::parse(token).unwrap()).is_some();
    let [sha256, sha512] = SIGNED_WITH_RSA;
    assert!(verifies(&keys(json!("RS256")), sha256) && !verifies(&keys(json!("RS256")), sha512));
    assert!(verifies(&keys(json!("RS512")), sha512) && !verifies(&keys(json!("RS512")), sha256));
    assert!(verifies(&keys(Value::Null), sha256), "a key may leave its algorithm open");
    let forged = sha256.replacen(".e30.", ".W10.", 1);
    assert!(!verifies(&keys(json!("RS256")), &forged));
    for unusable in [json!("ES256"), json!("PS256")] {
        assert_eq!(keys(unusable).len(), 0);
    }
}
