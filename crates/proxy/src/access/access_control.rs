//! Authentication and authorization behind one type, for the servers.

use super::{
    authentication::{
        AuthenticationOptions, Authenticator,
        authenticator::{Clock, KEY_BYTES},
        caller::Caller,
        presented::Presented,
    },
    authorization::{AuthorizationOptions, Authorized, Authorizer, authorizer::WebhookAuthorizer, read::Read},
    denial::Denial,
};
use crate::{telemetry::metrics::AccessMetrics, upstream::Upstream};

/// Options of both steps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessOptions {
    /// Who callers are.
    pub authentication: AuthenticationOptions,
    /// What they may read.
    pub authorization: AuthorizationOptions,
}

/// Decides who may read what.
pub struct AccessControl {
    /// `None` if callers are not distinguished.
    authenticator: Option<Authenticator>,
    authorizer: Authorizer,
}

impl AccessControl {
    /// Allows every caller everything (`--authorization-mode=AlwaysAllow`).
    pub fn always_allow() -> Self {
        Self { authenticator: None, authorizer: Authorizer::AlwaysAllow }
    }

    /// Asks the apiserver (`--authorization-mode=Webhook`). `key` must be random.
    pub fn webhook(
        upstream: &Upstream,
        options: AccessOptions,
        key: [u8; KEY_BYTES],
        clock: Clock,
        metrics: &AccessMetrics,
    ) -> Self {
        let AccessOptions { authentication, authorization } = options;
        let authenticator = Authenticator::new(upstream.clone(), authentication, key, clock, metrics);
        let authorizer = WebhookAuthorizer::new(upstream.clone(), authorization, metrics);
        Self { authenticator: Some(authenticator), authorizer: Authorizer::Webhook(authorizer) }
    }

    /// Whether callers are distinguished.
    pub fn reviews(&self) -> bool {
        self.authenticator.is_some()
    }

    /// The caller of a request.
    ///
    /// # Errors
    /// Why it is not known.
    pub async fn authenticate(&self, presented: &Presented) -> Result<Caller, Denial> {
        match &self.authenticator {
            None => Ok(Caller::Any),
            Some(authenticator) => authenticator.authenticate(presented).await,
        }
    }

    /// Returns the read as one that the caller may do.
    ///
    /// # Errors
    /// Why it may not, or why that is not known.
    pub async fn authorize(
        &self,
        caller: &Caller,
        read: Read,
        presented: &Presented,
    ) -> Result<Authorized<Read>, Denial> {
        self.authorizer.authorize(caller, read, presented.holder).await
    }
}
