//! The Rust runner of the script in `clients/conformance`: it reads commands as lines of JSON, and
//! writes the client's reports as lines of JSON. The runners of the other languages are
//! `clients/go/internal/conformance`, `clients/python/tests/conformance` and
//! `clients/typescript/tests/conformance`; `clients/conformance/README.md` describes the lines.

use std::{
    collections::{BTreeMap, HashMap},
    io::{BufRead, Write},
    sync::{LazyLock, Mutex},
    time::Duration,
};

use futures::future::{AbortHandle, Abortable};
use kubefan_client::{
    BackoffOptions, Client, ClientError, ClientOptions, Deleted, Encoding, ListWatch, OnExpired, OnLag, Parts,
    Projection, RawJson, ReadOptions, ReflectorError, Registration, SharedInformer, Target, WatchItem, WatchOptions,
};
use serde_json::{Value, json};
use tokio::sync::mpsc;

const SYNC_AT_MOST: Duration = Duration::from_secs(60);

/// Reports of quiet sources: the number of each item.
static COUNTS: LazyLock<Mutex<HashMap<String, BTreeMap<String, u64>>>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Runner {
    clients: HashMap<String, Client>,
    watches: HashMap<String, AbortHandle>,
    informers: HashMap<String, Informer>,
    registrations: HashMap<String, Registration>,
}

struct Informer {
    informer: SharedInformer<RawJson>,
    stop: AbortHandle,
    running: tokio::task::JoinHandle<()>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let (lines, mut commands) = mpsc::channel::<String>(1);
    std::thread::spawn(move || {
        std::io::stdin().lock().lines().map_while(Result::ok).all(|it| lines.blocking_send(it).is_ok())
    });
    say(&json!({ "language": "rust", "lacks": ["changes", "fallback"] }));
    let mut runner = Runner::default();
    while let Some(line) = commands.recv().await {
        let command: Value = serde_json::from_str(&line).expect("a command is JSON");
        let mut reply = match runner.run(&command).await {
            Ok(done) => json!({ "ok": done }),
            Err(error) => json!({ "error": shown(&error) }),
        };
        reply["id"] = command["id"].clone();
        say(&reply);
    }
}

fn say(line: &Value) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).expect("the driver reads");
}

fn report(from: &str, mut item: Value) {
    if let Some(counts) = COUNTS.lock().expect("no holder panics").get_mut(from) {
        *counts.entry(text(&item, "item")).or_default() += 1;
        return;
    }
    item["from"] = from.into();
    say(&item);
}

fn text(command: &Value, field: &str) -> String {
    command[field].as_str().unwrap_or_default().to_owned()
}

fn millis(command: &Value, field: &str) -> Option<Duration> {
    command[field].as_u64().map(Duration::from_millis)
}

fn shown(error: &ClientError) -> Value {
    json!({
        "code": format!("{:?}", error.code()), "reason": error.reason(), "field": error.field(),
        "expired": error.is_expired(), "retryable": error.is_retryable(), "message": error.to_string(),
    })
}

