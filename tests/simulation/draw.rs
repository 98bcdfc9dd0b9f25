//! Draws the parts of a world from a seed: the cluster, the replicas, the subscribers and their
//! requests.

use std::{sync::Arc, time::Duration};

use kubefan_sim::apiserver::{SimApiserver, SimOptions};
use rand::RngExt;
use rand_pcg::Pcg64Mcg;

use super::{
    history::{Encoding, HttpReads, Interface, Spec},
    informer::ApiserverUse,
    node::{Node, NodeOptions},
    peering::Peering,
    projection::Projected,
    selection::Selection,
    subscriber::ClientSettings,
    upstream::Transport,
    world::World,
};

/// A world without subscribers, with its replicas not started.
pub(crate) fn world(random: &mut Pcg64Mcg, subscribers: usize, crowd: Option<&Crowd>) -> Arc<World> {
    let one_of = |random: &mut Pcg64Mcg, all: &[usize]| all[random.random_range(0..all.len())];
    let sim = SimOptions {
        window_events_max: one_of(random, &[60, 300, 10_000]),
        bookmark_interval: Duration::from_secs(random.random_range(5..60)),
        seed: random.random(),
        ..SimOptions::default()
    };
    let options = NodeOptions {
        ring_events_max: one_of(random, &[16, 32, 64, 256, 100_000]),
        ring_age_max: Duration::from_secs(one_of(random, &[20, 300, 86_400]) as u64),
        conflated_bytes_max: [None, Some(2000), Some(20_000)][random.random_range(0..3)],
        watch_list: random.random_bool(0.5),
        page_size: one_of(random, &[7, 50, 500]) as u32,
        coalesce_max: Duration::from_millis(one_of(random, &[0, 0, 5]) as u64),
        cache_compression: random.random_bool(0.3),
        upstream_idle_timeout: Duration::from_secs(random.random_range(30..=90)),
        upstream_http2: random.random_bool(0.5),
        protobuf: random.random_bool(0.8),
        peers: random.random_bool(0.6),
        ring_bytes_max: [None, None, Some(10_000), Some(60_000)][random.random_range(0..4)],
        snapshots_max: one_of(random, &[1, 2, 256, 256, 256, 256, 256, 256]),
        snapshot_queue_timeout: Duration::from_millis(random.random_range(500..10_000)),
        consistent_list_bytes_min: one_of(random, &[0, 10_000, 4 << 20]),
        lists_max: one_of(random, &[1, 8, 8]),
        broken_resource: random.random_bool(0.3),
        compresses_for_few: crowd.is_none_or(|crowd| crowd.compresses_for_few),
        seed: random.random(),
    };
    let apiservers = if random.random_bool(0.4) { 2 } else { 1 };
    let world = replicas(sim, apiservers, &options, subscribers);
    world.note(format!("{apiservers} apiservers, {options:?}"));
    world
}

/// Apiservers of one cluster and two replicas in front of them, not started.
pub(crate) fn replicas(sim: SimOptions, apiservers: usize, options: &NodeOptions, subscribers: usize) -> Arc<World> {
    let sim = SimApiserver::new(SimOptions { clock: || "2026-01-01T00:00:00Z".to_owned(), date: false, ..sim });
    let siblings = (1..apiservers).map(|number| sim.sibling(options.seed ^ number as u64));
    let apiservers: Vec<_> = [sim.clone()].into_iter().chain(siblings).collect();
    let peering = Peering::new(options.seed);
    let node = |number: usize| {
        let options = NodeOptions { seed: options.seed.wrapping_add((number as u64) << 32), ..options.clone() };
        let transport = Transport::to(apiservers.clone(), number, options.upstream_http2);
        Node::new(number, options, transport, peering.clone())
    };
    let nodes = (0..2).map(node).collect();
    World::new(apiservers.clone(), nodes, subscribers)
}

/// The number of objects: a few dozen in most seeds, several hundred in some, so that lists have
/// several chunks and catch-ups several parts, and thousands in a few.
pub(crate) fn objects(random: &mut Pcg64Mcg) -> usize {
    match random.random_range(0..200u32) {
        0..2 => random.random_range(1500..3000),
        2..10 => random.random_range(300..800),
        _ => random.random_range(30..90),
    }
}

fn projected(random: &mut Pcg64Mcg) -> Projected {
    let projected = Projected {
        parts: Projected::PARTS[random.random_range(0..Projected::PARTS.len())],
        drop_managed_fields: random.random_bool(0.4),
        drop_last_applied: random.random_bool(0.3),
        only_changes: false,
    };
    let only_changes = projected.is_canonical() && random.random_bool(0.6);
    Projected { only_changes, ..projected }
}

