use std::{
    collections::BTreeMap,
    num::NonZeroU64,
    ops::Bound,
    time::{Duration, SystemTime},
};

use kubefan_model::{
    GroupVersionResource,
    event::EventType,
    fields::FieldTable,
    selection::Selection,
    selector::{FieldSelector, LabelSelector},
};
use proptest::prelude::*;
use tokio::time::Instant;

use super::*;
use crate::{
    CacheWriter, CachedState, PriorStep, PublishedCache, RelistReason, RingLimits, Update, columns::COLUMNS_MAX,
};

const LIMITS: RingLimits = RingLimits {
    ring_bytes_max: Some(1 << 20),
    ring_events_max: 6,
    ring_age_max: Duration::from_secs(3600),
    conflated_bytes_max: Some(6000),
};

struct Pods {
    gvr: GroupVersionResource,
    table: FieldTable,
    parser: Arc<ObjectParser>,
    cache: PublishedCache,
    writer: CacheWriter,
    /// The state at each version.
    states: BTreeMap<ResourceVersion, Store>,
}

impl Pods {
    fn new() -> Self {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let table = FieldTable::new(&gvr, true, &[]);
        let parser = Arc::new(ObjectParser::new(&table));
        let cache = PublishedCache::new(
            "pods".to_owned(),
            LIMITS,
            parser.clone(),
            || SystemTime::UNIX_EPOCH,
            Budget::alone(1 << 20).share(),
        );
        Self { gvr, table, parser, cache, writer: CacheWriter::default(), states: BTreeMap::new() }
    }

    fn select(&self, namespace: &str, labels: &str, fields: &str) -> Selection {
        let labels = LabelSelector::parse(labels).unwrap();
        let fields = FieldSelector::parse(fields).unwrap();
        Selection::bind(namespace, "", labels, &fields, &self.table, self.parser.clone(), &self.gvr).unwrap()
    }

