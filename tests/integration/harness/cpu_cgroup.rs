//! A control group with a limit of CPU time, for a process that a test starts. Dropping it removes
//! it, after its processes have ended.

use std::{
    fs,
    path::{Path, PathBuf},
    process,
};

const ROOT: &str = "/sys/fs/cgroup";
/// The period of the limit, in microseconds.
const PERIOD: u32 = 100_000;

/// A control group with a limit of CPU time.
pub(crate) struct CpuCgroup {
    directory: PathBuf,
    is_v2: bool,
}

impl CpuCgroup {
    /// Makes a group with this part of one CPU. `None` if the system does not allow it.
    pub(crate) fn with_percent(percent: u32) -> Option<CpuCgroup> {
        let name = format!("kubefan-test-{}", process::id());
        let membership = fs::read_to_string("/proc/self/cgroup").ok()?;
        let candidates = membership.lines().filter_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let path = path.trim_start_matches('/');
            match controllers {
                "" => Some((Path::new(ROOT).join(path), true)),
                all if all.split(',').any(|one| one == "cpu") => Some((Path::new(ROOT).join("cpu").join(path), false)),
                _ => None,
            }
        });
        candidates.into_iter().find_map(|(parent, is_v2)| {
            let directory = parent.join(&name);
            fs::create_dir(&directory).ok()?;
            // Dropped, and so removed, where the group has no limit to set.
            let group = CpuCgroup { directory, is_v2 };
            group.limit(&(PERIOD / 100 * percent).to_string()).then_some(group)
        })
    }

    /// Takes the limit away.
    pub(crate) fn unlimited(&self) {
        assert!(self.limit(if self.is_v2 { "max" } else { "-1" }), "the limit is taken away");
    }

    fn limit(&self, quota: &str) -> bool {
        let (file, text) =
            if self.is_v2 { ("cpu.max", format!("{quota} {PERIOD}")) } else { ("cpu.cfs_quota_us", quota.to_owned()) };
        fs::write(self.directory.join(file), text).is_ok()
    }

    /// The shell's command that moves the shell into the group.
    pub(crate) fn enter(&self) -> String {
        format!("echo $$ > {}/cgroup.procs", self.directory.display())
    }
}

impl Drop for CpuCgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.directory);
    }
}
