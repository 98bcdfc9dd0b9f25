//! Refusals: the simulator answers each request of a table like the real server.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use reqwest::Method;
use serde_json::{Value, json};

use super::{
    api::{Answer, Api, unique},
    real, simulated,
};
use crate::harness::tests;

tests! {
    apiserver: the_simulator_refuses_what_the_apiserver_refuses;
}

/// Queries of lists, which spaces separate, and the code of their answer.
const LISTS: [(u16, &str); 4] = [
    (
        422,
        "resourceVersionMatch=Exact resourceVersionMatch=Exact&resourceVersion=0 sendInitialEvents=true \
         resourceVersionMatch=NotOlderThan&resourceVersion=1&continue=abc resourceVersionMatch=Foo&resourceVersion=1 \
         sendInitialEvents=false&resourceVersionMatch=Foo",
    ),
    (400, "resourceVersion=abc resourceVersion=-1 timeout=abc"),
    (400, UNPARSABLE),
    (200, "timeout=5s timeout=1m30s bogus=1 limit=-1 allowWatchBookmarks=x"),
];
/// Queries of watches.
const WATCHES: [(u16, &str); 3] = [
    (
        422,
        "sendInitialEvents=true resourceVersionMatch=NotOlderThan resourceVersionMatch=Exact continue=abc \
         resourceVersionMatch=Exact&sendInitialEvents=true",
    ),
    (500, "resourceVersion=abc"),
    (400, UNPARSABLE),
];
/// Queries that lists and watches refuse in the same way.
const UNPARSABLE: &str = "limit=abc timeoutSeconds=abc labelSelector=a%3D%3D%3Db labelSelector=a%20in%20b \
                          fieldSelector=foo fieldSelector=spec.x%3D1";
/// Paths that are not there.
const MISSING: &str = "/api/v1/nopes /apis/apps/v9/deployments /api/v2 /api/v1/namespaces/default/nodes \
                       /apis/nope.io/v1/nopes /apis/nope.io/v1 /nope";

/// The same objects on both servers.
struct Both<'a> {
    servers: [&'a Api; 2],
    path: String,
}

impl Both<'_> {
    async fn ask(&self, method: Method, path: &str, media_type: &str, body: &Value) -> [Answer; 2] {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let [simulated, real] = self.servers.map(|api| api.send(method.clone(), path, media_type, body.clone()));
        [simulated.await, real.await]
    }

    /// Fails unless both answer with this code. If it is a failure, with the same Status or text.
    async fn same(&self, code: u16, method: Method, path: &str, media_type: &str, body: &Value) {
        let [simulated, real] = self.ask(method.clone(), path, media_type, body).await;
        let what = format!("{method} {path} {body}");
        assert_eq!((simulated.code, real.code), (code, code), "{what}: {} {}", simulated.text, real.text);
        if code >= 300 {
            assert_eq!(simulated.content_type, real.content_type, "{what}");
            assert_eq!(shown(&simulated), shown(&real), "{what}");
        }
    }

    async fn get(&self, code: u16, path: &str) {
        self.same(code, Method::GET, path, "application/json", &Value::Null).await;
    }
}

/// A failure as JSON, where the order of fields does not count, or as text.
fn shown(answer: &Answer) -> Value {
    serde_json::from_str(&answer.text).unwrap_or_else(|_| answer.text.clone().into())
}

async fn the_simulator_refuses_what_the_apiserver_refuses() {
    let (_sim, simulated) = simulated().await;
    let (_server, real) = real().await;
    let namespace = unique("refused");
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    let both = Both { servers: [&simulated, &real], path };
    let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}});
    for api in both.servers {
        api.post("/api/v1/namespaces", &json!({"metadata": {"name": namespace}})).await.ok();
        api.post(&both.path, &object).await.ok();
    }
    let path = &*both.path;
    for (verb, table) in [("", &LISTS[..]), ("&watch=1", &WATCHES)] {
        for (code, queries) in table {
            for query in queries.split_whitespace() {
                both.get(*code, &format!("{path}?{query}{verb}")).await;
            }
        }
    }
    both.get(400, "/api/v1/pods?fieldSelector=spec.foo%3D1").await;
    let token = |rv: u64, version: &str, start: &str| {
        BASE64_URL_SAFE_NO_PAD.encode(json!({"v": version, "rv": rv, "start": start}).to_string())
    };
    for token in [
        "@@@".to_owned(),
        token(5, "v2", "a"),
        token(0, "meta.k8s.io/v1", "a"),
        token(5, "meta.k8s.io/v1", ""),
        token(5, "meta.k8s.io/v1", "../x"),
        token(5, "meta.k8s.io/v1", "a") + "&resourceVersion=5",
    ] {
        both.get(400, &format!("{path}?continue={token}")).await;
    }
    for missing in MISSING.split_whitespace() {
        both.get(404, missing).await;
    }
    both.get(200, "/api/v1/namespaces/no-such-namespace/configmaps").await;
    let [own, other] = &["a", "zz"].map(|name| format!("{path}/{name}"));
    both.get(404, other).await;
    both.get(500, &format!("{own}?resourceVersion=abc")).await;
    both.get(200, &format!("{own}?resourceVersion=1")).await;
    let named = |metadata: Value| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata});
    let nowhere = "/api/v1/namespaces/no-such/configmaps";
    for (code, method, path, body) in [
        (409, Method::POST, path, object.clone()),
        (422, Method::POST, path, named(json!({}))),
        (404, Method::POST, nowhere, object.clone()),
        (404, Method::DELETE, other, json!({})),
        (405, Method::POST, own, object.clone()),
        (405, Method::PUT, path, object.clone()),
        (409, Method::PUT, own, named(json!({"name": "a", "resourceVersion": "1"}))),
        (400, Method::PUT, own, named(json!({"name": "b"}))),
    ] {
        both.same(code, method, path, "application/json", &body).await;
    }
    both.same(404, Method::PATCH, other, "application/merge-patch+json", &json!({})).await;
    both.same(415, Method::PATCH, own, "text/plain", &json!({})).await;
    let bad = named(json!({"name": "Bad_Name"}));
    let codes = both.ask(Method::POST, path, "application/json", &bad).await.map(|answer| answer.code);
    assert_eq!(codes, [422, 422]);
    both.same(200, Method::DELETE, own, "application/json", &json!({})).await;
}
