//! Caches of protobuf, and of tables beside them. Objects of a real kube-apiserver look the same to
//! selectors in JSON and in protobuf, whether they were listed or watched. If there is no cache of
//! an encoding, the refusal comes at once. `http::differential` compares the answers from these
//! caches.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::Bytes;
use kubefan_cache::{Phase, Refusal};
use kubefan_common::proto::v1alpha1::{Encoding, ListRequest, Projection, WatchRequest};
use kubefan_fanout::{CacheRequest, Catalog, Served};
use kubefan_informers::{CacheCatalog, CacheContext, EncodingLimits, ListScheduler, Registry};
use kubefan_model::{GroupVersionResource, Media, ResourceVersion, fields::FieldRef, object::Object, protobuf::kinds};
use kubefan_sim::apiserver::SimResource;
use kubefan_telemetry::metrics::Metrics;
use kubefan_upstream::{
    Source, Upstream,
    client::UpstreamOptions,
    discovery::{Discovery, DiscoveryOptions},
    settings::UpstreamSettings,
};
use rcgen::{CertificateParams, DnType, KeyPair};
use serde_json::{Value, json};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Code;
use tonic_types::StatusExt;

use crate::harness::{
    apiserver::{ApiServer, Options},
    objects::{pod, version_of},
    rig::{Rig, Setup, cache_of, on_demand, pods, target},
    tests, wait,
};

tests! {
    apiserver slow_faults: every_built_in_type_is_the_same_in_both_encodings;
    apiserver: each_encoding_has_its_own_byte_limit, an_unread_protobuf_cache_is_dropped;
    paused: an_apiserver_without_an_encoding_is_asked_once_a_minute, what_has_no_protobuf_is_refused_with_a_way_out;
}

const PROTOBUF: EncodingLimits = EncodingLimits { bytes_max: 512 << 20, idle_timeout: Duration::from_secs(600) };

/// kubefan's caches in front of the real apiserver.
struct Caches {
    catalog: CacheCatalog,
    _stop: DropGuard,
}

impl Caches {
    async fn over(api: &ApiServer, setup: Setup) -> Caches {
        let settings = UpstreamSettings { kubeconfig: Some(api.kubeconfig()), context: None };
        let upstream = Upstream::from_settings(settings, UpstreamOptions::default()).await.unwrap();
        let stop = CancellationToken::new();
        let metrics = Arc::new(Metrics::new(prometheus::Registry::new()).unwrap());
        let context = CacheContext {
            upstream: upstream.clone(),
            source: Source::apiserver(upstream.clone()),
            discovery: Arc::new(Discovery::new(upstream.clone(), DiscoveryOptions::default())),
            lists: ListScheduler::new(8, metrics.lists()),
            reflector: setup.reflector,
            upstream_field_selector: String::new(),
            schema_check_interval: setup.schema_check_interval,
            cache_compression: setup.cache_compression,
            peers: None,
            saved: None,
            seed: None,
        };
        let registry = Registry::new(context, setup.registry, metrics, stop.clone());
        tokio::spawn(registry.clone().run());
        Caches { catalog: CacheCatalog(registry), _stop: stop.drop_guard() }
    }

    async fn find(&self, gvr: &GroupVersionResource, namespace: &str, media: Media) -> Result<Served, Refusal> {
        let GroupVersionResource { group, version, resource } = gvr;
        self.catalog.find(CacheRequest { group, version, resource, namespace, media, tenant: None }).await
    }

    /// Waits for a synced cache.
    async fn synced(&self, gvr: &GroupVersionResource, namespace: &str, media: Media) -> Served {
        wait::until(&format!("{gvr} as {}", media.as_str()), wait::SOON, || async {
            let served = self.find(gvr, namespace, media).await.ok()?;
            assert_eq!(served.parser.media(), media);
            (*served.hub.phase().borrow() == Phase::Synced).then_some(served)
        })
        .await
    }
}

/// A setup that caches any resource, also as protobuf; all but secrets on demand.
fn anything() -> Setup {
    let mut setup = Setup::of(&["secrets"])
        .on_demand(kubefan_informers::OnDemandLimits { on_demand_resources_max: 1000, ..on_demand() });
    setup.registry.protobuf = Some(PROTOBUF);
    setup
}

