//! Decides on the next step for the managed certificate: a function of the Secret's content and of
//! the time. The steps in the life of a CA, in their order:
//!
//! 1. **Create the CA.** It signs, and its certificates are renewed, until the fourth step.
//! 2. **Create the next CA**, long before the end of the first. It signs nothing.
//! 3. **Record the publication**: the next CA is in all ConfigMaps. Then the overlap begins.
//! 4. **Switch to the next CA** when the overlap has passed. The key of the first is deleted.
//! 5. **Remove the expired CA** from the bundle. Nothing that it signed outlives it.
//!
//! All times are in seconds since 1970. They come from the certificates themselves, so replicas
//! that start know them too.

use std::{borrow::Borrow, time::Duration};

use super::managed_options::Lifetimes;

/// The part of a certificate's life after which it is renewed.
const RENEWED_AFTER: f64 = 2.0 / 3.0;
/// Replicas spread a renewal over this part of the life, so that usually one of them writes.
const RENEWAL_SPREAD: f64 = 1.0 / 30.0;
/// With this part of a certificate's life left, a CA is replaced even if the next one was not
/// published for the whole overlap. But the next one has half of the rest, at least.
const UNPUBLISHED_LEFT: f64 = 1.0 / 3.0;

/// A CA of the bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CaFacts {
    /// Tells it from all others.
    pub(super) id: String,
    /// Time at which the CA was made.
    pub(super) created: u64,
    /// Last second of the CA's validity.
    pub(super) not_after: u64,
    /// Whether the Secret has its key.
    pub(super) has_key: bool,
}

/// A serving certificate that can be used: signed by a CA of the bundle, with its key, for all
/// names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LeafFacts {
    /// Time at which the certificate was made.
    pub(super) created: u64,
    /// Last second of the certificate's validity.
    pub(super) not_after: u64,
}

/// Content of the Secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SecretContents {
    /// The CAs of the bundle.
    pub(super) cas: Vec<CaFacts>,
    /// The serving certificate, or why there is none that can be used.
    pub(super) leaf: Result<LeafFacts, &'static str>,
    /// The CA that was seen in all ConfigMaps, and the time since then.
    pub(super) published: Option<(String, u64)>,
}

/// The next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RenewalAction {
    /// No action.
    Keep,
    /// Make a CA and a certificate. Nothing that clients know remains.
    CreateCa,
    /// Make a certificate with the CA that signs, for this reason.
    RenewCertificate(&'static str),
    /// Make the next CA, which signs nothing yet.
    CreateNextCa,
    /// Note that the next CA is published.
    RecordPublication,
    /// Make a certificate with the next CA, and delete the key of the one before.
    SwitchToNextCa,
    /// Remove the CAs that have ended.
    RemoveExpiredCas,
}

/// The CA that signs, and the next one, if there is one: the oldest and the newest of those that
/// have a key and have not ended.
pub(super) fn signing_and_next<T: Borrow<CaFacts>>(cas: &[T], now: u64) -> Option<(&T, Option<&T>)> {
    let facts = cas.iter().map(|ca| (ca.borrow(), ca));
    let mut can_sign: Vec<(&CaFacts, &T)> = facts.filter(|(facts, _)| facts.has_key && now < facts.not_after).collect();
    can_sign.sort_by_key(|(facts, _)| (facts.created, &facts.id));
    let ((_, signing), later) = can_sign.split_first()?;
    Some((*signing, later.last().map(|(_, next)| *next)))
}

/// Decides on the next step. `is_published`: all ConfigMaps have the bundle. `jitter` is this
/// replica's own, from 0 to 1.
pub(super) fn next_step(
    state: &SecretContents,
    is_published: bool,
    now: u64,
    lifetimes: &Lifetimes,
    jitter: f64,
) -> RenewalAction {
    let Some((signing, next)) = signing_and_next(&state.cas, now) else { return RenewalAction::CreateCa };
    let left = signing.not_after - now;
    if let Some(next) = next {
        let since = state.published.as_ref().filter(|(id, at)| *id == next.id && *at <= now).map(|(_, at)| *at);
        if since.is_some_and(|at| now >= at + seconds(lifetimes.overlap)) {
            return RenewalAction::SwitchToNextCa;
        }
        let is_late = (left as f64) < lifetimes.certificate.as_secs_f64() * UNPUBLISHED_LEFT;
        // No client may know a CA yet that was made a moment ago.
        if is_late && now.saturating_sub(next.created) >= left {
            return RenewalAction::SwitchToNextCa;
        }
        if since.is_none() && is_published {
            return RenewalAction::RecordPublication;
        }
    }
    match &state.leaf {
        Err(why) => return RenewalAction::RenewCertificate(why),
        Ok(leaf) if now >= renewal(leaf, jitter) => {
            return RenewalAction::RenewCertificate("two thirds of its life have passed");
        }
        Ok(_) => {}
    }
    if next.is_none() && left <= seconds(lifetimes.next_ca_before_end()) {
        return RenewalAction::CreateNextCa;
    }
    if state.cas.iter().any(|ca| ca.not_after <= now) { RenewalAction::RemoveExpiredCas } else { RenewalAction::Keep }
}

/// Time at which a certificate is renewed.
fn renewal(leaf: &LeafFacts, jitter: f64) -> u64 {
    let life = leaf.not_after.saturating_sub(leaf.created) as f64;
    leaf.created + (life * (RENEWED_AFTER + jitter * RENEWAL_SPREAD)) as u64
}

fn seconds(duration: Duration) -> u64 {
    duration.as_secs()
}
