//! The metrics of authentication and authorization. Their names are kube-apiserver's where it has
//! the same.

use prometheus::{Error, IntCounter, IntCounterVec};

use super::register::Registrar;

/// The results of an authentication: it succeeded, it failed, or there was no verdict.
const AUTHENTICATIONS: [&str; 3] = ["success", "failure", "error"];
/// The results of an authorization.
const AUTHORIZATIONS: [&str; 3] = ["allowed", "denied", "error"];
/// Source of the answer about a token.
const TOKEN_CACHE: [&str; 2] = ["hit", "miss"];

/// Result of a check of a service account's token without a review: its user was proved, or not.
const LOCAL_CHECKS: [&str; 2] = ["known", "reviewed"];

/// The metrics of authentication and authorization.
#[derive(Clone)]
pub struct AccessMetrics {
    authentications: IntCounterVec,
    authorizations: IntCounterVec,
    token_cache: IntCounterVec,
    local_checks: IntCounterVec,
    token_reviews: ReviewMetrics,
    access_reviews: ReviewMetrics,
}

/// The metrics of the reviews of one kind.
#[derive(Clone)]
pub struct ReviewMetrics {
    /// Name of the reviewed thing, for logs.
    pub kind: &'static str,
    answered: IntCounterVec,
    /// Verdicts from before an outage that were used in it.
    pub in_grace: IntCounter,
}

impl ReviewMetrics {
    /// Counts an answer; `failure` is the reason if there was no verdict.
    pub fn answered(&self, failure: Option<&'static str>) {
        self.answered.with_label_values(&[failure.unwrap_or("ok")]).inc();
    }
}

impl AccessMetrics {
    pub(super) fn new(register: &Registrar<'_>) -> Result<Self, Error> {
        let with_all = |family: IntCounterVec, values: &[&str]| {
            for value in values {
                family.with_label_values(&[*value]);
            }
            family
        };
        let in_grace = register.counters(
            "kubefan_delegated_grace_total",
            "Verdicts from before an outage of the apiserver that were used in it, by kind of review.",
            &["review"],
        )?;
        let token_reviews = ReviewMetrics {
            kind: "TokenReview",
            answered: register.counters(
                "kubefan_delegated_authn_request_total",
                "TokenReviews sent to the apiserver, by result: 'ok' or the reason of the failure.",
                &["result"],
            )?,
            in_grace: in_grace.with_label_values(&["token"]),
        };
        let access_reviews = ReviewMetrics {
            kind: "SubjectAccessReview",
            answered: register.counters(
                "kubefan_delegated_authz_request_total",
                "SubjectAccessReviews sent to the apiserver, by result: 'ok' or the reason of the failure.",
                &["result"],
            )?,
            in_grace: in_grace.with_label_values(&["access"]),
        };
        let authentications = register.counters(
            "kubefan_authentication_attempts_total",
            "Callers that were authenticated, by result.",
            &["result"],
        )?;
        let authorizations = register.counters(
            "kubefan_authorization_attempts_total",
            "Reads that were authorized, by result.",
            &["result"],
        )?;
        let token_cache = register.counters(
            "kubefan_authentication_token_cache_request_total",
            "Tokens that were looked up in the cache of verdicts, by status.",
            &["status"],
        )?;
        let local_checks = register.counters(
            "kubefan_authentication_local_checks_total",
            "Tokens that were checked without a review, by result.",
            &["result"],
        )?;
        for reviews in [&token_reviews, &access_reviews] {
            with_all(reviews.answered.clone(), &["ok"]);
        }
        Ok(Self {
            authentications: with_all(authentications, &AUTHENTICATIONS),
            authorizations: with_all(authorizations, &AUTHORIZATIONS),
            token_cache: with_all(token_cache, &TOKEN_CACHE),
            local_checks: with_all(local_checks, &LOCAL_CHECKS),
            token_reviews,
            access_reviews,
        })
    }

    /// Counts an authentication; `None` if there was no verdict.
    pub fn authenticated(&self, succeeded: Option<bool>) {
        let [success, failure, error] = AUTHENTICATIONS;
        let result = succeeded.map_or(error, |succeeded| if succeeded { success } else { failure });
        self.authentications.with_label_values(&[result]).inc();
    }

    /// Counts an authorization; `None` if there was no verdict.
    pub fn authorized(&self, is_allowed: Option<bool>) {
        let [allowed, denied, error] = AUTHORIZATIONS;
        let result = is_allowed.map_or(error, |is_allowed| if is_allowed { allowed } else { denied });
        self.authorizations.with_label_values(&[result]).inc();
    }

    /// Counts a look at the cache of tokens.
    pub fn token_looked_up(&self, is_known: bool) {
        let [hit, miss] = TOKEN_CACHE;
        self.token_cache.with_label_values(&[if is_known { hit } else { miss }]).inc();
    }

    /// Counts a check of a token without a review, and whether it proved whose token it is.
    pub fn checked_locally(&self, is_known: bool) {
        let [known, reviewed] = LOCAL_CHECKS;
        self.local_checks.with_label_values(&[if is_known { known } else { reviewed }]).inc();
    }

    /// The metrics of TokenReviews.
    pub fn reviews_of_tokens(&self) -> ReviewMetrics {
        self.token_reviews.clone()
    }

    /// The metrics of SubjectAccessReviews.
    pub fn reviews_of_access(&self) -> ReviewMetrics {
        self.access_reviews.clone()
    }
}
