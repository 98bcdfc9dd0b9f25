//! What the system says about this process, where it says it.

use std::{
    fs::File,
    io::{self, Read, Seek},
};

/// Resident memory, as the kernel counts it, read again and again from one file that stays open: where descriptors are short, memory
/// often is too.
pub struct ResidentMemory(File);

impl ResidentMemory {
    /// The way to it.
    ///
    /// # Errors
    /// Where the system has no `/proc`.
    pub fn open() -> io::Result<Self> {
        File::open("/proc/self/status").map(Self)
    }

    /// What it is now, in bytes.
    ///
    /// # Errors
    /// Where it cannot be read this time.
    pub fn bytes(&mut self) -> io::Result<u64> {
        let mut status = String::new();
        self.0.rewind()?;
        self.0.read_to_string(&mut status)?;
        let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix("kB"));
        let kib = kib.and_then(|kib| kib.trim().parse::<u64>().ok());
        kib.and_then(|kib| kib.checked_mul(1024)).ok_or_else(|| io::Error::other("no VmRSS in /proc/self/status"))
    }
}

/// Resident memory in bytes; `None` where the system has no `/proc`.
pub fn resident_bytes() -> Option<u64> {
    ResidentMemory::open().ok()?.bytes().ok()
}

#[cfg(test)]
mod tests {
    #[cfg(target_os = "linux")]
    #[test]
    fn what_the_process_takes_is_known_each_time() {
        const MORE_BYTES: usize = 64 << 20;
        let mut memory = super::ResidentMemory::open().unwrap();
        let before = memory.bytes().unwrap();
        assert!(before > 1 << 20);
        let more = std::hint::black_box(vec![1_u8; MORE_BYTES]);
        assert!(memory.bytes().unwrap() > before + MORE_BYTES as u64 / 2);
        drop(more);
    }
}
