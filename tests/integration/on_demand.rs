//! On-demand caches: a resource that is not configured is cached when a reader asks for it, within
//! limits. A refusal names the flag that raises the limit. A cache without readers is dropped.

use std::time::Duration;

use futures::future::join_all;
use kubefan_common::proto::v1alpha1::Target;
use kubefan_fanout::{CacheRequest, Catalog};
use kubefan_informers::{OnDemandLimits, SizeLimits};
use kubefan_model::Media;
use kubefan_sim::apiserver::{Fault, SimResource, Verb};
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::{
    harness::{
        apiserver::ApiServer,
        kubefan::Kubefan,
        network::{Network, answer},
        objects::version_of,
        record::{Query, Watch, connect},
        rig::{PODS, Rig, Setup, cache_of, core, on_demand, pod, pods, target, versions},
        servers::is_cached,
        simulated::Simulated,
        tests, wait,
    },
    upstream_faults::line,
};

tests! {
    apiserver: a_custom_resource_is_selected_by_its_selectable_fields,
        media_that_are_configured_are_cached_from_the_start;
    local: watches_beyond_the_limit_are_passed_on_under_their_name;
    paused: a_resource_is_cached_when_it_is_requested, secrets_are_cached_only_if_they_are_configured,
        every_name_of_a_resource_uses_one_cache, an_unconfigured_resource_is_refused_with_the_flags,
        an_idle_place_goes_to_the_resource_that_is_requested_next, starts_read_the_schema_once,
        a_resource_that_was_too_large_is_asked_for_its_size_before_it_is_listed_again,
        a_first_sync_that_grows_too_large_is_stopped, a_cache_that_grows_too_large_ends_its_streams,
        the_bytes_of_all_caches_are_limited_together,
        a_cache_that_is_being_listed_counts_to_the_tenant_that_started_it, an_unread_cache_is_dropped_and_can_return,
        a_reader_waits_a_limited_time_for_the_first_sync, limits_count_only_what_the_upstream_selector_selects;
}

fn limited(objects: usize, bytes: usize) -> OnDemandLimits {
    OnDemandLimits { size: SizeLimits { on_demand_objects_max: objects, on_demand_bytes_max: bytes }, ..on_demand() }
}

fn fill(rig: &Rig, from: usize, to: usize) {
    for n in from..to {
        rig.sim.create(&pods(), pod(&format!("p{n}"), "new")).unwrap();
    }
}

async fn refused(rig: &Rig, resource: &str) -> Status {
    rig.watch(target(resource), "").await.err().expect("it is served")
}

fn assert_exhausted(status: &Status, flag: &str) {
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert!(status.message().contains(flag), "{status}");
    assert!(status.get_details_retry_info().is_some());
}

async fn a_resource_is_cached_when_it_is_requested() {
    let setup = Setup::of(&[]).on_demand(on_demand());
    let rig = Rig::synced(setup.sim(), setup).await;
    fill(&rig, 0, 3);
    assert_eq!(rig.asked(PODS).len(), 0, "no reader has asked");
    let mut watch = rig.watch_all("pods").await;
    let asked = rig.asked(PODS);
    assert!(asked.len() == 1 && asked[0].is_watch(), "a start asks for no list of its own: {asked:?}");
    assert_eq!((watch.state.len(), &watch.state), (3, &rig.truth(PODS).await));
    let last = rig.sim.create(&pods(), pod("later", "new")).unwrap();
    watch.until(last).await;
    assert_eq!(versions(&watch.events), [last]);
    let resources = rig.resources().await;
    assert!(resources.len() == 1 && resources[0].on_demand && resources[0].subscribers == 1, "{resources:?}");
    assert_eq!(rig.readyz_states(), "", "only configured resources count for readiness");
}

async fn every_name_of_a_resource_uses_one_cache() {
    let setup = Setup::of(&["deploy", "deployments"]).on_demand(on_demand());
    let rig = Rig::synced(setup.sim(), setup).await;
    assert_eq!(rig.readyz_states(), "deploy synced");
    let pods = ["pods", "po", "pod", "Pod", "pods.v1."];
    let deployments = ["deployments", "deploy", "deployment.apps", "deployments.v1.apps"];
    let mut watches = vec![rig.watch(Target { version: "v1".into(), ..target("pods") }, "").await.unwrap()];
    for name in pods.into_iter().chain(deployments) {
        watches.push(rig.watch_all(name).await);
    }
    assert_eq!(rig.sim.stats().open_watches.len(), 2);
    assert_eq!(rig.sim.stats().watches_started, 2, "one watch each");
    let resources = rig.resources().await;
    let names: Vec<_> = resources.iter().map(|one| (one.name.as_str(), one.on_demand, one.subscribers)).collect();
    assert_eq!(names, [("deploy", false, 4), ("pods", true, 6)]);
}

