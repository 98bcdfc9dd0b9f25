//! The group "limits": open files and memory of this process, against the configuration and the
//! caches to come.

use kubefan_app::{
    config::{CacheCompression, ServeConfig},
    open_files,
};
use kubefan_informers::memory_pressure;
use kubefan_telemetry::cgroup::MemoryGroup;

use super::report::{Finding, Report};
use crate::cli::{
    object_sample::ResourceSize,
    sizing::{self, human_bytes},
};

/// Checks the limits. `caches` are the sizes of the caches from the start, `None` if not known.
pub(super) fn check(config: &ServeConfig, caches: Option<&[ResourceSize]>, report: &mut Report) {
    report.group("limits");
    let given = config.serving.memory_bytes_max;
    let budget = memory_pressure::resident_max(given);
    let files = open_files::highest();
    let connections = open_files::connections_max(config, files, budget);
    report.add(judge_open_files(files, config.serving.connections_max, connections));
    let group = MemoryGroup::of_this_process().map(|group| group.limit());
    report.add_all(judge_budget(given.map(|bytes| bytes as u64), group));
    let budget = budget.map(|budget| budget as u64);
    if let Some(caches) = caches {
        let json: u64 = caches.iter().map(|cache| cache.bytes).sum();
        let is_packed = config.cache.compression == CacheCompression::Zstd;
        let needed = sizing::PROCESS_BYTES.value + sizing::cache_bytes(json as f64, is_packed);
        report.add(judge_memory(needed as u64, budget));
    }
    report.add_all(judge_on_demand(config, budget));
}

/// Judges the limit of open files. `given` is the number that the operator asked for, `fitting` the
/// number that fits.
fn judge_open_files(limit: Option<usize>, given: Option<usize>, fitting: usize) -> Finding {
    let limit = limit.map_or("no limit of open files".to_owned(), |limit| format!("{limit} open files"));
    match given {
        Some(given) if given > fitting => Finding::warning(
            "open files",
            format!("{limit} leave {fitting} connections, fewer than limits.connectionsMax {given}"),
            "raise the limit (ulimit -n, LimitNOFILE)",
        ),
        _ => Finding::ok("open files", format!("{limit}, {fitting} connections")),
    }
}

/// A budget above the limit of the group never acts: the kernel kills first.
fn judge_budget(given: Option<u64>, group: Option<u64>) -> Option<Finding> {
    match (given?, group) {
        (given, Some(limit)) if given >= limit => Some(Finding::error(
            "memory budget",
            format!(
                "--memory-max {} is not below the limit of the control group, {}",
                human_bytes(given as f64),
                human_bytes(limit as f64)
            ),
            "raise the limit, or leave --memory-max out: then it is 80% of the limit",
        )),
        _ => None,
    }
}

/// `needed` are the bytes of the caches from the start, without subscribers.
fn judge_memory(needed: u64, budget: Option<u64>) -> Finding {
    let what = format!("the resources of --resource need about {}", human_bytes(needed as f64));
    match budget {
        None => Finding::ok("memory", format!("{what}; nothing limits the process (--memory-max)")),
        Some(budget) if needed > budget => Finding::error(
            "memory",
            format!("{what}, more than the budget of {}", human_bytes(budget as f64)),
            "raise the memory limit, cache fewer resources or namespaces, or pack them (tuning.cacheCompression: zstd)",
        ),
        Some(budget) if needed > budget / 4 * 3 => Finding::warning(
            "memory",
            format!(
                "{what}, which leaves little of the budget of {} to subscribers and history",
                human_bytes(budget as f64)
            ),
            "raise the memory limit, or pack the caches (tuning.cacheCompression: zstd)",
        ),
        Some(budget) => Finding::ok("memory", format!("{what} of a budget of {}", human_bytes(budget as f64))),
    }
}

/// Readers may start caches up to their own limits, beside those from the start.
fn judge_on_demand(config: &ServeConfig, budget: Option<u64>) -> Option<Finding> {
    let on_demand = &config.on_demand;
    let of_readers = if on_demand.is_on { on_demand.bytes_max } else { 0 };
    let protobuf = on_demand.protobuf().map_or(0, |form| form.bytes_max);
    let tables = on_demand.tables().map_or(0, |form| form.bytes_max);
    let sum = of_readers + protobuf + tables;
    let budget = budget?;
    let message = format!(
        "caches that readers start may take {}, the budget of the process is {}",
        human_bytes(sum as f64),
        human_bytes(budget as f64)
    );
    let remedy = "lower limits.onDemandBytesMax, limits.protobufBytesMax or limits.cacheTablesBytesMax";
    (sum > budget).then(|| Finding::warning("caches of readers", message, remedy))
}

#[cfg(test)]
mod tests {
    use super::super::report::Outcome;
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn more_connections_than_open_files_are_a_warning() {
        assert_eq!(judge_open_files(Some(1024), Some(5000), 512).result, Outcome::Warning);
        assert_eq!(judge_open_files(Some(1024), None, 512).result, Outcome::Ok);
        assert_eq!(judge_open_files(None, Some(5000), 5000).result, Outcome::Ok);
    }

    #[test]
    fn memory_is_compared_with_the_budget() {
        let cases = [
            ((GIB, None), Outcome::Ok),
            ((2 * GIB, Some(GIB)), Outcome::Error),
            ((9 * GIB / 10, Some(GIB)), Outcome::Warning),
            ((GIB / 2, Some(GIB)), Outcome::Ok),
        ];
        for ((needed, budget), outcome) in cases {
            assert_eq!(judge_memory(needed, budget).result, outcome, "{needed} of {budget:?}");
        }
        assert_eq!(judge_budget(Some(GIB), Some(GIB)).unwrap().result, Outcome::Error);
        assert_eq!(judge_budget(Some(GIB / 2), Some(GIB)), None);
        assert_eq!(judge_budget(None, Some(GIB)), None);
    }

    #[test]
    fn the_limits_of_readers_caches_are_summed() {
        let config = ServeConfig::default();
        assert!(judge_on_demand(&config, Some(GIB / 2)).is_some());
        assert_eq!(judge_on_demand(&config, Some(2 * GIB)), None);
        assert_eq!(judge_on_demand(&config, None), None);
    }
}
