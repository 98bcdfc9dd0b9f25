//! The faults of one seed: their kinds, starts and ends. All of it is drawn from the seed and noted
//! in the story.

mod reach;
mod scenarios;

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use kubefan_sim::apiserver::{Backup, Fault, FaultRule, Verb};
use rand::RngExt;
use rand_pcg::Pcg64Mcg;
use tokio::time::Instant;

use super::{concurrent_lists, truth::version_of, upstream::EventFault, workload::Workload, world::World};

/// The kinds of faults, by their names in the counts.
pub(crate) const KINDS: [&str; 30] = [
    "upstream cut",
    "upstream cut mid-frame",
    "upstream half-open",
    "upstream slow",
    "upstream unreachable",
    "upstream error",
    "watch expired",
    "bookmarks lost",
    "event duplicated",
    "event out of order",
    "apiserver killed",
    "apiserver restarted",
    "apiserver lags",
    "compacted",
    "rewound",
    "kubefan killed",
    "kubefan drained",
    "memory short",
    "subscriber cut",
    "subscriber cut mid-frame",
    "subscriber half-open",
    "subscriber's link slow",
    "subscriber stalled",
    "subscribers stalled in a gap",
    "subscriber slow",
    "subscriber away",
    "clock jump",
    "schema changed",
    "another cluster",
    "crowd of reads",
];

/// A part of "subscribers stalled in a gap", which is itself counted once its gap begins.
pub(crate) const ALL_STALLED: &str = "all subscribers stalled";

pub(crate) use reach::APISERVER_USE_KINDS;

/// The end of a fault.
#[derive(Clone, Copy, Debug)]
enum Heal {
    Reach(usize),
    Latency(usize),
    Apiserver,
    Kill(usize, Duration),
    Start(usize),
    SubscriberLatency(usize),
    ReplicasReach(usize),
    ApiserversReach(usize),
    Lag(usize),
    Memory(usize),
    OtherCluster(usize),
}

/// The faults of one seed.
pub(crate) struct Faults {
    world: Arc<World>,
    pub(crate) random: Pcg64Mcg,
    agenda: Vec<(Instant, Heal)>,
    backups: Vec<Backup>,
    rewinds_left: usize,
    /// Faults that happened at once. A fault that waits for an event is counted when it happens.
    counts: BTreeMap<&'static str, u64>,
}

/// Time for every replica to notice that versions went back, before the cluster reaches the old
/// versions again.
const REWIND_PAUSE: Duration = Duration::from_secs(300);
/// Time in which programs send requests whose answers they do not read.
const READS_BEGIN: Duration = Duration::from_secs(3);

impl Faults {
    pub(crate) fn new(world: Arc<World>, random: Pcg64Mcg, rewinds_left: usize) -> Faults {
        Faults { world, random, agenda: Vec::new(), backups: Default::default(), rewinds_left, counts: BTreeMap::new() }
    }

