//! The memory charged to the control group of this process: the figure that the kernel compares
//! with the limit before it kills.
//!
//! Beside the resident memory these are the buffers of sockets and the kernel's own allocations for
//! the process. The page cache counts too, but the part that was not used lately (inactive) is
//! taken back before anything is killed, so it is subtracted, as kubelet does for its working set.

use std::{
    fs::{self, File},
    io::{self, Read, Seek},
    path::{Path, PathBuf},
    process,
};

/// Mount point of the control groups.
const ROOT: &str = "/sys/fs/cgroup";

/// The memory controllers of both versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Version {
    fn limit(self) -> &'static str {
        match self {
            Self::V1 => "memory.limit_in_bytes",
            Self::V2 => "memory.max",
        }
    }

    fn usage(self) -> &'static str {
        match self {
            Self::V1 => "memory.usage_in_bytes",
            Self::V2 => "memory.current",
        }
    }

    /// The name, in `memory.stat`, of the page cache that was not used lately, of the group and
    /// those below it.
    fn inactive_file(self) -> &'static str {
        match self {
            Self::V1 => "total_inactive_file",
            Self::V2 => "inactive_file",
        }
    }
}

/// The group that limits the memory of this process: its own or one above it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryGroup {
    version: Version,
    /// The group with the limit.
    limited: PathBuf,
    /// The group that the process is in.
    own: PathBuf,
    limit: u64,
}

impl MemoryGroup {
    /// The group with the least limit. `None` if nothing limits this process.
    pub fn of_this_process() -> Option<Self> {
        Self::find(Path::new(ROOT), &fs::read_to_string("/proc/self/cgroup").ok()?)
    }

    /// `membership` is the content of `/proc/self/cgroup`.
    fn find(root: &Path, membership: &str) -> Option<Self> {
        let groups = membership.lines().filter_map(|line| {
            let (_, rest) = line.split_once(':')?;
            let (controllers, path) = rest.split_once(':')?;
            let (root, version) = match controllers {
                "" => (root.to_owned(), Version::V2),
                all if all.split(',').any(|one| one == "memory") => (root.join("memory"), Version::V1),
                _ => return None,
            };
            // In a container, the path may be the host's, and the container's own group the root.
            let own = root.join(path.trim_start_matches('/'));
            let own = if own.is_dir() { own } else { root.clone() };
            let above = own.ancestors().take_while(|group| group.starts_with(&root)).map(Path::to_owned);
            let limits = above.filter_map(|group| Some((read_limit(&group.join(version.limit()))?, group)));
            let (limit, limited) = limits.min()?;
            Some(Self { version, limited, own: own.clone(), limit })
        });
        groups.min_by_key(|group| group.limit)
    }

    /// The limit, in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Whether the process shares its group with processes that did not start it. Then the group's
    /// charge says little about this process.
    pub fn is_shared(&self) -> bool {
        let members = fs::read_to_string(self.own.join("cgroup.procs")).unwrap_or_default();
        let mut started_by = vec![process::id()];
        while let Some(parent) = started_by.last().and_then(|id| parent_of(*id)) {
            started_by.push(parent);
        }
        members.lines().filter_map(|line| line.trim().parse().ok()).any(|id: u32| !started_by.contains(&id))
    }
}

/// Reads the memory charged to a group. The files stay open between reads, because a process that
/// is short of memory is often also short of file descriptors.
pub struct ChargedMemory {
    usage: File,
    stat: File,
    inactive_file: &'static str,
}

impl ChargedMemory {
    /// Opens the files of the group with the limit.
    ///
    /// # Errors
    /// If the files cannot be opened.
    pub fn open(group: &MemoryGroup) -> io::Result<Self> {
        let open = |name: &str| File::open(group.limited.join(name));
        let version = group.version;
        Ok(Self { usage: open(version.usage())?, stat: open("memory.stat")?, inactive_file: version.inactive_file() })
    }

