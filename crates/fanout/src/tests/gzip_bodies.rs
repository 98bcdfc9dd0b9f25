//! Gzip bodies of Kubernetes watches over HTTP: one member each, made of pieces that subscribers
//! share, with the bytes of the plain body.

use std::io::Read;

use flate2::read::GzDecoder;
use kubefan_model::{
    format::{ContentCoding, Format},
    projection::Projection,
};

use super::{watch_http::proved, *};
use crate::SubscribeOptions;

fn subscribe(cache: &Cache, coding: ContentCoding, options: impl Into<SubscribeOptions>) -> Subscription {
    let format = Format::http(Media::Json, Projection::default()).coded(coding);
    let waker = StreamWaker::new(&ConnectionWaker::new(), 0);
    cache.hub.subscribe(cache.select("app=web"), format, options, waker).unwrap()
}

/// A subscriber and all that it was sent.
struct Body {
    subscription: Subscription,
    sent: Vec<u8>,
}

impl Body {
    /// Takes the state at once: only some may be sent at a time.
    fn new(cache: &Cache, coding: ContentCoding, options: impl Into<SubscribeOptions>) -> Self {
        let mut body = Self { subscription: subscribe(cache, coding, options), sent: Vec::new() };
        // It lets other tasks run after each chunk that it has compressed.
        while body.subscription.in_backlog() {
            body.take(ALL);
        }
        body
    }

    /// Takes what is ready, at most `bytes_max` bytes at a time.
    fn take(&mut self, bytes_max: usize) {
        while let Some(frames) = self.subscription.take(bytes_max).unwrap() {
            self.sent.extend_from_slice(&to_bytes(frames));
        }
    }

    fn bookmark(&mut self) {
        if let Some(frames) = self.subscription.bookmark() {
            self.sent.extend_from_slice(&to_bytes(frames));
        }
    }

    fn end(mut self, error_event: &'static [u8]) -> Vec<u8> {
        let last = self.subscription.end_body(Bytes::from_static(error_event));
        self.sent.extend_from_slice(&to_bytes(last));
        self.sent
    }
}

/// Decodes one member, checks its checksum, and that nothing follows it.
fn decoded(body: &[u8]) -> String {
    let mut decoder = GzDecoder::new(body);
    let mut plain = String::new();
    decoder.read_to_string(&mut plain).expect("a whole gzip member");
    assert!(decoder.into_inner().is_empty(), "nothing follows the member");
    plain
}

/// More than all that is ready.
const ALL: usize = 1 << 20;

/// Enough that a shared segment is compressed.
const SUBSCRIBERS: usize = 24;

#[tokio::test(start_paused = true)]
async fn every_gzip_body_has_the_bytes_of_the_plain_one() {
    // With a budget the events of few subscribers are compressed, and stored without one.
    for (subscribers, has_budget) in [(1, true), (1, false), (2, false), (SUBSCRIBERS, false)] {
        let mut cache = Cache::within(RingLimits { ring_events_max: 1000, ..LIMITS });
        cache.hub.budgets.compression.open(has_budget);
        cache.list(&[("a", "web", 5), ("b", "db", 6), ("c", "web", 7)], 10);
        let options = || SubscribeOptions { marks_end: true, ..Start::Snapshot.into() };
        let mut plain = Body::new(&cache, ContentCoding::Identity, options());
        let mut coded: Vec<_> = (0..subscribers).map(|_| Body::new(&cache, ContentCoding::Gzip, options())).collect();
        for round in 0..8_u64 {
            for event in 0..=round {
                let name = ["a", "b", "c", "d"][(event % 4) as usize];
                let app = if (round + event) % 3 == 0 { "db" } else { "web" };
                cache.event(Modified, name, app, 20 + 10 * round + event);
            }
            plain.take(ALL);
            for (place, body) in coded.iter_mut().enumerate() {
                // One that reads only now and then finds segments that others have left.
                if place % 3 != 1 || round % 4 == 3 {
                    body.take(1 + 300 * place);
                }
            }
            if round == 3 {
                // A subscriber that starts inside the log.
                coded.push(Body::new(&cache, ContentCoding::Gzip, Start::Resume(version(51))));
                cache.apply(Update::Bookmark(version(19 + 10 * (round + 1))));
                plain.bookmark();
                for body in &mut coded[..subscribers] {
                    body.take(ALL);
                    body.bookmark();
                }
            }
        }
        let late = coded.pop().expect("it was added");
        let expected = String::from_utf8(plain.end(b"")).unwrap();
        for mut body in coded {
            body.take(ALL);
            assert_eq!(decoded(&body.end(b"")), expected, "of {subscribers}");
        }
        let late = {
            let mut late = late;
            late.take(ALL);
            decoded(&late.end(b""))
        };
        assert!(!late.is_empty() && expected.ends_with(&late[late.find("\n").unwrap() + 1..]), "{late}");
    }
}

