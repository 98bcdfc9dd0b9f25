//! Renders the workload's objects as an apiserver stores them: with defaults, conditions and
//! managed fields.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::pod::{Pod, TIERS};

/// Start of the workload's clock: 2026-01-01T00:00:00Z.
const EPOCH_SECONDS: i64 = 1_767_225_600;
/// The characters of Kubernetes' generated names (`k8s.io/apimachinery/pkg/util/rand`). Without
/// vowels they cannot form words.
const LETTERS: &[u8; 27] = b"bcdfghjklmnpqrstvwxz2456789";

fn time(seconds: u64) -> String {
    let seconds = EPOCH_SECONDS.saturating_add_unsigned(seconds);
    Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX).strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// A five-character name suffix. It is unique for serials below 27⁵.
fn suffix(serial: u64) -> String {
    let base = LETTERS.len() as u64;
    // The factor is coprime to the base, so consecutive serials get dissimilar suffixes.
    let mut rest = (serial % base.pow(5)) * 7_368_787 % base.pow(5);
    let mut letters = String::new();
    for _ in 0..5 {
        letters.push(char::from(LETTERS[(rest % base) as usize]));
        rest /= base;
    }
    letters
}

fn template_hash(app: usize) -> String {
    format!("7c{:08x}", (app as u32).wrapping_add(1).wrapping_mul(0x9e37_79b1))
}

pub(super) fn namespace_name(index: usize) -> String {
    format!("team-{index}")
}

pub(super) fn pod_name(pod: &Pod) -> String {
    format!("web-{}-{}-{}", pod.born_app, template_hash(pod.born_app), suffix(pod.serial))
}

pub(super) fn namespace(index: usize) -> Value {
    let name = namespace_name(index);
    json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": name, "labels": {"kubernetes.io/metadata.name": name}, "creationTimestamp": time(0)},
        "spec": {"finalizers": ["kubernetes"]},
        "status": {"phase": "Active"},
    })
}

pub(super) fn node(index: usize) -> Value {
    let name = format!("node-{index}");
    let condition = |kind: &str, status: &str, reason: &str, message: &str| {
        json!({"type": kind, "status": status, "reason": reason, "message": message,
            "lastHeartbeatTime": time(0), "lastTransitionTime": time(0)})
    };
    json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {
            "name": name, "creationTimestamp": time(0),
            "labels": {
                "beta.kubernetes.io/arch": "amd64", "beta.kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64",
                "kubernetes.io/hostname": name, "kubernetes.io/os": "linux",
                "topology.kubernetes.io/zone": format!("zone-{}", index % 3),
            },
            "annotations": {"node.alpha.kubernetes.io/ttl": "0", "volumes.kubernetes.io/controller-managed-attach-detach": "true"},
        },
        "spec": {"podCIDR": format!("10.{}.{}.0/24", 128 + index / 256 % 64, index % 256)},
        "status": {
            "addresses": [
                {"address": format!("192.0.2.{}", index % 256), "type": "InternalIP"}, {"address": name, "type": "Hostname"},
            ],
            "allocatable": {"cpu": "7910m", "ephemeral-storage": "95551679124", "memory": "31469364Ki", "pods": "110"},
            "capacity": {"cpu": "8", "ephemeral-storage": "103679300Ki", "memory": "32486196Ki", "pods": "110"},
            "conditions": [
                condition("MemoryPressure", "False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
                condition("DiskPressure", "False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
                condition("PIDPressure", "False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
                condition("Ready", "True", "KubeletReady", "kubelet is posting ready status"),
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
            "nodeInfo": {
                "architecture": "amd64", "bootID": "", "containerRuntimeVersion": "containerd://2.1.4",
                "kernelVersion": "6.12.41", "kubeProxyVersion": "", "kubeletVersion": "v1.35.4", "machineID": "",
                "operatingSystem": "linux", "osImage": "Debian GNU/Linux 13 (trixie)", "systemUUID": "",
            },
        },
    })
}

/// A pod for a create request. Updates omit the creation time, because the server preserves it.
pub(super) fn new_pod(pod: &Pod) -> Value {
    let mut value = self::pod(pod);
    value["metadata"]["creationTimestamp"] = time(pod.created).into();
    value
}

pub(super) fn pod(pod: &Pod) -> Value {
    let created = time(pod.created);
    let mut labels = json!({
        "app": format!("web-{}", pod.app), "pod-template-hash": template_hash(pod.born_app), "tier": TIERS[pod.tier],
    });
    if pod.canary {
        labels["canary"] = "true".into();
    }
    let owner = format!("web-{}-{}", pod.born_app, template_hash(pod.born_app));
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {
            "name": pod_name(pod), "generateName": format!("{owner}-"), "namespace": namespace_name(pod.namespace),
            "labels": labels,
            "annotations": {"example.com/config-hash": hex(pod.born_app as u64), "example.com/revision": pod.revision.to_string()},
            "ownerReferences": [{
                "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": owner, "uid": uid(pod.born_app as u64),
                "controller": true, "blockOwnerDeletion": true,
            }],
            "managedFields": managed_fields(pod),
        },
        "spec": spec(pod),
        "status": status(pod, &created),
    })
}

