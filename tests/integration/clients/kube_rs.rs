//! kube-rs: its watcher in list mode and in streaming mode, for whole objects and for metadata
//! only.

use std::{fmt::Debug, path::Path, pin::pin};

use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube_client::{
    Api, Client, Config, ResourceExt,
    config::{KubeConfigOptions, Kubeconfig},
    core::PartialObjectMeta,
};
use kube_runtime::watcher::{self, Event};
use serde_json::json;
use tokio::sync::watch;

use super::{Both, assert_equal};
use crate::harness::{apiserver::ApiServer, objects::pod, tests, wait};

tests! {
    apiserver slow_programs: a_kube_rs_watcher_sees_the_same_events_through_kubefan;
}

/// The name of the last pod created.
const LAST: &str = "last";

async fn a_kube_rs_watcher_sees_the_same_events_through_kubefan() {
    let both = Both::start(ApiServer::shared().await, &["--resource", "pods"]).await;
    let api = &both.api;
    let namespace = api.namespace("kube-rs").await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    for name in ["first", "second", "third"] {
        api.create(&pods, &pod(name)).await;
    }
    // A list of any version may be older than the last pod. Then the initial states would differ.
    for server in [api.url().to_owned(), format!("https://{}", both.kubefan.grpc_addr)] {
        wait::until("the pods in a list of any version", wait::SOON, || async {
            let list = api.client().get(format!("{server}{pods}?resourceVersion=0")).send().await.ok()?;
            list.text().await.ok()?.contains(r#""name":"third""#).then_some(())
        })
        .await;
    }
    let configs = [
        ("lists", watcher::Config::default()),
        ("lists in pages", watcher::Config::default().page_size(2)),
        ("lists any version", watcher::Config::default().any_semantic()),
        ("streams", watcher::Config::default().streaming_lists()),
        ("streams by label", watcher::Config::default().streaming_lists().labels("stage!=off")),
    ];
    let (started, mut has_started) = watch::channel(0);
    let mut watchers = Vec::new();
    for (what, config) in configs {
        for server in &both.servers {
            let client = client(&server.kubeconfig).await;
            let whole: Api<Pod> = Api::namespaced(client.clone(), &namespace);
            let whole = watcher::watcher(whole, config.clone());
            watchers.push((what, tokio::spawn(follow(whole, started.clone()))));
            let metadata: Api<PartialObjectMeta<Pod>> = Api::namespaced(client, &namespace);
            let metadata = watcher::watcher(metadata, config.clone());
            watchers.push((what, tokio::spawn(follow(metadata, started.clone()))));
        }
    }
    let all = watchers.len();
    tokio::time::timeout(wait::SOON * 2, has_started.wait_for(|started| *started == all))
        .await
        .expect("all watchers start")
        .unwrap();
    let stage = |stage: &str| json!({ "metadata": { "labels": { "stage": stage } } });
    api.patch(&format!("{pods}/first"), &stage("off")).await;
    api.patch(&format!("{pods}/second"), &stage("on")).await;
    api.patch(&format!("{pods}/first"), &stage("on")).await;
    api.delete(&format!("{pods}/third")).await;
    api.create(&pods, &pod("third")).await;
    api.create(&pods, &pod(LAST)).await;
    let mut seen = Vec::new();
    for (what, watcher) in watchers {
        seen.push((what, tokio::time::timeout(wait::SOON * 2, watcher).await.expect("the last pod arrives").unwrap()));
    }
    // The order is whole and metadata from the apiserver, then whole and metadata through kubefan.
    for group in seen.chunks(4) {
        assert_equal(&format!("{}, whole", group[0].0), &group[0].1, &group[2].1);
        assert_equal(&format!("{}, metadata", group[1].0), &group[1].1, &group[3].1);
        assert!(group[2].1.iter().any(|event| event.starts_with("Delete")), "{:?}", group[2].1);
    }
}

async fn client(kubeconfig: &Path) -> Client {
    let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

/// Records a watcher's events until the last pod arrives. Increments `started` when the initial
/// objects are complete.
async fn follow<K: ResourceExt + Debug>(
    events: impl Stream<Item = Result<Event<K>, watcher::Error>>,
    started: watch::Sender<usize>,
) -> Vec<String> {
    let mut events = pin!(events);
    let mut seen = Vec::new();
    let mut state = Vec::new();
    loop {
        let event = events.next().await.expect("a watcher does not end").expect("a watcher does not fail");
        match event {
            Event::Init => seen.push("Init".to_owned()),
            Event::InitApply(object) => state.push(format!("InitApply {object:?}")),
            Event::InitDone => {
                // Paged lists are in key order, but the order of streamed objects is not
                // guaranteed.
                state.sort();
                seen.append(&mut state);
                seen.push("InitDone".to_owned());
                started.send_modify(|started| *started += 1);
            }
            Event::Delete(object) => seen.push(format!("Delete {object:?}")),
            Event::Apply(object) => {
                seen.push(format!("Apply {object:?}"));
                if object.name_any() == LAST {
                    return seen;
                }
            }
        }
    }
}
