//! Lists as gzip bodies, whose chunks all readers share.

use std::sync::PoisonError;

use bytes::Bytes;
use kubefan_gzip::Piece;
use tokio::time::Instant;

use super::core::Hub;
use crate::{
    sync::MutexGuard,
    views::shared_lists::{ListRequest, RemovedLists, SharedList, SharedLists},
};

impl Hub {
    /// Returns a list that shares its chunks with the other lists of the same objects.
    pub fn shared_list(&self, request: ListRequest) -> SharedList {
        let mut removed = RemovedLists::default();
        let list = self.shared_lists().list(request, &self.budgets, Instant::now(), &mut removed);
        // Not under the lock.
        drop(removed);
        list
    }

    /// Compresses an object for one reader.
    pub fn compress(&self, plain: Bytes) -> Piece {
        let compressors = self.shared_lists().compressors().clone();
        compressors.compress(plain)
    }

    pub(super) fn shared_lists(&self) -> MutexGuard<'_, SharedLists> {
        self.shared_lists.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
