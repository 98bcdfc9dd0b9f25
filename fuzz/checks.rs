//! Invariants for untrusted input. Each check accepts arbitrary bytes and panics if an invariant is
//! violated.
//!
//! The fuzz targets run the checks with generated input. A unit test of kubefan runs them with
//! `corpus/`, on every compiler.

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::Arc,
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::{FutureExt, stream};
use http_body_util::{BodyExt, Full, StreamBody};
use kubefan_access::{AccessControl, Caller, Presented, Read, ReadVerb};
use kubefan_admission::Holder;
use kubefan_cache::{Backfill, CacheWriter, HistoryCopy, Refusal, RelistReason, RingLimits, writer::Change};
use kubefan_common::{
    encoding::{
        chunk::{self, ChunkError},
        delta,
    },
    proto::v1alpha1::{
        Event, GetRequest, ListRequest, ObjectDelta, ResourceStatus, TransferEntry, TransferHeader, TransferResponse,
        TransferTrailer, WatchRequest, transfer_entry::Entry, transfer_response::Part,
    },
};
use kubefan_fanout::{CacheRequest, Catalog, Patience, ReadSource, Served};
use kubefan_model::{
    GroupVersionResource, Media, ObjectKey, ResourceVersion, Scope,
    fields::FieldTable,
    format::IncludeObject,
    object::{Object, ObjectParser},
    projection::{Parts, Projection},
    selector::{FieldSelector, LabelSelector, SELECTOR_BYTES_MAX, ShardSelector},
    table::Tables,
};
use kubefan_peer::{CacheIdentity, Decoder, Encoder};
use kubefan_server::{
    grpc::{call, request},
    kube::{negotiate, options::ReadRequest, path::Path, query::Query},
    selector_limits::SelectorLimits,
    target_lookup,
};
use kubefan_telemetry::metrics::{Metrics, WatchPurpose};
use kubefan_upstream::{
    Reflector, Upstream,
    client::{UpstreamBody, UpstreamOptions},
    reflector::{ReflectorEvent, ReflectorOptions, Target},
};
use prost::Message;
use rand::{SeedableRng, rngs::StdRng};
use serde_json::value::RawValue;
use tower::{BoxError, service_fn, util::BoxCloneSyncService};

/// Separates two parts of an input. It never occurs in UTF-8, so the fuzzer need not avoid it.
const PART: u8 = 0xff;
/// Separates two chunks of a body.
const CHUNK: u8 = 0xfe;

type Check = fn(&[u8]);

/// All checks, by the names of their fuzz targets and corpora.
pub(crate) const ALL: [(&str, Check); 7] = [
    ("upstream", upstream),
    ("selectors", selectors),
    ("requests", requests),
    ("http", http),
    ("encodings", encodings),
    ("projection", projection),
    ("peers", peers),
];

/// Any JSON object.
type JsonObject = HashMap<String, Box<RawValue>>;

fn split_parts(data: &[u8]) -> (&[u8], &[u8]) {
    match data.iter().position(|byte| *byte == PART) {
        Some(at) => (&data[..at], &data[at + 1..]),
        None => (data, &[]),
    }
}

