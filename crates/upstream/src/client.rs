//! Requests to the apiserver. Reads have bounded answers, watches have endless ones, and every
//! failure becomes an [`UpstreamError`].
//!
//! The client works over any `tower` service, so that tests and the simulator can replace the
//! network. Every wait is limited: a read has a deadline for its whole answer, a watch has one for
//! its headers and then an idle timeout.

mod availability;
mod body_stream;
mod cross_origin;
mod exchange;
mod fallen_back;
pub mod identity;
mod identity_check;
pub mod lines;
mod probe;
mod replace;
mod review;
mod trusted_transport;
mod upstream_options;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use arc_swap::ArcSwap;
pub use body_stream::BodyStream;
use bytes::{Bytes, BytesMut};
use futures::{FutureExt, TryStreamExt};
use http::{HeaderMap, StatusCode, Uri, header};
pub use identity_check::FORBIDDEN_GRACE;
use kubefan_cache::warnings::Warnings;
pub use kubefan_common::query::encode_query;
use kubefan_common::{kubeconfig::is_loopback, text::without_value, watch_body::Framing};
use kubefan_model::Media;
pub use review::ReviewKind;
use serde::de::DeserializeOwned;
use tokio::{task::coop::consume_budget, time::timeout};
pub use upstream_options::UpstreamOptions;

pub use crate::transport::{
    HttpService,
    connection::{ConnectionLimits, UpstreamBody, holding},
};
use crate::{
    client::{
        availability::Availability,
        identity::{IdentityState, KUBE_SYSTEM, TrustedCa},
        lines::{LineOptions, Lines},
        trusted_transport::{Transport, accept_encoding, build, build_blocking},
    },
    error::{UpstreamError, shorten},
    fallback::{Fallback, Verdict, is_through_kubefan},
    transport::{
        self,
        renewal::Renewed,
        settings::{SettingsError, UpstreamSettings},
    },
};

/// The media type of everything that is read outside a cache.
const JSON: &str = Media::Json.content_type();
/// The number of bytes read from an error's body.
const ERROR_BODY_BYTES_MAX: usize = 64 << 10;

/// The verb of a request, as the apiserver defines it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verb {
    /// One object or document.
    Get,
    /// A list, or one page of a list.
    List,
    /// A watch.
    Watch,
    /// The creation of a review.
    Create,
    /// The replacement of an object.
    Update,
}

impl Verb {
    /// The label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::List => "list",
            Self::Watch => "watch",
            Self::Create => "create",
            Self::Update => "update",
        }
    }
}

/// Called for every request once its status is known; `None` if there was no answer.
pub type UpstreamObserver = Arc<dyn Fn(Verb, Option<StatusCode>) + Send + Sync>;

/// A client of one apiserver. Clones share connections and credentials.
#[derive(Clone)]
pub struct Upstream {
    inner: Arc<Inner>,
    identity: Arc<IdentityState>,
    observer: UpstreamObserver,
    /// The part of a kubefan's client in the fallback to the apiserver.
    tier: Option<Tier>,
}

/// The part of a kubefan's client in a fallback.
#[derive(Clone)]
struct Tier {
    fallback: Fallback,
    /// The apiserver, if requests go there while the kubefan is away.
    direct: Option<Arc<Upstream>>,
}

struct Inner {
    transport: Renewed<Transport, SettingsError>,
    /// Scheme, authority and path prefix, without a trailing slash.
    base: String,
    server: String,
    options: UpstreamOptions,
    availability: Availability,
    /// Whether the answer to the last check of the cluster has come through a kubefan.
    is_kubefan: AtomicBool,
    /// The last warnings on requests for single documents. They concern kubefan itself, not a
    /// resource.
    own_warnings: ArcSwap<Warnings>,
}

/// Whether a path is of Secrets. It may also be of another resource in a namespace with that name.
fn is_of_secrets(path_and_query: &str) -> bool {
    let path = path_and_query.split_once('?').map_or(path_and_query, |(path, _)| path);
    path.strip_prefix("/api/v1/").is_some_and(|path| path.split('/').any(|part| part == "secrets"))
}

