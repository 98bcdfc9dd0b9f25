use kubefan_model::fields::FieldTable;

use super::*;
use crate::{Gap, RelistReason, budget::Budget};

fn version(number: u64) -> ResourceVersion {
    ResourceVersion::new(number).unwrap()
}

fn cache() -> PublishedCache {
    let limits = RingLimits {
        ring_bytes_max: None,
        ring_events_max: 1,
        ring_age_max: Duration::from_secs(60),
        conflated_bytes_max: None,
    };
    let parser = Arc::new(ObjectParser::new(&FieldTable::default()));
    PublishedCache::new("pods".to_owned(), limits, parser, || SystemTime::UNIX_EPOCH, Budget::alone(0).share())
}

fn commit(cache: &mut PublishedCache, at: u64, change: Change) -> Applied {
    cache.apply(Commit { store: Store::default(), version: version(at), change }, Instant::now(), 1.0)
}

fn start(cache: &mut PublishedCache, at: u64) -> Applied {
    commit(cache, at, Change::Start { because: format!("list at {at}") })
}

fn gap(from: u64, to: u64) -> Change {
    let gap = Gap::new(version(from), version(to), RelistReason::Expired, Vec::new());
    Change::Record(HistoryRecord::Gap(Arc::new(gap)))
}

#[tokio::test(start_paused = true)]
async fn records_continue_a_history_and_a_start_replaces_it() {
    let mut cache = cache();
    assert!(matches!(start(&mut cache, 10), Applied::NewEpoch { replaced: false, .. }));
    assert_eq!(cache.synced_since(), Some(SystemTime::UNIX_EPOCH));
    let Applied::Continued(evicted) = commit(&mut cache, 12, gap(10, 12)) else { panic!("another history") };
    assert!(evicted.is_empty());
    let Applied::Continued(evicted) = commit(&mut cache, 14, gap(12, 14)) else { panic!("another history") };
    assert_eq!(
        evicted.iter().map(HistoryRecord::version).collect::<Vec<_>>(),
        [version(12)],
        "the ring holds one record"
    );
    let Applied::Continued(_) = commit(&mut cache, 15, Change::Version) else { panic!("another history") };
    let state = cache.state().unwrap();
    assert_eq!((state.epoch, state.version, state.history.ring().last()), (1, version(15), version(14)));
    let Applied::NewEpoch { because, replaced: true } = start(&mut cache, 5) else { panic!("the same history") };
    assert_eq!(because, "list at 5");
    assert_eq!((cache.state_of(1).is_some(), cache.state_of(2).unwrap().version), (false, version(5)));
}

#[tokio::test(start_paused = true)]
async fn the_phase_and_the_age_of_the_proof_decide_whether_readers_are_served() {
    let mut cache = cache();
    let refused = |cache: &PublishedCache| cache.serving(Instant::now()).err();
    assert!(matches!(refused(&cache), Some(Refusal::NotSynced { .. })));
    cache.trouble("unreachable".to_owned());
    assert_eq!(refused(&cache).unwrap().to_string(), "pods is not synced: unreachable");
    cache.live();
    assert_eq!(cache.phase(), Phase::Syncing, "there is nothing to serve");
    cache.failing("list: no".to_owned(), "no".to_owned());
    assert_eq!(refused(&cache).unwrap().to_string(), "pods is not synced: no");
    cache.close(Phase::NotCached, "opaque".to_owned());
    assert_eq!(refused(&cache), Some(Refusal::NotCached("opaque".to_owned())));
    start(&mut cache, 10);
    assert_eq!((cache.phase(), cache.message(), refused(&cache)), (Phase::Synced, "", None));
    cache.failing("list: no".to_owned(), "no".to_owned());
    assert_eq!((cache.phase(), refused(&cache)), (Phase::Stale, None));
    cache.trouble("unreachable".to_owned());
    assert_eq!((cache.phase(), refused(&cache)), (Phase::Stale, None));
    cache.limit_staleness(Some(Duration::from_secs(5)));
    assert!(matches!(refused(&cache), Some(Refusal::Stale { age: None, .. })), "never proved");
    cache.proved(Instant::now());
    tokio::time::advance(Duration::from_secs(5)).await;
    assert_eq!(refused(&cache), None);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(matches!(refused(&cache), Some(Refusal::Stale { age: Some(_), .. })));
    cache.close(Phase::NotFound, "gone".to_owned());
    assert_eq!(refused(&cache), Some(Refusal::NotFound("gone".to_owned())));
    assert_eq!((cache.age(Instant::now()), cache.synced_since()), (None, None));
}

#[tokio::test(start_paused = true)]
async fn a_saved_state_is_stale_and_as_old_as_its_last_proof_until_it_is_confirmed() {
    let mut cache = cache();
    tokio::time::advance(Duration::from_secs(600)).await;
    let proven_at = Instant::now() - Duration::from_secs(60);
    let saved =
        || Commit { store: Store::default(), version: version(10), change: Change::Start { because: String::new() } };
    cache.start_unconfirmed(saved(), Some(proven_at), "not asked yet".to_owned());
    assert_eq!((cache.phase(), cache.message(), cache.is_unconfirmed()), (Phase::Stale, "not asked yet", true));
    assert_eq!(cache.age(Instant::now()), Some(Duration::from_secs(60)));
    assert!(cache.serving(Instant::now()).is_ok());
    cache.limit_staleness(Some(Duration::from_secs(59)));
    assert!(matches!(cache.serving(Instant::now()), Err(Refusal::Stale { age: Some(_), .. })));
    cache.trouble("unreachable".to_owned());
    assert!(cache.is_unconfirmed(), "a failure confirms nothing");
    cache.live();
    assert_eq!((cache.phase(), cache.is_unconfirmed()), (Phase::Synced, false));

    cache.close(Phase::Syncing, String::new());
    cache.start_unconfirmed(saved(), None, String::new());
    assert!(matches!(cache.serving(Instant::now()), Err(Refusal::Stale { age: None, .. })), "an unknown age");
    cache.close(Phase::Syncing, String::new());
    assert!(!cache.is_unconfirmed());
}
