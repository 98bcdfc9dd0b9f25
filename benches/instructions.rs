//! Instructions per delivery, counted under valgrind. The count is the same on a busy and on an
//! idle machine, so a limit can be enforced.
//!
//! The benchmarks count kubefan's instructions in user space, from a commit to messages that are
//! ready to send, without HTTP/2 and the socket. Each benchmark repeats its work many times, so
//! that occasional work, such as allocating memory in bulk, is included on average. `cargo bench
//! -p kubefan-benches --bench instructions` fails if a limit is exceeded. The benchmark is built
//! without link-time optimization; the released binary needs somewhat fewer instructions.

#![expect(missing_docs, reason = "the macros below make items that cannot be documented")]

mod common;
mod nodes;

use std::{hint::black_box, sync::Arc};

use common::{Cache, PodKind, SMALL, Subscriber};
use gungraun::{Callgrind, EventKind, prelude::*};
use kubefan_cache::{Budgets, writer::Commit};
use kubefan_common::proto::v1alpha1::ResolvedResource;
use kubefan_fanout::{
    send::{
        encoder::{DeltaBases, Encoder},
        log_entry::LogEntry,
    },
    views::index::SelectorIndex,
};
use kubefan_model::{
    Media,
    event::WatchEvent,
    format::{ContentCoding, Encoding, Format},
    projection::Projection,
};
use nodes::Nodes;
use tokio::time::Instant;

/// The allocator of the kubefan binary.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Subscribers of one view.
const SUBSCRIBERS: usize = 1000;
/// Events committed together.
const BATCH: usize = 32;
/// Events to encode or to look up.
const EVENTS: usize = 100;
/// Views, each selecting its own node.
const VIEWS: usize = 10_000;

// Measured instruction counts with Rust 1.95 on x86-64 and the system's allocator. To update a
// number, divide the `Instructions` that the run prints by the factor used below, and state the
// gain or loss in the commit message.

/// Waking one stream, including its share of the commit.
const WAKE: usize = 110;
/// An event that matches none of [`VIEWS`] views, from its commit until all wake-ups are done.
const COMMIT_UNSEEN: usize = 15_590;
/// Taking one ready message by one subscriber, which then finds no more.
const TAKE_ONE: usize = 1_389;
/// Taking [`BATCH`] ready messages by one subscriber.
const TAKE_BATCH: usize = 1_548;
/// As [`TAKE_ONE`], an event of a watch over HTTP.
const TAKE_ONE_HTTP: usize = 1_388;
/// As [`TAKE_ONE_HTTP`], as a part of a gzip body, with the compression for the first subscriber.
const TAKE_ONE_GZIP: usize = 2_108;
/// Encoding an event of 1.5 KiB as a whole message.
const ENCODE_JSON: usize = 2_356;
/// Encoding the same event as a delta, including both projections.
const ENCODE_DELTA: usize = 168_006;
/// Finding the views for an event's node among [`VIEWS`].
const LOOK_UP: usize = 2_352;

/// A snapshot of one node's 30 pods, from a cache of [`PODS`].
const SELECTIVE_SNAPSHOT: usize = 115_837;
/// A resume after 10,000 events from the same cache. 30 of them concern the pods of the node.
const SELECTIVE_RESUME: usize = 147_987;
/// The sizes of the cache for the two above. The larger one may cost half as much again.
const PODS: [usize; 2] = [10_000, 150_000];
/// Number of agents that start or come back.
const AGENTS: usize = 100;

/// The limit is 25 % above the measured count: other compilers differ by a few percent, and runs by
/// up to two percent, because the histogram of delays searches longer for a higher delay.
fn limited(measured: usize) -> LibraryBenchmarkConfig {
    let mut callgrind = Callgrind::with_args(["--cache-sim=no"]);
    callgrind.format([EventKind::Ir]).hard_limits([(EventKind::Ir, (measured * 5 / 4) as u64)]);
    LibraryBenchmarkConfig::default().tool(callgrind).clone()
}

