//! Tests of discovery against a server that answers from a map of paths.

use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tower::{BoxError, service_fn, util::BoxCloneSyncService};

use super::*;
use crate::client::UpstreamOptions;

/// Answers by path from a map that the test can change, and counts requests for `/apis`.
#[derive(Clone, Default)]
struct Server {
    documents: Arc<Mutex<std::collections::BTreeMap<String, Value>>>,
    requests: Arc<AtomicUsize>,
}

impl Server {
    fn set(&self, path: &str, document: Value) {
        self.documents.lock().unwrap().insert(path.to_owned(), document);
    }

    fn upstream(&self) -> Upstream {
        let server = self.clone();
        let service = service_fn(move |request: http::Request<Bytes>| {
            let path = request.uri().path().to_owned();
            server.requests.fetch_add(usize::from(path == "/apis"), Ordering::Relaxed);
            let document = server.documents.lock().unwrap().get(&path).cloned();
            let code = match &document {
                None => 404,
                Some(Value::Number(code)) => code.as_u64().unwrap() as u16,
                Some(_) => 200,
            };
            let body =
                Full::new(Bytes::from(document.unwrap_or_default().to_string())).map_err(BoxError::from).boxed_unsync();
            async move { Ok::<_, BoxError>(http::Response::builder().status(code).body(body).unwrap()) }
        });
        Upstream::from_service(
            BoxCloneSyncService::new(service),
            &http::Uri::from_static("http://sim"),
            UpstreamOptions::default(),
        )
    }

    fn discovery(&self) -> Discovery {
        Discovery::new(self.upstream(), DiscoveryOptions::default())
    }
}

fn aggregated(group: &str, resources: &[&str]) -> Value {
    let resources: Vec<Value> = resources
        .iter()
        .map(|name| json!({"resource": name, "responseKind": {"kind": name}, "scope": "Namespaced", "verbs": ["list", "watch"]}))
        .collect();
    json!({"kind": "APIGroupDiscoveryList", "items": [{"metadata": {"name": group}, "versions": [{"version": "v1", "resources": resources}]}]})
}

fn server() -> Server {
    let server = Server::default();
    server.set("/api", aggregated("", &["pods"]));
    server.set("/apis", aggregated("example.com", &[]));
    server
}

#[tokio::test(start_paused = true)]
async fn a_new_resource_is_found_and_unknown_names_do_not_flood_the_apiserver() {
    let server = server();
    let discovery = server.discovery();
    assert!(discovery.resolve("pods").await.is_ok());
    for _ in 0..100 {
        let error = discovery.resolve("widgets").await.unwrap_err();
        assert_eq!(error.to_string(), "the apiserver has no resource \"widgets\"; `kubectl api-resources` lists all");
    }
    assert_eq!(server.requests.load(Ordering::Relaxed), 1);
    server.set("/apis", aggregated("example.com", &["widgets"]));
    tokio::time::advance(Duration::from_secs(2)).await;
    assert_eq!(discovery.resolve("widgets").await.unwrap().gvr.group, "example.com");
}

#[tokio::test(start_paused = true)]
async fn a_deleted_resource_stays_known_until_it_is_reported_missing() {
    let server = server();
    let discovery = server.discovery();
    assert!(discovery.resolve("pods").await.is_ok());
    server.set("/api", aggregated("", &[]));
    tokio::time::advance(Duration::from_secs(5)).await;
    assert!(discovery.resolve("pods").await.is_ok());
    let found = discovery.find_since(&GroupVersionResource::new("", "v1", "pods"), Instant::now()).await;
    assert!(matches!(found, Err(DiscoveryError::UnknownResource { .. })), "{found:?}");
    assert!(matches!(discovery.resolve("pods").await, Err(DiscoveryError::UnknownResource { .. })));
}

#[tokio::test(start_paused = true)]
async fn known_names_survive_an_outage_and_unknown_names_report_it() {
    let server = server();
    let discovery = server.discovery();
    assert!(discovery.resolve("pods").await.is_ok());
    server.set("/api", json!(503));
    tokio::time::advance(Duration::from_secs(3600)).await;
    assert!(discovery.resolve("pods").await.is_ok());
    assert!(matches!(
        discovery.resolve("nodes").await,
        Err(DiscoveryError::Upstream(UpstreamError::Server { code: 503, .. }))
    ));
}

