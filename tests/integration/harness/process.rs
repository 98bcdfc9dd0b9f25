//! Child processes that never outlive the test process, however it ends: dropped, they are killed; and should the test process
//! itself be killed, a watchdog that reads from a pipe sees its end and kills them. What they print goes to a file, so that a
//! full pipe cannot stop them.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};

use super::{Test, tests, wait};

/// A running program.
pub(crate) struct Process {
    name: &'static str,
    child: Child,
    watchdog: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command`; what it prints is appended to the file `log`.
    pub(crate) fn spawn(name: &'static str, command: &mut Command, log: &Path) -> Process {
        let out = File::options().create(true).append(true).open(log).expect("the log file opens");
        let err = out.try_clone().expect("the log file's handle is cloned");
        let child = command
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .spawn()
            .unwrap_or_else(|error| panic!("{name} does not start: {error}"));
        // A line means "stand down"; the end of the pipe without one means that the test process is gone.
        let watchdog = Command::new("sh")
            .args(["-c", r#"trap "" INT TERM HUP; read -r _ || kill -9 "$0""#, &child.id().to_string()])
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh starts");
        Process { name, child, watchdog, log: log.to_owned() }
    }

    /// The process id, to read its memory or to send it a signal.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// All that the process has printed so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// How the process ended, if it did.
    pub(crate) fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be waited for")
    }

    /// Kills the process as `kill -9` does, and waits for its end.
    pub(crate) fn kill9(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks the process to end, as `kill -TERM` does.
    pub(crate) fn terminate(&self) {
        let status = Command::new("sh").args(["-c", r#"kill -TERM "$0""#, &self.pid().to_string()]).status();
        assert!(status.is_ok_and(|status| status.success()), "{} takes no signal", self.name);
    }

    /// Waits for the process to end by itself.
    pub(crate) async fn ended(&mut self, at_most: Duration) -> ExitStatus {
        let what = format!("the end of {}", self.name);
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
        // Only now: from here on the process id may belong to somebody else.
        if let Some(mut pipe) = self.watchdog.stdin.take() {
            let _ = pipe.write_all(b"stand down\n");
        }
        let _ = self.watchdog.wait();
    }
}

/// A free port on loopback for a program that takes no listener and must come back on the same port. It is taken below the
/// ephemeral ports: one of those could become an outgoing connection's own port while the program is down.
pub(crate) fn free_port() -> u16 {
    const FIRST: u16 = 20_000;
    const COUNT: u16 = 12_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Test processes that run side by side start at different places.
    let start = std::process::id().wrapping_mul(97);
    for _ in 0..COUNT {
        let offset = (start + u32::from(NEXT.fetch_add(1, Ordering::Relaxed))) % u32::from(COUNT);
        let port = FIRST + offset as u16;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no free port between {FIRST} and {}", FIRST + COUNT);
}

pub(crate) const TESTS: &[Test] = tests! {
    local: a_process_takes_a_signal_and_its_output_is_kept, a_process_ends_with_the_test_process;
};

async fn a_process_takes_a_signal_and_its_output_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"trap "echo bye; exit 3" TERM; echo ready; while :; do sleep 0.05; done"#;
    let mut process = Process::spawn("sh", Command::new("sh").args(["-c", script]), &dir.path().join("log"));
    wait::until("its first line", wait::SOON, || async { process.log().contains("ready").then_some(()) }).await;
    process.terminate();
    assert_eq!(process.ended(wait::SOON).await.code(), Some(3));
    assert_eq!(process.log(), "ready\nbye\n");
}

async fn a_process_ends_with_the_test_process() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = Process::spawn("sleep", Command::new("sleep").arg("1000"), &dir.path().join("log"));
    // What the kernel does to this end of the pipe when the test process is killed.
    drop(process.watchdog.stdin.take());
    assert_eq!(process.ended(wait::SOON).await.signal(), Some(9));
}
