//! The two servers of the comparison and their objects. Some objects do not change during the
//! comparison, after a history of changes. Others change all the time.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use futures::future::join_all;
use reqwest::{Client, StatusCode};
use serde_json::{Value, json};

use super::{
    protobuf_json,
    request::{AnsweredBy, Request},
};
use crate::harness::{
    apiserver::{ApiServer, Options},
    kubefan::Kubefan,
    objects::version_of,
    servers::bearer,
    wait,
};

/// Prefix of the names and namespaces of unchanging objects.
pub(super) const STILL: &str = "still";
/// Number of unchanging objects per namespace, or of a cluster-scoped resource.
pub(super) const OBJECTS: usize = 6;
const NAMESPACES: [&str; 2] = ["still-a", "still-b"];
const GROUP: &str = "differential.example.com";
/// Interval between writes to the changing objects.
const WRITE_INTERVAL: Duration = Duration::from_millis(20);

/// A resource of the comparison.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resource {
    /// Group and version as a path.
    pub(super) prefix: &'static str,
    pub(super) plural: &'static str,
    pub(super) namespaced: bool,
    /// A field selector that selects some objects.
    pub(super) field: &'static str,
    /// Whether kubefan caches the resource.
    pub(super) cached: bool,
}

const fn resource(prefix: &'static str, plural: &'static str, namespaced: bool, field: &'static str) -> Resource {
    Resource { prefix, plural, namespaced, field, cached: true }
}

/// All resources of the comparison.
pub(super) const RESOURCES: [Resource; 10] = [
    resource("/api/v1", "pods", true, "spec.nodeName=node-1"),
    resource("/api/v1", "configmaps", true, "metadata.name!=still-1"),
    resource("/api/v1", "nodes", false, "spec.unschedulable=true"),
    resource("/api/v1", "namespaces", false, "status.phase=Active"),
    resource("/api/v1", "events", true, "reason=Tested"),
    // Deprecated: every answer has a warning.
    resource("/api/v1", "endpoints", true, "metadata.name!=still-1"),
    resource("/apis/apps/v1", "deployments", true, "metadata.namespace=still-a"),
    resource("/apis/coordination.k8s.io/v1", "leases", true, "metadata.name=still-2"),
    resource("/apis/differential.example.com/v1", "widgets", true, "spec.color=red"),
    Resource { cached: false, ..resource("/api/v1", "secrets", true, "type=Opaque") },
];

impl Resource {
    /// The path of a collection; in all namespaces if `namespace` is empty.
    pub(super) fn collection(&self, namespace: &str) -> String {
        let Self { prefix, plural, .. } = self;
        if self.namespaced && !namespace.is_empty() {
            format!("{prefix}/namespaces/{namespace}/{plural}")
        } else {
            format!("{prefix}/{plural}")
        }
    }

    /// A path under the deprecated `/watch/` prefix.
    pub(super) fn deprecated_watch(&self, path: &str) -> String {
        path.replacen(self.prefix, &format!("{}/watch", self.prefix), 1)
    }

    /// Whether a CustomResourceDefinition defines the resource.
    pub(super) fn is_custom(&self) -> bool {
        self.prefix.contains(".example.com/")
    }

