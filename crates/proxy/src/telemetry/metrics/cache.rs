//! The metrics of one cache, with the labels of the cache filled in: counting an event looks nothing up.

use std::{sync::Arc, time::Duration};

use prometheus::{Gauge, Histogram, IntCounter, IntGaugeVec};

use super::{
    Metrics,
    labels::{Lag, Proof, Resume, SelfCheck, Transfer, WarmStart, WatchPurpose},
};
use crate::fanout::StreamEnd;
use kubefan_model::{GroupVersionResource, Media, Scope, event::EventType};

/// The metrics of one cache. Cheap to use on the path of every event.
pub struct CacheMetrics {
    received: [IntCounter; 3],
    dispatched: IntCounter,
    deliveries: IntCounter,
    sent_bytes: IntCounter,
    snapshot_objects_sent: IntCounter,
    started: IntCounter,
    latency: Histogram,
    ring_age: Gauge,
    version: Gauge,
    staleness: Gauge,
    all: Arc<Metrics>,
    labels: [String; 4],
}

/// The gauges of one cache at one moment.
#[derive(Debug, Default, Clone, Copy)]
pub struct CacheGauges {
    /// Watches of subscribers.
    pub subscribers: usize,
    /// Distinct selections.
    pub views: usize,
    /// Bytes of history.
    pub ring_bytes: usize,
    /// Bytes of what is left of older history.
    pub residue_bytes: usize,
    /// Bytes of the views' logs.
    pub log_bytes: usize,
    /// Records of history.
    pub ring_events: usize,
    /// Age of the oldest record.
    pub ring_age: Duration,
    /// Objects.
    pub objects: usize,
    /// Their JSON bytes.
    pub object_bytes: usize,
    /// What they take in memory, in bytes.
    pub object_memory_bytes: usize,
    /// The version; 0 before the first list.
    pub version: u64,
    /// How long ago upstream proved it; infinite where it never has, 0 before the first list.
    pub staleness_seconds: f64,
    /// Whether it is served.
    pub synced: bool,
}

impl CacheMetrics {
    /// Every counter of the cache begins at zero.
    pub(super) fn new(all: &Arc<Metrics>, resource: &GroupVersionResource, scope: &Scope, media: Media) -> Self {
        let labels = [&resource.group, &resource.resource, scope.namespace(), media.as_str()].map(str::to_owned);
        let base: [&str; 4] = labels.each_ref().map(String::as_str);
        let with = |extra: &'static str| [base[0], base[1], base[2], base[3], extra];
        for reason in StreamEnd::ALL {
            all.subscriptions_finished.with_label_values(&with(reason));
        }
        for result in Resume::ALL {
            all.resumes.with_label_values(&with(result));
        }
        for result in Lag::ALL {
            all.lags.with_label_values(&with(result));
        }
        for result in WarmStart::ALL {
            all.warm_starts.with_label_values(&with(result));
        }
        for result in Transfer::ALL {
            all.transfers.with_label_values(&with(result));
        }
        for result in SelfCheck::ALL {
            all.self_checks.with_label_values(&with(result));
        }
        for result in Proof::ALL {
            all.proofs.with_label_values(&with(result));
        }
        all.proof_duration.with_label_values(&base);
        let received = [EventType::Added, EventType::Modified, EventType::Deleted]
            .map(|kind| all.events_received.with_label_values(&with(kind.as_str())));
        Self {
            received,
            dispatched: all.events_dispatched.with_label_values(&base),
            deliveries: all.deliveries.with_label_values(&base),
            sent_bytes: all.sent_bytes.with_label_values(&base),
            snapshot_objects_sent: all.snapshot_objects_sent.with_label_values(&base),
            started: all.subscriptions_started.with_label_values(&base),
            latency: all.latency.with_label_values(&base),
            ring_age: all.ring_age.with_label_values(&base),
            version: all.version.with_label_values(&base),
            staleness: all.staleness.with_label_values(&base),
            all: all.clone(),
            labels,
        }
    }

