//! A caller that was authenticated.

use std::{sync::Arc, time::SystemTime};

use kubefan_admission::Holder;
use tokio::time::Instant;

use crate::{
    bound_object::BoundObject,
    user::{ANONYMOUS, Digest, Identity},
};

/// The wall clock, which the end of a credential is compared with.
pub type Clock = fn() -> SystemTime;

/// A caller, as the authenticator knows it.
#[derive(Debug, Clone)]
pub enum Caller {
    /// Callers are not distinguished (`--access=local` and `insecure`).
    Any,
    /// The user with this identity.
    Known(Arc<KnownCaller>),
}

/// A user, and for how long its credential is valid.
#[derive(Debug)]
pub struct KnownCaller {
    /// The user, without the extras that are ignored.
    pub identity: Identity,
    /// The digest of the identity, which is a part of every key in the cache of verdicts.
    pub digest: Digest,
    /// The objects without which the credential is not valid.
    pub bound: Vec<BoundObject>,
    /// The uid of the pod that the credential is bound to, or its name.
    pod: Option<String>,
    /// End of the credential's validity; `None` if it is not known.
    pub expires_at: Option<Instant>,
}

impl KnownCaller {
    /// A caller with an identity, and a credential that is bound to nothing.
    pub fn new(identity: Identity, expires_at: Option<Instant>) -> Arc<Self> {
        let digest = identity.digest();
        Arc::new(Self { identity, digest, bound: Vec::new(), pod: None, expires_at })
    }

    /// The caller with the token of this user. Extras with the keys `ignored_extra` say nothing
    /// about its rights.
    pub fn of_token(user: Identity, ignored_extra: &[String], expires_at: Option<Instant>) -> Arc<Self> {
        let bound = BoundObject::of(&user);
        let pod = user.pod().map(str::to_owned);
        let identity = user.without_extra(ignored_extra);
        let digest = identity.digest();
        Arc::new(Self { identity, digest, bound, pod, expires_at })
    }

    /// The holder of a request of this caller. Its tenant has the share: an administrator of a
    /// namespace makes any number of service accounts.
    pub fn holder(&self, holder: Holder) -> Holder {
        holder.identified(&self.identity.user, self.pod.as_deref()).of_tenant(self.identity.tenant())
    }

    /// Whether the credential has expired.
    pub fn is_expired(&self) -> bool {
        self.expires_at.is_some_and(|at| at <= Instant::now())
    }
}

impl Caller {
    /// Whether it is the user without credentials.
    pub fn is_anonymous(&self) -> bool {
        matches!(self, Self::Known(known) if known.identity.user == ANONYMOUS)
    }

    /// The tenant that the caller's limits are shared with: [`Identity::tenant`]; `None` if callers
    /// are not distinguished.
    pub fn tenant(&self) -> Option<&str> {
        match self {
            Self::Any => None,
            Self::Known(known) => Some(known.identity.tenant()),
        }
    }

    /// Returns the holder of a request as this caller's user; unchanged if callers are not
    /// distinguished.
    pub fn holder(&self, holder: Holder) -> Holder {
        match self {
            Self::Any => holder,
            Self::Known(known) => known.holder(holder),
        }
    }

    /// The objects without which the caller's credential is not valid.
    pub fn bound(&self) -> &[BoundObject] {
        match self {
            Self::Any => &[],
            Self::Known(known) => &known.bound,
        }
    }

    /// End of the validity of the caller's credential; `None` if it is not known.
    pub fn expires_at(&self) -> Option<Instant> {
        match self {
            Self::Any => None,
            Self::Known(known) => known.expires_at,
        }
    }
}
