//! LIST and GET.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use serde_json::{Value, json};

use super::api::{Answer, Api, names, unique, version};

fn token(json: &Value) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(json.to_string())
}

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

pub(crate) async fn an_empty_list_has_items(api: &Api) {
    let path = api.config_maps().await;
    for query in ["", "?resourceVersion=0", "?limit=1", "?labelSelector=no%3Dsuch"] {
        let list = api.get(&format!("{path}{query}")).await;
        assert!(list.text.ends_with("\"items\":[]}\n"), "{query} {}", list.text);
    }
}

pub(crate) async fn version_zero_ignores_the_limit(api: &Api) {
    let path = five(api).await;
    let list = api.get(&format!("{path}?resourceVersion=0&limit=2")).await.ok();
    // The list may be older than the writes, but it must not be paged.
    assert!(list["metadata"].get("continue").is_none(), "{list}");
}

pub(crate) async fn a_version_alone_means_not_older_than(api: &Api) {
    let path = five(api).await;
    let newest = version(&api.get(&path).await.ok());
    let list = api.get(&format!("{path}?resourceVersion={}", newest - 3)).await.ok();
    assert!(version(&list) >= newest - 3);
    let list = api.get(&format!("{path}?resourceVersion={newest}&resourceVersionMatch=NotOlderThan")).await.ok();
    assert!(version(&list) >= newest && names(&list) == ["a", "b", "c", "d", "e"]);
}

pub(crate) async fn a_version_with_a_limit_means_exact(api: &Api) {
    let path = api.config_maps().await;
    let then = api.config_map(&path, "a", json!({})).await;
    api.config_map(&path, "b", json!({})).await;
    let list = api.get(&format!("{path}?resourceVersion={then}&limit=10")).await.ok();
    assert_eq!((version(&list), names(&list)), (then, vec!["a"]));
}

