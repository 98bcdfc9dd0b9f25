//! WATCH.

use serde_json::json;

use super::api::{Api, Event, version};

fn short(events: &[Event]) -> Vec<String> {
    events.iter().map(Event::short).collect()
}

async fn abc(api: &Api) -> String {
    let path = api.config_maps().await;
    for name in ["b", "a", "c"] {
        api.config_map(&path, name, json!({"app": "x"})).await;
    }
    path
}

pub(crate) async fn a_watch_without_version_starts_with_the_current_state(api: &Api) {
    let path = abc(api).await;
    let list = api.get(&path).await.ok();
    for query in ["", "?resourceVersion=0"] {
        let mut events = api.watch(&format!("{path}{query}")).await;
        let state = events.take(3).await;
        assert_eq!(short(&state), ["ADDED a", "ADDED b", "ADDED c"]);
        for (event, item) in state.iter().zip(list["items"].as_array().unwrap()) {
            assert_eq!(event.version(), version(item), "each has its own version");
        }
        let name = if query.is_empty() { "d" } else { "e" };
        let written = api.config_map(&path, name, json!({})).await;
        // A watch from any version may start before the previous round's write.
        let event = loop {
            let event = events.next().await.unwrap();
            if event.name() == name {
                break event;
            }
        };
        assert_eq!((&*event.kind, event.version()), ("ADDED", written));
        api.delete(&format!("{path}/{name}")).await.ok();
        let event = events.next().await.unwrap();
        assert_eq!(event.short(), format!("DELETED {name}"));
        assert!(event.version() > written, "a delete has a version of its own");
    }
}

