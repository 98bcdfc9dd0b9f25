//! Estimates the load that kubefan would take off an apiserver, and the resources that it would
//! need.

use serde::Serialize;

use kubefan_model::Scope;
use kubefan_upstream::{
    Upstream,
    discovery::{Discovery, DiscoveryOptions},
};

use super::{
    apiserver_load::{Load, ResourceLoad},
    seats,
};
use crate::cli::{
    object_sample::{ObjectSample, ResourceSize},
    sizing::{
        APISERVER_LIST_SECONDS_PER_BYTE, CONNECTION_BYTES, Deliveries, INGEST_SECONDS, PROCESS_BYTES, cache_bytes,
    },
};

/// The resources whose objects are looked at, those with the most bytes first.
const MEASURED_MAX: usize = 50;

/// Limits of the metrics. Part of every answer.
pub(super) const UNKNOWN: [&str; 7] = [
    "which clients would move: all watches are counted, also those of controllers that better stay, and the few of the \
     apiserver itself",
    "what watches select: one node's pods cost the apiserver as little as they bring, and still one watch each",
    "which lists a cache may answer: those with resourceVersion=0 and paged ones that continue; others are forwarded or proved",
    "which priority levels give the seats, and which watches begin with the state; a level may allow a request fewer \
     seats, and a list from etcd may cost more",
    "other apiservers of the cluster: these are the metrics of one; add up those of all",
    "other times of day: the rates are those of the time that was observed",
    "which encodings the clients ask for: a resource that is read in JSON and in protobuf has a watch and a cache of each; sizes of events are those of today",
];

/// Kubefan's estimated savings and needs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Savings {
    /// The time between the two samples.
    pub(super) seconds: f64,
    pub(super) replicas: u32,
    pub(super) apiserver: Apiserver,
    /// Resources, those with the most bytes first.
    pub(super) resources: Vec<ResourceSavings>,
    pub(super) kubefan: Kubefan,
    pub(super) unknown: [&'static str; 7],
}

/// The apiserver, before and after.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Apiserver {
    pub(super) cores: f64,
    pub(super) resident_bytes: f64,
    pub(super) watches: f64,
    pub(super) watches_after: f64,
    pub(super) events_per_second: f64,
    pub(super) events_per_second_after: f64,
    pub(super) event_bytes_per_second: f64,
    pub(super) event_bytes_per_second_after: f64,
    /// The CPU that the events cost which kubefan would send instead.
    pub(super) cores_saved: f64,
    /// The CPU of all lists of these resources.
    pub(super) cores_of_lists: f64,
    /// Seats of API Priority and Fairness. `None` without it.
    pub(super) seats: Option<Seats>,
}

/// Seats of API Priority and Fairness, before and after.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Seats {
    /// Those of all priority levels.
    pub(super) nominal: f64,
    /// Those that writes hold on average for the watches that they wake.
    pub(super) of_writes: f64,
    pub(super) of_writes_after: f64,
    /// Those that the lists of the resources that kubefan would cache hold on average.
    pub(super) of_lists: f64,
    /// Those that all watches ask for together if each begins with the state.
    pub(super) of_all_starts: f64,
    pub(super) of_all_starts_after: f64,
}

/// A resource, before and after.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ResourceSavings {
    #[serde(flatten)]
    pub(super) now: ResourceLoad,
    pub(super) watches: f64,
    pub(super) watches_after: f64,
    pub(super) events_per_second_after: f64,
    pub(super) event_bytes_per_second_after: f64,
    /// Seats of a list, and of a watch that begins with the state.
    pub(super) seats_per_list: f64,
    /// Seats that writes hold on average for all watches of all namespaces.
    pub(super) seats_of_writes: f64,
    pub(super) seats_of_writes_after: f64,
    /// The JSON of all objects, in bytes. `None` if kubefan would not cache it, or it is not known.
    pub(super) json_bytes: Option<f64>,
}

impl ResourceSavings {
    fn of(now: ResourceLoad, replicas: f64) -> Self {
        let watches = now.watches();
        let events = now.events_per_second;
        let changes = now.changes_per_second.unwrap_or(events / watches.max(1.0));
        let seats_of_writes = |watches| seats::of_writes(now.writes_per_second, watches);
        let mut savings = Self {
            watches,
            watches_after: watches.min(replicas),
            seats_per_list: seats::of_list(&now),
            seats_of_writes: seats_of_writes(now.cluster_watches()),
            seats_of_writes_after: seats_of_writes(now.cluster_watches().min(replicas)),
            events_per_second_after: events,
            event_bytes_per_second_after: now.event_bytes_per_second,
            json_bytes: None,
            now,
        };
        if savings.is_taken_over() && events > 0.0 {
            savings.events_per_second_after = events.min(changes * replicas);
            savings.event_bytes_per_second_after *= savings.events_per_second_after / events;
        }
        savings
    }

    /// Whether kubefan would have fewer watches.
    pub(super) fn is_taken_over(&self) -> bool {
        self.watches > self.watches_after
    }

