//! The metrics of one cache, with the labels of the cache filled in, so that counting an event
//! needs no label lookup.

use std::{sync::Arc, time::Duration};

use kubefan_model::{GroupVersionResource, Media, Scope, event::EventType};
use prometheus::{Gauge, GaugeVec, Histogram, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::{
    labels::{Lag, Proof, Resume, SelfCheck, Transfer, WarmStart, WatchPurpose},
    register::Registrar,
    saved_states::{SavedStateFamilies, SavedStateMetrics},
};

/// The labels of every metric of a cache.
const LABELS: [&str; 4] = ["group", "resource", "namespace", "media"];

/// The metrics of all caches.
pub(super) struct CacheFamilies {
    events_received: IntCounterVec,
    events_dispatched: IntCounterVec,
    deliveries: IntCounterVec,
    sent_bytes: IntCounterVec,
    gzip_pieces_made: IntCounterVec,
    gzip_pieces_sent: IntCounterVec,
    gzip_plain_bytes: IntCounterVec,
    gzip_bytes: IntCounterVec,
    snapshot_objects_sent: IntCounterVec,
    subscriptions_started: IntCounterVec,
    subscriptions_finished: IntCounterVec,
    resumes: IntCounterVec,
    lags: IntCounterVec,
    warm_starts: IntCounterVec,
    saved_states: SavedStateFamilies,
    transfers: IntCounterVec,
    relists: IntCounterVec,
    self_checks: IntCounterVec,
    proofs: IntCounterVec,
    proof_duration: HistogramVec,
    watch_restarts: IntCounterVec,
    latency: HistogramVec,
    subscribers: IntGaugeVec,
    views: IntGaugeVec,
    ring_bytes: IntGaugeVec,
    residue_bytes: IntGaugeVec,
    log_bytes: IntGaugeVec,
    ring_events: IntGaugeVec,
    ring_age: GaugeVec,
    objects: IntGaugeVec,
    object_bytes: IntGaugeVec,
    object_memory: IntGaugeVec,
    version: GaugeVec,
    staleness: GaugeVec,
    synced: IntGaugeVec,
    upstream_watches: IntGaugeVec,
    upstream_watches_started: IntCounterVec,
}

impl CacheFamilies {
    pub(super) fn new(register: &Registrar<'_>) -> Result<Self, prometheus::Error> {
        let with = |extra: &'static str| [LABELS[0], LABELS[1], LABELS[2], LABELS[3], extra];
        let latency_buckets =
            vec![0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];
        let proof_buckets = vec![0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0];
        Ok(Self {
            events_received: register.counters(
                "kubefan_events_received_total",
                "Events received from upstream.",
                &with("type"),
            )?,
            events_dispatched: register.counters(
                "kubefan_events_dispatched_total",
                "Messages appended to views: the cost of an event before it is multiplied by subscribers.",
                &LABELS,
            )?,
            deliveries: register.counters(
                "kubefan_deliveries_total",
                "Messages handed to subscribers' connections.",
                &LABELS,
            )?,
            sent_bytes: register.counters(
                "kubefan_sent_bytes_total",
                "Bytes handed to subscribers' connections, before HTTP/2 and TLS.",
                &LABELS,
            )?,
            gzip_pieces_made: register.counters(
                "kubefan_gzip_pieces_made_total",
                "Pieces of gzip bodies that readers share (events, and chunks of lists and initial states), when one is compressed or stored.",
                &LABELS,
            )?,
            gzip_pieces_sent: register.counters(
                "kubefan_gzip_pieces_sent_total",
                "The same pieces, each time one is handed to a connection.",
                &LABELS,
            )?,
            gzip_plain_bytes: register.counters(
                "kubefan_gzip_plain_bytes_total",
                "Bytes that gzip bodies handed to connections have when they are decoded.",
                &LABELS,
            )?,
            gzip_bytes: register.counters(
                "kubefan_gzip_bytes_total",
                "Bytes of gzip bodies handed to connections.",
                &LABELS,
            )?,
            snapshot_objects_sent: register.counters(
                "kubefan_snapshot_objects_sent_total",
                "Objects sent as part of a snapshot or a list.",
                &LABELS,
            )?,
            subscriptions_started: register.counters(
                "kubefan_subscriptions_started_total",
                "Watches started by subscribers.",
                &LABELS,
            )?,
            subscriptions_finished: register.counters(
                "kubefan_subscriptions_finished_total",
                "Subscribers' watches that ended, by reason.",
                &with("reason"),
            )?,
            resumes: register.counters(
                "kubefan_resumes_total",
                "Requests to resume from a resource version, by result.",
                &with("result"),
            )?,
            lags: register.counters(
                "kubefan_lags_total",
                "Watches that fell behind the retained events, by result.",
                &with("result"),
            )?,
            warm_starts: register.counters(
                "kubefan_warm_starts_total",
                "Attempts to start a cache from a peer, by result.",
                &with("result"),
            )?,
            saved_states: SavedStateFamilies::new(register, LABELS)?,
            transfers: register.counters(
                "kubefan_transfers_total",
                "Transfers of a cache to a peer, by result.",
                &with("result"),
            )?,
            relists: register.counters(
                "kubefan_relists_total",
                "Full lists of upstream, by reason.",
                &with("reason"),
            )?,
            self_checks: register.counters(
                "kubefan_self_checks_total",
                "Comparisons of the cache with upstream, by result.",
                &with("result"),
            )?,
            proofs: register.counters(
                "kubefan_proofs_total",
                "Freshness proofs for consistent reads, by result.",
                &with("result"),
            )?,
            proof_duration: register.histograms(
                "kubefan_proof_duration_seconds",
                "Duration of a freshness proof, successful or not.",
                &LABELS,
                proof_buckets,
            )?,
            watch_restarts: register.counters(
                "kubefan_upstream_watch_restarts_total",
                "Restarts of the upstream watch from its last version, by reason.",
                &with("reason"),
            )?,
            latency: register.histograms(
                "kubefan_dispatch_latency_seconds",
                "Time from reading an event from upstream to handing it to a subscriber's connection, for the oldest \
                 event of each batch.",
                &LABELS,
                latency_buckets,
            )?,
            subscribers: register.int_gauges("kubefan_subscribers", "Open watches of subscribers.", &LABELS)?,
            views: register.int_gauges(
                "kubefan_views",
                "Distinct selections; equal subscriptions share one.",
                &LABELS,
            )?,
            ring_bytes: register.int_gauges(
                "kubefan_ring_bytes",
                "Bytes that the event history retains beyond the cached objects.",
                &LABELS,
            )?,
            residue_bytes: register.int_gauges(
                "kubefan_residue_bytes",
                "Bytes of conflated history: one entry for each change that the event history evicted.",
                &LABELS,
            )?,
            log_bytes: register.int_gauges(
                "kubefan_view_log_bytes",
                "Bytes that views retain beyond the objects they share: logs, messages in flight, projected objects, \
                 compressed snapshots; and the indexes of state and history.",
                &LABELS,
            )?,
            ring_events: register.int_gauges("kubefan_ring_events", "Records in the event history.", &LABELS)?,
            ring_age: register.gauges(
                "kubefan_ring_oldest_age_seconds",
                "Age of the oldest record in the event history.",
                &LABELS,
            )?,
            objects: register.int_gauges("kubefan_cached_objects", "Cached objects.", &LABELS)?,
            object_bytes: register.int_gauges(
                "kubefan_cached_object_bytes",
                "Bytes of the cached objects in the encoding of the cache, before packing.",
                &LABELS,
            )?,
            object_memory: register.int_gauges(
                "kubefan_cached_object_memory_bytes",
                "Memory that the cached objects take, packed or not, including the data parsed from them.",
                &LABELS,
            )?,
            version: register.gauges(
                "kubefan_resource_version",
                "The resource version of the cache. Compare between replicas, not between resources.",
                &LABELS,
            )?,
            staleness: register.gauges(
                "kubefan_staleness_seconds",
                "Time since upstream last proved the version of the cache.",
                &LABELS,
            )?,
            synced: register.int_gauges("kubefan_synced", "1 if the resource is served.", &LABELS)?,
            upstream_watches: register.int_gauges(
                "kubefan_upstream_watches",
                "Open upstream watches, by purpose; 'standing' is at most 1.",
                &with("purpose"),
            )?,
            upstream_watches_started: register.counters(
                "kubefan_upstream_watches_started_total",
                "Upstream watches started, by purpose.",
                &with("purpose"),
            )?,
        })
    }
}

/// The metrics of one cache. The counters used for every event are resolved in advance.
pub struct CacheMetrics {
    received: [IntCounter; 3],
    dispatched: IntCounter,
    deliveries: IntCounter,
    sent_bytes: IntCounter,
    gzip_pieces_made: IntCounter,
    gzip_pieces_sent: IntCounter,
    gzip_plain_bytes: IntCounter,
    gzip_bytes: IntCounter,
    snapshot_objects_sent: IntCounter,
    started: IntCounter,
    latency: Histogram,
    ring_age: Gauge,
    version: Gauge,
    staleness: Gauge,
    all: Arc<CacheFamilies>,
    /// The metrics of the saved state.
    pub saved_states: SavedStateMetrics,
    labels: [String; 4],
}

/// Pieces of a gzip body.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct GzipPieces {
    /// Number of shared pieces that were compressed or stored for it. Others had been made before.
    pub made: u64,
    /// Number of shared pieces.
    pub sent: u64,
    /// Plain bytes of all pieces.
    pub plain_bytes: u64,
}

