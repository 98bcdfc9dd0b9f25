//! A cache from its file.

use kubefan_common::proto::v1alpha1::{TransferHeader, TransferResponse, transfer_response::Part};

use super::{
    saved_error::SavedError,
    state_dir::{OpenedState, StateDir, StateName},
    state_head::StateHead,
};
use crate::{
    decode::{Decoder, ReceivedCache},
    identity::CacheIdentity,
};

/// A cache that was read completely.
pub struct RestoredState {
    /// The facts that a transfer does not have.
    pub head: StateHead,
    /// The identity of the cache, as the file names it.
    pub identity: CacheIdentity,
    /// State and history.
    pub received: ReceivedCache,
}

impl StateDir {
    /// Reads a file up to the header of its transfer.
    fn begin(&self, name: &StateName) -> Result<(StateHead, TransferHeader, OpenedState), SavedError> {
        let (head, mut reader) = self.read(name)?;
        match reader.next_part()?.and_then(|part| part.part) {
            Some(Part::Header(header)) => Ok((head, header, reader)),
            Some(_) => Err(SavedError::Malformed(1)),
            None => Err(SavedError::Torn),
        }
    }

    /// Returns the cache that a file is of.
    ///
    /// # Errors
    /// There is no file, it is refused, or it is not a file of this format.
    pub fn peek(&self, name: &StateName) -> Result<(StateHead, CacheIdentity), SavedError> {
        let (head, header, _) = self.begin(name)?;
        Ok((head, CacheIdentity::of_header(&header)))
    }

    /// Reads a whole file. `decoder` makes its decoder, for the wanted identity.
    ///
    /// # Errors
    /// As [`Self::peek`], if `decoder` refuses the file, and if the content is incomplete or does
    /// not fit.
    pub fn restore(
        &self,
        name: &StateName,
        decoder: impl FnOnce(&StateHead, &CacheIdentity) -> Result<Decoder, SavedError>,
    ) -> Result<RestoredState, SavedError> {
        let (head, header, mut reader) = self.begin(name)?;
        let identity = CacheIdentity::of_header(&header);
        let mut decoder = decoder(&head, &identity)?;
        decoder.take(TransferResponse { part: Some(Part::Header(header)) })?;
        while let Some(part) = reader.next_part()? {
            decoder.take(part)?;
        }
        Ok(RestoredState { head, identity, received: decoder.finish()? })
    }
}
