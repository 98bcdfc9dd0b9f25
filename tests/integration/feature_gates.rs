//! Parts of the Kubernetes API that are alpha in the apiserver: shards of a collection, and objects
//! without managed fields. kubefan answers them in front of an apiserver that does not know them,
//! in the same way as an apiserver that does. It refuses requests that it cannot answer; the
//! apiserver would ignore the parameter and answer with everything.

use std::collections::BTreeSet;

use bytes::Bytes;
use futures::future::join_all;
use kubefan_model::{ResourceVersion, protobuf};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::harness::{
    apiserver::{ApiServer, NOBODY, Options, READER},
    assets,
    kubefan::Kubefan,
    objects::version_of,
    servers::{Servers, is_cached},
    tests, wait,
};

tests! {
    apiserver: shards_divide_a_collection_and_its_events_in_every_form, what_the_cache_cannot_answer_is_refused,
        without_the_gate_the_apiserver_decides_about_shards, managed_fields_are_dropped_in_every_form,
        no_caller_reads_more_through_a_gate, a_gate_reads_no_further_than_the_caches;
    apiserver large: shards_are_those_of_an_apiserver_that_has_them;
}

const GATES: &str = "tuning.featureGates=[ShardedListAndWatch=true, ManagedFieldsOptOut=true]";
const JSON: &str = "application/json";
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
const PARTIAL_LIST: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
const PARTIAL: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
const TABLE: &str = "application/json;as=Table;g=meta.k8s.io;v=v1";
const DROP: &str = ";drop=metadata.managedFields";
/// The bounds of three shards of unequal size.
const BOUNDS: [&str; 4] = ["0x0000000000000000", "0x3000000000000000", "0xa000000000000000", "0x10000000000000000"];

struct Answer {
    status: StatusCode,
    is_cached: bool,
    body: Bytes,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The names of the objects in a list or a Table.
    fn names(&self) -> BTreeSet<String> {
        let list = self.json();
        let objects = |items: &Value| items.as_array().cloned().unwrap_or_default();
        let rows = objects(&list["rows"]).into_iter().map(|row| row["object"].clone());
        let name = |object: &Value| object["metadata"]["name"].as_str().unwrap().to_owned();
        objects(&list["items"]).into_iter().chain(rows).map(|object| name(&object)).collect()
    }

    /// The events of a watch, without bookmarks.
    fn events(&self) -> Vec<Value> {
        let events = self.text().lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).collect::<Vec<_>>();
        events.into_iter().filter(|event| event["type"] != "BOOKMARK").collect()
    }

    fn refused_because(&self, what: &str) {
        assert_eq!(self.status, StatusCode::BAD_REQUEST, "{what}: {}", self.text());
        assert!(!self.is_cached || self.json()["reason"] == "BadRequest", "{what}");
    }
}

impl Servers {
    async fn get(&self, path: &str, accept: &str) -> Answer {
        answer(self.through(Method::GET, path).header("accept", accept)).await
    }

    async fn direct(&self, path: &str, accept: &str) -> Answer {
        answer(self.straight(path).header("accept", accept)).await
    }
}

/// Sends a request, and waits until kubefan has the proof that the answer needs. A busy apiserver
/// may not prove the cache fresh in time, and nothing else may answer.
async fn answer(request: reqwest::RequestBuilder) -> Answer {
    wait::until("a proof that the cache is fresh", wait::SOON, async || {
        let response = request.try_clone().expect("a body is text").send().await.unwrap();
        let status = response.status();
        let is_cached = is_cached(&response);
        let answer = Answer { status, is_cached, body: response.bytes().await.unwrap() };
        let is_unproved = status == StatusCode::SERVICE_UNAVAILABLE && answer.text().contains("not proved to be fresh");
        (!is_unproved).then_some(answer)
    })
    .await
}

