//! The memory budget: what is let go of, and in which order, when the process comes near to what it may take.
//!
//! What counts is what the kernel counts, the resident memory: rings, logs, snapshots in flight and send buffers, and whatever a library
//! keeps besides. Past a limit the kernel ends the process, and every stream with it; so history goes before streams do:
//!
//! 1. from 85 %: what is kept only to save work (projected objects, compressed snapshots, the last backfill) is dropped, and made again
//!    for each;
//! 2. from 90 %: history is halved each second, down to a sixteenth: who comes back from far gets a catch-up instead of every event;
//! 3. from 95 %: an eighth of the usual snapshots, lists, catch-ups, backfills and transfers to peers are let in at a time;
//! 4. from 100 %: none are; their readers are told to come back.
//!
//! Live streams are served all the while. Each step is taken back when the use is five points below it.

use std::{io, path::Path, sync::Arc, time::Duration};

use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};

use super::registry::Registry;
use crate::{
    config::MEMORY_BYTES_MIN,
    telemetry::{metrics::Metrics, process::ResidentMemory},
};

/// How often it is looked.
const INTERVAL: Duration = Duration::from_secs(1);
/// The steps, in percent of the budget.
const STEPS: [usize; 4] = [85, 90, 95, 100];
/// So far below a step it is taken back.
const HYSTERESIS: usize = 5;
/// The least share of its usual size that history keeps.
const SHARE_LEAST: f64 = 1.0 / 16.0;

/// Where the process stands, and what was let go of.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Pressure {
    /// Steps taken, 0 to 4.
    step: usize,
    /// What history may take of its usual size.
    share: f64,
}

impl Default for Pressure {
    fn default() -> Self {
        Self { step: 0, share: 1.0 }
    }
}

impl Pressure {
    /// What follows from so much in use.
    fn next(self, used: usize, bytes_max: usize) -> Self {
        let percent = used.saturating_mul(100) / bytes_max.max(1);
        let up = STEPS.iter().filter(|step| percent >= **step).count();
        let down = STEPS.iter().filter(|step| percent + HYSTERESIS >= **step).count();
        let step = if up > self.step { up } else { self.step.min(down) };
        let share = match step {
            2.. => (self.share / 2.0).max(SHARE_LEAST),
            0 => (self.share * 1.25).min(1.0),
            _ => self.share,
        };
        Self { step, share }
    }

    /// How many may be let in.
    fn snapshots_max(self, usual: usize) -> usize {
        match self.step {
            0..=2 => usual,
            3 => (usual / 8).max(1),
            _ => 0,
        }
    }
}

/// Keeps the process within `bytes_max`, for as long as it is polled.
pub async fn govern(registry: Arc<Registry>, metrics: Arc<Metrics>, bytes_max: usize) {
    let mut memory = match ResidentMemory::open() {
        Ok(memory) => memory,
        Err(error) => return warn!(%error, "this system does not tell how much memory is used; no budget is kept"),
    };
    info!(bytes_max, "keeping within the memory budget");
    let act = |used, pressure: Pressure, has_changed| {
        metrics.memory(used, bytes_max, pressure.step);
        if has_changed || pressure.step > 0 {
            registry.gate().narrow(pressure.snapshots_max(registry.gate().snapshots_max()));
            registry.shed(pressure.share, pressure.step == 0);
        }
    };
    follow(|| memory.bytes(), bytes_max, act).await;
}

/// Looks each second at what is `used`, and tells it with where that leads, and whether that is news. Where it cannot be seen, things
/// stay as they are until it can.
async fn follow(
    mut used: impl FnMut() -> io::Result<u64>,
    bytes_max: usize,
    mut act: impl FnMut(usize, Pressure, bool),
) {
    let (mut pressure, mut is_blind) = (Pressure::default(), false);
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let used = match used() {
            Ok(used) => usize::try_from(used).unwrap_or(usize::MAX),
            Err(error) => {
                if !std::mem::replace(&mut is_blind, true) {
                    warn!(%error, "how much memory is used cannot be read just now");
                }
                continue;
            }
        };
        is_blind = false;
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

/// Four fifths of what this process' cgroup may take, where that is limited.
pub fn default_budget() -> Option<usize> {
    let limit = cgroup_limit(Path::new("/sys/fs/cgroup"), &std::fs::read_to_string("/proc/self/cgroup").ok()?)?;
    let budget = limit / 5 * 4;
    if (budget as u64) < MEMORY_BYTES_MIN {
        warn!(
            limit,
            least = MEMORY_BYTES_MIN / 4 * 5,
            "the cgroup's memory limit is too small: kubefan may admit nobody"
        );
    }
    Some(budget)
}

/// The least limit on the way from the root to the process' own group: version 2, or version 1's memory controller.
fn cgroup_limit(root: &Path, membership: &str) -> Option<usize> {
    let limits = membership.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let (root, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            all if all.split(',').any(|one| one == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => return None,
        };
        // In a container the path may be that of the host, and its own group be the root.
        let own = root.join(path.trim_start_matches('/'));
        let groups = own.ancestors().take_while(|group| group.starts_with(&root)).map(Path::to_owned);
        groups.chain([root.clone()]).filter_map(|group| read_limit(&group.join(file))).min()
    });
    limits.min()
}

fn read_limit(file: &Path) -> Option<usize> {
    // Version 1 says "no limit" with a number near the largest.
    let limit: usize = std::fs::read_to_string(file).ok()?.trim().parse().ok()?;
    (limit < usize::MAX / 4).then_some(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_is_taken_at_once_and_taken_back_late() {
        let used = |pressure: Pressure, percent: usize| pressure.next(percent * 10, 1000);
        let easy = Pressure::default();
        assert_eq!(used(easy, 84), easy);
        let spare = used(easy, 85);
        assert_eq!((spare.step, spare.share), (1, 1.0));
        let short = used(spare, 91);
        assert_eq!((short.step, short.share), (2, 0.5));
        assert_eq!(used(used(short, 99), 99).share, 0.125);
        assert_eq!((0..9).fold(short, |pressure, _| used(pressure, 101)), Pressure { step: 4, share: SHARE_LEAST });
        assert_eq!(used(short, 86).step, 2, "not yet");
        let relieved = used(short, 84);
        assert_eq!((relieved.step, relieved.share), (1, 0.5), "history does not come back while memory is short");
        let again = (0..9).fold(relieved, |pressure, _| used(pressure, 50));
        assert_eq!(again, easy);
        let snapshots = [easy, spare, short, used(easy, 95), used(easy, 100)].map(|each| each.snapshots_max(256));
        assert_eq!(snapshots, [256, 256, 256, 32, 0]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_that_fails_is_not_the_last() {
        let looks = [Ok(100), Err(io::ErrorKind::Other), Err(io::ErrorKind::Other), Ok(50)];
        let (mut looks, mut acted) = (looks.into_iter(), Vec::new());
        let used = || looks.next().unwrap_or(Err(io::ErrorKind::Other)).map_err(io::Error::from);
        let following = follow(used, 100, |used, pressure, has_changed| acted.push((used, pressure.step, has_changed)));
        assert!(tokio::time::timeout(10 * INTERVAL, following).await.is_err());
        assert_eq!(acted, [(100, 4, true), (50, 0, true)]);
    }

    #[test]
    fn the_budget_follows_the_limit_of_the_cgroup() {
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
