//! From commits to the messages that a subscriber decodes, without a network and on paused time.

use std::{sync::Arc, time::Duration};

use bytes::{Buf, Bytes, BytesMut};
use kubefan_admission::{Gate, GateLimits};
use kubefan_cache::{CacheWriter, Phase, ProcessBudgets, Refusal, RelistReason, RingLimits, StreamEnd, Update};
use kubefan_common::{
    encoding::chunk,
    proto::v1alpha1::{DeleteReason, EventType as Type, ResolvedResource, WatchResponse, watch_response},
};
use kubefan_model::{
    GroupVersionResource, Media, ObjectKey, ResourceVersion, Scope,
    event::EventType,
    fields::FieldTable,
    format::Format,
    object::{Object, ObjectParser},
    selection::Selection,
    selector::{FieldSelector, LabelSelector},
};
use kubefan_telemetry::metrics::Metrics;
use prometheus::Registry;
use prost::Message;
use tokio::time::Instant;

use crate::{
    ConnectionWaker, FrameBuf, Hub, HubOptions, ReadyStreams, Start, StreamWaker, SubscribeOptions, Subscription,
};

mod budgets;
mod catch_ups;
mod formats;
mod gaps;
mod gzip_bodies;
#[cfg(feature = "interleavings")]
mod interleavings;
mod one_version;
mod protobuf;
mod shared_lists;
mod slices;
mod wake_ups;
mod watch_http;

const LIMITS: RingLimits = RingLimits {
    ring_bytes_max: Some(1 << 20),
    ring_events_max: 4,
    ring_age_max: Duration::from_secs(3600),
    conflated_bytes_max: Some(CONFLATED_BYTES),
};

/// Room for the selectable attributes of two objects.
const CONFLATED_BYTES: usize = 1000;

/// A hub and its writer.
struct Cache {
    hub: Arc<Hub>,
    writer: CacheWriter,
    parser: Arc<ObjectParser>,
    fields: FieldTable,
    gvr: GroupVersionResource,
}

impl Cache {
    fn new() -> Self {
        Self::within(LIMITS)
    }

    fn within(limits: RingLimits) -> Self {
        Self::sharing(&ProcessBudgets::default(), limits)
    }

    fn sharing(budgets: &ProcessBudgets, limits: RingLimits) -> Self {
        Self::of(budgets, limits, Media::Json)
    }

    fn of(budgets: &ProcessBudgets, limits: RingLimits, media: Media) -> Self {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let fields = FieldTable::new(&gvr, true, &[]);
        let all = Arc::new(Metrics::new(Registry::new()).unwrap());
        let gate = GateLimits { snapshots_max: 10, snapshot_queue_timeout: Duration::from_secs(10) };
        let metrics = all.cache(&gvr, &Scope::Cluster, media, &StreamEnd::ALL);
        let gate = Gate::new(gate, all.gate());
        let parser = match media {
            Media::Protobuf => ObjectParser::protobuf(&gvr, &fields).unwrap(),
            Media::Json | Media::Table => ObjectParser::new(&fields),
        };
        let parser = Arc::new(parser.of("Pod", "v1"));
        let budgets = budgets.clone();
        let cluster = Arc::new(|| None);
        let options = HubOptions { limits, coalesce_max: Duration::ZERO, gate, budgets, cluster };
        let hub = Hub::new(ResolvedResource::default(), parser.clone(), options, metrics);
        Self { hub, writer: CacheWriter::default(), parser, fields, gvr }
    }

    fn object(&self, name: &str, app: &str, version: u64) -> Object {
        if self.parser.media() == Media::Protobuf {
            return self.parser.parse(&protobuf::pod(name, app, version)).unwrap();
        }
        let json = format!(
            r#"{{"metadata":{{"name":"{name}","namespace":"ns","uid":"{name}","resourceVersion":"{version}","labels":{{"app":"{app}"}}}}}}"#
        );
        self.parser.parse(json.as_bytes()).unwrap()
    }

