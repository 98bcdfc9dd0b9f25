//! The Kubernetes API: answers each request from the cache or from upstream, and counts it.

use std::sync::Arc;

use axum::body::Body;
use futures::FutureExt;
use http::{HeaderMap, Method, Request, Response, StatusCode, request::Parts};
use kubefan_access::{
    Caller, Denial, Mode, Read, ReadVerb, authentication::presented::impersonates, switches::Switched,
};
use kubefan_audit::{AuditLog, Notes, record::put_id};
use kubefan_cache::Refusal;
use kubefan_common::proto::v1alpha1::Target;
use kubefan_fanout::{Catalog, StreamWaker};
use kubefan_model::{
    GroupVersionResource, Media,
    selector::{FieldSelector, ShardSelector},
};
use kubefan_telemetry::{
    metrics::Metrics,
    requests::{AnsweredBy, OTHER, Protocol},
};
use kubefan_upstream::client::holding;
use tokio::time::Instant;

use super::{
    answer::{Answer, CACHE_STATUS, FromUpstream, HIT, forwarded_watch},
    audited,
    cache_reads::{CacheReads, ResolvedRead, SelectOptions},
    cross_origin::CorsRequest,
    end_on_mode_change::UntilSwitched,
    feature_gates::{CacheOnly, FeatureGates},
    forwarded_caller::forwarded_caller,
    get,
    guard::Guard,
    hop_by_hop,
    kube_upstream::KubeUpstream,
    list::list,
    negotiate::{self, Form},
    options::{self, Freshness, ListOptions, Options, SHARD_SELECTOR},
    pages::PageSnapshots,
    path::Path,
    read_error::ReadError,
    request_info::{self, RequestInfo},
    selector_coverage,
    status::Failure,
    watch::{self, DefaultTimeouts},
    websocket::Socket,
};
use crate::{client_info::ClientInfo, reader::Reader, watch::OpenedWatch};

/// The Kubernetes API.
pub struct KubeApi<C> {
    reads: CacheReads<C>,
    /// The same, for requests that upstream must not answer.
    own_reads: CacheReads<C>,
    feature_gates: FeatureGates,
    pages: Arc<PageSnapshots>,
    timeouts: DefaultTimeouts,
    upstream: KubeUpstream,
    guard: Option<Guard>,
    audit: AuditLog,
    metrics: Arc<Metrics>,
}

/// Options of the Kubernetes API.
#[derive(Debug, Clone)]
pub struct KubeApiOptions {
    /// A consistent list of at least this many bytes of JSON waits a second or two for a freshness
    /// proof.
    pub consistent_list_bytes_min: usize,
    /// Which alpha parts of the Kubernetes API are on.
    pub feature_gates: FeatureGates,
    /// The field selector of the caches; objects that it does not select are not cached.
    pub narrowed_by: FieldSelector,
    /// Which requests are refused because a browser could be tricked into sending them.
    pub guard: Option<Guard>,
}

/// The way of a read whose resource is switched to the apiserver.
fn switched_upstream(mode: Mode, info: &RequestInfo<'_>) -> ReadError {
    let Path { group, resource, .. } = info.path.clone().unwrap_or_default();
    Denial::Switched(Switched::new(mode, &group, &resource)).into()
}

/// What a `GET` request reads.
enum ReadRequest {
    /// A collection; also a single object if the path has the deprecated `/watch/` prefix.
    Collection(Options),
    /// A single object, with this freshness.
    Object(Freshness),
}

impl<C: Catalog> KubeApi<C> {
    /// An API that reads from `reader`, and forwards everything else if `upstream` can.
    pub fn new(
        reader: Arc<Reader<C>>,
        upstream: KubeUpstream,
        options: KubeApiOptions,
        audit: AuditLog,
        metrics: Arc<Metrics>,
    ) -> Self {
        let KubeApiOptions { consistent_list_bytes_min, feature_gates, narrowed_by, guard } = options;
        let reads = |has_upstream, reader, narrowed_by| CacheReads {
            reader,
            has_upstream,
            consistent_list_bytes_min,
            narrowed_by,
        };
        let own_reads = reads(false, reader.clone(), narrowed_by.clone());
        let reads = reads(upstream.forwarder.is_some(), reader, narrowed_by);
        let (pages, timeouts) = Default::default();
        Self { reads, own_reads, feature_gates, pages, timeouts, upstream, guard, audit, metrics }
    }

