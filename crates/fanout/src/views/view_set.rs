//! The views of a hub: found by their key and by the content of an event; and the views whose
//! subscribers are still to be woken.
//!
//! The hub calls it inside its critical section, so the cost of a record must not grow with the
//! number of views that it does not concern. Only a gap concerns every view: it costs each of them
//! one entry, whatever its size.
//!
//! The log of every view that sees an event has an item for it, and all logs share one budget. If
//! the ring were shortened whenever they exceed it, a tenant with a thousand views would shorten
//! the history of all others. So the logs of the tenants with the most bytes are shortened, and the
//! ring stays. If callers are not distinguished, the ring is shortened: if it stayed, the next
//! resumes would fill the logs from it again.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Weak},
    time::Duration,
};

use kubefan_cache::{Budgets, HistoryRecord, budget::Budget};
use kubefan_common::{
    planted::{self, Bug},
    proto::v1alpha1::ResolvedResource,
};
use kubefan_model::{
    ResourceVersion,
    event::{EventType, TestedEvent},
    format::Format,
    selection::Selection,
    table::Tables,
};
use slab::Slab;
use smallvec::SmallVec;
use tokio::time::Instant;

use crate::{
    send::{differences::Differences, encoder::Encoder},
    views::{
        index::{SelectorIndex, ViewId},
        log::LogItem,
        log_bytes::LogBytes,
        shared_snapshot::SharedSnapshot,
        view::{View, ViewKey},
    },
};

/// The part of a tenant's limit to which its logs are shortened. If it were all, the next commit
/// would exceed the budget again.
const SHORTENED_SHARE: f64 = 0.9;
/// Number of parts of the budget of logs. While all logs exceed the budget, a cache looks for logs
/// to shorten again after they have grown by one part, or by an item for each view if that is more.
/// A look takes a lock of each view and sorts the tenants of all caches, and it may find nothing to
/// shorten: the bytes may be those of a cache that seldom has a commit, or of more tenants than the
/// budget has room for.
const LOOKS_PER_BUDGET: usize = 4096;
/// The time after which a cache looks again in any case.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The most views with one key: the newest, and older ones whose logs were shortened. Each of them
/// appends, encodes and compresses for itself. Without a limit, each of thousands of subscriptions
/// that resume could have its own.
const VIEWS_PER_KEY_MAX: usize = 4;

/// The views of a hub.
#[derive(Default)]
pub(crate) struct Views {
    slots: Slab<Slot>,
    /// The views of each key, the newest last. A key has at least one.
    ids: HashMap<ViewKey, SmallVec<[ViewId; 1]>>,
    encoders: HashMap<Format, Weak<Encoder>>,
    differences: Arc<Differences>,
    index: SelectorIndex,
    /// Views with entries that no wake-up has announced.
    unannounced: Vec<ViewId>,
    /// The number of records that no wake-up has announced.
    unannounced_records: usize,
    /// Views with events that are still to be tested, each once.
    untested: VecDeque<Arc<View>>,
    /// A buffer, reused between events.
    candidates: Vec<ViewId>,
    /// The next look at logs that exceed their budget.
    next_look: Option<NextLook>,
}

/// The next look at logs that exceed their budget: at this many bytes or at this time, whichever
/// comes first.
struct NextLook {
    /// The bytes of all logs of the cache.
    bytes: usize,
    time: Instant,
}

struct Slot {
    view: Arc<View>,
    unannounced: bool,
}

impl Views {
    /// The view with this key that new subscriptions share: the newest.
    pub(crate) fn get(&self, key: &ViewKey) -> Option<&Arc<View>> {
        self.ids.get(key).and_then(|ids| ids.last()).map(|id| &self.slots[*id].view)
    }

    /// The same view, if no other with this key may be added: a subscription that cannot start in
    /// its log must continue in another way.
    pub(crate) fn newest_at_limit(&self, key: &ViewKey) -> Option<&Arc<View>> {
        let is_full = self.ids.get(key).is_some_and(|ids| ids.len() >= VIEWS_PER_KEY_MAX);
        self.get(key).filter(|_| is_full)
    }

    /// Whether no view with this key can start after a version: the log of the newest was shortened
    /// and cannot grow at its old end, and no view may be added.
    pub(crate) fn none_can_start_after(&self, key: &ViewKey, version: ResourceVersion) -> bool {
        self.newest_at_limit(key).is_some_and(|view| !view.can_start_after(version))
    }

