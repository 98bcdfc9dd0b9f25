//! A read over HTTP, as parsed from the request alone.
//!
//! The hazard is a request that the apiserver interprets differently. A part that this code does
//! not understand completely is recorded as a problem of the read, and upstream answers it.

use http::{Method, request::Parts};
use kubefan_access::{Denial, Read, ReadVerb};
use kubefan_common::proto::v1alpha1::Target;
use kubefan_model::{
    ReadSpec, SelectorTexts,
    format::{ContentCoding, Format},
};
use kubefan_upstream::identity_headers::impersonates;

use super::{
    content_coding,
    fallback::Fallback,
    feature_gates::FeatureGates,
    hop_by_hop,
    negotiate::{self, Form},
    options::{self, Freshness, ListOptions, ReadRequest},
    path::Path,
    read_error::ReadError,
    request_info::RequestInfo,
    status::Failure,
    websocket::Socket,
};

/// The reason why upstream does not answer instead.
pub const NOT_FORWARDED: &str = "requests are not forwarded to the apiserver (--access)";

/// A `GET` request for objects.
pub struct HttpRead<'a> {
    /// The path.
    pub path: &'a Path,
    /// The operation and its options.
    pub request: ReadRequest,
    /// The selectors.
    pub spec: ReadSpec,
    /// The formats of the response, the preferred one first; `None` for one that kubefan cannot
    /// make.
    pub formats: Vec<Option<Format>>,
    /// Whether the failure of a get can be sent in the encoding that the client prefers.
    pub encodes_failures: bool,
    /// The reason why the caches cannot answer it, whatever they contain.
    pub problem: Option<ReadError>,
}

/// Settings by which a request is parsed.
#[derive(Debug, Clone, Copy)]
pub struct ReadSettings {
    /// The alpha parts of the Kubernetes API that are on.
    pub feature_gates: FeatureGates,
    /// Whether responses are compressed for clients that accept gzip.
    pub gzip: bool,
    /// Whether requests are passed through to upstream.
    pub is_passed_through: bool,
    /// The answer if the cache has none.
    pub fallback: Fallback,
}

impl<'a> HttpRead<'a> {
    /// Reads a request.
    ///
    /// # Errors
    /// If it is no read of objects, or one that only upstream understands.
    pub fn parse(request: &Parts, info: &'a RequestInfo<'_>, settings: ReadSettings) -> Result<Self, ReadError> {
        let path = info.path.as_ref().filter(|_| request.method == Method::GET);
        let path = path.ok_or_else(|| not_served(request, settings))?;
        if impersonates(&request.headers) {
            return Err(Denial::Impersonation.into());
        }
        let asked = ReadRequest::parse(&info.query, path).map_err(ReadError::Upstream)?;
        // Only a get asks for it.
        let encodes_failures = !matches!(asked, ReadRequest::Get(_))
            || negotiate::negotiate_failure(negotiate::accept_header(&request.headers)).is_some();
        let spec = options::selectors(&info.query, path);
        let mut read = Self { path, request: asked, spec, formats: Vec::new(), encodes_failures, problem: None };
        read.problem = read.complete(request, info, settings).err();
        Ok(read)
    }

    /// Reads the parts that may be a problem.
    fn complete(&mut self, request: &Parts, info: &RequestInfo<'_>, settings: ReadSettings) -> Result<(), ReadError> {
        check_shard(&self.spec, settings.feature_gates)?;
        self.check(request, settings)?;
        self.formats = self.negotiate(request, info, settings)?;
        Ok(())
    }

    /// Whether it may be the first request of an informer: all objects, at any version. Then a
    /// watch follows. A cache that starts for both costs upstream one list, as this request would.
    pub fn may_begin_informer(&self) -> bool {
        let ReadRequest::List(ListOptions { freshness, continues, .. }) = &self.request else { return false };
        let SelectorTexts { labels, fields, .. } = self.spec.texts();
        let is_whole = labels.is_empty() && fields.is_empty() && self.path.namespace.is_empty();
        is_whole && continues.is_empty() && *freshness == Freshness::Any
    }

