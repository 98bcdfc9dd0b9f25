//! Clients that ask for gzip bodies which no other client shares, or that read none of them.

use futures::FutureExt;

use crate::hostile::{
    attack::Attack,
    context::Context,
    raw_http::{get, request, request_without_reading},
};

pub(super) const ATTACKS: &[Attack] = &[
    Attack::new("gzip-lists", |context| gzip_lists(context).boxed()),
    Attack::new("gzip-pages", |context| gzip_pages(context).boxed()),
    Attack::new("gzip-views", |context| gzip_views(context).boxed()),
    Attack::new("alternating-encodings", |context| alternating_encodings(context).boxed()),
    Attack::new("unread-gzip-watches", |context| unread_gzip_watches(context).boxed()),
];

const GZIP: (&str, &str) = ("Accept-Encoding", "gzip");
const CLOSE: (&str, &str) = ("Connection", "close");

/// 20 lists a second of all pods, each with a selector of its own.
async fn gzip_lists(context: Context) {
    context
        .run(u64::MAX, 20, |context, number| async move {
            let path = format!("/api/v1/pods?resourceVersion=0&labelSelector=!a{number}");
            request(&context, number, &get(&path, &[GZIP, CLOSE])).await;
        })
        .await;
}

/// 50 pages a second, each of another size.
async fn gzip_pages(context: Context) {
    context
        .run(u64::MAX, 50, |context, number| async move {
            let path = format!("/api/v1/pods?limit={}", 100 + number % 900);
            request(&context, number, &get(&path, &[GZIP, CLOSE])).await;
        })
        .await;
}

/// 300 watches of all pods, from the state on, each with a selector of its own.
async fn gzip_views(context: Context) {
    context
        .run(300, 300, |context, number| async move {
            let path = format!("/api/v1/pods?watch=1&resourceVersion=0&labelSelector=!a{number}");
            request(&context, number, &get(&path, &[GZIP])).await;
        })
        .await;
}

/// 100 watches a second of one second each, from the state on, in gzip and without by turns.
async fn alternating_encodings(context: Context) {
    context
        .run(u64::MAX, 100, |context, number| async move {
            let path = "/api/v1/pods?watch=1&resourceVersion=0&timeoutSeconds=1";
            let coding = ("Accept-Encoding", ["gzip", "identity", "gzip;q=0.5, *;q=0.4"][(number % 3) as usize]);
            request(&context, number, &get(path, &[coding, CLOSE])).await;
        })
        .await;
}

/// 500 watches in gzip that read nothing, from the state on.
async fn unread_gzip_watches(context: Context) {
    context
        .run(500, 500, |context, number| async move {
            let path = "/api/v1/pods?watch=1&resourceVersion=0";
            request_without_reading(&context, number, &get(path, &[GZIP])).await;
        })
        .await;
}