    /// The namespaces with unchanging objects.
    fn namespaces(&self) -> &'static [&'static str] {
        if self.namespaced { &NAMESPACES } else { &[""] }
    }

    fn object(&self, namespace: &str, name: &str, number: usize) -> Value {
        let labels = match number % 3 {
            0 => json!({ "app": "web-0", "stage": "on" }),
            1 => json!({ "app": "web-1", "stage": "off", "canary": "" }),
            _ => json!({ "app": "web-2" }),
        };
        let mut object = match self.plural {
            "pods" => json!({ "spec": {
                "nodeName": (number % 2 == 1).then_some("node-1"),
                "containers": [{ "name": "main", "image": "registry.k8s.io/pause:3.10" }],
            } }),
            "configmaps" => json!({ "data": { "text": "<b>&\u{2028}ü\n\"", "number": number.to_string() } }),
            "nodes" => json!({ "spec": { "unschedulable": number % 2 == 1 } }),
            "events" => json!({
                "involvedObject": { "kind": "Pod", "namespace": namespace, "name": "p" },
                "reason": if number % 2 == 1 { "Tested" } else { "Seen" }, "message": "m", "type": "Normal",
            }),
            "endpoints" => json!({ "subsets": [{ "addresses": [{ "ip": "10.0.0.1" }], "ports": [{ "port": 80 }] }] }),
            "deployments" => json!({ "spec": {
                "selector": { "matchLabels": { "app": name } },
                "template": {
                    "metadata": { "labels": { "app": name } },
                    "spec": { "containers": [{ "name": "main", "image": "registry.k8s.io/pause:3.10" }] },
                },
            } }),
            "leases" => json!({ "spec": { "holderIdentity": "nobody", "leaseDurationSeconds": 15 } }),
            "widgets" => {
                json!({ "spec": { "z": 1.0, "color": if number % 2 == 1 { "red" } else { "blue" }, "a": "<b>&" } })
            }
            "secrets" => json!({ "stringData": { "key": "value" } }),
            _ => json!({}),
        };
        let (group, version) = self.prefix.rsplit_once('/').expect("a group and a version");
        let group = group.strip_prefix("/apis/").map(|group| format!("{group}/")).unwrap_or_default();
        object["apiVersion"] = json!(format!("{group}{version}"));
        object["kind"] = json!(match self.plural {
            "configmaps" => "ConfigMap".to_owned(),
            "endpoints" => "Endpoints".to_owned(),
            plural => format!("{}{}", plural[..1].to_uppercase(), &plural[1..plural.len() - 1]),
        });
        object["metadata"] = json!({ "name": name, "labels": labels, "annotations": { "text": "<ü&>" } });
        object
    }
}

/// Both servers, and the versions that requests use.
pub(super) struct World {
    pub(super) api: ApiServer,
    pub(super) kubefan: Kubefan,
    /// The version before the changes to the unchanging objects.
    pub(super) then: u64,
    /// The version after these changes.
    pub(super) now: u64,
    /// The apiserver's client, as the administrator.
    pub(super) direct: Client,
    /// kubefan's clients, over HTTP/1.1 and HTTP/2.
    pub(super) clients: [Client; 2],
    stopped: AtomicBool,
}

impl World {
    /// Starts both servers and writes the objects and their history.
    pub(super) async fn start() -> World {
        let api = ApiServer::start(Options::default()).await;
        create_widgets(&api).await;
        for namespace in NAMESPACES.iter().chain(&["busy"]) {
            api.create("/api/v1/namespaces", &json!({ "metadata": { "name": namespace } })).await;
        }
        let all: Vec<_> = RESOURCES
            .iter()
            .flat_map(|resource| resource.namespaces().iter().map(move |namespace| (*resource, *namespace)))
            .collect();
        join_all(all.iter().map(|(resource, namespace)| create(&api, resource, namespace))).await;
        let names = RESOURCES.map(|resource| {
            let group = resource.prefix.strip_prefix("/apis/").map(|group| group.trim_end_matches("/v1"));
            group.map_or(resource.plural.to_owned(), |group| format!("{}.{group}", resource.plural))
        });
        let cached: Vec<&str> =
            names.iter().zip(RESOURCES).filter(|(_, of)| of.cached).map(|(name, _)| &**name).collect();
        let kubefan = Kubefan::start(&api, &["--on-demand=false", &format!("--resource={}", cached.join(","))]).await;
        let then = version_of(&api.get_json("/api/v1/namespaces/still-a/pods").await);
        join_all(all.iter().map(|(resource, namespace)| change(&api, resource, namespace))).await;
        let now = version_of(&api.get_json("/api/v1/namespaces/still-a/pods").await);
        let client = |http2: bool| {
            let builder = Client::builder().no_proxy().default_headers(bearer(&api.admin_token()));
            if http2 { builder.http2_prior_knowledge() } else { builder.http1_only() }.build().unwrap()
        };
        let direct = api.client();
        let clients = [client(false), client(true)];
        let world = World { api, kubefan, then, now, direct, clients, stopped: false.into() };
        for resource in RESOURCES.iter().filter(|resource| resource.cached && !resource.is_custom()) {
            world.wait_for_protobuf(resource).await;
        }
        world
    }

    /// Waits for the protobuf cache, which starts with the first request for it.
    async fn wait_for_protobuf(&self, resource: &Resource) {
        let path = format!("{}?resourceVersion=0", resource.collection(""));
        let request = Request::get(path, AnsweredBy::Cache).accepting(protobuf_json::CONTENT_TYPE);
        let asked = || async { self.ask_kubefan(&request, 0).await.is_cached().then_some(()) };
        wait::until(&format!("{} as protobuf", resource.plural), wait::SOON, asked).await;
    }

