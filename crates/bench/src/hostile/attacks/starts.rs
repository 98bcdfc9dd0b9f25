//! Watches that start, resume or end more often than is sensible.

use futures::FutureExt;
use kubefan_common::proto::v1alpha1::{OnLag, WatchRequest};

use crate::hostile::{
    attack::Attack,
    context::Context,
    grpc_call::{open, pods, watch},
    raw_http::{get_once, request},
};

/// A ring so short that the version at the start of the attack soon needs a catch-up.
const SHORT_RING: &[&str] = &["limits.ringEventsMax=50"];

pub(super) const ATTACKS: &[Attack] = &[
    Attack::new("old-versions", |context| old_versions(context).boxed()),
    Attack { flags: SHORT_RING, ..Attack::new("catch-ups", |context| catch_ups(context).boxed()) },
    Attack::new("backfills", |context| backfills(context).boxed()),
    Attack::new("tiny-timeouts", |context| tiny_timeouts(context).boxed()),
    Attack::new("on-demand-starts", |context| on_demand_starts(context).boxed()),
    Attack::new("connect-storm", |context| connect_storm(context).boxed()),
];

/// 300 watches a second from the start of the attack, which replay all changes since.
async fn old_versions(context: Context) {
    context
        .run(u64::MAX, 300, |context, number| async move {
            let path = format!("/api/v1/pods?watch=1&resourceVersion={}&timeoutSeconds=1", context.version);
            request(&context, number, &get_once(&path)).await;
        })
        .await;
}

/// 200 watches over gRPC a second from a version that the ring no longer has.
async fn catch_ups(context: Context) {
    context
        .run(u64::MAX, 200, |context, number| async move {
            let Some(requests) = open(&context, number).await else { return };
            let message = WatchRequest {
                resource_version: context.version.to_string(),
                on_lag: OnLag::Conflate.into(),
                timeout_seconds: 1,
                ..pods(format!("!a{number}"))
            };
            watch(&context, &requests, &message).await;
        })
        .await;
}

/// 100 watches over gRPC a second from before the cache started.
async fn backfills(context: Context) {
    context
        .run(u64::MAX, 100, |context, number| async move {
            let Some(requests) = open(&context, number).await else { return };
            let version = number % context.version.max(1) + 1;
            let message =
                WatchRequest { resource_version: version.to_string(), timeout_seconds: 1, ..pods(String::new()) };
            watch(&context, &requests, &message).await;
        })
        .await;
}

/// 20 watches a second that list all pods and end after a second.
async fn tiny_timeouts(context: Context) {
    context
        .run(u64::MAX, 20, |context, number| async move {
            let path = "/api/v1/pods?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan\
                &resourceVersion=0&allowWatchBookmarks=true&timeoutSeconds=1";
            request(&context, number, &get_once(path)).await;
        })
        .await;
}

/// 200 reads a second of all other resources, which start caches.
async fn on_demand_starts(context: Context) {
    const PATHS: [&str; 7] = [
        "/api/v1/configmaps",
        "/api/v1/namespaces",
        "/api/v1/nodes",
        "/api/v1/services",
        "/api/v1/secrets",
        "/apis/apps/v1/deployments",
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    ];
    context
        .run(u64::MAX, 200, |context, number| async move {
            let path = PATHS[(number % PATHS.len() as u64) as usize];
            let path = match number % 3 {
                0 => format!("{path}?watch=1&timeoutSeconds=1"),
                1 => format!("{path}?resourceVersion=0"),
                _ => path.replacen("/v1/", &format!("/v1/namespaces/team-{}/", number % 10), 1),
            };
            request(&context, number, &get_once(&path)).await;
        })
        .await;
}

/// 1,000 connections a second that are closed at once.
async fn connect_storm(context: Context) {
    context
        .run(u64::MAX, 1000, |context, number| async move {
            if context.connect(number).await.is_some() {
                context.tally.count("connected");
            }
        })
        .await;
}