impl std::ops::AddAssign for GzipPieces {
    fn add_assign(&mut self, other: Self) {
        self.made += other.made;
        self.sent += other.sent;
        self.plain_bytes += other.plain_bytes;
    }
}

/// The gauges of one cache at one moment.
#[derive(Debug, Default, Clone, Copy)]
pub struct CacheGauges {
    /// Open watches of subscribers.
    pub subscribers: usize,
    /// Distinct selections.
    pub views: usize,
    /// Bytes of the event history.
    pub ring_bytes: usize,
    /// Bytes of the conflated history.
    pub residue_bytes: usize,
    /// Bytes of the views' logs.
    pub log_bytes: usize,
    /// Records in the event history.
    pub ring_events: usize,
    /// Age of the oldest record.
    pub ring_age: Duration,
    /// Number of objects.
    pub objects: usize,
    /// Bytes of the objects in the encoding of the cache, before packing.
    pub object_bytes: usize,
    /// Bytes of memory that the objects take.
    pub object_memory_bytes: usize,
    /// The version; 0 before the first list.
    pub version: u64,
    /// Seconds since upstream last proved the version: infinite if it never has, 0 before the first
    /// list.
    pub staleness_seconds: f64,
    /// Whether the cache is served.
    pub synced: bool,
}

impl CacheMetrics {
    /// Creates every counter of the cache, at zero.
    pub(super) fn new(
        all: &Arc<CacheFamilies>,
        resource: &GroupVersionResource,
        scope: &Scope,
        media: Media,
        ends: &[&'static str],
    ) -> Self {
        let labels = [&resource.group, &resource.resource, scope.namespace(), media.as_str()].map(str::to_owned);
        let base: [&str; 4] = labels.each_ref().map(String::as_str);
        let with = |extra: &'static str| [base[0], base[1], base[2], base[3], extra];
        for &reason in ends {
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
            gzip_pieces_made: all.gzip_pieces_made.with_label_values(&base),
            gzip_pieces_sent: all.gzip_pieces_sent.with_label_values(&base),
            gzip_plain_bytes: all.gzip_plain_bytes.with_label_values(&base),
            gzip_bytes: all.gzip_bytes.with_label_values(&base),
            snapshot_objects_sent: all.snapshot_objects_sent.with_label_values(&base),
            started: all.subscriptions_started.with_label_values(&base),
            latency: all.latency.with_label_values(&base),
            ring_age: all.ring_age.with_label_values(&base),
            version: all.version.with_label_values(&base),
            staleness: all.staleness.with_label_values(&base),
            saved_states: all.saved_states.of(base),
            all: all.clone(),
            labels,
        }
    }

    fn with<'a>(&'a self, extra: &'a str) -> [&'a str; 5] {
        [&self.labels[0], &self.labels[1], &self.labels[2], &self.labels[3], extra]
    }

