//! Everything that one subscriber received, with all that the oracle needs to judge it.

use std::{
    fmt,
    hash::{Hash, Hasher},
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use kubefan_common::proto::v1alpha1::{DeleteReason, Event, EventType, WatchResponse, watch_response::Message};

use super::{
    projection::Projected,
    schema,
    selection::Selection,
    truth::{Kind, read_place},
};

/// The identity of a subscriber and its request.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) number: usize,
    pub(crate) selection: Selection,
    pub(crate) encoding: Encoding,
    pub(crate) interface: Interface,
    /// gRPC with the generated client only.
    pub(crate) projected: Projected,
    /// `on_lag` CONFLATE.
    pub(crate) conflates: bool,
    /// `on_expired` RESTART.
    pub(crate) restarts: bool,
}

/// The interface that a subscriber reads from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Interface {
    /// gRPC with the generated client.
    Generated,
    /// gRPC with the client library.
    Library,
    /// Plain HTTP requests.
    Http(HttpReads),
}

/// Reads of a program over HTTP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HttpReads {
    /// Protobuf is preferred to JSON.
    pub(crate) is_protobuf: bool,
    /// One connection for all requests. Otherwise one for each request, each to the next replica.
    pub(crate) is_http2: bool,
    /// Requests accept gzip.
    pub(crate) accepts_gzip: bool,
    /// Watches from a version ask for bookmarks.
    pub(crate) bookmarks: bool,
    /// The limit of lists.
    pub(crate) page_size: Option<u32>,
    /// The program belongs to a crowd, which reads from one replica.
    pub(crate) is_in_crowd: bool,
}

/// The freshness that a read over HTTP demands.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(crate) enum Freshness {
    Consistent,
    Any,
    NotOlderThan(u64),
    Exact(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    Json,
    Zstd,
    Deltas,
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spec { number, selection, interface, projected, encoding, conflates, restarts } = self;
        let by = match interface {
            Interface::Generated => "generated client",
            Interface::Library => "library",
            Interface::Http(reads) => {
                let gzip = if reads.accepts_gzip { ", gzip" } else { "" };
                return write!(f, "subscriber {number} ({selection:?}, {reads:?}{gzip})");
            }
        };
        let projection = match projected.request() {
            None => String::new(),
            Some(_) => format!(", {projected:?}"),
        };
        let lag = if *conflates { "CONFLATE" } else { "EXPIRE" };
        let expired = if *restarts { "RESTART" } else { "FAIL" };
        write!(f, "subscriber {number} ({selection:?}, {encoding:?}, {by}, {lag}, {expired}{projection})")
    }
}

/// One event as the subscriber received it.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub(crate) struct ReceivedEvent {
    pub(crate) kind: Kind,
    pub(crate) key: String,
    pub(crate) uid: String,
    /// The version of the event, without a place inside it.
    pub(crate) version: u64,
    /// With the number of the first schema.
    pub(crate) bytes: Bytes,
    /// The number of the schema in the bytes.
    pub(crate) schema: Option<u8>,
}

impl ReceivedEvent {
    /// Reads an event that carries the whole object.
    pub(crate) fn of(event: &Event) -> ReceivedEvent {
        let kind = match (event.r#type(), event.delete_reason()) {
            (EventType::Added, DeleteReason::Unspecified) => Kind::Added,
            (EventType::Modified, DeleteReason::Unspecified) => Kind::Modified,
            (EventType::Deleted, DeleteReason::ObjectDeleted) => Kind::Deleted,
            (EventType::Deleted, DeleteReason::LeftSelector) => Kind::Left,
            (EventType::Deleted, DeleteReason::FinalStateUnknown) => Kind::Gone,
            _ => Kind::Invalid,
        };
        let (bytes, schema) = schema::split(event.object.clone());
        ReceivedEvent {
            kind,
            key: format!("{}/{}", event.namespace, event.name),
            uid: event.uid.clone(),
            version: event.resource_version.parse().unwrap_or(0),
            bytes,
            schema,
        }
    }
}

/// One entry of a history: something the subscriber did or received.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub(crate) enum Observation {
    /// A read over HTTP was sent, that demands this.
    Asked(Freshness),
    /// A watch started, from a version or, if `None`, with a snapshot.
    Opened {
        replica: usize,
        from: Option<u64>,
    },
    SnapshotBegin {
        version: u64,
        restarted_from: Option<u64>,
    },
    SnapshotEnd {
        objects: i64,
    },
    GapBegin {
        from: u64,
        reason: String,
    },
    GapEnd,
    CatchUpBegin {
        from: u64,
    },
    CatchUpEnd,
    Event(ReceivedEvent),
    Bookmark,
    /// The stream ended or was refused.
    Ended {
        code: String,
        reason: String,
        message: String,
    },
    /// A message was broken or did not fit the subscriber's delta bases.
    Undecodable(String),
    /// The subscriber drops its state and will ask for a snapshot. `goes_on`: the library does so
    /// on behalf of its user, and the user's versions must not go back.
    StartsOver {
        goes_on: bool,
    },
}

