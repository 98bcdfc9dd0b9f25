//! Judges an informer: the calls of its handlers, and the states of its store.
//!
//! For each handler and object the calls must be a conflation of the true history: states that
//! existed, in their order, each continuing from the one that the handler had before. The store
//! must at every moment be the state of one version, not below the version that it names.

mod stores;

use std::collections::{BTreeMap, BTreeSet, HashSet};

use kubefan_client::Deleted;

use super::{Breach, Guarantee, Violation};
use crate::{
    informer::{ApiserverUse, Call, InformerEntry, InformerHistory, InformerSpec, Observed, SLOW, Stored},
    schema,
    truth::{self, Epoch, Object, Truth, Write, first_place, last_place},
};

/// A handler's state of one object.
#[derive(Default)]
struct Known {
    /// The last state that it got, unless the object is deleted.
    told: Option<Stored>,
    /// No later call may be about a state before this version.
    floor: u64,
    /// The time of the last call.
    at: std::time::Duration,
    /// The calls that repeated the same version.
    repeated: usize,
}

struct Walk<'a> {
    truth: &'a Truth,
    spec: &'a InformerSpec,
    /// By handler, then by key.
    handlers: BTreeMap<usize, BTreeMap<String, Known>>,
    /// The time of the last complete state, gap or catch-up.
    conflated: Option<std::time::Duration>,
    /// The complete states since the start of the program.
    complete: usize,
    /// The gaps and catch-ups since the start of the program, in a seed whose schema changes. A
    /// replica sends objects again that another one has sent with the new schema.
    reencoded: usize,
    /// The entry of the last complete state.
    complete_at: Option<&'a InformerEntry>,
    /// The version that the store named last.
    version: Option<u64>,
    /// The highest version that the informer has reached since the start of the program.
    highest: u64,
    /// The first epoch whose start the program may have seen.
    first_epoch: usize,
    /// Objects that may lack an event: over HTTP a watch was resumed from the version of several
    /// events, or a state has that version, as at the apiserver.
    excused: BTreeSet<String>,
    /// The time of the last start at the apiserver since the start of the program.
    apiserver_start: Option<std::time::Duration>,
    /// Objects, by address, that are true states.
    true_states: HashSet<usize>,
    /// For each object, the versions in the first epoch at which the selection has an event.
    events: BTreeMap<&'a str, Vec<u64>>,
}

/// Judges one history. `ended`: every fault has healed and there was enough time, so the last entry
/// is a read of the complete store. `is_behind`: then the informer or a handler was still behind.
pub(crate) fn judge_informer(
    truth: &Truth,
    history: &InformerHistory,
    ended: bool,
    is_behind: bool,
) -> Result<(), Violation> {
    let mut events: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for write in &truth.epochs[0].writes {
        if let Some((_, object)) = write.seen_by(history.spec.selection) {
            events.entry(&object.key).or_default().push(write.version());
        }
    }
    let mut walk = Walk {
        truth,
        spec: &history.spec,
        handlers: BTreeMap::new(),
        conflated: None,
        complete: 0,
        reencoded: 0,
        complete_at: None,
        version: None,
        highest: 0,
        first_epoch: 0,
        excused: BTreeSet::new(),
        apiserver_start: None,
        true_states: HashSet::new(),
        events,
    };
    let violation = |(guarantee, text): Breach, entry, at_end| {
        let text = format!("{} {text}", history.spec);
        Violation { guarantee, text, entry, at_end }
    };
    for (i, entry) in history.entries.iter().enumerate() {
        walk.step(entry).map_err(|broken| violation(broken, i, false))?;
    }
    let last = history.entries.len().saturating_sub(1);
    if ended {
        walk.end(history.entries.last(), is_behind).map_err(|broken| violation(broken, last, true))
    } else {
        Ok(())
    }
}

fn version_of(object: &Stored) -> u64 {
    object.resource_version().parse().unwrap_or(0)
}

