//! Passthrough: forwards clients' requests to the apiserver unchanged.
//!
//! The hazard is a leaked identity: a client of kubefan must not act upstream as kubefan. These
//! connections are therefore separate from those of kubefan's own requests. If clients authenticate
//! as themselves, the connections are built from a configuration without any credentials, including
//! client certificates. If kubefan impersonates them, a request without a user is not sent.
//!
//! The other hazard is a shared connection: one client must not break the requests of others.
//! `connections` and `repeat` prevent that.

mod accepted_tokens;
mod base_url;
#[cfg(test)]
mod cancelled;
mod connections;
#[cfg(test)]
mod lost_connections;
mod passthrough_options;
mod protection;
mod repeat;
#[cfg(test)]
mod scripted_server;

use std::{sync::Arc, time::Duration};

use futures::{FutureExt, future::BoxFuture};
use http::{HeaderMap, Request, Response, StatusCode, Uri, Version, header, uri::InvalidUri};
use http_body_util::BodyExt;
use kube_client::{Config, config::AuthInfo};
use kubefan_common::kubeconfig::tls_config;
use tokio::time::{sleep, timeout};
use tower::{BoxError, ServiceExt, service_fn};

use self::{
    accepted_tokens::{AcceptedTokens, TokenKey},
    base_url::BaseUrl,
    connections::{Route, StreamPermits},
    repeat::Repeatable,
};
pub use self::{
    connections::connections_max,
    passthrough_options::{Credentials, PassthroughOptions},
    protection::check_reviewer,
};
pub use crate::transport::connector::ForwardService;
use crate::{
    acting_as::ActingAs,
    direct_apiserver::DirectApiserver,
    error::{UpstreamError, shorten},
    fallback::Verdict,
    identity_headers::is_identity,
    transport::{
        self,
        connection::{UpstreamBody, holding},
        connector::{self, HttpVersions},
        renewal::Renewed,
        settings::{SettingsError, UpstreamSettings},
        unprocessed,
    },
};

/// The longest time for which a request that finds an outage waits for the check of the apiserver.
const FALLBACK_WAIT: Duration = Duration::from_secs(3);

/// A request to forward.
pub struct Forwarded {
    /// Method, path, query, headers and body stay unchanged, except for the host and the
    /// credentials.
    pub request: Request<UpstreamBody>,
    /// The user that the request acts as, with [`Credentials::Impersonate`] only.
    pub acting_as: Option<ActingAs>,
    /// Whether the request needs a connection of its own, which can be upgraded.
    pub is_upgrade: bool,
    /// The bytes of the body that may be kept, to send the request again.
    pub kept_bytes_max: usize,
}

/// Extension of an answer of the apiserver, instead of the kubefan that is away.
#[derive(Debug, Clone, Copy)]
pub struct FromFallback;

/// Forwards requests to one apiserver.
pub struct Passthrough {
    service: Renewed<ForwardService, SettingsError>,
    base: BaseUrl,
    server: String,
    options: PassthroughOptions,
    streams: StreamPermits,
    accepted: AcceptedTokens,
    /// The apiserver in place of a kubefan that is away.
    fallback: Option<(DirectApiserver, Arc<Passthrough>)>,
}

impl Passthrough {
    /// Creates the connections from a kubeconfig or a service account.
    pub async fn from_settings(settings: UpstreamSettings, options: PassthroughOptions) -> Result<Self, SettingsError> {
        let config = settings.load().await?;
        let server = transport::server_name(&config.cluster_url);
        let base = BaseUrl::of(&config.cluster_url).ok_or_else(|| SettingsError::Transport {
            server: server.clone(),
            message: "its URL has no host".to_owned(),
        })?;
        let streams = StreamPermits::new(options.requests_max);
        let settings = settings.for_server(&config);
        let used = options.clone();
        let make = move || {
            let settings = settings.clone();
            let options = used.clone();
            let made = async move {
                let (config, files) = settings.load().await?;
                options.check_protection(&config)?;
                options.check_user(&config)?;
                Ok((build(config, &options).await?, files))
            };
            made.boxed()
        };
        let service = Renewed::new(make).await?;
        Ok(Self { service, base, server, options, streams, accepted: AcceptedTokens::default(), fallback: None })
    }

