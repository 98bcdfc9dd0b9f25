//! Resources that cannot be cached: those whose versions do not compare, and those whose names mean
//! something else in paths. Over HTTP their requests are forwarded; over gRPC they are refused.

use std::time::Duration;

use futures::future::join_all;
use kubefan_common::proto::v1alpha1::Target;
use kubefan_sim::apiserver::{SimResource, VersionForm};
use reqwest::{Client, Method, Response};
use serde_json::json;
use tokio::time::{Instant, sleep};
use tonic::Code;
use tonic_types::StatusExt;

use crate::harness::{
    apiserver::ApiServer,
    rest::CRDS,
    rig::{Rig, Setup, on_demand, target},
    servers::{Servers, is_cached},
    simulated::Simulated,
    tests, wait,
};

tests! {
    local: a_watch_of_what_has_no_comparable_versions_is_passed_on,
        a_resource_of_another_group_with_the_same_name_is_cached;
    paused: a_resource_without_comparable_versions_is_refused_over_grpc_and_remembered,
        a_resource_whose_versions_compare_at_last_is_cached, a_kubefan_behind_another_one_does_not_cache_what_the_first_refuses,
        a_resource_named_like_a_part_of_a_path_is_cached_only_where_it_is_listed;
    apiserver: a_resource_named_like_a_part_of_a_path_is_found_where_the_apiserver_finds_it;
}

const FORMS: [VersionForm; 3] = [VersionForm::Opaque, VersionForm::Wide, VersionForm::Absent];
const NAME: &str = "things.aggregated.example.com";
const PATH: &str = "/apis/aggregated.example.com/v1/things";

fn things(versions: VersionForm) -> SimResource {
    let mut things = SimResource::custom("aggregated.example.com", "v1", "things", "Thing");
    things.versions = versions;
    things
}

fn thing(name: &str) -> serde_json::Value {
    json!({ "metadata": { "namespace": "default", "name": name } })
}