/// A setup that caches the configmaps of one namespace.
fn configmaps_of(namespace: &str, limits: EncodingLimits) -> Setup {
    encoding(Setup::of(&["configmaps"]).namespaces(&[namespace]), limits)
}

/// A setup that caches protobuf and tables too.
fn encoding(mut setup: Setup, limits: EncodingLimits) -> Setup {
    setup.registry.protobuf = Some(limits);
    setup.registry.tables = Some(limits);
    setup
}

fn configmaps() -> GroupVersionResource {
    GroupVersionResource::new("", "v1", "configmaps")
}

fn configmap(name: &str, stage: &str, bytes: usize) -> Value {
    json!({ "metadata": { "name": name, "labels": { "stage": stage } }, "data": { "text": "x".repeat(bytes) } })
}

/// All resources that can be listed and watched.
async fn watchable(api: &ApiServer) -> Vec<GroupVersionResource> {
    let groups = api.get_json("/apis").await;
    let groups = groups["groups"].as_array().unwrap().iter().flat_map(|group| group["versions"].as_array().unwrap());
    let groups: Vec<_> = groups.map(|version| version["groupVersion"].as_str().unwrap().to_owned()).collect();
    let mut found = Vec::new();
    for (group, path) in
        groups.iter().map(|group| (group.as_str(), format!("/apis/{group}"))).chain([("v1", "/api/v1".into())])
    {
        let (group, version) = group.split_once('/').unwrap_or(("", group));
        for resource in api.get_json(&path).await["resources"].as_array().unwrap() {
            let verbs: Vec<_> = resource["verbs"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
            if verbs.contains(&"list") && verbs.contains(&"watch") {
                found.push(GroupVersionResource::new(group, version, resource["name"].as_str().unwrap()));
            }
        }
    }
    found
}

/// The parts of an object that selectors read: version, uid, labels, and every selectable field of
/// its resource.
type Seen = (ResourceVersion, String, Vec<(String, String)>, Vec<String>);

fn seen(served: &Served, object: &Object) -> Seen {
    let labels = object.labels().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let field = |index| served.parser.field(object, FieldRef::Index(index)).into_owned();
    let fields = (0..served.fields.fields().len()).map(field).collect();
    (object.version(), object.uid().to_owned(), labels, fields)
}

fn state(served: &Served) -> BTreeMap<String, Seen> {
    let (store, _) = served.hub.state().unwrap();
    store.iter().map(|object| (object.key().to_string(), seen(served, object))).collect()
}

fn bytes(served: &Served) -> BTreeMap<String, (ResourceVersion, Bytes)> {
    let (store, _) = served.hub.state().unwrap();
    store.iter().map(|object| (object.key().to_string(), (object.version(), object.bytes()))).collect()
}

/// Waits until two caches have the same versions. Checks that they are equal and returns the
/// content.
async fn same<T: PartialEq + std::fmt::Debug>(
    what: &str,
    one: &Served,
    other: &Served,
    held: impl Fn(&Served) -> BTreeMap<String, T>,
    version: impl Fn(&T) -> ResourceVersion,
) -> BTreeMap<String, T> {
    let versions = |held: &BTreeMap<String, T>| -> Vec<_> {
        held.iter().map(|(key, value)| (key.clone(), version(value))).collect()
    };
    // Some objects, such as leases, may change between the two reads.
    let (one, other) = wait::until(&format!("the same {what}"), wait::SOON, || async {
        let one = held(one);
        let other = held(other);
        (versions(&one) == versions(&other)).then_some((one, other))
    })
    .await;
    assert_eq!(one, other, "{what}");
    one
}

/// Creates objects whose selectable fields have values of every kind.
async fn populate(api: &ApiServer) {
    for (name, unschedulable) in [("n1", true), ("n2", false)] {
        api.create("/api/v1/nodes", &json!({ "metadata": { "name": name, "labels": { "pool": name } }, "spec": { "unschedulable": unschedulable } })).await;
    }
    let default = |resource: &str| format!("/api/v1/namespaces/default/{resource}");
    for (name, node, host_network) in [("a", "n1", true), ("b", "n2", false), ("c", "", false)] {
        let mut object = pod(name);
        object["spec"]["nodeName"] = json!(node);
        object["spec"]["hostNetwork"] = json!(host_network);
        object["spec"]["restartPolicy"] = json!(if host_network { "Never" } else { "Always" });
        object["metadata"]["annotations"] = json!({ "note": "x".repeat(300) });
        api.create(&default("pods"), &object).await;
    }
    let status = json!({ "status": { "phase": "Running", "podIP": "10.0.0.7", "podIPs": [{ "ip": "10.0.0.7" }] } });
    api.patch(&default("pods/a/status"), &status).await;
    api.patch(&default("pods/c/status"), &json!({ "status": { "nominatedNodeName": "n2" } })).await;
    api.create(&default("configmaps"), &configmap("settings", "new", 100)).await;
    api.create(&default("secrets"), &json!({ "metadata": { "name": "key" }, "type": "example.com/key", "data": {} }))
        .await;
    api.create(&default("services"), &json!({ "metadata": { "name": "web" }, "spec": { "ports": [{ "port": 80 }] } }))
        .await;
    let headless = json!({ "metadata": { "name": "all" }, "spec": { "clusterIP": "None", "ports": [{ "port": 80 }] } });
    api.create(&default("services"), &headless).await;
    let template = json!({ "metadata": { "labels": { "app": "x" } }, "spec": pod("x")["spec"] });
    let controller = json!({ "metadata": { "name": "rc" }, "spec": { "replicas": 3, "selector": { "app": "x" }, "template": template } });
    api.create(&default("replicationcontrollers"), &controller).await;
    api.patch(&default("replicationcontrollers/rc/status"), &json!({ "status": { "replicas": 300 } })).await;
    let event = |name: &str, source: Value, reporting: &str| {
        let involved = json!({
            "kind": "Pod", "namespace": "default", "name": "a", "uid": "u-1", "apiVersion": "v1", "resourceVersion": "7", "fieldPath": "spec.containers{main}",
        });
        json!({
            "metadata": { "name": name }, "involvedObject": involved, "reason": "\"Quoted\"", "type": "Warning", "message": "m",
            "source": source, "reportingComponent": reporting, "reportingInstance": "r", "action": "Do",
        })
    };
    api.create(&default("events"), &event("by-source", json!({ "component": "kubelet" }), "")).await;
    api.create(&default("events"), &event("by-reporter", json!({}), "controller")).await;
    let deployment = json!({ "metadata": { "name": "d" }, "spec": { "selector": { "matchLabels": { "app": "x" } }, "template": template } });
    api.create("/apis/apps/v1/namespaces/default/deployments", &deployment).await;
    let mut job =
        json!({ "metadata": { "name": "j" }, "spec": { "template": template, "completions": 5, "parallelism": 1 } });
    job["spec"]["template"]["spec"]["restartPolicy"] = json!("Never");
    api.create("/apis/batch/v1/namespaces/default/jobs", &job).await;
    let status = json!({ "status": { "succeeded": 2, "startTime": "2026-01-01T00:00:00Z" } });
    api.patch("/apis/batch/v1/namespaces/default/jobs/j/status", &status).await;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "somebody");
    let request = params.serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap();
    let request = json!({
        "metadata": { "name": "csr" },
        "spec": { "signerName": "example.com/signer", "usages": ["client auth"], "request": BASE64_STANDARD.encode(request) },
    });
    api.create("/apis/certificates.k8s.io/v1/certificatesigningrequests", &request).await;
    let slice = json!({
        "metadata": { "name": "slice" },
        "spec": { "driver": "example.com", "nodeName": "n1", "pool": { "name": "p", "generation": 1, "resourceSliceCount": 1 }, "devices": [] },
    });
    api.create("/apis/resource.k8s.io/v1/resourceslices", &slice).await;
}

