//! Probes whether the apiserver serves again after an outage (see [`super::availability`]).

use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout};

use crate::{
    client::{ERROR_BODY_BYTES_MAX, Upstream, Verb, availability::Health},
    error::UpstreamError,
};

/// The time between the starts of two probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// The time limit of a probe, with its connection and TLS handshake.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// Probes that are further apart are not about the same outage.
const PROBES_APART_MAX: Duration = Duration::from_secs(10);
/// Time to wait for an apiserver that is not ready.
const UNREADY_MAX: Duration = Duration::from_secs(15);
/// Time to wait for an apiserver that denies the probe. It denies everything until it has read its
/// authorization rules, half a second after its start.
const DENIED_MAX: Duration = Duration::from_secs(3);

/// The apiserver's answer to one probe.
enum ProbeResult {
    Available,
    /// Reachable but not ready; trusted for this long. Then it has this health.
    Unready(Duration, Health),
    Away,
}

impl Upstream {
    /// Waits until the apiserver has answered a probe that was sent after this call. All callers
    /// share the probes, at most one a second.
    ///
    /// Cancel-safe: another caller continues the probes.
    pub async fn until_available(&self) {
        self.until_probed(|health| health != Health::Down).await;
    }

    /// As [`Self::until_available`], but an apiserver that says that it is not ready is not
    /// available, however long it has said so.
    ///
    /// Cancel-safe.
    pub async fn until_serving(&self) {
        self.until_probed(|health| matches!(health, Health::Serving | Health::Denied)).await;
    }

    /// Waits for the end of an outage: until the apiserver serves a probe after a probe that it did
    /// not serve. If it serves the first, there is no outage, and this never returns. It shares the
    /// probes too.
    ///
    /// Cancel-safe.
    pub async fn until_outage_ends(&self) {
        let asked = Instant::now();
        self.until_probed(|health| health == Health::Serving).await;
        if self.availability().ended_at().is_none_or(|at| at < asked) {
            std::future::pending().await
        }
    }

    /// Probes from now on until a result `is_enough`.
    async fn until_probed(&self, mut is_enough: impl FnMut(Health) -> bool) {
        let mut not_before = Instant::now();
        loop {
            let (sent, health) = self.probe_shared(not_before).await;
            if is_enough(health) {
                return;
            }
            not_before = sent + Duration::from_nanos(1);
        }
    }

    /// The result of a probe that was sent at `not_before` or later, and when it was sent.
    async fn probe_shared(&self, not_before: Instant) -> (Instant, Health) {
        let mut probes = self.availability().probes.lock().await;
        if let Some((sent, health)) = probes.last
            && sent >= not_before
        {
            return (sent, health);
        }
        if let Some(next_at) = probes.next_at {
            sleep_until(next_at).await;
        }
        let sent = Instant::now();
        probes.next_at = Some(sent + PROBE_INTERVAL);
        // A caller may stop waiting in the middle of an outage. Probes after a pause are about
        // another one.
        if probes.last.is_some_and(|(last, _)| sent > last + PROBES_APART_MAX) {
            probes.failed = false;
            probes.unready_since = None;
        }
        let health = match self.probe().await {
            ProbeResult::Available => {
                probes.unready_since = None;
                if std::mem::take(&mut probes.failed) {
                    self.availability().outage_ended();
                    tracing::info!(server = self.server(), "upstream is available again");
                }
                Health::Serving
            }
            ProbeResult::Unready(most, then) => {
                probes.failed = true;
                let since = *probes.unready_since.get_or_insert(sent);
                if since.elapsed() >= most { then } else { Health::Down }
            }
            ProbeResult::Away => {
                probes.failed = true;
                probes.unready_since = None;
                Health::Down
            }
        };
        probes.last = Some((sent, health));
        (sent, health)
    }

    /// Whether an outage has ended a moment ago, so that the apiserver may still be starting. Then
    /// long delays between retries would outlast its start.
    pub fn is_starting(&self) -> bool {
        self.availability().is_starting()
    }

    async fn probe(&self) -> ProbeResult {
        let answer = self.get_limited(Verb::Get, "/readyz", "*/*", ERROR_BODY_BYTES_MAX);
        match timeout(PROBE_TIMEOUT, answer).await {
            Err(_) | Ok(Err(UpstreamError::Unreachable { .. } | UpstreamError::Reset { .. })) => ProbeResult::Away,
            // A gateway may answer 504 for an apiserver that is down.
            Ok(Err(error)) if error.is_passing() => ProbeResult::Unready(UNREADY_MAX, Health::Unknown),
            Ok(Err(UpstreamError::Forbidden { .. })) => ProbeResult::Unready(DENIED_MAX, Health::Denied),
            Ok(Ok(_) | Err(_)) => ProbeResult::Available,
        }
    }
}
