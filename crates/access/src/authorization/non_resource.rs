//! A path of kubefan's own, as kube-apiserver's authorizers see it (`NonResourceAttributes`). RBAC
//! names such paths in `nonResourceURLs`.

use serde::Serialize;

use crate::user::{Digest, Parts};

/// A request for a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct NonResource {
    path: &'static str,
    verb: &'static str,
}

impl NonResource {
    /// A GET of this path.
    pub const fn get(path: &'static str) -> Self {
        Self { path, verb: "get" }
    }

    /// A DELETE of this path.
    pub const fn delete(path: &'static str) -> Self {
        Self { path, verb: "delete" }
    }

    /// The verb of the request.
    pub fn verb(&self) -> &'static str {
        self.verb
    }

    /// The path.
    pub fn path(&self) -> &'static str {
        self.path
    }

    /// The key of a verdict about it, for a caller with this digest.
    pub(super) fn key(&self, caller: &Digest) -> Digest {
        let mut parts = Parts::default();
        parts.add_digest(caller);
        // No verb of a read: so it is no key of a read.
        parts.add("path");
        parts.add(self.verb);
        parts.add(self.path);
        parts.digest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authorization::attributes::Attributes;

    #[test]
    fn paths_and_callers_have_keys_of_their_own() {
        let metrics = NonResource::get("/metrics");
        let page = NonResource::get("/");
        let keys = [
            metrics.key(&[0; 32]),
            metrics.key(&[1; 32]),
            page.key(&[0; 32]),
            NonResource::delete("/").key(&[0; 32]),
            Attributes::default().key(&[0; 32]),
        ];
        for (at, key) in keys.iter().enumerate() {
            assert!(!keys[..at].contains(key), "{at}");
        }
    }
}