    /// Counts an event received from upstream.
    pub fn received(&self, kind: EventType) {
        self.received[kind as usize].inc();
    }

    /// Counts messages appended to views.
    pub fn dispatched(&self, messages: usize) {
        self.dispatched.inc_by(messages as u64);
    }

    /// Counts messages handed to a subscriber's connection.
    pub fn sent(&self, messages: usize, bytes: usize, latency: Option<Duration>) {
        self.deliveries.inc_by(messages as u64);
        self.sent_bytes.inc_by(bytes as u64);
        if let Some(latency) = latency {
            self.latency.observe(latency.as_secs_f64());
        }
    }

    /// Counts pieces of a gzip body, which are this many bytes, handed to a connection.
    pub fn gzip_sent(&self, GzipPieces { made, sent, plain_bytes }: GzipPieces, bytes: usize) {
        self.gzip_pieces_made.inc_by(made);
        self.gzip_pieces_sent.inc_by(sent);
        self.gzip_plain_bytes.inc_by(plain_bytes);
        self.gzip_bytes.inc_by(bytes as u64);
    }

    /// Counts objects of a snapshot or a list handed to a subscriber's connection.
    pub fn snapshot_sent(&self, objects: usize, bytes: usize) {
        self.snapshot_objects_sent.inc_by(objects as u64);
        self.sent_bytes.inc_by(bytes as u64);
    }

