//! The views of a hub: found by their key, and by what an event holds; and those whose subscribers are still to be woken.
//!
//! The hub calls it inside its critical section, so nothing here costs anything per view that a record does not concern, but for gaps,
//! which everybody is told of.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use slab::Slab;
use tokio::time::Instant;

use crate::{
    cache::{Expired, Gap, Record},
    fanout::{
        send::{budget::Budgets, encoder::Encoder},
        stream_end::StreamEnd,
        views::{
            index::{IndexTerm, SelectorIndex, ViewId},
            log::GapTransition,
            view::{View, ViewKey},
        },
    },
};
use kubefan_common::proto::v1alpha1::ResolvedResource;
use kubefan_model::{format::Format, table::Tables};

/// The views, by what they select and by what they are found by.
#[derive(Default)]
pub(in crate::fanout) struct Views {
    slots: Slab<Slot>,
    ids: HashMap<ViewKey, ViewId>,
    encoders: HashMap<Format, Weak<Encoder>>,
    index: SelectorIndex,
    /// Views that have something that their subscribers were not told of.
    unannounced: Vec<ViewId>,
    /// Those that have ended for themselves, whose subscribers were not told of it.
    ended: Vec<Arc<View>>,
    /// How many records that is.
    unannounced_records: usize,
    /// Kept between events.
    candidates: Vec<ViewId>,
}

struct Slot {
    view: Arc<View>,
    place: IndexTerm,
    unannounced: bool,
}

impl Views {
    /// The view that this is the key of.
    pub(in crate::fanout) fn get(&self, key: &ViewKey) -> Option<&Arc<View>> {
        self.ids.get(key).map(|id| &self.slots[*id].view)
    }

    /// The one encoder of a format, for objects of this resource, or rows of its tables; what it keeps is within `kept`.
    pub(in crate::fanout) fn encoder(
        &mut self,
        format: &Format,
        (resource, tables): (&ResolvedResource, Option<&Arc<Tables>>),
        kept: &Budgets,
    ) -> Arc<Encoder> {
        if let Some(encoder) = self.encoders.get(format).and_then(Weak::upgrade) {
            return encoder;
        }
        self.encoders.retain(|_, encoder| encoder.strong_count() > 0);
        let encoder = Arc::new(Encoder::new(format.clone(), resource, tables, kept.clone()));
        self.encoders.insert(format.clone(), Arc::downgrade(&encoder));
        encoder
    }

    /// The encoders that compare what they project.
    pub(in crate::fanout) fn comparing(&self) -> Vec<Arc<Encoder>> {
        let comparing = self.encoders.iter().filter(|(format, _)| format.only_changes());
        comparing.filter_map(|(_, encoder)| encoder.upgrade()).collect()
    }

    /// Takes a view in.
    pub(in crate::fanout) fn insert(&mut self, view: Arc<View>) {
        let entry = self.slots.vacant_entry();
        let id = entry.key();
        let place = self.index.insert(id, view.selection());
        self.ids.insert(view.key(), id);
        entry.insert(Slot { view, place, unannounced: false });
    }

    /// Takes a view out; not its successor, which may have the same key.
    pub(in crate::fanout) fn remove(&mut self, view: &Arc<View>) {
        let key = view.key();
        let id = self.ids.get(&key).copied().filter(|id| Arc::ptr_eq(&self.slots[*id].view, view));
        if let Some(id) = id {
            self.ids.remove(&key);
            let slot = self.slots.remove(id);
            self.index.remove(id, &slot.place);
        }
    }

    /// Takes all views out.
    pub(in crate::fanout) fn drain(&mut self) -> Vec<Arc<View>> {
        let slots = std::mem::take(self).slots;
        slots.into_iter().map(|(_, slot)| slot.view).collect()
    }

    /// Finds the views that could see something of a record.
    fn route(&mut self, record: &Record) {
        match record {
            Record::Event(event) => self.index.candidates(event, &mut self.candidates),
            // What a gap says concerns everybody.
            Record::Gap(_) => {
                self.candidates.clear();
                self.candidates.extend(self.slots.iter().map(|(id, _)| id));
            }
        }
    }

