//! Cached tables compared with the apiserver's: the same bytes, with the ages of rows, however old
//! a cached row is. Tables that cannot be cached come from upstream.

use std::{collections::BTreeSet, time::Duration};

use futures::{future::join_all, join};
use kubefan_common::proto::v1alpha1::ListResourcesRequest;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::harness::{
    apiserver::ApiServer,
    objects::{pod, version_of},
    record::connect,
    servers::{Servers, is_cached},
    tests, wait,
};

tests! {
    apiserver: a_cached_table_equals_the_apiservers_to_the_byte,
        a_watch_of_tables_equals_the_apiservers_and_sends_columns_once,
        changed_columns_of_a_custom_resource_are_picked_up, tables_that_cannot_be_cached_come_from_upstream;
}

/// The Accept header of kubectl.
const TABLE: &str =
    "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";

/// Start of the cells of a row.
const CELLS: &str = "\"cells\":[";

/// Twice the apiserver's interval of bookmarks.
const BOOKMARK_WITHIN: Duration = Duration::from_secs(120);

/// Answer of a server, and the seconds of the wall clock between which it wrote the rows.
struct Answer {
    status: StatusCode,
    is_cached: bool,
    body: String,
    asked: i64,
    written: i64,
}

impl Servers {
    async fn ask(&self, path: &str, direct: bool) -> Answer {
        let sent = if direct { self.straight(path) } else { self.through(Method::GET, path) };
        let asked = now();
        let mut response = sent.header("accept", TABLE).send().await.unwrap();
        let status = response.status();
        let is_cached = is_cached(&response);
        assert_eq!(response.headers()["content-type"], "application/json", "{path}");
        // A watch lasts longer than its rows.
        let mut body = Vec::new();
        let mut written = now();
        let mut rows = 0;
        while let Some(chunk) = response.chunk().await.unwrap() {
            body.extend_from_slice(&chunk);
            let rows_now = String::from_utf8_lossy(&body).matches(CELLS).count();
            if rows_now > rows {
                rows = rows_now;
                written = now();
            }
        }
        Answer { status, is_cached, body: String::from_utf8(body).unwrap(), asked, written }
    }

    /// Starts a watch, which starts the cache, and waits until the cache answers.
    async fn is_cached(&self, path: &str) {
        self.ask(&format!("{path}&watch=1&timeoutSeconds=1"), false).await;
        wait::until(&format!("{path} from the cache"), wait::SOON, || async {
            self.ask(path, false).await.is_cached.then_some(())
        })
        .await;
    }

