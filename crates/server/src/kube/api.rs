//! The Kubernetes API: answers each request from the cache or from upstream, and counts it.
//!
//! It decides what concerns every request: the mode of the resource, and the answer if no cache has
//! one. A read in the mode `Cache` is answered by [`ReadLoop`], as [`super::route`] decides.

use std::sync::Arc;

use axum::body::Body;
use futures::FutureExt;
use http::{Method, Request, Response, StatusCode, header, request::Parts};
use kubefan_access::{Caller, Denial, Mode, switches::Switched};
use kubefan_audit::{AuditLog, record::put_id};
use kubefan_cache::Refusal;
use kubefan_fanout::StreamWaker;
use kubefan_model::{GroupVersionResource, selector::FieldSelector};
use kubefan_telemetry::{
    metrics::Metrics,
    requests::{AnsweredBy, OTHER, Protocol},
};
use kubefan_upstream::client::holding;

use super::{
    answer::{self, Answer, CACHE_STATUS, FromUpstream, NOT_CACHED, failure_media, forwarded_watch},
    audited,
    cache_reads::CacheReads,
    cross_origin::CorsRequest,
    end_on_mode_change::UntilSwitched,
    error_type::{ErrorType, OwnAnswer, PROXY_STATUS},
    fallback::{Fallback, Refused},
    feature_gates::{CacheOnly, FeatureGates},
    forwarded_caller::forwarded_caller,
    guard::Guard,
    http_read::{HttpRead, NOT_FORWARDED, ReadSettings},
    kube_upstream::KubeUpstream,
    negotiate,
    options::SHARD_SELECTOR,
    pages::PageSnapshots,
    path::Path,
    read_loop::{ReadContext, ReadLoop},
    request_info::{self, RequestInfo, caller_of, client_of},
    status::Failure,
    watch::DefaultTimeouts,
};
use crate::{fallback_budget::FallbackBudget, reader::Reader, request_caller::RequestCaller, watch::OpenedWatch};

/// The Kubernetes API.
pub struct KubeApi {
    reads: CacheReads,
    feature_gates: FeatureGates,
    gzip: bool,
    pages: Arc<PageSnapshots>,
    timeouts: DefaultTimeouts,
    upstream: KubeUpstream,
    guard: Option<Guard>,
    budget: Arc<FallbackBudget>,
    audit: AuditLog,
    metrics: Arc<Metrics>,
}

/// Options of the Kubernetes API.
#[derive(Debug, Clone)]
pub struct KubeApiOptions {
    /// A consistent list of at least this many bytes of JSON waits a second or two for a freshness
    /// proof.
    pub consistent_list_bytes_min: usize,
    /// The alpha parts of the Kubernetes API that are on.
    pub feature_gates: FeatureGates,
    /// Whether responses are compressed for clients that accept gzip.
    pub gzip: bool,
    /// The field selector of the caches; objects that it does not select are not cached.
    pub narrowed_by: FieldSelector,
    /// Refuses requests that a browser could be tricked into sending.
    pub guard: Option<Guard>,
}

impl KubeApi {
    /// Creates an API that reads from `reader`, and forwards everything else if `upstream` can.
    pub fn new(
        reader: Arc<Reader>,
        upstream: KubeUpstream,
        options: KubeApiOptions,
        budget: Arc<FallbackBudget>,
        audit: AuditLog,
        metrics: Arc<Metrics>,
    ) -> Self {
        let KubeApiOptions { consistent_list_bytes_min, feature_gates, gzip, narrowed_by, guard } = options;
        let reads = CacheReads { reader, consistent_list_bytes_min, narrowed_by };
        let pages = Arc::default();
        let timeouts = DefaultTimeouts::default();
        Self { reads, feature_gates, gzip, pages, timeouts, upstream, guard, budget, audit, metrics }
    }

