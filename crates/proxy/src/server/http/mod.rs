//! The Kubernetes API over HTTP: list, get and watch of what is cached, in the apiserver's own words; all else goes upstream.
//!
//! The rule that keeps this small and honest: what is not understood to the letter is not answered here. A query that cannot be read, a
//! media type that is not made here, a version that is not held: upstream says what it says. Only where nothing is passed on
//! (`--passthrough=off`) kubefan itself refuses them.

pub mod accept;
pub mod body;
pub mod door;
pub mod hop_by_hop;
pub mod items;
pub mod list;
pub mod options;
mod partial;
pub mod path;
pub mod proxy;
pub mod status;
pub mod tunnel;
pub mod verb;
mod watch;
pub mod websocket;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use axum::body::Body;
use futures::FutureExt;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header, request::Parts};
use tokio_util::sync::CancellationToken;

use self::{
    accept::Form,
    options::{Freshness, Options},
    path::Path,
    proxy::Proxy,
    status::Failure,
    websocket::Socket,
};
use super::{
    call,
    listen::Peer,
    reader::{FRESHNESS_TIMEOUT, Opened, Reader},
    request::Selected,
    stall::Sending,
};
use crate::{
    fanout::{Catalog, ConnectionWaker, Patience, Phase, Refusal, Served, StreamWaker},
    telemetry::metrics::Metrics,
    upstream::warnings::Warnings,
};
use kubefan_common::proto::v1alpha1::Target;
use kubefan_model::{Media, ResourceVersion, format::Format, selector::FieldSelector};

/// What a request comes to.
pub enum Answer {
    /// A watch that has begun; whoever drives the connection sends it.
    Watch(Opened),
    /// A whole response, which is to be read without a pause: it pins state of the cache, or keeps a place on the way upstream.
    Read(Response<Body>),
    /// Upstream's response that goes on for as long as its reader likes: a watch, a log.
    PassedOn(Response<Body>),
}

/// What a path and a query ask for.
enum Asked {
    /// A collection, or a single object under the old `/watch/`.
    Many(Options),
    /// A single object, of this freshness.
    One(Freshness),
}

/// Why a read is not answered from the cache.
enum Otherwise {
    /// It is answered so.
    Failed(Failure),
    /// Upstream answers it; so it is answered where it is not asked.
    Upstream(Failure),
}

impl From<Failure> for Otherwise {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// Whether upstream knows better follows from why it was refused.
impl From<Refusal> for Otherwise {
    fn from(refusal: Refusal) -> Self {
        let failure = Failure::from(&refusal);
        match refusal {
            Refusal::Exhausted(_) | Refusal::Draining | Refusal::Expired(_) | Refusal::Rewritten(_) => {
                Self::Failed(failure)
            }
            // It may have come, or be permitted, by now; and what is wrong with a selector upstream says in its own words.
            Refusal::NotFound(_) | Refusal::Forbidden(_) | Refusal::NotCached(_) | Refusal::Invalid { .. } => {
                Self::Upstream(failure)
            }
            // Not as fresh as it was asked for.
            Refusal::NotSynced { .. } | Refusal::Stale { .. } | Refusal::Future { .. } | Refusal::Unavailable(_) => {
                Self::Upstream(failure)
            }
        }
    }
}

/// The front door of the Kubernetes API.
pub struct Front<C> {
    reader: Arc<Reader<C>>,
    pages: Arc<list::Pages>,
    /// How many have begun.
    watches: Arc<AtomicU32>,
    /// `None`: nothing is passed on.
    proxy: Option<Arc<Proxy>>,
    options: Arc<FrontOptions>,
    metrics: Arc<Metrics>,
}

/// What an operator may change of the door.
#[derive(Debug, Clone)]
pub struct FrontOptions {
    /// A snapshot that makes too little progress in so long ends, and what else is to be read without a pause.
    pub stall_timeout: Duration,
    /// From so many bytes of JSON on, a consistent list waits for a proof that takes a second or two.
    pub consistent_list_bytes_min: usize,
    /// The caches hold only what this selects.
    pub narrowed_by: FieldSelector,
    /// Whether requests that a browser could be led to send are refused: see [`door`].
    pub is_guarded: bool,
}

impl<C> Clone for Front<C> {
    fn clone(&self) -> Self {
        let Self { reader, pages, watches, proxy, options, metrics } = self;
        let (reader, pages, watches, proxy) = (reader.clone(), pages.clone(), watches.clone(), proxy.clone());
        Self { reader, pages, watches, proxy, options: options.clone(), metrics: metrics.clone() }
    }
}

/// Whether a request is for this door: whatever is not gRPC.
pub fn is_kubernetes<B>(request: &Request<B>) -> bool {
    !call::is_any_grpc(request.headers())
}

/// Tells an answer of the cache from upstream's (RFC 9211).
const CACHE_STATUS: HeaderName = HeaderName::from_static("cache-status");
const HIT: HeaderValue = HeaderValue::from_static("kubefan; hit");

/// The headers of a watch.
pub fn watch_headers(media: Media, warnings: &Warnings, headers: &mut HeaderMap) {
    put_headers(media.watch_content_type(), headers);
    warnings.put(headers);
}

fn put_headers(content_type: &'static str, headers: &mut HeaderMap) {
    headers.insert(CACHE_STATUS, HIT);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
}

/// A response from the cache.
fn response(content_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    put_headers(content_type, response.headers_mut());
    response
}

/// How a read stands to a cache that is not there yet.
#[derive(Clone, Copy)]
struct Haste {
    /// It goes on to use the cache, and starts it.
    is_watch: bool,
    /// It waits for the first list: any state will do, or it comes back in any case.
    waits: bool,
}

/// A read that a cache can answer.
struct Read<'a> {
    path: &'a Path,
    selected: Selected,
    format: Format,
}