    /// Waits until the apiserver has sent the cache a bookmark. A cache that it filled from a list
    /// does not know the cells of an empty object before.
    async fn has_bookmark(&self, list: &str) {
        let ends = "allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
        let watch = format!("{list}&watch=1&timeoutSeconds=1&{ends}");
        wait::until("cells in a bookmark", BOOKMARK_WITHIN, || async {
            let body = self.ask(&watch, false).await.body;
            let bookmark = body.lines().find(|line| line.contains("k8s.io/initial-events-end"))?;
            (!bookmark.contains(r#""cells":[null"#)).then_some(())
        })
        .await;
    }

    /// Asks both servers, and asserts that their answers are equal.
    async fn same(&self, path: &str) -> String {
        self.same_in(path, masked).await
    }

    /// Like [`Self::same`], for the part of a body that `compared` keeps.
    async fn same_in(&self, path: &str, compared: fn(&str) -> String) -> String {
        let (direct, ours) = tokio::join!(self.ask(path, true), self.ask(path, false));
        assert!(ours.is_cached, "{path}: {}", ours.body);
        assert_eq!(direct.status, ours.status, "{path}");
        // All timestamps are whole seconds, so an age changes only when a second of the wall clock
        // ends.
        let apart = direct.written.max(ours.written) - direct.asked.min(ours.asked);
        let direct = compared(&direct.body);
        let ours = compared(&ours.body);
        // A watch that ends soon may end before its last bookmark.
        let (direct, direct_bookmarks) = apart_from_bookmarks(&direct);
        let (ours, our_bookmarks) = apart_from_bookmarks(&ours);
        for (direct, ours) in direct_bookmarks.iter().zip(&our_bookmarks) {
            assert!(direct == ours, "{path}: {}", difference(direct, ours));
        }
        if apart == 0 {
            assert!(direct == ours, "{path}: {}", difference(&direct, &ours));
        }
        let (direct_text, direct_ages) = without_ages(&direct);
        let (our_text, our_ages) = without_ages(&ours);
        assert!(direct_text == our_text, "{path}: {}", difference(&direct_text, &our_text));
        for (direct_age, our_age) in direct_ages.iter().zip(&our_ages) {
            let is_near = direct_age.is_at_most_apart(our_age, apart);
            assert!(is_near, "{path}: {apart} s apart: {}", difference(&direct, &ours));
        }
        ours
    }

    /// Asks both servers for a missing object, and asserts that all bytes are equal.
    async fn same_failure(&self, path: &str) -> String {
        let (direct, ours) = tokio::join!(self.ask(path, true), self.ask(path, false));
        assert_eq!((direct.status, direct.body), (ours.status, ours.body.clone()));
        assert!(ours.is_cached && !ours.status.is_success(), "{path}: {}", ours.body);
        ours.body
    }

    /// Waits until the rows in the cache are older than they are now.
    async fn age(&self, path: &str) {
        let ages = async || without_ages(&self.ask(path, false).await.body).1;
        let first = ages().await;
        assert!(!first.is_empty(), "{path} has no ages");
        wait::until("other ages", wait::SOON, async || (ages().await != first).then_some(())).await;
    }
}

/// An age in a cell.
#[derive(Debug, PartialEq, Eq)]
struct Age {
    seconds: i64,
    /// The seconds of its smallest unit, which it is rounded down to.
    unit: i64,
}

impl Age {
    /// Reads an age such as `2m30s`.
    fn read(text: &str) -> Option<Age> {
        let mut age = Age { seconds: 0, unit: 0 };
        for part in text.split_inclusive(|c: char| !c.is_ascii_digit()) {
            let (number, unit) = part.split_at_checked(part.len() - 1)?;
            age.unit = match unit {
                "s" => 1,
                "m" => 60,
                "h" => 3600,
                "d" => 86_400,
                "y" => 365 * 86_400,
                _ => return None,
            };
            age.seconds += number.parse::<i64>().ok()? * age.unit;
        }
        (age.unit > 0).then_some(age)
    }

    /// Whether both can be the age of one thing, at two moments that are at most this many seconds
    /// apart.
    fn is_at_most_apart(&self, other: &Age, seconds: i64) -> bool {
        let apart = (self.seconds - other.seconds).abs();
        apart == 0 || (seconds > 0 && apart < self.unit.max(other.unit) + seconds)
    }
}

/// Takes the ages out of all cells: `"2m"` and `"3 (2m ago)"`.
fn without_ages(body: &str) -> (String, Vec<Age>) {
    let mut text = String::new();
    let mut ages = Vec::new();
    let mut parts = body.split(CELLS);
    text += parts.next().unwrap_or_default();
    for part in parts {
        let (cells, rest) = part.split_once(']').expect("the cells end");
        let masked = cells.split(',').map(|cell| {
            let around = cell.strip_suffix(" ago)\"").and_then(|cell| cell.rsplit_once('('));
            let (before, age) = around.unwrap_or(("", cell.trim_matches('"')));
            match Age::read(age) {
                Some(age) => {
                    ages.push(age);
                    format!("{before}AGE")
                }
                None => cell.to_owned(),
            }
        });
        text += &format!("{CELLS}{}]{rest}", masked.collect::<Vec<_>>().join(","));
    }
    (text, ages)
}

/// Masks the version of a list or bookmark, which moves with the rest of the cluster. Rows of
/// custom objects are compared without the order of fields: upstream writes their metadata in the
/// type's order, and kubefan in the object's own.
fn masked(body: &str) -> String {
    let masked = |line: &str| {
        let table: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("JSON: {line}"));
        let (object, places) = match table["type"].as_str() {
            None => (&table, 1),
            Some("BOOKMARK") => (&table["object"], usize::MAX),
            Some(_) => (&table["object"], 0),
        };
        let version = object["metadata"]["resourceVersion"].as_str().unwrap_or_default();
        let line = line.replacen(&format!("\"resourceVersion\":\"{version}\""), "\"resourceVersion\":\"N\"", places);
        let sorted = |line: &str| serde_json::from_str::<Value>(line).unwrap().to_string();
        if line.contains(".tables.example.com/v1\"") { sorted(&line) } else { line }
    };
    body.lines().map(masked).collect::<Vec<_>>().join("\n")
}

/// The lines of a body, and its bookmarks except for the one that ends the initial events.
fn apart_from_bookmarks(body: &str) -> (String, Vec<String>) {
    let is_bookmark =
        |line: &&str| line.contains("\"type\":\"BOOKMARK\"") && !line.contains("k8s.io/initial-events-end");
    let (bookmarks, lines): (Vec<&str>, Vec<&str>) = body.lines().partition(is_bookmark);
    (lines.join("\n"), bookmarks.into_iter().map(str::to_owned).collect())
}

/// The events without bookmarks, because those depend only on time.
fn without_bookmarks(body: &str) -> String {
    let events = body.lines().filter(|line| !line.contains("\"type\":\"BOOKMARK\""));
    events.collect::<Vec<_>>().join("\n")
}

fn difference(direct: &str, ours: &str) -> String {
    let at = direct.bytes().zip(ours.bytes()).take_while(|(a, b)| a == b).count().saturating_sub(200);
    let around = |text: &str| text.get(at..).unwrap_or_default().chars().take(500).collect::<String>();
    format!("\n  upstream {}\n  kubefan  {}", around(direct), around(ours))
}

/// Creates a custom resource with its own columns.
async fn create_crd(api: &ApiServer, prefix: &str, columns: Value) -> String {
    let group = format!("{}.tables.example.com", api.unique(prefix));
    api.create_crd(&group, "widgets", "Widget").await;
    show(api, &group, columns).await;
    group
}

/// Changes the columns, and waits until the apiserver shows them.
async fn show(api: &ApiServer, group: &str, columns: Value) {
    let names: Vec<_> = columns.as_array().unwrap().iter().map(|column| column["name"].clone()).collect();
    let patch = json!([{ "op": "add", "path": "/spec/versions/0/additionalPrinterColumns", "value": columns }]);
    api.json_patch(&format!("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/widgets.{group}"), &patch).await;
    wait::until("the columns", wait::SOON, || async {
        let url = format!("{}/apis/{group}/v1/widgets?limit=1", api.url());
        let table = api.client().get(url).header("accept", TABLE).send().await.unwrap();
        let table: Value = serde_json::from_slice(&table.bytes().await.unwrap()).unwrap_or_default();
        let shown = table["columnDefinitions"].as_array()?.iter().skip(1).map(|column| column["name"].clone());
        shown.eq(names.iter().cloned()).then_some(())
    })
    .await;
}

#[expect(clippy::disallowed_methods, reason = "ages are of the wall clock")]
fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

fn seconds_ago(seconds: u64) -> String {
    let at = jiff::Timestamp::from_second(now() - i64::try_from(seconds).unwrap()).unwrap();
    at.to_string()
}

/// Creates a pod whose containers restarted this many seconds ago, given for its init containers
/// and its main container.
async fn restarted(api: &ApiServer, path: &str, name: &str, setup: Option<u64>, main: Option<u64>) {
    let mut pod = pod(name);
    pod["spec"]["initContainers"] = json!([
        { "name": "setup", "image": "registry.k8s.io/pause:3.10" },
        { "name": "sidecar", "image": "registry.k8s.io/pause:3.10", "restartPolicy": "Always" },
    ]);
    api.create(path, &pod).await;
    let container = |name: &str, ago: Option<u64>, state: Value| {
        let last = ago.map(|ago| json!({ "terminated": { "exitCode": 1, "finishedAt": seconds_ago(ago) } }));
        json!({
            "name": name, "image": "x", "imageID": "", "ready": true, "restartCount": ago.map_or(0, |_| 3),
            "lastState": last.unwrap_or(json!({})), "state": state, "started": true,
        })
    };
    let is_setting_up = main.is_none() && setup.is_some();
    let done = if is_setting_up { json!({ "running": {} }) } else { json!({ "terminated": { "exitCode": 0 } }) };
    let status = json!({ "status": {
        "phase": if is_setting_up { "Pending" } else { "Running" },
        "initContainerStatuses": [
            container("setup", setup, done), container("sidecar", setup.map(|ago| ago + 1000), json!({ "running": {} })),
        ],
        "containerStatuses": [container("main", main, json!({ "running": {} }))],
    } });
    api.patch(&format!("{path}/{name}/status"), &status).await;
}

async fn a_cached_table_equals_the_apiservers_to_the_byte() {
    let servers = Servers::start(ApiServer::shared().await, &["--cache-tables"]).await;
    let api = &servers.api;
    let columns = json!([
        { "name": "Size", "type": "integer", "jsonPath": ".spec.size" },
        { "name": "Made", "type": "date", "jsonPath": ".metadata.creationTimestamp", "priority": 1 },
    ]);
    let group = create_crd(api, "same", columns).await;
    let namespace = api.namespace("tables").await;
    let within = |rest: &str| format!("/api/v1/namespaces/{namespace}/{rest}");
    for n in 0..3 {
        api.create(&within("pods"), &pod(&format!("p{n}"))).await;
        let text = json!({ "metadata": { "name": format!("c{n}") }, "data": { "text": "<b>&\u{2028}ü\n\"" } });
        api.create(&within("configmaps"), &text).await;
        let widget = json!({
            "apiVersion": format!("{group}/v1"), "kind": "Widget", "metadata": { "name": format!("w{n}") },
            "spec": { "z": 1.0, "size": n },
        });
        api.create(&format!("/apis/{group}/v1/namespaces/{namespace}/widgets"), &widget).await;
    }
    api.patch(&within("pods/p2/status"), &json!({ "status": { "phase": "Succeeded" } })).await;
    for (name, setup, main) in
        [("r0", None, Some(200)), ("r1", Some(400), None), ("r2", Some(400), Some(90_000)), ("r3", Some(7000), None)]
    {
        restarted(api, &within("pods"), name, setup, main).await;
    }
    let widgets = format!("/apis/{group}/v1/namespaces/{namespace}/widgets");
    join_all([within("pods"), within("configmaps"), widgets.clone()].map(async |path| {
        let list = format!("{path}?resourceVersion=0");
        servers.is_cached(&list).await;
        servers.has_bookmark(&list).await;
        // Once with a new row, and once with a row that has been cached for a while.
        for is_old in [false, true] {
            if is_old {
                servers.age(&list).await;
            }
            let includes = ["", "&includeObject=None", "&includeObject=Metadata", "&includeObject=Object"];
            join_all(includes.map(async |include| {
                let query = format!("resourceVersion=0{include}");
                let table = servers.same(&format!("{path}?{query}")).await;
                assert!(table.contains("\"rows\":[{\"cells\":[\""), "{table}");
                servers.same(&format!("{path}?{query}&labelSelector=nothing%3Dhere")).await;
                servers.same(&format!("{path}?{query}&fieldSelector=metadata.name!%3Dp1,metadata.name!%3Dw1")).await;
                let watch = format!("{path}?watch=1&timeoutSeconds=5&{query}");
                let ends = "allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
                let initial = format!("{watch}&{ends}");
                let (watched, _) = join!(servers.same(&watch), servers.same(&initial));
                assert_eq!(watched.matches("\"columnDefinitions\":[").count(), 1);
            }))
            .await;
        }
    }))
    .await;
    // Other tests may create nodes.
    let no_nodes = "/api/v1/nodes?resourceVersion=0&fieldSelector=metadata.name%3Dnone";
    servers.is_cached(no_nodes).await;
    servers.same(no_nodes).await;
    let restarts = servers.same(&format!("{}?resourceVersion=0", within("pods"))).await;
    assert_eq!(restarts.matches(" ago)").count(), 4, "{restarts}");
    for path in [within("pods/p1"), within("pods/r2"), within("configmaps/c1"), format!("{widgets}/w1")] {
        for include in ["", "&includeObject=None", "&includeObject=Object"] {
            servers.same(&format!("{path}?resourceVersion=0{include}")).await;
        }
    }
    let missing = servers.same_failure(&within("pods/none?resourceVersion=0")).await;
    assert!(missing.contains("\"pods \\\"none\\\" not found\""), "{missing}");
    // Pages are served from the cache.
    let version = version_of(&api.get_json(&within("pods/r3")).await);
    let first = format!("{}?resourceVersion={version}&resourceVersionMatch=NotOlderThan&limit=4", within("pods"));
    let page = servers.ask(&first, false).await;
    let page: Value = serde_json::from_str(&page.body).unwrap();
    let token = page["metadata"]["continue"].as_str().unwrap();
    assert_eq!((page["rows"].as_array().unwrap().len(), &page["metadata"]["remainingItemCount"]), (4, &json!(3)));
    let rest = servers.same(&format!("{}?limit=4&continue={token}", within("pods"))).await;
    assert_eq!(rest.matches("{\"cells\":").count(), 3);
    api.delete_crd(&group, "widgets").await;
}

async fn a_watch_of_tables_equals_the_apiservers_and_sends_columns_once() {
    let servers = Servers::start(ApiServer::shared().await, &["--resource=configmaps", "--cache-tables"]).await;
    let api = &servers.api;
    let namespace = api.namespace("tables").await;
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    let configmap = |name: &str| json!({ "metadata": { "name": name, "labels": { "stage": "on" } }, "data": {} });
    let first = api.create(&path, &configmap("a")).await;
    servers.is_cached(&format!("{path}?resourceVersion=0")).await;
    let from = version_of(&first);
    let stage = |stage: &str| json!({ "metadata": { "labels": { "stage": stage } } });
    api.create(&path, &configmap("b")).await;
    api.patch(&format!("{path}/a"), &stage("off")).await;
    api.patch(&format!("{path}/a"), &stage("on")).await;
    api.patch(&format!("{path}/b"), &json!({ "data": { "text": "x" } })).await;
    api.delete(&format!("{path}/b")).await;
    let selectors = [("", 5), ("&labelSelector=stage%3Don", 5), ("&labelSelector=stage%3Doff", 2)];
    let watches = selectors.iter().flat_map(|of| ["None", "Metadata", "Object"].map(|include| (of, include)));
    join_all(watches.map(async |((selector, events), include)| {
        let query = format!("resourceVersion={from}&includeObject={include}&allowWatchBookmarks=true{selector}");
        let watch = format!("{path}?watch=1&timeoutSeconds=5&{query}");
        let events_text = servers.same_in(&watch, without_bookmarks).await;
        assert_eq!(events_text.lines().count(), *events, "{events_text}");
        assert_eq!(events_text.matches("\"columnDefinitions\":[").count(), 1, "{events_text}");
        assert!(events_text.lines().next().unwrap().contains("\"columnDefinitions\":["), "{events_text}");
    }))
    .await;
    api.delete(&format!("{path}/a")).await;
    // The status page has the cache in every form, and gRPC serves only JSON.
    let (_, status) = servers.kubefan.admin("/status").await.unwrap();
    let status: Value = serde_json::from_str(&status).unwrap();
    let caches = status["caches"].as_array().unwrap().iter().filter(|cache| cache["resource"] == "configmaps");
    let shown: BTreeSet<_> =
        caches.map(|cache| ["encoding", "state"].map(|key| cache[key].as_str().unwrap())).collect();
    assert_eq!(shown, BTreeSet::from([["json", "synced"], ["table", "synced"]]));
    let mut client = connect(servers.kubefan.grpc_addr).await;
    let listed = client.list_resources(ListResourcesRequest {}).await.unwrap().into_inner().resources;
    assert_eq!(listed.iter().filter(|status| status.name == "configmaps").count(), 1, "{listed:?}");
}

async fn changed_columns_of_a_custom_resource_are_picked_up() {
    let servers = Servers::start(ApiServer::shared().await, &["--cache-tables"]).await;
    let api = &servers.api;
    let group =
        create_crd(api, "columns", json!([{ "name": "Size", "type": "integer", "jsonPath": ".spec.size" }])).await;
    let path = format!("/apis/{group}/v1/namespaces/default/widgets");
    let widget = json!({
        "apiVersion": format!("{group}/v1"), "kind": "Widget", "metadata": { "name": "one" },
        "spec": { "size": 5, "color": "red" },
    });
    api.create(&path, &widget).await;
    let list = format!("{path}?resourceVersion=0");
    servers.is_cached(&list).await;
    // The change may take two checks of the schema, and it ends the watch.
    let watch = format!("{path}?watch=1&timeoutSeconds=180&resourceVersion=0");
    let watched = async { servers.ask(&watch, false).await.body };
    let changed = async {
        show(api, &group, json!([{ "name": "Color", "type": "string", "jsonPath": ".spec.color" }])).await;
    };
    let (watched, ()) = tokio::join!(watched, changed);
    assert!(watched.contains("\"type\":\"ERROR\"") && watched.contains("\"code\":410"), "{watched}");
    servers.is_cached(&list).await;
    let table = servers.same(&list).await;
    assert!(table.contains("\"red\"") && !table.contains("Size"), "{table}");
    api.delete_crd(&group, "widgets").await;
}

async fn tables_that_cannot_be_cached_come_from_upstream() {
    let servers =
        Servers::start(ApiServer::shared().await, &["--cache-tables", "--resource=jobs.batch,pods", "--on-demand"])
            .await;
    let api = &servers.api;
    let since = json!([{ "name": "Since", "type": "date", "jsonPath": ".status.at" }]);
    let group = create_crd(api, "relative", since).await;
    let widget = json!({ "apiVersion": format!("{group}/v1"), "kind": "Widget", "metadata": { "name": "one" } });
    api.create(&format!("/apis/{group}/v1/namespaces/default/widgets"), &widget).await;
    for path in ["/apis/batch/v1/jobs", "/api/v1/events", &format!("/apis/{group}/v1/widgets")] {
        // This watch would start the cache.
        let watch = servers.ask(&format!("{path}?resourceVersion=0&watch=1&timeoutSeconds=1"), false).await;
        assert!(watch.status.is_success() && !watch.is_cached, "{path}: {}", watch.body);
        let answer = servers.ask(&format!("{path}?resourceVersion=0"), false).await;
        assert!(answer.status.is_success() && !answer.is_cached, "{path}: {}", answer.body);
        assert!(answer.body.starts_with("{\"kind\":\"Table\""), "{}", answer.body);
    }
    let bad = servers.ask("/api/v1/pods?resourceVersion=0&includeObject=Some", false).await;
    assert!(bad.status == StatusCode::BAD_REQUEST && !bad.is_cached, "{}", bad.body);
    let without = Servers::start(ApiServer::shared().await, &["--resource=pods"]).await;
    let answer = without.ask("/api/v1/pods?resourceVersion=0", false).await;
    assert!(answer.status.is_success() && !answer.is_cached, "it is off by default");
    api.delete_crd(&group, "widgets").await;
}