fn hex(number: u64) -> String {
    let mixed = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!("{mixed:016x}{:016x}", mixed.rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9))
}

fn uid(number: u64) -> String {
    let hex = hex(number);
    format!("{}-{}-4{}-a{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..])
}

fn container_name(index: usize) -> &'static str {
    ["server", "metrics-proxy", "log-shipper"][index % 3]
}

fn image(pod: &Pod, index: usize) -> String {
    format!("registry.example.com/{}/{}:1.{}.0", TIERS[pod.born_app % TIERS.len()], container_name(index), pod.born_app)
}

fn spec(pod: &Pod) -> Value {
    let container = |index: usize| {
        json!({
            "name": container_name(index), "image": image(pod, index), "imagePullPolicy": "IfNotPresent",
            "env": [
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
                {"name": "LOG_LEVEL", "value": "info"},
            ],
            "ports": [{"containerPort": 8080 + index, "name": "http", "protocol": "TCP"}],
            "readinessProbe": {
                "httpGet": {"path": "/readyz", "port": 8080 + index, "scheme": "HTTP"},
                "failureThreshold": 3, "periodSeconds": 10, "successThreshold": 1, "timeoutSeconds": 1,
            },
            "resources": {"limits": {"memory": "512Mi"}, "requests": {"cpu": "100m", "memory": "256Mi"}},
            "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
            "volumeMounts": [
                {"mountPath": "/etc/config", "name": "config", "readOnly": true},
                {"mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "name": "kube-api-access", "readOnly": true},
            ],
        })
    };
    let toleration =
        |key: &str| json!({"effect": "NoExecute", "key": key, "operator": "Exists", "tolerationSeconds": 300});
    json!({
        "containers": (0..pod.containers).map(container).collect::<Vec<_>>(),
        "dnsPolicy": "ClusterFirst", "enableServiceLinks": true, "nodeName": format!("node-{}", pod.node),
        "preemptionPolicy": "PreemptLowerPriority", "priority": 0, "restartPolicy": "Always",
        "schedulerName": "default-scheduler", "securityContext": {"fsGroup": 1000, "runAsNonRoot": true},
        "serviceAccount": "default", "serviceAccountName": "default", "terminationGracePeriodSeconds": 30,
        "tolerations": [toleration("node.kubernetes.io/not-ready"), toleration("node.kubernetes.io/unreachable")],
        "volumes": [
            {"name": "config", "configMap": {"defaultMode": 420, "name": format!("web-{}", pod.born_app)}},
            {"name": "kube-api-access", "projected": {"defaultMode": 420, "sources": [
                {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
                {"configMap": {"items": [{"key": "ca.crt", "path": "ca.crt"}], "name": "kube-root-ca.crt"}},
                {"downwardAPI": {"items": [
                    {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}, "path": "namespace"},
                ]}},
            ]}},
        ],
    })
}

fn status(pod: &Pod, created: &str) -> Value {
    let changed = time(pod.changed);
    let ready = if pod.ready { "True" } else { "False" };
    let condition = |kind: &str, status: &str, at: &str| json!({"type": kind, "status": status, "lastProbeTime": null, "lastTransitionTime": at, "observedGeneration": 1});
    let pod_ip = format!("10.{}.{}.{}", 128 + pod.node / 256 % 64, pod.node % 256, pod.serial % 250 + 2);
    let container = |index: usize| {
        let restarted = index == 0 && pod.restarts > 0;
        let last_state = if restarted {
            json!({"terminated": {"exitCode": 137, "reason": "OOMKilled", "startedAt": created, "finishedAt": changed,
                "containerID": format!("containerd://{}", hex(pod.serial ^ pod.restarts))}})
        } else {
            json!({})
        };
        json!({
            "name": container_name(index), "image": image(pod, index),
            "imageID": format!("{}@sha256:{}{}", image(pod, index), hex(index as u64), hex(pod.born_app as u64)),
            "containerID": format!("containerd://{}{}", hex(pod.serial), hex(pod.restarts)),
            "ready": pod.ready || index > 0, "started": true, "restartCount": if index == 0 { pod.restarts } else { 0 },
            "lastState": last_state,
            "state": {"running": {"startedAt": if restarted { &changed } else { created }}},
        })
    };
    json!({
        "conditions": [
            condition("PodReadyToStartContainers", "True", created), condition("Initialized", "True", created),
            condition("Ready", ready, &changed), condition("ContainersReady", ready, &changed),
            condition("PodScheduled", "True", created),
        ],
        "containerStatuses": (0..pod.containers).map(container).collect::<Vec<_>>(),
        "hostIP": format!("192.0.2.{}", pod.node % 256), "hostIPs": [{"ip": format!("192.0.2.{}", pod.node % 256)}],
        "phase": "Running", "podIP": pod_ip, "podIPs": [{"ip": pod_ip}], "qosClass": "Burstable",
        "startTime": created, "observedGeneration": 1,
    })
}

fn managed_fields(pod: &Pod) -> Value {
    let leaf = || json!({});
    let set = |fields: &[&str]| {
        let mut set = json!({".": {}});
        for field in fields {
            set[format!("f:{field}")] = leaf();
        }
        set
    };
    let mut containers = json!({});
    for index in 0..pod.containers {
        let fields =
            ["env", "image", "imagePullPolicy", "name", "ports", "readinessProbe", "resources", "volumeMounts"];
        containers[format!("k:{{\"name\":\"{}\"}}", container_name(index))] = set(&fields);
    }
    let condition = |kind: &str| (format!("k:{{\"type\":\"{kind}\"}}"), set(&["lastTransitionTime", "status", "type"]));
    let conditions: serde_json::Map<String, Value> =
        ["ContainersReady", "Initialized", "Ready"].into_iter().map(condition).collect();
    json!([
        {
            "manager": "kube-controller-manager", "operation": "Update", "apiVersion": "v1", "time": time(pod.created),
            "fieldsType": "FieldsV1", "fieldsV1": {
                "f:metadata": {
                    "f:annotations": set(&["example.com/config-hash", "example.com/revision"]), "f:generateName": leaf(),
                    "f:labels": set(&["app", "pod-template-hash", "tier"]), "f:ownerReferences": leaf(),
                },
                "f:spec": {
                    "f:containers": containers, "f:dnsPolicy": leaf(), "f:restartPolicy": leaf(), "f:schedulerName": leaf(),
                    "f:securityContext": leaf(), "f:terminationGracePeriodSeconds": leaf(), "f:volumes": leaf(),
                },
            },
        },
        {
            "manager": "kubelet", "operation": "Update", "apiVersion": "v1", "time": time(pod.changed),
            "fieldsType": "FieldsV1", "fieldsV1": {"f:status": {
                "f:conditions": conditions, "f:containerStatuses": leaf(), "f:hostIP": leaf(), "f:phase": leaf(),
                "f:podIP": leaf(), "f:podIPs": leaf(), "f:startTime": leaf(),
            }},
            "subresource": "status",
        },
    ])
}
