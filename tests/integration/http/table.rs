//! The table of requests: every row of the list, watch and get semantics, for each resource and
//! encoding.

use reqwest::Method;

use super::{
    request::{AnsweredBy, Request},
    world::{OBJECTS, RESOURCES, Resource, STILL, World},
};

use AnsweredBy::{Cache, Either, Upstream};

/// Queries of lists. `{then}` is the version before the changes, `{now}` the one after them, and
/// `{future}` is never reached.
const LISTS: &[(&str, AnsweredBy)] = &[
    // Freshness.
    ("", Either),
    ("resourceVersion=", Either),
    ("resourceVersion=0", Cache),
    ("resourceVersion=0&resourceVersionMatch=NotOlderThan", Cache),
    ("resourceVersion={then}", Cache),
    ("resourceVersion={now}&resourceVersionMatch=NotOlderThan", Cache),
    ("resourceVersion={then}&resourceVersionMatch=Exact", Either),
    ("resourceVersion={future}", Either),
    ("resourceVersion={future}&resourceVersionMatch=NotOlderThan", Either),
    ("resourceVersion={future}&resourceVersionMatch=Exact", Upstream),
    ("resourceVersion=1&resourceVersionMatch=Exact", Upstream),
    // Pages.
    ("limit=2", Either),
    ("limit=500", Either),
    ("limit=0", Either),
    ("limit=-1", Either),
    ("resourceVersion=0&limit=2", Cache),
    ("resourceVersion={then}&limit=2", Either),
    ("resourceVersion={now}&resourceVersionMatch=NotOlderThan&limit=2", Cache),
    ("resourceVersion={now}&resourceVersionMatch=NotOlderThan&limit=2&labelSelector=app", Cache),
    ("resourceVersion={now}&resourceVersionMatch=NotOlderThan&limit=1000", Cache),
    ("continue=abc", Upstream),
    ("continue=eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6NSwic3RhcnQiOiIuLi8uLi94XHUwMDAwIn0", Upstream),
    // Invalid combinations and values.
    ("resourceVersion=abc", Upstream),
    ("resourceVersion=01", Either),
    ("resourceVersionMatch=Exact", Upstream),
    ("resourceVersionMatch=NotOlderThan", Upstream),
    ("resourceVersion=0&resourceVersionMatch=Exact", Upstream),
    ("sendInitialEvents=true", Upstream),
    ("sendInitialEvents=false&resourceVersion=0", Upstream),
    ("resourceVersion=0&limit=abc", Upstream),
    ("resourceVersion=0&timeoutSeconds=abc", Upstream),
    ("resourceVersion=0&timeoutSeconds=5", Cache),
    ("resourceVersion=0&timeout=10s", Cache),
    ("resourceVersion=0&timeout=abc", Upstream),
    // Selectors.
    ("resourceVersion=0&labelSelector=stage%3Don", Cache),
    ("resourceVersion=0&labelSelector=stage+in+(on,off),app!%3Dweb-1", Cache),
    ("resourceVersion=0&labelSelector=!canary", Cache),
    ("resourceVersion=0&labelSelector=app+notin+(web-0),app", Cache),
    ("resourceVersion=0&labelSelector=nothing%3Dhere", Cache),
    ("resourceVersion=0&labelSelector=a+in+(b", Upstream),
    ("resourceVersion=0&fieldSelector={field}", Cache),
    ("resourceVersion=0&fieldSelector=metadata.name%3Dstill-1", Cache),
    ("resourceVersion=0&fieldSelector=metadata.name!%3Dstill-1&labelSelector=app", Cache),
    ("resourceVersion=0&fieldSelector=spec.colour%3Dred", Upstream),
    // Query parsing.
    ("resourceVersion=0&watch=false", Cache),
    ("resourceVersion=0&resourceVersion=abc", Cache),
    ("resourceVersion=0&unknown=parameter&x", Cache),
    ("resourceVersion=0&limit=", Either),
    ("resourceVersion=0&allowWatchBookmarks=true", Cache),
    ("resourceVersion=0;limit=1", Upstream),
    ("resourceVersion=0&fieldSelector=metadata.name%3Da;b", Upstream),
    ("resourceVersion=0&unknown=%zz", Upstream),
    ("resourceVersion=0&pretty=true", Upstream),
    ("&&resourceVersion=0&", Cache),
    ("ResourceVersion=0&resourceversion=abc", Either),
    ("resourceVersion=0&fieldManager=me&dryRun=All&export=true", Cache),
];

