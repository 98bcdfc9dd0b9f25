//! The events of one watch: decodes the lines of its body.

use bytes::Bytes;
use futures::{StreamExt, stream};

use super::{
    cut::{self, Cuts},
    lines::Lines,
    metadata::{RawEvent, raw_object, read_event},
};
use crate::{
    error::{ApiStatus, ClientError},
    lister_watcher::{WatchEvent, WatchEventKind, WatchEvents},
};
use kubefan_common::{
    api_json::{Bookmark, read_bookmark},
    text::without_value,
};

/// Returns the events of a watch's body. With `initial_events`, the body starts with the current
/// state, and the stream with [`WatchEventKind::SnapshotBegin`].
pub(super) fn events(lines: Lines, initial_events: bool, cuts: Cuts) -> WatchEvents {
    let phase = if initial_events { Phase::Start } else { Phase::Live };
    let watch = Watch { lines, phase, cuts };
    stream::try_unfold(watch, |mut watch| async move { Ok(watch.next().await?.map(|event| (event, watch))) }).boxed()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Nothing has been read; the current state will come first.
    Start,
    /// The current state is arriving.
    Snapshot,
    Live,
}

struct Watch {
    lines: Lines,
    phase: Phase,
    cuts: Cuts,
}

impl Watch {
    async fn next(&mut self) -> Result<Option<WatchEvent>, ClientError> {
        if self.phase == Phase::Start {
            self.phase = Phase::Snapshot;
            return Ok(Some(WatchEventKind::SnapshotBegin.into()));
        }
        loop {
            let Some(line) = self.lines.next().await? else { return Ok(None) };
            if let Some(event) = self.event(&line)? {
                return Ok(Some(event));
            }
        }
    }

    /// The event of a line. `None` for one without a meaning of its own: a bookmark inside the
    /// current state.
    fn event(&mut self, line: &Bytes) -> Result<Option<WatchEvent>, ClientError> {
        let RawEvent { event_type, object } = read_event(line)
            .map_err(|error| self.protocol(format!("an event of a watch: {}", without_value(&error))))?;
        let kind = match event_type.as_str() {
            "ADDED" => WatchEventKind::Added,
            "MODIFIED" => WatchEventKind::Modified,
            "DELETED" => WatchEventKind::Deleted,
            "BOOKMARK" => return self.bookmark(&object),
            "ERROR" => {
                return Err(match ApiStatus::from_json(None, &object) {
                    Some(status) => status.into(),
                    None => self.protocol("an ERROR event without a Status".to_owned()),
                });
            }
            other => return Ok(Some(unreadable(format!("an event of unknown type {other:?}")))),
        };
        let object = match raw_object(cut::apply(object, self.cuts)) {
            Ok(object) => object,
            Err(error) => return Ok(Some(unreadable(format!("an {event_type} event: {}", without_value(&error))))),
        };
        // The objects of the current state are in key order, so their versions do not show how much
        // has been received.
        let version = (self.phase == Phase::Live && !object.resource_version.is_empty())
            .then(|| object.resource_version.to_string());
        Ok(Some(WatchEvent { kind: kind(object), resume_version: version }))
    }

    fn bookmark(&mut self, object: &[u8]) -> Result<Option<WatchEvent>, ClientError> {
        let Bookmark { resource_version, ends_initial_events } = match read_bookmark(object) {
            Ok(bookmark) => bookmark,
            Err(error) => return Ok(Some(unreadable(format!("a BOOKMARK event: {}", without_value(&error))))),
        };
        match self.phase {
            Phase::Live => Ok(Some(WatchEventKind::Bookmark.at(&resource_version))),
            _ if ends_initial_events => {
                self.phase = Phase::Live;
                Ok(Some(WatchEventKind::SnapshotEnd.at(&resource_version)))
            }
            _ => Ok(None),
        }
    }

    fn protocol(&self, message: String) -> ClientError {
        ClientError::HttpProtocol { address: self.lines.address().to_owned(), message }
    }
}

fn unreadable(message: String) -> WatchEvent {
    WatchEventKind::Unreadable(message).into()
}
