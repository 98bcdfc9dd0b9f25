//! The bug that is planted in this process.

use std::{
    env,
    sync::atomic::{AtomicUsize, Ordering},
};

use super::Bug;

const NONE: usize = usize::MAX;
const UNDECIDED: usize = usize::MAX - 1;

static CHOSEN: AtomicUsize = AtomicUsize::new(UNDECIDED);

/// Whether this bug is planted.
pub fn is(bug: Bug) -> bool {
    match CHOSEN.load(Ordering::SeqCst) {
        UNDECIDED => {
            plant(from_environment());
            is(bug)
        }
        chosen => chosen == bug as usize,
    }
}

/// Plants a bug in place of the current one. `None` removes it.
pub fn plant(bug: Option<Bug>) {
    CHOSEN.store(bug.map_or(NONE, |bug| bug as usize), Ordering::SeqCst);
}

/// # Panics
///
/// If there is no bug of that name: a test must not pass because its bug was not planted.
fn from_environment() -> Option<Bug> {
    let name = env::var("KUBEFAN_PLANTED_BUG").ok().filter(|name| !name.is_empty())?;
    let found = Bug::ALL.iter().chain(Bug::AMONG_THREADS).copied().find(|bug| bug.name() == name);
    assert!(found.is_some(), "KUBEFAN_PLANTED_BUG={name} is not a bug in crate::planted::Bug");
    found
}
