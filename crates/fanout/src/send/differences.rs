//! Differences between the objects of events and those before them. The encoders of a cache share
//! them: each difference is computed once for an event, however many projections are compared, live
//! and replayed.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use kubefan_cache::budget::{Budget, Share};
use kubefan_model::{ResourceVersion, event::WatchEvent, object::Object, projection::Difference};

/// The number of events whose difference is remembered: subscribers that return after a short while
/// replay them.
const REMEMBERED_MAX: usize = 4096;

/// The differences of a cache's latest events, within the budget of projections.
#[derive(Default)]
pub struct Differences(Mutex<Known>);

/// Keyed by version, with the event itself: a backfill may have another event of the same version.
type Known = BTreeMap<ResourceVersion, (Weak<WatchEvent>, Arc<Difference>, Share)>;

impl Differences {
    /// The difference between the object of an event and the object before.
    pub fn of(&self, event: &Arc<WatchEvent>, previous: &Object, budget: &Budget) -> Arc<Difference> {
        let is_it = |(of, ..): &&(Weak<WatchEvent>, Arc<Difference>, Share)| of.as_ptr() == Arc::as_ptr(event);
        let known = self.lock().get(&event.version()).filter(is_it).map(|(_, known, _)| known.clone());
        known.unwrap_or_else(|| {
            let made = Arc::new(Difference::new(&previous.bytes(), &event.object().bytes()));
            self.remember(event, &made, budget);
            made
        })
    }

    /// Forgets older events if there is no room.
    fn remember(&self, event: &Arc<WatchEvent>, made: &Arc<Difference>, budget: &Budget) {
        let version = event.version();
        let mut known = self.lock();
        loop {
            let is_full = known.len() >= REMEMBERED_MAX;
            if !is_full && let Some(share) = budget.take(made.bytes()) {
                known.insert(version, (Arc::downgrade(event), made.clone(), share));
                return;
            }
            match known.first_entry() {
                Some(oldest) if *oldest.key() < version => drop(oldest.remove()),
                _ => return,
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets all.
    pub fn forget(&self) {
        self.lock().clear();
    }
}