impl Runner {
    async fn run(&mut self, command: &Value) -> Result<Value, ClientError> {
        let name = text(command, "as");
        if command["quiet"] == true {
            COUNTS.lock().expect("no holder panics").insert(name.clone(), BTreeMap::new());
        }
        match &*text(command, "op") {
            "connect" => {
                let address = text(command, "address");
                let options = client_options(command);
                let client = if command["lazy"] == true {
                    Client::connect_lazy(&address, &options).await?
                } else {
                    Client::connect(&address, &options).await?
                };
                self.clients.insert(name, client);
            }
            "list" => {
                let list = self.client(command).list(target(command), read_options(command)).await?;
                let objects: Vec<_> =
                    list.objects.iter().map(|it| object(&it.namespace, &it.name, &it.object)).collect();
                return Ok(json!({ "version": list.resource_version, "cluster": list.cluster, "objects": objects }));
            }
            "get" => {
                let got =
                    self.client(command).get(target(command), read_options(command)).await?.object.unwrap_or_default();
                return Ok(json!({ "objects": [object(&got.namespace, &got.name, &got.object)] }));
            }
            "list_resources" => {
                let caches = self.client(command).list_resources().await?;
                let names: Vec<_> = caches.into_iter().map(|it| it.resource.unwrap_or_default().resource).collect();
                return Ok(json!({ "resources": names }));
            }
            "watch" => {
                let watch = self.client(command).watch(target(command), watch_options(command));
                let (handle, registration) = AbortHandle::new_pair();
                self.watches.insert(name.clone(), handle);
                tokio::spawn(async move {
                    if Abortable::new(follow(watch, &name), registration).await.is_err() {
                        report(&name, json!({ "item": "end" }));
                    }
                });
            }
            "informer" => {
                let informer = self.informer(command, &name);
                self.informers.insert(name, informer);
            }
            "handler" => {
                let registration = handle(&self.informers[&text(command, "of")].informer, &name);
                self.registrations.insert(name, registration);
            }
            "wait_for_sync" => {
                let synced = self.registrations[&name].synced();
                let _ = tokio::time::timeout(SYNC_AT_MOST, synced).await;
            }
            "wait_until" => {
                let informer = &self.informers[&name].informer;
                let reached = informer.wait_until(&text(command, "resource_version"), SYNC_AT_MOST).await;
                return Ok(json!({ "reached": reached.is_ok() }));
            }
            "store" => {
                let stored = self.informers[&name].informer.indexer().list();
                let objects: serde_json::Map<_, _> =
                    stored.iter().map(|it| (it.key().to_string(), json!([it.resource_version(), it.uid()]))).collect();
                return Ok(json!({ "objects": objects }));
            }
            "counts" => {
                let counts = COUNTS.lock().expect("no holder panics").get(&name).cloned();
                return Ok(json!({ "counts": counts.unwrap_or_default() }));
            }
            "close" => self.close(&name).await,
            "reset" => {
                for name in self.watches.keys().chain(self.informers.keys()).cloned().collect::<Vec<_>>() {
                    self.close(&name).await;
                }
                *self = Runner::default();
                COUNTS.lock().expect("no holder panics").clear();
            }
            other => panic!("{other} is no command"),
        }
        Ok(json!({}))
    }

    fn client(&self, command: &Value) -> Client {
        self.clients[&text(command, "client")].clone()
    }

    fn informer(&mut self, command: &Value, name: &str) -> Informer {
        let target = target(command);
        let options = watch_options(command);
        let backoff = options.backoff.clone();
        let source = ListWatch::new(self.client(command), &target.resource, &target.namespace, &target.field_selector)
            .label_selector(&target.label_selector)
            .tweak_grpc(|it| *it = options);
        let informer = SharedInformer::<RawJson>::builder(source).backoff(backoff).build();
        let from = name.to_owned();
        informer.on_error(move |error| {
            let error = match error {
                ReflectorError::Client(error) => shown(error),
                other => json!({ "message": other.to_string() }),
            };
            report(&from, json!({ "item": "error", "error": error }));
        });
        self.registrations.insert(name.to_owned(), handle(&informer, name));
        let (stop, stopped) = AbortHandle::new_pair();
        let run = informer.clone();
        let running = tokio::spawn(async move {
            let _ = run.run(Abortable::new(std::future::pending::<()>(), stopped)).await;
        });
        Informer { informer, stop, running }
    }

    async fn close(&mut self, name: &str) {
        if let Some(watch) = self.watches.remove(name) {
            watch.abort();
        }
        if let Some(informer) = self.informers.remove(name) {
            informer.stop.abort();
            let _ = informer.running.await;
            report(name, json!({ "item": "end" }));
        }
        self.clients.remove(name);
    }
}

/// Adds a handler that reports each call.
fn handle(informer: &SharedInformer<RawJson>, from: &str) -> Registration {
    let [added, updated, deleted] = [(); 3].map(|()| from.to_owned());
    let handler = informer
        .handler()
        .on_add(move |it, initial| {
            report(&added, json!({ "item": "add", "key": it.key().as_str(), "initial": initial, "version": it.resource_version() }));
        })
        .on_update(move |old, new| {
            report(&updated, json!({
                "item": "update", "key": new.key().as_str(), "version": new.resource_version(), "old": old.resource_version(),
            }));
        })
        .on_delete(move |it| {
            let unknown = matches!(it, Deleted::FinalStateUnknown(_));
            report(&deleted, json!({ "item": "delete", "key": it.key().as_str(), "unknown": unknown }));
        });
    informer.add_event_handler(handler).expect("the informer takes a handler")
}

/// Reports every item of a watch.
async fn follow(mut watch: kubefan_client::WatchStream, from: &str) {
    while let Some(next) = watch.next().await {
        let mut item = match next {
            Ok(item) => shown_item(&item),
            Err(error) => json!({ "item": "failed", "error": shown(&error) }),
        };
        item["resume"] = watch.resume_version().into();
        item["cluster"] = watch.cluster().into();
        report(from, item);
    }
    report(from, json!({ "item": "end" }));
}

