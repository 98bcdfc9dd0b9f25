//! Requests of others on their way to the apiserver, unread and unchanged.
//!
//! The hazard is an identity that leaks: whoever may speak to kubefan must not act upstream as kubefan. So the connections here are not
//! those of kubefan's own requests, and where callers act as themselves they are made from a configuration without any credential in it,
//! client certificate included.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use futures::{FutureExt, future::BoxFuture};
use http::{
    HeaderMap, StatusCode, Uri, Version, header,
    uri::{Authority, InvalidUri, PathAndQuery, Scheme},
};
use kube_client::{Config, config::AuthInfo};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::{BoxError, ServiceExt, service_fn};

use super::{
    connector::{self, Passage, STREAMS_MAX, Versions},
    error::{UpstreamError, shorten},
    renewal::Renewal,
    settings::{SettingsError, UpstreamSettings},
    transport::{self, UpstreamBody},
};

/// With whose credentials requests go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Credentials {
    /// Those that each request carries; none of kubefan's.
    Caller,
    /// kubefan's; none of those that a request carries.
    Own,
}

/// Limits of what is passed on.
#[derive(Debug, Clone)]
pub struct PassthroughOptions {
    /// With whose credentials.
    pub credentials: Credentials,
    /// Requests at a time.
    pub requests_max: usize,
    /// For a connection with its TLS handshake.
    pub connect_timeout: Duration,
}

/// The way to an apiserver for requests of others.
pub struct Passthrough {
    service: ArcSwap<Passage>,
    base: Base,
    server: String,
    options: PassthroughOptions,
    renewal: Renewal,
    all: Arc<Semaphore>,
    /// Those of requests that last: they leave some for all others, a renewal of a lease among them.
    lasting: Arc<Semaphore>,
    /// The places of each connection: with more requests than it takes they would wait for each other, watches for hours.
    connections: Vec<Arc<Semaphore>>,
}

/// Requests that last leave one place of so many to those that do not.
const SHORT_SHARE: usize = 5;

/// Where every request goes, whatever it names.
struct Base {
    scheme: Scheme,
    /// Without user info.
    authority: Authority,
    /// Without a closing slash.
    prefix: String,
}

/// A place among the requests that are passed on; it is to be held until the response has ended.
pub struct Place {
    route: Route,
    _all: OwnedSemaphorePermit,
    _lasting: Option<OwnedSemaphorePermit>,
    _connection: Option<OwnedSemaphorePermit>,
}

/// The client that carries a request.
#[derive(Debug, Clone, Copy)]
enum Route {
    /// The one with this number.
    Shared(usize),
    /// A connection of its own, which may become something else.
    Upgrade,
}

impl Passthrough {
    /// The way that kubeconfig or service account name.
    pub async fn from_settings(settings: UpstreamSettings, options: PassthroughOptions) -> Result<Self, SettingsError> {
        let config = settings.load().await?;
        let server = transport::server_name(&config.cluster_url);
        let base = Base::of(&config.cluster_url).ok_or_else(|| SettingsError::Transport {
            server: server.clone(),
            message: "its URL names no host".to_owned(),
        })?;
        let service = ArcSwap::from_pointee(build(config, &options).await?);
        let all = Arc::new(Semaphore::new(options.requests_max.min(Semaphore::MAX_PERMITS)));
        let lasting = options.requests_max - options.requests_max / SHORT_SHARE;
        let lasting = Arc::new(Semaphore::new(lasting.min(Semaphore::MAX_PERMITS)));
        let connections = connections(&options);
        let connections = (0..connections).map(|_| Arc::new(Semaphore::new(STREAMS_MAX))).collect();
        let renewal = Renewal::new(Some(settings));
        Ok(Self { service, base, server, options, renewal, all, lasting, connections })
    }

    /// With whose credentials requests go on.
    pub fn credentials(&self) -> Credentials {
        self.options.credentials
    }

    /// Requests at a time.
    pub fn requests_max(&self) -> usize {
        self.options.requests_max
    }

