//! The part of a log that a subscriber reads next, or the reason why there is none.

use std::sync::Arc;

use super::{log::Cursor, segment::Segment};
use crate::{
    cache::{Expired, stream_end::StreamEnd},
    fanout::send::log_entry::LogEntry,
};
use kubefan_model::ResourceVersion;

/// What the log has after a cursor.
pub enum LogRun {
    /// Nothing yet; the waker is armed.
    Empty,
    /// Nothing up to this place that concerns the view.
    Passed(Cursor),
    /// A segment that several subscribers take.
    Shared(Arc<Segment>),
    /// Entries for the only subscriber of the view, and the place after them.
    Unshared(Vec<LogEntry>, Cursor),
}

impl LogRun {
    /// Entries that were read at a place, for the only subscriber of the view.
    pub(super) fn unshared(entries: Vec<LogEntry>, at: Cursor) -> Self {
        let end = at.past(&entries);
        Self::Unshared(entries, end)
    }
}

/// Why the log has nothing after a cursor, and will not have.
pub enum LogReadError {
    /// The entry at the cursor was trimmed.
    Behind {
        /// The oldest version that the log covers.
        oldest: ResourceVersion,
    },
    /// The view's format cannot express the gap at the cursor.
    Gap(Expired),
    /// The view has ended.
    Ended(StreamEnd),
}
