//! The source that the caches list and watch: the apiserver, or the next kubefan on the way to it.
//!
//! A kubefan near its subscribers may read from another one, so that the apiserver serves one watch
//! per resource however many kubefans there are. Its lists, its watches and the proofs of their
//! freshness then go to that kubefan. All else stays with the apiserver: reviews of callers,
//! discovery, passthrough, and the checks of a cache's content, because a cache cannot confirm the
//! objects that it sent itself.
//!
//! Versions are comparable only within one cluster, and the two addresses are configured
//! separately. So both must show the uid of the namespace kube-system, and the same one. Over gRPC
//! each snapshot names it.
//!
//! A kubefan's Kubernetes API has everything that an apiserver's has. Its gRPC service has more and
//! less: it marks gaps and tells the age of its state, but only JSON is read from it, and only the
//! newest state.
//!
//! With a [`DirectApiserver`], lists and watches go to the apiserver while that kubefan is away.
//! The methods here are about the kubefan then; [`Source::current`] is the server of the moment.

use std::{sync::Arc, time::Duration};

use kubefan_cache::Update;
use kubefan_model::{Media, ResourceVersion, object::ObjectParser};
use kubefan_telemetry::metrics::UpstreamWatchGuard;
use rand::rngs::StdRng;
use tokio::time::{Instant, sleep, timeout};

use crate::{
    client::{Upstream, UpstreamObserver, identity::IdentityError},
    direct_apiserver::DirectApiserver,
    error::UpstreamError,
    fallback::{Fallback, PROBE_TIMEOUT},
    grpc_reflector::GrpcReflector,
    kubefan_client::KubefanClient,
    reflector::{Reflector, ReflectorOptions, Target},
    source_reflector::SourceReflector,
};

/// Greatest age of the proof in a kubefan's bookmark: the interval of its bookmarks.
const KUBEFAN_BOOKMARK_AGE_MAX: Duration = Duration::from_secs(60);

/// Factor by which a kubefan behind another one checks the schema of its resources less often. The
/// other one sends the objects of a new schema by itself, and the apiserver should not be asked by
/// each.
const SCHEMA_CHECKS_FEWER: u32 = 10;

/// Time for which a resource that cannot be cached is passed on without another look, if discovery
/// shows no change of it. A list may have been a mistake of its server.
const NOT_CACHED_TTL: Duration = Duration::from_secs(3600);
/// Time for which a resource that another kubefan does not cache is passed on. The operator of that
/// kubefan may change it at any time.
const NOT_CACHED_TTL_BEHIND_KUBEFAN: Duration = Duration::from_secs(60);

/// The server of lists and watches. A clone is cheap.
#[derive(Clone)]
pub struct Source {
    server: Server,
    apiserver: Upstream,
    /// The apiserver in place of a kubefan that is away.
    direct: Option<DirectApiserver>,
}

#[derive(Clone)]
enum Server {
    Apiserver,
    /// The Kubernetes API of a kubefan.
    Http(Upstream),
    /// The gRPC service of a kubefan.
    Grpc(KubefanClient),
}

impl Source {
    /// Lists and watches at the apiserver.
    pub fn apiserver(apiserver: Upstream) -> Self {
        Self { server: Server::Apiserver, apiserver, direct: None }
    }

    /// Lists and watches at the Kubernetes API of a kubefan in front of this apiserver.
    pub fn kubefan(kubefan: Upstream, apiserver: Upstream) -> Self {
        Self { server: Server::Http(kubefan), apiserver, direct: None }
    }

    /// Lists and watches at the gRPC service of a kubefan in front of this apiserver.
    pub fn grpc(kubefan: KubefanClient, apiserver: Upstream) -> Self {
        Self { server: Server::Grpc(kubefan), apiserver, direct: None }
    }

    /// Returns the same source, which calls `observer` for every request.
    pub fn with_observer(self, observer: UpstreamObserver) -> Self {
        let server = match self.server {
            Server::Apiserver => Server::Apiserver,
            Server::Http(kubefan) => Server::Http(kubefan.with_observer(observer.clone())),
            Server::Grpc(kubefan) => Server::Grpc(kubefan.with_observer(observer.clone())),
        };
        Self { server, apiserver: self.apiserver.with_observer(observer), ..self }
    }