    /// A place for one request, for one that is to become something else on a connection of its own; `None` where there are too many, or
    /// too many that last, such as this one.
    pub fn place(&self, is_upgrade: bool, lasts: bool) -> Option<Place> {
        let all = self.all.clone().try_acquire_owned().ok()?;
        let lasting = match lasts || is_upgrade {
            true => Some(self.lasting.clone().try_acquire_owned().ok()?),
            false => None,
        };
        if is_upgrade {
            return Some(Place { route: Route::Upgrade, _all: all, _lasting: lasting, _connection: None });
        }
        let free = |connection: &Arc<Semaphore>| connection.clone().try_acquire_owned().ok();
        let free = self.connections.iter().enumerate().find_map(|(number, places)| Some((number, free(places)?)));
        // There are places for all; only one that moved while we looked can have hidden from us.
        let (number, connection) = free.map_or((0, None), |(number, permit)| (number, Some(permit)));
        Some(Place { route: Route::Shared(number), _all: all, _lasting: lasting, _connection: connection })
    }

    /// Sends a request: method, path, query, headers and body as they are, but for the host and the credentials.
    pub async fn send(
        &self,
        place: &Place,
        mut request: http::Request<UpstreamBody>,
    ) -> Result<http::Response<UpstreamBody>, UpstreamError> {
        let invalid = |_| UpstreamError::invalid("the path cannot be put behind the server's");
        *request.uri_mut() = self.base.join(request.uri()).map_err(invalid)?;
        // The connection decides.
        *request.version_mut() = Version::HTTP_11;
        request.headers_mut().remove(header::HOST);
        if self.options.credentials == Credentials::Own {
            remove_credentials(request.headers_mut());
        }
        request.extensions_mut().clear();
        request.extensions_mut().insert(place.route);
        let service = Passage::clone(&self.service.load());
        let sent = carry(service, request).await.map_err(|error| transport::classify(error, &self.server));
        let refused = match &sent {
            Ok(response) => {
                self.options.credentials == Credentials::Own && response.status() == StatusCode::UNAUTHORIZED
            }
            Err(error) => matches!(error, UpstreamError::Tls { .. } | UpstreamError::Credentials { .. }),
        };
        if refused {
            self.renew().await;
        }
        sent
    }

    /// Reads the settings again and makes new connections with them.
    async fn renew(&self) {
        let Some(config) = self.renewal.config().await else { return };
        let service = match config {
            Ok(config) => build(config, &self.options).await,
            Err(error) => Err(error),
        };
        match service {
            Ok(service) => self.service.store(Arc::new(service)),
            Err(error) => tracing::warn!(%error, "the way upstream could not be read again; the old one stays"),
        }
    }
}

impl Base {
    fn of(url: &Uri) -> Option<Self> {
        let authority = url.authority()?.as_str();
        let authority = authority.rsplit('@').next()?.parse().ok()?;
        let scheme = url.scheme().cloned().unwrap_or(Scheme::HTTPS);
        Some(Self { scheme, authority, prefix: url.path().trim_end_matches('/').to_owned() })
    }

    /// Where a request goes. Path and query stay as they are, to the byte.
    fn join(&self, uri: &Uri) -> Result<Uri, InvalidUri> {
        let path = match uri.path_and_query() {
            Some(path) if self.prefix.is_empty() => path.clone(),
            Some(path) => PathAndQuery::from_maybe_shared(format!("{}{path}", self.prefix))?,
            None => PathAndQuery::from_static("/"),
        };
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(self.scheme.clone());
        parts.authority = Some(self.authority.clone());
        parts.path_and_query = Some(path);
        // Cannot fail: all three are there.
        Ok(Uri::from_parts(parts).unwrap_or_default())
    }
}

/// Not within an `async fn`: the compiler could not tell that what it waits for is `Send`.
fn carry(
    service: Passage,
    request: http::Request<UpstreamBody>,
) -> BoxFuture<'static, Result<http::Response<UpstreamBody>, BoxError>> {
    service.oneshot(request).boxed()
}

/// How many connections it may take.
fn connections(options: &PassthroughOptions) -> usize {
    options.requests_max.div_ceil(STREAMS_MAX)
}

/// Removes whatever could make the apiserver take a request for somebody else's.
fn remove_credentials(headers: &mut HeaderMap) {
    let is_identity =
        |name: &str| name == "authorization" || name.starts_with("impersonate-") || name.starts_with("x-remote-");
    let names: Vec<_> = headers.keys().filter(|name| is_identity(name.as_str())).cloned().collect();
    for name in names {
        headers.remove(name);
    }
}

