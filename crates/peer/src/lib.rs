//! Exchange between replicas, over mutual TLS: their caches for a warm start, and their load.
//!
//! **Warm start.** A starting replica copies state and history from a running one, so that a
//! rolling update loses no history. A peer sends its cache at one version: the objects, the
//! conflated history, and the recent events. The receiver uses a transfer only as a whole, and
//! `informers::warm_start` compares the keys, versions, uids and labels with upstream before
//! anything of it is served. A peer's certificate proves who the peer is, not that its data is
//! right. The remaining content of the objects and the history are taken on trust. Any failure here
//! costs only time, because a replica can always start with a list.
//!
//! **State on disk.** The same parts, in files: [`saved`].
//!
//! **Load.** A replica asks the others how many watches they serve. `server::rebalance` decides
//! from the answers which watches move.

pub mod decode;
pub mod encode;
mod error;
mod identity;
mod loads;
pub mod receiver;
pub mod saved;
pub mod sender;
pub mod server;
pub mod tls;
mod transfer_log;

#[cfg(test)]
mod tests;

pub use decode::{Decoder, ReceivedCache};
pub use encode::Encoder;
pub use error::PeerError;
pub use identity::{CacheIdentity, schema_text};
pub use loads::{Load, Loads, PeerLoad};
pub use receiver::{Dial, DnsDial, FoundPeers, Peers};
pub use sender::{LoadSource, OfferedCache, OfferedCaches, TransferService, copy_cache};
pub use transfer_log::{NoTransferLog, TransferLog, TransferRecord};
