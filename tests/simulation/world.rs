//! State that all parts of a seed's run share: the cluster and its truth, the replicas, the
//! controls of the subscribers, and the story.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use kubefan_model::GroupVersionResource;
use kubefan_sim::apiserver::{Fault, FaultRule, SimApiserver, SimOptions, Verb};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use tokio::time::{Instant, sleep_until};

use super::{
    link::{Link, Route},
    node::{BROKEN_RESOURCE, Node},
    oracle::Facts,
    schema,
    truth::Truth,
    workload::Workload,
};

/// The shared parts of a seed's run.
pub(crate) struct World {
    started: Instant,
    /// The first of the apiservers. Writes and backups go through it.
    pub(crate) sim: SimApiserver,
    /// All apiservers, which share one etcd.
    pub(crate) apiservers: Vec<SimApiserver>,
    pub(crate) truth: Mutex<Truth>,
    pub(crate) nodes: Vec<Node>,
    /// By number of the subscriber.
    pub(crate) controls: Vec<SubscriberControl>,
    pub(crate) story: Mutex<Vec<(Duration, String)>>,
    /// Time at which memory first became short.
    pub(crate) memory_short: Mutex<Option<Duration>>,
    /// A time in which no fault is active, or has an effect any more.
    pub(crate) quiet: Mutex<Option<Range<Duration>>>,
    /// Counts for the table of a sweep.
    pub(crate) counts: Mutex<BTreeMap<&'static str, u64>>,
    /// Times of the changes of the schema.
    schema_changes: Mutex<Vec<Duration>>,
}

/// Controls one subscriber from outside: its connections to the replicas and its behaviour.
#[derive(Default)]
pub(crate) struct SubscriberControl {
    /// To the replicas.
    pub(crate) route: Route,
    /// To the apiservers.
    pub(crate) direct: Route,
    behaviour: Mutex<Behaviour>,
    /// Set by those that look at `starts_over`.
    pub(crate) can_start_over: AtomicBool,
    starts_over: AtomicBool,
}

#[derive(Clone, Copy, Default)]
struct Behaviour {
    stalled_until: Option<Instant>,
    away_until: Option<Instant>,
    slow: Option<(Duration, Instant)>,
}

impl SubscriberControl {
    /// The subscriber starts over at once, as another program, if it is not the client library that
    /// decides how it returns.
    pub(crate) fn start_over(&self) {
        if self.can_start_over.load(Ordering::Relaxed) {
            self.starts_over.store(true, Ordering::Relaxed);
            self.route.each(|link| link.cut());
        }
    }

    /// Whether the program was to start over. Resets it.
    pub(crate) fn takes_start_over(&self) -> bool {
        self.starts_over.swap(false, Ordering::Relaxed)
    }

    /// Applies `what` to every open connection. Returns true if there was one.
    pub(crate) fn each(&self, what: impl Fn(&Link)) -> bool {
        let to_replicas = self.route.each(&what);
        self.direct.each(&what) || to_replicas
    }

    /// The subscriber reads nothing for this long.
    pub(crate) fn stall(&self, time: Duration) {
        self.behaviour.lock().unwrap().stalled_until = Some(Instant::now() + time);
    }

    /// The subscriber stays away for this long after its connection breaks.
    pub(crate) fn leave(&self, time: Duration) {
        self.behaviour.lock().unwrap().away_until = Some(Instant::now() + time);
    }

    /// The subscriber takes `each` per message, for this long.
    pub(crate) fn slow(&self, each: Duration, time: Duration) {
        self.behaviour.lock().unwrap().slow = Some((each, Instant::now() + time));
    }

    /// The subscriber behaves normally again.
    pub(crate) fn heal(&self) {
        *self.behaviour.lock().unwrap() = Behaviour::default();
    }

    /// Waits before the next message is read.
    pub(crate) async fn pause(&self) {
        let Behaviour { stalled_until, slow, .. } = *self.behaviour.lock().unwrap();
        if let Some((each, until)) = slow
            && Instant::now() < until
        {
            tokio::time::sleep(each).await;
        }
        self.wait(stalled_until, |now| now.stalled_until).await;
    }

    /// Waits before the subscriber connects again.
    pub(crate) async fn stay_away(&self) {
        let until = self.behaviour.lock().unwrap().away_until;
        self.wait(until, |now| now.away_until).await;
    }

    /// Waits in short steps, so that a heal takes effect early.
    async fn wait(&self, mut until: Option<Instant>, now: impl Fn(&Behaviour) -> Option<Instant>) {
        while let Some(at) = until.filter(|at| Instant::now() < *at) {
            sleep_until(at.min(Instant::now() + Duration::from_secs(5))).await;
            until = now(&self.behaviour.lock().unwrap());
        }
    }
}

