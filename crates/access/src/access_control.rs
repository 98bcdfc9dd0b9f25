//! Authentication and authorization behind one type, for the servers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use kubefan_admission::Holder;
use kubefan_common::spread::spread;
use kubefan_telemetry::metrics::AccessMetrics;
use kubefan_upstream::Upstream;
use rustls::pki_types::CertificateDer;

use super::{
    authentication::{
        AuthenticationOptions, Authenticator,
        authenticator::KEY_BYTES,
        caller::{Caller, Clock},
        certificate::{ClientCertificate, TrustedCas},
        presented::Presented,
        service_account::ServiceAccounts,
    },
    authorization::{
        AuthorizationOptions, Authorized, Authorizer, authorizer::WebhookAuthorizer, explanation::Explanation,
        non_resource::NonResource, read::Read,
    },
    denial::Denial,
    modes::Modes,
    switches::Switches,
    user::Identity,
};

/// Options of both steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessOptions {
    /// Options of authentication.
    pub authentication: AuthenticationOptions,
    /// Options of authorization.
    pub authorization: AuthorizationOptions,
    /// Options of the reviews of their streams.
    pub streams: StreamOptions,
}

/// Options of the reviews of a right while its stream lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamOptions {
    /// Interval of the reviews of its caller's right.
    pub reauthorize_interval: Duration,
    /// After this time its caller must authenticate itself again; `None` for no limit.
    pub age_max: Option<Duration>,
}

/// Authenticates and authorizes callers.
pub struct AccessControl {
    /// `None` if callers are not distinguished.
    authenticator: Option<Authenticator>,
    /// `None` if client certificates name no callers.
    cas: Option<Arc<TrustedCas>>,
    authorizer: Authorizer,
    /// `None` if callers are not distinguished.
    streams: Option<StreamOptions>,
    /// The number of streams so far, which spreads their reviews.
    started: AtomicU32,
    switches: Arc<Switches>,
}

impl AccessControl {
    /// Allows every caller everything (`--access=local` and `insecure`).
    pub fn always_allow() -> Self {
        let authorizer = Authorizer::AlwaysAllow;
        let switches = Switches::fixed(Modes::default());
        Self { authenticator: None, cas: None, authorizer, streams: None, started: AtomicU32::new(0), switches }
    }

    /// Asks the apiserver (`--access=authorized`). `key` must be random.
    pub fn webhook(
        upstream: &Upstream,
        options: AccessOptions,
        key: [u8; KEY_BYTES],
        clock: Clock,
        metrics: &AccessMetrics,
    ) -> Self {
        let AccessOptions { authentication, authorization, streams } = options;
        let authenticator = Authenticator::new(upstream.clone(), authentication, key, clock, metrics);
        let authorizer = WebhookAuthorizer::new(upstream.clone(), authorization, metrics);
        Self {
            authenticator: Some(authenticator),
            cas: None,
            authorizer: Authorizer::Webhook(Box::new(authorizer)),
            streams: Some(streams),
            started: AtomicU32::new(0),
            switches: Switches::fixed(Modes::default()),
        }
    }

    /// Limits the caches to the reads that these modes leave to them.
    #[must_use]
    pub fn with_switches(self, switches: Arc<Switches>) -> Self {
        Self { switches, ..self }
    }

    /// The modes in force.
    pub fn switches(&self) -> &Arc<Switches> {
        &self.switches
    }

    /// Knows callers by certificates of these CAs, too.
    #[must_use]
    pub fn with_client_cas(self, cas: Option<Arc<TrustedCas>>) -> Self {
        Self { cas, ..self }
    }

    /// Checks tokens of service accounts itself, where that is possible.
    #[must_use]
    pub fn with_service_accounts(self, service_accounts: Option<ServiceAccounts>) -> Self {
        let authenticator =
            self.authenticator.map(|authenticator| authenticator.with_service_accounts(service_accounts));
        Self { authenticator, ..self }
    }

    /// Verifies the certificate of a connection, which comes first in `chain`. `None` if
    /// certificates name no callers.
    pub fn certificate(&self, chain: &[CertificateDer<'_>]) -> Option<Arc<ClientCertificate>> {
        self.cas.clone().map(|cas| ClientCertificate::new(chain, cas))
    }

    /// Whether callers are distinguished.
    pub fn reviews(&self) -> bool {
        self.authenticator.is_some()
    }

    /// Whether the apiserver could be asked about callers when it last had to be.
    pub fn is_answered(&self) -> bool {
        self.authenticator.as_ref().is_none_or(Authenticator::is_answered) && self.authorizer.is_answered()
    }

    /// Returns the options of the next stream's reviews; `None` without reviews. The times are up
    /// to a fifth shorter than configured, so that streams that start together are not reviewed
    /// together. The number (0 to 1) spreads their other periodic work.
    pub(super) fn next_stream(&self) -> Option<(StreamOptions, f64)> {
        let StreamOptions { reauthorize_interval, age_max } = self.streams?;
        let spread = spread(self.started.fetch_add(1, Ordering::Relaxed).into());
        let shorter = |time: Duration| time.mul_f64(1.0 - spread / 5.0);
        let reauthorize_interval = shorter(reauthorize_interval);
        let age_max = age_max.map(shorter);
        let options = StreamOptions { reauthorize_interval, age_max };
        Some((options, spread))
    }

    /// Asks again whether a caller may still read. A verdict that is older than `age` does not
    /// count.
    ///
    /// # Errors
    /// The denial, if the caller may not read or its rights are not known.
    pub(super) async fn authorize_again(
        &self,
        authorized: &Authorized<Read>,
        holder: Holder,
        age: Duration,
    ) -> Result<(), Denial> {
        self.authorizer.authorize_again(authorized, holder, age).await
    }

    /// The caller of a request.
    ///
    /// # Errors
    /// The denial, if the caller is not known.
    pub async fn authenticate(&self, presented: &Presented) -> Result<Caller, Denial> {
        match &self.authenticator {
            None => Ok(Caller::Any),
            Some(authenticator) => authenticator.authenticate(presented).await,
        }
    }

    /// Authorizes a read.
    ///
    /// # Errors
    /// The reason why the caller may not read, or why the verdict is not known.
    pub async fn authorize(
        &self,
        caller: &Caller,
        read: Read,
        presented: &Presented,
    ) -> Result<Authorized<Read>, Denial> {
        self.authorizer.authorize(caller, read, presented.holder).await
    }

    /// Whether the caller of a request may read a path of kubefan's own.
    ///
    /// # Errors
    /// The denial, if the caller may not use the path or its rights are not known.
    pub async fn authorize_path(&self, path: NonResource, presented: &Presented) -> Result<(), Denial> {
        if presented.impersonates {
            return Err(Denial::Impersonation);
        }
        let caller = self.authenticate(presented).await?;
        self.authorizer.authorize_path(&caller, path, presented.holder).await
    }

    /// Explains to the operator what a user may read, and why.
    ///
    /// # Errors
    /// The reason why that is not known.
    pub async fn explain(&self, user: Identity, read: &Read, holder: Holder) -> Result<Explanation, Denial> {
        let user = match &self.authenticator {
            Some(authenticator) => authenticator.without_ignored(user),
            None => user,
        };
        self.authorizer.explain(user, read, holder).await
    }
}