    /// Returns the same source, which lists and watches at `direct` while the kubefan is away.
    /// Requests that go to the apiserver in any case go to `apiserver`.
    pub fn with_fallback(self, direct: DirectApiserver, apiserver: Upstream) -> Self {
        let server = match self.server {
            Server::Apiserver => return self,
            Server::Http(kubefan) => Server::Http(kubefan.noting(direct.fallback())),
            Server::Grpc(kubefan) => Server::Grpc(kubefan.noting(direct.fallback())),
        };
        Self { server, apiserver, direct: Some(direct) }
    }

    /// Returns the source of lists and watches now: one server, without a fallback.
    pub fn current(&self) -> Self {
        match &self.direct {
            Some(direct) if direct.fallback().is_away() => Self::apiserver(direct.upstream().clone()),
            _ => self.own(),
        }
    }

    /// Returns the same source without a fallback.
    pub(super) fn own(&self) -> Self {
        Self { direct: None, ..self.clone() }
    }

    /// Returns the apiserver in place of a kubefan that is away. `None` without a fallback.
    pub(super) fn direct(&self) -> Option<&DirectApiserver> {
        self.direct.as_ref()
    }

    /// Whether lists and watches go to the apiserver because the kubefan is away.
    pub fn is_fallen_back(&self) -> bool {
        self.fallback().is_some_and(Fallback::is_away)
    }

    /// Returns the fallback to the apiserver. `None` if there is none.
    pub fn fallback(&self) -> Option<&Fallback> {
        self.direct.as_ref().map(DirectApiserver::fallback)
    }

    /// Probes the kubefan while it is away, without end. Without a fallback this completes at once.
    /// `others` is a client of the same kubefan, which must serve, too.
    pub async fn keep_probing(self, others: Option<Upstream>) {
        let Some(direct) = &self.direct else { return };
        let fallback = direct.fallback().clone();
        loop {
            fallback.until(true).await;
            let mut is_first = true;
            while fallback.is_away() {
                sleep(fallback.probe_delay(is_first)).await;
                is_first = false;
                let probe = self.probe(fallback.target(), others.as_ref());
                fallback.probed(timeout(PROBE_TIMEOUT, probe).await.unwrap_or(false));
                // Requests without a turn, such as reviews, need the apiserver only if they went to
                // the kubefan, and not if another replica has taken over at once.
                if others.is_some() && fallback.is_away() {
                    let _ = timeout(PROBE_TIMEOUT, direct.becomes_usable()).await;
                }
            }
        }
    }

    /// Whether the kubefan serves. `target` is one that a cache reads, `others` another client.
    async fn probe(&self, target: Option<Target>, others: Option<&Upstream>) -> bool {
        let serves = match &self.server {
            Server::Apiserver => true,
            Server::Http(kubefan) => kubefan.serves().await,
            Server::Grpc(kubefan) => match target {
                Some(target) => kubefan.probe(&target).await,
                None => true,
            },
        };
        match others {
            Some(others) => serves && others.serves().await,
            None => serves,
        }
    }

    /// The address, for messages.
    pub fn name(&self) -> &str {
        match &self.server {
            Server::Apiserver => self.apiserver.server(),
            Server::Http(kubefan) => kubefan.server(),
            Server::Grpc(kubefan) => kubefan.address(),
        }
    }

    /// The client of a Kubernetes API; `None` over gRPC.
    pub fn http(&self) -> Option<&Upstream> {
        match &self.server {
            Server::Apiserver => Some(&self.apiserver),
            Server::Http(kubefan) => Some(kubefan),
            Server::Grpc(_) => None,
        }
    }

    /// Whether that server is a kubefan.
    pub fn is_kubefan(&self) -> bool {
        !matches!(self.server, Server::Apiserver)
    }

    /// Whether it is read over gRPC. Then it marks gaps, tells the age of its state, and sends the
    /// objects of a new schema.
    pub fn is_grpc(&self) -> bool {
        matches!(self.server, Server::Grpc(_))
    }

    /// As [`Self::is_grpc`], for the server of the moment.
    pub fn is_grpc_now(&self) -> bool {
        self.is_grpc() && !self.is_fallen_back()
    }

    /// The interval of schema checks, if it is `configured` for the apiserver.
    pub fn schema_check_interval(&self, configured: Duration) -> Duration {
        if self.is_grpc() { configured * SCHEMA_CHECKS_FEWER } else { configured }
    }

    /// Returns for how long a resource that cannot be cached stays known as such.
    pub fn not_cached_ttl(&self) -> Duration {
        if self.is_grpc() { NOT_CACHED_TTL_BEHIND_KUBEFAN } else { NOT_CACHED_TTL }
    }

