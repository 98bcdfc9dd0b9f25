//! Who may read what, by the configuration.

use std::{sync::Arc, time::Duration};

use kubefan_access::{
    AccessControl, AccessOptions, Exists, ServiceAccounts, StreamOptions, Switches, TrustedCas,
    authentication::{
        AuthenticationOptions, authenticator::KEY_BYTES, caller::Clock, certificate::trusted_cas::ClientCaError,
    },
    authorization::AuthorizationOptions,
    review::QueueLimits,
};
use kubefan_server::admin_access::{AdminAccess, Details};
use kubefan_telemetry::metrics::Metrics;
use kubefan_upstream::Upstream;

use super::server_options;
use crate::config::{AuthorizationMode, CallerConfig, ListenAddress, ServeConfig};

/// Reviews of one kind that are being answered at a time. A connection to the apiserver takes about
/// as many.
const REVIEWS_IN_FLIGHT_MAX: usize = 100;
/// How long a review waits for its turn.
const REVIEW_WAIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The CAs whose certificates name callers: those of the file, or else those that will be read from
/// the cluster. `None` if certificates name no callers. `clock` is the wall clock.
pub(super) fn client_cas(config: &ServeConfig, clock: Clock) -> Result<Option<Arc<TrustedCas>>, ClientCaError> {
    let CallerConfig { mode, client_ca_file, skip_lookup, ignored_extra, .. } = &config.callers;
    if *mode == AuthorizationMode::AlwaysAllow || config.serving.tls.is_none() {
        return Ok(None);
    }
    let ignored_extra = ignored_extra.clone();
    match client_ca_file {
        Some(file) => TrustedCas::of_file(file.clone(), clock, ignored_extra).map(Some),
        None if *skip_lookup => Ok(None),
        None => Ok(Some(TrustedCas::unread(clock, ignored_extra))),
    }
}

/// Decides who may read what. `exists` looks up what tokens are bound to, `clock` is the wall
/// clock, and `key` must be
/// random. The caches answer what `switches` leave to them.
pub(super) fn control(
    callers: &CallerConfig,
    upstream: &Upstream,
    client_cas: Option<Arc<TrustedCas>>,
    exists: Exists,
    (clock, key, switches): (Clock, [u8; KEY_BYTES], Arc<Switches>),
    metrics: &Metrics,
) -> Arc<AccessControl> {
    let queue = QueueLimits {
        per_second: callers.reviews_per_second,
        burst: callers.reviews_per_second.saturating_mul(2),
        in_flight_max: REVIEWS_IN_FLIGHT_MAX,
        waiting_max: callers.reviews_waiting_max,
        wait_timeout: REVIEW_WAIT_TIMEOUT,
    };
    let authentication = AuthenticationOptions {
        api_audiences: callers.api_audiences.clone(),
        token_ttl: callers.token_ttl,
        outage_grace: callers.outage_grace,
        anonymous: callers.anonymous,
        ignored_extra: callers.ignored_extra.clone(),
        queue,
    };
    let authorization = AuthorizationOptions {
        authorized_ttl: callers.authorized_ttl,
        unauthorized_ttl: callers.unauthorized_ttl,
        outage_grace: callers.outage_grace,
        always_allow_groups: callers.always_allow_groups.clone(),
        broad_first: callers.broad_first,
        queue,
    };
    let CallerConfig { reauthorize_interval, stream_age_max: age_max, .. } = *callers;
    let streams = StreamOptions { reauthorize_interval, age_max };
    let options = AccessOptions { authentication, authorization, streams };
    let access = match callers.mode {
        AuthorizationMode::AlwaysAllow => AccessControl::always_allow(),
        AuthorizationMode::Webhook => {
            let service_accounts = || ServiceAccounts::new(upstream.clone(), exists, metrics.access());
            AccessControl::webhook(upstream, options, key, clock, metrics.access())
                .with_client_cas(client_cas)
                .with_service_accounts(callers.service_account_jwks.then(service_accounts))
        }
    };
    Arc::new(access.with_switches(switches))
}

/// Who sees the details that the admin port shows: every client where every caller may read
/// everything, and where only kubefan's own user reaches the port.
pub(super) fn admin_details(config: &ServeConfig) -> Details {
    let ServeConfig { callers, serving, .. } = config;
    let is_owners = matches!(serving.admin_listen, ListenAddress::Unix(_)) && serving.listen_mode.is_owners();
    match callers.mode {
        AuthorizationMode::Webhook if callers.admin_authorization => Details::Authorized,
        AuthorizationMode::Webhook if !is_owners => Details::Closed,
        AuthorizationMode::Webhook | AuthorizationMode::AlwaysAllow => Details::Open,
    }
}

/// Who sees and changes what over the admin port.
pub(super) fn admin_access(config: &ServeConfig, access: &Arc<AccessControl>) -> AdminAccess {
    let guard = server_options::guard(config, &config.serving.admin_listen);
    AdminAccess::new(admin_details(config), access.clone(), guard)
}