async fn an_unconfigured_resource_is_refused_with_the_flags() {
    let setup = Setup::of(&["nodes"]);
    let rig = Rig::synced(setup.sim(), setup).await;
    let status = refused(&rig, "deploy").await;
    assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
    assert_eq!(status.get_details_error_info().unwrap().reason, "NOT_CACHED");
    assert!(
        status.message().contains("--resource deployments.apps") && status.message().contains("--on-demand"),
        "{status}"
    );
    let status = refused(&rig, "podz").await;
    assert_eq!(status.code(), Code::NotFound, "{status}");
    assert!(status.message().contains("did you mean \"pods\""), "{status}");
}

async fn secrets_are_cached_only_if_they_are_configured() {
    for is_configured in [false, true] {
        let setup = Setup::of(&["secrets"][..usize::from(is_configured)]).on_demand(on_demand());
        let sim = setup.sim();
        let mut secrets = SimResource::custom("", "v1", "secrets", "Secret");
        secrets.custom = false;
        sim.add_resource(secrets);
        let rig = Rig::synced(sim, setup).await;
        let read = rig.watch(target("secrets"), "").await;
        assert_eq!(read.is_ok(), is_configured);
        if let Err(status) = read {
            assert_eq!(status.code(), Code::FailedPrecondition, "{status}");
            assert!(status.message().contains("--resource secrets"), "{status}");
            assert_eq!(rig.asked("/api/v1/secrets").len(), 0);
        }
    }
}

async fn an_idle_place_goes_to_the_resource_that_is_requested_next() {
    let setup = Setup::of(&["namespaces"]).on_demand(OnDemandLimits { on_demand_resources_max: 3, ..on_demand() });
    let rig = Rig::synced(setup.sim(), setup).await;
    let cached = async || {
        let on_demand = rig.resources().await.into_iter().filter(|one| one.on_demand);
        on_demand.map(|one| one.name).collect::<Vec<_>>()
    };
    let mut pods_watch = rig.watch_all("pods").await;
    drop(rig.watch_all("services").await);
    sleep(Duration::from_secs(1)).await;
    drop(rig.watch_all("configmaps").await);
    // Clients that come back at once, such as informers that list again, keep their places.
    assert_exhausted(&refused(&rig, "nodes").await, "limits.onDemandResourcesMax");
    assert_eq!(rig.asked("/api/v1/nodes").len(), 0);
    rig.watch_all("namespaces").await;
    rig.watch_all("svc").await;
    rig.watch_all("configmaps").await;
    assert_eq!(cached().await, ["configmaps", "pods", "services"]);
    sleep(Duration::from_secs(11)).await;
    rig.list(target("services")).await.unwrap();
    let _nodes = rig.watch_all("nodes").await;
    assert_eq!(
        cached().await,
        ["nodes", "pods", "services"],
        "the resource that was read least recently loses its place"
    );
    sleep(Duration::from_secs(11)).await;
    let _deployments = rig.watch_all("deployments").await;
    assert_eq!(cached().await, ["deployments.apps", "nodes", "pods"]);
    sleep(Duration::from_secs(3600)).await;
    assert_exhausted(&refused(&rig, "configmaps").await, "all of them are in use");
    let last = rig.sim.create(&pods(), pod("later", "new")).unwrap();
    pods_watch.until(last).await;
    assert_eq!(pods_watch.gaps, [], "a place with an open stream is never taken");
}