    /// Who cannot be told of a gap is not led over it: their views end before it, and who comes next has another one.
    fn end_unmarked(&mut self, gap: &Gap) {
        let unmarked = |(_, slot): &(usize, &Slot)| !slot.view.encoder().format().has_marks();
        let views: Vec<_> = self.slots.iter().filter(unmarked).map(|(_, slot)| slot.view.clone()).collect();
        for view in views {
            self.remove(&view);
            view.close(&StreamEnd::Expired(Expired { requested: gap.from, oldest: gap.to }));
            self.ended.push(view);
        }
    }

    /// Appends a record where it is seen; tells how many messages that gave.
    pub(in crate::fanout) fn append(&mut self, record: &Record, received: Instant) -> usize {
        if let Record::Gap(gap) = record {
            self.end_unmarked(gap);
        }
        let mut inside = match record {
            Record::Event(_) => HashMap::new(),
            Record::Gap(gap) => self.see(gap),
        };
        self.route(record);
        let mut dispatched = 0;
        for id in &self.candidates {
            let Some(slot) = self.slots.get_mut(*id) else { continue };
            let messages = match record {
                Record::Event(event) => slot.view.append(event, received),
                Record::Gap(gap) => {
                    // A list compares bytes: with a new schema an object has others at the version it had.
                    slot.view.forget();
                    slot.view.append_gap(gap, inside.remove(id).unwrap_or_default(), received)
                }
            };
            dispatched += messages;
            if messages > 0 && !std::mem::replace(&mut slot.unannounced, true) {
                self.unannounced.push(*id);
            }
        }
        self.unannounced_records += usize::from(dispatched > 0);
        dispatched
    }

    /// What each view sees inside a gap: each event is looked up, as one outside is.
    fn see(&mut self, gap: &Gap) -> HashMap<ViewId, Vec<GapTransition>> {
        let mut inside: HashMap<_, Vec<_>> = HashMap::new();
        for event in &gap.events {
            self.index.candidates(event, &mut self.candidates);
            for id in &self.candidates {
                if let Some(seen) = self.slots.get(*id).and_then(|slot| event.transition(slot.view.selection())) {
                    inside.entry(*id).or_default().push((event.clone(), seen));
                }
            }
        }
        inside
    }

    /// Lets go of a record, which only those who could see it can hold.
    pub(in crate::fanout) fn trim(&mut self, record: &Record) {
        self.route(record);
        let concerned = self.candidates.iter().filter_map(|id| self.slots.get(*id));
        concerned.for_each(|slot| slot.view.trim(record.version()));
    }

    /// The views whose subscribers are to be woken, and of how many records; they count as told.
    pub(in crate::fanout) fn take_unannounced(&mut self) -> (Vec<Arc<View>>, usize) {
        let (ids, ended) = (std::mem::take(&mut self.unannounced), std::mem::take(&mut self.ended));
        let told = ids.into_iter().filter_map(|id| {
            let slot = self.slots.get_mut(id)?;
            slot.unannounced = false;
            Some(slot.view.clone())
        });
        (told.chain(ended).collect(), std::mem::take(&mut self.unannounced_records))
    }

    /// Whether nobody is to be woken.
    pub(in crate::fanout) fn all_announced(&self) -> bool {
        self.unannounced.is_empty() && self.ended.is_empty()
    }

    /// How many there are.
    pub(in crate::fanout) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Lets go of everything that is kept only to save work.
    pub(in crate::fanout) fn forget(&self) {
        self.slots.iter().for_each(|(_, slot)| slot.view.forget());
        self.encoders.values().filter_map(Weak::upgrade).for_each(|encoder| encoder.forget());
    }

    /// Lets each go of what has served its time.
    pub(in crate::fanout) fn tidy(&self, now: Instant) {
        self.slots.iter().for_each(|(_, slot)| slot.view.tidy(now));
    }
}