/// Waits until the caches of these media types answer. The first request starts a cache, and waits
/// only a moment for it.
async fn start_caches(servers: &Servers, path: &str, media: &[&str]) {
    for accept in media {
        wait::until(accept, wait::SOON, || async {
            servers.get(&format!("{path}?resourceVersion=0"), accept).await.is_cached.then_some(())
        })
        .await;
    }
}

/// Waits until the cache has the objects of the apiserver, so that a short watch has them too.
async fn catch_up(servers: &Servers, path: &str) {
    let present = servers.direct(path, JSON).await.json();
    wait::until("the cache to have the last write", wait::SOON, || async {
        let cached = servers.get(&format!("{path}?resourceVersion=0"), JSON).await;
        (cached.json()["items"] == present["items"]).then_some(())
    })
    .await;
}

fn shard(field: &str, start: &str, end: &str) -> String {
    format!("shardRange(object.metadata.{field}, '{start}', '{end}')")
}

fn encoded(text: &str) -> String {
    form_urlencoded::byte_serialize(text.as_bytes()).collect()
}

/// A namespace with configmaps; their collection's path.
async fn configmaps(api: &ApiServer, count: usize) -> String {
    let path = format!("/api/v1/namespaces/{}/configmaps", api.namespace("gates").await);
    for number in 0..count {
        api.create(&path, &json!({ "metadata": { "name": format!("c{number:03}") }, "data": { "k": "v" } })).await;
    }
    path
}

async fn shards_divide_a_collection_and_its_events_in_every_form() {
    let api = ApiServer::shared().await;
    let path = configmaps(&api, 40).await;
    let servers = Servers::start(api, &["--resource=configmaps", "--cache-tables", GATES]).await;
    start_caches(&servers, &path, &[TABLE, PROTOBUF]).await;
    let all = servers.get(&path, JSON).await.names();
    for field in ["uid", "namespace"] {
        for accept in [JSON, PARTIAL_LIST, TABLE] {
            let mut seen = BTreeSet::new();
            for bounds in BOUNDS.windows(2) {
                let selector = shard(field, bounds[0], bounds[1]);
                let path = format!("{path}?shardSelector={}", encoded(&selector));
                let part = servers.get(&path, accept).await;
                assert!(part.is_cached, "{accept}: {}", part.text());
                let names = part.names();
                assert!(seen.is_disjoint(&names), "{selector}");
                assert!(field == "namespace" || names.len() < all.len(), "{selector}");
                seen.extend(names.clone());
                assert_eq!(part.json()["metadata"]["shardInfo"]["selector"], selector, "{accept}");

                if field == "uid" && accept == JSON {
                    let state = servers.get(&format!("{path}&watch=1&timeoutSeconds=1"), JSON).await.events();
                    let name = |event: Value| event["object"]["metadata"]["name"].as_str().unwrap().to_owned();
                    assert_eq!(state.into_iter().map(name).collect::<BTreeSet<_>>(), names, "the state of a watch");
                }

                // The pages of the same list, whose rest is not counted.
                let mut paged = BTreeSet::new();
                let mut next = String::new();
                while paged.len() < names.len() {
                    let page = servers.get(&format!("{path}&limit=5{next}"), accept).await;
                    assert_eq!(page.json()["metadata"]["remainingItemCount"], Value::Null);
                    paged.extend(page.names());
                    next = format!("&continue={}", page.json()["metadata"]["continue"].as_str().unwrap_or_default());
                }
                assert_eq!(paged, names, "{selector}");
            }
            assert_eq!(seen, all, "{field} {accept}");
        }
        let selector = shard(field, BOUNDS[0], BOUNDS[3]);
        let whole = servers.get(&format!("{path}?shardSelector={}", encoded(&selector)), PROTOBUF).await;
        let list = protobuf::read_list(protobuf::open(&whole.body).unwrap().message).unwrap();
        assert_eq!(list.items.len(), all.len());
        assert!(whole.text().contains(&selector), "its shardInfo");
    }

    // An event is in the shard of its object, also after the same name has got another uid.
    let from = version_of(&servers.get(&path, JSON).await.json());
    servers.api.delete(&format!("{path}/c000")).await;
    servers.api.create(&path, &json!({ "metadata": { "name": "c000" } })).await;
    servers.api.patch(&format!("{path}/c001"), &json!({ "data": { "k": "new" } })).await;
    catch_up(&servers, &path).await;
    let watches =
        BOUNDS.windows(2).map(|bounds| format!("&shardSelector={}", encoded(&shard("uid", bounds[0], bounds[1]))));
    let watches: Vec<_> = watches.chain([String::new()]).collect();
    let watch = |parameters: &String| {
        let servers = &servers;
        let path = format!("{path}?watch=1&resourceVersion={from}&timeoutSeconds=5{parameters}");
        async move { servers.get(&path, JSON).await.events() }
    };
    let mut events = join_all(watches.iter().map(watch)).await;
    let all = events.pop().unwrap();
    let mut divided = events.concat();
    divided.sort_by_key(|event| version_of(&event["object"]));
    assert_eq!((all.len(), divided), (3, all));
}