async fn starts_read_the_schema_once() {
    let setup = Setup::of(&[]).on_demand(on_demand());
    let sim = setup.sim();
    sim.add_resource(SimResource::custom("example.com", "v1", "widgets", "Widget"));
    let rig = Rig::synced(sim, setup).await;
    let copies = ["pods", "services", "configmaps", "widgets"].repeat(10);
    let watches = join_all(copies.into_iter().map(|resource| rig.watch(target(resource), ""))).await;
    let refused: Vec<_> = watches.iter().filter_map(|watch| watch.as_ref().err()).collect();
    assert!(refused.is_empty(), "{refused:?}");
    for path in ["/version", "/openapi/v3", "/openapi/v3/apis/example.com/v1"] {
        assert_eq!(rig.asked(path).len(), 1, "{path}");
    }
}

async fn a_resource_that_was_too_large_is_asked_for_its_size_before_it_is_listed_again() {
    let setup = Setup::of(&[]).on_demand(limited(5, 1 << 30));
    let rig = Rig::synced(setup.sim(), setup).await;
    fill(&rig, 0, 20);
    let start_time = Instant::now();
    assert_exhausted(&refused(&rig, "pods").await, "limits.onDemandObjectsMax");
    assert!(start_time.elapsed() < Duration::from_secs(1), "the refusal comes after {:?}", start_time.elapsed());
    let asked = rig.asked(PODS);
    assert!(asked.len() == 1 && asked[0].is_watch(), "{asked:?}");
    assert_exhausted(&refused(&rig, "pods").await, "limits.onDemandObjectsMax");
    assert_eq!(rig.asked(PODS).len(), 1, "the answer is remembered");
    for attempt in 1..4 {
        sleep(Duration::from_secs(61)).await;
        assert_exhausted(&refused(&rig, "pods").await, "limits.onDemandObjectsMax");
        let asked = rig.asked(PODS);
        assert!(asked.len() == 1 + attempt && asked[attempt].path.ends_with("?limit=1"), "{asked:?}");
    }
    for n in 3..20 {
        rig.sim.delete(&pods(), "default", &format!("p{n}")).unwrap();
    }
    sleep(Duration::from_secs(61)).await;
    assert_eq!(rig.watch_all("pods").await.state.len(), 3, "the refusal is remembered for a minute");
}

async fn a_first_sync_that_grows_too_large_is_stopped() {
    for (limits, flag) in
        [(limited(5, 1 << 30), "limits.onDemandObjectsMax"), (limited(100, 3000), "limits.onDemandBytesMax")]
    {
        for watch_list in [true, false] {
            let mut setup = Setup::of(&[]).on_demand(limits);
            setup.reflector.watch_list = watch_list;
            setup.reflector.page_size = 3;
            let sim = setup.sim();
            let rig = Rig::synced(sim, setup).await;
            fill(&rig, 0, 40);
            let start_time = Instant::now();
            assert_exhausted(&refused(&rig, "pods").await, flag);
            assert!(start_time.elapsed() < Duration::from_secs(1), "{flag}: {:?}", start_time.elapsed());
            let asked = rig.asked(PODS).len();
            assert!(asked <= 5, "{flag}: it stops where the limit is passed, not after all pages: {asked}");
            assert_eq!(rig.sim.stats().open_watches.len(), 0, "{flag}");
            assert!(rig.resources().await.is_empty(), "{flag}");
        }
    }
}

async fn a_cache_that_grows_too_large_ends_its_streams() {
    let setup = Setup::of(&["nodes"]).on_demand(limited(5, 1 << 30));
    let rig = Rig::synced(setup.sim(), setup).await;
    fill(&rig, 0, 5);
    let mut nodes = rig.watch_all("nodes").await;
    let mut watch = rig.watch_all("pods").await;
    fill(&rig, 5, 6);
    let status = watch.end().await;
    assert!(status.message().contains("limits.onDemandObjectsMax"), "{status}");
    assert_exhausted(&refused(&rig, "pods").await, "limits.onDemandObjectsMax");
    assert_eq!(rig.sim.stats().open_watches.len(), 1, "the nodes'");
    let created = rig.sim.create(&core("nodes"), json!({ "metadata": { "name": "n1" } })).unwrap();
    nodes.until(created).await;
}

