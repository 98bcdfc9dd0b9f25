//! Random requests made of paths, parameters, values and media types. Most of them are invalid, and
//! both servers must reject them in the same way.

use rand::{RngExt, seq::IndexedRandom};
use rand_pcg::Pcg64Mcg;
use reqwest::Method;

use super::{
    request::{AnsweredBy, Request},
    table::fill,
    world::{RESOURCES, Resource, World},
};

/// Parameters and their values, which spaces separate. `''` is an empty value. Valid values come
/// first, because [`one`] prefers them. `{}` placeholders are filled in as in the table.
const PARAMETERS: &[(&str, &str)] = &[
    ("resourceVersion", "0 {now} {then} '' 0 {now} 1 abc -1 0x10 +{now} 1.5 00 %20{now}"),
    ("resourceVersionMatch", "NotOlderThan Exact '' exact Newest"),
    ("limit", "1 3 500 0 -1 '' abc 1.5 9223372036854775807 9223372036854775808 %2B2 1e3"),
    (
        "labelSelector",
        "app stage%3Don stage+in+(on,off) app!%3Dweb-0 !canary stage%3D%3Don '' app%3Dweb-0,stage stage+notin+(on) canary%3D \
         app+in+(web-0,web-1),!canary nothing a+in+( , a%3D- x>1 x%3E1,app stage%3Don,stage%3Doff %zz %80 app;stage app%00",
    ),
    (
        "fieldSelector",
        "metadata.name%3Dstill-1 {field} metadata.namespace%3Dstill-a metadata.name!%3Dstill-0 '' \
         metadata.name%3D%3Dstill-2 metadata.name%3Dstill-1,metadata.namespace%3Dstill-b status.phase%3DPending \
         spec.nothing%3D1 metadata.name metadata.name%3Da%5C,b metadata.labels.app%3Dweb a%3Db%3Dc ,",
    ),
    ("allowWatchBookmarks", "true 1 false 0 '' yes FALSE"),
    ("sendInitialEvents", "true false '' 1 0"),
    ("watch", "true 1 false 0 '' True nonsense"),
    ("timeout", "10s 5m 1h30m '' -1s 5 abc 0 0s 1.5h 90000ms"),
    ("continue", "'' abc eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6MCwic3RhcnQiOiJ4XHUwMDAwIn0 %00"),
    ("pretty", "false true 0 1 ''"),
    ("fieldManager", "me"),
    ("unknown", "x %zz a;b a=b %E2%98%83"),
];
/// Media types, one a line.
const ACCEPTS: &str = "application/json
*/*
application/yaml
application/vnd.kubernetes.protobuf
application/cbor
text/html
application/*
*
application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1
application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1
application/json;as=Table;g=meta.k8s.io;v=v1
application/json;stream=watch
application/json;stream=other
application/json;sv=v1
application/json;pretty=1
application/json;as=;g=;v=
application/json;v=v1
application/json ; charset=utf-8
Application/JSON
application/json;profile=x
application/json;as=\"Table\"
application/json/x
";
const QUALITIES: &[&str] = &["", "", "", ";q=0.5", ";q=0.9", ";q=0", ";q=1.0", ";q=abc", "; q=0.3"];

/// Generates `count` requests.
pub(super) fn requests(world: &World, random: &mut Pcg64Mcg, count: usize) -> Vec<Request> {
    (0..count).map(|_| request(world, random)).collect()
}

/// Chooses one value; the first four are more likely.
fn one<'a>(random: &mut Pcg64Mcg, all: &[&'a str]) -> &'a str {
    let likely = random.random_bool(0.75);
    all[..if likely { all.len().min(4) } else { all.len() }].choose(random).expect("the slice is not empty")
}

fn request(world: &World, random: &mut Pcg64Mcg) -> Request {
    let resource = RESOURCES[..8].choose(random).expect("the slice is not empty");
    let path = path(resource, random);
    let mut query = Vec::new();
    for _ in 0..random.random_range(0..5) {
        let (name, values) = PARAMETERS.choose(random).expect("the slice is not empty");
        let value = one(random, &values.split(' ').map(|value| value.trim_matches('\'')).collect::<Vec<_>>());
        query.push(match random.random_range(0..40) {
            0 => (*name).to_owned(),
            1 => format!("{}={value}", name.to_uppercase()),
            _ => format!("{name}={value}"),
        });
    }
    // Half of the requests name a version that the cache can answer, and every watch is short.
    if random.random_bool(0.5) {
        query.push("resourceVersion=0".to_owned());
    }
    query.insert(0, "timeoutSeconds=1".to_owned());
    let query = fill(&query.join("&"), resource, world);
    let mut request = Request::get(format!("{path}?{query}"), AnsweredBy::Either);
    if random.random_bool(0.3) {
        let accepts: Vec<_> = ACCEPTS.split('\n').collect();
        let clauses = (0..random.random_range(1..4))
            .map(|_| format!("{}{}", one(random, &accepts), QUALITIES.choose(random).expect("the slice is not empty")));
        request = request.accepting(&clauses.collect::<Vec<_>>().join([",", ", "][random.random_range(0..2)]));
    }
    if random.random_bool(0.02) {
        request.method = [Method::HEAD, Method::OPTIONS].choose(random).expect("the slice is not empty").clone();
    }
    request
}

fn path(resource: &Resource, random: &mut Pcg64Mcg) -> String {
    let namespace = one(random, &["still-a", "", "still-b", "", "nowhere", "Still-A", "still-a%20"]);
    let mut path = resource.collection(namespace);
    if random.random_bool(0.3) {
        let names = "still-1 still-0 still-4 still-3 nothing STILL-1 still%2D1 a_b still-1/status x%2Fy";
        let name = one(random, &names.split(' ').collect::<Vec<_>>());
        path = format!("{path}/{name}");
    }
    if random.random_bool(0.2) {
        path = resource.deprecated_watch(&path);
    }
    match random.random_range(0..50) {
        0 => format!("{path}/"),
        1 => path.replacen('/', "//", 1),
        2 => path.replace("v1", "v2"),
        3 => path.to_uppercase(),
        _ => path,
    }
}