async fn what_the_cache_cannot_answer_is_refused() {
    let api = ApiServer::shared().await;
    let path = configmaps(&api, 2).await;
    let servers = Servers::start(api, &["--resource=configmaps", "--on-demand=false", GATES]).await;
    let selector = encoded(&shard("uid", BOUNDS[0], BOUNDS[1]));
    let not_cached = path.replace("configmaps", "podtemplates");
    let drop = format!("{JSON}{DROP},*/*{DROP}");
    for (method, path, accept) in [
        (Method::GET, format!("{path}?shardSelector=app"), JSON),
        (Method::GET, format!("{path}?watch=1&shardSelector={selector}%20%26%26%20true"), JSON),
        (Method::GET, format!("{path}?shardSelector={selector}"), "application/yaml"),
        (Method::GET, format!("{not_cached}?shardSelector={selector}"), JSON),
        (Method::GET, format!("{not_cached}?watch=1&shardSelector={selector}"), JSON),
        (Method::GET, format!("{path}/?shardSelector={selector}"), JSON),
        (Method::GET, format!("/api/v1/namespaces/proxy/configmaps/?shardSelector={selector}"), JSON),
        (Method::DELETE, format!("{path}?shardSelector={selector}"), JSON),
        (Method::GET, not_cached.clone(), &drop),
        (Method::GET, format!("{not_cached}?watch=1"), &drop),
        (Method::GET, path.clone(), &format!("application/yaml{DROP}")),
        (Method::GET, path.clone(), &format!("{TABLE}{DROP}")),
        (Method::GET, path.clone(), &format!("{JSON};drop=spec")),
    ] {
        answer(servers.through(method.clone(), &path).header("accept", accept))
            .await
            .refused_because(&format!("{method} {path} {accept}"));
    }
    assert_eq!(servers.direct(&path, JSON).await.names().len(), 2, "nothing was deleted");
    // Other requests notice nothing. A client that takes whole objects too, gets them from the
    // apiserver, and a client asks for its Lease with a drop, whatever is cached.
    for (path, accept, expected) in [
        (&not_cached, JSON, StatusCode::OK),
        (&path, "application/yaml", StatusCode::OK),
        (&not_cached, &format!("{JSON}{DROP},{JSON}"), StatusCode::OK),
        (&not_cached, &format!("{JSON};drop=spec,{JSON}"), StatusCode::OK),
        (&format!("{not_cached}/none"), &drop, StatusCode::NOT_FOUND),
    ] {
        assert_eq!(servers.get(path, accept).await.status, expected, "{path} {accept}");
    }
    let single = servers.get(&format!("{path}/c000?shardSelector={selector}"), JSON).await;
    assert_eq!(single.json()["metadata"]["name"], "c000", "a get has no shards");
    let deleted = answer(servers.through(Method::DELETE, &format!("{path}/c001?shardSelector={selector}"))).await;
    assert_eq!(deleted.status, StatusCode::OK);
    // Writes go to the apiserver, whatever objects its responses contain.
    let body = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "written" } }).to_string();
    let written = servers.through(Method::POST, &path).header("accept", drop).header("content-type", JSON).body(body);
    assert_eq!(answer(written).await.status, StatusCode::CREATED);
}

