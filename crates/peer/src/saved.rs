//! Caches on disk: a start with the state and history of the process before, without a peer.
//!
//! A file has the parts that a peer is sent ([`crate::Encoder`]), behind a head with the facts that
//! only discovery and the process know. The hazard is a wrong answer: a file that is torn, altered,
//! from another cluster or from another user must never be served. So every record has a checksum,
//! a file is replaced only as a whole, and files that others may write are refused. Any failure
//! here costs only time, because a cache can always start with a list.
//!
//! Everything here blocks, and so belongs on a thread that may.

mod restored_state;
mod saved_error;
mod state_dir;
mod state_file;
mod state_head;
mod state_key;

#[cfg(test)]
mod tests;

pub use restored_state::RestoredState;
pub use saved_error::{SaveFailure, SavedError};
pub use state_dir::{Salt, StateDir, StateName};
pub use state_head::{Endpoint, StateHead};
pub use state_key::StateKey;