    fn apply(&mut self, update: Update) {
        if let Some(commit) = self.writer.apply(update).unwrap() {
            self.hub.batch().commit(commit, Instant::now());
        }
    }

    /// Lists at a version that may have more events, as at a kubefan that has a part of it.
    fn list(&mut self, objects: &[(&str, &str, u64)], at: u64) {
        self.list_at(objects, version(at));
    }

    fn list_at(&mut self, objects: &[(&str, &str, u64)], place: ResourceVersion) {
        self.apply(Update::ListBegin { reason: RelistReason::Expired });
        for (name, app, version) in objects {
            self.apply(Update::ListItem(self.object(name, app, *version)));
        }
        self.apply(Update::ListEnd(place));
    }

    fn event(&mut self, kind: EventType, name: &str, app: &str, at: u64) {
        self.apply(Update::Event(kind, self.object(name, app, at)));
    }

    fn select(&self, labels: &str) -> Selection {
        let labels = LabelSelector::parse(labels).unwrap();
        let none = FieldSelector::default();
        Selection::bind("", "", labels, &none, &self.fields, self.parser.clone(), &self.gvr).unwrap()
    }

    fn subscribe(&self, labels: &str, start: impl Into<SubscribeOptions>) -> Result<Subscription, Refusal> {
        self.hub.subscribe(self.select(labels), Format::default(), start, StreamWaker::new(&ConnectionWaker::new(), 0))
    }

    fn after(&self, labels: &str, at: u64) -> Result<Subscription, Refusal> {
        self.subscribe(labels, Start::Resume(version(at)))
    }
}

fn version(number: u64) -> ResourceVersion {
    ResourceVersion::new(number).unwrap()
}

/// A message in one line, such as `+web@11 (11)`: its kind, the key, the version, and in brackets
/// the resume version.
fn line(message: &WatchResponse) -> String {
    use watch_response::Message::{
        Bookmark, CatchUpBegin, CatchUpEnd, Event, GapBegin, GapEnd, SnapshotBegin, SnapshotChunk, SnapshotEnd,
    };
    let what = match message.message.as_ref().unwrap() {
        Event(event) => {
            let sign = match (event.r#type(), event.delete_reason()) {
                (Type::Added, _) => "+",
                (Type::Modified, _) => "~",
                (_, DeleteReason::LeftSelector) => "<",
                (_, DeleteReason::FinalStateUnknown) => "?",
                _ => "-",
            };
            format!("{sign}{}@{}", event.name, event.resource_version)
        }
        SnapshotBegin(begin) if !begin.restarted_from.is_empty() => {
            format!("snapshot@{} for {}", begin.resource_version, begin.restarted_from)
        }
        SnapshotBegin(begin) => format!("snapshot@{}", begin.resource_version),
        SnapshotEnd(end) => format!("end of {}", end.object_count),
        GapBegin(begin) => format!("gap from {} {}", begin.resource_version, begin.reason),
        GapEnd(_) => "end of gap".into(),
        CatchUpBegin(begin) => format!("catch-up from {}", begin.resource_version),
        CatchUpEnd(_) => "end of catch-up".into(),
        Bookmark(_) => "bookmark".into(),
        SnapshotChunk(chunk) => format!("chunk of {}", chunk::decode(&chunk.zstd, 1 << 20).unwrap().len()),
    };
    match message.resume_version.as_str() {
        "" => what,
        resume if message.version_is_complete => format!("{what} ({resume}.end)"),
        resume => format!("{what} ({resume})"),
    }
}

/// Everything that is ready for a subscription, decoded.
async fn messages(subscription: &mut Subscription) -> Vec<WatchResponse> {
    let mut all = Vec::new();
    // Time is paused: the timeout passes only once nothing else can.
    while let Ok(Ok(frames)) = tokio::time::timeout(Duration::from_millis(1), subscription.next()).await {
        all.append(&mut decode(frames));
    }
    all
}

fn to_bytes(mut frames: FrameBuf) -> Bytes {
    frames.copy_to_bytes(frames.len())
}