async fn without_the_gate_the_apiserver_decides_about_shards() {
    let api = ApiServer::shared().await;
    let path = configmaps(&api, 3).await;
    let servers = Servers::start(api, &["--resource=configmaps"]).await;
    let query = format!("?shardSelector={}", encoded(&shard("uid", BOUNDS[0], BOUNDS[1])));
    assert!(servers.get(&format!("{path}?resourceVersion=0"), JSON).await.is_cached);
    let answer = servers.get(&format!("{path}{query}&resourceVersion=0"), JSON).await;
    assert!(!answer.is_cached, "it must not answer what it does not read");
    assert_eq!(answer.names(), servers.direct(&format!("{path}{query}"), JSON).await.names());
    let own = Servers::start(servers.api, &["--resource=configmaps", "--access=local-cache-only"]).await;
    own.get(&format!("{path}{query}"), JSON).await.refused_because("nothing else can answer it");
}

/// The JSON of objects without their managed fields. All other bytes stay.
fn without_managed_fields(json: &str) -> String {
    const FIELD: &str = ",\"managedFields\":[";
    let mut rest = json;
    let mut out = String::new();
    while let Some((before, after)) = rest.split_once(FIELD) {
        out += before;
        // No text in it has brackets of its own.
        let mut depth = 1;
        let end = after.find(|c| {
            depth += i32::from(c == '[') - i32::from(c == ']');
            depth == 0
        });
        rest = &after[end.expect("the list ends") + 1..];
    }
    assert!(out.len() < json.len(), "the apiserver knows no drop: {json}");
    out + rest
}

async fn managed_fields_are_dropped_in_every_form() {
    let api = ApiServer::shared().await;
    let path = configmaps(&api, 5).await;
    let servers = Servers::start(api, &["--resource=configmaps", GATES]).await;
    start_caches(&servers, &path, &[PROTOBUF]).await;
    let drop = |accept: &str| format!("{accept}{DROP}");
    let own = format!("{path}/c001");

    for (path, accept) in [(&own, JSON), (&own, PARTIAL), (&path, JSON), (&path, PARTIAL_LIST)] {
        let ours = servers.get(path, &drop(accept)).await;
        assert!(ours.is_cached, "{}", ours.text());
        let mut expected = without_managed_fields(&servers.direct(path, accept).await.text());
        if path.ends_with("configmaps") {
            let version =
                |text: &str| serde_json::from_str::<Value>(text).unwrap()["metadata"]["resourceVersion"].to_string();
            expected = expected.replacen(&version(&expected), &version(&ours.text()), 1);
        }
        assert_eq!(ours.text(), expected);
        assert!(servers.get(path, accept).await.text().contains("managedFields"), "only where it is asked for");
    }
    let from = version_of(&servers.get(&path, JSON).await.json());
    servers.api.patch(&own, &json!({ "data": { "k": "new" } })).await;
    servers.api.delete(&format!("{path}/c002")).await;
    catch_up(&servers, &path).await;
    for (accept, start) in [(JSON, format!("&resourceVersion={from}")), (PARTIAL, String::new())] {
        let watch = format!("{path}?watch=1&timeoutSeconds=5{start}");
        let dropped = drop(accept);
        let (ours, direct) = tokio::join!(servers.get(&watch, &dropped), servers.direct(&watch, accept));
        assert_eq!(ours.text(), without_managed_fields(&direct.text()), "{accept}");
    }

    // The apiserver's own protobuf without managed fields, when they are cleared.
    let ours = servers.get(&own, &drop(PROTOBUF)).await;
    assert!(servers.direct(&own, PROTOBUF).await.body.len() > ours.body.len());
    let cleared = servers.api.patch(&own, &json!({ "metadata": { "managedFields": [{}] } })).await;
    let version = ResourceVersion::new(version_of(&cleared)).unwrap();
    let direct = servers.direct(&own, PROTOBUF).await;
    assert_eq!(protobuf::at_version(&ours.body, version).unwrap(), direct.body);
    wait::until("the cache has the change", wait::SOON, || async {
        (servers.get(&own, &drop(PROTOBUF)).await.body == direct.body).then_some(())
    })
    .await;
}