async fn the_bytes_of_all_caches_are_limited_together() {
    let setup = Setup::of(&[]).on_demand(limited(1000, 10_000));
    let rig = Rig::synced(setup.sim(), setup).await;
    fill(&rig, 0, 15);
    let big =
        |name: &str| json!({ "metadata": { "namespace": "default", "name": name }, "data": { "a": "x".repeat(3000) } });
    for name in ["one", "two"] {
        rig.sim.create(&core("configmaps"), big(name)).unwrap();
    }
    let mut watch = rig.watch_all("pods").await;
    let held = rig.resources().await[0].object_bytes;
    assert!((4_000..10_000).contains(&held), "each cache alone fits: {held}");
    assert_exhausted(&refused(&rig, "configmaps").await, "limits.onDemandBytesMax");
    let last = rig.sim.create(&pods(), pod("later", "new")).unwrap();
    watch.until(last).await;
    drop(watch);
    // Dropping a cache frees its bytes.
    sleep(Duration::from_secs(900)).await;
    assert_eq!(rig.watch_all("configmaps").await.state.len(), 2);
}

async fn a_cache_that_is_being_listed_counts_to_the_tenant_that_started_it() {
    let setup = Setup::of(&[]).on_demand(limited(1000, 10_000));
    let sim = setup.sim();
    let network = Network::to(sim.clone());
    network.rule(|path| {
        let resources = [("configmaps", "ConfigMap", 4000), ("services", "Service", 4000), ("pods", "Pod", 5000)];
        let is_list = |resource: &str| path.starts_with(&format!("/api/v1/{resource}?")) && path.contains("watch=");
        let (_, kind, bytes) = resources.into_iter().find(|(resource, ..)| is_list(resource))?;
        let metadata = json!({ "namespace": "default", "name": "a", "uid": "u", "resourceVersion": "1" });
        let object = json!({ "kind": kind, "apiVersion": "v1", "metadata": metadata, "data": "x".repeat(bytes) });
        Some(answer(200, vec![line("ADDED", &object)], true))
    });
    let rig = Rig::over(network, sim, setup);
    let start = async |resource, tenant| {
        let request = CacheRequest { tenant: Some(tenant), ..cache_of(resource, Media::Json) };
        // The caller hangs up before the list has ended.
        assert!(timeout(Duration::from_secs(1), rig.catalog.find(request)).await.is_err(), "{resource}");
    };
    start("configmaps", "greedy").await;
    start("services", "greedy").await;
    start("pods", "honest").await;
    let cached: Vec<_> = rig.resources().await.into_iter().map(|status| status.name).collect();
    assert!(cached.contains(&"pods".to_owned()) && cached.len() == 2, "{cached:?}");
}

async fn an_unread_cache_is_dropped_and_can_return() {
    let idle = Duration::from_secs(60);
    let setup = Setup::of(&["nodes"]).on_demand(OnDemandLimits { on_demand_idle_timeout: idle, ..on_demand() });
    let rig = Rig::synced(setup.sim(), setup).await;
    fill(&rig, 0, 3);
    let gauges = [
        "kubefan_cached_objects",
        "kubefan_cached_object_bytes",
        "kubefan_ring_events",
        "kubefan_synced",
        "kubefan_subscribers",
    ];
    for _ in 0..2 {
        let mut watch = rig.watch_all("pods").await;
        sleep(idle * 10).await;
        let last = rig.sim.create(&pods(), pod("kept", "new")).unwrap();
        watch.until(last).await;
        rig.sim.delete(&pods(), "default", "kept").unwrap();
        watch.until(rig.sim.revision()).await;
        assert_eq!(watch.gaps, [], "a subscriber keeps the cache");
        assert_eq!(rig.of_pods("kubefan_cached_objects", ""), 3.0);
        drop(watch);
        for _ in 0..5 {
            sleep(idle / 2).await;
            rig.list(target("po")).await.unwrap();
        }
        assert_eq!(rig.resources().await.len(), 2, "a list is a reader too");
        sleep(idle * 2).await;
        assert_eq!(rig.sim.stats().open_watches.len(), 1, "only the nodes' watch is left");
        assert_eq!(rig.resources().await.len(), 1);
        for gauge in gauges {
            assert_eq!(rig.of_pods(gauge, ""), 0.0, "{gauge}");
        }
        assert_eq!(rig.readyz_states(), "nodes synced", "configured resources stay");
    }
}

