//! Who may read what: kubefan's verdict about a request is the apiserver's answer to the same
//! request sent straight, over every protocol.
//!
//! kubefan runs here with `--passthrough=off`, so that every answer is its own.

use std::collections::BTreeMap;

use reqwest::StatusCode;

use super::{
    requests::By::{Grpc, Protobuf},
    rows::MATRIX,
    world::World,
};
use crate::harness::{Test, apiserver::ApiServer, tests};

pub(crate) const TESTS: &[Test] = tests! {
    apiserver: verdicts_are_those_of_the_apiserver;
};

async fn verdicts_are_those_of_the_apiserver() {
    // The apiserver knows anonymous users, too.
    let world = World::start(ApiServer::shared().await, &["--passthrough=off", "--anonymous-auth"]).await;
    let mut wrong = Vec::new();
    let mut seen: BTreeMap<u16, usize> = BTreeMap::new();
    for row in MATRIX {
        let path = world.path(*row);
        let (straight, said) = world.http(*row, &format!("{}{path}", world.api.url())).await;
        let (through, answer) = match row.6 {
            Grpc => world.over_grpc(*row).await,
            _ => {
                let (status, body) = world.http(*row, &world.url(&path)).await;
                (status, body["message"].as_str().unwrap_or_default().to_owned())
            }
        };
        *seen.entry(straight.as_u16()).or_default() += 1;
        // A refusal has the apiserver's words, and over gRPC they come first.
        let words = said["message"].as_str().unwrap_or_default();
        let is_named = straight == StatusCode::FORBIDDEN && row.6 != Protobuf;
        let has_words = match row.6 {
            // A get names the object there.
            Grpc => answer.contains(words.split(" is forbidden: ").last().unwrap_or_default()),
            _ => answer == words,
        };
        if straight != through || (is_named && !has_words) {
            wrong.push(format!("{row:?}\n  {path}\n  straight {straight} {words}\n  kubefan  {through} {answer}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), MATRIX.len(), wrong.join("\n"));
    for code in [200, 401, 403, 404] {
        assert!(seen.get(&code).is_some_and(|count| *count > 0), "{seen:?}");
    }
}
