//! Passthrough: forwards clients' requests to the apiserver unread and unchanged.
//!
//! The hazard is a leaked identity: a client of kubefan must not act upstream as kubefan. These
//! connections are therefore separate from those of kubefan's own requests. If clients authenticate
//! as themselves, the connections are built from a configuration without any credentials, including
//! client certificates. If kubefan impersonates them, a request without a user is not sent.

use std::{net::IpAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use futures::{FutureExt, future::BoxFuture};
use http::{
    HeaderMap, StatusCode, Uri, Version, header,
    uri::{Authority, InvalidUri, PathAndQuery, Scheme},
};
use kube_client::{Config, config::AuthInfo};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::{BoxError, ServiceExt, service_fn};

use crate::upstream::{
    acting_as::ActingAs,
    error::{UpstreamError, shorten},
    repeat,
    transport::{
        self,
        connection::{STREAMS_MAX, UpstreamBody},
        connector::{self, ForwardService, HttpVersions},
        renewal::Renewal,
        settings::{SettingsError, UpstreamSettings},
    },
};

/// Whose credentials a forwarded request carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Credentials {
    /// Only the client's credentials, from the request.
    Caller,
    /// Only kubefan's credentials. Those in the request are removed.
    Own,
    /// Kubefan's credentials, and the user that the request acts as. Those in the request are
    /// removed.
    Impersonate,
}

/// Options of passthrough.
#[derive(Debug, Clone)]
pub struct PassthroughOptions {
    /// Whose credentials requests carry.
    pub credentials: Credentials,
    /// The limit on concurrent requests.
    pub requests_max: usize,
    /// Whether callers' tokens may be sent where others could read them.
    pub allows_insecure_upstream: bool,
    /// Time limit for a connection with its TLS handshake.
    pub connect_timeout: Duration,
}

impl PassthroughOptions {
    /// Refuses to send callers' tokens over plain http, where they could be read on the way, or to
    /// a server that proves nothing. Plain http stays allowed within this machine.
    fn check_protection(&self, config: &Config) -> Result<(), SettingsError> {
        if self.credentials != Credentials::Caller || self.allows_insecure_upstream {
            return Ok(());
        }
        let Some(problem) = exposure(config) else { return Ok(()) };
        Err(SettingsError::Unprotected { server: transport::server_name(&config.cluster_url), problem })
    }
}

impl PassthroughOptions {
    /// A request can act as one user only.
    fn check_user(&self, config: &Config) -> Result<(), SettingsError> {
        let AuthInfo { impersonate, impersonate_groups, .. } = &config.auth_info;
        if self.credentials != Credentials::Impersonate || (impersonate.is_none() && impersonate_groups.is_none()) {
            return Ok(());
        }
        let message = "--passthrough=impersonate acts as kubefan's callers, and this kubeconfig already acts as another user (as, \
                       as-groups); leave that out"
            .to_owned();
        Err(SettingsError::Transport { server: transport::server_name(&config.cluster_url), message })
    }
}

/// How tokens that are sent to the apiserver could be read by others; `None` if they could not.
fn exposure(config: &Config) -> Option<&'static str> {
    let is_plain = config.cluster_url.scheme() == Some(&Scheme::HTTP);
    let is_local = config.proxy_url.is_none() && is_loopback(&config.cluster_url);
    match is_plain {
        true if is_local => None,
        true => Some("over plain http"),
        false if config.accept_invalid_certs => Some("without a check of its certificate (insecure-skip-tls-verify)"),
        false => None,
    }
}

/// Refuses to have callers reviewed by a server that others could stand in for, or where they could
/// read callers' tokens on the way.
///
/// # Errors
/// The settings cannot be read, or [`SettingsError::Unverified`].
pub async fn check_reviewer(settings: &UpstreamSettings) -> Result<(), SettingsError> {
    let config = settings.load().await?;
    match exposure(&config) {
        None => Ok(()),
        Some(problem) => {
            Err(SettingsError::Unverified { server: transport::server_name(&config.cluster_url), problem })
        }
    }
}

fn is_loopback(url: &Uri) -> bool {
    let host = url.host().unwrap_or_default();
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.to_canonical().is_loopback())
}

