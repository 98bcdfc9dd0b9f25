//! Errors of a transfer. The texts are logged; the receiver tries the next peer.

use kubefan_common::encoding::FrameError;
use kubefan_model::object::ObjectError;

/// The reason why a transfer failed.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The DNS lookup of the peers' name failed.
    #[error("--peers {name}: {message}")]
    Resolve {
        /// The name, with its port.
        name: String,
        /// The resolver's error.
        message: String,
    },
    /// No address of another replica was found.
    #[error("there is no other replica")]
    NoOtherReplica,
    /// The address is one of this replica.
    #[error("this is the address of this replica")]
    OwnAddress,
    /// A file with the certificate, the key or the peers' CA cannot be used.
    #[error("--peer-cert-file, --peer-key-file, --peer-ca-file: {0}")]
    Files(String),
    /// The certificate that the managed CA signed for this replica cannot be used.
    #[error("this replica's certificate of the managed CA cannot be used: {0}")]
    Managed(String),
    /// Nothing answers at the peer's address, or the connection closes before anything does.
    #[error("cannot be reached: {0}")]
    Unreachable(String),
    /// The connection failed, or the peer did not prove its identity.
    #[error("no connection: {0}")]
    Connect(String),
    /// The peer refused the request.
    #[error("refused: {0}")]
    Refused(String),
    /// The peer has a different cache.
    #[error("the peer has another cache: {what} is {theirs:?} there and {ours:?} here")]
    Differs {
        /// The differing part of the identity.
        what: &'static str,
        /// The peer's value.
        theirs: String,
        /// This replica's value.
        ours: String,
    },
    /// The transfer ended early, or nothing arrived for too long.
    #[error("the transfer was cut off: {0}")]
    CutOff(String),
    /// The transfer is larger than the limit.
    #[error("the transfer has more than {0} bytes; raise limits.peerTransferBytesMax")]
    TooLarge(u64),
    /// The transfer is malformed or inconsistent.
    #[error("the transfer is broken: {0}")]
    Broken(String),
}

impl PeerError {
    /// Whether the same attempt may succeed in a moment.
    pub(super) fn may_pass(&self) -> bool {
        matches!(self, Self::Resolve { .. } | Self::Unreachable(_))
    }

    pub(super) fn broken(what: impl std::fmt::Display) -> Self {
        Self::Broken(what.to_string())
    }
}

impl From<FrameError> for PeerError {
    fn from(error: FrameError) -> Self {
        Self::broken(error)
    }
}

impl From<ObjectError> for PeerError {
    fn from(error: ObjectError) -> Self {
        Self::broken(error)
    }
}