impl<'a> Walk<'a> {
    fn step(&mut self, entry: &'a InformerEntry) -> Result<(), Breach> {
        self.highest = self.highest.max(entry.given.map_or(0, truth::version_of));
        match &entry.what {
            Observed::Started => {
                self.handlers.clear();
                self.conflated = None;
                self.complete = 0;
                self.complete_at = None;
                self.version = None;
                self.excused.clear();
                self.apiserver_start = None;
                self.reencoded = 0;
                // Right after a restore a replica may still be in the previous history.
                let is_settled = entry.revision > self.truth.epochs[entry.epoch].base;
                self.first_epoch = if is_settled { entry.epoch } else { entry.epoch.saturating_sub(1) };
                self.highest = 0;
                Ok(())
            }
            Observed::HandlerAdded(handler) => {
                self.handlers.insert(*handler, BTreeMap::new());
                Ok(())
            }
            Observed::Resumed(place) => {
                let shared = self.sharing(truth::version_of(*place), entry);
                self.excused.extend(shared);
                Ok(())
            }
            Observed::ApiserverStart { window } => {
                let before = self.apiserver_start.replace(entry.at);
                let passed = before.map(|before| entry.at.saturating_sub(before));
                match passed.filter(|passed| passed < window) {
                    Some(passed) => {
                        let text =
                            format!("has two starts at the apiserver within {passed:?}, and one in {window:?} is due");
                        Err((Guarantee::Bounded, text))
                    }
                    None => Ok(()),
                }
            }
            Observed::Complete(place) => {
                let version = place.map(truth::version_of).filter(|_| self.spec.reads_over_http());
                self.excused = version.map_or_else(BTreeSet::new, |version| self.sharing(version, entry));
                self.conflated = Some(entry.at);
                self.complete += 1;
                self.complete_at = Some(entry);
                Ok(())
            }
            Observed::Batch => {
                self.conflated = Some(entry.at);
                self.reencoded += usize::from(self.truth.schemas > 1);
                Ok(())
            }
            Observed::Failed(_) => Ok(()),
            Observed::Undecodable(why) => {
                Err((Guarantee::Reliable, format!("got a body that cannot be decoded: {why}")))
            }
            Observed::Call { handler, call, stored } => {
                if let Call::Add(object) | Call::Update(_, object) = call {
                    self.highest = self.highest.max(version_of(object));
                }
                let mut known = self.handlers.entry(*handler).or_default().remove(call.key()).unwrap_or_default();
                let result = self.call(*handler, call, &mut known, entry);
                known.at = entry.at;
                let result = result.and_then(|()| self.is_in_store(call, stored.as_ref(), entry));
                self.handlers.entry(*handler).or_default().insert(call.key().to_owned(), known);
                result.map_err(|(guarantee, text)| (guarantee, format!("called handler {handler}: {text}")))
            }
            Observed::Read { snapshot, index } => {
                index.clone().map_err(|why| (Guarantee::Reliable, format!("has a wrong index: {why}")))?;
                self.read(snapshot, entry)
            }
        }
    }

    /// Whether a restore has undone this version, or another one that the informer reached.
    fn is_undone(&self, version: u64, entry: &InformerEntry) -> bool {
        let version = version.max(self.highest);
        self.truth
            .epochs
            .iter()
            .take(entry.epoch + 1)
            .skip(self.first_epoch + 1)
            .any(|epoch| epoch.base < first_place(version))
    }

    /// The objects that were written at this version, if it has several events.
    fn sharing(&self, version: u64, entry: &InformerEntry) -> BTreeSet<String> {
        let writes = self.truth.epochs[..=entry.epoch].iter().map(|epoch| epoch.writes_of(version));
        writes.filter(|writes| writes.len() > 1).flatten().map(|write| write.key().to_owned()).collect()
    }

    /// Whether the last complete state may lack an object's change at this version: over HTTP it
    /// may be a state between two events of its version, as at the apiserver.
    fn may_lack(&self, key: &str, version: u64, entry: &InformerEntry) -> bool {
        let Some(InformerEntry { what: Observed::Complete(Some(place)), .. }) = self.complete_at else { return false };
        self.spec.reads_over_http()
            && truth::version_of(*place) == version
            && self.sharing(version, entry).contains(key)
    }

    /// Whether an event of this object may be repeated: kubefan was asked to go on from a version
    /// of the apiserver, which does not say how many of its events were received.
    fn may_repeat(&self, key: &str) -> bool {
        self.spec.apiserver == ApiserverUse::FallsBack && self.excused.contains(key)
    }

    /// The writes at this version, in every epoch.
    fn writes_at(&self, version: u64, entry: &InformerEntry) -> impl Iterator<Item = &'a Write> + use<'a> {
        let truth: &'a Truth = self.truth;
        truth.epochs[..=entry.epoch].iter().flat_map(move |epoch| epoch.writes_of(version))
    }

