//! Whether the apiserver serves again after an outage: one probe for all who wait.
//!
//! After an outage every cache wants to continue at once, but none should find out by itself when
//! that is possible: with a backoff of its own each would be late by up to a minute, and without
//! one they would be a load on an apiserver that is starting. So a caller that cannot connect waits
//! here. The first one sends a probe a second, and its success releases all of them.
//!
//! The probe is `GET /readyz`: kube-apiserver allows it to every user, it costs one small answer,
//! and through proxies and load balancers it takes the way of all other requests. A TCP connection
//! would be cheaper, but it says little: a load balancer accepts it while no apiserver is up, and
//! an apiserver accepts it seconds before it has read its authorization rules. While `/readyz`
//! answers 429 or 5xx the apiserver is starting. That is believed for a limited time only, because
//! one failed check makes an apiserver unready that still serves. Any other answer means that
//! requests are worth a try, and that their own failures say more than the probe's.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep_until, timeout};

use crate::upstream::{
    client::{ERROR_BODY_BYTES_MAX, Upstream, Verb},
    error::UpstreamError,
};

/// The time between the starts of two probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// The time limit of a probe, with its connection and TLS handshake.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an apiserver that is not ready is waited for.
const UNREADY_MAX: Duration = Duration::from_secs(15);
/// How long after an outage the apiserver counts as starting.
const STARTING: Duration = Duration::from_secs(30);

/// What is known about the availability of an apiserver.
#[derive(Default)]
pub(in crate::upstream) struct Availability {
    /// Locked while a caller probes for all.
    probes: tokio::sync::Mutex<Probes>,
    /// When the last outage ended.
    returned: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct Probes {
    /// The earliest start of the next probe.
    not_before: Option<Instant>,
    /// When the last successful probe was sent.
    succeeded: Option<Instant>,
    /// Since when the apiserver answers that it is not ready.
    unready_since: Option<Instant>,
    /// Whether the last probe failed.
    failed: bool,
}

enum ProbeResult {
    Available,
    Unready,
    Away,
}

impl Availability {
    fn returned(&self) -> MutexGuard<'_, Option<Instant>> {
        self.returned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Upstream {
    /// Waits until the apiserver has answered a probe that was sent after this call. All callers
    /// share the probes, at most one a second.
    ///
    /// Cancel-safe: another caller continues the probes.
    pub async fn until_available(&self) {
        let asked = Instant::now();
        let mut probes = self.availability().probes.lock().await;
        while probes.succeeded.is_none_or(|at| at < asked) {
            if let Some(not_before) = probes.not_before {
                sleep_until(not_before).await;
            }
            let sent = Instant::now();
            probes.not_before = Some(sent + PROBE_INTERVAL);
            match self.probe().await {
                ProbeResult::Available => {
                    probes.unready_since = None;
                    probes.succeeded = Some(sent);
                    if std::mem::take(&mut probes.failed) {
                        *self.availability().returned() = Some(Instant::now());
                        tracing::info!(server = self.server(), "upstream is available again");
                    }
                }
                ProbeResult::Unready => {
                    probes.failed = true;
                    let since = *probes.unready_since.get_or_insert(sent);
                    probes.succeeded = (since.elapsed() >= UNREADY_MAX).then_some(sent);
                }
                ProbeResult::Away => {
                    probes.failed = true;
                    probes.unready_since = None;
                }
            }
        }
    }

    /// Whether an outage has ended a moment ago, so that the apiserver may still be starting. Then
    /// long delays between retries would outlast its start.
    pub fn is_starting(&self) -> bool {
        self.availability().returned().is_some_and(|at| at.elapsed() < STARTING)
    }

    async fn probe(&self) -> ProbeResult {
        let answer = self.get_limited(Verb::Get, "/readyz", "*/*", ERROR_BODY_BYTES_MAX);
        match timeout(PROBE_TIMEOUT, answer).await {
            Err(_) | Ok(Err(UpstreamError::Unreachable { .. } | UpstreamError::Reset { .. })) => ProbeResult::Away,
            // A gateway may answer 504 for an apiserver that is down.
            Ok(Err(error)) if error.is_away() || error.is_busy() => ProbeResult::Unready,
            Ok(Ok(_) | Err(_)) => ProbeResult::Available,
        }
    }
}