    /// Answers a request. A watch wakes `stream_waker` when it has something to send.
    pub async fn answer(&self, mut request: Request<Body>, stream_waker: StreamWaker) -> Answer {
        let uri = request.uri().clone();
        let info = RequestInfo::new(request.method(), &uri, request.headers());
        let verb = info.verb;
        let is_long_running = request_info::is_long_running(verb, uri.path());
        let is_head = request.method() == Method::HEAD;
        let mut record = audited::begin(&self.audit, &mut request, &info);
        let (id, media) = (record.id(), failure_media(request.headers()));
        let page = CorsRequest::of(&request);
        let mut counted = self.metrics.requests().begin(Protocol::Http, verb, is_long_running);
        let guarded = self.guard.as_ref().map_or(Ok(()), |guard| guard.check(&request));
        let answer = match guarded {
            Err(failure) => Answer::Response(failure.response(media)),
            Ok(()) => {
                // A watch that still waits for a proof or for upstream would end as soon as it was
                // opened.
                let drained = async {
                    match info.is_watch {
                        true => self.reads.reader.drain().cancelled().await,
                        false => std::future::pending().await,
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
        }
        let (code, by) = match &answer {
            Answer::Watch(_) => (StatusCode::OK, AnsweredBy::Cache),
            Answer::Response(response) | Answer::Forwarded(response) => (response.status(), answered_by(response)),
        };
        // Only now, because the request may have started the cache.
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
        let mode = self.mode(&parts, info).await;
        let cache_only = self.cache_only(&parts, info);
        let reads = if cache_only.is_some() { &self.own_reads } else { &self.reads };
        let read = match &mode {
            Err(denial) => Err(denial.clone().into()),
            Ok((Mode::Cache, _)) => self.read(reads, &parts, info, stream_waker).await,
            Ok((mode, _)) => Err(switched_upstream(*mode, info)),
        };
        let failure = match read {
            Ok(answer) => return answer,
            Err(ReadError::Final(failure)) => return Answer::Response(refusal_from_cache(&parts, &failure)),
            Err(ReadError::Unknown(failure)) => return Answer::Response(refusal(&parts, &failure)),
            Err(ReadError::Upstream(failure)) => failure,
        };
        if let Some(needed) = cache_only {
            let is_switched = matches!(mode, Ok((mode, _)) if mode != Mode::Cache);
            return Answer::Response(refusal(&parts, &not_forwarded(needed, failure, is_switched)));
        }
        let Some(forwarder) = &self.upstream.forwarder else {
            return Answer::Response(refusal(&parts, &failure));
        };
        let client = client_of(&parts);
        let (reader, notes) = (&self.reads.reader, notes_of(&parts));
        // Boxed: most requests are not forwarded and need not have the memory for it.
        let caller = forwarded_caller(reader, forwarder, &parts, info.verb, &client, &notes).boxed().await;
        let request = Request::from_parts(parts, body);
        let mut response = forwarder.forward(request, info.verb, &client, caller, reader.drain()).boxed().await;
        if let (true, Some(path), Ok((mode, caller))) = (info.is_watch, &info.path, mode) {
            let until = UntilSwitched::new(self.reads.reader.switches(), path, caller, mode);
            until.map(|until| response.extensions_mut().insert(until));
        }
        Answer::Forwarded(response)
    }

    /// Who answers a request, and its caller if that decides it: only reads of objects have another
    /// mode than `Cache`. This comes before everything that could forward the request.
    async fn mode(&self, request: &Parts, info: &RequestInfo<'_>) -> Result<(Mode, Option<Caller>), Denial> {
        let reads = matches!(request.method, Method::GET | Method::HEAD);
        let Some(path) = info.path.as_ref().filter(|_| reads) else { return Ok((Mode::Cache, None)) };
        let reader = &self.reads.reader;
        if !reader.switches().is_any_set() {
            return Ok((Mode::Cache, None));
        }
        let presented = client_of(request).presents(&request.headers, hop_by_hop::is_websocket(&request.headers));
        reader.mode((&path.group, &path.resource), &presented, &notes_of(request)).await
    }

    /// What a request needs that upstream might ignore.
    fn cache_only(&self, request: &Parts, info: &RequestInfo<'_>) -> Option<CacheOnly> {
        let FeatureGates { sharded_list_and_watch, managed_fields_opt_out } = self.feature_gates;
        let is_collection = match &info.path {
            Some(path) => path.name.is_empty() || path.is_watch,
            // Only upstream might read it as the path of a collection. What is proxied has its own
            // parameters.
            None => request_info::subresource(request.uri.path()) != Some("proxy"),
        };
        // Also to delete a collection: upstream might delete all of it.
        if sharded_list_and_watch
            && is_collection
            && info.query.first(SHARD_SELECTOR).is_some_and(|text| !text.is_empty())
        {
            return Some(CacheOnly::ShardSelector);
        }
        let is_read = managed_fields_opt_out && request.method == Method::GET;
        let path = info.path.as_ref().filter(|_| is_read)?;
        // A single object is passed on unless its cache certainly has it. A client sends `drop`
        // with all its requests, and a leader election reads its Lease.
        if !is_collection && !self.reads.holds_all(path) {
            return None;
        }
        let header = negotiate::accept_header(&request.headers)?;
        let is_list = is_collection && !info.is_watch;
        negotiate::insists_on_drop(header, is_list).then_some(CacheOnly::ManagedFieldsOptOut)
    }

    /// Reads from a cache.
    async fn read(
        &self,
        reads: &CacheReads<C>,
        request: &Parts,
        info: &RequestInfo<'_>,
        stream_waker: StreamWaker,
    ) -> Result<Answer, ReadError> {
        let uri = &request.uri;
        let not_served = || {
            let off = match self.upstream.forwarder {
                None => ", and passthrough to the apiserver is off (--passthrough=off)",
                Some(_) => "",
            };
            match request.method {
                Method::GET => Failure::not_served(format!("{} is not served from the cache{off}", uri.path())),
                _ => Failure::method_not_allowed(format!("kubefan only serves reads{off}")),
            }
        };
        let path = info.path.as_ref().filter(|_| request.method == Method::GET);
        let path = path.ok_or_else(|| ReadError::Upstream(not_served()))?;
        if impersonates(&request.headers) {
            return Err(Denial::Impersonation.into());
        }
        let arrived_at = Instant::now();
        let asked = match path.name.is_empty() || path.is_watch {
            true => {
                let options = Options::read(&info.query, path.is_watch).map_err(ReadError::Upstream)?;
                ReadRequest::Collection(options)
            }
            false => ReadRequest::Object(options::read_get(&info.query).map_err(ReadError::Upstream)?),
        };
        let selectors = match &asked {
            ReadRequest::Collection(options) => options.selectors(),
            ReadRequest::Object(_) => ("", ""),
        };
        let shard = match &asked {
            ReadRequest::Collection(options) => self.shard(options.shard_selector())?,
            ReadRequest::Object(_) => None,
        };
        // Upstream answers what the caches do not cover, so kubefan asks nothing about its caller.
        if reads.has_upstream {
            selector_coverage::check(&reads.narrowed_by, path, selectors.1)?;
        }
        // Upstream finds one object sooner than a freshness proof could arrive.
        if matches!(asked, ReadRequest::Object(Freshness::Consistent)) && reads.has_upstream {
            return Err(ReadError::Upstream(Failure::unavailable("it must come from upstream".to_owned())));
        }
        let is_list = matches!(asked, ReadRequest::Collection(Options::List(_)));
        let is_watch = matches!(asked, ReadRequest::Collection(Options::Watch(_)));
        let is_object = matches!(asked, ReadRequest::Object(_));
        if hop_by_hop::upgrade(&request.headers).is_some() {
            // Only a watch can be a websocket.
            let socket = if is_watch { Socket::from_request(&request.headers, &request.extensions)? } else { None };
            socket.ok_or_else(|| ReadError::Upstream(not_served()))?;
        }
        if is_watch && !path.name.is_empty() && !selectors.1.is_empty() {
            let message = "fieldSelector metadata.name doesn't match requested name".to_owned();
            return Err(ReadError::Upstream(Failure::bad_request(message)));
        }
        let accept = negotiate::accept_header(&request.headers)
            .ok_or_else(|| ReadError::Upstream(negotiate::not_acceptable()))?;
        // Without passthrough, compact JSON is better than a refusal.
        let is_pretty = !is_watch && reads.has_upstream && negotiate::is_pretty(&request.headers, &info.query);
        let forms = negotiate::negotiate(accept, is_list, self.feature_gates.managed_fields_opt_out);
        let include = options::include_object(&info.query);
        // Only JSON can be pretty.
        let forms =
            forms.into_iter().map(|asked| if is_pretty && asked.is_json() { Form::Other.into() } else { asked });
        let client = client_of(request);
        let presented = client.presents(&request.headers, hop_by_hop::is_websocket(&request.headers));
        let notes = notes_of(request);
        let read = read_of(&asked, path, selectors).of_shard(shard);
        let read = reads.reader.authorize(&presented, read, &notes).await;
        let read = read.map_err(|denial| match presented.is_by_certificate() {
            true => ReadError::denied_by_certificate(denial),
            false => denial.into(),
        })?;
        if hop_by_hop::is_websocket(&request.headers) {
            self.upstream.check_websocket_origin(request).await?;
        }
        // Only now: the refusal says what is cached. A single object is served if it is.
        if !reads.has_upstream && !is_object {
            selector_coverage::check(&reads.narrowed_by, path, selectors.1)?;
        }
        let holder = read.holder(client.holder());
        // Taken before a read waits for its cache.
        let place = if is_watch { reads.reader.admit_stream(holder)? } else { reads.reader.admit_read(holder)? };
        let formats = forms.map(|asked| asked.format(include));
        let waits_for_sync = match &asked {
            ReadRequest::Collection(Options::Watch(_)) => true,
            ReadRequest::Collection(Options::List(options)) => options.freshness != Freshness::Consistent,
            ReadRequest::Object(_) => false,
        };
        let is_first_list = |options: &ListOptions| options.may_begin_informer() && path.namespace.is_empty();
        let starts_cache = match &asked {
            ReadRequest::Collection(Options::Watch(_)) => true,
            ReadRequest::Collection(Options::List(options)) => is_first_list(options),
            ReadRequest::Object(_) => false,
        };
        let select_options = SelectOptions { holder, starts_cache, waits_for_sync };
        let (selected, format) = reads.select(path, &read, formats, select_options).await?;
        let warnings = selected.served.hub.warnings();
        let read = ResolvedRead { path, selected, format, arrived_at, read, notes };
        let answer = match asked {
            ReadRequest::Collection(Options::Watch(options)) => {
                let sender = client.sender(&request.headers);
                watch::open(reads, &self.timeouts, read, options, (place, sender), stream_waker).await
            }
            ReadRequest::Collection(Options::List(options)) => {
                list(reads, &self.pages, read, options, place).await.map(Answer::Response)
            }
            ReadRequest::Object(freshness) => get::get(reads, read, freshness).await.map(Answer::Response),
        };
        // A watch has the warnings in its own headers. A refusal gets them too.
        let mut response = match answer {
            Ok(Answer::Response(response)) => response,
            // That an object does not exist, in an encoding that kubefan cannot make, such as YAML.
            Err(ReadError::Final(failure))
                if is_object && reads.has_upstream && negotiate::negotiate_failure(Some(accept)).is_none() =>
            {
                return Err(ReadError::Upstream(failure));
            }
            Err(ReadError::Final(failure)) => refusal_from_cache(request, &failure),
            other => return other,
        };
        warnings.put(response.headers_mut());
        Ok(Answer::Response(response))
    }

    /// The shard that a selector names; `None` if it is empty.
    fn shard(&self, selector: &str) -> Result<Option<ShardSelector>, ReadError> {
        if selector.is_empty() {
            return Ok(None);
        }
        if !self.feature_gates.sharded_list_and_watch {
            let message = "the caches answer shardSelector only with --feature-gates=ShardedListAndWatch=true";
            return Err(ReadError::Upstream(Failure::bad_request(message.to_owned())));
        }
        let parsed = ShardSelector::parse(selector).map(Some);
        parsed.map_err(|error| Failure::bad_request(format!("invalid shard selector: {error}")).into())
    }

    /// The label of a resource in metrics: its name if it is cached or a limit prevents that, so
    /// that callers cannot create labels.
    fn resource_label(&self, path: Option<Path>, text: &str) -> String {
        let named = path.or_else(|| Path::parse_subresource(text).map(|(path, _)| path));
        let is_cached = |path: &Path| {
            [Media::Json, Media::Protobuf, Media::Table].into_iter().any(|media| self.reads.is_cached(path, media))
        };
        match named.filter(|path| is_cached(path) || self.reads.is_known_uncached(path)) {
            Some(Path { group, version, resource, .. }) => {
                GroupVersionResource::new(&group, &version, &resource).to_string()
            }
            None => OTHER.to_owned(),
        }
    }
}

/// The failure of a request that the cache cannot answer and upstream must not.
fn not_forwarded(needed: CacheOnly, failure: Failure, is_switched: bool) -> Failure {
    // These say that the cache lacks the answer. Others hold for any server, or for a while only.
    match is_switched || matches!(failure.code(), 404..=406) {
        true => Failure::bad_request(format!("{needed}: {}", failure.message())),
        false => failure,
    }
}

/// What a request reads.
fn read_of(asked: &ReadRequest, path: &Path, (label_selector, field_selector): (&str, &str)) -> Read {
    let Path { group, version, resource, namespace, name, is_watch } = path.clone();
    let (label_selector, field_selector) = (label_selector.to_owned(), field_selector.to_owned());
    let target = Target { group, version, resource, namespace, name, label_selector, field_selector };
    match asked {
        ReadRequest::Object(_) => Read::object(target),
        ReadRequest::Collection(_) if is_watch => Read::watch_path(target),
        ReadRequest::Collection(Options::Watch(_)) => Read::collection(ReadVerb::Watch, target),
        ReadRequest::Collection(Options::List(_)) => Read::collection(ReadVerb::List, target),
    }
}

fn notes_of(request: &Parts) -> Notes {
    request.extensions.get::<Notes>().cloned().unwrap_or_default()
}

fn client_of(request: &Parts) -> ClientInfo {
    request.extensions.get().cloned().unwrap_or_default()
}

fn answered_by(response: &Response<Body>) -> AnsweredBy {
    let is_refused = matches!(response.status(), StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    if response.extensions().get::<FromUpstream>().is_some() {
        AnsweredBy::Upstream
    } else if response.headers().contains_key(CACHE_STATUS) && !is_refused {
        AnsweredBy::Cache
    } else {
        AnsweredBy::Kubefan
    }
}

/// A failure, in an encoding that the client accepts.
fn refusal(parts: &Parts, failure: &Failure) -> Response<Body> {
    failure.response(failure_media(&parts.headers))
}

fn failure_media(headers: &HeaderMap) -> Media {
    negotiate::negotiate_failure(negotiate::accept_header(headers)).unwrap_or_default()
}

/// A failure that was decided by a cache.
fn refusal_from_cache(parts: &Parts, failure: &Failure) -> Response<Body> {
    let mut response = refusal(parts, failure);
    response.headers_mut().insert(CACHE_STATUS, HIT);
    response
}

#[cfg(test)]
mod tests;