    /// The URL of a path at kubefan.
    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.kubefan.grpc_addr)
    }

    /// Reads each resource at version `now` while there are no writes. The last change of most
    /// resources is older than that version, and no server may treat it as a future version.
    pub(super) async fn assert_fresh_without_writes(&self) {
        let reads = RESOURCES.iter().filter(|resource| resource.cached).map(|resource| async {
            let path = format!("{}?resourceVersion={}", resource.collection(""), self.now);
            for (client, url) in
                [(&self.direct, format!("{}{path}", self.api.url())), (&self.clients[0], self.url(&path))]
            {
                let response = client.get(&url).send().await.unwrap();
                let status = response.status();
                assert_eq!(status, StatusCode::OK, "{url}: {}", response.text().await.unwrap_or_default());
            }
        });
        join_all(reads).await;
    }

    /// Changes the other objects until [`Self::stop`]. Returns the number of writes.
    pub(super) async fn write(&self) -> usize {
        let mut writes = 0;
        while !self.stopped.load(Ordering::Relaxed) {
            let round = writes / RESOURCES.len();
            let resource = RESOURCES[writes % RESOURCES.len()];
            let name = format!("busy-{}", round % 3);
            let path = resource.collection("busy");
            // No controller runs here, so a deleted namespace would remain forever.
            let is_namespace = resource.plural == "namespaces";
            if round % 12 < 3 && (!is_namespace || round < 3) {
                self.api.create(&path, &resource.object("busy", &name, writes)).await;
            } else if round % 12 >= 9 && !is_namespace {
                self.api.delete(&format!("{path}/{name}")).await;
            } else {
                let stage = ["on", "off"][writes % 2];
                let patch = json!({ "metadata": { "labels": { "stage": stage, "write": writes.to_string() } } });
                self.api.patch(&format!("{path}/{name}"), &patch).await;
            }
            writes += 1;
            tokio::time::sleep(WRITE_INTERVAL).await;
        }
        writes
    }

    /// Stops [`Self::write`].
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}

async fn create(api: &ApiServer, resource: &Resource, namespace: &str) {
    for number in 0..OBJECTS {
        let name = format!("{STILL}-{number}");
        let made = api.create(&resource.collection(namespace), &resource.object(namespace, &name, number)).await;
        assert_eq!(made["metadata"]["name"], json!(name));
    }
}

/// The history that watches replay: objects enter and leave selectors, change, and are deleted and
/// recreated.
async fn change(api: &ApiServer, resource: &Resource, namespace: &str) {
    let path = |number: usize| format!("{}/{STILL}-{number}", resource.collection(namespace));
    let stage = |stage: Value| json!({ "metadata": { "labels": { "stage": stage } } });
    api.patch(&path(0), &stage(json!("off"))).await;
    api.patch(&path(2), &stage(json!("on"))).await;
    api.patch(&path(1), &stage(Value::Null)).await;
    api.patch(&path(0), &json!({ "metadata": { "annotations": { "more": "true" } } })).await;
    api.patch(&path(0), &stage(json!("on"))).await;
    if resource.plural == "namespaces" {
        return;
    }
    api.delete(&path(3)).await;
    api.delete(&path(4)).await;
    api.create(&resource.collection(namespace), &resource.object(namespace, &format!("{STILL}-4"), 0)).await;
}

async fn create_widgets(api: &ApiServer) {
    let spec = json!({
        "type": "object", "x-kubernetes-preserve-unknown-fields": true, "properties": { "color": { "type": "string" } },
    });
    let definition = json!({
        "metadata": { "name": format!("widgets.{GROUP}") },
        "spec": {
            "group": GROUP, "scope": "Namespaced",
            "names": { "plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "BoxOfWidgets" },
            "versions": [{
                "name": "v1", "served": true, "storage": true, "selectableFields": [{ "jsonPath": ".spec.color" }],
                "schema": { "openAPIV3Schema": { "type": "object", "properties": { "spec": spec } } },
            }],
        },
    });
    api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", &definition).await;
    let path = format!("/apis/{GROUP}/v1/namespaces/default/widgets");
    let probe = json!({ "apiVersion": format!("{GROUP}/v1"), "kind": "Widget", "metadata": { "name": "probe" } });
    wait::until("widgets to be written", wait::SOON, || async {
        let sent = api.request(reqwest::Method::POST, &path, Some(("application/json", &probe))).await;
        sent.0.is_success().then_some(())
    })
    .await;
    // Objects written right after the definition have no managedFields, which `compare` uses to
    // recognize custom objects.
    api.delete(&format!("{path}/probe")).await;
}
