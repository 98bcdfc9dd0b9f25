//! The operation of a read: `ListOptions` and `GetOptions` from a query, interpreted and validated
//! as the apiserver does (`internalversion/validation.ValidateListOptions`,
//! `runtime/conversion.go`; API concepts page).

use std::time::Duration;

use kubefan_model::{ReadSpec, ResourceVersion, SelectorTexts, format::IncludeObject};

use super::{
    path::Path,
    query::{Query, is_true},
    status::{Cause, Failure},
};

/// The parameter of the shard selector (KEP-5866).
pub const SHARD_SELECTOR: &str = "shardSelector";

/// The freshness that `resourceVersion` and `resourceVersionMatch` demand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freshness {
    /// Includes every write that finished before the request (a consistent read).
    Consistent,
    /// Any cached state.
    Any,
    /// At least this version.
    NotOlderThan(ResourceVersion),
    /// Exactly this version.
    Exact(ResourceVersion),
}

/// The start of a watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchStart {
    /// With the state, at least this fresh, as initial events.
    State(Freshness),
    /// With the changes after this version.
    After(ResourceVersion),
    /// With the changes after the current state, which is at least this fresh.
    Now(Freshness),
}

/// The options of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListOptions {
    /// The freshness that it demands.
    pub freshness: Freshness,
    /// The most objects of a page; `None` for no paging.
    pub limit: Option<usize>,
    /// The continue token; empty for the first page.
    pub continues: String,
}

/// The options of a watch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WatchOptions {
    /// The start.
    pub start: WatchStart,
    /// Whether bookmarks are sent.
    pub bookmarks: bool,
    /// Whether a bookmark marks the end of the initial events.
    pub marks_end: bool,
    /// The duration; `None` if the server decides.
    pub timeout: Option<Duration>,
}

/// The operation of a read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadRequest {
    /// A single object, with this freshness.
    Get(Freshness),
    /// A collection.
    List(ListOptions),
    /// Changes of a collection, or of a single object if the path has the deprecated `/watch/`
    /// prefix.
    Watch(WatchOptions),
}

/// Returns the selectors of a read. A get has none.
pub fn selectors(query: &Query<'_>, path: &Path) -> ReadSpec {
    if !path.has_list_options() {
        return ReadSpec::default();
    }
    let text = |name| query.first(name).unwrap_or_default().to_owned();
    let labels = text("labelSelector");
    let fields = text("fieldSelector");
    let shard = text(SHARD_SELECTOR);
    ReadSpec::new(SelectorTexts { labels, fields, shard })
}

/// Returns the part of its object that each row of a Table includes; `None` if the value is
/// invalid.
pub fn include_object(query: &Query<'_>) -> Option<IncludeObject> {
    IncludeObject::parse(query.first("includeObject").unwrap_or_default())
}

/// The parameters as they are given.
#[derive(Default)]
struct Raw<'a> {
    watch: bool,
    version: &'a str,
    version_match: &'a str,
    continues: &'a str,
    limit: i64,
    timeout: &'a str,
    timeout_seconds: Option<i64>,
    bookmarks: bool,
    send_initial_events: Option<bool>,
}

fn number(value: &str) -> Result<i64, Failure> {
    value.parse().map_err(|error: std::num::ParseIntError| {
        let problem = match error.kind() {
            std::num::IntErrorKind::PosOverflow | std::num::IntErrorKind::NegOverflow => "value out of range",
            _ => "invalid syntax",
        };
        Failure::bad_request(format!("strconv.ParseInt: parsing {value:?}: {problem}"))
    })
}

