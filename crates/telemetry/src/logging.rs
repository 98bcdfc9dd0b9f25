//! Logging to stderr, as text or as JSON. Log lines never contain a credential or the content of an
//! object.
//!
//! The hazard is a client that makes kubefan log: it must neither fill the log nor delay others. So
//! libraries log errors only (`levels`), lines of one kind have a rate (`rate`), each field is cut
//! (`log_lines`), and no worker waits for stderr: a thread writes the lines, and those that it is
//! too slow for are dropped and counted.

mod levels;
mod log_format;
mod log_lines;
mod rate;

use std::{
    io::{self, IsTerminal},
    thread,
    time::Duration,
};

use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::{layer::SubscriberExt, util::SubscriberInitExt};

use self::rate::Rate;

pub use log_format::LogFormat;

/// The most lines that wait to be written.
const LINES_MAX: usize = 4096;

/// On drop, it writes the lines that wait, for a second at most.
#[must_use = "lines that wait are lost if it is dropped early"]
pub struct LogGuard {
    _writer: WorkerGuard,
}

/// Starts logging for the whole process.
///
/// # Errors
/// `level` is not a valid filter, or logging has already started.
pub fn init(format: LogFormat, level: &str) -> Result<LogGuard, String> {
    let filter = levels::filter(level)?;
    let writer = NonBlockingBuilder::default().buffered_lines_limit(LINES_MAX).thread_name("kubefan-log");
    let (writer, guard) = writer.finish(io::stderr());
    let dropped = writer.error_counter();
    let rate = Rate::default();
    let lines = log_lines::layer(format, writer, io::stderr().is_terminal());
    let started = tracing_subscriber::registry().with(filter).with(lines).with(rate.clone()).try_init();
    started.map_err(|error| format!("cannot start logging: {error}"))?;
    let report = move || {
        let mut reported = 0;
        loop {
            #[expect(clippy::disallowed_methods, reason = "a thread of its own, outside of the runtime")]
            thread::sleep(Duration::from_secs(1));
            rate.tick();
            let lines = dropped.dropped_lines();
            if lines > reported {
                tracing::warn!(lines = lines - reported, "log lines were dropped: stderr is too slow");
                reported = lines;
            }
        }
    };
    let started = thread::Builder::new().name("kubefan-log-rate".to_owned()).spawn(report);
    started.map_err(|error| format!("cannot start logging: {error}"))?;
    Ok(LogGuard { _writer: guard })
}
