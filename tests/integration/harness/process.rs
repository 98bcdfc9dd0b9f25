//! Child processes that never outlive the test process. Dropping the value kills the child. If the
//! test process itself is killed, a watchdog detects the end of a pipe and kills the child. Output
//! goes to a file, because a full pipe would block the child.

use std::{
    fs::{self, File},
    io::Write,
    net::SocketAddr,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};

use tokio::net::TcpSocket;

use super::{secrets, tests, wait};

/// Start of the names of kubefan's processes.
const KUBEFAN: &str = "kubefan";

/// A running program.
pub(crate) struct Process {
    name: &'static str,
    child: Child,
    watchdog: Child,
    logs: Vec<PathBuf>,
}

impl Process {
    /// Starts `command` and appends its output to the file `log`.
    pub(crate) fn spawn(name: &'static str, command: &mut Command, log: &Path) -> Process {
        let out = appended(log);
        let err = out.try_clone().expect("the log file's handle is cloned");
        Process::start(name, command, out, err, vec![log.to_owned()])
    }

    /// Like `spawn`, but standard error has a file of its own. `eprintln!` writes a line in several
    /// parts, so a line of standard output in the same file could fall between them.
    pub(crate) fn spawn_apart(name: &'static str, command: &mut Command, dir: &Path) -> Process {
        let logs = vec![dir.join("stdout"), dir.join("stderr")];
        Process::start(name, command, appended(&logs[0]), appended(&logs[1]), logs)
    }

    fn start(name: &'static str, command: &mut Command, out: File, err: File, logs: Vec<PathBuf>) -> Process {
        // The variables of the tests themselves would look like misspelt settings.
        let given: Vec<_> = command.get_envs().map(|(name, _)| name.to_owned()).collect();
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("KUBEFAN_") && !given.contains(&name) {
                command.env_remove(name);
            }
        }
        if name.starts_with(KUBEFAN) {
            secrets::remember_tokens_of(command.get_args().map(|argument| argument.to_string_lossy()));
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .unwrap_or_else(|error| panic!("{name} does not start: {error}"));
        // A line on the pipe tells the watchdog to exit. End of file without a line means that the
        // test process is gone.
        let watchdog = Command::new("sh")
            .args(["-c", r#"trap "" INT TERM HUP; read -r _ || kill -9 "$0""#, &child.id().to_string()])
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh starts");
        Process { name, child, watchdog, logs }
    }

    /// The process ID, for reading its memory or sending a signal.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The output so far. If the streams have a file each, standard output is first.
    pub(crate) fn log(&self) -> String {
        self.logs.iter().map(|log| fs::read_to_string(log).unwrap_or_default()).collect()
    }

    /// The exit status, if the process has exited.
    pub(crate) fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be waited for")
    }

    /// Kills the process like `kill -9`, and waits until it has exited.
    pub(crate) fn kill9(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks the process to exit, like `kill -TERM`.
    pub(crate) fn terminate(&self) {
        self.signal("TERM");
    }

    /// Asks the process to read its files again, like `kill -HUP`.
    pub(crate) fn hang_up(&self) {
        self.signal("HUP");
    }

    fn signal(&self, name: &str) {
        send_signal(self.pid(), name);
    }

    /// Waits until the process exits by itself.
    pub(crate) async fn ended(&mut self, at_most: Duration) -> ExitStatus {
        let what = format!("{} to exit", self.name);
        wait::until(&what, at_most, || {
            let exited = self.exited();
            async move { exited }
        })
        .await
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill9();
        // Only after the child was reaped: from here on another process may have its ID.
        if let Some(mut pipe) = self.watchdog.stdin.take() {
            let _ = pipe.write_all(b"exit\n");
        }
        let _ = self.watchdog.wait();
        if self.name.starts_with(KUBEFAN) {
            secrets::assert_none_in("its output", &self.log());
        }
    }
}

/// Sends a signal, such as `TERM`, to a process.
pub(crate) fn send_signal(pid: u32, name: &str) {
    let kill = format!(r#"kill -{name} "$0""#);
    let status = Command::new("sh").args(["-c", &kill, &pid.to_string()]).status();
    assert!(status.is_ok_and(|status| status.success()), "cannot send SIG{name} to {pid}");
}

/// A figure of a process's memory in bytes, such as `VmRSS` or `VmHWM`.
pub(crate) fn memory_of(pid: u32, figure: &str) -> usize {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let kib = status.lines().find_map(|line| line.strip_prefix(figure)?.strip_prefix(':')?.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.parse::<usize>().ok()).expect("the process has the figure") << 10
}

fn appended(log: &Path) -> File {
    File::options().create(true).append(true).open(log).expect("the log file opens")
}

/// A free port on loopback, for a program that cannot inherit a listener and must return to the
/// same port after a restart. It is below the ephemeral ports, because an outgoing connection could
/// take an ephemeral port while the program is down.
pub(crate) fn free_port() -> u16 {
    const FIRST: u16 = 20_000;
    const COUNT: u16 = 12_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Concurrent test processes start the search at different ports.
    let start = std::process::id().wrapping_mul(97);
    for _ in 0..COUNT {
        let offset = (start + u32::from(NEXT.fetch_add(1, Ordering::Relaxed))) % u32::from(COUNT);
        let port = FIRST + offset as u16;
        if is_free(port) {
            return port;
        }
    }
    panic!("no free port between {FIRST} and {}", FIRST + COUNT);
}

/// Whether a program can listen at a port of loopback. A process that is being started inherits the
/// socket of this test for a moment. So the socket does not listen, and leaves the port to others.
fn is_free(port: u16) -> bool {
    let socket = TcpSocket::new_v4().expect("a socket is made");
    socket.set_reuseaddr(true).expect("an option that every socket has");
    socket.bind(([127, 0, 0, 1], port).into()).is_ok()
}

/// A port of loopback that refuses connections while this value lives: it is bound, so that no
/// other process takes it, and not listening.
pub(crate) fn closed_port() -> (TcpSocket, SocketAddr) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

tests! {
    local: a_process_receives_signals_and_its_output_is_logged, a_line_in_parts_stays_whole_apart,
        a_child_is_killed_when_the_test_process_dies;
}

async fn a_process_receives_signals_and_its_output_is_logged() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"trap "echo bye; exit 3" TERM; echo ready; while :; do sleep 0.05; done"#;
    let mut process = Process::spawn("sh", Command::new("sh").args(["-c", script]), &dir.path().join("log"));
    wait::until("its first line", wait::SOON, || async { process.log().contains("ready").then_some(()) }).await;
    process.terminate();
    assert_eq!(process.ended(wait::SOON).await.code(), Some(3));
    assert_eq!(process.log(), "ready\nbye\n");
}

async fn a_line_in_parts_stays_whole_apart() {
    let dir = tempfile::tempdir().unwrap();
    let script = "printf 'a line ' >&2; echo another; echo 'in parts' >&2";
    let mut process = Process::spawn_apart("sh", Command::new("sh").args(["-c", script]), dir.path());
    process.ended(wait::SOON).await;
    assert_eq!(process.log(), "another\na line in parts\n");
}

async fn a_child_is_killed_when_the_test_process_dies() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = Process::spawn("sleep", Command::new("sleep").arg("1000"), &dir.path().join("log"));
    // The kernel closes this end of the pipe when the test process is killed.
    drop(process.watchdog.stdin.take());
    assert_eq!(process.ended(wait::SOON).await.signal(), Some(9));
}