impl<'a> Raw<'a> {
    fn read(query: &'a Query<'_>) -> Result<Self, Failure> {
        query.check()?;
        let mut raw = Self::default();
        let mut seen: Vec<&str> = Vec::new();
        for (name, value) in query.pairs() {
            // The first value of a parameter counts.
            if seen.contains(&name) {
                continue;
            }
            match name {
                "watch" => raw.watch = is_true(value),
                "resourceVersion" => raw.version = value,
                "resourceVersionMatch" => raw.version_match = value,
                "continue" => raw.continues = value,
                "limit" => raw.limit = number(value)?,
                "timeout" => raw.timeout = value,
                "timeoutSeconds" => raw.timeout_seconds = Some(number(value)?),
                "allowWatchBookmarks" => raw.bookmarks = is_true(value),
                "sendInitialEvents" => raw.send_initial_events = Some(is_true(value)),
                // Only known names are kept, so that the time grows no faster than the query.
                _ => continue,
            }
            seen.push(name);
        }
        Ok(raw)
    }

    fn version(&self) -> Result<Option<ResourceVersion>, Failure> {
        ResourceVersion::parse_request(self.version)
            .map_err(|_| {
                let number = "strconv.ParseUint: parsing";
                let version = self.version;
                Failure::bad_request(format!(
                    "invalid resource version: resourceVersion: Invalid value: {version:?}: {number} {version:?}: invalid syntax"
                ))
            })
    }

    fn check_list(&self) -> Result<(), Failure> {
        let mut causes = Vec::new();
        if !self.version_match.is_empty() {
            if self.version.is_empty() {
                causes.push(Cause::forbidden(
                    "resourceVersionMatch",
                    "resourceVersionMatch is forbidden unless resourceVersion is provided",
                ));
            }
            if !self.continues.is_empty() {
                causes.push(Cause::forbidden(
                    "resourceVersionMatch",
                    "resourceVersionMatch is forbidden when continue is provided",
                ));
            }
            if !matches!(self.version_match, "Exact" | "NotOlderThan") {
                causes.push(Cause::not_supported(
                    "resourceVersionMatch",
                    self.version_match,
                    &["Exact", "NotOlderThan", ""],
                ));
            }
            if self.version_match == "Exact" && self.version == "0" {
                causes.push(Cause::forbidden(
                    "resourceVersionMatch",
                    "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"",
                ));
            }
        }
        if self.send_initial_events.is_some() {
            causes.push(Cause::forbidden("sendInitialEvents", "sendInitialEvents is forbidden for list"));
        }
        Failure::if_invalid(causes)
    }

    fn check_watch(&self) -> Result<(), Failure> {
        let mut causes = Vec::new();
        if self.send_initial_events.is_some() && self.version_match != "NotOlderThan" {
            causes.push(Cause::forbidden(
                "resourceVersionMatch",
                "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
            ));
        }
        if !self.version_match.is_empty() {
            if self.send_initial_events.is_none() {
                causes.push(Cause::forbidden(
                    "resourceVersionMatch",
                    "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
                ));
            }
            if self.version_match != "NotOlderThan" {
                causes.push(Cause::not_supported("resourceVersionMatch", self.version_match, &["NotOlderThan"]));
            }
            if !self.continues.is_empty() {
                causes.push(Cause::forbidden(
                    "resourceVersionMatch",
                    "resourceVersionMatch is forbidden when continue is provided",
                ));
            }
        }
        Failure::if_invalid(causes)
    }

    fn list(self) -> Result<ListOptions, Failure> {
        self.check_list()?;
        if !self.continues.is_empty() && !matches!(self.version, "" | "0") {
            return Err(Failure::bad_request(
                "specifying resource version is not allowed when using continue".to_owned(),
            ));
        }
        let limit = usize::try_from(self.limit).ok().filter(|limit| *limit > 0);
        let freshness = match (self.version()?, self.version_match) {
            (None, _) if self.version.is_empty() => Freshness::Consistent,
            (None, _) => Freshness::Any,
            (Some(version), "Exact") => Freshness::Exact(version),
            // Without resourceVersionMatch, a limit demands pages of exactly that version (the
            // legacy behavior).
            (Some(version), "") if limit.is_some() => Freshness::Exact(version),
            (Some(version), _) => Freshness::NotOlderThan(version),
        };
        Ok(ListOptions { limit, freshness, continues: self.continues.to_owned() })
    }