fn decode(mut frames: FrameBuf) -> Vec<WatchResponse> {
    let mut all = Vec::new();
    while frames.has_remaining() {
        let prefix = frames.copy_to_bytes(5);
        let len = u32::from_be_bytes(prefix[1..].try_into().unwrap()) as usize;
        all.push(WatchResponse::decode(frames.copy_to_bytes(len)).unwrap());
    }
    all
}

async fn ready(subscription: &mut Subscription) -> Vec<String> {
    messages(subscription).await.iter().map(line).collect()
}

use EventType::{Added, Deleted, Modified};

#[tokio::test(start_paused = true)]
async fn a_snapshot_is_followed_by_exactly_the_later_events() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5), ("b", "db", 6)], 10);
    let mut all = cache.subscribe("", Start::Snapshot).unwrap();
    cache.event(Modified, "b", "db", 11);
    cache.event(Added, "c", "web", 12);
    assert_eq!(ready(&mut all).await, ["snapshot@10", "+a@5", "+b@6", "end of 2 (10)", "~b@11 (11)", "+c@12 (12)"]);
    cache.event(Deleted, "a", "web", 13);
    assert_eq!(ready(&mut all).await, ["-a@13 (13)"]);
}

#[tokio::test(start_paused = true)]
async fn objects_enter_and_leave_a_selector_with_kubernetes_own_transitions() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5), ("b", "db", 6)], 10);
    let mut web = cache.subscribe("app=web", Start::Snapshot).unwrap();
    cache.event(Modified, "b", "web", 11);
    cache.event(Modified, "a", "db", 12);
    cache.event(Modified, "a", "db", 13);
    cache.event(Deleted, "a", "db", 14);
    let messages = messages(&mut web).await;
    let lines: Vec<_> = messages.iter().map(line).collect();
    assert_eq!(lines, ["snapshot@10", "+a@5", "end of 1 (10)", "+b@11 (11)", "<a@12 (12)"]);
    let Some(watch_response::Message::Event(left)) = &messages[4].message else { panic!("no event") };
    let object = std::str::from_utf8(&left.object).unwrap();
    assert!(object.contains(r#""resourceVersion":"12""#) && object.contains(r#""app":"web""#), "{object}");
}

#[tokio::test(start_paused = true)]
async fn a_resumed_watch_gets_the_same_events_as_an_unbroken_one() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let mut unbroken = cache.subscribe("app=web", Start::Snapshot).unwrap();
    ready(&mut unbroken).await;
    cache.event(Modified, "a", "db", 11);
    cache.event(Added, "b", "web", 12);
    cache.event(Modified, "a", "web", 13);
    let expected = ready(&mut unbroken).await;
    assert_eq!(expected, ["<a@11 (11)", "+b@12 (12)", "+a@13 (13)"]);
    // Into the view that the first one uses, and into one of its own that must be built from the
    // ring.
    assert_eq!(ready(&mut cache.after("app=web", 10).unwrap()).await, expected);
    drop(unbroken);
    let mut late = cache.after("app=web", 12).unwrap();
    let mut early = cache.after("app=web", 10).unwrap();
    assert_eq!(ready(&mut early).await, expected);
    assert_eq!(ready(&mut late).await, expected[2..], "older history in front moves nobody's place");
}

#[tokio::test(start_paused = true)]
async fn without_a_conflated_history_a_version_below_the_ring_is_expired() {
    let mut cache = Cache::within(RingLimits { conflated_bytes_max: Some(0), ..LIMITS });
    cache.list(&[], 10);
    let mut slow = cache.subscribe("", Start::Snapshot).unwrap();
    for at in 11..=16 {
        cache.event(Modified, "a", "web", at);
    }
    let expired = cache.after("", 10).err().unwrap();
    assert_eq!(
        expired.to_string(),
        "too old resource version: 10 (11)",
        "what is not in the ring any more is no change"
    );
    assert_eq!(ready(&mut cache.after("", 12).unwrap()).await.len(), 4);
    let snapshot = slow.next().await.unwrap();
    assert_eq!(snapshot.messages(), 2);
    let end = slow.next().await.unwrap_err();
    assert_eq!(end.to_string(), "too old resource version: 10 (12)", "the slow one is told, and costs nobody else");
}