    /// Without the objects themselves: as large as the events.
    fn json_by_events(&self) -> Option<f64> {
        let ResourceLoad { events_per_second, event_bytes_per_second, objects, .. } = &self.now;
        (*events_per_second > 0.0).then(|| event_bytes_per_second / events_per_second * objects.unwrap_or(0.0))
    }
}

/// Kubefan's own needs.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Kubefan {
    pub(super) subscribers: f64,
    /// Resident memory of each replica.
    pub(super) memory_bytes_per_replica: f64,
    /// CPUs of all replicas together, if events gather for writes.
    pub(super) cores_min: f64,
    /// CPUs of all replicas together, if each event is a write of its own.
    pub(super) cores_max: f64,
    /// Resources whose objects could not be read, so that memory lacks them.
    pub(super) not_measured: Vec<String>,
}

impl Savings {
    pub(super) fn of(load: Load, replicas: u32) -> Self {
        let Load { seconds, cores, resident_bytes, seats, woken_per_second, resources } = load;
        let is_read = |load: &ResourceLoad| load.watches() > 0.0 || load.lists_per_minute > 0.0;
        let resources = resources.into_iter().filter(is_read);
        let mut resources: Vec<_> = resources.map(|now| ResourceSavings::of(now, f64::from(replicas))).collect();
        let order = |of: &ResourceSavings| (of.now.event_bytes_per_second, of.watches);
        resources.sort_by(|a, b| order(b).partial_cmp(&order(a)).unwrap_or(std::cmp::Ordering::Equal));
        let sum = |of: fn(&ResourceSavings) -> f64| resources.iter().map(of).sum::<f64>();
        let events = sum(|of| of.now.events_per_second);
        let events_after = sum(|of| of.events_per_second_after);
        let moved = Deliveries { per_second: events - events_after, message_bytes: 0.0 };
        let taken_over = || resources.iter().filter(|of| of.is_taken_over());
        let list_bytes: f64 = taken_over().map(|of| of.now.list_bytes_per_second).sum();
        let seats = seats.map(|nominal| {
            let of_writes = sum(|of| of.seats_of_writes);
            // A watch of one node's pods is not woken by others, which its metrics do not tell.
            let woken = if of_writes > 0.0 { (seats::of_woken(woken_per_second) / of_writes).min(1.0) } else { 0.0 };
            Seats {
                nominal,
                of_writes: of_writes * woken,
                of_writes_after: sum(|of| of.seats_of_writes_after) * woken,
                of_lists: taken_over().map(|of| of.now.lists_running * of.seats_per_list).sum(),
                of_all_starts: sum(|of| of.watches * of.seats_per_list),
                of_all_starts_after: sum(|of| of.watches_after * of.seats_per_list),
            }
        });
        let apiserver = Apiserver {
            cores,
            resident_bytes,
            watches: sum(|of| of.watches),
            watches_after: sum(|of| of.watches_after),
            events_per_second: events,
            events_per_second_after: events_after,
            event_bytes_per_second: sum(|of| of.now.event_bytes_per_second),
            event_bytes_per_second_after: sum(|of| of.event_bytes_per_second_after),
            cores_saved: moved.apiserver_cores().min(cores),
            cores_of_lists: (list_bytes * APISERVER_LIST_SECONDS_PER_BYTE.value).min(cores),
            seats,
        };
        let mut savings =
            Self { seconds, replicas, apiserver, resources, kubefan: Kubefan::default(), unknown: UNKNOWN };
        savings.calculate();
        savings
    }

    /// Reads the first objects of the resources that kubefan would cache, for their size in JSON.
    pub(super) async fn measure_objects(&mut self, upstream: &Upstream) {
        let discovery = Discovery::new(upstream.clone(), DiscoveryOptions::default());
        let taken_over = self.resources.iter_mut().filter(|of| of.is_taken_over());
        for resource in taken_over.take(MEASURED_MAX) {
            let key = &resource.now.key;
            let Ok(found) = discovery.find(&key.group, "", &key.resource).await else { continue };
            let path = found.gvr.collection_path(&Scope::Cluster);
            let Ok(sample) = ObjectSample::read(upstream, &path, "").await else { continue };
            if let Some(ResourceSize { objects, bytes }) = sample.size {
                resource.now.objects = Some(objects as f64);
                resource.json_bytes = Some(bytes as f64);
            }
        }
        self.calculate();
    }

