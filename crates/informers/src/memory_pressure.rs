//! The memory budget: releases memory, the cheapest loss first, when it comes close to the limit.
//!
//! Beyond its memory limit the kernel kills the process, and every stream with it. So the process
//! must release memory before. It measures the value that the kernel compares with the limit: the
//! charge of its control group, which covers history, logs, snapshots in flight, libraries, and the
//! sockets' buffers in the kernel alike. Without a group of its own it measures its resident
//! memory. A sum of the parts' own reports would miss the allocator, the buffers of libraries and
//! every part that was forgotten.
//!
//! Live streams matter most, so streams with a reading client are served at every step, and the
//! cheapest losses come first:
//!
//! 1. From 85 %: data that only saves work (projected objects, compressed snapshots, the latest
//!    backfill) is dropped, and made again for each reader.
//! 2. From 90 %: history is halved every second, down to a sixteenth. Subscribers that resume from
//!    an old version get a catch-up instead of every event.
//! 3. From 95 %: only an eighth of the usual number of snapshots, lists, catch-ups, backfills and
//!    transfers to peers may run at a time.
//! 4. From 100 %: none may start. Their readers get an error with a retry delay. Connections and
//!    streams whose clients have read nothing for a while are ended, some each second.
//!
//! A step ends when memory is five points below its threshold. Without this margin, releasing
//! memory would end the step that released it, again and again.

use std::{io, sync::Arc, time::Duration};

use kubefan_common::planted::{self, Bug};
use kubefan_telemetry::{
    cgroup::{ChargedMemory, MemoryGroup},
    metrics::Metrics,
    process::ResidentMemory,
};
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};

use super::registry::Registry;

/// The smallest useful budget, in bytes: the process with empty caches, and a little more.
pub const MEMORY_BYTES_MIN: u64 = 64 << 20;

/// The time between two measurements.
const INTERVAL: Duration = Duration::from_secs(1);
/// The thresholds of the steps, in percent of the budget.
const STEPS: [usize; 4] = [85, 90, 95, 100];
/// Distance below a step's threshold at which the step ends, in percent of the budget.
const HYSTERESIS: usize = 5;
/// The smallest share of its usual size that history is limited to.
const HISTORY_SHARE_MIN: f64 = 1.0 / 16.0;

/// The current step and its effect on history.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Pressure {
    /// 0 (no pressure) to 4.
    step: usize,
    /// The share of its usual size that history may use, from 0 to 1.
    history_share: f64,
}

impl Default for Pressure {
    fn default() -> Self {
        Self { step: 0, history_share: 1.0 }
    }
}

impl Pressure {
    /// Returns the pressure after a measurement of `used` bytes.
    fn next(self, used: usize, bytes_max: usize) -> Self {
        let percent = used.saturating_mul(100) / bytes_max.max(1);
        let up = STEPS.iter().filter(|step| percent >= **step).count();
        let down = STEPS.iter().filter(|step| percent + HYSTERESIS >= **step).count();
        let step = if up > self.step { up } else { self.step.min(down) };
        let history_share = match step {
            2.. => (self.history_share / 2.0).max(HISTORY_SHARE_MIN),
            0 => (self.history_share * 1.25).min(1.0),
            _ => self.history_share,
        };
        Self { step, history_share }
    }

    /// Returns the maximum number of requests that pin state at a time.
    fn snapshots_max(self, usual: usize) -> usize {
        match self.step {
            0..=2 => usual,
            3 => (usual / 8).max(1),
            _ => 0,
        }
    }
}

/// Keeps the process within its budget, as long as the future is polled. `end_unread` ends some
/// connections and streams whose clients read nothing, and returns how many; it is called each
/// second while memory is at its limit.
pub async fn keep_within(
    registry: Arc<Registry>,
    metrics: Arc<Metrics>,
    budget: MemoryBudget,
    end_unread: impl Fn() -> usize,
) {
    let bytes_max = budget.bytes_max;
    let mut memory = match MemoryInUse::open(&budget) {
        Ok(memory) => memory,
        Err(error) => {
            return warn!(%error, "this system does not report the process's memory; the memory budget has no effect");
        }
    };
    info!(bytes_max, charged = memory.charged.is_some(), "keeping within the memory budget");
    keep_measured_within(registry, metrics, bytes_max, || memory.bytes(), end_unread).await;
}

