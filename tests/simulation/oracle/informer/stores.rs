//! The store of an informer: at every moment the state of one version, and at the end the truth.

use kubefan_client::{RawJson, Snapshot};

use super::{Breach, Guarantee, Walk, version_of};
use crate::{
    informer::{InformerEntry, Observed, Stored},
    truth::{self, Epoch, first_place, last_place, read_place},
};

/// Number of events beyond the version that a store names that are tried, to find the version of
/// its state.
const EVENTS_TRIED_MAX: usize = 300;

impl Walk<'_> {
    /// Checks the whole store at one moment.
    pub(super) fn read(&mut self, snapshot: &Snapshot<RawJson>, entry: &InformerEntry) -> Result<(), Breach> {
        let Some(version) = read_place(snapshot.resource_version()).map(truth::version_of) else {
            return if snapshot.is_empty() && self.version.is_none() {
                Ok(())
            } else {
                Err((Guarantee::Atomic, format!("has {} objects at no version", snapshot.len())))
            };
        };
        self.highest = self.highest.max(version);
        let before = self.version.replace(version);
        if let Some(before) = before.filter(|before| version < *before && !self.is_undone(*before, entry)) {
            return Err((Guarantee::Ordered, format!("has a store at {version}, after version {before}")));
        }
        if let Some(given) = entry.given.map(truth::version_of).filter(|given| *given != version) {
            let text = format!("has a store at {version}, and the server has given it version {given}");
            return Err((Guarantee::Bookmarkable, text));
        }
        let reached = self.truth.epochs[..=entry.epoch].iter().map(|epoch| epoch.revision).max().unwrap_or(0);
        if first_place(version) > if entry.epoch == 0 { entry.revision } else { reached } {
            let reached = truth::version_of(entry.revision);
            let text = format!("has a store at {version}, and the cluster had only reached {reached}");
            return Err((Guarantee::Bookmarkable, text));
        }
        for object in snapshot.iter() {
            self.is_true_state(object, entry)
                .map_err(|(guarantee, text)| (guarantee, format!("{text}\n  in a store at {version}")))?;
        }
        let epochs = &self.truth.epochs[..=entry.epoch];
        if epochs.iter().any(|epoch| self.is_at_or_after(epoch, version, snapshot)) || self.may_be_mixed(entry) {
            return Ok(());
        }
        Err(self.why_not(&epochs[entry.epoch], version, snapshot, entry))
    }

    /// Whether a restore may have left the store with a mix of both histories, as with any client
    /// of a restored cluster: it has got no complete state since then.
    fn may_be_mixed(&self, entry: &InformerEntry) -> bool {
        entry.epoch > 0 && !self.complete_at.is_some_and(|complete| self.is_settled(complete, entry))
    }

    /// Whether a complete state is certain to be one of the cluster's current history: every
    /// replica had noticed the restore.
    fn is_settled(&self, complete: &InformerEntry, entry: &InformerEntry) -> bool {
        let base = self.truth.epochs[entry.epoch].base;
        // Nothing is written for minutes after a restore.
        complete.epoch == entry.epoch && complete.revision > base
    }

    /// Whether the store is the state at the version, or at one of the events after it.
    fn is_at_or_after(&self, epoch: &Epoch, version: u64, snapshot: &Snapshot<RawJson>) -> bool {
        // The state before all writes of the version but the first.
        let start = first_place(version);
        if self.is_state(epoch, start, snapshot) {
            return true;
        }
        let later = epoch.writes[epoch.after(start)..].iter();
        let later = later.filter(|write| write.seen_by(self.spec.selection).is_some()).take(EVENTS_TRIED_MAX);
        later.into_iter().any(|write| self.is_state(epoch, write.place, snapshot))
    }

    fn is_state(&self, epoch: &Epoch, place: u64, snapshot: &Snapshot<RawJson>) -> bool {
        let right = epoch.at(place).values().filter(|object| self.spec.selection.has(object));
        let mut right = right.filter(|object| !self.excused.contains(&object.key));
        let mut stored = snapshot.iter().filter(|object| !self.excused.contains(object.key().as_str()));
        loop {
            match (right.next(), stored.next()) {
                (None, None) => return true,
                // The bytes were checked with the version and the uid.
                (Some(right), Some(stored))
                    if right.key == stored.key().as_str()
                        && right.version == version_of(stored)
                        && right.uid == stored.uid() => {}
                _ => return false,
            }
        }
    }

    /// Explains why a store is not the state of any version.
    fn why_not(&self, epoch: &Epoch, version: u64, snapshot: &Snapshot<RawJson>, entry: &InformerEntry) -> Breach {
        let earlier = epoch.writes[..epoch.after(last_place(version))].iter().rev();
        let earlier = earlier.filter(|write| write.seen_by(self.spec.selection).is_some()).take(EVENTS_TRIED_MAX);
        let earlier = earlier.map(|write| write.place - 1);
        if let Some(at) = earlier.into_iter().find(|at| self.is_state(epoch, *at, snapshot)) {
            return (Guarantee::Bookmarkable, format!("has a store at {version} with the state of {at}"));
        }
        let seen = |key: &str, from: u64| {
            let later = epoch.writes[epoch.after(last_place(from))..].iter();
            let mut later = later.filter_map(|write| Some((write.place, write.seen_by(self.spec.selection)?.1)));
            later.any(|(place, object)| object.key == key && place <= entry.revision)
        };
        let state = epoch.at(last_place(version));
        let has = |key: &str| state.get(key).filter(|object| self.spec.selection.has(object));
        let is_old = |stored: &&Stored| {
            let key = stored.key().as_str();
            let is_current = has(key).is_some_and(|right| right.version == version_of(stored));
            !is_current && version_of(stored) <= version && !seen(key, version_of(stored).max(version))
        };
        let wrong: Vec<_> = snapshot.iter().filter(is_old).map(|object| object.key().as_str()).collect();
        let right = state.values().filter(|object| self.spec.selection.has(object)).map(|object| object.key.as_str());
        let missing: Vec<_> = right.filter(|key| snapshot.get(key).is_none() && !seen(key, version)).collect();
        if wrong.is_empty() && missing.is_empty() {
            (Guarantee::Atomic, format!("has a store at {version} that is not the state of one version"))
        } else {
            let text = format!("has a store at {version} with old states or ghosts of {wrong:?}, without {missing:?}");
            (Guarantee::Reliable, text)
        }
    }

    /// Checks the store and the handlers after every fault has healed. `last` is a read.
    pub(super) fn end(&self, last: Option<&InformerEntry>, is_behind: bool) -> Result<(), Breach> {
        let convergent =
            |text: String| Err((Guarantee::Convergent, format!("{text}, although all faults have healed")));
        let Some((entry, Observed::Read { snapshot, .. })) = last.map(|entry| (entry, &entry.what)) else {
            return convergent("does not run".to_owned());
        };
        if self.may_be_mixed(entry) {
            return Ok(());
        }
        let (_, epoch) = self.truth.now();
        let version = snapshot.resource_version();
        let wanted = self.truth.last_seen_by(self.spec.selection);
        if read_place(version).unwrap_or(0) < wanted {
            let wanted = truth::version_of(wanted);
            return convergent(format!("has a store at {version:?}, before the event at {wanted}"));
        }
        if !self.is_state(epoch, epoch.revision, snapshot) {
            return convergent(format!("has a store at {version} that is not the truth"));
        }
        for (handler, objects) in &self.handlers {
            let told: Vec<_> = objects.values().filter_map(|known| known.told.as_ref()).collect();
            let same = |(told, stored): (&&Stored, &Stored)| {
                told.key() == stored.key() && told.resource_version() == stored.resource_version()
            };
            if told.len() != snapshot.len() || !told.iter().zip(snapshot.iter()).all(same) {
                let told = told.len();
                let stored = snapshot.len();
                return convergent(format!(
                    "has told handler {handler} of {told} objects and has {stored}, or other states"
                ));
            }
        }
        if is_behind { convergent("has a handler that is behind, or has not synced".to_owned()) } else { Ok(()) }
    }
}
