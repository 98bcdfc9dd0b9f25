//! The true history: every write with its version and bytes, in epochs. An epoch ends when the
//! cluster is restored from a backup, because the same versions mean something else afterwards.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use serde_json::Value;
use tokio::time::Instant;

use super::{schema, selection::Selection};

/// The managed fields of the pods that have some, as the apiserver writes them.
pub(crate) const MANAGED_FIELDS: &str = r#""managedFields":[{"manager":"kubelet","operation":"Update"}]"#;

/// The number of places in a version, more than a transaction has writes. The oracle counts in
/// places: those of version 218 start at 218 × `PLACES`, and later writes of one version have the
/// next ones.
const PLACES: u64 = 1 << 8;

/// The first place of a version: that of its first write, and of the version itself if it has none.
pub(crate) fn first_place(version: u64) -> u64 {
    version * PLACES
}

/// The last place of a version, after all of its writes.
pub(crate) fn last_place(version: u64) -> u64 {
    version * PLACES + PLACES - 1
}

/// The version that a place is in.
pub(crate) fn version_of(place: u64) -> u64 {
    place / PLACES
}

/// The place that kubefan names so: `218`, `218.1` for the second event of that version, or
/// `218.end` after all of them.
pub(crate) fn read_place(text: &str) -> Option<u64> {
    let (version, sub) = text.split_once('.').unwrap_or((text, "0"));
    let version = version.parse::<u64>().ok()?;
    if sub == "end" {
        return Some(last_place(version));
    }
    let sub = sub.parse::<u64>().ok()?;
    (sub < PLACES).then(|| first_place(version) + sub)
}

/// A pod as it was at one version.
#[derive(Debug)]
pub(crate) struct Object {
    /// `namespace/name`, ordered like etcd's keys.
    pub(crate) key: String,
    pub(crate) uid: String,
    pub(crate) version: u64,
    pub(crate) namespace: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) node: String,
    pub(crate) phase: String,
    bytes: String,
    value: Value,
}

impl PartialEq for Object {
    fn eq(&self, other: &Object) -> bool {
        self.bytes == other.bytes
    }
}

impl Eq for Object {}

impl Object {
    /// Parses an object as a watch of the apiserver sends it, apart from the number of its schema.
    pub(crate) fn read(bytes: &[u8]) -> Object {
        let bytes = String::from_utf8(schema::without_number(bytes).0.into_owned()).unwrap();
        let value: Value = serde_json::from_str(&bytes).unwrap();
        let text = |pointer: &str| value.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let labels = value.pointer("/metadata/labels").and_then(Value::as_object);
        let labels = labels.into_iter().flatten().map(|(k, v)| (k.clone(), v.as_str().unwrap_or_default().to_owned()));
        let namespace = text("/metadata/namespace");
        Object {
            key: format!("{namespace}/{}", text("/metadata/name")),
            uid: text("/metadata/uid"),
            version: text("/metadata/resourceVersion").parse().unwrap(),
            labels: labels.collect(),
            node: text("/spec/nodeName"),
            phase: text("/status/phase"),
            namespace,
            bytes,
            value,
        }
    }

    /// The object as JSON.
    pub(crate) fn value(&self) -> &Value {
        &self.value
    }

