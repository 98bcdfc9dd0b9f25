//! Custom resources and discovery.

use serde_json::{Value, json};

use super::api::{Api, names, unique, version};
use crate::harness::{rest::CRDS, wait};

/// A custom resource in its own group.
struct Widgets {
    group: String,
    definition: Value,
}

impl Widgets {
    fn new() -> Self {
        let group = format!("{}.example.com", unique("g"));
        let spec = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true,
            "properties": {"color": {"type": "string"}}});
        let definition = json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("widgets.{group}")},
            "spec": {
                "group": group, "scope": "Namespaced",
                "names": {"plural": "widgets", "singular": "widget", "kind": "Widget", "shortNames": ["wd"]},
                "versions": [{
                    "name": "v1", "served": true, "storage": true, "selectableFields": [{"jsonPath": ".spec.color"}],
                    "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}},
                }],
            },
        });
        Self { group, definition }
    }

    fn path(&self) -> String {
        format!("/apis/{}/v1/namespaces/default/widgets", self.group)
    }

    /// Creates the definition and waits until it is served. A real server takes a moment.
    async fn define(&self, api: &Api) {
        api.post(CRDS, &self.definition).await.ok();
        wait::until("the resource to be served", wait::SOON, || async {
            (api.get(&self.path()).await.code == 200).then_some(())
        })
        .await;
    }

    async fn remove(&self, api: &Api) {
        api.delete(&format!("{CRDS}/widgets.{}", self.group)).await.ok();
    }

    async fn create(&self, api: &Api, name: &str, color: &str) -> u64 {
        let object = json!({"apiVersion": format!("{}/v1", self.group), "kind": "Widget", "metadata": {"name": name},
            "spec": {"z": 1, "color": color, "a": "<b>&"}});
        // A real server may refuse writes for a moment after the definition.
        wait::until("the resource to accept writes", wait::SOON, || async {
            let answer = api.post(&self.path(), &object).await;
            (answer.code == 201).then(|| version(&answer.json()))
        })
        .await
    }
}