#[tokio::test(start_paused = true)]
async fn a_relist_is_a_marked_gap_and_its_end_can_be_resumed_from() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5), ("b", "web", 6)], 10);
    let mut web = cache.after("app=web", 10).unwrap();
    cache.list(&[("a", "db", 18), ("c", "web", 15)], 20);
    cache.event(Modified, "c", "web", 21);
    let lines = ready(&mut web).await;
    assert_eq!(lines, ["gap from 10 expired", "?b@6", "+c@15", "<a@18", "end of gap (20)", "~c@21 (21)"]);
    assert_eq!(ready(&mut cache.after("app=web", 20).unwrap()).await, ["~c@21 (21)"]);
    let inside = cache.after("app=web", 15).err().unwrap();
    assert_eq!(inside.to_string(), "too old resource version: 15 (20)");
}

#[tokio::test(start_paused = true)]
async fn a_bookmark_waits_until_everything_before_it_was_taken() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let mut db = cache.subscribe("app=db", Start::Snapshot).unwrap();
    assert!(db.bookmark().is_none(), "not inside a snapshot");
    ready(&mut db).await;
    assert!(db.bookmark().is_none(), "the version has not moved");
    cache.event(Modified, "a", "web", 11);
    assert_eq!(line(&decode(db.bookmark().unwrap())[0]), "bookmark (11)");
    cache.event(Modified, "a", "db", 12);
    assert!(db.bookmark().is_none(), "an event is still to be taken");
    cache.apply(Update::Bookmark(version(30)));
    assert_eq!(ready(&mut db).await, ["+a@12 (12)"]);
    assert!(db.bookmark().is_some());
}

