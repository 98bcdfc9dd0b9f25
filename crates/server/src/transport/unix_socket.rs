//! Unix sockets: the permission to connect, and the one process that listens.
//!
//! A client needs the right to write to the socket's file. So the file is created with its rights,
//! and nothing can connect before they are set.
//!
//! A process that was killed leaves its file behind, and the next one replaces it. Between its look
//! and its own file another process could do the same, and one of the two would listen on a file
//! that no longer exists. So both lock the directory.

use std::{
    fmt,
    fs::{self, File, Permissions, TryLockError},
    io,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use rustix::fs::{Mode, RawMode, fchmod};
use serde::{Deserialize, Deserializer, de};
use socket2::{Domain, SockAddr, Socket, Type};
use tokio::{
    net::{UnixListener, UnixStream},
    time::{sleep, timeout},
};

use super::limits::BACKLOG;

/// Time that another process may hold the lock of the directory. It needs some milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// The time between two attempts to lock the directory.
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// The rights of a socket's file, as `chmod` takes them, without special bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketMode(u32);

/// The text is no mode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no mode of a file; write it in octal, like 0600 or 0660")]
pub struct InvalidMode {
    text: String,
}

impl SocketMode {
    /// Whether only the user that kubefan runs as, and root, may connect.
    pub fn is_owners(self) -> bool {
        self.0 & 0o077 == 0
    }
}

impl Default for SocketMode {
    /// Only the user that kubefan runs as, and root, may connect.
    fn default() -> Self {
        Self(0o600)
    }
}

impl FromStr for SocketMode {
    type Err = InvalidMode;

    fn from_str(text: &str) -> Result<Self, InvalidMode> {
        let is_octal = (3..=4).contains(&text.len()) && text.bytes().all(|b| (b'0'..=b'7').contains(&b));
        let mode = is_octal.then(|| u32::from_str_radix(text, 8).ok()).flatten();
        mode.filter(|mode| *mode <= 0o777)
            .map(Self)
            .ok_or_else(|| InvalidMode { text: text.chars().take(64).collect() })
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl<'de> Deserialize<'de> for SocketMode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // YAML reads octal digits as a number; as a string they mean the mode.
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// The file of a Unix socket. Dropping it removes the file, unless another one has its name.
pub struct SocketFile {
    path: PathBuf,
    /// Device and number of the file.
    identity: (u64, u64),
}

impl SocketFile {
    /// The path that the socket was bound to.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|current| current == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Listens on a path, with these rights. A socket that a dead process left behind is replaced; one
/// that is in use is not, nor is another kind of file.
///
/// # Errors
/// The file cannot be created, its directory cannot be locked, or the path is in use.
pub(super) async fn bind(path: &Path, mode: SocketMode) -> io::Result<(SocketFile, UnixListener)> {
    let _locked = timeout(LOCK_TIMEOUT, lock_directory(path)).await.unwrap_or(Err(io::ErrorKind::WouldBlock.into()))?;
    match listen(path, mode) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            // A regular file refuses connections too, and must not be removed.
            let is_socket = fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
            match UnixStream::connect(path).await {
                Err(connect) if is_socket && connect.kind() == io::ErrorKind::ConnectionRefused => {
                    fs::remove_file(path)?;
                    listen(path, mode)
                }
                _ => Err(error),
            }
        }
        other => other,
    }
}

/// Waits until no other process holds the lock of the directory that a path is in. The lock ends
/// with the file, or with the process.
async fn lock_directory(path: &Path) -> io::Result<File> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = File::open(parent.unwrap_or(Path::new(".")))?;
    loop {
        match directory.try_lock() {
            Ok(()) => return Ok(directory),
            Err(TryLockError::WouldBlock) => sleep(LOCK_INTERVAL).await,
            // Without locks, two processes that start at the same moment may still collide.
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => return Ok(directory),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
}

fn listen(path: &Path, SocketMode(mode): SocketMode) -> io::Result<(SocketFile, UnixListener)> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // Linux creates the file with the rights of the socket, less those that the umask takes. Other
    // systems refuse this; there the rights are set below, before anything can connect.
    let _ = fchmod(&socket, Mode::from_raw_mode(mode as RawMode));
    socket.bind(&SockAddr::unix(path)?)?;
    let file = SocketFile { path: path.to_owned(), identity: identity(path)? };
    fs::set_permissions(path, Permissions::from_mode(mode))?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok((file, UnixListener::from_std(socket.into())?))
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let file = fs::symlink_metadata(path)?;
    Ok((file.dev(), file.ino()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[tokio::test]
    async fn only_an_abandoned_socket_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let listen_on = async |path: &PathBuf| bind(path, SocketMode::default()).await;

        let file = directory.path().join("file");
        fs::write(&file, "precious").unwrap();
        let error = listen_on(&file).await.err().expect("a regular file");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert_eq!(fs::read_to_string(&file).unwrap(), "precious");

        let link = directory.path().join("link");
        symlink(&file, &link).unwrap();
        assert!(listen_on(&link).await.is_err(), "a link to one");
        assert!(link.is_symlink() && file.exists());

        let stale = directory.path().join("stale");
        drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
        assert!(stale.exists(), "left behind");
        let listener = listen_on(&stale).await.unwrap();

        assert!(listen_on(&stale).await.is_err(), "a live one");
        assert!(UnixStream::connect(&stale).await.is_ok(), "which still accepts connections");
        drop(listener);
        assert!(!stale.exists());
    }

    #[tokio::test]
    async fn a_socket_has_the_rights_that_were_asked_for() {
        let directory = tempfile::tempdir().unwrap();
        for text in ["0600", "0660", "0666", "0777"] {
            let path = directory.path().join(text);
            let mode: SocketMode = text.parse().unwrap();
            let _listener = bind(&path, mode).await.unwrap();
            assert_eq!(mode_of(&path), mode.0, "{text}, whatever the umask");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_socket_is_created_with_its_rights() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        fchmod(&socket, Mode::from_raw_mode(SocketMode::default().0 as RawMode)).unwrap();
        socket.bind(&SockAddr::unix(&path).unwrap()).unwrap();
        assert_eq!(mode_of(&path), 0o600, "before it listens");
    }

    #[tokio::test]
    async fn one_of_two_processes_that_start_together_listens() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let starts = (0..8).map(|_| bind(&path, SocketMode::default()));
        let listeners: Vec<_> = futures::future::join_all(starts).await.into_iter().filter_map(Result::ok).collect();
        assert_eq!(listeners.len(), 1);
        assert!(UnixStream::connect(&path).await.is_ok(), "and its file is the one that clients find");
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_waits_a_limited_time_for_the_lock() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let locked = lock_directory(&path).await.unwrap();
        let error = bind(&path, SocketMode::default()).await.err().expect("it is locked");
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        drop(locked);
        assert!(bind(&path, SocketMode::default()).await.is_ok());
    }

    #[tokio::test]
    async fn the_file_of_another_process_is_not_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let first = bind(&path, SocketMode::default()).await.unwrap();
        fs::remove_file(&path).unwrap();
        // The number of the removed file must not be used again.
        let _other = bind(&directory.path().join("other"), SocketMode::default()).await.unwrap();
        let second = bind(&path, SocketMode::default()).await.unwrap();
        drop(first);
        assert!(UnixStream::connect(&path).await.is_ok());
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn a_mode_is_written_in_octal() {
        for (text, shown) in [("600", "0600"), ("0660", "0660"), ("0777", "0777"), ("000", "0000")] {
            assert_eq!(text.parse::<SocketMode>().unwrap().to_string(), shown);
        }
        for text in ["", "6", "0o600", "0888", "1777", "-600", "rw-------", "00600"] {
            assert!(text.parse::<SocketMode>().is_err(), "{text}");
        }
    }
}
