use kubefan_model::{fields::FieldTable, object::ObjectParser};

use super::*;

fn version(number: u64) -> ResourceVersion {
    ResourceVersion::new(number).unwrap()
}

fn object(name: &str, uid: &str, number: u64) -> Object {
    let json = format!(r#"{{"metadata":{{"name":"{name}","uid":"{uid}","resourceVersion":"{number}"}}}}"#);
    ObjectParser::new(&FieldTable::default()).parse(json.as_bytes()).unwrap()
}

fn list(writer: &mut CacheWriter, objects: Vec<Object>, number: u64) -> Commit {
    writer.apply(Update::ListBegin { reason: RelistReason::Expired }).unwrap();
    for object in objects {
        writer.apply(Update::ListItem(object)).unwrap();
    }
    writer.apply(Update::ListEnd(version(number).end())).unwrap().unwrap()
}

fn told(commit: &Commit) -> Vec<(EventType, String, u64)> {
    let line = |event: &WatchEvent| (event.kind(), event.object().key().to_string(), event.version().get());
    match &commit.change {
        Change::Record(HistoryRecord::Event(event)) => vec![line(event)],
        Change::Record(HistoryRecord::Gap(gap)) => gap.events.iter().map(|event| line(event)).collect(),
        Change::Start { .. } | Change::Restored(_) | Change::Version => vec![],
    }
}

use EventType::{Added, Deleted, Modified};

/// Similar to each other, as objects of one resource are, and larger than their attributes.
fn pod(number: usize, version: u64) -> Object {
    let containers =
        r#"{"name":"main","image":"registry.example.com/team/server:1.13.0","imagePullPolicy":"IfNotPresent"},"#;
    let json = format!(
        r#"{{"kind":"Pod","metadata":{{"name":"web-{number:04}","uid":"u{number}","resourceVersion":"{version}","labels":{{"app":"web"}}}},"spec":{{"containers":[{}{{}}]}}}}"#,
        containers.repeat(6)
    );
    ObjectParser::new(&FieldTable::default()).parse(json.as_bytes()).unwrap()
}

fn events(commit: &Commit) -> Vec<Arc<WatchEvent>> {
    let Change::Record(record) = &commit.change else { panic!("no record") };
    record.events().to_vec()
}

#[test]
fn with_compression_every_current_object_is_packed_and_reads_the_same() {
    for count in [3, 30, 300] {
        let mut writer = CacheWriter::new(true);
        let commit = list(&mut writer, (0..count).map(|number| pod(number, 5)).collect(), 10);
        assert!(commit.store.iter().all(|object| object.is_packed()), "{count}");
        let json: Vec<_> = (0..count).map(|number| pod(number, 5).bytes()).collect();
        assert_eq!(commit.store.iter().map(|object| object.bytes()).collect::<Vec<_>>(), json);
        assert_eq!(commit.store.json_bytes(), json.iter().map(|bytes| bytes.len()).sum::<usize>());
        assert!(commit.store.cost_bytes() < commit.store.json_bytes());
        let commit = writer.apply(Update::Event(Modified, pod(1, 12))).unwrap().unwrap();
        assert!(commit.store.get("web-0001").unwrap().is_packed());
        assert!(!events(&commit)[0].object().is_packed(), "what is about to be sent is not unpacked for it");
    }
}

#[test]
fn a_relist_that_repeats_a_packed_object_keeps_its_memory() {
    let mut writer = CacheWriter::new(true);
    let pods = || (0..200).map(|number| pod(number, 5)).collect();
    let before = list(&mut writer, pods(), 10).store;
    let after = list(&mut writer, pods(), 11).store;
    assert!(before.iter().zip(after.iter()).all(|(before, after)| Arc::ptr_eq(before, after)));
}

#[test]
fn a_replaced_object_is_packed_when_its_event_settles() {
    let mut writer = CacheWriter::default();
    list(&mut writer, (0..100).map(|number| pod(number, 5)).collect(), 10);
    let commit = writer.apply(Update::Event(Modified, pod(7, 12))).unwrap().unwrap();
    let event = &events(&commit)[0];
    assert!(!event.previous().unwrap().is_packed(), "a new event is about to be encoded");
    event.settle();
    assert!(event.previous().unwrap().is_packed() && !event.object().is_packed());
    assert_eq!(event.previous().unwrap().bytes(), pod(7, 5).bytes());
    let commit = writer.apply(Update::Event(Deleted, pod(7, 13))).unwrap().unwrap();
    let event = &events(&commit)[0];
    event.settle();
    assert!(event.previous().unwrap().is_packed() && event.object().is_packed());
    assert_eq!(event.object().bytes(), pod(7, 13).bytes());
}

#[test]
fn a_relist_prepared_in_parts_has_the_same_difference() {
    let commit = |parts: Option<usize>| {
        let mut writer = CacheWriter::default();
        list(&mut writer, (0..100).map(|number| pod(number, 5)).collect(), 10);
        writer.apply(Update::ListBegin { reason: RelistReason::Expired }).unwrap();
        for number in (0..100).filter(|number| number % 3 > 0) {
            let version = if number % 3 == 1 { 5 } else { 15 };
            writer.apply(Update::ListItem(pod(number, version))).unwrap();
        }
        while parts.is_some_and(|parts| writer.prepare(parts)) {}
        let commit = writer.apply(Update::ListEnd(version(20).end())).unwrap().unwrap();
        for event in events(&commit) {
            event.settle();
            assert!(event.previous().is_none_or(|previous| previous.is_packed()));
        }
        told(&commit)
    };
    assert_eq!(commit(None).len(), 67);
    assert_eq!(commit(None), commit(Some(7)));
}

#[test]
fn a_relist_becomes_deletes_then_changes_in_order() {
    let mut writer = CacheWriter::default();
    let first = vec![object("a", "1", 5), object("b", "2", 6), object("c", "3", 7), object("d", "4", 8)];
    assert!(matches!(list(&mut writer, first, 10).change, Change::Start { .. }));
    let second = vec![object("a", "1", 19), object("b", "9", 12), object("d", "4", 8), object("e", "5", 15)];
    let commit = list(&mut writer, second, 20);
    assert_eq!(
        told(&commit),
        [
            (Deleted, "b".into(), 6),
            (Deleted, "c".into(), 7),
            (Added, "b".into(), 12),
            (Added, "e".into(), 15),
            (Modified, "a".into(), 19),
        ]
    );
    assert_eq!((commit.version.get(), commit.store.len()), (20, 4));
}

#[test]
fn a_relist_keeps_the_memory_of_unchanged_objects() {
    let mut writer = CacheWriter::default();
    let before = list(&mut writer, vec![object("a", "1", 5)], 10).store;
    let after = list(&mut writer, vec![object("a", "1", 5)], 11).store;
    assert!(Arc::ptr_eq(before.get("a").unwrap(), after.get("a").unwrap()));
}

#[test]
fn a_relist_without_differences_is_a_gap_too() {
    let mut writer = CacheWriter::default();
    list(&mut writer, vec![], 10);
    assert!(matches!(list(&mut writer, vec![], 12).change, Change::Record(HistoryRecord::Gap(_))));
    assert!(matches!(list(&mut writer, vec![], 12).change, Change::Version), "nothing can have happened");
}

/// Other bytes at the version of an object.
fn reencoded(name: &str, uid: &str, number: u64) -> Object {
    let json =
        format!(r#"{{"metadata":{{"name":"{name}","uid":"{uid}","resourceVersion":"{number}"}},"spec":{{"new":1}}}}"#);
    ObjectParser::new(&FieldTable::default()).parse(json.as_bytes()).unwrap()
}

/// A writer at version 10, after a list that shows new bytes of `a` and `b`.
fn awaiting() -> CacheWriter {
    let mut writer = CacheWriter::default();
    list(&mut writer, vec![object("a", "1", 5), object("b", "2", 6), object("c", "3", 7)], 10);
    writer.apply(Update::ListBegin { reason: RelistReason::SchemaChanged }).unwrap();
    for object in [reencoded("a", "1", 5), reencoded("b", "2", 6), object("c", "3", 7)] {
        writer.apply(Update::ListItem(object)).unwrap();
    }
    assert!(writer.apply(Update::ListEnd(version(10).end())).unwrap().is_none() && writer.awaits_version());
    writer
}

fn span(commit: &Commit) -> Option<(u64, u64, bool)> {
    match &commit.change {
        Change::Record(HistoryRecord::Gap(gap)) => Some((gap.from.get(), gap.to.get(), gap.is_lossy)),
        _ => None,
    }
}

fn is_new(commit: &Commit, name: &str) -> bool {
    String::from_utf8_lossy(&commit.store.get(name).unwrap().bytes()).contains("new")
}

#[test]
fn other_bytes_at_the_version_reached_become_the_step_to_the_next_version() {
    let mut writer = awaiting();
    assert!(writer.apply(Update::Bookmark(version(10))).unwrap().is_none(), "no new version");
    let commit = writer.apply(Update::Bookmark(version(20))).unwrap().unwrap();
    assert_eq!(span(&commit), Some((19, 20, false)));
    assert_eq!(told(&commit), [(Modified, "a".into(), 5), (Modified, "b".into(), 6)]);
    assert!(is_new(&commit, "a") && is_new(&commit, "b") && !is_new(&commit, "c") && !writer.awaits_version());
}

#[test]
fn a_change_before_the_next_version_is_part_of_that_step() {
    let commit = awaiting().apply(Update::Event(Modified, object("b", "2", 11))).unwrap().unwrap();
    assert_eq!(span(&commit), Some((10, 11, false)));
    assert_eq!(told(&commit), [(Modified, "a".into(), 5), (Modified, "b".into(), 11)]);
    let previous = events(&commit)[1].previous().unwrap();
    assert_eq!(previous.bytes(), object("b", "2", 6).bytes(), "what subscribers have");
    assert!(is_new(&commit, "a") && commit.store.get("b").unwrap().version() == version(11));
    let commit = awaiting().apply(Update::Event(Deleted, object("b", "2", 11))).unwrap().unwrap();
    assert_eq!(told(&commit), [(Deleted, "b".into(), 11), (Modified, "a".into(), 5)]);
    assert!(commit.store.get("b").is_none() && commit.store.len() == 2);
}

#[test]
fn a_change_of_the_only_object_with_other_bytes_is_an_event() {
    let mut writer = CacheWriter::default();
    list(&mut writer, vec![object("a", "1", 5)], 10);
    writer.apply(Update::ListBegin { reason: RelistReason::SchemaChanged }).unwrap();
    writer.apply(Update::ListItem(reencoded("a", "1", 5))).unwrap();
    assert!(writer.apply(Update::ListEnd(version(10).end())).unwrap().is_none());
    let commit = writer.apply(Update::Event(Modified, reencoded("a", "1", 11))).unwrap().unwrap();
    assert_eq!((span(&commit), told(&commit)), (None, vec![(Modified, "a".into(), 11)]));
}

#[test]
fn a_list_of_now_replaces_an_encoding_that_waits() {
    let mut writer = awaiting();
    let commit = list(&mut writer, vec![reencoded("a", "1", 5), object("c", "3", 7)], 15);
    assert_eq!(span(&commit), Some((10, 15, true)));
    assert_eq!(told(&commit), [(Deleted, "b".into(), 6), (Modified, "a".into(), 5)]);
    assert!(!writer.awaits_version());
    let commit = list(&mut awaiting(), vec![object("a", "1", 5), object("b", "2", 6), object("c", "3", 7)], 10);
    assert!(matches!(commit.change, Change::Version), "the schema is the old one again");
}

#[test]
fn an_encoding_that_waits_comes_with_a_marked_difference() {
    let mut writer = awaiting();
    let changes = vec![ConflatedChange::Remove(ObjectKey::new("", "c"))];
    let update = Update::Conflated { reason: RelistReason::Expired, changes, version: version(15) };
    let commit = writer.apply(update).unwrap().unwrap();
    assert_eq!((is_new(&commit, "a"), is_new(&commit, "b"), commit.store.get("c").is_none()), (true, true, true));
    assert!(!writer.awaits_version());
}

#[test]
fn a_cluster_that_went_back_means_nothing_to_a_cache_without_a_state() {
    let mut writer = CacheWriter::default();
    assert!(writer.apply(Update::WentBack { reached: version(9) }).unwrap().is_none());
    list(&mut writer, vec![], 9);
}

#[test]
fn another_state_at_the_version_reached_starts_a_new_history() {
    let commit = list(&mut awaiting(), vec![reencoded("a", "1", 5)], 10);
    assert!(matches!(commit.change, Change::Start { .. }));
}

#[test]
fn a_list_at_an_older_version_starts_a_new_history() {
    let mut writer = CacheWriter::default();
    list(&mut writer, vec![object("a", "1", 5)], 10);
    assert!(matches!(list(&mut writer, vec![], 9).change, Change::Start { .. }));
    assert_eq!(writer.version(), Some(version(9).end()));
}

#[test]
fn a_list_that_contradicts_the_cache_starts_a_new_history() {
    let because = |reason: RelistReason, second: Object| {
        let mut writer = CacheWriter::default();
        list(&mut writer, vec![object("a", "1", 5), object("b", "2", 8)], 10);
        writer.apply(Update::ListBegin { reason }).unwrap();
        for object in [object("a", "1", 5), second, object("z", "9", 15)] {
            writer.apply(Update::ListItem(object)).unwrap();
        }
        match writer.apply(Update::ListEnd(version(20).end())).unwrap().unwrap().change {
            Change::Start { because } => because,
            _ => String::new(),
        }
    };
    assert_eq!(because(RelistReason::Expired, object("b", "7", 8)), "b at version 8 had uid 2, and has 7");
    assert_eq!(because(RelistReason::Expired, object("b", "2", 7)), "b was at version 8, and is listed at 7");
    assert_eq!(
        because(RelistReason::Expired, object("c", "3", 9)),
        "c is listed at version 9, and was not there at 10"
    );
    assert_eq!(because(RelistReason::SelfCheck, object("c", "3", 9)), "", "it was missed, and a gap tells it");
    for possible in [object("b", "2", 8), object("b", "7", 12), object("c", "3", 11)] {
        assert_eq!(because(RelistReason::Expired, possible), "");
    }
}

#[test]
fn after_the_cluster_went_back_a_newer_list_starts_a_new_history() {
    let mut writer = CacheWriter::default();
    list(&mut writer, vec![object("a", "1", 5)], 10);
    writer.apply(Update::WentBack { reached: version(7) }).unwrap();
    // The first try fails midway.
    writer.apply(Update::ListBegin { reason: RelistReason::Rewritten }).unwrap();
    let commit = list(&mut writer, vec![object("a", "1", 5)], 12);
    let Change::Start { because } = commit.change else { panic!("it goes on") };
    assert_eq!(because, "version 10 was sent before, and the cluster is at 7");
    let commit = list(&mut writer, vec![object("a", "1", 5)], 13);
    assert!(matches!(commit.change, Change::Record(_)), "once");
}

#[test]
fn a_repeated_or_reordered_event_is_not_passed_on() {
    let mut writer = CacheWriter::default();
    assert_eq!(writer.apply(Update::Bookmark(version(3))).err(), Some(UpdateError::NotListed));
    list(&mut writer, vec![object("a", "1", 5)], 10);
    writer.apply(Update::Event(Modified, object("a", "1", 12))).unwrap();
    assert!(writer.apply(Update::Event(Modified, object("a", "1", 12))).unwrap().is_none());
    let error = writer.apply(Update::Event(Modified, object("a", "1", 11))).err().unwrap();
    assert_eq!(error.to_string(), "upstream sent a at version 11, after version 12");
}

/// A list at the version of its start, with events in the middle of it.
#[test]
fn objects_that_change_during_a_list_keep_their_state_and_the_others_get_its_bytes() {
    let first = ["a", "b", "c", "d", "e"].into_iter().zip(5..).map(|(name, number)| object(name, "1", number));
    for parts in [None, Some(1)] {
        let mut writer = CacheWriter::default();
        list(&mut writer, first.clone().collect(), 10);
        writer.apply(Update::ListBegin { reason: RelistReason::SchemaChanged }).unwrap();
        for object in [reencoded("a", "1", 5), reencoded("b", "1", 6)] {
            writer.apply(Update::ListItem(object)).unwrap();
        }
        let changes = [
            (Modified, reencoded("b", "1", 11)),
            (Deleted, object("d", "1", 12)),
            (Deleted, object("e", "1", 13)),
            (Added, reencoded("e", "2", 14)),
            (Added, object("f", "1", 15)),
        ];
        for (kind, object) in changes {
            let commit = writer.apply(Update::Event(kind, object)).unwrap().unwrap();
            assert_eq!(told(&commit).len(), 1, "an event is passed on at once");
        }
        for object in [object("c", "1", 7), reencoded("d", "1", 8), reencoded("e", "1", 9)] {
            writer.apply(Update::ListItem(object)).unwrap();
        }
        while parts.is_some_and(|parts| writer.prepare(parts)) {}
        assert!(writer.apply(Update::ListEnd(version(10).end())).unwrap().is_none() && writer.awaits_version());
        let commit = writer.apply(Update::Bookmark(version(20))).unwrap().unwrap();
        assert_eq!(told(&commit), [(Modified, "a".into(), 5)]);
        let previous = events(&commit)[0].previous().unwrap();
        assert_eq!(previous.bytes(), object("a", "1", 5).bytes(), "what subscribers have");
        let held: Vec<_> =
            commit.store.iter().map(|o| (o.key().to_string(), o.version().get(), o.uid().to_owned())).collect();
        let expected = [("a", 5, "1"), ("b", 11, "1"), ("c", 7, "1"), ("e", 14, "2"), ("f", 15, "1")];
        assert_eq!(held, expected.map(|(name, number, uid)| (name.to_owned(), number, uid.to_owned())));
        assert!(is_new(&commit, "a") && is_new(&commit, "b") && !is_new(&commit, "c"));
    }
}

/// The list begins between two events of one version and ends after a later one.
#[test]
fn a_list_for_a_new_schema_continues_the_history_from_a_place_inside_a_version() {
    let mut writer = CacheWriter::default();
    list(&mut writer, vec![object("a", "1", 5), object("b", "2", 6), object("c", "3", 7)], 10);
    for name in ["a", "b"] {
        writer.apply(Update::Event(Deleted, object(name, "1", 12))).unwrap().unwrap();
    }
    writer.apply(Update::ListBegin { reason: RelistReason::SchemaChanged }).unwrap();
    writer.apply(Update::ListItem(reencoded("c", "3", 7))).unwrap();
    writer.apply(Update::Event(Added, object("d", "4", 13))).unwrap().unwrap();
    assert!(writer.apply(Update::ListEnd(version(12).end())).unwrap().is_none(), "it has the state of its start");
    assert!(writer.awaits_version());
}

#[test]
fn other_bytes_that_wait_are_committed_during_the_next_list_and_not_again() {
    let mut writer = awaiting();
    writer.apply(Update::ListBegin { reason: RelistReason::SchemaChanged }).unwrap();
    let commit = writer.apply(Update::Event(Modified, object("c", "3", 11))).unwrap().unwrap();
    assert_eq!(told(&commit), [(Modified, "a".into(), 5), (Modified, "b".into(), 6), (Modified, "c".into(), 11)]);
    for object in [reencoded("a", "1", 5), reencoded("b", "2", 6), reencoded("c", "3", 7)] {
        writer.apply(Update::ListItem(object)).unwrap();
    }
    assert!(writer.apply(Update::ListEnd(version(10).end())).unwrap().is_none() && !writer.awaits_version());
    let commit = writer.apply(Update::Bookmark(version(12))).unwrap().unwrap();
    assert!(told(&commit).is_empty() && is_new(&commit, "a") && !is_new(&commit, "c"));
}

#[test]
fn a_list_with_events_that_contradicts_the_state_of_its_start_leads_to_a_new_history() {
    for (listed, at) in [(vec![], 10), (vec![object("a", "1", 4)], 10), (vec![object("a", "1", 5)], 9)] {
        let mut writer = CacheWriter::default();
        list(&mut writer, vec![object("a", "1", 5)], 10);
        writer.apply(Update::ListBegin { reason: RelistReason::SchemaChanged }).unwrap();
        writer.apply(Update::Event(Added, object("b", "1", 11))).unwrap();
        for object in listed {
            writer.apply(Update::ListItem(object)).unwrap();
        }
        let differs = Some(UpdateError::Differs { version: version(at) });
        assert_eq!(writer.apply(Update::ListEnd(version(at).end())).err(), differs);
        let commit = list(&mut writer, vec![object("b", "1", 11)], 20);
        assert!(matches!(commit.change, Change::Start { .. }));
    }
}

#[test]
fn the_state_decides_whether_an_object_is_new() {
    let mut writer = CacheWriter::default();
    list(&mut writer, vec![object("a", "1", 5)], 10);
    let commit = writer.apply(Update::Event(Added, object("a", "1", 11))).unwrap().unwrap();
    assert_eq!(told(&commit), [(Modified, "a".into(), 11)]);
    let commit = writer.apply(Update::Event(Deleted, object("a", "1", 12))).unwrap().unwrap();
    assert!(commit.store.is_empty());
    assert!(writer.apply(Update::Bookmark(version(11))).unwrap().is_none());
    assert_eq!(writer.apply(Update::Bookmark(version(30))).unwrap().unwrap().version.get(), 30);
}

use std::collections::BTreeMap;

use proptest::prelude::*;

/// History of one name between two lists.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    NeverThere,
    New,
    Gone,
    Same,
    Changed,
    Remade,
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_relist_is_exactly_the_difference_between_the_two_states(
        fates in prop::collection::vec((0..6usize, 0..50u64), 0..12),
        parts in prop::option::of(1..4usize),
    ) {
        use Fate::{Changed, Gone, NeverThere, New, Remade, Same};
        let mut before = BTreeMap::new();
        let mut after = BTreeMap::new();
        for (number, (fate, order)) in (0u64..).zip(&fates) {
            let fate = [NeverThere, New, Gone, Same, Changed, Remade][*fate];
            let name = format!("n{number}");
            let old = 10 + number;
            let new = 100 + 100 * order + number;
            let was = (!matches!(fate, NeverThere | New)).then_some(("1", old));
            let is = match fate {
                NeverThere | Gone => None,
                Same => was,
                New | Changed => Some(("1", new)),
                Remade => Some(("2", new)),
            };
            was.map(|was| before.insert(name.clone(), was));
            is.map(|is| after.insert(name, is));
        }
        let all = |state: &BTreeMap<String, (&str, u64)>| -> Vec<_> {
            state.iter().map(|(name, (uid, version))| object(name, uid, *version)).collect()
        };
        let mut writer = CacheWriter::default();
        list(&mut writer, all(&before), 90);
        writer.apply(Update::ListBegin { reason: RelistReason::Expired }).unwrap();
        for object in all(&after) {
            writer.apply(Update::ListItem(object)).unwrap();
        }
        while parts.is_some_and(|parts| writer.prepare(parts)) {}
        let commit = writer.apply(Update::ListEnd(version(10_000).end())).unwrap().unwrap();
        let events = events(&commit);
        let mut state = before.clone();
        let mut last = None;
        let mut count = BTreeMap::new();
        for event in &events {
            let name = event.object().key().to_string();
            let object = event.object();
            let held = state.get(&name).copied();
            let previous = event.previous();
            let previous = previous.as_deref().map(|previous| (previous.uid(), previous.version().get()));
            prop_assert_eq!(previous, held, "what was there before {}", name);
            let now = (if object.uid() == "1" { "1" } else { "2" }, object.version().get());
            match event.kind() {
                Deleted => {
                    prop_assert_eq!((held, last), (Some(now), None), "deletes come first, of what was there");
                    state.remove(&name);
                }
                kind => {
                    prop_assert!(last < Some(event.version()), "changes come in the order of versions");
                    prop_assert_eq!(kind == Added, held.is_none());
                    last = Some(event.version());
                    state.insert(name.clone(), now);
                }
            }
            *count.entry(name).or_insert(0) += 1;
        }
        let held = commit.store.iter().map(|o| (o.key().to_string(), o.version().get())).collect::<Vec<_>>();
        prop_assert_eq!(held, after.iter().map(|(name, (_, version))| (name.clone(), *version)).collect::<Vec<_>>());
        prop_assert_eq!(&state, &after);
        for (number, (fate, _)) in fates.iter().enumerate() {
            let told = count.get(&format!("n{number}")).copied().unwrap_or(0);
            prop_assert_eq!(told, [0, 1, 1, 0, 1, 2][*fate], "n{}", number);
        }
    }
}

#[test]
fn several_changes_at_one_version_have_places_in_it() {
    let mut writer = CacheWriter::default();
    list(&mut writer, vec![object("a", "1", 5), object("b", "2", 6), object("c", "3", 7)], 10);
    let mut places = Vec::new();
    for update in [
        Update::Event(Deleted, object("a", "1", 12)),
        Update::Event(Deleted, object("b", "2", 12)),
        Update::Bookmark(version(12)),
        Update::Event(Modified, object("c", "3", 12)),
        Update::Event(Added, object("d", "4", 13)),
    ] {
        places.extend(writer.apply(update).unwrap().map(|commit| (told(&commit), commit.version.to_string())));
    }
    let expected = [
        (vec![(Deleted, "a".to_owned(), 12)], "12".to_owned()),
        (vec![(Deleted, "b".to_owned(), 12)], "12.1".to_owned()),
        (vec![(Modified, "c".to_owned(), 12)], "12.2".to_owned()),
        (vec![(Added, "d".to_owned(), 13)], "13".to_owned()),
    ];
    assert_eq!(places, expected);
}

#[test]
fn a_watch_from_below_the_version_reached_adds_only_missing_events() {
    let mut writer = CacheWriter::default();
    list(&mut writer, vec![object("a", "1", 5), object("b", "2", 6), object("c", "3", 7)], 10);
    writer.apply(Update::Event(Deleted, object("a", "1", 12))).unwrap().unwrap();
    writer.apply(Update::Event(Modified, object("b", "2", 12))).unwrap().unwrap();
    // The watch breaks, and the next one sends all of version 12.
    assert!(writer.apply(Update::Event(Deleted, object("a", "1", 12))).unwrap().is_none());
    assert!(writer.apply(Update::Event(Modified, object("b", "2", 12))).unwrap().is_none());
    let commit = writer.apply(Update::Event(Deleted, object("c", "3", 12))).unwrap().unwrap();
    assert_eq!(commit.version.to_string(), "12.2");
    assert_eq!(commit.store.iter().map(|object| object.key().to_string()).collect::<Vec<_>>(), ["b"]);
    // An object has one change at a version, and versions never decrease.
    for update in [(Deleted, object("b", "2", 12)), (Modified, object("b", "2", 11)), (Deleted, object("z", "9", 11))] {
        let error = writer.apply(Update::Event(update.0, update.1)).err().unwrap();
        assert!(matches!(error, UpdateError::OutOfOrder { .. }), "{error}");
    }
}

#[test]
fn a_list_between_the_changes_at_one_version_brings_the_rest_as_a_gap() {
    let after_one = || {
        let mut writer = CacheWriter::default();
        list(&mut writer, vec![object("a", "1", 5), object("b", "2", 6), object("c", "3", 7)], 10);
        writer.apply(Update::Event(Deleted, object("a", "1", 12))).unwrap().unwrap();
        writer
    };
    let mut writer = after_one();
    let commit = list(&mut writer, vec![object("c", "3", 12), object("d", "4", 12)], 12);
    assert_eq!(commit.version, version(12).end(), "places of what the watch has not brought are unknown");
    assert_eq!(told(&commit), [(Deleted, "b".into(), 6), (Modified, "c".into(), 12), (Added, "d".into(), 12)]);
    assert!(writer.apply(Update::Event(Deleted, object("b", "2", 12))).unwrap().is_none(), "the list had it");
    // A difference that is no change at this version contradicts it.
    let other = list(&mut after_one(), vec![object("b", "2", 6), object("c", "3", 8)], 12);
    assert!(matches!(other.change, Change::Start { .. }));
    let mut complete = after_one();
    complete.apply(Update::Bookmark(version(12).end())).unwrap();
    let differs = list(&mut complete, vec![object("b", "2", 6)], 12);
    assert!(matches!(differs.change, Change::Start { .. }), "nothing more could come at this version");
    let repeated = list(&mut after_one(), vec![object("b", "2", 6), object("c", "3", 7)], 12);
    assert!(matches!(repeated.change, Change::Version));
}

#[test]
fn a_list_of_a_kubefan_that_has_a_part_of_the_version_reached_is_refused() {
    let mut writer = CacheWriter::default();
    list(&mut writer, vec![object("c", "3", 7)], 12);
    let part = |writer: &mut CacheWriter, objects: Vec<Object>| {
        writer.apply(Update::ListBegin { reason: RelistReason::Expired }).unwrap();
        for object in objects {
            assert!(writer.apply(Update::ListItem(object)).unwrap().is_none());
        }
        writer.apply(Update::ListEnd(version(12)))
    };
    let differs = part(&mut writer, vec![object("b", "2", 6), object("c", "3", 7)]);
    assert_eq!(differs.err(), Some(UpdateError::Differs { version: version(12) }));
    let commit = part(&mut writer, vec![object("c", "3", 7)]).unwrap().unwrap();
    assert_eq!((commit.version, commit.store.len()), (version(12).end(), 1));
    assert!(matches!(commit.change, Change::Version));
}
