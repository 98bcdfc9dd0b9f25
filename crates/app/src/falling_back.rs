//! The apiserver in place of the kubefan at `--upstream` while that is away, by the configuration.
//!
//! If `--kubeconfig` leads to the apiserver, only lists and watches change their server. If it
//! leads to the kubefan, reviews, discovery and forwarded requests need another server as well,
//! and `--upstream-fallback-kubeconfig` names it.

use kubefan_client::FallbackBudget;
use kubefan_telemetry::metrics::Metrics;
use kubefan_upstream::{
    Source, Upstream,
    client::{ConnectionLimits, UpstreamObserver, UpstreamOptions},
    direct_apiserver::DirectApiserver,
    fallback::{Fallback, FallbackOptions},
    passthrough::{Passthrough, PassthroughOptions, check_reviewer},
};
use rand::{SeedableRng, rngs::StdRng};

use super::{failure::AppError, seed::seed};
use crate::config::{AuthorizationMode, ServeConfig, UpstreamFallback};

/// The clients of all servers, before they are observed.
pub(super) struct Servers {
    /// The server of `--kubeconfig`.
    pub(super) upstream: Upstream,
    /// The server of lists and watches.
    pub(super) source: Source,
    /// The connections of forwarded requests.
    pub(super) passthrough: Option<Passthrough>,
    /// The apiserver, if it is another server than that of `--kubeconfig`.
    pub(super) direct: Option<Direct>,
}

/// The clients of the apiserver behind a kubefan.
pub(super) struct Direct {
    upstream: Upstream,
    passthrough: Option<Passthrough>,
}

impl Direct {
    /// Reads the settings of `--upstream-fallback-kubeconfig`. `None` if there are none, or nothing
    /// ever falls back. `upstream` is the client of the kubefan.
    pub(super) async fn from_config(
        config: &ServeConfig,
        upstream: &Upstream,
        passthrough: Option<&PassthroughOptions>,
    ) -> Result<Option<Self>, AppError> {
        let Some(settings) = config.upstream.fallback_settings.clone().filter(|_| may_fall_back(config)) else {
            return Ok(None);
        };
        if config.access.mode() == AuthorizationMode::Webhook {
            check_reviewer(&settings).await?;
        }
        let connection = ConnectionLimits::APISERVER;
        let request_timeout = config.upstream.request_timeout;
        let options = UpstreamOptions { request_timeout, connection, ..UpstreamOptions::default() };
        let client = Upstream::from_settings(settings.clone(), options).await?.of_cluster_of(upstream);
        let passthrough = match passthrough.cloned() {
            Some(options) => {
                Some(Passthrough::from_settings(settings, PassthroughOptions { connection, ..options }).await?)
            }
            None => None,
        };
        Ok(Some(Self { upstream: client, passthrough }))
    }
}

impl Servers {
    /// Counts the requests of all clients.
    pub(super) fn observed(self, observer: &UpstreamObserver) -> Self {
        let direct = self.direct.map(|direct| Direct {
            upstream: direct.upstream.with_observer(observer.clone()),
            passthrough: direct.passthrough,
        });
        Self {
            upstream: self.upstream.with_observer(observer.clone()),
            source: self.source.with_observer(observer.clone()),
            passthrough: self.passthrough,
            direct,
        }
    }

    /// Lets the clients of the kubefan fall back. Returns a client that still reaches only the
    /// kubefan, if `--kubeconfig` leads to it.
    pub(super) fn with_fallback(self, config: &ServeConfig, metrics: &Metrics) -> (Self, Option<Upstream>) {
        if !may_fall_back(config) {
            return (self, None);
        }
        let Self { upstream, source, passthrough, direct } = self;
        let budget = FallbackBudget {
            clients: config.upstream.fallback_clients,
            starts_per_second: f64::from(config.upstream.fallback_rate),
        };
        let fallback = |apiserver: &Upstream| {
            Fallback::new(FallbackOptions {
                apiserver: apiserver.server().to_owned(),
                kubefan: source.name().to_owned(),
                budget,
                metrics: metrics.fallback().clone(),
                random: StdRng::seed_from_u64(seed()),
            })
        };
        let Some(Direct { upstream: direct, passthrough: direct_passthrough }) = direct else {
            let direct = DirectApiserver::new(fallback(&upstream), upstream.clone());
            let source = source.with_fallback(direct, upstream.clone());
            return (Self { upstream, source, passthrough, direct: None }, None);
        };
        let fallback = fallback(&direct);
        let kubefan = upstream.clone();
        let upstream = upstream.falling_back(&fallback, direct.clone());
        let direct = DirectApiserver::new(fallback, direct);
        let passthrough = match (passthrough, direct_passthrough) {
            (Some(passthrough), Some(connections)) => Some(passthrough.with_fallback(direct.clone(), connections)),
            (passthrough, _) => passthrough,
        };
        let source = source.with_fallback(direct, upstream.clone());
        (Self { upstream, source, passthrough, direct: None }, Some(kubefan))
    }
}

fn may_fall_back(config: &ServeConfig) -> bool {
    config.upstream.source.is_some() && config.upstream.fallback == UpstreamFallback::Paced
}