    /// Calculates kubefan's own needs.
    fn calculate(&mut self) {
        let taken_over = || self.resources.iter().filter(|of| of.is_taken_over());
        let subscribers: f64 = taken_over().map(|of| of.watches).sum();
        let json = |of: &ResourceSavings| of.json_bytes.or_else(|| of.json_by_events());
        let replicas = f64::from(self.replicas);
        let caches = cache_bytes(taken_over().filter_map(json).sum(), false);
        let connections = subscribers / replicas * CONNECTION_BYTES.value;
        let deliveries = taken_over().map(|of| {
            let per_second = of.now.events_per_second;
            let message_bytes = if per_second > 0.0 { of.now.event_bytes_per_second / per_second } else { 0.0 };
            Deliveries { per_second, message_bytes }
        });
        let (least, most) = deliveries
            .map(|deliveries| (deliveries.cores_min(), deliveries.cores_max()))
            .fold((0.0, 0.0), |(least, most), one| (least + one.0, most + one.1));
        let ingested: f64 = taken_over().map(|of| of.events_per_second_after).sum();
        let ingestion = ingested * INGEST_SECONDS.value;
        let is_unknown = |of: &&ResourceSavings| json(of).is_none() && of.now.objects != Some(0.0);
        let not_measured = taken_over().filter(is_unknown).map(|of| of.now.resource.clone()).collect();
        self.kubefan = Kubefan {
            subscribers,
            memory_bytes_per_replica: PROCESS_BYTES.value + caches + connections,
            cores_min: ingestion + least,
            cores_max: ingestion + most,
            not_measured,
        };
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn load(resource: &str, watches: f64, events: f64, changes: Option<f64>) -> ResourceLoad {
        ResourceLoad {
            resource: resource.to_owned(),
            watches_by_scope: BTreeMap::from([("cluster".to_owned(), watches)]),
            events_per_second: events,
            event_bytes_per_second: events * 1000.0,
            changes_per_second: changes,
            objects: Some(100.0),
            ..ResourceLoad::default()
        }
    }

    fn savings(resources: Vec<ResourceLoad>) -> Savings {
        savings_of(resources, 0.0)
    }

    fn savings_of(resources: Vec<ResourceLoad>, woken_per_second: f64) -> Savings {
        let seats = Some(600.0);
        Savings::of(Load { seconds: 10.0, cores: 0.5, resident_bytes: 1e9, seats, woken_per_second, resources }, 2)
    }

    #[test]
    fn a_watch_per_replica_remains_and_gets_each_change_once() {
        let savings = savings(vec![load("leases", 2.0, 40.0, Some(20.0)), load("pods", 500.0, 10_000.0, Some(20.0))]);
        assert_eq!(savings.resources[0].now.resource, "pods", "the most bytes first");
        let Apiserver { watches, watches_after, events_per_second_after, cores_saved, .. } = savings.apiserver;
        assert_eq!((watches, watches_after), (502.0, 4.0));
        assert_eq!(events_per_second_after, 40.0 + 40.0, "two watches are no more than two replicas");
        assert!((cores_saved - 9_960.0 * 35e-6).abs() < 1e-9, "{cores_saved}");
        assert_eq!(savings.kubefan.subscribers, 500.0);
        let expected = PROCESS_BYTES.value + 100_000.0 * 1.28 + 250.0 * CONNECTION_BYTES.value;
        assert!((savings.kubefan.memory_bytes_per_replica - expected).abs() < 1.0);
        assert!(savings.kubefan.cores_min < savings.kubefan.cores_max);
    }

    #[test]
    fn changes_that_are_not_counted_are_those_of_one_watch() {
        let savings = savings(vec![load("pods", 100.0, 500.0, None)]);
        assert_eq!(savings.apiserver.events_per_second_after, 10.0);
        assert_eq!(savings.apiserver.event_bytes_per_second_after, 10_000.0);
    }

    #[test]
    fn no_more_is_saved_than_the_apiserver_uses() {
        let savings = savings(vec![load("pods", 1e6, 1e9, Some(1.0))]);
        assert_eq!(savings.apiserver.cores_saved, 0.5);
    }

    #[test]
    fn seats_of_writes_and_of_starts_follow_the_watches() {
        let written = |resource, watches| ResourceLoad {
            writes_per_second: 20.0,
            lists_running: 0.5,
            objects: Some(350.0),
            ..load(resource, watches, 0.0, None)
        };
        let resources = || vec![written("pods", 500.0), written("leases", 2.0)];
        let seats = savings_of(resources(), 20.0 * 502.0).apiserver.seats.unwrap();
        assert_eq!((seats.nominal, seats.of_lists), (600.0, 0.5 * 4.0), "kubefan would not cache leases");
        assert!((seats.of_writes - 20.0 * 50.0 * 0.005).abs() < 1e-9, "{seats:?}");
        assert_eq!(seats.of_writes_after, 0.0, "two watches cost no seat");
        assert_eq!((seats.of_all_starts, seats.of_all_starts_after), (502.0 * 4.0, 4.0 * 4.0));
        // Most watches are of single nodes: the apiserver counts those that were woken.
        let seats = savings_of(resources(), 20.0 * 50.0).apiserver.seats.unwrap();
        assert!((seats.of_writes - 20.0 * 5.0 * 0.005).abs() < 1e-9, "{seats:?}");
    }

    #[test]
    fn resources_without_events_and_objects_are_named() {
        let quiet = ResourceLoad { objects: None, ..load("secrets", 50.0, 0.0, None) };
        let empty = ResourceLoad { objects: Some(0.0), ..load("jobs.batch", 50.0, 0.0, None) };
        let unread = load("events", 0.0, 0.0, None);
        let savings = savings(vec![quiet, empty, unread]);
        assert_eq!(savings.kubefan.not_measured, ["secrets"]);
        assert_eq!(savings.resources.len(), 2, "nothing reads the third");
    }
}
