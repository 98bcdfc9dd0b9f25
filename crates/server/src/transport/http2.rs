//! HTTP/2 connections. [`connection`] is the task of one connection and describes the send path.

pub mod arrival;
pub mod coalescer;
pub mod connection;
pub mod deadlines;
pub mod keepalive;
pub mod payload;
pub mod requests;
pub mod respond;
pub mod wakers;
pub mod watch_stream;
