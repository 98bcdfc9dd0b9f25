//! Bodies that are the same bytes for many subscribers are decoded once for all of them.
//!
//! A thousand decoders would take the CPU time of the server. Instead every subscriber compares
//! each byte that it receives with that of the first one, and takes over its number of events. A
//! subscriber whose body differs decodes it itself.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

use super::{encoding::Encoding, event_counter::GzipEvents};

/// The end of an empty stored block (RFC 1951, section 3.2.4), at which servers flush what they
/// have compressed. An event is complete at most of them, and at few other positions.
const FLUSH: [u8; 4] = [0x00, 0x00, 0xff, 0xff];
/// Bytes that are kept for the subscribers that are behind the first.
const KEPT_BYTES_MAX: usize = 64 << 20;

/// The bodies of a set of subscribers, by the URL path of the watch.
#[derive(Default)]
pub(super) struct SharedBodies(Mutex<HashMap<String, Arc<Mutex<SharedBody>>>>);

impl SharedBodies {
    /// Returns the body of the watches with this path.
    pub(super) fn of(&self, path: &str, encoding: Encoding) -> Arc<Mutex<SharedBody>> {
        let mut bodies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(body) = bodies.get(path) {
            return body.clone();
        }
        let body = Arc::new(Mutex::new(SharedBody::new(encoding, KEPT_BYTES_MAX)));
        bodies.insert(path.to_owned(), body.clone());
        body
    }
}

/// A body with `Content-Encoding: gzip`, as far as any of its subscribers has received it.
pub(super) struct SharedBody {
    encoding: Encoding,
    decoded: GzipEvents,
    /// The last bytes of the body.
    kept: Vec<u8>,
    /// At least this many bytes are kept, and at most twice as many.
    kept_bytes: usize,
    /// Position in the body of the first byte that is kept.
    start: u64,
    /// Positions at which the number of complete events is known to change, in order.
    counts: VecDeque<CountAt>,
}

/// The number of events that are complete at a position of the body.
#[derive(Clone, Copy)]
struct CountAt {
    position: u64,
    events: u64,
}

impl SharedBody {
    fn new(encoding: Encoding, kept_bytes: usize) -> Self {
        let decoded = GzipEvents::new(encoding);
        Self { encoding, decoded, kept: Vec::new(), kept_bytes, start: 0, counts: VecDeque::new() }
    }

    /// Compares the part of a body that begins at `position` with the same part of the others, and
    /// decodes what none of them has received yet. Returns the number of events that are complete
    /// at the end of the part; `None` if the bytes differ, or those of the others are no longer
    /// kept.
    ///
    /// # Errors
    /// If the body is not gzip.
    pub(super) fn read(&mut self, position: u64, part: &[u8]) -> Result<Option<u64>, String> {
        let known = position.checked_sub(self.start).and_then(|offset| self.kept.get(offset as usize..));
        let Some(known) = known else { return Ok(None) };
        let (common, new) = part.split_at(part.len().min(known.len()));
        if !known.starts_with(common) {
            return Ok(None);
        }
        self.append(new)?;
        Ok(Some(self.events_at(position + part.len() as u64)))
    }

    /// Decodes the first `position` bytes again, for a body that cannot be compared from there on.
    ///
    /// # Errors
    /// If they are no longer kept.
    pub(super) fn decode_to(&self, position: u64) -> Result<GzipEvents, String> {
        let mut decoded = GzipEvents::new(self.encoding);
        if position > 0 {
            let known = self.kept.get(..position as usize).filter(|_| self.start == 0);
            decoded.read(known.ok_or("gzip: a subscriber differs from the others, or is too far behind them")?)?;
        }
        Ok(decoded)
    }

    fn append(&mut self, new: &[u8]) -> Result<(), String> {
        let mut decoded_to = self.kept.len();
        self.kept.extend_from_slice(new);
        // A flush may have begun in the part before.
        let search_from = decoded_to.saturating_sub(FLUSH.len() - 1);
        let searched = self.kept.get(search_from..).unwrap_or_default();
        let flushes = memchr::memmem::find_iter(searched, &FLUSH).map(|at| search_from + at + FLUSH.len());
        for end in flushes.chain([self.kept.len()]) {
            self.decoded.read(self.kept.get(decoded_to..end).unwrap_or_default())?;
            decoded_to = end;
            let events = self.decoded.events();
            if self.counts.back().map_or(0, |last| last.events) != events {
                self.counts.push_back(CountAt { position: self.start + end as u64, events });
            }
        }
        if self.kept.len() > 2 * self.kept_bytes {
            let dropped = self.kept.len() - self.kept_bytes;
            self.kept.drain(..dropped);
            self.start += dropped as u64;
            while self.counts.get(1).is_some_and(|second| second.position <= self.start) {
                self.counts.pop_front();
            }
        }
        Ok(())
    }

