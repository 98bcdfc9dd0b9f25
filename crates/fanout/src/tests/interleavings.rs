//! Tries many orders in which a writer and its readers may run. The guarantees hold in each of
//! them, and every bug that is planted for this is found. It needs a build with other locks, in
//! `crates/fanout`:
//!
//! ```text
//! KUBEFAN_SHUTTLE_ITERATIONS=100000 cargo test --release --lib --features interleavings interleavings
//! ```

use std::{
    env,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    task::Poll,
};

use kubefan_common::planted::{Bug, plant};
use kubefan_model::projection::Projection;
use shuttle::{
    Config, Runner,
    future::block_on,
    scheduler::{PctScheduler, RandomScheduler},
    thread,
};

use super::*;

/// The orders that are tried by each of two schedulers, unless `KUBEFAN_SHUTTLE_ITERATIONS` says
/// more.
const ITERATIONS: usize = 500;
/// Decides which orders are tried, so that a failure can be repeated.
const SEED: u64 = 5;
/// The most switches between threads that a bug needs, for the scheduler that limits them.
const SWITCHES: usize = 4;

fn try_all(scenario: fn()) {
    let iterations = env::var("KUBEFAN_SHUTTLE_ITERATIONS").ok().and_then(|text| text.parse().ok());
    let iterations = iterations.unwrap_or(ITERATIONS);
    Runner::new(RandomScheduler::new_from_seed(SEED, iterations), Config::new()).run(scenario);
    Runner::new(PctScheduler::new_from_seed(SEED, SWITCHES, iterations), Config::new()).run(scenario);
}

fn holds(scenario: fn()) {
    plant(None);
    try_all(scenario);
}

