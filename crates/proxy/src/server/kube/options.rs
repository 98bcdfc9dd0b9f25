//! The query of a list or watch: `ListOptions` of the API concepts page, read and checked as the apiserver does
//! (`internalversion/validation.ValidateListOptions`, `runtime/conversion.go`).

use std::{borrow::Cow, time::Duration};

use form_urlencoded::parse;

use super::status::{Cause, Failure};
use kubefan_model::{ResourceVersion, format::Include};

/// The longest query that is read.
const QUERY_BYTES_MAX: usize = 64 << 10;

/// What `resourceVersion` and `resourceVersionMatch` ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freshness {
    /// Not older than any write that had finished before the request.
    Consistent,
    /// Whatever is held.
    Any,
    /// Not older than this version.
    NotOlderThan(ResourceVersion),
    /// Of exactly this version.
    Exact(ResourceVersion),
}

/// What a watch is told first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// The state, of this freshness.
    State(Freshness),
    /// What comes after this version.
    After(ResourceVersion),
    /// What comes from now on: of a state that is consistent, or any.
    Now(Freshness),
}

/// A list's options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListOptions {
    /// By label.
    pub label_selector: String,
    /// By field.
    pub field_selector: String,
    /// How fresh.
    pub freshness: Freshness,
    /// The most objects of a page; `None`: no pages.
    pub limit: Option<usize>,
    /// The token of the page before; empty for the first.
    pub continues: String,
}

/// A watch's options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WatchOptions {
    /// By label.
    pub label_selector: String,
    /// By field.
    pub field_selector: String,
    /// Where it begins.
    pub begin: Begin,
    /// Whether bookmarks are sent.
    pub bookmarks: bool,
    /// Whether one ends the initial state.
    pub marks_end: bool,
    /// When it ends; `None`: when the server likes.
    pub timeout: Option<Duration>,
}

/// What a query asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Options {
    /// A list.
    List(ListOptions),
    /// A watch.
    Watch(WatchOptions),
}

impl Options {
    /// By label and by field.
    pub fn selectors(&self) -> (&str, &str) {
        match self {
            Self::List(ListOptions { label_selector, field_selector, .. })
            | Self::Watch(WatchOptions { label_selector, field_selector, .. }) => (label_selector, field_selector),
        }
    }
}

/// How much of its object each row of a table is to have; `None` where only upstream can say what is wrong with the query.
pub fn include_object(query: &str) -> Option<Include> {
    let value = parse(query.as_bytes()).find(|(name, _)| name == "includeObject");
    Include::parse(&value.map_or(Cow::Borrowed(""), |(_, value)| value))
}

/// A parameter and its value.
type Pair<'a> = (Cow<'a, str>, Cow<'a, str>);

#[derive(Default)]
struct Raw<'a> {
    watch: bool,
    label_selector: Cow<'a, str>,
    field_selector: Cow<'a, str>,
    version: Cow<'a, str>,
    version_match: Cow<'a, str>,
    continues: Cow<'a, str>,
    limit: i64,
    timeout: Cow<'a, str>,
    timeout_seconds: Option<i64>,
    bookmarks: bool,
    send_initial_events: Option<bool>,
}

