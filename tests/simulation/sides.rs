//! Moves the reads of an informer between kubefan and the apiserver, as the transport of the Go
//! client does: a read that finds no kubefan goes to the apiserver, and so do all others until the
//! program returns. A watch goes on from its last version at the other side, without a list.

use std::{sync::Mutex, time::Duration};

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use tokio::time::Instant;

/// The side of a program's reads.
pub(crate) struct Sides(Mutex<SidesState>);

struct SidesState {
    random: Pcg64Mcg,
    /// The time at which reads return to kubefan. `None` while they are there.
    back_at: Option<Instant>,
    /// The next start at the apiserver. One start is allowed in a window.
    next_start: Instant,
    window: Duration,
}

/// Whether a read may move. The pages of a list must come from one server.
pub(crate) fn can_move(path: &str) -> bool {
    !path.contains("limit=") && !path.contains("continue=")
}

impl Sides {
    pub(crate) fn new(seed: u64) -> Sides {
        let mut random = Pcg64Mcg::seed_from_u64(seed);
        let window = Duration::from_millis(random.random_range(100..5000));
        Sides(Mutex::new(SidesState { random, back_at: None, next_start: Instant::now(), window }))
    }

    /// The time at which reads return to kubefan; `None` if they go there now.
    pub(crate) fn back_at(&self) -> Option<Instant> {
        let mut state = self.0.lock().unwrap();
        state.back_at = state.back_at.filter(|back_at| Instant::now() < *back_at);
        state.back_at
    }

    /// Sends reads to the apiserver for a while. kubefan may be back before, or not be there then.
    pub(crate) fn leave(&self) {
        let mut state = self.0.lock().unwrap();
        let time = Duration::from_millis(state.random.random_range(1000..60_000));
        state.back_at = Some(Instant::now() + time);
    }

    /// Takes the next start at the apiserver.
    pub(crate) fn next_start(&self) -> Instant {
        let mut state = self.0.lock().unwrap();
        let start = state.next_start.max(Instant::now());
        state.next_start = start + state.window;
        start
    }
}
