//! A cluster with objects of many resources: those that kube-state-metrics watches.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::{
    task::{JoinHandle, JoinSet},
    time::{MissedTickBehavior, interval},
};

use crate::harness::{apiserver::ApiServer, objects::version_of};

/// Number of parallel writers while the cluster is filled, each with its own connection.
const CONCURRENCY: usize = 16;
/// Leases that are written, as those of nodes and of leader elections are.
const LEASES: usize = 5;
/// The namespace of the written leases.
const LEASES_PATH: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";

/// A resource of the cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    /// As discovery names it.
    pub(crate) group: &'static str,
    pub(crate) version: &'static str,
    pub(crate) resource: &'static str,
    pub(crate) namespaced: bool,
    /// Everything but the metadata.
    body: &'static str,
    /// Whether a large cluster has many of them.
    pub(crate) many: bool,
}

const fn core(resource: &'static str, body: &'static str) -> Kind {
    Kind { group: "", version: "v1", resource, namespaced: true, body, many: false }
}

const fn of(group: &'static str, version: &'static str, resource: &'static str, body: &'static str) -> Kind {
    Kind { group, version, resource, namespaced: true, body, many: false }
}

impl Kind {
    const fn many(mut self) -> Kind {
        self.many = true;
        self
    }

    const fn cluster_scoped(mut self) -> Kind {
        self.namespaced = false;
        self
    }

    /// As kubefan's `--resource` takes it.
    pub(crate) fn full_name(&self) -> String {
        if self.group.is_empty() { self.resource.to_owned() } else { format!("{}.{}", self.resource, self.group) }
    }

    /// As the program of `tests/clients` takes it.
    pub(crate) fn versioned_name(&self) -> String {
        format!("{}.{}.{}", self.resource, self.version, self.group)
    }

    /// The path of the objects of the whole cluster.
    pub(crate) fn path(&self) -> String {
        let root = if self.group.is_empty() { "/api".to_owned() } else { format!("/apis/{}", self.group) };
        format!("{root}/{}/{}", self.version, self.resource)
    }

    /// The path of the objects of a namespace, or of the cluster if they have none.
    pub(crate) fn path_in(&self, namespace: &str) -> String {
        if !self.namespaced {
            return self.path();
        }
        let path = self.path();
        let (root, resource) = path.rsplit_once('/').expect("a path has parts");
        format!("{root}/namespaces/{namespace}/{resource}")
    }

    pub(crate) fn object(&self, name: &str) -> Value {
        let mut object: Value = serde_json::from_str(self.body).expect("the body is JSON");
        object["metadata"] = json!({ "name": name, "labels": { "mark": "0" } });
        object
    }
}

const POD: &str = r#"{"spec":{"containers":[{"name":"main","image":"pause"}]}}"#;
const REPLICATED: &str = r#"{"spec":{"replicas":0,"serviceName":"a","selector":{"matchLabels":{"app":"a"}},"template":{"metadata":{"labels":{"app":"a"}},"spec":{"containers":[{"name":"main","image":"pause"}]}}}}"#;
const DAEMON: &str = r#"{"spec":{"selector":{"matchLabels":{"app":"a"}},"template":{"metadata":{"labels":{"app":"a"}},"spec":{"containers":[{"name":"main","image":"pause"}]}}}}"#;
const CONTROLLER: &str = r#"{"spec":{"replicas":0,"selector":{"app":"a"},"template":{"metadata":{"labels":{"app":"a"}},"spec":{"containers":[{"name":"main","image":"pause"}]}}}}"#;
const JOB: &str =
    r#"{"spec":{"template":{"spec":{"restartPolicy":"Never","containers":[{"name":"main","image":"pause"}]}}}}"#;
const CRON_JOB: &str = r#"{"spec":{"schedule":"0 0 1 1 *","jobTemplate":{"spec":{"template":{"spec":{"restartPolicy":"Never","containers":[{"name":"main","image":"pause"}]}}}}}}"#;
const CLAIM: &str = r#"{"spec":{"accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"1Gi"}}}}"#;
const VOLUME: &str =
    r#"{"spec":{"accessModes":["ReadWriteOnce"],"capacity":{"storage":"1Gi"},"hostPath":{"path":"/x"}}}"#;