/// An observation with its time, the cluster's epoch and revision at that time, and the resume
/// version that came with it. Both are places, as everywhere but in events.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) at: Duration,
    pub(crate) epoch: usize,
    pub(crate) revision: u64,
    pub(crate) what: Observation,
    pub(crate) resume: Option<u64>,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>10.3} s  ", self.at.as_secs_f64())?;
        match &self.what {
            Observation::Event(ReceivedEvent { kind, key, uid, version, bytes, .. }) => {
                write!(f, "{kind:?} {key} uid {} at {version}, {} bytes", &uid[..uid.len().min(8)], bytes.len())?;
            }
            other => write!(f, "{other:?}")?,
        }
        match self.resume {
            Some(resume) => write!(f, "; resume {resume}"),
            None => Ok(()),
        }
    }
}

/// Everything that one subscriber received.
#[derive(Clone, Debug)]
pub(crate) struct History {
    pub(crate) spec: Spec,
    pub(crate) entries: Vec<Entry>,
}

impl History {
    /// A hash that differs between two runs that differ.
    pub(crate) fn digest(&self) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        self.entries.hash(&mut hasher);
        hasher.finish()
    }
}

/// A history that is being written. Clones write to the same one.
#[derive(Clone)]
pub(crate) struct Recorder {
    history: Arc<Mutex<History>>,
    clock: Arc<dyn Fn() -> (Duration, usize, u64) + Send + Sync>,
}

impl Recorder {
    /// `clock` returns the time, the epoch and the revision.
    pub(crate) fn new(spec: Spec, clock: Arc<dyn Fn() -> (Duration, usize, u64) + Send + Sync>) -> Recorder {
        Recorder { history: Arc::new(Mutex::new(History { spec, entries: Vec::new() })), clock }
    }

    pub(crate) fn note(&self, what: Observation, resume: Option<u64>) {
        let (at, epoch, revision) = (self.clock)();
        self.history.lock().unwrap().entries.push(Entry { at, epoch, revision, what, resume });
    }

    /// The last resume version since the subscriber last dropped its state, or 0.
    pub(crate) fn reached(&self) -> u64 {
        let history = self.history.lock().unwrap();
        let given =
            history.entries.iter().rev().take_while(|entry| !matches!(entry.what, Observation::StartsOver { .. }));
        given.filter_map(|entry| entry.resume).next().unwrap_or(0)
    }

    /// The highest resume version so far. It need not be the last one: a program may start over.
    pub(crate) fn highest(&self) -> u64 {
        self.history.lock().unwrap().entries.iter().filter_map(|entry| entry.resume).max().unwrap_or(0)
    }

    pub(crate) fn spec(&self) -> Spec {
        self.history.lock().unwrap().spec.clone()
    }

    pub(crate) fn history(&self) -> History {
        self.history.lock().unwrap().clone()
    }
}

/// The place in a field of a message; `None` if the field is empty.
pub(crate) fn version(text: &str) -> Option<u64> {
    (!text.is_empty()).then(|| read_place(text).expect("a version of the simulator is a number"))
}

/// The observation in a message of a watch. `None` for events and snapshot chunks: only the
/// subscriber's delta bases can decode them.
pub(crate) fn mark(response: &WatchResponse) -> Option<Observation> {
    let number = |text: &str| version(text).unwrap_or(0);
    Some(match response.message.as_ref()? {
        Message::SnapshotBegin(begin) => Observation::SnapshotBegin {
            version: number(&begin.resource_version),
            restarted_from: version(&begin.restarted_from),
        },
        Message::SnapshotEnd(end) => Observation::SnapshotEnd { objects: end.object_count },
        Message::GapBegin(begin) => {
            Observation::GapBegin { from: number(&begin.resource_version), reason: begin.reason.clone() }
        }
        Message::GapEnd(_) => Observation::GapEnd,
        Message::CatchUpBegin(begin) => Observation::CatchUpBegin { from: number(&begin.resource_version) },
        Message::CatchUpEnd(_) => Observation::CatchUpEnd,
        Message::Bookmark(_) => Observation::Bookmark,
        Message::Event(_) | Message::SnapshotChunk(_) => return None,
    })
}
