//! The budgets of CPU time for gzip: one for events that few readers take, and one for the chunks
//! of lists and initial states. Single objects are not counted.
//!
//! An event that many readers get costs less to compress than it saves. With few readers it costs
//! CPU time and saves bytes on the network. So the whole process spends at most a small part of one
//! core on it. A chunk is compressed once for all its readers, but clients could ask for the states
//! of many selections. A budget is a token bucket in one number (GCRA).

use std::{
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use tokio::time::Instant;

/// CPU time of compressing one byte of an event, in nanoseconds, as decision 54 measured it in a
/// process that does other work between two events.
const NANOSECONDS_PER_EVENT_BYTE: u64 = 8;
/// The budget of events is one part in this many of one core.
pub(crate) const EVENTS_CORE_DIVISOR: u64 = 20;
/// CPU time of compressing one byte of a chunk, in nanoseconds, as decision 54 measured it.
const NANOSECONDS_PER_CHUNK_BYTE: u64 = 2;
/// The budget of chunks is one part in this many of all cores.
const CHUNKS_CORES_DIVISOR: u64 = 4;
/// Number of cores. To ask for it takes system calls.
static CORES: LazyLock<u64> = LazyLock::new(|| thread::available_parallelism().map_or(1, |cores| cores.get() as u64));
/// The time whose budget may be spent at once.
const BURST: Duration = Duration::from_secs(1);

/// A share of CPU time for the whole process. Clones are the same budget.
#[derive(Debug, Clone)]
pub struct CompressionBudget(Arc<Spent>);

#[derive(Debug)]
struct Spent {
    /// Time of the budget that a byte takes, in picoseconds.
    byte_picoseconds: u64,
    /// The budget counts time from here on.
    start: Instant,
    /// The time up to which the budget is spent, in nanoseconds after `start`.
    up_to: AtomicU64,
    is_closed: AtomicBool,
}

impl CompressionBudget {
    /// The budget of events with few readers: one part in `core_divisor` of a core.
    pub fn of_events(core_divisor: u64) -> Self {
        Self::new((1000 * NANOSECONDS_PER_EVENT_BYTE).saturating_mul(core_divisor))
    }

    /// The budget of the chunks of lists and initial states: a quarter of the cores.
    pub fn of_chunks() -> Self {
        Self::new(1000 * NANOSECONDS_PER_CHUNK_BYTE * CHUNKS_CORES_DIVISOR / *CORES)
    }

    fn new(byte_picoseconds: u64) -> Self {
        let start = Instant::now();
        let up_to = AtomicU64::new(0);
        let is_closed = AtomicBool::new(false);
        Self(Arc::new(Spent { byte_picoseconds, start, up_to, is_closed }))
    }

    /// Takes the CPU time to compress this many bytes. Returns false if the budget has none left.
    pub fn take(&self, bytes: usize, now: Instant) -> bool {
        let Spent { byte_picoseconds, start, up_to, is_closed } = &*self.0;
        if is_closed.load(Ordering::Relaxed) {
            return false;
        }
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let elapsed = nanoseconds(now.saturating_duration_since(*start));
        let latest = elapsed.saturating_add(nanoseconds(BURST));
        let cost = (bytes as u64).saturating_mul(*byte_picoseconds) / 1000;
        let spend = |up_to: u64| up_to.max(elapsed).checked_add(cost).filter(|spent| *spent <= latest);
        up_to.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend).is_ok()
    }

    /// Allows or forbids to spend it.
    pub fn open(&self, open: bool) {
        self.0.is_closed.store(!open, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_twentieth_of_a_core_is_spent_and_at_most_that_of_a_second_at_once() {
        let budget = CompressionBudget::of_events(EVENTS_CORE_DIVISOR);
        // 50 ms of a core, at 8 ns for each byte.
        let second = 6_250_000;
        let now = Instant::now();
        assert!(budget.take(second, now));
        assert!(!budget.take(1000, now), "the second is spent");
        assert!(budget.take(second / 2, now + Duration::from_millis(500)));
        assert!(!budget.take(1000, now + Duration::from_millis(500)));
        let later = now + Duration::from_secs(3600);
        assert!(budget.take(second, later));
        assert!(!budget.take(1000, later), "an hour without compression is not saved up");
        assert!(!budget.take(usize::MAX, later + BURST));
    }

    #[tokio::test(start_paused = true)]
    async fn clones_share_the_budget_and_a_closed_one_gives_nothing() {
        let budget = CompressionBudget::of_events(EVENTS_CORE_DIVISOR);
        budget.clone().open(false);
        assert!(!budget.take(1, Instant::now()));
        budget.open(true);
        assert!(budget.clone().take(6_250_000, Instant::now()));
        assert!(!budget.take(1000, Instant::now()));
    }
}
