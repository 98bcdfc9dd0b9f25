//! What the system says about this process, where it says it.

/// Resident memory in bytes, as the kernel counts it; `None` where the system has no `/proc`.
pub fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    kib.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    #[cfg(target_os = "linux")]
    #[test]
    fn what_the_process_takes_is_known() {
        assert!(super::resident_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
