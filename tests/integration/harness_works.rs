//! Tests of the harness itself: the assumptions of the other tests about a control plane of their
//! own.

use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::harness::{
    apiserver::{ApiServer, Options},
    objects::{pod, version_of},
    tests,
};

tests! {
    apiserver slow_faults: a_control_plane_keeps_its_flags_and_data_through_a_kill_and_forgets_what_is_compacted;
}

async fn a_control_plane_keeps_its_flags_and_data_through_a_kill_and_forgets_what_is_compacted() {
    let api = ApiServer::start(Options::default().flag("--feature-gates=WatchList=false")).await;
    let old = api.create("/api/v1/namespaces/default/pods", &pod("survivor")).await;
    let new = version_of(&api.create("/api/v1/namespaces/default/pods", &pod("second")).await);
    api.compact_etcd(new).await;
    api.kill9();
    let url = format!("{}/api/v1/namespaces/default/pods/survivor", api.url());
    assert!(api.client().get(&url).send().await.unwrap_err().is_connect());
    // The apiserver answers from its watch cache until it restarts.
    api.restart().await;
    assert_eq!(api.get_json("/api/v1/namespaces/default/pods/survivor").await, old);

    let old = version_of(&old);
    let watch = format!("/api/v1/namespaces/default/pods?watch=true&timeoutSeconds=5&resourceVersion={old}");
    let (status, event) = api.request(Method::GET, &watch, None).await;
    assert_eq!((status, &event["type"], &event["object"]["code"]), (StatusCode::OK, &json!("ERROR"), &json!(410)));
    let list = format!("/api/v1/pods?resourceVersion={old}&resourceVersionMatch=Exact");
    assert_eq!(api.request(Method::GET, &list, None).await.0, StatusCode::GONE);

    let watch_list = "/api/v1/pods?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan\
                      &allowWatchBookmarks=true&timeoutSeconds=1";
    assert_eq!(api.request(Method::GET, watch_list, None).await.0, StatusCode::UNPROCESSABLE_ENTITY);
}
