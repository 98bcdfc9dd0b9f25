//! The delta base: the JSON bytes of every object that a watch was sent. The next delta of an
//! object applies to these bytes.
//!
//! The hazard is a base that differs from the server's: it would produce wrong bytes. Therefore
//! each delta carries a checksum of its base. After any mismatch the whole base is discarded, and
//! wrong bytes never reach the caller.

use std::collections::HashMap;

use bytes::Bytes;

use kubefan_common::{
    encoding::{
        chunk::ChunkError,
        delta::{self, DeltaError},
    },
    proto::v1alpha1::{Event, EventType},
};

/// Approximate memory of an entry besides the object's bytes and its key, in bytes.
const ENTRY_BYTES: usize = 128;

/// The reason why the object of an event cannot be determined.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum DeltaBaseError {
    #[error("a delta arrived for an object without a delta base")]
    Missing,
    #[error(transparent)]
    Delta(#[from] DeltaError),
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// The base was dropped because of the memory limit, so no delta can be applied.
    #[error("the objects exceed {0} bytes, the limit of delta_base_bytes_max; continuing without deltas")]
    OverLimit(usize),
}

/// The objects of a watch, and whether they are complete.
#[derive(Debug)]
pub(super) struct DeltaBase {
    objects: HashMap<String, Bytes>,
    bytes: usize,
    bytes_max: usize,
    object_bytes_max: usize,
    over_limit: bool,
    /// Whether every object of the watch is here. True after a snapshot that fit the limit.
    complete: bool,
}

impl DeltaBase {
    pub(super) fn new(bytes_max: usize, object_bytes_max: usize) -> Self {
        Self { objects: HashMap::new(), bytes: 0, bytes_max, object_bytes_max, over_limit: false, complete: false }
    }

    /// Starts a snapshot, which replaces all objects.
    pub(super) fn begin_snapshot(&mut self) {
        *self = Self::new(self.bytes_max, self.object_bytes_max);
    }

    /// Ends the snapshot: the base is complete, unless it exceeded the limit.
    pub(super) fn end_snapshot(&mut self) {
        self.complete = !self.over_limit;
    }

    /// Whether every object of the watch is here.
    pub(super) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Discards all objects.
    pub(super) fn clear(&mut self) {
        self.begin_snapshot();
    }

    /// Replaces the event's delta by the whole object, and stores the object as the next base. A
    /// deleted object is removed from the base.
    pub(super) fn resolve(&mut self, event: &mut Event) -> Result<(), DeltaBaseError> {
        let key = format!("{}/{}", event.namespace, event.name);
        match event.delta.take() {
            Some(_) if self.over_limit => return Err(DeltaBaseError::OverLimit(self.bytes_max)),
            Some(delta) => {
                let base = self.objects.get(&key).ok_or(DeltaBaseError::Missing)?;
                event.object = delta::decode(base, &delta, self.object_bytes_max)?;
            }
            // Copied, because a stored slice would keep the whole network buffer or chunk in
            // memory.
            None => event.object = Bytes::copy_from_slice(&event.object),
        }
        if event.r#type() == EventType::Deleted {
            self.remove(&key);
        } else {
            self.insert(key, event.object.clone());
        }
        Ok(())
    }

    fn insert(&mut self, key: String, object: Bytes) {
        if self.over_limit {
            return;
        }
        self.bytes += object.len() + key.len() + ENTRY_BYTES;
        let name_bytes = key.len();
        if let Some(before) = self.objects.insert(key, object) {
            self.bytes -= before.len() + name_bytes + ENTRY_BYTES;
        }
        if self.bytes > self.bytes_max {
            self.clear();
            self.over_limit = true;
        }
    }

    fn remove(&mut self, key: &str) {
        if let Some(before) = self.objects.remove(key) {
            self.bytes -= before.len() + key.len() + ENTRY_BYTES;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: EventType, object: &str) -> Event {
        Event { r#type: kind.into(), name: "a".to_owned(), object: object.to_owned().into(), ..Event::default() }
    }

    fn changed(base: &str, new: &str) -> Event {
        let delta = delta::object_delta("1".to_owned(), base.as_bytes(), new.as_bytes());
        Event { delta: Some(delta.expect("the delta is smaller than the object")), ..event(EventType::Modified, "") }
    }

    fn states() -> [String; 3] {
        ["one", "two", "three"].map(|state| format!("{{\"spec\":\"{}\",\"status\":\"{state}\"}}", "long ".repeat(20)))
    }

    fn resolved(delta_base: &mut DeltaBase, mut event: Event) -> Result<String, DeltaBaseError> {
        delta_base.resolve(&mut event)?;
        assert_eq!(event.delta, None);
        Ok(String::from_utf8(event.object.to_vec()).expect("JSON"))
    }

    #[test]
    fn each_delta_applies_to_the_previous_state() {
        let [one, two, three] = &states();
        let mut delta_base = DeltaBase::new(1 << 20, 1 << 20);
        assert_eq!(resolved(&mut delta_base, event(EventType::Added, one)).as_ref(), Ok(one));
        assert_eq!(resolved(&mut delta_base, changed(one, two)).as_ref(), Ok(two));
        assert_eq!(resolved(&mut delta_base, changed(two, three)).as_ref(), Ok(three));
        let wrong = resolved(&mut delta_base, changed(one, two));
        assert!(matches!(wrong, Err(DeltaBaseError::Delta(DeltaError::WrongBase { .. }))), "{wrong:?}");
    }

    #[test]
    fn a_deleted_object_is_no_longer_a_delta_base() {
        let [one, two, _] = &states();
        let mut delta_base = DeltaBase::new(1 << 20, 1 << 20);
        delta_base.begin_snapshot();
        resolved(&mut delta_base, event(EventType::Added, one)).unwrap();
        delta_base.end_snapshot();
        let gone = Event { r#type: EventType::Deleted.into(), ..changed(one, two) };
        assert_eq!(resolved(&mut delta_base, gone).as_ref(), Ok(two), "the last state may be a delta");
        assert_eq!((delta_base.bytes, delta_base.is_complete()), (0, true));
        assert_eq!(resolved(&mut delta_base, changed(two, one)), Err(DeltaBaseError::Missing));
    }

    #[test]
    fn above_the_limit_nothing_is_stored_and_a_delta_is_an_error() {
        let [one, two, _] = &states();
        let mut delta_base = DeltaBase::new(one.len(), 1 << 20);
        delta_base.begin_snapshot();
        assert_eq!(
            resolved(&mut delta_base, event(EventType::Added, one)).as_ref(),
            Ok(one),
            "the event itself is still returned"
        );
        delta_base.end_snapshot();
        assert_eq!((delta_base.bytes, delta_base.is_complete(), delta_base.objects.len()), (0, false, 0));
        assert_eq!(resolved(&mut delta_base, changed(one, two)), Err(DeltaBaseError::OverLimit(one.len())));
    }
}