    /// Returns the current charge of the group, less the inactive page cache, in bytes.
    ///
    /// # Errors
    /// The files cannot be read.
    pub fn bytes(&mut self) -> io::Result<u64> {
        let no_number = |_| io::Error::other("no number in the file of the control group's usage");
        let usage: u64 = read_again(&mut self.usage)?.trim().parse().map_err(no_number)?;
        let stat = read_again(&mut self.stat)?;
        let inactive = stat.lines().find_map(|line| line.strip_prefix(self.inactive_file)?.trim().parse::<u64>().ok());
        Ok(usage.saturating_sub(inactive.unwrap_or(0)))
    }
}

fn read_again(file: &mut File) -> io::Result<String> {
    let mut text = String::new();
    file.rewind()?;
    file.read_to_string(&mut text)?;
    Ok(text)
}

fn read_limit(file: &Path) -> Option<u64> {
    // Version 1 has a number near the maximum where there is no limit.
    let limit: u64 = fs::read_to_string(file).ok()?.trim().parse().ok()?;
    (limit < u64::MAX / 4).then_some(limit)
}

/// The process that started another one (`proc_pid_stat(5)`). The name before it may contain
/// anything, also spaces and parentheses.
fn parent_of(id: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
    (parent > 0).then_some(parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Groups(tempfile::TempDir);

    impl Groups {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn find(&self, membership: &str) -> Option<MemoryGroup> {
            MemoryGroup::find(self.0.path(), membership)
        }

        fn limit(&self, membership: &str) -> Option<u64> {
            self.find(membership).map(|group| group.limit())
        }
    }

    #[test]
    fn the_limit_is_the_smallest_of_all_groups_above_the_process() {
        let groups = Groups::new();
        assert_eq!(groups.limit("0::/\n"), None);
        groups.write("memory.max", "max\n");
        assert_eq!(groups.limit("0::/\n"), None);
        groups.write("kubepods/pod1/memory.max", "1000\n");
        groups.write("kubepods/pod1/one/memory.max", "max\n");
        assert_eq!(groups.limit("0::/kubepods/pod1/one\n"), Some(1000), "a pod limits its containers");
        groups.write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        groups.write("memory/docker/memory.limit_in_bytes", "500\n");
        assert_eq!(groups.limit("5:cpu,memory:/docker\n1:name=systemd:/\n"), Some(500));
        groups.write("memory.max", "2000\n");
        assert_eq!(groups.limit("0::/not/seen/from/here\n"), Some(2000), "in a container its own group is the root");
    }

    #[test]
    fn the_charge_includes_non_resident_memory_without_the_inactive_page_cache() {
        let groups = Groups::new();
        groups.write("a/memory.max", "100000\n");
        groups.write("a/memory.current", "5000\n");
        groups.write(
            "a/memory.stat",
            "anon 1000\nfile 2500\nkernel 900\nsock 600\ninactive_file 2000\nactive_file 500\n",
        );
        let mut charged = ChargedMemory::open(&groups.find("0::/a\n").unwrap()).unwrap();
        assert_eq!(charged.bytes().unwrap(), 3000);
        groups.write("a/memory.current", "7000\n");
        assert_eq!(charged.bytes().unwrap(), 5000, "read anew each time");

        groups.write("memory/b/memory.limit_in_bytes", "100000\n");
        groups.write("memory/b/memory.usage_in_bytes", "5000\n");
        groups.write("memory/b/memory.stat", "inactive_file 10\ntotal_inactive_file 1500\n");
        let mut charged = ChargedMemory::open(&groups.find("4:memory:/b\n").unwrap()).unwrap();
        assert_eq!(charged.bytes().unwrap(), 3500);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_group_is_shared_if_it_has_processes_that_did_not_start_this_one() {
        let groups = Groups::new();
        groups.write("a/memory.max", "100000\n");
        let group = groups.find("0::/a\n").unwrap();
        let own = process::id();
        let parent = parent_of(own).unwrap();
        groups.write("a/cgroup.procs", &format!("{own}\n"));
        assert!(!group.is_shared());
        groups.write("a/cgroup.procs", &format!("{parent}\n{own}\n"));
        assert!(!group.is_shared(), "an init process");
        groups.write("a/cgroup.procs", &format!("{parent}\n{own}\n{}\n", u32::MAX));
        assert!(group.is_shared());
    }
}
