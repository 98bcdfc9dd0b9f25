//! The orders in which a writer and its readers may run: what is promised holds in each that is tried, and each of the mistakes that
//! were planted for this is found. LogRun by `.ci/run`, because locks are others here:
//!
//! ```text
//! KUBEFAN_SHUTTLE=1 KUBEFAN_SHUTTLE_ITERATIONS=100000 cargo test --release --lib interleavings
//! ```

use std::{
    env,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, PoisonError},
    task::Poll,
};

use shuttle::{
    Config, Runner,
    future::block_on,
    scheduler::{PctScheduler, RandomScheduler},
    thread,
};

use super::*;
use kubefan_common::planted::{Bug, plant};

/// The orders that are tried by each of two schedulers, unless `KUBEFAN_SHUTTLE_ITERATIONS` says more.
const ITERATIONS: usize = 500;
/// Decides which orders: a failure comes again.
const SEED: u64 = 5;
/// The switches between threads that a mistake needs at most, for the scheduler that looks for such.
const SWITCHES: usize = 4;

/// What is planted is planted for the whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn try_all(scenario: fn()) {
    let iterations = env::var("KUBEFAN_SHUTTLE_ITERATIONS").ok().and_then(|text| text.parse().ok());
    let iterations = iterations.unwrap_or(ITERATIONS);
    Runner::new(RandomScheduler::new_from_seed(SEED, iterations), Config::new()).run(scenario);
    Runner::new(PctScheduler::new_from_seed(SEED, SWITCHES, iterations), Config::new()).run(scenario);
}

fn holds(scenario: fn()) {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    plant(None);
    try_all(scenario);
}

fn finds(bug: Bug, scenario: fn()) {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    plant(Some(bug));
    let found = catch_unwind(AssertUnwindSafe(|| try_all(scenario))).is_err();
    plant(None);
    assert!(found, "{} is not found", bug.name());
}

const FIRST: u64 = 10;
const LAST: u64 = 13;

fn started() -> Cache {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5)], FIRST);
    cache
}

/// One object that is now of this app and now of that.
fn write(mut cache: Cache) {
    for at in FIRST + 1..=LAST {
        cache.event(Modified, "a", if at % 2 == 0 { "db" } else { "web" }, at);
    }
}

/// What one subscriber was told, and what it was promised.
#[derive(Default)]
struct Told {
    /// The versions of events after the snapshot.
    events: Vec<u64>,
    /// The last version to come back with.
    resume: u64,
}

impl Told {
    fn hear(&mut self, pieces: FrameBuf) {
        let mut in_snapshot = false;
        for message in decode(pieces) {
            let resume = message.resume_version.parse().unwrap_or(0);
            match message.message.as_ref().unwrap() {
                watch_response::Message::SnapshotBegin(_) => in_snapshot = true,
                watch_response::Message::SnapshotEnd(_) => in_snapshot = false,
                watch_response::Message::Event(event) if !in_snapshot => {
                    let at = event.resource_version.parse().unwrap();
                    assert!(at > self.resume, "the event of {at} after {} was promised", self.resume);
                    self.events.push(at);
                }
                _ => {}
            }
            assert!(resume == 0 || resume >= self.resume, "{resume} after {}", self.resume);
            self.resume = self.resume.max(resume);
        }
    }
}

/// Subscribes while there are commits, comes back once, and must have been told each event once and in order.
fn each_event_comes_once() {
    let cache = started();
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let (hub, all) = (cache.hub.clone(), cache.select(""));
            thread::spawn(move || {
                let subscribe = |start| {
                    hub.subscribe(all.clone(), Format::default(), start, StreamWaker::new(&ConnectionWaker::new(), 0))
                        .unwrap()
                };
                let mut told = Told::default();
                let mut subscription = subscribe(Start::Snapshot);
                told.hear(block_on(subscription.next()).unwrap());
                let first = told.resume - told.events.len() as u64;
                drop(subscription);
                let mut subscription = subscribe(Start::Resume(version(told.resume)));
                while told.resume < LAST {
                    told.hear(block_on(subscription.next()).unwrap());
                }
                assert_eq!(told.events, (first + 1..=LAST).collect::<Vec<_>>());
            })
        })
        .collect();
    write(cache);
    readers.into_iter().for_each(|reader| reader.join().unwrap());
}

