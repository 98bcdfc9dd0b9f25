//! Requests to the apiserver: bounded answers for reads, endless ones for watches, and every failure as an [`UpstreamError`].
//!
//! The seam below is a `tower` service, so that tests and the simulator can stand in for the network. Every wait has an end: a
//! read has a deadline over its whole answer, a watch one for its headers and then an idle timeout.

use std::{
    io::Read,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use arc_swap::ArcSwap;
use bytes::{Bytes, BytesMut};
use flate2::read::MultiGzDecoder;
use futures::{Stream, ready};
use http::{HeaderMap, StatusCode, Uri, header};
use http_body::Body;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use tower::ServiceExt;

use super::{
    error::{UpstreamError, shorten},
    identity::{IdentityMemory, TrustedCa},
    lines::{Framing, LineOptions, Lines},
    renewal::Renewal,
    settings::{SettingsError, UpstreamSettings},
    transport,
    warnings::Warnings,
};
use kubefan_model::Media;

pub use super::transport::{HttpService, UpstreamBody, holding};

/// The media type of everything that kubefan reads of no cache.
const JSON: &str = Media::Json.content_type();
/// The most that is read of an error's body.
const ERROR_BODY_BYTES_MAX: usize = 64 << 10;

/// What a request is, by the apiserver's own verbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verb {
    /// One object or document.
    Get,
    /// A list, or a page of one.
    List,
    /// A watch.
    Watch,
}

impl Verb {
    /// As a metric's label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::List => "list",
            Self::Watch => "watch",
        }
    }
}

/// Hears of every request once its status is known; `None` where there was no answer.
pub type UpstreamObserver = Arc<dyn Fn(Verb, Option<StatusCode>) + Send + Sync>;

/// Limits of a client.
#[derive(Debug, Clone)]
pub struct UpstreamOptions {
    /// For a TCP connection with its TLS handshake.
    pub connect_timeout: Duration,
    /// For a read with its whole answer, and for the headers of a watch. kube-apiserver's own limit for reads is 60 s.
    pub request_timeout: Duration,
    /// The longest answer to a read.
    pub body_bytes_max: usize,
    /// `User-Agent`, which audit logs and flow control show.
    pub user_agent: String,
}

impl Default for UpstreamOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(60),
            body_bytes_max: 512 << 20,
            user_agent: format!(
                "kubefan/{} ({}/{})",
                env!("CARGO_PKG_VERSION"),
                std::env::consts::OS,
                std::env::consts::ARCH
            ),
        }
    }
}

/// A client of one apiserver. A clone shares connections and credentials.
#[derive(Clone)]
pub struct Upstream {
    inner: Arc<Inner>,
    observer: UpstreamObserver,
}

struct Inner {
    service: ArcSwap<HttpService>,
    /// Scheme, authority and path prefix, without a closing slash.
    base: String,
    server: String,
    options: UpstreamOptions,
    renewal: Renewal,
    trusted_ca: ArcSwap<TrustedCa>,
    identity: IdentityMemory,
    /// What it was last warned of where no cached resource was asked for: they are about kubefan itself.
    own_warnings: ArcSwap<Warnings>,
}

impl Upstream {
    /// A client by kubeconfig or service account.
    ///
    /// When the apiserver later refuses the credentials, the settings are read again, so that rotated client certificates and
    /// exec plugins are picked up; token files are re-read by themselves.
    pub async fn from_settings(settings: UpstreamSettings, options: UpstreamOptions) -> Result<Self, SettingsError> {
        let config = settings.load().await?;
        let base = transport::request_base(&config)?;
        let server = transport::server_name(&config.cluster_url);
        let trusted_ca = trusted_ca(&config);
        let service = build_blocking(config, &options).await?;
        Ok(Self::new(service, &base, server, options, Some(settings), trusted_ca))
    }

    /// A client by a configuration made elsewhere. Runs an exec plugin where there is one, which blocks.
    pub fn from_config(config: kube_client::Config, options: UpstreamOptions) -> Result<Self, SettingsError> {
        let base = transport::request_base(&config)?;
        let server = transport::server_name(&config.cluster_url);
        let service = transport::build(&config, options.connect_timeout, &options.user_agent)?;
        Ok(Self::new(service, &base, server, options, None, trusted_ca(&config)))
    }

