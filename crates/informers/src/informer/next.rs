//! The values between the steps of an informer.

use kubefan_cache::RelistReason;
use kubefan_fanout::CommitBatch;
use kubefan_upstream::reflector::{ReflectorError, ReflectorEvent};

use crate::list_scheduler::ListPermit;

/// The next input of an informer.
pub(super) enum Next {
    Step(Result<ReflectorEvent, ReflectorError>),
    /// A planned relist is due.
    Relist(RelistReason, ListPermit),
}

/// Commits whose subscribers are not woken yet. Dropping it wakes them.
pub(super) struct Unannounced {
    pub(super) batch: CommitBatch,
    /// The reflector's steps since the last wake-up.
    pub(super) steps: usize,
}