impl<C: Catalog> Front<C> {
    /// The door to what `reader` reads, and by `proxy` to all else.
    pub fn new(
        reader: Arc<Reader<C>>,
        proxy: Option<Arc<Proxy>>,
        options: FrontOptions,
        metrics: Arc<Metrics>,
    ) -> Self {
        let (pages, watches) = Default::default();
        Self { reader, pages, watches, proxy, options: Arc::new(options), metrics }
    }

    /// Answers a request of which the door has nothing to say.
    async fn answer_admitted(&self, request: Request<Body>, bell: StreamWaker) -> Answer {
        let (parts, body) = request.into_parts();
        let failure = match self.read(&parts, bell).await {
            Ok(answer) => return answer,
            Err(Otherwise::Failed(failure)) => return Answer::Read(refused_here(&parts, &failure)),
            Err(Otherwise::Upstream(failure)) => failure,
        };
        let Some(proxy) = &self.proxy else {
            return Answer::PassedOn(refused(&parts, &failure));
        };
        let peer = parts.extensions.get::<Peer>().copied().unwrap_or_default();
        // In a box: most requests are not passed on, and need not have the room for it.
        Answer::PassedOn(proxy.forward(Request::from_parts(parts, body), peer).boxed().await)
    }

    /// Reads from a cache.
    async fn read(&self, request: &Parts, bell: StreamWaker) -> Result<Answer, Otherwise> {
        let uri = &request.uri;
        let nothing = || {
            let because = "and nothing is passed on to the apiserver (--passthrough=off)";
            match request.method {
                Method::GET => Failure::not_served(format!("{} is not served from the cache, {because}", uri.path())),
                _ => Failure::method_not_allowed(format!("kubefan only reads, {because}")),
            }
        };
        let path = match request.method {
            Method::GET => Path::parse(uri.path()),
            _ => None,
        };
        let path = path.ok_or_else(|| Otherwise::Upstream(nothing()))?;
        let query = uri.query().unwrap_or_default();
        let asked = match path.name.is_empty() || path.is_watch {
            true => Asked::Many(Options::read(query, path.is_watch).map_err(Otherwise::Upstream)?),
            false => Asked::One(options::read_get(query).map_err(Otherwise::Upstream)?),
        };
        self.check_part(&path, &asked)?;
        // One object upstream finds sooner than any proof comes that ours is the newest.
        if matches!(asked, Asked::One(Freshness::Consistent)) && self.proxy.is_some() {
            return Err(Otherwise::Upstream(Failure::unavailable("it must come from upstream".to_owned())));
        }
        let is_list = matches!(asked, Asked::Many(Options::List(_)));
        let is_watch = matches!(asked, Asked::Many(Options::Watch(_)));
        if hop_by_hop::upgrade(&request.headers).is_some() {
            // Nothing else here can be one.
            let socket = if is_watch { Socket::of(&request.headers, &request.extensions)? } else { None };
            socket.ok_or_else(|| Otherwise::Upstream(nothing()))?;
        }
        let selectors = match &asked {
            Asked::Many(options) => options.selectors(),
            Asked::One(_) => ("", ""),
        };
        if is_watch && !path.name.is_empty() && !selectors.1.is_empty() {
            let message = "fieldSelector metadata.name doesn't match requested name".to_owned();
            return Err(Otherwise::Upstream(Failure::bad_request(message)));
        }
        let header = accepts(&request.headers).ok_or_else(|| Otherwise::Upstream(not_made()))?;
        // What nobody else can be asked for is not refused for its looks.
        let is_pretty = !is_watch && self.proxy.is_some() && is_pretty(request);
        let forms = accept::negotiate(header, is_list);
        let include = options::include_object(query);
        // Nobody reads protobuf for its looks.
        let forms = forms.into_iter().map(|form| if is_pretty && form.is_json() { Form::Other } else { form });
        let place = (!is_watch).then(|| self.reader.admit_read()).transpose()?;
        let formats = forms.map(|form| form.made(include));
        let waits = match &asked {
            Asked::Many(Options::Watch(_)) => true,
            Asked::Many(Options::List(options)) => options.freshness != Freshness::Consistent,
            Asked::One(_) => false,
        };
        let (selected, format) = self.select(&path, selectors, formats, Haste { is_watch, waits }).await?;
        let warnings = selected.served.hub.warnings();
        let read = Read { path: &path, selected, format };
        let answer = match asked {
            Asked::Many(Options::Watch(options)) => self.watch(read, options, bell).await,
            Asked::Many(Options::List(options)) => self.list(read, options, place).await.map(Answer::Read),
            Asked::One(freshness) => self.get(read, freshness).await.map(Answer::Read),
        };
        // A watch has them from its cache; who is refused is warned as well.
        let mut response = match answer {
            Ok(Answer::Read(response)) => response,
            Err(Otherwise::Failed(failure)) => refused_here(request, &failure),
            other => return other,
        };
        warnings.put(response.headers_mut());
        Ok(Answer::Read(response))
    }