/// Responses of upstream, from body chunks to commits. The input is a byte of flags, the body of
/// every list, [`PART`], and the body of every watch with [`CHUNK`] between chunks. Versions never
/// decrease except after a new start, and every object can be parsed from its own bytes.
pub(crate) fn upstream(data: &[u8]) {
    const STEPS_MAX: usize = 64;
    let Some((flags, data)) = data.split_first() else { return };
    let (list, watch) = split_parts(data);
    let chunks: Vec<_> = watch.split(|byte| *byte == CHUNK).map(Bytes::copy_from_slice).collect();
    let list = Bytes::copy_from_slice(list);
    let gzip = flags & 2 != 0;
    let protobuf = flags & 8 != 0;
    let service = service_fn(move |request: http::Request<Bytes>| {
        let body: UpstreamBody = if request.uri().query().is_some_and(|query| query.contains("watch=1")) {
            let frames = chunks.clone().into_iter().map(|chunk| Ok::<_, BoxError>(http_body::Frame::data(chunk)));
            StreamBody::new(stream::iter(frames)).boxed_unsync()
        } else {
            Full::new(list.clone()).map_err(|never: Infallible| match never {}).boxed_unsync()
        };
        let mut answer = http::Response::new(body);
        if protobuf {
            let media = request.headers().get("accept").cloned().expect("every request names one");
            answer.headers_mut().insert("content-type", media);
        }
        if gzip {
            answer.headers_mut().insert("content-encoding", http::HeaderValue::from_static("gzip"));
        }
        async move { Ok::<_, BoxError>(answer) }
    });
    let base = http::Uri::from_static("http://upstream");
    let options = UpstreamOptions { body_bytes_max: 1 << 20, ..UpstreamOptions::default() };
    let client = Upstream::from_service(BoxCloneSyncService::new(service), &base, options);
    let gvr = GroupVersionResource::new("", "v1", "pods");
    let table = FieldTable::new(&gvr, true, &[]);
    let parser = if protobuf {
        ObjectParser::protobuf(&gvr, &table).expect("pods are built in")
    } else if flags & 16 != 0 {
        ObjectParser::table(Tables::new(&gvr, || SystemTime::UNIX_EPOCH), &table)
    } else {
        ObjectParser::new(&table)
    };
    let parser = Arc::new(parser.of("Pod", "v1"));
    let metrics = Arc::new(Metrics::new(prometheus::Registry::new()).expect("a new registry")).cache(
        &gvr,
        &Scope::Cluster,
        parser.media(),
        &[],
    );
    let target =
        Target { gvr, kind: "Pod".to_owned(), scope: Scope::Cluster, namespaced: true, field_selector: String::new() };
    let options = ReflectorOptions {
        page_size: 2,
        watch_list: flags & 1 != 0,
        upstream_idle_timeout: Duration::from_secs(1),
        line_bytes_max: 1 << 16,
    };
    let open_watch = Arc::new(move || metrics.upstream_watch(WatchPurpose::Standing));
    let mut reflector = Reflector::new(client, target, parser.clone(), options, open_watch, StdRng::seed_from_u64(0));
    let mut writer = CacheWriter::new(flags & 4 != 0);
    let steps = async {
        for _ in 0..STEPS_MAX {
            let update = match reflector.step().await {
                Ok(ReflectorEvent::Update { update, .. }) => update,
                Ok(ReflectorEvent::Watching { .. } | ReflectorEvent::Proved { .. } | ReflectorEvent::Ended { .. }) => {
                    continue;
                }
                Err(_) => return,
            };
            let reached = writer.version();
            match writer.apply(update) {
                Ok(Some(commit)) => {
                    let is_start = matches!(commit.change, Change::Start { .. });
                    assert!(is_start || reached.is_none_or(|reached| reached <= commit.version), "{reached:?}");
                    for object in commit.store.iter() {
                        check_round_trip(object, &parser);
                    }
                }
                Ok(None) => {}
                Err(_) => reflector.relist(RelistReason::OutOfOrder),
            }
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime without I/O").block_on(steps);
}

fn check_round_trip(object: &Arc<Object>, parser: &Arc<ObjectParser>) {
    let version = ResourceVersion::new(u64::MAX).expect("not zero");
    let at_version = parser.parse(&object.bytes_at(version)).expect("an object at another version");
    assert_eq!((at_version.version(), at_version.key(), at_version.uid()), (version, object.key(), object.uid()));
    assert!(at_version.has_same_attributes(object));
    let selectable = object.selectable_attributes(parser);
    let read = parser.parse(&selectable.bytes()).expect("an object reduced to its selectable attributes");
    if let Some(tables) = parser.tables() {
        let row = tables.row(&object.bytes(), IncludeObject::Object);
        serde_json::from_slice::<&RawValue>(&row).expect("a table row is JSON");
    }
    assert!(selectable.has_same_attributes(object) && read.has_same_attributes(object), "{:?}", selectable.bytes());
}

/// Selectors: formatting a parsed selector and parsing it again gives the same selector. The first
/// part of the input is a label selector or a shard selector, the second a field selector.
pub(crate) fn selectors(data: &[u8]) {
    let (labels, fields) = split_parts(data);
    if let Ok(labels) = std::str::from_utf8(labels)
        && let Ok(selector) = LabelSelector::parse(labels)
    {
        let text = selector.to_string();
        // Added spaces and quotes may exceed the limit.
        if text.len() <= SELECTOR_BYTES_MAX {
            assert_eq!(LabelSelector::parse(&text).as_ref(), Ok(&selector), "{labels:?} is {text:?}");
        }
        for value in [None, Some(""), Some("web"), Some("-9223372036854775808")] {
            selector.matches(|_| value);
        }
    }
    if let Ok(shard) = std::str::from_utf8(labels)
        && let Ok(selector) = ShardSelector::parse(shard)
    {
        let text = selector.to_string();
        if text.len() <= SELECTOR_BYTES_MAX {
            assert_eq!(ShardSelector::parse(&text).as_ref(), Ok(&selector), "{shard:?} is {text:?}");
        }
        let _ = selector.shards().is_none_or(|shards| shards.contains("namespace", "uid"));
    }
    if let Ok(fields) = std::str::from_utf8(fields)
        && let Ok(selector) = FieldSelector::parse(fields)
    {
        let text = selector.to_string();
        if text.len() <= SELECTOR_BYTES_MAX {
            assert_eq!(FieldSelector::parse(&text).as_ref(), Ok(&selector), "{fields:?} is {text:?}");
        }
        for value in [None, Some(""), Some("web")] {
            selector.matches(|_| value.map(Into::into));
        }
    }
}

/// A catalog without resources: these checks concern what happens before the look-up.
struct EmptyCatalog;

#[async_trait]
impl Catalog for EmptyCatalog {
    async fn find(&self, _: CacheRequest<'_>) -> Result<Served, Refusal> {
        Err(Refusal::NotFound("the catalog is empty".to_owned()))
    }

    async fn full_name(&self, _: &str, _: &str, _: &str) -> Option<GroupVersionResource> {
        None
    }

    async fn backfill(&self, _: &Served, _: ResourceVersion, _: bool) -> Result<Arc<Backfill>, Refusal> {
        Err(Refusal::NotFound("the catalog is empty".to_owned()))
    }

    async fn prove(
        &self,
        _: &Served,
        _: Option<&kubefan_model::selection::Selection>,
        _: Patience,
    ) -> Result<ReadSource, Refusal> {
        Err(Refusal::NotFound("the catalog is empty".to_owned()))
    }

    async fn advance(&self, _: &Served, _: Patience) -> Result<(), Refusal> {
        Err(Refusal::NotFound("the catalog is empty".to_owned()))
    }

    async fn cluster_version(&self, _: &Served, _: tokio::time::Instant) -> Result<ResourceVersion, Refusal> {
        Err(Refusal::NotFound("the catalog is empty".to_owned()))
    }

    fn exists(&self, _: &GroupVersionResource, _: &ObjectKey, _: &str) -> Option<bool> {
        None
    }

    fn holds(&self, _: &GroupVersionResource, _: Media) -> bool {
        false
    }

    fn is_known_uncached(&self, _: &GroupVersionResource) -> bool {
        false
    }

    fn changes(&self) -> kubefan_common::sync::watch::Receiver<u64> {
        kubefan_common::sync::watch::Sender::new(0).subscribe()
    }

    fn list(&self) -> Vec<(Media, ResourceStatus)> {
        Vec::new()
    }
}

/// The body of a gRPC call, split at each [`CHUNK`], and its message, decoded as each type of
/// request.
pub(crate) fn requests(data: &[u8]) {
    let mut buffer = BytesMut::new();
    for chunk in data.split(|byte| *byte == CHUNK) {
        buffer.extend_from_slice(chunk);
        if !matches!(call::take_message(&mut buffer, 1 << 16), Ok(None)) {
            break;
        }
    }
    let mut targets = Vec::new();
    if let Ok(watch) = WatchRequest::decode(data) {
        let has_state = request::state_kept(&watch);
        let version = request::version(&watch.resource_version);
        assert!(has_state != Ok(true) || matches!(version, Ok(Some(_))));
        let _ = (request::timeout(watch.timeout_seconds), request::bookmark_interval(watch.bookmark_interval));
        let _ = (request::watch_format(&watch), request::policy(&watch));
        targets.push(watch.target);
    }
    if let Ok(list) = ListRequest::decode(data) {
        let _ = (request::list_format(&list), request::version(&list.resource_version));
        targets.push(list.target);
    }
    if let Ok(get) = GetRequest::decode(data) {
        let _ = request::get_format(&get);
        targets.push(get.target);
    }
    let limits = SelectorLimits { terms_max: 100, values_max: 2000 };
    let access = AccessControl::always_allow();
    let presented = Presented::new(&http::HeaderMap::new(), false, false, Holder::new(1, None));
    for target in targets.into_iter().map(Option::unwrap_or_default) {
        for read in [Read::object(target.clone()), Read::collection(ReadVerb::Watch, target)] {
            // The attributes that an authorizer sees of any request.
            let _ = read.attributes().key(&[0; 32]);
            let read = access.authorize(&Caller::Any, read, &presented).now_or_never();
            let Some(Ok(read)) = read else { panic!("everything is allowed") };
            let selected = target_lookup::select(&EmptyCatalog, &read, Media::Json, None, limits).now_or_never();
            assert!(matches!(selected, Some(Err(Refusal::Invalid { .. } | Refusal::NotFound(_)))));
        }
    }
}

/// An HTTP request: the path, [`PART`], the query, [`CHUNK`], and the Accept header. Path segments
/// cannot change the path upstream, and content negotiation is deterministic.
pub(crate) fn http(data: &[u8]) {
    let (path, rest) = split_parts(data);
    let mut rest = rest.splitn(2, |byte| *byte == CHUNK).map(String::from_utf8_lossy);
    let query = rest.next().unwrap_or_default();
    let accept = rest.next().unwrap_or_default();
    if let Some(path) = Path::parse(&String::from_utf8_lossy(path)) {
        let Path { group, version, resource, namespace, name, .. } = &path;
        for part in [group, version, resource, namespace, name] {
            assert!(!part.contains(['/', '%']), "{part:?} could change the path upstream");
        }
        let _ = ReadRequest::parse(&Query::parse(&query), &path).map_err(|failure| failure.json());
        let object = Path { name: "p".to_owned(), is_watch: false, ..path };
        let _ = ReadRequest::parse(&Query::parse(&query), &object).map_err(|failure| failure.json());
    }
    for is_list in [false, true] {
        let forms = negotiate::negotiate(&accept, is_list, true);
        assert_eq!(forms, negotiate::negotiate(&accept, is_list, true));
    }
    let _ = negotiate::negotiate_failure(Some(&accept));
}

/// Compressed data that clients receive: the input as a chunk of events, as a delta with its base,
/// and as two states to compute a delta between.
pub(crate) fn encodings(data: &[u8]) {
    const BYTES_MAX: usize = 1 << 20;
    if let Ok(events) = chunk::decode(data, BYTES_MAX) {
        let again =
            chunk::encode(events.iter().map(Event::encode_length_delimited_to_vec)).expect("it fitted into one chunk");
        // Without the fields that it does not know, an event may be too short.
        match chunk::decode(&again, 2 * BYTES_MAX) {
            Err(ChunkError::TooManyEvents { .. }) => {}
            decoded => assert_eq!(decoded.as_ref(), Ok(&events)),
        }
    }
    let (base, rest) = split_parts(data);
    let sent = ObjectDelta {
        base_crc32: delta::base_crc32(base),
        zstd: Bytes::copy_from_slice(rest),
        ..ObjectDelta::default()
    };
    if let Ok(object) = delta::decode(base, &sent, BYTES_MAX) {
        assert!(object.len() <= BYTES_MAX);
    }
    if let Some(delta_sent) = delta::object_delta("1".to_owned(), base, rest) {
        assert_eq!(delta::decode(base, &delta_sent, rest.len()).as_deref(), Ok(rest));
    }
}

/// Projections: a field mask with one path per line, [`PART`], and an object. Projecting JSON gives
/// JSON, and projecting again changes nothing.
pub(crate) fn projection(data: &[u8]) {
    let (paths, json) = split_parts(data);
    let Ok(paths) = std::str::from_utf8(paths) else { return };
    let paths: Vec<String> = paths.lines().map(str::to_owned).collect();
    let is_json = serde_json::from_slice::<JsonObject>(json).is_ok();
    for parts in [Parts::Full, Parts::Metadata, Parts::Fields(&paths)] {
        for (drop_managed_fields, drop_last_applied) in [(false, false), (true, false), (false, true)] {
            let Ok(projection) = Projection::new(parts, drop_managed_fields, drop_last_applied) else { continue };
            let projected = projection.apply(json);
            if is_json {
                assert!(serde_json::from_slice::<JsonObject>(&projected).is_ok(), "{projected:?}");
                assert_eq!(projection.apply(&projected), projected);
            }
        }
    }
}

/// A transfer from another replica. The input is one byte each for the version of the state, the
/// floor of the ring and the floor of the conflated history, then the content of a chunk. A
/// transfer that can be decoded can be encoded again, and decodes to the same state.
pub(crate) fn peers(data: &[u8]) {
    let [version, ring_floor, conflated_floor, content @ ..] = data else { return };
    let header = TransferHeader {
        cluster: "c".to_owned(),
        version: "v1".to_owned(),
        resource: "pods".to_owned(),
        schema: "s".to_owned(),
        resource_version: version.to_string(),
        ring_floor: ring_floor.to_string(),
        residue_floor: conflated_floor.to_string(),
        ..TransferHeader::default()
    };
    let mut trailer = TransferTrailer::default();
    let mut rest = content;
    while !rest.is_empty()
        && let Ok(entry) = TransferEntry::decode_length_delimited(&mut rest)
    {
        match entry.entry {
            Some(Entry::Object(_)) => trailer.objects += 1,
            Some(Entry::Change(_)) => trailer.changes += 1,
            Some(Entry::Event(_)) => trailer.events += 1,
            Some(Entry::Inexact(_) | Entry::Gap(_)) | None => {}
        }
    }
    let mut digest = crc32fast::Hasher::new();
    digest.update(&header.encode_to_vec());
    digest.update(content);
    trailer.crc32 = digest.finalize();
    let chunk = chunk::encode_content(content).expect("the content is small");
    let sent = [Part::Header(header), Part::Chunk(chunk), Part::Trailer(trailer)];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime without I/O").block_on(async {
        let Some((objects, copy, encoder)) = decode_transfer(sent) else { return };
        let again = encoder.map(|part| part.expect("a decoded transfer can be encoded").part.expect("a part"));
        let (objects_decoded_again, copy_decoded_again, _) =
            decode_transfer(again).expect("an encoded transfer can be decoded");
        assert_eq!(objects, objects_decoded_again);
        assert_eq!(
            (copy.ring_floor, copy.records.len()),
            (copy_decoded_again.ring_floor, copy_decoded_again.records.len())
        );
        assert_eq!(
            (copy.conflated_floor, copy.changes.len()),
            (copy_decoded_again.conflated_floor, copy_decoded_again.changes.len())
        );
    });
}

