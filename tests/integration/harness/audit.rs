//! Reads the requests that an apiserver received from its own audit log. Metrics count requests,
//! but only the audit log shows which client sent them.

use std::collections::BTreeMap;

use serde_json::Value;
use tempfile::TempDir;

use super::apiserver::Options;

/// Rules that log lists and watches of pods. A watch is logged when it starts and again when it
/// ends, with the same ID.
const OF_PODS: &str = "{ level: Metadata, verbs: [list, watch], resources: [{ group: '', resources: [pods] }] }";

/// The audit log of a control plane.
pub(crate) struct Audit {
    directory: TempDir,
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// `list`, `watch`, `create` and so on.
    pub(crate) verb: String,
    /// The name of the user that sent it.
    pub(crate) user: String,
    /// Path and query.
    pub(crate) uri: String,
    /// The `User-Agent`.
    pub(crate) agent: String,
    /// The HTTP status.
    pub(crate) code: u64,
}

impl Request {
    /// Whether the request asks for the full state: the first page of a list, or a watch with
    /// initial events. A list of a single name does not: kubefan uses it to learn the cluster's
    /// version after a watch ends.
    pub(crate) fn requests_full_state(&self) -> bool {
        match self.verb.as_str() {
            "list" => !self.uri.contains("continue=") && !self.uri.contains("fieldSelector=metadata.name%3D"),
            "watch" => self.uri.contains("sendInitialEvents=true"),
            _ => false,
        }
    }
}

/// Whether a list or watch of this URI begins with the latest state, so that kubefan needs a proof
/// of freshness to answer it.
pub(crate) fn is_consistent(uri: &str) -> bool {
    uri.split(['?', '&']).filter_map(|part| part.strip_prefix("resourceVersion=")).all(str::is_empty)
}

impl Audit {
    /// Creates an empty audit log of lists and watches of pods.
    pub(crate) fn new() -> Audit {
        Audit::with(OF_PODS)
    }

    /// Creates an empty audit log of all reads.
    pub(crate) fn of_reads() -> Audit {
        Audit::with("{ level: Metadata, verbs: [get, list, watch] }")
    }

    /// Creates an empty audit log of all requests.
    pub(crate) fn of_all() -> Audit {
        Audit::with("{ level: Metadata }")
    }

    fn with(rule: &str) -> Audit {
        let policy = format!(
            "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{rule}, {{ level: None }}]\n"
        );
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory is made");
        std::fs::write(directory.path().join("policy.yaml"), policy).expect("the policy is written");
        Audit { directory }
    }

    /// Options for the control plane that writes this log.
    pub(crate) fn options(&self) -> Options {
        let path = |name: &str| self.directory.path().join(name).display().to_string();
        let policy = format!("--audit-policy-file={}", path("policy.yaml"));
        Options::default().flag(&policy).flag(&format!("--audit-log-path={}", path("audit.log")))
    }

    fn entries(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.directory.path().join("audit.log")).unwrap_or_default();
        // The last line may be incomplete.
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// The records of requests whose ID starts with `prefix`, by ID: the last of each.
    pub(crate) fn records(&self, prefix: &str) -> BTreeMap<String, Value> {
        let of_test = |entry: Value| Some((entry["auditID"].as_str()?.to_owned(), entry));
        self.entries().into_iter().filter_map(of_test).filter(|(id, _)| id.starts_with(prefix)).collect()
    }

    /// The requests of clients whose `User-Agent` starts with `user_agent`, in order. A list is
    /// logged before it is answered.
    pub(crate) fn requests(&self, user_agent: &str) -> Vec<Request> {
        let mut requests: BTreeMap<String, (usize, Request)> = BTreeMap::new();
        for (at, entry) in self.entries().into_iter().enumerate() {
            let text = |field: &str| entry[field].as_str().unwrap_or_default().to_owned();
            if text("userAgent").starts_with(user_agent) {
                let code = entry["responseStatus"]["code"].as_u64().unwrap_or_default();
                let agent = text("userAgent");
                let user = entry["user"]["username"].as_str().unwrap_or_default().to_owned();
                let request = Request { verb: text("verb"), user, uri: text("requestURI"), agent, code };
                requests.entry(text("auditID")).or_insert((at, request));
            }
        }
        let mut requests: Vec<_> = requests.into_values().collect();
        requests.sort_by_key(|(at, _)| *at);
        requests.into_iter().map(|(_, request)| request).collect()
    }
}
