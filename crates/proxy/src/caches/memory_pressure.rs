//! The memory budget: what to release, and in which order, when resident memory comes close to the
//! limit.
//!
//! Beyond its memory limit the kernel kills the process, and every stream with it. So the process
//! must release memory before. It measures resident memory, as the kernel does: that covers
//! history, logs, snapshots in flight, send buffers and libraries alike. Adding up only what each
//! part reports about itself would miss the allocator, buffers of libraries and everything
//! forgotten.
//!
//! Live streams matter most, so they are served at every step, and the cheapest losses come first:
//!
//! 1. From 85 %: data that only saves work (projected objects, compressed snapshots, the latest
//!    backfill) is dropped, and made again for each reader.
//! 2. From 90 %: history is halved every second, down to a sixteenth. Subscribers that resume from
//!    an old version get a catch-up instead of every event.
//! 3. From 95 %: only an eighth of the usual number of snapshots, lists, catch-ups, backfills and
//!    transfers to peers may run at a time.
//! 4. From 100 %: none may start. Their readers get an error with a retry delay.
//!
//! A step ends when memory is five points below its threshold. Without this margin, releasing
//! memory would end the step that released it, again and again.

use std::{io, path::Path, sync::Arc, time::Duration};

use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};

use super::registry::Registry;
use crate::telemetry::{metrics::Metrics, process::ResidentMemory};

/// The smallest useful budget, in bytes: the process with empty caches, and a little more.
pub const MEMORY_BYTES_MIN: u64 = 64 << 20;

/// The time between two measurements.
const INTERVAL: Duration = Duration::from_secs(1);
/// The thresholds of the steps, in percent of the budget.
const STEPS: [usize; 4] = [85, 90, 95, 100];
/// How far memory must fall below a step's threshold before the step ends, in percent of the
/// budget.
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
    /// The pressure after a measurement of `used` bytes.
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

    /// How many requests may pin state at a time.
    fn snapshots_max(self, usual: usize) -> usize {
        match self.step {
            0..=2 => usual,
            3 => (usual / 8).max(1),
            _ => 0,
        }
    }
}

/// Keeps the process within `bytes_max`, as long as the future is polled.
pub async fn keep_within(registry: Arc<Registry>, metrics: Arc<Metrics>, bytes_max: usize) {
    let mut memory = match ResidentMemory::open() {
        Ok(memory) => memory,
        Err(error) => {
            return warn!(%error, "this system does not report the process's memory; the memory budget has no effect");
        }
    };
    info!(bytes_max, "keeping within the memory budget");
    keep_measured_within(registry, metrics, bytes_max, || memory.bytes()).await;
}

/// Like [`keep_within`], by another measure of the bytes in use.
pub async fn keep_measured_within(
    registry: Arc<Registry>,
    metrics: Arc<Metrics>,
    bytes_max: usize,
    used: impl FnMut() -> io::Result<u64>,
) {
    let act = |used, pressure: Pressure, has_changed| {
        metrics.memory(used, bytes_max, pressure.step);
        if has_changed || pressure.step > 0 {
            registry.gate().narrow(pressure.snapshots_max(registry.gate().snapshots_max()));
            registry.shed(pressure.history_share, pressure.step == 0);
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
    let (mut pressure, mut has_failed) = (Pressure::default(), false);
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

/// Four fifths of the memory limit of this process's cgroup. `None` if there is no limit.
pub fn default_budget() -> Option<usize> {
    let limit = cgroup_limit(Path::new("/sys/fs/cgroup"), &std::fs::read_to_string("/proc/self/cgroup").ok()?)?;
    let budget = limit / 5 * 4;
    if (budget as u64) < MEMORY_BYTES_MIN {
        warn!(
            limit,
            least = MEMORY_BYTES_MIN / 4 * 5,
            "the cgroup's memory limit is too small: kubefan may refuse all subscribers"
        );
    }
    Some(budget)
}

/// The smallest limit of the process's own group and its ancestors, by cgroup version 2 or by the
/// memory controller of version 1. `membership` is the content of `/proc/self/cgroup`.
fn cgroup_limit(root: &Path, membership: &str) -> Option<usize> {
    let limits = membership.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let (root, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            all if all.split(',').any(|one| one == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => return None,
        };
        // In a container, the path may be the host's, and the container's own group the root.
        let own = root.join(path.trim_start_matches('/'));
        let groups = own.ancestors().take_while(|group| group.starts_with(&root)).map(Path::to_owned);
        groups.chain([root.clone()]).filter_map(|group| read_limit(&group.join(file))).min()
    });
    limits.min()
}

fn read_limit(file: &Path) -> Option<usize> {
    // Version 1 has a number near the maximum where there is no limit.
    let limit: usize = std::fs::read_to_string(file).ok()?.trim().parse().ok()?;
    (limit < usize::MAX / 4).then_some(limit)
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
        let (mut readings, mut acted) = (readings.into_iter(), Vec::new());
        let used = || readings.next().unwrap_or(Err(io::ErrorKind::Other)).map_err(io::Error::from);
        let following =
            observe(used, 100, |used, pressure, has_changed| acted.push((used, pressure.step, has_changed)));
        assert!(tokio::time::timeout(10 * INTERVAL, following).await.is_err());
        assert_eq!(acted, [(100, 4, true), (50, 0, true)]);
    }

    #[test]
    fn the_cgroup_limit_is_the_smallest_of_all_ancestors() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let limit = |membership: &str| cgroup_limit(root.path(), membership);
        assert_eq!(limit("0::/\n"), None);
        write("memory.max", "max\n");
        assert_eq!(limit("0::/\n"), None);
        write("kubepods/pod1/memory.max", "1000\n");
        write("kubepods/pod1/one/memory.max", "max\n");
        assert_eq!(limit("0::/kubepods/pod1/one\n"), Some(1000), "a pod limits its containers");
        write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        write("memory/docker/memory.limit_in_bytes", "500\n");
        assert_eq!(limit("5:cpu,memory:/docker\n1:name=systemd:/\n"), Some(500));
        write("memory.max", "2000\n");
        assert_eq!(limit("0::/not/seen/from/here\n"), Some(2000), "in a container its own group is the root");
    }
}
