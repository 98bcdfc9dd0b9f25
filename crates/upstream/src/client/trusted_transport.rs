//! The connections to the server of a configuration, and the encoding of its answers.

use kube_client::Config;
use kubefan_common::kubeconfig::wants_gzip;

use super::{identity::TrustedCa, upstream_options::UpstreamOptions};
use crate::transport::{self, HttpService, settings::SettingsError};

/// The connections, and the CA that they are verified against. All fields must come from the same
/// reading of the settings.
#[derive(Clone)]
pub(super) struct Transport {
    pub(super) service: HttpService,
    pub(super) trusted_ca: TrustedCa,
    /// The `Accept-Encoding` of reads and watches.
    pub(super) accept_encoding: &'static str,
}

/// As [`build`], on a thread that may wait for a credential plugin.
pub(super) async fn build_blocking(config: Config, options: &UpstreamOptions) -> Result<Transport, SettingsError> {
    let server = transport::server_name(&config.cluster_url);
    let options = options.clone();
    let build = tokio::task::spawn_blocking(move || build(&config, &options));
    build.await.unwrap_or_else(|_| {
        Err(SettingsError::Transport { server, message: "the task that runs the credential plugin failed".to_owned() })
    })
}

/// Makes connections to the server of a configuration.
pub(super) fn build(config: &Config, options: &UpstreamOptions) -> Result<Transport, SettingsError> {
    let service = transport::build(config, options.connection, &options.user_agent)?;
    let accept_encoding = accept_encoding(wants_gzip(config));
    Ok(Transport { service, trusted_ca: trusted_ca(config), accept_encoding })
}

/// The `Accept-Encoding` of reads and watches.
pub(super) fn accept_encoding(gzip: bool) -> &'static str {
    if gzip { "gzip" } else { "identity" }
}

fn trusted_ca(config: &Config) -> TrustedCa {
    match &config.root_cert {
        Some(bundle) if !config.accept_invalid_certs => TrustedCa::of(bundle),
        _ => TrustedCa::default(),
    }
}
