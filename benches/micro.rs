//! Times of the single steps between a line from upstream and a ready batch:
//! `cargo bench -p kubefan-benches --bench micro [NAME]`.
//!
//! The times depend on the machine and its load. Limits are enforced in `instructions` instead. An
//! iteration that processes many items also shows items per second. If each iteration needs new
//! input, preparing it is not included in the time.

mod common;

use std::{collections::BTreeMap, future::ready, hint::black_box, sync::Arc, time::Duration};

use bytes::Bytes;
use common::{Cache, PodKind, Pods, SMALL, Subscriber, apply_list};
use divan::{
    Bencher,
    counter::{BytesCount, ItemsCount},
};
use http_body_util::{BodyExt, Full};
use kubefan_cache::{
    Budgets, CacheWriter, EventRing, HistoryRecord, RingLimits, Store, Update,
    writer::{Change, Commit},
};
use kubefan_common::{
    encoding::{chunk, delta},
    proto::v1alpha1::ResolvedResource,
};
use kubefan_fanout::{
    send::encoder::{DeltaBases, Encoder},
    views::{
        index::SelectorIndex,
        selected_objects::{Page, SelectedObjects},
        shared_snapshot::SharedSnapshot,
    },
};
use kubefan_model::{
    ResourceVersion, Scope,
    event::WatchEvent,
    format::Format,
    projection::{Parts, Projection},
};
use kubefan_telemetry::metrics::WatchPurpose;
use kubefan_upstream::{
    Upstream,
    client::{HttpService, UpstreamOptions},
    lines::LINE_BYTES_MAX,
    reflector::{Reflector, ReflectorEvent, ReflectorOptions, Target},
};
use rand::{SeedableRng, rngs::StdRng};
use tokio::{
    runtime::{Builder, Runtime},
    time::Instant,
};
use tower::{BoxError, service_fn};

/// The allocator of the kubefan binary.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() {
    divan::main();
}

fn version(number: u64) -> ResourceVersion {
    ResourceVersion::new(number).expect("not zero")
}

/// The JSON of a pod before and after a change.
fn changed_pod() -> (String, String) {
    let (mut pods, created) = Pods::new(1, &[]);
    (created[0].clone(), pods.change())
}

/// A change of a pod that has not been read yet.
fn event() -> Arc<WatchEvent> {
    Cache::new(100, &[]).events(1).swap_remove(0)
}

/// Label selectors that match no pod: nine in ten by equality, one in ten set-based or negative.
fn labels_without_match(number: usize) -> String {
    match number % 20 {
        0 => format!("pod-template-hash notin (a,b),zone-{number}"),
        10 => format!("tier!=a,!app,zone-{number}"),
        _ => format!("app=other-{number}"),
    }
}

mod ring {
    use super::*;

    const LIMITS: RingLimits = RingLimits {
        ring_bytes_max: Some(1 << 30),
        ring_events_max: RECORDS,
        ring_age_max: Duration::from_secs(3600),
        conflated_bytes_max: None,
    };
    const RECORDS: usize = 10_000;

    /// A full ring, and a source of further records.
    fn full() -> (EventRing, Cache) {
        let mut cache = Cache::new(1000, SMALL);
        let floor = cache.hub.head().expect("a list");
        let mut ring = EventRing::new(LIMITS, floor);
        for event in cache.events(RECORDS) {
            ring.push(HistoryRecord::Event(event), Instant::now());
        }
        (ring, cache)
    }

    /// Appends one record. One record is packed, and one is evicted.
    #[divan::bench(sample_size = 100)]
    fn append(bencher: Bencher<'_, '_>) {
        let (mut ring, mut cache) = full();
        let now = Instant::now();
        bencher.with_inputs(|| cache.events(1).swap_remove(0)).bench_local_values(|event| {
            ring.push(HistoryRecord::Event(event), now);
            ring.evict(now, 0, 1.0, 1.0)
        });
    }

    /// Reads the last records of 10,000, as for a subscriber that resumes.
    #[divan::bench(args = [1, 100, 10_000], sample_size = 20)]
    fn read(bencher: Bencher<'_, '_>, records: usize) {
        let (ring, _) = full();
        let all: Vec<_> =
            ring.since(ring.floor()).map(|all| all.map(HistoryRecord::version).collect()).unwrap_or_default();
        let after = if records < all.len() { all[all.len() - 1 - records] } else { ring.floor() };
        bencher.counter(ItemsCount::new(records)).bench_local(|| {
            let records = ring.since(black_box(after)).into_iter().flatten();
            records.map(|record| record.version().get()).sum::<u64>()
        });
    }
}

