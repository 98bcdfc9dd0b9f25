//! Identifies a caller by the credentials of its request.
//!
//! A token comes before a certificate. kubefan forwards only the token, so the apiserver would know
//! the caller by it, and a caller must not be two users. An unknown token fails the request, as in
//! the apiserver, also if anonymous requests are allowed; and so does a certificate of an unknown
//! CA.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use futures::FutureExt;
use kubefan_admission::Holder;
use kubefan_telemetry::metrics::AccessMetrics;
use kubefan_upstream::Upstream;
use ring::hmac;
use tokio::time::Instant;

use super::{
    bearer_token::BearerToken,
    caller::{Caller, Clock, KnownCaller},
    certificate::CertificateVerdict,
    presented::Presented,
    service_account::ServiceAccounts,
    token_review,
};
use crate::{
    denial::Denial,
    review::{Outcome, QueueLimits, Review, ReviewError, Reviews, ReviewsOptions},
    user::{Digest, Identity},
};

/// The most tokens whose users are kept, and the most unknown tokens. One has about 1 KiB.
const TOKENS_MAX: usize = 16_384;

/// The bytes of the key that hides tokens in the cache.
pub const KEY_BYTES: usize = 32;

const UNKNOWN: &str =
    "the apiserver does not accept this token: it is invalid, has expired, or is for another audience";
const EXPOSED: &str = "kubefan takes tokens only over TLS or a Unix socket, because others could read them on the way";
const MISSING: &str = "kubefan serves known callers only: send a token as `authorization: Bearer TOKEN`, or use a client \
    certificate of the CA that it trusts";
const UNAVAILABLE: &str = "kubefan cannot ask the apiserver now whose token this is; try again";

/// Options of authentication.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthenticationOptions {
    /// A token must be for one of these; empty for the apiserver's own.
    pub api_audiences: Vec<String>,
    /// Time for which the answer about a token counts.
    pub token_ttl: Duration,
    /// Time for which known callers stay known while the apiserver cannot be asked.
    pub outage_grace: Duration,
    /// Whether a request without credentials is from the user `system:anonymous`.
    pub anonymous: bool,
    /// Keys of extras that are left out.
    pub ignored_extra: Vec<String>,
    /// Limits of the reviews.
    pub queue: QueueLimits,
}

/// Result of a token's review: its user, if it has one.
#[derive(Debug, Clone)]
struct TokenVerdict(Option<Arc<KnownCaller>>);

impl Outcome for TokenVerdict {
    fn is_positive(&self) -> bool {
        self.0.is_some()
    }

    fn ends_at(&self) -> Option<Instant> {
        self.0.as_ref().and_then(|caller| caller.expires_at)
    }

    /// Before its review the owner of the token is not known.
    fn holder(&self, asker: Holder) -> Holder {
        self.0.as_ref().map_or(asker, |caller| caller.holder(asker))
    }
}

/// Identifies callers.
pub struct Authenticator {
    upstream: Upstream,
    options: Arc<AuthenticationOptions>,
    key: hmac::Key,
    clock: Clock,
    reviews: Reviews<Digest, TokenVerdict>,
    /// Checks tokens without a review; `None` if all are reviewed.
    service_accounts: Option<ServiceAccounts>,
    metrics: AccessMetrics,
}

impl Authenticator {
    /// Whether the apiserver could be asked when it last had to be.
    pub fn is_answered(&self) -> bool {
        self.reviews.is_answered()
    }

    /// Asks over `upstream`. `key` must be random: it hides tokens in the cache.
    pub fn new(
        upstream: Upstream,
        options: AuthenticationOptions,
        key: [u8; KEY_BYTES],
        clock: Clock,
        metrics: &AccessMetrics,
    ) -> Self {
        let AuthenticationOptions { outage_grace, queue, .. } = options;
        let reviews = ReviewsOptions { entries_max: TOKENS_MAX, outage_grace, queue };
        let reviews = Reviews::new(reviews, metrics.reviews_of_tokens());
        let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
        let options = Arc::new(options);
        let metrics = metrics.clone();
        Self { upstream, options, key, clock, reviews, service_accounts: None, metrics }
    }