/// A subscriber over gRPC.
pub(crate) fn spec(random: &mut Pcg64Mcg, number: usize) -> Spec {
    let interface = if random.random_bool(0.4) { Interface::Library } else { Interface::Generated };
    let projected = if interface == Interface::Generated && random.random_bool(0.4) {
        projected(random)
    } else {
        Projected::default()
    };
    let encodings = [Encoding::Json, Encoding::Zstd, Encoding::Deltas];
    Spec {
        number,
        // The first subscribers have selectors that objects enter and leave in every seed.
        selection: match number {
            0 => Selection::Everything,
            1 => Selection::App("web"),
            2 => Selection::Node("node-0"),
            _ => Selection::ALL[random.random_range(0..Selection::ALL.len())],
        },
        encoding: encodings[random.random_range(0..encodings.len())],
        interface,
        projected,
        conflates: random.random_bool(0.6),
        restarts: random.random_bool(0.5),
    }
}

/// A program that reads over HTTP. `codings` draws the content coding.
pub(crate) fn reader(random: &mut Pcg64Mcg, codings: &mut Pcg64Mcg, number: usize) -> Spec {
    let reads = HttpReads { accepts_gzip: codings.random_bool(0.5), ..reads(random) };
    let selections: Vec<_> = Selection::over_http().collect();
    over_http(number, selections[random.random_range(0..selections.len())], reads)
}

/// Draws everything but the content coding.
fn reads(random: &mut Pcg64Mcg) -> HttpReads {
    HttpReads {
        is_protobuf: random.random_bool(0.4),
        is_http2: random.random_bool(0.5),
        accepts_gzip: false,
        bookmarks: random.random_bool(0.7),
        page_size: [None, Some(3), Some(20), Some(500)][random.random_range(0..4)],
        is_in_crowd: false,
    }
}

fn over_http(number: usize, selection: Selection, reads: HttpReads) -> Spec {
    Spec {
        number,
        selection,
        encoding: Encoding::Json,
        interface: Interface::Http(reads),
        projected: Projected::default(),
        conflates: false,
        restarts: false,
    }
}

/// Programs that read the same objects in the same form, in gzip, so that they share the pieces.
pub(crate) struct Crowd {
    selection: Selection,
    is_protobuf: bool,
    /// Whether the replicas have CPU time to compress events for a few readers.
    compresses_for_few: bool,
}

/// The number of programs of a crowd, which read from one replica. From 24 readers on a replica
/// compresses events whatever that costs. Most programs of a crowd are watching at a time, so the
/// number of readers of the view rises above 24 and falls below it again and again.
pub(crate) const CROWD_READERS: usize = 28;

impl Crowd {
    /// Draws a crowd in a few seeds, because its programs are as many as all others.
    pub(crate) fn draw(random: &mut Pcg64Mcg) -> Option<Crowd> {
        let is_drawn = random.random_bool(1.0 / 16.0);
        let selections: Vec<_> = Selection::over_http().collect();
        let selection = selections[random.random_range(0..selections.len())];
        is_drawn.then(|| Crowd {
            selection,
            is_protobuf: random.random_bool(0.4),
            compresses_for_few: random.random_bool(0.25),
        })
    }

    /// A program of the crowd.
    pub(crate) fn reader(&self, random: &mut Pcg64Mcg, number: usize) -> Spec {
        let reads = HttpReads { is_protobuf: self.is_protobuf, accepts_gzip: true, is_in_crowd: true, ..reads(random) };
        over_http(number, self.selection, reads)
    }
}

/// The informers that also read from the apiserver: some in a part of the seeds.
pub(crate) fn apiserver_users(random: &mut Pcg64Mcg) -> Vec<ApiserverUse> {
    if !random.random_bool(1.0 / 8.0) {
        return Vec::new();
    }
    let falls_back = random.random_range(1..=2);
    let fall_back = std::iter::repeat_n(ApiserverUse::FallsBack, falls_back);
    fall_back.chain([ApiserverUse::Moves]).collect()
}

pub(crate) fn settings(random: &mut Pcg64Mcg) -> ClientSettings {
    ClientSettings {
        start_after: Duration::from_millis(random.random_range(0..20_000)),
        window_bytes: [4 << 10, 16 << 10, 64 << 10][random.random_range(0..3)],
        bookmark_interval: Duration::from_millis(random.random_range(2000..20_000)),
        timeout_seconds: if random.random_bool(0.2) { random.random_range(5..60) } else { 0 },
        first_replica: random.random_range(0..2),
    }
}