async fn no_caller_reads_more_through_a_gate() {
    let api = ApiServer::shared().await;
    let path = configmaps(&api, 4).await;
    let namespace = path.split('/').nth(4).unwrap().to_owned();
    for arguments in [
        ["create", "role", "see", "--verb=get,list,watch", "--resource=configmaps"],
        ["create", "rolebinding", "see", "--role=see", &format!("--user={READER}")],
    ] {
        api.kubectl(&[&arguments[..], &["-n", &namespace]].concat()).await;
    }
    let (cert, key) = api.server_certificate();
    let tls = ["--tls-cert-file", cert.to_str().unwrap(), "--tls-private-key-file", key.to_str().unwrap()];
    let reviewed = ["--resource=configmaps", "--access=authorized", GATES];
    let kubefan = Kubefan::start(&api, &[&reviewed[..], &tls].concat()).await;
    let selector = encoded(&shard("uid", BOUNDS[0], BOUNDS[3]));
    let everywhere = "/api/v1/configmaps".to_owned();
    let reads = |path: &str| {
        let json = JSON.to_owned();
        let drop = format!("{JSON}{DROP}");
        [
            (format!("{path}?shardSelector={selector}"), json.clone()),
            (format!("{path}?watch=1&timeoutSeconds=1&shardSelector={selector}"), json),
            (path.to_owned(), drop.clone()),
            (format!("{path}?watch=1&timeoutSeconds=1"), drop),
        ]
    };
    for (user, path, expected) in [
        (READER, &path, StatusCode::OK),
        (READER, &everywhere, StatusCode::FORBIDDEN),
        (NOBODY, &path, StatusCode::FORBIDDEN),
        (NOBODY, &format!("{path}/c001"), StatusCode::FORBIDDEN),
    ] {
        for (path, accept) in reads(path) {
            let url = format!("https://{}{path}", kubefan.grpc_addr);
            let read = answer(api.client_as(user).get(url).header("accept", &accept)).await;
            assert_eq!(read.status, expected, "{user} {path} {accept}: {}", read.text());
            assert!(expected.is_success() || !read.text().contains("managedFields"), "{}", read.text());
        }
    }
}

async fn a_gate_reads_no_further_than_the_caches() {
    let api = ApiServer::shared().await;
    let path = configmaps(&api, 4).await;
    let other = configmaps(&api, 4).await;
    let namespace = path.split('/').nth(4).unwrap();
    let cached = ["--resource=configmaps", "--namespace", namespace, "--on-demand=false", GATES];
    let servers = Servers::start(api, &cached).await;
    let selector = encoded(&shard("uid", BOUNDS[0], BOUNDS[3]));
    let drop = format!("{JSON}{DROP}");
    let whole = servers.get(&format!("{path}?shardSelector={selector}"), JSON).await;
    assert!(whole.is_cached && whole.names().len() >= 4, "{}", whole.text());
    let dropped = servers.get(&path, &drop).await;
    assert!(dropped.is_cached && !dropped.text().contains("managedFields"), "{}", dropped.text());
    for outside in [&other, "/api/v1/configmaps"] {
        for watch in ["", "&watch=1"] {
            let path = format!("{outside}?limit=0{watch}");
            servers.get(&format!("{path}&shardSelector={selector}"), JSON).await.refused_because(&path);
            servers.get(&path, &drop).await.refused_because(&path);
        }
        assert_eq!(servers.get(outside, JSON).await.status, StatusCode::OK, "without the gate's parameter");
    }
}

