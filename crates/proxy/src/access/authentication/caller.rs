//! A caller that was authenticated.

use std::{sync::Arc, time::SystemTime};

use tokio::time::Instant;

use crate::{
    access::user::{Digest, Identity},
    fanout::Holder,
};

/// The wall clock, which the end of a credential is compared with.
pub type Clock = fn() -> SystemTime;

/// A caller: what an authenticator has found out about it.
#[derive(Debug, Clone)]
pub enum Caller {
    /// Callers are not distinguished (`--authorization-mode=AlwaysAllow`).
    Any,
    /// This user.
    Known(Arc<KnownCaller>),
}

/// A user, and for how long its credential is valid.
#[derive(Debug)]
pub struct KnownCaller {
    /// The user, without the extras that are ignored.
    pub identity: Identity,
    /// The digest of the identity, which is a part of every key in the cache of verdicts.
    pub digest: Digest,
    /// When the credential expires; `None` if that is not known.
    pub expires_at: Option<Instant>,
}

impl KnownCaller {
    /// A caller with an identity.
    pub fn new(identity: Identity, expires_at: Option<Instant>) -> Arc<Self> {
        let digest = identity.digest();
        Arc::new(Self { identity, digest, expires_at })
    }

    /// The holder of a request of this caller.
    pub fn holder(&self, holder: Holder) -> Holder {
        holder.identified(&self.identity.user, self.identity.pod())
    }

    /// Whether the credential has expired.
    pub fn is_expired(&self) -> bool {
        self.expires_at.is_some_and(|at| at <= Instant::now())
    }
}

impl Caller {
    /// When the caller's credential expires; `None` if that is not known.
    pub fn expires_at(&self) -> Option<Instant> {
        match self {
            Self::Any => None,
            Self::Known(known) => known.expires_at,
        }
    }
}