/// The same server, and nobody in particular.
fn anonymous(mut config: Config) -> Config {
    config.auth_info = AuthInfo::default();
    config.headers.clear();
    config
}

async fn build(config: Config, options: &PassthroughOptions) -> Result<Passage, SettingsError> {
    let server = transport::server_name(&config.cluster_url);
    let options = options.clone();
    // A credential plugin may have to run.
    let build = tokio::task::spawn_blocking(move || build_blocking(config, &options));
    build.await.unwrap_or_else(|_| {
        Err(SettingsError::Transport { server, message: "the credential plugin did not come back".to_owned() })
    })
}

fn build_blocking(config: Config, options: &PassthroughOptions) -> Result<Passage, SettingsError> {
    let config = match options.credentials {
        Credentials::Caller => anonymous(config),
        Credentials::Own => config,
    };
    let server = transport::server_name(&config.cluster_url);
    let failed = |message: String| SettingsError::Transport { server: server.clone(), message: shorten(&message) };
    let tls = transport::tls_config(&config).map_err(failed)?;
    let client = |versions| connector::build(&config, &tls, versions, options.connect_timeout).map_err(failed);
    let shared = (0..connections(options)).map(|_| client(Versions::All)).collect::<Result<Arc<[_]>, _>>()?;
    let upgrade = client(Versions::Http1)?;
    let routed = service_fn(move |request: http::Request<UpstreamBody>| {
        let client = match request.extensions().get() {
            Some(Route::Upgrade) => upgrade.clone(),
            Some(Route::Shared(number)) => shared.get(*number).unwrap_or(&upgrade).clone(),
            None => upgrade.clone(),
        };
        client.oneshot(request)
    });
    match options.credentials {
        Credentials::Caller => Ok(Passage::new(routed)),
        Credentials::Own => transport::authenticated(&config, routed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join(base: &str, path: &'static str) -> String {
        Base::of(&base.parse().unwrap()).unwrap().join(&path.parse().unwrap()).unwrap().to_string()
    }

    #[test]
    fn paths_go_on_to_the_byte() {
        for path in [
            "/api/v1/pods",
            "/api/v1/../x/%2e%2E/./y//z/",
            "/apis/a/v1/b?labelSelector=a%3Db,c='d'&x=%zz&&=",
            "/api/v1/namespaces/a/services/https:s:1/proxy/{x}|\"~",
        ] {
            assert_eq!(join("https://h:6443", path), format!("https://h:6443{path}"));
            assert_eq!(join("https://h/k8s/clusters/a/", path), format!("https://h/k8s/clusters/a{path}"));
        }
        assert_eq!(join("https://h:6443", "http://elsewhere:1/api?x"), "https://h:6443/api?x", "absolute form");
        assert_eq!(join("https://admin:secret@h:6443", "/api"), "https://h:6443/api");
    }

    #[test]
    fn nothing_that_names_an_identity_is_left() {
        let mut headers = HeaderMap::new();
        for name in
            ["authorization", "impersonate-user", "impersonate-extra-scopes", "x-remote-user", "accept", "x-request-id"]
        {
            headers.append(http::HeaderName::from_static(name), http::HeaderValue::from_static("x"));
            headers.append(http::HeaderName::from_static(name), http::HeaderValue::from_static("y"));
        }
        remove_credentials(&mut headers);
        let mut left: Vec<_> = headers.keys().map(|name| name.as_str()).collect();
        left.sort_unstable();
        assert_eq!(left, ["accept", "x-request-id"]);
    }

    #[test]
    fn a_caller_borrows_nothing_from_the_configuration() {
        let mut config = Config::new(Uri::from_static("https://h:6443"));
        config.auth_info.client_certificate_data = Some("certificate".to_owned());
        config.auth_info.username = Some("kubefan".to_owned());
        config.auth_info.impersonate = Some("admin".to_owned());
        config.headers.push((header::AUTHORIZATION, http::HeaderValue::from_static("Bearer x")));
        let config = anonymous(config);
        assert_eq!(format!("{:?}", config.auth_info), format!("{:?}", AuthInfo::default()));
        assert!(config.headers.is_empty());
    }
}