/// A cache, its subscribers, and the commits to deliver to them.
struct Fixture {
    cache: Cache,
    commits: Vec<Commit>,
    subscribers: Vec<Subscriber>,
    messages: usize,
}

impl Fixture {
    /// Creates waiting subscribers and `batch` commits for them. Delivers one such batch
    /// beforehand, so that first-time initialization is not counted.
    fn new(batch: usize, subscribers: impl FnOnce(&Cache) -> Vec<Subscriber>) -> Self {
        let mut cache = Cache::new(20, SMALL);
        let subscribers = subscribers(&cache);
        let commits = cache.changes(batch);
        let mut fixture = Self { cache, commits, subscribers, messages: 0 }.commit_all().deliver_all();
        fixture.commits = fixture.cache.changes(batch);
        fixture
    }

    /// Publishes all commits and wakes the subscribers.
    fn commit_all(mut self) -> Self {
        let mut batch = self.cache.hub.batch();
        for commit in self.commits.drain(..) {
            batch.commit(commit, Instant::now());
        }
        drop(batch);
        self
    }

    /// Every subscriber takes its messages. The first one encodes them.
    fn deliver_all(mut self) -> Self {
        self.messages = self.subscribers.iter_mut().map(Subscriber::deliver).sum();
        self
    }
}

/// Subscribers of one view that selects every pod.
fn one_view(batch: usize) -> Fixture {
    Fixture::new(batch, |cache| (0..SUBSCRIBERS).map(|_| cache.subscribe("", "")).collect())
}

fn one_view_committed(batch: usize) -> Fixture {
    one_view(batch).commit_all()
}

/// As [`one_view_committed`], for watches over HTTP.
fn http_committed(coding: ContentCoding) -> Fixture {
    let format = Format::http(Media::Json, Projection::default()).coded(coding);
    let subscribers = |cache: &Cache| (0..SUBSCRIBERS).map(|_| cache.subscribe_in(format.clone(), "", "")).collect();
    Fixture::new(1, subscribers).commit_all()
}

/// Subscribers that each select a node without events.
fn other_nodes() -> Fixture {
    let node = |i| format!("spec.nodeName=other-{i}");
    Fixture::new(1, |cache| (0..VIEWS).map(|i| cache.subscribe("", &node(i))).collect())
}

fn each_received_one(fixture: Fixture) {
    assert_eq!(fixture.messages, SUBSCRIBERS);
}

fn each_received_a_batch(fixture: Fixture) {
    assert_eq!(fixture.messages, BATCH * SUBSCRIBERS);
}

fn each_was_woken(fixture: Fixture) {
    each_received_one(fixture.deliver_all());
}

fn no_subscriber_was_woken(fixture: Fixture) {
    assert_eq!(fixture.deliver_all().messages, 0);
}

// Commits one event and wakes the 1,000 subscribers of a view.
#[library_benchmark]
#[bench::one_event(args = (1), setup = one_view, teardown = each_was_woken, config = limited(WAKE * SUBSCRIBERS))]
#[bench::unseen(args = (), setup = other_nodes, teardown = no_subscriber_was_woken, config = limited(COMMIT_UNSEEN))]
fn commit(fixture: Fixture) -> Fixture {
    black_box(fixture).commit_all()
}

// 1,000 subscribers of a view take their ready messages and find no more.
#[library_benchmark]
#[bench::one_event(
    args = (1), setup = one_view_committed, teardown = each_received_one, config = limited(TAKE_ONE * SUBSCRIBERS)
)]
#[bench::batch_of_32(
    args = (BATCH),
    setup = one_view_committed,
    teardown = each_received_a_batch,
    config = limited(TAKE_BATCH * SUBSCRIBERS)
)]
#[bench::http(
    args = (ContentCoding::Identity),
    setup = http_committed,
    teardown = each_received_one,
    config = limited(TAKE_ONE_HTTP * SUBSCRIBERS)
)]
#[bench::gzip(
    args = (ContentCoding::Gzip),
    setup = http_committed,
    teardown = each_received_one,
    config = limited(TAKE_ONE_GZIP * SUBSCRIBERS)
)]
fn take(fixture: Fixture) -> Fixture {
    black_box(fixture).deliver_all()
}