/// Its reader may have asked for the newest state, so a state that was shared a moment before is
/// too old.
#[tokio::test(start_paused = true)]
async fn a_gzip_body_begins_with_the_state_of_the_cache_at_that_moment() {
    let mut cache = Cache::new();
    cache.list(&[("a", "web", 5), ("b", "web", 6)], 10);
    let options = || SubscribeOptions { marks_end: true, ..Start::Snapshot.into() };
    let _before = Body::new(&cache, ContentCoding::Gzip, options());
    cache.event(Modified, "a", "web", 11);
    let plain = String::from_utf8(Body::new(&cache, ContentCoding::Identity, options()).end(b"")).unwrap();
    let coded = Body::new(&cache, ContentCoding::Gzip, options()).end(b"");
    assert_eq!(decoded(&coded), plain, "it ends with a bookmark at 11, without an event");
}

#[tokio::test(start_paused = true)]
async fn nothing_is_compressed_again_for_one_subscriber_far_behind() {
    let mut cache = Cache::within(RingLimits { ring_events_max: 1000, ..LIMITS });
    cache.list(&[("a", "web", 5)], 10);
    cache.hub.budgets.compression.open(false);
    let from_start = || Start::Resume(version(10));
    let mut readers: Vec<_> = (0..SUBSCRIBERS).map(|_| Body::new(&cache, ContentCoding::Gzip, from_start())).collect();
    for at in 20..70 {
        cache.event(Modified, "a", "web", at);
    }
    for reader in &mut readers {
        reader.take(ALL);
    }
    let mut late = Body::new(&cache, ContentCoding::Gzip, from_start());
    late.take(ALL);
    let late = late.end(b"");
    let shared = readers.remove(0).end(b"");
    assert_eq!(decoded(&late), decoded(&shared));
    assert!(shared.len() < decoded(&shared).len(), "compressed for {SUBSCRIBERS}");
    assert!(late.len() > decoded(&late).len(), "stored for one");
}

/// It reads first, and what it reads last is new to all.
#[tokio::test(start_paused = true)]
async fn events_are_compressed_for_all_after_a_subscriber_far_behind_has_read_them() {
    let mut cache = Cache::within(RingLimits { ring_events_max: 1000, ..LIMITS });
    cache.list(&[("a", "web", 5)], 10);
    cache.hub.budgets.compression.open(false);
    let from_start = || Start::Resume(version(10));
    let mut readers: Vec<_> = (0..SUBSCRIBERS).map(|_| Body::new(&cache, ContentCoding::Gzip, from_start())).collect();
    cache.event(Modified, "a", "web", 20);
    for reader in &mut readers {
        reader.take(ALL);
    }
    for at in 21..70 {
        cache.event(Modified, "a", "web", at);
    }
    let mut late = Body::new(&cache, ContentCoding::Gzip, from_start());
    late.take(ALL);
    for reader in &mut readers {
        reader.take(ALL);
    }
    let late = late.end(b"");
    let shared = readers.remove(0).end(b"");
    assert_eq!(decoded(&late), decoded(&shared));
    assert!(shared.len() < decoded(&shared).len(), "compressed for {SUBSCRIBERS}");
}

