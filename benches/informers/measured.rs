//! Measures the cost of a client that runs as a child process.

use std::{path::Path, process::Stdio, time::Duration};

use kubefan_bench::process::Meter;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::timeout,
};

use crate::Failure;

/// Limit of each step.
const STEP_MAX: Duration = Duration::from_secs(180);

/// A running client.
pub(crate) struct Measured {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
    meter: Meter,
}

impl Measured {
    /// Starts a program. It is killed when this is dropped.
    pub(crate) async fn start(program: &Path, args: &[&str]) -> Result<Self, Failure> {
        let mut command = Command::new(program);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().map_err(|error| format!("{}: {error}", program.display()))?;
        let stdin = child.stdin.take().ok_or("the client has no stdin")?;
        let lines = BufReader::new(child.stdout.take().ok_or("the client has no stdout")?).lines();
        let meter = Meter::new(child.id().ok_or("the client has ended")?);
        let mut measured = Self { child, stdin, lines, meter };
        measured.answer("ready").await?;
        Ok(measured)
    }

    /// Gives an order, and returns what the client answers after `answer`.
    pub(crate) async fn order(&mut self, order: &str, answer: &str) -> Result<String, Failure> {
        self.stdin.write_all(format!("{order}\n").as_bytes()).await?;
        self.answer(answer).await
    }

    async fn answer(&mut self, answer: &str) -> Result<String, Failure> {
        let line = timeout(STEP_MAX, self.lines.next_line()).await.map_err(|_| format!("no {answer:?} in time"))??;
        let line = line.ok_or_else(|| format!("the client ended before {answer:?}"))?;
        Ok(line.strip_prefix(answer).ok_or_else(|| format!("expected {answer:?}, got {line:?}"))?.trim().to_owned())
    }

    /// User and system time of all threads so far, in nanoseconds.
    pub(crate) fn cpu_nanos(&mut self) -> Result<u64, Failure> {
        Ok(self.meter.cpu_nanos()?)
    }

    /// Resident memory in bytes: now, and its highest value so far.
    pub(crate) fn resident_bytes(&self) -> Result<(u64, u64), Failure> {
        let now = self.meter.resident_bytes()?;
        Ok((now, self.meter.peak_bytes()?.max(now)))
    }

    /// Ends the client.
    pub(crate) async fn end(mut self) -> Result<(), Failure> {
        drop(self.stdin);
        timeout(STEP_MAX, self.child.wait()).await??;
        Ok(())
    }
}