    /// Applies the defaults of a watch without a version: it starts with the state
    /// (`SetListOptionsDefaults`).
    fn with_defaults(mut self) -> Self {
        let unset = self.send_initial_events.is_none() && self.version_match.is_empty();
        if unset && matches!(self.version, "" | "0") {
            self.send_initial_events = Some(true);
            self.version_match = "NotOlderThan";
        }
        self
    }

    fn watch(self) -> Result<WatchOptions, Failure> {
        let freshness = match self.version()? {
            Some(version) => Freshness::NotOlderThan(version),
            None if self.version == "0" => Freshness::Any,
            None => Freshness::Consistent,
        };
        let start = match (self.send_initial_events, freshness) {
            (Some(true), freshness) => WatchStart::State(freshness),
            (_, Freshness::NotOlderThan(version) | Freshness::Exact(version)) => WatchStart::After(version),
            (None, freshness) => WatchStart::State(freshness),
            (Some(false), freshness) => WatchStart::Now(freshness),
        };
        let timeout = match self.timeout_seconds.map(u64::try_from) {
            None | Some(Ok(0)) => None,
            Some(Ok(seconds)) => Some(seconds),
            // At the apiserver, the context has expired before the watch begins. Its answer depends
            // on its version, so upstream answers.
            Some(Err(_)) => return Err(Failure::bad_request("timeoutSeconds is negative".to_owned())),
        };
        Ok(WatchOptions {
            start,
            bookmarks: self.bookmarks,
            marks_end: self.bookmarks && self.send_initial_events == Some(true),
            timeout: timeout.map(|seconds| Duration::from_secs(seconds.min(u64::from(u32::MAX)))),
        })
    }
}

impl ReadRequest {
    /// Reads the query of a request for a path.
    ///
    /// # Errors
    /// The apiserver's answer.
    pub fn parse(query: &Query<'_>, path: &Path) -> Result<Self, Failure> {
        if path.has_list_options() {
            return Self::of_collection(query, path.is_watch);
        }
        freshness_of_get(query).map(Self::Get)
    }

    /// Reads the query of a collection. `is_watch_path`: the path has the deprecated `/watch/`
    /// prefix. Such a request is a watch, but the apiserver validates it as a list unless it also
    /// has `watch=1`.
    fn of_collection(query: &Query<'_>, is_watch_path: bool) -> Result<Self, Failure> {
        let raw = Raw::read(query)?;
        if raw.watch {
            let raw = raw.with_defaults();
            raw.check_watch()?;
            return raw.watch().map(Self::Watch);
        }
        if is_watch_path {
            raw.check_list()?;
            return raw.watch().map(Self::Watch);
        }
        check_timeout(raw.timeout)?;
        raw.list().map(Self::List)
    }
}

/// Returns the freshness that a get demands. Other parameters have no meaning in a get.
fn freshness_of_get(query: &Query<'_>) -> Result<Freshness, Failure> {
    query.check()?;
    let first = |name| query.first(name).unwrap_or_default();
    check_timeout(first("timeout"))?;
    let raw = Raw { version: first("resourceVersion"), ..Raw::default() };
    Ok(match raw.version()? {
        Some(version) => Freshness::NotOlderThan(version),
        None if raw.version == "0" => Freshness::Any,
        None => Freshness::Consistent,
    })
}