const SCALER: &str =
    r#"{"spec":{"maxReplicas":3,"scaleTargetRef":{"kind":"Deployment","name":"x","apiVersion":"apps/v1"}}}"#;
/// A request for a certificate of "/CN=state"; its key was thrown away.
const SIGNING_REQUEST: &str = r#"{"spec":{"signerName":"example.com/none","usages":["client auth"],"request":"LS0tLS1CRUdJTiBDRVJUSUZJQ0FURSBSRVFVRVNULS0tLS0KTUlISk1ISUNBUUF3RURFT01Bd0dBMVVFQXd3RmMzUmhkR1V3V1RBVEJnY3Foa2pPUFFJQkJnZ3Foa2pPUFFNQgpCd05DQUFUTWdqZ1hPYTJqN2RvNElSWVYveStLd3BIWUEvNFI4NDZ4QVhiS0N3d2xOM3RPUTR1czNoNEM3SzI1CjdoVk9XbkxPL1Erc1BzbFZIOU5OdG90ZEZDNFBvQUF3Q2dZSUtvWkl6ajBFQXdJRFJ3QXdSQUlnSklrRHg2Y2kKNk9PZWNlaGQ5WFBhTmV0ZEhQQVkvSFl3Q3pqeVhUQkJoU0FDSUU0MHVDQm5tdFdvdlUzelllWCtBeW4vcWFrYwpPbS9yWThyWUVzRTZxTXd2Ci0tLS0tRU5EIENFUlRJRklDQVRFIFJFUVVFU1QtLS0tLQo="}}"#;

