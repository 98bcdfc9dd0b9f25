//! The reason why a user may read something, or may not, for the operator (`kubefan auth can-i`).

use std::sync::Arc;

use serde::Serialize;

use super::attributes::Attributes;

/// A verdict, and the reviews that led to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// Whether the user may.
    allowed: bool,
    /// Reason of the verdict; may be empty.
    reason: String,
    /// The reviews, in this order, until one allowed the read.
    reviews: Vec<ReviewedAttributes>,
}

/// A review that was asked for, and its verdict.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ReviewedAttributes {
    verb: &'static str,
    group: String,
    version: String,
    resource: String,
    /// Empty for all namespaces.
    namespace: String,
    /// Empty for all objects.
    name: String,
    label_selector: String,
    field_selector: String,
    allowed: bool,
    reason: String,
    /// Whether the verdict was known from before.
    cached: bool,
}

impl ReviewedAttributes {
    pub(super) fn new(attributes: &Attributes, allowed: bool, reason: Arc<str>, cached: bool) -> Self {
        let Attributes { verb, group, version, resource, namespace, name, labels, fields } = attributes.clone();
        let label_selector = labels.to_string();
        let field_selector = fields.to_string();
        let verb = verb.as_str();
        let reason = reason.to_string();
        Self {
            verb,
            group,
            version,
            resource,
            namespace,
            name,
            label_selector,
            field_selector,
            allowed,
            reason,
            cached,
        }
    }
}

impl Explanation {
    /// A user that is not reviewed.
    pub(super) fn always_allowed(reason: &str) -> Self {
        Self { allowed: true, reason: reason.to_owned(), reviews: Vec::new() }
    }

    /// The last review decides.
    pub(super) fn of(reviews: Vec<ReviewedAttributes>) -> Self {
        let last = reviews.last();
        let allowed = last.is_some_and(|step| step.allowed);
        Self { allowed, reason: last.map(|step| step.reason.clone()).unwrap_or_default(), reviews }
    }
}
