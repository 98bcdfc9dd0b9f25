//! Statistics that the operating system provides about this process.

use std::{
    fs::File,
    io::{self, Read, Seek},
};

/// Reads the resident memory of this process. The file stays open between reads, because a process
/// that is short of memory is often also short of file descriptors.
pub struct ResidentMemory(File);

impl ResidentMemory {
    /// Opens the kernel's status file for this process.
    ///
    /// # Errors
    /// The system has no `/proc`.
    pub fn open() -> io::Result<Self> {
        File::open("/proc/self/status").map(Self)
    }

    /// The resident memory now, in bytes.
    ///
    /// # Errors
    /// The file cannot be read, or has no `VmRSS` line.
    pub fn bytes(&mut self) -> io::Result<u64> {
        let mut status = String::new();
        self.0.rewind()?;
        self.0.read_to_string(&mut status)?;
        let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix("kB"));
        let kib = kib.and_then(|kib| kib.trim().parse::<u64>().ok());
        kib.and_then(|kib| kib.checked_mul(1024)).ok_or_else(|| io::Error::other("no VmRSS in /proc/self/status"))
    }
}

/// Resident memory in bytes; `None` if the system has no `/proc`.
pub fn resident_bytes() -> Option<u64> {
    ResidentMemory::open().ok()?.bytes().ok()
}

/// The processor time of this process so far, in seconds; `None` if the system has no `/proc`. More
/// exact than the metric, which counts whole seconds.
pub fn cpu_seconds() -> Option<f64> {
    /// The kernel reports times in this unit on every architecture (`USER_HZ`).
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name of the program may contain anything, but ends with the last parenthesis. The times
    // in user mode and in the kernel are the fields 14 and 15 of the line.
    let after_name = stat.rsplit_once(')')?.1;
    let ticks = after_name.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<f64>().ok());
    Some(ticks.sum::<Option<f64>>()? / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    #[cfg(target_os = "linux")]
    #[test]
    fn processor_time_grows_with_work() {
        let before = super::cpu_seconds().unwrap();
        while super::cpu_seconds().unwrap() < before + 0.02 {}
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn resident_memory_is_read_anew_each_time() {
        const MORE_BYTES: usize = 64 << 20;
        let mut memory = super::ResidentMemory::open().unwrap();
        let before = memory.bytes().unwrap();
        assert!(before > 1 << 20);
        let more = std::hint::black_box(vec![1_u8; MORE_BYTES]);
        assert!(memory.bytes().unwrap() > before + MORE_BYTES as u64 / 2);
        drop(more);
    }
}
