//! The data port and the admin port: everything that subscribers and operators connect to.
//!
//! Caches are found only through the trait [`kubefan_fanout::Catalog`], and read through their
//! [`kubefan_fanout::Hub`]. From top to bottom, each part uses only those below it:
//!
//! - [`transport`]: listeners, TLS, HTTP/2 and HTTP/1.1 connections, and the watches on them.
//! - [`grpc`] and [`kube`]: the two APIs of the data port. Neither knows the other.
//! - [`reader`]: admission limits, and reads and subscriptions for both APIs.
//! - [`target_lookup`], [`selector_limits`], [`watch`], [`subscribers`], [`client_info`],
//!   [`request_caller`], [`fallback_budget`], [`staleness`] and `sliced_list`: the types they
//!   share.
//!
//! [`rebalance`] moves watches to replicas that have fewer.
//!
//! [`admin_port`] is the thread of the admin port, [`admin`] has its answers, [`admin_access`] the
//! access to them, [`can_i`] a question that it answers, [`status_report`] the data of its status
//! page, and [`worker_check`] the liveness of the workers.

pub mod admin;
pub mod admin_access;
pub mod admin_port;
pub mod can_i;
pub mod client_info;
pub mod fallback_budget;
pub mod grpc;
pub mod kube;
pub mod reader;
pub mod rebalance;
pub mod request_caller;
pub mod selector_limits;
mod sliced_list;
pub mod staleness;
pub mod status_report;
pub mod subscribers;
pub mod target_lookup;
pub mod transport;
pub mod watch;
pub mod worker_check;

pub use client_info::ClientInfo;
pub use transport::{
    serve::Server,
    services::{ServerHandles, ServerOptions},
};
