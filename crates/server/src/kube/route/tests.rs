use std::sync::LazyLock;

use kubefan_access::{Denial, Mode, authorization::attributes::Attributes, denial::Forbidden, switches::Switched};
use kubefan_cache::Expired;
use kubefan_model::{GroupVersionResource, format::Format, projection::Projection, selector::FieldSelector};

use super::*;
use crate::kube::{
    cache_facts::{NotAllowed, SnapshotFacts},
    fallback::Fallback,
    feature_gates::CacheOnly,
    options::selectors,
    path::Path,
    query::Query,
};

static ALL: LazyLock<FieldSelector> = LazyLock::new(FieldSelector::default);
static NARROW: LazyLock<FieldSelector> = LazyLock::new(|| FieldSelector::parse("spec.nodeName=n").unwrap());

type Read = HttpRead<'static>;
type Facts = CacheFacts<'static>;

const PODS: &str = "/api/v1/pods";
const ANY: &str = "/api/v1/pods?resourceVersion=0";
const AT_431: &str = "/api/v1/pods?resourceVersion=431";
const POD: &str = "/api/v1/namespaces/a/pods/p";
const ANY_POD: &str = "/api/v1/namespaces/a/pods/p?resourceVersion=0";
const POD_AT_431: &str = "/api/v1/namespaces/a/pods/p?resourceVersion=431";
const WATCH: &str = "/api/v1/pods?watch=1";
const ANY_WATCH: &str = "/api/v1/pods?watch=1&resourceVersion=0";
const WATCH_AFTER_431: &str = "/api/v1/pods?watch=1&resourceVersion=431";
const WATCH_AT_431: &str =
    "/api/v1/pods?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion=431";
const WATCH_NOW: &str = "/api/v1/pods?watch=1&sendInitialEvents=false&resourceVersionMatch=NotOlderThan";
// {"v":"meta.k8s.io/v1","rv":430,"start":"a/p\u0000"}
const PAGE: &str = "/api/v1/pods?continue=eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6NDMwLCJzdGFydCI6ImEvcFx1MDAwMCJ9";

fn version(number: u64) -> ResourceVersion {
    ResourceVersion::new(number).unwrap()
}

fn future() -> Refusal {
    Refusal::Future { requested: version(431), current: version(430) }
}

fn unavailable() -> Refusal {
    Refusal::Unavailable("not proved".to_owned())
}

fn not_synced() -> Refusal {
    Refusal::NotSynced { resource: "pods".to_owned(), message: String::new() }
}

fn failing() -> Refusal {
    Refusal::Failing { resource: "pods".to_owned(), cause: String::new() }
}

fn stale() -> Refusal {
    Refusal::Stale {
        resource: "pods".to_owned(),
        age: None,
        staleness_max: std::time::Duration::ZERO,
        message: String::new(),
    }
}

fn forbidden() -> Denial {
    let user = "u".to_owned();
    let reason = String::new();
    Denial::Forbidden(Box::new(Forbidden { attributes: Attributes::default(), user, reason }))
}

fn bad_request() -> Failure {
    Failure::bad_request("a test".to_owned())
}

fn format(media: Media) -> Option<Format> {
    Some(Format::http(media, Projection::default()))
}

/// Returns the facts about a cache of one object.
fn cache(media: Media) -> FoundCacheFacts {
    FoundCacheFacts {
        gvr: GroupVersionResource::new("", "v1", "pods"),
        media,
        namespaced: true,
        refusal: None,
        is_listed_since: false,
        objects: Some(1),
    }
}