    /// Counts the start of a subscriber's watch.
    pub fn subscription_started(&self) {
        self.started.inc();
    }

    /// Counts the end of a subscriber's watch, by its reason.
    pub fn subscription_finished(&self, end: &'static str) {
        self.all.subscriptions_finished.with_label_values(&self.with(end)).inc();
    }

    /// Counts an answered request to resume from a version.
    pub fn resume(&self, result: Resume) {
        self.all.resumes.with_label_values(&self.with(result.as_str())).inc();
    }

    /// Counts a subscription that fell behind the retained events.
    pub fn lag(&self, result: Lag) {
        self.all.lags.with_label_values(&self.with(result.as_str())).inc();
    }

    /// Counts an attempt to start this cache from a peer.
    pub fn warm_start(&self, result: WarmStart) {
        self.all.warm_starts.with_label_values(&self.with(result.as_str())).inc();
    }

    /// Counts a transfer of this cache to a peer.
    pub fn transfer(&self, result: Transfer) {
        self.all.transfers.with_label_values(&self.with(result.as_str())).inc();
    }

    /// Counts a full list of upstream.
    pub fn relist(&self, reason: &str) {
        self.all.relists.with_label_values(&self.with(reason)).inc();
    }

    /// Counts a comparison of the cache with upstream.
    pub fn self_check(&self, result: SelfCheck) {
        self.all.self_checks.with_label_values(&self.with(result.as_str())).inc();
    }

    /// Counts a freshness proof.
    pub fn proof(&self, result: Proof, duration: Duration) {
        self.all.proofs.with_label_values(&self.with(result.as_str())).inc();
        self.all.proof_duration.with_label_values(&self.labels).observe(duration.as_secs_f64());
    }

    /// Counts a restart of the upstream watch.
    pub fn watch_restart(&self, reason: &str) {
        self.all.watch_restarts.with_label_values(&self.with(reason)).inc();
    }

    /// Counts an opened upstream watch. It counts as open until the guard is dropped.
    pub fn upstream_watch(&self, purpose: WatchPurpose) -> UpstreamWatchGuard {
        let labels = self.with(purpose.as_str());
        self.all.upstream_watches_started.with_label_values(&labels).inc();
        let open = self.all.upstream_watches.with_label_values(&labels);
        open.inc();
        UpstreamWatchGuard { open }
    }

    /// Sets the gauges. Called for every scrape.
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

/// Counts one open upstream watch until it is dropped.
pub struct UpstreamWatchGuard {
    open: IntGauge,
}

impl Drop for UpstreamWatchGuard {
    fn drop(&mut self) {
        self.open.dec();
    }
}
