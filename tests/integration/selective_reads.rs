//! Reads of some objects of a quiet resource. Their proof costs upstream no more than the reads
//! would cost it without kubefan.

use std::time::Duration;

use http_body_util::BodyExt;
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::{
    freshness::{lookups, probes, proofs, write_configmap},
    harness::{
        objects::version_of,
        rig::{PODS, Rig, pod, pods},
        tests,
    },
    informer_start::{HttpWatch, quiet, with_a_silent_watch},
};

tests! {
    paused: a_selective_read_costs_upstream_no_object_that_it_does_not_select,
        equal_selective_informers_share_a_proof, many_different_selections_wait_for_one_bookmark,
        a_selective_state_is_current_although_others_have_changed,
        a_read_without_a_whole_state_lists_nothing_upstream;
}

/// The paths and queries of all lists of metadata of pods.
fn metadata_lists(rig: &Rig) -> Vec<String> {
    let collections = [PODS, "/api/v1/namespaces/default/pods", "/api/v1/namespaces/other/pods"];
    let asked = collections.iter().flat_map(|collection| rig.asked(collection));
    asked.filter(|asked| asked.is_metadata_only).map(|asked| asked.path).collect()
}

/// A quiet kubefan with twenty pods. `web` has the label `stage=web`.
async fn quiet_with_pods() -> Rig {
    let rig = quiet().await;
    for number in 0..19 {
        rig.sim.create(&pods(), pod(&format!("pod-{number}"), "on")).unwrap();
    }
    rig.sim.create(&pods(), pod("web", "web")).unwrap();
    sleep(Duration::from_secs(20)).await;
    write_configmap(&rig.sim);
    rig
}

async fn json(rig: &Rig, path: &str) -> Value {
    let response = rig.get(path).await;
    assert_eq!(response.status(), 200, "{path}");
    serde_json::from_slice(&response.into_body().collect().await.unwrap().to_bytes()).unwrap()
}

async fn a_selective_read_costs_upstream_no_object_that_it_does_not_select() {
    const OTHER: &str = "/api/v1/namespaces/other/pods";
    for (path, parameters, expected, listed) in [
        (PODS, "&labelSelector=stage%3Dweb", &["web"][..], "labelSelector=stage%3Dweb"),
        (OTHER, "&fieldSelector=spec.nodeName%3Dn1", &[], "fieldSelector=spec.nodeName%3Dn1"),
    ] {
        let rig = quiet_with_pods().await;
        let start_time = Instant::now();
        let version = rig.sim.revision();
        let (names, reached) = HttpWatch::informer_of(&rig, path, parameters).await.initial().await;
        assert_eq!((&names[..], reached), (&expected.iter().map(ToString::to_string).collect::<Vec<_>>()[..], version));
        assert!(start_time.elapsed() < Duration::from_millis(100), "{:?}", start_time.elapsed());
        let lists = metadata_lists(&rig);
        assert!(lists.len() == 1 && lists[0].starts_with(path) && lists[0].contains(listed), "{lists:?}");
        assert_eq!((lookups(&rig.network), probes(&rig), proofs(&rig, "equal")), (0, 0.0, 1.0));
    }
    // A get without passthrough.
    let rig = quiet_with_pods().await;
    assert_eq!(json(&rig, "/api/v1/namespaces/default/pods/web").await["metadata"]["name"], "web");
    let lists = metadata_lists(&rig);
    assert!(lists.len() == 1 && lists[0].contains("fieldSelector=metadata.name%3Dweb"), "{lists:?}");
}

async fn equal_selective_informers_share_a_proof() {
    let rig = quiet_with_pods().await;
    let start = || async { HttpWatch::informer_of(&rig, PODS, "&labelSelector=stage%3Dweb").await.initial().await.0 };
    for names in futures::future::join_all((0..100).map(|_| start())).await {
        assert_eq!(names, ["web"]);
    }
    assert_eq!(metadata_lists(&rig).len(), 1);
}

async fn many_different_selections_wait_for_one_bookmark() {
    let rig = quiet_with_pods().await;
    let start = |number: usize| {
        let rig = &rig;
        async move {
            let parameters = format!("&labelSelector=stage%3Dweb,number+notin+({number})");
            HttpWatch::informer_of(rig, PODS, &parameters).await.initial().await.0
        }
    };
    for names in futures::future::join_all((0..100).map(start)).await {
        assert_eq!(names, ["web"]);
    }
    assert!(metadata_lists(&rig).len() <= 16, "{}", metadata_lists(&rig).len());
    assert_eq!((lookups(&rig.network), probes(&rig)), (1, 1.0));
}

/// The watch of the cache is silent, so the cache does not have the new pod.
async fn a_selective_state_is_current_although_others_have_changed() {
    let rig = with_a_silent_watch().await;
    let version = rig.sim.create(&pods(), pod("unseen", "off")).unwrap();
    let (names, reached) = HttpWatch::informer_of(&rig, PODS, "&labelSelector=stage%3Don").await.initial().await;
    assert!(names == ["stays"] && reached >= version, "{names:?} at {reached}, and {version} was written");
}

async fn a_read_without_a_whole_state_lists_nothing_upstream() {
    // A page without passthrough.
    let rig = quiet_with_pods().await;
    let list = json(&rig, &format!("{PODS}?limit=1")).await;
    assert_eq!(list["items"].as_array().unwrap().len(), 1);
    assert!(version_of(&list) >= rig.sim.revision());
    assert_eq!((metadata_lists(&rig), lookups(&rig.network)), (Vec::new(), 1));

    let rig = quiet_with_pods().await;
    let path = format!("{PODS}?watch=1&sendInitialEvents=false&resourceVersionMatch=NotOlderThan");
    assert_eq!((rig.get(&path).await.status().as_u16(), metadata_lists(&rig)), (200, Vec::new()));
}
