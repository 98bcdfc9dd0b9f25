//! The messages that carry no object.

use bytes::Bytes;

use kubefan_cache::Gap;
use kubefan_common::proto::v1alpha1::{
    Bookmark, CatchUpBegin, CatchUpEnd, GapBegin, GapEnd, ResolvedResource, SnapshotBegin, SnapshotChunk, SnapshotEnd,
    WatchResponse, watch_response::Message,
};
use kubefan_model::ResourceVersion;

/// Opens a snapshot. `restarted_from` is the version that could not be resumed from, if there was
/// one.
pub fn snapshot_begin(
    version: ResourceVersion,
    resource: ResolvedResource,
    cluster: Option<String>,
    restarted_from: Option<ResourceVersion>,
) -> WatchResponse {
    let begin = SnapshotBegin {
        resource_version: version.least_reached().to_string(),
        resource: Some(resource),
        restarted_from: restarted_from.map_or_else(String::new, |version| version.least_reached().to_string()),
        cluster: cluster.unwrap_or_default(),
    };
    response(None, Message::SnapshotBegin(begin))
}

/// Closes a snapshot.
pub fn snapshot_end(version: ResourceVersion, object_count: u64) -> WatchResponse {
    let end = SnapshotEnd { object_count: i64::try_from(object_count).unwrap_or(i64::MAX) };
    response(Some(version), Message::SnapshotEnd(end))
}

/// Opens a gap.
pub fn gap_begin(gap: &Gap) -> WatchResponse {
    let resource_version = gap.from.least_reached().to_string();
    let reason = gap.reason.as_str().to_owned();
    let begin = GapBegin { resource_version, reason };
    response(None, Message::GapBegin(begin))
}

/// Closes a gap.
pub fn gap_end(gap: &Gap) -> WatchResponse {
    response(Some(gap.to), Message::GapEnd(GapEnd {}))
}

/// Opens a catch-up from `version`.
pub fn catch_up_begin(version: ResourceVersion) -> WatchResponse {
    response(None, Message::CatchUpBegin(CatchUpBegin { resource_version: version.least_reached().to_string() }))
}

/// Closes a catch-up to `version`.
pub fn catch_up_end(version: ResourceVersion) -> WatchResponse {
    response(Some(version), Message::CatchUpEnd(CatchUpEnd {}))
}

/// A part of a compressed snapshot.
pub fn snapshot_chunk(zstd: Bytes) -> WatchResponse {
    response(None, Message::SnapshotChunk(SnapshotChunk { zstd }))
}

/// A bookmark.
pub fn bookmark(version: ResourceVersion) -> WatchResponse {
    response(Some(version), Message::Bookmark(Bookmark {}))
}

fn response(resume: Option<ResourceVersion>, message: Message) -> WatchResponse {
    WatchResponse {
        resume_version: resume.map_or_else(String::new, |version| version.least_reached().to_string()),
        version_is_complete: resume.is_some_and(ResourceVersion::is_end),
        message: Some(message),
    }
}
