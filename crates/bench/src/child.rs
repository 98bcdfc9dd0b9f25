//! Servers run as separate processes, so that their costs can be measured alone. A child ends when
//! its handle is dropped. On Linux it also ends when this process is killed and cannot drop
//! anything.

use std::{
    ffi::{OsStr, OsString},
    io,
    net::SocketAddr,
    os::unix::process::CommandExt,
    path::Path,
    process::Stdio,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, Command},
    sync::watch,
    time::{sleep, timeout},
};

use super::BenchError;

/// Time limit from the start of a process to the line with its address.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of lines read before that line. A program that prints more is not a suitable server.
const LINES_MAX: usize = 1000;

/// Text that kubefan prints before the address of its admin port.
const ADMIN_MARKER: &str = "kubefan: serving admin on ";

/// The hidden command that calls [`launch`].
pub const LAUNCH: &str = "bench-child";

/// Replaces this process by another program, which is killed when its parent process ends. Returns
/// only on failure.
///
/// # Errors
/// If the program cannot be executed.
pub fn launch(program: &OsStr, args: &[OsString]) -> io::Error {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)) {
        return error.into();
    }
    let error = std::process::Command::new(program).args(args).exec();
    io::Error::new(error.kind(), format!("{}: {error}", Path::new(program).display()))
}

/// A running server process.
pub(super) struct ServerProcess {
    pub(super) address: SocketAddr,
    pub(super) pid: u32,
    /// The address of its admin port, once it was printed. The sender lives as long as the process.
    admin: watch::Receiver<Option<SocketAddr>>,
    log: Arc<LogReader>,
    /// Killed when dropped.
    _child: Child,
}

/// Reading of a server's log.
#[derive(Default)]
struct LogReader {
    /// The bytes read so far, without the lines of the start.
    bytes: AtomicU64,
    /// The most bytes that are read per second; 0 for all.
    bytes_per_second_max: AtomicU32,
}

impl LogReader {
    async fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Relaxed);
        let per_second = self.bytes_per_second_max.load(Relaxed);
        if per_second > 0 {
            sleep(Duration::from_secs(1).mul_f64(bytes as f64 / f64::from(per_second))).await;
        }
    }
}

impl ServerProcess {
    /// Starts `program` through `launcher` (this program), and waits for a line on stderr that
    /// contains `marker` and ends in an address.
    pub(super) async fn start<A: AsRef<OsStr>>(
        name: &str,
        launcher: &Path,
        program: &Path,
        args: impl IntoIterator<Item = A>,
        marker: &str,
    ) -> Result<Self, BenchError> {
        let failed = |message: String| BenchError::Start { name: name.to_owned(), message };
        let mut command = Command::new(launcher);
        command
            .arg(LAUNCH)
            .arg(program)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        // Only the flags may configure the server.
        for (variable, _) in std::env::vars_os() {
            if variable.to_str().is_some_and(|variable| variable.starts_with("KUBEFAN_")) {
                command.env_remove(variable);
            }
        }
        let mut child = command.spawn().map_err(|error| failed(format!("{}: {error}", launcher.display())))?;
        let pid = child.id().ok_or_else(|| failed("it exited at once".to_owned()))?;
        let stderr = child.stderr.take().ok_or_else(|| failed("it has no stderr".to_owned()))?;
        let mut lines = BufReader::new(stderr).lines();
        let found = timeout(START_TIMEOUT, find(&mut lines, marker)).await;
        let found = found.unwrap_or_else(|_| Err(format!("it did not print {marker:?} within {START_TIMEOUT:?}")));
        let address = found.map_err(failed)?;
        let (sender, admin) = watch::channel(None);
        let log = Arc::<LogReader>::default();
        let read = log.clone();
        // If nothing read the pipe, it would fill up and block the process.
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                read.add(line.len() + 1).await;
                if let Some((_, address)) = line.split_once(ADMIN_MARKER) {
                    sender.send_replace(address.trim_end().parse().ok());
                }
            }
        });
        Ok(Self { address, pid, admin, log, _child: child })
    }

    /// The bytes of its log that were read so far.
    pub(super) fn log_bytes(&self) -> u64 {
        self.log.bytes.load(Relaxed)
    }

    /// Limits the bytes of its log that are read per second from now on.
    pub(super) fn read_log_slowly(&self, bytes_per_second: u32) {
        self.log.bytes_per_second_max.store(bytes_per_second, Relaxed);
    }

    /// The address of kubefan's admin port.
    ///
    /// # Errors
    /// If the process does not print it.
    pub(super) async fn admin_address(&self) -> Result<SocketAddr, BenchError> {
        let mut admin = self.admin.clone();
        let found = timeout(START_TIMEOUT, admin.wait_for(Option::is_some)).await;
        let address = found.ok().and_then(Result::ok).and_then(|address| *address);
        let message = || format!("it did not print {ADMIN_MARKER:?}");
        address.ok_or_else(|| BenchError::Start { name: "the server".to_owned(), message: message() })
    }
}

async fn find(lines: &mut Lines<impl tokio::io::AsyncBufRead + Unpin>, marker: &str) -> Result<SocketAddr, String> {
    let mut last = String::from("it exited without output");
    for _ in 0..LINES_MAX {
        let Ok(Some(line)) = lines.next_line().await else { return Err(last) };
        if let Some((_, rest)) = line.split_once(marker) {
            let address = rest.trim_end().rsplit(' ').next().unwrap_or_default();
            return address.parse().map_err(|_| format!("no address in {line:?}"));
        }
        last = line.strip_prefix("error: ").unwrap_or(&line).to_owned();
    }
    Err(last)
}