async fn every_built_in_type_is_the_same_in_both_encodings() {
    let api = ApiServer::start(Options::default()).await;
    populate(&api).await;
    let resources = watchable(&api).await;
    assert!(resources.len() > 45, "{resources:?}");
    let mut with_fields = BTreeMap::new();
    // An apiserver allows a hundred streams per connection, and a cache uses one.
    for resources in resources.chunks(20) {
        let caches = Caches::over(&api, anything()).await;
        let by_list = Caches::over(&api, anything().by_list()).await;
        for gvr in resources {
            assert!(kinds::is_known(gvr), "{gvr} of {} is built in", gvr.version);
            let json = caches.synced(gvr, "", Media::Json).await;
            let protobuf = caches.synced(gvr, "", Media::Protobuf).await;
            let held = same(&gvr.to_string(), &json, &protobuf, state, |seen| seen.0).await;
            let fields = held.values().flat_map(|(.., fields)| fields).filter(|field| !field.is_empty()).count();
            *with_fields.entry(gvr.to_string()).or_insert(0) += fields;
            // A list and a watch give the same bytes.
            let listed = by_list.synced(gvr, "", Media::Protobuf).await;
            same(&format!("bytes of {gvr}"), &protobuf, &listed, bytes, |(version, _)| *version).await;
        }
    }
    for filled in [
        "pods",
        "nodes",
        "namespaces",
        "secrets",
        "services",
        "replicationcontrollers",
        "events",
        "events.events.k8s.io",
        "jobs.batch",
        "certificatesigningrequests.certificates.k8s.io",
        "resourceslices.resource.k8s.io",
    ] {
        assert!(with_fields.get(filled).is_some_and(|fields| *fields > 0), "{filled}: {with_fields:?}");
    }
    // Changes from now on arrive by watch.
    let caches = Caches::over(&api, anything()).await;
    for resource in ["pods", "nodes"] {
        let gvr = GroupVersionResource::new("", "v1", resource);
        caches.synced(&gvr, "", Media::Json).await;
        caches.synced(&gvr, "", Media::Protobuf).await;
    }
    api.patch("/api/v1/namespaces/default/pods/c", &json!({ "metadata": { "labels": { "app": "other" } } })).await;
    api.patch("/api/v1/nodes/n1", &json!({ "spec": { "unschedulable": null } })).await;
    api.delete("/api/v1/namespaces/default/pods/b").await;
    let last = version_of(&api.create("/api/v1/namespaces/default/pods", &pod("last")).await);
    let fresh = Caches::over(&api, anything().by_list()).await;
    for resource in ["pods", "nodes"] {
        let gvr = GroupVersionResource::new("", "v1", resource);
        let json = caches.synced(&gvr, "", Media::Json).await;
        let protobuf = caches.synced(&gvr, "", Media::Protobuf).await;
        if resource == "pods" {
            for cache in [&json, &protobuf] {
                cache.hub.reached(ResourceVersion::new(last).unwrap(), wait::SOON).await.unwrap();
            }
        }
        let listed = fresh.synced(&gvr, "", Media::Protobuf).await;
        same(&format!("bytes of {resource} by watch"), &protobuf, &listed, bytes, |(version, _)| *version).await;
        same(resource, &json, &protobuf, state, |seen| seen.0).await;
    }
    // A restarted apiserver has no past events.
    api.restart().await;
    let caches = Caches::over(&api, anything()).await;
    let protobuf = caches.synced(&pods(), "", Media::Protobuf).await;
    // An apiserver that has just started may not answer in time.
    let expired = wait::until("the answer of the restarted apiserver", 3 * wait::SOON, || async {
        let backfill = caches.catalog.backfill(&protobuf, ResourceVersion::new(1).unwrap(), false).await;
        (!matches!(backfill, Err(Refusal::Unavailable(_)))).then_some(backfill)
    })
    .await;
    assert!(matches!(expired, Err(Refusal::Expired(_))), "an ERROR event in protobuf: {expired:?}");
}