impl Upstream {
    /// Creates a client from a kubeconfig or a service account.
    ///
    /// The settings are read again when a file that they name has changed, and if the apiserver
    /// refuses the credentials, so that renewed CAs and client certificates and new credentials
    /// from exec plugins are used. Token files are always re-read.
    pub async fn from_settings(settings: UpstreamSettings, options: UpstreamOptions) -> Result<Self, SettingsError> {
        let config = settings.load().await?;
        let base = transport::request_base(&config)?;
        let server = transport::server_name(&config.cluster_url);
        let settings = settings.for_server(&config);
        let used = options.clone();
        let make = move || {
            let settings = settings.clone();
            let options = used.clone();
            let made = async move {
                let (config, files) = settings.load().await?;
                Ok((build_blocking(config, &options).await?, files))
            };
            made.boxed()
        };
        Ok(Self::new(Renewed::new(make).await?, &base, server, options))
    }

    /// Creates a client from a ready configuration. This runs the configuration's exec plugin, if
    /// any, so it may block.
    pub fn from_config(config: kube_client::Config, options: UpstreamOptions) -> Result<Self, SettingsError> {
        let base = transport::request_base(&config)?;
        let server = transport::server_name(&config.cluster_url);
        Ok(Self::new(Renewed::fixed(build(&config, &options)?), &base, server, options))
    }

    /// Creates a client over any HTTP service, for tests and simulation.
    pub fn from_service(service: HttpService, base: &Uri, options: UpstreamOptions) -> Self {
        let accept_encoding = accept_encoding(!is_loopback(base));
        let transport = Renewed::fixed(Transport { service, trusted_ca: TrustedCa::default(), accept_encoding });
        Self::new(transport, base, transport::server_name(base), options)
    }

    fn new(transport: Renewed<Transport, SettingsError>, base: &Uri, server: String, options: UpstreamOptions) -> Self {
        let base = format!("{}{}", transport::server_name(base), base.path().trim_end_matches('/'));
        let inner = Inner {
            transport,
            base,
            server,
            options,
            availability: Default::default(),
            is_kubefan: AtomicBool::default(),
            own_warnings: Default::default(),
        };
        Self { inner: Arc::new(inner), identity: Arc::default(), observer: Arc::new(|_, _| {}), tier: None }
    }

    /// Returns the same client, which calls `observer` for every request.
    pub fn with_observer(self, observer: UpstreamObserver) -> Self {
        Self { observer, ..self }
    }

    /// Scheme, host and port, for messages.
    pub fn server(&self) -> &str {
        &self.inner.server
    }

    pub(crate) fn identity_state(&self) -> &IdentityState {
        &self.identity
    }

    pub(crate) fn availability(&self) -> &Availability {
        &self.inner.availability
    }

    /// The CA that the server's certificate is verified against now.
    pub fn trusted_ca(&self) -> TrustedCa {
        self.inner.transport.last().trusted_ca.clone()
    }

    /// Reads JSON at a path relative to the server's, such as `/api/v1/pods?limit=500`.
    pub async fn get(&self, verb: Verb, path_and_query: &str) -> Result<Bytes, UpstreamError> {
        Ok(self.get_accept(verb, path_and_query, JSON).await?.into_body())
    }

    /// Reads JSON and deserializes it.
    pub async fn get_json<T: DeserializeOwned>(&self, verb: Verb, path_and_query: &str) -> Result<T, UpstreamError> {
        let body = self.get(verb, path_and_query).await?;
        serde_json::from_slice(&body)
            .map_err(|error| UpstreamError::invalid(format_args!("{path_and_query}: {}", without_value(&error))))
    }