    /// Returns the one encoder of a format, for objects of this resource, or rows of its tables.
    /// The bytes that it retains are within the budgets.
    pub(crate) fn encoder(
        &mut self,
        format: &Format,
        resource: &ResolvedResource,
        tables: Option<&Arc<Tables>>,
        budgets: &Budgets,
    ) -> Arc<Encoder> {
        if let Some(encoder) = self.encoders.get(format).and_then(Weak::upgrade) {
            return encoder;
        }
        self.encoders.retain(|_, encoder| encoder.strong_count() > 0);
        let encoder =
            Arc::new(Encoder::new(format.clone(), resource, tables, budgets.clone()).sharing(self.differences.clone()));
        self.encoders.insert(format.clone(), Arc::downgrade(&encoder));
        encoder
    }

    /// Adds a view. New subscriptions with its key share it. An older view with this key keeps
    /// those that it has, and gets new ones only after this one is removed.
    pub(crate) fn insert(&mut self, view: Arc<View>) {
        let entry = self.slots.vacant_entry();
        let id = entry.key();
        view.id.get_or_init(|| id);
        self.index.insert(id, view.selection());
        self.ids.entry(view.key()).or_default().push(id);
        entry.insert(Slot { view, unannounced: false });
    }

    /// Removes a view, and not the others with its key.
    pub(crate) fn remove(&mut self, view: &Arc<View>) {
        // After `drain` its id may be that of another view.
        let is_this = |id: &ViewId| self.slots.get(*id).is_some_and(|slot| Arc::ptr_eq(&slot.view, view));
        let Some(id) = view.id.get().copied().filter(is_this) else { return };
        let key = view.key();
        if let Some(ids) = self.ids.get_mut(&key) {
            ids.retain(|known| *known != id);
            if ids.is_empty() {
                self.ids.remove(&key);
            }
        }
        self.slots.remove(id);
        self.index.remove(id);
    }

    /// Removes all views. Their untested events are still tested.
    pub(crate) fn drain(&mut self) -> Vec<Arc<View>> {
        let Self { slots, untested, .. } = std::mem::take(self);
        self.untested = untested;
        slots.into_iter().map(|(_, slot)| slot.view).collect()
    }

    /// Finds the views that a record may concern.
    fn route(&mut self, record: &HistoryRecord) {
        match record {
            HistoryRecord::Event(event) => self.index.candidates(event, &mut self.candidates),
            // Every subscriber must know of a gap.
            HistoryRecord::Gap(_) => {
                self.candidates.clear();
                self.candidates.extend(self.slots.iter().map(|(id, _)| id));
            }
        }
    }

    /// Appends a record to the views that it may concern. Returns their number.
    pub(crate) fn append(&mut self, record: &HistoryRecord, received: Instant) -> usize {
        self.route(record);
        let objects = match record {
            HistoryRecord::Event(event) => Some((event, event.object(), event.previous())),
            HistoryRecord::Gap(_) => None,
        };
        let tested =
            objects.as_ref().map(|(event, object, previous)| TestedEvent::new(event, object, previous.as_deref()));
        let mut dispatched = 0;
        for id in &self.candidates {
            let Some(slot) = self.slots.get_mut(*id) else { continue };
            let is_appended = match (record, &tested) {
                (HistoryRecord::Event(event), _) if slot.view.tests_later() => {
                    if slot.view.append_untested(event, received) {
                        self.untested.push_back(slot.view.clone());
                    }
                    false
                }
                (HistoryRecord::Event(event), Some(tested)) => slot.view.append(event, tested, received),
                (HistoryRecord::Event(_), None) => false,
                (HistoryRecord::Gap(gap), _) => {
                    slot.view.append_gap(gap, received);
                    slot.view.encoder().format().has_markers() || !planted::is(Bug::EndNotAnnounced)
                }
            };
            dispatched += usize::from(is_appended);
            if is_appended && !std::mem::replace(&mut slot.unannounced, true) {
                self.unannounced.push(*id);
            }
        }
        self.unannounced_records += usize::from(dispatched > 0);
        for event in record.events().iter().filter(|event| event.kind() == EventType::Deleted) {
            let encoders = self.encoders.values().filter_map(Weak::upgrade);
            for encoder in encoders {
                encoder.deleted(event.object().key());
            }
        }
        dispatched
    }

