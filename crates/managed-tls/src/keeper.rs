//! Keeps the managed certificate: looks at the Secret, takes over its content, publishes the CA,
//! writes the copies, and does the next step. One task for the life of the process.
//!
//! A failure leaves the certificate in use unchanged. Its reason is logged once, counted, and shown
//! by readiness as long as there is no certificate at all.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use kubefan_common::backoff::{Backoff, BackoffOptions};
use kubefan_telemetry::metrics::ManagedTlsMetrics;
use kubefan_upstream::Upstream;
use rand::{RngExt, rngs::StdRng};
use serde_json::Value;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::{
    in_use::{Held, HeldProof, ManagedTls},
    issue::IssueError,
    managed_options::{ManagedOptions, Stored},
    material::{Material, Part},
    renewal_plan::{RenewalAction, next_step},
    stored_objects::{self, LookError},
};

/// A replica whose clock differs more from the apiserver's writes nothing: it would see
/// certificates end that are good. Certificates begin an hour before they are made.
const SKEW_MAX: Duration = Duration::from_secs(20 * 60);
/// Steps in one look. A renewal needs one, a start two.
const STEPS_MAX: usize = 4;
/// Conflicts in one look. Each means that another replica has written.
const CONFLICTS_MAX: usize = 8;
/// The longest wait of a replica after a conflict.
const CONFLICT_DELAY_MAX: Duration = Duration::from_millis(200);
/// Number of looks between two comparisons of the ConfigMaps and copies. They are also compared if
/// the certificate or the bundle has changed, or one of them does not have it.
const LOOKS_PER_COMPARISON: u32 = 10;
/// The life of the certificate for peers, which is never stored.
const PEER_LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// The name of a failure to make a certificate.
const ISSUE: &str = "issue";
/// The name of a failure of the clock.
const CLOCK: &str = "clock";

/// The wall clock.
type Clock = fn() -> SystemTime;

/// The task that keeps the certificate.
pub struct Keeper {
    upstream: Upstream,
    options: ManagedOptions,
    tls: Arc<ManagedTls>,
    clock: Clock,
    random: StdRng,
    metrics: ManagedTlsMetrics,
    /// Position of this replica in the spread of renewals.
    jitter: f64,
    material: Option<Material>,
    /// Content of all ConfigMaps and copies at the last comparison, and the looks since.
    published: Option<([Part; 2], u32)>,
    /// The last failure of each object.
    failed: BTreeMap<String, String>,
}

impl Keeper {
    /// A task that fills `tls`. `clock` is the wall clock.
    pub fn new(
        upstream: Upstream,
        options: ManagedOptions,
        tls: Arc<ManagedTls>,
        clock: Clock,
        mut random: StdRng,
        metrics: ManagedTlsMetrics,
    ) -> Self {
        let jitter = random.random();
        let material = None;
        let published = None;
        let failed = BTreeMap::new();
        Self { upstream, options, tls, clock, random, metrics, jitter, material, published, failed }
    }

    /// Keeps the certificate, without end.
    pub async fn run(mut self) {
        let max = self.options.lifetimes.look_interval();
        let defaults = BackoffOptions::default();
        let initial = defaults.initial.min(max);
        let mut backoff = Backoff::new(BackoffOptions { initial, max, ..defaults });
        loop {
            let looked = self.look().await;
            self.prove_to_peers();
            let delay = match looked {
                Ok(()) => max.mul_f64(self.random.random_range(0.75..1.25)),
                Err(error) => backoff.next_delay(Instant::now(), error.error.retry_after(), &mut self.random),
            };
            let asked = self.tls.clone();
            tokio::select! {
                () = sleep(delay) => {}
                () = asked.asked.notified() => {}
            }
        }
    }

