//! A right that kubefan lacks for a cache. Requests without it are refused for as long as the
//! operator does nothing, so it is logged once and shown for as long as it is missing.

use std::sync::{Mutex, PoisonError};

use tracing::warn;

use kubefan_fanout::Served;
use kubefan_model::Scope;

/// The right that kubefan lacks for a cache, in words; `None` if the last request had it.
#[derive(Default)]
pub(super) struct MissingRight(Mutex<Option<String>>);

impl MissingRight {
    /// Notes that upstream has refused a list with this error.
    pub(super) fn list_is_forbidden(&self, served: &Served, error: &str) {
        let scope = match &served.scope {
            Scope::Namespace(namespace) => format!("in the namespace {namespace}"),
            Scope::Cluster if served.namespaced => "in all namespaces".to_owned(),
            Scope::Cluster => "in the cluster".to_owned(),
        };
        let gvr = &served.gvr;
        let right =
            format!("no self-check and no freshness proof: kubefan may not list {gvr} {scope}; grant it the verb list");
        if self.replace(Some(right.clone())) {
            warn!(resource = %gvr, scope = served.scope.namespace(), error, "{right}");
        }
    }

    /// Notes that upstream has not refused a list.
    pub(super) fn list_is_allowed(&self) {
        self.replace(None);
    }

    /// Returns whether it is another one.
    fn replace(&self, right: Option<String>) -> bool {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = *known != right;
        *known = right;
        is_new
    }

    /// Returns the missing right in words.
    pub(super) fn get(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