    /// Reads one answer with its headers. `accept` lists the media types.
    pub async fn get_accept(
        &self,
        verb: Verb,
        path_and_query: &str,
        accept: &str,
    ) -> Result<http::Response<Bytes>, UpstreamError> {
        self.get_limited(verb, path_and_query, accept, self.inner.options.body_bytes_max).await
    }

    /// As [`Self::get_accept`], with its own limit in bytes.
    pub(crate) async fn get_limited(
        &self,
        verb: Verb,
        path_and_query: &str,
        accept: &str,
        body_bytes_max: usize,
    ) -> Result<http::Response<Bytes>, UpstreamError> {
        let this = self.in_use();
        this.within_timeout(async {
            let (parts, body) = this.send(verb, path_and_query, accept).await?.into_parts();
            Ok(http::Response::from_parts(parts, this.read(body, body_bytes_max).await?))
        })
        .await
    }

    /// Reads objects in an encoding, with the warnings about the resource. `bytes_max` lowers the
    /// limit of an answer.
    ///
    /// # Errors
    /// [`UpstreamError::Refused`] with 406 if the server answers in another encoding, and
    /// [`UpstreamError::TooLarge`].
    pub async fn get_media(
        &self,
        verb: Verb,
        path_and_query: &str,
        media: Media,
        bytes_max: usize,
    ) -> Result<(Bytes, Warnings), UpstreamError> {
        let bytes_max = bytes_max.min(self.inner.options.body_bytes_max);
        let response = self.get_limited(verb, path_and_query, media.accept(), bytes_max).await?;
        check_media(response.headers(), media)?;
        let warnings = self.warnings(response.headers());
        Ok((response.into_body(), warnings))
    }

    /// Starts a watch, and returns its body as a stream of chunks.
    ///
    /// # Errors
    /// As [`Self::get_media`].
    pub async fn stream(&self, path_and_query: &str, media: Media) -> Result<BodyStream, UpstreamError> {
        let this = self.in_use();
        let send = this.send(Verb::Watch, path_and_query, media.watch_accept());
        let response = this.within_timeout(send).await?;
        check_media(response.headers(), media)?;
        let warnings = this.warnings(response.headers());
        Ok(response.into_body().with_warnings(warnings))
    }

    /// Starts a watch, and returns its events with the warnings about the resource.
    ///
    /// The encoding and the answer's headers determine how the body is split into events.
    ///
    /// # Errors
    /// As [`Self::get_media`].
    pub async fn watch(
        &self,
        path_and_query: &str,
        media: Media,
        options: LineOptions,
    ) -> Result<(Lines<BodyStream>, Warnings), UpstreamError> {
        let mut chunks = self.stream(path_and_query, media).await?;
        let warnings = std::mem::take(&mut chunks.warnings);
        let framing = match media {
            Media::Json | Media::Table => Framing::Lines,
            Media::Protobuf => Framing::Lengths,
        };
        let options = LineOptions { framing, ..options };
        Ok((Lines::new(chunks, options), warnings))
    }

    /// The warnings in an answer that concern the requested resource.
    fn warnings(&self, headers: &HeaderMap) -> Warnings {
        Warnings::of(headers).without(&self.inner.own_warnings.load())
    }

    async fn within_timeout<T>(
        &self,
        work: impl Future<Output = Result<T, UpstreamError>>,
    ) -> Result<T, UpstreamError> {
        let request_timeout = self.inner.options.request_timeout;
        let attempt = self.attempt();
        let answered = timeout(request_timeout, work).await;
        let is_late = answered.is_err();
        // The apiserver behind a kubefan may be the one that hangs.
        if is_late
            && let Some(attempt) = attempt
            && !Box::pin(self.serves_in_time()).await
        {
            attempt.note(Verdict::Lost);
        }
        let result = answered.unwrap_or_else(|_| {
            let message = format!("no complete answer from {} within {request_timeout:?}", self.inner.server);
            Err(UpstreamError::Timeout { message, retry_after: None })
        });
        if let Err(UpstreamError::Auth { .. }) = &result {
            self.inner.transport.refused(&self.inner.transport.last()).await;
        }
        result
    }

