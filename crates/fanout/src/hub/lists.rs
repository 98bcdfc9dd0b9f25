//! Lists as gzip bodies, whose chunks all readers share.

use std::sync::PoisonError;

use tokio::time::Instant;

use super::core::Hub;
use crate::{
    sync::MutexGuard,
    views::shared_lists::{ListRequest, SharedList, SharedLists},
};

impl Hub {
    /// Returns a list that shares its chunks with the other lists of the same objects.
    pub fn shared_list(&self, request: ListRequest) -> SharedList {
        self.shared_lists().list(request, &self.budgets.chunks, Instant::now())
    }

    pub(super) fn shared_lists(&self) -> MutexGuard<'_, SharedLists> {
        self.shared_lists.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