    /// Returns the same connections, to a kubefan. While that is away, requests go to the apiserver
    /// over `connections`.
    pub fn with_fallback(self, apiserver: DirectApiserver, connections: Self) -> Self {
        Self { fallback: Some((apiserver, Arc::new(connections))), ..self }
    }

    /// Forwards over an existing transport, which has the credentials, if any. Simulations and
    /// tests bring their own. `None` if the URL has no host.
    pub fn over(service: ForwardService, server: &Uri, options: PassthroughOptions) -> Option<Self> {
        Some(Self {
            service: Renewed::fixed(service),
            base: BaseUrl::of(server)?,
            server: transport::server_name(server),
            streams: StreamPermits::new(options.requests_max),
            options,
            accepted: AcceptedTokens::default(),
            fallback: None,
        })
    }

    /// Returns the owner of the credentials that requests carry.
    pub fn credentials(&self) -> Credentials {
        self.options.credentials
    }

    /// The limit on concurrent requests. The caller of [`Self::send`] keeps it.
    pub fn requests_max(&self) -> usize {
        self.options.requests_max
    }

    /// Whether a request with this path would carry kubefan's credentials out of the path of the
    /// server's URL, to another service.
    pub fn leads_out(&self, path: &str) -> bool {
        let is_left_directly = || self.fallback.as_ref().is_some_and(|(_, direct)| direct.base.is_left_by(path));
        self.options.credentials.are_kubefans() && (self.base.is_left_by(path) || is_left_directly())
    }

    /// Sends a request. It is sent again, on another connection, if the apiserver has certainly not
    /// read it.
    ///
    /// # Errors
    /// [`UpstreamError::Unread`] if the apiserver has not read the request, and it cannot be sent
    /// again or was sent too often.
    pub async fn send(&self, forwarded: Forwarded) -> Result<Response<UpstreamBody>, UpstreamError> {
        let Forwarded { mut request, acting_as, is_upgrade, kept_bytes_max } = forwarded;
        let credentials = self.options.credentials;
        if (credentials == Credentials::Impersonate) != acting_as.is_some() {
            return Err(UpstreamError::invalid("nothing says which user the request acts as"));
        }
        let asked = request.uri().clone();
        *request.uri_mut() = self.base.join(&asked).map_err(invalid)?;
        // The connection determines the actual version.
        *request.version_mut() = Version::HTTP_11;
        request.headers_mut().remove(header::HOST);
        if credentials.are_kubefans() {
            remove_credentials(request.headers_mut());
        }
        let token = TokenKey::of(request.headers());
        let method = request.method().clone();
        if let Some(acting_as) = acting_as {
            acting_as.write(request.headers_mut());
        }
        let is_accepted = credentials.are_kubefans() || self.accepted.contains(token);
        let (route, permit) = self.streams.acquire(is_accepted, is_upgrade);
        request.extensions_mut().clear();
        request.extensions_mut().insert(route);
        let sent = self.send_or_fall_back(Repeatable::new(request, kept_bytes_max), &asked).await;
        if !credentials.are_kubefans() {
            self.accepted.answered(token, &method, sent.as_ref().ok().map(|response| response.status()));
        }
        sent.map(|response| response.map(|body| holding(body, permit).boxed_unsync()))
    }

