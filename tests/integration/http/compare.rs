//! Compares two answers to one request. Necessary differences are masked first: versions of lists,
//! objects that change during the test, and how far back a server's history reaches.

use serde_json::Value;

use super::{
    request::{Answer, AnsweredBy, Request},
    world::STILL,
};

const HEADERS: [&str; 4] = ["content-type", "cache-control", "x-content-type-options", "warning"];

/// The differences between two answers; empty if there are none.
pub(super) fn differences(request: &Request, direct: &Answer, ours: &Answer) -> Vec<String> {
    let mut found = Vec::new();
    let mut check = |what: &str, direct: String, ours: String| {
        if direct != ours {
            found.push(format!("{what}: {}", first_difference(&direct, &ours)));
        }
    };
    let status = |answer: &Answer| match answer.status {
        200 => "200".to_owned(),
        code => format!("{code} {}", unversioned(&shown(&answer.text()))),
    };
    if direct.status != ours.status {
        check("status", status(direct), status(ours));
        return found;
    }
    for name in HEADERS {
        check(name, direct.header(name).to_owned(), ours.header(name).to_owned());
    }
    let retries = |answer: &Answer| (!answer.header("retry-after").is_empty()).to_string();
    check("retry-after", retries(direct), retries(ours));
    let is_json = direct.header("content-type").starts_with("application/json");
    if direct.status == 200 && !is_json && !direct.is_protobuf() {
        // Only upstream renders this, and it includes changing objects that cannot be masked here.
    } else if is_watch(request) && direct.status == 200 {
        check("events", events(direct).join("\n"), events(ours).join("\n"));
    } else {
        check("body", masked(direct), masked(ours));
    }
    found
}

/// An error if the wrong server answered.
pub(super) fn wrong_server(request: &Request, ours: &Answer) -> Option<String> {
    match (request.by, ours.is_cached()) {
        (AnsweredBy::Cache, false) => Some(format!("upstream answered: {} {}", ours.status, shown(&ours.text()))),
        (AnsweredBy::Upstream, true) => Some(format!("the cache answered: {} {}", ours.status, shown(&ours.text()))),
        _ => None,
    }
}

/// Whether a request is a watch. A request for a single object is one only under the deprecated
/// path.
pub(super) fn is_watch(request: &Request) -> bool {
    let path = request.path.split('?').next().unwrap_or_default();
    let truth = |value: String| value != "0" && !value.eq_ignore_ascii_case("false");
    path.contains("/watch/") || request.parameter("watch").is_some_and(truth)
}

/// Whether an object does not change during the test.
fn is_still(object: &Value) -> bool {
    let meta = &object["metadata"];
    let of = |name: &str| meta[name].as_str().unwrap_or_default();
    let namespace = of("namespace");
    (if namespace.is_empty() { of("name") } else { namespace }).starts_with(STILL)
}

/// The watch events of unchanging objects, byte for byte except for the versions of bookmarks.
fn events(answer: &Answer) -> Vec<String> {
    let text = answer.text();
    let mut newest = 0;
    let mut lines = Vec::new();
    for line in text.lines() {
        let Ok(event) = serde_json::from_str::<Value>(line) else {
            lines.push(line.to_owned());
            continue;
        };
        let object = &event["object"];
        let version = object["metadata"]["resourceVersion"].as_str().unwrap_or_default();
        let number: u64 = version.parse().unwrap_or_default();
        match event["type"].as_str().unwrap_or_default() {
            // Periodic bookmarks are not comparable.
            "BOOKMARK" if object["metadata"]["annotations"]["k8s.io/initial-events-end"] != "true" => {}
            "BOOKMARK" => {
                let order = if number >= newest { "" } else { " OLDER THAN A PREVIOUS EVENT" };
                // Built-in types also write empty fields beside the metadata.
                let meta = object["metadata"].to_string().replace(&format!("\"{version}\""), "\"N\"");
                lines.push(format!("BOOKMARK {} {} {meta}{order}", object["kind"], object["apiVersion"]));
            }
            "ERROR" => lines.push(unversioned(line)),
            _ if is_still(object) => {
                newest = newest.max(number);
                lines.push(if is_sorted_partial(object) { event.to_string() } else { line.to_owned() });
            }
            _ => {}
        }
    }
    lines
}