    /// Trims the logs of the views that evicted records may concern. The records are in order.
    pub(crate) fn trim(&mut self, evicted: &[HistoryRecord]) {
        let Some(newest) = evicted.last() else { return };
        // Many records together cost each view one trim.
        if evicted.len() >= self.slots.len() {
            for (_, slot) in &self.slots {
                slot.view.trim(newest.version());
            }
            return;
        }
        for record in evicted {
            self.route(record);
            let concerned = self.candidates.iter().filter_map(|id| self.slots.get(*id));
            for slot in concerned {
                slot.view.trim(record.version());
            }
        }
    }

    /// Shortens the logs of the tenants with the most bytes, if the logs exceed their budget.
    /// Returns the share of the ring, from 0 to 1, that is to be retained: all of it, unless
    /// callers are not distinguished. The view with the key `except` is not shortened: a
    /// subscription is about to start in its log, and would have to read that history again.
    pub(crate) fn shorten_logs(&mut self, logs: &Budget, except: Option<&ViewKey>, now: Instant) -> f64 {
        let share = logs.retained_share();
        let is_early = |next: &NextLook| logs.used() < next.bytes && now < next.time;
        if share >= 1.0 || self.next_look.as_ref().is_some_and(is_early) {
            return 1.0;
        }
        let Some(tenant_max) = logs.tenant_max() else { return share };
        let tenant_bytes = |view: &View| view.with_log_bytes(|bytes| bytes.tenant_bytes());
        let all = self.slots.iter().map(|(_, slot)| &slot.view);
        let too_large: Vec<_> = all.filter(|view| tenant_bytes(view) > tenant_max).collect();
        for view in &too_large {
            view.with_log_bytes(LogBytes::charge_to_smallest);
        }
        // Before any is shortened, so that all logs of a tenant lose the same part.
        let held: Vec<_> = too_large.iter().map(|view| tenant_bytes(view)).collect();
        let except = except.and_then(|key| self.get(key));
        for (view, bytes) in too_large.into_iter().zip(held) {
            if bytes > tenant_max && !except.is_some_and(|except| Arc::ptr_eq(except, view)) {
                view.shorten(tenant_max as f64 / bytes as f64 * SHORTENED_SHARE);
            }
        }
        let grown_by = (self.slots.len() * size_of::<LogItem>()).max(logs.bytes_max() / LOOKS_PER_BUDGET);
        self.next_look = Some(NextLook { bytes: logs.used() + grown_by, time: now + LOOK_INTERVAL });
        1.0
    }

    /// The views whose subscribers are to be woken, and for how many records. They count as
    /// announced from here on.
    pub(crate) fn take_unannounced(&mut self) -> (Vec<Arc<View>>, usize) {
        let announced = std::mem::take(&mut self.unannounced).into_iter().filter_map(|id| {
            let slot = self.slots.get_mut(id)?;
            slot.unannounced = false;
            Some(slot.view.clone())
        });
        (announced.collect(), std::mem::take(&mut self.unannounced_records))
    }

    /// The view that comes next to test a slice of its events.
    pub(crate) fn next_untested(&mut self) -> Option<Arc<View>> {
        self.untested.pop_front()
    }

    /// Queues a view that has more events to test, after the others.
    pub(crate) fn queue_untested(&mut self, view: Arc<View>) {
        self.untested.push_back(view);
    }

    /// Whether a view has events to test.
    pub(crate) fn has_untested(&self) -> bool {
        !self.untested.is_empty()
    }

    /// Whether no subscriber is to be woken.
    pub(crate) fn all_announced(&self) -> bool {
        self.unannounced.is_empty()
    }

    /// The selections of the views.
    pub(crate) fn selections(&self) -> impl Iterator<Item = &Selection> {
        self.slots.iter().map(|(_, slot)| slot.view.selection())
    }

    /// The number of views.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// The number of keys that are known.
    #[cfg(test)]
    pub(crate) fn keys(&self) -> usize {
        self.ids.len()
    }

    /// Drops everything that is retained only for reuse. The caller drops the returned snapshots
    /// without a lock.
    pub(crate) fn forget(&self) -> Vec<Arc<SharedSnapshot>> {
        let snapshots = self.slots.iter().filter_map(|(_, slot)| slot.view.forget()).collect();
        self.differences.forget();
        for encoder in self.encoders.values().filter_map(Weak::upgrade) {
            encoder.forget();
        }
        snapshots
    }

    /// Removes snapshots that are too old to be reused. The caller drops them without a lock.
    pub(crate) fn tidy(&self, now: Instant) -> Vec<Arc<SharedSnapshot>> {
        self.slots.iter().filter_map(|(_, slot)| slot.view.tidy(now)).collect()
    }
}
