//! The directory with the files: who may write it, and how a file is replaced.
//!
//! A user who can write a file decides what kubefan serves. So the directory and its files must
//! belong to the user of this process, and other users must not be able to write them. Volumes
//! often have wider rights, so the files are in a directory of their own inside of the given one.
//! Files are opened relative to the opened directory, and links are not followed, so that a
//! directory that is replaced later changes nothing.

use std::{
    fs::File,
    io::{BufReader, BufWriter, Write},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use kubefan_common::proto::v1alpha1::TransferResponse;
use kubefan_model::{GroupVersionResource, Scope};
use rustix::{
    fs::{
        AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, Stat, flock, fstat, fsync, mkdirat, openat, renameat,
        statat, unlinkat,
    },
    io::Errno,
    process::geteuid,
};

use super::{
    saved_error::{SaveFailure, SavedError},
    state_file::{self, SALT_BYTES, StateParts, StateReader},
    state_head::StateHead,
    state_key::StateKey,
};
use crate::error::PeerError;

/// The directory inside of the given one.
const DIRECTORY: &str = "kubefan";
const SUFFIX: &str = ".state";
const UNFINISHED_SUFFIX: &str = ".tmp";
const BUFFER_BYTES: usize = 256 << 10;
/// Entries of the directory that are looked at.
const ENTRIES_MAX: usize = 64 << 10;

/// A file that is being read.
pub(super) type OpenedState = StateReader<BufReader<File>>;

/// Makes the random salt of a file.
pub type Salt = fn() -> [u8; SALT_BYTES];

/// The name of a cache's file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateName(String);

impl StateName {
    /// Returns the name of the file of a cache.
    ///
    /// # Errors
    /// [`SavedError::Name`] if the resource has characters that no name in Kubernetes has.
    pub fn of(gvr: &GroupVersionResource, scope: &Scope) -> Result<Self, SavedError> {
        let GroupVersionResource { group, version, resource } = gvr;
        let parts = [resource.as_str(), version, group, scope.namespace()];
        let name = parts.join("_");
        // No part has an underscore, so two caches never have the same name.
        let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
        let are_plain = parts.iter().all(|part| part.bytes().all(is_plain));
        if resource.is_empty() || name.starts_with('.') || name.len() > 240 || !are_plain {
            return Err(SavedError::Name(name));
        }
        Ok(Self(name + SUFFIX))
    }

    /// The name in the directory.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A directory with saved states.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    dir: OwnedFd,
    key: Option<StateKey>,
    salt: Salt,
}

impl StateDir {
    /// Opens the directory inside of `parent`, and creates it if it does not exist. With a key the
    /// files are encrypted.
    ///
    /// # Errors
    /// It cannot be created or opened, belongs to another user, or others may write it.
    pub fn open(parent: &Path, key: Option<StateKey>, salt: Salt) -> Result<Self, SavedError> {
        let path = parent.join(DIRECTORY);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = rustix::fs::open(parent, flags, Mode::empty()).map_err(io)?;
        match mkdirat(&parent, DIRECTORY, Mode::RWXU) {
            Ok(()) => sync(&parent)?,
            Err(Errno::EXIST) => {}
            // It may exist on a file system that is read-only.
            Err(Errno::ROFS | Errno::ACCESS | Errno::PERM) => {}
            Err(error) => return Err(io(error)),
        }
        let dir = openat(&parent, DIRECTORY, flags | OFlags::NOFOLLOW, Mode::empty()).map_err(io)?;
        check_rights(&fstat(&dir).map_err(io)?, geteuid().as_raw())?;
        Ok(Self { path, dir, key, salt })
    }

    /// The directory with the files, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the files are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.key.is_some()
    }

    /// Reads the start of a cache's file.
    ///
    /// # Errors
    /// There is no file, it is refused, or it is not a file of this format.
    pub(super) fn read(&self, name: &StateName) -> Result<(StateHead, OpenedState), SavedError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&self.dir, name.as_str(), flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Err(SavedError::Absent),
            Err(Errno::LOOP) => return Err(SavedError::NotAFile),
            Err(error) => return Err(io(error)),
        };
        let found = fstat(&file).map_err(io)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(SavedError::NotAFile);
        }
        check_rights(&found, geteuid().as_raw())?;
        StateReader::open(BufReader::with_capacity(BUFFER_BYTES, File::from(file)), self.key.as_ref())
    }

    /// Replaces a cache's file. Returns its length in bytes.
    ///
    /// # Errors
    /// It cannot be written, or the parts cannot be encoded. Then the file is the one before,
    /// except after a failure to flush the directory.
    pub fn save(
        &self,
        name: &StateName,
        head: &StateHead,
        parts: impl Iterator<Item = Result<TransferResponse, PeerError>>,
    ) -> Result<u64, SaveFailure> {
        self.lock().map_err(|error| SaveFailure { bytes: 0, error })?;
        let unfinished = format!("{}{UNFINISHED_SUFFIX}", name.as_str());
        let written = self.write(&unfinished, StateParts { head, parts, key: self.key.as_ref(), salt: (self.salt)() });
        let rename = || renameat(&self.dir, &unfinished, &self.dir, name.as_str()).map_err(io);
        let replaced = written.and_then(|bytes| rename().map(|()| bytes));
        let bytes = replaced.map_err(|error| {
            let length = statat(&self.dir, &unfinished, AtFlags::SYMLINK_NOFOLLOW).map(|found| found.st_size);
            let _ = unlinkat(&self.dir, &unfinished, AtFlags::empty());
            SaveFailure { bytes: u64::try_from(length.unwrap_or_default()).unwrap_or_default(), error }
        })?;
        sync(&self.dir).map_err(|error| SaveFailure { bytes, error })?;
        Ok(bytes)
    }

    fn write(
        &self,
        unfinished: &str,
        content: StateParts<'_, impl Iterator<Item = Result<TransferResponse, PeerError>>>,
    ) -> Result<u64, SavedError> {
        // The rest of a process that was killed.
        self.unlink(unfinished)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.dir, unfinished, flags, Mode::RUSR | Mode::WUSR).map_err(io)?;
        let mut output = BufWriter::with_capacity(BUFFER_BYTES, File::from(file));
        let bytes = state_file::write(&mut output, content)?;
        output.flush()?;
        output.get_ref().sync_all()?;
        Ok(bytes)
    }

    /// Returns the names of the files, in order.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn names(&self) -> Result<Vec<StateName>, SavedError> {
        let files = self.entries()?.into_iter().filter(|name| name.ends_with(SUFFIX));
        let mut names: Vec<_> = files.map(StateName).collect();
        names.sort();
        Ok(names)
    }

    /// Removes the files for which `is_kept` is false, and the rests of saves that a killed process
    /// has left. Returns the number of files. This process must not be saving.
    ///
    /// # Errors
    /// The directory cannot be read, or a file cannot be removed.
    pub fn keep_only(&self, is_kept: impl Fn(&StateName) -> bool) -> Result<usize, SavedError> {
        let is_unwanted = |name: &String| match name.strip_suffix(UNFINISHED_SUFFIX) {
            Some(state) => state.ends_with(SUFFIX),
            None => name.ends_with(SUFFIX) && !is_kept(&StateName(name.clone())),
        };
        let unwanted: Vec<_> = self.entries()?.into_iter().filter(is_unwanted).collect();
        if !unwanted.is_empty() {
            self.lock()?;
        }
        for name in &unwanted {
            self.unlink(name)?;
        }
        Ok(unwanted.len())
    }

    /// Removes a file, if it exists.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn remove(&self, name: &StateName) -> Result<(), SavedError> {
        self.lock()?;
        self.unlink(name.as_str())
    }

    fn entries(&self) -> Result<Vec<String>, SavedError> {
        let entries = Dir::read_from(self.dir.as_fd()).map_err(io)?.take(ENTRIES_MAX);
        let entries = entries.collect::<Result<Vec<_>, _>>().map_err(io)?;
        Ok(entries.iter().filter_map(|entry| entry.file_name().to_str().ok().map(str::to_owned)).collect())
    }

    fn unlink(&self, name: &str) -> Result<(), SavedError> {
        match unlinkat(&self.dir, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(io(error)),
        }
    }

    /// Locks the directory for as long as it is open. Two processes would remove each other's
    /// unfinished files.
    fn lock(&self) -> Result<(), SavedError> {
        match flock(&self.dir, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => Err(SavedError::InUse),
            // Some file systems have no locks.
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

/// Checks that a file or directory belongs to this user, and that other users cannot write it.
pub(super) fn check_rights(found: &Stat, ours: u32) -> Result<(), SavedError> {
    let mode = found.st_mode & 0o7777;
    if found.st_uid != ours {
        return Err(SavedError::OtherOwner { owner: found.st_uid, ours });
    }
    if mode & 0o022 != 0 {
        return Err(SavedError::WritableByOthers { mode });
    }
    Ok(())
}

/// Flushes a directory.
fn sync(dir: &OwnedFd) -> Result<(), SavedError> {
    match fsync(dir) {
        // Some network file systems cannot, and need not.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(error) => Err(io(error)),
    }
}

fn io(error: Errno) -> SavedError {
    SavedError::Io(error.into())
}
