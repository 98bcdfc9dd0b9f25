//! SubjectAccessReviews: verdicts of the apiserver's authorizers about a user's requests.

use std::{collections::BTreeMap, sync::Arc};

use kubefan_common::text::one_line;
use kubefan_upstream::{ReviewKind, Upstream, UpstreamError};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::{
    attributes::{Attributes, ResourceAttributes},
    non_resource::NonResource,
};
use crate::{review::Outcome, user::Identity};

const ACCESS_REVIEW: ReviewKind = ReviewKind {
    path: "/apis/authorization.k8s.io/v1/subjectaccessreviews",
    api_version: "authorization.k8s.io/v1",
    kind: "SubjectAccessReview",
};
/// The longest reason that a caller is shown, or that is kept, in characters.
const REASON_CHARS_MAX: usize = 512;

/// The subject of a review.
#[derive(Debug, Clone)]
pub(super) enum Question {
    /// A read of objects.
    Read(Attributes),
    /// A path of kubefan's own.
    Path(NonResource),
}

impl Question {
    /// Size of the question, in bytes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Read(attributes) => attributes.bytes(),
            Self::Path(path) => path.path().len(),
        }
    }
}

/// The verdict about a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AccessVerdict {
    /// The caller may, for this reason, which may be empty.
    Allowed(Arc<str>),
    /// The caller may not, for this reason, which may be empty. Also if no authorizer has an
    /// opinion, or only a conditional one.
    Denied(Arc<str>),
}

impl Outcome for AccessVerdict {
    fn is_positive(&self) -> bool {
        matches!(self, Self::Allowed(_))
    }

    fn ends_at(&self) -> Option<Instant> {
        None
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Spec<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    resource_attributes: Option<ResourceAttributes<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    non_resource_attributes: Option<NonResource>,
    user: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    uid: &'a str,
    groups: &'a [String],
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    extra: &'a BTreeMap<String, Vec<String>>,
}

#[derive(Deserialize)]
struct Status {
    allowed: bool,
    #[serde(default)]
    denied: bool,
    #[serde(default)]
    reason: String,
}

/// Asks whether a user may.
pub(super) async fn review(
    upstream: &Upstream,
    user: &Identity,
    question: &Question,
) -> Result<AccessVerdict, UpstreamError> {
    let Identity { user, uid, groups, extra } = user;
    let (resource_attributes, non_resource_attributes) = match question {
        Question::Read(attributes) => (Some(attributes.for_review()), None),
        Question::Path(path) => (None, Some(*path)),
    };
    let spec = Spec { resource_attributes, non_resource_attributes, user, uid, groups, extra };
    let status: Status = upstream.review(&ACCESS_REVIEW, &spec).await?;
    let reason = one_line(&status.reason, REASON_CHARS_MAX).into();
    Ok(if status.allowed && !status.denied { AccessVerdict::Allowed(reason) } else { AccessVerdict::Denied(reason) })
}
