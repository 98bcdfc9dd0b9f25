//! The objects that the programs read. Each has a label `change` with the number of its last
//! change, so that a program's view shows how far it is.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::View;
use crate::harness::apiserver::ApiServer;

const NAMESPACES: usize = 3;
/// Per namespace.
const PODS: usize = 14;
/// Per namespace, each with an EndpointSlice. The pods belong to them in turn.
const SERVICES: usize = 2;
const NODES: usize = 4;

/// Pods, Services, EndpointSlices and Ingresses in a few namespaces, and Nodes.
pub(super) struct World {
    pub(super) api: ApiServer,
    changes: usize,
    /// The number of the last change, by kind, namespace and name.
    last: BTreeMap<(&'static str, String, String), usize>,
}

impl World {
    pub(super) async fn create(api: ApiServer) -> World {
        let mut world = World { api, changes: 0, last: BTreeMap::new() };
        for node in 0..NODES {
            let addresses = json!([{ "type": "InternalIP", "address": format!("10.9.0.{node}") }]);
            world.create_object("node", "", &node_name(node), json!({ "status": { "addresses": addresses } })).await;
        }
        for namespace in (0..NAMESPACES).map(|at| format!("shop-{at}")) {
            world.api.create("/api/v1/namespaces", &json!({ "metadata": { "name": namespace } })).await;
            for app in (0..SERVICES).map(app_name) {
                let ports = json!([{ "name": "http", "port": 80 }]);
                let service = json!({ "spec": { "selector": { "app": app }, "ports": ports } });
                world.create_object("service", &namespace, &app, service).await;
                let slice = json!({ "addressType": "IPv4", "ports": ports, "endpoints": endpoints(0) });
                world.create_object("endpointslice", &namespace, &app, slice).await;
            }
            let backend = json!({ "service": { "name": app_name(0), "port": { "number": 80 } } });
            let ingress = json!({ "spec": rules(0, &backend) });
            world.create_object("ingress", &namespace, "web", ingress).await;
            for pod in 0..PODS {
                world.create_pod(&namespace, pod).await;
            }
        }
        world
    }

    /// Changes this many objects, one after the other: labels and addresses of pods, pods under the
    /// same name as before, and the other kinds.
    pub(super) async fn change(&mut self, changes: usize) {
        for _ in 0..changes {
            let at = self.changes;
            let namespace = format!("shop-{}", at / 10 % NAMESPACES);
            let pod = at / 2 % PODS;
            let app = app_name(at / 20 % SERVICES);
            match at % 10 {
                0..5 => self.patch("pod", &namespace, &pod_name(pod), json!({})).await,
                5 => {
                    let path = format!("{}/{}", collection("pod", &namespace), pod_name(pod));
                    let status = running(format!("10.8.{pod}.{}", at % 250));
                    self.api.patch(&format!("{path}/status"), &json!({ "status": status })).await;
                    self.patch("pod", &namespace, &pod_name(pod), json!({})).await;
                }
                6 => {
                    self.api.delete(&format!("{}/{}", collection("pod", &namespace), pod_name(pod))).await;
                    self.create_pod(&namespace, pod).await;
                }
                7 => self.patch("service", &namespace, &app, json!({})).await,
                8 => self.patch("endpointslice", &namespace, &app, json!({ "endpoints": endpoints(at) })).await,
                _ if at % 20 == 9 => self.patch("node", "", &node_name(at / 20 % NODES), json!({})).await,
                _ => {
                    let backend = json!({ "service": { "name": app, "port": { "number": 80 } } });
                    self.patch("ingress", &namespace, "web", json!({ "spec": rules(at, &backend) })).await;
                }
            }
        }
    }

    /// The last change of each object of these kinds: `kind namespace name change`.
    pub(super) fn marks(&self, kinds: &[&str]) -> View {
        let ours = self.last.iter().filter(|((kind, ..), _)| kinds.contains(kind));
        ours.map(|((kind, namespace, name), change)| format!("{kind} {namespace} {name} {change}")).collect()
    }

    async fn create_pod(&mut self, namespace: &str, pod: usize) {
        let containers = json!([{ "name": "main", "image": "pause", "ports": [{ "containerPort": 8080 }] }]);
        let spec = json!({ "nodeName": node_name(pod % NODES), "containers": containers });
        let object = json!({ "metadata": { "labels": { "app": app_name(pod % SERVICES) } }, "spec": spec });
        self.create_object("pod", namespace, &pod_name(pod), object).await;
        let path = format!("{}/{}/status", collection("pod", namespace), pod_name(pod));
        let status = running(format!("10.7.{pod}.{}", self.changes % 250));
        self.api.patch(&path, &json!({ "status": status })).await;
    }

    async fn create_object(&mut self, kind: &'static str, namespace: &str, name: &str, mut object: Value) {
        object["metadata"]["name"] = json!(name);
        object["metadata"]["labels"]["change"] = json!(self.changed(kind, namespace, name));
        self.api.create(&collection(kind, namespace), &object).await;
    }

    async fn patch(&mut self, kind: &'static str, namespace: &str, name: &str, mut patch: Value) {
        patch["metadata"]["labels"]["change"] = json!(self.changed(kind, namespace, name));
        self.api.patch(&format!("{}/{name}", collection(kind, namespace)), &patch).await;
    }

    /// Counts a change of an object. Returns its number as the value of a label.
    fn changed(&mut self, kind: &'static str, namespace: &str, name: &str) -> String {
        self.changes += 1;
        self.last.insert((kind, namespace.to_owned(), name.to_owned()), self.changes);
        self.changes.to_string()
    }
}

fn collection(kind: &str, namespace: &str) -> String {
    match kind {
        "node" => "/api/v1/nodes".to_owned(),
        "pod" | "service" => format!("/api/v1/namespaces/{namespace}/{kind}s"),
        "ingress" => format!("/apis/networking.k8s.io/v1/namespaces/{namespace}/ingresses"),
        _ => format!("/apis/discovery.k8s.io/v1/namespaces/{namespace}/{kind}s"),
    }
}

fn pod_name(pod: usize) -> String {
    format!("pod-{pod}")
}

fn node_name(node: usize) -> String {
    format!("node-{node}")
}

fn app_name(app: usize) -> String {
    format!("web-{app}")
}

fn running(address: String) -> Value {
    let ready = json!([{ "type": "Ready", "status": "True" }]);
    json!({ "phase": "Running", "podIP": address, "podIPs": [{ "ip": address }], "conditions": ready })
}

/// One ready endpoint, and one that is ready at every other change.
fn endpoints(change: usize) -> Value {
    let endpoint = |address: String, ready: bool| json!({ "addresses": [address], "conditions": { "ready": ready } });
    json!([endpoint("10.6.0.1".to_owned(), true), endpoint(format!("10.6.1.{}", change % 250), change % 20 == 8)])
}

fn rules(change: usize, backend: &Value) -> Value {
    let path = json!({ "path": "/", "pathType": "Prefix", "backend": backend });
    json!({ "rules": [{ "host": format!("web-{change}.example.com"), "http": { "paths": [path] } }] })
}