    /// What a path and selectors select, in the first of the formats; where nobody else is asked, in the first that is made here.
    async fn select(
        &self,
        path: &Path,
        selectors: (&str, &str),
        formats: impl Iterator<Item = Option<Format>>,
        haste: Haste,
    ) -> Result<(Selected, Format), Otherwise> {
        let mut first = None;
        for format in formats {
            let selected = match format {
                Some(format) => {
                    let selected = self.select_in(format.media(), path, selectors, haste).await;
                    selected.map(|selected| (selected, format))
                }
                None => Err(Otherwise::Upstream(not_made())),
            };
            match selected {
                Err(Otherwise::Upstream(failure)) if self.proxy.is_none() => drop(first.get_or_insert(failure)),
                other => return other,
            }
        }
        Err(Otherwise::Upstream(first.unwrap_or_else(not_made)))
    }

    /// What a path and selectors select in an encoding, as long as the cache serves it. Only a watch starts the cache of a resource: it
    /// goes on to use it, while a list or a single object upstream gives sooner, where it may be asked.
    async fn select_in(
        &self,
        media: Media,
        path: &Path,
        (label_selector, field_selector): (&str, &str),
        Haste { is_watch, waits }: Haste,
    ) -> Result<Selected, Otherwise> {
        let is_cached = |media| self.is_cached(path, media);
        if !is_watch && self.proxy.is_some() && !is_cached(Media::Json) && !is_cached(media) {
            return Err(Otherwise::Upstream(Failure::not_served(format!("{} is not cached", path.resource))));
        }
        let target = Target {
            group: path.group.clone(),
            version: path.version.clone(),
            resource: path.resource.clone(),
            namespace: path.namespace.clone(),
            name: path.name.clone(),
            label_selector: label_selector.to_owned(),
            field_selector: field_selector.to_owned(),
        };
        // Who must see every write is not kept waiting while a cache begins; the next one finds it.
        if !waits && self.proxy.is_some() && media != Media::Json && !is_cached(media) {
            self.reader.begin(target, media);
            let message = format!("{} is not cached as {}", path.resource, media.as_str());
            return Err(Otherwise::Upstream(Failure::not_served(message)));
        }
        // A replica that has just been started is where everybody comes back to, and upstream is not to be asked by all of them: they wait for
        // the first list, and are asked to come again where it takes too long, as a restarted apiserver would.
        let selected = match waits {
            true => self.reader.select_synced(Some(target), media).await,
            false => self.reader.select(Some(target), media).await,
        };
        let selected = selected.map_err(|refusal| match refusal {
            Refusal::NotSynced { .. } if waits => Otherwise::Failed(Failure::from(&refusal)),
            refusal => refusal.into(),
        })?;
        if waits && *selected.served.hub.phase().borrow() == Phase::Syncing {
            return Err(Failure::initializing().into());
        }
        let nameless = selected.served.namespaced && path.namespace.is_empty() && !path.name.is_empty();
        match nameless {
            // No object has such a path.
            true => Err(Otherwise::Upstream(Failure::not_served("the resource is namespaced".to_owned()))),
            false => Ok(selected),
        }
    }

