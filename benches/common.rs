//! Common parts of the benchmarks: a cache with the workload's pods, and subscribers that take
//! messages as a connection does, without a socket.
//!
//! Everything is generated from one seed, so that all runs measure the same work. Commits and
//! subscribers are created before the measurement starts.

use std::{sync::Arc, task::Waker, time::Duration};

use kubefan_admission::{Gate, GateLimits};
use kubefan_cache::{
    CacheWriter, HistoryRecord, ProcessBudgets, RelistReason, RingLimits, Update,
    writer::{Change, Commit},
};
use kubefan_common::proto::v1alpha1::ResolvedResource;
use kubefan_fanout::{
    ConnectionWaker, Hub, HubOptions, ReadyStreams, Start, StreamWaker, Subscription,
    send::log_entry::{EntryKind, LogEntry},
};
use kubefan_model::{
    GroupVersionResource, Media, ResourceVersion, Scope,
    event::{EventType, Transition, WatchEvent},
    fields::FieldTable,
    format::Format,
    object::{Object, ObjectParser},
    selection::Selection,
    selector::{FieldSelector, LabelSelector},
};
use kubefan_sim::workload::{Operation, Workload, WorkloadOptions};
use kubefan_telemetry::metrics::{CacheMetrics, Metrics};
use prometheus::Registry;
use serde_json::Value;
use tokio::time::Instant;

/// Bytes that a connection takes at once.
pub(crate) const BATCH_BYTES_MAX: usize = 64 << 10;
/// Small enough that the history is full: as in a cache that has run for a while, every commit
/// packs one record and evicts another.
const RING_EVENTS_MAX: usize = 2 * RingLimits::FRESH_RECORDS_MAX;
/// Fields to remove from pods, each with the part of the object that contains it.
pub(crate) type OmittedFields = &'static [(&'static str, &'static str)];

/// Optional fields. Without them a pod has about 1.5 KiB, as in most published figures, instead of
/// 3 to 6.5.
pub(crate) const SMALL: OmittedFields = &[
    ("metadata", "managedFields"),
    ("spec", "containers"),
    ("spec", "tolerations"),
    ("spec", "volumes"),
    ("status", "conditions"),
];

/// The workload's pods, with the uids and resource versions that an apiserver adds.
pub(crate) struct Pods {
    workload: Workload,
    omitted: OmittedFields,
    version: u64,
}

impl Pods {
    /// Creates `count` pods on 100 nodes. Returns the source of their changes and their JSON.
    pub(crate) fn new(count: usize, omitted: OmittedFields) -> (Self, Vec<String>) {
        let options = WorkloadOptions { objects: count, ..WorkloadOptions::default() };
        let mut pods = Self { workload: Workload::new(1, options), omitted, version: 1 };
        let mut created = Vec::with_capacity(count);
        while let Some(change) = pods.workload.next_setup() {
            if let (Operation::Create(pod), "pods") = (change.operation, change.resource.resource.as_str()) {
                created.push(pods.stored(pod));
            }
        }
        (pods, created)
    }

    /// The next change: seven of nine change the status, two of nine labels or annotations.
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
        for (part, field) in self.omitted {
            pod[part].as_object_mut().map(|fields| fields.remove(*field));
        }
        self.version += 1;
        pod["metadata"]["uid"] = uid(pod["metadata"]["name"].as_str().unwrap_or_default()).into();
        pod["metadata"]["resourceVersion"] = self.version.to_string().into();
        pod.to_string()
    }
}

/// A uid of the usual length, constant for the lifetime of the pod.
fn uid(name: &str) -> String {
    let hash = name.bytes().fold(0, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    format!("{:08x}-0000-4000-a000-{:012x}", hash >> 32, hash & 0xffff_ffff_ffff)
}

/// The parser and the selectable fields of pods.
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

    /// Metrics that are not exported.
    pub(crate) fn metrics(&self) -> CacheMetrics {
        let metrics = Metrics::new(Registry::new()).expect("a new registry");
        Arc::new(metrics).cache(&self.gvr, &Scope::Cluster, Media::Json, &kubefan_cache::StreamEnd::ALL)
    }

    /// A selection from label and field selectors in kubectl's syntax.
    pub(crate) fn select(&self, labels: &str, fields: &str) -> Selection {
        let labels = LabelSelector::parse(labels).expect("a label selector");
        let fields = FieldSelector::parse(fields).expect("a field selector");
        Selection::bind("", "", labels, &fields, &self.fields, self.parser.clone(), &self.gvr).expect("fields of pods")
    }
}

/// A cache of pods with a full history, and its writer.
pub(crate) struct Cache {
    pub(crate) hub: Arc<Hub>,
    pub(crate) kind: PodKind,
    writer: CacheWriter,
    pods: Pods,
}

