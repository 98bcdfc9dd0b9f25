//! Probes whether the apiserver serves again after an outage (see [`super::availability`]).

use std::time::Duration;

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
/// How long an apiserver that denies the probe is waited for. It denies everything until it has
/// read its authorization rules, half a second after its start.
const DENIED_MAX: Duration = Duration::from_secs(3);

enum ProbeResult {
    Available,
    /// It is there, and is believed for so long that it cannot serve.
    Unready(Duration),
    Away,
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
                        self.availability().outage_ended();
                        tracing::info!(server = self.server(), "upstream is available again");
                    }
                }
                ProbeResult::Unready(most) => {
                    probes.failed = true;
                    let since = *probes.unready_since.get_or_insert(sent);
                    probes.succeeded = (since.elapsed() >= most).then_some(sent);
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
        self.availability().is_starting()
    }

    async fn probe(&self) -> ProbeResult {
        let answer = self.get_limited(Verb::Get, "/readyz", "*/*", ERROR_BODY_BYTES_MAX);
        match timeout(PROBE_TIMEOUT, answer).await {
            Err(_) | Ok(Err(UpstreamError::Unreachable { .. } | UpstreamError::Reset { .. })) => ProbeResult::Away,
            // A gateway may answer 504 for an apiserver that is down.
            Ok(Err(error)) if error.is_passing() => ProbeResult::Unready(UNREADY_MAX),
            Ok(Err(UpstreamError::Forbidden { .. })) => ProbeResult::Unready(DENIED_MAX),
            Ok(Ok(_) | Err(_)) => ProbeResult::Available,
        }
    }
}
