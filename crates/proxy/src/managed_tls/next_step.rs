//! Decides what to do next about the managed certificate: a function of what the Secret has and of
//! the time. The life of a CA, as the states that follow each other:
//!
//! 1. **Signing.** One CA has a key here, and signs.
//! 2. **Announced.** The next CA is made, long before the end of the first. It signs nothing.
//! 3. **Published.** The next CA is in all ConfigMaps. From then on the overlap counts.
//! 4. **Succeeded.** The overlap has passed: the next CA signs. The key of the first is deleted.
//! 5. **Forgotten.** The first CA has ended, and is removed from the bundle. Nothing that it
//!    signed outlives it.
//!
//! All times are in seconds since 1970. They come from the certificates themselves, so replicas
//! that start know them too.

use std::time::Duration;

use super::managed_options::Lifetimes;

/// The part of a certificate's life after which it is renewed.
const RENEWED_AFTER: f64 = 2.0 / 3.0;
/// Replicas spread a renewal over this part of the life, so that usually one of them writes.
const RENEWAL_SPREAD: f64 = 1.0 / 30.0;
/// With this part of a certificate's life left, a CA is replaced even if the next one was not
/// published for as long as it should. But the next one has half of what was left, at least.
const UNPUBLISHED_LEFT: f64 = 1.0 / 3.0;

/// A CA of the bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CaFacts {
    /// Tells it from all others.
    pub(super) id: String,
    /// When it was made.
    pub(super) created: u64,
    /// Its last second.
    pub(super) not_after: u64,
    /// Whether the Secret has its key.
    pub(super) has_key: bool,
}

/// A serving certificate that can be used: signed by a CA of the bundle, with its key, for all
/// names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LeafFacts {
    /// When it was made.
    pub(super) created: u64,
    /// Its last second.
    pub(super) not_after: u64,
}

/// What the Secret has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct State {
    /// The CAs of the bundle.
    pub(super) cas: Vec<CaFacts>,
    /// The serving certificate, or why there is none that can be used.
    pub(super) leaf: Result<LeafFacts, &'static str>,
    /// The CA that was seen in all ConfigMaps, and since when.
    pub(super) published: Option<(String, u64)>,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing.
    Keep,
    /// Make a CA and a certificate. Nothing that clients know remains.
    Begin,
    /// Make a certificate with the CA that signs, for this reason.
    Renew(&'static str),
    /// Make the next CA, which signs nothing yet.
    Announce,
    /// Note that the next CA is published.
    Published,
    /// Make a certificate with the next CA, and delete the key of the one before.
    Succeed,
    /// Remove the CAs that have ended.
    Forget,
}

impl State {
    /// The CAs that can sign now, the oldest first: the one that signs, and the next one.
    pub(super) fn signers(&self, now: u64) -> Vec<&CaFacts> {
        let mut signers: Vec<_> = self.cas.iter().filter(|ca| ca.has_key && now < ca.not_after).collect();
        signers.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        signers
    }
}

/// Decides. `is_published`: all ConfigMaps have the bundle. `jitter` is this replica's own, from 0
/// to 1.
pub(super) fn next_step(state: &State, is_published: bool, now: u64, lifetimes: &Lifetimes, jitter: f64) -> Step {
    let signers = state.signers(now);
    let (Some(signing), next) = (signers.first(), signers.get(1..).unwrap_or_default().last()) else {
        return Step::Begin;
    };
    let left = signing.not_after - now;
    if let Some(next) = next {
        let since = state.published.as_ref().filter(|(id, at)| *id == next.id && *at <= now).map(|(_, at)| *at);
        if since.is_some_and(|at| now >= at + seconds(lifetimes.overlap)) {
            return Step::Succeed;
        }
        let is_late = (left as f64) < lifetimes.certificate.as_secs_f64() * UNPUBLISHED_LEFT;
        // One that was made a moment ago can be known to no client.
        if is_late && now.saturating_sub(next.created) >= left {
            return Step::Succeed;
        }
        if since.is_none() && is_published {
            return Step::Published;
        }
    }
    match &state.leaf {
        Err(why) => return Step::Renew(why),
        Ok(leaf) if now >= renewal(leaf, jitter) => return Step::Renew("two thirds of its life have passed"),
        Ok(_) => {}
    }
    if next.is_none() && left <= seconds(lifetimes.next_ca_before_end()) {
        return Step::Announce;
    }
    if state.cas.iter().any(|ca| ca.not_after <= now) { Step::Forget } else { Step::Keep }
}

/// When a certificate is renewed.
fn renewal(leaf: &LeafFacts, jitter: f64) -> u64 {
    let life = leaf.not_after.saturating_sub(leaf.created) as f64;
    leaf.created + (life * (RENEWED_AFTER + jitter * RENEWAL_SPREAD)) as u64
}

fn seconds(duration: Duration) -> u64 {
    duration.as_secs()
}
