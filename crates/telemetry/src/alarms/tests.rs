use kubefan_model::{GroupVersionResource, Media, Scope};
use prometheus::Registry;

use super::*;
use crate::{
    last_hour::SAMPLE_INTERVAL,
    metrics::{CacheMetrics, Metrics, SelfCheck},
};

/// The metrics of a kubefan with one cache, sampled in order.
struct World {
    metrics: Arc<Metrics>,
    pods: CacheMetrics,
    alarms: Alarms,
    now: Instant,
}

impl World {
    fn new() -> Self {
        let metrics = Arc::new(Metrics::new(Registry::new()).unwrap());
        let pods = GroupVersionResource::new("", "v1", "pods");
        let pods = metrics.cache(&pods, &Scope::Cluster, Media::Json, &[]);
        let mut world = Self { metrics, pods, alarms: Alarms::default(), now: Instant::now() };
        assert_eq!(world.after(0), []);
        world
    }

    /// Samples for this many seconds. Returns the alarms that fire at their end.
    fn after(&mut self, seconds: u64) -> Vec<Alarm> {
        let end = self.now + Duration::from_secs(seconds);
        loop {
            let fire = self.alarms.sample(&self.metrics.registry().gather(), self.now);
            if self.now >= end {
                return fire;
            }
            self.now += SAMPLE_INTERVAL;
        }
    }
}

#[test]
fn a_difference_fires_for_an_hour_and_a_minimum_more() {
    let mut world = World::new();
    world.pods.self_check(SelfCheck::Equal);
    assert_eq!(world.after(60), []);
    world.pods.self_check(SelfCheck::Different);
    assert_eq!(world.after(10), [Alarm::Difference]);
    assert_eq!(world.after(3600), [Alarm::Difference]);
    assert_eq!(world.after(600), []);
}

#[test]
fn relists_of_one_cache_for_one_reason_are_counted() {
    let mut world = World::new();
    for reason in ["initial", "initial", "initial", "initial", "expired", "expired", "expired", "stalled", "stalled"] {
        world.pods.relist(reason);
    }
    assert_eq!(world.after(10), []);
    world.pods.relist("expired");
    assert_eq!(world.after(10), [Alarm::Relisting]);
    world.pods.watch_restart("timeout");
    world.pods.watch_restart("other_cluster");
    assert_eq!(world.after(10), [Alarm::OtherCluster, Alarm::Relisting]);
}

#[test]
fn late_events_count_by_their_share() {
    let mut world = World::new();
    for _ in 0..200 {
        world.pods.sent(1, 1, Some(Duration::from_millis(900)));
    }
    world.pods.sent(1, 1, Some(Duration::from_secs(2)));
    world.pods.sent(1, 1, Some(Duration::from_secs(9)));
    assert_eq!(world.after(10), []);
    world.pods.sent(1, 1, Some(Duration::from_secs(2)));
    assert_eq!(world.after(10), [Alarm::SlowDispatch]);
}

#[test]
fn memory_must_be_short_for_two_minutes() {
    let mut world = World::new();
    assert_eq!(world.after(300), []);
    world.metrics.memory(9, 10, 4);
    assert_eq!(world.after(110), []);
    world.metrics.memory(9, 10, 2);
    assert_eq!(world.after(10), []);
    world.metrics.memory(9, 10, 3);
    assert_eq!(world.after(130), [Alarm::Memory]);
}

#[test]
fn an_alarm_that_fires_again_fires_longer() {
    let mut world = World::new();
    let seconds_of_alarm = |world: &mut World| {
        for _ in 0..100 {
            world.metrics.access().reviews_of_tokens().answered(Some("error"));
        }
        (0..).take_while(|_| world.after(10) == [Alarm::ReviewsFailing]).count() as u64 * 10
    };
    let first = seconds_of_alarm(&mut world);
    assert!(first >= 300, "{first}");
    let second = seconds_of_alarm(&mut world);
    assert!(second >= first + 290, "{second}, after {first}");
    assert_eq!(world.after(2 * 3600), []);
    assert_eq!(seconds_of_alarm(&mut world), first, "it was quiet for long");
}
