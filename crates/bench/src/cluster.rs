//! A real apiserver as the source of changes: the workload's pods in a new namespace, changed with
//! PATCH and deleted at the end.
//!
//! The pods are bound to nodes that do not exist and have complete statuses, so that they are as
//! large as running pods. A pod garbage collector would delete them after a while: use an apiserver
//! without controllers.

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
    latency::ChangeTimes,
    rest::{Endpoint, RestClient},
    source_options::SourceOptions,
};
use kubefan_sim::workload::{Change, Operation, Workload};

/// Time limit for deleting the pods and the namespace.
const CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(60);
/// Concurrent writes.
const WRITES_MAX: usize = 16;
const JSON: &str = "application/json";
const MERGE_PATCH: &str = "application/merge-patch+json";

/// A namespace in a cluster. Nothing else writes to it.
pub(super) struct Cluster {
    client: RestClient,
    kubeconfig: PathBuf,
    namespace: String,
    workload: Workload,
    /// A generated change that has not been written yet.
    next: Option<Change>,
    version: u64,
    objects: usize,
}

impl Cluster {
    /// Creates the namespace. The caller must call [`Self::clean_up`] to delete it.
    pub(super) async fn create(
        kubeconfig: &Path,
        endpoint: Endpoint,
        options: SourceOptions,
    ) -> Result<Self, BenchError> {
        let client = RestClient::connect(endpoint).await?;
        let named = json!({"metadata": {"generateName": "kubefan-bench-"}});
        let made = client.call(Method::POST, "/api/v1/namespaces", JSON, Some(&named)).await?;
        let namespace = made["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let workload = Workload::new(options.seed, options.workload);
        Ok(Self { client, kubeconfig: kubeconfig.to_owned(), namespace, workload, next: None, version: 0, objects: 0 })
    }

    /// Creates the pods.
    pub(super) async fn fill(&mut self) -> Result<(), BenchError> {
        let mut pods = Vec::new();
        while let Some(change) = self.workload.next_setup() {
            if let ("pods", Operation::Create(pod)) = (&*change.resource.resource, change.operation) {
                pods.push(pod);
            }
        }
        self.objects = pods.len();
        let created = stream::iter(pods).map(|pod| self.create_pod(pod)).buffer_unordered(WRITES_MAX);
        let version = created.try_fold(0, |last, version| async move { Ok(last.max(version)) }).await?;
        self.version = self.version.max(version);
        Ok(())
    }

    /// Creates a pod and then sets its status. Returns the resource version after the second write.
    async fn create_pod(&self, pod: Value) -> Result<u64, BenchError> {
        self.post(pod.clone()).await?;
        self.patch_status(&pod).await
    }

    async fn post(&self, mut pod: Value) -> Result<u64, BenchError> {
        if let Some(metadata) = pod["metadata"].as_object_mut() {
            // The server sets its own managedFields, and a garbage collector would delete pods
            // whose owners do not exist.
            metadata.retain(|field, _| !matches!(field.as_str(), "managedFields" | "ownerReferences"));
            metadata.insert("namespace".to_owned(), self.namespace.clone().into());
        }
        Ok(version(&self.client.call(Method::POST, &self.path("", ""), JSON, Some(&pod)).await?))
    }

    async fn patch_status(&self, pod: &Value) -> Result<u64, BenchError> {
        let path = self.path(&name(pod), "/status");
        let patch = json!({"status": pod["status"]});
        Ok(version(&self.client.call(Method::PATCH, &path, MERGE_PATCH, Some(&patch)).await?))
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

    /// Makes changes, up to [`WRITES_MAX`] concurrently. Changes of the same pod are sequential.
    pub(super) async fn make_changes(&mut self, count: usize, times: &ChangeTimes) -> Result<(), BenchError> {
        let mut remaining = count;
        while remaining > 0 {
            let changes = self.next_distinct(remaining.min(WRITES_MAX));
            remaining -= changes.len();
            self.objects += changes.iter().filter(|change| matches!(change.operation, Operation::Create(_))).count();
            let writes = stream::iter(changes).map(|change| {
                times.record_change();
                self.write(change)
            });
            let last =
                writes.buffer_unordered(WRITES_MAX).try_fold(0, |last, version| async move { Ok(last.max(version)) });
            let last = last.await?;
            self.version = self.version.max(last);
        }
        Ok(())
    }

    /// Sets an annotation on one pod of each node that has pods. Returns these nodes' numbers.
    pub(super) async fn annotate_each_node(&mut self, annotation: &str, text: &str) -> Result<Vec<usize>, BenchError> {
        let (nodes, changes): (Vec<_>, Vec<_>) = self.workload.annotate_each_node(annotation, text).into_iter().unzip();
        let writes = stream::iter(changes).map(|change| self.write(change)).buffer_unordered(WRITES_MAX);
        let last = writes.try_fold(0, |last, version| async move { Ok(last.max(version)) }).await?;
        self.version = self.version.max(last);
        Ok(nodes)
    }

    /// Returns the next changes, at most one per pod. Deletions are skipped: deleting a bound pod
    /// produces two events, but receivers expect one per change. The number of pods therefore grows
    /// by one per twenty changes.
    fn next_distinct(&mut self, count: usize) -> Vec<Change> {
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

    /// Makes one write, which produces one event.
    async fn write(&self, change: Change) -> Result<u64, BenchError> {
        match change.operation {
            Operation::Create(pod) => self.post(pod).await,
            Operation::Update(pod) => {
                let metadata = &pod["metadata"];
                let patch = json!({"metadata": {"labels": metadata["labels"], "annotations": metadata["annotations"]}});
                let path = self.path(&name(&pod), "");
                Ok(version(&self.client.call(Method::PATCH, &path, MERGE_PATCH, Some(&patch)).await?))
            }
            Operation::UpdateStatus(pod) => self.patch_status(&pod).await,
            // Skipped by `next_distinct`.
            Operation::Delete { .. } => Ok(0),
        }
    }

    /// Deletes the namespace and the pods.
    pub(super) async fn clean_up(self) -> Result<(), BenchError> {
        let path = format!("/api/v1/namespaces/{}", self.namespace);
        let deleted = async {
            let client = self.client.reconnect().await?;
            // The namespace first: it then accepts no pod of a write that was cancelled on its way.
            client.call(Method::DELETE, &path, JSON, None).await?;
            let now = json!({"gracePeriodSeconds": 0});
            // The answer has the deleted objects.
            loop {
                let pods = client.call(Method::DELETE, &self.path("", ""), JSON, Some(&now)).await?;
                if pods["items"].as_array().is_none_or(Vec::is_empty) {
                    return Ok(());
                }
            }
        };
        match timeout(CLEAN_UP_TIMEOUT, deleted).await {
            Ok(result) => result,
            Err(_) => Err(BenchError::Cluster(format!("DELETE {path}: no answer within {CLEAN_UP_TIMEOUT:?}"))),
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
