//! Decides which differences between a list and the cached state can be of the same history.

use std::sync::Arc;

use kubefan_model::{
    ResourceVersion,
    event::{EventType, WatchEvent},
    object::Object,
};

use super::difference::is_reencoded;
use crate::relist_reason::RelistReason;

/// Whether a difference may be a change at `version`, as the list shows it.
pub(super) fn may_be_missing(event: &WatchEvent, version: ResourceVersion) -> bool {
    event.kind() == EventType::Deleted || event.object().version().is_at(version) || is_reencoded(event)
}

/// Returns the message for a list that differs.
pub(super) fn differs_at(version: ResourceVersion) -> String {
    format!("a list at version {} differs from the state at that version", version.whole())
}

/// Returns the reason why a listed object cannot exist if `cached` is its state at the version
/// `reached`, earlier in the same history. Such an object is of a restored state that has since
/// passed `reached` by other changes.
pub(super) fn contradiction(
    cached: Option<&Arc<Object>>,
    object: &Object,
    reached: ResourceVersion,
    reason: RelistReason,
) -> Option<String> {
    let key = object.key();
    let version = object.version();
    match cached {
        Some(cached) if version < cached.version() => {
            Some(format!("{key} was at version {}, and is listed at {version}", cached.version()))
        }
        Some(cached) if version == cached.version() && object.uid() != cached.uid() => {
            Some(format!("{key} at version {version} had uid {}, and has {}", cached.uid(), object.uid()))
        }
        // An object that a self-check finds missing was lost between upstream and cache; that alone
        // does not mean another history.
        None if version <= reached && reason != RelistReason::SelfCheck => {
            Some(format!("{key} is listed at version {version}, and was not there at {}", reached.whole()))
        }
        _ => None,
    }
}
