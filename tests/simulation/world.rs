//! What all parts of a seed's run share: the cluster and its truth, the replicas, the controls of
//! the subscribers, and the story.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use kubefan_sim::apiserver::SimApiserver;
use tokio::time::{Instant, sleep_until};

use super::{link::Route, node::Node, truth::Truth};

/// The shared parts of a seed's run.
pub(crate) struct World {
    started: Instant,
    pub(crate) sim: SimApiserver,
    pub(crate) truth: Mutex<Truth>,
    pub(crate) nodes: Vec<Node>,
    /// By number of the subscriber.
    pub(crate) controls: Vec<SubscriberControl>,
    pub(crate) story: Mutex<Vec<(Duration, String)>>,
}

/// Controls one subscriber from outside: its connections to the replicas and its behaviour.
#[derive(Default)]
pub(crate) struct SubscriberControl {
    pub(crate) route: Route,
    behaviour: Mutex<Behaviour>,
}

#[derive(Clone, Copy, Default)]
struct Behaviour {
    stalled_until: Option<Instant>,
    away_until: Option<Instant>,
    slow: Option<(Duration, Instant)>,
}

impl SubscriberControl {
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
    pub(crate) fn new(sim: SimApiserver, nodes: Vec<Node>, subscribers: usize) -> Arc<World> {
        Arc::new(World {
            started: Instant::now(),
            sim,
            truth: Mutex::new(Truth::new()),
            nodes,
            controls: (0..subscribers).map(|_| SubscriberControl::default()).collect(),
            story: Mutex::default(),
        })
    }

    /// The time since the start of the run.
    pub(crate) fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Adds a line to the story.
    pub(crate) fn note(&self, what: impl Into<String>) {
        self.story.lock().unwrap().push((self.now(), what.into()));
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