/// As the apiserver reads a boolean.
pub fn truth(value: &str) -> bool {
    value != "0" && !value.eq_ignore_ascii_case("false")
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
    fn read(query: &'a str) -> Result<Self, Failure> {
        let mut raw = Self::default();
        let mut seen: Vec<Cow<'_, str>> = Vec::new();
        for (name, value) in pairs(query)? {
            // Of a name that comes more than once, the first value counts.
            if seen.contains(&name) {
                continue;
            }
            match &*name {
                "watch" => raw.watch = truth(&value),
                "labelSelector" => raw.label_selector = value,
                "fieldSelector" => raw.field_selector = value,
                "resourceVersion" => raw.version = value,
                "resourceVersionMatch" => raw.version_match = value,
                "continue" => raw.continues = value,
                "limit" => raw.limit = number(&value)?,
                "timeout" => raw.timeout = value,
                "timeoutSeconds" => raw.timeout_seconds = Some(number(&value)?),
                "allowWatchBookmarks" => raw.bookmarks = truth(&value),
                "sendInitialEvents" => raw.send_initial_events = Some(truth(&value)),
                _ => {}
            }
            seen.push(name);
        }
        Ok(raw)
    }

    fn version(&self) -> Result<Option<ResourceVersion>, Failure> {
        ResourceVersion::parse_request(&self.version)
            .map_err(|_| {
                let number = "strconv.ParseUint: parsing";
                let version = &self.version;
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
            if !matches!(&*self.version_match, "Exact" | "NotOlderThan") {
                causes.push(Cause::not_supported(
                    "resourceVersionMatch",
                    &self.version_match,
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
                causes.push(Cause::not_supported("resourceVersionMatch", &self.version_match, &["NotOlderThan"]));
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
        if !self.continues.is_empty() && !matches!(&*self.version, "" | "0") {
            return Err(Failure::bad_request(
                "specifying resource version is not allowed when using continue".to_owned(),
            ));
        }
        let limit = usize::try_from(self.limit).ok().filter(|limit| *limit > 0);
        let freshness = match (self.version()?, &*self.version_match) {
            (None, _) if self.version.is_empty() => Freshness::Consistent,
            (None, _) => Freshness::Any,
            (Some(version), "Exact") => Freshness::Exact(version),
            // Without a match, a limit asks for pages of exactly that version, as it always has.
            (Some(version), "") if limit.is_some() => Freshness::Exact(version),
            (Some(version), _) => Freshness::NotOlderThan(version),
        };
        Ok(ListOptions {
            label_selector: self.label_selector.into_owned(),
            field_selector: self.field_selector.into_owned(),
            limit,
            freshness,
            continues: self.continues.into_owned(),
        })
    }

    /// The state first is what a watch gets that names no version, as if it had asked for it (`SetListOptionsDefaults`).
    fn with_defaults(mut self) -> Self {
        let unset = self.send_initial_events.is_none() && self.version_match.is_empty();
        if unset && matches!(&*self.version, "" | "0") {
            self.send_initial_events = Some(true);
            self.version_match = Cow::Borrowed("NotOlderThan");
        }
        self
    }

    fn watch(self) -> Result<WatchOptions, Failure> {
        let freshness = match self.version()? {
            Some(version) => Freshness::NotOlderThan(version),
            None if self.version == "0" => Freshness::Any,
            None => Freshness::Consistent,
        };
        let begin = match (self.send_initial_events, freshness) {
            (Some(true), freshness) => Begin::State(freshness),
            (_, Freshness::NotOlderThan(version) | Freshness::Exact(version)) => Begin::After(version),
            (None, freshness) => Begin::State(freshness),
            (Some(false), freshness) => Begin::Now(freshness),
        };
        let timeout =
            self.timeout_seconds.and_then(|seconds| u64::try_from(seconds).ok()).filter(|seconds| *seconds > 0);
        Ok(WatchOptions {
            label_selector: self.label_selector.into_owned(),
            field_selector: self.field_selector.into_owned(),
            begin,
            bookmarks: self.bookmarks,
            marks_end: self.bookmarks && self.send_initial_events == Some(true),
            timeout: timeout.map(|seconds| Duration::from_secs(seconds.min(u64::from(u32::MAX)))),
        })
    }
}

impl Options {
    /// Reads the query of a collection; `is_old` under the old `/watch/`, where a watch is checked as a list unless it says that it is one.
    ///
    /// # Errors
    /// What the apiserver would answer.
    pub fn read(query: &str, is_old: bool) -> Result<Self, Failure> {
        let raw = Raw::read(query)?;
        match (raw.watch, is_old) {
            (true, _) => {
                let raw = raw.with_defaults();
                raw.check_watch()?;
                raw.watch().map(Self::Watch)
            }
            (false, true) => {
                raw.check_list()?;
                raw.watch().map(Self::Watch)
            }
            (false, false) => {
                check_timeout(&raw.timeout)?;
                raw.list().map(Self::List)
            }
        }
    }
}

/// Reads the query of a single object: how fresh it must be. All else means nothing there.
///
/// # Errors
/// What the apiserver would answer.
pub fn read_get(query: &str) -> Result<Freshness, Failure> {
    let mut pairs = pairs(query)?;
    let mut first = |name: &str| match pairs.iter_mut().find(|(known, _)| known == name) {
        Some((_, value)) => std::mem::take(value),
        None => Cow::Borrowed(""),
    };
    check_timeout(&first("timeout"))?;
    let raw = Raw { version: first("resourceVersion"), ..Raw::default() };
    Ok(match raw.version()? {
        Some(version) => Freshness::NotOlderThan(version),
        None if raw.version == "0" => Freshness::Any,
        None => Freshness::Consistent,
    })
}

/// The parameters, where they can be read in one way only.
///
/// # Errors
/// Go leaves out what is escaped wrongly and what has a semicolon, and reads the rest: let it.
fn pairs(query: &str) -> Result<Vec<Pair<'_>>, Failure> {
    if query.len() > QUERY_BYTES_MAX {
        return Err(Failure::bad_request(format!("the query is longer than {QUERY_BYTES_MAX} bytes")));
    }
    let is_escaped =
        |part: &str| matches!(part.as_bytes(), [a, b, ..] if a.is_ascii_hexdigit() && b.is_ascii_hexdigit());
    let pairs: Vec<_> = parse(query.as_bytes()).collect();
    let lossy = pairs.iter().any(|(name, value)| name.contains('\u{fffd}') || value.contains('\u{fffd}'));
    if lossy || query.contains(';') || !query.split('%').skip(1).all(is_escaped) {
        return Err(Failure::bad_request("the query is not escaped as it must be".to_owned()));
    }
    Ok(pairs)
}

/// Checks the time that a request may take, a duration as Go writes them. No read from the cache takes so long that it would matter.
fn check_timeout(timeout: &str) -> Result<(), Failure> {
    let mut rest = timeout;
    while !rest.is_empty() {
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let unit = ["ms", "s", "m", "h"].into_iter().find(|unit| rest[digits..].starts_with(unit));
        match unit {
            // Longer ones may be too long.
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
        match Options::read(query, false) {
            Ok(Options::List(options)) => options,
            other => panic!("{query}: {other:?}"),
        }
    }

    fn watch(query: &str) -> WatchOptions {
        match Options::read(&format!("watch=1&{query}"), false) {
            Ok(Options::Watch(options)) => options,
            other => panic!("{query}: {other:?}"),
        }
    }

    #[test]
    fn how_fresh_a_list_is_follows_version_match_and_limit() {
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
    fn a_watch_begins_where_it_is_told_to() {
        assert_eq!(watch("").begin, Begin::State(Freshness::Consistent));
        assert_eq!(watch("resourceVersion=0").begin, Begin::State(Freshness::Any));
        assert_eq!(watch("resourceVersion=7").begin, Begin::After(version(7)));
        let streamed = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
        assert_eq!(watch(streamed).begin, Begin::State(Freshness::Consistent));
        let not_older = format!("{streamed}&resourceVersion=7");
        assert_eq!(watch(&not_older).begin, Begin::State(Freshness::NotOlderThan(version(7))));
        let none = "sendInitialEvents=false&resourceVersionMatch=NotOlderThan";
        assert_eq!(watch(none).begin, Begin::Now(Freshness::Consistent));
        assert_eq!(watch("timeoutSeconds=5").timeout, Some(Duration::from_secs(5)));
        assert_eq!(watch("timeoutSeconds=0").timeout, None);
        let old = Options::read("allowWatchBookmarks=1", true);
        assert!(matches!(old, Ok(Options::Watch(WatchOptions { bookmarks: true, marks_end: false, .. }))), "{old:?}");
        assert!(watch("allowWatchBookmarks=1").marks_end, "by default");
    }

    #[test]
    fn what_does_not_fit_together_is_refused_as_upstream_does() {
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
            let failure = Options::read(query, false).expect_err(query);
            assert_eq!(failure.code(), code, "{query}");
        }
    }
}
