//! The watches that are being sent, for operators: a list of them, and a way to end one.
//!
//! The send path takes no part in this. An entry is made when a watch was opened and goes with it;
//! in between, the watch writes its place to memory of its own
//! ([`Observer`](kubefan_fanout::Observer)). An operator's question is answered when it is asked,
//! without a lock that a commit waits for.

mod listing;
mod open_watches;

pub use self::{
    listing::{ListOptions, ListedSubscribers, SortBy},
    open_watches::{Registered, Subscribers},
};