    /// Returns the same read, to be authorized.
    pub fn to_authorize(&self) -> Read {
        let Path { group, version, resource, namespace, name, is_watch } = self.path.clone();
        let target = Target { group, version, resource, namespace, name, ..Target::default() };
        let read = match self.request {
            ReadRequest::Get(_) => Read::object(target),
            ReadRequest::List(_) => Read::collection(ReadVerb::List, target),
            ReadRequest::Watch(_) if is_watch => Read::watch_path(target),
            ReadRequest::Watch(_) => Read::collection(ReadVerb::Watch, target),
        };
        read.selecting(self.spec.clone())
    }

    /// Checks an upgrade, which only a watch may request, and a watch of a single object.
    fn check(&self, request: &Parts, settings: ReadSettings) -> Result<(), ReadError> {
        let is_watch = matches!(self.request, ReadRequest::Watch(_));
        if hop_by_hop::upgrade(&request.headers).is_some() {
            let socket = if is_watch { Socket::from_request(&request.headers, &request.extensions)? } else { None };
            socket.ok_or_else(|| not_served(request, settings))?;
        }
        if is_watch && !self.path.name.is_empty() && !self.spec.texts().fields.is_empty() {
            let message = "fieldSelector metadata.name doesn't match requested name".to_owned();
            return Err(ReadError::Upstream(Failure::bad_request(message)));
        }
        Ok(())
    }

    /// Negotiates the content coding.
    fn coding(&self, request: &Parts, settings: ReadSettings, format: &Format) -> ContentCoding {
        // The length of a compressed chunk tells how much its objects have in common, so someone
        // who may write one Secret and see the length could guess at the others (BREACH).
        let is_secret = self.path.group.is_empty() && self.path.resource == "secrets";
        let is_websocket = hop_by_hop::upgrade(&request.headers).is_some();
        // The first event of a watch of rows has the columns, which shared pieces cannot have. The
        // ages in rows change too, so few watches share the same bytes.
        let is_watch = matches!(self.request, ReadRequest::Watch(_));
        let is_watch_of_rows = is_watch && !format.is_time_independent();
        if !settings.gzip || is_secret || is_websocket || is_watch_of_rows {
            return ContentCoding::Identity;
        }
        content_coding::negotiate(&request.headers)
    }

    /// Negotiates the formats that the client accepts.
    fn negotiate(
        &self,
        request: &Parts,
        info: &RequestInfo<'_>,
        settings: ReadSettings,
    ) -> Result<Vec<Option<Format>>, ReadError> {
        let ReadSettings { feature_gates, fallback, .. } = settings;
        let accept = negotiate::accept_header(&request.headers)
            .ok_or_else(|| ReadError::Upstream(negotiate::not_acceptable()))?;
        let is_watch = matches!(self.request, ReadRequest::Watch(_));
        // Without passthrough, compact JSON is better than a refusal.
        let is_pretty = !is_watch && fallback.is_upstream() && negotiate::is_pretty(&request.headers, &info.query);
        let is_list = matches!(self.request, ReadRequest::List(_));
        let asked = negotiate::negotiate(accept, is_list, feature_gates.managed_fields_opt_out);
        let include = options::include_object(&info.query);
        // Only JSON can be pretty.
        let asked =
            asked.into_iter().map(|asked| if is_pretty && asked.is_json() { Form::Other.into() } else { asked });
        let coded = |format: Format| {
            let coding = self.coding(request, settings, &format);
            format.coded(coding)
        };
        Ok(asked.map(|asked| asked.format(include).map(coded)).collect())
    }
}

/// Checks the shard selector.
fn check_shard(spec: &ReadSpec, gates: FeatureGates) -> Result<(), ReadError> {
    if spec.texts().shard.is_empty() {
        return Ok(());
    }
    if !gates.sharded_list_and_watch {
        let message = "the caches answer shardSelector only with tuning.featureGates=ShardedListAndWatch=true";
        return Err(ReadError::Upstream(Failure::bad_request(message.to_owned())));
    }
    let shard = spec.shard().map(drop);
    shard.map_err(|error| Failure::bad_request(format!("invalid shard selector: {error}")).into())
}

/// Returns the failure of a request that is no read of objects.
fn not_served(request: &Parts, settings: ReadSettings) -> ReadError {
    let off = if settings.is_passed_through { String::new() } else { format!(", and {NOT_FORWARDED}") };
    ReadError::Upstream(match request.method {
        Method::GET => Failure::not_served(format!("{} is not served from the cache{off}", request.uri.path())),
        _ => Failure::method_not_allowed(format!("kubefan only serves reads{off}")),
    })
}
