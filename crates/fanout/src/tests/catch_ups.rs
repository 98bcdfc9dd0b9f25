//! Resumes from versions that the ring has evicted: catch-ups, restarts, and expired versions.

use std::collections::BTreeMap;

use kubefan_cache::{Backfill, Budgets, EventRing, HistoryRecord, OnExpired, OnLag};
use kubefan_model::{
    event::WatchEvent,
    format::Encoding,
    projection::{Parts, Projection},
};
use proptest::prelude::*;

use super::*;
use crate::{NotSubscribed, Provided, ProvidedBackfill, SubscribeOptions};

fn options(start: Start, on_lag: OnLag, on_expired: OnExpired) -> SubscribeOptions {
    SubscribeOptions { on_lag, on_expired, ..start.into() }
}

fn conflate(start: Start) -> SubscribeOptions {
    options(start, OnLag::Conflate, OnExpired::Fail)
}

fn restart(start: Start) -> SubscribeOptions {
    options(start, OnLag::Expire, OnExpired::Restart)
}

impl Cache {
    /// A ring of four records, and a conflated history without a limit in practice.
    fn with_conflated_history() -> Self {
        Self::within(RingLimits { conflated_bytes_max: Some(1 << 20), ..LIMITS })
    }

    fn with(&self, labels: &str, options: SubscribeOptions) -> Result<Subscription, Refusal> {
        self.hub.subscribe(
            self.select(labels),
            Format::default(),
            options,
            StreamWaker::new(&ConnectionWaker::new(), 0),
        )
    }

    /// Resumes after version 5, which only the backfill has.
    pub(super) fn with_backfill(&self, format: Format, backfill: Backfill) -> Result<Subscription, NotSubscribed> {
        let waker = Arc::new(StreamWaker::new(&ConnectionWaker::new(), 0));
        let permit = Some(Arc::new(self.hub.gate().try_acquire(None).unwrap()));
        let backfill = ProvidedBackfill::Read(Arc::new(backfill));
        let mut provided = Provided { backfill, permit, ..Provided::default() };
        self.hub.try_subscribe(&self.select(""), &format, &Start::Resume(version(5)).into(), &mut provided, &waker)
    }