fn finds(bug: Bug, scenario: fn()) {
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

/// Changes one object, which belongs to one app and then to the other.
fn write(mut cache: Cache) {
    for at in FIRST + 1..=LAST {
        cache.event(Modified, "a", if at % 2 == 0 { "db" } else { "web" }, at);
    }
}

/// Messages of one subscriber.
#[derive(Default)]
struct Received {
    /// The versions of events after the snapshot.
    events: Vec<u64>,
    /// The last version to resume from.
    resume: u64,
}

impl Received {
    fn take(&mut self, frames: FrameBuf) {
        let mut in_snapshot = false;
        for message in decode(frames) {
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

/// Subscribes during commits, resumes once, and must have been sent each event once and in order.
fn each_event_comes_once() {
    each_event_of_a_selection_comes_once("");
}

/// The selection is tested outside of the critical section.
fn each_deferred_event_comes_once() {
    each_event_of_a_selection_comes_once("app,!a,!b,!c,!d,!e,!f,!g,!h");
}

fn each_event_of_a_selection_comes_once(labels: &str) {
    let cache = started();
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let hub = cache.hub.clone();
            let all = cache.select(labels);
            thread::spawn(move || {
                let subscribe = |start| {
                    hub.subscribe(all.clone(), Format::default(), start, StreamWaker::new(&ConnectionWaker::new(), 0))
                        .unwrap()
                };
                let mut told = Received::default();
                let mut subscription = subscribe(Start::Snapshot);
                told.take(block_on(subscription.next()).unwrap());
                let first = told.resume - told.events.len() as u64;
                drop(subscription);
                let mut subscription = subscribe(Start::Resume(version(told.resume)));
                while told.resume < LAST {
                    told.take(block_on(subscription.next()).unwrap());
                }
                assert_eq!(told.events, (first + 1..=LAST).collect::<Vec<_>>());
            })
        })
        .collect();
    write(cache);
    for reader in readers {
        reader.join().unwrap();
    }
}

/// A connection: one waker and several streams. Only ready streams are read; a bookmark if there is
/// nothing more.
fn a_connection_reads_only_ready_streams() {
    let cache = started();
    // The last one is tested outside of the critical section.
    let selectors = ["", "app=web", "app=db", "app=db,!a,!b,!c,!d,!e,!f,!g,!h"];
    let line = ConnectionWaker::new();
    // It changes and is web still, leaves web for db, and comes back.
    let expected = [vec![11, 12, 13], vec![11, 12, 13], vec![12, 13], vec![12, 13]];
    let mut streams: Vec<_> = (0u32..)
        .zip(selectors)
        .map(|(number, labels)| {
            let waker = StreamWaker::new(&line, number);
            let hub = &cache.hub;
            hub.subscribe(cache.select(labels), Format::default(), Start::Snapshot, waker).unwrap()
        })
        .collect();
    let reader = thread::spawn(move || {
        let mut told: [Received; 4] = Default::default();
        let mut queue = ReadyStreams::from_slice(&[0, 1, 2, 3]);
        loop {
            for stream in queue.drain(..) {
                let stream = stream as usize;
                while let Some(frames) = streams[stream].take(1 << 16).unwrap() {
                    told[stream].take(frames);
                }
                if let Some(bookmark) = streams[stream].bookmark() {
                    told[stream].take(bookmark);
                }
            }
            let done = |told: &Received, expected: &Vec<u64>| told.events.last() == expected.last();
            if told.iter().zip(&expected).all(|(told, expected)| done(told, expected)) {
                break;
            }
            block_on(poll_fn(|cx| {
                line.register(cx.waker());
                line.take_ready(&mut queue);
                if queue.is_empty() { Poll::Pending } else { Poll::Ready(()) }
            }));
        }
        for (told, expected) in told.iter().zip(&expected) {
            assert_eq!(&told.events, expected);
        }
    });
    write(cache);
    reader.join().unwrap();
}

/// Two waves of wake-ups at the same time: one was delayed, and the next follows at once.
fn two_waves_wake_one_stream() {
    let line = ConnectionWaker::new();
    let waker = Arc::new(StreamWaker::new(&line, 0));
    waker.arm();
    let ringers: Vec<_> = (0..2).map(|_| waker.clone()).map(|waker| thread::spawn(move || waker.wake())).collect();
    let woken: Vec<_> = ringers.into_iter().map(|ringer| ringer.join().unwrap()).collect();
    let mut ready_streams = ReadyStreams::new();
    line.take_ready(&mut ready_streams);
    assert_eq!((ready_streams.len(), woken.iter().map(|woken| woken.streams).sum()), (1, 1));
}

/// Every stream that waits when a hub closes ends.
fn waiting_streams_end() {
    let mut cache = started();
    let readers: Vec<_> = (0..2)
        .map(|_| {
            let hub = cache.hub.clone();
            let all = cache.select("");
            thread::spawn(move || {
                let waker = StreamWaker::new(&ConnectionWaker::new(), 0);
                let Ok(mut subscription) = hub.subscribe(all, Format::default(), Start::Snapshot, waker) else {
                    return;
                };
                while block_on(subscription.next()).is_ok() {}
            })
        })
        .collect();
    cache.event(Modified, "a", "db", FIRST + 1);
    cache.hub.close(Phase::NotFound, StreamEnd::Stopped("gone".to_owned()));
    for reader in readers {
        reader.join().unwrap();
    }
}

/// Reads a watch over HTTP until it ends.
fn reads_to_the_end(cache: &Cache) -> thread::JoinHandle<()> {
    let format = Format::http(Media::Json, Projection::default());
    let waker = StreamWaker::new(&ConnectionWaker::new(), 0);
    let mut watch = cache.hub.subscribe(cache.select(""), format, Start::Snapshot, waker).unwrap();
    thread::spawn(move || while block_on(watch.next()).is_ok() {})
}

/// A gap ends a watch over HTTP, whether it waits or not.
fn a_gap_ends_a_watch() {
    let mut cache = started();
    let reader = reads_to_the_end(&cache);
    cache.list(&[("a", "db", LAST)], LAST);
    reader.join().unwrap();
}

/// Other bytes at the same version end a watch over HTTP.
fn a_new_encoding_ends_a_watch() {
    let mut cache = started();
    let reader = reads_to_the_end(&cache);
    cache.list(&[("a", "db", 5)], FIRST);
    cache.apply(Update::Bookmark(version(LAST)));
    reader.join().unwrap();
}

#[test]
fn a_subscription_during_commits_misses_and_repeats_nothing() {
    holds(each_event_comes_once);
    holds(each_deferred_event_comes_once);
    finds(Bug::SubscribedInTwoSections, each_event_comes_once);
    finds(Bug::SubscribedInTwoSections, each_deferred_event_comes_once);
}

#[test]
fn no_wake_up_is_lost() {
    holds(a_connection_reads_only_ready_streams);
    finds(Bug::ArmedAfterTheRead, a_connection_reads_only_ready_streams);
    finds(Bug::DisarmedAfterTheWakeUp, a_connection_reads_only_ready_streams);
    finds(Bug::WokenBeforeReady, a_connection_reads_only_ready_streams);
}

#[test]
fn a_stream_waker_wakes_once_for_each_time_that_it_was_armed() {
    holds(two_waves_wake_one_stream);
    finds(Bug::WokenTwice, two_waves_wake_one_stream);
}

#[test]
fn no_bookmark_overtakes_an_event() {
    finds(Bug::HeadBeforeAppend, a_connection_reads_only_ready_streams);
}

#[test]
fn waiting_streams_end_when_the_hub_closes() {
    holds(waiting_streams_end);
    finds(Bug::WokenBeforeTheEnd, waiting_streams_end);
}

#[test]
fn watches_that_cannot_express_a_gap_end_there() {
    holds(a_gap_ends_a_watch);
    finds(Bug::EndNotAnnounced, a_gap_ends_a_watch);
    holds(a_new_encoding_ends_a_watch);
    finds(Bug::ReencodedPasses, a_new_encoding_ends_a_watch);
}
