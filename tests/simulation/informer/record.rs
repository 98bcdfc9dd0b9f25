//! Everything that one informer did, with all that the oracle needs to judge it.

use std::{
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, Mutex},
    time::Duration,
};

use kubefan_client::{Deleted, Object, RawJson, Snapshot};

use super::InformerSpec;
use crate::truth::version_of;

/// The number of the handler that is slow. 0 gets every call at once, 2 is added late.
pub(crate) const SLOW: usize = 1;

/// An object as an informer has it.
pub(crate) type Stored = Arc<Object<RawJson>>;

/// A call of a handler.
#[derive(Clone, Debug)]
pub(crate) enum Call {
    Add(Stored),
    Update(Stored, Stored),
    Delete(Deleted<RawJson>),
}

impl Call {
    pub(crate) fn key(&self) -> &str {
        match self {
            Call::Add(object) | Call::Update(_, object) => object.key().as_str(),
            Call::Delete(deleted) => deleted.key().as_str(),
        }
    }
}

/// Something that an informer did or received.
#[derive(Clone, Debug)]
pub(crate) enum Observed {
    /// The program starts, without any state.
    Started,
    HandlerAdded(usize),
    /// A watch over HTTP starts from the version of this place, which has no places there.
    Resumed(u64),
    /// A list or a watch starts at the apiserver. The program may have one such start in a window.
    ApiserverStart {
        window: Duration,
    },
    /// The server has sent a complete state, up to its end: that of this place.
    Complete(Option<u64>),
    /// The server has sent a gap or a catch-up, up to its end.
    Batch,
    /// A list or a watch failed, or the connection broke.
    Failed(String),
    /// A body over HTTP has a content coding that cannot be decoded.
    Undecodable(String),
    /// A call of a handler, and the store's state of the object at that moment.
    Call {
        handler: usize,
        call: Call,
        stored: Option<Stored>,
    },
    /// The whole store at one moment, and whether its index agrees with it.
    Read {
        snapshot: Snapshot<RawJson>,
        index: Result<(), String>,
    },
}

/// An observation with its time, and the cluster's epoch and revision at that time.
#[derive(Clone, Debug)]
pub(crate) struct InformerEntry {
    pub(crate) at: Duration,
    pub(crate) epoch: usize,
    pub(crate) revision: u64,
    pub(crate) what: Observed,
    /// The last version that the server gave. `None` if it has not given one since the start or the
    /// last list.
    pub(crate) given: Option<u64>,
}

fn name(object: &Stored) -> String {
    format!("{} uid {} at {}", object.key(), &object.uid()[..object.uid().len().min(8)], object.resource_version())
}

impl fmt::Display for InformerEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>10.3} s  ", self.at.as_secs_f64())?;
        match &self.what {
            Observed::Started => write!(f, "the program starts"),
            Observed::HandlerAdded(handler) => write!(f, "handler {handler} is added"),
            Observed::Resumed(place) => write!(f, "a watch from version {}", version_of(*place)),
            Observed::ApiserverStart { window } => write!(f, "a start at the apiserver, one in {window:?}"),
            Observed::Complete(place) => write!(f, "a complete state at {place:?}; given {:?}", self.given),
            Observed::Batch => write!(f, "a gap or a catch-up; given {:?}", self.given),
            Observed::Failed(why) => write!(f, "failed: {why}"),
            Observed::Undecodable(why) => write!(f, "undecodable: {why}"),
            Observed::Call { handler, call, .. } => match call {
                Call::Add(object) => write!(f, "handler {handler}: add {}", name(object)),
                Call::Update(old, new) => {
                    write!(f, "handler {handler}: update {}, before at {}", name(new), old.resource_version())
                }
                Call::Delete(Deleted::Known(object)) => write!(f, "handler {handler}: delete {}", name(object)),
                Call::Delete(Deleted::FinalStateUnknown(unknown)) => {
                    let last = unknown.last_known.as_ref().map(|last| last.resource_version().to_owned());
                    write!(f, "handler {handler}: delete {}, last known at {last:?}", unknown.key)
                }
            },
            Observed::Read { snapshot, .. } => {
                write!(f, "read: {} objects at {:?}", snapshot.len(), snapshot.resource_version())
            }
        }
    }
}

/// Everything that one informer did.
#[derive(Clone, Debug)]
pub(crate) struct InformerHistory {
    pub(crate) spec: InformerSpec,
    pub(crate) entries: Vec<InformerEntry>,
}

impl InformerHistory {
    /// A hash that differs between two runs that differ.
    pub(crate) fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for entry in &self.entries {
            (entry.at, entry.epoch, entry.revision, entry.given, entry.to_string()).hash(&mut hasher);
            match &entry.what {
                Observed::Call { call: Call::Add(object) | Call::Update(_, object), .. } => {
                    object.as_bytes().hash(&mut hasher);
                }
                Observed::Read { snapshot, .. } => {
                    for object in snapshot.iter() {
                        (object.key(), object.uid(), object.resource_version()).hash(&mut hasher);
                    }
                }
                _ => {}
            }
        }
        hasher.finish()
    }
}

/// A history that is being written. Clones write to the same one.
#[derive(Clone)]
pub(crate) struct InformerRecorder {
    history: Arc<Mutex<InformerHistory>>,
    given: Arc<Mutex<Option<u64>>>,
    clock: Arc<dyn Fn() -> (Duration, usize, u64) + Send + Sync>,
}

impl InformerRecorder {
    /// `clock` returns the time, the epoch and the revision.
    pub(crate) fn new(
        spec: InformerSpec,
        clock: Arc<dyn Fn() -> (Duration, usize, u64) + Send + Sync>,
    ) -> InformerRecorder {
        let history = Arc::new(Mutex::new(InformerHistory { spec, entries: Vec::new() }));
        InformerRecorder { history, given: Arc::default(), clock }
    }

    pub(crate) fn note(&self, what: Observed) {
        if matches!(what, Observed::Started) {
            self.give(None);
        }
        let (at, epoch, revision) = (self.clock)();
        let given = *self.given.lock().unwrap();
        self.history.lock().unwrap().entries.push(InformerEntry { at, epoch, revision, what, given });
    }

    /// The server has given this version.
    pub(super) fn give(&self, version: Option<u64>) {
        *self.given.lock().unwrap() = version;
    }

    pub(crate) fn spec(&self) -> InformerSpec {
        self.history.lock().unwrap().spec.clone()
    }

    pub(crate) fn history(&self) -> InformerHistory {
        self.history.lock().unwrap().clone()
    }
}
