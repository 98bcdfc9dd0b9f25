//! The history of one resource and scope: recent events in full, and what is left of older ones.
//!
//! What the ring lets go of goes into the residue, so the two join without a hole. Together they say which way leads on from a version.

use std::{ops::Bound, sync::Arc};

use tokio::time::Instant;

use super::{
    residue::{Replaced, Residue},
    ring::{EventRing, Expired, Record, RingLimits},
};
use crate::model::{ResourceVersion, object::ObjectParser};

/// What leads on from a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Every event after it is held.
    Ring,
    /// What changed after it is known, each object once.
    Residue,
}

/// Whether `version` is within an upper bound.
pub(super) fn is_within(version: ResourceVersion, up_to: Bound<ResourceVersion>) -> bool {
    match up_to {
        Bound::Included(last) => version <= last,
        Bound::Excluded(end) => version < end,
        Bound::Unbounded => true,
    }
}

/// Ring and residue.
pub struct History {
    limits: RingLimits,
    parser: Arc<ObjectParser>,
    ring: EventRing,
    residue: Residue,
    /// What it may take of its usual size.
    share: f64,
}

impl History {
    /// A history that starts after `floor`, of objects that `parser` reads.
    pub fn new(limits: RingLimits, floor: ResourceVersion, parser: Arc<ObjectParser>) -> Self {
        Self { limits, parser, ring: EventRing::new(limits, floor), residue: Residue::new(floor), share: 1.0 }
    }

    /// The recent events.
    pub fn ring(&self) -> &EventRing {
        &self.ring
    }

    /// What is left of older ones.
    pub fn residue(&self) -> &Residue {
        &self.residue
    }

    /// Appends a record that the views have seen. [`Self::evict`] follows.
    pub fn push(&mut self, record: Record, now: Instant) {
        self.ring.push(record, now);
    }

    /// Lets go of what is over the limits, as [`EventRing::evict`]; gives the records that the ring no longer holds.
    pub fn evict(&mut self, now: Instant, store_bytes: usize, log_bytes: usize) -> Vec<Record> {
        let gone = self.ring.evict(now, store_bytes, log_bytes, self.share);
        gone.iter().for_each(|record| self.residue.push(record, &self.parser));
        self.residue.evict((self.limits.residue_bytes_max(store_bytes) as f64 * self.share) as usize);
        gone
    }

    /// Keeps a share of its usual size from the next eviction on.
    pub fn keep(&mut self, share: f64) {
        self.share = share;
    }

    /// The oldest version that something leads on from.
    pub fn oldest(&self) -> ResourceVersion {
        self.residue.floor()
    }

    /// What leads on from `version`, which is not from the future: events where they are held.
    pub fn way_from(&self, version: ResourceVersion) -> Result<Way, Expired> {
        let Err(expired) = self.ring.since(version) else { return Ok(Way::Ring) };
        // Inside a gap there is no exact state, and what was put in its place says nothing about the versions within.
        let inside_a_gap = version >= self.ring.floor();
        let oldest = if inside_a_gap { expired.oldest } else { self.residue.known_from(version) };
        match oldest == version {
            true => Ok(Way::Residue),
            false => Err(Expired { requested: version, oldest }),
        }
    }

    /// What was there before each change after one version and up to another, newest first. Only a part of about `changes_max` changes
    /// each time, so that a reader who has much to catch up with keeps nobody from the history: where there is more, the version that
    /// it lies below is given too.
    pub fn replaced(
        &self,
        after: ResourceVersion,
        up_to: Bound<ResourceVersion>,
        changes_max: usize,
    ) -> Result<(Vec<Replaced>, Option<ResourceVersion>), Expired> {
        if after < self.residue.floor() {
            return Err(Expired { requested: after, oldest: self.oldest() });
        }
        let mut part = Vec::new();
        for record in self.ring.between(after, up_to) {
            let version = record.version();
            let replaced = record.events().iter().rev().map(|event| {
                let (object, before) = (event.object(), event.previous());
                Replaced { version, key: object.key().clone(), before }
            });
            part.extend(replaced);
            if part.len() >= changes_max {
                return Ok((part, Some(version)));
            }
        }
        for change in self.residue.between(after, up_to) {
            // Whole versions: a gap's changes share one.
            if let Some(last) = part.last().map(|last: &Replaced| last.version)
                && last != change.version
                && part.len() >= changes_max
            {
                return Ok((part, Some(last)));
            }
            part.push(change.clone());
        }
        Ok((part, None))
    }
}
