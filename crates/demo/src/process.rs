//! What the system says about this process, where it says it.

use std::fs;

/// How many files and connections may be open at once; `None` where it is not known.
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
    fn the_soft_limit_is_read_and_no_limit_is_none() {
        let limits =
            |soft: &str| format!("Limit   Soft Limit  Hard Limit  Units\nMax open files   {soft}   1048576  files\n");
        assert_eq!(soft_limit(&limits("1024")), Some(1024));
        assert_eq!(soft_limit(&limits("unlimited")), None);
    }
}
