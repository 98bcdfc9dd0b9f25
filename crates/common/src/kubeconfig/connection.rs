//! Settings of a configuration for requests to its server, for the proxy and the client library.

use std::net::IpAddr;

use http::Uri;
use kube_client::{
    Config,
    client::{
        ConfigExt,
        middleware::{AuthLayer, ExtraHeadersLayer},
    },
};

use super::{
    errors::explain_auth,
    proxy_environment::is_loopback,
    token_of_file::{TokenOfFile, take_token_file},
};
use crate::text::innermost;

/// Adds the credentials of a configuration to its requests.
pub struct Credentials {
    /// The token file. kube-client does not know it.
    pub token_file: Option<TokenOfFile>,
    /// All other credentials.
    pub auth: Option<AuthLayer>,
    /// Impersonation.
    pub headers: ExtraHeadersLayer,
}

impl Credentials {
    /// The credentials of a configuration. This runs its exec plugin, if any.
    ///
    /// # Errors
    /// The reason why the credentials cannot be used, without a secret.
    pub fn new(config: &Config) -> Result<Self, String> {
        let mut config = config.clone();
        let token_file = take_token_file(&mut config.auth_info).map_err(|error| explain_auth(&error))?;
        let auth = config.auth_layer().map_err(|error| match &error {
            kube_client::Error::Auth(error) => explain_auth(error),
            other => innermost(other).to_string(),
        })?;
        let headers = config.extra_headers_layer().map_err(|_| "its impersonation settings are not valid headers")?;
        Ok(Self { token_file, auth, headers })
    }
}

/// The URL for requests. With `tls-server-name` its host is that name, because reqwest checks the
/// certificate against the URL. The name is then resolved to the addresses of [`real_host`].
///
/// # Errors
/// The name cannot be resolved like this.
pub fn request_url(config: &Config) -> Result<Uri, String> {
    let is_tls = config.cluster_url.scheme_str() == Some("https");
    let Some(name) = config.tls_server_name.as_ref().filter(|_| is_tls) else { return Ok(config.cluster_url.clone()) };
    let invalid = || "its tls-server-name is not a host name".to_owned();
    // No resolver is asked for an address.
    if name.parse::<IpAddr>().is_ok() {
        return Err(invalid());
    }
    let mut parts = config.cluster_url.clone().into_parts();
    let port = config.cluster_url.port_u16().unwrap_or(443);
    parts.authority = Some(format!("{name}:{port}").parse().map_err(|_| invalid())?);
    Uri::from_parts(parts).map_err(|_| invalid())
}

/// The host to resolve in place of the one in [`request_url`]. `None` if they are the same.
pub fn real_host(config: &Config) -> Option<&str> {
    config.tls_server_name.as_ref().filter(|_| config.cluster_url.scheme_str() == Some("https"))?;
    config.cluster_url.host().map(|host| host.trim_matches(['[', ']']))
}

/// The URL of the proxy, if any.
///
/// # Errors
/// A proxy would have to resolve a `tls-server-name`.
pub fn proxy_url(config: &Config) -> Result<Option<String>, String> {
    if config.tls_server_name.is_some() && config.proxy_url.is_some() {
        return Err("tls-server-name together with a proxy is not supported".to_owned());
    }
    Ok(config.proxy_url.as_ref().map(Uri::to_string))
}

/// Whether to ask the server for gzip: unless the kubeconfig has `disable-compression`, or the
/// server is on this machine, where bytes cost less than their compression. A proxy may be
/// anywhere.
pub fn wants_gzip(config: &Config) -> bool {
    !config.disable_compression && (config.proxy_url.is_some() || !is_loopback(&config.cluster_url))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_go_to_the_tls_server_name_at_the_addresses_of_the_server_and_through_no_proxy() {
        let mut config = Config::new("https://[fd00::1]:6443/prefix".parse().unwrap());
        config.proxy_url = Some("http://proxy.example:1".parse().unwrap());
        assert_eq!((request_url(&config).unwrap(), real_host(&config)), (config.cluster_url.clone(), None));
        assert_eq!(proxy_url(&config), Ok(Some("http://proxy.example:1/".to_owned())));
        config.tls_server_name = Some("kube.example".to_owned());
        assert_eq!(request_url(&config).unwrap(), "https://kube.example:6443/prefix");
        assert_eq!(real_host(&config), Some("fd00::1"));
        assert!(proxy_url(&config).is_err());
        for name in ["10.0.0.1", "a b"] {
            config.tls_server_name = Some(name.to_owned());
            assert_eq!(request_url(&config), Err("its tls-server-name is not a host name".to_owned()), "{name:?}");
        }
    }

    #[test]
    fn gzip_is_for_servers_elsewhere_and_unless_the_kubeconfig_says_otherwise() {
        for (server, expected) in [
            ("https://kube.example:6443", true),
            ("https://10.0.0.1:6443", true),
            ("https://localhost:6443", false),
            ("http://127.0.0.1:8001", false),
            ("https://[::1]:6443", false),
        ] {
            let mut config = Config::new(server.parse().unwrap());
            assert_eq!(wants_gzip(&config), expected, "{server}");
            config.proxy_url = Some("http://localhost:3128".parse().unwrap());
            assert!(wants_gzip(&config), "{server} through a proxy");
            config.disable_compression = true;
            assert!(!wants_gzip(&config), "{server}");
        }
    }
}