/// Returns a read of JSON, and the facts when everything was fetched: a cache of one object at
/// version 430.
fn fetched(uri: &str, fallback: Fallback) -> (Read, Facts) {
    let (path, query) = uri.split_once('?').unwrap_or((uri, ""));
    let path: &'static Path = Box::leak(Box::new(Path::parse(path).unwrap()));
    let query = Query::parse(query);
    let request = ReadRequest::parse(&query, path).unwrap();
    let spec = selectors(&query, path);
    let formats = vec![format(Media::Json)];
    let read = HttpRead { path, request, spec, formats, encodes_failures: true, problem: None };
    let mut facts = CacheFacts::new(fallback, &ALL, &read);
    facts.verdict = Some(Ok(()));
    facts.admission = Some(Ok(()));
    facts.cached = vec![Media::Json];
    facts.formats[0].cache = Some(Ok(cache(Media::Json)));
    facts.is_large = Some(false);
    facts.freshness = Some(Ok(()));
    facts.snapshot = Some(Ok(SnapshotFacts { version: Some(version(430)), has_object: true }));
    facts.subscription = Some(Ok(()));
    (read, facts)
}

fn found(facts: &mut Facts) -> &mut FoundCacheFacts {
    facts.formats[0].cache.as_mut().unwrap().as_mut().unwrap()
}

fn text(route: Route) -> String {
    match route {
        Route::Cache => "cache".to_owned(),
        Route::Forward => "upstream".to_owned(),
        Route::Refuse(Refused::Plain(failure)) => format!("kubefan {}", failure.code()),
        Route::Refuse(Refused::ByCache(failure)) => format!("cache {}", failure.code()),
        Route::Refuse(Refused::NotCached(failure)) => format!("client {}", failure.code()),
        Route::Refuse(Refused::Event(failure, _)) => format!("event {}", failure.code()),
        Route::Needs(Need::StartForLater(format)) => format!("needs start {format}"),
        Route::Needs(Need::Cache { format, waits_for_sync: false }) => format!("needs cache {format}"),
        Route::Needs(Need::Cache { format, waits_for_sync: true }) => format!("needs synced cache {format}"),
        Route::Needs(Need::Proof(Proof { patience, lists: false })) => format!("needs proof {patience:?}"),
        Route::Needs(Need::Proof(Proof { patience, lists: true })) => format!("needs proof {patience:?} by list"),
        Route::Needs(Need::Version(version, patience)) => format!("needs {version} {patience:?}"),
        Route::Needs(Need::Page { version, last }) => format!("needs page {version} after {}", last.as_str()),
        Route::Needs(need) => format!("needs {need:?}").to_lowercase(),
    }
}

