//! The reason why a read is not answered from the cache, and for each of them whether upstream may
//! answer instead. Whether it does is decided by the [`Fallback`](super::fallback::Fallback).

use kubefan_access::{
    Mode,
    denial::{Denial, IMPERSONATION},
};
use kubefan_cache::Refusal;
use kubefan_model::Media;

use super::{error_type::ErrorType, status::Failure};

/// The reason why a read is not answered from the cache.
#[derive(Debug, Clone, PartialEq)]
pub enum ReadError {
    /// kubefan answers with this failure, which a cache has decided.
    ByCache(Failure),
    /// Upstream answers. kubefan answers with this failure only if passthrough is off.
    Upstream(Failure),
    /// kubefan answers with this failure, which says nothing about a cache.
    Plain(Failure),
    /// A watch in this encoding has this failure as its only event.
    Event(Failure, Media),
}

impl ReadError {
    /// Returns the error for a caller that only a certificate names. The request cannot be
    /// forwarded with it, so kubefan refuses it itself.
    pub fn denied_by_certificate(denial: Denial) -> Self {
        // An invalid certificate says nothing about the caller.
        let is_invalid = matches!(denial, Denial::Invalid { .. });
        match Self::from(denial) {
            Self::Upstream(failure) if !is_invalid => Self::Plain(failure),
            other => other,
        }
    }
}

impl From<Denial> for ReadError {
    fn from(denial: Denial) -> Self {
        match denial {
            // With passthrough the apiserver refuses in its own words, and records that.
            Denial::Unauthenticated(_) => Self::Upstream(Failure::unauthorized("Unauthorized".to_owned())),
            Denial::Certificate(why) => Self::Plain(Failure::unauthorized(why.to_owned())),
            Denial::Forbidden(forbidden) => Self::Upstream(Failure::denied(&forbidden)),
            Denial::ForbiddenPath(forbidden) => Self::Plain(Failure::forbidden(forbidden.message())),
            Denial::Switched(switched) if switched.mode == Mode::Deny => {
                Self::Plain(Failure::forbidden(switched.message()))
            }
            Denial::Switched(switched) => {
                Self::Upstream(Failure::unavailable(switched.message()).because(ErrorType::ProxyInternalResponse))
            }
            Denial::Impersonation => Self::Upstream(Failure::forbidden(IMPERSONATION.to_owned())),
            // A fleet whose callers cannot be reviewed must not all turn to the apiserver.
            Denial::Unavailable(why) => Self::Plain(Failure::unavailable(why.to_owned())),
            Denial::Busy(message) => Self::Plain(Failure::too_many_requests(message)),
            denial @ Denial::Invalid { .. } => Self::from(Refusal::from(denial)),
        }
    }
}

impl From<Failure> for ReadError {
    fn from(failure: Failure) -> Self {
        Self::ByCache(failure)
    }
}

impl From<Refusal> for ReadError {
    fn from(refusal: Refusal) -> Self {
        let failure = Failure::from(&refusal);
        match refusal {
            Refusal::Exhausted(_) | Refusal::Draining | Refusal::Expired(_) | Refusal::Rewritten(_) => {
                Self::ByCache(failure)
            }
            // Upstream may have created or permitted the resource since, and reports invalid
            // selectors in its own words.
            Refusal::NotFound(_) | Refusal::Forbidden(_) | Refusal::NotCached(_) | Refusal::Invalid { .. } => {
                Self::Upstream(failure)
            }
            Refusal::NotEncoded(_) => Self::Upstream(failure),
            Refusal::Unauthenticated(_) | Refusal::Denied(_) => Self::Upstream(failure),
            // The limits of caches protect kubefan's memory, and the rate limit protects upstream
            // from reads that kubefan adds. Upstream has limits of its own for its clients.
            Refusal::NoRoom(_) | Refusal::RateLimited { .. } => Self::Upstream(failure),
            Refusal::Switched(_) => Self::Upstream(failure),
            // The cache is not as fresh as requested.
            Refusal::NotSynced { .. } | Refusal::Failing { .. } | Refusal::Stale { .. } => Self::Upstream(failure),
            Refusal::Future { .. } | Refusal::Unavailable(_) => Self::Upstream(failure),
        }
    }
}