/// Queries of watches. Each watch gets its own timeout.
const WATCHES: &[(&str, AnsweredBy)] = &[
    ("", Either),
    ("allowWatchBookmarks=true", Either),
    ("resourceVersion=0", Cache),
    ("resourceVersion=0&allowWatchBookmarks=true", Cache),
    ("resourceVersion={then}", Cache),
    ("resourceVersion={then}&allowWatchBookmarks=true", Cache),
    ("resourceVersion={now}", Cache),
    ("resourceVersion={then}&labelSelector=stage%3Don", Cache),
    ("resourceVersion={then}&labelSelector=stage!%3Don", Cache),
    ("resourceVersion={then}&fieldSelector={field}", Cache),
    ("resourceVersion={then}&fieldSelector=metadata.name%3Dstill-4", Cache),
    ("resourceVersion={future}", Cache),
    ("resourceVersion=1", Cache),
    ("resourceVersion=1&allowWatchBookmarks=true&labelSelector=app", Cache),
    ("sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true", Either),
    ("sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&resourceVersion=0", Cache),
    ("sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&resourceVersion={now}", Cache),
    ("sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion={then}&labelSelector=app", Cache),
    ("sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion={future}", Either),
    ("sendInitialEvents=false&resourceVersionMatch=NotOlderThan&resourceVersion=0", Cache),
    ("sendInitialEvents=false&resourceVersionMatch=NotOlderThan&resourceVersion=0&allowWatchBookmarks=true", Cache),
    ("sendInitialEvents=false&resourceVersionMatch=NotOlderThan", Either),
    ("sendInitialEvents=false&resourceVersionMatch=NotOlderThan&resourceVersion={then}", Cache),
    ("sendInitialEvents=true", Upstream),
    ("sendInitialEvents=true&resourceVersion=0&resourceVersionMatch=Exact", Upstream),
    ("resourceVersionMatch=NotOlderThan", Upstream),
    ("resourceVersion=0&resourceVersionMatch=NotOlderThan", Upstream),
    ("resourceVersion=abc", Upstream),
    ("resourceVersion=-1", Upstream),
    ("resourceVersion=0&labelSelector=a+in+(b", Upstream),
    ("resourceVersion=0&fieldSelector=spec.colour%3Dred", Upstream),
    ("resourceVersion=0&labelSelector=stage%3Don&allowWatchBookmarks=true", Cache),
    ("resourceVersion=0&limit=1", Cache),
    ("resourceVersion=0&continue=abc", Upstream),
    ("resourceVersion={then}&continue=abc", Cache),
    ("resourceVersion=0&timeout=abc", Cache),
    ("resourceVersion=0&pretty=true", Cache),
    ("resourceVersion=0&timeout=5s", Cache),
];

/// Queries of single objects.
const GETS: &[(&str, AnsweredBy)] = &[
    ("", Upstream),
    ("resourceVersion=0", Cache),
    ("resourceVersion={then}", Cache),
    ("resourceVersion={now}", Cache),
    ("resourceVersion={future}", Either),
    ("resourceVersion=abc", Upstream),
    ("resourceVersion=0&pretty=true", Upstream),
    ("resourceVersion=0&watch=true&timeoutSeconds=2", Cache),
    ("resourceVersion=0&labelSelector=nothing%3Dhere", Cache),
    ("resourceVersion=0&limit=abc", Cache),
    ("resourceVersion=0&resourceVersionMatch=Exact", Cache),
];

