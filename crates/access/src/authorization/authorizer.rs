//! Authorizes the reads of callers, by the verdicts of the apiserver.
//!
//! The broad right comes first: most callers that may read their own part may read the whole
//! resource, and then one review serves all of their requests, and those of all pods of their
//! service account. A verdict that is known comes before any review.

use std::{sync::Arc, time::Duration};

use futures::FutureExt;
use kubefan_admission::Holder;
use kubefan_telemetry::metrics::AccessMetrics;
use kubefan_upstream::Upstream;

use super::{
    access_review::{self, AccessVerdict, Question},
    attributes::{Attributes, ReadVerb},
    authorized::Authorized,
    explanation::{Explanation, ReviewedAttributes},
    non_resource::NonResource,
    read::Read,
};
use crate::{
    authentication::caller::{Caller, KnownCaller},
    denial::{Denial, Forbidden, ForbiddenPath},
    review::{Outcome, QueueLimits, Review, ReviewError, Reviews, ReviewsOptions},
    user::{Digest, Identity},
};

/// The most verdicts that are kept, of each kind. One has about 350 bytes.
const VERDICTS_MAX: usize = 65_536;

/// Text for a caller that is refused although nothing is known against it.
const UNAVAILABLE: &str = "kubefan cannot ask the apiserver now what this caller may read; try again";
const UNKNOWN: &str = "the caller is not known";
const EXPIRED: &str = "the credential has expired";

/// Options of authorization.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthorizationOptions {
    /// Time for which a permission counts.
    pub authorized_ttl: Duration,
    /// Time for which a refusal counts.
    pub unauthorized_ttl: Duration,
    /// Time for which known callers keep their last verdict while the apiserver cannot be asked.
    pub outage_grace: Duration,
    /// Members of these groups are not reviewed.
    pub always_allow_groups: Vec<String>,
    /// Whether the right to the whole resource is asked for before the right to a part of it.
    pub broad_first: bool,
    /// Limits of the reviews.
    pub queue: QueueLimits,
}

/// Authorizes the reads of callers.
pub enum Authorizer {
    /// Everything.
    AlwaysAllow,
    /// Reads that the apiserver allows.
    Webhook(Box<WebhookAuthorizer>),
}

/// Asks the apiserver.
pub struct WebhookAuthorizer {
    upstream: Upstream,
    options: AuthorizationOptions,
    reviews: Reviews<Digest, AccessVerdict>,
    metrics: AccessMetrics,
}

impl Authorizer {
    /// Whether the apiserver could be asked when it last had to be.
    pub fn is_answered(&self) -> bool {
        match self {
            Self::AlwaysAllow => true,
            Self::Webhook(webhook) => webhook.reviews.is_answered(),
        }
    }

    /// Authorizes a read.
    ///
    /// # Errors
    /// The reason why the caller may not read, or why the verdict is not known.
    pub async fn authorize(&self, caller: &Caller, read: Read, holder: Holder) -> Result<Authorized<Read>, Denial> {
        let reason = match (self, caller) {
            (Self::AlwaysAllow, _) => Arc::default(),
            (Self::Webhook(_), Caller::Any) => return Err(Denial::Unauthenticated(UNKNOWN)),
            (Self::Webhook(webhook), Caller::Known(known)) => webhook.authorize(known, &read, holder, None).await?,
        };
        Ok(Authorized::new(read, caller.clone(), reason))
    }

