//! Parses and validates the query of a list or watch. The checks run in kube-apiserver's order,
//! because the first failed check decides the response.

use super::{
    resource::SimResource,
    status::{Cause, Status},
};
use kubefan_model::selector::{FieldOperator, FieldSelector, LabelSelector};

/// Kubernetes' `ListOptions`. An absent resource version and an empty one mean the same.
#[derive(Debug, Default)]
pub(super) struct ListOptions {
    pub(super) labels: LabelSelector,
    pub(super) fields: FieldSelector,
    pub(super) watch: bool,
    pub(super) allow_bookmarks: bool,
    pub(super) resource_version: String,
    pub(super) version_match: String,
    pub(super) timeout_seconds: Option<i64>,
    pub(super) limit: i64,
    pub(super) continue_token: String,
    pub(super) send_initial_events: Option<bool>,
}

impl ListOptions {
    /// Parses the query of a list or a watch.
    ///
    /// # Errors
    /// 400 or 422, as from kube-apiserver.
    pub(super) fn read(query: &str, resource: &SimResource, watch_list: bool) -> Result<Self, Status> {
        let mut options = Self::default();
        let pairs: Vec<_> = form_urlencoded::parse(query.as_bytes()).collect();
        let first = |name: &str| pairs.iter().find(|(key, _)| key == name).map(|(_, value)| &**value);
        options.watch = first("watch").is_some_and(parse_bool);
        options.allow_bookmarks = first("allowWatchBookmarks").is_some_and(parse_bool);
        options.resource_version = first("resourceVersion").unwrap_or_default().to_owned();
        options.version_match = first("resourceVersionMatch").unwrap_or_default().to_owned();
        options.timeout_seconds = first("timeoutSeconds").map(parse_int).transpose()?;
        options.limit = first("limit").map(parse_int).transpose()?.unwrap_or_default();
        options.continue_token = first("continue").unwrap_or_default().to_owned();
        options.send_initial_events = first("sendInitialEvents").map(parse_bool);
        let labels = first("labelSelector").unwrap_or_default();
        options.labels = LabelSelector::parse(labels).map_err(|error| Status::bad_request(error.message()))?;
        let mut fields = first("fieldSelector").unwrap_or_default().to_owned();
        if resource.kind == "Pod" {
            // `spec.host` is the deprecated alias of `spec.nodeName`.
            fields = fields.replace("spec.host=", "spec.nodeName=").replace("spec.host!=", "spec.nodeName!=");
        }
        options.fields = FieldSelector::parse(&fields).map_err(|error| Status::bad_request(error.message()))?;
        if !options.watch
            && let Some(timeout) = first("timeout")
        {
            check_duration(timeout)?;
        }
        options.set_defaults(watch_list);
        options.validate(watch_list)?;
        for term in options.fields.terms() {
            resource.check_field(&term.path).map_err(Status::bad_request)?;
        }
        Ok(options)
    }

    fn set_defaults(&mut self, watch_list: bool) {
        let unset = self.send_initial_events.is_none() && self.version_match.is_empty();
        let legacy = matches!(&*self.resource_version, "" | "0");
        if watch_list && unset && self.watch && legacy {
            self.send_initial_events = Some(true);
            self.version_match = "NotOlderThan".to_owned();
        }
    }

