//! Finds the process that listens on a TCP port, as far as this process may see: in a container,
//! the processes of that container. Elsewhere than on Linux the answer is always unknown.

use std::{fs, path::Path};

/// A process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Owner {
    /// The name of its program, as the kernel knows it.
    pub(super) name: String,
    pub(super) pid: u32,
}

/// The process that listens on a port; `None` if it is not known.
pub(super) fn of_port(port: u16) -> Option<Owner> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| fs::read_to_string(path).unwrap_or_default());
    let inodes: Vec<u64> = tables.iter().flat_map(|table| listeners(table, port)).collect();
    if inodes.is_empty() {
        return None;
    }
    let processes = fs::read_dir("/proc").ok()?;
    let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| has_socket(*pid, &inodes)).find_map(|pid| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        Some(Owner { name: name.trim().to_owned(), pid })
    })
}

/// The inodes of the sockets that listen on a port, in a table of `proc_pid_net(5)`.
fn listeners(table: &str, port: u16) -> Vec<u64> {
    const LISTEN: &str = "0A";
    let inode = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let local = fields.get(1)?;
        let state = fields.get(3)?;
        let inode = fields.get(9)?;
        let found = u16::from_str_radix(local.rsplit(':').next()?, 16).ok()?;
        (found == port && *state == LISTEN).then(|| inode.parse().ok()).flatten()
    };
    table.lines().skip(1).filter_map(inode).collect()
}

fn has_socket(pid: u32, inodes: &[u64]) -> bool {
    let Ok(files) = fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd")) else { return false };
    let inode = |target: &Path| target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok();
    files
        .filter_map(|file| fs::read_link(file.ok()?.path()).ok())
        .any(|target| inode(&target).is_some_and(|inode: u64| inodes.contains(&inode)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sockets_that_listen_count() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            0: 0100007F:1D13 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 41 1 0000 100 0 0 10 0\n\
            1: 0100007F:1D13 0100007F:CAFE 01 00000000:00000000 00:00000000 00000000  1000        0 42 1 0000 20 4 30 10 -1\n\
            2: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 43 1 0000 100 0 0 10 0\n";
        assert_eq!(listeners(table, 7443), [41]);
        assert_eq!(listeners(table, 22), [43]);
        assert_eq!(listeners(table, 80), [] as [u64; 0]);
        assert_eq!(listeners("", 80), [] as [u64; 0]);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_port_of_this_process_is_its_own() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let owner = of_port(listener.local_addr().unwrap().port()).unwrap();
        assert_eq!(owner.pid, std::process::id());
        assert!(!owner.name.is_empty());
    }
}
