//! An HTTP client that changes nothing on the way: no path is rewritten, no header added, no body read. reqwest, which carries kubefan's
//! own requests, parses every URL anew, and would so resolve `..` and escape characters that others have signed or meant as they are.

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

use super::transport::{self, UpstreamBody};

/// A client for whole requests of others.
pub(super) type Passage = BoxCloneSyncService<http::Request<UpstreamBody>, http::Response<UpstreamBody>, BoxError>;

/// What one response whose reader stalls can make kubefan hold, in bytes: with HTTP/2's own 64 KiB a list would run at a fraction of its
/// speed.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;

/// The streams of one connection. kube-apiserver takes 100 (`--http2-max-streams-per-connection`), as most proxies do.
pub(super) const STREAMS_MAX: usize = 100;

/// So that responses that are not read stop no others.
const CONNECTION_WINDOW_BYTES: u32 = STREAM_WINDOW_BYTES * STREAMS_MAX as u32;

/// Which HTTP is offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Versions {
    /// HTTP/2 where the server takes it.
    All,
    /// HTTP/1.1 alone: only there a connection can become something else.
    Http1,
}

/// Builds a client for the server of a configuration, with its proxy. `tls` says who we are there.
pub(super) fn build(
    config: &Config,
    tls: &ClientConfig,
    versions: Versions,
    connect_timeout: Duration,
) -> Result<Passage, String> {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_keepalive(Some(transport::TCP_KEEPALIVE));
    http.set_connect_timeout(Some(connect_timeout));
    let name = match &config.tls_server_name {
        Some(name) => Some(ServerName::try_from(name.clone()).map_err(|_| "its tls-server-name is no host name")?),
        None => None,
    };
    let way = Way { tls, name, versions, connect_timeout };
    let Some(proxy) = proxy(config)? else { return Ok(way.client(http)) };
    let uri = proxy.uri().clone();
    match uri.scheme_str() {
        Some("http" | "https") => {
            let to_proxy = https(tls, None, Versions::Http1, http);
            let tunnel = Tunnel::new(uri, to_proxy);
            Ok(way.client(match proxy.basic_auth() {
                Some(auth) => tunnel.with_auth(auth.clone()),
                None => tunnel,
            }))
        }
        // The proxy resolves names, as client-go has it.
        Some("socks5" | "socks5h") => {
            let socks = SocksV5::new(uri, http);
            Ok(way.client(match proxy.raw_auth() {
                Some((user, password)) => socks.with_auth(user.to_owned(), password.to_owned()),
                None => socks,
            }))
        }
        _ => Err("its proxy-url is no URL of an HTTP or SOCKS5 proxy".to_owned()),
    }
}

/// The proxy that leads to the server, if there is one.
fn proxy(config: &Config) -> Result<Option<Intercept>, String> {
    let Some(url) = &config.proxy_url else { return Ok(None) };
    let exceptions = match transport::is_of_environment(url) {
        true => ["NO_PROXY", "no_proxy"].iter().find_map(|name| std::env::var(name).ok()).unwrap_or_default(),
        false => String::new(),
    };
    let matcher = |exceptions| Matcher::builder().all(url.to_string()).no(exceptions).build();
    if matcher(String::new()).intercept(&config.cluster_url).is_none() {
        return Err("its proxy-url is no URL of a proxy".to_owned());
    }
    Ok(matcher(exceptions).intercept(&config.cluster_url))
}

fn https<C>(
    tls: &ClientConfig,
    name: Option<ServerName<'static>>,
    versions: Versions,
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
        Versions::All => builder.enable_all_versions().wrap_connector(connector),
        Versions::Http1 => builder.enable_http1().wrap_connector(connector),
    }
}

/// What does not depend on the kind of proxy.
struct Way<'a> {
    tls: &'a ClientConfig,
    name: Option<ServerName<'static>>,
    versions: Versions,
    connect_timeout: Duration,
}

impl Way<'_> {
    fn client<C>(self, connector: C) -> Passage
    where
        C: Service<Uri> + Clone + Send + Sync + 'static,
        C::Response: Connection + Read + Write + Send + Unpin + 'static,
        C::Future: Send + 'static,
        C::Error: Into<BoxError>,
    {
        let connect_timeout = self.connect_timeout;
        let connector = ServiceBuilder::new()
            .map_future(move |connecting| within(connect_timeout, connecting).boxed())
            .service(https(self.tls, self.name, self.versions, connector));
        let client: Client<_, UpstreamBody> = Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .http2_initial_stream_window_size(STREAM_WINDOW_BYTES)
            .http2_initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .http2_keep_alive_interval(transport::HTTP2_PING_INTERVAL)
            .http2_keep_alive_timeout(transport::HTTP2_PING_TIMEOUT)
            .build(connector);
        let client = client.map_response(|response| response.map(|body| body.map_err(BoxError::from).boxed_unsync()));
        BoxCloneSyncService::new(client.map_err(BoxError::from))
    }
}

/// A connection with its TLS handshake, in time.
async fn within<T>(
    connect_timeout: Duration,
    connecting: impl Future<Output = Result<T, BoxError>>,
) -> Result<T, BoxError> {
    tokio::time::timeout(connect_timeout, connecting).await.unwrap_or_else(|_| {
        Err(io::Error::new(io::ErrorKind::TimedOut, format!("no connection within {connect_timeout:?}")).into())
    })
}