    /// Whether it has objects in this form.
    pub fn has(&self, media: Media) -> bool {
        media == Media::Json || !self.is_grpc()
    }

    /// A reflector of a target. `open_watch` counts a watch until its guard is dropped.
    pub fn reflector(
        &self,
        target: Target,
        parser: Arc<ObjectParser>,
        options: ReflectorOptions,
        open_watch: Arc<dyn Fn() -> UpstreamWatchGuard + Send + Sync>,
        random: StdRng,
    ) -> SourceReflector {
        let client = match &self.server {
            Server::Grpc(kubefan) => {
                let kubefan = kubefan.clone();
                let apiserver = self.apiserver.clone();
                let reflector = GrpcReflector::new(kubefan, apiserver, target, parser, open_watch, random);
                return SourceReflector::Grpc(Box::new(reflector));
            }
            Server::Apiserver => &self.apiserver,
            Server::Http(kubefan) => kubefan,
        };
        let reflector = Reflector::new(client.clone(), target, parser, options, open_watch, random);
        SourceReflector::Http(Box::new(reflector))
    }

    /// The version that the cluster has reached.
    ///
    /// # Errors
    /// As a list. Over gRPC also if the other kubefan could not prove its state.
    pub async fn cluster_version(&self, target: &Target) -> Result<ResourceVersion, UpstreamError> {
        match &self.server {
            Server::Apiserver => self.apiserver.cluster_version(target).await,
            Server::Http(kubefan) => kubefan.cluster_version(target).await,
            Server::Grpc(kubefan) => Ok(kubefan.freshness(target, true).await?.version),
        }
    }

    /// The time at which `update` proves that the state was current; `None` if it proves nothing.
    /// The apiserver's bookmarks prove the time at which they are `received`. Over gRPC only the
    /// age proves something.
    pub fn proof_in(&self, update: &Update, received: Instant) -> Option<Instant> {
        match (&self.server, update) {
            (Server::Grpc(_), _) => None,
            (_, Update::Event(..)) | (Server::Apiserver, Update::Bookmark(_)) => Some(received),
            (Server::Http(_), Update::Bookmark(_)) => received.checked_sub(KUBEFAN_BOOKMARK_AGE_MAX),
            _ => None,
        }
    }

    /// Like [`Upstream::confirm`]. A kubefan must also serve the cluster of the apiserver.
    ///
    /// # Errors
    /// As [`Upstream::confirm`]; `Unidentified` if one of the two does not show which cluster it
    /// serves.
    pub async fn confirm(&self) -> Result<(), IdentityError> {
        let found = match &self.server {
            Server::Apiserver => return self.apiserver.confirm().await,
            Server::Http(kubefan) => {
                kubefan.confirm().await?;
                kubefan.cluster()
            }
            Server::Grpc(kubefan) => kubefan.cluster(),
        };
        // The cluster of a saved state is not yet that of the apiserver.
        if self.apiserver.cluster().is_none() || self.apiserver.is_assumed() {
            self.apiserver.confirm().await?;
        }
        let unidentified = |server: &str| IdentityError::Unidentified { server: server.to_owned() };
        let known = self.apiserver.cluster().ok_or_else(|| unidentified(self.apiserver.server()))?;
        let found = found.ok_or_else(|| unidentified(self.name()))?;
        if known == found {
            return Ok(());
        }
        let shown = |uid| format!("kube-system uid {uid}");
        Err(IdentityError::OtherCluster { server: self.name().to_owned(), known: shown(known), found: shown(found) })
    }

    /// Whether the server answered for another cluster when it was last asked, and must be asked
    /// again before anything is requested: see [`Upstream::is_doubted`].
    pub fn is_doubted(&self) -> bool {
        match &self.server {
            Server::Apiserver => self.apiserver.is_doubted(),
            Server::Http(kubefan) => kubefan.is_doubted(),
            Server::Grpc(_) => false,
        }
    }