fn shown_item(item: &WatchItem) -> Value {
    match item {
        WatchItem::SnapshotBegin { restarted_from, .. } => {
            json!({ "item": "snapshot_begin", "restarted_from": restarted_from })
        }
        WatchItem::SnapshotEnd { object_count } => json!({ "item": "snapshot_end", "count": object_count }),
        WatchItem::Event(event) => {
            let mut item = object(&event.namespace, &event.name, &event.object);
            item["item"] = "event".into();
            item["type"] = event.r#type().as_str_name().trim_start_matches("EVENT_TYPE_").into();
            item["delete_reason"] = event.delete_reason().as_str_name().trim_start_matches("DELETE_REASON_").into();
            item["uid"] = (&*event.uid).into();
            item["version"] = (&*event.resource_version).into();
            item
        }
        WatchItem::GapBegin { reason, .. } => json!({ "item": "gap_begin", "reason": reason }),
        WatchItem::GapEnd => json!({ "item": "gap_end" }),
        WatchItem::CatchUpBegin { .. } => json!({ "item": "catch_up_begin" }),
        WatchItem::CatchUpEnd => json!({ "item": "catch_up_end" }),
        WatchItem::Bookmark => json!({ "item": "bookmark" }),
        WatchItem::Disconnected { error, .. } => json!({ "item": "disconnected", "error": shown(error) }),
        WatchItem::Reconnected { .. } => json!({ "item": "reconnected" }),
        WatchItem::Restarted { error } => json!({ "item": "restarted", "error": shown(error) }),
    }
}

fn object(namespace: &str, name: &str, json: &[u8]) -> Value {
    let key = if namespace.is_empty() { name.to_owned() } else { format!("{namespace}/{name}") };
    json!({ "key": key, "object": String::from_utf8_lossy(json) })
}

fn client_options(command: &Value) -> ClientOptions {
    let default = ClientOptions::default();
    ClientOptions {
        ca_file: command["ca_file"].as_str().map(Into::into),
        server_name: command["server_name"].as_str().map(Into::into),
        token: command["token"].as_str().map(Into::into),
        token_file: command["token_file"].as_str().map(Into::into),
        connect_timeout: millis(command, "connect_timeout_ms").unwrap_or(default.connect_timeout),
        keepalive_interval: millis(command, "keepalive_interval_ms").unwrap_or(default.keepalive_interval),
        keepalive_timeout: millis(command, "keepalive_timeout_ms").unwrap_or(default.keepalive_timeout),
        ..default
    }
}

fn target(command: &Value) -> Target {
    Target {
        resource: text(command, "resource"),
        namespace: text(command, "namespace"),
        name: text(command, "name"),
        label_selector: text(command, "label_selector"),
        field_selector: text(command, "field_selector"),
        ..Target::default()
    }
}

fn projection(command: &Value) -> Projection {
    let parts = if let Some(fields) = command["fields"].as_array() {
        Parts::Fields(fields.iter().filter_map(|it| it.as_str().map(Into::into)).collect())
    } else if command["metadata_only"] == true {
        Parts::Metadata
    } else {
        Parts::Full
    };
    Projection { parts, drop_managed_fields: command["drop_managed_fields"] == true, ..Projection::default() }
}

fn read_options(command: &Value) -> ReadOptions {
    let resource_version = text(command, "resource_version");
    ReadOptions { resource_version, projection: projection(command), ..ReadOptions::default() }
}

fn watch_options(command: &Value) -> WatchOptions {
    let mut options = WatchOptions {
        resource_version: text(command, "resource_version"),
        cluster: text(command, "cluster"),
        timeout: millis(command, "timeout_ms"),
        bookmark_interval: millis(command, "bookmark_interval_ms"),
        projection: projection(command),
        only_changes: command["only_changes"] == true,
        backoff: BackoffOptions {
            initial: Duration::from_millis(50),
            max: Duration::from_millis(500),
            ..BackoffOptions::default()
        },
        ..WatchOptions::default()
    };
    match &*text(command, "encoding") {
        "zstd" => options.encoding = Encoding::Zstd,
        "zstd-delta" => options.encoding = Encoding::ZstdDelta,
        _ => {}
    }
    match &*text(command, "on_expired") {
        "fail" => options.on_expired = OnExpired::Fail,
        "restart" => options.on_expired = OnExpired::Restart,
        _ => {}
    }
    match &*text(command, "on_lag") {
        "expire" => options.on_lag = OnLag::Expire,
        "conflate" => options.on_lag = OnLag::Conflate,
        _ => {}
    }
    options
}