/// Reads a watch until it has brought an object of this name.
async fn until(watch: &mut Response, name: &str) {
    let mut read = String::new();
    let wanted = format!(r#""name":"{name}""#);
    while !read.contains(&wanted) {
        read += std::str::from_utf8(&watch.chunk().await.unwrap().expect("the watch continues")).unwrap();
    }
}

async fn a_watch_of_what_has_no_comparable_versions_is_passed_on() {
    let client = Client::builder().no_proxy().build().unwrap();
    for versions in FORMS {
        for flag in ["--resource=things.aggregated.example.com,pods", "--resource=pods"] {
            let simulated = Simulated::start().await;
            simulated.sim.add_resource(things(versions));
            simulated.sim.create(&things(versions).gvr, thing("first")).unwrap();
            let kubefan = simulated.kubefan(&[flag]).await;
            let what = format!("{versions:?}, {flag}");
            let get = async |query: &str| {
                let url = format!("http://{}{PATH}{query}", kubefan.grpc_addr);
                client.get(url).send().await.unwrap()
            };
            for query in ["?watch=1", "?watch=1&resourceVersion=0", "?watch=1&allowWatchBookmarks=true"] {
                let mut watch = get(query).await;
                assert_eq!((watch.status().as_u16(), is_cached(&watch)), (200, false), "{what}: {query}");
                until(&mut watch, "first").await;
            }
            for query in ["", "?resourceVersion=0", "?limit=1"] {
                let list = get(query).await;
                assert_eq!((list.status().as_u16(), is_cached(&list)), (200, false), "{what}: {query}");
                assert!(list.text().await.unwrap().contains(r#""name":"first""#), "{what}: {query}");
            }
            let (code, ready) = kubefan.admin("/readyz?verbose").await.unwrap();
            assert_eq!(code.as_u16(), 200, "{what}: {ready}");
            let says = "things.aggregated.example.com not cached: ";
            assert_eq!(ready.contains(says), flag.contains("things"), "{what}: {ready}");
        }
    }
}

async fn a_resource_of_another_group_with_the_same_name_is_cached() {
    let simulated = Simulated::start().await;
    simulated.sim.add_resource(things(VersionForm::Opaque));
    simulated.sim.add_resource(SimResource::custom("other.example.com", "v1", "things", "Thing"));
    let kubefan = simulated.kubefan(&["--resource=things", "--on-demand"]).await;
    let (_, ready) = kubefan.admin("/readyz?verbose").await.unwrap();
    assert!(ready.contains("things not cached: "), "{ready}");
    let client = Client::builder().no_proxy().build().unwrap();
    let url = format!("http://{}/apis/other.example.com/v1/things?resourceVersion=0", kubefan.grpc_addr);
    wait::until("the other group's resource to be cached", wait::SOON, || async {
        let list = client.get(&url).send().await.ok()?;
        is_cached(&list).then_some(())
    })
    .await;
}

async fn a_resource_without_comparable_versions_is_refused_over_grpc_and_remembered() {
    for versions in FORMS {
        for resources in [&[NAME][..], &[]] {
            let what = format!("{versions:?}, {resources:?}");
            let setup = Setup::of(resources).on_demand(on_demand());
            let sim = setup.sim();
            sim.add_resource(things(versions));
            sim.create(&things(versions).gvr, thing("first")).unwrap();
            let rig = Rig::synced(sim, setup).await;
            let start_time = Instant::now();
            let refused = rig.watch(target(NAME), "").await.err().unwrap();
            assert!(start_time.elapsed() < Duration::from_secs(1), "{what}: after {:?}", start_time.elapsed());
            assert_eq!(refused.code(), Code::FailedPrecondition, "{what}: {refused}");
            assert_eq!(refused.get_details_error_info().unwrap().reason, "NOT_CACHED", "{what}: {refused}");
            assert!(refused.message().contains("resource version"), "{what}: {refused}");
            let asked = rig.asked(PATH).len();
            for _ in 0..20 {
                sleep(Duration::from_secs(60)).await;
                let refused = rig.list(target(NAME)).await.err().unwrap();
                assert_eq!(refused.code(), Code::FailedPrecondition, "{what}: {refused}");
            }
            assert_eq!(rig.asked(PATH).len(), asked, "{what}: it is remembered");
        }
    }
}

async fn a_resource_whose_versions_compare_at_last_is_cached() {
    for resources in [&[NAME][..], &[]] {
        let setup = Setup { schema_check_interval: Duration::from_secs(30), ..Setup::of(resources) };
        let setup = setup.on_demand(on_demand());
        let sim = setup.sim();
        sim.add_resource(things(VersionForm::Opaque));
        let rig = Rig::synced(sim, setup).await;
        assert!(rig.watch(target(NAME), "").await.is_err());
        sleep(Duration::from_secs(100)).await;
        let numbered = things(VersionForm::Number);
        rig.sim.remove_resource(&numbered.gvr);
        rig.sim.add_resource(numbered.clone());
        rig.sim.create(&numbered.gvr, thing("first")).unwrap();
        sleep(Duration::from_secs(100)).await;
        assert_eq!(rig.watch_all(NAME).await.state.len(), 1, "{resources:?}");
    }
}

async fn a_kubefan_behind_another_one_does_not_cache_what_the_first_refuses() {
    let setup = Setup::of(&["pods"]);
    let sim = setup.sim();
    sim.add_resource(things(VersionForm::Number));
    let front = Rig::synced(sim, setup).await;
    let (rig, _link) = Rig::behind(&front, Setup::of(&["pods", NAME]));
    rig.readyz_has("things.aggregated.example.com not cached: ").await;
    rig.ready().await;
    let refused = rig.watch(target(NAME), "").await.err().unwrap();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
}

fn named(plural: &str) -> SimResource {
    SimResource::custom("example.com", "v1", plural, "Named")
}

async fn a_resource_named_like_a_part_of_a_path_is_cached_only_where_it_is_listed() {
    for (plural, in_cluster, in_namespace) in
        [("watch", false, true), ("namespaces", true, true), ("status", true, false), ("proxy", false, true)]
    {
        for (namespaces, is_cached) in [(&[][..], in_cluster), (&["default"], in_namespace)] {
            let setup = Setup::of(&["pods"]).namespaces(namespaces).on_demand(on_demand());
            let sim = setup.sim();
            sim.add_resource(named(plural));
            sim.create(&named(plural).gvr, thing("first")).unwrap();
            let rig = Rig::synced(sim, setup).await;
            let target = Target {
                group: "example.com".to_owned(),
                version: "v1".to_owned(),
                namespace: "default".to_owned(),
                ..target(plural)
            };
            match rig.watch(target, "").await {
                Ok(_) => assert!(is_cached, "{plural} {namespaces:?}"),
                Err(refused) => {
                    assert!(!is_cached, "{plural} {namespaces:?}: {refused}");
                    assert_eq!(refused.code(), Code::FailedPrecondition, "{plural}: {refused}");
                }
            }
        }
    }
}

fn definition(group: &str, plural: &str, scope: &str) -> serde_json::Value {
    let kind = format!("{}{}{scope}", plural[..1].to_uppercase(), &plural[1..]);
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{plural}.{group}") },
        "spec": {
            "group": group, "scope": scope,
            "names": { "plural": plural, "singular": kind.to_lowercase(), "kind": kind },
            "versions": [{
                "name": "v1", "served": true, "storage": true,
                "schema": { "openAPIV3Schema": { "type": "object" } },
            }],
        },
    })
}

async fn a_resource_named_like_a_part_of_a_path_is_found_where_the_apiserver_finds_it() {
    let servers = &Servers::start(ApiServer::shared().await, &["--resource=pods"]).await;
    let plurals = ["watch", "namespaces", "status", "finalize", "proxy"];
    let all = plurals.into_iter().flat_map(|plural| [(plural, "Namespaced"), (plural, "Cluster")]);
    join_all(all.map(|(plural, scope)| found_where_the_apiserver_finds_it(servers, plural, scope))).await;
}

async fn found_where_the_apiserver_finds_it(servers: &Servers, plural: &str, scope: &str) {
    let api = &servers.api;
    let group = format!("{}.example.com", api.unique("paths"));
    api.create(CRDS, &definition(&group, plural, scope)).await;
    let root = format!("/apis/{group}/v1");
    // Objects are written where the apiserver finds the resource, if it does anywhere.
    let object = json!({
        "apiVersion": format!("{group}/v1"), "metadata": { "name": "default" },
        "kind": definition(&group, plural, scope)["spec"]["names"]["kind"],
    });
    let collection = match scope {
        "Cluster" => format!("{root}/{plural}"),
        _ => format!("{root}/namespaces/default/{plural}"),
    };
    let send = || api.request(Method::POST, &collection, Some(("application/json", &object)));
    let created = wait::try_until(Duration::from_secs(5), || async { send().await.0.is_success().then_some(()) }).await;
    if created.is_some() {
        // The apiserver's watch cache may answer from before the object.
        let any_version = format!("{collection}?resourceVersion=0");
        wait::until("the object in the apiserver's watch cache", wait::SOON, || async {
            let (_, names) = read(servers.straight(&any_version).send().await.unwrap()).await;
            names.contains(&"default".to_owned()).then_some(())
        })
        .await;
    }
    let paths = [
        format!("{root}/{plural}"),
        format!("{root}/{plural}/default"),
        format!("{root}/namespaces/default/{plural}"),
        format!("{root}/namespaces/default/{plural}/default"),
        format!("{root}/namespaces/default"),
        format!("{root}/watch/{plural}"),
        format!("{root}/watch/namespaces/default/{plural}"),
        format!("{root}/watch/namespaces/default/{plural}/default"),
    ];
    // Some of the paths are watches without a parameter.
    let queries = ["", "&resourceVersion=0", "&watch=1", "&watch=1&resourceVersion=0"]
        .map(|rest| format!("?timeoutSeconds=1{rest}"));
    let all = paths.iter().flat_map(|path| queries.iter().map(move |query| format!("{path}{query}")));
    join_all(all.map(async |asked| {
        // The storage may still be initializing. For some of these names it never finishes.
        let straight = wait::try_until(Duration::from_secs(5), || async {
            Some(read(servers.straight(&asked).send().await.unwrap()).await).filter(|(code, _)| *code != 429)
        });
        let straight = straight.await.unwrap_or((429, Vec::new()));
        let through = read(servers.through(Method::GET, &asked).send().await.unwrap()).await;
        assert_eq!(through, straight, "{scope} {asked}");
    }))
    .await;
    api.delete(&format!("{CRDS}/{plural}.{group}")).await;
}

/// The status code, and the names of the objects.
async fn read(response: Response) -> (u16, Vec<String>) {
    let code = response.status().as_u16();
    let text = response.text().await.unwrap();
    let names = text.split(r#""metadata":{"#).filter_map(|metadata| {
        let (_, name) = metadata.split_once(r#""name":""#)?;
        Some(name.split('"').next().unwrap_or_default().to_owned())
    });
    (code, if code == 200 { names.collect() } else { Vec::new() })
}