    /// The bytes that a subscriber gets for the object at `version`. With deltas this is the
    /// canonical form, which has no version.
    pub(crate) fn bytes_at(&self, version: u64, canonical: bool) -> Bytes {
        let own = format!(r#""resourceVersion":"{}""#, self.version);
        let bytes = if canonical {
            self.bytes.replacen(&(own + ","), "", 1).replacen(&format!(",{MANAGED_FIELDS}"), "", 1)
        } else {
            self.bytes.replacen(&own, &format!(r#""resourceVersion":"{version}""#), 1)
        };
        Bytes::from(bytes)
    }

    /// Whether `bytes` have the object's selectable attributes: namespace, name, uid, labels and
    /// selectable fields.
    pub(crate) fn has_attributes_in(&self, bytes: &[u8]) -> bool {
        let Ok(value) = serde_json::from_slice::<Value>(bytes) else { return false };
        let is = |pointer: &str, expected: &str| {
            value.pointer(pointer).and_then(Value::as_str).unwrap_or_default() == expected
        };
        let labels = value.pointer("/metadata/labels").and_then(Value::as_object);
        let labels = labels.into_iter().flatten().map(|(k, v)| (k.clone(), v.as_str().unwrap_or_default().to_owned()));
        let key = self.key.split_once('/').unwrap_or_default();
        is("/metadata/namespace", key.0)
            && is("/metadata/name", key.1)
            && is("/metadata/uid", &self.uid)
            && is("/spec/nodeName", &self.node)
            && is("/status/phase", &self.phase)
            && labels.collect::<BTreeMap<_, _>>() == self.labels
    }
}

/// One write of a pod.
#[derive(Clone, Debug)]
pub(crate) struct Write {
    pub(crate) place: u64,
    /// The time since the start of the run.
    pub(crate) at: Duration,
    pub(crate) before: Option<Arc<Object>>,
    pub(crate) after: Option<Arc<Object>>,
}

/// A change of an object, from the subscriber's point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Added,
    Modified,
    /// The object was deleted.
    Deleted,
    /// The object no longer matches the selector.
    Left,
    /// The object is gone after a marked span; how it ended is not known.
    Gone,
    /// An event type and a delete reason that exclude each other.
    Invalid,
}

impl Kind {
    /// Whether the subscriber loses the object.
    pub(crate) fn removes(self) -> bool {
        matches!(self, Kind::Deleted | Kind::Left | Kind::Gone)
    }
}

impl Write {
    pub(crate) fn version(&self) -> u64 {
        version_of(self.place)
    }

    /// The key of the pod.
    pub(crate) fn key(&self) -> &str {
        self.before.iter().chain(&self.after).next().map_or("", |object| &object.key)
    }

    /// The event of this write for a selection, and the object to send.
    pub(crate) fn seen_by(&self, selection: Selection) -> Option<(Kind, &Arc<Object>)> {
        let has = |object: &&Arc<Object>| selection.has(object);
        match (self.before.as_ref().filter(has), self.after.as_ref().filter(has)) {
            (None, Some(after)) => Some((Kind::Added, after)),
            (Some(_), Some(after)) => Some((Kind::Modified, after)),
            (Some(before), None) if self.after.is_some() => Some((Kind::Left, before)),
            (Some(before), None) => Some((Kind::Deleted, before)),
            (None, None) => None,
        }
    }
}

/// The pods at one place, by key.
pub(crate) type State = imbl::OrdMap<String, Arc<Object>>;

/// The history from the start of the cluster up to a restore.
#[derive(Clone, Default)]
pub(crate) struct Epoch {
    /// Ordered by place.
    pub(crate) writes: Vec<Write>,
    /// The state before the first write, and after each write.
    states: Vec<State>,
    /// The last place of the last version of any resource.
    pub(crate) revision: u64,
    /// Up to this place the history is that of the previous epoch.
    pub(crate) base: u64,
}

impl Epoch {
    fn new() -> Epoch {
        Epoch { states: vec![State::new()], ..Epoch::default() }
    }

    /// The index of the first write after a place.
    pub(crate) fn after(&self, place: u64) -> usize {
        self.writes.partition_point(|write| write.place <= place)
    }

    /// The pods at a place.
    pub(crate) fn at(&self, place: u64) -> &State {
        &self.states[self.after(place)]
    }

    /// The writes of a version.
    pub(crate) fn writes_of(&self, version: u64) -> &[Write] {
        let start = self.writes.partition_point(|write| write.place < first_place(version));
        &self.writes[start..self.after(last_place(version))]
    }
}

/// The whole history of the cluster.
pub(crate) struct Truth {
    started: Instant,
    pub(crate) epochs: Vec<Epoch>,
    /// Number of schemas so far.
    pub(crate) schemas: usize,
    /// The number of the current schema.
    pub(crate) schema: u8,
}

impl Truth {
    pub(crate) fn new() -> Truth {
        Truth { started: Instant::now(), epochs: vec![Epoch::new()], schemas: 1, schema: 0 }
    }

    /// The current epoch and its number.
    pub(crate) fn now(&self) -> (usize, &Epoch) {
        (self.epochs.len() - 1, self.epochs.last().unwrap())
    }

    /// The current state.
    pub(crate) fn state(&self) -> &State {
        self.now().1.states.last().unwrap()
    }

    /// Records a write of another resource.
    pub(crate) fn moved(&mut self, revision: u64) {
        self.epochs.last_mut().unwrap().revision = last_place(revision);
    }

    /// Records a write or delete of a pod.
    pub(crate) fn wrote(&mut self, version: u64, key: &str, after: Option<Object>) {
        let at = self.started.elapsed();
        let epoch = self.epochs.last_mut().unwrap();
        let same = epoch.writes.last().map(|last| last.place).filter(|last| version_of(*last) == version);
        let place = same.map_or(first_place(version), |last| last + 1);
        assert!(version >= version_of(epoch.revision), "the simulator's versions never decrease");
        epoch.revision = last_place(version);
        let mut state = epoch.states.last().unwrap().clone();
        let after = after.map(Arc::new);
        let before = match &after {
            Some(object) => state.insert(key.to_owned(), object.clone()),
            None => state.remove(key),
        };
        epoch.writes.push(Write { place, at, before, after });
        epoch.states.push(state);
    }

    /// Records that the cluster was restored to its state at `version`.
    pub(crate) fn restored(&mut self, version: u64) {
        let mut epoch = self.epochs.last().unwrap().clone();
        let kept = epoch.after(last_place(version));
        epoch.writes.truncate(kept);
        epoch.states.truncate(kept + 1);
        epoch.revision = last_place(version);
        epoch.base = last_place(version);
        self.epochs.push(epoch);
    }

    /// The first place of the version of the last event that a selection gets.
    pub(crate) fn last_seen_by(&self, selection: Selection) -> u64 {
        let seen = self.now().1.writes.iter().rev().find(|write| write.seen_by(selection).is_some());
        seen.map_or(0, |write| first_place(write.version()))
    }
}