    /// Looks, and does all steps that are due.
    async fn look(&mut self) -> Result<(), LookError> {
        let mut steps = 0;
        let mut conflicts = 0;
        while steps < STEPS_MAX && conflicts < CONFLICTS_MAX {
            let secret = self.options.secret.clone();
            let found = stored_objects::get(&self.upstream, Stored::Secret, &secret).await;
            let found = self.noted("secret read", found)?;
            let now = self.now();
            let material = Material::read(&found.object, &self.options.dns_names, now);
            self.take_over(&material, now);
            let is_published = match material.certified() {
                Some(_) => self.publish(&material).await,
                None => false,
            };
            let step = next_step(&material.state, is_published, now, &self.options.lifetimes, self.jitter);
            if step == RenewalAction::Keep {
                self.works(ISSUE);
                return Ok(());
            }
            if let Some(skew) = found.date.and_then(|date| clock_skew(date, (self.clock)())) {
                self.has_a_wrong_clock(skew);
                return Ok(());
            }
            self.works(CLOCK);
            let mut object = found.object;
            if let Err(error) = material.apply(step, &mut object, &self.options, now) {
                self.not_made(&error);
                return Ok(());
            }
            self.works(ISSUE);
            if self.write(step, &object).await? {
                steps += 1;
            } else {
                conflicts += 1;
                sleep(CONFLICT_DELAY_MAX.mul_f64(self.random.random())).await;
            }
        }
        Ok(())
    }

    /// Writes the result of a step. False if another replica has written meanwhile.
    async fn write(&mut self, step: RenewalAction, object: &Value) -> Result<bool, LookError> {
        let secret = self.options.secret.clone();
        let written = stored_objects::replace(&self.upstream, Stored::Secret, &secret, object).await;
        let written = self.noted("secret update", written)?;
        if written {
            match step {
                RenewalAction::CreateCa => {
                    info!(%secret, "made a CA and a certificate: the Secret had no CA that can be used")
                }
                RenewalAction::RenewCertificate(why) => info!(%secret, why, "made a new certificate"),
                RenewalAction::CreateNextCa => {
                    info!(%secret, "made the next CA, which is published before it signs anything")
                }
                RenewalAction::RecordPublication => info!(%secret, "the next CA is in all ConfigMaps"),
                RenewalAction::SwitchToNextCa => {
                    info!(%secret, "the next CA signs from now on; made a new certificate")
                }
                RenewalAction::RemoveExpiredCas => info!(%secret, "removed a CA that has ended"),
                RenewalAction::Keep => {}
            }
        }
        Ok(written)
    }

    /// Uses the content of the Secret, if possible.
    fn take_over(&mut self, material: &Material, now: u64) {
        *self.tls.status() = material.describe(now);
        let Some((certified, facts)) = material.certified() else { return };
        let before = self.tls.held();
        let is_same = before.as_ref().is_some_and(|held| held.certified.cert == certified.cert);
        // Also whether their keys are there.
        let has_same_cas = self.material.as_ref().is_some_and(|last| last.state.cas == material.state.cas);
        self.metrics.certificate_expiration.set(facts.not_after as f64);
        self.metrics.ca_expiration.set(material.signing_not_after(now).map_or(f64::INFINITY, |end| end as f64));
        if is_same && has_same_cas {
            return;
        }
        self.material = Some(material.clone());
        let peer = self.peer_proof(material, now).or_else(|| before?.peer);
        if !is_same {
            info!(secret = %self.options.secret, "the certificate of the data port was read from its Secret");
        }
        self.tls.hold(Held { certified, peer });
    }

    /// Renews the proof for peers from the CA's key in memory, so that an outage does not end it.
    fn prove_to_peers(&self) {
        let now = self.now();
        let (Some(held), Some(material)) = (self.tls.held(), &self.material) else { return };
        if held.peer.as_ref().is_some_and(|peer| now < peer.renewed_at) {
            return;
        }
        if let Some(peer) = self.peer_proof(material, now) {
            self.tls.hold(Held { peer: Some(peer), ..held });
        }
    }