impl World {
    pub(crate) fn new(apiservers: Vec<SimApiserver>, nodes: Vec<Node>, subscribers: usize) -> Arc<World> {
        let world = Arc::new(World {
            started: Instant::now(),
            sim: apiservers[0].clone(),
            apiservers,
            truth: Mutex::new(Truth::new()),
            nodes,
            controls: (0..subscribers).map(|_| SubscriberControl::default()).collect(),
            story: Mutex::default(),
            memory_short: Mutex::default(),
            quiet: Mutex::default(),
            counts: Mutex::default(),
            schema_changes: Mutex::default(),
        });
        for apiserver in &world.apiservers {
            world.break_resource(apiserver);
        }
        world
    }

    /// The time since the start of the run.
    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Gives all pods the bytes of this schema, or of a new one. Returns the schema before.
    pub(crate) fn change_schema(&self, number: Option<u8>) -> u8 {
        let mut truth = self.truth.lock().unwrap();
        let before = truth.schema;
        // One digit: a seed has a few changes.
        truth.schema = number.unwrap_or(truth.schemas.min(9) as u8);
        truth.schemas += 1;
        schema::change(&self.sim, truth.schema);
        self.schema_changes.lock().unwrap().push(self.now());
        before
    }

    /// Lets every list upstream fail.
    pub(crate) fn fail_lists(&self) {
        for apiserver in &self.apiservers {
            let fault = Fault::InternalError;
            let verb = Some(Verb::List);
            apiserver.set_fault(FaultRule { fault, verb, resource: None, requests: usize::MAX });
        }
    }

    /// Lets the apiservers serve everything again, except the resources that they never serve in
    /// this seed.
    pub(crate) fn clear_faults(&self) {
        for apiserver in &self.apiservers {
            apiserver.clear_faults();
            self.break_resource(apiserver);
        }
    }

    /// Lets the apiserver refuse the resource that it does not serve in this seed.
    fn break_resource(&self, apiserver: &SimApiserver) {
        if self.nodes[0].options().broken_resource {
            let resource = Some(GroupVersionResource::new("", "v1", BROKEN_RESOURCE));
            apiserver.set_fault(FaultRule { fault: Fault::InternalError, verb: None, resource, requests: usize::MAX });
        }
    }

    /// An apiserver of another cluster, with a pod, that is ahead of this one.
    pub(crate) fn other_cluster(&self) -> SimApiserver {
        let seed = self.nodes[0].options().seed ^ 0xf0e1;
        let clock = || "2026-01-01T00:00:00Z".to_owned();
        let other = SimApiserver::new(SimOptions { seed, clock, date: false, ..SimOptions::default() });
        let mut random = Pcg64Mcg::seed_from_u64(seed);
        let mut truth = Truth::new();
        let ahead = self.sim.revision() + random.random_range(0..100);
        let mut workload = Workload::new(random, 20);
        workload.populate(&other, &mut truth);
        while other.revision() < ahead {
            workload.write_other(&other, &mut truth);
        }
        other
    }

    /// Adds a line to the story.
    pub(crate) fn note(&self, what: impl Into<String>) {
        self.story.lock().unwrap().push((self.now(), what.into()));
    }

    /// Counts something that happened so often.
    pub(crate) fn count(&self, name: &'static str, times: u64) {
        *self.counts.lock().unwrap().entry(name).or_default() += times;
    }

    /// The facts about the replicas that the oracle needs.
    pub(crate) fn facts(&self) -> Facts {
        let options = self.nodes[0].options();
        let since_start = |at: Instant| at.duration_since(self.started);
        let requests = self.nodes.iter().flat_map(|node| node.transport.states_at()).map(since_start);
        let starts = self.nodes.iter().flat_map(|node| node.started_at()).map(since_start);
        Facts {
            // By its size the ring may evict any event.
            ring_events_max: if options.ring_bytes_max.is_some() { 0 } else { options.ring_events_max },
            ring_age_max: options.ring_age_max,
            interruptions: requests.chain(starts).collect(),
            memory_short: *self.memory_short.lock().unwrap(),
            quiet: self.quiet.lock().unwrap().clone(),
            schema_changes: self.schema_changes.lock().unwrap().clone(),
        }
    }

    /// The clock for histories: the time, the epoch and the revision.
    pub(crate) fn clock(self: &Arc<World>) -> Arc<dyn Fn() -> (Duration, usize, u64) + Send + Sync> {
        let world = self.clone();
        Arc::new(move || {
            let truth = world.truth.lock().unwrap();
            let (number, epoch) = truth.now();
            (world.now(), number, epoch.revision)
        })
    }
}
