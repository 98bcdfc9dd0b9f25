//! An authorized target, as a type.
//!
//! The hazard is a path through the servers that forgets the question. So all code that reads,
//! starts, proves or backfills a cache takes an [`Authorized`], and only the authorizer can make
//! one.

use std::sync::Arc;

use kubefan_admission::Holder;

use crate::authentication::caller::Caller;

/// Something that its caller may read.
#[derive(Debug, Clone)]
pub struct Authorized<T> {
    what: T,
    caller: Caller,
    reason: Arc<str>,
}

impl<T> Authorized<T> {
    /// For the authorizer alone.
    pub(super) fn new(what: T, caller: Caller, reason: Arc<str>) -> Self {
        Self { what, caller, reason }
    }

    /// The target of the authorization.
    pub fn what(&self) -> &T {
        &self.what
    }

    /// The caller that may read it.
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    /// Returns the holder of the request as its caller's user.
    pub fn holder(&self, holder: Holder) -> Holder {
        self.caller.holder(holder)
    }

    /// The authorizer's reason; may be empty.
    pub fn reason(&self) -> &Arc<str> {
        &self.reason
    }
}
