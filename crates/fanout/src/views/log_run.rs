//! The part of a log that a subscriber reads next, or the reason why there is none.

use std::sync::Arc;

use kubefan_cache::{Expired, stream_end::StreamEnd};
use kubefan_model::ResourceVersion;

use super::{log::Cursor, segment::Segment};
use crate::send::log_entry::LogEntry;

/// The part of a log after a cursor.
pub enum LogRun {
    /// Nothing yet; the waker is armed.
    Empty,
    /// Nothing up to this cursor that concerns the view.
    Passed(Cursor),
    /// A segment that several subscribers take.
    Shared(Arc<Segment>),
    /// Entries for the only subscriber of the view, and the place after them.
    Unshared(Vec<LogEntry>, Cursor),
}

impl LogRun {
    /// Entries that were read at `cursor`, for the only subscriber of the view.
    pub(super) fn unshared_at(cursor: Cursor, entries: Vec<LogEntry>) -> Self {
        let end = cursor.past(&entries);
        Self::Unshared(entries, end)
    }
}

/// The reason why a log has nothing after a cursor, and will not have.
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