/// Forwards requests to one apiserver.
pub struct Passthrough {
    service: ArcSwap<ForwardService>,
    base: BaseUrl,
    server: String,
    options: PassthroughOptions,
    renewal: Renewal,
    /// Permits of long-running requests. They leave some permits for short requests, such as the
    /// renewal of a lease.
    long_running: Arc<Semaphore>,
    /// The stream permits of each connection. Requests beyond the server's limit would wait for
    /// each other, and for watches that means hours.
    connections: Vec<Arc<Semaphore>>,
}

/// One permit in this many is reserved for short requests.
const SHORT_SHARE: usize = 5;

/// The destination of every request, regardless of the host that the request names.
struct BaseUrl {
    scheme: Scheme,
    /// Without user info.
    authority: Authority,
    /// Without a trailing slash.
    prefix: String,
}

/// The permit of a forwarded request. It must be held until the response has ended.
pub struct PassthroughPermit {
    route: Route,
    _long_running: Option<OwnedSemaphorePermit>,
    _connection: Option<OwnedSemaphorePermit>,
}

/// The HTTP client for a request.
#[derive(Debug, Clone, Copy)]
enum Route {
    /// The shared client with this index.
    Shared(usize),
    /// A separate connection, which can be upgraded to another protocol.
    Upgrade,
}

impl Passthrough {
    /// Creates the connections from a kubeconfig or a service account.
    pub async fn from_settings(settings: UpstreamSettings, options: PassthroughOptions) -> Result<Self, SettingsError> {
        let config = settings.load().await?;
        options.check_protection(&config)?;
        options.check_user(&config)?;
        let server = transport::server_name(&config.cluster_url);
        let base = BaseUrl::of(&config.cluster_url).ok_or_else(|| SettingsError::Transport {
            server: server.clone(),
            message: "its URL has no host".to_owned(),
        })?;
        let service = ArcSwap::from_pointee(build(config, &options).await?);
        let long_running = long_running_max(options.requests_max);
        let long_running = Arc::new(Semaphore::new(long_running.min(Semaphore::MAX_PERMITS)));
        let connections = connections(options.requests_max);
        let connections = (0..connections).map(|_| Arc::new(Semaphore::new(STREAMS_MAX))).collect();
        let renewal = Renewal::new(Some(settings));
        Ok(Self { service, base, server, options, renewal, long_running, connections })
    }

    /// Whose credentials requests carry.
    pub fn credentials(&self) -> Credentials {
        self.options.credentials
    }

    /// The limit on concurrent requests.
    pub fn requests_max(&self) -> usize {
        self.options.requests_max
    }

    /// Whether a request with this path would carry kubefan's credentials out of the path of the
    /// server's URL, to another service.
    pub fn leads_out(&self, path: &str) -> bool {
        self.options.credentials != Credentials::Caller && self.base.is_left_by(path)
    }

    /// Acquires a permit for one request; the caller counts them all. `is_upgrade` requests get a
    /// separate connection. Long-running requests (`lasts`, and all upgrades) have a limit of their
    /// own. `None` if it is reached.
    pub fn try_acquire(&self, is_upgrade: bool, lasts: bool) -> Option<PassthroughPermit> {
        let long_running = match lasts || is_upgrade {
            true => Some(self.long_running.clone().try_acquire_owned().ok()?),
            false => None,
        };
        if is_upgrade {
            return Some(PassthroughPermit { route: Route::Upgrade, _long_running: long_running, _connection: None });
        }
        let free = |connection: &Arc<Semaphore>| connection.clone().try_acquire_owned().ok();
        let free = self.connections.iter().enumerate().find_map(|(number, permits)| Some((number, free(permits)?)));
        // The connections together have enough permits. A search can miss one only if it was
        // released behind the search's position.
        let (number, connection) = free.map_or((0, None), |(number, permit)| (number, Some(permit)));
        Some(PassthroughPermit { route: Route::Shared(number), _long_running: long_running, _connection: connection })
    }