/// A connection: one waker, several streams, and a look only at those whose bells rang; a bookmark wherever there is nothing more.
fn a_connection_looks_at_what_rang() {
    let cache = started();
    let (line, selectors) = (ConnectionWaker::new(), ["", "app=web", "app=db"]);
    // It changes and is web still, leaves web for db, and comes back.
    let expected = [vec![11, 12, 13], vec![11, 12, 13], vec![12, 13]];
    let mut streams: Vec<_> = (0u32..)
        .zip(selectors)
        .map(|(number, labels)| {
            let bell = StreamWaker::new(&line, number);
            let hub = &cache.hub;
            hub.subscribe(cache.select(labels), Format::default(), Start::Snapshot, bell).unwrap()
        })
        .collect();
    let reader = thread::spawn(move || {
        let mut told = [Told::default(), Told::default(), Told::default()];
        let mut queue = ReadyStreams::from_slice(&[0, 1, 2]);
        loop {
            for stream in queue.drain(..) {
                let stream = stream as usize;
                while let Some(pieces) = streams[stream].take(1 << 16).unwrap() {
                    told[stream].hear(pieces);
                }
                if let Some(bookmark) = streams[stream].bookmark() {
                    told[stream].hear(bookmark);
                }
            }
            let done = |told: &Told, expected: &Vec<u64>| told.events.last() == expected.last();
            if told.iter().zip(&expected).all(|(told, expected)| done(told, expected)) {
                break;
            }
            block_on(poll_fn(|cx| {
                line.register(cx.waker());
                line.take_ready(&mut queue);
                if queue.is_empty() { Poll::Pending } else { Poll::Ready(()) }
            }));
        }
        told.iter().zip(&expected).for_each(|(told, expected)| assert_eq!(&told.events, expected));
    });
    write(cache);
    reader.join().unwrap();
}

/// Two waves of wake-ups at once, as when one was held back and the next follows at once.
fn two_ring_one_bell() {
    let line = ConnectionWaker::new();
    let bell = Arc::new(StreamWaker::new(&line, 0));
    bell.arm();
    let ringers: Vec<_> = (0..2).map(|_| bell.clone()).map(|bell| thread::spawn(move || bell.wake())).collect();
    let woken: Vec<_> = ringers.into_iter().map(|ringer| ringer.join().unwrap()).collect();
    let mut rung = ReadyStreams::new();
    line.take_ready(&mut rung);
    assert_eq!((rung.len(), woken.iter().map(|woken| woken.streams).sum()), (1, 1));
}

/// Whoever waits when a hub closes is told.
fn the_end_is_told() {
    let mut cache = started();
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let (hub, all) = (cache.hub.clone(), cache.select(""));
            thread::spawn(move || {
                let bell = StreamWaker::new(&ConnectionWaker::new(), 0);
                let Ok(mut subscription) = hub.subscribe(all, Format::default(), Start::Snapshot, bell) else { return };
                while block_on(subscription.next()).is_ok() {}
            })
        })
        .collect();
    cache.event(Modified, "a", "db", FIRST + 1);
    cache.hub.close(Phase::NotFound, StreamEnd::Stopped("gone".to_owned()));
    readers.into_iter().for_each(|reader| reader.join().unwrap());
}

#[test]
fn who_subscribes_among_commits_misses_nothing_and_sees_nothing_twice() {
    holds(each_event_comes_once);
    finds(Bug::SubscribedInTwoSections, each_event_comes_once);
}

#[test]
fn no_wake_up_is_lost() {
    holds(a_connection_looks_at_what_rang);
    finds(Bug::ArmedAfterTheLook, a_connection_looks_at_what_rang);
    finds(Bug::DisarmedAfterTheRing, a_connection_looks_at_what_rang);
    finds(Bug::WokenBeforeTheRing, a_connection_looks_at_what_rang);
}

#[test]
fn a_bell_rings_once_for_each_time_that_it_was_armed() {
    holds(two_ring_one_bell);
    finds(Bug::RingsTwice, two_ring_one_bell);
}

#[test]
fn no_bookmark_overtakes_an_event() {
    finds(Bug::HeadBeforeAppend, a_connection_looks_at_what_rang);
}

#[test]
fn who_waits_for_a_hub_that_closes_is_told() {
    holds(the_end_is_told);
    finds(Bug::WokenBeforeTheEnd, the_end_is_told);
}
