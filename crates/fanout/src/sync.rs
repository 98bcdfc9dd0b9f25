//! The locks and atomics between a commit and a woken subscriber.
//!
//! Normally they are std's. In the tests that explore thread interleavings
//! (`fanout/tests/interleavings.rs`) they are shuttle's, which can switch threads at each of them.

#[cfg(not(all(test, feature = "interleavings")))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic::AtomicBool};

#[cfg(all(test, feature = "interleavings"))]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, atomic::AtomicBool};
