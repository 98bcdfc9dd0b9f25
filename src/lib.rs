//! kubefan is a watch fan-out proxy for Kubernetes: it lists and watches each resource once, keeps a watch cache, and serves any
//! number of subscribers from it.
//!
//! Data flows one way, down this drawing; a module may use what is above it, never what is below:
//!
//! ```text
//!   kube-apiserver (or another kubefan)
//!       │ list + watch, once per resource and scope      upstream   reflector: a state machine, one step function
//!       │  ◀── or, at the begin, what a replica holds    peer       encode, sender → receiver, decode
//!       ▼
//!   objects, parsed once, bytes in canonical form
//!       │ apply / replace, one writer per resource       cache      store (state) + ring (history)
//!       ▼
//!   views: one per distinct selection, shared by all equal subscriptions
//!       │ an event wakes only the views it concerns      fanout     encode once
//!       ▼
//!   subscriptions: a cursor into the view's log
//!       │ pull; wake-ups carry no data                   server     gRPC, admin
//!       ▼
//!   subscribers                                          client     resume
//! ```
//!
//! `model` (names, versions, objects, selectors; no I/O) is used by every layer. `app` alone sees all and does only wiring.
//! `docs/ARCHITECTURE.md` says what must stay true and why.

pub mod model;
#[doc(hidden)]
pub mod planted;
pub mod proto;

#[cfg(feature = "server")]
pub mod app;
#[cfg(any(feature = "server", feature = "client"))]
pub mod backoff;
#[cfg(feature = "server")]
pub mod cache;
#[cfg(feature = "cli")]
pub mod cli;
#[cfg(feature = "client")]
pub mod client;
#[cfg(feature = "server")]
pub mod config;
#[cfg(any(feature = "server", feature = "client"))]
pub mod encoding;
#[cfg(feature = "server")]
pub mod fanout;
#[cfg(feature = "server")]
pub mod peer;
#[cfg(feature = "server")]
pub mod server;
#[cfg(feature = "sim")]
pub mod sim;
#[cfg(feature = "server")]
mod sync;
#[cfg(feature = "server")]
pub mod telemetry;
#[cfg(feature = "server")]
pub mod upstream;
#[cfg(feature = "server")]
pub mod watch;

#[cfg(test)]
extern crate self as kubefan;

#[cfg(all(test, feature = "server", feature = "client"))]
#[path = "../fuzz/checks.rs"]
mod fuzz;
