//! Checks which cluster answers upstream, and compares it with the identity learned first (see
//! [`super::identity`]).

use std::{
    sync::{MutexGuard, PoisonError, atomic::Ordering},
    time::Duration,
};

use kubefan_common::planted::{self, Bug};
use serde::Deserialize;
use tokio::time::Instant;

use crate::{
    client::{
        Upstream, Verb,
        identity::{Identity, IdentityError, KUBE_SYSTEM, KnownFrom, is_same_cluster},
    },
    error::UpstreamError,
};

/// Time for which a 403 counts as temporary if requests were allowed before: an apiserver that has
/// just started answers 403 until its authorizer has loaded its rules.
pub const FORBIDDEN_GRACE: Duration = Duration::from_secs(30);

#[derive(Deserialize)]
struct Namespace {
    metadata: Metadata,
}

#[derive(Deserialize)]
struct Metadata {
    #[serde(default)]
    uid: String,
}

impl Upstream {
    /// Confirms that all answers received until now are from the cluster identified first: by a
    /// check that starts now. An earlier check would say nothing about answers that came after it.
    /// Callers that come during a check share the next one.
    ///
    /// # Errors
    /// `OtherCluster` if another cluster answers; `Unanswered` if the check itself failed.
    pub async fn confirm(&self) -> Result<(), IdentityError> {
        let state = self.identity_state();
        let started = state.checks_started.load(Ordering::SeqCst);
        let mut check = state.check.lock().await;
        if let Some((number, result)) = &check.last
            && (*number > started || planted::is(Bug::OldCheckConfirms))
        {
            return result.clone();
        }
        let number = state.checks_started.fetch_add(1, Ordering::SeqCst) + 1;
        let result = self.check_identity(&mut check.denied_since).await;
        match &result {
            Ok(()) => state.is_doubted.store(false, Ordering::SeqCst),
            Err(IdentityError::OtherCluster { .. }) => state.is_doubted.store(true, Ordering::SeqCst),
            Err(_) => {}
        }
        check.last = Some((number, result.clone()));
        result
    }

    /// Whether another cluster answered the last check. An answer requested now may come from it,
    /// although the check after the answer finds the right one again.
    pub fn is_doubted(&self) -> bool {
        self.identity_state().is_doubted.load(Ordering::SeqCst)
    }

    /// Confirms the cluster before a request, if another cluster answered the last check: else that
    /// one may answer the request, and the right one the check after it.
    ///
    /// # Errors
    /// As [`Self::confirm`].
    pub async fn confirm_if_doubted(&self) -> Result<(), IdentityError> {
        if self.is_doubted() { self.confirm().await } else { Ok(()) }
    }

    /// The known identity as text; `None` before the first successful check.
    pub fn identity(&self) -> Option<String> {
        self.known().as_ref().map(ToString::to_string)
    }

    /// The known identity if it distinguishes clusters: `None` if it has neither a uid nor a CA, or
    /// before the first successful check.
    pub fn proven_identity(&self) -> Option<String> {
        self.known().as_ref().filter(|known| known.uid.is_some() || !known.ca.is_empty()).map(ToString::to_string)
    }

    /// The uid of the namespace kube-system: a cluster name that every replica agrees on and that
    /// never changes. A CA is not suitable: it is rotated, and may sign for many clusters.
    pub fn cluster(&self) -> Option<String> {
        self.known().as_ref().and_then(|known| known.uid.clone())
    }

    /// Takes the cluster of a saved state as the known one, until a check confirms it. Returns
    /// false if another one is known.
    pub fn assume_cluster(&self, uid: &str) -> bool {
        let mut known = self.known();
        if let Some(known) = &*known {
            return known.uid.as_deref() == Some(uid);
        }
        *known = Some(Identity { uid: Some(uid.to_owned()), ca: self.trusted_ca() });
        self.identity_state().is_assumed.store(true, Ordering::SeqCst);
        true
    }

    /// Whether the known cluster is that of a saved state, which no check has confirmed.
    pub fn is_assumed(&self) -> bool {
        self.identity_state().is_assumed.load(Ordering::SeqCst)
    }

    /// Forgets an assumed cluster, because another one answers and nothing of the assumed one is
    /// served any more. The next check learns the identity. Returns the uid of the assumed cluster.
    pub fn forget_assumed_cluster(&self) -> Option<String> {
        let mut known = self.known();
        let was_assumed = self.identity_state().is_assumed.swap(false, Ordering::SeqCst);
        if was_assumed { known.take()?.uid } else { None }
    }

    fn known(&self) -> MutexGuard<'_, Option<Identity>> {
        self.identity_state().known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn check_identity(&self, denied_since: &mut Option<Instant>) -> Result<(), IdentityError> {
        let uid = match self.get_json::<Namespace>(Verb::Get, KUBE_SYSTEM).await {
            Ok(namespace) => Some(namespace.metadata.uid).filter(|uid| !uid.is_empty()),
            Err(error @ (UpstreamError::Forbidden { .. } | UpstreamError::NotFound { .. })) => {
                let had_uid = self.known().as_ref().is_some_and(|known| known.uid.is_some());
                let since = *denied_since.get_or_insert_with(Instant::now);
                let denied = matches!(error, UpstreamError::Forbidden { .. });
                if had_uid && !(denied && since.elapsed() >= FORBIDDEN_GRACE) {
                    return Err(IdentityError::Unanswered(error));
                }
                None
            }
            Err(error) => return Err(IdentityError::Unanswered(error)),
        };
        if uid.is_some() {
            *denied_since = None;
        }
        let found = Identity { uid, ca: self.in_use().trusted_ca() };
        let mut known = self.known();
        let known_from = if self.is_assumed() { KnownFrom::File } else { KnownFrom::Check };
        if !is_same_cluster(known.as_ref(), known_from, &found) {
            return Err(IdentityError::OtherCluster {
                server: self.server().to_owned(),
                known: known.as_ref().map(ToString::to_string).unwrap_or_default(),
                found: match &found.uid {
                    Some(_) => found.to_string(),
                    None => found.ca.to_string(),
                },
            });
        }
        if known.as_ref().is_none_or(|known| known.uid != found.uid) {
            tracing::info!(server = self.server(), identity = %found, "identified the cluster");
        }
        *known = Some(found);
        self.identity_state().is_assumed.store(false, Ordering::SeqCst);
        Ok(())
    }
}