    /// Answers a request. A watch wakes `stream_waker` when it has something to send.
    pub async fn answer(&self, mut request: Request<Body>, stream_waker: StreamWaker) -> Answer {
        let uri = request.uri().clone();
        let info = RequestInfo::new(request.method(), &uri, request.headers());
        let verb = info.verb;
        let is_long_running = request_info::is_long_running(verb, uri.path());
        let is_head = request.method() == Method::HEAD;
        let mut record = audited::begin(&self.audit, &mut request, &info);
        let id = record.id();
        let media = failure_media(request.headers());
        let page = CorsRequest::of(&request);
        let mut counted = self.metrics.requests().begin(Protocol::Http, verb, is_long_running);
        let guarded = self.guard.as_ref().map_or(Ok(()), |guard| guard.check(&request));
        let answer = match guarded {
            Err(failure) => Answer::Response(failure.response(media)),
            Ok(()) => {
                // A watch that still waits for a proof or for upstream would end as soon as it was
                // opened.
                let drained = async {
                    if info.is_watch {
                        self.reads.reader.drain().cancelled().await;
                    } else {
                        std::future::pending::<()>().await;
                    }
                };
                tokio::select! {
                    biased;
                    answer = record.span().follow(self.answer_guarded(request, &info, stream_waker)) => answer,
                    () = drained => Answer::Response(Failure::from(&Refusal::Draining).response(media)),
                }
            }
        };
        let answer = self.upstream.permit(page, answer).await;
        let answered = audited::answer(&answer, is_long_running);
        let recorded = audited::answered(&mut record, answered).await;
        let mut answer = match recorded {
            Ok(()) => answer,
            Err(not_recorded) => Answer::Response(Failure::not_recorded(not_recorded).response(media)),
        };
        if let Answer::Response(response) | Answer::Forwarded(response) = &mut answer {
            put_id(id, response.headers_mut());
            put_proxy_status(response);
            if answered_by(response) == AnsweredBy::Cache {
                self.budget.put(response.headers_mut());
            }
        }
        let (code, by) = match &answer {
            Answer::Watch(_) => (StatusCode::OK, AnsweredBy::Cache),
            Answer::Response(response) | Answer::Forwarded(response) => (response.status(), answered_by(response)),
        };
        // Counted only now, because the request may have started the cache.
        counted.answered(&self.resource_label(info.path, uri.path()), code.as_str(), by);
        match answer {
            Answer::Watch(opened) => Answer::Watch(Box::new(OpenedWatch { record, ..*opened })),
            // The answer to a HEAD has no body, and nothing else enforces that for HTTP/2.
            Answer::Response(response) | Answer::Forwarded(response) if is_head && by != AnsweredBy::Upstream => {
                Answer::Response(response.map(|_| Body::empty()))
            }
            // Only watches end at a drain: logs and sessions could not be resumed.
            Answer::Forwarded(mut response) if info.is_watch => {
                let switched = response.extensions_mut().remove::<UntilSwitched>();
                let response = forwarded_watch(response, self.reads.reader.drain(), switched);
                Answer::Forwarded(audited::recorded(response, record))
            }
            Answer::Forwarded(response) if is_long_running => Answer::Forwarded(audited::recorded(response, record)),
            // The request counts as in flight until its body has ended.
            Answer::Response(response) | Answer::Forwarded(response) => {
                Answer::Response(response.map(|body| Body::new(holding(body, (counted, record)))))
            }
        }
    }

    /// Answers a request that the guard let through.
    async fn answer_guarded(
        &self,
        request: Request<Body>,
        info: &RequestInfo<'_>,
        stream_waker: StreamWaker,
    ) -> Answer {
        let (parts, body) = request.into_parts();
        let caller = caller_of(&parts);
        let mode = self.mode(&parts, info, &caller).await;
        let fallback = self.fallback(&parts, info);
        let refused = match &mode {
            Ok((Mode::Cache, _)) => match self.read(&parts, info, &caller, fallback, stream_waker).await {
                Ok(answer) => return answer,
                Err(refused) => refused,
            },
            Ok((mode, _)) => {
                let Path { group, resource, .. } = info.path.clone().unwrap_or_default();
                fallback.refusal_of_switched(Switched::new(*mode, &group, &resource))
            }
            Err(denial) => fallback.refusal(denial.clone().into()),
        };
        if let Some(refused) = refused {
            return Answer::Response(answer::refusal(&parts.headers, &refused));
        }
        // Without a forwarder the fallback is a refusal, so this one is for a mistake in that.
        let Some(forwarder) = &self.upstream.forwarder else {
            let failure = Failure::unavailable(NOT_FORWARDED.to_owned());
            return Answer::Response(answer::refusal(&parts.headers, &Refused::Plain(failure)));
        };
        let client = client_of(&parts);
        let reader = &self.reads.reader;
        // Boxed: most requests are not forwarded and need not have the memory for it.
        let caller = forwarded_caller(reader, forwarder, &parts, info.verb, &caller).boxed().await;
        let request = Request::from_parts(parts, body);
        let mut response = forwarder.forward(request, info.verb, &client, caller, reader.drain()).boxed().await;
        if info.is_watch
            && let Some(path) = &info.path
            && let Ok((mode, caller)) = mode
        {
            let until = UntilSwitched::new(self.reads.reader.switches(), path, caller, mode);
            if let Some(until) = until {
                response.extensions_mut().insert(until);
            }
        }
        Answer::Forwarded(response)
    }

    /// Returns the mode of a request, and its caller if the caller decides it: only reads of
    /// objects have another mode than `Cache`. The mode is decided before anything could forward
    /// the request.
    async fn mode(
        &self,
        request: &Parts,
        info: &RequestInfo<'_>,
        caller: &RequestCaller,
    ) -> Result<(Mode, Option<Caller>), Denial> {
        let reads = matches!(request.method, Method::GET | Method::HEAD);
        let Some(path) = info.path.as_ref().filter(|_| reads) else { return Ok((Mode::Cache, None)) };
        let reader = &self.reads.reader;
        if !reader.switches().is_any_set() {
            return Ok((Mode::Cache, None));
        }
        reader.mode(caller, &path.group, &path.resource).await
    }

