//! Hostile clients: the attacks, the process that they run in, and the sink that they are compared
//! with.
//!
//! An attack is an entry of a table and one function. It is bounded in count and time, and stays on
//! loopback. Attackers bind other addresses of 127/8 than the honest clients, so that limits per
//! address tell them apart, and their process is niced. The baseline is the same attack against the
//! sink, so that the CPU time of the attackers themselves is in both measurements.

pub mod attack;
pub mod attacker;
mod attacks;
mod client_hello;
mod context;
mod frames;
mod grpc_call;
mod raw_http;
pub mod sink;
mod tally;

pub use attacks::{all, find};
