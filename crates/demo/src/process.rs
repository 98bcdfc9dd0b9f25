//! Limits of this process, as the operating system reports them.

use std::fs;

/// The limit on open files, including connections; `None` if it is unknown.
pub(super) fn open_files_max() -> Option<u64> {
    soft_limit(&fs::read_to_string("/proc/self/limits").ok()?)
}

fn soft_limit(limits: &str) -> Option<u64> {
    limits.lines().find_map(|line| line.strip_prefix("Max open files"))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_is_read_and_unlimited_is_none() {
        let limits =
            |soft: &str| format!("Limit   Soft Limit  Hard Limit  Units\nMax open files   {soft}   1048576  files\n");
        assert_eq!(soft_limit(&limits("1024")), Some(1024));
        assert_eq!(soft_limit(&limits("unlimited")), None);
    }
}
