//! Tests of the harness itself: what the other tests assume about the real apiserver.

use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::harness::{
    apiserver::{ApiServer, NOBODY, Options, READER},
    objects::{pod, version_of},
    rbac::settled,
    tests,
};

tests! {
    apiserver: any_client_connects_with_the_authority_and_a_token, a_pod_is_served_until_it_is_deleted,
        a_user_sees_what_its_role_allows, a_client_certificate_names_a_user,
        a_custom_resource_can_be_created_and_deleted, a_watch_is_counted_by_the_apiserver;
    apiserver full: a_killed_apiserver_comes_back_with_its_data, a_compacted_version_is_gone,
        a_feature_gate_reaches_the_apiserver;
}

async fn any_client_connects_with_the_authority_and_a_token() {
    let api = ApiServer::shared().await;
    let authority = reqwest::Certificate::from_pem(&std::fs::read(api.ca_pem_path()).unwrap()).unwrap();
    let client = reqwest::Client::builder().tls_certs_only([authority]).build().unwrap();
    let url = format!("{}/api/v1/nodes", api.url());
    let answer = client.get(url).bearer_auth(api.admin_token()).send().await.unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
}

async fn a_pod_is_served_until_it_is_deleted() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("pods").await;
    let pods = format!("/api/v1/namespaces/{namespace}/pods");

    let created = api.create(&pods, &pod("web")).await;
    let changed = api.patch(&format!("{pods}/web"), &json!({ "metadata": { "labels": { "app": "changed" } } })).await;
    assert!(version_of(&changed) > version_of(&created));
    let listed = api.get_json(&format!("{pods}?labelSelector=app%3Dchanged")).await;
    assert_eq!(listed["items"][0]["metadata"]["uid"], created["metadata"]["uid"]);
    assert_eq!(api.kubectl(&["get", "pods", "-n", &namespace, "-o", "name"]).await, "pod/web\n");

    api.delete(&format!("{pods}/web")).await;
    assert_eq!(api.request(Method::GET, &format!("{pods}/web"), None).await.0, StatusCode::NOT_FOUND);
}

async fn a_user_sees_what_its_role_allows() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("roles").await;
    api.kubectl(&["create", "role", "see", "--verb=list", "--resource=pods", "-n", &namespace]).await;
    api.kubectl(&["create", "rolebinding", "see", "--role=see", "--user=reader", "-n", &namespace]).await;
    settled(&api).await;

    let list = ["get", "pods", "-n", &namespace];
    let (ok, _, stderr) = api.try_kubectl(&api.kubeconfig_for(READER), &list).await;
    assert!(ok, "{stderr}");
    let (ok, _, stderr) = api.try_kubectl(&api.kubeconfig_for(NOBODY), &list).await;
    assert!(!ok && stderr.contains("Forbidden"), "{stderr}");
    let url = format!("{}/api/v1/namespaces/{namespace}/pods", api.url());
    assert_eq!(api.client_as(NOBODY).get(url).send().await.unwrap().status(), StatusCode::FORBIDDEN);
}

async fn a_client_certificate_names_a_user() {
    let api = ApiServer::shared().await;
    let kubeconfig = api.kubeconfig_with_certificate("carried", "system:masters");
    let (ok, stdout, stderr) = api.try_kubectl(&kubeconfig, &["auth", "whoami"]).await;
    assert!(ok && stdout.contains("carried"), "{stdout}{stderr}");
}

async fn a_custom_resource_can_be_created_and_deleted() {
    let api = ApiServer::shared().await;
    let namespace = api.namespace("widgets").await;
    for _ in 0..2 {
        api.create_crd("harness.example.com", "widgets", "Widget").await;
        let widgets = format!("/apis/harness.example.com/v1/namespaces/{namespace}/widgets");
        let widget = json!({
            "apiVersion": "harness.example.com/v1", "kind": "Widget", "metadata": { "name": "one" }, "size": 3,
        });
        assert_eq!(api.create(&widgets, &widget).await["size"], 3);
        api.delete_crd("harness.example.com", "widgets").await;
    }
}

async fn a_killed_apiserver_comes_back_with_its_data() {
    let api = ApiServer::start(Options::default()).await;
    let before = api.create("/api/v1/namespaces/default/pods", &pod("survivor")).await;
    let url = format!("{}/api/v1/namespaces/default/pods/survivor", api.url());

    api.kill9();
    assert!(api.client().get(&url).send().await.unwrap_err().is_connect());
    api.restart().await;
    assert_eq!(api.get_json("/api/v1/namespaces/default/pods/survivor").await, before);
}

async fn a_compacted_version_is_gone() {
    let api = ApiServer::start(Options::default()).await;
    let old = version_of(&api.create("/api/v1/namespaces/default/pods", &pod("first")).await);
    let new = version_of(&api.create("/api/v1/namespaces/default/pods", &pod("second")).await);
    api.compact_etcd(new).await;
    // The apiserver answers from its watch cache until it restarts.
    api.restart().await;

    let watch = format!("/api/v1/namespaces/default/pods?watch=true&timeoutSeconds=5&resourceVersion={old}");
    let (status, event) = api.request(Method::GET, &watch, None).await;
    assert_eq!((status, &event["type"], &event["object"]["code"]), (StatusCode::OK, &json!("ERROR"), &json!(410)));
    let list = format!("/api/v1/pods?resourceVersion={old}&resourceVersionMatch=Exact");
    assert_eq!(api.request(Method::GET, &list, None).await.0, StatusCode::GONE);
}

async fn a_feature_gate_reaches_the_apiserver() {
    let api = ApiServer::start(Options::default().flag("--feature-gates=WatchList=false")).await;
    let watch_list = "/api/v1/pods?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan\
                      &allowWatchBookmarks=true&timeoutSeconds=1";
    assert_eq!(api.request(Method::GET, watch_list, None).await.0, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(api.metric("kubernetes_feature_enabled").await.contains(r#"name="WatchList",stage="BETA"} 0"#));
}

async fn a_watch_is_counted_by_the_apiserver() {
    // No other test watches this resource.
    let api = ApiServer::shared().await;
    let running = r#"resource="podtemplates",scope="cluster",subresource="",verb="WATCH",version="v1"} 1"#;
    let url = format!("{}/api/v1/podtemplates?watch=true", api.url());
    let watch = api.client().get(url).send().await.unwrap();
    let counted = api.metric("apiserver_longrunning_requests").await;
    assert!(counted.contains(running), "{counted}");
    drop(watch);
}
