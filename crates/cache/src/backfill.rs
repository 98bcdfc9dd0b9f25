//! A backfill: events from before a cache started, read again from upstream for clients that return
//! with an older version.

use kubefan_model::ResourceVersion;

use crate::{
    budget::Share,
    ring::{EventRing, Expired, HistoryRecord},
};

/// Every event from one version to another. The cached history continues from there.
pub struct Backfill {
    /// The epoch of the cache whose history continues it. Versions of another epoch have no meaning
    /// there.
    pub epoch: u64,
    /// The events; the floor is where they start.
    pub ring: EventRing,
    /// Every event at or below this version is in it.
    pub reached: ResourceVersion,
    /// Whether its events have the object before them, which filtered views need.
    pub has_state: bool,
    /// Counts its memory.
    pub share: Share,
}

impl Backfill {
    /// Whether it serves a client that returns with `version`, and whose view needs the objects
    /// before each event or not.
    pub fn serves(&self, version: ResourceVersion, needs_state: bool) -> bool {
        let is_within = version <= self.reached || version.is_end() && version.is_at(self.reached);
        version >= self.ring.floor() && is_within && (self.has_state || !needs_state)
    }

    /// Records of the backfill after `version`.
    pub fn since(&self, version: ResourceVersion) -> Result<impl DoubleEndedIterator<Item = &HistoryRecord>, Expired> {
        self.ring.since(version)
    }
}

impl std::fmt::Debug for Backfill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}..={} ({} records)", self.ring.floor(), self.reached, self.ring.len())
    }
}