mod index {
    use super::*;

    /// Finds the views that could match an event, if each selects a different node.
    #[divan::bench(args = [100, 1000, 10_000], sample_size = 100)]
    fn by_node(bencher: Bencher<'_, '_>, views: usize) {
        let kind = PodKind::new();
        let mut index = SelectorIndex::default();
        for id in 0..views {
            index.insert(id, &kind.select("", &format!("spec.nodeName=node-{id}")));
        }
        let event = event();
        let mut candidates = Vec::new();
        bencher.bench_local(|| {
            index.candidates(black_box(&event), &mut candidates);
            candidates.len()
        });
    }

    /// An event among 1,000 views without a match. A tenth of them are set-based or negative and
    /// have to be tested.
    #[divan::bench(sample_size = 20)]
    fn none_of_1000(bencher: Bencher<'_, '_>) {
        let kind = PodKind::new();
        let mut index = SelectorIndex::default();
        let views: Vec<_> = (0..1000).map(|i| kind.select(&labels_without_match(i), "")).collect();
        for (id, selection) in views.iter().enumerate() {
            index.insert(id, selection);
        }
        let event = event();
        let mut candidates = Vec::new();
        bencher.counter(ItemsCount::new(views.len())).bench_local(|| {
            index.candidates(black_box(&event), &mut candidates);
            candidates.iter().filter(|id| event.transition(&views[**id]).is_some()).count()
        });
    }
}

mod commit {
    use super::*;

    fn measure(bencher: Bencher<'_, '_>, mut cache: Cache, subscribers: Vec<Subscriber>) {
        let hub = cache.hub.clone();
        bencher.with_inputs(|| cache.changes(1).pop()).bench_local_values(|commit| {
            if let Some(commit) = commit {
                hub.batch().commit(commit, Instant::now());
            }
        });
        drop(subscribers);
    }

    /// Commits one event that matches none of the views; all select by `spec.nodeName`.
    #[divan::bench(args = [100, 1000, 10_000], sample_size = 20)]
    fn other_nodes(bencher: Bencher<'_, '_>, views: usize) {
        let cache = Cache::new(100, &[]);
        let subscribers = (0..views).map(|i| cache.subscribe("", &format!("spec.nodeName=other-{i}"))).collect();
        measure(bencher, cache, subscribers);
    }

    /// Commits one event that matches none of 1,000 views: nine in ten by equality, one in ten
    /// set-based or negative.
    #[divan::bench(sample_size = 20)]
    fn other_selectors(bencher: Bencher<'_, '_>) {
        let cache = Cache::new(100, &[]);
        let subscribers = (0..1000).map(|i| cache.subscribe(&labels_without_match(i), "")).collect();
        measure(bencher, cache, subscribers);
    }

    /// 1,000 woken subscribers of one view take one event and find no more. The time in
    /// microseconds equals the time of one delivery in nanoseconds.
    #[divan::bench(sample_size = 1)]
    fn take_by_1000(bencher: Bencher<'_, '_>) {
        let mut cache = Cache::new(100, SMALL);
        let mut subscribers: Vec<_> = (0..1000).map(|_| cache.subscribe("", "")).collect();
        bencher
            .counter(ItemsCount::new(subscribers.len()))
            .with_inputs(|| {
                for commit in cache.changes(1) {
                    cache.publish(commit);
                }
            })
            .bench_local_values(|()| subscribers.iter_mut().map(Subscriber::deliver).sum::<usize>());
    }
}

mod relist {
    use super::*;

    /// A list of 10,000 pods, one percent of them changed: processing items, computing the
    /// difference, and updating the history.
    #[divan::bench(sample_count = 5, sample_size = 1)]
    fn one_percent_of_10000(bencher: Bencher<'_, '_>) {
        let kind = PodKind::new();
        let (mut pods, created) = Pods::new(10_000, &[]);
        let keyed = |json: String| (kind.parse(&json).key().clone(), json);
        let mut now: BTreeMap<_, _> = created.into_iter().map(keyed).collect();
        let parsed = |now: &BTreeMap<_, String>| now.values().map(|json| kind.parse(json)).collect();
        let mut writer = CacheWriter::default();
        let mut reached = 20_000;
        apply_list(&mut writer, parsed(&now), reached);
        bencher
            .with_inputs(|| {
                now.extend((0..100).map(|_| keyed(pods.change())));
                reached += 1000;
                (parsed(&now), reached)
            })
            .bench_local_values(|(objects, reached)| apply_list(&mut writer, objects, reached));
    }
}

mod upstream {
    use super::*;

