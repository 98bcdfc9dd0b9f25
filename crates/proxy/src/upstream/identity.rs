//! Which cluster answers: the uid of the namespace kube-system where it may be read, else the CA that its certificate is trusted by.
//!
//! Versions of two clusters mean nothing to each other, so what another cluster says behind the same address (an address given to a new
//! cluster, a name that leads elsewhere now) must never be mixed into a cache. The identity is learned once, kept for the life of
//! the process, and asked again whenever a connection may have broken, before anything that came after it is believed. One question
//! serves all whose doubt is older than it.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use serde::Deserialize;
use tokio::time::Instant;

use super::{
    client::{Upstream, Verb},
    error::UpstreamError,
};

/// So long a 403 is taken for a passing one where the uid is known: an apiserver that has just started answers 403 until its
/// authorizer has read its rules.
const DENIED_GRACE: Duration = Duration::from_secs(30);

const KUBE_SYSTEM: &str = "/api/v1/namespaces/kube-system";

/// Why what upstream says is not believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// Another cluster answers.
    #[error(
        "another cluster answers at {server}: {found}, and this cache is of {known}; nothing of it is taken over; when the change \
         is meant, restart kubefan"
    )]
    OtherCluster {
        /// Scheme, host and port.
        server: String,
        /// The identity since the start.
        known: String,
        /// What was found now.
        found: String,
    },
    /// The question was not answered.
    #[error("which cluster answers cannot be told: {0}")]
    Unanswered(#[source] UpstreamError),
}

impl IdentityError {
    /// The label in metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::OtherCluster { .. } => "other_cluster",
            Self::Unanswered(error) => error.reason(),
        }
    }

    /// What the apiserver asks to wait.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::OtherCluster { .. } => None,
            Self::Unanswered(error) => error.retry_after(),
        }
    }
}

/// A moment after which nothing is believed before upstream was asked again: only a question that began later answers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Doubt(u64);

/// The certificates that upstream's is checked against, by their SHA-256; none where the system's are, or where nothing is checked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrustedCa(BTreeSet<String>);

impl TrustedCa {
    /// Of a bundle in DER.
    pub fn of(bundle: &[Vec<u8>]) -> Self {
        let fingerprint = |der: &Vec<u8>| {
            let digest = ring::digest::digest(&ring::digest::SHA256, der);
            digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
        };
        Self(bundle.iter().map(fingerprint).collect())
    }

    /// While a CA is rotated the bundle has both, so one certificate in common is enough.
    fn goes_with(&self, other: &Self) -> bool {
        self == other || self.0.intersection(&other.0).next().is_some()
    }
}

impl fmt::Display for TrustedCa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.0.first(), self.0.len()) {
            (None, _) => f.write_str("no serving CA of its own"),
            (Some(first), 1) => write!(f, "serving CA sha256:{first}"),
            (Some(first), count) => write!(f, "serving CA sha256:{first} and {} more", count - 1),
        }
    }
}

/// What is known of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Identity {
    uid: Option<String>,
    ca: TrustedCa,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.uid {
            Some(uid) => write!(f, "kube-system uid {uid}"),
            None => write!(f, "{} (the namespace kube-system may not be read)", self.ca),
        }
    }
}

/// The memory of one client and its clones.
#[derive(Default)]
pub(super) struct IdentityMemory {
    /// Questions begun.
    begun: AtomicU64,
    /// Held while upstream is asked: who comes meanwhile shares the answer, if it began late enough.
    asking: tokio::sync::Mutex<Asking>,
    known: Mutex<Option<Identity>>,
}