    /// Sends a read, and turns every status except success into an error.
    async fn send(
        &self,
        verb: Verb,
        path_and_query: &str,
        accept: &str,
    ) -> Result<http::Response<BodyStream>, UpstreamError> {
        // The length of compressed Secrets tells what they have in common with each other.
        let accept_encoding =
            if is_of_secrets(path_and_query) { "identity" } else { self.inner.transport.last().accept_encoding };
        let request = http::Request::get(format!("{}{path_and_query}", self.inner.base))
            .header(header::ACCEPT, accept)
            .header(header::ACCEPT_ENCODING, accept_encoding)
            .header(header::USER_AGENT, &self.inner.options.user_agent)
            .body(Bytes::new())
            .map_err(|error| UpstreamError::invalid(format_args!("{path_and_query} is not a valid path: {error}")))?;
        self.send_request(verb, request).await
    }

    /// Sends a request, and turns every status except success into an error.
    async fn send_request(
        &self,
        verb: Verb,
        request: http::Request<Bytes>,
    ) -> Result<http::Response<BodyStream>, UpstreamError> {
        let response = self.exchange_noted(verb, request).await?;
        // A failure may come from a load balancer, so its lack of warnings means nothing.
        if verb == Verb::Get && response.status().is_success() {
            self.inner.own_warnings.store(Arc::new(Warnings::of(response.headers())));
        }
        let (parts, body) = response.into_parts();
        let body = BodyStream::new(&parts.headers, body, &self.inner.server);
        if parts.status.is_success() {
            return Ok(http::Response::from_parts(parts, body?));
        }
        // Without a readable body, the status alone is sufficient.
        let body = async { self.read(body?, ERROR_BODY_BYTES_MAX).await }.await.unwrap_or_default();
        Err(UpstreamError::from_response(parts.status, &parts.headers, &body))
    }

    /// As [`Self::exchange`]. Notes what the answer says about a kubefan.
    async fn exchange_noted(
        &self,
        verb: Verb,
        request: http::Request<Bytes>,
    ) -> Result<http::Response<UpstreamBody>, UpstreamError> {
        let attempt = self.attempt();
        // Not of other requests: an aggregated API may itself be served by a kubefan.
        let is_check = verb == Verb::Get && request.uri().path().ends_with(KUBE_SYSTEM);
        let exchanged = self.exchange(verb, request).await;
        if let (Ok(response), true) = (&exchanged, is_check) {
            self.inner.is_kubefan.store(is_through_kubefan(response.headers()), Ordering::Relaxed);
        }
        if let Some(attempt) = attempt {
            attempt.exchanged(verb, &exchanged);
        }
        exchanged
    }

    async fn read(&self, mut body: BodyStream, body_bytes_max: usize) -> Result<Bytes, UpstreamError> {
        if body.bytes_min > body_bytes_max {
            return Err(UpstreamError::TooLarge { body_bytes_max });
        }
        let mut bytes = BytesMut::with_capacity(body.bytes_min.min(1 << 20));
        while let Some(chunk) = body.try_next().await? {
            if bytes.len() + chunk.len() > body_bytes_max {
                return Err(UpstreamError::TooLarge { body_bytes_max });
            }
            bytes.extend_from_slice(&chunk);
            // One received chunk may decode to many.
            consume_budget().await;
        }
        Ok(bytes.freeze())
    }
}

/// Checks that an answer has the requested encoding. JSON needs no check: its content identifies
/// it, and some servers send no media type.
fn check_media(headers: &HeaderMap, media: Media) -> Result<(), UpstreamError> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if media != Media::Protobuf || essence.eq_ignore_ascii_case(media.content_type()) {
        return Ok(());
    }
    let message = shorten(&format!("asked for {}, got {given:?}", media.content_type()));
    Err(UpstreamError::Refused { code: StatusCode::NOT_ACCEPTABLE.as_u16(), message })
}

#[cfg(test)]
mod tests;
