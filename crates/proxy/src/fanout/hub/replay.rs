//! History for a view that starts before its log, tested outside of the critical section.
//!
//! A view without an indexed equality term tests every record since its version. With 100,000
//! records that takes long enough to hold up every commit. So a long replay is made before the
//! section, in parts, and the section tests only what was committed meanwhile.

use super::core::Hub;
use crate::{
    cache::Record,
    fanout::views::{
        log::{LogItem, Replayed},
        view::ViewKey,
    },
};
use kubefan_model::{ResourceVersion, selection::Selection};

/// The most records that are tested inside the section. Tests replay short histories in parts too.
const TESTED_INSIDE_MAX: usize = if cfg!(test) { 2 } else { 1000 };
/// How many records are copied at a time.
const PART: usize = if cfg!(test) { 2 } else { 4096 };

impl Hub {
    /// What a view will need of the history after `version`; `None` if that is little, or is not in
    /// the ring.
    pub(in crate::fanout) fn replay(
        &self,
        key: &ViewKey,
        selection: &Selection,
        version: ResourceVersion,
    ) -> Option<Replayed> {
        let (epoch, up_to) = {
            let state = self.lock();
            let cached = state.published.state()?;
            let up_to = state.views.get(key).map_or(cached.version, |view| view.floor());
            let ring = cached.history.ring();
            let is_short = up_to <= version || ring.count_after(version) <= TESTED_INSIDE_MAX;
            if is_short || cached.history.steps().of(selection).is_some() {
                return None;
            }
            (cached.epoch, up_to)
        };
        let (mut items, mut reached) = (Vec::new(), version);
        loop {
            let part: Vec<Record> = {
                let state = self.lock();
                let ring = state.published.state_of(epoch)?.history.ring();
                let records = ring.since(reached).ok()?.take_while(|record| record.version() <= up_to);
                records.take(PART).cloned().collect()
            };
            let Some(last) = part.last() else { break };
            reached = last.version();
            items.extend(part.iter().filter_map(|record| LogItem::replayed(record, selection)));
        }
        Some(Replayed { epoch, after: version, up_to, items })
    }
}
