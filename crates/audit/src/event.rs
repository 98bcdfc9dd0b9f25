//! The JSON of a record: an `Event` (`k8s.io/apiserver/pkg/apis/audit/v1`), with its fields in the
//! apiserver's order.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    net::IpAddr,
    time::{SystemTime, UNIX_EPOCH},
};

use serde::Serialize;

use kubefan_access::Identity;
use kubefan_common::{text::one_line, visible::EscapedJson};

/// The longest name in a record, in bytes. The path of a request may have a longer one.
const NAME_BYTES_MAX: usize = 512;
/// The longest message in a record, in characters. It may quote the path.
const MESSAGE_CHARS_MAX: usize = 1024;
/// The end of a text that was cut (`auditinternal`'s words).
pub(super) const TRUNCATED: &str = "...TRUNCATED";

/// The stage of a request that a record is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Stage {
    /// The headers of a stream are sent.
    ResponseStarted,
    /// The answer has ended.
    ResponseComplete,
    /// kubefan's code has failed.
    Panic,
}

/// The object that is read or changed (`ObjectReference`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectRef {
    /// Plural name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub resource: String,
    /// Empty for all namespaces.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Empty for all objects.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Empty for the core group.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub api_group: String,
    /// API version.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub api_version: String,
    /// As in `pods/log`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub subresource: String,
}

impl ObjectRef {
    /// Cuts the names to the longest that a record has.
    pub(super) fn shortened(self) -> Self {
        let short = |name| shortened(name, NAME_BYTES_MAX);
        let Self { resource, namespace, name, api_group, api_version, subresource } = self;
        Self {
            resource: short(resource),
            namespace: short(namespace),
            name: short(name),
            api_group: short(api_group),
            api_version: short(api_version),
            subresource: short(subresource),
        }
    }
}

/// The answer to a request (`metav1.Status`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Outcome {
    metadata: Empty,
    /// `Success` or `Failure`; empty for an answer that is no `Status`.
    #[serde(skip_serializing_if = "str::is_empty")]
    status: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    message: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    reason: String,
    code: u16,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
struct Empty {}

impl Outcome {
    /// An answer with this HTTP status code.
    pub fn code(code: u16) -> Self {
        Self { code, ..Self::default() }
    }

    /// A refusal, with a reason that machines can read.
    pub fn failure(code: u16, reason: &str, message: &str) -> Self {
        let message = one_line(message, MESSAGE_CHARS_MAX);
        Self { status: "Failure", message, reason: reason.to_owned(), code, ..Self::default() }
    }

    /// The caller went away before there was an answer. The apiserver's words and code.
    pub(super) fn closed_early() -> Self {
        Self { status: "Success", message: "Connection closed early".to_owned(), code: 200, ..Self::default() }
    }

    /// kubefan's code has failed.
    pub(super) fn panicked() -> Self {
        Self::failure(500, "InternalError", "kubefan has failed (panic); its log says where")
    }

    /// The status code.
    pub(super) fn status_code(&self) -> u16 {
        self.code
    }

    /// The reason, or the code if there is none.
    pub(super) fn error_type(&self) -> String {
        if self.reason.is_empty() { self.code.to_string() } else { self.reason.clone() }
    }

    /// Whether the answer has the status code of a failure.
    pub fn is_failure(&self) -> bool {
        self.code >= 400
    }
}

/// The user of a record (`authenticationv1.UserInfo`). Empty if it is not known.
#[derive(Debug, Default, Serialize)]
pub(super) struct User<'a> {
    #[serde(skip_serializing_if = "str::is_empty")]
    username: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    uid: &'a str,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    groups: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    extra: Option<&'a BTreeMap<String, Vec<String>>>,
}

impl User<'_> {
    /// The user of requests whose callers are not distinguished, as on the apiserver's port without
    /// authentication.
    pub(super) fn unsecured() -> Self {
        Self { username: "system:unsecured", ..Self::default() }
    }
}

impl<'a> From<&'a Identity> for User<'a> {
    fn from(Identity { user, uid, groups, extra }: &'a Identity) -> Self {
        Self { username: user, uid, groups, extra: Some(extra).filter(|extra| !extra.is_empty()) }
    }
}

/// A record.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Event<'a> {
    kind: &'static str,
    api_version: &'static str,
    level: &'static str,
    #[serde(rename = "auditID")]
    pub(super) audit_id: &'a str,
    pub(super) stage: Stage,
    #[serde(rename = "requestURI")]
    pub(super) request_uri: Cow<'a, str>,
    pub(super) verb: &'a str,
    pub(super) user: User<'a>,
    #[serde(rename = "sourceIPs", skip_serializing_if = "<[_]>::is_empty")]
    pub(super) source_ips: &'a [IpAddr],
    #[serde(skip_serializing_if = "str::is_empty")]
    pub(super) user_agent: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) object_ref: Option<Cow<'a, ObjectRef>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) response_status: Option<&'a Outcome>,
    pub(super) request_received_timestamp: String,
    pub(super) stage_timestamp: String,
    pub(super) annotations: BTreeMap<&'static str, Cow<'a, str>>,
}

impl<'a> Event<'a> {
    pub(super) fn new(audit_id: &'a str, stage: Stage, received: SystemTime, now: SystemTime) -> Self {
        Self {
            kind: "Event",
            api_version: "audit.k8s.io/v1",
            level: "Metadata",
            audit_id,
            stage,
            request_uri: Cow::default(),
            verb: "",
            user: User::default(),
            source_ips: &[],
            user_agent: "",
            object_ref: None,
            response_status: None,
            request_received_timestamp: timestamp(received),
            stage_timestamp: timestamp(now),
            annotations: BTreeMap::new(),
        }
    }

    /// One line, with its line feed.
    pub(super) fn to_line(&self) -> Vec<u8> {
        let mut line = Vec::new();
        // Strings and numbers: this cannot fail.
        let _ = serde_json::to_writer(EscapedJson(&mut line), self);
        line.push(b'\n');
        line
    }
}

/// A text of at most `bytes_max` bytes, and a mark if it was longer.
pub(super) fn shortened(mut text: String, bytes_max: usize) -> String {
    if text.len() > bytes_max {
        text.truncate((0..=bytes_max).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0));
        text.push_str(TRUNCATED);
    }
    text
}

/// A time as `MicroTime` writes it.
fn timestamp(at: SystemTime) -> String {
    let at = jiff::Timestamp::try_from(at).or_else(|_| jiff::Timestamp::try_from(UNIX_EPOCH));
    at.map_or_else(|_| String::new(), |at| format!("{at:.6}"))
}
