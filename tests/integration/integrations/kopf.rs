//! An operator with kopf, in tests/kopf. In a shared namespace it follows ConfigMaps; in a
//! namespace of its own it handles widgets, to which kopf writes finalizers, annotations and
//! results.
//!
//! kopf handles the latest state of an object, so changes in quick succession may become one call.
//! The test changes an object again only after the last change was handled: then both operators
//! must have the same calls.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    process::Command,
};

use serde_json::{Value, json};

use super::{CHANGES, COPIES, SETTLED_AT_MOST, Server, Setting, counts, pages};
use crate::{
    harness::{
        apiserver::ApiServer,
        audit::Audit,
        process::{Process, free_port},
        tests, tools, wait,
    },
    quiet::Table,
};

tests! {
    python slow_programs: kopf_makes_the_same_calls_through_kubefan;
    local: the_page_of_kopf_shows_the_operator;
}

const PAGE: &str = "kopf.md";
const DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kopf");
const GROUP: &str = "integrations.example.com";
const SHARED: &str = "shared";
/// The ConfigMap that exists before the operators.
const FIRST: &str = "first";
/// Number of ConfigMaps, and of widgets.
const OBJECTS: usize = 25;
/// Number of times that each of them changes.
const ROUNDS: usize = CHANGES / OBJECTS / 2;

async fn the_page_of_kopf_shows_the_operator() {
    pages::assert_shows(PAGE, "python", "tests/kopf/handlers.py");
}

async fn kopf_makes_the_same_calls_through_kubefan() {
    let python = tools::python("kopf", &Path::new(DIR).join("requirements.txt"));
    let audit = Audit::of_all();
    let api = ApiServer::start(audit.options()).await;
    api.create_crd(GROUP, "widgets", "Widget").await;
    let setting = Setting::with(api, audit, PAGE).await;
    let api = &setting.world.api;
    let servers = [&setting.direct, &setting.through];
    for namespace in [SHARED, &own(servers[0]), &own(servers[1])] {
        api.create("/api/v1/namespaces", &json!({ "metadata": { "name": namespace } })).await;
    }
    let first = json!({ "metadata": { "name": FIRST }, "data": { "change": FIRST } });
    api.create(&format!("/api/v1/namespaces/{SHARED}/configmaps"), &first).await;
    let columns = counts::COLUMNS;
    let mut table = Table::new("kopf: requests at the apiserver, and handler calls of each operator", &columns);

    let mut operators = servers.map(|server| vec![Operator::start(&python, &setting, server, &own(server))]);
    // Once it has this one, it watches, and every further change is an event.
    let mut store = BTreeMap::from([(FIRST.to_owned(), json!([FIRST]))]);
    stores_are(&operators, &store).await;
    setting.counts().await.rows(&mut table, "started", 1, 1);

    for round in 0..ROUNDS {
        for object in 0..OBJECTS {
            change(api, &format!("/api/v1/namespaces/{SHARED}/configmaps"), "data", object, round).await;
            for server in servers {
                let widgets = format!("/apis/{GROUP}/v1/namespaces/{}/widgets", own(server));
                change(api, &widgets, "spec", object, round).await;
            }
            if is_deletion(object, round) {
                store.remove(&name_of(object))
            } else {
                store.insert(name_of(object), json!([round.to_string()]))
            };
        }
        for operator in operators.iter().flatten() {
            operator.called(1 + 2 * OBJECTS * (round + 1)).await;
        }
    }
    let [direct, through] = operators.each_ref().map(|operators| operators[0].calls());
    // Events, creations and changes of all, and the deletions of some.
    assert_eq!(direct.len(), 1 + 3 * OBJECTS + OBJECTS.div_ceil(2), "{:?}", direct.keys());
    assert_eq!(direct, through);
    stores_are(&operators, &store).await;
    let one = setting.counts().await;
    one.rows(&mut table, &format!("after {CHANGES} changes"), 1, 1 + 2 * OBJECTS * ROUNDS);

    // More copies would handle the same widgets, so these have none.
    for _ in 1..COPIES {
        for (server, operators) in servers.iter().zip(&mut operators) {
            operators.push(Operator::start(&python, &setting, server, SHARED));
        }
    }
    stores_are(&operators, &store).await;
    let all = setting.counts().await;
    all.rows(&mut table, "more copies started", COPIES, 1 + 2 * OBJECTS * ROUNDS);
    println!("{table}");
    // kopf lists the namespaces without a version, when it starts with `--namespace`.
    all.assert_only_direct_copies_cost(&one, &["/api/v1/namespaces"]);
}

