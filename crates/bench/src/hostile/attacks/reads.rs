//! Reads that are expensive, senseless or refused, one connection each.

use futures::FutureExt;

use crate::hostile::{
    attack::Attack,
    context::Context,
    raw_http::{get, get_once, request},
};

pub(super) const ATTACKS: &[Attack] = &[
    Attack::new("namespaces", |context| namespaces(context).boxed()),
    Attack::new("wrong-paths", |context| wrong_paths(context).boxed()),
    Attack::new("random-tokens", |context| random_tokens(context).boxed()),
    Attack::new("future-versions", |context| future_versions(context).boxed()),
    Attack::new("continue-tokens", |context| continue_tokens(context).boxed()),
    Attack { flags: &["--cache-tables"], ..Attack::new("tables", |context| tables(context).boxed()) },
    Attack::new("foreign-hosts", |context| foreign_hosts(context).boxed()),
    Attack::new("metrics", |context| metrics(context).boxed()),
];

const CLOSE: (&str, &str) = ("Connection", "close");

/// 500 lists a second of namespaces that do not exist.
async fn namespaces(context: Context) {
    let path = |number: u64| format!("/api/v1/namespaces/none-{number}/pods?resourceVersion=0");
    context.run(u64::MAX, 500, move |context, number| get_path(context, number, path(number))).await;
}

async fn get_path(context: Context, number: u64, path: String) {
    request(&context, number, &get_once(&path)).await;
}

/// 500 requests a second for paths that do not exist.
async fn wrong_paths(context: Context) {
    let path = |number: u64| match number % 4 {
        0 => format!("/wrong/{number}"),
        1 => format!("/apis/none{number}.example.com/v1/things"),
        2 => format!("/api/v1/namespaces/a/pods/b/{number}/..%2f..%2f"),
        _ => format!("/api/v1/pods?watch=perhaps&resourceVersion=x{number}"),
    };
    context.run(u64::MAX, 500, move |context, number| get_path(context, number, path(number))).await;
}

/// 500 requests a second, each with a token of its own.
async fn random_tokens(context: Context) {
    context
        .run(u64::MAX, 500, |context, number| async move {
            let token = format!("Bearer {:x}", number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let path = if number % 2 == 0 { "/api/v1/pods?limit=1" } else { "/api/v1/secrets?limit=1" };
            request(&context, number, &get(path, &[("Authorization", &token), CLOSE])).await;
        })
        .await;
}

/// 300 lists and watches a second at versions that the cluster has not reached.
async fn future_versions(context: Context) {
    context
        .run(u64::MAX, 300, |context, number| {
            let watch = if number % 2 == 0 { "&watch=1" } else { "" };
            let path = format!("/api/v1/pods?resourceVersion={}{watch}", context.version + 1_000_000 + number);
            get_path(context, number, path)
        })
        .await;
}

/// 500 lists a second with made-up continue tokens.
async fn continue_tokens(context: Context) {
    let path = |number: u64| match number % 2 {
        0 => format!("/api/v1/pods?limit=10&continue=made-up-{number}"),
        // {"v":"meta.k8s.io/v1","rv":1,"start":"a"}
        _ => "/api/v1/pods?limit=10&continue=eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6MSwic3RhcnQiOiJhIn0".to_owned(),
    };
    context.run(u64::MAX, 500, move |context, number| get_path(context, number, path(number))).await;
}

/// 10 Tables a second of all pods.
async fn tables(context: Context) {
    context
        .run(u64::MAX, 10, |context, number| async move {
            let table = ("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json");
            request(&context, number, &get("/api/v1/pods?resourceVersion=0", &[table, CLOSE])).await;
        })
        .await;
}

/// 500 requests a second as a web page of another host would make them.
async fn foreign_hosts(context: Context) {
    context
        .run(u64::MAX, 500, |context, number| async move {
            let host = format!("h{number}.example.com");
            let origin = format!("http://h{number}.example.com");
            let headers = [("Host", &*host), ("Origin", &origin), ("Sec-Fetch-Site", "cross-site"), CLOSE];
            request(&context, number, &get("/api/v1/pods", &headers)).await;
        })
        .await;
}

/// 100 requests a second for the metrics, on the admin port.
async fn metrics(mut context: Context) {
    context.target = context.admin;
    context.run(u64::MAX, 100, |context, number| get_path(context, number, "/metrics".to_owned())).await;
}