    /// Returns the fallback of a request that the cache does not answer.
    fn fallback(&self, request: &Parts, info: &RequestInfo<'_>) -> Fallback {
        match self.cache_only(request, info) {
            Some(needed) => Fallback::CacheOnly(needed),
            None if reads_elsewhere(request) => Fallback::Client,
            None if self.upstream.forwards() => Fallback::Upstream,
            None => Fallback::Off,
        }
    }

    /// Returns the part of a request that upstream might ignore.
    fn cache_only(&self, request: &Parts, info: &RequestInfo<'_>) -> Option<CacheOnly> {
        let FeatureGates { sharded_list_and_watch, managed_fields_opt_out } = self.feature_gates;
        let is_collection = match &info.path {
            Some(path) => path.has_list_options(),
            // Only upstream might read it as the path of a collection. Proxied requests have their
            // own parameters.
            None => request_info::subresource(request.uri.path()) != Some("proxy"),
        };
        // A shard selector matters to the deletion of a collection too: upstream might delete all
        // of it.
        if sharded_list_and_watch
            && is_collection
            && info.query.first(SHARD_SELECTOR).is_some_and(|text| !text.is_empty())
        {
            return Some(CacheOnly::ShardSelector);
        }
        let is_read = managed_fields_opt_out && request.method == Method::GET;
        let path = info.path.as_ref().filter(|_| is_read)?;
        // A request for a single object is forwarded unless the cache certainly has the object: a
        // client sends `drop` with all its requests, and a leader election reads its Lease.
        if !is_collection && !self.reads.holds_all(path) {
            return None;
        }
        let header = negotiate::accept_header(&request.headers)?;
        let is_list = is_collection && !info.is_watch;
        negotiate::insists_on_drop(header, is_list).then_some(CacheOnly::ManagedFieldsOptOut)
    }

    /// Answers a request from a cache.
    ///
    /// # Errors
    /// The refusal of a request that is not answered; `None` if upstream has to answer it.
    async fn read(
        &self,
        request: &Parts,
        info: &RequestInfo<'_>,
        caller: &RequestCaller,
        fallback: Fallback,
        stream_waker: StreamWaker,
    ) -> Result<Answer, Option<Refused>> {
        let settings = ReadSettings {
            feature_gates: self.feature_gates,
            gzip: self.gzip,
            is_passed_through: self.upstream.forwards(),
            fallback,
        };
        let read = HttpRead::parse(request, info, settings).map_err(|error| fallback.refusal(error))?;
        let Self { reads, pages, timeouts, upstream, .. } = self;
        let context = ReadContext { reads, pages, timeouts, upstream };
        ReadLoop::new(context, request, caller, read, fallback, stream_waker).run().await.ok_or(None)
    }

    /// Returns the label of a resource in metrics: its name if it is cached or a limit prevents
    /// that, so that callers cannot create labels.
    fn resource_label(&self, path: Option<Path>, text: &str) -> String {
        let named = path.or_else(|| Path::parse_subresource(text).map(|(path, _)| path));
        match named.filter(|path| !self.reads.cached(path).is_empty() || self.reads.is_known_uncached(path)) {
            Some(Path { group, version, resource, .. }) => {
                GroupVersionResource::new(&group, &version, &resource).to_string()
            }
            None => OTHER.to_owned(),
        }
    }
}

/// Names the error, if kubefan itself refuses the request (RFC 9209).
fn put_proxy_status(response: &mut Response<Body>) {
    if answered_by(response) == AnsweredBy::Upstream {
        return;
    }
    let answer = OwnAnswer {
        status: response.status(),
        is_of_cache: response.headers().contains_key(CACHE_STATUS),
        cause: response.extensions().get::<ErrorType>().copied(),
    };
    if let Some(error) = answer.error() {
        response.headers_mut().insert(PROXY_STATUS, error.value());
    }
}

/// Whether the client reads at upstream by itself what the cache does not answer.
fn reads_elsewhere(request: &Parts) -> bool {
    let is_read = matches!(request.method, Method::GET | Method::HEAD);
    let values = request.headers.get_all(header::CACHE_CONTROL).iter();
    let mut directives = values.filter_map(|value| value.to_str().ok()).flat_map(|text| text.split(','));
    is_read && directives.any(|directive| directive.trim().eq_ignore_ascii_case("only-if-cached"))
}

fn answered_by(response: &Response<Body>) -> AnsweredBy {
    let is_refused = matches!(response.status(), StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    let is_of_cache = response.headers().get(CACHE_STATUS).is_some_and(|status| status != NOT_CACHED);
    if response.extensions().get::<FromUpstream>().is_some() {
        AnsweredBy::Upstream
    } else if is_of_cache && !is_refused {
        AnsweredBy::Cache
    } else {
        AnsweredBy::Kubefan
    }
}

#[cfg(test)]
pub(crate) mod tests;