pub(crate) async fn a_custom_object_has_sorted_keys(api: &Api) {
    let widgets = Widgets::new();
    widgets.define(api).await;
    widgets.create(api, "w0", "red").await;
    let path = widgets.path();
    let object = api.get(&format!("{path}/w0")).await.text;
    let head = format!(r#"{{"apiVersion":"{}/v1","kind":"Widget","metadata":{{"creationTimestamp":""#, widgets.group);
    assert!(object.starts_with(&head), "{object}");
    assert!(object.ends_with("\"spec\":{\"a\":\"\\u003cb\\u003e\\u0026\",\"color\":\"red\",\"z\":1}}\n"), "{object}");
    let object = object.trim_end();
    let list = api.get(&path).await;
    let version = version(&list.json());
    let head = format!(r#"{{"apiVersion":"{}/v1","items":["#, widgets.group);
    let tail = format!(r#"],"kind":"WidgetList","metadata":{{"continue":"","resourceVersion":"{version}"}}}}"#);
    assert_eq!(list.text, format!("{head}{object}{tail}\n"));
    let mut events = api.watch(&format!("{path}?allowWatchBookmarks=true")).await;
    assert_eq!(events.next().await.unwrap().line, format!("{{\"type\":\"ADDED\",\"object\":{object}}}\n"));
    let end = events.next().await.unwrap();
    let metadata =
        format!(r#"{{"annotations":{{"k8s.io/initial-events-end":"true"}},"resourceVersion":"{}"}}"#, end.version());
    assert!(end.line.ends_with(&format!("\"kind\":\"Widget\",\"metadata\":{metadata}}}}}\n")), "{}", end.line);
    widgets.create(api, "w1", "red").await;
    let page = api.get(&format!("{path}?limit=1")).await.text;
    let (_, metadata) = page.rsplit_once(r#""metadata":"#).unwrap();
    assert!(metadata.starts_with(r#"{"continue":"eyJ"#) && metadata.contains(r#","remainingItemCount":1,"resource"#));
    widgets.remove(api).await;
}

pub(crate) async fn selectable_fields_of_a_custom_resource_select(api: &Api) {
    let widgets = Widgets::new();
    widgets.define(api).await;
    for (name, color) in [("a", "red"), ("b", "blue"), ("c", "red")] {
        widgets.create(api, name, color).await;
    }
    let path = widgets.path();
    let list = api.get(&format!("{path}?fieldSelector=spec.color%3Dred")).await.ok();
    assert_eq!(names(&list), ["a", "c"]);
    let message = "field label not supported: spec.foo";
    api.get(&format!("{path}?fieldSelector=spec.foo%3D1")).await.fails(400, "BadRequest", message);
    let mut events =
        api.watch(&format!("{path}?fieldSelector=spec.color%3Dblue&resourceVersion={}", version(&list))).await;
    api.patch(&format!("{path}/a"), &json!({"spec": {"color": "blue"}})).await.ok();
    api.patch(&format!("{path}/b"), &json!({"spec": {"color": "green"}})).await.ok();
    let received: Vec<String> = events.take(2).await.iter().map(super::api::Event::short).collect();
    assert_eq!(received, ["ADDED a", "DELETED b"]);
    widgets.remove(api).await;
}

pub(crate) async fn a_version_older_than_the_resource_is_expired(api: &Api) {
    let widgets = Widgets::new();
    widgets.define(api).await;
    let events = api.watch(&format!("{}?resourceVersion=1", widgets.path())).await;
    assert_eq!(events.code, 200, "never an HTTP 410");
    let events = events.rest().await;
    assert_eq!((events.len(), &*events[0].kind), (1, "ERROR"));
    let status = &events[0].object;
    let message = status["message"].as_str().unwrap();
    let oldest = message.strip_prefix("too old resource version: 1 (").and_then(|rest| rest.strip_suffix(')'));
    assert!(oldest.is_some_and(|oldest| oldest.parse::<u64>().is_ok()), "{message}");
    let expected = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
        "reason": "Expired", "code": 410});
    assert_eq!(*status, expected);
    widgets.remove(api).await;
}

pub(crate) async fn removing_a_resource_deletes_its_objects_and_ends_its_watches(api: &Api) {
    let widgets = Widgets::new();
    widgets.define(api).await;
    for name in ["a", "b"] {
        widgets.create(api, name, "red").await;
    }
    let path = widgets.path();
    let list = version(&api.get(&path).await.ok());
    let events = api.watch(&format!("{path}?resourceVersion={list}")).await;
    widgets.remove(api).await;
    let events = events.rest().await;
    let received: Vec<String> = events.iter().map(super::api::Event::short).collect();
    assert_eq!(received, ["DELETED a", "DELETED b"]);
    assert!(list < events[0].version() && events[0].version() < events[1].version());
    let gone = api.get(&path).await;
    assert_eq!((gone.code, &*gone.text), (404, "404 page not found\n"));
    assert_eq!(api.get(&format!("{path}?watch=1")).await.code, 404);
    widgets.define(api).await;
    assert!(names(&api.get(&path).await.ok()).is_empty());
    let events = api.watch(&format!("{path}?resourceVersion={list}")).await.rest().await;
    assert_eq!(events[0].object["reason"], "Expired", "a version from before the resource was recreated is too old");
    widgets.create(api, "c", "red").await;
    widgets.remove(api).await;
}

/// A list that selects nothing returns the cluster's version and advances the watch cache to it. A
/// later bookmark proves that the watch reached that version.
pub(crate) async fn a_bookmark_proves_that_nothing_was_missed(api: &Api) {
    let widgets = Widgets::new();
    widgets.define(api).await;
    let start = widgets.create(api, "a", "red").await;
    // A write to another resource advances the cluster's version.
    api.namespace().await;
    let unused = widgets.path().replace("/default/", "/no-such/");
    let now = version(&api.get(&format!("{unused}?fieldSelector=metadata.name%3Dno-such")).await.ok());
    assert!(now > start);
    let query = format!("resourceVersion={start}&allowWatchBookmarks=true&timeoutSeconds=10");
    let events = api.watch(&format!("{}?{query}", widgets.path())).await.rest().await;
    assert!((1..=2).contains(&events.len()), "{events:?}");
    for event in &events {
        assert!(event.kind == "BOOKMARK" && event.version() >= now, "{event:?} is below {now}");
    }
    widgets.remove(api).await;
}

pub(crate) async fn discovery_lists_the_served_resources(api: &Api) {
    let widgets = Widgets::new();
    widgets.define(api).await;
    let media_type = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
    let find = |list: &Value, field: &str, name: &str| -> Value {
        let found =
            list.as_array().unwrap().iter().find(|entry| entry.pointer(field).is_some_and(|value| value == name));
        found.unwrap_or_else(|| panic!("no {name}")).clone()
    };
    let core = api.get_as("/api", media_type).await;
    assert_eq!(core.content_type, media_type);
    let pods = find(&core.ok()["items"][0]["versions"][0]["resources"], "/resource", "pods");
    assert_eq!((&pods["scope"], &pods["shortNames"]), (&json!("Namespaced"), &json!(["po"])));
    assert_eq!(pods["responseKind"]["kind"], "Pod");
    // A real server fills discovery a moment after it serves the resource.
    let groups = wait::until("discovery to list the group", wait::SOON, || async {
        let groups = api.get_as("/apis", media_type).await.ok();
        let is_listed = groups["items"].as_array()?.iter().any(|group| group["metadata"]["name"] == widgets.group);
        let legacy = api.get(&format!("/apis/{}/v1", widgets.group)).await;
        (is_listed && legacy.code == 200).then_some(groups)
    })
    .await;
    let group = find(&groups["items"], "/metadata/name", &widgets.group);
    let expected = json!({"resource": "widgets", "scope": "Namespaced", "singularResource": "widget", "shortNames": ["wd"],
        "responseKind": {"group": widgets.group, "version": "v1", "kind": "Widget"},
        "verbs": ["delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"]});
    assert_eq!(group["versions"][0]["resources"], json!([expected]));
    let legacy = api.get(&format!("/apis/{}/v1", widgets.group)).await.ok();
    assert_eq!(legacy["groupVersion"], format!("{}/v1", widgets.group));
    let entry = find(&legacy["resources"], "/name", "widgets");
    assert_eq!((&entry["kind"], &entry["namespaced"]), (&json!("Widget"), &json!(true)));
    find(&api.get("/apis").await.ok()["groups"], "/name", "apps");
    find(&api.get("/api/v1").await.ok()["resources"], "/name", "nodes");
    let openapi = api.get("/openapi/v3").await.ok();
    let url = openapi["paths"]["api/v1"]["serverRelativeURL"].as_str().unwrap().to_owned();
    assert!(url.starts_with("/openapi/v3/api/v1?hash="), "{url}");
    assert!(api.get("/version").await.ok()["gitVersion"].as_str().unwrap().starts_with("v1."));
    wait::until("/readyz to be ok", wait::SOON, || async { (api.get("/readyz").await.text == "ok").then_some(()) })
        .await;
    widgets.remove(api).await;
}