    /// A client over any HTTP service: for tests and simulation.
    pub fn from_service(service: HttpService, base: &Uri, options: UpstreamOptions) -> Self {
        Self::new(service, base, transport::server_name(base), options, None, TrustedCa::default())
    }

    fn new(
        service: HttpService,
        base: &Uri,
        server: String,
        options: UpstreamOptions,
        settings: Option<UpstreamSettings>,
        trusted_ca: TrustedCa,
    ) -> Self {
        let base = format!("{}{}", transport::server_name(base), base.path().trim_end_matches('/'));
        let service = ArcSwap::from_pointee(service);
        let (renewal, identity) = (Renewal::new(settings), IdentityMemory::default());
        let (trusted_ca, own_warnings) = (ArcSwap::from_pointee(trusted_ca), ArcSwap::default());
        let inner = Inner { service, base, server, options, renewal, trusted_ca, identity, own_warnings };
        Self { inner: Arc::new(inner), observer: Arc::new(|_, _| {}) }
    }

    /// The same client, with every request told to `observer`.
    pub fn with_observer(self, observer: UpstreamObserver) -> Self {
        Self { observer, ..self }
    }

    /// Scheme, host and port, for messages.
    pub fn server(&self) -> &str {
        &self.inner.server
    }

    pub(super) fn identity_memory(&self) -> &IdentityMemory {
        &self.inner.identity
    }

    /// What the server's certificate is checked against now.
    pub(super) fn trusted_ca(&self) -> TrustedCa {
        TrustedCa::clone(&self.inner.trusted_ca.load())
    }

    /// Reads JSON at a path below the server's, such as `/api/v1/pods?limit=500`.
    pub async fn get(&self, verb: Verb, path_and_query: &str) -> Result<Bytes, UpstreamError> {
        Ok(self.get_accept(verb, path_and_query, JSON).await?.into_body())
    }

    /// Reads JSON into a type.
    pub async fn get_json<T: DeserializeOwned>(&self, verb: Verb, path_and_query: &str) -> Result<T, UpstreamError> {
        let body = self.get(verb, path_and_query).await?;
        serde_json::from_slice(&body).map_err(|error| UpstreamError::invalid(format_args!("{path_and_query}: {error}")))
    }

    /// Reads one answer with its headers, asking for the given media types.
    pub async fn get_accept(
        &self,
        verb: Verb,
        path_and_query: &str,
        accept: &str,
    ) -> Result<http::Response<Bytes>, UpstreamError> {
        self.get_limited(verb, path_and_query, accept, self.inner.options.body_bytes_max).await
    }

    /// As [`Self::get_accept`], with a limit of its own.
    pub(super) async fn get_limited(
        &self,
        verb: Verb,
        path_and_query: &str,
        accept: &str,
        body_bytes_max: usize,
    ) -> Result<http::Response<Bytes>, UpstreamError> {
        self.within_timeout(async {
            let (parts, body) = self.send(verb, path_and_query, accept).await?.into_parts();
            let mut bytes = self.read(body, body_bytes_max).await?;
            if is_gzip(&parts.headers) {
                bytes = gunzip(&bytes, body_bytes_max)?;
            }
            Ok(http::Response::from_parts(parts, bytes))
        })
        .await
    }

    /// Reads objects in an encoding, with what is to be known of them.
    ///
    /// # Errors
    /// [`UpstreamError::Refused`] with 406 where the server has no such encoding of them, whatever it answers instead.
    pub async fn get_media(
        &self,
        verb: Verb,
        path_and_query: &str,
        media: Media,
    ) -> Result<(Bytes, Warnings), UpstreamError> {
        let response = self.get_accept(verb, path_and_query, media.accept()).await?;
        check_media(response.headers(), media)?;
        let warnings = self.warnings(response.headers());
        Ok((response.into_body(), warnings))
    }

    /// Starts a watch: its body, chunk by chunk, for as long as it lasts.
    ///
    /// # Errors
    /// As [`Self::get_media`].
    pub async fn stream(&self, path_and_query: &str, media: Media) -> Result<BodyStream, UpstreamError> {
        let send = self.send(Verb::Watch, path_and_query, media.watch_accept());
        let response = self.within_timeout(send).await?;
        check_media(response.headers(), media)?;
        let (gzip, warnings) = (is_gzip(response.headers()), self.warnings(response.headers()));
        Ok(BodyStream { body: response.into_body(), server: self.inner.server.clone(), gzip, warnings })
    }