    const OBJECTS: usize = 500;

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_time().build().expect("a runtime")
    }

    /// A reflector whose upstream returns these fixed responses.
    fn reflector(kind: &PodKind, list: &Bytes, watch: &Bytes) -> Reflector {
        let list = list.clone();
        let watch = watch.clone();
        let metrics = kind.metrics();
        let service = service_fn(move |request: http::Request<Bytes>| {
            let watches = request.uri().query().is_some_and(|query| query.starts_with("watch"));
            let body = Full::new(if watches { watch.clone() } else { list.clone() });
            ready(Ok(http::Response::new(body.map_err(BoxError::from).boxed_unsync())))
        });
        let base = http::Uri::from_static("http://apiserver.bench");
        let upstream = Upstream::from_service(HttpService::new(service), &base, UpstreamOptions::default());
        let target = Target {
            gvr: kind.gvr.clone(),
            kind: "Pod".to_owned(),
            namespaced: true,
            scope: Scope::Cluster,
            field_selector: String::new(),
        };
        let options = ReflectorOptions {
            page_size: OBJECTS as u32,
            watch_list: false,
            upstream_idle_timeout: Duration::from_secs(60),
            line_bytes_max: LINE_BYTES_MAX,
        };
        let open_watch = Arc::new(move || metrics.upstream_watch(WatchPurpose::Standing));
        Reflector::new(upstream, target, kind.parser.clone(), options, open_watch, StdRng::seed_from_u64(1))
    }

    fn page(items: &[String]) -> Bytes {
        format!(r#"{{"metadata":{{"resourceVersion":"1"}},"items":[{}]}}"#, items.join(",")).into()
    }

    /// Runs steps until one satisfies `last`. Returns the number of objects.
    fn steps(runtime: &Runtime, reflector: &mut Reflector, last: fn(&ReflectorEvent) -> bool) -> usize {
        runtime.block_on(async {
            let mut objects = 0;
            loop {
                let step = reflector.step().await.expect("good answers");
                if last(&step) {
                    return objects;
                }
                if let ReflectorEvent::Update { update: Update::ListItem(_) | Update::Event(..), .. } = step {
                    objects += 1;
                }
            }
        })
    }

    /// Processes a watch of 500 lines, received in one chunk.
    #[divan::bench]
    fn watch_lines(bencher: Bencher<'_, '_>) {
        let kind = PodKind::new();
        let runtime = runtime();
        let (mut pods, _) = Pods::new(OBJECTS, &[]);
        let line = |_| format!("{{\"type\":\"MODIFIED\",\"object\":{}}}\n", pods.change());
        let watch = Bytes::from((0..OBJECTS).map(line).collect::<String>());
        let bytes = BytesCount::new(watch.len());
        bencher
            .counter(ItemsCount::new(OBJECTS))
            .counter(bytes)
            .with_inputs(|| {
                let mut reflector = reflector(&kind, &page(&[]), &watch);
                steps(&runtime, &mut reflector, |step| matches!(step, ReflectorEvent::Watching { .. }));
                reflector
            })
            .bench_local_refs(|reflector| {
                let objects = steps(&runtime, reflector, |step| matches!(step, ReflectorEvent::Ended { .. }));
                assert_eq!(objects, OBJECTS);
            });
    }

    /// Processes one page of a list with 500 items.
    #[divan::bench]
    fn list_page(bencher: Bencher<'_, '_>) {
        let kind = PodKind::new();
        let runtime = runtime();
        let (_, created) = Pods::new(OBJECTS, &[]);
        let list = page(&created);
        let bytes = BytesCount::new(list.len());
        bencher
            .counter(ItemsCount::new(OBJECTS))
            .counter(bytes)
            .with_inputs(|| reflector(&kind, &list, &Bytes::new()))
            .bench_local_refs(|reflector| {
                let end =
                    |step: &ReflectorEvent| matches!(step, ReflectorEvent::Update { update: Update::ListEnd(_), .. });
                assert_eq!(steps(&runtime, reflector, end), OBJECTS);
            });
    }
}

mod object {
    use super::*;

    /// Parses an object's JSON for the attributes used in routing.
    #[divan::bench(sample_size = 20)]
    fn parse(bencher: Bencher<'_, '_>) {
        let kind = PodKind::new();
        let (json, _) = changed_pod();
        bencher.counter(BytesCount::of_str(&json)).bench_local(|| kind.parse(black_box(&json)));
    }

