//! Decides whether others could read requests to the apiserver, or answer in its place.

use http::uri::Scheme;
use kube_client::{Config, config::AuthInfo};
use kubefan_common::kubeconfig::is_loopback;

use super::passthrough_options::{Credentials, PassthroughOptions};
use crate::transport::{
    self,
    settings::{SettingsError, UpstreamSettings},
};

impl PassthroughOptions {
    /// Refuses to send callers' tokens over plain http, where they could be read on the way, or to
    /// a server that proves nothing. Plain http stays allowed within this machine.
    pub(super) fn check_protection(&self, config: &Config) -> Result<(), SettingsError> {
        if self.credentials.are_kubefans() || self.allows_insecure_upstream {
            return Ok(());
        }
        let Some(problem) = exposure(config) else { return Ok(()) };
        Err(SettingsError::Unprotected { server: transport::server_name(&config.cluster_url), problem })
    }

    /// Refuses a kubeconfig that already acts as another user: a request can act as one user only.
    pub(super) fn check_user(&self, config: &Config) -> Result<(), SettingsError> {
        let AuthInfo { impersonate, impersonate_groups, .. } = &config.auth_info;
        if self.credentials != Credentials::Impersonate || (impersonate.is_none() && impersonate_groups.is_none()) {
            return Ok(());
        }
        let message = "--access=authorized-impersonate acts as kubefan's callers, and this kubeconfig already acts as another user (as, \
                       as-groups); leave that out"
            .to_owned();
        Err(SettingsError::Transport { server: transport::server_name(&config.cluster_url), message })
    }
}

/// Explains how others could read tokens that are sent to the apiserver; `None` if they could not.
fn exposure(config: &Config) -> Option<&'static str> {
    if config.cluster_url.scheme() == Some(&Scheme::HTTP) {
        let is_local = config.proxy_url.is_none() && is_loopback(&config.cluster_url);
        return (!is_local).then_some("over plain http");
    }
    config.accept_invalid_certs.then_some("without a check of its certificate (insecure-skip-tls-verify)")
}

/// Refuses to have callers reviewed by a server that others could stand in for, or where they could
/// read callers' tokens on the way.
///
/// # Errors
/// The settings cannot be read, or [`SettingsError::Unverified`].
pub async fn check_reviewer(settings: &UpstreamSettings) -> Result<(), SettingsError> {
    let config = settings.load().await?;
    let Some(problem) = exposure(&config) else { return Ok(()) };
    Err(SettingsError::Unverified { server: transport::server_name(&config.cluster_url), problem })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::connection::ConnectionLimits;

    #[test]
    fn callers_tokens_are_not_sent_where_others_could_read_them() {
        let options = |credentials, allows_insecure_upstream| PassthroughOptions {
            credentials,
            requests_max: 1,
            allows_insecure_upstream,
            connection: ConnectionLimits::APISERVER,
        };
        for (url, accept_invalid_certs, is_protected) in [
            ("https://apiserver:6443", false, true),
            ("https://apiserver:6443", true, false),
            ("https://127.0.0.1:6443", true, false),
            ("http://apiserver:8080", false, false),
            ("http://10.0.0.1:8080", false, false),
            ("http://localhost.evil.example:8080", false, false),
            ("http://127.0.0.1:8001", false, true),
            ("http://localhost:8001", false, true),
            ("http://[::1]:8001", false, true),
        ] {
            let mut config = Config::new(url.parse().unwrap());
            config.accept_invalid_certs = accept_invalid_certs;
            let refused = options(Credentials::Caller, false).check_protection(&config).err();
            assert_eq!(refused.is_none(), is_protected, "{url}, {accept_invalid_certs}");
            assert!(refused.is_none_or(|error| error.to_string().contains("tuning.passthroughInsecureUpstream")));
            assert!(options(Credentials::Caller, true).check_protection(&config).is_ok(), "{url}");
            assert!(options(Credentials::Own, false).check_protection(&config).is_ok(), "{url}");
        }
        let mut proxied = Config::new("http://localhost:8001".parse().unwrap());
        proxied.proxy_url = Some("http://proxy.example:3128".parse().unwrap());
        assert!(options(Credentials::Caller, false).check_protection(&proxied).is_err());
    }
}