type DecodedTransfer = (Vec<Bytes>, HistoryCopy, Encoder);

/// Decodes a transfer. Returns its objects, its history, and an encoder for the same transfer.
fn decode_transfer(parts: impl IntoIterator<Item = Part>) -> Option<DecodedTransfer> {
    let now = tokio::time::Instant::now();
    let gvr = GroupVersionResource::new("", "v1", "pods");
    let parser = Arc::new(ObjectParser::new(&FieldTable::new(&gvr, true, &[])).of("Pod", "v1"));
    let cluster = "c".to_owned();
    let schema = "s".to_owned();
    let upstream_field_selector = String::new();
    let identity = CacheIdentity { cluster, gvr, scope: Scope::Cluster, upstream_field_selector, schema };
    let limits = RingLimits {
        ring_bytes_max: None,
        ring_events_max: 1000,
        ring_age_max: Duration::from_secs(1000),
        conflated_bytes_max: None,
    };
    let mut decoder = Decoder::new(identity.clone(), limits, parser, CacheWriter::new(false), 1 << 20, now);
    for part in parts {
        decoder.take(TransferResponse { part: Some(part) }).ok()?;
    }
    let commit = decoder.finish().ok()?.commit;
    let Change::Restored(history) = commit.change else { panic!("a transfer contains a state and its history") };
    let copied = || {
        let mut copy = HistoryCopy::of(commit.version);
        while history.copy(&mut copy, 7) {}
        copy
    };
    let objects = commit.store.iter().map(|object| object.bytes()).collect();
    Some((objects, copied(), Encoder::new(&identity, commit.store.clone(), copied(), now)))
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_input_of_the_corpus_passes_its_check() {
        for (name, check) in super::ALL {
            let inputs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
            let mut count = 0;
            for input in std::fs::read_dir(&inputs).unwrap() {
                let path = input.unwrap().path();
                // Shown if the check fails.
                println!("{}", path.display());
                check(&std::fs::read(path).unwrap());
                count += 1;
            }
            assert!(count > 0, "{} is empty", inputs.display());
        }
    }
}
