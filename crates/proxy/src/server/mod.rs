//! What subscribers and operators speak to. Everything below is served from the [`crate::fanout::Catalog`] trait.
//!
//! The data port: [`accept`] takes connections and tells the protocols apart; [`connection`] drives HTTP/2 and sends watches;
//! [`bridge`] carries every other request to tonic's services; [`limits`] names what all of it may take.

pub mod accept;
pub mod admin;
pub mod bridge;
pub mod call;
pub mod clocks;
pub mod coalescer;
pub mod connection;
pub mod deadlines;
pub mod grpc;
pub mod health;
pub mod http;
pub mod http1;
pub mod keepalive;
pub mod limits;
pub mod listen;
pub mod payload;
pub mod plaintext;
pub mod preface;
pub mod reader;
pub mod request;
pub mod stall;
pub mod status;
pub mod stream;
pub mod tls;

pub use accept::{Server, ServerOptions};
