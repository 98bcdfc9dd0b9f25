//! A watch channel whose waiters wake in the order in which they began to wait.

pub mod watch;