    /// How long those who have the time wait for a proof.
    fn patience(&self) -> Patience {
        if self.proxy.is_some() { Patience::Bookmark } else { Patience::Insistent }
    }

    /// Waits until the cache is as fresh as was asked for.
    async fn freshen(&self, served: &Served, freshness: Freshness, patience: Patience) -> Result<(), Otherwise> {
        match freshness {
            Freshness::Any => {}
            Freshness::Consistent => self.reader.catalog().prove(served, patience).await?,
            Freshness::NotOlderThan(version) => self.reach(served, version).await?,
            // Told by the state itself, once it is held.
            Freshness::Exact(_) => {}
        }
        Ok(())
    }

    /// Waits until the cache is not older than `version`. One of a quiet resource stands at its last change, below the versions that
    /// upstream gives to everything else, until a proof moves it on.
    async fn reach(&self, served: &Served, version: ResourceVersion) -> Result<(), Otherwise> {
        let mut proved = false;
        let proof = async {
            proved = self.reader.catalog().prove(served, self.patience()).await.is_ok();
            std::future::pending::<std::convert::Infallible>().await
        };
        let reached = tokio::select! {
            biased;
            reached = served.hub.reached(version, FRESHNESS_TIMEOUT) => reached,
            never = proof => match never {},
        };
        reached.map_err(|refusal| match refusal {
            // Upstream would wait in vain as well.
            Refusal::Future { .. } if proved => Otherwise::Failed(Failure::from(&refusal)),
            other => Otherwise::Upstream(Failure::from(&other)),
        })
    }

    /// From 0 to 1, another each time: what began together is not to end together. Evenly spread, which chance would not be.
    fn spread(&self) -> f64 {
        const GOLDEN_RATIO: f64 = 0.618_033_988_749_894_9;
        (f64::from(self.watches.fetch_add(1, Ordering::Relaxed)) * GOLDEN_RATIO).fract()
    }

    /// The body of a watch that nobody else drives.
    pub fn body(&self, opened: Opened, line: Arc<ConnectionWaker>, sending: Sending) -> Response<Body> {
        let (media, warnings) = (opened.speech.media(), opened.subscription.warnings());
        let drain = self.reader.drain().clone();
        let watch = body::WatchBody::new(opened, line, self.options.stall_timeout, drain, sending);
        let mut response = Response::new(Body::new(watch));
        watch_headers(media, &warnings, response.headers_mut());
        response
    }

    /// The same as a websocket's messages, until `drain`; where a watch did not come about, the response stays as it is.
    pub fn socket(&self, socket: Socket, response: Response<Body>, drain: CancellationToken) -> Response<Body> {
        match response.status() {
            StatusCode::OK => socket.carry(response, self.options.stall_timeout, drain),
            _ => response,
        }
    }
}

/// A failure, in an encoding that its caller accepts.
fn refused(parts: &Parts, failure: &Failure) -> Response<Body> {
    failure.response(accept::negotiate_failure(accepts(&parts.headers)))
}

/// The same, of what a cache has told.
fn refused_here(parts: &Parts, failure: &Failure) -> Response<Body> {
    let mut response = refused(parts, failure);
    response.headers_mut().insert(CACHE_STATUS, HIT);
    response
}

fn not_made() -> Failure {
    Failure::not_acceptable(
        "only JSON and protobuf, whole or as PartialObjectMetadata, and tables are made from the cache".to_owned(),
    )
}

/// The media types that are asked for; `None` where they cannot be read.
fn accepts(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::ACCEPT).map_or(Some(""), |value| value.to_str().ok())
}

/// Whether the JSON is for people (`isPrettyPrint` in the apiserver's `negotiate.go`).
fn is_pretty(request: &Parts) -> bool {
    let query = request.uri.query().unwrap_or_default();
    if let Some((_, value)) = form_urlencoded::parse(query.as_bytes()).find(|(name, _)| name == "pretty")
        && !value.is_empty()
    {
        return matches!(&*value, "1" | "t" | "T" | "true" | "TRUE" | "True");
    }
    let agent = request.headers.get(header::USER_AGENT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    ["curl", "Wget", "Mozilla/5.0"].iter().any(|people| agent.starts_with(people))
}
