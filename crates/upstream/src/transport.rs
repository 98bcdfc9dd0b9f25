//! The HTTP client under [`super::Upstream`]: reqwest with the TLS configuration and credentials
//! that kube-client derives from a kubeconfig.
//!
//! A half-open connection must not look like a quiet resource, so HTTP/2 PINGs and TCP keepalive
//! are on.

pub(super) mod connection;
pub(super) mod connector;
mod pool;
pub(super) mod renewal;
mod resolver;
pub mod settings;
pub(super) mod unprocessed;

use std::{error::Error, io, sync::Arc, time::Duration};

use bytes::Bytes;
use http::Uri;
use hyper_util::client::legacy;
use kube_client::{Config, client::AuthError};
use kubefan_common::{
    kubeconfig::{Credentials, explain_auth, proxy_url, real_host, request_url, tls_config},
    text::{find, innermost},
    tls::{self, TlsSettings},
    token_file::TokenFile,
};
use reqwest::{Proxy, redirect};
use tower::{BoxError, Service, ServiceBuilder, ServiceExt, service_fn, util::BoxCloneSyncService};

pub(crate) use self::settings::server_name;

use crate::{
    error::{UpstreamError, shorten},
    transport::{
        connection::{ConnectionLimits, UpstreamBody},
        pool::Pool,
        resolver::Resolver,
        settings::SettingsError,
    },
};

/// The HTTP service for requests to the apiserver: reqwest in production, a simulated network in
/// simulation.
pub type HttpService = BoxCloneSyncService<http::Request<Bytes>, http::Response<UpstreamBody>, BoxError>;

/// The window of one stream, for a list page or a watch. With HTTP/2's default of 64 KiB, lists are
/// many times slower.
const HTTP2_STREAM_WINDOW_BYTES: u32 = 4 << 20;
/// The window of the connection. It is larger than one stream's, so that one unread stream does not
/// block the others.
const HTTP2_CONNECTION_WINDOW_BYTES: u32 = 32 << 20;

/// The time after which a token file is read again, as in client-go. A kubelet replaces a token at
/// 80 % of its lifetime, which is at least ten minutes.
const TOKEN_READ_INTERVAL: Duration = Duration::from_secs(60);

/// Advice in TLS errors: the operator's settings of the connection to the apiserver.
const SETTINGS: TlsSettings = TlsSettings {
    trust: "certificate-authority in kubefan's kubeconfig must contain the CA that has (in a pod, ca.crt of the service account); with \
            insecure-skip-tls-verify any server could pass for it",
    plaintext: "the server in kubefan's kubeconfig must begin with http://",
};

/// Builds the client. This runs the kubeconfig's exec plugin, if any, so it may block.
pub(crate) fn build(config: &Config, limits: ConnectionLimits, user_agent: &str) -> Result<HttpService, SettingsError> {
    let server = server_name(&config.cluster_url);
    let failed = |message: String| SettingsError::Transport { server: server.clone(), message: shorten(&message) };
    if config.accept_invalid_certs {
        tracing::warn!(
            server,
            "the kubeconfig sets insecure-skip-tls-verify: the apiserver's certificate is not checked, so any server can pass for it"
        );
    }
    // Built once, so that another connection does not run the exec plugin again.
    let tls = tls_config(config).map_err(failed)?;
    let config_copy = config.clone();
    let user_agent = user_agent.to_owned();
    let pool = Pool::new(move || client(&config_copy, tls.clone(), limits, &user_agent)).map_err(failed)?;
    let pool = Arc::new(pool);
    let send = service_fn(move |request: http::Request<reqwest::Body>| {
        let pool = pool.clone();
        async move { pool.send(request).await }
    });
    let authenticated = authenticated(config, send)?;
    Ok(BoxCloneSyncService::new(
        ServiceBuilder::new()
            .map_request(|request: http::Request<Bytes>| request.map(reqwest::Body::from))
            .service(authenticated),
    ))
}

/// Adds the credentials of a configuration to every request, and overwrites any that the request
/// already has.
pub(crate) fn authenticated<B, S>(
    config: &Config,
    service: S,
) -> Result<BoxCloneSyncService<http::Request<B>, http::Response<UpstreamBody>, BoxError>, SettingsError>
where
    B: http_body::Body + Send + 'static,
    S: Service<http::Request<B>, Response = http::Response<UpstreamBody>, Error = BoxError>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    let Credentials { token_file, auth, headers } = Credentials::new(config).map_err(|message| {
        SettingsError::Transport { server: server_name(&config.cluster_url), message: shorten(&message) }
    })?;
    let token_file = token_file.map(|of| Arc::new(TokenFile::new(of.path, of.inline, TOKEN_READ_INTERVAL)));
    let send = service_fn(move |mut request: http::Request<B>| {
        let service = service.clone();
        let token_file = token_file.clone();
        async move {
            if let Some(file) = token_file {
                let token = file.header().await.map_err(AuthError::from)?;
                request.headers_mut().insert(http::header::AUTHORIZATION, token);
            }
            service.oneshot(request).await
        }
    });
    let service = ServiceBuilder::new().option_layer(auth).layer(headers).map_err(BoxError::from).service(send);
    Ok(BoxCloneSyncService::new(service))
}

