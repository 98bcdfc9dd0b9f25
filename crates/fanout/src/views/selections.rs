//! The selections of a hub: equal ones share their memory, and all of them have a limit.
//!
//! A selector may have thousands of values, and exists for as long as its watch, so the selectors
//! of many watches could take more memory than everything else, and nothing that is dropped under
//! memory pressure would free it. So each distinct selection takes its bytes from the budget of the
//! process when it arrives, and gives them back with its last watch or list. Each view takes its
//! share of the index, and its field mask. Readers share the budget fairly: the last bytes of a
//! cache's part are for readers that hold less than others.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use kubefan_admission::{FairPermit, FairPool, Holder, PermitKind};
use kubefan_cache::{
    Refusal,
    budget::{Budget, Share},
};
use kubefan_model::{
    format::Format,
    selection::{Selection, WeakSelection},
};

use super::{
    index::filed_values_max,
    value_table::PLACE_BYTES,
    view::{View, ViewMemory},
};

const SELECTOR_BYTES: PermitKind = PermitKind {
    name: "bytes of selectors and of streams' field masks",
    setting: "limits.selectorMemoryMax",
    identity_setting: "",
};

/// With fewer selections, dropped ones are not looked for.
const SWEPT_LEAST: usize = 64;

/// The selections of a hub.
pub struct Selections {
    budget: Budget,
    /// The bytes of each holder, views included. A selection counts to the holder that brought it.
    shares: Arc<FairPool>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// By their hashes. The selections are not owned: they go with their last watch or list.
    selections: HashMap<u64, Vec<WeakSelection>>,
    /// The number of hashes at which those that are gone are removed.
    swept_at: usize,
}

impl Selections {
    /// None yet; they are counted in `budget`.
    pub fn new(budget: Budget) -> Self {
        Self { shares: FairPool::new(budget.bytes_max()), budget, known: Mutex::default() }
    }

    /// Returns the one selection that equals this one, which `holder` wants to read. `None` is
    /// kubefan itself.
    ///
    /// # Errors
    /// [`Refusal::Exhausted`] if there is none yet, and no room for it or no share of the holder's.
    pub fn share(&self, selection: Selection, holder: Option<Holder>) -> Result<Selection, Refusal> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let same_hash = known.selections.get(&selection.spec_hash());
        let mut same_hash = same_hash.into_iter().flatten().filter_map(WeakSelection::upgrade);
        if let Some(equal) = same_hash.find(|other| *other == selection) {
            return Ok(equal);
        }
        let bytes = selection.bytes() + size_of::<WeakSelection>();
        let place = self.take_place(holder, bytes + view_bytes(&selection))?;
        selection.keep((self.take(bytes)?, place));
        if known.selections.len() >= known.swept_at.max(SWEPT_LEAST) {
            known.selections.retain(|_, same_hash| {
                same_hash.retain(|other| !other.is_dropped());
                !same_hash.is_empty()
            });
            known.selections.shrink_to_fit();
            known.swept_at = 2 * known.selections.len();
        }
        let same_hash = known.selections.entry(selection.spec_hash()).or_default();
        // Lists of one selection would otherwise leave one each: a weak one keeps its allocation.
        same_hash.retain(|other| !other.is_dropped());
        same_hash.push(selection.downgrade());
        Ok(selection)
    }

    /// Takes the memory of a view: its own, that of the index, and that of its field mask, which
    /// counts to `holder`.
    ///
    /// # Errors
    /// [`Refusal::Exhausted`] if there is no room for it, or no share of the holder's.
    pub fn take_view(
        &self,
        selection: &Selection,
        format: &Format,
        holder: Option<Holder>,
    ) -> Result<ViewMemory, Refusal> {
        let mask_bytes = format.projection().heap_bytes();
        let place = match mask_bytes {
            0 => None,
            bytes => Some(self.take_place(holder, bytes)?),
        };
        Ok(ViewMemory { _bytes: self.take(view_bytes(selection) + mask_bytes)?, _of_holder: place })
    }

    fn take_place(&self, holder: Option<Holder>, bytes: usize) -> Result<FairPermit, Refusal> {
        // Other caches may have taken room meanwhile, or given some back.
        self.shares.set((self.budget.used() + self.budget.room()).into());
        self.shares.try_take_many(holder, bytes).ok_or_else(|| self.exhausted())
    }

    fn take(&self, bytes: usize) -> Result<Share, Refusal> {
        self.budget.take(bytes).ok_or_else(|| self.exhausted())
    }

    fn exhausted(&self) -> Refusal {
        Refusal::Exhausted(SELECTOR_BYTES.exhausted(self.budget.bytes_max()))
    }
}

/// The memory of a view of this selection, in bytes.
fn view_bytes(selection: &Selection) -> usize {
    size_of::<View>() + filed_values_max(selection) * PLACE_BYTES
}

#[cfg(test)]
mod tests;
