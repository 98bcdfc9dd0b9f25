//! Errors of files with a state. The texts are logged; the cache starts cold.

use std::io;

use crate::error::PeerError;

/// A save that has failed.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct SaveFailure {
    /// The bytes that were written.
    pub bytes: u64,
    /// The reason.
    pub error: SavedError,
}

/// The reason why a state is not saved, or not used.
#[derive(Debug, thiserror::Error)]
pub enum SavedError {
    /// The file system refuses the request.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// There is no such file.
    #[error("there is none")]
    Absent,
    /// It is a directory, a link, a socket or a device.
    #[error("it is not a regular file")]
    NotAFile,
    /// Another user owns it.
    #[error("the user {owner} owns it, and kubefan runs as the user {ours}")]
    OtherOwner {
        /// The owner.
        owner: u32,
        /// The user of this process.
        ours: u32,
    },
    /// Other users may write it.
    #[error("others may write it: its mode is {mode:04o}")]
    WritableByOthers {
        /// The permission bits.
        mode: u32,
    },
    /// Another process writes to the directory.
    #[error("another process uses the directory")]
    InUse,
    /// The file has other content.
    #[error("it is not a file of kubefan")]
    NotAState,
    /// The file has a format that this version does not read.
    #[error("it has the format {0}, which this version of kubefan does not read")]
    OtherFormat(u32),
    /// The file is encrypted, and there is no key.
    #[error("it is encrypted, and there is no --state-key-file")]
    Encrypted,
    /// There is a key, and the file is not encrypted.
    #[error("it is not encrypted, although there is a --state-key-file")]
    Plain,
    /// The key is another one, or the file was altered.
    #[error("the key of --state-key-file does not open it")]
    WrongKey,
    /// The file ends within a record.
    #[error("it is torn: it ends within a record")]
    Torn,
    /// A record was altered.
    #[error("the checksum of record {0} does not match")]
    Checksum(u64),
    /// A record is malformed.
    #[error("record {0} cannot be read")]
    Malformed(u64),
    /// The name of the cache cannot be that of a file.
    #[error("{0:?} cannot be the name of a file")]
    Name(String),
    /// The file is of another apiserver, by address or CA.
    #[error("it is of {theirs}, and this is {ours}")]
    OtherServer {
        /// The servers of the file.
        theirs: String,
        /// The servers of this process.
        ours: String,
    },
    /// The file is of another cache.
    #[error("it is of another cache: {what} is {theirs:?} there and {ours:?} here")]
    OtherCache {
        /// The differing part of the identity.
        what: &'static str,
        /// The value in the file.
        theirs: String,
        /// The value of this process.
        ours: String,
    },
    /// The content is larger than the limit.
    #[error("it has more than {0} bytes; raise limits.peerTransferBytesMax")]
    TooLarge(u64),
    /// The content is incomplete.
    #[error(transparent)]
    Transfer(PeerError),
    /// The key file has no key.
    #[error("it must have 32 bytes in base64, as of `head -c 32 /dev/urandom | base64`")]
    NoKey,
}

impl From<PeerError> for SavedError {
    fn from(error: PeerError) -> Self {
        match error {
            PeerError::Differs { what, theirs, ours } => Self::OtherCache { what, theirs, ours },
            PeerError::TooLarge(bytes_max) => Self::TooLarge(bytes_max),
            error => Self::Transfer(error),
        }
    }
}
