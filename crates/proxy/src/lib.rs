//! The proxy: it lists and watches each resource once, keeps a watch cache, and serves any number of subscribers from it.
//!
//! Data flows one way, down this drawing; a module may use what is above it, never what is below:
//!
//! ```text
//!   kube-apiserver (or another kubefan)
//!       │ list + watch, once per resource and scope      upstream   reflector: a state machine, one step function
//!       │  ◀── or, at the start, a replica's cache       peer       encode, sender → receiver, decode
//!       ▼
//!   objects, parsed once, bytes in canonical form
//!       │ apply / replace, one writer per resource       cache      store (state) + ring (history)
//!       ▼
//!   views: one per distinct selection, shared by all equal subscriptions
//!       │ an event wakes only the views it concerns      fanout     encode once
//!       ▼
//!   subscriptions: a cursor into the view's log
//!       │ pull; wake-ups carry no data                   server     gRPC, the Kubernetes API, admin
//!       ▼
//!   subscribers
//! ```
//!
//! `docs/ARCHITECTURE.md` says what must stay true and why.

pub mod app;
pub mod cache;
pub mod config;
pub mod fanout;
pub mod kube_encoding;
pub mod peer;
pub mod server;
pub mod telemetry;
pub mod upstream;

#[cfg(test)]
extern crate self as kubefan_proxy;

#[cfg(test)]
#[path = "../../../fuzz/checks.rs"]
mod fuzz;
