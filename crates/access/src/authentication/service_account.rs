//! Tokens of service accounts, checked here without a TokenReview (`tuning.serviceAccountJwks`), if
//! they are for an audience of kubefan's own.
//!
//! The check only ever says yes. A token that it cannot prove goes to a TokenReview: an unknown
//! key, a claim that does not fit, an object that no cache has. So it can save reviews, and refuses
//! no caller that the apiserver knows.
//!
//! - `json_web_token`: the form of a token.
//! - `signing_keys`: the keys that the apiserver signs with.
//! - `key_source`: their source, and the interval of its reads.
//! - `claims`: the claims of a token, and its user.

mod claims;
mod json_web_token;
mod key_source;
mod signing_keys;

use std::sync::Arc;

use kubefan_telemetry::metrics::AccessMetrics;
use kubefan_upstream::Upstream;

use self::{claims::Claims, json_web_token::JsonWebToken, key_source::KeySource, signing_keys::SigningKeys};
use super::{
    bearer_token::BearerToken,
    caller::{Clock, KnownCaller},
};
use crate::bound_object::BoundObject;

/// Whether an object exists, as far as a cache of all objects of its resource knows.
pub type Exists = Arc<dyn Fn(&BoundObject) -> Option<bool> + Send + Sync>;

/// Checks tokens of service accounts.
pub struct ServiceAccounts {
    keys: KeySource,
    exists: Exists,
    metrics: AccessMetrics,
}

impl ServiceAccounts {
    /// Reads the keys over `upstream`, and looks up the objects of tokens with `exists`.
    pub fn new(upstream: Upstream, exists: Exists, metrics: &AccessMetrics) -> Self {
        Self { keys: KeySource::new(upstream), exists, metrics: metrics.clone() }
    }

    /// The caller with a token, if that can be proved here. Extras with the keys `ignored_extra`
    /// are left out.
    pub(super) fn caller(
        &self,
        token: &BearerToken,
        audiences: &[String],
        ignored_extra: &[String],
        clock: Clock,
    ) -> Option<Arc<KnownCaller>> {
        let jwt = JsonWebToken::parse(token.expose())?;
        let caller = self.proved(&jwt, audiences, ignored_extra, clock);
        self.metrics.checked_locally(caller.is_some());
        caller
    }

    fn proved(
        &self,
        jwt: &JsonWebToken<'_>,
        audiences: &[String],
        ignored_extra: &[String],
        clock: Clock,
    ) -> Option<Arc<KnownCaller>> {
        let keys: Arc<SigningKeys> = self.keys.with(&jwt.key_id)?;
        let claims = Claims::of(keys.verified(jwt)?)?;
        let expires_at = claims.valid_until(keys.issuer(), audiences, clock())?;
        let identity = claims.identity();
        let mut bound = BoundObject::of(&identity).into_iter().chain(claims.secret());
        let exists = |object: BoundObject| (self.exists)(&object) == Some(true);
        bound.all(exists).then(|| KnownCaller::of_token(identity, ignored_extra, Some(expires_at)))
    }
}

#[cfg(test)]
mod tests;