/// Media types, and whether the cache can produce them for: a list, a single object, a watch.
const ACCEPTS: &[(&str, bool, bool, bool)] = &[
    ("*/*", true, true, true),
    ("application/*", false, false, false),
    ("application/json", true, true, true),
    ("application/json; charset=utf-8", true, true, true),
    ("text/html, application/json;q=0.5", true, true, true),
    ("application/json;stream=watch", true, true, true),
    ("application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1", true, false, false),
    ("application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1", false, true, true),
    ("application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json", false, true, true),
    ("application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json", true, false, false),
    ("application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1beta1", false, false, false),
    ("application/json;as=Table;g=meta.k8s.io;v=v1", false, false, false),
    (
        "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json",
        false,
        false,
        false,
    ),
    ("application/json;as=Nothing;g=meta.k8s.io;v=v1", false, false, false),
    ("application/yaml", false, false, false),
    // From the protobuf cache, if there is one and it is synced.
    ("application/vnd.kubernetes.protobuf", true, true, true),
    ("application/vnd.kubernetes.protobuf,application/json", true, true, true),
    ("application/vnd.kubernetes.protobuf;stream=watch,application/json;stream=watch", true, true, true),
    ("application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1", true, false, false),
    ("application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1", false, true, true),
    ("application/vnd.kubernetes.protobuf;as=Table;g=meta.k8s.io;v=v1", false, false, false),
    ("application/cbor", false, false, false),
    ("application/json;q=0.1,application/yaml;q=0.2", false, false, false),
    ("text/html", false, false, false),
    ("application/json;pretty=1", false, false, false),
    ("nonsense", false, false, false),
    ("application/json;q=0", true, true, true),
];

/// Timeout of watches, in seconds.
const WATCH_SECONDS: u64 = 3;

/// The requests for all resources, or only for the resources that differ most from each other.
pub(super) fn requests(world: &World, all_resources: bool) -> Vec<Request> {
    let asked =
        |resource: &&Resource| all_resources || matches!(resource.plural, "pods" | "nodes" | "events" | "widgets");
    let mut all: Vec<_> = RESOURCES.iter().filter(asked).flat_map(|resource| of(resource, world)).collect();
    all.extend(others(world));
    all
}

fn of(resource: &Resource, world: &World) -> Vec<Request> {
    let mut all = Vec::new();
    let mut ask = |path: &str, query: &str, by: AnsweredBy, accept: Option<&str>| {
        // Requests for a resource that is not cached always go upstream.
        let by = if resource.cached { by } else { Upstream };
        let and = if query.is_empty() { "" } else { "?" };
        let request = Request::get(format!("{path}{and}{}", fill(query, resource, world)), by);
        all.push(match accept {
            Some(accept) => request.accepting(accept),
            None => request,
        });
    };
    let everywhere = resource.collection("");
    let namespace = resource.namespaced.then(|| resource.collection("still-a"));
    for collection in [Some(&everywhere), namespace.as_ref()].into_iter().flatten() {
        let is_first = *collection == everywhere;
        // Whether single objects are at this path.
        let has_objects = !(resource.namespaced && is_first);
        let one = |number: usize| format!("{collection}/{STILL}-{number}");
        let watch = format!("timeoutSeconds={WATCH_SECONDS}");
        for (query, expected) in LISTS {
            ask(collection, query, *expected, None);
        }
        for (query, expected) in WATCHES {
            let query = format!("{watch}{}{query}", if query.is_empty() { "" } else { "&" });
            ask(collection, &format!("watch=true&{query}"), *expected, None);
            // One scope suffices for the deprecated paths, which validate these parameters like a
            // list.
            if is_first {
                let expected = if query.contains("sendInitialEvents") { Upstream } else { Either };
                ask(&resource.deprecated_watch(collection), &query, expected, None);
            }
        }
        for (accept, list, single, watched) in ACCEPTS {
            // Custom resources have no protobuf encoding, and only upstream can produce its error.
            let unknown = accept.contains("protobuf") && resource.is_custom();
            let expected = |made: bool| if made && !unknown { Cache } else { Upstream };
            ask(collection, "resourceVersion=0", expected(*list), Some(*accept));
            ask(&one(1), "resourceVersion=0", expected(*single && has_objects), Some(*accept));
            let watch = format!("watch=1&{watch}&resourceVersion=0&allowWatchBookmarks=true");
            ask(collection, &watch, expected(*watched), Some(*accept));
        }
        if !has_objects {
            continue;
        }
        for (query, expected) in GETS {
            ask(&one(1), query, *expected, None);
        }
        ask(&one(OBJECTS), "resourceVersion=0", Cache, None);
        ask(&one(3), "resourceVersion={now}", Cache, None);
        let watch = format!("{watch}&resourceVersion={{then}}");
        ask(&resource.deprecated_watch(&one(4)), &watch, Cache, None);
        for name in [1, OBJECTS] {
            let named = format!("{watch}&fieldSelector=metadata.name%3D{STILL}-{name}");
            ask(&resource.deprecated_watch(&one(1)), &named, Upstream, None);
        }
        ask(&format!("{collection}/"), "", Upstream, None);
        ask(&format!("{}/status", one(1)), "", Upstream, None);
    }
    all
}