/// Validates `timeout`, a duration in Go's syntax. Its value is ignored: a read from the cache is
/// much faster.
fn check_timeout(timeout: &str) -> Result<(), Failure> {
    let mut rest = timeout;
    while !rest.is_empty() {
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let unit = ["ms", "s", "m", "h"].into_iter().find(|unit| rest[digits..].starts_with(unit));
        match unit {
            // More digits could overflow in Go.
            Some(unit) if (1..=6).contains(&digits) => rest = &rest[digits + unit.len()..],
            _ => {
                return Err(Failure::bad_request(format!("invalid timeout specified in the request URL: {timeout:?}")));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(number: u64) -> ResourceVersion {
        ResourceVersion::new(number).unwrap()
    }

    fn list(query: &str) -> ListOptions {
        match ReadRequest::of_collection(&Query::parse(query), false) {
            Ok(ReadRequest::List(options)) => options,
            other => panic!("{query}: {other:?}"),
        }
    }

    fn watch(query: &str) -> WatchOptions {
        match ReadRequest::of_collection(&Query::parse(&format!("watch=1&{query}")), false) {
            Ok(ReadRequest::Watch(options)) => options,
            other => panic!("{query}: {other:?}"),
        }
    }

    #[test]
    fn the_freshness_of_a_list_follows_from_version_match_and_limit() {
        assert_eq!(list("").freshness, Freshness::Consistent);
        assert_eq!(list("resourceVersion=0").freshness, Freshness::Any);
        assert_eq!(list("resourceVersion=7").freshness, Freshness::NotOlderThan(version(7)));
        assert_eq!(list("resourceVersion=7&limit=5").freshness, Freshness::Exact(version(7)));
        let pages = list("resourceVersion=7&resourceVersionMatch=NotOlderThan&limit=5");
        assert_eq!((pages.freshness, pages.limit), (Freshness::NotOlderThan(version(7)), Some(5)));
        assert_eq!(list("resourceVersion=7&resourceVersionMatch=Exact").freshness, Freshness::Exact(version(7)));
        assert_eq!(list("limit=3&limit=9").limit, Some(3), "the first counts");
    }

    #[test]
    fn the_start_of_a_watch_follows_from_its_options() {
        assert_eq!(watch("").start, WatchStart::State(Freshness::Consistent));
        assert_eq!(watch("resourceVersion=0").start, WatchStart::State(Freshness::Any));
        assert_eq!(watch("resourceVersion=7").start, WatchStart::After(version(7)));
        let streamed = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
        assert_eq!(watch(streamed).start, WatchStart::State(Freshness::Consistent));
        let not_older = format!("{streamed}&resourceVersion=7");
        assert_eq!(watch(&not_older).start, WatchStart::State(Freshness::NotOlderThan(version(7))));
        let none = "sendInitialEvents=false&resourceVersionMatch=NotOlderThan";
        assert_eq!(watch(none).start, WatchStart::Now(Freshness::Consistent));
        assert_eq!(watch("timeoutSeconds=5").timeout, Some(Duration::from_secs(5)));
        assert_eq!(watch("timeoutSeconds=0").timeout, None);
        assert!(
            ReadRequest::of_collection(&Query::parse("watch=1&timeoutSeconds=-1"), false).is_err(),
            "the apiserver answers"
        );
        let old = ReadRequest::of_collection(&Query::parse("allowWatchBookmarks=1"), true);
        assert!(
            matches!(old, Ok(ReadRequest::Watch(WatchOptions { bookmarks: true, marks_end: false, .. }))),
            "{old:?}"
        );
        assert!(watch("allowWatchBookmarks=1").marks_end, "by default");
    }

    #[test]
    fn invalid_options_are_refused_with_the_apiservers_codes() {
        for (query, code) in [
            ("resourceVersion=x", 400),
            ("limit=x", 400),
            ("resourceVersionMatch=Exact", 422),
            ("resourceVersion=0&resourceVersionMatch=Exact", 422),
            ("resourceVersion=1&resourceVersionMatch=Newest", 422),
            ("sendInitialEvents=true", 422),
            ("continue=abc&resourceVersion=7", 400),
            ("watch=1&sendInitialEvents=true", 422),
            ("watch=1&resourceVersionMatch=NotOlderThan&resourceVersion=1", 422),
            ("watch=1&continue=abc", 422),
            ("fieldSelector=metadata.name=a;b", 400),
            ("unknown=%zz", 400),
            ("labelSelector=%ff", 400),
            ("timeout=soon", 400),
        ] {
            let failure = ReadRequest::of_collection(&Query::parse(query), false).expect_err(query);
            assert_eq!(failure.code(), code, "{query}");
        }
        let read =
            |parameters: usize| ReadRequest::of_collection(&Query::parse(&vec!["a"; parameters].join("&")), false);
        assert!(read(10_000).is_ok());
        assert_eq!(read(10_001).unwrap_err().code(), 400, "Go would read none of them");
    }
}
