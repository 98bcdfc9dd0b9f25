//! The claims of a service account's token (`pkg/serviceaccount/claims.go`), and its user
//! (`UserInfo` in `pkg/serviceaccount/util.go`).

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use kubefan_model::ObjectKey;
use serde::Deserialize;
use tokio::time::Instant;

use crate::{bound_object::BoundObject, user::Identity};

const EXTRA: &str = "authentication.kubernetes.io/";

/// The claims.
#[derive(Deserialize)]
pub(super) struct Claims {
    #[serde(rename = "iss")]
    issuer: String,
    #[serde(rename = "sub")]
    subject: String,
    #[serde(rename = "aud")]
    audiences: Audiences,
    /// In seconds since 1970.
    #[serde(rename = "exp")]
    expires: f64,
    #[serde(rename = "nbf")]
    not_before: f64,
    #[serde(rename = "jti")]
    id: Option<String>,
    #[serde(rename = "kubernetes.io")]
    bound: Bound,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Audiences {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
struct Bound {
    namespace: String,
    serviceaccount: Reference,
    pod: Option<Reference>,
    node: Option<Reference>,
    secret: Option<Reference>,
}

#[derive(Deserialize)]
struct Reference {
    name: String,
    uid: String,
}

impl Claims {
    /// The claims in the payload of a token. `None` for a token of another kind.
    pub(super) fn of(payload: &[u8]) -> Option<Self> {
        serde_json::from_slice(payload).ok()
    }

    /// End of the claims' validity, if they are valid now and for one of `audiences`. No time is
    /// added for clocks that differ: the apiserver does that, in a review.
    pub(super) fn valid_until(&self, issuer: &str, audiences: &[String], now: SystemTime) -> Option<Instant> {
        let is_for_us = match &self.audiences {
            Audiences::One(audience) => audiences.contains(audience),
            Audiences::Many(all) => all.iter().any(|audience| audiences.contains(audience)),
        };
        let at = |seconds: f64| SystemTime::UNIX_EPOCH.checked_add(Duration::try_from_secs_f64(seconds).ok()?);
        let is_own = self.issuer == issuer && self.subject == self.user() && !self.bound.serviceaccount.uid.is_empty();
        if !is_own || !is_for_us || now < at(self.not_before)? {
            return None;
        }
        let left = at(self.expires)?.duration_since(now).ok().filter(|left| !left.is_zero())?;
        Instant::now().checked_add(left)
    }

    fn user(&self) -> String {
        Identity::service_account_name(&self.bound.namespace, &self.bound.serviceaccount.name)
    }

    /// Returns its user, as a TokenReview would.
    pub(super) fn identity(&self) -> Identity {
        let Bound { namespace, serviceaccount, pod, node, .. } = &self.bound;
        let mut extra = BTreeMap::new();
        let mut add = |key: &str, value: &str| {
            if !value.is_empty() {
                extra.insert(format!("{EXTRA}{key}"), vec![value.to_owned()]);
            }
        };
        for (kind, reference) in [("pod", pod), ("node", node)] {
            if let Some(Reference { name, uid }) = reference {
                add(&format!("{kind}-name"), name);
                add(&format!("{kind}-uid"), uid);
            }
        }
        if let Some(id) = self.id.as_ref().filter(|id| !id.is_empty()) {
            add("credential-id", &format!("JTI={id}"));
        }
        let groups = Identity::service_account_groups(namespace);
        Identity { user: self.user(), uid: serviceaccount.uid.clone(), groups, extra }.authenticated()
    }

    /// The Secret that it is bound to, which no extra names.
    pub(super) fn secret(&self) -> Option<BoundObject> {
        let Reference { name, uid } = self.bound.secret.as_ref()?;
        let key = ObjectKey::new(&self.bound.namespace, name);
        Some(BoundObject { resource: "secrets", key, uid: uid.clone() })
    }
}