async fn a_reader_waits_a_limited_time_for_the_first_sync() {
    let setup = Setup::of(&[]).on_demand(on_demand());
    let sim = setup.sim();
    let rig = Rig::synced(sim, setup).await;
    rig.fault(Verb::Watch, Fault::ServiceUnavailable, 4);
    let start_time = Instant::now();
    let status = refused(&rig, "pods").await;
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.get_details_retry_info().is_some() && status.message().contains("503"), "{status}");
    assert_eq!(start_time.elapsed().as_secs(), 5);
    sleep(Duration::from_secs(60)).await;
    rig.watch_all("pods").await;
    assert_eq!(rig.resources().await.len(), 1);
}

async fn limits_count_only_what_the_upstream_selector_selects() {
    let mut setup = Setup::of(&[]).on_demand(limited(5, 1 << 30));
    setup.upstream_field_selector = "spec.nodeName=n1".to_owned();
    let sim = setup.sim();
    for n in 0..20 {
        let mut pod = pod(&format!("p{n}"), "new");
        pod["spec"]["nodeName"] = if n < 3 { "n1".into() } else { "n2".into() };
        sim.create(&pods(), pod).unwrap();
    }
    let rig = Rig::over(Network::to(sim.clone()), sim, setup);
    rig.ready().await;
    assert_eq!(rig.watch_all("pods").await.state.len(), 3);
    assert!(rig.asked(PODS).iter().all(|asked| asked.path.contains("fieldSelector=")));
}