/// The resources that kube-state-metrics watches by default.
pub(crate) const KINDS: [Kind; 28] = [
    core("configmaps", r#"{"data":{"key":"value"}}"#).many(),
    core("limitranges", r#"{"spec":{"limits":[]}}"#),
    core("namespaces", "{}").cluster_scoped(),
    core("nodes", "{}").cluster_scoped().many(),
    core("persistentvolumeclaims", CLAIM).many(),
    core("persistentvolumes", VOLUME).cluster_scoped(),
    core("pods", POD).many(),
    core("replicationcontrollers", CONTROLLER),
    core("resourcequotas", r#"{"spec":{}}"#),
    core("secrets", r#"{"stringData":{"key":"value"}}"#).many(),
    core("services", r#"{"spec":{"clusterIP":"None","ports":[{"port":80}]}}"#).many(),
    of("apps", "v1", "daemonsets", DAEMON),
    of("apps", "v1", "deployments", DAEMON).many(),
    of("apps", "v1", "replicasets", DAEMON).many(),
    of("apps", "v1", "statefulsets", REPLICATED),
    of("batch", "v1", "cronjobs", CRON_JOB),
    of("batch", "v1", "jobs", JOB).many(),
    of("autoscaling", "v2", "horizontalpodautoscalers", SCALER),
    of("certificates.k8s.io", "v1", "certificatesigningrequests", SIGNING_REQUEST).cluster_scoped(),
    of("coordination.k8s.io", "v1", "leases", r#"{"spec":{"holderIdentity":"x"}}"#),
    of("discovery.k8s.io", "v1", "endpointslices", r#"{"addressType":"IPv4","endpoints":[],"ports":[]}"#).many(),
    of(
        "networking.k8s.io",
        "v1",
        "ingresses",
        r#"{"spec":{"defaultBackend":{"service":{"name":"x","port":{"number":80}}}}}"#,
    ),
    of("networking.k8s.io", "v1", "networkpolicies", r#"{"spec":{"podSelector":{}}}"#),
    of("policy", "v1", "poddisruptionbudgets", r#"{"spec":{"minAvailable":1,"selector":{"matchLabels":{"app":"a"}}}}"#),
    of("storage.k8s.io", "v1", "storageclasses", r#"{"provisioner":"example.com/x"}"#).cluster_scoped(),
    of(
        "storage.k8s.io",
        "v1",
        "volumeattachments",
        r#"{"spec":{"attacher":"example.com","nodeName":"n","source":{"persistentVolumeName":"v"}}}"#,
    )
    .cluster_scoped(),
    of("admissionregistration.k8s.io", "v1", "mutatingwebhookconfigurations", r#"{"webhooks":[]}"#).cluster_scoped(),
    of("admissionregistration.k8s.io", "v1", "validatingwebhookconfigurations", r#"{"webhooks":[]}"#).cluster_scoped(),
];

/// The kind with this plural name.
pub(crate) fn kind(resource: &str) -> Kind {
    *KINDS.iter().find(|kind| kind.resource == resource).expect("the kind is listed")
}

/// The value of `--resource` for these kinds.
pub(crate) fn resource_flag(kinds: &[Kind]) -> String {
    kinds.iter().map(Kind::full_name).collect::<Vec<_>>().join(",")
}

/// Creates about `total` objects, called `o-0` and so on: one of each kind, and the rest of the
/// kinds that clusters have many of. Returns the number.
pub(crate) async fn populate(api: &ApiServer, total: usize) -> usize {
    let many = KINDS.iter().filter(|kind| kind.many).count();
    let each = total.saturating_sub(KINDS.len()) / many + 1;
    let mut created = 0;
    for kind in KINDS {
        let count = if kind.many { each } else { 1 };
        create(api, &kind, 0..count).await;
        created += count;
    }
    created
}

/// Creates objects of one kind in the namespace `default`.
pub(crate) async fn create(api: &ApiServer, kind: &Kind, numbers: std::ops::Range<usize>) {
    let mut writers = JoinSet::new();
    for writer in 0..CONCURRENCY.min(numbers.len()) {
        let (api, kind, numbers) = (api.handle(), *kind, numbers.clone());
        writers.spawn(async move {
            for number in numbers.skip(writer).step_by(CONCURRENCY) {
                api.create(&kind.path_in("default"), &kind.object(&format!("o-{number}"))).await;
            }
        });
    }
    writers.join_all().await;
}

/// Writes a mark into the label of the first object of each kind. Returns the versions, in order.
pub(crate) async fn mark(api: &ApiServer, kinds: &[Kind], mark: u64) -> Vec<u64> {
    let patch = json!({ "metadata": { "labels": { "mark": mark.to_string() } } });
    let patch_one = |kind: &Kind| {
        let (path, patch) = (format!("{}/o-0", kind.path_in("default")), patch.clone());
        async move { version_of(&api.patch(&path, &patch).await) }
    };
    futures::future::join_all(kinds.iter().map(patch_one)).await
}

/// A writer that changes something again and again, until it is dropped. Failed writes are skipped.
pub(crate) struct Background(JoinHandle<()>);

impl Drop for Background {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Writes leases at this rate, so that the cluster's version advances as in every cluster.
pub(crate) async fn write_leases(api: &ApiServer, per_second: u32) -> Background {
    let namespace = json!({ "metadata": { "name": "kube-node-lease" } });
    // kube-apiserver creates the namespace itself, a moment after its start.
    let _ = api.request(reqwest::Method::POST, "/api/v1/namespaces", Some(("application/json", &namespace))).await;
    let kind = kind("leases");
    for number in 0..LEASES {
        api.create(LEASES_PATH, &kind.object(&format!("written-{number}"))).await;
    }
    write(api, per_second, |tick| format!("{LEASES_PATH}/written-{}", tick as usize % LEASES))
}

/// Changes a label of the object at the path that `path` returns for each tick.
pub(crate) fn write(api: &ApiServer, per_second: u32, path: impl Fn(u64) -> String + Send + 'static) -> Background {
    let (client, url) = (api.client(), api.url().to_owned());
    Background(tokio::spawn(async move {
        let mut ticks = interval(Duration::from_secs(1) / per_second);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for tick in 0_u64.. {
            ticks.tick().await;
            let patch = json!({ "metadata": { "labels": { "tick": tick.to_string() } } });
            let request = client.patch(format!("{url}{}", path(tick)));
            let request = request.header("content-type", "application/merge-patch+json").body(patch.to_string());
            let _ = request.timeout(Duration::from_secs(5)).send().await;
        }
    }))
}
