//! `--namespace`: each namespace has its own cache with its own versions, upstream watch, metrics
//! and readiness. A subscription names one namespace, because versions have no common order across
//! namespaces.

use kubefan_common::proto::v1alpha1::{ResourceState, Target};
use kubefan_sim::apiserver::SimApiserver;
use serde_json::json;
use tonic::Code;
use tonic_types::StatusExt;

use crate::harness::{
    network::{Network, answer},
    record::Watch,
    rig::{PODS, Rig, Setup, core, pod_in, pods, target, versions},
    tests,
};

tests! {
    paused: each_namespace_has_its_own_cache, a_read_of_another_scope_is_refused_with_the_cached_ones,
        a_denied_namespace_does_not_affect_the_others, cluster_scoped_resources_are_cached_once,
        a_version_of_one_namespace_skips_nothing_in_another;
}

const ALPHA: &str = "/api/v1/namespaces/alpha/pods";
const BETA: &str = "/api/v1/namespaces/beta/pods";

fn setup(resources: &[&str]) -> (SimApiserver, Setup) {
    let setup = Setup::of(resources).namespaces(&["alpha", "beta"]);
    let sim = setup.sim();
    for name in ["alpha", "beta", "gamma"] {
        sim.create(&core("namespaces"), json!({ "metadata": { "name": name } })).unwrap();
        sim.create(&pods(), pod_in(name, "first", "new")).unwrap();
    }
    (sim, setup)
}

fn in_namespace(namespace: &str, labels: &str) -> Target {
    Target { namespace: namespace.to_owned(), label_selector: labels.to_owned(), ..target("pods") }
}

/// Starts a watch of the pods of a namespace, and receives its snapshot.
async fn snapshot(rig: &Rig, namespace: &str) -> Watch {
    let mut watch = rig.watch(in_namespace(namespace, ""), "").await.unwrap();
    watch.until_resumable().await;
    watch
}

