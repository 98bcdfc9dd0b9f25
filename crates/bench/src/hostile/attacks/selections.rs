//! Selections that are expensive to evaluate, to store or to tell apart.

use futures::FutureExt;
use kubefan_common::proto::v1alpha1::{Encoding, Projection, ProjectionType, WatchRequest};

use crate::hostile::{
    attack::Attack,
    context::Context,
    grpc_call::{open, pods, watch},
    raw_http::{get, get_once, request},
};

/// Turns forwarding off, so that kubefan itself answers selectors beyond its limits.
const ALONE: &[&str] = &["--access=local-cache-only"];
/// The size of a long selector, in bytes.
const LONG_BYTES: usize = 16 << 10;
/// The default of `limits.selectorTermsMax`.
const TERMS: usize = 100;
/// The default of `limits.selectorValuesMax`.
const VALUES: usize = 2000;

pub(super) const ATTACKS: &[Attack] = &[
    Attack::new("selector-watches", |context| selector_watches(context).boxed()),
    Attack { flags: ALONE, ..Attack::new("long-selector-watches", |context| long_selector_watches(context).boxed()) },
    Attack::new("selector-lists", |context| selector_lists(context).boxed()),
    Attack { flags: ALONE, ..Attack::new("long-selector-lists", |context| long_selector_lists(context).boxed()) },
    Attack::new("value-watches", |context| value_watches(context).boxed()),
    Attack::new("change-masks", |context| change_masks(context).boxed()),
    Attack::new("distinct-views", |context| distinct_views(context).boxed()),
    Attack::new("zstd-snapshots", |context| zstd_snapshots(context).boxed()),
];

/// Terms that every pod must be tested with: `!aa0,!aa1,…`, different for each number.
fn absent(number: u64, terms: usize) -> String {
    (0..terms).map(|term| format!("!a{number}-{term}")).collect::<Vec<_>>().join(",")
}

/// Returns [`LONG_BYTES`] of such terms.
fn long(number: u64) -> String {
    let mut selector = absent(number, LONG_BYTES / 4);
    // Every character has one byte, and a shorter last term is a term too, unless it is empty.
    selector.truncate(LONG_BYTES);
    selector.trim_end_matches(['!', ',', '-']).to_owned()
}

fn watch_path(context: &Context, selector: &str) -> String {
    let selector = selector.replace(' ', "%20");
    format!("/api/v1/pods?watch=1&resourceVersion={}&labelSelector={selector}", context.version)
}

/// 300 watches, each with as many terms of its own as are allowed.
async fn selector_watches(context: Context) {
    let operation = async |context: Context, number: u64| {
        request(&context, number, &get(&watch_path(&context, &absent(number, TERMS)), &[])).await;
    };
    context.run(300, 300, operation).await;
}

/// 300 watches, each with 16 KiB of terms of its own.
async fn long_selector_watches(context: Context) {
    context
        .run(300, 300, |context, number| async move {
            request(&context, number, &get(&watch_path(&context, &long(number)), &[])).await;
        })
        .await;
}

/// 20 lists a second, each with as many terms of its own as are allowed. All of them match every
/// pod.
async fn selector_lists(context: Context) {
    context.run(u64::MAX, 20, |context, number| list(context, number, absent(number, TERMS))).await;
}

/// 20 lists a second with 16 KiB of terms.
async fn long_selector_lists(context: Context) {
    context.run(u64::MAX, 20, |context, number| list(context, number, long(number))).await;
}

async fn list(context: Context, number: u64, selector: String) {
    let path = format!("/api/v1/pods?resourceVersion=0&labelSelector={selector}");
    request(&context, number, &get_once(&path)).await;
}

/// 500 watches with a set of 2,000 values each.
async fn value_watches(context: Context) {
    context
        .run(500, 500, |context, number| async move {
            let values = (0..VALUES).map(|value| format!("v{}", value as u64 + number * 7)).collect::<Vec<_>>();
            let selector = format!("app in ({})", values.join(","));
            request(&context, number, &get(&watch_path(&context, &selector), &[])).await;
        })
        .await;
}

/// Runs watches over gRPC, ten to a connection.
async fn grpc_watches(context: Context, connections: u64, make: fn(&Context, u64) -> WatchRequest) {
    const EACH: u64 = 10;
    context
        .run(connections, connections, move |context, number| async move {
            let Some(requests) = open(&context, number).await else { return };
            let messages: Vec<_> = (0..EACH).map(|watch| make(&context, number * EACH + watch)).collect();
            futures::future::join_all(messages.iter().map(|message| watch(&context, &requests, message))).await;
        })
        .await;
}

/// 500 live watches that send only changes, each of a field of its own.
async fn change_masks(context: Context) {
    let make = |context: &Context, number: u64| WatchRequest {
        resource_version: context.version.to_string(),
        projection: Some(Projection {
            r#type: ProjectionType::FieldMask.into(),
            paths: vec![format!("metadata.annotations.a{number}")],
            only_changes: true,
            ..Projection::default()
        }),
        ..pods(String::new())
    };
    grpc_watches(context, 50, make).await;
}

/// 1,000 live watches, each with a view of its own that sees every pod.
async fn distinct_views(context: Context) {
    let make = |context: &Context, number: u64| WatchRequest {
        resource_version: context.version.to_string(),
        ..pods(format!("!a{number}"))
    };
    grpc_watches(context, 100, make).await;
}

/// 20 snapshots a second, compressed, and none of them shared.
async fn zstd_snapshots(context: Context) {
    context
        .run(u64::MAX, 20, |context, number| async move {
            let Some(requests) = open(&context, number).await else { return };
            let message =
                WatchRequest { encoding: Encoding::Zstd.into(), timeout_seconds: 1, ..pods(format!("!a{number}")) };
            watch(&context, &requests, &message).await;
        })
        .await;
}
