//! Protobuf objects. Objects of a real kube-apiserver look the same to selectors in both encodings,
//! whether they were listed or watched. Responses derived from them equal the apiserver's bytes. If
//! there is no protobuf cache, the refusal comes at once.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use bytes::{BufMut, Bytes};
use kubefan_model::{
    GroupVersionResource, Media, ResourceVersion,
    fields::FieldRef,
    object::Object,
    projection::Projection,
    protobuf::{self, ListMeta, kinds},
    selection::Selection,
    selector::{FieldSelector, LabelSelector},
};
use kubefan_proxy::{
    caches::{CacheContext, EncodingLimits, ListScheduler, Registry, RegistryOptions},
    fanout::{Catalog, Phase, Refusal, Served},
    telemetry::metrics::Metrics,
    upstream::{
        Source, Upstream,
        client::{UpstreamOptions, Verb},
        discovery::{Discovery, DiscoveryOptions},
        lines::LineOptions,
        settings::UpstreamSettings,
    },
};
use rcgen::{CertificateParams, DnType, KeyPair};
use serde_json::{Value, json};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::harness::{
    apiserver::{ApiServer, Options},
    objects::{pod, version_of},
    rig::{Rig, Setup, on_demand},
    tests, wait,
};

tests! {
    apiserver full: every_built_in_type_is_the_same_in_both_encodings;
    apiserver: derived_responses_equal_the_apiservers_bytes, a_protobuf_cache_follows_its_watch_and_can_be_backfilled,
        protobuf_caches_have_their_own_byte_limit, an_unread_protobuf_cache_is_dropped;
    paused: an_apiserver_without_protobuf_is_asked_once_a_minute, without_protobuf_there_is_no_cache_and_no_request;
}

const PROTOBUF: EncodingLimits = EncodingLimits { bytes_max: 512 << 20, idle_timeout: Duration::from_secs(600) };

/// kubefan's caches in front of the real apiserver.
struct Caches {
    registry: Arc<Registry>,
    metrics: Arc<Metrics>,
    upstream: Upstream,
    _stop: DropGuard,
}

impl Caches {
    async fn over(api: &ApiServer, setup: Setup) -> Caches {
        let settings = UpstreamSettings { kubeconfig: Some(api.kubeconfig()), context: None };
        let upstream = Upstream::from_settings(settings, UpstreamOptions::default()).await.unwrap();
        let (stop, metrics) = (CancellationToken::new(), Arc::new(Metrics::new(prometheus::Registry::new()).unwrap()));
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
            seed: None,
        };
        let registry = Registry::new(context, setup.registry, metrics.clone(), stop.clone());
        tokio::spawn(registry.clone().run());
        Caches { registry, metrics, upstream, _stop: stop.drop_guard() }
    }

    async fn find(&self, gvr: &GroupVersionResource, namespace: &str, media: Media) -> Result<Served, Refusal> {
        self.registry.find(&gvr.group, &gvr.version, &gvr.resource, namespace, media).await
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

    fn metric(&self, line: &str) -> f64 {
        self.registry.refresh_gauges();
        let text = prometheus::TextEncoder::new().encode_to_string(&self.metrics.registry().gather()).unwrap();
        let value = text.lines().find_map(|each| each.strip_prefix(line)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.parse().unwrap())
    }
}

/// A setup that caches any resource, also as protobuf; all but secrets on demand.
fn anything() -> Setup {
    let mut setup = Setup::of(&["secrets"])
        .on_demand(kubefan_proxy::caches::OnDemandLimits { on_demand_resources_max: 1000, ..on_demand() });
    setup.registry.protobuf = Some(PROTOBUF);
    setup
}