/// A rule, a request that it concerns, the change from the facts when everything was fetched, and
/// the routes with and without upstream.
type Row = (&'static str, &'static str, fn(&mut Read, &mut Facts), [&'static str; 2]);

fn check(rows: &[Row]) {
    for (rule, uri, change, expected) in rows {
        let routed = [Fallback::Upstream, Fallback::Off].map(|fallback| {
            let (mut read, mut facts) = fetched(uri, fallback);
            change(&mut read, &mut facts);
            text(route(&read, &facts))
        });
        assert_eq!(routed, *expected, "{rule}: {uri}");
    }
}

#[test]
fn the_request_and_its_caller_come_first() {
    const DENIED: &str = "upstream refuses callers in its own words";
    const BY_CERTIFICATE: &str = "upstream never sees a client certificate";
    check(&[
        ("everything is there", ANY, |_, _| {}, ["cache", "cache"]),
        (
            "a read beyond a narrowed cache is upstream's, whoever asks",
            ANY,
            |_, facts| (facts.narrowed_by, facts.verdict) = (&*NARROW, None),
            ["upstream", "needs verdict"],
        ),
        (
            "the selector of a narrowed cache is in the request",
            "/api/v1/pods?resourceVersion=0&fieldSelector=spec.nodeName%3Dn",
            |_, facts| facts.narrowed_by = &*NARROW,
            ["cache", "cache"],
        ),
        (
            "a consistent get is upstream's, whoever asks",
            POD,
            |_, facts| facts.verdict = None,
            ["upstream", "needs verdict"],
        ),
        (
            "what the request says wrongly is upstream's to explain",
            ANY,
            |read, facts| {
                read.problem = Some(ReadError::Upstream(bad_request()));
                facts.verdict = None;
            },
            ["upstream", "kubefan 400"],
        ),
        (
            "what upstream would not explain is refused",
            ANY,
            |read, facts| (read.problem, facts.verdict) = (Some(ReadError::ByCache(bad_request())), None),
            ["cache 400", "cache 400"],
        ),
        ("no read comes before the verdict", ANY, |_, facts| facts.verdict = None, ["needs verdict", "needs verdict"]),
        (
            DENIED,
            ANY,
            |_, facts| facts.verdict = Some(Err(NotAllowed::Denied(forbidden()))),
            ["upstream", "kubefan 403"],
        ),
        (
            DENIED,
            ANY,
            |_, facts| facts.verdict = Some(Err(NotAllowed::Denied(Denial::Unauthenticated("")))),
            ["upstream", "kubefan 401"],
        ),
        (
            "callers that cannot be reviewed must not all turn to upstream",
            ANY,
            |_, facts| facts.verdict = Some(Err(NotAllowed::Denied(Denial::Unavailable("")))),
            ["kubefan 503", "kubefan 503"],
        ),
        (
            "callers that cannot be reviewed must not all turn to upstream",
            ANY,
            |_, facts| facts.verdict = Some(Err(NotAllowed::Denied(Denial::Busy(String::new())))),
            ["kubefan 429", "kubefan 429"],
        ),
        (
            BY_CERTIFICATE,
            ANY,
            |_, facts| facts.verdict = Some(Err(NotAllowed::DeniedByCertificate(forbidden()))),
            ["kubefan 403", "kubefan 403"],
        ),
        (
            "a limit of kubefan's holds for its caches only",
            ANY,
            |_, facts| {
                let denial = Denial::Invalid { field: "target", message: String::new() };
                facts.verdict = Some(Err(NotAllowed::DeniedByCertificate(denial)));
            },
            ["upstream", "kubefan 400"],
        ),
        (
            "a page of another site opens no websocket",
            WATCH_AFTER_431,
            |_, facts| facts.verdict = Some(Err(NotAllowed::ForeignOrigin(Failure::forbidden(String::new())))),
            ["cache 403", "cache 403"],
        ),
        (
            "only those that may read learn what is cached",
            ANY,
            |_, facts| facts.narrowed_by = &*NARROW,
            ["upstream", "kubefan 400"],
        ),
        (
            "an object of a narrowed cache is served",
            ANY_POD,
            |_, facts| facts.narrowed_by = &*NARROW,
            ["upstream", "cache"],
        ),
        ("a read takes a place", ANY, |_, facts| facts.admission = None, ["needs admission", "needs admission"]),
        (
            "a limit of places is final",
            ANY,
            |_, facts| facts.admission = Some(Err(Refusal::Exhausted(String::new()))),
            ["cache 429", "cache 429"],
        ),
    ]);
}

#[test]
fn a_cache_is_found_or_started() {
    const NONE: fn(&mut Read, &mut Facts) = |_, facts| {
        facts.cached = Vec::new();
        facts.formats[0].cache = None;
    };
    const HELD: fn(&mut Read, &mut Facts) = |_, facts| facts.formats[0].cache = None;
    const PROTOBUF: fn(&mut Read, &mut Facts) = |read, facts| {
        read.formats[0] = format(Media::Protobuf);
        facts.formats[0].cache = None;
    };
    const STARTED: fn(&mut Read, &mut Facts) = |read, facts| {
        PROTOBUF(read, facts);
        facts.formats[0].is_started = true;
    };
    const NO_FORMAT: fn(&mut Read, &mut Facts) = |read, facts| {
        read.formats = Vec::new();
        facts.formats = Vec::new();
    };
    const UNKNOWN_FORMAT: fn(&mut Read, &mut Facts) = |read, _| read.formats[0] = None;
    const SECOND: fn(&mut Read, &mut Facts) = |read, facts| {
        read.formats = vec![None, format(Media::Json)];
        facts.formats.insert(0, FormatFacts::default());
    };
    const UNSYNCED: fn(&mut Read, &mut Facts) = |_, facts| facts.formats[0].cache = Some(Err(not_synced()));
    const SYNCING: fn(&mut Read, &mut Facts) = |_, facts| found(facts).refusal = Some(not_synced());
    const FAILING: fn(&mut Read, &mut Facts) = |_, facts| found(facts).refusal = Some(failing());
    const STALE: fn(&mut Read, &mut Facts) = |_, facts| found(facts).refusal = Some(stale());
    const NO_ROOM: fn(&mut Read, &mut Facts) =
        |_, facts| facts.formats[0].cache = Some(Err(Refusal::NoRoom(String::new())));
    const NOT_CACHED: fn(&mut Read, &mut Facts) =
        |_, facts| facts.formats[0].cache = Some(Err(Refusal::NotCached(String::new())));
    const DRAINING: fn(&mut Read, &mut Facts) = |_, facts| facts.formats[0].cache = Some(Err(Refusal::Draining));
    check(&[
        ("a form that kubefan cannot make is upstream's", ANY, NO_FORMAT, ["upstream", "kubefan 406"]),
        ("a form that kubefan cannot make is upstream's", ANY, UNKNOWN_FORMAT, ["upstream", "kubefan 406"]),
        ("without upstream the next form is made", ANY, SECOND, ["upstream", "cache"]),
        ("a watch starts a cache", WATCH_AFTER_431, NONE, ["needs synced cache 0", "needs synced cache 0"]),
        ("the first list of an informer starts a cache", ANY, NONE, ["needs synced cache 0", "needs synced cache 0"]),
        (
            "other lists do not start a cache",
            "/api/v1/namespaces/a/pods?resourceVersion=0",
            NONE,
            ["upstream", "needs synced cache 0"],
        ),
        (
            "other lists do not start a cache",
            "/api/v1/pods?resourceVersion=0&labelSelector=a",
            NONE,
            ["upstream", "needs synced cache 0"],
        ),
        ("other lists do not start a cache", PODS, NONE, ["upstream", "needs cache 0"]),
        ("a get does not start a cache", ANY_POD, NONE, ["upstream", "needs cache 0"]),
        ("a consistent list does not wait for the first list", PODS, HELD, ["needs cache 0", "needs cache 0"]),
        ("a get does not wait for the first list", ANY_POD, HELD, ["needs cache 0", "needs cache 0"]),
        ("a list of any state waits for it", ANY, HELD, ["needs synced cache 0", "needs synced cache 0"]),
        ("a list at a version waits for it", AT_431, HELD, ["needs synced cache 0", "needs synced cache 0"]),
        ("a watch waits for it", WATCH, HELD, ["needs synced cache 0", "needs synced cache 0"]),
        ("a consistent read starts another encoding for the next", PODS, PROTOBUF, ["needs start 0", "needs cache 0"]),
        ("a consistent read starts another encoding for the next", PODS, STARTED, ["upstream", "needs cache 0"]),
        ("a list of any state waits for another encoding", ANY, PROTOBUF, ["needs synced cache 0"; 2]),
        ("clients that return to a new replica do not all turn to upstream", ANY, UNSYNCED, ["cache 429", "cache 429"]),
        ("clients that return to a new replica do not all turn to upstream", WATCH, SYNCING, ["cache 429"; 2]),
        ("clients that return to a new replica do not all turn to upstream", ANY, FAILING, ["cache 429"; 2]),
        ("upstream may be fresher than a stale cache", ANY, STALE, ["upstream", "kubefan 503"]),
        ("a read that does not wait for the first list is upstream's", PODS, UNSYNCED, ["upstream", "kubefan 429"]),
        ("a read that does not wait for the first list is upstream's", ANY_POD, UNSYNCED, ["upstream", "kubefan 429"]),
        ("there may be room later", ANY, NO_ROOM, ["upstream", "cache 429"]),
        ("what is never cached is upstream's", ANY, NOT_CACHED, ["upstream", "kubefan 404"]),
        ("a drain is final", ANY, DRAINING, ["cache 503", "cache 503"]),
        ("no object has this path", "/api/v1/pods/p?resourceVersion=0", |_, _| {}, ["upstream", "kubefan 404"]),
        (
            "an object of the cluster has this path",
            "/api/v1/nodes/n?resourceVersion=0",
            |_, facts| found(facts).namespaced = false,
            ["cache", "cache"],
        ),
    ]);
}

#[test]
fn a_cache_answers_if_it_is_as_fresh_as_demanded() {
    const UNPROVED: fn(&mut Read, &mut Facts) = |_, facts| {
        facts.freshness = None;
        facts.snapshot = None;
    };
    const LISTED: fn(&mut Read, &mut Facts) = |_, facts| {
        facts.freshness = None;
        found(facts).is_listed_since = true;
    };
    const UNPROVABLE: fn(&mut Read, &mut Facts) = |_, facts| {
        facts.freshness = Some(Err(NotFresh::NotProved(unavailable())));
    };
    const LARGE: fn(&mut Read, &mut Facts) = |_, facts| (facts.freshness, facts.is_large) = (None, Some(true));
    const UNMEASURED: fn(&mut Read, &mut Facts) = |_, facts| (facts.freshness, facts.is_large) = (None, None);
    const EMPTY: fn(&mut Read, &mut Facts) = |_, facts| (facts.freshness, found(facts).objects) = (None, None);
    const BEHIND: fn(&mut Read, &mut Facts) = |_, facts| {
        facts.freshness = Some(Err(NotFresh::NotReached(NotReached { refusal: future(), is_proved: false })));
    };
    const AHEAD: fn(&mut Read, &mut Facts) = |_, facts| {
        facts.freshness = Some(Err(NotFresh::NotReached(NotReached { refusal: future(), is_proved: true })));
    };
    check(&[
        ("any state needs no proof", ANY, UNPROVED, ["needs snapshot", "needs snapshot"]),
        ("any state needs no proof", ANY_POD, UNPROVED, ["needs snapshot", "needs snapshot"]),
        (
            "a consistent list needs one",
            PODS,
            UNPROVED,
            ["needs proof AtOnce by list", "needs proof NoFallback by list"],
        ),
        ("a consistent get needs one", POD, UNPROVED, ["upstream", "needs proof NoFallback by list"]),
        (
            "a consistent watch needs one",
            WATCH,
            UNPROVED,
            ["needs proof Bookmark by list", "needs proof NoFallback by list"],
        ),
        (
            "a watch from now reads no object for it",
            WATCH_NOW,
            UNPROVED,
            ["needs proof Bookmark", "needs proof NoFallback"],
        ),
        ("a list after the request is a proof", PODS, LISTED, ["cache", "cache"]),
        ("upstream is asked how large a list is", PODS, UNMEASURED, ["needs size", "needs proof NoFallback by list"]),
        (
            "a large list is worth a wait",
            "/api/v1/pods?labelSelector=a",
            LARGE,
            ["needs proof Bookmark by list", "needs proof NoFallback by list"],
        ),
        (
            "upstream answers a small list of some objects as soon",
            "/api/v1/pods?labelSelector=a",
            UNPROVED,
            ["needs proof AtOnce", "needs proof NoFallback by list"],
        ),
        (
            "a page that is not all of the list is not listed",
            "/api/v1/pods?limit=1",
            |_, facts| (facts.freshness, found(facts).objects) = (None, Some(2)),
            ["needs proof AtOnce", "needs proof NoFallback"],
        ),
        (
            "a page that is all of the list is listed",
            "/api/v1/pods?limit=1",
            UNPROVED,
            ["needs proof AtOnce by list", "needs proof NoFallback by list"],
        ),
        (
            "a page of some objects is not listed",
            "/api/v1/namespaces/a/pods?limit=5",
            UNPROVED,
            ["needs proof AtOnce", "needs proof NoFallback"],
        ),
        ("there is nothing to wait for before the first list", PODS, EMPTY, ["needs proof AtOnce by list"; 2]),
        ("upstream answers what is not proved", PODS, UNPROVABLE, ["upstream", "kubefan 503"]),
        ("upstream answers what is not proved", WATCH, UNPROVABLE, ["upstream", "kubefan 503"]),
        ("upstream answers what is not proved", WATCH_NOW, UNPROVABLE, ["upstream", "kubefan 503"]),
        ("a named version is waited for", AT_431, UNPROVED, ["needs 431 Bookmark", "needs 431 NoFallback"]),
        ("a named version is waited for", POD_AT_431, UNPROVED, ["needs 431 Bookmark", "needs 431 NoFallback"]),
        ("a named version is waited for", WATCH_AT_431, UNPROVED, ["needs 431 Bookmark", "needs 431 NoFallback"]),
        ("upstream may have reached a version", AT_431, BEHIND, ["upstream", "kubefan 504"]),
        ("upstream may have reached a version", POD_AT_431, BEHIND, ["upstream", "kubefan 504"]),
        ("upstream may have reached a version", WATCH_AT_431, BEHIND, ["upstream", "kubefan 504"]),
        ("a version that the cluster has not reached is too large", AT_431, AHEAD, ["cache 504", "cache 504"]),
        ("a version that the cluster has not reached is too large", POD_AT_431, AHEAD, ["cache 504", "cache 504"]),
        ("the headers of a watch come before that", WATCH_AT_431, AHEAD, ["event 504", "event 504"]),
    ]);
}

#[test]
fn a_snapshot_or_a_subscription_answers() {
    const MISSING: fn(&mut Read, &mut Facts) = |_, facts| {
        facts.snapshot = Some(Ok(SnapshotFacts { version: Some(version(430)), has_object: false }));
    };
    const UNTAKEN: fn(&mut Read, &mut Facts) = |_, facts| facts.snapshot = None;
    const EXPIRED: fn(&mut Read, &mut Facts) = |_, facts| {
        let expired = Expired { requested: version(7), oldest: version(430) };
        facts.subscription = Some(Err(Refusal::Expired(expired)));
    };
    check(&[
        ("a get needs a snapshot", ANY_POD, UNTAKEN, ["needs snapshot", "needs snapshot"]),
        ("an object that does not exist", ANY_POD, MISSING, ["cache 404", "cache 404"]),
        (
            "a failure in an encoding that kubefan cannot make is upstream's",
            ANY_POD,
            |read, facts| {
                read.encodes_failures = false;
                MISSING(read, facts);
            },
            ["upstream", "cache 404"],
        ),
        (
            "an object that a narrowed cache lacks may exist",
            ANY_POD,
            |read, facts| {
                facts.narrowed_by = &*NARROW;
                MISSING(read, facts);
            },
            ["upstream", "cache 503"],
        ),
        (
            "a refused snapshot is upstream's",
            ANY,
            |_, facts| facts.snapshot = Some(Err(stale())),
            ["upstream", "kubefan 503"],
        ),
        (
            "a limit of snapshots is final",
            ANY,
            |_, facts| facts.snapshot = Some(Err(Refusal::Exhausted(String::new()))),
            ["cache 429", "cache 429"],
        ),
        ("exactly this version", "/api/v1/pods?resourceVersion=430&limit=5", |_, _| {}, ["cache", "cache"]),
        (
            "etcd has other versions",
            "/api/v1/pods?resourceVersion=429&resourceVersionMatch=Exact",
            |_, _| {},
            ["upstream", "kubefan 410"],
        ),
        ("an invalid token is upstream's to explain", "/api/v1/pods?continue=x", UNTAKEN, ["upstream", "kubefan 400"]),
        (
            "a token of another path",
            "/api/v1/namespaces/b/pods?continue=eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6NDMwLCJzdGFydCI6ImEvcFx1MDAwMCJ9",
            UNTAKEN,
            ["upstream", "kubefan 410"],
        ),
        ("a later page has a snapshot", PAGE, UNTAKEN, ["needs page 430 after a/p", "needs page 430 after a/p"]),
        ("a later page is answered from it", PAGE, |_, _| {}, ["cache", "cache"]),
        (
            "etcd retains what a token names",
            PAGE,
            |_, facts| facts.snapshot = Some(Ok(SnapshotFacts { version: None, has_object: false })),
            ["upstream", "kubefan 410"],
        ),
        (
            "a watch is subscribed",
            WATCH_AFTER_431,
            |_, facts| (facts.subscription, facts.freshness) = (None, None),
            ["needs subscription", "needs subscription"],
        ),
        ("a watch from an expired version", WATCH_AFTER_431, EXPIRED, ["event 410", "event 410"]),
        (
            "a watch that cannot be read again is upstream's",
            ANY_WATCH,
            |_, facts| facts.subscription = Some(Err(unavailable())),
            ["upstream", "kubefan 503"],
        ),
        (
            "a history that has ended is final",
            ANY_WATCH,
            |_, facts| facts.subscription = Some(Err(Refusal::Rewritten(String::new()))),
            ["cache 410", "cache 410"],
        ),
    ]);
}

/// Returns the facts after each answer that the loop may give to a need.
fn after(need: &Need, read: &Read, facts: &Facts) -> Vec<Facts> {
    let with = |change: &dyn Fn(&mut Facts)| {
        let mut facts = facts.clone();
        change(&mut facts);
        facts
    };
    match need {
        Need::Verdict => [Ok(()), Err(NotAllowed::Denied(forbidden()))]
            .map(|verdict| with(&|facts| facts.verdict = Some(verdict.clone())))
            .into(),
        Need::Admission => [
            (Ok(()), vec![]),
            (Ok(()), vec![Media::Json]),
            (Ok(()), vec![Media::Json, Media::Protobuf]),
            (Err(Refusal::Exhausted(String::new())), vec![]),
        ]
        .map(|(admission, cached)| {
            with(&|facts| (facts.admission, facts.cached) = (Some(admission.clone()), cached.clone()))
        })
        .into(),
        Need::StartForLater(format) => vec![with(&|facts| facts.formats[*format].is_started = true)],
        Need::Cache { format, .. } => {
            let synced = cache(read.formats[*format].as_ref().unwrap().media());
            let syncing = FoundCacheFacts { refusal: Some(not_synced()), objects: None, ..synced.clone() };
            [
                Ok(FoundCacheFacts { is_listed_since: true, ..synced.clone() }),
                Ok(synced),
                Ok(syncing),
                Err(not_synced()),
                Err(Refusal::NoRoom(String::new())),
                Err(Refusal::NotCached(String::new())),
            ]
            .map(|cache| with(&|facts| facts.formats[*format].cache = Some(cache.clone())))
            .into()
        }
        Need::Size => [true, false].map(|is_large| with(&|facts| facts.is_large = Some(is_large))).into(),
        Need::Proof(_) | Need::Version(..) => [
            Ok(()),
            Err(NotFresh::NotProved(unavailable())),
            Err(NotFresh::NotReached(NotReached { refusal: future(), is_proved: true })),
        ]
        .map(|freshness| with(&|facts| facts.freshness = Some(freshness.clone())))
        .into(),
        Need::Snapshot | Need::Page { .. } => [
            Ok(SnapshotFacts { version: Some(version(430)), has_object: true }),
            Ok(SnapshotFacts { version: None, has_object: false }),
            Err(stale()),
        ]
        .map(|snapshot| with(&|facts| facts.snapshot = Some(snapshot.clone())))
        .into(),
        Need::Subscription => [Ok(()), Err(unavailable())]
            .map(|subscription| with(&|facts| facts.subscription = Some(subscription.clone())))
            .into(),
    }
}

/// Follows every sequence of answers to its end. Returns whether the cache answers after some of
/// them.
fn may_be_served(read: &Read, facts: &Facts, asked: &mut Vec<Need>) -> bool {
    let need = match route(read, facts) {
        Route::Needs(need) => need,
        decided => return decided == Route::Cache,
    };
    assert!(!asked.contains(&need), "{need:?} is needed twice: {asked:?}");
    asked.push(need.clone());
    let mut is_served = false;
    for facts in after(&need, read, facts) {
        is_served |= may_be_served(read, &facts, asked);
    }
    asked.pop();
    is_served
}

#[test]
fn no_need_is_asked_for_twice() {
    const READS: [&str; 12] =
        [PODS, ANY, AT_431, POD, ANY_POD, POD_AT_431, WATCH, ANY_WATCH, WATCH_AFTER_431, WATCH_AT_431, WATCH_NOW, PAGE];
    for uri in READS {
        for fallback in
            [Fallback::Upstream, Fallback::Client, Fallback::Off, Fallback::CacheOnly(CacheOnly::ShardSelector)]
        {
            for narrowed_by in [&*ALL, &*NARROW] {
                let (mut read, _) = fetched(uri, fallback);
                read.formats = vec![format(Media::Protobuf), None, format(Media::Json)];
                let facts = CacheFacts::new(fallback, narrowed_by, &read);
                let is_served = may_be_served(&read, &facts, &mut Vec::new());
                let is_cached = *narrowed_by == *ALL || matches!(read.request, ReadRequest::Get(_));
                assert!(is_served || !is_cached || fallback.is_upstream(), "{uri}: {fallback:?}");
            }
        }
    }
}

#[test]
fn requests_that_upstream_might_misread_are_refused() {
    let text = |refused: Option<Refused>| text(refused.map_or(Route::Forward, Route::Refuse));
    for needed in [CacheOnly::ShardSelector, CacheOnly::ManagedFieldsOptOut] {
        let cache_only = Fallback::CacheOnly(needed);
        let upstream = |failure| text(cache_only.refusal(ReadError::Upstream(failure)));
        assert_eq!(upstream(Failure::not_served(String::new())), "kubefan 400", "the cache lacks it");
        assert_eq!(upstream(negotiate::not_acceptable()), "kubefan 400", "the cache lacks it");
        assert_eq!(upstream(Failure::unavailable(String::new())), "kubefan 503", "for a while only");
        assert_eq!(text(cache_only.refusal(ReadError::ByCache(bad_request()))), "cache 400");
        let switched = |fallback: Fallback, mode| text(fallback.refusal_of_switched(Switched::new(mode, "", "pods")));
        assert_eq!(switched(cache_only, Mode::Passthrough), "kubefan 400");
        assert_eq!(switched(cache_only, Mode::Deny), "kubefan 403");
        assert_eq!(switched(Fallback::Upstream, Mode::Passthrough), "upstream");
        assert_eq!(switched(Fallback::Client, Mode::Passthrough), "client 504");
        assert_eq!(switched(Fallback::Client, Mode::Deny), "kubefan 403");
        assert_eq!(switched(Fallback::Off, Mode::Passthrough), "kubefan 503");
    }
}

#[test]
fn a_retriable_failure_of_any_form_is_reported_before_a_final_one() {
    let missing = || Failure::not_served("nothing is cached as protobuf".to_owned());
    let syncing = || Failure::unavailable("not synced".to_owned());
    let code = |known: Option<Failure>, other: Failure| more_helpful(known, other).code();
    assert_eq!(code(None, missing()), 404);
    assert_eq!(code(Some(missing()), syncing()), 503);
    assert_eq!(code(Some(syncing()), missing()), 503);
    assert_eq!(code(Some(missing()), negotiate::not_acceptable()), 404, "the first");
}