async fn each_encoding_has_its_own_byte_limit() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("protobuf").await;
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    for n in 0..10 {
        api.create(&path, &configmap(&format!("c{n}"), "new", 5000)).await;
    }
    let few = EncodingLimits { bytes_max: 40_000, ..PROTOBUF };
    let caches = Caches::over(&api, configmaps_of(&namespace, few)).await;
    let json = caches.synced(&configmaps(), &namespace, Media::Json).await;
    for (media, flag) in [(Media::Protobuf, "limits.protobufBytesMax"), (Media::Table, "limits.cacheTablesBytesMax")] {
        let found = caches.find(&configmaps(), &namespace, media).await;
        let Err(Refusal::NoRoom(message) | Refusal::NotCached(message)) = found else { panic!("{flag} has no effect") };
        assert!(message.contains(flag) && message.contains("40000"), "{message}");
        assert!(json.hub.phase().borrow().serves(), "the JSON cache still serves");
    }
    let secrets = GroupVersionResource::new("", "v1", "secrets");
    let Err(Refusal::NotCached(message)) = caches.find(&secrets, &namespace, Media::Protobuf).await else {
        panic!("secrets are served without being configured")
    };
    assert!(message.contains("--resource secrets"), "{message}");
}

async fn an_unread_protobuf_cache_is_dropped() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("protobuf").await;
    let soon = EncodingLimits { idle_timeout: Duration::from_millis(200), ..PROTOBUF };
    let caches = Caches::over(&api, configmaps_of(&namespace, soon)).await;
    let json = caches.synced(&configmaps(), &namespace, Media::Json).await;
    let first = caches.synced(&configmaps(), &namespace, Media::Protobuf).await;
    wait::until("the end of the unread cache", wait::SOON, || async {
        (*first.hub.phase().borrow() == Phase::Syncing).then_some(())
    })
    .await;
    let second = caches.synced(&configmaps(), &namespace, Media::Protobuf).await;
    assert!(!Arc::ptr_eq(&first.hub, &second.hub));
    let still = caches.synced(&configmaps(), &namespace, Media::Json).await;
    assert!(Arc::ptr_eq(&json.hub, &still.hub), "configured resources stay");
}