/// A setup that caches the configmaps of one namespace.
fn configmaps_of(namespace: &str, protobuf: EncodingLimits) -> Setup {
    let setup = Setup::of(&["configmaps"]).namespaces(&[namespace]);
    Setup { registry: RegistryOptions { protobuf: Some(protobuf), ..setup.registry }, ..setup }
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

/// What selectors read of an object: version, uid, labels, and every selectable field of its
/// resource.
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
        let (one, other) = (held(one), held(other));
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
        let (caches, by_list) = (Caches::over(&api, anything()).await, Caches::over(&api, anything().by_list()).await);
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
        let (json, protobuf) =
            (caches.synced(&gvr, "", Media::Json).await, caches.synced(&gvr, "", Media::Protobuf).await);
        if resource == "pods" {
            for cache in [&json, &protobuf] {
                cache.hub.reached(ResourceVersion::new(last).unwrap(), wait::SOON).await.unwrap();
            }
        }
        let listed = fresh.synced(&gvr, "", Media::Protobuf).await;
        same(&format!("bytes of {resource} by watch"), &protobuf, &listed, bytes, |(version, _)| *version).await;
        same(resource, &json, &protobuf, state, |seen| seen.0).await;
    }
    let gvr = GroupVersionResource::new("", "v1", "pods");
    let (json, protobuf) = (caches.synced(&gvr, "", Media::Json).await, caches.synced(&gvr, "", Media::Protobuf).await);
    let select = |served: &Served, labels: &str, fields: &str| {
        let (labels, fields) = (LabelSelector::parse(labels).unwrap(), FieldSelector::parse(fields).unwrap());
        let of = Selection::bind("", "", labels, &fields, &served.fields, served.parser.clone(), &gvr).unwrap();
        let (store, _) = served.hub.state().unwrap();
        store.select(&of, None).map(|object| object.key().to_string()).collect::<Vec<_>>()
    };
    for (labels, fields, count) in [
        ("app=other", "", 1),
        ("app in (a,last)", "", 2),
        ("!app", "", 0),
        ("", "spec.nodeName=n1", 1),
        ("", "spec.nodeName=", 2),
        ("", "spec.hostNetwork=true,status.phase=Running", 1),
        ("", "spec.hostNetwork=false", 2),
        ("", "status.podIP!=10.0.0.7", 2),
        ("", "status.podIPs=", 3),
    ] {
        let found = select(&protobuf, labels, fields);
        assert_eq!(found, select(&json, labels, fields), "{labels} {fields}");
        assert_eq!(found.len(), count, "{labels} {fields}: {found:?}");
    }
    // A restarted apiserver has no past events.
    api.restart().await;
    let caches = Caches::over(&api, anything()).await;
    let protobuf = caches.synced(&gvr, "", Media::Protobuf).await;
    // An apiserver that has just started may not answer in time.
    let expired = wait::until("the answer of the restarted apiserver", 3 * wait::SOON, || async {
        let backfill = caches.registry.backfill(&protobuf, ResourceVersion::new(1).unwrap(), false).await;
        (!matches!(backfill, Err(Refusal::Unavailable(_)))).then_some(backfill)
    })
    .await;
    assert!(matches!(expired, Err(Refusal::Expired(_))), "an ERROR event in protobuf: {expired:?}");
}