    #[divan::bench(args = ["canonical", "metadata", "fields"], sample_size = 20)]
    fn project(bencher: Bencher<'_, '_>, parts: &str) {
        let paths = ["metadata.labels", "spec.nodeName", "status.podIP", "status.conditions.type"].map(str::to_owned);
        let parts = match parts {
            "metadata" => Parts::Metadata,
            "fields" => Parts::Fields(&paths),
            _ => Parts::Full,
        };
        let projection = Projection::new(parts, true, false).expect("a valid mask");
        let (json, _) = changed_pod();
        bencher.counter(BytesCount::of_str(&json)).bench_local(|| projection.apply(black_box(json.as_bytes())));
    }
}

mod frames {
    use super::*;

    const BATCH: usize = 32;

    /// A batch in one contiguous buffer, shared by all subscribers of a view.
    #[divan::bench(sample_size = 20)]
    fn contiguous(bencher: Bencher<'_, '_>) {
        let encoder = Encoder::new(Format::default(), &ResolvedResource::default(), None, Budgets::default());
        let entries = Cache::new(100, SMALL).entries(BATCH);
        bencher.counter(ItemsCount::new(BATCH)).bench_local(|| {
            let mut bytes = encoder.buffer(64 << 10);
            for entry in black_box(&entries) {
                encoder.entry(entry, DeltaBases::All, &mut bytes);
            }
            bytes.freeze()
        });
    }

    /// A batch as message headers and references to the objects' own bytes, for a single
    /// subscriber.
    #[divan::bench(sample_size = 20)]
    fn by_reference(bencher: Bencher<'_, '_>) {
        let encoder = Encoder::new(Format::default(), &ResolvedResource::default(), None, Budgets::default());
        let entries = Cache::new(100, SMALL).entries(BATCH);
        bencher.counter(ItemsCount::new(BATCH)).bench_local(|| {
            let mut frames = encoder.writer(0);
            for entry in black_box(&entries) {
                encoder.entry(entry, DeltaBases::All, &mut frames);
            }
            frames.finish()
        });
    }
}

mod deltas {
    use super::*;

    /// A pod's canonical bytes before and after a change.
    fn states() -> [Vec<u8>; 2] {
        let canonical = Projection::default().canonical();
        let (before, after) = changed_pod();
        [before, after].map(|json| canonical.apply(json.as_bytes()).to_vec())
    }

    #[divan::bench(sample_size = 20)]
    fn encode(bencher: Bencher<'_, '_>) {
        let [base, new] = states();
        bencher.bench_local(|| delta::object_delta("1".to_owned(), black_box(&base), &new));
    }

    #[divan::bench(sample_size = 20)]
    fn decode(bencher: Bencher<'_, '_>) {
        let [base, new] = states();
        let made = delta::object_delta("1".to_owned(), &base, &new).expect("it pays");
        bencher.bench_local(|| delta::decode(black_box(&base), &made, delta::OBJECT_BYTES_MAX));
    }
}

mod snapshot {
    use super::*;

    fn store(kind: &PodKind) -> Store {
        let (_, created) = Pods::new(50, &[]);
        let objects = created.iter().map(|json| kind.parse(json)).collect();
        match apply_list(&mut CacheWriter::default(), objects, 1000) {
            Some(Commit { store, change: Change::Start { .. }, .. }) => store,
            _ => Store::default(),
        }
    }

    /// Encodes a compressed chunk of 256 KiB of pods for its first reader.
    #[divan::bench]
    fn chunk_encode(bencher: Bencher<'_, '_>) {
        let kind = PodKind::new();
        let store = store(&kind);
        let selection = kind.select("", "");
        let encoder = Encoder::new(Format::default(), &ResolvedResource::default(), None, Budgets::default());
        bencher.counter(BytesCount::new(store.json_bytes().min(256 << 10))).bench_local(|| {
            let objects = Arc::new(SelectedObjects::new(store.clone(), Page::default()));
            let generation = Arc::new(SharedSnapshot::new(&objects, version(1000), None, Instant::now()));
            generation.join(version(1000), Instant::now()).map(|joined| joined.frame(0, &selection, &encoder))
        });
    }

    /// Decodes the same chunk.
    #[divan::bench]
    fn chunk_decode(bencher: Bencher<'_, '_>) {
        let (_, created) = Pods::new(50, &[]);
        let events = created.iter().map(|json| {
            let event = kubefan_common::proto::v1alpha1::Event { object: json.clone().into(), ..Default::default() };
            prost::Message::encode_length_delimited_to_vec(&event)
        });
        let zstd = chunk::encode(events).expect("small enough");
        let bytes = BytesCount::new(created.iter().map(String::len).sum::<usize>());
        bencher.counter(bytes).bench_local(|| chunk::decode(black_box(&zstd), chunk::CONTENT_BYTES_MAX));
    }
}