    /// Sends a request to the apiserver of the fallback if the kubefan is away, also if this
    /// request finds that out and the kubefan has certainly not read it.
    async fn send_or_fall_back(
        &self,
        request: Repeatable,
        asked: &Uri,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        let Some((apiserver, direct)) = &self.fallback else { return self.send_until_read(&request).await };
        if !apiserver.is_usable() {
            let attempt = apiserver.fallback().attempt();
            let sent = self.send_until_read(&request).await;
            let error = match sent {
                Ok(response) => return Ok(response),
                Err(error) => error,
            };
            // Callers can break off their requests, and provoke answers. So only a connection that
            // cannot be made counts.
            if matches!(error, UpstreamError::Unreachable { .. }) {
                attempt.note(Verdict::Lost);
            }
            let is_unread = matches!(error, UpstreamError::Unreachable { .. } | UpstreamError::Unread { .. });
            if !is_unread || !request.is_repeatable() {
                return Err(error);
            }
            // It holds a place meanwhile.
            if !timeout(FALLBACK_WAIT, apiserver.becomes_usable()).await.unwrap_or_default() {
                return Err(error);
            }
        }
        let to = direct.base.join(asked).map_err(invalid)?;
        let mut response = direct.send_until_read(&request.to(to)).await?;
        response.extensions_mut().insert(FromFallback);
        Ok(response)
    }

    /// Makes attempts until the apiserver has read the request.
    async fn send_until_read(&self, request: &Repeatable) -> Result<Response<UpstreamBody>, UpstreamError> {
        let mut delays = unprocessed::DELAYS.iter();
        let mut last_error = None;
        let mut service = self.service.current().await;
        while let Some(attempt) = request.attempt() {
            let error = match forward(ForwardService::clone(&service), attempt).await {
                Ok(response) => {
                    if self.options.credentials.are_kubefans() && response.status() == StatusCode::UNAUTHORIZED {
                        self.service.refused(&service).await;
                    }
                    return Ok(response);
                }
                Err(error) => error,
            };
            if unprocessed::is_unprocessed(&*error) {
                last_error = Some(transport::root_cause(&*error));
                let Some(delay) = delays.next() else { break };
                sleep(*delay).await;
                continue;
            }
            let is_unsent = transport::is_unsent(&*error);
            let error = transport::classify(error, &self.server);
            let is_renewed = error.may_be_of_settings() && self.service.refused(&service).await;
            // TLS may also break after the apiserver has read the request.
            if !is_renewed || !is_unsent {
                return Err(error);
            }
            service = self.service.last();
        }
        Err(UpstreamError::Unread { message: last_error.unwrap_or_default() })
    }
}

fn invalid(_: InvalidUri) -> UpstreamError {
    UpstreamError::invalid("the path cannot be appended to the server's")
}

/// A separate function, because the compiler cannot prove that the future inside an `async fn` is
/// `Send`.
fn forward(
    service: ForwardService,
    request: Request<UpstreamBody>,
) -> BoxFuture<'static, Result<Response<UpstreamBody>, BoxError>> {
    service.oneshot(request).boxed()
}

/// Removes every header that could make the apiserver attribute the request to another user.
fn remove_credentials(headers: &mut HeaderMap) {
    let names: Vec<_> = headers.keys().filter(|name| is_identity(name.as_str())).cloned().collect();
    for name in names {
        headers.remove(name);
    }
}

/// The configuration for the same server, without any credentials.
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
    let tls = tls_config(&config).map_err(failed)?;
    let client = |versions| connector::build(&config, &tls, versions, options.connection).map_err(failed);
    let clients = || {
        let clients = (0..connections::shared(options.requests_max)).map(|_| client(HttpVersions::All));
        clients.collect::<Result<Arc<[_]>, _>>()
    };
    let accepted = clients()?;
    let unaccepted = clients()?;
    let upgrade = client(HttpVersions::Http1)?;
    let service = service_fn(move |request: Request<UpstreamBody>| {
        let shared = match request.extensions().get() {
            Some(Route::Accepted(number)) => accepted.get(*number),
            Some(Route::Unaccepted(number)) => unaccepted.get(*number),
            Some(Route::Upgrade) | None => None,
        };
        shared.unwrap_or(&upgrade).clone().oneshot(request)
    });
    match options.credentials {
        Credentials::Caller => Ok(ForwardService::new(service)),
        Credentials::Own | Credentials::Impersonate => transport::authenticated(&config, service),
    }
}

#[cfg(test)]
mod tests;
