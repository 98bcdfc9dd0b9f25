//! CPU time and memory of a process, from `/proc`: CPU time in nanoseconds, and resident memory.

use std::{collections::HashMap, fs, io, path::PathBuf};

/// Reads the figures of one process, which need not be a child.
#[derive(Debug)]
pub struct Meter {
    directory: PathBuf,
    /// CPU nanoseconds by thread. A thread that has ended retains its last value.
    threads: HashMap<u64, u64>,
}

impl Meter {
    /// Returns the meter of the process with this id.
    pub fn new(pid: u32) -> Self {
        Self { directory: format!("/proc/{pid}").into(), threads: HashMap::new() }
    }

    /// User and system time of all threads so far, in nanoseconds.
    ///
    /// # Errors
    /// If the process has ended, or there is no `/proc`.
    pub fn cpu_nanos(&mut self) -> io::Result<u64> {
        for task in fs::read_dir(self.directory.join("task"))? {
            let task = task?;
            // The thread may have ended since the directory was read.
            let Ok(text) = fs::read_to_string(task.path().join("schedstat")) else { continue };
            let thread = task.file_name().to_str().and_then(|name| name.parse().ok());
            let nanos = text.split_whitespace().next().and_then(|number| number.parse().ok());
            if let (Some(thread), Some(nanos)) = (thread, nanos) {
                self.threads.insert(thread, nanos);
            }
        }
        if self.threads.is_empty() {
            Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel has no /proc/PID/task/TID/schedstat"))
        } else {
            Ok(self.threads.values().sum())
        }
    }

    /// Resident memory in bytes.
    ///
    /// # Errors
    /// As for [`Self::cpu_nanos`].
    pub fn resident_bytes(&self) -> io::Result<u64> {
        // `smaps_rollup` is exact. `status` omits pages that the threads have not yet added to the
        // total.
        let rollup = fs::read_to_string(self.directory.join("smaps_rollup"));
        rollup.and_then(|text| kibibytes(&text, "Rss:")).or_else(|_| self.status("VmRSS:"))
    }

    /// The highest resident memory since [`Self::reset_peak`], in bytes.
    ///
    /// # Errors
    /// As for [`Self::cpu_nanos`].
    pub fn peak_bytes(&self) -> io::Result<u64> {
        self.status("VmHWM:")
    }

    /// Resets the peak to the current resident memory.
    ///
    /// # Errors
    /// If the process belongs to another user.
    pub fn reset_peak(&self) -> io::Result<()> {
        fs::write(self.directory.join("clear_refs"), "5")
    }

    fn status(&self, field: &str) -> io::Result<u64> {
        kibibytes(&fs::read_to_string(self.directory.join("status"))?, field)
    }
}

fn kibibytes(text: &str, field: &str) -> io::Result<u64> {
    let number = text.lines().find_map(|line| line.strip_prefix(field)?.split_whitespace().next()?.parse::<u64>().ok());
    number.map(|kib| kib * 1024).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("no {field}")))
}

/// Raises the limit of open files to its maximum. Returns the limit in effect; `None` if unlimited.
pub(super) fn raise_open_files() -> Option<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum && setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).is_ok() {
        return maximum;
    }
    current
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_running_process_reports_cpu_time_and_memory() {
        let mut meter = Meter::new(std::process::id());
        let before = meter.cpu_nanos().unwrap();
        let mut sum = 0_u64;
        while meter.cpu_nanos().unwrap() == before {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        assert!(meter.resident_bytes().unwrap() > 100_000);
        assert!(meter.peak_bytes().unwrap() >= meter.resident_bytes().unwrap() / 2);
    }

    #[test]
    fn a_process_that_does_not_exist_is_an_error() {
        let mut meter = Meter::new(u32::MAX);
        assert!(meter.cpu_nanos().is_err() && meter.resident_bytes().is_err());
    }
}
