//! kube-rs: its watcher, which lists or begins with a watch, of whole objects and of their metadata.

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
use crate::harness::{Test, apiserver::ApiServer, objects::pod, tests, wait};

pub(crate) const TESTS: &[Test] = tests! {
    apiserver: a_kube_rs_watcher_sees_the_same;
};

/// The pod that comes last.
const LAST: &str = "last";

async fn a_kube_rs_watcher_sees_the_same() {
    let both = Both::start(ApiServer::shared().await, &["--resource", "pods"]).await;
    let api = &both.api;
    let namespace = api.namespace("kube-rs").await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");
    for name in ["first", "second", "third"] {
        api.create(&pods, &pod(name)).await;
    }
    let configs = [
        ("lists", watcher::Config::default()),
        ("lists in pages", watcher::Config::default().page_size(2)),
        ("lists whatever there is", watcher::Config::default().any_semantic()),
        ("streams", watcher::Config::default().streaming_lists()),
        ("streams by label", watcher::Config::default().streaming_lists().labels("stage!=off")),
    ];
    let (begun, mut has_begun) = watch::channel(0);
    let mut watchers = Vec::new();
    for (what, config) in configs {
        for server in &both.servers {
            let client = client(&server.kubeconfig).await;
            let whole: Api<Pod> = Api::namespaced(client.clone(), &namespace);
            let whole = watcher::watcher(whole, config.clone());
            watchers.push((what, tokio::spawn(follow(whole, begun.clone()))));
            let metadata: Api<PartialObjectMeta<Pod>> = Api::namespaced(client, &namespace);
            let metadata = watcher::watcher(metadata, config.clone());
            watchers.push((what, tokio::spawn(follow(metadata, begun.clone()))));
        }
    }
    let all = watchers.len();
    tokio::time::timeout(wait::SOON * 2, has_begun.wait_for(|begun| *begun == all))
        .await
        .expect("all have begun")
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
        seen.push((what, tokio::time::timeout(wait::SOON * 2, watcher).await.expect("the last pod comes").unwrap()));
    }
    // Whole and metadata from the apiserver, then the same through kubefan.
    for four in seen.chunks(4) {
        assert_equal(&format!("{}, whole", four[0].0), &four[0].1, &four[2].1);
        assert_equal(&format!("{}, metadata", four[1].0), &four[1].1, &four[3].1);
        assert!(four[2].1.iter().any(|event| event.starts_with("Delete")), "{:?}", four[2].1);
    }
}

async fn client(kubeconfig: &Path) -> Client {
    let kubeconfig = Kubeconfig::read_from(kubeconfig).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

/// What a watcher tells, until the last pod has come; tells when its initial state is complete.
async fn follow<K: ResourceExt + Debug>(
    events: impl Stream<Item = Result<Event<K>, watcher::Error>>,
    begun: watch::Sender<usize>,
) -> Vec<String> {
    let (mut events, mut seen, mut state) = (pin!(events), Vec::new(), Vec::new());
    loop {
        let event = events.next().await.expect("a watcher does not end").expect("nothing fails");
        match event {
            Event::Init => seen.push("Init".to_owned()),
            Event::InitApply(object) => state.push(format!("InitApply {object:?}")),
            Event::InitDone => {
                // Pages of a list come by key, but nobody has promised an order to who streams.
                state.sort();
                seen.append(&mut state);
                seen.push("InitDone".to_owned());
                begun.send_modify(|begun| *begun += 1);
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
