//! A real apiserver as the source: the workload's pods in a namespace of their own, changed by PATCH, deleted at the end.
//!
//! The pods are bound to nodes that do not exist and have full statuses, so that their bytes are those of running pods. Where a pod
//! garbage collector runs, it takes them away after a while: measure against an apiserver that stands alone.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use futures::{StreamExt, TryStreamExt, stream};
use http::Method;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{
    BenchError,
    latency::Times,
    rest::{Endpoint, Rest},
    source::SourceOptions,
};
use kubefan_sim::workload::{Change, Operation, Workload};

/// For the namespace to be deleted, its pods first.
const FINISH_TIMEOUT: Duration = Duration::from_secs(60);
/// Writes under way at a time.
const WRITES_MAX: usize = 16;
const JSON: &str = "application/json";
const MERGE_PATCH: &str = "application/merge-patch+json";

/// A namespace of a cluster, and the only writer to it.
pub(super) struct Cluster {
    rest: Rest,
    kubeconfig: PathBuf,
    namespace: String,
    workload: Workload,
    /// Made, and not written yet.
    next: Option<Change>,
    version: u64,
    objects: usize,
}

impl Cluster {
    /// Makes the namespace. Whatever happens then, [`Self::finish`] takes it away.
    pub(super) async fn begin(
        kubeconfig: &Path,
        endpoint: Endpoint,
        options: SourceOptions,
    ) -> Result<Self, BenchError> {
        let rest = Rest::connect(endpoint).await?;
        let named = json!({"metadata": {"generateName": "kubefan-bench-"}});
        let made = rest.call(Method::POST, "/api/v1/namespaces", JSON, Some(&named)).await?;
        let namespace = made["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let workload = Workload::new(options.seed, options.workload);
        Ok(Self { rest, kubeconfig: kubeconfig.to_owned(), namespace, workload, next: None, version: 0, objects: 0 })
    }

    /// Makes the pods.
    pub(super) async fn fill(&mut self) -> Result<(), BenchError> {
        let mut pods = Vec::new();
        while let Some(change) = self.workload.next_setup() {
            if let ("pods", Operation::Create(pod)) = (&*change.resource.resource, change.operation) {
                pods.push(pod);
            }
        }
        self.objects = pods.len();
        let created = stream::iter(pods).map(|pod| self.create(pod)).buffer_unordered(WRITES_MAX);
        let version = created.try_fold(0, |last, version| async move { Ok(last.max(version)) }).await?;
        self.version = self.version.max(version);
        Ok(())
    }

    /// A pod with its status, which takes two writes; the version of the second.
    async fn create(&self, pod: Value) -> Result<u64, BenchError> {
        self.post(pod.clone()).await?;
        self.patch_status(&pod).await
    }

    async fn post(&self, mut pod: Value) -> Result<u64, BenchError> {
        if let Some(metadata) = pod["metadata"].as_object_mut() {
            // The server has its own of the one, and a garbage collector would miss the owners.
            metadata.retain(|field, _| !matches!(field.as_str(), "managedFields" | "ownerReferences"));
            metadata.insert("namespace".to_owned(), self.namespace.clone().into());
        }
        Ok(version(&self.rest.call(Method::POST, &self.path("", ""), JSON, Some(&pod)).await?))
    }

    async fn patch_status(&self, pod: &Value) -> Result<u64, BenchError> {
        let path = self.path(&name(pod), "/status");
        let patch = json!({"status": pod["status"]});
        Ok(version(&self.rest.call(Method::PATCH, &path, MERGE_PATCH, Some(&patch)).await?))
    }

    fn path(&self, name: &str, subresource: &str) -> String {
        let slash = if name.is_empty() { "" } else { "/" };
        format!("/api/v1/namespaces/{}/pods{slash}{name}{subresource}", self.namespace)
    }

    pub(super) fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    pub(super) fn namespace(&self) -> &str {
        &self.namespace
    }

    pub(super) fn objects(&self) -> usize {
        self.objects
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Makes changes, several at a time where there are several. One object's come one after the other.
    pub(super) async fn change(&mut self, count: usize, times: &Times) -> Result<(), BenchError> {
        let mut rest = count;
        while rest > 0 {
            let changes = self.distinct(rest.min(WRITES_MAX));
            rest -= changes.len();
            self.objects += changes.iter().filter(|change| matches!(change.operation, Operation::Create(_))).count();
            let writes = stream::iter(changes).map(|change| {
                times.made();
                self.write(change)
            });
            let last =
                writes.buffer_unordered(WRITES_MAX).try_fold(0, |last, version| async move { Ok(last.max(version)) });
            let last = last.await?;
            self.version = self.version.max(last);
        }
        Ok(())
    }

    /// The next changes, of which no two are of one pod. Deletions are left out: an apiserver makes two events of that of a bound pod,
    /// and receivers count on one for each change. So the pods become more, by one in twenty changes.
    fn distinct(&mut self, count: usize) -> Vec<Change> {
        let mut changes: Vec<Change> = Vec::with_capacity(count);
        while changes.len() < count {
            let change = self.next.take().unwrap_or_else(|| self.workload.next_change());
            if matches!(change.operation, Operation::Delete { .. }) {
                continue;
            }
            let key = key(&change);
            if changes.iter().any(|other| self::key(other) == key) {
                self.next = Some(change);
                break;
            }
            changes.push(change);
        }
        changes
    }

    /// One write with one event.
    async fn write(&self, change: Change) -> Result<u64, BenchError> {
        match change.operation {
            Operation::Create(pod) => self.post(pod).await,
            Operation::Update(pod) => {
                let metadata = &pod["metadata"];
                let patch = json!({"metadata": {"labels": metadata["labels"], "annotations": metadata["annotations"]}});
                let path = self.path(&name(&pod), "");
                Ok(version(&self.rest.call(Method::PATCH, &path, MERGE_PATCH, Some(&patch)).await?))
            }
            Operation::UpdateStatus(pod) => self.patch_status(&pod).await,
            // Not among them.
            Operation::Delete { .. } => Ok(0),
        }
    }

    /// Deletes the pods and the namespace.
    pub(super) async fn finish(self) -> Result<(), BenchError> {
        let path = format!("/api/v1/namespaces/{}", self.namespace);
        let deleted = async {
            let now = json!({"gracePeriodSeconds": 0});
            self.rest.call(Method::DELETE, &self.path("", ""), JSON, Some(&now)).await?;
            self.rest.call(Method::DELETE, &path, JSON, None).await
        };
        match timeout(FINISH_TIMEOUT, deleted).await {
            Ok(result) => result.map(|_| ()),
            Err(_) => Err(BenchError::Cluster(format!("DELETE {path}: no answer within {FINISH_TIMEOUT:?}"))),
        }
    }
}

fn name(pod: &Value) -> String {
    pod["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}

fn key(change: &Change) -> String {
    match &change.operation {
        Operation::Create(pod) | Operation::Update(pod) | Operation::UpdateStatus(pod) => name(pod),
        Operation::Delete { name, .. } => name.clone(),
    }
}

fn version(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().and_then(|text| text.parse().ok()).unwrap_or_default()
}