    /// Checks that an object is as it was at its version, and selected there.
    fn is_true_state(&mut self, object: &Stored, entry: &InformerEntry) -> Result<(), Breach> {
        let address = std::sync::Arc::as_ptr(object) as usize;
        if self.true_states.contains(&address) {
            return Ok(());
        }
        let key = object.key().as_str();
        let version = version_of(object);
        let mut why = (Guarantee::Reliable, format!("got {key} at {version}, and nothing was written there"));
        for write in self.writes_at(version, entry) {
            let Some(right) = write.after.as_ref().filter(|right| right.key == key) else { continue };
            if !self.spec.selection.has(right) {
                why = (Guarantee::Filtered, format!("got {key} at {version}, which it does not select"));
            } else if right.uid != object.uid() || !self.has_bytes(right, version, object.as_bytes()) {
                let bytes = String::from_utf8_lossy(object.as_bytes());
                why = (Guarantee::Reliable, format!("got {key} at {version} as it never was:\n    {bytes}"));
            } else {
                self.true_states.insert(address);
                return Ok(());
            }
        }
        Err(why)
    }

    fn has_bytes(&self, right: &Object, version: u64, bytes: &[u8]) -> bool {
        let bytes = &*schema::without_number(bytes).0;
        let whole = right.bytes_at(version, false);
        let right = right.bytes_at(version, self.spec.canonical());
        // The items of a list do not name their type. kubefan's own lists have no canonical form.
        let untyped = || String::from_utf8_lossy(&right).replacen(r#""apiVersion":"v1","kind":"Pod","#, "", 1);
        let is_mixed = self.spec.apiserver == ApiserverUse::FallsBack && whole == bytes;
        right == bytes
            || is_mixed
            || (self.spec.lists && (untyped().as_bytes() == bytes || self.spec.canonical() && whole == bytes))
    }

    fn call(&mut self, handler: usize, call: &Call, known: &mut Known, entry: &InformerEntry) -> Result<(), Breach> {
        let key = call.key();
        match call {
            Call::Add(new) => {
                if let Some(told) = &known.told {
                    let text = format!("added {key} at {}, which it had at {}", version_of(new), version_of(told));
                    return Err((Guarantee::Unique, text));
                }
                self.is_true_state(new, entry)?;
                self.is_next(handler, key, version_of(new), false, known, entry)?;
                known.floor = version_of(new);
                known.told = Some(new.clone());
            }
            Call::Update(old, new) => {
                let Some(told) = &known.told else {
                    return Err((Guarantee::Reliable, format!("updated {key}, which was not added before")));
                };
                if version_of(told) != version_of(old) || told.uid() != old.uid() || told.as_bytes() != old.as_bytes() {
                    let told = version_of(told);
                    let old = version_of(old);
                    let text = format!("updated {key} from {old}, and its last state was at {told}");
                    return Err((Guarantee::Reliable, text));
                }
                if self.spec.recreated_as_two_calls && old.uid() != new.uid() {
                    return Err((Guarantee::Reliable, format!("updated {key} to an object with another uid")));
                }
                self.is_true_state(new, entry)?;
                if version_of(new) == version_of(old) && new.as_bytes() != old.as_bytes() {
                    // With another schema an object has other bytes at the same version.
                } else if version_of(new) == version_of(old) {
                    // A complete state reports unchanged objects again.
                    known.repeated += 1;
                    let is_excused = self.is_undone(version_of(old), entry) || self.may_repeat(key);
                    if known.repeated >= self.complete + self.reencoded && !is_excused {
                        let version = version_of(new);
                        let text = format!("updated {key} at {version} to the same version once more");
                        return Err((Guarantee::Unique, text));
                    }
                } else {
                    self.is_next(handler, key, version_of(new), false, known, entry)?;
                }
                known.floor = version_of(new);
                known.told = Some(new.clone());
            }
            Call::Delete(deleted) => {
                let Some(told) = known.told.take() else {
                    if self.is_undone(0, entry) || self.excused.contains(key) {
                        return Ok(());
                    }
                    return Err((Guarantee::Reliable, format!("deleted {key}, which was not added before")));
                };
                known.floor = self.deleted(handler, &told, deleted, known, entry)?;
                // A list that lacks an object was made after the object was deleted.
                self.highest = self.highest.max(self.gone_at(&told, entry).unwrap_or(0));
            }
        }
        Ok(())
    }

    /// The lowest version at which an object can have been deleted after this state of it.
    fn gone_at(&self, told: &Stored, entry: &InformerEntry) -> Option<u64> {
        let removes = |write: &&Write| {
            let seen = write.seen_by(self.spec.selection);
            seen.is_some_and(|(kind, object)| object.key == told.key().as_str() && kind.removes())
        };
        let first = |epoch: &Epoch| {
            let removal = epoch.writes[epoch.after(last_place(version_of(told)))..].iter().find(removes)?;
            (removal.place <= entry.revision || entry.epoch > 0).then_some(removal.version())
        };
        self.truth.epochs[..=entry.epoch].iter().filter_map(first).min()
    }

    /// Checks a deletion. Returns the version that the next call must exceed.
    fn deleted(
        &self,
        handler: usize,
        told: &Stored,
        deleted: &Deleted<kubefan_client::RawJson>,
        known: &Known,
        entry: &InformerEntry,
    ) -> Result<u64, Breach> {
        let key = told.key().as_str();
        let last = version_of(told);
        let is_missing = self.may_lack(key, last, entry);
        if !is_missing && !self.is_undone(last, entry) && self.gone_at(told, entry).is_none() {
            let text = format!("deleted {key}, which has existed ever since its last state at {last}");
            return Err((Guarantee::Reliable, text));
        }
        match deleted {
            Deleted::FinalStateUnknown(unknown) => {
                let last_known = unknown.last_known.as_ref().map(version_of);
                if handler != SLOW && last_known != Some(last) {
                    let text = format!("deleted {key} with the last state at {last_known:?}, and it got {last}");
                    return Err((Guarantee::Reliable, text));
                }
                Ok(if is_missing { last - 1 } else { last })
            }
            Deleted::Known(object) => {
                let version = version_of(object);
                self.is_next(handler, key, version, true, known, entry)?;
                let bytes = object.as_bytes();
                let was = |write: &&Write| {
                    let before = write.before.iter().chain(&write.after).filter(|state| state.key == key);
                    let mut before = before.filter(|state| state.uid == object.uid());
                    before.any(|state| self.has_bytes(state, version, bytes) || state.has_attributes_in(bytes))
                };
                if !self.truth.epochs.iter().any(|epoch| epoch.writes.iter().rev().any(|write| was(&write))) {
                    let bytes = String::from_utf8_lossy(bytes);
                    return Err((Guarantee::Reliable, format!("deleted {key} as it never was:\n    {bytes}")));
                }
                Ok(version)
            }
        }
    }

    /// Checks that a state is after the last one, and that a handler that gets every call has
    /// missed nothing in between.
    fn is_next(
        &self,
        handler: usize,
        key: &str,
        version: u64,
        is_deletion: bool,
        known: &Known,
        entry: &InformerEntry,
    ) -> Result<(), Breach> {
        let last = known.floor;
        if self.is_undone(last, entry) || version < last && self.may_lack(key, last, entry) {
            return Ok(());
        }
        let is_conflated =
            handler == SLOW || self.conflated.is_some_and(|at| at >= known.at) || self.excused.contains(key);
        // A gap or a catch-up deletes an object with its last state.
        if is_deletion && is_conflated && version == last {
            return Ok(());
        }
        let verb = if is_deletion { "deleted" } else { "told of" };
        if version == last && self.may_repeat(key) {
            return Ok(());
        }
        if version <= last {
            let same = if version == last { Guarantee::Unique } else { Guarantee::Ordered };
            return Err((same, format!("{verb} {key} at {version}, after its state at {last}")));
        }
        if is_conflated || last == 0 || entry.epoch > 0 {
            return Ok(());
        }
        let events = self.events.get(key).map_or(&[][..], Vec::as_slice);
        match events.iter().find(|event| **event > last && **event < version) {
            Some(missed) => {
                Err((Guarantee::Reliable, format!("{verb} {key} at {version} without its event at {missed}")))
            }
            None => Ok(()),
        }
    }

    /// The store must not be behind a handler.
    fn is_in_store(&self, call: &Call, stored: Option<&Stored>, entry: &InformerEntry) -> Result<(), Breach> {
        let (Call::Add(new) | Call::Update(_, new)) = call else { return Ok(()) };
        match stored {
            Some(stored)
                if version_of(stored) < version_of(new)
                    && !self.is_undone(version_of(new), entry)
                    && !self.may_lack(call.key(), version_of(new), entry) =>
            {
                let new = version_of(new);
                let stored = version_of(stored);
                let key = call.key();
                Err((Guarantee::Reliable, format!("told of {key} at {new}, and the store has it at {stored}")))
            }
            _ => Ok(()),
        }
    }
}
