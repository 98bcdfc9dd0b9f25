//! LIST and GET.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use futures::future::join_all;
use serde_json::{Value, json};

use super::api::{Answer, Api, names, unique, version};

async fn five(api: &Api) -> String {
    let path = api.config_maps().await;
    for name in ["a", "b", "c", "d", "e"] {
        let app = if name < "c" { "x" } else { "y" };
        api.config_map(&path, name, json!({"app": app})).await;
    }
    path
}

fn is_too_large(answer: &Answer, asked: u64) {
    let status = answer.json();
    let message = status["message"].as_str().unwrap();
    assert!(message.starts_with(&format!("Timeout: Too large resource version: {asked}, current: ")), "{message}");
    answer.fails(504, "Timeout", message);
    let causes = json!([{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]);
    assert_eq!(status["details"], json!({"causes": causes, "retryAfterSeconds": 1}));
    assert_eq!(answer.retry_after.as_deref(), Some("1"));
}

pub(crate) async fn a_list_without_version_sees_every_finished_write(api: &Api) {
    let path = api.config_maps().await;
    for round in 0..10 {
        let written = api.config_map(&path, &format!("m{round}"), json!({})).await;
        let list = api.get(&path).await.ok();
        assert_eq!(names(&list).len(), round + 1);
        assert!(version(&list) >= written);
    }
}

pub(crate) async fn a_list_item_of_a_built_in_type_has_no_kind(api: &Api) {
    let path = api.config_maps().await;
    api.config_map(&path, "a", json!({"x": "y"})).await;
    let list = api.get(&path).await;
    assert!(list.text.starts_with(r#"{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":""#));
    assert!(list.text.ends_with("]}\n"), "{}", list.text);
    let item = list.text.split_once(r#""items":["#).unwrap().1;
    let rest = item.strip_suffix("]}\n").unwrap();
    assert!(rest.starts_with(r#"{"metadata":{"name":"a","namespace":""#), "{rest}");
    // A get and a watch send the same bytes after the kind.
    let whole = format!(r#"{{"kind":"ConfigMap","apiVersion":"v1",{}"#, &rest[1..]);
    assert_eq!(api.get(&format!("{path}/a")).await.text, format!("{whole}\n"));
    let mut events = api.watch(&path).await;
    assert_eq!(events.next().await.unwrap().line, format!("{{\"type\":\"ADDED\",\"object\":{whole}}}\n"));
}

pub(crate) async fn version_match_and_limit_decide_which_state_is_listed(api: &Api) {
    let path = api.config_maps().await;
    for query in ["", "?resourceVersion=0", "?limit=1", "?labelSelector=no%3Dsuch"] {
        let list = api.get(&format!("{path}{query}")).await;
        assert!(list.text.ends_with("\"items\":[]}\n"), "{query} {}", list.text);
    }
    api.config_map(&path, "a", json!({})).await;
    let then = api.config_map(&path, "b", json!({"old": "yes"})).await;
    api.patch(&format!("{path}/b"), &json!({"metadata": {"labels": {"old": "no"}}})).await.ok();
    for name in ["c", "d"] {
        api.config_map(&path, name, json!({})).await;
    }
    api.delete(&format!("{path}/a")).await.ok();
    let now = version(&api.get(&path).await.ok());
    for (query, is_exact, listed) in [
        (format!("resourceVersion={then}&limit=10"), true, "ab"),
        (format!("resourceVersion={then}&resourceVersionMatch=Exact"), true, "ab"),
        (format!("resourceVersion={now}"), false, "bcd"),
        (format!("resourceVersion={now}&resourceVersionMatch=NotOlderThan"), false, "bcd"),
        (format!("resourceVersion={now}&resourceVersionMatch=NotOlderThan&limit=2"), false, "bc"),
    ] {
        let list = api.get(&format!("{path}?{query}")).await.ok();
        assert_eq!(names(&list).concat(), listed, "{query}");
        if is_exact {
            assert_eq!(
                (version(&list), &list["items"][1]["metadata"]["labels"]["old"]),
                (then, &json!("yes")),
                "{query}"
            );
        } else {
            assert!(version(&list) >= now, "{query}: {list}");
        }
        let remaining = if query.contains("limit=2") { json!(1) } else { Value::Null };
        assert_eq!(list["metadata"]["remainingItemCount"], remaining, "{query}");
    }
    // A list of any version may be older than the writes, but it must not be paged.
    let list = api.get(&format!("{path}?resourceVersion=0&limit=1")).await.ok();
    assert!(list["metadata"].get("continue").is_none(), "{list}");
}

pub(crate) async fn a_list_of_metadata_has_the_same_names_and_versions(api: &Api) {
    let path = five(api).await;
    let plain = api.get(&format!("{path}?limit=2")).await.ok();
    let only = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
    for accept in [only.to_owned(), format!("{only},application/json")] {
        let then = version(&plain);
        let query = format!("limit=2&resourceVersion={then}&resourceVersionMatch=Exact");
        let answer = api.get_as(&format!("{path}?{query}"), &accept).await;
        let begin =
            r#"{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","metadata":{"resourceVersion":""#;
        assert!(answer.text.starts_with(begin), "{}", answer.text);
        let list = answer.ok();
        assert_eq!((version(&list), names(&list)), (then, vec!["a", "b"]));
        assert_eq!(list["metadata"]["remainingItemCount"], 3);
        for (item, whole) in list["items"].as_array().unwrap().iter().zip(plain["items"].as_array().unwrap()) {
            let mut metadata = item["metadata"].clone();
            let mut expected = whole["metadata"].clone();
            for metadata in [&mut metadata, &mut expected] {
                metadata.as_object_mut().unwrap().remove("managedFields");
            }
            assert_eq!(metadata, expected);
            let fields: Vec<_> = item.as_object().unwrap().keys().collect();
            assert_eq!(fields, ["apiVersion", "kind", "metadata"], "and nothing else");
            assert_eq!(item["kind"], "PartialObjectMetadata");
        }
        let next = list["metadata"]["continue"].as_str().unwrap();
        let rest = api.get_as(&format!("{path}?continue={next}"), &accept).await.ok();
        assert_eq!((version(&rest), names(&rest)), (then, vec!["c", "d", "e"]));
    }
}

pub(crate) async fn a_future_version_is_waited_for(api: &Api) {
    let path = five(api).await;
    let future = version(&api.get(&path).await.ok()) + 1_000_000;
    let [list, object] = ["", "/a"].map(|name| format!("{path}{name}?resourceVersion={future}"));
    let exact = format!("{list}&resourceVersionMatch=Exact");
    let reads = async {
        for answer in join_all([&list, &exact, &object].map(|path| api.get(path))).await {
            is_too_large(&answer, future);
        }
    };
    let initial = async {
        let query = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
        let events = api.watch(&format!("{list}&{query}")).await;
        assert_eq!(events.code, 200);
        let events = events.rest().await;
        assert_eq!((events.len(), &*events[0].kind), (1, "ERROR"));
        let status = &events[0].object;
        assert_eq!((&status["code"], &status["reason"]), (&json!(504), &json!("Timeout")));
        assert_eq!(status["details"]["causes"][0]["reason"], "ResourceVersionTooLarge");
    };
    let watch = async {
        let events = api.watch(&format!("{list}&timeoutSeconds=2")).await;
        assert_eq!(events.code, 200);
        api.config_map(&path, "f", json!({})).await;
        assert_eq!(events.rest().await, []);
    };
    tokio::join!(reads, initial, watch);
}

pub(crate) async fn all_pages_have_the_version_of_the_first(api: &Api) {
    let path = five(api).await;
    let first = api.get(&format!("{path}?limit=2")).await.ok();
    assert_eq!((names(&first), &first["metadata"]["remainingItemCount"]), (vec!["a", "b"], &json!(3)));
    let next = first["metadata"]["continue"].as_str().unwrap();
    let decoded: Value = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(next).unwrap()).unwrap();
    assert_eq!(decoded, json!({"v": "meta.k8s.io/v1", "rv": version(&first), "start": "/b\0"}));
    // Changes between the pages must not appear in them.
    api.delete(&format!("{path}/d")).await.ok();
    api.config_map(&path, "bb", json!({})).await;
    let second = api.get(&format!("{path}?limit=2&continue={next}")).await.ok();
    assert_eq!((names(&second), version(&second)), (vec!["c", "d"], version(&first)));
    assert_eq!(second["metadata"]["remainingItemCount"], 1);
    let next = second["metadata"]["continue"].as_str().unwrap();
    let third = api.get(&format!("{path}?limit=2&continue={next}&resourceVersion=0")).await.ok();
    assert_eq!((names(&third), version(&third)), (vec!["e"], version(&first)));
    assert!(third["metadata"].get("continue").is_none() && third["metadata"].get("remainingItemCount").is_none());
    // With a selector the rest is not counted.
    let page = api.get(&format!("{path}?limit=1&labelSelector=app%3Dx")).await.ok();
    assert_eq!(names(&page), ["a"]);
    assert!(page["metadata"].get("remainingItemCount").is_none());
    let next = page["metadata"]["continue"].as_str().unwrap();
    let page = api.get(&format!("{path}?limit=5&labelSelector=app%3Dx&continue={next}")).await.ok();
    assert_eq!(names(&page), ["b"]);
    assert!(page["metadata"].get("continue").is_none());
    // A token with the version -1 continues at the latest state.
    let token = json!({"v": "meta.k8s.io/v1", "rv": -1, "start": "c\0"});
    let token = BASE64_URL_SAFE_NO_PAD.encode(token.to_string());
    let list = api.get(&format!("{path}?limit=5&continue={token}")).await.ok();
    assert_eq!(names(&list), ["e"]);
}

pub(crate) async fn objects_are_in_etcd_key_order(api: &Api) {
    let short = unique("order");
    let mark = unique("mark");
    let long = format!("{short}-b");
    for namespace in [&short, &long] {
        api.post("/api/v1/namespaces", &json!({"metadata": {"name": namespace}})).await.ok();
        let path = format!("/api/v1/namespaces/{namespace}/configmaps");
        for name in ["z", "a", "a.b", "a-b"] {
            api.config_map(&path, name, json!({"mark": mark})).await;
        }
    }
    let keys = |list: &Value| -> Vec<String> {
        let text = |item: &Value, field: &str| item["metadata"][field].as_str().unwrap().to_owned();
        let items = list["items"].as_array().unwrap();
        items.iter().map(|item| format!("{}/{}", text(item, "namespace"), text(item, "name"))).collect()
    };
    let ordered = [&long, &short].map(|namespace| ["a", "a-b", "a.b", "z"].map(|name| format!("{namespace}/{name}")));
    let list = api.get(&format!("/api/v1/configmaps?labelSelector=mark%3D{mark}")).await.ok();
    assert_eq!(keys(&list), ordered.concat());
    let mut events = api.watch(&format!("/api/v1/configmaps?labelSelector=mark%3D{mark}")).await;
    let events: Vec<String> =
        events.take(8).await.iter().map(|event| keys(&json!({"items": [event.object]})).concat()).collect();
    assert_eq!(events, ordered.concat());
}

pub(crate) async fn selectors_select_matching_objects(api: &Api) {
    let path = api.config_maps().await;
    for (name, labels) in [
        ("a", json!({"app": "web", "gen": "5"})),
        ("b", json!({"app": "db", "gen": "x"})),
        ("c", json!({"app": "", "gen": "007"})),
        ("d", json!({})),
    ] {
        api.config_map(&path, name, labels).await;
    }
    let its_namespace = format!("metadata.namespace={}", path.split('/').nth(4).unwrap());
    for (parameter, selector, selected) in [
        ("labelSelector", "app=web", "a"),
        ("labelSelector", "app==web", "a"),
        ("labelSelector", "app!=web", "bcd"),
        ("labelSelector", "app in (web, db)", "ab"),
        ("labelSelector", "app notin (web,db)", "cd"),
        ("labelSelector", "app", "abc"),
        ("labelSelector", "!app", "d"),
        ("labelSelector", "app=", "c"),
        ("labelSelector", "app in ()", "c"),
        ("labelSelector", "gen>4", "ac"),
        ("labelSelector", "gen<6,gen>5", ""),
        ("labelSelector", "gen > 5", "c"),
        ("labelSelector", "app,gen!=x", "ac"),
        ("labelSelector", " app = web ", "a"),
        ("labelSelector", "app in (,web)", "ac"),
        ("fieldSelector", "metadata.name=b", "b"),
        ("fieldSelector", "metadata.name==b", "b"),
        ("fieldSelector", "metadata.name!=b", "acd"),
        ("fieldSelector", "metadata.name=b,metadata.name=c", ""),
        ("fieldSelector", "metadata.name=none", ""),
        ("fieldSelector", ",", "abcd"),
        ("fieldSelector", &its_namespace, "abcd"),
        ("fieldSelector", "metadata.namespace=other", ""),
    ] {
        let query: String = form_urlencoded::Serializer::new(String::new()).append_pair(parameter, selector).finish();
        let list = api.get(&format!("{path}?{query}")).await.ok();
        assert_eq!(names(&list).concat(), selected, "{parameter} {selector}");
    }
}