#[tokio::test(start_paused = true)]
async fn equal_subscriptions_share_a_view_until_the_last_one_ends() {
    let mut cache = Cache::new();
    cache.list(&[], 10);
    let first = cache.subscribe("app=web,tier=front", Start::Snapshot).unwrap();
    let second = cache.subscribe("tier==front, app=web", Start::Snapshot).unwrap();
    assert_eq!((cache.hub.status().subscribers, cache.hub.views()), (2, 1));
    drop(first);
    drop(second);
    assert_eq!((cache.hub.status().subscribers, cache.hub.views()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn subscribers_of_one_view_get_the_same_bytes_however_much_they_take_at_a_time() {
    let mut cache = Cache::new();
    cache.list(&[], 10);
    let start = |cache: &Cache| cache.after("app=web", 10).unwrap();
    let mut alone = start(&cache);
    let mut sizes = vec![1, 150, 400, 1000, 1 << 20];
    let mut shared: Vec<_> = sizes.iter().map(|_| (cache.after("app", 10).unwrap(), BytesMut::new())).collect();
    for at in 11..=14 {
        cache.event(Modified, &format!("pod-{}", at % 3), "web", at);
        let one = usize::try_from(at).unwrap() % shared.len();
        let (subscription, bytes) = &mut shared[one];
        bytes.extend(subscription.take(sizes[one]).unwrap().map(to_bytes).unwrap_or_default());
        sizes.rotate_left(1);
    }
    let expected = to_bytes(alone.take(1 << 20).unwrap().unwrap());
    for ((subscription, bytes), size) in shared.iter_mut().zip(&sizes) {
        while let Some(frames) = subscription.take(*size).unwrap() {
            bytes.extend(to_bytes(frames));
        }
        assert_eq!(*bytes, expected);
    }
    assert_eq!(cache.hub.budgets().segments.used(), 0, "what everybody has taken is not kept");
}

#[tokio::test(start_paused = true)]
async fn a_burst_wakes_once_and_an_event_wakes_only_its_views() {
    let mut cache = Cache::new();
    cache.list(&[], 10);
    let line = ConnectionWaker::new();
    let subscribe = |cache: &Cache, labels: &str, stream| {
        let waker = StreamWaker::new(&line, stream);
        cache.hub.subscribe(cache.select(labels), Format::default(), Start::Resume(version(10)), waker).unwrap()
    };
    let mut all = [subscribe(&cache, "", 1), subscribe(&cache, "app=web", 2), subscribe(&cache, "app!=web", 3)];
    for subscription in &mut all {
        assert!(subscription.take(1 << 20).unwrap().is_none());
    }
    cache.event(Modified, "a", "web", 11);
    cache.event(Modified, "b", "web", 12);
    let mut ready_streams = ReadyStreams::new();
    line.take_ready(&mut ready_streams);
    assert_eq!(*ready_streams, [1, 2]);
    assert_eq!(all[1].take(1 << 20).unwrap().unwrap().messages(), 2);
    assert!(all[1].take(1 << 20).unwrap().is_none() && all[2].take(1 << 20).unwrap().is_none());
    cache.event(Modified, "c", "web", 13);
    ready_streams.clear();
    line.take_ready(&mut ready_streams);
    assert_eq!(*ready_streams, [2], "who has not looked yet is not told again");
}

#[tokio::test(start_paused = true)]
async fn a_closed_hub_ends_its_streams_after_the_events_before_it() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let mut all = cache.after("", 10).unwrap();
    cache.event(Deleted, "a", "web", 11);
    cache.hub.close(Phase::NotFound, StreamEnd::NotFound("widgets are gone".into()));
    assert_eq!(ready(&mut all).await, ["-a@11 (11)"]);
    assert_eq!(all.next().await.unwrap_err(), StreamEnd::NotFound("widgets are gone".into()));
    assert_eq!(cache.after("", 11).err(), Some(Refusal::NotFound("widgets are gone".into())));
    drop(all);
    cache.writer = CacheWriter::default();
    cache.list(&[], 30);
    assert!(cache.after("", 30).is_ok(), "created again, served again");
}

#[tokio::test(start_paused = true)]
async fn versions_that_went_back_upstream_end_every_stream() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let mut all = cache.after("", 10).unwrap();
    cache.list(&[("a", "web", 3)], 4);
    assert!(matches!(all.next().await, Err(StreamEnd::Rewritten(_))));
    assert_eq!(ready(&mut cache.subscribe("", Start::Snapshot).unwrap()).await[0], "snapshot@4");
}

#[tokio::test(start_paused = true)]
async fn no_bookmark_of_the_next_history_ends_a_stream_of_the_last() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], 10);
    let mut all = cache.after("", 10).unwrap();
    assert!(ready(&mut all).await.is_empty());
    // A version beyond the subscriber's, and no later state.
    cache.list(&[("a", "web", 3)], 20);
    assert!(all.bookmark().is_none(), "the change was not sent yet");
    assert!(matches!(all.next().await, Err(StreamEnd::Rewritten(_))));
}

#[tokio::test(start_paused = true)]
async fn a_version_from_the_future_is_waited_for_and_then_refused() {
    let mut cache = Cache::new();
    cache.list(&[], 10);
    assert_eq!(cache.after("", 12).err().unwrap().to_string(), "too large resource version: 12, current: 10");
    let hub = cache.hub.clone();
    let waiting = tokio::spawn(async move { hub.reached(version(12), Duration::from_secs(3)).await });
    tokio::task::yield_now().await;
    cache.event(Added, "a", "web", 12);
    assert_eq!(waiting.await.unwrap(), Ok(()));
    assert!(cache.hub.reached(version(13), Duration::from_secs(3)).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn before_the_first_list_every_reader_is_refused() {
    let cache = Cache::new();
    assert!(matches!(cache.subscribe("", Start::Snapshot), Err(Refusal::NotSynced { .. })));
    cache.hub.trouble("list: cannot reach the apiserver".into());
    let refusal = cache.hub.snapshot().err().unwrap();
    assert!(refusal.to_string().ends_with("cannot reach the apiserver"), "{refusal}");
}