pub(crate) async fn initial_events_end_with_a_bookmark(api: &Api) {
    let path = abc(api).await;
    let newest = version(&api.get(&path).await.ok());
    for query in [
        "allowWatchBookmarks=true".to_owned(),
        "allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan".to_owned(),
        format!(
            "allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion={newest}"
        ),
    ] {
        let mut events = api.watch(&format!("{path}?{query}")).await;
        let events = events.take(4).await;
        assert_eq!(short(&events), ["ADDED a", "ADDED b", "ADDED c", "BOOKMARK "], "{query}");
        let end = &events[3];
        assert!(end.version() >= newest);
        let metadata = format!(
            r#"{{"resourceVersion":"{}","annotations":{{"k8s.io/initial-events-end":"true"}}}}"#,
            end.version()
        );
        let object = format!(r#"{{"kind":"ConfigMap","apiVersion":"v1","metadata":{metadata}}}"#);
        assert_eq!(end.line, format!("{{\"type\":\"BOOKMARK\",\"object\":{object}}}\n"));
    }
    // Without allowWatchBookmarks there is no bookmark.
    let query = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&timeoutSeconds=5";
    let events = api.watch(&format!("{path}?{query}")).await.rest().await;
    assert_eq!(short(&events), ["ADDED a", "ADDED b", "ADDED c"]);
    // A bookmark contains the zero value of its type.
    for (resource, rest) in [
        ("pods", r#""spec":{"containers":null},"status":{}"#),
        ("services", r#""spec":{},"status":{"loadBalancer":{}}"#),
        ("namespaces", r#""spec":{},"status":{}"#),
    ] {
        let query = "watch=true&allowWatchBookmarks=true&labelSelector=no%3Dsuch";
        let mut events = api.stream(&format!("/api/v1/{resource}?{query}")).await;
        let line = events.next().await.unwrap().line;
        assert!(line.ends_with(&format!("\"true\"}}}},{rest}}}}}\n")), "{line}");
    }
}

pub(crate) async fn a_watch_from_a_version_sends_only_later_events_up_to_its_timeout(api: &Api) {
    let path = api.config_maps().await;
    let a = api.config_map(&path, "a", json!({})).await;
    let b = api.config_map(&path, "b", json!({})).await;
    let changed = version(&api.patch(&format!("{path}/a"), &json!({"data": {"k": "v"}})).await.ok());
    let mut events = api.watch(&format!("{path}?resourceVersion={a}")).await;
    let replayed = events.take(2).await;
    assert_eq!(short(&replayed), ["ADDED b", "MODIFIED a"]);
    assert_eq!((replayed[0].version(), replayed[1].version()), (b, changed));
    api.delete(&format!("{path}/b")).await.ok();
    let deleted = events.next().await.unwrap();
    assert_eq!(deleted.short(), "DELETED b");
    // Without initial events it starts now.
    let query = "sendInitialEvents=false&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    let mut now = api.watch(&format!("{path}?{query}")).await;
    for seconds in ["1", "-1"] {
        let query = format!("resourceVersion={}&timeoutSeconds={seconds}", deleted.version());
        let events = api.watch(&format!("{path}?{query}")).await;
        assert_eq!(events.code, 200);
        assert_eq!(events.rest().await, [], "{seconds} s");
    }
    api.config_map(&path, "d", json!({})).await;
    assert_eq!(now.next().await.unwrap().short(), "ADDED d");
}

pub(crate) async fn entering_a_label_selector_is_added_and_leaving_it_is_deleted(api: &Api) {
    let path = api.config_maps().await;
    let start = api.config_map(&path, "in", json!({"app": "x"})).await;
    api.config_map(&path, "out", json!({"app": "y"})).await;
    let mut events = api.watch(&format!("{path}?labelSelector=app%3Dx&resourceVersion={start}")).await;
    let app = |app: &str| json!({"metadata": {"labels": {"app": app}}});
    let entered = api.patch(&format!("{path}/out"), &app("x")).await.ok();
    let changed = api.patch(&format!("{path}/out"), &json!({"data": {"k": "v"}})).await.ok();
    let left = version(&api.patch(&format!("{path}/out"), &app("z")).await.ok());
    // Changes outside of the selector send no events.
    api.patch(&format!("{path}/out"), &json!({"data": {"k": "w"}})).await.ok();
    api.delete(&format!("{path}/out")).await.ok();
    api.delete(&format!("{path}/in")).await.ok();
    let received = events.take(4).await;
    assert_eq!(short(&received), ["ADDED out", "MODIFIED out", "DELETED out", "DELETED in"]);
    assert_eq!((&received[0].object, &received[1].object), (&entered, &changed));
    // An object that leaves the selector is sent as it was when last selected, with the version of
    // the change that removed it.
    let mut last = changed;
    last["metadata"]["resourceVersion"] = left.to_string().into();
    assert_eq!(received[2].object, last);
    assert!(received[3].version() > left && received[3].object["metadata"]["labels"]["app"] == "x");
}

pub(crate) async fn entering_a_field_selector_is_added_and_leaving_it_is_deleted(api: &Api) {
    let path = format!("{}/pods", api.namespace().await);
    let pod = |name: &str, node: &str| {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"nodeName": node, "containers": [{"name": "c", "image": "example.com/c"}]}})
    };
    let start = version(&api.post(&path, &pod("a", "n1")).await.ok());
    let phase = "fieldSelector=status.phase%3DRunning";
    let mut running = api.watch(&format!("{path}?{phase}&resourceVersion={start}")).await;
    let mut on_node = api.watch(&format!("{path}?fieldSelector=spec.nodeName%3Dn1&resourceVersion={start}")).await;
    api.post(&path, &pod("b", "n2")).await.ok();
    for phase in ["Running", "Succeeded"] {
        for name in ["a", "b"] {
            api.patch(&format!("{path}/{name}/status"), &json!({"status": {"phase": phase}})).await.ok();
        }
    }
    let received = running.take(4).await;
    assert_eq!(short(&received), ["ADDED a", "ADDED b", "DELETED a", "DELETED b"]);
    assert_eq!(received[2].object["status"]["phase"], "Running");
    assert_eq!(short(&on_node.take(2).await), ["MODIFIED a", "MODIFIED a"]);
    let list = api.get(&format!("{path}?fieldSelector=spec.host%3Dn2,status.phase!%3DRunning")).await.ok();
    assert_eq!(super::api::names(&list), ["b"]);
}

pub(crate) async fn a_watch_sends_only_its_namespace_and_name(api: &Api) {
    let here = api.config_maps().await;
    let there = api.config_maps().await;
    let start = api.config_map(&here, "a", json!({})).await;
    let mut events = api.watch(&format!("{here}?resourceVersion={start}")).await;
    let mut named = api.watch(&format!("{here}?resourceVersion={start}&fieldSelector=metadata.name%3Dc")).await;
    for name in ["b", "c"] {
        api.config_map(&there, name, json!({})).await;
        api.config_map(&here, name, json!({})).await;
    }
    assert_eq!(short(&events.take(2).await), ["ADDED b", "ADDED c"]);
    let event = named.next().await.unwrap();
    assert_eq!(event.short(), "ADDED c");
    assert!(here.contains(event.object["metadata"]["namespace"].as_str().unwrap()));
}

pub(crate) async fn a_bookmark_precedes_the_timeout(api: &Api) {
    let path = api.config_maps().await;
    let start = api.config_map(&path, "a", json!({})).await;
    // The write must end before the bookmark, which comes two seconds before the end.
    let query = format!("resourceVersion={start}&allowWatchBookmarks=true&timeoutSeconds=10");
    let events = api.watch(&format!("{path}?{query}")).await;
    let written = api.config_map(&path, "b", json!({})).await;
    let events = events.rest().await;
    // The final bookmark may come early and then again.
    let (added, bookmarks) = events.split_first().unwrap();
    assert_eq!(added.short(), "ADDED b");
    assert!((1..=2).contains(&bookmarks.len()), "{bookmarks:?}");
    for bookmark in bookmarks {
        assert!(bookmark.kind == "BOOKMARK" && bookmark.version() >= written);
        let metadata = format!(r#"{{"resourceVersion":"{}"}}"#, bookmark.version());
        assert!(bookmark.line.contains(&format!("\"metadata\":{metadata}}}")), "{}", bookmark.line);
    }
}

pub(crate) async fn the_deprecated_watch_path_starts_with_the_current_state(api: &Api) {
    let path = abc(api).await;
    let old = path.replace("/api/v1/", "/api/v1/watch/");
    let mut events = api.stream(&format!("{old}?timeoutSeconds=5&allowWatchBookmarks=true")).await.rest().await;
    // A bookmark may precede the timeout; none ends the initial events.
    events.retain(|event| event.kind != "BOOKMARK" || !event.object["metadata"]["annotations"].is_null());
    assert_eq!(short(&events), ["ADDED a", "ADDED b", "ADDED c"]);
    let events = api.stream(&format!("{old}/b?timeoutSeconds=5")).await.rest().await;
    assert_eq!(short(&events), ["ADDED b"]);
}
