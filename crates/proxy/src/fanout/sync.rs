//! The locks and flags on the way from a commit to a woken subscriber.
//!
//! They are std's; in the tests that try out the orders in which threads may run
//! (`fanout/tests/interleavings.rs`) they are shuttle's, which lets another thread go on at each of
//! them.

#[cfg(not(all(test, shuttle)))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic::AtomicBool};

#[cfg(all(test, shuttle))]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic::AtomicBool};
