//! A marked difference, as another kubefan sends it: applied at once, as if the state that it leads
//! to had been listed. A reader never sees a part of it, and every view marks it as a gap.

use std::sync::Arc;

use super::{CacheWriter, Change, Commit, Listing, SCHEMA_CHANGED, UpdateError, is_reencoded, new_object, same};
use crate::cache::{gap::Gap, ring::Record};
use kubefan_model::{ObjectKey, ResourceVersion, object::Object};

/// A part of [`Update::Conflated`](super::Update::Conflated).
#[derive(Debug)]
pub enum ConflatedChange {
    /// The object exists, in this state.
    Put(Object),
    /// No object has this key.
    Remove(ObjectKey),
}

impl CacheWriter {
    pub(super) fn conflated(
        &mut self,
        reason: &'static str,
        changes: Vec<ConflatedChange>,
        version: ResourceVersion,
    ) -> Result<Option<Commit>, UpdateError> {
        let from = self.version.ok_or(UpdateError::NotListed)?;
        let (mut store, before) = (self.store.clone(), self.store.clone());
        for change in changes {
            match change {
                ConflatedChange::Put(object) => {
                    let cached = store.get(object.key().as_str());
                    if !cached.is_some_and(|cached| same(cached, &object)) {
                        let object = new_object(object, cached);
                        self.packing.event(&object);
                        store.insert(self.packing.current(&object));
                    }
                }
                ConflatedChange::Remove(key) => drop(store.remove(key.as_str())),
            }
        }
        let (contradiction, history, prepared) = Default::default();
        let listing = Listing { store, reason, before, from: Some(from), contradiction, history, prepared };
        let mut commit = self.replace(listing, version)?;
        // No event is lost if only the encoding has changed.
        if let Some(Commit { change: Change::Record(Record::Gap(gap)), .. }) = &mut commit
            && reason == SCHEMA_CHANGED
            && gap.events.iter().all(|event| is_reencoded(event))
        {
            *gap = Arc::new(Gap::reencoded(version, reason, gap.events.clone()));
        }
        Ok(commit)
    }
}
