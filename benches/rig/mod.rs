//! What the benchmarks share: a cache of the workload's pods, and subscribers that take as a connection does, without a socket.
//!
//! Everything here is made from one seed, so that two runs measure the same work. What is measured is only what is called between
//! setup and teardown: commits and subscribers are made ahead.

use std::{sync::Arc, task::Waker, time::Duration};

use kubefan_common::proto::v1alpha1::ResolvedResource;
use kubefan_model::{
    GroupVersionResource, Media, ResourceVersion, Scope,
    event::{EventType, Transition, WatchEvent},
    fields::FieldTable,
    format::Format,
    object::{Object, ObjectParser},
    selection::Selection,
    selector::{FieldSelector, LabelSelector},
};
use kubefan_proxy::{
    cache::{
        CacheWriter, Record, RingLimits, Update,
        writer::{Change, Commit},
    },
    fanout::{
        ConnectionWaker, Gate, GateLimits, Hub, HubOptions, ReadyStreams, Start, StreamWaker, Subscription,
        send::entry::{EntryKind, LogEntry},
    },
    telemetry::metrics::{CacheMetrics, Metrics},
};
use kubefan_sim::workload::{Operation, Workload, WorkloadOptions};
use prometheus::Registry;
use serde_json::Value;
use tokio::time::Instant;

/// As a connection takes them.
const BATCH_BYTES_MAX: usize = 64 << 10;
/// History is full soon, so that every commit settles a record and lets go of one, as in a cache that has run for a while.
const RING_EVENTS_MAX: usize = 2 * RingLimits::FRESH_RECORDS_MAX;
/// Fields that pods are made without, each in a part of the object.
pub(crate) type LeftOut = &'static [(&'static str, &'static str)];

/// What a pod can do without: it is then about 1.5 KiB instead of 3 to 6.5, as most published figures have it.
pub(crate) const SMALL: LeftOut = &[
    ("metadata", "managedFields"),
    ("spec", "containers"),
    ("spec", "tolerations"),
    ("spec", "volumes"),
    ("status", "conditions"),
];

/// The workload's pods with what an apiserver adds: uids and versions.
pub(crate) struct Pods {
    workload: Workload,
    left_out: LeftOut,
    version: u64,
}

impl Pods {
    /// `count` pods on 100 nodes, and what changes them.
    pub(crate) fn new(count: usize, left_out: LeftOut) -> (Self, Vec<String>) {
        let options = WorkloadOptions { objects: count, ..WorkloadOptions::default() };
        let mut pods = Self { workload: Workload::new(1, options), left_out, version: 1 };
        let mut created = Vec::with_capacity(count);
        while let Some(change) = pods.workload.next_setup() {
            if let (Operation::Create(pod), "pods") = (change.operation, change.resource.resource.as_str()) {
                created.push(pods.stored(pod));
            }
        }
        (pods, created)
    }

    /// The next change: seven of nine are of the status, two of labels or annotations.
    pub(crate) fn change(&mut self) -> String {
        loop {
            match self.workload.next_change().operation {
                Operation::Create(pod) | Operation::Update(pod) | Operation::UpdateStatus(pod) => {
                    return self.stored(pod);
                }
                Operation::Delete { .. } => {}
            }
        }
    }

    fn stored(&mut self, mut pod: Value) -> String {
        for (part, field) in self.left_out {
            pod[part].as_object_mut().map(|fields| fields.remove(*field));
        }
        self.version += 1;
        pod["metadata"]["uid"] = uid(pod["metadata"]["name"].as_str().unwrap_or_default()).into();
        pod["metadata"]["resourceVersion"] = self.version.to_string().into();
        pod.to_string()
    }
}

