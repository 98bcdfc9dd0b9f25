//! History for a view that starts before its log, tested outside of the critical section.
//!
//! A view without an indexed equality term tests every record since its version, and so does one
//! with a term that nearly all objects meet. With 100,000 records that takes long enough to hold up
//! every commit. So a long replay is made before the section, in slices between which other tasks
//! run, and the section tests only the records that were committed meanwhile.
//!
//! After a rollout thousands of clients may want a replay, and its items are memory that no budget
//! counts: some megabytes each. So the clients of one view take turns, and a replay ends as soon as
//! the view of another client has its history. The gate admits a few replays of different views at
//! a time.

use std::{collections::VecDeque, mem, ops::ControlFlow};

use kubefan_admission::fair_share::Holder;
use kubefan_cache::{History, HistoryRecord, Refusal, sliced_scan::SLICE_TESTS};
use kubefan_model::{ResourceVersion, format::Format, selection::Selection};

use super::{core::Hub, slices::SlicedWork};
use crate::views::{
    log::{LogItem, Replayed},
    view::ViewKey,
};

/// The most tests inside the section, in terms × records. Tests replay short histories in slices
/// too.
const TESTED_INSIDE_MAX: usize = if cfg!(test) { 4 } else { 4000 };
/// The most records of a slice.
const RECORDS_MAX: usize = if cfg!(test) { 2 } else { 4096 };

/// A replay in progress.
struct Replay {
    key: ViewKey,
    /// The versions that are left, if only some records may concern the view.
    indexed: Option<VecDeque<ResourceVersion>>,
    replayed: Replayed,
    /// Version up to which it is complete.
    reached: ResourceVersion,
}

impl Hub {
    /// Replays the history after `version` for a view of this selection and format. Other tasks run
    /// between its slices. `None` if there is little to replay, if the ring does not have it, if a
    /// log has it already, or if no view could use it.
    ///
    /// # Errors
    /// The gate's refusal, if too many clients want history.
    pub async fn replay(
        &self,
        selection: &Selection,
        format: &Format,
        version: ResourceVersion,
        holder: Option<Holder>,
    ) -> Result<Option<Replayed>, Refusal> {
        // Most resumes need none.
        if self.start_replay(selection, format, version).is_none() {
            return Ok(None);
        }
        let turns = self.replay_turns.of(ViewKey { selection: selection.clone(), format: format.clone() });
        let mut permit = None;
        let (_turn, replay) = loop {
            let turn = turns.lock().await;
            let Some(replay) = self.start_replay(selection, format, version) else { return Ok(None) };
            permit = permit.or_else(|| self.gate().try_acquire_replay(holder));
            if permit.is_some() {
                break (turn, replay);
            }
            // Another client of the view may have a permit before this one.
            drop((turn, replay));
            permit = Some(self.gate().acquire_replay(holder).await?);
        };
        Ok(self.in_slices(replay).await)
    }

    /// Like [`Self::replay`], at once.
    pub(crate) fn replay_now(
        &self,
        selection: &Selection,
        format: &Format,
        version: ResourceVersion,
    ) -> Option<Replayed> {
        self.at_once(self.start_replay(selection, format, version)?)
    }

    fn start_replay(&self, selection: &Selection, format: &Format, version: ResourceVersion) -> Option<Replay> {
        let key = ViewKey { selection: selection.clone(), format: format.clone() };
        let state = self.lock();
        let cached = state.published.state()?;
        if state.views.none_can_start_after(&key, version) {
            return None;
        }
        let known = state.views.get(&key).filter(|view| view.can_start_after(version));
        let up_to = known.map_or(cached.version, |view| view.floor());
        if up_to <= version {
            return None;
        }
        let LongHistory { indexed } = LongHistory::after(version, &cached.history, selection)?;
        let replayed = Replayed { epoch: cached.epoch, after: version, up_to, items: Vec::new() };
        Some(Replay { key, indexed, replayed, reached: version })
    }
}

/// A part of history that is too long to be tested inside the critical section.
pub(crate) struct LongHistory {
    /// The versions that an index has for the selection; `None` if each record is to be tested.
    indexed: Option<VecDeque<ResourceVersion>>,
}

impl LongHistory {
    /// Finds the history after a version; `None` if it is short for this selection.
    pub(crate) fn after(version: ResourceVersion, history: &History, selection: &Selection) -> Option<Self> {
        let is_short = |records: usize| records * selection.tests() <= TESTED_INSIDE_MAX;
        if is_short(history.ring().count_after(version)) {
            return None;
        }
        // The records of a term are few, unless nearly all objects have its value.
        let indexed = history.indexed_after(version, selection).map(VecDeque::from);
        if indexed.as_ref().is_some_and(|versions| is_short(versions.len())) {
            return None;
        }
        Some(Self { indexed })
    }
}

impl SlicedWork for Replay {
    /// `None` if the replay is of no use any more: the ring no longer has the rest, another
    /// subscription has made a view that has it, or no view may be added for it.
    type Done = Option<Replayed>;

    fn slice(&mut self, hub: &Hub) -> ControlFlow<Option<Replayed>> {
        let Some(part) = self.next_part(hub) else { return ControlFlow::Break(None) };
        let Some(last) = part.last() else { return ControlFlow::Break(Some(self.take_replayed())) };
        self.reached = last.version();
        let selection = &self.key.selection;
        self.replayed.items.extend(part.iter().filter_map(|record| LogItem::replayed(record, selection)));
        ControlFlow::Continue(())
    }
}

impl Replay {
    /// Returns the records of the next slice; none if the replay is complete. `None` if it is of no
    /// use any more.
    fn next_part(&mut self, hub: &Hub) -> Option<Vec<HistoryRecord>> {
        // An event is two objects.
        let records_max = RECORDS_MAX.min(SLICE_TESTS / (2 * self.key.selection.tests())).max(1);
        let state = hub.lock();
        let views = &state.views;
        let after = self.replayed.after;
        if views.get(&self.key).is_some_and(|view| view.floor() <= after)
            || views.none_can_start_after(&self.key, after)
        {
            return None;
        }
        let ring = state.published.state_of(self.replayed.epoch)?.history.ring();
        // Fails if some of the remaining records were evicted.
        let all = ring.since(self.reached).ok()?;
        let up_to = |record: &&HistoryRecord| record.version() <= self.replayed.up_to;
        Some(match &mut self.indexed {
            None => all.take_while(up_to).take(records_max).cloned().collect(),
            Some(versions) => {
                let next = versions.drain(..records_max.min(versions.len()));
                next.filter_map(|version| ring.record_at(version)).take_while(up_to).cloned().collect()
            }
        })
    }

    fn take_replayed(&mut self) -> Replayed {
        let Replayed { epoch, after, up_to, items } = &mut self.replayed;
        Replayed { epoch: *epoch, after: *after, up_to: *up_to, items: mem::take(items) }
    }
}
