//! Authentication and authorization of callers, by the configuration.

use std::{sync::Arc, time::Duration};

use kubefan_access::{
    AccessControl, AccessOptions, BoundObject, Exists, ServiceAccounts, StreamOptions, Switches, TrustedCas,
    authentication::{
        AuthenticationOptions,
        caller::Clock,
        certificate::{cluster, trusted_cas::ClientCaError},
    },
    authorization::AuthorizationOptions,
    review::QueueLimits,
};
use kubefan_fanout::Catalog;
use kubefan_informers::{CacheCatalog, Registry};
use kubefan_server::admin_access::{AdminAccess, Details};

use super::{clock::wall_clock, component::Shared, seed::seed, server_options};
use crate::config::{AuthorizationMode, CallerConfig, ClientCas, ListenAddress, ServeConfig};

/// Reviews of one kind that are being answered at a time. A connection to the apiserver takes about
/// as many.
const REVIEWS_IN_FLIGHT_MAX: usize = 100;
/// Maximum wait of a review for its turn.
const REVIEW_WAIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the CAs whose certificates name callers: the CAs of the file, or else the CAs that will
/// be read from the cluster. `None` if certificates name no callers. `clock` is the wall clock.
pub(super) fn client_cas(config: &ServeConfig, clock: Clock) -> Result<Option<Arc<TrustedCas>>, ClientCaError> {
    let ignored_extra = config.callers.ignored_extra.clone();
    match config.client_cas() {
        ClientCas::None => Ok(None),
        ClientCas::File(file) => TrustedCas::of_file(file.to_owned(), clock, ignored_extra).map(Some),
        ClientCas::Cluster => Ok(Some(TrustedCas::unread(clock, ignored_extra))),
    }
}

/// The decisions about callers, before they are built.
pub(super) struct Callers {
    /// The CAs of their certificates. `None` if certificates name no callers.
    pub(super) client_cas: Option<Arc<TrustedCas>>,
    /// Whether the modes of reads may change while kubefan runs.
    pub(super) modes_change: bool,
}

/// The decisions about callers.
pub(super) struct CallersHandle {
    /// Decides about each read.
    pub(super) access: Arc<AccessControl>,
    /// The reads that the caches answer.
    pub(super) switches: Arc<Switches>,
}

impl Callers {
    /// Starts the decisions. The caches of `registry` show whether the objects that tokens are
    /// bound to exist.
    pub(super) fn build(self, shared: Shared<'_>, registry: &Arc<Registry>) -> CallersHandle {
        let Self { client_cas, modes_change } = self;
        if let Some(cas) = client_cas.clone().filter(|cas| !cas.is_of_file()) {
            shared.spawn(cluster::follow(shared.upstream.clone(), cas));
        }
        let caches = CacheCatalog(registry.clone());
        let exists: Exists =
            Arc::new(move |object: &BoundObject| caches.exists(&object.gvr(), &object.key, &object.uid));
        let modes = shared.config.modes.modes.clone();
        let switches = if modes_change { Switches::new(modes) } else { Switches::fixed(modes) };
        let access = control(shared, client_cas, exists).with_switches(switches.clone());
        CallersHandle { access: Arc::new(access), switches }
    }
}

fn control(shared: Shared<'_>, client_cas: Option<Arc<TrustedCas>>, exists: Exists) -> AccessControl {
    let callers = &shared.config.callers;
    let upstream = shared.upstream;
    let key = seed();
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
    match shared.config.access.mode() {
        AuthorizationMode::AlwaysAllow => AccessControl::always_allow(),
        AuthorizationMode::Webhook => {
            let service_accounts = || ServiceAccounts::new(upstream.clone(), exists, shared.metrics.access());
            AccessControl::webhook(upstream, options, key, wall_clock, shared.metrics.access())
                .with_client_cas(client_cas)
                .with_service_accounts(callers.service_account_jwks.then(service_accounts))
        }
    }
}

/// Returns the clients that see the details of the admin port: every client, if every caller may
/// read everything or if only kubefan's own user reaches the port.
pub(super) fn admin_details(config: &ServeConfig) -> Details {
    let ServeConfig { access, callers, serving, .. } = config;
    let is_owners = matches!(serving.admin_listen, ListenAddress::Unix(_)) && serving.listen_mode.is_owners();
    match access.mode() {
        AuthorizationMode::Webhook if callers.admin_authorization => Details::Authorized,
        AuthorizationMode::Webhook if !is_owners => Details::Closed,
        AuthorizationMode::Webhook | AuthorizationMode::AlwaysAllow => Details::Open,
    }
}

/// Returns the access to the admin port.
pub(super) fn admin_access(config: &ServeConfig, access: &Arc<AccessControl>) -> AdminAccess {
    let guard = server_options::guard(config, &config.serving.admin_listen);
    AdminAccess::new(admin_details(config), access.clone(), guard)
}
