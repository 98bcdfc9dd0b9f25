//! A custom resource that is deleted and made again with another kind, list kind, scope or
//! selectable field is soon served as upstream serves it, and not by its old shape.

use std::time::Duration;

use futures::future::join_all;
use http_body_util::BodyExt;
use kubefan_sim::apiserver::{FaultRule, SelectableField, SimApiserver, SimResource, Verb};
use kubefan_upstream::client::Verb as UpstreamVerb;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tonic::Code;
use tonic_types::StatusExt;

use crate::{
    harness::{
        apiserver::ApiServer,
        network::answer,
        rest::CRDS,
        rig::{Rig, Setup, on_demand},
        servers::Servers,
        tests, wait,
    },
    upstream_faults::status,
};

tests! {
    paused: a_resource_that_is_made_again_is_served_by_its_new_shape,
        discovery_that_follows_later_is_asked_again, a_stream_of_the_old_shape_ends_with_the_reason,
        a_kubefan_behind_another_one_follows_too, a_cache_that_starts_knows_the_new_shape,
        resources_that_expire_together_share_the_look_at_discovery,
        a_resource_that_fails_for_long_asks_discovery_rarely;
    apiserver: a_definition_that_is_made_again_is_served_as_by_the_apiserver;
}

const NAME: &str = "widgets.example.com";
const PATHS: [&str; 4] = [
    "/apis/example.com/v1/widgets?resourceVersion=0",
    "/apis/example.com/v1/namespaces/default/widgets?resourceVersion=0",
    "/apis/example.com/v1/namespaces/default/widgets/a?resourceVersion=0",
    "/apis/example.com/v1/widgets?resourceVersion=0&fieldSelector=spec.color%3Dred",
];
/// The time in which the new shape is served. The interval of schema checks is longer.
const SOON: Duration = Duration::from_secs(15);

type Change = fn(&mut SimResource);

fn widgets() -> SimResource {
    let mut widgets = SimResource::custom("example.com", "v1", "widgets", "Widget");
    widgets.selectable_fields = vec![SelectableField::text("spec.color")];
    widgets
}

