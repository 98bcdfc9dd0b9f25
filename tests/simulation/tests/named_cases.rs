//! Two known failures of other proxies, as fixed scenarios beside the random seeds: an object that
//! is deleted while a subscriber attaches stays as a ghost, and a delete while a subscriber is away
//! is never sent.

use std::{sync::Arc, time::Duration};

use kubefan_sim::apiserver::SimOptions;
use libtest_mimic::{Failed, Trial};
use rand::SeedableRng;
use rand_pcg::Pcg64Mcg;
use tokio::time::sleep;

use crate::{
    draw::replicas,
    history::{Encoding, History, Interface, Observation, Recorder, Spec},
    node::NodeOptions,
    oracle,
    projection::Projected,
    seed::run_paused,
    selection::Selection,
    subscriber::{self, ClientSettings},
    truth::Kind,
    workload::Workload,
    world::World,
};

const ENCODINGS: [Encoding; 3] = [Encoding::Json, Encoding::Zstd, Encoding::Deltas];

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("an_object_deleted_while_a_subscriber_attaches_leaves_no_ghost", || play(while_attaching())),
        Trial::test("a_delete_while_a_subscriber_is_away_is_sent_later", || play(while_away())),
        Trial::test("a_delete_that_the_ring_has_evicted_is_sent_later", || play(while_away_for_long())),
        Trial::test("a_delete_while_every_replica_restarts_is_sent_later", || play(while_restarted())),
    ]
}

fn play(case: impl Future<Output = ()>) -> Result<(), Failed> {
    match run_paused(case).1.first() {
        None => Ok(()),
        Some(panic) => Err(format!("a task panicked: {panic}").into()),
    }
}

struct Case {
    world: Arc<World>,
    workload: Workload,
    recorders: Vec<Recorder>,
}

impl Case {
    /// A cluster of at most 60 pods, and two synced replicas with rings of 16 events.
    async fn begin() -> Case {
        let options = NodeOptions { ring_events_max: 16, ..NodeOptions::default() };
        let world = replicas(SimOptions::default(), 1, &options, 64);
        let mut workload = Workload::new(Pcg64Mcg::seed_from_u64(7), 60);
        workload.populate(&world.sim, &mut world.truth.lock().unwrap());
        for node in &world.nodes {
            node.start();
        }
        sleep(Duration::from_secs(5)).await;
        Case { world, workload, recorders: Vec::new() }
    }

    /// Adds a subscriber that connects to the first replica after a delay.
    fn subscribe(&mut self, selection: Selection, encoding: Encoding, start_after: Duration) {
        let number = self.recorders.len();
        let library = number.is_multiple_of(2);
        let interface = if library { Interface::Library } else { Interface::Generated };
        let projected = Projected::default();
        let spec = Spec { number, selection, encoding, interface, projected, conflates: true, restarts: true };
        let window_bytes = 4 << 10;
        let bookmark_interval = Duration::from_secs(5);
        let settings =
            ClientSettings { start_after, window_bytes, bookmark_interval, timeout_seconds: 0, first_replica: 0 };
        let recorder = Recorder::new(spec.clone(), self.world.clock());
        self.recorders.push(recorder.clone());
        let world = self.world.clone();
        let random = Pcg64Mcg::seed_from_u64(number as u64);
        if library {
            tokio::spawn(subscriber::library(world, spec, settings, recorder, random))
        } else {
            tokio::spawn(subscriber::generated(world, spec, settings, recorder, random))
        };
    }

    /// Adds one subscriber for each selection and encoding, and waits until all have their
    /// snapshots.
    async fn subscribe_all(&mut self) {
        for selection in Selection::ALL {
            for encoding in &ENCODINGS {
                self.subscribe(selection, *encoding, Duration::ZERO);
            }
        }
        sleep(Duration::from_secs(10)).await;
    }

    fn write(&mut self, writes: usize) {
        for _ in 0..writes {
            self.workload.step(&self.world.sim, &mut self.world.truth.lock().unwrap());
        }
    }

    /// Deletes all pods except the first `kept`.
    fn delete_all_but(&mut self, kept: usize) {
        let mut truth = self.world.truth.lock().unwrap();
        let others: Vec<_> = truth.state().values().skip(kept).cloned().collect();
        for object in &others {
            self.workload.delete(&self.world.sim, &mut truth, object);
        }
    }

    /// Cuts all subscribers off. They come back after `time`.
    fn away(&self, time: Duration) {
        for control in &self.world.controls {
            control.leave(time);
            control.route.each(|link| link.cut());
        }
    }

    /// Waits until nothing changes any more, then judges every history. Returns the number of
    /// subscribers with an observation that `like` accepts.
    async fn judge(&self, like: impl Fn(&Observation) -> bool) -> usize {
        sleep(Duration::from_secs(120)).await;
        let truth = self.world.truth.lock().unwrap();
        let histories: Vec<_> = self.recorders.iter().map(Recorder::history).collect();
        for history in &histories {
            if let Err(violation) = oracle::judge(&truth, &self.world.facts(), history, true) {
                let lines: Vec<_> = history.entries.iter().map(ToString::to_string).collect();
                panic!("{violation}\n{}", lines.join("\n"));
            }
        }
        let matching = |history: &&History| history.entries.iter().any(|entry| like(&entry.what));
        histories.iter().filter(matching).count()
    }
}

/// Deletes happen at every moment of an attachment: before the request, on its way, during the
/// snapshot, and after it.
async fn while_attaching() {
    let mut case = Case::begin().await;
    // Latency makes an attachment take some time.
    for control in &case.world.controls {
        control.route.delay(Duration::from_millis(3));
    }
    for i in 0..60 {
        case.subscribe(Selection::ALL[i % 4], ENCODINGS[i % 3], Duration::from_millis(i as u64));
    }
    for _ in 0..40 {
        case.delete_all_but(27);
        case.write(6);
        sleep(Duration::from_millis(2)).await;
    }
    case.delete_all_but(0);
    let matching = case.judge(|what| matches!(what, Observation::Event(event) if event.kind.removes())).await;
    assert!(matching > 30, "only {matching} got a delete");
}

/// The events are still in the ring, so the deletes are sent as they were.
async fn while_away() {
    let mut case = Case::begin().await;
    case.subscribe_all().await;
    case.away(Duration::from_secs(10));
    case.delete_all_but(26);
    let matching = case.judge(|what| matches!(what, Observation::Event(event) if event.kind == Kind::Deleted)).await;
    assert!(matching > 3, "only {matching} got the delete event itself");
}

/// Both rings have evicted the events, and other objects have taken some of the names.
async fn while_away_for_long() {
    let mut case = Case::begin().await;
    case.subscribe_all().await;
    case.away(Duration::from_secs(60));
    case.delete_all_but(3);
    case.write(400);
    case.delete_all_but(5);
    case.write(40);
    let caught_up = case.judge(|what| matches!(what, Observation::CatchUpBegin { .. })).await;
    assert_eq!(caught_up, case.recorders.len(), "all resume below the ring");
}

/// The restarted replicas know nothing of the events and read them again from the apiserver.
async fn while_restarted() {
    let mut case = Case::begin().await;
    case.subscribe_all().await;
    for node in &case.world.nodes {
        node.kill();
    }
    case.delete_all_but(3);
    case.write(100);
    for node in &case.world.nodes {
        node.start();
    }
    let marked = |what: &Observation| {
        matches!(what, Observation::SnapshotBegin { restarted_from: Some(_), .. } | Observation::CatchUpBegin { .. })
    };
    assert_eq!(case.judge(marked).await, 0, "every event could be read again");
}
