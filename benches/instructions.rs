//! Instructions per delivery, counted under valgrind: the same on a busy machine and on an idle one, so that a bound can be enforced.
//!
//! Counted is what kubefan spends in user space from a commit to messages that are ready for the wire; HTTP/2 and the socket come on
//! top. Each benchmark does its work many times over, so that what happens now and then (memory that is asked for in bulk) is in its
//! share. `cargo bench --bench instructions` fails where a limit is passed. The build has no link-time optimization: the binary that
//! is shipped needs somewhat less.

#![expect(missing_docs, reason = "the macros below make items that cannot be documented")]

mod rig;

use std::{hint::black_box, sync::Arc};

use gungraun::{Callgrind, EventKind, prelude::*};
use kubefan_common::proto::v1alpha1::ResolvedResource;
use kubefan_model::{
    event::WatchEvent,
    format::{Encoding, Format},
    projection::Projection,
};
use kubefan_proxy::{
    cache::writer::Commit,
    fanout::{
        send::{
            budget::Budgets,
            encoder::{DeltaBases, Encoder},
            entry::LogEntry,
        },
        views::index::SelectorIndex,
    },
};
use rig::{Cache, PodKind, SMALL, Subscriber};
use tokio::time::Instant;

/// As the binary has it.
#[cfg(feature = "jemalloc")]
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Of one view.
const SUBSCRIBERS: usize = 1000;
/// Events that come at once.
const BATCH: usize = 32;
/// Events that are encoded, or looked up.
const EVENTS: usize = 100;
/// Views of a node each.
const VIEWS: usize = 10_000;

// What was measured, in instructions: Rust 1.95 on x86-64. To renew a number, divide the `Instructions` that the run shows by what the
// number is multiplied with below, and say in the commit what was won or lost.

/// A bell that rings, with its share of the commit.
const RING: usize = 109;
/// An event that concerns none of [`VIEWS`] views, from its commit to the end of its wake-ups.
const COMMIT_UNSEEN: usize = 8_002;
/// One message that is ready, taken by one subscriber, who then finds no more.
const TAKE_ONE: usize = 1_096;
/// The same with [`BATCH`] messages.
const TAKE_BATCH: usize = 1_438;
/// An event of 1.5 KiB that becomes a whole message.
const ENCODE_JSON: usize = 2_993;
/// The same as a delta, with both projections.
const ENCODE_DELTA: usize = 168_900;
/// From an event to the views of its node, among [`VIEWS`].
const LOOK_UP: usize = 2_333;

/// The limit is five quarters of what was measured: other compilers differ by a few percent, and runs by up to two, because the
/// histogram of delays looks further for a longer delay.
fn limited(measured: usize) -> LibraryBenchmarkConfig {
    let mut callgrind = Callgrind::with_args(["--cache-sim=no"]);
    callgrind.format([EventKind::Ir]).hard_limits([(EventKind::Ir, (measured * 5 / 4) as u64)]);
    LibraryBenchmarkConfig::default().tool(callgrind).clone()
}

/// What happens at once, and who hears of it.
struct Wave {
    cache: Cache,
    commits: Vec<Commit>,
    subscribers: Vec<Subscriber>,
    messages: usize,
}

impl Wave {
    /// Subscribers who wait, and `batch` events for them. There was such a wave before, so that what is made once is made.
    fn new(batch: usize, subscribers: impl FnOnce(&Cache) -> Vec<Subscriber>) -> Self {
        let mut cache = Cache::new(20, SMALL);
        let subscribers = subscribers(&cache);
        let commits = cache.changes(batch);
        let mut wave = Self { cache, commits, subscribers, messages: 0 }.told().taken();
        wave.commits = wave.cache.changes(batch);
        wave
    }

    /// Publishes and wakes.
    fn told(mut self) -> Self {
        let mut batch = self.cache.hub.batch();
        for commit in self.commits.drain(..) {
            batch.commit(commit, Instant::now());
        }
        drop(batch);
        self
    }

    /// Everybody takes; the first encodes.
    fn taken(mut self) -> Self {
        self.messages = self.subscribers.iter_mut().map(Subscriber::deliver).sum();
        self
    }
}

