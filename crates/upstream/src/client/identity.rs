//! The identity of the cluster behind the upstream address: the uid of the namespace kube-system if
//! kubefan may read it, otherwise the CA that signs the serving certificate.
//!
//! Resource versions of two clusters are not comparable. If the address now leads to another
//! cluster (a rebuilt cluster, a changed DNS name), its data must never be mixed into an existing
//! cache. kubefan therefore learns the identity once, retains it for the life of the process, and
//! checks it again whenever a connection may have broken, before it uses anything received since.
//!
//! This file holds the data and the comparison; `identity_check` sends the requests.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64},
    },
    time::Duration,
};

use tokio::time::Instant;

use crate::error::UpstreamError;

/// The path of the object whose uid is that of the cluster.
pub(super) const KUBE_SYSTEM: &str = "/api/v1/namespaces/kube-system";

/// The reason why upstream's answers are not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// Another cluster answers.
    #[error(
        "another cluster answers at {server}: {found}, but this cache belongs to {known}; none of its data is used; if the \
         change is intended, restart kubefan"
    )]
    OtherCluster {
        /// Scheme, host and port.
        server: String,
        /// The identity since the start.
        known: String,
        /// The identity found now.
        found: String,
    },
    /// One of two servers does not show which cluster it serves, so they may serve two.
    #[error(
        "{server} does not show which cluster it serves, and with --upstream both servers must show the same one; grant \
         kubefan get on the namespace kube-system there"
    )]
    Unidentified {
        /// Scheme, host and port.
        server: String,
    },
    /// The identity could not be read.
    #[error("cannot determine which cluster answers: {0}")]
    Unanswered(#[source] UpstreamError),
}

impl IdentityError {
    /// The label in metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::OtherCluster { .. } => "other_cluster",
            Self::Unidentified { .. } => "unidentified",
            Self::Unanswered(error) => error.reason(),
        }
    }

    /// The delay that the apiserver asks for.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::OtherCluster { .. } | Self::Unidentified { .. } => None,
            Self::Unanswered(error) => error.retry_after(),
        }
    }
}

/// The CA certificates that upstream's certificate is verified against, as SHA-256 fingerprints in
/// hex. Empty if the system's CAs are used, or if verification is off.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrustedCa(BTreeSet<String>);

impl TrustedCa {
    /// Fingerprints of a bundle of DER certificates.
    pub fn of(bundle: &[Vec<u8>]) -> Self {
        let fingerprint = |der: &Vec<u8>| {
            let digest = ring::digest::digest(&ring::digest::SHA256, der);
            digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
        };
        Self(bundle.iter().map(fingerprint).collect())
    }

    /// Returns the fingerprints, in order.
    pub fn fingerprints(&self) -> Vec<String> {
        self.0.iter().cloned().collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// During a CA rotation the bundle has the old and the new CA, so one shared certificate is
    /// enough.
    fn overlaps(&self, other: &Self) -> bool {
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

/// The facts that identify a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) uid: Option<String>,
    pub(crate) ca: TrustedCa,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.uid {
            Some(uid) => write!(f, "kube-system uid {uid}"),
            None => write!(f, "{} (the namespace kube-system may not be read)", self.ca),
        }
    }
}

/// The identity that a client and its clones share.
#[derive(Default)]
pub(crate) struct IdentityState {
    pub(crate) checks_started: AtomicU64,
    /// Locked during a check. A caller that waited for the lock shares the result if the check
    /// started after it asked.
    pub(crate) check: tokio::sync::Mutex<CheckState>,
    /// Whether the last check found another cluster.
    pub(crate) is_doubted: AtomicBool,
    /// Shared by the clients of a kubefan and of the apiserver behind it. Each checks by itself.
    pub(crate) known: Arc<Mutex<Option<Identity>>>,
    /// Whether the known identity is that of a saved state, which no check has confirmed. Shared
    /// with it.
    pub(crate) is_assumed: Arc<AtomicBool>,
}

impl IdentityState {
    /// Returns a state without checks, of the same cluster.
    pub(crate) fn sharing(&self) -> Self {
        Self { known: Arc::clone(&self.known), is_assumed: Arc::clone(&self.is_assumed), ..Self::default() }
    }
}

#[derive(Default)]
pub(crate) struct CheckState {
    /// The number of the last check, and its result.
    pub(crate) last: Option<(u64, Result<(), IdentityError>)>,
    pub(crate) denied_since: Option<Instant>,
}

/// Source of the known identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KnownFrom {
    /// A check of this process.
    Check,
    /// A saved state.
    File,
}

/// Whether `found` may be the known cluster. The uid decides if both have one, otherwise the CA.
pub(crate) fn is_same_cluster(known: Option<&Identity>, known_from: KnownFrom, found: &Identity) -> bool {
    let Some(known) = known else { return true };
    match (&known.uid, &found.uid) {
        (Some(known), Some(found)) => known == found,
        // If the uid has become unreadable, the CA replaces it, but only if a CA is configured:
        // without one, nothing would distinguish two clusters. It may sign for many clusters, so it
        // does not replace a uid that only a file has.
        (Some(_), None) => known_from == KnownFrom::Check && !found.ca.is_empty() && known.ca.overlaps(&found.ca),
        (None, _) => known.ca.overlaps(&found.ca),
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
    fn the_uid_identifies_a_cluster_and_otherwise_the_ca() {
        let same = |known: &Identity, found: &Identity| is_same_cluster(Some(known), KnownFrom::Check, found);
        let a = identity(Some("a"), &["ca"]);
        assert!(same(&a, &identity(Some("a"), &["new ca"])), "the CA was replaced");
        assert!(!same(&a, &identity(Some("b"), &["ca"])), "one CA may sign for many clusters");
        assert!(same(&a, &identity(None, &["ca"])));
        assert!(!is_same_cluster(Some(&a), KnownFrom::File, &identity(None, &["ca"])));
        assert!(!same(&a, &identity(None, &["other"])));
        assert!(!same(&identity(Some("a"), &[]), &identity(None, &[])), "no CA, so nothing confirms it");
        let by_ca = identity(None, &["old"]);
        assert!(same(&by_ca, &identity(None, &["old", "new"])), "a rotation trusts both for a while");
        assert!(same(&by_ca, &identity(Some("a"), &["old"])), "permission to read the uid was granted later");
        assert!(!same(&by_ca, &identity(Some("a"), &["new"])));
        assert!(same(&identity(None, &[]), &identity(None, &[])), "neither has an identity, so nothing contradicts it");
    }

    #[test]
    fn an_identity_prints_the_uid_or_the_ca_fingerprints() {
        assert_eq!(identity(Some("4f1"), &["ca"]).to_string(), "kube-system uid 4f1");
        let text = identity(None, &["a", "b"]).to_string();
        assert!(text.starts_with("serving CA sha256:") && text.contains(" and 1 more (the namespace"), "{text}");
    }
}
