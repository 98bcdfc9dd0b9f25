//! The record of a transfer, which another part of the program keeps: a transfer is a read of
//! everything that a cache holds.

use futures::future::BoxFuture;
use tonic::{Extensions, Status};

use super::identity::CacheIdentity;

/// Records transfers.
pub trait TransferLog: Send + Sync + 'static {
    /// A peer asks for a cache. `of` are the extensions of its request, with its connection.
    fn begin(&self, of: &Extensions, wanted: &CacheIdentity) -> Box<dyn TransferRecord>;
}

/// The record of one transfer. Dropping it completes it.
pub trait TransferRecord: Send + 'static {
    /// The transfer is refused.
    fn refused(&mut self, status: &Status);

    /// The transfer begins.
    ///
    /// # Errors
    /// If the transfer must not begin, because it cannot be recorded.
    fn started(&mut self) -> BoxFuture<'_, Result<(), Status>>;
}

/// Records nothing.
pub struct NoTransferLog;

impl TransferLog for NoTransferLog {
    fn begin(&self, _: &Extensions, _: &CacheIdentity) -> Box<dyn TransferRecord> {
        Box::new(Self)
    }
}

impl TransferRecord for NoTransferLog {
    fn refused(&mut self, _: &Status) {}

    fn started(&mut self) -> BoxFuture<'_, Result<(), Status>> {
        Box::pin(std::future::ready(Ok(())))
    }
}
