//! Every reason to refuse a caller before anything is read.
//!
//! The hazard is a text that says too much: whether something exists, or which rights kubefan's own
//! account has. So a text only repeats the caller's request, and the reason of the apiserver's
//! authorizer.

use kubefan_cache::Refusal;

use super::{modes::Mode, switches::Switched};
use crate::authorization::attributes::Attributes;

/// The reason why a caller is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Denial {
    /// kubefan does not know who the caller is.
    Unauthenticated(&'static str),
    /// The caller's certificate does not identify it.
    Certificate(&'static str),
    /// The caller may not read this.
    Forbidden(Box<Forbidden>),
    /// The caller may not read this path of kubefan's own.
    ForbiddenPath(Box<ForbiddenPath>),
    /// The operator has taken this read out of the cache.
    Switched(Switched),
    /// kubefan acts for the caller only, and the request names another user.
    Impersonation,
    /// The apiserver cannot be asked now.
    Unavailable(&'static str),
    /// A limit of reviews is reached.
    Busy(String),
    /// The read asks for more than kubefan's limits allow any caller.
    Invalid {
        /// The field at fault, as a path in the request message.
        field: &'static str,
        /// The limit.
        message: String,
    },
}

/// A read that the apiserver's authorizer does not allow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forbidden {
    /// The attributes of the read.
    pub attributes: Attributes,
    /// The user that asked.
    pub user: String,
    /// The authorizer's reason; may be empty.
    pub reason: String,
}

/// A path that the apiserver's authorizer does not allow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForbiddenPath {
    /// The verb of the request.
    pub verb: &'static str,
    /// The path of the request.
    pub path: &'static str,
    /// The user that asked.
    pub user: String,
    /// The authorizer's reason; may be empty.
    pub reason: String,
}

impl ForbiddenPath {
    /// The apiserver's words.
    pub fn message(&self) -> String {
        let Self { verb, path, user, reason } = self;
        let because = if reason.is_empty() { String::new() } else { format!(": {reason}") };
        format!("User {user:?} cannot {verb} path {path:?}{because}")
    }
}

/// Text of the refusal of impersonation where it is not forwarded.
pub const IMPERSONATION: &str = "this request acts as another user (Impersonate-User and its like), which kubefan does not do: \
    leave that out (kubectl: --as), or ask the apiserver itself";

impl Forbidden {
    /// The apiserver's words (`forbiddenMessage` in `responsewriters/errors.go`).
    pub fn message(&self) -> String {
        let Self { attributes, user, reason } = self;
        let Attributes { verb, group, resource, namespace, .. } = attributes;
        let at = if namespace.is_empty() {
            "at the cluster scope".to_owned()
        } else {
            format!("in the namespace {namespace:?}")
        };
        let because = if reason.is_empty() { String::new() } else { format!(": {reason}") };
        let verb = verb.as_str();
        let message = format!("User {user:?} cannot {verb} resource {resource:?} in API group {group:?} {at}");
        // As the apiserver does, for clients that show it as HTML.
        message.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;") + &because
    }

    /// The resource with its group, as in `deployments.apps`.
    pub fn qualified_resource(&self) -> String {
        let Attributes { group, resource, .. } = &self.attributes;
        if group.is_empty() { resource.clone() } else { format!("{resource}.{group}") }
    }

    /// Advice for a caller that may read less than it asked for.
    fn advice(&self) -> &'static str {
        if self.attributes.namespace.is_empty() && self.attributes.name.is_empty() {
            "; if you may read single namespaces only, name one (target.namespace)"
        } else {
            ""
        }
    }
}

impl From<Denial> for Refusal {
    fn from(denial: Denial) -> Self {
        match denial {
            Denial::Unauthenticated(why) | Denial::Certificate(why) => Self::Unauthenticated(why.to_owned()),
            Denial::Forbidden(forbidden) => {
                let resource = forbidden.qualified_resource();
                let advice = forbidden.advice();
                Self::Denied(format!("{resource} is forbidden: {}{advice}", forbidden.message()))
            }
            Denial::ForbiddenPath(forbidden) => Self::Denied(forbidden.message()),
            Denial::Switched(switched) if switched.mode == Mode::Deny => Self::Denied(switched.message()),
            Denial::Switched(switched) => Self::Switched(switched.message()),
            Denial::Impersonation => Self::Denied(IMPERSONATION.to_owned()),
            Denial::Unavailable(why) => Self::Unavailable(why.to_owned()),
            Denial::Busy(message) => Self::Exhausted(message),
            Denial::Invalid { field, message } => Self::Invalid { field, message },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authorization::attributes::ReadVerb;

    #[test]
    fn a_denial_has_the_apiservers_words() {
        let forbidden = |group: &str, namespace: &str, reason: &str| {
            let own = str::to_owned;
            let attributes = Attributes {
                verb: ReadVerb::List,
                group: own(group),
                version: own("v1"),
                resource: own("pods"),
                namespace: own(namespace),
                ..Attributes::default()
            };
            Forbidden { attributes, user: own("x"), reason: own(reason) }
        };
        assert_eq!(
            forbidden("", "y", "").message(),
            r#"User "x" cannot list resource "pods" in API group "" in the namespace "y""#
        );
        assert_eq!(
            forbidden("apps", "", "no RBAC policy matched").message(),
            r#"User "x" cannot list resource "pods" in API group "apps" at the cluster scope: no RBAC policy matched"#
        );
        let refused = |namespace| Refusal::from(Denial::Forbidden(Box::new(forbidden("apps", namespace, ""))));
        let text = refused("").to_string();
        assert!(text.starts_with("pods.apps is forbidden: User \"x\" cannot list"), "{text}");
        assert!(text.contains("target.namespace") && !refused("y").to_string().contains("target.namespace"));
    }
}
