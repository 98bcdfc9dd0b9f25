//! The answer to a request that the cache does not answer: upstream's, or a refusal.
//!
//! The hazard is a request that upstream must not see, because it might interpret it differently.
//!
//! A client that reads at the apiserver by itself says so with `Cache-Control: only-if-cached` (RFC
//! 9111, section 5.2.1.7). Then kubefan decides as for any read, but does not forward it: the
//! client's read takes another way, which does not depend on kubefan.

use kubefan_access::{Denial, switches::Switched};
use kubefan_fanout::Patience;
use kubefan_model::Media;

use super::{feature_gates::CacheOnly, read_error::ReadError, status::Failure};

/// The answer if the cache has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallback {
    /// Upstream.
    Upstream,
    /// A 504, after which the client asks upstream itself.
    Client,
    /// A refusal of kubefan: passthrough is off.
    Off,
    /// A refusal of kubefan, because upstream might ignore a part of the request.
    CacheOnly(CacheOnly),
}

/// The form of a refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refused {
    /// A response that says nothing about a cache.
    Plain(Failure),
    /// A response that a cache has decided, marked by a header.
    ByCache(Failure),
    /// A 504 for a client that only wants the cache's answer.
    NotCached(Failure),
    /// The only event of a watch in this encoding.
    Event(Failure, Media),
}

impl Fallback {
    /// Whether upstream may answer, through this kubefan or not.
    pub fn is_upstream(self) -> bool {
        matches!(self, Self::Upstream | Self::Client)
    }

    /// Returns the patience of a read: less if upstream may answer it instead.
    pub fn patience(self) -> Patience {
        if self.is_upstream() { Patience::Bookmark } else { Patience::NoFallback }
    }

    /// Returns the refusal of a request that the cache does not answer. `None` if upstream answers
    /// it.
    pub fn refusal(self, error: ReadError) -> Option<Refused> {
        let failure = match error {
            ReadError::ByCache(failure) => return Some(Refused::ByCache(failure)),
            ReadError::Plain(failure) => return Some(Refused::Plain(failure)),
            ReadError::Event(failure, media) => return Some(Refused::Event(failure, media)),
            ReadError::Upstream(failure) => failure,
        };
        match self {
            Self::Upstream => None,
            Self::Client => Some(Refused::NotCached(Failure::only_if_cached(&failure))),
            Self::Off => Some(Refused::Plain(failure)),
            // With these statuses (404 to 406) the caches have no answer. A failure with another
            // status would come from any server, or passes by itself.
            Self::CacheOnly(needed) if matches!(failure.code(), 404..=406) => Some(lacks(needed, &failure)),
            Self::CacheOnly(_) => Some(Refused::Plain(failure)),
        }
    }

    /// Returns the refusal of a read whose resource the operator has switched to another mode.
    /// `None` if upstream answers it.
    pub fn refusal_of_switched(self, switched: Switched) -> Option<Refused> {
        match (self, ReadError::from(Denial::Switched(switched))) {
            (Self::CacheOnly(needed), ReadError::Upstream(failure)) => Some(lacks(needed, &failure)),
            (_, error) => self.refusal(error),
        }
    }
}

/// Returns the refusal of a request for something that only a cache has.
fn lacks(needed: CacheOnly, failure: &Failure) -> Refused {
    Refused::Plain(Failure::bad_request(format!("{needed}: {}", failure.message())))
}