    /// Starts a watch: its events, one by one, and what is to be known of the resource.
    ///
    /// How the events are cut out of the body follows from the encoding and from the answer.
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
        let options = LineOptions { gzip: chunks.gzip, framing, ..options };
        Ok((Lines::new(chunks, options), warnings))
    }

    /// What an answer says of the resource that was asked for.
    fn warnings(&self, headers: &HeaderMap) -> Warnings {
        Warnings::of(headers).without(&self.inner.own_warnings.load())
    }

    async fn within_timeout<T>(
        &self,
        work: impl Future<Output = Result<T, UpstreamError>>,
    ) -> Result<T, UpstreamError> {
        let request_timeout = self.inner.options.request_timeout;
        let result = timeout(request_timeout, work).await.unwrap_or_else(|_| {
            let message = format!("no complete answer from {} within {request_timeout:?}", self.inner.server);
            Err(UpstreamError::Timeout { message, retry_after: None })
        });
        if let Err(UpstreamError::Auth { .. } | UpstreamError::Tls { .. } | UpstreamError::Credentials { .. }) = &result
        {
            self.renew_credentials().await;
        }
        result
    }

    /// Sends a request and turns every status but success into an error.
    async fn send(
        &self,
        verb: Verb,
        path_and_query: &str,
        accept: &str,
    ) -> Result<http::Response<UpstreamBody>, UpstreamError> {
        let request = http::Request::get(format!("{}{path_and_query}", self.inner.base))
            .header(header::ACCEPT, accept)
            .header(header::ACCEPT_ENCODING, "identity")
            .header(header::USER_AGENT, &self.inner.options.user_agent)
            .body(Bytes::new())
            .map_err(|error| UpstreamError::invalid(format_args!("{path_and_query} is no path: {error}")))?;
        let service = HttpService::clone(&self.inner.service.load());
        let mut told = Told { observer: &self.observer, verb, status: None };
        let response =
            service.oneshot(request).await.map_err(|error| transport::classify(error, &self.inner.server))?;
        told.status = Some(response.status());
        drop(told);
        // A failure may be another's, of a balancer on the way, say, and warns of nothing.
        if verb == Verb::Get && response.status().is_success() {
            self.inner.own_warnings.store(Arc::new(Warnings::of(response.headers())));
        }
        if response.status().is_success() {
            return Ok(response);
        }
        let (parts, body) = response.into_parts();
        let body = match self.read(body, ERROR_BODY_BYTES_MAX).await {
            Ok(body) => body,
            // The status alone says enough.
            Err(_) => Bytes::new(),
        };
        Err(UpstreamError::from_response(parts.status, &parts.headers, &body))
    }

    async fn read(&self, mut body: UpstreamBody, body_bytes_max: usize) -> Result<Bytes, UpstreamError> {
        let hint = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        if hint > body_bytes_max {
            return Err(UpstreamError::TooLarge { body_bytes_max });
        }
        let mut bytes = BytesMut::with_capacity(hint.min(1 << 20));
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| transport::classify(error, &self.inner.server))?;
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > body_bytes_max {
                return Err(UpstreamError::TooLarge { body_bytes_max });
            }
            bytes.extend_from_slice(&data);
        }
        Ok(bytes.freeze())
    }

    /// Reads the settings again and makes new connections with them.
    async fn renew_credentials(&self) {
        let Some(config) = self.inner.renewal.config().await else { return };
        let service = match config {
            Ok(config) => {
                let trusted_ca = trusted_ca(&config);
                build_blocking(config, &self.inner.options).await.map(|service| (service, trusted_ca))
            }
            Err(error) => Err(error),
        };
        match service {
            Ok((service, trusted_ca)) => {
                // Before the way that it is for: what comes by it is then compared with this one.
                self.inner.trusted_ca.store(Arc::new(trusted_ca));
                self.inner.service.store(Arc::new(service));
            }
            Err(error) => tracing::warn!(%error, "the credentials could not be read again; the old ones stay"),
        }
    }
}

fn trusted_ca(config: &kube_client::Config) -> TrustedCa {
    match &config.root_cert {
        Some(bundle) if !config.accept_invalid_certs => TrustedCa::of(bundle),
        _ => TrustedCa::default(),
    }
}

/// Tells the observer of a request once, also where nobody waits for its answer any more.
struct Told<'a> {
    observer: &'a UpstreamObserver,
    verb: Verb,
    status: Option<StatusCode>,
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        (self.observer)(self.verb, self.status);
    }
}

