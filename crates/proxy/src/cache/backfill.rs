//! Events from before a cache began, read again from upstream for those who come back from there.

use crate::cache::ring::{EventRing, Expired, Record};
use kubefan_model::ResourceVersion;

/// Every event from one version to another that the cache itself leads on from.
pub struct Backfill {
    /// The history of the cache that it leads up to; versions of another one mean nothing there.
    pub epoch: u64,
    /// Its floor is where it begins.
    pub ring: EventRing,
    /// Where it ends: everything at or below this version is in it.
    pub reached: ResourceVersion,
    /// Whether its events know what was there before them, as filtered views must.
    pub has_state: bool,
}

impl Backfill {
    /// Whether it serves one who comes back with `version` and needs to know what was there before or not.
    pub fn serves(&self, version: ResourceVersion, needs_state: bool) -> bool {
        version >= self.ring.floor() && version <= self.reached && (self.has_state || !needs_state)
    }

    /// Its records after `version`.
    pub fn since(&self, version: ResourceVersion) -> Result<impl DoubleEndedIterator<Item = &Record>, Expired> {
        self.ring.since(version)
    }
}

impl std::fmt::Debug for Backfill {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}..={} ({} records)", self.ring.floor(), self.reached, self.ring.len())
    }
}
