//! The bytes of every object that a watch was sent, from which deltas make the next ones.
//!
//! The hazard is a base that is not the server's. Whatever does not fit is an error, and then nothing that is kept is trusted any
//! more: wrong bytes are never passed on.

use std::collections::HashMap;

use bytes::Bytes;

use kubefan_common::{
    encoding::{
        chunk::ChunkError,
        delta::{self, DeltaError},
    },
    proto::v1alpha1::{Event, EventType},
};

/// What an entry costs beside the object's bytes and its name, about.
const ENTRY_BYTES: usize = 128;

/// Why an event's object cannot be told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum KeptError {
    #[error("a delta for an object that is not kept")]
    Missing,
    #[error(transparent)]
    Delta(#[from] DeltaError),
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// Nothing is kept any more, so that no delta can be used.
    #[error(
        "the objects take more than {0} bytes, the limit for what is kept (kept_bytes_max); going on without deltas"
    )]
    OverLimit(usize),
}

/// What is kept, and whether that is all there is.
#[derive(Debug)]
pub(super) struct Kept {
    objects: HashMap<String, Bytes>,
    bytes: usize,
    bytes_max: usize,
    object_bytes_max: usize,
    over_limit: bool,
    /// It began with a snapshot, so every object of the watch is here.
    whole: bool,
}

impl Kept {
    pub(super) fn new(bytes_max: usize, object_bytes_max: usize) -> Self {
        Self { objects: HashMap::new(), bytes: 0, bytes_max, object_bytes_max, over_limit: false, whole: false }
    }

    /// A snapshot begins: what was kept is replaced.
    pub(super) fn begin(&mut self) {
        *self = Self::new(self.bytes_max, self.object_bytes_max);
    }

    /// The snapshot is complete.
    pub(super) fn end(&mut self) {
        self.whole = !self.over_limit;
    }

    /// Whether every object of the watch is here.
    pub(super) fn is_whole(&self) -> bool {
        self.whole
    }

    /// Trusts nothing that is kept.
    pub(super) fn forget(&mut self) {
        self.begin();
    }

    /// Gives the event its object, and keeps that.
    pub(super) fn resolve(&mut self, event: &mut Event) -> Result<(), KeptError> {
        let key = format!("{}/{}", event.namespace, event.name);
        match event.delta.take() {
            Some(_) if self.over_limit => return Err(KeptError::OverLimit(self.bytes_max)),
            Some(delta) => {
                let base = self.objects.get(&key).ok_or(KeptError::Missing)?;
                event.object = delta::decode(base, &delta, self.object_bytes_max)?;
            }
            // What is kept long must not hold on to the network's buffer or to a whole chunk.
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
            self.forget();
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
        Event { delta: Some(delta.expect("it pays")), ..event(EventType::Modified, "") }
    }

    fn states() -> [String; 3] {
        ["one", "two", "three"].map(|state| format!("{{\"spec\":\"{}\",\"status\":\"{state}\"}}", "long ".repeat(20)))
    }

    fn resolved(kept: &mut Kept, mut event: Event) -> Result<String, KeptError> {
        kept.resolve(&mut event)?;
        assert_eq!(event.delta, None);
        Ok(String::from_utf8(event.object.to_vec()).expect("JSON"))
    }

    #[test]
    fn each_state_is_made_from_the_one_before() {
        let [one, two, three] = &states();
        let mut kept = Kept::new(1 << 20, 1 << 20);
        assert_eq!(resolved(&mut kept, event(EventType::Added, one)).as_ref(), Ok(one));
        assert_eq!(resolved(&mut kept, changed(one, two)).as_ref(), Ok(two));
        assert_eq!(resolved(&mut kept, changed(two, three)).as_ref(), Ok(three));
        let wrong = resolved(&mut kept, changed(one, two));
        assert!(matches!(wrong, Err(KeptError::Delta(DeltaError::WrongBase { .. }))), "{wrong:?}");
    }

    #[test]
    fn what_was_deleted_is_no_base() {
        let [one, two, _] = &states();
        let mut kept = Kept::new(1 << 20, 1 << 20);
        kept.begin();
        resolved(&mut kept, event(EventType::Added, one)).unwrap();
        kept.end();
        let gone = Event { r#type: EventType::Deleted.into(), ..changed(one, two) };
        assert_eq!(resolved(&mut kept, gone).as_ref(), Ok(two), "the last state may come as a delta");
        assert_eq!((kept.bytes, kept.is_whole()), (0, true));
        assert_eq!(resolved(&mut kept, changed(two, one)), Err(KeptError::Missing));
    }

    #[test]
    fn over_the_limit_nothing_is_kept_and_a_delta_is_refused() {
        let [one, two, _] = &states();
        let mut kept = Kept::new(one.len(), 1 << 20);
        kept.begin();
        assert_eq!(resolved(&mut kept, event(EventType::Added, one)).as_ref(), Ok(one), "it is passed on all the same");
        kept.end();
        assert_eq!((kept.bytes, kept.is_whole(), kept.objects.len()), (0, false, 0));
        assert_eq!(resolved(&mut kept, changed(one, two)), Err(KeptError::OverLimit(one.len())));
    }
}
