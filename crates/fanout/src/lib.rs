//! From one event to many subscribers: views shared by equal subscriptions, and cursors into their
//! logs.
//!
//! The hub is the only place where state, history and views change, all in one critical section per
//! commit. A commit never waits for a subscriber: a subscription pulls, and a wake-up carries no
//! data.

pub mod catalog;
pub mod hub;
pub mod send;
pub mod subscribe;
mod sync;
pub mod views;
pub mod wake;

#[cfg(test)]
mod tests;

pub use catalog::{CacheRequest, Catalog, OWN_WATCH_WAIT, Patience, Served};
pub use hub::{
    CachePosition, CommitBatch, Continuation, Hub, HubOptions, HubStatus, ProvedState, ReadSource, SavedAge, SavedState,
};
pub use send::FrameBuf;
pub use subscribe::{
    BATCH_BYTES_MAX, NotSubscribed, Observed, Observer, Provided, Start, SubscribeNeed, SubscribeOptions, Subscription,
    options::ProvidedBackfill,
};
pub use views::{
    log::Behind,
    selected_objects::Page,
    shared_lists::{ListChunk, ListExtent, ListKey, ListRequest, SharedList},
    view::ViewKey,
};
pub use wake::{ConnectionWaker, OfStream, ReadyStreams, StreamWaker};