pub(crate) async fn an_exact_list_is_the_state_at_that_version(api: &Api) {
    let path = api.config_maps().await;
    api.config_map(&path, "a", json!({})).await;
    let then = api.config_map(&path, "b", json!({"old": "yes"})).await;
    api.patch(&format!("{path}/b"), &json!({"metadata": {"labels": {"old": "no"}}})).await.ok();
    api.config_map(&path, "c", json!({})).await;
    api.delete(&format!("{path}/a")).await.ok();
    let list = api.get(&format!("{path}?resourceVersion={then}&resourceVersionMatch=Exact")).await.ok();
    assert_eq!((version(&list), names(&list)), (then, vec!["a", "b"]));
    assert_eq!(list["items"][1]["metadata"]["labels"]["old"], "yes");
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

pub(crate) async fn not_older_than_with_a_limit_pages(api: &Api) {
    let path = five(api).await;
    let newest = version(&api.get(&path).await.ok());
    let query = format!("resourceVersion={}&resourceVersionMatch=NotOlderThan&limit=3", newest - 2);
    let list = api.get(&format!("{path}?{query}")).await.ok();
    assert!(version(&list) >= newest - 2);
    assert_eq!((names(&list), &list["metadata"]["remainingItemCount"]), (vec!["a", "b", "c"], &json!(2)));
}

pub(crate) async fn a_future_version_times_out_with_504(api: &Api) {
    let path = five(api).await;
    let future = version(&api.get(&path).await.ok()) + 1_000_000;
    let list = format!("{path}?resourceVersion={future}");
    let exact = format!("{path}?resourceVersion={future}&resourceVersionMatch=Exact");
    let object = format!("{path}/a?resourceVersion={future}");
    let (list, exact, object) = tokio::join!(api.get(&list), api.get(&exact), api.get(&object));
    for answer in [list, exact, object] {
        is_too_large(&answer, future);
    }
}

pub(crate) async fn contradictory_options_are_refused_with_422(api: &Api) {
    let path = five(api).await;
    let forbidden = |field: &str, why: &str| json!({"reason": "FieldValueForbidden", "message": format!("Forbidden: {why}"), "field": field});
    let unset =
        forbidden("resourceVersionMatch", "resourceVersionMatch is forbidden unless resourceVersion is provided");
    let paged = forbidden("resourceVersionMatch", "resourceVersionMatch is forbidden when continue is provided");
    let any =
        forbidden("resourceVersionMatch", "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"");
    let initial = forbidden("sendInitialEvents", "sendInitialEvents is forbidden for list");
    let unknown = json!({"reason": "FieldValueNotSupported", "field": "resourceVersionMatch",
        "message": "Unsupported value: \"Foo\": supported values: \"Exact\", \"NotOlderThan\", \"\""});
    let cases = [
        ("resourceVersionMatch=Exact", vec![&unset]),
        ("resourceVersionMatch=Exact&resourceVersion=0", vec![&any]),
        ("resourceVersionMatch=NotOlderThan&resourceVersion=1&continue=abc", vec![&paged]),
        ("resourceVersionMatch=Foo&resourceVersion=1", vec![&unknown]),
        ("sendInitialEvents=true", vec![&initial]),
        ("sendInitialEvents=false&resourceVersionMatch=Foo", vec![&unset, &unknown, &initial]),
    ];
    for (query, causes) in cases {
        let answer = api.get(&format!("{path}?{query}")).await;
        let status = answer.json();
        assert_eq!((answer.code, &status["reason"]), (422, &json!("Invalid")), "{query} {}", answer.text);
        assert_eq!(
            status["details"],
            json!({"group": "meta.k8s.io", "kind": "ListOptions", "causes": causes}),
            "{query}"
        );
        let faults: Vec<String> = causes
            .iter()
            .map(|cause| format!("{}: {}", cause["field"].as_str().unwrap(), cause["message"].as_str().unwrap()))
            .collect();
        let faults = if faults.len() == 1 { faults[0].clone() } else { format!("[{}]", faults.join(", ")) };
        assert_eq!(status["message"], format!("ListOptions.meta.k8s.io \"\" is invalid: {faults}"), "{query}");
    }
}

pub(crate) async fn unparsable_parameters_are_refused_with_400(api: &Api) {
    let path = api.config_maps().await;
    let syntax = |text: &str| format!("strconv.ParseUint: parsing \"{text}\": invalid syntax");
    let version =
        |text: &str| format!("invalid resource version: resourceVersion: Invalid value: \"{text}\": {}", syntax(text));
    let int = "strconv.ParseInt: parsing \"abc\": invalid syntax".to_owned();
    let cases = [
        ("resourceVersion=abc", version("abc")),
        ("resourceVersion=-1", version("-1")),
        ("limit=abc", int.clone()),
        ("timeoutSeconds=abc", int),
        ("timeout=abc", "invalid timeout specified in the request URL - time: invalid duration \"abc\"".into()),
        ("labelSelector=a%3D%3D%3Db", "unable to parse requirement: found '=', expected: identifier".into()),
        ("labelSelector=a%20in%20b", "unable to parse requirement: found 'b' expected: '('".into()),
        ("fieldSelector=foo", "invalid selector: 'foo'; can't understand 'foo'".into()),
        (
            "fieldSelector=spec.x%3D1",
            "\"spec.x\" is not a known field selector: only \"metadata.name\", \"metadata.namespace\"".into(),
        ),
    ];
    for (query, message) in cases {
        api.get(&format!("{path}?{query}")).await.fails(400, "BadRequest", &message);
        if !matches!(query.split('=').next(), Some("resourceVersion" | "timeout")) {
            api.get(&format!("{path}?watch=1&{query}")).await.fails(400, "BadRequest", &message);
        }
    }
    let unknown_field = "field label not supported: spec.foo";
    api.get("/api/v1/pods?fieldSelector=spec.foo%3D1").await.fails(400, "BadRequest", unknown_field);
    for fine in ["timeout=5s", "timeout=1m30s", "bogus=1", "limit=-1", "allowWatchBookmarks=x"] {
        api.get(&format!("{path}?{fine}")).await.ok();
    }
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
}

pub(crate) async fn a_page_with_a_selector_has_no_remaining_item_count(api: &Api) {
    let path = five(api).await;
    let page = api.get(&format!("{path}?limit=1&labelSelector=app%3Dx")).await.ok();
    assert_eq!(names(&page), ["a"]);
    assert!(page["metadata"].get("remainingItemCount").is_none());
    let next = page["metadata"]["continue"].as_str().unwrap();
    let page = api.get(&format!("{path}?limit=5&labelSelector=app%3Dx&continue={next}")).await.ok();
    assert_eq!(names(&page), ["b"]);
    assert!(page["metadata"].get("continue").is_none());
}

pub(crate) async fn an_invalid_continue_token_is_refused(api: &Api) {
    let path = five(api).await;
    let meta = "meta.k8s.io/v1";
    let cases = [
        ("@@@".to_owned(), "illegal base64 data at input byte 0"),
        (token(&json!({"v": "v2", "rv": 5, "start": "a"})), "server does not recognize this encoded version v2"),
        (
            token(&json!({"v": meta, "rv": 0, "start": "a"})),
            "incorrect encoded start resourceVersion (version meta.k8s.io/v1)",
        ),
        (token(&json!({"v": meta, "rv": 5, "start": ""})), "encoded start key empty (version meta.k8s.io/v1)"),
        (token(&json!({"v": meta, "rv": 5, "start": "../x"})), "../x"),
    ];
    for (token, why) in cases {
        let message = format!("invalid continue token: continue key is not valid: {why}");
        api.get(&format!("{path}?continue={token}")).await.fails(400, "BadRequest", &message);
    }
    let page = api.get(&format!("{path}?limit=1")).await.ok();
    let next = page["metadata"]["continue"].as_str().unwrap();
    let message = "specifying resource version is not allowed when using continue";
    api.get(&format!("{path}?continue={next}&resourceVersion=5")).await.fails(400, "BadRequest", message);
}

pub(crate) async fn a_token_with_version_minus_one_continues_at_the_latest_state(api: &Api) {
    let path = five(api).await;
    api.delete(&format!("{path}/d")).await.ok();
    let token = token(&json!({"v": "meta.k8s.io/v1", "rv": -1, "start": "c\0"}));
    let list = api.get(&format!("{path}?limit=5&continue={token}")).await.ok();
    assert_eq!(names(&list), ["e"]);
}

pub(crate) async fn objects_are_in_etcd_key_order(api: &Api) {
    let (short, mark) = (unique("order"), unique("mark"));
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

pub(crate) async fn label_selectors_select_matching_objects(api: &Api) {
    let path = api.config_maps().await;
    for (name, labels) in [
        ("a", json!({"app": "web", "gen": "5"})),
        ("b", json!({"app": "db", "gen": "x"})),
        ("c", json!({"app": "", "gen": "007"})),
        ("d", json!({})),
    ] {
        api.config_map(&path, name, labels).await;
    }
    for (selector, selected) in [
        ("app=web", "a"),
        ("app==web", "a"),
        ("app!=web", "bcd"),
        ("app in (web, db)", "ab"),
        ("app notin (web,db)", "cd"),
        ("app", "abc"),
        ("!app", "d"),
        ("app=", "c"),
        ("app in ()", "c"),
        ("gen>4", "ac"),
        ("gen<6,gen>5", ""),
        ("gen > 5", "c"),
        ("app,gen!=x", "ac"),
        (" app = web ", "a"),
        ("app in (,web)", "ac"),
    ] {
        let query: String =
            form_urlencoded::Serializer::new(String::new()).append_pair("labelSelector", selector).finish();
        let list = api.get(&format!("{path}?{query}")).await.ok();
        assert_eq!(names(&list).concat(), selected, "{selector}");
    }
}

pub(crate) async fn field_selectors_select_matching_objects(api: &Api) {
    let path = five(api).await;
    let namespace = path.split('/').nth(4).unwrap();
    for (selector, selected) in [
        ("metadata.name=b", "b"),
        ("metadata.name==b", "b"),
        ("metadata.name!=b", "acde"),
        ("metadata.name=b,metadata.name=c", ""),
        ("metadata.name=none", ""),
        (",", "abcde"),
        (&format!("metadata.namespace={namespace}"), "abcde"),
        ("metadata.namespace=other", ""),
    ] {
        let query: String =
            form_urlencoded::Serializer::new(String::new()).append_pair("fieldSelector", selector).finish();
        let list = api.get(&format!("{path}?{query}")).await.ok();
        assert_eq!(names(&list).concat(), selected, "{selector}");
    }
}

pub(crate) async fn a_get_accepts_a_resource_version(api: &Api) {
    let path = api.config_maps().await;
    let written = api.config_map(&path, "a", json!({})).await;
    assert_eq!(version(&api.get(&format!("{path}/a")).await.ok()), written);
    assert_eq!(version(&api.get(&format!("{path}/a?resourceVersion={written}")).await.ok()), written);
    let message = "resourceVersion: Invalid value: \"abc\": strconv.ParseUint: parsing \"abc\": invalid syntax";
    api.get(&format!("{path}/a?resourceVersion=abc")).await.fails(500, "", message);
}

pub(crate) async fn missing_objects_and_resources_are_404(api: &Api) {
    let path = api.config_maps().await;
    let answer = api.get(&format!("{path}/nope")).await;
    answer.fails(404, "NotFound", "configmaps \"nope\" not found");
    assert_eq!(answer.json()["details"], json!({"name": "nope", "kind": "configmaps"}));
    let missing = "the server could not find the requested resource";
    for unknown in ["/api/v1/nopes", "/apis/apps/v9/deployments", "/api/v2", "/api/v1/namespaces/default/nodes"] {
        api.get(unknown).await.fails(404, "NotFound", missing);
    }
    for unknown in ["/apis/nope.io/v1/nopes", "/apis/nope.io/v1", "/nope"] {
        let answer = api.get(unknown).await;
        assert_eq!((answer.code, &*answer.text), (404, "404 page not found\n"), "{unknown}");
        assert!(answer.content_type.starts_with("text/plain"));
    }
    assert!(names(&api.get("/api/v1/namespaces/no-such-namespace/configmaps").await.ok()).is_empty());
}