/// As long as a real one, and the same for as long as the pod lives.
fn uid(name: &str) -> String {
    let mixed = name.bytes().fold(0, |mix: u64, byte| (mix ^ u64::from(byte)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    format!("{:08x}-0000-4000-a000-{:012x}", mixed >> 32, mixed & 0xffff_ffff_ffff)
}

/// What pods are read and selected with.
pub(crate) struct PodKind {
    pub(crate) gvr: GroupVersionResource,
    fields: FieldTable,
    pub(crate) parser: Arc<ObjectParser>,
}

impl PodKind {
    pub(crate) fn new() -> Self {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let fields = FieldTable::new(&gvr, true, &[]);
        let parser = Arc::new(ObjectParser::new(&fields));
        Self { gvr, fields, parser }
    }

    pub(crate) fn parse(&self, json: &str) -> Object {
        self.parser.parse(json.as_bytes()).expect("the workload's pods are objects")
    }

    /// Metrics that nobody reads.
    pub(crate) fn metrics(&self) -> CacheMetrics {
        let metrics = Metrics::new(Registry::new()).expect("a new registry");
        Arc::new(metrics).cache(&self.gvr, &Scope::Cluster, Media::Json)
    }

    /// Selectors as kubectl takes them.
    pub(crate) fn select(&self, labels: &str, fields: &str) -> Selection {
        let labels = LabelSelector::parse(labels).expect("a label selector");
        let fields = FieldSelector::parse(fields).expect("a field selector");
        Selection::bind("", "", labels, &fields, &self.fields, self.parser.clone(), &self.gvr).expect("fields of pods")
    }
}

/// A cache of pods with full history, and who writes it.
pub(crate) struct Cache {
    pub(crate) hub: Arc<Hub>,
    pub(crate) kind: PodKind,
    writer: CacheWriter,
    pods: Pods,
}

impl Cache {
    pub(crate) fn new(count: usize, left_out: LeftOut) -> Self {
        let kind = PodKind::new();
        let limits = RingLimits {
            ring_bytes_max: Some(1 << 30),
            ring_events_max: RING_EVENTS_MAX,
            ring_age_max: Duration::from_secs(3600),
            residue_bytes_max: None,
        };
        let all = Arc::new(Metrics::new(Registry::new()).expect("the registry is empty"));
        let gate = GateLimits { snapshots_max: 1000, snapshot_queue_timeout: Duration::ZERO };
        let gate = Gate::new(gate, all.gate());
        let options = HubOptions { limits, coalesce_max: Duration::ZERO, gate, cluster: Arc::new(|| None) };
        let hub = Hub::new(ResolvedResource::default(), kind.parser.clone(), options, kind.metrics());
        let (pods, created) = Pods::new(count, left_out);
        let mut cache = Self { hub, kind, writer: CacheWriter::default(), pods };
        let objects: Vec<_> = created.iter().map(|json| cache.kind.parse(json)).collect();
        list(&mut cache.writer, objects, cache.pods.version).into_iter().for_each(|commit| cache.publish(commit));
        for commit in cache.changes(RING_EVENTS_MAX) {
            cache.publish(commit);
        }
        cache
    }

    /// The next changes, ready to be published.
    pub(crate) fn changes(&mut self, count: usize) -> Vec<Commit> {
        let change = |_| {
            let pod = self.kind.parse(&self.pods.change());
            self.writer.apply(Update::Event(EventType::Modified, pod)).expect("versions grow")
        };
        (0..count).filter_map(change).collect()
    }

    /// The events of the next changes, as they are before anybody has seen them.
    pub(crate) fn events(&mut self, count: usize) -> Vec<Arc<WatchEvent>> {
        let event = |commit: Commit| match commit.change {
            Change::Record(Record::Event(event)) => Some(event),
            _ => None,
        };
        self.changes(count).into_iter().filter_map(event).collect()
    }

    /// The same, as a view that has seen each of these pods before holds them.
    pub(crate) fn entries(&mut self, count: usize) -> Vec<LogEntry> {
        let entry = |event: Arc<WatchEvent>| LogEntry {
            version: event.version(),
            kind: EntryKind::Event(event, Transition::Change),
            received: None,
        };
        self.events(count).into_iter().map(entry).collect()
    }

    /// Commits, and wakes those whom it concerns.
    pub(crate) fn publish(&self, commit: Commit) {
        self.hub.batch().commit(commit, Instant::now());
    }

    /// A subscriber that has everything, and waits.
    pub(crate) fn subscribe(&self, labels: &str, fields: &str) -> Subscriber {
        let line = ConnectionWaker::new();
        let start = Start::Resume(self.hub.head().expect("a list"));
        let selection = self.kind.select(labels, fields);
        let subscription = self.hub.subscribe(selection, Format::default(), start, StreamWaker::new(&line, 1));
        let mut subscription = subscription.unwrap_or_else(|refusal| panic!("{refusal}"));
        assert!(subscription.take(BATCH_BYTES_MAX).is_ok_and(|pieces| pieces.is_none()), "nothing has happened");
        Subscriber { line, subscription, rung: ReadyStreams::new() }
    }
}

/// A list as the reflector tells it; the commit that it leads to.
pub(crate) fn list(writer: &mut CacheWriter, objects: Vec<Object>, version: u64) -> Option<Commit> {
    let mut apply = |update| writer.apply(update).expect("a list");
    apply(Update::ListBegin { reason: "bench" });
    for object in objects {
        apply(Update::ListItem(object));
    }
    apply(Update::ListEnd(ResourceVersion::new(version).expect("not zero")))
}

/// One subscriber on a connection of its own.
pub(crate) struct Subscriber {
    line: Arc<ConnectionWaker>,
    subscription: Subscription,
    rung: ReadyStreams,
}

impl Subscriber {
    /// What a connection does when it is woken, but for HTTP/2 and the socket; gives the messages that there were.
    pub(crate) fn deliver(&mut self) -> usize {
        self.line.register(Waker::noop());
        self.line.take_ready(&mut self.rung);
        let mut messages = 0;
        for _ in self.rung.drain(..) {
            while let Ok(Some(pieces)) = self.subscription.take(BATCH_BYTES_MAX) {
                messages += pieces.messages();
            }
        }
        messages
    }
}