    fn peer_proof(&self, material: &Material, now: u64) -> Option<HeldProof> {
        let made = HeldProof::make(material, now, now + PEER_LIFETIME.as_secs())?;
        made.inspect_err(|error| warn!(%error, "this replica has no proof for its peers")).ok()
    }

    /// Writes the ConfigMaps and copies that do not have their part. True if all ConfigMaps have it
    /// that can, and one of them at least. Copies do not count: clients read no CA there.
    async fn publish(&mut self, material: &Material) -> bool {
        let parts = [Stored::ConfigMap, Stored::Copy].map(|stored| material.part(stored));
        if let Some((last, looks)) = &mut self.published
            && *last == parts
            && *looks < LOOKS_PER_COMPARISON
        {
            *looks += 1;
            return true;
        }
        self.published = None;
        let objects: Vec<_> = self.options.published_in().map(|(stored, name)| (stored, name.clone())).collect();
        let mut maps = 0;
        let mut have_all = true;
        let mut is_open = false;
        for (stored, name) in &objects {
            let is_map = *stored == Stored::ConfigMap;
            let published = stored_objects::publish(&self.upstream, *stored, name, &material.part(*stored)).await;
            let published = self.noted(&format!("{} {name}", stored.kind()), published);
            have_all &= matches!(published, Ok(true));
            match published {
                Ok(true) if is_map => maps += 1,
                Ok(false) if is_map => is_open = true,
                // A lasting failure does not hold up the others: no client reads the CA there.
                Err(error) if is_map => is_open |= !error.is_lasting(),
                _ => {}
            }
        }
        if have_all {
            self.published = Some((parts, 0));
        }
        !is_open && (maps > 0 || self.options.ca_config_maps.is_empty())
    }

    /// Counts a failure, and logs it if it is not the last one of this object.
    fn noted<T>(&mut self, what: &str, result: Result<T, LookError>) -> Result<T, LookError> {
        match &result {
            Ok(_) => self.works(what),
            Err(error) => {
                self.metrics.failed(error.is_write, error.stored.as_str());
                let text = error.to_string();
                if error.stored == Stored::Secret {
                    *self.tls.status() = Err(text.clone());
                }
                self.fails(what, text);
            }
        }
        result
    }

    /// A certificate cannot be made. A retry would not change that, so nothing is written.
    fn not_made(&mut self, error: &IssueError) {
        self.metrics.failed(true, Stored::Secret.as_str());
        *self.tls.status() = Err(error.to_string());
        self.fails(ISSUE, error.to_string());
    }

    fn fails(&mut self, what: &str, text: String) {
        if self.failed.get(what) != Some(&text) {
            warn!("the managed certificate: {text}");
            self.failed.insert(what.to_owned(), text);
        }
    }

    fn works(&mut self, what: &str) {
        if self.failed.remove(what).is_some() {
            info!(what, "the managed certificate: it works again");
        }
    }

    fn has_a_wrong_clock(&mut self, skew: Duration) {
        let seconds = skew.as_secs();
        // At every look, because the look has set the status from the Secret.
        *self.tls.status() =
            Err(format!("the clock differs from the apiserver's by {seconds} s, so it is not renewed here"));
        // Without the seconds, which differ at each look.
        self.fails(CLOCK, "it is not renewed here, because the clock differs from the apiserver's".to_owned());
    }

    fn now(&self) -> u64 {
        (self.clock)().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
    }
}

/// Returns the difference between the clock and the apiserver's, if it is more than allowed.
fn clock_skew(date: SystemTime, now: SystemTime) -> Option<Duration> {
    let skew = now.duration_since(date).unwrap_or_else(|error| error.duration());
    (skew > SKEW_MAX).then_some(skew)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_may_differ_by_twenty_minutes_in_both_directions() {
        let at = |minutes: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(minutes * 60);
        let skew = |minutes: u64| clock_skew(at(100), at(minutes)).map(|skew| skew.as_secs() / 60);
        assert_eq!([79, 80, 100, 120, 121].map(skew), [Some(21), None, None, None, Some(21)]);
    }
}