    /// Checks tokens of service accounts itself, where that is possible.
    #[must_use]
    pub fn with_service_accounts(self, service_accounts: Option<ServiceAccounts>) -> Self {
        Self { service_accounts, ..self }
    }

    /// A user without the extras that are left out of reviews.
    pub fn without_ignored(&self, user: Identity) -> Identity {
        user.without_extra(&self.options.ignored_extra)
    }

    /// The caller of a request.
    ///
    /// # Errors
    /// The denial, if the caller is not known.
    pub async fn authenticate(&self, presented: &Presented) -> Result<Caller, Denial> {
        let caller = self.caller(presented).await;
        self.metrics.authenticated(match &caller {
            Ok(_) => Some(true),
            Err(Denial::Unauthenticated(_) | Denial::Certificate(_)) => Some(false),
            Err(_) => None,
        });
        caller.map(Caller::Known)
    }

    async fn caller(&self, presented: &Presented) -> Result<Arc<KnownCaller>, Denial> {
        let Presented { token, is_exposed, certificate, holder, .. } = presented;
        match (token, certificate) {
            (Some(_), _) if *is_exposed => Err(Denial::Unauthenticated(EXPOSED)),
            (Some(token), _) => self.of_token(token, *holder).await,
            (None, Some(CertificateVerdict::Known(caller))) => Ok(caller.clone()),
            (None, Some(CertificateVerdict::Refused(why))) => Err(Denial::Certificate(why)),
            (None, Some(CertificateVerdict::Unavailable(why))) => Err(Denial::Unavailable(why)),
            (None, _) if self.options.anonymous => Ok(KnownCaller::new(Identity::anonymous(), None)),
            (None, Some(CertificateVerdict::Nothing(why))) => Err(Denial::Certificate(why)),
            (None, None) => Err(Denial::Unauthenticated(MISSING)),
        }
    }

    /// The verdict about a token that needs no review.
    fn checked(&self, token: &BearerToken, key: Digest, holder: Holder) -> Option<TokenVerdict> {
        let AuthenticationOptions { api_audiences, ignored_extra, token_ttl, .. } = &*self.options;
        let caller = self.service_accounts.as_ref()?.caller(token, api_audiences, ignored_extra, self.clock)?;
        let verdict = TokenVerdict(Some(caller));
        self.reviews.keep(key, holder, verdict.clone(), *token_ttl);
        Some(verdict)
    }

    async fn of_token(&self, token: &BearerToken, holder: Holder) -> Result<Arc<KnownCaller>, Denial> {
        let key = token.digest(&self.key, &self.options.api_audiences);
        let known = self.reviews.known(&key);
        self.metrics.token_looked_up(known.is_some());
        let verdict = match known.or_else(|| self.checked(token, key, holder)) {
            Some(verdict) => Ok(verdict),
            None => {
                let upstream = self.upstream.clone();
                let token = token.clone();
                let options = self.options.clone();
                let clock = self.clock;
                let answer = async move {
                    let user = token_review::review(&upstream, &token, &options.api_audiences).await?;
                    let verdict =
                        user.map(|user| KnownCaller::of_token(user, &options.ignored_extra, end_of(&token, clock())));
                    Ok((TokenVerdict(verdict), options.token_ttl))
                };
                // A token of any length costs the apiserver one look-up or one signature.
                let review = Review { bytes: Box::new(|| 0), answer: answer.boxed() };
                self.reviews.verdict(key, holder, review).await
            }
        };
        match verdict {
            Ok(TokenVerdict(Some(caller))) if !caller.is_expired() => Ok(caller),
            Ok(TokenVerdict(_)) => Err(Denial::Unauthenticated(UNKNOWN)),
            Err(ReviewError::Busy(message)) => Err(Denial::Busy(message)),
            Err(ReviewError::Outage | ReviewError::Refused) => Err(Denial::Unavailable(UNAVAILABLE)),
        }
    }
}

/// End of a token's validity, on tokio's clock. `None` if the token names none.
fn end_of(token: &BearerToken, now: SystemTime) -> Option<Instant> {
    let end = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(token.expires_at_seconds()?))?;
    let left = end.duration_since(now).unwrap_or_default();
    Instant::now().checked_add(left)
}

#[cfg(test)]
mod tests;