async fn derived_responses_equal_the_apiservers_bytes() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("protobuf").await;
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    for (name, bytes) in [("a", 10), ("b", 300), ("c", 20_000)] {
        api.create(&path, &configmap(name, "new", bytes)).await;
    }
    let caches = Caches::over(&api, configmaps_of(&namespace, PROTOBUF)).await;
    caches.synced(&configmaps(), &namespace, Media::Json).await;
    let served = caches.synced(&configmaps(), &namespace, Media::Protobuf).await;
    let (store, _) = served.hub.state().unwrap();
    let (upstream, metadata) = (&caches.upstream, Projection::partial_object_metadata());

    for object in store.iter() {
        let own = format!("{path}/{}", object.key().name());
        let (whole, _) = upstream.get_media(Verb::Get, &own, Media::Protobuf).await.unwrap();
        assert_eq!(object.bytes(), whole, "a get");
        let accept = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
        let partial = upstream.get_accept(Verb::Get, &own, accept).await.unwrap().into_body();
        assert_eq!(protobuf::projected(&object.bytes(), &metadata).unwrap(), partial, "its metadata");
    }

    let (body, _) = upstream.get_media(Verb::List, &format!("{path}?limit=2"), Media::Protobuf).await.unwrap();
    let opened = protobuf::open(&body).unwrap();
    let list = protobuf::read_list(opened.message).unwrap();
    assert_eq!((opened.kind, list.items.len(), list.meta.remaining_item_count), ("ConfigMapList", 2, Some(1)));
    let write = |kind: &str, meta: &ListMeta, items: &[Bytes]| {
        let (mut out, len) = (Vec::new(), items.iter().map(|item| protobuf::item_len(item.len())).sum());
        let api_version = if kind.starts_with("Partial") { "meta.k8s.io/v1" } else { "v1" };
        protobuf::put_list_head(api_version, kind, meta, len, &mut out);
        for item in items {
            protobuf::put_item_head(item.len(), &mut out);
            out.put_slice(item);
        }
        out.put_slice(protobuf::TAIL);
        Bytes::from(out)
    };
    let items: Vec<_> =
        store.iter().map(|object| Bytes::copy_from_slice(protobuf::open(&object.bytes()).unwrap().message)).collect();
    assert_eq!(write("ConfigMapList", &list.meta, &items[..2]), body, "a page of a list");
    let accept = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
    let body = upstream.get_accept(Verb::List, &path, accept).await.unwrap().into_body();
    let meta = protobuf::read_list(protobuf::open(&body).unwrap().message).unwrap().meta;
    let items: Vec<_> =
        store.iter().map(|object| protobuf::projected_item(&object.bytes(), &metadata).unwrap().into()).collect();
    assert_eq!(write("PartialObjectMetadataList", &meta, &items), body, "a list of metadata");

    let query =
        "watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&timeoutSeconds=30";
    let (mut events, _) =
        upstream.watch(&format!("{path}?{query}"), Media::Protobuf, LineOptions::default()).await.unwrap();
    for object in store.iter() {
        let event = events.next_line().await.unwrap().unwrap();
        let frame = protobuf::watch_frame("ADDED", &object.bytes());
        assert_eq!((&frame[4..], &frame[..4]), (&event[..], &(event.len() as u32).to_be_bytes()[..]), "an event");
    }
    let event = events.next_line().await.unwrap().unwrap();
    let event = protobuf::read_watch_event(&event).unwrap();
    let bookmark = protobuf::read_bookmark(event.object).unwrap();
    assert_eq!((event.kind, bookmark.ends_initial_state), ("BOOKMARK", true));
    let version: ResourceVersion = bookmark.version.parse().unwrap();
    let ours = protobuf::bookmark("v1", "ConfigMap", version, true);
    assert_eq!(protobuf::read_bookmark(&ours).unwrap(), bookmark);
    assert_eq!(protobuf::open(&ours).unwrap().kind, protobuf::open(event.object).unwrap().kind);

    let missing = upstream.get_media(Verb::Get, &format!("{path}/none"), Media::Protobuf).await.unwrap_err();
    assert_eq!(missing.reason(), "not_found");
    assert!(missing.to_string().contains("configmaps \"none\" not found"), "{missing}");
}

async fn a_protobuf_cache_follows_its_watch_and_can_be_backfilled() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("protobuf").await;
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    let before = version_of(&api.create(&path, &configmap("a", "new", 10)).await);
    api.create(&path, &configmap("b", "new", 10)).await;
    let caches = Caches::over(&api, configmaps_of(&namespace, PROTOBUF)).await;
    let json = caches.synced(&configmaps(), &namespace, Media::Json).await;
    let served = caches.synced(&configmaps(), &namespace, Media::Protobuf).await;
    let again = caches.synced(&configmaps(), &namespace, Media::Protobuf).await;
    assert!(Arc::ptr_eq(&served.hub, &again.hub), "all readers share one cache");
    let (state, _) = served.hub.state().unwrap();
    let old = state.iter().find(|object| object.key().name() == "a").unwrap().clone();

    let changed = api.patch(&format!("{path}/a"), &json!({ "metadata": { "labels": { "stage": "old" } } })).await;
    api.delete(&format!("{path}/b")).await;
    let last = version_of(&api.create(&path, &configmap("c", "new", 10)).await);
    for cache in [&json, &served] {
        cache.hub.reached(ResourceVersion::new(last).unwrap(), wait::SOON).await.unwrap();
    }
    let (state, version) = served.hub.state().unwrap();
    assert!(version.get() >= last && last > version_of(&changed));
    let held: Vec<_> = state
        .iter()
        .map(|object| (object.key().name().to_owned(), object.label("stage").unwrap().to_owned()))
        .collect();
    assert_eq!(held, [("a".to_owned(), "old".to_owned()), ("c".to_owned(), "new".to_owned())]);
    // The event for a subscriber of stage=new about `a`: the old object at the version of the
    // change.
    let at = ResourceVersion::new(version_of(&changed)).unwrap();
    let left = served.parser.parse(&old.bytes_at(at)).unwrap();
    assert_eq!((left.version(), left.label("stage"), left.uid()), (at, Some("new"), old.uid()));

    // A backfill from before the cache works with protobuf too.
    let backfill = caches.registry.backfill(&served, ResourceVersion::new(before).unwrap(), true).await.unwrap();
    assert_eq!(backfill.ring.floor().get(), before);
    let labels = |media: &str| format!(r#"{{group="",media="{media}",namespace="{namespace}",resource="configmaps"}}"#);
    for media in ["json", "protobuf"] {
        assert_eq!(caches.metric(&format!("kubefan_cached_objects{}", labels(media))), 2.0);
        assert_eq!(caches.metric(&format!("kubefan_synced{}", labels(media))), 1.0);
    }
    let bytes = |media: &str| caches.metric(&format!("kubefan_cached_object_bytes{}", labels(media)));
    assert!(bytes("protobuf") < bytes("json"));
    let listed = caches.registry.list();
    let forms: Vec<_> = listed.iter().map(|(media, status)| (*media, status.object_count)).collect();
    assert_eq!(forms, [(Media::Json, 2), (Media::Protobuf, 2)], "{listed:?}");
}

