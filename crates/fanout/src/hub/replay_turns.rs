//! The turns of clients that replay history for the same view.

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, Weak},
};

use tokio::sync;

use crate::{sync::Mutex, views::view::ViewKey};

/// The turns by view. Views without a replaying client are dropped when another one is added.
#[derive(Default)]
pub(super) struct ReplayTurns(Mutex<HashMap<ViewKey, Weak<sync::Mutex<()>>>>);

impl ReplayTurns {
    /// Returns the turns of the clients that replay for this view.
    pub(super) fn of(&self, key: ViewKey) -> Arc<sync::Mutex<()>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(turns) = all.get(&key).and_then(Weak::upgrade) {
            return turns;
        }
        all.retain(|_, turns| turns.strong_count() > 0);
        let turns = Arc::default();
        all.insert(key, Arc::downgrade(&turns));
        turns
    }
}
