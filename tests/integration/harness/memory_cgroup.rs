//! A control group with a limit of memory, below the test's own. Only some systems let a test make
//! one: as root with version 1, or where version 2 was delegated.

use std::{
    fs,
    path::{Path, PathBuf},
    process,
};

/// Mount point of the control groups.
const ROOT: &str = "/sys/fs/cgroup";

/// A group without processes yet. Dropping it removes it, once its processes have ended.
pub(crate) struct MemoryCgroup {
    directory: PathBuf,
}

impl MemoryCgroup {
    /// Makes a group with a limit in bytes. `None` if the system does not allow it.
    pub(crate) fn with_limit(bytes_max: u64) -> Option<MemoryCgroup> {
        let membership = fs::read_to_string("/proc/self/cgroup").ok()?;
        let candidates = membership.lines().filter_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let path = path.trim_start_matches('/');
            match controllers {
                "" => Some((Path::new(ROOT).join(path), "memory.max")),
                all if all.split(',').any(|one| one == "memory") => {
                    Some((Path::new(ROOT).join("memory").join(path), "memory.limit_in_bytes"))
                }
                _ => None,
            }
        });
        candidates.into_iter().find_map(|(parent, limit)| {
            let directory = parent.join(format!("kubefan-test-{}", process::id()));
            fs::create_dir(&directory).ok()?;
            // Dropped, and so removed, where the group has no limit to set.
            let group = MemoryCgroup { directory };
            fs::write(group.directory.join(limit), bytes_max.to_string()).ok()?;
            Some(group)
        })
    }

    /// The shell's command that moves the shell into the group.
    pub(crate) fn enter(&self) -> String {
        format!("echo $$ > {}/cgroup.procs", self.directory.display())
    }

    /// Returns how many processes of the group the kernel has killed.
    pub(crate) fn killed(&self) -> u64 {
        let read = |name: &str| fs::read_to_string(self.directory.join(name)).unwrap_or_default();
        let text = read("memory.events") + &read("memory.oom_control");
        text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok()).unwrap_or(0)
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.directory);
    }
}