async fn build_blocking(config: kube_client::Config, options: &UpstreamOptions) -> Result<HttpService, SettingsError> {
    let server = transport::server_name(&config.cluster_url);
    let (connect_timeout, user_agent) = (options.connect_timeout, options.user_agent.clone());
    let build = tokio::task::spawn_blocking(move || transport::build(&config, connect_timeout, &user_agent));
    build.await.unwrap_or_else(|_| {
        Err(SettingsError::Transport { server, message: "the credential plugin did not come back".to_owned() })
    })
}

/// The chunks of a watch.
pub struct BodyStream {
    body: UpstreamBody,
    server: String,
    gzip: bool,
    warnings: Warnings,
}

impl Stream for BodyStream {
    type Item = Result<Bytes, UpstreamError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match ready!(Pin::new(&mut self.body).poll_frame(context)) {
                None => return Poll::Ready(None),
                Some(Err(error)) => return Poll::Ready(Some(Err(transport::classify(error, &self.server)))),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Poll::Ready(Some(Ok(data)));
                    }
                }
            }
        }
    }
}

/// Encodes a query: `?limit=500&labelSelector=a%3Db`; empty without pairs.
pub fn encode_query<'a>(pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish();
    if query.is_empty() { query } else { format!("?{query}") }
}

/// Whether an answer is in the encoding that was asked for. JSON tells by itself, and some servers do not name it.
fn check_media(headers: &HeaderMap, media: Media) -> Result<(), UpstreamError> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if media != Media::Protobuf || essence.eq_ignore_ascii_case(media.content_type()) {
        return Ok(());
    }
    let message = shorten(&format!("asked for {}, got {given:?}", media.content_type()));
    Err(UpstreamError::Refused { code: StatusCode::NOT_ACCEPTABLE.as_u16(), message })
}

fn is_gzip(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_ENCODING).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"gzip"))
}

