//! The apiserver closes a connection after a request that it cannot authenticate, and at random if
//! `--goaway-chance` is set. Callers of kubefan share connections to it, and notice none of this.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use futures::{StreamExt, stream};
use reqwest::{Client, StatusCode, retry};
use serde_json::{Value, json};
use tokio::{
    task::JoinSet,
    time::{interval, timeout},
};

use crate::harness::{
    apiserver::{ApiServer, Options},
    is_full_scale,
    kubefan::Kubefan,
    tests,
};

tests! {
    apiserver: writes_beside_callers_that_the_apiserver_refuses_all_succeed;
    apiserver slow_faults: writes_to_an_apiserver_that_closes_connections_all_succeed;
}

/// Writes at a time. The apiserver closes a connection under several of them.
const CONCURRENT: usize = 8;
/// The longest wait for an answer: kube-apiserver gives up a request after 60 s, unless it is a
/// watch.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Only the metadata of objects, because the objects are large.
const NAMES: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";

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
    let client = client();
    let token = api.admin_token();
    let post = |_| {
        let request = client.post(&url).header("content-type", "application/json").bearer_auth(&token);
        let request = request.body(body.clone());
        async move {
            let answer = async {
                let response = request.send().await.unwrap();
                (response.status(), response.text().await.unwrap())
            };
            let answered = timeout(ANSWER_TIMEOUT, answer).await;
            let (status, text) =
                answered.unwrap_or_else(|_| panic!("no answer; kubefan wrote:\n{}", kubefan.process.log()));
            if status == StatusCode::CREATED { Ok(name_in(&text)) } else { Err((status, text)) }
        }
    };
    let answers: Vec<_> = stream::iter(0..writes).map(post).buffer_unordered(CONCURRENT).collect().await;
    let mut answered = Vec::new();
    let mut failed = Vec::new();
    for answer in answers {
        match answer {
            Ok(name) => answered.push(name),
            Err(failure) => failed.push(failure),
        }
    }
    assert!(failed.is_empty(), "{} of {writes} failed: {:?}", failed.len(), failed.first());
    let listed = api.client().get(format!("{}{path}", api.url())).header("accept", NAMES).send().await.unwrap();
    let listed: Value = serde_json::from_str(&listed.text().await.unwrap()).unwrap();
    let made = listed["items"].as_array().unwrap().iter().map(name_of).filter(|name| name.starts_with("w-"));
    let mut made: Vec<String> = made.collect();
    answered.sort_unstable();
    made.sort_unstable();
    assert_eq!(made.len(), writes, "a write was repeated that the apiserver had read");
    assert_eq!(made, answered);
    println!("{writes} writes of {bytes} bytes, 0 failed, {} objects", made.len());
}

fn name_of(object: &Value) -> String {
    object["metadata"]["name"].as_str().unwrap().to_owned()
}

fn name_in(text: &str) -> String {
    name_of(&serde_json::from_str(text).unwrap())
}

async fn writes_beside_callers_that_the_apiserver_refuses_all_succeed() {
    let api = ApiServer::shared().await;
    let kubefan = Kubefan::start(&api, &["--resource=pods"]).await;
    let mut strangers = JoinSet::<()>::new();
    let answered: [Arc<AtomicUsize>; 2] = Default::default();
    for (token, status, answered) in
        [(None, StatusCode::OK, answered[0].clone()), (Some("wrong"), StatusCode::UNAUTHORIZED, answered[1].clone())]
    {
        let get = client().get(format!("http://{}/version", kubefan.grpc_addr));
        let get = token.map_or(get.try_clone().unwrap(), |token| get.bearer_auth(token));
        strangers.spawn(async move {
            let mut ticks = interval(Duration::from_millis(10));
            loop {
                ticks.tick().await;
                let answer = get.try_clone().unwrap().send().await;
                if answer.is_ok_and(|answer| answer.status() == status) {
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }
    write(&api, &kubefan).await;
    assert!(strangers.try_join_next().is_none(), "a stranger stopped");
    let answered = answered.map(|answered| answered.load(Ordering::Relaxed));
    assert!(answered.iter().all(|answered| *answered > 0), "the strangers were answered {answered:?} times");
}

async fn writes_to_an_apiserver_that_closes_connections_all_succeed() {
    let api = ApiServer::start(Options::default().flag("--goaway-chance=0.02")).await;
    let kubefan = Kubefan::start(&api, &["--resource=pods"]).await;
    write(&api, &kubefan).await;
}