fn client(
    config: &Config,
    mut tls: rustls::ClientConfig,
    limits: ConnectionLimits,
    user_agent: &str,
) -> Result<reqwest::Client, String> {
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let mut builder = reqwest::Client::builder()
        .tls_backend_preconfigured(tls)
        .user_agent(user_agent)
        .connect_timeout(limits.connect_timeout)
        .tcp_nodelay(true)
        .tcp_keepalive(connection::TCP_KEEPALIVE)
        .tcp_keepalive_interval(connection::TCP_KEEPALIVE_INTERVAL)
        .tcp_keepalive_retries(connection::TCP_KEEPALIVE_RETRIES)
        .http2_initial_stream_window_size(HTTP2_STREAM_WINDOW_BYTES)
        .http2_initial_connection_window_size(HTTP2_CONNECTION_WINDOW_BYTES)
        .http2_keep_alive_interval(limits.ping_interval)
        .http2_keep_alive_timeout(limits.ping_timeout)
        // A redirect would send the credentials to another host.
        .redirect(redirect::Policy::none())
        .no_proxy();
    if let Some(url) = proxy_url(config)? {
        let proxy = Proxy::all(url).map_err(|_| "its proxy-url is not the URL of a proxy".to_owned())?;
        builder = builder.proxy(proxy);
    }
    let resolver = real_host(config).map_or_else(Resolver::new, Resolver::to);
    builder.dns_resolver(Arc::new(resolver)).build().map_err(|error| root_cause(&error))
}

/// The URL for requests ([`request_url`]).
pub(crate) fn request_base(config: &Config) -> Result<Uri, SettingsError> {
    request_url(config)
        .map_err(|message| SettingsError::Transport { server: server_name(&config.cluster_url), message })
}

/// Whether the request was never sent: there were no credentials for it, or no connection.
pub(crate) fn is_unsent(error: &(dyn Error + Send + Sync + 'static)) -> bool {
    find::<AuthError>(error).is_some()
        || find::<legacy::Error>(error).is_some_and(legacy::Error::is_connect)
        || find::<reqwest::Error>(error).is_some_and(reqwest::Error::is_connect)
}

/// Classifies a failed request.
pub(crate) fn classify(error: BoxError, server: &str) -> UpstreamError {
    let server = || server.to_owned();
    let error: &(dyn Error + 'static) = &*error;
    if let Some(auth) = find::<AuthError>(error) {
        return UpstreamError::Credentials { message: shorten(&explain_auth(auth)) };
    }
    if let Some(refused) = find::<rustls::Error>(error) {
        let message = tls::explain(refused, SETTINGS).unwrap_or_else(|| refused.to_string());
        return UpstreamError::Tls { server: server(), message: shorten(&message) };
    }
    let message = root_cause(error);
    let by_client = find::<reqwest::Error>(error).map(|error| error.is_connect() || error.is_dns());
    let by_client = by_client.or_else(|| find::<legacy::Error>(error).map(legacy::Error::is_connect));
    let connecting = match by_client {
        Some(connecting) => connecting,
        None => find::<io::Error>(error).is_some_and(|error| {
            use io::ErrorKind::*;
            matches!(
                error.kind(),
                ConnectionRefused | HostUnreachable | NetworkUnreachable | AddrNotAvailable | NotFound
            )
        }),
    };
    if connecting { UpstreamError::Unreachable { server: server(), message } } else { UpstreamError::Reset { message } }
}

/// The text of the innermost error. The outer ones would repeat the URL, and with it the user info
/// of a proxy or server.
pub(crate) fn root_cause(error: &(dyn Error + 'static)) -> String {
    let root = innermost(error);
    match root.downcast_ref::<reqwest::Error>() {
        // A reqwest error without a source would print its URL.
        Some(error) if error.is_timeout() => "timed out".to_owned(),
        Some(_) => "the request could not be sent".to_owned(),
        None => shorten(tls::plain(&root.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_name_omits_user_info() {
        let uri: Uri = "https://admin:secret@h.example:6443/k8s/clusters/a".parse().unwrap();
        assert_eq!(server_name(&uri), "https://h.example:6443");
    }

    #[test]
    fn a_refused_connection_differs_from_a_broken_one() {
        let refused: BoxError = io::Error::from(io::ErrorKind::ConnectionRefused).into();
        assert_eq!(classify(refused, "https://h").reason(), "unreachable");
        let broken: BoxError = io::Error::from(io::ErrorKind::BrokenPipe).into();
        assert_eq!(classify(broken, "https://h").reason(), "reset");
        let tls: BoxError = io::Error::new(io::ErrorKind::InvalidData, rustls::Error::DecryptError).into();
        assert_eq!(classify(tls, "https://h").reason(), "tls");
    }

    #[test]
    fn failures_of_tls_name_the_settings_of_the_kubeconfig() {
        let unknown = rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer);
        let text = classify(io::Error::new(io::ErrorKind::InvalidData, unknown).into(), "https://h").to_string();
        assert!(text.starts_with("TLS with the apiserver at https://h failed: no trusted CA has signed"), "{text}");
        assert!(text.contains("certificate-authority") && text.contains("insecure-skip-tls-verify"), "{text}");
        let cut =
            io::Error::new(io::ErrorKind::UnexpectedEof, "peer closed connection without sending TLS close_notify");
        let text = classify(cut.into(), "https://h").to_string();
        assert!(text.contains("closed the connection without ending TLS") && !text.contains("close_notify"), "{text}");
    }
}