    /// The number of faults of each kind. A fault that found nothing to break is not counted.
    pub(crate) fn counts(&self) -> BTreeMap<&'static str, u64> {
        let mut counts = self.counts.clone();
        for (fault, count) in self.world.nodes.iter().flat_map(|node| node.transport.applied()) {
            *counts.entry(fault).or_default() += count;
        }
        counts
    }

    /// The number of all faults.
    pub(crate) fn count(&self) -> u64 {
        self.counts().values().sum()
    }

    /// Takes a backup. The cluster may be restored from it later.
    pub(crate) fn back_up(&mut self) {
        self.backups.push(self.world.sim.backup());
    }

    /// Ends the faults that are due.
    pub(crate) fn heal_due(&mut self) {
        let now = Instant::now();
        let agenda = std::mem::take(&mut self.agenda);
        let (due, later): (Vec<_>, Vec<_>) = agenda.into_iter().partition(|(at, _)| *at <= now);
        self.agenda = later;
        for (_, heal) in due {
            self.heal(heal);
        }
    }

    /// Ends all faults.
    pub(crate) fn heal_all(&mut self) {
        self.world.note("all faults are healed");
        for _ in 0..2 {
            let agenda = std::mem::take(&mut self.agenda);
            for (_, heal) in agenda {
                self.heal(heal);
            }
        }
        self.world.clear_faults();
        for node in &self.world.nodes {
            node.transport.heal();
            node.transport.route.reset_silent();
        }
        for control in &self.world.controls {
            control.heal();
            control.route.reset_silent();
            control.direct.reset_silent();
        }
    }

    /// Waits while nothing is written.
    async fn pause(&mut self, time: Duration) {
        let over = Instant::now() + time;
        while Instant::now() < over {
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.heal_due();
        }
    }

    fn later(&mut self, after: Duration, heal: Heal) {
        self.agenda.push((Instant::now() + after, heal));
    }

    fn heal(&mut self, heal: Heal) {
        let world = self.world.clone();
        match heal {
            Heal::Reach(node) => {
                world.note(format!("kubefan {node} can reach the apiserver again"));
                world.nodes[node].transport.route.refuse(false);
            }
            Heal::Latency(node) => world.nodes[node].transport.route.delay(Duration::ZERO),
            Heal::Apiserver => {
                world.note("the apiserver is back, with an empty watch cache");
                for apiserver in &world.apiservers {
                    apiserver.restart();
                }
                for node in &world.nodes {
                    node.transport.route.refuse(false);
                }
                for control in &world.controls {
                    control.direct.refuse(false);
                }
            }
            Heal::Kill(node, down) => {
                world.nodes[node].kill();
                self.later(down, Heal::Start(node));
            }
            Heal::Start(node) => {
                if !world.nodes[node].is_running() {
                    world.note(format!("kubefan {node} starts"));
                    world.nodes[node].start();
                }
            }
            Heal::Lag(apiserver) => {
                world.note(format!("apiserver {apiserver} catches up"));
                world.apiservers[apiserver].catch_up();
            }
            Heal::Memory(node) => world.nodes[node].memory_percent.store(0, Ordering::Relaxed),
            Heal::OtherCluster(node) => {
                world.note(format!("kubefan {node} reaches its own cluster again"));
                world.nodes[node].transport.misroute(None);
            }
            Heal::SubscriberLatency(subscriber_number) => {
                world.controls[subscriber_number].route.delay(Duration::ZERO);
                world.controls[subscriber_number].direct.delay(Duration::ZERO);
            }
            Heal::ReplicasReach(subscriber_number) => {
                world.note(format!("subscriber {subscriber_number} reaches the replicas again"));
                world.controls[subscriber_number].route.bring_back();
            }
            Heal::ApiserversReach(subscriber_number) => {
                world.note(format!("subscriber {subscriber_number} reaches the apiservers again"));
                world.controls[subscriber_number].direct.bring_back();
            }
        }
    }

    fn seconds(&mut self, least: u64, most: u64) -> Duration {
        Duration::from_millis(self.random.random_range(least * 1000..=most * 1000))
    }

    /// Starts one fault.
    pub(crate) async fn inject(&mut self, workload: &mut Workload) {
        let world = self.world.clone();
        let node = self.random.random_range(0..world.nodes.len());
        let apiserver = self.random.random_range(0..world.apiservers.len());
        let subscriber_number = self.random.random_range(0..world.controls.len());
        let transport = &world.nodes[node].transport;
        let kind = KINDS[self.random.random_range(0..KINDS.len())];
        let upstream = format!("{kind}: kubefan {node}");
        let subscriber = format!("{kind}: subscriber {subscriber_number}");
        match kind {
            "upstream cut" => {
                world.note(upstream);
                if !transport.route.each(|link| link.cut()) {
                    return;
                }
            }
            "upstream cut mid-frame" => {
                let bytes = self.random.random_range(1..6000);
                world.note(format!("{upstream}, after {bytes} bytes"));
                if !transport.route.each(|link| link.cut_after(bytes)) {
                    return;
                }
            }
            "upstream half-open" => {
                // Over one connection for all requests the replica would get no answers either.
                let is_one_of_several = !world.nodes[node].options().upstream_http2;
                if is_one_of_several {
                    // The replica sees everything that was written before.
                    self.pause(Duration::from_secs(1)).await;
                }
                world.note(upstream);
                if !transport.route.each(|link| link.silence()) {
                    return;
                }
                if is_one_of_several {
                    self.change_unseen(workload).await;
                }
            }
            "upstream slow" => {
                let latency = Duration::from_millis(self.random.random_range(5..2000));
                let time = self.seconds(1, 60);
                world.note(format!("{upstream}, {latency:?} for {time:?}"));
                transport.route.delay(latency);
                self.later(time, Heal::Latency(node));
            }
            "upstream unreachable" => {
                let time = self.seconds(1, 60);
                world.note(format!("{upstream}, for {time:?}"));
                transport.route.refuse(true);
                transport.route.each(|link| link.cut());
                self.later(time, Heal::Reach(node));
            }
            "upstream error" => {
                let retry_after_seconds = [1, 5, 30][self.random.random_range(0..3)];
                let faults = [
                    Fault::TooManyRequests { retry_after_seconds },
                    Fault::TooManyRequests { retry_after_seconds },
                    Fault::TooManyRequests { retry_after_seconds },
                    Fault::InternalError,
                    Fault::ServiceUnavailable,
                    Fault::Disconnect,
                    Fault::Silence,
                    Fault::TruncatedLine,
                    Fault::OneByteWrites,
                ];
                let fault = faults[self.random.random_range(0..faults.len())].clone();
                let verb = if self.random.random_bool(0.5) { Verb::Watch } else { Verb::List };
                world.note(format!("{kind}: {fault:?} for the next {verb:?}, and kubefan {node} is cut"));
                world.apiservers[apiserver].set_fault(FaultRule {
                    fault,
                    verb: Some(verb),
                    resource: None,
                    requests: 1,
                });
                transport.route.each(|link| link.cut());
            }
            "watch expired" => {
                world.note(upstream);
                return transport.schedule(EventFault::Expire, kind);
            }
            "bookmarks lost" => {
                let time = self.seconds(10, 120);
                world.note(format!("{upstream}, for {time:?}"));
                transport.lose_bookmarks_until(Instant::now() + time);
            }
            "event duplicated" => {
                world.note(upstream);
                return transport.schedule(EventFault::Duplicate, kind);
            }
            "event out of order" => {
                world.note(upstream);
                return transport.schedule(EventFault::OutOfOrder, kind);
            }
            "apiserver killed" => {
                let time = self.seconds(1, 40);
                world.note(format!("{kind}, for {time:?}"));
                for node in &world.nodes {
                    node.transport.route.refuse(true);
                    node.transport.route.each(|link| link.cut());
                }
                for control in &world.controls {
                    control.direct.refuse(true);
                }
                for apiserver in &world.apiservers {
                    apiserver.drop_connections();
                }
                self.later(time, Heal::Apiserver);
            }
            "apiserver restarted" => {
                world.note(kind);
                for apiserver in &world.apiservers {
                    apiserver.restart();
                }
            }
            "apiserver lags" => {
                let time = self.seconds(1, 30);
                world.note(format!("{kind}: apiserver {apiserver}, for {time:?}"));
                world.apiservers[apiserver].lag();
                self.later(time, Heal::Lag(apiserver));
            }
            "memory short" => {
                let percent = [87, 92, 97, 101][self.random.random_range(0..4)];
                let time = self.seconds(2, 40);
                world.note(format!("{upstream}, {percent} % of the budget for {time:?}"));
                if self.random.random_bool(0.5) {
                    world.note("no subscriber reads");
                    for control in &world.controls {
                        control.stall(time);
                    }
                    self.pause(READS_BEGIN).await;
                }
                world.memory_short.lock().unwrap().get_or_insert(world.now());
                world.nodes[node].memory_percent.store(percent, Ordering::Relaxed);
                self.later(time, Heal::Memory(node));
            }
            "compacted" => {
                world.note(kind);
                world.sim.compact();
            }
            "rewound" => {
                // Restores a backup that is at least some writes old. Otherwise no replica could
                // notice.
                let is_possible = self.rewinds_left > 0 && world.truth.lock().unwrap().schemas == 1;
                let Some(at) = self.backups.len().checked_sub(2).filter(|_| is_possible) else { return };
                self.rewinds_left -= 1;
                let is_overtaken = self.random.random_bool(0.5);
                if is_overtaken {
                    self.heal_all();
                }
                let backup = self.backups[self.random.random_range(0..=at)].clone();
                self.backups.clear();
                for apiserver in &world.apiservers {
                    apiserver.catch_up();
                }
                world.sim.restore(&backup);
                for apiserver in &world.apiservers {
                    apiserver.drop_connections();
                }
                let (from, to) = {
                    let mut truth = world.truth.lock().unwrap();
                    let from = version_of(truth.now().1.revision);
                    truth.restored(world.sim.revision());
                    (from, world.sim.revision())
                };
                if is_overtaken {
                    world.note(format!("{kind} from {from} to {to}, which other resources overtake"));
                    self.overtake(from, workload).await;
                } else {
                    world.note(format!("{kind} from {from} to {to}; nothing is written for {REWIND_PAUSE:?}"));
                    self.pause(REWIND_PAUSE).await;
                }
            }
            "schema changed" => {
                if !self.change_schema(workload).await {
                    return;
                }
            }
            "another cluster" => {
                if !world.nodes[node].is_running() || !transport.is_identified() {
                    return;
                }
                let time = self.seconds(5, 60);
                world.note(format!("{upstream}, for {time:?}"));
                transport.misroute(Some(world.other_cluster()));
                self.later(time, Heal::OtherCluster(node));
            }
            "crowd of reads" => {
                world.note(format!("{upstream}, while lists fail upstream"));
                concurrent_lists::read(&world, node).await;
            }
            "kubefan killed" => {
                let down = self.seconds(0, 40);
                if !world.nodes[node].is_running() {
                    return;
                }
                world.note(format!("{upstream}, for {down:?}"));
                world.nodes[node].kill();
                self.later(down, Heal::Start(node));
            }
            "kubefan drained" => {
                let drain = self.seconds(1, 5);
                let down = self.seconds(0, 40);
                if !world.nodes[node].is_running() {
                    return;
                }
                world.note(format!("{upstream}, killed after {drain:?}, for {down:?}"));
                world.nodes[node].drain();
                self.later(drain, Heal::Kill(node, down));
            }
            "subscriber cut" => {
                world.note(subscriber);
                if !world.controls[subscriber_number].each(|link| link.cut()) {
                    return;
                }
            }
            "subscriber cut mid-frame" => {
                let bytes = self.random.random_range(1..6000);
                world.note(format!("{subscriber}, after {bytes} bytes"));
                if !world.controls[subscriber_number].each(|link| link.cut_after(bytes)) {
                    return;
                }
            }
            "subscriber half-open" => {
                world.note(subscriber);
                if !world.controls[subscriber_number].each(|link| link.silence()) {
                    return;
                }
            }
            "subscriber's link slow" => {
                let latency = Duration::from_millis(self.random.random_range(5..2000));
                let time = self.seconds(1, 60);
                world.note(format!("{subscriber}, {latency:?} for {time:?}"));
                world.controls[subscriber_number].route.delay(latency);
                world.controls[subscriber_number].direct.delay(latency);
                self.later(time, Heal::SubscriberLatency(subscriber_number));
            }
            "subscriber stalled" => {
                let time = self.seconds(5, 90);
                world.note(format!("{subscriber}, for {time:?}"));
                world.controls[subscriber_number].stall(time);
            }
            "subscribers stalled in a gap" => {
                let away = self.seconds(2, 10);
                let stall = self.seconds(60, 120);
                world.note(format!(
                    "{kind}: kubefan {node} cut for {away:?}, and then its watch has expired; for {stall:?}"
                ));
                for control in &world.controls {
                    control.stall(stall);
                }
                *self.counts.entry(ALL_STALLED).or_default() += 1;
                transport.route.refuse(true);
                transport.route.each(|link| link.cut());
                self.later(away, Heal::Reach(node));
                return transport.schedule(EventFault::Expire, kind);
            }
            "subscriber slow" => {
                let each = Duration::from_millis(self.random.random_range(10..500));
                let time = self.seconds(10, 60);
                world.note(format!("{subscriber}, {each:?} for each message, for {time:?}"));
                world.controls[subscriber_number].slow(each, time);
            }
            "subscriber away" => {
                let time = self.seconds(2, 90);
                world.note(format!("{subscriber}, for {time:?}"));
                world.controls[subscriber_number].leave(time);
                if !world.controls[subscriber_number].each(|link| link.cut()) {
                    return;
                }
            }
            _ => {
                let time = self.seconds(30, 600);
                world.note(format!("{kind}, by {time:?}"));
                tokio::time::advance(time).await;
            }
        }
        *self.counts.entry(kind).or_default() += 1;
    }
}