async fn an_apiserver_without_an_encoding_is_asked_once_a_minute() {
    let find = async |rig: &Rig, media| {
        let found = rig.catalog.find(cache_of("configmaps", media)).await;
        found.map(|served| served.gvr.to_string())
    };
    for (media, refusal) in
        [(Media::Protobuf, "does not give configmaps as protobuf"), (Media::Table, "does not give configmaps as table")]
    {
        let setup = encoding(Setup::of(&["configmaps"]), PROTOBUF);
        let rig = Rig::synced(setup.sim(), setup).await;
        let asked = || rig.metric(r#"kubefan_upstream_requests_total{code="406",verb="watch"}"#);
        for _ in 0..2 {
            let refused = find(&rig, media).await.unwrap_err().to_string();
            assert!(refused.contains(refusal), "{refused}");
            assert_eq!(asked(), 1.0, "{refusal}");
        }
        tokio::time::sleep(Duration::from_secs(61)).await;
        assert!(find(&rig, media).await.is_err());
        assert_eq!(asked(), 2.0, "it may have been replaced by one that gives it ({refusal})");
    }
}

async fn what_has_no_protobuf_is_refused_with_a_way_out() {
    let start = async |setup: Setup| {
        let sim = setup.sim();
        sim.add_resource(SimResource::custom("example.com", "v1", "widgets", "Widget"));
        Rig::synced(sim, setup).await
    };
    let off = start(Setup::of(&["pods"])).await;
    let configured = start(encoding(Setup::of(&["pods", "widgets.example.com"]), PROTOBUF)).await;
    let on_demand = start(encoding(Setup::of(&["pods"]).on_demand(on_demand()), PROTOBUF)).await;
    let whole = Projection::default();
    let dropping = Projection { drop_managed_fields: true, ..Default::default() };
    let json_only = ["widgets", "ENCODING_JSON"];
    for (rig, resource, projection, code, field, texts) in [
        (&off, "pods", &whole, Code::FailedPrecondition, "", &["tuning.protobuf=off"][..]),
        (&configured, "configmaps", &whole, Code::FailedPrecondition, "", &["--resource configmaps"]),
        (&configured, "pods", &dropping, Code::InvalidArgument, "projection.drop_managed_fields", &[]),
        (&configured, "widgets.example.com", &whole, Code::InvalidArgument, "encoding", &json_only),
        (&on_demand, "widgets.example.com", &whole, Code::InvalidArgument, "encoding", &json_only),
    ] {
        let target = Some(target(resource));
        let projection = Some(projection.clone());
        let encoding = Encoding::Protobuf.into();
        let list =
            ListRequest { target: target.clone(), projection: projection.clone(), encoding, ..Default::default() };
        let watch = WatchRequest { target, projection, encoding, ..Default::default() };
        for status in [rig.send(watch).await.err(), rig.list_request(list).await.err()] {
            let status = status.unwrap_or_else(|| panic!("{resource} is served as protobuf"));
            assert_eq!(status.code(), code, "{status}");
            assert!(texts.iter().all(|text| status.message().contains(text)), "{status}");
            let violations = status.get_details_bad_request().map_or(Vec::new(), |details| details.field_violations);
            assert_eq!(violations.first().map_or("", |violation| &*violation.field), field, "{status}");
        }
    }
    assert!(on_demand.list(target("widgets.example.com")).await.is_ok(), "JSON is served");
}
