//! HTTP/1.1 connections, served by hyper.

pub mod connection;
pub mod socket;
pub mod watch_body;
