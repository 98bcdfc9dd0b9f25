//! Servers as processes of their own, so that what they cost is theirs alone. A child ends when its handle is dropped, and on Linux also
//! when this process is killed before it can drop anything.

use std::{
    ffi::{OsStr, OsString},
    io,
    net::SocketAddr,
    os::unix::process::CommandExt,
    path::Path,
    process::Stdio,
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, Command},
    time::timeout,
};

use super::BenchError;

/// From the start of a process to the line that says where it listens.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Lines before that one; a program that prints more is not one of ours.
const LINES_MAX: usize = 1000;

/// The hidden command that [`launch`] is.
pub const LAUNCH: &str = "bench-child";

/// Becomes another program, which is told to end when the process that started it has ended.
///
/// # Errors
/// When there is no such program.
pub fn launch(program: &OsStr, args: &[OsString]) -> io::Error {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)) {
        return error.into();
    }
    let error = std::process::Command::new(program).args(args).exec();
    io::Error::new(error.kind(), format!("{}: {error}", Path::new(program).display()))
}

/// A running server.
pub(super) struct ServerProcess {
    pub(super) address: SocketAddr,
    pub(super) pid: u32,
    /// Killed when dropped.
    _child: Child,
}

impl ServerProcess {
    /// Starts a program, by way of `launcher`, which is this program, and waits for the line on its stderr that has `marker` and ends in an
    /// address.
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
        // What is measured is what the flags say.
        for (variable, _) in std::env::vars_os() {
            if variable.to_str().is_some_and(|variable| variable.starts_with("KUBEFAN_")) {
                command.env_remove(variable);
            }
        }
        let mut child = command.spawn().map_err(|error| failed(format!("{}: {error}", launcher.display())))?;
        let pid = child.id().ok_or_else(|| failed("it ended at once".to_owned()))?;
        let stderr = child.stderr.take().ok_or_else(|| failed("it has no stderr".to_owned()))?;
        let mut lines = BufReader::new(stderr).lines();
        let found = timeout(START_TIMEOUT, find(&mut lines, marker)).await;
        let found = found.unwrap_or_else(|_| Err(format!("it did not say {marker:?} within {START_TIMEOUT:?}")));
        let address = found.map_err(failed)?;
        // A pipe that nobody reads would stop the process.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Ok(Self { address, pid, _child: child })
    }
}

async fn find(lines: &mut Lines<impl tokio::io::AsyncBufRead + Unpin>, marker: &str) -> Result<SocketAddr, String> {
    let mut last = String::from("it ended without a word");
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