async fn each_namespace_has_its_own_cache() {
    let (sim, setup) = setup(&["pods"]);
    let rig = Rig::synced(sim, setup).await;
    assert_eq!(rig.readyz_states(), "pods/alpha synced\npods/beta synced");
    let mut alpha = snapshot(&rig, "alpha").await;
    let mut beta = snapshot(&rig, "beta").await;
    assert_eq!(alpha.state.keys().collect::<Vec<_>>(), ["alpha/first"]);
    let mut in_alpha = Vec::new();
    let mut in_beta = Vec::new();
    for name in ["b", "c", "d"] {
        in_alpha.push(rig.sim.create(&pods(), pod_in("alpha", name, "new")).unwrap());
        in_beta.push(rig.sim.create(&pods(), pod_in("beta", name, "new")).unwrap());
        rig.sim.create(&pods(), pod_in("gamma", name, "new")).unwrap();
    }
    alpha.until(in_alpha[2]).await;
    beta.until(in_beta[2]).await;
    assert_eq!((versions(&alpha.events), versions(&beta.events)), (in_alpha, in_beta));
    assert_eq!(alpha.state, rig.truth(ALPHA).await);
    assert_eq!(beta.state, rig.truth(BETA).await);

    let mut more = Vec::new();
    for n in 0..20 {
        more.push(rig.watch(in_namespace("alpha", &format!("stage!=s{n}")), "").await.unwrap());
    }
    assert_eq!(
        rig.sim.stats().open_watches[&pods()],
        2,
        "one upstream watch per namespace for any number of subscribers"
    );
    assert_eq!(rig.asked(PODS).len(), 0, "and none across namespaces");
    for (namespace, objects, subscribers) in [("alpha", 4.0, 21.0), ("beta", 4.0, 1.0)] {
        let labels = format!(r#"{{group="",media="json",namespace="{namespace}",resource="pods"}}"#);
        assert_eq!(rig.metric(&format!("kubefan_cached_objects{labels}")), objects);
        assert_eq!(rig.metric(&format!("kubefan_subscribers{labels}")), subscribers);
        assert_eq!(rig.metric(&format!("kubefan_synced{labels}")), 1.0);
    }
    let resources = rig.resources().await;
    let names: Vec<_> =
        resources.iter().map(|one| (one.name.as_str(), one.namespace.as_str(), one.subscribers)).collect();
    assert_eq!(names, [("pods", "alpha", 21), ("pods", "beta", 1)]);
}

async fn a_read_of_another_scope_is_refused_with_the_cached_ones() {
    let (sim, setup) = setup(&["pods", "nodes"]);
    let rig = Rig::synced(sim, setup).await;
    let nodes_of_one = Target { namespace: "alpha".into(), ..target("nodes") };
    for (target, code, words) in [
        (target("pods"), Code::InvalidArgument, ["alpha, beta", "namespace"]),
        (in_namespace("gamma", ""), Code::FailedPrecondition, ["alpha, beta", "--namespace gamma"]),
        (nodes_of_one, Code::InvalidArgument, ["not namespaced", "nodes"]),
    ] {
        let status = rig.watch(target.clone(), "").await.err().unwrap();
        assert_eq!(status.code(), code, "{status}");
        assert!(words.iter().all(|word| status.message().contains(word)), "{status}");
        assert_eq!(rig.list(target).await.unwrap_err().code(), code);
    }
    let status = rig.watch(target("pods"), "").await.err().unwrap();
    assert_eq!(status.get_details_bad_request().unwrap().field_violations[0].field, "target.namespace");
}

async fn a_denied_namespace_does_not_affect_the_others() {
    let (sim, setup) = setup(&["pods"]);
    let network = Network::to(sim.clone());
    network.rule(|path| {
        let denied = json!({ "kind": "Status", "code": 403, "reason": "Forbidden", "message": "pods is forbidden: no, not there" });
        path.starts_with(BETA).then(|| answer(403, vec![denied.to_string()], false))
    });
    let rig = Rig::over(network, sim, setup);
    rig.readyz_has("pods/beta forbidden: ").await;
    rig.readyz_has("pods/alpha synced").await;
    assert!(!rig.registry.readiness().0);
    let mut alpha = snapshot(&rig, "alpha").await;
    let status = rig.watch(in_namespace("beta", ""), "").await.err().unwrap();
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    assert!(status.message().contains("no, not there"), "{status}");
    let states: Vec<_> = rig.resources().await.iter().map(|one| one.state()).collect();
    assert_eq!(states, [ResourceState::Synced, ResourceState::Forbidden]);

    rig.network.clear_rules();
    rig.ready().await;
    let last = rig.sim.create(&pods(), pod_in("alpha", "later", "new")).unwrap();
    alpha.until(last).await;
    assert_eq!(alpha.gaps, [], "the other namespace's failure does not affect this one");
}

async fn cluster_scoped_resources_are_cached_once() {
    let (sim, setup) = setup(&["pods", "nodes"]);
    let created = sim.create(&core("nodes"), json!({ "metadata": { "name": "n1" } })).unwrap();
    let rig = Rig::synced(sim, setup).await;
    assert_eq!(rig.readyz_states(), "nodes synced\npods/alpha synced\npods/beta synced");
    let mut watch = rig.watch_all("nodes").await;
    watch.until(created).await;
    assert_eq!(watch.state.keys().collect::<Vec<_>>(), ["/n1"]);
    assert_eq!(rig.asked("/api/v1/nodes").len(), 1);
}

async fn a_version_of_one_namespace_skips_nothing_in_another() {
    let (sim, setup) = setup(&["pods"]);
    let rig = Rig::synced(sim, setup).await;
    let mut beta = rig.watch(in_namespace("beta", ""), "").await.unwrap();
    let ahead = rig.sim.create(&pods(), pod_in("beta", "ahead", "new")).unwrap();
    beta.until(ahead).await;
    // Alpha's own progress reaches the version, and no event of alpha is skipped.
    let next = rig.sim.create(&pods(), pod_in("alpha", "next", "new")).unwrap();
    let mut alpha = rig.watch(in_namespace("alpha", ""), &beta.resume_version).await.unwrap();
    alpha.until(next).await;
    assert_eq!(versions(&alpha.events), [next]);
}
