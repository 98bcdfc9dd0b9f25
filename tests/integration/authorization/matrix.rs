//! A matrix of callers and requests: kubefan's verdict about a request is the apiserver's answer to
//! the same request sent straight, over every protocol.
//!
//! kubefan runs here with `--access=authorized-cache-only`, so that every answer is its own.

use std::collections::BTreeMap;

use futures::{StreamExt, stream};
use reqwest::StatusCode;
use serde_json::Value;

use super::{
    identities::Who::Admin,
    requests::{
        By::{Grpc, Protobuf, Table},
        Row,
        Verb::List,
        row,
    },
    rows::{MATRIX, WITH_WEBHOOK},
    world::World,
};
use crate::harness::{
    apiserver::{ApiServer, Options},
    authorizer::Authorizer,
    tests, wait,
};

tests! {
    apiserver slow_faults: verdicts_are_those_of_the_apiserver, verdicts_are_those_of_an_authorizer_that_denies;
}

/// The apiserver knows anonymous users, too.
const ARGS: [&str; 3] = ["--access=authorized-cache-only", "--anonymous-auth", "--cache-tables"];
/// Rows that are sent at a time. A watch takes a second.
const CONCURRENCY: usize = 8;

/// Sends a row to both servers: the apiserver's code and words, and the difference, if there is
/// one.
async fn compared(world: &World, row: Row) -> (u16, String, Option<String>) {
    let (straight, said) = world.over_http(row, world.api.addr()).await;
    let (through, answer) = match row.by {
        Grpc => world.over_grpc(row).await,
        _ => {
            let (status, body) = world.over_http(row, world.kubefan.grpc_addr).await;
            (status, body["message"].as_str().unwrap_or_default().to_owned())
        }
    };
    // A refusal has the apiserver's words, and over gRPC they come first.
    let words = said["message"].as_str().unwrap_or_default();
    let is_named = straight == StatusCode::FORBIDDEN && row.by != Protobuf;
    let has_words = match row.by {
        // A get names the object there.
        Grpc => answer.contains(words.split(" is forbidden: ").last().unwrap_or_default()),
        _ => answer == words,
    };
    let differs = straight != through || (is_named && !has_words);
    let difference = differs.then(|| {
        let path = world.path(row);
        format!("{row:?}\n  {path}\n  straight {straight} {words}\n  kubefan  {through} {answer}")
    });
    (straight.as_u16(), words.to_owned(), difference)
}

/// Sends all rows. Each of these codes, and each of these ends of a refusal, must be among the
/// apiserver's answers.
async fn assert_same_verdicts(world: &World, rows: &[Row], codes: &[u16], ends: &[&str]) {
    // The caches of other encodings start with the first request.
    for by in [Protobuf, Table] {
        for resource in ["pods", "configmaps"] {
            let row = row(Admin, List, resource, "", "", "", by);
            wait::until(&format!("{resource} as {by:?}"), wait::SOON, || async {
                (world.over_http(row, world.kubefan.grpc_addr).await.0 == StatusCode::OK).then_some(())
            })
            .await;
        }
    }
    let compared = stream::iter(rows).map(|row| compared(world, *row)).buffer_unordered(CONCURRENCY);
    let mut seen = BTreeMap::<u16, usize>::new();
    let mut said = Vec::new();
    let mut wrong = Vec::new();
    for (code, words, difference) in compared.collect::<Vec<_>>().await {
        *seen.entry(code).or_default() += 1;
        said.push(words);
        wrong.extend(difference);
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), rows.len(), wrong.join("\n"));
    println!("{} verdicts are the same: {seen:?}", rows.len());
    assert!(codes.iter().all(|code| seen.contains_key(code)), "{seen:?}");
    for end in ends {
        assert!(said.iter().any(|words| words.ends_with(end)), "no row is refused with {end:?}");
    }
}

async fn verdicts_are_those_of_the_apiserver() {
    let world = World::start(ApiServer::shared().await, &ARGS).await.with_pods().await;
    assert_same_verdicts(&world, MATRIX, &[101, 200, 401, 403, 404], &[]).await;
}

/// Denials of the test's webhook: an object by its name, a pod by the extra that names it, and
/// watches of configmaps by the extra of every client certificate.
fn denies(spec: &Value) -> Option<&'static str> {
    let attributes = &spec["resourceAttributes"];
    let has = |key: &str, start: &str| {
        let values = spec["extra"][format!("authentication.kubernetes.io/{key}")].as_array();
        values.is_some_and(|values| values.iter().filter_map(Value::as_str).any(|value| value.starts_with(start)))
    };
    let watches_configmaps = attributes["verb"] == "watch" && attributes["resource"] == "configmaps";
    if attributes["name"] == "two" {
        Some("two is sealed")
    } else if has("pod-name", "barred") {
        Some("this pod is barred")
    } else if watches_configmaps && has("credential-id", "X509SHA256=") {
        Some("no watches with certificates")
    } else {
        None
    }
}

async fn verdicts_are_those_of_an_authorizer_that_denies() {
    let authorizer = Authorizer::start(denies).await;
    let api = ApiServer::start(Options::default().flag(&authorizer.flag())).await;
    // An authorizer that denies single objects needs this flag.
    let exact = "tuning.authorizationBroadFirst=false";
    let world = World::start(api, &[&ARGS[..], &[exact]].concat()).await.with_pods().await;
    let reasons = ["two is sealed", "this pod is barred", "no watches with certificates"];
    assert_same_verdicts(&world, WITH_WEBHOOK, &[101, 200, 403], &reasons).await;
}