fn gunzip(bytes: &Bytes, body_bytes_max: usize) -> Result<Bytes, UpstreamError> {
    let mut plain = Vec::new();
    let mut limited = MultiGzDecoder::new(&bytes[..]).take(body_bytes_max as u64 + 1);
    limited.read_to_end(&mut plain).map_err(|error| UpstreamError::invalid(format_args!("broken gzip: {error}")))?;
    if plain.len() > body_bytes_max { Err(UpstreamError::TooLarge { body_bytes_max }) } else { Ok(plain.into()) }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, io::Write, sync::Mutex};

    use flate2::{Compression, write::GzEncoder};
    use futures::stream;
    use http_body::Frame;
    use http_body_util::{Full, StreamBody};
    use tokio::time::Instant;
    use tower::{BoxError, service_fn, util::BoxCloneSyncService};

    use super::*;

    type Answer = http::Response<UpstreamBody>;

    fn answer(code: u16, body: impl Into<Bytes>) -> Answer {
        let body = Full::new(body.into()).map_err(|never: Infallible| match never {}).boxed_unsync();
        http::Response::builder().status(code).body(body).unwrap()
    }

    fn upstream<F>(options: UpstreamOptions, respond: fn(http::Request<Bytes>) -> F) -> Upstream
    where
        F: Future<Output = Result<Answer, BoxError>> + Send + 'static,
    {
        let service = BoxCloneSyncService::new(service_fn(respond));
        Upstream::from_service(service, &Uri::from_static("https://u:p@sim.local:6443/prefix/"), options)
    }

    #[tokio::test]
    async fn a_request_asks_for_identity_below_the_servers_path() {
        let upstream = upstream(UpstreamOptions::default(), |request| async move {
            assert_eq!(request.uri().to_string(), "https://sim.local:6443/prefix/api/v1/pods?limit=5");
            assert_eq!(request.headers()[header::ACCEPT_ENCODING], "identity");
            assert!(request.headers()[header::USER_AGENT].to_str().unwrap().starts_with("kubefan/"));
            Ok(answer(200, r#"{"kind":"PodList"}"#))
        });
        let query = encode_query([("limit", "5")]);
        let value: serde_json::Value = upstream.get_json(Verb::List, &format!("/api/v1/pods{query}")).await.unwrap();
        assert_eq!(value["kind"], "PodList");
        assert_eq!(upstream.server(), "https://sim.local:6443");
    }

    #[tokio::test]
    async fn every_request_is_observed_once_with_its_code() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let observer = Arc::clone(&seen);
        let upstream = upstream(UpstreamOptions::default(), |request| async move {
            match request.uri().path() {
                "/prefix/ok" => Ok(answer(200, "{}")),
                "/prefix/forbidden" => Ok(answer(403, "no")),
                _ => Err(std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into()),
            }
        })
        .with_observer(Arc::new(move |verb, code| {
            observer.lock().unwrap().push((verb.as_str(), code.map(|c| c.as_u16())))
        }));
        upstream.get(Verb::Get, "/ok").await.unwrap();
        assert_eq!(upstream.get(Verb::List, "/forbidden").await.unwrap_err().reason(), "forbidden");
        assert_eq!(upstream.stream("/down", Media::Json).await.err().unwrap().reason(), "unreachable");
        assert_eq!(*seen.lock().unwrap(), [("get", Some(200)), ("list", Some(403)), ("watch", None)]);
    }

    #[tokio::test]
    async fn a_failure_leaves_known_what_is_about_kubefan_itself() {
        const OWN: &str = r#"299 - "your token will expire""#;
        const OTHERS: &str = r#"299 - "v1 Endpoints is deprecated""#;
        let upstream = upstream(UpstreamOptions::default(), |request| async move {
            let (code, warnings): (_, &[_]) = match request.uri().path() {
                "/prefix/version" => (200, &[OWN]),
                "/prefix/down" => (503, &[]),
                _ => (200, &[OWN, OTHERS]),
            };
            let mut answer = answer(code, "{}");
            for warning in warnings {
                answer.headers_mut().append(header::WARNING, warning.parse().unwrap());
            }
            Ok(answer)
        });
        upstream.get(Verb::Get, "/version").await.unwrap();
        for _ in 0..2 {
            let (_, warnings) = upstream.get_media(Verb::List, "/list", Media::Json).await.unwrap();
            let mut headers = HeaderMap::new();
            warnings.put(&mut headers);
            let told: Vec<_> = headers.get_all(header::WARNING).into_iter().collect();
            assert_eq!(told, [OTHERS]);
            upstream.get(Verb::Get, "/down").await.unwrap_err();
        }
    }

    #[tokio::test]
    async fn an_answer_beyond_the_limit_is_not_read() {
        let options = UpstreamOptions { body_bytes_max: 1000, ..UpstreamOptions::default() };
        let upstream = upstream(options, |request| async move {
            let body = if request.uri().path().ends_with("bomb") {
                let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
                encoder.write_all(&vec![b' '; 100_000]).unwrap();
                encoder.finish().unwrap()
            } else {
                vec![b' '; 1001]
            };
            let mut answer = answer(200, body);
            if request.uri().path().ends_with("bomb") {
                answer.headers_mut().insert(header::CONTENT_ENCODING, "gzip".parse().unwrap());
            }
            Ok(answer)
        });
        for path in ["/plain", "/bomb"] {
            let error = upstream.get(Verb::Get, path).await.unwrap_err();
            assert_eq!(error, UpstreamError::TooLarge { body_bytes_max: 1000 }, "{path}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_never_completes_times_out() {
        let upstream = upstream(UpstreamOptions::default(), |_| async move {
            let body = StreamBody::new(stream::pending::<Result<Frame<Bytes>, BoxError>>());
            Ok(http::Response::new(BodyExt::boxed_unsync(body)))
        });
        let start = Instant::now();
        assert_eq!(upstream.get(Verb::List, "/x").await.unwrap_err().reason(), "timeout");
        assert_eq!(start.elapsed(), Duration::from_secs(60));
    }

    #[tokio::test]
    async fn a_watch_gives_lines_and_then_the_break() {
        let upstream = upstream(UpstreamOptions::default(), |_| async move {
            let chunks =
                [Ok(Frame::data(Bytes::from("{\"type\""))), Ok(Frame::data(Bytes::from(":1}\n"))), Err("gone".into())];
            Ok(http::Response::new(BodyExt::boxed_unsync(StreamBody::new(stream::iter(chunks)))))
        });
        let (mut lines, _) = upstream.watch("/w?watch=1", Media::Json, LineOptions::default()).await.unwrap();
        assert_eq!(lines.next_line().await.unwrap().unwrap(), "{\"type\":1}");
        assert_eq!(lines.next_line().await.unwrap_err().reason(), "reset");
    }
}
