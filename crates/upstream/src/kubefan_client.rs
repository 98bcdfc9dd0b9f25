//! The gRPC client of the next kubefan on the way to the apiserver.
//!
//! All caches share one connection. The files of the settings are read again, if they changed,
//! before a request and after a failed watch, because a CA and a client certificate are rotated
//! while this process runs. The token file is read again from time to time. Each answer that names
//! its cluster is noted, so that no state of another cluster is taken
//! ([`Source::confirm`](super::Source::confirm)).

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::FutureExt;
use http::StatusCode;
use kubefan_client::{Client, ClientCertificate, ClientError, ClientOptions, GetFreshnessResponse, WatchStream};
use kubefan_common::{
    proto::v1alpha1,
    reasons::{ErrorReason, error_metadata},
};
use kubefan_model::{ResourceVersion, Scope};
use tokio::time::{Instant, timeout};
use tonic::Code;

use super::{
    client::{UpstreamObserver, Verb},
    error::{INITIALIZING, UpstreamError, shorten},
    fallback::{Attempt, Fallback, Verdict},
    reflector::Target,
    transport::{
        connection::ConnectionLimits,
        renewal::{NamedFiles, Renewed},
    },
};

/// Maximum time of an answer about the freshness of a cache. A proof takes up to 4 s, and may wait
/// for one that is under way.
const FRESHNESS_TIMEOUT: Duration = Duration::from_secs(9);
/// Path of the service account's token in a pod.
const POD_TOKEN_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/token";

/// The address of the next kubefan, and this kubefan's credentials there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct KubefanSettings {
    /// As `kubefan get --server` takes it.
    pub address: String,
    /// The CA of its certificate; `None` for the system's.
    pub ca_file: Option<PathBuf>,
    /// A bearer token. `None`, with TLS and without a client certificate: that of the pod's service
    /// account, if there is one.
    pub token_file: Option<PathBuf>,
    /// A client certificate.
    pub certificate: Option<ClientCertificate>,
    /// The name in its certificate; `None` for the host of the address.
    pub server_name: Option<String>,
}

impl KubefanSettings {
    fn options(&self) -> ClientOptions {
        let has_tls = self.address.starts_with("https://");
        let of_pod = || Some(PathBuf::from(POD_TOKEN_FILE)).filter(|file| has_tls && Path::exists(file));
        let may_default = self.certificate.is_none();
        ClientOptions {
            ca_file: self.ca_file.clone(),
            client_certificate: self.certificate.clone(),
            server_name: self.server_name.clone(),
            token_file: self.token_file.clone().or_else(|| of_pod().filter(|_| may_default)),
            connect_timeout: ConnectionLimits::KUBEFAN.connect_timeout,
            keepalive_interval: ConnectionLimits::KUBEFAN.ping_interval,
            keepalive_timeout: ConnectionLimits::KUBEFAN.ping_timeout,
            ..ClientOptions::default()
        }
    }

    async fn client(&self) -> Result<(Client, NamedFiles), ClientError> {
        let options = self.options();
        let certificate = options.client_certificate.clone();
        let certificate = certificate.map(|certificate| [certificate.certificate_file, certificate.key_file]);
        let files =
            NamedFiles::look(options.ca_file.iter().cloned().chain(certificate.into_iter().flatten()).collect());
        Ok((Client::connect_lazy(&self.address, &options).await?, files))
    }
}

/// A client of one kubefan. A clone is cheap.
#[derive(Clone)]
pub struct KubefanClient {
    inner: Arc<Inner>,
    observer: UpstreamObserver,
    /// Learns what requests find.
    fallback: Option<Fallback>,
}

struct Inner {
    address: String,
    client: Renewed<Client, ClientError>,
    /// The cluster that the last answer named.
    cluster: Mutex<Option<String>>,
}

/// Freshness of the next kubefan's cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Freshness {
    /// The version that it has reached.
    pub version: ResourceVersion,
    /// Time at which that version was current, at the latest; `None` if that was never proved.
    pub proven_at: Option<Instant>,
    /// The uid of its cluster. Empty if it is unknown.
    pub cluster: String,
}