/// Subscribers of one view, who see everything.
fn one_view(batch: usize) -> Wave {
    Wave::new(batch, |cache| (0..SUBSCRIBERS).map(|_| cache.subscribe("", "")).collect())
}

fn one_view_told(batch: usize) -> Wave {
    one_view(batch).told()
}

/// Subscribers of a node each, where nothing happens.
fn other_nodes() -> Wave {
    let node = |i| format!("spec.nodeName=other-{i}");
    Wave::new(1, |cache| (0..VIEWS).map(|i| cache.subscribe("", &node(i))).collect())
}

fn all_have_one(wave: Wave) {
    assert_eq!(wave.messages, SUBSCRIBERS);
}

fn all_have_a_batch(wave: Wave) {
    assert_eq!(wave.messages, BATCH * SUBSCRIBERS);
}

fn all_were_told(wave: Wave) {
    all_have_one(wave.taken());
}

fn nobody_was_told(wave: Wave) {
    assert_eq!(wave.taken().messages, 0);
}

// One event is committed, and 1,000 subscribers of a view are woken.
#[library_benchmark]
#[bench::one_event(args = (1), setup = one_view, teardown = all_were_told, config = limited(RING * SUBSCRIBERS))]
#[bench::unseen(args = (), setup = other_nodes, teardown = nobody_was_told, config = limited(COMMIT_UNSEEN))]
fn commit(wave: Wave) -> Wave {
    black_box(wave).told()
}

// 1,000 subscribers of a view take what is ready for them, and find no more.
#[library_benchmark]
#[bench::one_event(
    args = (1), setup = one_view_told, teardown = all_have_one, config = limited(TAKE_ONE * SUBSCRIBERS)
)]
#[bench::batch_of_32(
    args = (BATCH),
    setup = one_view_told,
    teardown = all_have_a_batch,
    config = limited(TAKE_BATCH * SUBSCRIBERS)
)]
fn take(wave: Wave) -> Wave {
    black_box(wave).taken()
}

/// Changes of pods that nobody has looked at, and what encodes them.
fn changes(encoding: Encoding) -> (Encoder, Vec<LogEntry>) {
    let encoder = Encoder::new(
        Format::new(Projection::default(), false, encoding).expect("a format"),
        &ResolvedResource::default(),
        None,
        Budgets::default(),
    );
    let mut entries = Cache::new(20, SMALL).entries(1 + EVENTS);
    // To make zstd's context is no part of it.
    if let Some(first) = entries.pop() {
        encoder.entry(&first, DeltaBases::All, &mut encoder.buffer(4096));
    }
    (encoder, entries)
}

// Events become messages, each for the first time.
#[library_benchmark]
#[bench::json(args = (Encoding::Json), setup = changes, config = limited(ENCODE_JSON * EVENTS))]
#[bench::delta(args = (Encoding::ZstdDelta), setup = changes, config = limited(ENCODE_DELTA * EVENTS))]
fn encode((encoder, entries): (Encoder, Vec<LogEntry>)) -> impl Sized {
    let mut bytes = encoder.buffer(EVENTS * 4096);
    for entry in &entries {
        encoder.entry(black_box(entry), DeltaBases::All, &mut bytes);
    }
    let bytes = bytes.freeze();
    (encoder, entries, bytes)
}

fn views_by_node() -> (SelectorIndex, Vec<Arc<WatchEvent>>, Vec<usize>) {
    let (kind, mut index) = (PodKind::new(), SelectorIndex::default());
    for id in 0..VIEWS {
        index.insert(id, &kind.select("", &format!("spec.nodeName=node-{id}")));
    }
    (index, Cache::new(20, SMALL).events(EVENTS), Vec::with_capacity(4))
}

// The views that could see an event are found, among 10,000 by node.
#[library_benchmark]
#[bench::by_node(args = (), setup = views_by_node, config = limited(LOOK_UP * EVENTS))]
fn look_up((index, events, mut found): (SelectorIndex, Vec<Arc<WatchEvent>>, Vec<usize>)) -> impl Sized {
    for event in &events {
        index.candidates(black_box(event), &mut found);
        assert!(!found.is_empty());
    }
    (index, events, found)
}

library_benchmark_group!(name = deliveries, benchmarks = [commit, take, encode, look_up]);

main!(library_benchmark_groups = deliveries);
