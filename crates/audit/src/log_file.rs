//! The file of the audit log, rotated by size as kube-apiserver's is (lumberjack): `audit.log` is
//! renamed to `audit-2026-01-02T15-04-05.000.log`, and old files are removed by count and age.
//!
//! No crate fits: those that rotate by size name files their own way, stop the process if they
//! cannot create one, or cannot open the file again after another program has moved it.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use super::{log_writer::Sink, queue::Clock};

/// The time in the name of a rotated file, in UTC.
const TIME_FORMAT: &str = "%Y-%m-%dT%H-%M-%S%.3f";
/// Attempts to find a name that no file has: files of the same millisecond get later times.
const NAMES_MAX: u32 = 100;
/// The rights of the file, as kube-apiserver's.
const MODE: u32 = 0o600;

/// Rotation of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rotation {
    /// The longest file, in bytes.
    pub bytes_max: u64,
    /// The most rotated files; `None`: all are kept.
    pub backups_max: Option<usize>,
    /// Rotated files that are older are removed.
    pub age_max: Option<Duration>,
}

/// Asks for the file to be opened again, from another task.
#[derive(Debug, Clone, Default)]
pub struct Reopen(Arc<AtomicBool>);

impl Reopen {
    /// Opens the file again before the next write: another program may have moved it.
    pub fn reopen(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The output that lines are appended to.
trait Output: Write {
    /// Cuts off all after the first `bytes`.
    fn cut(&mut self, bytes: u64) -> io::Result<()>;
}

impl Output for File {
    fn cut(&mut self, bytes: u64) -> io::Result<()> {
        // Another program may have truncated it. `set_len` would fill it with zeros.
        if self.metadata()?.len() < bytes {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.set_len(bytes)
    }
}

impl Output for io::Stdout {
    fn cut(&mut self, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Appends lines, and leaves no part of one where that is possible.
struct Appender<O> {
    output: O,
    bytes: u64,
    /// Whether the output may end in a part of a line.
    is_torn: bool,
}

impl<O: Output> Appender<O> {
    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        let separator: &[u8] = if self.is_torn { b"\n" } else { b"" };
        for part in [separator, lines] {
            if let Err(error) = self.output.write_all(part) {
                self.is_torn |= self.output.cut(self.bytes).is_err();
                return Err(error);
            }
        }
        self.output.flush()?;
        self.is_torn = false;
        self.bytes += (separator.len() + lines.len()) as u64;
        Ok(())
    }
}

/// Standard output.
pub struct StandardOutput(Appender<io::Stdout>);

impl Default for StandardOutput {
    fn default() -> Self {
        Self(Appender { output: io::stdout(), bytes: 0, is_torn: false })
    }
}

impl Sink for StandardOutput {
    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        self.0.append(lines)
    }
}

/// A file that is rotated.
pub struct LogFile {
    path: PathBuf,
    rotation: Rotation,
    clock: Clock,
    reopen: Reopen,
    /// `None` until the file can be opened.
    file: Option<Appender<File>>,
    /// The length at which the file is rotated. It grows if the file cannot be renamed.
    rotates_at: u64,
}

impl LogFile {
    /// Opens or creates a file, which is continued.
    ///
    /// # Errors
    /// If the file cannot be opened for writing.
    pub fn open(path: PathBuf, rotation: Rotation, clock: Clock) -> io::Result<Self> {
        let reopen = Reopen::default();
        let rotates_at = rotation.bytes_max;
        let file = Some(open(&path)?);
        Ok(Self { path, rotation, clock, reopen, file, rotates_at })
    }

    /// Returns a handle that asks for the file to be opened again.
    pub fn reopen_handle(&self) -> Reopen {
        self.reopen.clone()
    }

    fn opened(&mut self) -> io::Result<&mut Appender<File>> {
        if self.file.is_none() {
            self.rotates_at = self.rotation.bytes_max;
        }
        match &mut self.file {
            Some(file) => Ok(file),
            none => Ok(none.insert(open(&self.path)?)),
        }
    }

    /// Renames the file. If it cannot be renamed, it is continued: a file that is too long is
    /// better than lost records.
    fn rotate(&mut self) {
        let renamed = free_name(&self.path, (self.clock)()).and_then(|backup| fs::rename(&self.path, backup));
        match renamed {
            Ok(()) => self.file = None,
            Err(error) => {
                self.rotates_at += self.rotation.bytes_max;
                tracing::warn!(%error, path = %self.path.display(), "the audit log cannot be rotated; it is continued");
            }
        }
        self.remove_old();
    }

    fn remove_old(&self) {
        let Rotation { backups_max, age_max, .. } = self.rotation;
        let oldest = age_max.and_then(|age| (self.clock)().checked_sub(age)).map(time_text);
        let mut backups = backups(&self.path).unwrap_or_default();
        // The newest first.
        backups.sort_unstable_by(|(one, _), (other, _)| other.cmp(one));
        for (index, (time, path)) in backups.iter().enumerate() {
            let is_old = oldest.as_ref().is_some_and(|oldest| time < oldest);
            if (is_old || backups_max.is_some_and(|most| index >= most))
                && let Err(error) = fs::remove_file(path)
            {
                tracing::warn!(%error, path = %path.display(), "an old file of the audit log cannot be removed");
            }
        }
    }
}

impl Sink for LogFile {
    fn append(&mut self, lines: &[u8]) -> io::Result<()> {
        if self.reopen.0.swap(false, Ordering::Relaxed) {
            self.file = None;
        }
        let bytes = self.opened()?.bytes;
        if bytes > 0 && bytes + lines.len() as u64 > self.rotates_at {
            self.rotate();
        }
        self.opened()?.append(lines)
    }
}

fn open(path: &Path) -> io::Result<Appender<File>> {
    let output = OpenOptions::new().append(true).create(true).mode(MODE).open(path)?;
    let bytes = output.metadata()?.len();
    Ok(Appender { output, bytes, is_torn: bytes > 0 && !ends_a_line(path, bytes) })
}

/// Whether a file of this many bytes ends with a whole line. A process that was killed may have
/// left a part of one.
fn ends_a_line(path: &Path, bytes: u64) -> bool {
    let mut last = [0];
    let read = File::open(path).and_then(|file| file.read_exact_at(&mut last, bytes - 1));
    read.is_ok() && last == *b"\n"
}

/// Splits the name of a rotated file into the parts before and after the time.
fn parts(path: &Path) -> (String, String) {
    let text = |part: Option<&std::ffi::OsStr>| part.unwrap_or_default().to_string_lossy().into_owned();
    let extension = path.extension().map(|extension| format!(".{}", extension.to_string_lossy()));
    (text(path.file_stem()) + "-", extension.unwrap_or_default())
}

/// A time as in the name of a rotated file. Later times are greater texts.
fn time_text(at: SystemTime) -> String {
    jiff::Timestamp::try_from(at).map(|at| at.strftime(TIME_FORMAT).to_string()).unwrap_or_default()
}

/// The name of the rotated file.
fn free_name(path: &Path, now: SystemTime) -> io::Result<PathBuf> {
    let (before, after) = parts(path);
    let named = |later: u32| {
        path.with_file_name(before.clone() + &time_text(now + Duration::from_millis(later.into())) + &after)
    };
    let free = (0..NAMES_MAX).map(named).find(|name| !name.exists());
    free.ok_or_else(|| io::ErrorKind::AlreadyExists.into())
}

/// The rotated files of a log, with their times.
fn backups(path: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let (before, after) = parts(path);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let time = name.strip_prefix(&before).and_then(|rest| rest.strip_suffix(&after));
        // Other files may start with the same text.
        if let Some(time) = time.filter(|time| jiff::civil::DateTime::strptime(TIME_FORMAT, time).is_ok()) {
            found.push((time.to_owned(), entry.path()));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests;