    fn objects(&mut self, events: &[(EventType, &str, &str, u64)]) {
        for (kind, name, app, at) in events {
            self.event(*kind, name, app, *at);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn below_the_ring_each_changed_object_is_sent_once_to_any_selector() {
    let mut cache = Cache::with_conflated_history();
    cache.list(&[("a", "web", 5), ("b", "web", 6), ("c", "db", 7), ("d", "web", 8), ("e", "web", 9)], 10);
    cache.objects(&[
        (Modified, "a", "db", 11),
        (Deleted, "b", "web", 12),
        (Modified, "c", "web", 13),
        (Modified, "d", "web", 14),
        (Added, "f", "web", 15),
        (Deleted, "f", "web", 16),
        (Modified, "c", "db", 17),
        (Modified, "c", "web", 18),
        (Modified, "z", "other", 19),
    ]);
    assert_eq!(
        ready(&mut cache.after("app=web", 10).unwrap()).await,
        ["catch-up from 10", "<a@5", "?b@6", "+c@18", "~d@14", "end of catch-up (19)"],
        "what came and went in between is not told"
    );
    assert_eq!(
        ready(&mut cache.after("app=db", 10).unwrap()).await,
        ["catch-up from 10", "<c@7", "+a@11", "end of catch-up (19)"]
    );
    assert_eq!(ready(&mut cache.after("app=none", 10).unwrap()).await, ["catch-up from 10", "end of catch-up (19)"]);
    let mut live = cache.after("app=web", 12).unwrap();
    cache.event(Modified, "e", "web", 20);
    assert_eq!(
        ready(&mut live).await,
        ["catch-up from 12", "+c@18", "~d@14", "end of catch-up (19)", "~e@20 (20)"],
        "and then the log, without a hole"
    );
}

#[tokio::test(start_paused = true)]
async fn a_deleted_object_is_sent_with_its_selectable_attributes() {
    let mut cache = Cache::with_conflated_history();
    cache.list(&[("a", "web", 5)], 10);
    cache.event(Deleted, "a", "web", 11);
    for at in 12..=20 {
        cache.event(Modified, "z", "other", at);
    }
    let messages = messages(&mut cache.after("app=web", 10).unwrap()).await;
    let Some(watch_response::Message::Event(gone)) = &messages[1].message else { panic!("no event") };
    let json: serde_json::Value = serde_json::from_slice(&gone.object).unwrap();
    let left = serde_json::json!({
        "kind": "Pod", "apiVersion": "v1",
        "metadata": {"name": "a", "namespace": "ns", "uid": "a", "resourceVersion": "5", "labels": {"app": "web"}},
    });
    assert_eq!(json, left);
}

#[tokio::test(start_paused = true)]
async fn below_the_conflated_history_a_version_is_expired() {
    let mut cache = Cache::new();
    cache.list(&[], 10);
    for at in 11..40 {
        cache.event(if at % 2 == 0 { Deleted } else { Added }, "a", "web", at);
    }
    let oldest = cache.hub.status().oldest.unwrap();
    assert!(version(10) < oldest && oldest < version(35), "{oldest}");
    let expired = cache.after("", 10).err().unwrap();
    assert_eq!(expired.to_string(), format!("too old resource version: 10 ({oldest})"));
    assert_eq!(ready(&mut cache.after("", oldest.get()).unwrap()).await[0], format!("catch-up from {oldest}"));
    let over = cache.with("", restart(Start::Resume(version(10)))).unwrap();
    assert_eq!(ready(&mut { over }).await, ["snapshot@39 for 10", "+a@39", "end of 1 (39)"]);
}

#[tokio::test(start_paused = true)]
async fn a_lagging_subscriber_continues_as_it_asked() {
    let mut cache = Cache::with_conflated_history();
    cache.list(&[("a", "web", 5), ("b", "web", 6)], 10);
    let [mut conflates, mut restarts, mut expires] =
        [conflate(Start::Snapshot), restart(Start::Snapshot), Start::Snapshot.into()]
            .map(|options| cache.with("", options).unwrap());
    for each in [&mut conflates, &mut restarts, &mut expires] {
        assert_eq!(ready(each).await.len(), 4);
    }
    cache.event(Deleted, "b", "web", 11);
    for at in 12..=20 {
        cache.event(Modified, "a", "web", at);
    }
    assert_eq!(ready(&mut conflates).await, ["catch-up from 10", "?b@6", "~a@20", "end of catch-up (20)"]);
    assert_eq!(ready(&mut restarts).await, ["snapshot@20 for 10", "+a@20", "end of 1 (20)"]);
    assert_eq!(expires.next().await.unwrap_err().to_string(), "too old resource version: 10 (16)");
    cache.event(Modified, "a", "web", 21);
    for each in [&mut conflates, &mut restarts] {
        assert_eq!(ready(each).await, ["~a@21 (21)"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_subscriber_that_lags_inside_a_gap_is_not_sent_a_catch_up() {
    let mut cache = Cache::with_conflated_history();
    cache.list(&[("a", "web", 5)], 10);
    let start = Start::Resume(version(10));
    let mut fails = cache.with("", conflate(start)).unwrap();
    let mut restarts = cache.with("", options(start, OnLag::Conflate, OnExpired::Restart)).unwrap();
    cache.list(&[("a", "web", 5), ("b", "web", 15), ("c", "web", 16)], 20);
    for each in [&mut fails, &mut restarts] {
        let part = each.take(1).unwrap().unwrap();
        assert!(decode(part).iter().all(|message| message.resume_version.is_empty()), "the gap has not ended");
    }
    // The subscriber may have received b, which history does not know at version 10.
    cache.event(Deleted, "b", "web", 21);
    for at in 22..=30 {
        cache.event(Modified, "a", "web", at);
    }
    let mut lines = ready(&mut restarts).await;
    lines.retain(|line| !line.contains("gap"));
    assert!(
        lines.ends_with(&["snapshot@30 for 10", "+a@30", "+c@16", "end of 2 (30)"].map(str::to_owned)),
        "{lines:?}"
    );
    let end = loop {
        if let Err(end) = fails.next().await {
            break end;
        }
    };
    assert!(matches!(end, StreamEnd::Expired(_)), "{end}");
}

#[tokio::test(start_paused = true)]
async fn a_version_inside_a_gap_is_expired_after_the_ring_evicted_the_gap() {
    let mut cache = Cache::with_conflated_history();
    cache.list(&[("a", "web", 5)], 10);
    cache.list(&[("a", "web", 5), ("b", "web", 15)], 20);
    for at in 21..=30 {
        cache.event(Modified, "a", "web", at);
    }
    assert_eq!(
        ready(&mut cache.after("", 10).unwrap()).await,
        ["catch-up from 10", "~a@30", "+b@15", "end of catch-up (30)"]
    );
    let Err(Refusal::Expired(expired)) = cache.after("", 17) else { panic!("something leads on from inside a gap") };
    assert_eq!(expired.to_string(), "too old resource version: 17 (20)", "where the gap ends something does");
    assert_eq!(ready(&mut cache.after("", 20).unwrap()).await, ["catch-up from 20", "~a@30", "end of catch-up (30)"]);
}

#[tokio::test(start_paused = true)]
async fn a_catch_up_never_continues_in_another_history() {
    let mut cache = Cache::with_conflated_history();
    cache.list(&[("a", "web", 5)], 10);
    let mut slow = cache.with("", conflate(Start::Snapshot)).unwrap();
    ready(&mut slow).await;
    for at in 11..=20 {
        cache.event(Modified, "a", "web", at);
    }
    cache.list(&[("x", "web", 3)], 7);
    let end = slow.next().await.unwrap_err();
    assert!(matches!(end, StreamEnd::Rewritten(_)), "{end}");
}

#[tokio::test(start_paused = true)]
async fn a_backfill_ends_with_a_version_to_resume_from() {
    let mut cache = Cache::with_conflated_history();
    cache.list(&[("a", "web", 5)], 10);
    let epoch = cache.hub.position().unwrap().epoch;
    let share = Budgets::default().backfills.share();
    let backfill =
        Backfill { epoch, ring: EventRing::new(LIMITS, version(5)), reached: version(10), has_state: true, share };
    let mut back = cache.with_backfill(Format::default(), backfill).unwrap();
    for at in 11..=20 {
        cache.event(Modified, "a", "web", at);
    }
    let mut lines = ready(&mut back).await;
    assert_eq!(lines.remove(0), "bookmark (10)", "else a mark that follows would begin where it never was");
}

#[tokio::test(start_paused = true)]
async fn a_backfill_without_state_is_sent_in_formats_that_have_only_changes() {
    let mut cache = Cache::with_conflated_history();
    cache.list(&[("a", "web", 8)], 10);
    let epoch = cache.hub.position().unwrap().epoch;
    let mut ring = EventRing::new(LIMITS, version(5));
    let object = Arc::new(cache.object("a", "web", 8));
    let event = WatchEvent::new(Modified, version(8), object.clone(), Some(object));
    ring.push(HistoryRecord::Event(Arc::new(event)), Instant::now());
    let share = Budgets::default().backfills.share();
    let backfill = Backfill { epoch, ring, reached: version(10), has_state: false, share };
    let labels = Projection::new(Parts::Fields(&["metadata.labels".to_owned()]), false, false).unwrap();
    let format = Format::new(labels, true, Encoding::Json).unwrap();
    let mut back = cache.with_backfill(format, backfill).unwrap();
    assert_eq!(ready(&mut back).await, ["~a@8 (8)", "bookmark (10)"], "what was there before is not known");
}

/// One step of a random history.
#[derive(Debug, Clone)]
enum Op {
    Put(u8, u8),
    Delete(u8),
    /// The next changes are found by a list only.
    Relist(Vec<(u8, Option<u8>)>),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let relist = prop::collection::vec((0..6u8, prop::option::of(0..3u8)), 0..4);
    let op = prop_oneof![
        6 => (0..6u8, 0..3u8).prop_map(|(name, app)| Op::Put(name, app)),
        3 => (0..6u8).prop_map(Op::Delete),
        1 => relist.prop_map(Op::Relist),
    ];
    prop::collection::vec(op, 1..40)
}

const APPS: [&str; 3] = ["web", "db", "other"];

/// A subscriber's state: name to uid and version.
type State = BTreeMap<String, (String, u64)>;

/// A cluster whose state is known at every version.
struct World {
    cache: Cache,
    now: BTreeMap<u8, (String, u8, u64)>,
    at: u64,
    made: u64,
    states: BTreeMap<u64, BTreeMap<u8, (String, u8, u64)>>,
    inside_gaps: Vec<u64>,
}

impl World {
    fn new() -> Self {
        let mut cache = Cache::with_conflated_history();
        cache.list(&[], 10);
        let states = BTreeMap::from([(10, BTreeMap::new())]);
        Self { cache, now: BTreeMap::new(), at: 10, made: 0, states, inside_gaps: Vec::new() }
    }

    fn object(&self, name: u8) -> Object {
        let (uid, app, at) = &self.now[&name];
        let json = format!(
            r#"{{"metadata":{{"name":"n{name}","namespace":"ns","uid":"{uid}","resourceVersion":"{at}","labels":{{"app":"{}"}}}}}}"#,
            APPS[*app as usize]
        );
        self.cache.parser.parse(json.as_bytes()).unwrap()
    }

    fn write(&mut self, name: u8, app: Option<u8>) -> Option<(EventType, Object)> {
        let known = self.now.contains_key(&name);
        let (kind, object) = match app {
            Some(app) => {
                self.at += 1;
                self.made += u64::from(!known);
                let uid = self.now.get(&name).map_or(format!("u{}", self.made), |(uid, ..)| uid.clone());
                self.now.insert(name, (uid, app, self.at));
                (if known { Modified } else { Added }, self.object(name))
            }
            None if !known => return None,
            None => {
                self.at += 1;
                self.now.get_mut(&name).unwrap().2 = self.at;
                let object = self.object(name);
                self.now.remove(&name);
                (Deleted, object)
            }
        };
        self.states.insert(self.at, self.now.clone());
        Some((kind, object))
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Put(name, app) => {
                let (kind, object) = self.write(name, Some(app)).unwrap();
                self.cache.apply(Update::Event(kind, object));
            }
            Op::Delete(name) => {
                if let Some((kind, object)) = self.write(name, None) {
                    self.cache.apply(Update::Event(kind, object));
                }
            }
            Op::Relist(writes) => {
                let from = self.at;
                for (name, app) in writes {
                    self.write(name, app);
                }
                self.inside_gaps.extend(from + 1..self.at);
                self.cache.apply(Update::ListBegin { reason: RelistReason::Expired });
                let names: Vec<_> = self.now.keys().copied().collect();
                for name in names {
                    self.cache.apply(Update::ListItem(self.object(name)));
                }
                self.cache.apply(Update::ListEnd(version(self.at)));
            }
        }
    }

    fn state(&self, at: u64, app: &str) -> State {
        let selected = self.states[&at].iter().filter(|(_, (_, of, _))| app.is_empty() || APPS[*of as usize] == app);
        selected.map(|(name, (uid, _, at))| (format!("n{name}"), (uid.clone(), *at))).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Filtered and convergent: from any version and for any selection, a subscriber is sent
    /// exactly the changes that lead from its state at that version to its state now.
    #[test]
    fn from_every_version_a_subscriber_reaches_the_current_state(ops in ops()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let mut world = World::new();
            for op in ops {
                world.apply(op);
            }
            for app in ["", "web", "db"] {
                let labels = if app.is_empty() { String::new() } else { format!("app={app}") };
                for from in 10..=world.at {
                    let mut back = match world.cache.after(&labels, from) {
                        Ok(back) => back,
                        Err(refusal) => {
                            assert!(world.inside_gaps.contains(&from), "{from}: {refusal}");
                            continue;
                        }
                    };
                    let mut state = world.state(from, app);
                    let mut inside = false;
                    let mut told = Vec::new();
                    for message in messages(&mut back).await {
                        use watch_response::Message::*;
                        assert_eq!(inside && !matches!(message.message, Some(CatchUpEnd(_) | GapEnd(_))), message.resume_version.is_empty() && !matches!(message.message, Some(CatchUpBegin(_) | GapBegin(_))));
                        match message.message.unwrap() {
                            CatchUpBegin(_) | GapBegin(_) => { (inside, told) = (true, Vec::new()); }
                            CatchUpEnd(_) | GapEnd(_) => inside = false,
                            Event(event) => {
                                let at = event.resource_version.parse::<u64>().unwrap();
                                let held = state.get(&event.name).map(|(uid, _)| uid.clone());
                                if inside {
                                    assert!(!told.contains(&(event.name.clone(), event.uid.clone())), "{event:?} twice");
                                    told.push((event.name.clone(), event.uid.clone()));
                                }
                                match event.r#type() {
                                    Type::Added => assert_eq!(held, None, "{event:?}"),
                                    _ => assert_eq!(held.as_ref(), Some(&event.uid), "{event:?}"),
                                }
                                match event.r#type() {
                                    Type::Deleted => drop(state.remove(&event.name)),
                                    _ => drop(state.insert(event.name, (event.uid, at))),
                                }
                            }
                            other => panic!("{other:?}"),
                        }
                    }
                    assert_eq!(state, world.state(world.at, app), "{app:?} from {from}");
                }
            }
        });
    }
}
