//! The meeting point of one writer and many subscribers, for one resource and scope.

pub mod batch;
pub(crate) mod core;
mod indexing;
mod lists;
mod matching;
mod proved;
mod reads;
pub(crate) mod replay;
mod replay_turns;
mod saved_state;
mod slices;
mod status;

pub(crate) use self::reads::HistoryError;
pub use self::{
    batch::CommitBatch,
    core::{COALESCE_MAX, CachePosition, ClusterName, Continuation, Hub, HubOptions},
    proved::{ProvedState, ReadSource},
    saved_state::{SavedAge, SavedState},
    status::HubStatus,
};
