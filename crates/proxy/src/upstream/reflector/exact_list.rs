//! Lists the state at a version that was reached before.
//!
//! After a schema change the objects have to be read again, although no event was missed. A list of
//! now would hide the events since the last one. A list at the version reached differs from the
//! known state only in bytes, and the watch continues from that version.

use rand::Rng;

use super::Reflector;
use crate::upstream::error::UpstreamError;
use kubefan_model::ResourceVersion;

impl<R: Rng> Reflector<R> {
    /// Discards everything read after `version`. The next step lists the state at exactly that
    /// version again, for `reason`, and the watch continues from there. If upstream does not have
    /// that state, the list after it is one of the newest state.
    pub fn list_again_at(&mut self, version: ResourceVersion, reason: &'static str) {
        self.relist(reason);
        self.lists_at = Some(version);
    }

    /// Whether the next list, or the one in progress, is at a version that was reached before. Such
    /// a list proves nothing about now.
    pub fn lists_the_past(&self) -> bool {
        self.lists_at.is_some()
    }

    /// Whether the next list may be a watch-list, which has the newest state only.
    pub(super) fn can_watch_list(&self) -> bool {
        self.options.watch_list && !self.watch_list_refused && !self.next_is_paged && self.lists_at.is_none()
    }

    /// The first page failed.
    pub(super) fn exact_list_failed(&mut self, error: &UpstreamError) {
        // etcd has compacted the version, or was restored to an older one.
        if matches!(error, UpstreamError::Gone { .. } | UpstreamError::VersionTooLarge { .. }) {
            self.lists_at = None;
        }
    }
}