    /// Sends a request. Method, path, query, headers and body stay unchanged, except for the host
    /// and the credentials. With [`Credentials::Impersonate`] it is sent only as a user.
    pub async fn send(
        &self,
        place: &PassthroughPermit,
        acting_as: Option<ActingAs>,
        mut request: http::Request<UpstreamBody>,
    ) -> Result<http::Response<UpstreamBody>, UpstreamError> {
        let credentials = self.options.credentials;
        if (credentials == Credentials::Impersonate) != acting_as.is_some() {
            return Err(UpstreamError::invalid("nothing says which user the request acts as"));
        }
        let invalid = |_| UpstreamError::invalid("the path cannot be appended to the server's");
        *request.uri_mut() = self.base.join(request.uri()).map_err(invalid)?;
        // The connection determines the actual version.
        *request.version_mut() = Version::HTTP_11;
        request.headers_mut().remove(header::HOST);
        if credentials != Credentials::Caller {
            remove_credentials(request.headers_mut());
        }
        if let Some(acting_as) = acting_as {
            acting_as.write(request.headers_mut());
        }
        request.extensions_mut().clear();
        request.extensions_mut().insert(place.route);
        let (again, service) = (repeat::copy_of(&request), ForwardService::clone(&self.service.load()));
        let sent = match (forward(service.clone(), request).await, again) {
            (Err(error), Some(again)) if repeat::is_unread(&*error) => forward(service, again).await,
            (sent, _) => sent,
        };
        let sent = sent.map_err(|error| transport::classify(error, &self.server));
        let refused = match &sent {
            Ok(response) => credentials != Credentials::Caller && response.status() == StatusCode::UNAUTHORIZED,
            Err(error) => matches!(error, UpstreamError::Tls { .. } | UpstreamError::Credentials { .. }),
        };
        if refused {
            self.renew().await;
        }
        sent
    }

    /// Reads the settings again, and opens new connections with them.
    async fn renew(&self) {
        let Some(config) = self.renewal.config().await else { return };
        let service = match config {
            Ok(config) => {
                match self.options.check_protection(&config).and_then(|()| self.options.check_user(&config)) {
                    Ok(()) => build(config, &self.options).await,
                    Err(error) => Err(error),
                }
            }
            Err(error) => Err(error),
        };
        match service {
            Ok(service) => self.service.store(Arc::new(service)),
            Err(error) => tracing::warn!(%error, "cannot read the upstream settings again; the old ones stay in use"),
        }
    }
}

impl BaseUrl {
    fn of(url: &Uri) -> Option<Self> {
        let authority = url.authority()?.as_str();
        let authority = authority.rsplit('@').next()?.parse().ok()?;
        let scheme = url.scheme().cloned().unwrap_or(Scheme::HTTPS);
        Some(Self { scheme, authority, prefix: url.path().trim_end_matches('/').to_owned() })
    }

    /// Whether a server that resolves dots could read a path as one outside of the prefix.
    fn is_left_by(&self, path: &str) -> bool {
        let path = path.to_ascii_lowercase().replace("%2e", ".").replace("%2f", "/").replace("%5c", "\\");
        !self.prefix.is_empty() && path.split(['/', '\\']).any(|segment| segment == "..")
    }

    /// The full URL of a request. Path and query stay the same, byte for byte.
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
        // Cannot fail, because all three parts are set.
        Ok(Uri::from_parts(parts).unwrap_or_default())
    }
}

/// A separate function, because the compiler cannot prove that the future inside an `async fn` is
/// `Send`.
fn forward(
    service: ForwardService,
    request: http::Request<UpstreamBody>,
) -> BoxFuture<'static, Result<http::Response<UpstreamBody>, BoxError>> {
    service.oneshot(request).boxed()
}

/// The number of shared connections.
fn connections(requests_max: usize) -> usize {
    requests_max.div_ceil(STREAMS_MAX)
}

/// How many long-running requests there may be.
fn long_running_max(requests_max: usize) -> usize {
    requests_max - requests_max / SHORT_SHARE
}

/// The most connections to upstream that so many requests need. With `upgrades`, each session has
/// one of its own.
pub fn connections_max(requests_max: usize, upgrades: bool) -> usize {
    connections(requests_max) + if upgrades { long_running_max(requests_max) } else { 0 }
}