impl Freshness {
    /// Whether it is known to be of another cluster than this one.
    pub(super) fn is_of_another(&self, cluster: &str) -> bool {
        !self.cluster.is_empty() && !cluster.is_empty() && self.cluster != cluster
    }
}

impl KubefanClient {
    /// Reads the files of the settings. Connects with the first request.
    ///
    /// # Errors
    /// An address or file that cannot be used.
    pub async fn from_settings(settings: KubefanSettings) -> Result<Self, ClientError> {
        let make = move || {
            let settings = settings.clone();
            async move { settings.client().await }.boxed()
        };
        Ok(Self::new(Renewed::new(make).await?))
    }

    /// A client over an existing connection, for tests and simulation.
    pub fn from_client(client: Client) -> Self {
        Self::new(Renewed::fixed(client))
    }

    fn new(client: Renewed<Client, ClientError>) -> Self {
        let address = client.last().address().to_owned();
        let cluster = Mutex::default();
        let inner = Inner { address, client, cluster };
        Self { inner: Arc::new(inner), observer: Arc::new(|_, _| {}), fallback: None }
    }

    /// Returns the same client, which calls `observer` for every request.
    pub fn with_observer(self, observer: UpstreamObserver) -> Self {
        Self { observer, ..self }
    }

    /// Returns the same client, which notes what its requests find.
    pub fn noting(self, fallback: &Fallback) -> Self {
        Self { fallback: Some(fallback.clone()), ..self }
    }

    /// The address, as it was given.
    pub fn address(&self) -> &str {
        &self.inner.address
    }