#[derive(Default)]
struct Asking {
    /// The last question, and its answer.
    last: Option<(u64, Result<(), IdentityError>)>,
    denied_since: Option<Instant>,
}

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
    /// Something may have broken: what comes from here on is to be confirmed.
    pub fn doubt(&self) -> Doubt {
        Doubt(self.identity_memory().begun.load(Ordering::SeqCst))
    }

    /// Whether the cluster that answers is still the one of the first time, by a question that began after the doubt.
    pub async fn confirm(&self, doubt: Doubt) -> Result<(), IdentityError> {
        let memory = self.identity_memory();
        let mut asking = memory.asking.lock().await;
        if let Some((question, answer)) = &asking.last
            && *question > doubt.0
        {
            return answer.clone();
        }
        let question = memory.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let answer = self.ask(&mut asking.denied_since).await;
        asking.last = Some((question, answer.clone()));
        answer
    }

    /// The identity in use, for people; `None` before the first answer.
    pub fn identity(&self) -> Option<String> {
        self.known().as_ref().map(ToString::to_string)
    }

    /// The identity where there is something to tell clusters apart by; `None` also before the first answer.
    pub fn proven_identity(&self) -> Option<String> {
        self.known().as_ref().filter(|known| known.uid.is_some() || !known.ca.0.is_empty()).map(ToString::to_string)
    }

    /// A name for the cluster that is the same for every replica, and for good: the uid of the namespace kube-system. A CA is none: it is
    /// replaced now and then, and may sign for many clusters.
    pub fn cluster(&self) -> Option<String> {
        self.known().as_ref().and_then(|known| known.uid.clone())
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Option<Identity>> {
        self.identity_memory().known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn ask(&self, denied_since: &mut Option<Instant>) -> Result<(), IdentityError> {
        let uid = match self.get_json::<Namespace>(Verb::Get, KUBE_SYSTEM).await {
            Ok(namespace) => Some(namespace.metadata.uid).filter(|uid| !uid.is_empty()),
            Err(error @ (UpstreamError::Forbidden { .. } | UpstreamError::NotFound { .. })) => {
                let had_uid = self.known().as_ref().is_some_and(|known| known.uid.is_some());
                let since = *denied_since.get_or_insert_with(Instant::now);
                let denied = matches!(error, UpstreamError::Forbidden { .. });
                if had_uid && !(denied && since.elapsed() >= DENIED_GRACE) {
                    return Err(IdentityError::Unanswered(error));
                }
                None
            }
            Err(error) => return Err(IdentityError::Unanswered(error)),
        };
        if uid.is_some() {
            *denied_since = None;
        }
        let found = Identity { uid, ca: self.trusted_ca() };
        let mut known = self.known();
        match compare(known.as_ref(), &found) {
            true => {
                if known.as_ref().is_none_or(|known| known.uid != found.uid) {
                    tracing::info!(server = self.server(), identity = %found, "the cluster is known by");
                }
                *known = Some(found);
                Ok(())
            }
            false => Err(IdentityError::OtherCluster {
                server: self.server().to_owned(),
                known: known.as_ref().map(ToString::to_string).unwrap_or_default(),
                found: match &found.uid {
                    Some(_) => found.to_string(),
                    None => found.ca.to_string(),
                },
            }),
        }
    }
}

/// Whether what was found may be the cluster that is known. The uid decides where both have one; else the CA does.
fn compare(known: Option<&Identity>, found: &Identity) -> bool {
    let Some(known) = known else { return true };
    match (&known.uid, &found.uid) {
        (Some(known), Some(found)) => known == found,
        // A uid that can no longer be read is given up for a CA only where there is one to tell clusters apart by.
        (Some(_), None) => !found.ca.0.is_empty() && known.ca.goes_with(&found.ca),
        (None, _) => known.ca.goes_with(&found.ca),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(uid: Option<&str>, ca: &[&str]) -> Identity {
        let bundle: Vec<Vec<u8>> = ca.iter().map(|name| name.as_bytes().to_vec()).collect();
        Identity { uid: uid.map(str::to_owned), ca: TrustedCa::of(&bundle) }
    }

    #[test]
    fn the_uid_decides_and_else_the_ca() {
        let same = |known: &Identity, found: &Identity| compare(Some(known), found);
        let a = identity(Some("a"), &["ca"]);
        assert!(same(&a, &identity(Some("a"), &["new ca"])), "the CA was replaced");
        assert!(!same(&a, &identity(Some("b"), &["ca"])), "one CA may sign for many clusters");
        assert!(same(&a, &identity(None, &["ca"])));
        assert!(!same(&a, &identity(None, &["other"])));
        assert!(!same(&identity(Some("a"), &[]), &identity(None, &[])), "nothing speaks for it");
        let by_ca = identity(None, &["old"]);
        assert!(same(&by_ca, &identity(None, &["old", "new"])), "a rotation has both for a while");
        assert!(same(&by_ca, &identity(Some("a"), &["old"])), "a right that was granted later");
        assert!(!same(&by_ca, &identity(Some("a"), &["new"])));
        assert!(same(&identity(None, &[]), &identity(None, &[])), "nothing can be told, and nothing speaks against it");
    }

    #[test]
    fn people_see_what_is_used() {
        assert_eq!(identity(Some("4f1"), &["ca"]).to_string(), "kube-system uid 4f1");
        let text = identity(None, &["a", "b"]).to_string();
        assert!(text.starts_with("serving CA sha256:") && text.contains(" and 1 more (the namespace"), "{text}");
    }
}