    /// Like [`Upstream::confirm_if_doubted`].
    ///
    /// # Errors
    /// As [`Self::confirm`].
    pub async fn confirm_if_doubted(&self) -> Result<(), IdentityError> {
        if self.is_doubted() { self.confirm().await } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use bytes::Bytes;
    use http::{Request, Response, StatusCode, Uri};
    use http_body_util::{BodyExt, Full};
    use tower::{BoxError, util::BoxCloneSyncService};

    use super::*;
    use crate::client::{FORBIDDEN_GRACE, UpstreamOptions};

    /// A server of the cluster with this uid; `None` denies it.
    fn server(name: &str, uid: Option<&'static str>) -> Upstream {
        let service = tower::service_fn(move |_: Request<Bytes>| async move {
            let (status, body) = match uid {
                Some(uid) => (StatusCode::OK, format!(r#"{{"metadata":{{"uid":"{uid}"}}}}"#)),
                None => (StatusCode::FORBIDDEN, "{}".to_owned()),
            };
            let body = Full::new(Bytes::from(body)).map_err(|never| match never {}).boxed_unsync();
            let response = Response::builder().status(status).body(body).expect("a response");
            Ok(response)
        });
        let base: Uri = format!("https://{name}").parse().expect("an address");
        Upstream::from_service(BoxCloneSyncService::new(service), &base, UpstreamOptions::default())
    }

    /// Servers behind one address: each answer is of the cluster with the next uid.
    fn servers(uids: &[&'static str]) -> Upstream {
        let uids = Arc::new(Mutex::new(Vec::from(uids).into_iter()));
        let service = tower::service_fn(move |_: Request<Bytes>| {
            let uid = uids.lock().expect("a lock").next();
            async move {
                let uid = uid.ok_or_else(|| BoxError::from("a request too many"))?;
                let body = Full::new(Bytes::from(format!(r#"{{"metadata":{{"uid":"{uid}"}}}}"#)));
                Ok(Response::new(body.map_err(|never| match never {}).boxed_unsync()))
            }
        });
        let base = Uri::from_static("https://apiserver");
        Upstream::from_service(BoxCloneSyncService::new(service), &base, UpstreamOptions::default())
    }

    #[tokio::test]
    async fn after_another_cluster_has_answered_the_next_request_is_confirmed_first() {
        let source = Source::apiserver(servers(&["a", "b", "b", "a"]));
        assert_eq!(source.confirm().await, Ok(()));
        assert_eq!(source.confirm_if_doubted().await, Ok(()), "asks nothing");
        source.confirm().await.expect_err("another cluster");
        source.confirm_if_doubted().await.expect_err("still another cluster");
        assert_eq!(source.confirm_if_doubted().await, Ok(()));
        assert_eq!(source.confirm_if_doubted().await, Ok(()), "asks nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn the_cluster_of_a_saved_state_is_forgotten_if_the_apiserver_does_not_show_its_uid() {
        let apiserver = server("apiserver", None);
        assert!(apiserver.assume_cluster("a") && !apiserver.assume_cluster("b"));
        assert!(matches!(apiserver.confirm().await, Err(IdentityError::Unanswered(_))), "it may have just started");
        tokio::time::advance(FORBIDDEN_GRACE).await;
        assert!(matches!(apiserver.confirm().await, Err(IdentityError::OtherCluster { .. })));
        assert_eq!(apiserver.forget_assumed_cluster().as_deref(), Some("a"));
        assert_eq!(apiserver.forget_assumed_cluster(), None);
        assert_eq!((apiserver.confirm().await, apiserver.cluster()), (Ok(()), None));
        assert!(!apiserver.assume_cluster("a"), "its cluster is not known to be this one");
    }

    #[tokio::test]
    async fn a_kubefan_is_a_source_only_if_it_shows_the_cluster_of_the_apiserver() {
        let apiserver = || server("apiserver", Some("a"));
        assert_eq!(Source::apiserver(apiserver()).confirm().await, Ok(()));
        assert_eq!(Source::kubefan(server("kubefan", Some("a")), apiserver()).confirm().await, Ok(()));
        let other = Source::kubefan(server("kubefan", Some("b")), apiserver()).confirm().await.unwrap_err();
        assert!(
            other.to_string().starts_with("another cluster answers at https://kubefan: kube-system uid b"),
            "{other}"
        );
        let assumed = server("apiserver", Some("b"));
        assert!(assumed.assume_cluster("a"));
        let source = Source::kubefan(server("kubefan", Some("a")), assumed);
        let error = source.confirm().await.unwrap_err().to_string();
        assert!(error.starts_with("another cluster answers at https://apiserver"), "a file proves nothing: {error}");
        for (kubefan, apiserver, unidentified) in [(None, Some("a"), "kubefan"), (Some("a"), None, "apiserver")] {
            let source = Source::kubefan(server("kubefan", kubefan), server("apiserver", apiserver));
            let error = source.confirm().await.unwrap_err().to_string();
            assert!(error.contains(&format!("https://{unidentified} does not show")), "{error}");
        }
    }
}