    /// The uid of the cluster that the last answer named; `None` if it named none.
    pub fn cluster(&self) -> Option<String> {
        self.inner.cluster.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn note_cluster(&self, cluster: String) {
        let named = Some(cluster).filter(|cluster| !cluster.is_empty());
        *self.inner.cluster.lock().unwrap_or_else(PoisonError::into_inner) = named;
    }

    pub(super) fn watch(&self, target: &Target, options: kubefan_client::WatchOptions) -> WatchStream {
        self.inner.client.last().watch(message(target), options)
    }

    pub(super) fn observe(&self, verb: Verb, is_answered: bool) {
        if let Some(fallback) = self.fallback.as_ref().filter(|_| is_answered) {
            fallback.attempt().note(Verdict::Answered);
        }
        (self.observer)(verb, is_answered.then_some(StatusCode::OK));
    }

    /// Begins a request, to note its result.
    pub(super) fn attempt(&self) -> Option<Attempt> {
        self.fallback.as_ref().map(Fallback::attempt)
    }

    /// Takes the budget of clients that the next kubefan names.
    pub(super) fn take_budget(&self, budget: Option<&str>) {
        if let (Some(fallback), Some(budget)) = (&self.fallback, budget) {
            fallback.take_budget_text(budget);
        }
    }

    /// Returns the freshness of the next kubefan's cache of a target. With `prove`, the version is
    /// not below the cluster's version at this call, and the apiserver is asked at most once for
    /// all kubefans that ask there.
    ///
    /// # Errors
    /// As a watch.
    pub async fn freshness(&self, target: &Target, prove: bool) -> Result<Freshness, UpstreamError> {
        let client = self.inner.client.current().await;
        let attempt = self.attempt();
        let asked_at = Instant::now();
        let answer = timeout(FRESHNESS_TIMEOUT, client.get_freshness(message(target), prove)).await;
        self.observe(Verb::Get, matches!(answer, Ok(Ok(_))));
        let GetFreshnessResponse { resource_version, version_is_complete, age, cluster } = match answer {
            Ok(Ok(answer)) => answer,
            // A proof fails if the apiserver is in trouble. The kubefan has answered.
            Ok(Err(error)) if prove && Verdict::of_client_error(&error) == Verdict::Busy => {
                return Err(upstream_error(&error));
            }
            Ok(Err(error)) => return Err(self.failed(attempt.as_ref(), &error).await),
            Err(_) => {
                note(attempt.as_ref(), Verdict::Lost);
                let message = format!("no answer from {} within {FRESHNESS_TIMEOUT:?}", self.inner.address);
                return Err(UpstreamError::Timeout { message, retry_after: None });
            }
        };
        self.note_cluster(cluster.clone());
        let version = ResourceVersion::parse_place(&resource_version).map_err(UpstreamError::invalid)?;
        let version = if version_is_complete { version.end() } else { version };
        // The age is as of the answer, so this is a little too old.
        let age = age.and_then(|age| Duration::try_from(age).ok());
        Ok(Freshness { version, proven_at: age.and_then(|age| asked_at.checked_sub(age)), cluster })
    }

    /// Takes note of the failure of a request, and reads the files again if they may be the reason.
    pub(super) async fn failed(&self, attempt: Option<&Attempt>, error: &ClientError) -> UpstreamError {
        note(attempt, Verdict::of_client_error(error));
        if error.is_unreachable() || error.code() == Code::Unauthenticated {
            self.inner.client.refused(&self.inner.client.last()).await;
        }
        upstream_error(error)
    }
}

impl KubefanClient {
    /// Whether the next kubefan answers about a target. An answer that it is not served is one.
    pub(super) async fn probe(&self, target: &Target) -> bool {
        match self.inner.client.current().await.get_freshness(message(target), false).await {
            Ok(_) => true,
            Err(error) => Verdict::of_client_error(&error) == Verdict::Answered,
        }
    }
}

fn note(attempt: Option<&Attempt>, verdict: Verdict) {
    if let Some(attempt) = attempt {
        attempt.note(verdict);
    }
}

/// The target of requests: the scope and the selector of a cache.
fn message(target: &Target) -> v1alpha1::Target {
    v1alpha1::Target {
        group: target.gvr.group.clone(),
        version: target.gvr.version.clone(),
        resource: target.gvr.resource.clone(),
        namespace: match &target.scope {
            Scope::Cluster => String::new(),
            Scope::Namespace(namespace) => namespace.clone(),
        },
        field_selector: target.field_selector.clone(),
        ..v1alpha1::Target::default()
    }
}

/// Converts a failure of the next kubefan to the failure of an apiserver that asks for the same
/// reaction.
fn upstream_error(error: &ClientError) -> UpstreamError {
    let message = shorten(&error.to_string());
    let retry_after = error.retry_after();
    let ClientError::Status(status) = error else {
        return match error {
            ClientError::Unreachable { address, message } => {
                UpstreamError::Unreachable { server: address.clone(), message: shorten(message) }
            }
            ClientError::Undecodable { .. } => UpstreamError::Reset { message },
            _ => UpstreamError::InvalidResponse { message },
        };
    };
    if let Some(cause) = status.metadata.get(error_metadata::CAUSE).filter(|_| error.is_not_synced()) {
        let message = shorten(&format!("{INITIALIZING}: {cause}"));
        return UpstreamError::TooManyRequests { message, retry_after };
    }
    match status.code {
        _ if error.reason() == ErrorReason::NotCached => UpstreamError::NotCached { message },
        _ if error.reason() == ErrorReason::Draining => UpstreamError::Draining { message, retry_after },
        _ if error.is_expired() => UpstreamError::Gone { message },
        _ if error.is_resource_version_too_large() => UpstreamError::VersionTooLarge { message, retry_after },
        Code::PermissionDenied => UpstreamError::Forbidden { message },
        Code::Unauthenticated => UpstreamError::Auth { message },
        Code::NotFound => UpstreamError::NotFound { message },
        Code::ResourceExhausted => UpstreamError::TooManyRequests { message, retry_after },
        Code::DeadlineExceeded => UpstreamError::Timeout { message, retry_after },
        Code::InvalidArgument | Code::FailedPrecondition | Code::Unimplemented => {
            UpstreamError::Refused { code: StatusCode::BAD_REQUEST.as_u16(), message }
        }
        Code::Unavailable => {
            UpstreamError::Server { code: StatusCode::SERVICE_UNAVAILABLE.as_u16(), message, retry_after }
        }
        _ => UpstreamError::Reset { message },
    }
}