/// An encoder, and changes of pods that have not been encoded yet.
struct Changes {
    encoder: Encoder,
    entries: Vec<LogEntry>,
}

fn changes(encoding: Encoding) -> Changes {
    let encoder = Encoder::new(
        Format::new(Projection::default(), false, encoding).expect("a format"),
        &ResolvedResource::default(),
        None,
        Budgets::default(),
    );
    let mut entries = Cache::new(20, SMALL).entries(1 + EVENTS);
    // Creating zstd's context is not part of the measurement.
    if let Some(first) = entries.pop() {
        encoder.entry(&first, DeltaBases::All, &mut encoder.buffer(4096));
    }
    Changes { encoder, entries }
}

// Encodes events as messages, each for the first time.
#[library_benchmark]
#[bench::json(args = (Encoding::Json), setup = changes, config = limited(ENCODE_JSON * EVENTS))]
#[bench::delta(args = (Encoding::ZstdDelta), setup = changes, config = limited(ENCODE_DELTA * EVENTS))]
fn encode(changes: Changes) -> impl Sized {
    let Changes { encoder, entries } = changes;
    let mut bytes = encoder.buffer(EVENTS * 4096);
    for entry in &entries {
        encoder.entry(black_box(entry), DeltaBases::All, &mut bytes);
    }
    let bytes = bytes.freeze();
    (encoder, entries, bytes)
}

/// An index of views, events of their pods, and the list of views that an event could match.
struct ViewsByNode {
    index: SelectorIndex,
    events: Vec<Arc<WatchEvent>>,
    found: Vec<usize>,
}

fn views_by_node() -> ViewsByNode {
    let kind = PodKind::new();
    let mut index = SelectorIndex::default();
    for id in 0..VIEWS {
        index.insert(id, &kind.select("", &format!("spec.nodeName=node-{id}")));
    }
    ViewsByNode { index, events: Cache::new(20, SMALL).events(EVENTS), found: Vec::with_capacity(4) }
}

// Finds the views that could match an event, among 10,000 views by node.
#[library_benchmark]
#[bench::by_node(args = (), setup = views_by_node, config = limited(LOOK_UP * EVENTS))]
fn look_up(views: ViewsByNode) -> impl Sized {
    let ViewsByNode { index, events, mut found } = views;
    for event in &events {
        index.candidates(black_box(event), &mut found);
        assert!(!found.is_empty());
    }
    (index, events, found)
}

fn agents(pods: usize) -> Nodes {
    Nodes::new(pods)
}

/// At the larger size it may cost half as much again as at the smaller one.
fn flat(measured: usize) -> LibraryBenchmarkConfig {
    limited(measured * AGENTS * 6 / 5)
}

// Agents start with the pods of their nodes.
#[library_benchmark]
#[bench::small(args = (PODS[0]), setup = agents, config = limited(SELECTIVE_SNAPSHOT * AGENTS))]
#[bench::large(args = (PODS[1]), setup = agents, config = flat(SELECTIVE_SNAPSHOT))]
fn selective_snapshot(nodes: Nodes) -> Nodes {
    for agent in 0..AGENTS {
        assert_eq!(nodes.snapshot(black_box(agent)), Nodes::PODS_PER_NODE + 2);
    }
    nodes
}

// The same agents come back after events of all nodes.
#[library_benchmark]
#[bench::small(args = (PODS[0]), setup = agents, config = limited(SELECTIVE_RESUME * AGENTS))]
#[bench::large(args = (PODS[1]), setup = agents, config = flat(SELECTIVE_RESUME))]
fn selective_resume(nodes: Nodes) -> Nodes {
    for agent in 0..AGENTS {
        assert_eq!(nodes.resume(black_box(agent)), Nodes::PODS_PER_NODE);
    }
    nodes
}

library_benchmark_group!(
    name = deliveries,
    benchmarks = [commit, take, encode, look_up, selective_snapshot, selective_resume]
);

main!(library_benchmark_groups = deliveries);
