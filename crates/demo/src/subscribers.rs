//! The subscribers, each a task with a connection of its own: directly on the apiserver by HTTP, or on kubefan by gRPC.

use std::{sync::Arc, time::Duration};

use serde::Deserialize;
use tokio::{task::JoinSet, time::sleep};

use super::{DemoOptions, board::Board, selectors};
use kubefan_client::{ClientOptions, ListWatch, Target, WatchItem, WatchOptions};
use kubefan_model::Media;
use kubefan_proxy::upstream::{
    Upstream, UpstreamError,
    client::{BodyStream, encode_query},
    lines::{LineOptions, Lines},
};

/// A direct watch that broke starts over after this.
const RETRY_DELAY: Duration = Duration::from_millis(500);
/// The least that kubefan takes. A subscriber whose pods are quiet learns by bookmark how far it has come.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(1);

/// Subscribers on the apiserver, each with list and watch in one request, as client-go's informers do it now. Dropping the set ends
/// them.
pub(super) fn direct(upstream: &Upstream, options: &DemoOptions, board: &Arc<Board>) -> JoinSet<()> {
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
        let (upstream, board, path) = (upstream.clone(), board.clone(), format!("/api/v1/pods{query}"));
        tasks.spawn(async move {
            loop {
                // Why it ended does not matter: the next one starts over, and the break is counted.
                if let Ok((lines, _)) = upstream.watch(&path, Media::Json, LineOptions::default()).await {
                    let _ = receive(lines, index, &board).await;
                }
                board.broke();
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

/// All that is read of an object.
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

/// Reads a direct watch until it ends. The first bookmark ends the initial state: the apiserver sends it right after.
async fn receive(mut lines: Lines<BodyStream>, index: usize, board: &Board) -> Result<(), UpstreamError> {
    let mut initial = true;
    while let Some(line) = lines.next_line().await? {
        let broken = |error| UpstreamError::invalid(format_args!("a line of the watch: {error}"));
        let Line { kind, object } = serde_json::from_slice(&line).map_err(broken)?;
        let version = object.metadata.resource_version.parse().unwrap_or_default();
        match kind {
            "BOOKMARK" => initial = false,
            "ERROR" => return Ok(()),
            _ if initial => continue,
            _ => board.delivered(version, line.len()),
        }
        board.reached(index, version);
    }
    Ok(())
}

/// Subscribers on the kubefan at `address`, by the client library. Dropping the set ends them.
pub(super) fn through_kubefan(address: &str, options: &DemoOptions, board: &Arc<Board>) -> JoinSet<()> {
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
        let (address, board) = (address.to_owned(), board.clone());
        tasks.spawn(async move {
            let Ok(client) = ListWatch::connect_lazy(&address, &ClientOptions::default()).await else {
                return board.broke();
            };
            let mut watch = client.watch(target, watch_options);
            let mut initial = true;
            while let Some(item) = watch.next().await {
                match item {
                    Ok(WatchItem::SnapshotBegin { .. }) => initial = true,
                    Ok(WatchItem::SnapshotEnd { .. }) => initial = false,
                    Ok(WatchItem::Event(event)) if !initial => {
                        let version = event.resource_version.parse().unwrap_or_default();
                        board.delivered(version, event.object.len());
                    }
                    Ok(WatchItem::Disconnected { .. } | WatchItem::Restarted { .. }) | Err(_) => board.broke(),
                    Ok(_) => {}
                }
                board.reached(index, watch.resume_version().parse().unwrap_or_default());
            }
        });
    }
    tasks
}