    /// Asks again whether the caller may still read the target, by its identity. A verdict that is
    /// older than `age` does not count.
    ///
    /// # Errors
    /// The reason why it may not, or why the verdict is not known.
    pub async fn authorize_again(
        &self,
        authorized: &Authorized<Read>,
        holder: Holder,
        age: Duration,
    ) -> Result<(), Denial> {
        match (self, authorized.caller()) {
            (Self::Webhook(webhook), Caller::Known(known)) => {
                webhook.authorize(known, authorized.what(), holder, Some(age)).await.map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Whether the caller may read a path of kubefan's own.
    ///
    /// # Errors
    /// The denial, if the caller may not use the path or its rights are not known.
    pub async fn authorize_path(&self, caller: &Caller, path: NonResource, holder: Holder) -> Result<(), Denial> {
        match (self, caller) {
            (Self::AlwaysAllow, _) => Ok(()),
            (Self::Webhook(_), Caller::Any) => Err(Denial::Unauthenticated(UNKNOWN)),
            (Self::Webhook(webhook), Caller::Known(known)) => webhook.authorize_path(known, path, holder).await,
        }
    }

    /// Explains what a user may read, and why: for the operator; it decides nothing. Cached
    /// verdicts are shown as they are.
    ///
    /// # Errors
    /// The reason why that is not known.
    pub async fn explain(&self, user: Identity, read: &Read, holder: Holder) -> Result<Explanation, Denial> {
        match self {
            Self::AlwaysAllow => {
                Ok(Explanation::always_allowed("every caller may read everything (--access=local or insecure)"))
            }
            Self::Webhook(webhook) => webhook.explain(user, read, holder).await,
        }
    }
}

impl WebhookAuthorizer {
    /// Asks over `upstream`.
    pub fn new(upstream: Upstream, options: AuthorizationOptions, metrics: &AccessMetrics) -> Self {
        let AuthorizationOptions { outage_grace, queue, .. } = options;
        let reviews = ReviewsOptions { entries_max: VERDICTS_MAX, outage_grace, queue };
        let reviews = Reviews::new(reviews, metrics.reviews_of_access());
        Self { upstream, options, reviews, metrics: metrics.clone() }
    }

    async fn authorize(
        &self,
        caller: &Arc<KnownCaller>,
        read: &Read,
        holder: Holder,
        age: Option<Duration>,
    ) -> Result<Arc<str>, Denial> {
        let verdict = self.verdict(caller, read, holder, age).await;
        self.count(&verdict);
        verdict
    }

    fn count<T>(&self, verdict: &Result<T, Denial>) {
        self.metrics.authorized(match verdict {
            Ok(_) => Some(true),
            Err(Denial::Forbidden(_) | Denial::ForbiddenPath(_)) => Some(false),
            Err(_) => None,
        });
    }

    async fn authorize_path(&self, caller: &Arc<KnownCaller>, path: NonResource, holder: Holder) -> Result<(), Denial> {
        let verdict = self.path_verdict(caller, path, holder).await;
        self.count(&verdict);
        verdict
    }

    async fn path_verdict(&self, caller: &Arc<KnownCaller>, path: NonResource, holder: Holder) -> Result<(), Denial> {
        if caller.is_expired() {
            return Err(Denial::Unauthenticated(EXPIRED));
        }
        if self.is_always_allowed(&caller.identity) {
            return Ok(());
        }
        let key = path.key(&caller.digest);
        match self.review(caller, Question::Path(path), key, caller.holder(holder), None).await {
            Ok(AccessVerdict::Allowed(_)) => Ok(()),
            Ok(AccessVerdict::Denied(reason)) => {
                let user = caller.identity.user.clone();
                let reason = reason.to_string();
                Err(Denial::ForbiddenPath(Box::new(ForbiddenPath {
                    verb: path.verb(),
                    path: path.path(),
                    user,
                    reason,
                })))
            }
            Err(error) => Err(unknown(error)),
        }
    }

    async fn explain(&self, user: Identity, read: &Read, holder: Holder) -> Result<Explanation, Denial> {
        if self.is_always_allowed(&user) {
            return Ok(Explanation::always_allowed(
                "a group of the user is not reviewed (tuning.authorizationAlwaysAllowGroups)",
            ));
        }
        let caller = KnownCaller::new(user, None);
        let mut steps = Vec::new();
        for attributes in read.questions(self.options.broad_first) {
            let key = attributes.key(&caller.digest);
            let is_kept = self.reviews.known(&key).is_some();
            let review = self.review(&caller, Question::Read(attributes.clone()), key, holder, None);
            let (is_allowed, reason) = match review.await.map_err(unknown)? {
                AccessVerdict::Allowed(reason) => (true, reason),
                AccessVerdict::Denied(reason) => (false, reason),
            };
            steps.push(ReviewedAttributes::new(&attributes, is_allowed, reason, is_kept));
            if is_allowed {
                break;
            }
        }
        Ok(Explanation::of(steps))
    }

    /// Returns the verdict about a read. With an `age`, older verdicts in the cache do not count.
    async fn verdict(
        &self,
        caller: &Arc<KnownCaller>,
        read: &Read,
        holder: Holder,
        age: Option<Duration>,
    ) -> Result<Arc<str>, Denial> {
        if caller.is_expired() {
            return Err(Denial::Unauthenticated(EXPIRED));
        }
        if self.is_always_allowed(&caller.identity) {
            return Ok(Arc::default());
        }
        let allowed = |key: &Digest| match self.reviews.known(key) {
            Some(AccessVerdict::Allowed(reason)) => Some(reason),
            _ => None,
        };
        let mut all = Vec::new();
        let mut keys = Vec::new();
        for attributes in read.questions(self.options.broad_first) {
            // Each key costs a digest, and most reads need the first alone.
            let key = attributes.key(&caller.digest);
            if age.is_none()
                && let Some(reason) = allowed(&key)
            {
                return Ok(reason);
            }
            all.push(attributes);
            keys.push(key);
        }
        let mut denied = None;
        let mut is_outage = false;
        let holder = caller.holder(holder);
        for (at, (attributes, key)) in all.iter().zip(&keys).enumerate() {
            let by_watch = || self.allowed_by_watch(caller, &all[at..], &keys[at..]);
            // Callers that return in an outage do not wait for a review that cannot succeed.
            if self.reviews.is_away()
                && let Some(reason) = by_watch()
            {
                return Ok(reason);
            }
            match self.review(caller, Question::Read(attributes.clone()), *key, holder, age).await {
                Ok(AccessVerdict::Allowed(reason)) => return Ok(reason),
                Ok(AccessVerdict::Denied(reason)) => denied = Some(reason),
                Err(ReviewError::Outage) => match by_watch() {
                    Some(reason) => return Ok(reason),
                    // The verdict about a narrower right may still count.
                    None => is_outage = true,
                },
                Err(error) => return Err(unknown(error)),
            }
        }
        // The last answer is the one about exactly this read.
        let exact = all.pop();
        match (denied, exact) {
            (Some(reason), Some(attributes)) if !is_outage => {
                let user = caller.identity.user.clone();
                let reason = reason.to_string();
                Err(Denial::Forbidden(Box::new(Forbidden { attributes, user, reason })))
            }
            _ => Err(Denial::Unavailable(UNAVAILABLE)),
        }
    }

    /// Returns the reason why the caller may list in an outage: it may watch the same. `lists` are
    /// the reads from a broad one to exactly the requested one, with their keys.
    ///
    /// An informer starts with a watch that sends the objects of a list, for which the right to
    /// watch is enough, and falls back to a list that was never reviewed. A verdict about the list
    /// itself, and a refusal of a part of it, come first.
    fn allowed_by_watch(&self, caller: &KnownCaller, lists: &[Attributes], keys: &[Digest]) -> Option<Arc<str>> {
        let list = lists.first()?;
        let key = keys.first()?;
        let is_refused = |key| self.reviews.kept(key).is_some_and(|verdict| !verdict.is_positive());
        if list.verb != ReadVerb::List
            || self.options.outage_grace.is_zero()
            || self.reviews.kept(key).is_some()
            || keys.iter().any(is_refused)
        {
            return None;
        }
        let watch = Attributes { verb: ReadVerb::Watch, ..list.clone() };
        let Some(AccessVerdict::Allowed(reason)) = self.reviews.kept(&watch.key(&caller.digest)) else { return None };
        self.reviews.count_in_grace();
        Some(reason)
    }

    async fn review(
        &self,
        caller: &Arc<KnownCaller>,
        question: Question,
        key: Digest,
        holder: Holder,
        age: Option<Duration>,
    ) -> Result<AccessVerdict, ReviewError> {
        let AuthorizationOptions { authorized_ttl, unauthorized_ttl, .. } = self.options;
        let upstream = self.upstream.clone();
        let caller = caller.clone();
        let question = Arc::new(question);
        let measured = question.clone();
        let answer = async move {
            let verdict = access_review::review(&upstream, &caller.identity, &question).await?;
            let fresh_for = if verdict.is_positive() { authorized_ttl } else { unauthorized_ttl };
            Ok((verdict, fresh_for))
        };
        let review = Review { bytes: Box::new(move || measured.bytes()), answer: answer.boxed() };
        match age {
            None => self.reviews.verdict(key, holder, review).await,
            Some(age) => self.reviews.recent(key, holder, age, review).await,
        }
    }

    fn is_always_allowed(&self, user: &Identity) -> bool {
        user.groups.iter().any(|group| self.options.always_allow_groups.contains(group))
    }
}

/// Denial of a caller without a verdict.
fn unknown(error: ReviewError) -> Denial {
    match error {
        ReviewError::Busy(message) => Denial::Busy(message),
        ReviewError::Outage | ReviewError::Refused => Denial::Unavailable(UNAVAILABLE),
    }
}

#[cfg(test)]
mod tests;
