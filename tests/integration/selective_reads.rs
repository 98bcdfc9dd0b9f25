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
        rig::{PODS, Rig, churn, pod, pods},
        tests,
    },
    informer_start::{HttpWatch, get, quiet, with_a_silent_watch},
};

tests! {
    paused: a_selective_informer_costs_upstream_no_object_that_it_does_not_select,
        an_informer_of_a_namespace_costs_upstream_no_object_of_another, equal_selective_informers_share_a_proof,
        many_different_selections_wait_for_one_bookmark, a_selective_state_is_current_although_others_have_changed,
        a_get_without_passthrough_costs_upstream_one_object, a_page_without_passthrough_lists_nothing_upstream,
        a_watch_without_a_state_lists_nothing_upstream, a_busy_cache_is_proved_by_a_look_up;
}

/// The paths and queries of all lists of metadata of pods.
fn metadata_lists(rig: &Rig) -> Vec<String> {
    let collections = [PODS, "/api/v1/namespaces/default/pods", "/api/v1/namespaces/other/pods"];
    let asked = collections.iter().flat_map(|collection| rig.network.recorded_requests(collection));
    asked.filter(|asked| asked.is_metadata_only).map(|asked| asked.path).collect()
}

/// A quiet kubefan with twenty pods, of which `web` has the label `stage=web`.
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
    let response = get(rig, path).await;
    assert_eq!(response.status(), 200, "{path}");
    serde_json::from_slice(&response.into_body().collect().await.unwrap().to_bytes()).unwrap()
}

async fn a_selective_informer_costs_upstream_no_object_that_it_does_not_select() {
    let rig = quiet_with_pods().await;
    let (start_time, version) = (Instant::now(), rig.sim.revision());
    let mut watch = HttpWatch::informer_of(&rig, PODS, "&labelSelector=stage%3Dweb").await;
    assert_eq!(watch.initial().await, (vec!["web".to_owned()], version));
    assert!(start_time.elapsed() < Duration::from_millis(100), "{:?}", start_time.elapsed());
    let lists = metadata_lists(&rig);
    assert!(lists.len() == 1 && lists[0].contains("labelSelector=stage%3Dweb"), "{lists:?}");
    assert_eq!((lookups(&rig.network), probes(&rig), proofs(&rig, "equal")), (0, 0.0, 1.0));
}

async fn an_informer_of_a_namespace_costs_upstream_no_object_of_another() {
    let rig = quiet_with_pods().await;
    let path = "/api/v1/namespaces/other/pods";
    let (names, _) = HttpWatch::informer_of(&rig, path, "&fieldSelector=spec.nodeName%3Dn1").await.initial().await;
    assert_eq!(names, Vec::<String>::new());
    let lists = metadata_lists(&rig);
    assert!(lists.len() == 1 && lists[0].starts_with(path), "{lists:?}");
    assert!(lists[0].contains("fieldSelector=spec.nodeName%3Dn1"), "{lists:?}");
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

async fn a_get_without_passthrough_costs_upstream_one_object() {
    let rig = quiet_with_pods().await;
    let object = json(&rig, "/api/v1/namespaces/default/pods/web").await;
    assert_eq!(object["metadata"]["name"], "web");
    let lists = metadata_lists(&rig);
    assert!(lists.len() == 1 && lists[0].contains("fieldSelector=metadata.name%3Dweb"), "{lists:?}");
}

async fn a_page_without_passthrough_lists_nothing_upstream() {
    let rig = quiet_with_pods().await;
    let list = json(&rig, &format!("{PODS}?limit=1")).await;
    assert_eq!(list["items"].as_array().unwrap().len(), 1);
    assert!(version_of(&list) >= rig.sim.revision());
    assert_eq!((metadata_lists(&rig), lookups(&rig.network)), (Vec::new(), 1));
}

async fn a_watch_without_a_state_lists_nothing_upstream() {
    let rig = quiet_with_pods().await;
    let response =
        get(&rig, &format!("{PODS}?watch=1&sendInitialEvents=false&resourceVersionMatch=NotOlderThan")).await;
    assert_eq!((response.status().as_u16(), metadata_lists(&rig)), (200, Vec::new()));
}

async fn a_busy_cache_is_proved_by_a_look_up() {
    let rig = quiet().await;
    for round in 0..4 {
        churn(&rig.sim, round, 1);
        sleep(Duration::from_millis(10)).await;
        HttpWatch::informer_of(&rig, PODS, "").await.initial().await;
        assert_eq!((metadata_lists(&rig), lookups(&rig.network)), (Vec::new(), round + 1));
        sleep(Duration::from_millis(100)).await;
    }
}
