//! The subscribers. Each is a task with its own connection: directly to the apiserver over HTTP, or
//! to kubefan over gRPC.

use std::{sync::Arc, time::Duration};

use kubefan_client::{Client, ClientOptions, Target, WatchItem, WatchOptions};
use kubefan_model::Media;
use kubefan_upstream::{
    Upstream, UpstreamError,
    client::{BodyStream, encode_query},
    lines::{LineOptions, Lines},
};
use serde::Deserialize;
use tokio::{task::JoinSet, time::sleep};

use super::{options::DemoOptions, progress::Progress, selectors};

/// A broken direct watch restarts after this.
const RETRY_DELAY: Duration = Duration::from_millis(500);
/// The shortest interval that kubefan accepts. Bookmarks tell a subscriber with quiet pods how far
/// it has read.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(1);

/// Starts the subscribers on the apiserver. Each gets its list and its watch in one request, as
/// current client-go informers do. Dropping the set ends them.
pub(super) fn direct(upstream: &Upstream, options: &DemoOptions, progress: &Arc<Progress>) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    for index in 0..options.subscribers {
        let selectors = selectors::of(index, options);
        let query = encode_query([
            ("watch", "1"),
            ("sendInitialEvents", "true"),
            ("resourceVersionMatch", "NotOlderThan"),
            ("allowWatchBookmarks", "true"),
            ("labelSelector", &selectors.labels),
            ("fieldSelector", &selectors.fields),
        ]);
        let upstream = upstream.clone();
        let progress = progress.clone();
        let path = format!("/api/v1/pods{query}");
        tasks.spawn(async move {
            loop {
                // The reason does not matter: the watch restarts and the break is counted.
                if let Ok((lines, _)) = upstream.watch(&path, Media::Json, LineOptions::default()).await {
                    let _ = receive(lines, index, &progress).await;
                }
                progress.broke();
                sleep(RETRY_DELAY).await;
            }
        });
    }
    tasks
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(rename = "type")]
    kind: &'a str,
    #[serde(borrow)]
    object: Object<'a>,
}

/// The only part of an object that is parsed.
#[derive(Deserialize)]
struct Object<'a> {
    #[serde(borrow)]
    metadata: Metadata<'a>,
}

#[derive(Deserialize)]
struct Metadata<'a> {
    #[serde(rename = "resourceVersion", default)]
    resource_version: &'a str,
}

/// Reads a direct watch until it ends. The first bookmark marks the end of the initial state: the
/// apiserver sends it right after that.
async fn receive(mut lines: Lines<BodyStream>, index: usize, progress: &Progress) -> Result<(), UpstreamError> {
    let mut initial = true;
    while let Some(line) = lines.next_line().await? {
        let broken = |error| UpstreamError::invalid(format_args!("a line of the watch: {error}"));
        let Line { kind, object } = serde_json::from_slice(&line).map_err(broken)?;
        let version = object.metadata.resource_version.parse().unwrap_or_default();
        match kind {
            "BOOKMARK" => initial = false,
            "ERROR" => return Ok(()),
            _ if initial => continue,
            _ => progress.delivered(version, line.len()),
        }
        progress.reached(index, version);
    }
    Ok(())
}

/// Starts the subscribers on the kubefan at `address`, with the client library. Dropping the set
/// ends them.
pub(super) fn through_kubefan(address: &str, options: &DemoOptions, progress: &Arc<Progress>) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    for index in 0..options.subscribers {
        let selectors = selectors::of(index, options);
        let target = Target {
            resource: "pods".to_owned(),
            label_selector: selectors.labels,
            field_selector: selectors.fields,
            ..Target::default()
        };
        let watch_options = WatchOptions {
            bookmark_interval: Some(BOOKMARK_INTERVAL),
            seed: Some(options.seed.wrapping_add(index as u64)),
            ..WatchOptions::default()
        };
        let address = address.to_owned();
        let progress = progress.clone();
        tasks.spawn(async move {
            let Ok(client) = Client::connect_lazy(&address, &ClientOptions::default()).await else {
                return progress.broke();
            };
            let mut watch = client.watch(target, watch_options);
            let mut initial = true;
            while let Some(item) = watch.next().await {
                match item {
                    Ok(WatchItem::SnapshotBegin { .. }) => initial = true,
                    Ok(WatchItem::SnapshotEnd { .. }) => initial = false,
                    Ok(WatchItem::Event(event)) if !initial => {
                        let version = event.resource_version.parse().unwrap_or_default();
                        progress.delivered(version, event.object.len());
                    }
                    Ok(WatchItem::Disconnected { .. } | WatchItem::Restarted { .. }) | Err(_) => progress.broke(),
                    Ok(_) => {}
                }
                let reached = watch.resume_version().split('.').next().unwrap_or_default();
                progress.reached(index, reached.parse().unwrap_or_default());
            }
        });
    }
    tasks
}