    fn with<'a>(&'a self, extra: &'a str) -> [&'a str; 5] {
        [&self.labels[0], &self.labels[1], &self.labels[2], &self.labels[3], extra]
    }

    /// An event came from upstream.
    pub fn received(&self, kind: EventType) {
        self.received[kind as usize].inc();
    }

    /// Messages were appended to views.
    pub fn dispatched(&self, messages: usize) {
        self.dispatched.inc_by(messages as u64);
    }

    /// Messages were handed to a subscriber's connection.
    pub fn sent(&self, messages: usize, bytes: usize, latency: Option<Duration>) {
        self.deliveries.inc_by(messages as u64);
        self.sent_bytes.inc_by(bytes as u64);
        if let Some(latency) = latency {
            self.latency.observe(latency.as_secs_f64());
        }
    }

    /// Objects of a snapshot or a list were handed to a subscriber's connection.
    pub fn snapshot_sent(&self, objects: usize, bytes: usize) {
        self.snapshot_objects_sent.inc_by(objects as u64);
        self.sent_bytes.inc_by(bytes as u64);
    }

    /// A watch of a subscriber started.
    pub fn subscription_started(&self) {
        self.started.inc();
    }

    /// A watch of a subscriber ended.
    pub fn subscription_finished(&self, end: &StreamEnd) {
        self.all.subscriptions_finished.with_label_values(&self.with(end.as_str())).inc();
    }

    /// A request to go on from a version was answered.
    pub fn resume(&self, result: Resume) {
        self.all.resumes.with_label_values(&self.with(result.as_str())).inc();
    }

    /// A subscription had fallen behind.
    pub fn lag(&self, result: Lag) {
        self.all.lags.with_label_values(&self.with(result.as_str())).inc();
    }

    /// An attempt to take over this cache from a peer has ended.
    pub fn warm_start(&self, result: WarmStart) {
        self.all.warm_starts.with_label_values(&self.with(result.as_str())).inc();
    }

    /// A transfer of this cache to a peer has ended.
    pub fn transfer(&self, result: Transfer) {
        self.all.transfers.with_label_values(&self.with(result.as_str())).inc();
    }

    /// Upstream is listed again.
    pub fn relist(&self, reason: &str) {
        self.all.relists.with_label_values(&self.with(reason)).inc();
    }

    /// The cache was compared with upstream.
    pub fn self_check(&self, result: SelfCheck) {
        self.all.self_checks.with_label_values(&self.with(result.as_str())).inc();
    }

    /// Upstream was asked whether the cache is fresh.
    pub fn proof(&self, result: Proof, duration: Duration) {
        self.all.proofs.with_label_values(&self.with(result.as_str())).inc();
        self.all.proof_duration.with_label_values(&self.labels).observe(duration.as_secs_f64());
    }

    /// The upstream watch is started again.
    pub fn watch_restart(&self, reason: &str) {
        self.all.watch_restarts.with_label_values(&self.with(reason)).inc();
    }

    /// A watch upstream was opened; it counts as open until the guard is dropped.
    pub fn upstream_watch(&self, purpose: WatchPurpose) -> UpstreamWatchGuard {
        let labels = self.with(purpose.as_str());
        self.all.upstream_watches_started.with_label_values(&labels).inc();
        let open = self.all.upstream_watches.with_label_values(&labels);
        open.inc();
        UpstreamWatchGuard { open }
    }

    /// Sets the gauges; called when they are read.
    pub fn set(&self, gauges: CacheGauges) {
        let base: [&str; 4] = self.labels.each_ref().map(String::as_str);
        let set = |gauge: &IntGaugeVec, value: usize| {
            gauge.with_label_values(&base).set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        set(&self.all.subscribers, gauges.subscribers);
        set(&self.all.views, gauges.views);
        set(&self.all.ring_bytes, gauges.ring_bytes);
        set(&self.all.residue_bytes, gauges.residue_bytes);
        set(&self.all.log_bytes, gauges.log_bytes);
        set(&self.all.ring_events, gauges.ring_events);
        set(&self.all.objects, gauges.objects);
        set(&self.all.object_bytes, gauges.object_bytes);
        set(&self.all.object_memory, gauges.object_memory_bytes);
        set(&self.all.synced, usize::from(gauges.synced));
        self.ring_age.set(gauges.ring_age.as_secs_f64());
        self.version.set(gauges.version as f64);
        self.staleness.set(gauges.staleness_seconds);
    }
}

/// One open upstream watch.
pub struct UpstreamWatchGuard {
    open: prometheus::IntGauge,
}

impl Drop for UpstreamWatchGuard {
    fn drop(&mut self) {
        self.open.dec();
    }
}