/// Like [`keep_within`], by another measure of the bytes in use.
pub async fn keep_measured_within(
    registry: Arc<Registry>,
    metrics: Arc<Metrics>,
    bytes_max: usize,
    used: impl FnMut() -> io::Result<u64>,
    end_unread: impl Fn() -> usize,
) {
    let act = |used, pressure: Pressure, has_changed| {
        metrics.memory(used, bytes_max, pressure.step);
        if (has_changed && !planted::is(Bug::PressureStays)) || pressure.step > 0 {
            registry.gate().narrow(pressure.snapshots_max(registry.gate().snapshots_max()));
            registry.shed(pressure.history_share, pressure.step == 0);
        }
        if pressure.step == STEPS.len() {
            match end_unread() {
                0 => {}
                ended => warn!(
                    ended,
                    "connections and streams whose clients read nothing were ended, because memory is short"
                ),
            }
        }
    };
    observe(used, bytes_max, act).await;
}

/// Measures memory every second and calls `act` with the bytes in use, the pressure, and whether
/// the pressure has changed. After a failed measurement, the last pressure stays in effect.
async fn observe(
    mut used: impl FnMut() -> io::Result<u64>,
    bytes_max: usize,
    mut act: impl FnMut(usize, Pressure, bool),
) {
    let mut pressure = Pressure::default();
    let mut has_failed = false;
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let used = match used() {
            Ok(used) => usize::try_from(used).unwrap_or(usize::MAX),
            Err(error) => {
                if !std::mem::replace(&mut has_failed, true) {
                    warn!(%error, "cannot read the process's memory");
                }
                continue;
            }
        };
        has_failed = false;
        let next = pressure.next(used, bytes_max);
        if next.step != pressure.step {
            warn!(
                used,
                bytes_max,
                step = next.step,
                "memory is {}",
                if next.step > pressure.step { "short" } else { "less short" }
            );
        }
        act(used, next, next != pressure);
        pressure = next;
    }
}

/// The memory that the process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryBudget {
    /// Maximum of the resident memory, in bytes.
    pub bytes_max: usize,
    /// The control group with the limit, and the maximum of its charge, in bytes. `None` if nothing
    /// limits the process, or if other processes share the group.
    charged: Option<(MemoryGroup, usize)>,
}

impl MemoryBudget {
    /// Takes the budget that was given, else four fifths of the limit of this process's control
    /// group. `None` if there is neither.
    pub fn new(given: Option<usize>) -> Option<Self> {
        let group = MemoryGroup::of_this_process();
        let limit = group.as_ref().map(|group| usize::try_from(group.limit()).unwrap_or(usize::MAX));
        let (bytes_max, charged_max) = shares(given, limit)?;
        if let Some(limit) = limit.filter(|_| (charged_max as u64) < MEMORY_BYTES_MIN) {
            warn!(
                limit,
                least = MEMORY_BYTES_MIN / 4 * 5,
                "the cgroup's memory limit is too small: kubefan may refuse all subscribers"
            );
        }
        let charged = group.filter(|group| {
            let is_shared = group.is_shared();
            if is_shared {
                info!("other processes share the cgroup: only kubefan's resident memory is compared with the budget");
            }
            !is_shared
        });
        Some(Self { bytes_max, charged: charged.map(|group| (group, charged_max)) })
    }
}

/// Returns the budget of the resident memory in bytes: the one that was given, else four fifths of
/// the limit of this process's control group.
pub fn resident_max(given: Option<usize>) -> Option<usize> {
    let group = MemoryGroup::of_this_process();
    let limit = group.map(|group| usize::try_from(group.limit()).unwrap_or(usize::MAX));
    shares(given, limit).map(|(bytes_max, _)| bytes_max)
}

/// Returns the budgets of the resident memory and of the charge of a group with this limit. A given
/// budget above four fifths of the limit counts for both.
fn shares(given: Option<usize>, limit: Option<usize>) -> Option<(usize, usize)> {
    let usual = limit.map(|limit| limit / 5 * 4);
    let bytes_max = given.or(usual)?;
    let charged_max = usual.zip(limit).map_or(bytes_max, |(usual, limit)| usual.max(bytes_max.min(limit)));
    Some((bytes_max, charged_max))
}

