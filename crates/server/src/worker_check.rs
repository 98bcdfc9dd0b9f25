//! Whether the workers of a runtime still run tasks.
//!
//! A worker that waits for a lock which is never released runs no task any more, and the tasks of
//! its queue may never run again. Nothing inside that runtime can report this. So another thread
//! compares the runtime's counters of each worker.

use std::time::Duration;

use tokio::runtime::RuntimeMetrics;

/// The time between two observations.
pub const OBSERVATION_INTERVAL: Duration = Duration::from_secs(1);

/// Observations without progress after which a worker is stuck: 30 s. Observations are counted
/// instead of time, because a process that was suspended has observed nothing.
const OBSERVATIONS_MAX: u32 = 30;

/// Observes the workers of one runtime.
pub struct WorkerCheck {
    runtime: RuntimeMetrics,
    workers: Vec<Observed>,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct Observed {
    progress: Progress,
    /// The observations with the same progress.
    unchanged: u32,
}

/// Counters of a worker: they change after each run of tasks.
#[derive(Debug, Clone, Default, PartialEq)]
struct Progress {
    /// Odd while the worker is parked: it has nothing to do.
    parks: u64,
    busy: Duration,
}

impl Observed {
    /// Compares with the observation before. Returns true if the worker is stuck.
    fn next(&mut self, progress: Progress) -> bool {
        let is_parked = progress.parks % 2 == 1;
        self.unchanged = if is_parked || progress != self.progress { 0 } else { self.unchanged + 1 };
        self.progress = progress;
        self.unchanged >= OBSERVATIONS_MAX
    }
}

impl WorkerCheck {
    /// Observes the workers of this runtime.
    pub fn new(runtime: RuntimeMetrics) -> Self {
        let workers = vec![Observed::default(); runtime.num_workers()];
        Self { runtime, workers }
    }

    /// Observes each worker; to be called every [`OBSERVATION_INTERVAL`]. Returns the number of a
    /// worker that has been in the same task for 30 observations.
    pub fn observe(&mut self) -> Option<usize> {
        let runtime = &self.runtime;
        let observe = |(number, worker): (usize, &mut Observed)| {
            let parks = runtime.worker_park_unpark_count(number);
            let progress = Progress { parks, busy: runtime.worker_total_busy_duration(number) };
            worker.next(progress).then_some(number)
        };
        // Each worker is observed, also behind one that is stuck.
        self.workers.iter_mut().enumerate().map(observe).fold(None, Option::or)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use tokio::runtime::Builder;

    use super::*;

    #[test]
    fn a_worker_is_stuck_only_if_it_neither_parks_nor_ends_a_task() {
        let stuck = |progress: &dyn Fn(u32) -> Progress| {
            let mut worker = Observed::default();
            (0..3 * OBSERVATIONS_MAX).any(|second| worker.next(progress(second)))
        };
        assert!(!stuck(&|_| Progress { parks: 7, busy: Duration::ZERO }), "parked");
        assert!(!stuck(&|second| Progress { parks: 8, busy: Duration::from_secs(second.into()) }), "always busy");
        assert!(!stuck(&|second| Progress { parks: u64::from(second) * 2, busy: Duration::ZERO }), "often parked");
        assert!(stuck(&|_| Progress { parks: 8, busy: Duration::from_secs(9) }), "in one task");
        assert!(stuck(&|_| Progress::default()), "in its first task");
    }

    #[test]
    fn a_worker_that_is_blocked_in_a_task_is_found_and_runs_on_unharmed() {
        let runtime = Builder::new_multi_thread().worker_threads(2).build().unwrap();
        let mut check = WorkerCheck::new(runtime.metrics());
        let (started, has_started) = sync_channel(0);
        let (release, released) = sync_channel::<()>(0);
        let blocked = runtime.spawn(async move {
            started.send(()).unwrap();
            released.recv().unwrap();
        });
        has_started.recv().unwrap();
        // The other worker may still be about to park.
        let stuck = (0..=10 * OBSERVATIONS_MAX).find_map(|_| check.observe());
        assert!(stuck.is_some());
        release.send(()).unwrap();
        runtime.block_on(blocked).unwrap();
        runtime.block_on(async {
            while check.observe().is_some() {
                tokio::task::yield_now().await;
            }
        });
    }
}