/// Requests outside of the table's resources.
fn others(world: &World) -> Vec<Request> {
    let forwarded = "/ /api /api/v1 /apis /apis/apps /apis/apps/v1 /version /healthz /nothing /api/v2/pods \
                     /apis/nothing.example.com/v1/things /api/v1/nothings /api/v1/namespaces/still-a \
                     /api/v1/namespaces/nowhere/nodes /api/v1/namespaces/still-a/status /api/v1/watch /apis/apps/v1/watch/ \
                     /api/v1/pods/still-1 /api/v1/namespaces/still-a/pods/still-1/log \
                     /apis/apps/v1/namespaces/still-a/deployments/still-1/scale \
                     /api/v1/namespaces/still%2Da/pods?resourceVersion=0 /api/v1/namespaces/nowhere/pods/x /api/v1/Pods \
                     /API/v1/pods /apis/v1/pods /apis/events.k8s.io/v1/events?limit=1";
    let cached = "/api/v1/namespaces/nowhere/pods?resourceVersion=0 /api/v1/endpoints?resourceVersion=0 \
                  /api/v1/namespaces/still-a/endpoints/still-1?resourceVersion=0 \
                  /api/v1/namespaces/still-a/endpoints/nothing?resourceVersion=0 \
                  /api/v1/endpoints?watch=true&timeoutSeconds=2&resourceVersion=0 \
                  /api/v1/watch/endpoints?timeoutSeconds=2&resourceVersion={then} \
                  /api/v1/endpoints?watch=true&timeoutSeconds=2&resourceVersion=1";
    let mut all = Vec::new();
    for (paths, by) in [(forwarded, Upstream), (cached, Cache)] {
        let paths = paths.replace("{then}", &world.then.to_string());
        all.extend(paths.split(' ').map(|path| Request::get(path.to_owned(), by)));
    }
    let pods = |by| Request::get("/api/v1/namespaces/still-a/pods?resourceVersion=0".to_owned(), by);
    for method in [Method::HEAD, Method::OPTIONS, Method::PUT, Method::TRACE] {
        all.push(Request { method, ..pods(Upstream) });
    }
    for agent in ["curl/8.5.0", "Mozilla/5.0 (X11)", "Wget/1.21", "kubectl/v1.35.4"] {
        let by = if agent.starts_with("kubectl") { Cache } else { Upstream };
        all.push(Request { headers: vec![("user-agent", agent.to_owned())], ..pods(by) });
    }
    all
}

/// Replaces the placeholders of a query.
pub(super) fn fill(query: &str, resource: &Resource, world: &World) -> String {
    query
        .replace("{then}", &world.then.to_string())
        .replace("{now}", &world.now.to_string())
        .replace("{future}", &(world.now + 1_000_000_000).to_string())
        .replace("{field}", &resource.field.replace('=', "%3D"))
}