/// Measures the memory in use. The charge of the group includes the buffers of sockets and the
/// kernel's own memory, which count to the limit but not to the resident memory.
struct MemoryInUse {
    resident: ResidentMemory,
    bytes_max: usize,
    charged: Option<(ChargedMemory, usize)>,
}

impl MemoryInUse {
    fn open(budget: &MemoryBudget) -> io::Result<Self> {
        let resident = ResidentMemory::open()?;
        let open = |(group, charged_max): &(MemoryGroup, usize)| match ChargedMemory::open(group) {
            Ok(charged) => Some((charged, *charged_max)),
            Err(error) => {
                warn!(%error, "cannot read what the cgroup is charged; only the resident memory is compared with the budget");
                None
            }
        };
        Ok(Self { resident, bytes_max: budget.bytes_max, charged: budget.charged.as_ref().and_then(open) })
    }

    /// Returns the measure that is closer to its budget, in bytes of the budget of the resident
    /// memory.
    fn bytes(&mut self) -> io::Result<u64> {
        let resident = self.resident.bytes()?;
        let Some((charged, charged_max)) = &mut self.charged else { return Ok(resident) };
        Ok(resident.max(scaled(charged.bytes()?, self.bytes_max, *charged_max)))
    }
}

/// Converts bytes to the same share of another budget.
fn scaled(bytes: u64, to_max: usize, from_max: usize) -> u64 {
    let scaled = u128::from(bytes) * (to_max as u128) / (from_max.max(1) as u128);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_takes_effect_at_once_and_ends_below_its_threshold() {
        let used = |pressure: Pressure, percent: usize| pressure.next(percent * 10, 1000);
        let none = Pressure::default();
        assert_eq!(used(none, 84), none);
        let slight = used(none, 85);
        assert_eq!((slight.step, slight.history_share), (1, 1.0));
        let short = used(slight, 91);
        assert_eq!((short.step, short.history_share), (2, 0.5));
        assert_eq!(used(used(short, 99), 99).history_share, 0.125);
        assert_eq!(
            (0..9).fold(short, |pressure, _| used(pressure, 101)),
            Pressure { step: 4, history_share: HISTORY_SHARE_MIN }
        );
        assert_eq!(used(short, 86).step, 2, "not yet");
        let relieved = used(short, 84);
        assert_eq!(
            (relieved.step, relieved.history_share),
            (1, 0.5),
            "history does not come back while memory is short"
        );
        let again = (0..9).fold(relieved, |pressure, _| used(pressure, 50));
        assert_eq!(again, none);
        let snapshots = [none, slight, short, used(none, 95), used(none, 100)].map(|each| each.snapshots_max(256));
        assert_eq!(snapshots, [256, 256, 256, 32, 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_memory_reading_is_retried() {
        let readings = [Ok(100), Err(io::ErrorKind::Other), Err(io::ErrorKind::Other), Ok(50)];
        let mut readings = readings.into_iter();
        let mut acted = Vec::new();
        let used = || readings.next().unwrap_or(Err(io::ErrorKind::Other)).map_err(io::Error::from);
        let following =
            observe(used, 100, |used, pressure, has_changed| acted.push((used, pressure.step, has_changed)));
        assert!(tokio::time::timeout(10 * INTERVAL, following).await.is_err());
        assert_eq!(acted, [(100, 4, true), (50, 0, true)]);
    }

    #[test]
    fn a_budget_follows_from_the_limit_and_the_given_value() {
        for (given, limit, expected) in [
            (None, None, None),
            (None, Some(1000), Some((800, 800))),
            (Some(500), None, Some((500, 500))),
            (Some(500), Some(1000), Some((500, 800))),
            (Some(900), Some(1000), Some((900, 900))),
            (Some(5000), Some(1000), Some((5000, 1000))),
        ] {
            assert_eq!(shares(given, limit), expected, "{given:?}, {limit:?}");
        }
        assert_eq!(scaled(400, 500, 800), 250, "half of each");
        assert_eq!(scaled(u64::MAX, usize::MAX, 1), u64::MAX);
    }
}
