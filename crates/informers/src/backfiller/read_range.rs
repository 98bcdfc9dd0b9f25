//! Requests of a backfill, and the range of versions that serves them.

use std::collections::BTreeSet;

use kubefan_model::ResourceVersion;

/// A request for all events after a version.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Request {
    pub(super) version: ResourceVersion,
    /// Whether each event must come with the object's previous state.
    pub(super) needs_state: bool,
}

/// The range of one read.
#[derive(Clone, Copy)]
pub(super) struct ReadRange {
    pub(super) from: ResourceVersion,
    /// The newest requested version. The read must reach it, else it would not serve that request.
    pub(super) to: ResourceVersion,
    pub(super) with_state: bool,
}

impl ReadRange {
    /// Returns the smallest range that serves all `requests`. `None` if there are none.
    pub(super) fn of(requests: &BTreeSet<Request>) -> Option<Self> {
        let first = requests.first()?;
        let last = requests.last()?;
        let with_state = requests.iter().any(|request| request.needs_state);
        Some(Self { from: first.version, to: last.version, with_state })
    }

    pub(super) fn serves(&self, request: Request) -> bool {
        self.from <= request.version && request.version <= self.to && (self.with_state || !request.needs_state)
    }
}
