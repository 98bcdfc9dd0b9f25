//! How soon a subscriber of a quiet resource is served by another replica. It resumes from the
//! version of a bookmark, which that replica has not reached: the resource itself has no changes
//! that would bring it there.

use std::{net::SocketAddr, time::Duration};

use kubefan_common::proto::v1alpha1::{Target, WatchRequest, watch_response::Message};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;

use super::{
    Table,
    cluster::{self, kind},
    seconds,
};
use crate::harness::{
    apiserver::{ApiServer, Options},
    is_full_scale,
    kubefan::Kubefan,
    objects::version_of,
    record::{Watch, connect},
    tests, wait,
};

tests! {
    apiserver full: a_subscriber_resumes_at_another_replica_from_the_version_of_a_bookmark;
}

const OPENED_AT_MOST: Duration = Duration::from_secs(120);
/// How soon a refusal follows the headers of an answer.
const REFUSED_AT_MOST: Duration = Duration::from_secs(15);
const RETRY_DELAY: Duration = Duration::from_millis(50);
/// Bookmarks of a quiet resource arrive once a minute, or after a consistent read.
const BOOKMARK_AT_MOST: Duration = Duration::from_secs(150);
const RESOURCE: &str = "configmaps";

async fn a_subscriber_resumes_at_another_replica_from_the_version_of_a_bookmark() {
    let tries = if is_full_scale() { 4 } else { 1 };
    let api = ApiServer::start(Options::default()).await;
    let configmaps = kind(RESOURCE);
    cluster::create(&api, &configmaps, 0..10).await;
    let _leases = cluster::write_leases(&api, 10).await;
    let args = ["--resource", RESOURCE, "--consistent-list-bytes-min=0"];
    let replicas = [Kubefan::start(&api, &args).await, Kubefan::start(&api, &args).await];
    let mut table = Table::new(
        format!("Failover on a quiet resource, from a bookmark's version ({tries} tries)"),
        &["through", "open after s", "refusals before", "last refusal"],
    );
    for attempt in 0..tries {
        let [from, to] = if attempt % 2 == 0 { [0, 1] } else { [1, 0] };
        let version = bookmark(&replicas[from]).await;
        let start = Instant::now();
        let (refusals, last) = open(replicas[to].grpc_addr, &version).await;
        let took = last.as_ref().ok().map(|(_, opened)| (*opened - start).as_secs_f64());
        let words =
            refusals.last().map_or("-".to_owned(), |status| format!("{:?}: {}", status.code(), status.message()));
        table.row(&[&"kubefan", &seconds(took, OPENED_AT_MOST), &refusals.len(), &words.replace('|', "/")]);
        let (mut watch, _) = last.unwrap_or_else(|status| panic!("not opened at {version}: {status}"));
        let label = json!({ "metadata": { "labels": { "attempt": attempt.to_string() } } });
        let path = format!("{}/o-0", configmaps.path_in("default"));
        watch.until(version_of(&api.patch(&path, &label).await)).await;
        assert!(watch.gaps.is_empty() && watch.snapshots == 0, "a gap or a snapshot after {version}");
        let start = Instant::now();
        let url = format!("{}{}?watch=1&resourceVersion={version}", api.url(), configmaps.path());
        let response = api.client().get(url).send().await.expect("the apiserver answers");
        assert!(response.status().is_success());
        table.row(&[&"straight", &seconds(Some(start.elapsed().as_secs_f64()), OPENED_AT_MOST), &0, &"-"]);
    }
    println!("{table}");
}

fn request(version: &str) -> WatchRequest {
    WatchRequest {
        target: Some(Target { resource: RESOURCE.to_owned(), ..Target::default() }),
        resource_version: version.to_owned(),
        bookmark_interval: Some(prost_types::Duration { seconds: 1, nanos: 0 }),
        ..WatchRequest::default()
    }
}

/// The version of the next bookmark of a replica. A consistent read makes it come soon.
async fn bookmark(replica: &Kubefan) -> String {
    let mut client = connect(replica.grpc_addr).await;
    let responses = client.watch(request("")).await.expect("the replica serves").into_inner();
    let mut watch = Watch::over(Box::pin(responses), "");
    watch.until_resumable().await;
    let before: u64 = watch.resume_version.parse().expect("an etcd revision is a number");
    // Later than the version of both caches.
    let cluster = wait::until("the cluster's version to advance", wait::SOON, || async {
        let version = version_of_cluster(replica).await;
        (version > before).then_some(version)
    })
    .await;
    let bookmarks = async {
        loop {
            let response = watch.step().await.expect("the watch continues").expect("the watch continues");
            let version = response.resume_version.parse().unwrap_or(0_u64);
            if matches!(response.message, Some(Message::Bookmark(_))) && version >= cluster {
                return response.resume_version;
            }
        }
    };
    tokio::time::timeout(BOOKMARK_AT_MOST, bookmarks).await.expect("a bookmark arrives")
}

/// The version of a consistent list through a replica.
async fn version_of_cluster(replica: &Kubefan) -> u64 {
    let url = format!("http://{}{}", replica.grpc_addr, kind(RESOURCE).path());
    let text = reqwest::get(url).await.expect("the replica answers").text().await.expect("a list is text");
    let list: serde_json::Value = serde_json::from_str(&text).expect("a list is JSON");
    version_of(&list)
}

/// Opens a watch from a version, again after each refusal. Returns the refusals, and the watch with
/// the time at which it was opened.
async fn open(replica: SocketAddr, version: &str) -> (Vec<Status>, Result<(Watch, Instant), Status>) {
    let mut client = connect(replica).await;
    let (mut refusals, start) = (Vec::new(), Instant::now());
    loop {
        let outcome = match client.watch(request(version)).await {
            Ok(response) => {
                let opened = Instant::now();
                let mut watch = Watch::over(Box::pin(response.into_inner()), version);
                // A refusal may follow the headers.
                match timeout(REFUSED_AT_MOST, watch.step()).await {
                    Ok(Err(status)) => Err(status),
                    _ => Ok((watch, opened)),
                }
            }
            Err(status) => Err(status),
        };
        match outcome {
            Ok(opened) => return (refusals, Ok(opened)),
            Err(status) if start.elapsed() > OPENED_AT_MOST => return (refusals, Err(status)),
            Err(status) => refusals.push(status),
        }
        sleep(RETRY_DELAY).await;
    }
}
