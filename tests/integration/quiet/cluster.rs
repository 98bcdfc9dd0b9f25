//! Objects of several resources, and a writer that changes them.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{MissedTickBehavior, interval},
};

use crate::harness::apiserver::ApiServer;

/// Number of parallel writers while the cluster is filled, each with its own connection.
const CONCURRENCY: usize = 16;

/// A resource of the cluster, with namespaces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    /// The group, empty for the core group. The version is v1.
    group: &'static str,
    pub(crate) resource: &'static str,
    /// Everything but the metadata.
    body: &'static str,
}

const KINDS: [Kind; 5] = [
    Kind { group: "", resource: "configmaps", body: r#"{"data":{"key":"value"}}"# },
    Kind { group: "", resource: "pods", body: r#"{"spec":{"containers":[{"name":"main","image":"pause"}]}}"# },
    Kind { group: "", resource: "secrets", body: r#"{"stringData":{"key":"value"}}"# },
    Kind { group: "", resource: "services", body: r#"{"spec":{"clusterIP":"None","ports":[{"port":80}]}}"# },
    Kind {
        group: "apps",
        resource: "deployments",
        body: r#"{"spec":{"selector":{"matchLabels":{"app":"a"}},"template":{"metadata":{"labels":{"app":"a"}},"spec":{"containers":[{"name":"main","image":"pause"}]}}}}"#,
    },
];

/// The kind with this plural name.
pub(crate) fn kind(resource: &str) -> Kind {
    *KINDS.iter().find(|kind| kind.resource == resource).expect("the kind is listed")
}

impl Kind {
    /// As kubefan's `--resource` takes it.
    pub(crate) fn full_name(&self) -> String {
        if self.group.is_empty() { self.resource.to_owned() } else { format!("{}.{}", self.resource, self.group) }
    }

    fn root(&self) -> String {
        if self.group.is_empty() { "/api/v1".to_owned() } else { format!("/apis/{}/v1", self.group) }
    }

    /// The path of the objects of the whole cluster.
    pub(crate) fn path(&self) -> String {
        format!("{}/{}", self.root(), self.resource)
    }

    /// The path of the objects of a namespace.
    pub(crate) fn path_in(&self, namespace: &str) -> String {
        format!("{}/namespaces/{namespace}/{}", self.root(), self.resource)
    }

    pub(crate) fn object(&self, name: &str) -> Value {
        let mut object: Value = serde_json::from_str(self.body).expect("the body is JSON");
        object["metadata"] = json!({ "name": name });
        object
    }
}

/// Creates objects of one kind in the namespace `default`, called `o-0` and so on.
pub(crate) async fn create(api: &ApiServer, kind: &Kind, count: usize) {
    let mut writers = JoinSet::new();
    for writer in 0..CONCURRENCY.min(count) {
        let api = api.handle();
        let kind = *kind;
        writers.spawn(async move {
            for number in (writer..count).step_by(CONCURRENCY) {
                api.create(&kind.path_in("default"), &kind.object(&format!("o-{number}"))).await;
            }
        });
    }
    writers.join_all().await;
}

/// A writer that changes something again and again, until it is dropped. Failed writes are skipped.
pub(crate) struct Background(JoinHandle<()>);

impl Drop for Background {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Changes a label of the object at the path that `path` returns for each tick.
pub(crate) fn write(api: &ApiServer, per_second: u32, path: impl Fn(u64) -> String + Send + 'static) -> Background {
    let url = api.url().to_owned();
    write_at(api, per_second, move |tick| format!("{url}{}", path(tick)))
}

/// Like [`write`], with the URL of the object.
pub(crate) fn write_at(api: &ApiServer, per_second: u32, url: impl Fn(u64) -> String + Send + 'static) -> Background {
    let client = api.client();
    Background(tokio::spawn(async move {
        let mut ticks = interval(Duration::from_secs(1) / per_second);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for tick in 0_u64.. {
            ticks.tick().await;
            let patch = json!({ "metadata": { "labels": { "tick": tick.to_string() } } });
            let request = client.patch(url(tick));
            let request = request.header("content-type", "application/merge-patch+json").body(patch.to_string());
            let _ = request.timeout(Duration::from_secs(5)).send().await;
        }
    }))
}