#[tokio::test]
async fn legacy_documents_are_understood_and_one_unavailable_group_hides_no_other() {
    let server = Server::default();
    let resources = |name: &str| json!({"resources": [{"name": name, "kind": name, "namespaced": true, "verbs": ["list", "watch"]}]});
    server.set("/api", json!({"kind": "APIVersions", "versions": ["v1"]}));
    server.set("/api/v1", resources("pods"));
    server.set(
        "/apis",
        json!({"kind": "APIGroupList", "groups": [
            {"name": "metrics.k8s.io", "versions": [{"groupVersion": "metrics.k8s.io/v1beta1", "version": "v1beta1"}]},
            {"name": "example.com", "versions": [{"version": "v1"}, {"version": "v2"}], "preferredVersion": {"version": "v2"}},
        ]}),
    );
    server.set("/apis/metrics.k8s.io/v1beta1", json!(503));
    server.set("/apis/example.com/v1", resources("widgets"));
    server.set("/apis/example.com/v2", resources("widgets"));
    let discovery = server.discovery();
    assert_eq!(discovery.resolve("widgets").await.unwrap().gvr.version, "v2");
    assert!(discovery.resolve("pods").await.is_ok());
    let error = discovery.resolve("nodes.metrics.k8s.io").await.unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("the resource \"nodes.metrics.k8s.io\" is unknown: API group metrics.k8s.io/v1beta1"),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_changed_schema_changes_the_fingerprint_and_a_forbidden_document_is_none() {
    let server = server();
    let discovery = server.discovery();
    let of = |group: &str| GroupVersionResource::new(group, "v1", "x");
    assert_eq!(discovery.schema_fingerprint(&of("")).await.unwrap(), SchemaFingerprint::default());
    // Until the documents are read again.
    let later = || tokio::time::sleep(super::SCHEMA_DOCUMENTS_AGE_MAX);
    later().await;
    server.set("/version", json!({"gitVersion": "v1.35.4"}));
    let schemas = |hash: &str| json!({"paths": {"apis/example.com/v1": {"serverRelativeURL": format!("/openapi/v3/apis/example.com/v1?hash={hash}")}}});
    server.set("/openapi/v3", schemas("A1"));
    let first = discovery.schema_fingerprint(&of("example.com")).await.unwrap();
    assert_eq!((first.server_version.as_deref(), first.schema_hash.as_deref()), (Some("v1.35.4"), Some("A1")));
    server.set("/openapi/v3", schemas("B2"));
    assert_eq!(discovery.schema_fingerprint(&of("example.com")).await.unwrap(), first, "it is shared for a while");
    later().await;
    assert_ne!(discovery.schema_fingerprint(&of("example.com")).await.unwrap(), first);
    server.set("/openapi/v3", json!(500));
    later().await;
    assert!(discovery.schema_fingerprint(&of("example.com")).await.is_err());
}

#[tokio::test]
async fn a_schema_reveals_the_list_kind_and_the_selectable_fields() {
    let of = |kind: &str| json!([{ "group": "example.com", "version": "v1", "kind": kind }]);
    let items =
        |name: &str| json!({ "items": { "items": { "$ref": format!("#/components/schemas/{name}") } }, "kind": {} });
    let schemas = json!({ "components": { "schemas": {
        "com.example.v1.Widget": {
            "x-kubernetes-group-version-kind": of("Widget"), "x-kubernetes-selectable-fields": [{ "fieldPath": ".spec.color" }],
            "properties": { "spec": { "properties": { "items": { "items": {} } } } },
        },
        "com.example.v1.BoxOfWidgets": {
            "x-kubernetes-group-version-kind": of("BoxOfWidgets"), "properties": items("com.example.v1.Widget"),
        },
        "com.example.v1.GadgetList": {
            "x-kubernetes-group-version-kind": of("GadgetList"), "properties": items("com.example.v1.Gadget"),
        },
        "com.example.v1.Gadget": { "x-kubernetes-group-version-kind": of("Gadget"), "properties": { "items": { "type": "string" } } },
        "io.k8s.ListMeta": { "properties": { "remainingItemCount": {} } },
    } } });
    let server = server();
    server.set("/openapi/v3/apis/example.com/v1", schemas);
    let discovery = server.discovery();
    let custom = async |group: &str, kind: &str| {
        discovery.custom_resource_schema(&GroupVersionResource::new(group, "v1", "x"), kind).await.unwrap()
    };
    let widget = CustomResourceSchema {
        selectable_fields: vec![".spec.color".to_owned()],
        list_kind: Some("BoxOfWidgets".to_owned()),
    };
    assert_eq!(custom("example.com", "Widget").await, widget);
    assert_eq!(custom("example.com", "Gadget").await.list_kind.as_deref(), Some("GadgetList"));
    assert_eq!(custom("example.com", "Gone").await, CustomResourceSchema::default());
    assert_eq!(custom("other.com", "Widget").await, CustomResourceSchema::default(), "no schemas");
    assert_eq!(custom("apps", "Deployment").await, CustomResourceSchema::default(), "a built-in type");
}