/// Whether this is the metadata of a custom object. Upstream sorts its fields if it encodes the
/// whole object, and otherwise writes them in the order of the type. kubefan keeps the order that
/// it received.
fn is_sorted_partial(object: &Value) -> bool {
    let is_partial =
        |object: &Value| object["kind"].as_str().is_some_and(|kind| kind.starts_with("PartialObjectMetadata"));
    let managed = |object: &Value| {
        object["metadata"]["managedFields"][0]["apiVersion"].as_str().unwrap_or_default().contains(".example.com/")
    };
    let first = object["items"].get(0).unwrap_or(object);
    is_partial(object) && managed(first)
}

/// A body with the necessary differences masked. JSON keeps its order of fields.
fn masked(answer: &Answer) -> String {
    let text = answer.text();
    let Ok(mut body) = serde_json::from_str::<Value>(&text) else { return text };
    if body.get("items").is_some_and(Value::is_array) {
        let meta = &mut body["metadata"];
        for name in ["resourceVersion", "continue", "remainingItemCount"] {
            if let Some(value) = meta.get_mut(name) {
                // Both sides must agree on whether a value is set.
                *value = Value::from(if value == "" { "" } else { "set" });
            }
        }
        body["items"].as_array_mut().expect("items is an array").retain(is_still);
        return body.to_string();
    }
    if body["kind"] == "Status" {
        return unversioned(&text);
    }
    if is_sorted_partial(&body) { body.to_string() } else { text }
}

/// A failure message without the server's current version.
fn unversioned(text: &str) -> String {
    let mut text = text.to_owned();
    // Without a cache, the retry delay is random.
    for (before, after) in [("current: ", "\""), ("too old resource version: ", ")"), ("retryAfterSeconds\":", "}")] {
        let Some(at) = text.find(before).map(|at| at + before.len()) else { continue };
        let from = if after == ")" { text[at..].find('(').map_or(at, |open| at + open + 1) } else { at };
        let Some(to) = text[from..].find(after) else { continue };
        text.replace_range(from..from + to, "N");
    }
    text
}

/// The surroundings of the first byte in which two texts differ.
fn first_difference(direct: &str, ours: &str) -> String {
    let at = direct.bytes().zip(ours.bytes()).take_while(|(a, b)| a == b).count();
    let surroundings = |text: &str| {
        let bytes = &text.as_bytes()[at.saturating_sub(60).min(text.len())..text.len().min(at + 160)];
        String::from_utf8_lossy(bytes).into_owned()
    };
    format!("at byte {at}\n      upstream {:?}\n      kubefan  {:?}", surroundings(direct), surroundings(ours))
}

/// The start of a text.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(200).collect()
}

/// The request that makes upstream return the same bytes as a list from the cache: a list at
/// exactly that version. `None` if there is no such request.
pub(super) fn at_its_version(request: &Request, ours: &Answer) -> Option<Request> {
    let body: Value = serde_json::from_str(&ours.text()).ok()?;
    if ours.status != 200
        || !body["items"].is_array()
        || request.parameter("continue").is_some_and(|token| !token.is_empty())
    {
        return None;
    }
    let version = body["metadata"]["resourceVersion"].as_str()?;
    // A list at version 0 ignores the limit.
    let is_whole = request.parameter("resourceVersion").as_deref() == Some("0") && !request.path.contains("/events");
    let mut query = form_urlencoded::Serializer::new(String::new());
    for (name, value) in form_urlencoded::parse(request.query().as_bytes()) {
        match &*name {
            "resourceVersion" | "resourceVersionMatch" => {}
            "limit" if is_whole => {}
            _ => {
                query.append_pair(&name, &value);
            }
        }
    }
    query.append_pair("resourceVersion", version).append_pair("resourceVersionMatch", "Exact");
    let path = request.path.split('?').next().unwrap_or_default();
    Some(Request { path: format!("{path}?{}", query.finish()), ..request.clone() })
}

/// The first difference between two bodies, byte for byte.
pub(super) fn byte_difference(direct: &Answer, ours: &Answer) -> Option<String> {
    let parsed = |answer: &Answer| serde_json::from_slice::<Value>(&answer.body).ok();
    if let (Some(direct), Some(ours)) = (parsed(direct), parsed(ours))
        && is_sorted_partial(&direct)
        && direct == ours
    {
        return None;
    }
    (direct.body != ours.body)
        .then(|| format!("bytes at its version: {}", first_difference(&direct.text(), &ours.text())))
}