/// A quiet cache is proved to have the state of a version that it has not reached.
#[tokio::test(start_paused = true)]
async fn a_proved_state_is_compressed_once_for_all() {
    let mut cache = Cache::new();
    let names: Vec<_> = (0..200).map(|number| format!("web-{number:03}")).collect();
    let objects: Vec<_> = names.iter().map(|name| (name.as_str(), "web", 5)).collect();
    cache.list(&objects, 10);
    let mut bodies = [20, 20, 30].map(|at| Body::new(&cache, ContentCoding::Gzip, proved(&cache, at)));
    let plain = Body::new(&cache, ContentCoding::Identity, proved(&cache, 20));
    cache.event(Modified, "web-000", "web", 40);
    for body in &mut bodies {
        body.take(ALL);
    }
    let mut plain = plain;
    plain.take(ALL);
    let plain = String::from_utf8(plain.end(b"")).unwrap();
    let [first, second, later] = bodies.map(|body| body.end(b""));
    assert_eq!((decoded(&first), decoded(&second)), (plain.clone(), plain.clone()));
    assert!(first.len() < plain.len() / 4, "{} of {} bytes", first.len(), plain.len());
    assert_eq!(decoded(&later), plain.replace("\"20\"", "\"30\""), "the same state at another version");
}

/// A client could ask for the states of many selections.
#[tokio::test(start_paused = true)]
async fn a_state_is_stored_while_the_budget_of_chunks_is_spent_and_compressed_afterwards() {
    let mut cache = Cache::new();
    let names: Vec<_> = (0..200).map(|number| format!("web-{number:03}")).collect();
    let objects: Vec<_> = names.iter().map(|name| (name.as_str(), "web", 5)).collect();
    cache.list(&objects, 10);
    let state = || Body::new(&cache, ContentCoding::Gzip, Start::Snapshot).end(b"");
    cache.hub.budgets.chunk_compression.open(false);
    let stored = state();
    cache.hub.budgets.chunk_compression.open(true);
    let compressed = state();
    assert_eq!(decoded(&stored), decoded(&compressed));
    assert!(stored.len() > decoded(&stored).len() && compressed.len() < stored.len() / 2, "it is not retained");
}

#[tokio::test(start_paused = true)]
async fn an_error_event_ends_a_gzip_body_even_if_nothing_was_sent_before() {
    let mut cache = Cache::new();
    cache.list(&[], 10);
    let body = Body::new(&cache, ContentCoding::Gzip, Start::Snapshot);
    assert_eq!(decoded(&body.end(b"{\"type\":\"ERROR\"}\n")), "{\"type\":\"ERROR\"}\n");
    let empty = Body::new(&cache, ContentCoding::Gzip, Start::Snapshot);
    assert_eq!(decoded(&empty.end(b"")), "", "a watch without events is a whole member too");
}

#[tokio::test(start_paused = true)]
async fn subscribers_share_the_compressed_bytes_of_state_and_events() {
    let mut cache = Cache::new();
    let names: Vec<_> = (0..200).map(|number| format!("web-{number:03}")).collect();
    let objects: Vec<_> = names.iter().map(|name| (name.as_str(), "web", 5)).collect();
    cache.list(&objects, 10);
    let mut addresses = Vec::new();
    let mut state_of_next = || {
        let mut subscription = subscribe(&cache, ContentCoding::Gzip, Start::Snapshot);
        let mut frames = subscription.take(ALL).unwrap().expect("the state");
        assert_eq!(frames.copy_to_bytes(kubefan_gzip::HEADER.len()), kubefan_gzip::HEADER.as_slice());
        addresses.push(frames.chunk().as_ptr());
        assert!(frames.remaining() < 200 * 20, "{} bytes", frames.remaining());
        assert!(subscription.take(ALL).unwrap().is_none());
        subscription
    };
    let mut all: Vec<_> = (0..SUBSCRIBERS).map(|_| state_of_next()).collect();
    cache.event(Modified, "web-000", "web", 11);
    for subscription in &mut all {
        addresses.push(subscription.take(ALL).unwrap().expect("the event").chunk().as_ptr());
    }
    addresses.dedup();
    assert_eq!(addresses.len(), 2, "one memory for the state and one for the event");
}