async fn protobuf_caches_have_their_own_byte_limit() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("protobuf").await;
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    for n in 0..10 {
        api.create(&path, &configmap(&format!("c{n}"), "new", 5000)).await;
    }
    let few = EncodingLimits { bytes_max: 40_000, ..PROTOBUF };
    let caches = Caches::over(&api, configmaps_of(&namespace, few)).await;
    let json = caches.synced(&configmaps(), &namespace, Media::Json).await;
    let Err(Refusal::NoRoom(message)) = caches.find(&configmaps(), &namespace, Media::Protobuf).await else {
        panic!("it is served beyond its limit")
    };
    assert!(message.contains("--protobuf-bytes-max") && message.contains("40000"), "{message}");
    assert!(json.hub.phase().borrow().serves(), "the JSON cache still serves");
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

fn pods() -> GroupVersionResource {
    GroupVersionResource::new("", "v1", "pods")
}

async fn refused(rig: &Rig, gvr: &GroupVersionResource) -> String {
    match rig.registry.find(&gvr.group, &gvr.version, &gvr.resource, "", Media::Protobuf).await {
        Err(Refusal::NotCached(message) | Refusal::NotEncoded(message) | Refusal::NoRoom(message)) => message,
        Err(other) => panic!("{other:?}"),
        Ok(served) => panic!("{} is served as protobuf", served.gvr),
    }
}

async fn an_apiserver_without_protobuf_is_asked_once_a_minute() {
    let setup = Setup::of(&["configmaps"]);
    let setup = Setup { registry: RegistryOptions { protobuf: Some(PROTOBUF), ..setup.registry }, ..setup };
    let rig = Rig::synced(setup.sim(), setup).await;
    assert!(refused(&rig, &configmaps()).await.contains("does not give configmaps as protobuf"));
    let asked = || rig.metric(r#"kubefan_upstream_requests_total{code="406",verb="watch"}"#);
    let before = asked();
    assert!(refused(&rig, &configmaps()).await.contains("does not give configmaps as protobuf"));
    assert_eq!((before, asked()), (1.0, 1.0));
    tokio::time::sleep(Duration::from_secs(61)).await;
    refused(&rig, &configmaps()).await;
    assert_eq!(asked(), 2.0, "it may have been replaced by one that does");
}

async fn without_protobuf_there_is_no_cache_and_no_request() {
    let rig = Rig::synced(Setup::of(&["pods"]).sim(), Setup::of(&["pods"])).await;
    assert!(refused(&rig, &pods()).await.contains("--protobuf=off"));
    let setup = Setup::of(&["pods"]);
    let setup = Setup { registry: RegistryOptions { protobuf: Some(PROTOBUF), ..setup.registry }, ..setup };
    let rig = Rig::synced(setup.sim(), setup).await;
    let widgets = GroupVersionResource::new("example.com", "v1", "widgets");
    assert!(refused(&rig, &widgets).await.contains("no built-in type"));
    assert!(refused(&rig, &configmaps()).await.contains("--resource configmaps"));
}