/// Removes every header by which the apiserver could attribute the request to another user.
fn remove_credentials(headers: &mut HeaderMap) {
    let is_identity =
        |name: &str| name == "authorization" || name.starts_with("impersonate-") || name.starts_with("x-remote-");
    let names: Vec<_> = headers.keys().filter(|name| is_identity(name.as_str())).cloned().collect();
    for name in names {
        headers.remove(name);
    }
}

/// The same server, without any credentials.
fn anonymous(mut config: Config) -> Config {
    config.auth_info = AuthInfo::default();
    config.headers.clear();
    config
}

async fn build(config: Config, options: &PassthroughOptions) -> Result<ForwardService, SettingsError> {
    let server = transport::server_name(&config.cluster_url);
    let options = options.clone();
    // This may run a credential plugin.
    let build = tokio::task::spawn_blocking(move || build_blocking(config, &options));
    build.await.unwrap_or_else(|_| {
        Err(SettingsError::Transport { server, message: "the task that runs the credential plugin failed".to_owned() })
    })
}

fn build_blocking(config: Config, options: &PassthroughOptions) -> Result<ForwardService, SettingsError> {
    let config = match options.credentials {
        Credentials::Caller => anonymous(config),
        Credentials::Own | Credentials::Impersonate => config,
    };
    let server = transport::server_name(&config.cluster_url);
    let failed = |message: String| SettingsError::Transport { server: server.clone(), message: shorten(&message) };
    let tls = transport::tls_config(&config).map_err(failed)?;
    let client = |versions| connector::build(&config, &tls, versions, options.connect_timeout).map_err(failed);
    let shared =
        (0..connections(options.requests_max)).map(|_| client(HttpVersions::All)).collect::<Result<Arc<[_]>, _>>()?;
    let upgrade = client(HttpVersions::Http1)?;
    let route = service_fn(move |request: http::Request<UpstreamBody>| {
        let client = match request.extensions().get() {
            Some(Route::Upgrade) => upgrade.clone(),
            Some(Route::Shared(number)) => shared.get(*number).unwrap_or(&upgrade).clone(),
            None => upgrade.clone(),
        };
        client.oneshot(request)
    });
    match options.credentials {
        Credentials::Caller => Ok(ForwardService::new(route)),
        Credentials::Own | Credentials::Impersonate => transport::authenticated(&config, route),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn callers_tokens_are_not_sent_where_others_could_read_them() {
        let options = |credentials, allows_insecure_upstream| PassthroughOptions {
            credentials,
            requests_max: 1,
            allows_insecure_upstream,
            connect_timeout: Duration::from_secs(1),
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
            assert!(refused.is_none_or(|error| error.to_string().contains("--passthrough-insecure-upstream")));
            assert!(options(Credentials::Caller, true).check_protection(&config).is_ok(), "{url}");
            assert!(options(Credentials::Own, false).check_protection(&config).is_ok(), "{url}");
        }
        let mut proxied = Config::new("http://localhost:8001".parse().unwrap());
        proxied.proxy_url = Some("http://proxy.example:3128".parse().unwrap());
        assert!(options(Credentials::Caller, false).check_protection(&proxied).is_err());
    }

    use super::*;

    fn join(base: &str, path: &'static str) -> String {
        BaseUrl::of(&base.parse().unwrap()).unwrap().join(&path.parse().unwrap()).unwrap().to_string()
    }

    #[test]
    fn paths_are_forwarded_byte_for_byte() {
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
    fn a_path_with_dots_may_lead_out_of_a_prefix() {
        let is_left = |base: &str, path| BaseUrl::of(&base.parse().unwrap()).unwrap().is_left_by(path);
        for (path, is) in [
            ("/api/v1/pods", false),
            ("/api/v1/namespaces/a/configmaps/a..b", false),
            ("/api/../../../../v3/tokens", true),
            ("/api/%2e%2E/v3", true),
            ("/api/.%2e%2Fv3", true),
            ("/api/..%5cv3", true),
            ("/..", true),
        ] {
            assert_eq!(is_left("https://h/k8s/clusters/a", path), is, "{path}");
            assert!(!is_left("https://h:6443/", path), "all of the server is the apiserver");
        }
    }

    #[test]
    fn every_identity_header_is_removed() {
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
    fn an_anonymous_configuration_has_no_credentials() {
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
