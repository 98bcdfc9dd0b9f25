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

#[cfg(test)]
mod tests {
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