    fn events_at(&self, position: u64) -> u64 {
        let after = self.counts.partition_point(|count| count.position <= position);
        after.checked_sub(1).and_then(|last| self.counts.get(last)).map_or(0, |count| count.events)
    }
}

#[cfg(test)]
mod tests {
    use kubefan_gzip::{Compressor, HEADER, Level};
    use proptest::prelude::*;

    use super::*;

    /// The parts of a body: its header and its events.
    fn parts(numbers: std::ops::Range<usize>) -> Vec<Vec<u8>> {
        let mut compressor = Compressor::new(Level::DEFAULT);
        let mut parts = vec![HEADER.to_vec()];
        for number in numbers {
            let plain = format!("{{\"number\":{number},\"text\":\"{}\"}}\n", "x".repeat(number * 7));
            parts.push(compressor.compress(plain.into()).to_bytes().to_vec());
        }
        parts
    }

    fn shared() -> SharedBody {
        SharedBody::new(Encoding::Gzip, KEPT_BYTES_MAX)
    }

    proptest! {
        #[test]
        fn every_subscriber_has_the_events_that_it_has_received(
            reads in prop::collection::vec((0..3usize, 1..200usize), 0..100),
        ) {
            let body = parts(0..20).concat();
            let mut shared = shared();
            let mut positions = [0; 3];
            for (subscriber, bytes) in reads {
                let position = &mut positions[subscriber];
                let end = (*position + bytes).min(body.len());
                let events = shared.read(*position as u64, &body[*position..end]).unwrap().unwrap();
                *position = end;
                let mut alone = GzipEvents::new(Encoding::Gzip);
                alone.read(&body[..end]).unwrap();
                // Between two flushes an event may be counted at the next one.
                prop_assert!(events <= alone.events() && events + 1 >= alone.events());
            }
        }
    }

    #[test]
    fn a_subscriber_that_is_behind_has_each_event_when_its_last_byte_arrives() {
        let parts = parts(0..20);
        let body = parts.concat();
        for cut in [body.len(), 100, 7] {
            let mut shared = shared();
            for (number, part) in body.chunks(cut).enumerate() {
                shared.read((number * cut) as u64, part).unwrap().unwrap();
            }
            let mut position = 0;
            for (number, part) in parts.iter().enumerate() {
                assert_eq!(shared.read(position, part).unwrap(), Some(number as u64));
                position += part.len() as u64;
            }
        }
    }

    #[test]
    fn a_body_that_differs_is_decoded_from_its_beginning() {
        let first = parts(0..20);
        let mut second = first.clone();
        second[10] = parts(30..31).remove(1);
        let mut shared = shared();
        shared.read(0, &first.concat()).unwrap().unwrap();
        let same = second[..10].concat();
        assert_eq!(shared.read(0, &same).unwrap(), Some(9));
        assert_eq!(shared.read(same.len() as u64, &second[10]).unwrap(), None);
        let mut own = shared.decode_to(same.len() as u64).unwrap();
        own.read(&second[10..].concat()).unwrap();
        assert_eq!(own.events(), 20);
        // The others are not affected.
        assert_eq!(shared.read(same.len() as u64, &first[10..].concat()).unwrap(), Some(20));
    }

    #[test]
    fn a_subscriber_that_is_too_far_behind_can_only_begin_anew() {
        let body = parts(0..100).concat();
        let mut shared = SharedBody::new(Encoding::Gzip, 1_000);
        let events = body.chunks(500).enumerate().map(|(number, part)| shared.read(number as u64 * 500, part));
        assert_eq!(events.last().unwrap().unwrap(), Some(100));
        assert!(shared.kept.len() <= 2_500 && shared.start > 0);
        assert_eq!(shared.read(0, &body[..10]), Ok(None));
        assert_eq!(shared.decode_to(0).unwrap().events(), 0);
        assert_eq!(shared.read(10, &body[10..20]), Ok(None));
        assert!(shared.decode_to(10).is_err());
        assert_eq!(shared.read(body.len() as u64 - 10, &body[body.len() - 10..]).unwrap(), Some(100));
    }
}