    fn pod(&self, number: usize, app: usize, node: usize, uid: usize, version: u64) -> Object {
        let labels = ["", r#""app":"web""#, r#""app":"db""#][app];
        let namespace = number % 2;
        let json = format!(
            r#"{{"metadata":{{"namespace":"ns{namespace}","name":"p{number}","uid":"u{uid}","resourceVersion":"{version}","labels":{{{labels}}}}},"spec":{{"nodeName":"n{node}"}}}}"#
        );
        self.parser.parse(json.as_bytes()).unwrap()
    }

    fn apply(&mut self, update: Update, now: Instant) {
        if let Some(commit) = self.writer.apply(update).unwrap() {
            self.states.insert(commit.version, commit.store.clone());
            self.cache.apply(commit, now, 1.0);
        }
    }

    fn list(&mut self, pods: impl Iterator<Item = Object>, version: u64, now: Instant) {
        self.apply(Update::ListBegin { reason: RelistReason::Expired }, now);
        for pod in pods {
            self.apply(Update::ListItem(pod), now);
        }
        self.apply(Update::ListEnd(ResourceVersion::new(version).unwrap()), now);
    }

    fn state(&self) -> &CachedState {
        self.cache.state().unwrap()
    }

    /// Returns the uid of each object that a selection saw at a version, as a catch-up finds it.
    fn found_at(&self, from: ResourceVersion, selection: &Selection) -> BTreeMap<String, String> {
        let CachedState { store, history, .. } = self.state();
        let mut was: BTreeMap<_, _> =
            members(store, selection).into_iter().map(|(key, uid)| (key, Some(uid))).collect();
        let mut up_to = Bound::Unbounded;
        loop {
            let (part, rest) = history.prior_steps(from, up_to, 3, selection).unwrap();
            let before = part.into_iter().flat_map(|step| match step {
                PriorStep::Object(PriorState { key, before, .. }) => vec![(key, before)],
                PriorStep::Gap(gap) => {
                    let seen =
                        gap.select(selection, 0).map(|(_, event, _)| (event.object().key().clone(), event.previous()));
                    seen.collect::<Vec<_>>().into_iter().rev().collect()
                }
            });
            for (key, before) in before {
                let uid = before.filter(|before| selection.matches(before)).map(|before| before.uid().to_owned());
                was.insert(key.to_string(), uid);
            }
            match rest {
                Some(rest) => up_to = Bound::Excluded(rest),
                None => break,
            }
        }
        was.into_iter().filter_map(|(key, uid)| Some((key, uid?))).collect()
    }

    /// Compares reads through the index with the real state.
    fn check(&self, selection: &Selection) -> Result<(), TestCaseError> {
        let CachedState { store, history, .. } = self.state();
        let selected: Vec<_> = store.select(selection, None).map(|object| object.key().to_string()).collect();
        let expected: Vec<_> = members(store, selection).into_keys().collect();
        prop_assert_eq!(&selected, &expected);
        for last in store.iter() {
            let rest = store.select(selection, Some(last.key())).map(|object| object.key().clone());
            let expected = store.after(Some(last.key())).filter(|object| selection.matches(object));
            prop_assert!(rest.eq(expected.map(|object| object.key().clone())), "after {}", last.key());
        }
        let mut sliced = Vec::new();
        let mut last = None;
        loop {
            let mut scan = store.scan(selection, last.as_ref(), 3);
            sliced.extend(scan.by_ref().map(|object| object.key().to_string()));
            if scan.is_complete() {
                break;
            }
            last = scan.tested().cloned();
        }
        prop_assert_eq!(sliced, expected, "in slices");
        for (from, state) in &self.states {
            if !history.can_resume_from(*from, *from) {
                continue;
            }
            prop_assert_eq!(self.found_at(*from, selection), members(state, selection), "catch-up from {}", from);
            if *from >= history.ring().floor() {
                let sees = |record: &&HistoryRecord| match record {
                    HistoryRecord::Gap(_) => true,
                    HistoryRecord::Event(event) => event.transition(selection).is_some(),
                };
                let found = history.since(*from, selection).unwrap().filter(sees).map(HistoryRecord::version);
                let expected = history.ring().since(*from).unwrap().filter(sees).map(HistoryRecord::version);
                prop_assert_eq!(found.collect::<Vec<_>>(), expected.collect::<Vec<_>>(), "log from {}", from);
            }
        }
        Ok(())
    }
}

fn members(store: &Store, selection: &Selection) -> BTreeMap<String, String> {
    let selected = store.iter().filter(|object| selection.matches(object));
    selected.map(|object| (object.key().to_string(), object.uid().to_owned())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_index_that_is_built_while_the_cache_changes_finds_what_a_scan_finds(
        changes in prop::collection::vec((0..7usize, (0..3usize, 0..3usize, 0..2usize), 0..12usize), 1..60),
        starts in 0..30usize,
        parts in prop::collection::vec(0..4usize, 60),
        term in 0..6usize,
    ) {
        let mut pods = Pods::new();
        let now = Instant::now();
        let first: Vec<_> = (0..5).map(|number| pods.pod(number, number % 3, number % 2, 0, 1 + number as u64)).collect();
        pods.list(first.into_iter(), 10, now);
        let (namespace, labels, fields) = [
            ("", "app=web", ""),
            ("", "app in (web,db)", ""),
            ("ns1", "app=db", ""),
            ("", "", "spec.nodeName=n1"),
            ("", "app!=db", "spec.nodeName=n1"),
            ("ns0", "", ""),
        ][term];
        let selection = pods.select(namespace, labels, fields);
        let mut build = None;
        let mut version = 10;
        let mut is_installed = false;
        for (at, (number, (app, node, uid), what)) in changes.into_iter().enumerate() {
            version += 10;
            let exists = pods.state().store.iter().find(|object| object.key().name() == format!("p{number}")).cloned();
            match what {
                // Another list, with one other object.
                0 => {
                    let kept = pods.state().store.iter().filter(|object| object.key().name() != format!("p{number}"));
                    let kept: Vec<_> = kept.map(|object| pods.parser.parse(&object.bytes()).unwrap()).collect();
                    let changed = pods.pod(number, app, node, uid, version - 5);
                    pods.list(kept.into_iter().chain([changed]), version, now);
                }
                1..=3 if let Some(exists) = exists => {
                    let last = exists.bytes_at(ResourceVersion::new(version).unwrap());
                    let last = pods.parser.parse(&last).unwrap();
                    pods.apply(Update::Event(EventType::Deleted, last), now);
                }
                _ => {
                    // An object keeps its uid while it exists.
                    let uid = exists.as_ref().map_or(uid, |exists| usize::from(exists.uid() == "u1"));
                    let changed = pods.pod(number, app, node, uid, version);
                    let kind = if exists.is_some() { EventType::Modified } else { EventType::Added };
                    pods.apply(Update::Event(kind, changed), now);
                }
            }
            if at >= starts && !is_installed && build.is_none() {
                pods.cache.used(&selection, None, now);
                build = pods.cache.used(&selection, None, now);
            }
            for _ in 0..parts[at] {
                let Some(mut next) = build.take() else { break };
                match next.next() {
                    NextPart::Work => next.work(),
                    NextPart::History => pods.cache.copy_for(&mut next).unwrap(),
                    NextPart::Install => {
                        pods.cache.install(&next.column().clone(), Some(next), Instant::now());
                        is_installed = pods.state().history.steps().of(&selection).is_some();
                        continue;
                    }
                }
                build = Some(next);
            }
            pods.check(&selection)?;
        }
    }
}

#[test]
fn a_selection_with_an_indexed_term_reads_only_its_objects_and_its_records() {
    let mut pods = Pods::new();
    let now = Instant::now();
    let first: Vec<_> = (0..100).map(|number| pods.pod(number, 0, number, 0, 1 + number as u64)).collect();
    pods.list(first.into_iter(), 1000, now);
    let selection = pods.select("", "", "spec.nodeName=n7");
    assert!(pods.cache.used(&selection, None, now).is_none());
    let mut build = pods.cache.used(&selection, None, now).unwrap();
    loop {
        match build.next() {
            NextPart::Work => build.work(),
            NextPart::History => pods.cache.copy_for(&mut build).unwrap(),
            NextPart::Install => break,
        }
    }
    pods.cache.install(&build.column().clone(), Some(build), Instant::now());
    for number in 5..10 {
        let changed = pods.pod(number, 1, number, 0, 1001 + number as u64);
        pods.apply(Update::Event(EventType::Modified, changed), now);
    }
    let CachedState { store, history, .. } = pods.state();
    let all = (Bound::Unbounded, Bound::Unbounded);
    let keys: Vec<_> = store.postings().candidates(&selection, &all).unwrap().map(ObjectKey::to_string).collect();
    assert_eq!(keys, ["ns1/p7"]);
    let from = ResourceVersion::new(1000).unwrap();
    let versions: Vec<_> = history.since(from, &selection).unwrap().map(|record| record.version().get()).collect();
    assert_eq!(versions, [1008]);
    let (steps, rest) = history.prior_steps(from, Bound::Unbounded, 10, &selection).unwrap();
    assert_eq!((steps.len(), rest), (1, None));
    pods.cache.drop_unused_indexes(std::iter::empty(), now + Duration::from_secs(24 * 3600));
    assert!(pods.state().store.postings().is_empty() && pods.state().history.steps().of(&selection).is_none());
}

/// Builds the index of a selection up to its last part.
fn built(pods: &mut Pods, selection: &Selection, now: Instant) -> ColumnBuild {
    let mut build = None;
    while build.is_none() {
        build = pods.cache.used(selection, None, now);
    }
    let mut build = build.unwrap();
    loop {
        match build.next() {
            NextPart::Work => build.work(),
            NextPart::History => pods.cache.copy_for(&mut build).unwrap(),
            NextPart::Install => return build,
        }
    }
}

#[test]
fn the_indexed_term_with_the_fewest_keys_is_used() {
    let mut pods = Pods::new();
    let now = Instant::now();
    // Half of the pods are on each node, and three have the label.
    let pod = |pods: &Pods, number: usize, version| pods.pod(number, usize::from(number < 3), number % 2, 0, version);
    let first: Vec<_> = (0..100).map(|number| pod(&pods, number, 1 + number as u64)).collect();
    pods.list(first.into_iter(), 1000, now);
    for (labels, fields) in [("app=web", ""), ("", "spec.nodeName=n0")] {
        let selection = pods.select("", labels, fields);
        let build = built(&mut pods, &selection, now);
        pods.cache.install(&build.column().clone(), Some(build), now);
    }
    for number in 0..6 {
        let changed = pod(&pods, number, 1001 + number as u64);
        pods.apply(Update::Event(EventType::Modified, changed), now);
    }
    let all = (Bound::Unbounded, Bound::Unbounded);
    let both = pods.select("", "app=web", "spec.nodeName=n0");
    let node = pods.select("", "app!=db", "spec.nodeName=n0");
    for (selection, keys, records) in [(both, 3, 3), (node, 50, 3)] {
        let CachedState { store, history, .. } = pods.state();
        assert_eq!(store.postings().candidates(&selection, &all).unwrap().count(), keys);
        let from = ResourceVersion::new(1000).unwrap();
        assert_eq!(history.since(from, &selection).unwrap().count(), records);
        pods.check(&selection).unwrap();
    }
}

#[test]
fn an_index_that_is_complete_under_memory_pressure_is_not_installed() {
    let mut pods = Pods::new();
    let now = Instant::now();
    let first: Vec<_> = (0..10).map(|number| pods.pod(number, 1, number, 0, 1 + number as u64)).collect();
    pods.list(first.into_iter(), 1000, now);
    let selection = pods.select("", "", "spec.nodeName=n7");
    let build = built(&mut pods, &selection, now);
    pods.cache.open_indexes(false);
    pods.cache.install(&build.column().clone(), Some(build), now);
    let state = pods.state();
    assert!(state.store.postings().is_empty() && state.history.steps().of(&selection).is_none());
    assert_eq!(state.history.steps().sizes().count(), 0, "nor does a half of it stay");
    pods.cache.open_indexes(true);
    let build = built(&mut pods, &selection, now);
    pods.cache.install(&build.column().clone(), Some(build), now);
    assert!(!pods.state().store.postings().is_empty());
}

#[test]
fn a_column_that_is_replaced_is_no_longer_indexed() {
    let mut pods = Pods::new();
    let now = Instant::now();
    let pod = pods.pod(0, 1, 0, 0, 1);
    pods.list(std::iter::once(pod), 10, now);
    for key in 0..COLUMNS_MAX {
        let selection = pods.select("", &format!("key-{key}=x"), "");
        let build = built(&mut pods, &selection, now);
        pods.cache.install(&build.column().clone(), Some(build), now);
    }
    let columns = |pods: &Pods| {
        let CachedState { store, history, .. } = pods.state();
        (store.postings().sizes().count(), history.steps().sizes().count())
    };
    assert_eq!(columns(&pods), (COLUMNS_MAX, COLUMNS_MAX));
    let other = pods.select("", "app=web", "");
    let tenant = NonZeroU64::new(1);
    assert!(pods.cache.used(&other, tenant, now).is_none());
    let build = pods.cache.used(&other, tenant, now).unwrap();
    // The steps of the new one are filed from the start of its build.
    assert_eq!(columns(&pods), (COLUMNS_MAX - 1, COLUMNS_MAX));
    assert_eq!(*build.column(), Column::Label("app".into()));
    pods.check(&other).unwrap();
}