fn own(server: &Server) -> String {
    format!("own-{}", server.account)
}

fn name_of(object: usize) -> String {
    format!("object-{object}")
}

/// Every other object is deleted at the end.
fn is_deletion(object: usize, round: usize) -> bool {
    round == ROUNDS - 1 && object.is_multiple_of(2)
}

async fn change(api: &ApiServer, collection: &str, field: &str, object: usize, round: usize) {
    let name = name_of(object);
    let change = json!({ "change": round.to_string() });
    let path = format!("{collection}/{name}");
    match round {
        0 => {
            let mut new = json!({ "metadata": { "name": name }, field: change });
            if field == "spec" {
                new["apiVersion"] = json!(format!("{GROUP}/v1"));
                new["kind"] = json!("Widget");
            }
            api.create(collection, &new).await;
        }
        _ if is_deletion(object, round) => drop(api.delete(&path).await),
        _ => drop(api.patch(&path, &json!({ field: change })).await),
    }
}

/// Waits until the index of each operator has these ConfigMaps.
async fn stores_are(operators: &[Vec<Operator>; 2], wanted: &BTreeMap<String, Value>) {
    for operator in operators.iter().flatten() {
        let equal = wait::try_until(SETTLED_AT_MOST, || async {
            let store = operator.store().await?;
            (store == json!(wanted)).then_some(())
        });
        if equal.await.is_none() {
            let store = operator.store().await;
            panic!("the index is\n{store:?}\nand not\n{wanted:?}\nkopf printed\n{}", operator.process.log());
        }
    }
}

/// A running kopf.
struct Operator {
    process: Process,
    port: u16,
}

impl Operator {
    fn start(python: &Path, setting: &Setting, server: &Server, namespace: &str) -> Operator {
        let port = free_port();
        let dir = setting.file("kopf");
        std::fs::create_dir(&dir).unwrap();
        let mut command = Command::new(python);
        command.args(["-m", "kopf", "run", "--standalone", "--log-format=plain"]);
        for namespace in BTreeSet::from([SHARED, namespace]) {
            command.args(["--namespace", namespace]);
        }
        command
            .args(["--liveness", &format!("http://127.0.0.1:{port}/healthz")])
            .arg(Path::new(DIR).join("handlers.py"));
        command.env("OPERATOR_SERVER", &server.url);
        command.env("OPERATOR_CA_FILE", &server.ca_file).env("OPERATOR_TOKEN_FILE", &server.token_file);
        Operator { process: Process::spawn_apart("kopf", &mut command, &dir), port }
    }

    /// Content of its index. kopf computes the answer at most every ten seconds.
    async fn store(&self) -> Option<Value> {
        let answer = reqwest::get(format!("http://127.0.0.1:{}/healthz", self.port)).await.ok()?;
        serde_json::from_str::<Value>(&answer.text().await.ok()?).ok()?.get("store").cloned()
    }

    fn printed(&self) -> Vec<Value> {
        self.process.log().lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Waits until its handlers were called this often.
    async fn called(&self, times: usize) {
        let called = wait::try_until(SETTLED_AT_MOST, || async { (self.printed().len() >= times).then_some(()) });
        let in_time = called.await.is_some();
        assert!(in_time, "{} of {times} calls; kopf printed\n{}", self.printed().len(), self.process.log());
    }

    /// The calls of each handler for each object, in order.
    fn calls(&self) -> BTreeMap<(String, String), Vec<Value>> {
        let mut calls: BTreeMap<_, Vec<Value>> = BTreeMap::new();
        for call in self.printed() {
            let [handler, name] = ["handler", "name"].map(|key| call[key].as_str().unwrap().to_owned());
            calls.entry((handler, name)).or_default().push(call["what"].clone());
        }
        calls
    }
}
