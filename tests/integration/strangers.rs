//! The apiserver closes a connection after a request that it cannot authenticate, and at random if
//! `--goaway-chance` is set. Callers of kubefan share connections to it, and notice none of this.

use std::time::Duration;

use futures::{StreamExt, stream};
use reqwest::{Client, StatusCode, retry};
use serde_json::json;
use tokio::{task::JoinSet, time::interval};

use crate::harness::{
    apiserver::{ApiServer, Options},
    is_full_scale,
    kubefan::Kubefan,
    tests,
};

tests! {
    apiserver: writes_beside_callers_that_the_apiserver_refuses_all_succeed;
    apiserver slow: writes_to_an_apiserver_that_closes_connections_all_succeed;
}

/// Writes at a time. The apiserver closes a connection under several of them.
const CONCURRENT: usize = 8;

/// The number of writes, and the bytes of each.
fn size() -> (usize, usize) {
    if is_full_scale() { (1000, 300_000) } else { (200, 30_000) }
}

/// A client of kubefan that sends nothing again by itself.
fn client() -> Client {
    Client::builder().http2_prior_knowledge().retry(retry::never()).no_proxy().build().unwrap()
}

/// Creates ConfigMaps through kubefan, each under a name that the apiserver makes up, because a
/// repeated name would hide a repeated write. Each must succeed, and be made once.
async fn write(api: &ApiServer, kubefan: &Kubefan) {
    let path = format!("/api/v1/namespaces/{}/configmaps", api.namespace("writes").await);
    let (writes, bytes) = size();
    let body = json!({ "metadata": { "generateName": "w-" }, "data": { "text": "x".repeat(bytes) } }).to_string();
    let url = format!("http://{}{path}", kubefan.grpc_addr);
    let (client, token) = (client(), api.admin_token());
    let post = |_| {
        let request = client.post(&url).header("content-type", "application/json").bearer_auth(&token);
        let request = request.body(body.clone());
        async move {
            let response = request.send().await.unwrap();
            let status = response.status();
            if status == StatusCode::CREATED { None } else { Some((status, response.text().await.unwrap())) }
        }
    };
    let failed: Vec<_> =
        stream::iter(0..writes).map(post).buffer_unordered(CONCURRENT).filter_map(async |x| x).collect().await;
    assert!(failed.is_empty(), "{} of {writes} failed: {:?}", failed.len(), failed.first());
    let listed = api.get_json(&path).await;
    let made = listed["items"].as_array().unwrap().iter().filter(|item| item["metadata"]["generateName"] == "w-");
    assert_eq!(made.count(), writes, "a write was repeated that the apiserver had read");
}

async fn writes_beside_callers_that_the_apiserver_refuses_all_succeed() {
    let api = ApiServer::shared().await;
    let kubefan = Kubefan::start(&api, &["--resource=pods"]).await;
    let mut strangers = JoinSet::<()>::new();
    for token in [None, Some("wrong")] {
        let get = client().get(format!("http://{}/version", kubefan.grpc_addr));
        let get = token.map_or(get.try_clone().unwrap(), |token| get.bearer_auth(token));
        strangers.spawn(async move {
            let mut ticks = interval(Duration::from_millis(10));
            loop {
                ticks.tick().await;
                let _answer = get.try_clone().unwrap().send().await;
            }
        });
    }
    write(&api, &kubefan).await;
    assert!(strangers.try_join_next().is_none(), "a stranger stopped");
}

async fn writes_to_an_apiserver_that_closes_connections_all_succeed() {
    let api = ApiServer::start(Options::default().flag("--goaway-chance=0.02")).await;
    let kubefan = Kubefan::start(&api, &["--resource=pods"]).await;
    write(&api, &kubefan).await;
}