async fn watches_beyond_the_limit_are_passed_on_under_their_name() {
    let simulated = Simulated::start().await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let watch = async |kubefan: &Kubefan, resource: &str| {
        let url = format!("http://{}/api/v1/{resource}?watch=1&resourceVersion=0", kubefan.grpc_addr);
        client.get(url).send().await.unwrap()
    };
    let kubefan = simulated.kubefan(&["limits.onDemandResourcesMax=2"]).await;
    let pods_watch = watch(&kubefan, "pods").await;
    let services = watch(&kubefan, "services").await;
    assert!(is_cached(&pods_watch) && is_cached(&services));
    for name in ["one", "two"] {
        let mut passed_on = watch(&kubefan, "configmaps").await;
        assert_eq!((passed_on.status().as_u16(), is_cached(&passed_on)), (200, false));
        simulated
            .sim
            .create(&core("configmaps"), json!({ "metadata": { "namespace": "default", "name": name } }))
            .unwrap();
        let mut read = String::new();
        while !read.contains(&format!(r#""name":"{name}""#)) {
            read += std::str::from_utf8(&passed_on.chunk().await.unwrap().unwrap()).unwrap();
        }
    }
    let (_, metrics) = kubefan.admin("/metrics").await.unwrap();
    let counted = r#"kubefan_requests_total{answered_by="upstream",code="200",protocol="http",resource="configmaps",verb="watch"} 2"#;
    assert!(metrics.contains(counted), "{metrics}");
    let log = kubefan.process.log();
    assert_eq!(log.matches("no place for another resource").count(), 1, "{log}");

    let alone = simulated.kubefan(&["limits.onDemandResourcesMax=1", "--access=local-cache-only"]).await;
    let _pods = watch(&alone, "pods").await;
    let refused = watch(&alone, "configmaps").await;
    assert_eq!(refused.status().as_u16(), 429);
    assert!(refused.headers().contains_key("retry-after"));
    let text = refused.text().await.unwrap();
    for word in ["limits.onDemandResourcesMax", "--resource", "--access"] {
        assert!(text.contains(word), "{text}");
    }
}

async fn media_that_are_configured_are_cached_from_the_start() {
    let api = ApiServer::shared().await;
    let resources = "--resource=configmaps=protobuf,services=json+protobuf,nodes";
    let kubefan = Kubefan::start(&api, &[resources, "--on-demand=false"]).await;
    let (_, ready) = kubefan.admin("/readyz?verbose").await.unwrap();
    let synced: Vec<_> = ready.lines().filter_map(|line| Some(line.split_once(" synced; ")?.0)).collect();
    let expected = ["[+]configmaps (protobuf)", "[+]nodes", "[+]services (protobuf)", "[+]services"];
    assert_eq!(synced, expected, "{ready}");
    // A cache is ready after its list, and its watch follows.
    wait::until("one watch for each cache", wait::SOON, || async {
        let watches = kubefan.metric_lines("kubefan_upstream_watches").await?;
        (watches.iter().filter(|line| line.ends_with(" 1")).count() == 4).then_some(())
    })
    .await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let protobuf = "application/vnd.kubernetes.protobuf";
    for (resource, accept, cached) in [
        ("configmaps", protobuf, true),
        ("configmaps", "application/json", false),
        ("services", protobuf, true),
        ("services", "application/json", true),
        ("nodes", "application/json", true),
    ] {
        let url = format!("http://{}/api/v1/{resource}?resourceVersion=0", kubefan.grpc_addr);
        let answer = client.get(url).header("accept", accept).bearer_auth(api.admin_token()).send().await.unwrap();
        assert_eq!((answer.status().as_u16(), is_cached(&answer)), (200, cached), "{resource} as {accept}");
    }
    let status = Watch::start(&mut connect(kubefan.grpc_addr).await, target("configmaps"), "").await.err().unwrap();
    assert!(status.message().contains("--resource configmaps=json+protobuf"), "{status}");
}

async fn a_custom_resource_is_selected_by_its_selectable_fields() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("paints").await;
    let schema = json!({ "type": "object", "properties": {
        "spec": { "type": "object", "properties": { "color": { "type": "string" }, "size": { "type": "integer" } } },
    }});
    let crd = json!({
        "metadata": { "name": "paints.kubefan.example.org" },
        "spec": {
            "group": "kubefan.example.org", "scope": "Namespaced",
            "names": { "plural": "paints", "singular": "paint", "kind": "Paint" },
            "versions": [{
                "name": "v1", "served": true, "storage": true, "schema": { "openAPIV3Schema": schema },
                "selectableFields": [{ "jsonPath": ".spec.color" }, { "jsonPath": ".spec.size" }],
            }],
        },
    });
    api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", &crd).await;
    let paints = format!("/apis/kubefan.example.org/v1/namespaces/{namespace}/paints");
    wait::until("the paints", wait::SOON, || async {
        (api.request(reqwest::Method::GET, &paints, None).await.0 == 200).then_some(())
    })
    .await;
    // No --resource: on a loopback address readers choose the cached resources.
    let kubefan = Kubefan::start(&api, &["tuning.schemaCheckInterval=1s"]).await;
    let mut client = connect(kubefan.grpc_addr).await;
    let selected = |fields: &'static str| Target {
        namespace: namespace.clone(),
        ..Query { fields, ..Query::default() }.target("paints.kubefan.example.org")
    };
    // Retried while the OpenAPI document does not have the new resource yet.
    let mut watch = wait::until("the selectable fields", wait::SOON, || {
        let mut client = client.clone();
        let target = selected("spec.color=blue,spec.size!=3");
        async move { Watch::start(&mut client, target, "").await.ok() }
    })
    .await;
    watch.until_resumable().await;
    let paint = |name: &str, color: &str, size: u32| {
        json!({
            "apiVersion": "kubefan.example.org/v1", "kind": "Paint", "metadata": { "name": name },
            "spec": { "color": color, "size": size },
        })
    };
    api.create(&paints, &paint("red", "red", 1)).await;
    let blue = version_of(&api.create(&paints, &paint("blue", "blue", 1)).await);
    let grown = version_of(&api.patch(&format!("{paints}/blue"), &json!({ "spec": { "size": 3 } })).await);
    let turned = version_of(&api.patch(&format!("{paints}/red"), &json!({ "spec": { "color": "blue" } })).await);
    watch.until(turned).await;
    assert_eq!(versions(&watch.events), [blue, grown, turned]);
    assert_eq!((watch.left, watch.state.len()), (1, 1));
    let direct = format!("{paints}?fieldSelector=spec.color%3Dblue,spec.size!%3D3");
    assert_eq!(api.get_json(&direct).await["items"].as_array().unwrap().len(), 1, "the apiserver agrees");

    let as_protobuf = Kubefan::start(&api, &["--resource=paints.kubefan.example.org=protobuf"]).await;
    let (_, ready) = as_protobuf.admin("/readyz?verbose").await.unwrap();
    assert!(ready.contains("[+]paints.kubefan.example.org synced"), "a custom resource has no protobuf: {ready}");
    assert!(as_protobuf.process.log().contains("cached as JSON although protobuf is configured"));

    let status = Watch::start(&mut client, selected("spec.shape=round"), "").await.err().unwrap();
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    assert!(status.message().contains("spec.shape"), "{status}");
}
