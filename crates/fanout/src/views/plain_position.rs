//! Positions in the plain bytes of a view's log, for the checksum at the end of a gzip body.
//!
//! A gzip body ends with the checksum of its plain bytes. A subscriber that takes a segment does
//! not compute with it: it keeps the position where it began and the one that it has reached. Their
//! difference is computed once, when the body ends or when the subscriber skips a part of the log.

use std::sync::{Arc, OnceLock};

use kubefan_common::planted::{self, Bug};
use kubefan_gzip::{Checksum, Prefix};

/// A position in the plain bytes of segments that follow each other. Positions of different runs
/// have no distance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlainPosition {
    run: u64,
    prefix: Prefix,
}

/// The plain bytes from one position to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlainRange {
    /// The first position.
    pub from: PlainPosition,
    /// The position after the last byte.
    pub to: PlainPosition,
}

/// The position after a segment, once the segment is encoded.
pub type SegmentEnd = Arc<OnceLock<PlainPosition>>;

impl PlainPosition {
    /// The position at which a run of segments begins.
    pub fn start_of(run: u64) -> Self {
        Self { run, prefix: Prefix::START }
    }

    /// Returns the position after a piece that begins here.
    #[must_use]
    pub fn then(self, piece: Checksum) -> Self {
        Self { prefix: self.prefix.then(piece), ..self }
    }
}

impl PlainRange {
    /// Number of bytes.
    pub fn bytes(self) -> u64 {
        self.to.prefix.bytes().saturating_sub(self.from.prefix.bytes())
    }

    /// Returns the checksum of the bytes.
    pub fn checksum(self) -> Checksum {
        let same_run = self.from.run == self.to.run;
        debug_assert!(same_run, "positions of different runs have no distance");
        // A range only grows within one run, so it has a distance.
        self.to.prefix.since(self.from.prefix).filter(|_| same_run).unwrap_or_default()
    }
}

/// The checksum of the body that one subscriber is sent.
#[derive(Debug, Clone, Copy, Default)]
pub struct BodyChecksum {
    /// The checksum of what was sent before `range`.
    before: Checksum,
    /// The plain bytes of shared segments, taken one after the other.
    range: Option<PlainRange>,
}

impl BodyChecksum {
    /// Adds bytes of its own.
    pub fn add(&mut self, plain: Checksum) {
        if !plain.is_empty() {
            self.before = self.sum().then(plain);
            self.range = None;
        }
    }

    /// Adds a part of a shared segment.
    pub fn add_shared(&mut self, part: PlainRange) {
        match &mut self.range {
            Some(range) if range.to == part.from || planted::is(Bug::GzipRangeJumps) => range.to = part.to,
            _ => {
                self.before = self.sum();
                self.range = Some(part);
            }
        }
    }

    /// Returns the checksum of the whole body so far.
    pub fn sum(&self) -> Checksum {
        self.range.map_or(self.before, |range| self.before.then(range.checksum()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checksum(parts: &[&str]) -> Checksum {
        Checksum::of(parts.concat().as_bytes())
    }

    #[test]
    fn the_sum_is_that_of_the_bytes_however_they_were_taken() {
        let start = PlainPosition::start_of(1);
        let a = start.then(checksum(&["a"]));
        let ab = a.then(checksum(&["bb"]));
        let other = PlainPosition::start_of(2);
        let c = other.then(checksum(&["ccc"]));
        let mut body = BodyChecksum::default();
        body.add(checksum(&["initial state"]));
        body.add_shared(PlainRange { from: a, to: ab });
        assert_eq!(body.sum(), checksum(&["initial state", "bb"]), "it may begin inside the log");
        body.add(checksum(&["bookmark"]));
        body.add_shared(PlainRange { from: start, to: a });
        body.add_shared(PlainRange { from: a, to: ab });
        body.add_shared(PlainRange { from: other, to: c });
        body.add(Checksum::EMPTY);
        assert_eq!(body.sum(), checksum(&["initial state", "bb", "bookmark", "a", "bb", "ccc"]));
    }

    #[test]
    fn a_part_of_the_log_that_is_skipped_does_not_count() {
        let start = PlainPosition::start_of(1);
        let a = start.then(checksum(&["a"]));
        let ab = a.then(checksum(&["bb"]));
        let abc = ab.then(checksum(&["ccc"]));
        let mut body = BodyChecksum::default();
        body.add_shared(PlainRange { from: start, to: a });
        body.add_shared(PlainRange { from: ab, to: abc });
        assert_eq!(body.sum(), checksum(&["a", "ccc"]));
    }
}