/// Each change of the shape.
fn other_shapes() -> [(&'static str, SimResource); 4] {
    let changes: [(&str, Change); 4] = [
        ("kind", |widgets| widgets.kind = "Gadget".to_owned()),
        ("list kind", |widgets| widgets.list_kind = "BoxOfWidgets".to_owned()),
        ("scope", |widgets| widgets.namespaced = false),
        ("field", |widgets| widgets.selectable_fields = vec![SelectableField::text("spec.size")]),
    ];
    changes.map(|(name, change)| {
        let mut other = widgets();
        change(&mut other);
        (name, other)
    })
}

fn create(sim: &SimApiserver, resource: &SimResource, name: &str) {
    let mut object = json!({ "metadata": { "name": name }, "spec": { "color": "red" } });
    if resource.namespaced {
        object["metadata"]["namespace"] = json!("default");
    }
    sim.create(&resource.gvr, object).unwrap();
}

/// Stops serving the widgets, and serves other ones. For `absent` they do not exist.
async fn make_again(rig: &Rig, other: &SimResource, absent: Duration) {
    rig.sim.remove_resource(&other.gvr);
    sleep(absent).await;
    rig.sim.add_resource(other.clone());
    create(&rig.sim, other, "a");
}

/// The answer of kubefan without its version; `None` for a failure.
async fn through(rig: &Rig, path: &str) -> Option<Value> {
    let response = rig.get(path).await;
    let is_success = response.status() == 200;
    let body = response.into_body().collect().await.unwrap().to_bytes();
    is_success.then(|| unversioned(&body))
}

async fn straight(rig: &Rig, path: &str) -> Option<Value> {
    let body = rig.network.upstream().get(UpstreamVerb::Get, path).await.ok()?;
    Some(unversioned(&body))
}

/// A cache may be at a lower version than the cluster.
fn unversioned(body: &[u8]) -> Value {
    let mut value: Value = serde_json::from_slice(body).unwrap();
    value["metadata"]["resourceVersion"] = Value::Null;
    value
}

async fn assert_same(rig: &Rig, what: &str) {
    for path in PATHS {
        assert_eq!(through(rig, path).await, straight(rig, path).await, "{what}: {path}");
    }
}

fn setup(resources: &[&str]) -> Setup {
    Setup { schema_check_interval: Duration::from_secs(30), ..Setup::of(resources) }.on_demand(on_demand())
}

/// A kubefan that serves the widgets.
async fn serving(resources: &[&str]) -> Rig {
    let setup = setup(resources);
    let sim = setup.sim();
    sim.add_resource(widgets());
    create(&sim, &widgets(), "a");
    let rig = Rig::synced(sim, setup).await;
    // Discovery was asked a while ago, and starts a cache if none is configured.
    assert_same(&rig, "at first").await;
    sleep(Duration::from_secs(100)).await;
    rig
}

async fn a_resource_that_is_made_again_is_served_by_its_new_shape() {
    for resources in [&[NAME][..], &[]] {
        // Upstream answers the next watch with 410, or with 404.
        for absent in [Duration::ZERO, Duration::from_secs(2)] {
            for (change, other) in other_shapes() {
                let rig = serving(resources).await;
                let _watch = rig.watch_all(NAME).await;
                make_again(&rig, &other, absent).await;
                sleep(SOON).await;
                assert_same(&rig, &format!("{change}, {resources:?}, absent for {absent:?}")).await;
            }
        }
    }
}

/// The documents of discovery and schemas do not change for a while.
async fn freeze_discovery(rig: &Rig, frozen: Duration) {
    let mut documents = Vec::new();
    for path in ["/api", "/apis", "/openapi/v3", "/openapi/v3/apis/example.com/v1"] {
        let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";
        let document = rig.network.upstream().get_accept(UpstreamVerb::Get, path, accept).await.unwrap().into_body();
        documents.push((path, String::from_utf8(document.to_vec()).unwrap()));
    }
    let until = Instant::now() + frozen;
    rig.network.rule(move |path| {
        let (_, document) = documents.iter().find(|(frozen, _)| *frozen == path)?;
        (Instant::now() < until).then(|| answer(200, vec![document.clone()], false))
    });
}

async fn discovery_that_follows_later_is_asked_again() {
    for resources in [&[NAME][..], &[]] {
        for (change, other) in other_shapes() {
            let rig = serving(resources).await;
            let _watch = rig.watch_all(NAME).await;
            freeze_discovery(&rig, Duration::from_secs(3)).await;
            make_again(&rig, &other, Duration::ZERO).await;
            sleep(SOON).await;
            assert_same(&rig, &format!("{change}, {resources:?}")).await;
        }
    }
}

async fn a_stream_of_the_old_shape_ends_with_the_reason() {
    let rig = serving(&[NAME]).await;
    let mut watch = rig.watch_all(NAME).await;
    let [(_, other), ..] = other_shapes();
    make_again(&rig, &other, Duration::ZERO).await;
    let ended = watch.end().await;
    assert_eq!(ended.code(), Code::OutOfRange, "{ended}");
    assert_eq!(ended.get_details_error_info().unwrap().reason, "HISTORY_REWRITTEN", "{ended}");
    assert!(ended.message().contains("is served with another schema"), "{ended}");
    rig.readyz_has("widgets.example.com synced").await;
    let watch = rig.watch_all(NAME).await;
    assert!(watch.state.values().all(|object| object.contains(r#""kind":"Gadget""#)), "{:?}", watch.state);
}

async fn a_kubefan_behind_another_one_follows_too() {
    for (change, other) in other_shapes() {
        let front = serving(&[NAME]).await;
        let (rig, _link) = Rig::behind(&front, setup(&[NAME]));
        rig.ready().await;
        assert_same(&rig, "at first").await;
        sleep(Duration::from_secs(100)).await;
        make_again(&front, &other, Duration::ZERO).await;
        sleep(2 * SOON).await;
        assert_same(&front, change).await;
        assert_same(&rig, &format!("{change}, behind")).await;
    }
}

async fn a_cache_that_starts_knows_the_new_shape() {
    for (change, other) in other_shapes() {
        for (before, after) in [(widgets(), other.clone()), (other.clone(), widgets())] {
            let setup = setup(&["pods"]);
            let sim = setup.sim();
            sim.add_resource(before);
            let rig = Rig::synced(sim, setup).await;
            sleep(Duration::from_secs(100)).await;
            make_again(&rig, &after, Duration::ZERO).await;
            assert_same(&rig, change).await;
        }
    }
}

fn discoveries(rig: &Rig) -> usize {
    rig.asked("/apis").len()
}

async fn resources_that_expire_together_share_the_look_at_discovery() {
    const RESOURCES: usize = 50;
    let names: Vec<String> = (0..RESOURCES).map(|number| format!("widgets{number}.example.com")).collect();
    let setup = setup(&names.iter().map(String::as_str).collect::<Vec<_>>());
    let sim = setup.sim();
    for number in 0..RESOURCES {
        sim.add_resource(SimResource::custom("example.com", "v1", &format!("widgets{number}"), "Widget"));
    }
    let rig = Rig::synced(sim, setup).await;
    sleep(Duration::from_secs(100)).await;
    let asked = || ["/apis", "/openapi/v3", "/openapi/v3/apis/example.com/v1"].map(|path| rig.asked(path).len());
    let before = asked();
    rig.sim.restart();
    sleep(Duration::from_secs(20)).await;
    rig.ready().await;
    let after = asked();
    assert!(after[0] - before[0] <= 5 && after[1] - before[1] <= 6, "{before:?}, then {after:?}");
    assert_eq!(after[2], before[2], "the schemas are those of before");
}

async fn a_resource_that_fails_for_long_asks_discovery_rarely() {
    for code in [404, 410] {
        let rig = serving(&[NAME]).await;
        let before = discoveries(&rig);
        let reason = if code == 404 { "NotFound" } else { "Expired" };
        for verb in [Verb::Watch, Verb::List] {
            let fault = status(code, reason, "no");
            rig.sim.set_fault(FaultRule { fault, verb: Some(verb), resource: Some(widgets().gvr), requests: 10_000 });
        }
        rig.sim.drop_connections();
        sleep(Duration::from_secs(600)).await;
        let asked = discoveries(&rig) - before;
        assert!((1..=90).contains(&asked), "{code}: {asked} in ten minutes");
    }
}

/// A definition of widgets: kind, list kind, scope and selectable field.
fn definition(group: &str, [kind, list_kind, scope, field]: [&str; 4]) -> Value {
    let spec =
        json!({ "type": "object", "properties": { "color": { "type": "string" }, "size": { "type": "string" } } });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("widgets.{group}") },
        "spec": {
            "group": group, "scope": scope,
            "names": { "plural": "widgets", "singular": kind.to_lowercase(), "kind": kind, "listKind": list_kind },
            "versions": [{
                "name": "v1", "served": true, "storage": true, "selectableFields": [{ "jsonPath": format!(".spec.{field}") }],
                "schema": { "openAPIV3Schema": { "type": "object", "properties": { "spec": spec } } },
            }],
        },
    })
}

async fn define(api: &ApiServer, group: &str, shape: [&str; 4]) {
    let [kind, _, scope, _] = shape;
    api.create(CRDS, &definition(group, shape)).await;
    let namespace = if scope == "Cluster" { "" } else { "/namespaces/default" };
    let collection = format!("/apis/{group}/v1{namespace}/widgets");
    let object = json!({ "apiVersion": format!("{group}/v1"), "kind": kind, "metadata": { "name": "a" },
        "spec": { "color": "red" } });
    wait::until("the resource to accept writes", wait::SOON, || async {
        api.request(Method::POST, &collection, Some(("application/json", &object))).await.0.is_success().then_some(())
    })
    .await;
}

async fn a_definition_that_is_made_again_is_served_as_by_the_apiserver() {
    const WIDGETS: [&str; 4] = ["Widget", "WidgetList", "Namespaced", "color"];
    let others = [
        ["Gadget", "GadgetList", "Namespaced", "color"],
        ["Widget", "BoxOfWidgets", "Namespaced", "color"],
        ["Widget", "WidgetList", "Cluster", "color"],
        ["Widget", "WidgetList", "Namespaced", "size"],
    ];
    let api = ApiServer::shared().await;
    let groups = others.map(|_| format!("{}.example.com", api.unique("shape")));
    join_all(groups.iter().map(|group| define(&api, group, WIDGETS))).await;
    let names: Vec<String> = groups.iter().map(|group| format!("widgets.{group}")).collect();
    let servers = Servers::start(api, &[&format!("--resource={}", names.join(","))]).await;
    let change = async |group: &str, other: [&str; 4]| {
        servers.api.delete_crd(group, "widgets").await;
        define(&servers.api, group, other).await;
        for path in PATHS {
            let consistent = path.replace("?resourceVersion=0", "?").replace("example.com", group);
            for path in [path.replace("example.com", group), consistent] {
                let same = || async {
                    let straight = answered(servers.straight(&path).send().await.unwrap()).await;
                    let through = answered(servers.through(Method::GET, &path).send().await.unwrap()).await;
                    (straight == through).then_some(())
                };
                wait::until(&format!("{other:?} at {path}"), wait::SOON, same).await;
            }
        }
        servers.api.delete(&format!("{CRDS}/widgets.{group}")).await;
    };
    join_all(groups.iter().zip(others).map(|(group, other)| change(group, other))).await;
}

/// The status code, and the answer if it is no failure.
async fn answered(response: reqwest::Response) -> (u16, Option<Value>) {
    let code = response.status().as_u16();
    let body = response.bytes().await.unwrap();
    (code, (code == 200).then(|| unversioned(&body)))
}