/// Compares lists and watches of shards with an apiserver of a release that has them.
async fn shards_are_those_of_an_apiserver_that_has_them() {
    let options = Options::default().program(assets::kube_apiserver_newest());
    let api = ApiServer::start(options.flag("--feature-gates=ShardedListAndWatch=true")).await;
    let path = configmaps(&api, 60).await;
    let servers = Servers::start(api, &["--resource=configmaps", GATES]).await;
    let from = version_of(&servers.get(&path, JSON).await.json());
    for number in (0..60).step_by(4) {
        let own = format!("{path}/c{number:03}");
        servers.api.patch(&own, &json!({ "data": { "k": "new" } })).await;
        servers.api.delete(&own).await;
    }
    let two = [shard("uid", BOUNDS[0], BOUNDS[1]), shard("uid", BOUNDS[2], BOUNDS[3])].join(" || ");
    let overlapping = [shard("uid", BOUNDS[1], BOUNDS[3]), shard("uid", BOUNDS[0], BOUNDS[2])].join("||");
    let quoted = format!("( {} )", shard("uid", BOUNDS[1], BOUNDS[2]).replace('\'', "\""));
    let selectors = [
        shard("uid", BOUNDS[0], BOUNDS[1]),
        shard("uid", BOUNDS[1], BOUNDS[3]),
        shard("namespace", BOUNDS[0], BOUNDS[2]),
        shard("namespace", BOUNDS[2], BOUNDS[3]),
        two,
        overlapping,
        quoted,
    ];
    let mut compared = 0;
    for selector in selectors.iter().map(|selector| encoded(selector)) {
        for query in
            ["", "&limit=4", "&resourceVersion=0", "&fieldSelector=metadata.name%21%3Dc001", "&labelSelector=a"]
        {
            let path = format!("{path}?shardSelector={selector}{query}");
            let direct = servers.direct(&path, JSON).await.json();
            let ours = servers.get(&path, JSON).await;
            assert!(ours.is_cached, "{path}: {}", ours.text());
            let mut ours = ours.json();
            for changing in ["resourceVersion", "continue"] {
                assert_eq!(ours["metadata"][changing].is_null(), direct["metadata"][changing].is_null(), "{path}");
                if let Some(value) = ours["metadata"].get_mut(changing) {
                    *value = direct["metadata"][changing].clone();
                }
            }
            assert_eq!(ours.to_string(), direct.to_string(), "{path}");
            compared += 1;
        }
        let list = format!("{path}?shardSelector={selector}");
        let direct = servers.direct(&list, PROTOBUF).await;
        let ours = servers.get(&list, PROTOBUF).await;
        assert_eq!(ours.body.len(), direct.body.len(), "{list} in protobuf");
        for start in [format!("&resourceVersion={from}"), String::new()] {
            let watch = format!("{path}?watch=1&timeoutSeconds=5&shardSelector={selector}{start}");
            let (direct, ours) = tokio::join!(servers.direct(&watch, JSON), servers.get(&watch, JSON));
            assert_eq!(ours.text(), direct.text(), "{watch}");
            compared += 1;
        }
    }
    for wrong in ["x", "shardRange(object.metadata.name, '0x0000000000000000', '0x0000000000000001')"] {
        let path = format!("{path}?shardSelector={}", encoded(wrong));
        let direct = servers.direct(&path, JSON).await;
        let ours = servers.get(&path, JSON).await;
        assert!(!direct.status.is_success(), "{}", direct.text());
        ours.refused_because(wrong);
    }
    println!("{compared} lists and watches of shards are equal");
}
