//! An HTTP client that forwards requests unchanged: it rewrites no path, adds no header and reads
//! no body.
//!
//! The client for kubefan's own requests, reqwest, does not qualify: it parses every URL again,
//! which resolves `..` and escapes characters. Forwarded paths may be signed and must arrive byte
//! for byte.

use std::{io, time::Duration};

use futures::FutureExt;
use http::Uri;
use http_body_util::BodyExt;
use hyper::rt::{Read, Write};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::{
        legacy::{
            Client,
            connect::{
                Connection, HttpConnector,
                proxy::{SocksV5, Tunnel},
            },
        },
        proxy::matcher::{Intercept, Matcher},
    },
    rt::{TokioExecutor, TokioTimer},
};
use kube_client::Config;
use rustls::{ClientConfig, pki_types::ServerName};
use tower::{BoxError, Service, ServiceBuilder, ServiceExt, util::BoxCloneSyncService};

use crate::transport::{
    connection::{self, ConnectionLimits, STREAMS_MAX, UpstreamBody},
    resolver::Resolver,
};

/// A client for forwarded requests.
pub type ForwardService = BoxCloneSyncService<http::Request<UpstreamBody>, http::Response<UpstreamBody>, BoxError>;

/// The HTTP/2 window of one stream: the memory that one stalled response can occupy. With the
/// default of 64 KiB, lists are many times slower.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;

/// Room for every stream's window, so that stalled responses do not block the others.
const CONNECTION_WINDOW_BYTES: u32 = STREAM_WINDOW_BYTES * STREAMS_MAX as u32;

/// Cancelled streams that a connection remembers, each for a second.
const RESET_STREAMS_MAX: usize = 1000;

/// The HTTP versions offered to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HttpVersions {
    /// HTTP/2 if the server accepts it, otherwise HTTP/1.1.
    All,
    /// Only HTTP/1.1, because only its connections can be upgraded to another protocol.
    Http1,
}

/// Builds a client for the server of a configuration, through its proxy if it has one. `tls` holds
/// the client's identity.
pub(crate) fn build(
    config: &Config,
    tls: &ClientConfig,
    versions: HttpVersions,
    limits: ConnectionLimits,
) -> Result<ForwardService, String> {
    let mut http = HttpConnector::new_with_resolver(Resolver::new());
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_keepalive(Some(connection::TCP_KEEPALIVE));
    http.set_keepalive_interval(Some(connection::TCP_KEEPALIVE_INTERVAL));
    http.set_keepalive_retries(Some(connection::TCP_KEEPALIVE_RETRIES));
    http.set_connect_timeout(Some(limits.connect_timeout));
    let name = match &config.tls_server_name {
        Some(name) => Some(ServerName::try_from(name.clone()).map_err(|_| "its tls-server-name is not a host name")?),
        None => None,
    };
    let options = ClientOptions { tls, name, versions, limits };
    let Some(proxy) = proxy(config)? else { return Ok(options.client(http)) };
    let uri = proxy.uri().clone();
    match uri.scheme_str() {
        Some("http" | "https") => {
            let to_proxy = https(tls, None, HttpVersions::Http1, http);
            let tunnel = Tunnel::new(uri, to_proxy);
            Ok(options.client(match proxy.basic_auth() {
                Some(auth) => tunnel.with_auth(auth.clone()),
                None => tunnel,
            }))
        }
        // The proxy resolves names, as in client-go.
        Some("socks5" | "socks5h") => {
            let socks = SocksV5::new(uri, http);
            Ok(options.client(match proxy.raw_auth() {
                Some((user, password)) => socks.with_auth(user.to_owned(), password.to_owned()),
                None => socks,
            }))
        }
        _ => Err("its proxy-url is not the URL of an HTTP or SOCKS5 proxy".to_owned()),
    }
}

/// The proxy to use for the server, if any.
fn proxy(config: &Config) -> Result<Option<Intercept>, String> {
    let Some(url) = &config.proxy_url else { return Ok(None) };
    let proxy = Matcher::builder().all(url.to_string()).build().intercept(&config.cluster_url);
    proxy.map(Some).ok_or_else(|| "its proxy-url is not the URL of a proxy".to_owned())
}

fn https<C>(
    tls: &ClientConfig,
    name: Option<ServerName<'static>>,
    versions: HttpVersions,
    connector: C,
) -> HttpsConnector<C> {
    let mut tls = tls.clone();
    tls.alpn_protocols.clear();
    let builder = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
    let builder = match name {
        Some(name) => builder.with_server_name_resolver(FixedServerNameResolver::new(name)),
        None => builder,
    };
    match versions {
        HttpVersions::All => builder.enable_all_versions().wrap_connector(connector),
        HttpVersions::Http1 => builder.enable_http1().wrap_connector(connector),
    }
}

/// The options that do not depend on the kind of proxy.
struct ClientOptions<'a> {
    tls: &'a ClientConfig,
    name: Option<ServerName<'static>>,
    versions: HttpVersions,
    limits: ConnectionLimits,
}

impl ClientOptions<'_> {
    fn client<C>(self, connector: C) -> ForwardService
    where
        C: Service<Uri> + Clone + Send + Sync + 'static,
        C::Response: Connection + Read + Write + Send + Unpin + 'static,
        C::Future: Send + 'static,
        C::Error: Into<BoxError>,
    {
        let ConnectionLimits { connect_timeout, ping_interval, ping_timeout } = self.limits;
        let connector = ServiceBuilder::new()
            .map_future(move |connecting| within(connect_timeout, connecting).boxed())
            .service(https(self.tls, self.name, self.versions, connector));
        let client: Client<_, UpstreamBody> = Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .http2_initial_stream_window_size(STREAM_WINDOW_BYTES)
            .http2_initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .http2_keep_alive_interval(ping_interval)
            .http2_keep_alive_timeout(ping_timeout)
            // By default h2 remembers 50 of the streams that callers cancel within a second. It
            // closes the connection, and with it the requests of others, after 1,024 answers to
            // streams that it has forgotten. That limit protects clients from servers, and this
            // server is the apiserver.
            .http2_max_concurrent_reset_streams(RESET_STREAMS_MAX)
            .http2_max_local_error_reset_streams(None)
            .build(connector);
        let client = client.map_response(|response| response.map(|body| body.map_err(BoxError::from).boxed_unsync()));
        BoxCloneSyncService::new(client.map_err(BoxError::from))
    }
}

/// Limits the time for a connection with its TLS handshake.
async fn within<T>(
    connect_timeout: Duration,
    connecting: impl Future<Output = Result<T, BoxError>>,
) -> Result<T, BoxError> {
    tokio::time::timeout(connect_timeout, connecting).await.unwrap_or_else(|_| {
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("no connection within {connect_timeout:?}")).into())
    })
}