    fn validate(&self, watch_list: bool) -> Result<(), Status> {
        let mut causes = Vec::new();
        let forbid = |field: &'static str, why: &str| Cause {
            reason: "FieldValueForbidden",
            message: format!("Forbidden: {why}"),
            field,
        };
        let unsupported = |supported: &str| Cause {
            reason: "FieldValueNotSupported",
            message: format!("Unsupported value: {:?}: supported values: {supported}", self.version_match),
            field: "resourceVersionMatch",
        };
        const MATCH: &str = "resourceVersionMatch";
        let matched = !self.version_match.is_empty();
        let exact = self.version_match == "Exact";
        let not_older = self.version_match == "NotOlderThan";
        if matched && !self.watch && self.resource_version.is_empty() {
            causes.push(forbid(MATCH, "resourceVersionMatch is forbidden unless resourceVersion is provided"));
        }
        if self.watch && self.send_initial_events.is_some() {
            if !not_older {
                causes.push(forbid(MATCH, "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan"));
            }
            if !watch_list {
                let why = "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled";
                causes.push(forbid("sendInitialEvents", why));
            }
        }
        if matched && self.watch && self.send_initial_events.is_none() {
            causes.push(forbid(
                MATCH,
                "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
            ));
        }
        if matched && self.watch && !not_older {
            causes.push(unsupported("\"NotOlderThan\""));
        }
        if matched && !self.continue_token.is_empty() {
            causes.push(forbid(MATCH, "resourceVersionMatch is forbidden when continue is provided"));
        }
        if matched && !self.watch && !exact && !not_older {
            causes.push(unsupported("\"Exact\", \"NotOlderThan\", \"\""));
        }
        if exact && !self.watch && self.resource_version == "0" {
            causes.push(forbid(MATCH, "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\""));
        }
        if !self.watch && self.send_initial_events.is_some() {
            causes.push(forbid("sendInitialEvents", "sendInitialEvents is forbidden for list"));
        }
        if causes.is_empty() { Ok(()) } else { Err(Status::invalid("meta.k8s.io", "ListOptions", "", causes)) }
    }

    /// The name that the field selector requires, if any.
    pub(super) fn name(&self) -> Option<&str> {
        let terms = self.fields.terms().iter();
        let mut names = terms.filter(|term| &*term.path == "metadata.name" && term.op == FieldOperator::Equals);
        names.next().map(|term| &*term.value)
    }

    /// Whether both selectors are empty.
    pub(super) fn selects_everything(&self) -> bool {
        self.labels.is_everything() && self.fields.is_everything()
    }
}

/// Parses a resource version. An empty one is 0. The error has the text of Go's parser.
pub(super) fn version(text: &str) -> Result<u64, String> {
    if text.is_empty() {
        return Ok(0);
    }
    let fault =
        |why: &str| format!("resourceVersion: Invalid value: {text:?}: strconv.ParseUint: parsing {text:?}: {why}");
    if !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(fault("invalid syntax"));
    }
    text.parse().map_err(|_| fault("value out of range"))
}

/// As in apimachinery's query conversion, every value but `0` and `false` is true.
fn parse_bool(text: &str) -> bool {
    text != "0" && !text.eq_ignore_ascii_case("false")
}

fn parse_int(text: &str) -> Result<i64, Status> {
    text.parse().map_err(|error: std::num::ParseIntError| {
        let why = match error.kind() {
            std::num::IntErrorKind::PosOverflow | std::num::IntErrorKind::NegOverflow => "value out of range",
            _ => "invalid syntax",
        };
        Status::bad_request(format!("strconv.ParseInt: parsing {text:?}: {why}"))
    })
}

/// Checks `?timeout=` of a request that is not long-running. Accepts the syntax of Go's
/// `time.ParseDuration`.
fn check_duration(text: &str) -> Result<(), Status> {
    let mut rest = text.strip_prefix(['-', '+']).unwrap_or(text);
    let mut parts = 0;
    if rest == "0" {
        return Ok(());
    }
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(|b| b.is_ascii_digit() || *b == b'.').count();
        let unit = ["ns", "us", "µs", "ms", "s", "m", "h"].into_iter().find(|unit| {
            let after = rest.get(digits..).and_then(|tail| tail.strip_prefix(unit));
            digits > 0 && after.is_some_and(|tail| tail.chars().next().is_none_or(|c| c.is_ascii_digit() || c == '.'))
        });
        let Some(unit) = unit else { break };
        rest = &rest[digits + unit.len()..];
        parts += 1;
    }
    if parts > 0 && rest.is_empty() {
        return Ok(());
    }
    Err(Status::bad_request(format!("invalid timeout specified in the request URL - time: invalid duration {text:?}")))
}