impl Cache {
    pub(crate) fn new(count: usize, omitted: OmittedFields) -> Self {
        let kind = PodKind::new();
        let hub = hub(&kind, RING_EVENTS_MAX);
        let (pods, created) = Pods::new(count, omitted);
        let mut cache = Self { hub, kind, writer: CacheWriter::default(), pods };
        let objects: Vec<_> = created.iter().map(|json| cache.kind.parse(json)).collect();
        if let Some(commit) = apply_list(&mut cache.writer, objects, cache.pods.version) {
            cache.publish(commit);
        }
        for commit in cache.changes(RING_EVENTS_MAX) {
            cache.publish(commit);
        }
        cache
    }

    /// The next changes as commits, not yet published.
    pub(crate) fn changes(&mut self, count: usize) -> Vec<Commit> {
        let change = |_| {
            let pod = self.kind.parse(&self.pods.change());
            self.writer.apply(Update::Event(EventType::Modified, pod)).expect("versions grow")
        };
        (0..count).filter_map(change).collect()
    }

    /// The events of the next changes, not yet read by any view.
    pub(crate) fn events(&mut self, count: usize) -> Vec<Arc<WatchEvent>> {
        let event = |commit: Commit| match commit.change {
            Change::Record(HistoryRecord::Event(event)) => Some(event),
            _ => None,
        };
        self.changes(count).into_iter().filter_map(event).collect()
    }

    /// The log entries of the next changes, for a view that already contains the pods.
    pub(crate) fn entries(&mut self, count: usize) -> Vec<LogEntry> {
        let entry = |event: Arc<WatchEvent>| LogEntry {
            version: event.version(),
            kind: EntryKind::Event(event, Transition::Change),
            received: None,
        };
        self.events(count).into_iter().map(entry).collect()
    }

    /// Publishes a commit and wakes the matching subscribers.
    pub(crate) fn publish(&self, commit: Commit) {
        self.hub.batch().commit(commit, Instant::now());
    }

    /// A subscriber that is up to date and waiting.
    pub(crate) fn subscribe(&self, labels: &str, fields: &str) -> Subscriber {
        self.subscribe_in(Format::default(), labels, fields)
    }

    pub(crate) fn subscribe_in(&self, format: Format, labels: &str, fields: &str) -> Subscriber {
        let connection_waker = ConnectionWaker::new();
        let start = Start::Resume(self.hub.head().expect("a list"));
        let selection = self.kind.select(labels, fields);
        let subscription = self.hub.subscribe(selection, format, start, StreamWaker::new(&connection_waker, 1));
        let mut subscription = subscription.unwrap_or_else(|refusal| panic!("{refusal}"));
        assert!(subscription.take(BATCH_BYTES_MAX).is_ok_and(|frames| frames.is_none()), "nothing has happened");
        Subscriber { connection_waker, subscription, ready: ReadyStreams::new() }
    }
}

/// A hub of pods without state.
pub(crate) fn hub(kind: &PodKind, ring_events_max: usize) -> Arc<Hub> {
    let limits = RingLimits {
        ring_bytes_max: Some(1 << 30),
        ring_events_max,
        ring_age_max: Duration::from_secs(3600),
        conflated_bytes_max: None,
    };
    let all = Arc::new(Metrics::new(Registry::new()).expect("the registry is empty"));
    let gate = GateLimits { snapshots_max: 1000, snapshot_queue_timeout: Duration::ZERO };
    let gate = Gate::new(gate, all.gate());
    let budgets = ProcessBudgets::default();
    let cluster = Arc::new(|| None);
    let options = HubOptions { limits, coalesce_max: Duration::ZERO, gate, budgets, cluster };
    Hub::new(ResolvedResource::default(), kind.parser.clone(), options, kind.metrics())
}

/// Applies a complete list to the writer. Returns the resulting commit.
pub(crate) fn apply_list(writer: &mut CacheWriter, objects: Vec<Object>, version: u64) -> Option<Commit> {
    let mut apply = |update| writer.apply(update).expect("a list");
    apply(Update::ListBegin { reason: RelistReason::Initial });
    for object in objects {
        apply(Update::ListItem(object));
    }
    apply(Update::ListEnd(ResourceVersion::new(version).expect("not zero")))
}

/// One subscriber on its own connection.
pub(crate) struct Subscriber {
    connection_waker: Arc<ConnectionWaker>,
    subscription: Subscription,
    ready: ReadyStreams,
}

impl Subscriber {
    /// Does the work of a woken connection except HTTP/2 and the socket. Returns the number of
    /// messages.
    pub(crate) fn deliver(&mut self) -> usize {
        self.connection_waker.register(Waker::noop());
        self.connection_waker.take_ready(&mut self.ready);
        let mut messages = 0;
        for _ in self.ready.drain(..) {
            while let Ok(Some(frames)) = self.subscription.take(BATCH_BYTES_MAX) {
                messages += frames.messages();
            }
        }
        messages
    }
}
