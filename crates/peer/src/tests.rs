//! A received cache equals the sent one, and an incomplete or altered transfer is refused.

use std::{ops::Bound, sync::Arc, time::Duration};

use kubefan_cache::{
    CacheWriter, Gap, History, HistoryCopy, HistoryRecord, RelistReason, RingLimits, Store, Update, writer::Change,
};
use kubefan_common::proto::v1alpha1::{TransferResponse, transfer_response::Part};
use kubefan_model::{
    GroupVersionResource, ResourceVersion, Scope, event::EventType, fields::FieldTable, object::ObjectParser,
};
use kubefan_upstream::discovery::SchemaFingerprint;
use proptest::{prelude::*, sample::Index};
use tokio::time::Instant;

use super::*;

/// A change to one of a few objects.
#[derive(Debug, Clone)]
pub(super) enum Step {
    Put {
        name: u8,
        label: u8,
        filler: u8,
    },
    Delete {
        name: u8,
    },
    /// A relist that finds these objects, with these labels.
    Relist {
        keep: Vec<(u8, u8)>,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let put = (0..6_u8, 0..3_u8, 0..3_u8).prop_map(|(name, label, filler)| Step::Put { name, label, filler });
    let relist = prop::collection::vec((0..6_u8, 0..3_u8), 0..6).prop_map(|keep| Step::Relist { keep });
    let step = prop_oneof![12 => put, 4 => (0..6_u8).prop_map(|name| Step::Delete { name }), 1 => relist];
    prop::collection::vec(step, 0..120)
}

fn version(number: u64) -> ResourceVersion {
    ResourceVersion::new(number).unwrap()
}

fn gvr() -> GroupVersionResource {
    GroupVersionResource::new("", "v1", "pods")
}

pub(super) fn parser() -> Arc<ObjectParser> {
    Arc::new(ObjectParser::new(&FieldTable::new(&gvr(), true, &[])).of("Pod", "v1"))
}

pub(super) fn identity() -> CacheIdentity {
    let cluster = "kube-system uid 1".to_owned();
    let schema = "s".to_owned();
    CacheIdentity { cluster, gvr: gvr(), scope: Scope::Cluster, upstream_field_selector: String::new(), schema }
}

fn json(name: u8, label: u8, filler: u8, number: u64) -> String {
    let filler = "all the same ".repeat(40 * usize::from(filler));
    format!(
        r#"{{"kind":"Pod","apiVersion":"v1","metadata":{{"name":"p{name}","namespace":"ns","uid":"u{name}","resourceVersion":"{number}","labels":{{"l":"{label}"}}}},"spec":{{"nodeName":"n{label}"}},"status":{{"message":"{filler}"}}}}"#
    )
}

pub(super) fn limits(records: usize) -> RingLimits {
    RingLimits {
        ring_bytes_max: None,
        ring_events_max: records,
        ring_age_max: Duration::from_secs(3600),
        conflated_bytes_max: Some(6 << 10),
    }
}

/// A cache after some changes, as a hub has it.
pub(super) struct Cache {
    pub(super) store: Store,
    pub(super) history: History,
    pub(super) version: ResourceVersion,
}

pub(super) fn cache(steps: &[Step], records: usize, pack: bool, now: Instant) -> Cache {
    let parser = parser();
    let mut writer = CacheWriter::new(pack);
    let object = |name: u8, label: u8, filler: u8, number: u64| {
        parser.parse(json(name, label, filler, number).as_bytes()).unwrap()
    };
    writer.apply(Update::ListBegin { reason: RelistReason::Initial }).unwrap();
    writer.apply(Update::ListItem(object(0, 0, 1, 3))).unwrap();
    let commit = writer.apply(Update::ListEnd(version(5))).unwrap().unwrap();
    let mut cache = Cache {
        store: commit.store,
        history: History::new(limits(records), commit.version, parser.clone()),
        version: commit.version,
    };
    let mut number = 5;
    let mut present = std::collections::BTreeSet::from([0]);
    for step in steps {
        number += 2;
        let mut updates = Vec::new();
        match step {
            Step::Put { name, label, filler } => {
                present.insert(*name);
                updates.push(Update::Event(EventType::Modified, object(*name, *label, *filler, number)));
            }
            Step::Delete { name } if present.remove(name) => {
                updates.push(Update::Event(EventType::Deleted, object(*name, 0, 0, number)));
            }
            Step::Delete { .. } => {}
            Step::Relist { keep } => {
                let keep: std::collections::BTreeMap<_, _> = keep.iter().copied().collect();
                updates.push(Update::ListBegin { reason: RelistReason::Expired });
                for (name, label) in &keep {
                    number += 1;
                    updates.push(Update::ListItem(object(*name, *label, 1, number)));
                }
                present = keep.keys().copied().collect();
                number += 1;
                updates.push(Update::ListEnd(version(number)));
            }
        }
        for update in updates {
            let Some(commit) = writer.apply(update).unwrap() else { continue };
            if let Change::Record(record) = commit.change {
                cache.history.push(record, now);
            }
            cache.store = commit.store;
            cache.version = commit.version;
            cache.history.evict(now, cache.store.json_bytes(), 1.0);
        }
    }
    cache
}

pub(super) fn parts(cache: &Cache, entries_max: usize, chunk_bytes: usize, now: Instant) -> Vec<TransferResponse> {
    let mut copy = HistoryCopy::of(cache.version);
    while cache.history.copy(&mut copy, entries_max) {}
    let encoder = Encoder::new(&identity(), cache.store.clone(), copy, now).in_chunks_of(chunk_bytes);
    encoder.collect::<Result<_, _>>().unwrap()
}

fn decode(
    parts: impl IntoIterator<Item = TransferResponse>,
    limits: RingLimits,
    pack: bool,
) -> Result<ReceivedCache, PeerError> {
    let writer = CacheWriter::new(pack);
    let mut decoder = Decoder::new(identity(), limits, parser(), writer, 1 << 30, Instant::now());
    for part in parts {
        decoder.take(part)?;
    }
    decoder.finish()
}

/// Everything that a subscriber could receive, as text.
pub(super) fn contents(store: &Store, history: &History) -> String {
    let mut lines = vec![format!("{} {}", history.conflated().floor(), history.ring().floor())];
    lines.extend(store.iter().map(|object| String::from_utf8(object.bytes().to_vec()).unwrap()));
    let conflated = history.conflated();
    for change in conflated.between(conflated.floor(), Bound::Unbounded) {
        lines.push(format!(
            "{} {} {:?}",
            change.version,
            change.key,
            change.before.as_ref().map(|before| before.bytes())
        ));
    }
    lines.push(format!("{:?}", conflated.gaps().collect::<Vec<_>>()));
    for record in history.ring().since(history.ring().floor()).unwrap() {
        if let HistoryRecord::Gap(gap) = record {
            lines.push(format!("gap {} {} {}", gap.from, gap.to, gap.reason.as_str()));
        }
        for event in record.events() {
            let object = event.object().bytes();
            let previous = event.previous().map(|previous| previous.bytes());
            lines.push(format!("{:?} {} {object:?} {previous:?}", event.kind(), event.version()));
        }
    }
    lines.join("\n")
}

pub(super) fn restored(restored: ReceivedCache) -> (Store, History, CacheWriter) {
    let Change::Restored(history) = restored.commit.change else { panic!("no history") };
    (restored.commit.store, *history, restored.writer)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
}

#[test]
fn a_gap_that_was_a_catch_up_upstream_keeps_its_reason() {
    runtime().block_on(async {
        let now = Instant::now();
        let mut cache = cache(&[], 10, false, now);
        cache
            .history
            .push(HistoryRecord::Gap(Arc::new(Gap::new(version(5), version(9), RelistReason::CatchUp, vec![]))), now);
        cache.version = version(9);
        let (store, history, _) = restored(decode(parts(&cache, 10, 1000, now), limits(10), false).unwrap());
        assert_eq!(contents(&store, &history), contents(&cache.store, &cache.history));
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_received_cache_equals_the_sent_one(
        steps in steps(),
        records in 1..40_usize,
        entries_max in 1..50_usize,
        chunk_bytes in 300..8000_usize,
        pack in any::<(bool, bool)>(),
    ) {
        runtime().block_on(async {
            let now = Instant::now();
            let cache = cache(&steps, records, pack.0, now);
            let parts = parts(&cache, entries_max, chunk_bytes, now);
            let (store, history, mut writer) = restored(decode(parts, limits(records), pack.1).unwrap());
            assert_eq!(contents(&store, &history), contents(&cache.store, &cache.history));
            assert_eq!(writer.version(), Some(cache.version));
            // The writer continues from the received version.
            let next = parser().parse(json(1, 1, 1, cache.version.get() + 1).as_bytes()).unwrap();
            assert!(writer.apply(Update::Event(EventType::Modified, next)).unwrap().is_some());
        });
    }

    #[test]
    fn a_truncated_duplicated_reordered_or_altered_transfer_is_refused(
        steps in steps(),
        chunk_bytes in 300..8000_usize,
        at in any::<Index>(),
        byte in any::<Index>(),
        how in 0..5,
    ) {
        runtime().block_on(async {
            let now = Instant::now();
            let cache = cache(&steps, 20, false, now);
            let mut parts = parts(&cache, 100, chunk_bytes, now);
            let at = at.index(parts.len());
            match how {
                0 => parts.truncate(at),
                1 => drop(parts.remove(at)),
                2 => parts.insert(at, parts[at].clone()),
                3 => {
                    let other = (at + 1) % parts.len();
                    parts.swap(at, other);
                }
                _ => {
                    let mut bytes = prost::Message::encode_to_vec(&parts[at]);
                    let byte = byte.index(bytes.len());
                    bytes[byte] ^= 1;
                    // gRPC itself refuses bytes that are not a message.
                    let Ok(altered) = prost::Message::decode(&*bytes) else { return };
                    parts[at] = altered;
                }
            }
            match decode(parts, limits(20), false) {
                Err(_) => {}
                // The flipped bit may have no meaning.
                Ok(same) if how == 4 => {
                    let (store, history, _) = restored(same);
                    assert_eq!(contents(&store, &history), contents(&cache.store, &cache.history));
                }
                Ok(_) => panic!("{how} at {at}"),
            }
        });
    }

    #[test]
    fn a_replica_with_lower_limits_retains_the_newest_records(steps in steps(), records in 1..10_usize) {
        runtime().block_on(async {
            let now = Instant::now();
            let cache = cache(&steps, 60, false, now);
            let parts = parts(&cache, 100, 1000, now);
            let (_, history, _) = restored(decode(parts, limits(records), false).unwrap());
            assert!(history.ring().len() <= records);
            let ours = cache.history.ring().since(history.ring().floor()).unwrap().map(HistoryRecord::version);
            let theirs = history.ring().since(history.ring().floor()).unwrap().map(HistoryRecord::version);
            assert!(ours.eq(theirs), "the newest");
        });
    }
}

#[tokio::test(start_paused = true)]
async fn a_copy_in_parts_loses_nothing_that_the_ring_evicts_meanwhile() {
    let put = |i: usize| Step::Put { name: (i % 5) as u8, label: (i % 3) as u8, filler: 1 };
    let steps: Vec<Step> = (0..80).map(put).collect();
    let now = Instant::now();
    let mut cache = cache(&steps, 40, false, now);
    let known_from = cache.history.oldest();
    let mut copy = HistoryCopy::of(cache.version);
    assert!(cache.history.copy(&mut copy, 10));
    // The ring evicts most of the records that are not copied yet.
    let mut number = cache.version.get();
    for _ in 0..25 {
        number += 1;
        let object = Arc::new(parser().parse(json(1, 1, 1, number).as_bytes()).unwrap());
        let event =
            kubefan_model::event::WatchEvent::new(EventType::Modified, version(number), object.clone(), Some(object));
        cache.history.push(HistoryRecord::Event(Arc::new(event)), now);
        cache.history.evict(now, 0, 1.0);
    }
    while cache.history.copy(&mut copy, 10) {}
    assert!(copy.ring_floor < copy.version && !copy.changes.is_empty());
    assert!(copy.records.iter().all(|(record, _)| record.version() > copy.ring_floor));
    assert!(copy.changes.iter().all(|change| change.version <= copy.ring_floor));
    let parts = Encoder::new(&identity(), cache.store.clone(), copy, now).collect::<Result<Vec<_>, _>>().unwrap();
    let (_, history, _) = restored(decode(parts, limits(40), false).unwrap());
    assert!(history.oldest() >= known_from);
    assert!([cache.version, history.oldest()].into_iter().all(|from| history.can_resume_from(from, from)));
}

#[tokio::test(start_paused = true)]
async fn a_different_cache_and_an_oversized_transfer_are_refused() {
    let now = Instant::now();
    let cache = cache(&[], 10, false, now);
    let other = |change: fn(&mut CacheIdentity)| {
        let mut wanted = identity();
        change(&mut wanted);
        let mut decoder = Decoder::new(wanted, limits(10), parser(), CacheWriter::new(false), 1 << 20, now);
        let header = parts(&cache, 10, 1000, now).remove(0);
        decoder.take(header).unwrap_err().to_string()
    };
    let error = other(|wanted| wanted.cluster = "kube-system uid 2".to_owned());
    assert_eq!(
        error,
        r#"the peer has another cache: the cluster is "kube-system uid 1" there and "kube-system uid 2" here"#
    );
    assert!(other(|wanted| wanted.schema = "t".to_owned()).contains("the schema"));
    assert!(other(|wanted| wanted.upstream_field_selector = "a=b".to_owned()).contains("the field selector"));
    assert!(other(|wanted| wanted.scope = Scope::Namespace("a".to_owned())).contains("the resource"));

    let mut small = Decoder::new(identity(), limits(10), parser(), CacheWriter::new(false), 100, now);
    let taken = parts(&cache, 10, 1000, now).into_iter().try_for_each(|part| small.take(part));
    assert!(matches!(taken, Err(PeerError::TooLarge(100))), "{taken:?}");
}

#[test]
fn an_unknown_schema_has_no_text() {
    let fields = FieldTable::new(&gvr(), true, &[]);
    let text = |server: Option<&str>, hash: Option<&str>| {
        let server_version = server.map(str::to_owned);
        let schema_hash = hash.map(str::to_owned);
        schema_text("Pod", &fields, Some(&SchemaFingerprint { server_version, schema_hash }))
    };
    assert_eq!(text(Some("v1.35.4"), Some("A")), text(Some("v1.35.4"), Some("A")));
    assert_ne!(text(Some("v1.35.4"), Some("A")), text(Some("v1.35.4"), Some("B")));
    assert_ne!(text(Some("v1.35.4"), Some("A")), text(Some("v1.35.5"), Some("A")));
    assert!(text(Some("v1.35.4"), Some("A")).is_some());
    for unknown in [text(None, None), text(Some("v1.35.4"), None), text(None, Some("A"))] {
        assert_eq!(unknown, None, "two unknown schemas must not compare as equal");
    }
    assert_eq!(schema_text("Pod", &fields, None), None);
}

#[tokio::test(start_paused = true)]
async fn decoding_stops_at_the_first_empty_entry() {
    let now = Instant::now();
    let mut parts = parts(&cache(&[], 10, false, now), 10, 1000, now);
    // An empty entry, followed by bytes that are not an entry.
    let content = kubefan_common::encoding::chunk::encode_content(&[0, 0xff]).unwrap();
    parts[1] = TransferResponse { part: Some(Part::Chunk(content)) };
    let Err(error) = decode(parts, limits(10), false) else { panic!("it was accepted") };
    assert_eq!(error.to_string(), "the transfer is broken: an unknown entry");
}

#[tokio::test(start_paused = true)]
async fn a_record_retains_its_age() {
    let cache = cache(&[Step::Put { name: 1, label: 1, filler: 1 }], 10, false, Instant::now());
    tokio::time::advance(Duration::from_secs(600)).await;
    let now = Instant::now();
    let (_, history, _) = restored(decode(parts(&cache, 10, 1000, now), limits(10), false).unwrap());
    assert_eq!(history.ring().age(now), Duration::from_secs(600), "it expires when it would have at the sender");
}
