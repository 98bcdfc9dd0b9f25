//! The proxy: it lists and watches each resource once, keeps a watch cache of it, and serves any
//! number of subscribers from the cache, over gRPC and over the Kubernetes API.
//!
//! Events flow down this drawing:
//!
//! ```text
//!   kube-apiserver (or another kubefan)                        a replica that already runs
//!       │ list and watch, once per resource,                       │ its cache, for a warm start
//!       ▼ scope and encoding                                       ▼
//!   upstream   client, discovery, reflector                    peer   sender → receiver
//!       │                                                          │
//!       └─ objects: parsed once, bytes in canonical form ──────────┘
//!       ▼
//!   caches     which caches exist; one informer fills each of them
//!       │ apply or replace, one writer per cache
//!       ▼
//!   cache      store (current state) and ring (recent events)
//!       │ an event wakes only the views that it concerns
//!       ▼
//!   fanout     views: one per distinct selection and encoding; each event is encoded once
//!       │ subscriptions: a cursor into a view's log; they pull, wake-ups carry no data
//!       ▼
//!   server     gRPC             watch and list
//!       │      Kubernetes API   HTTP list, get and watch from the cache; all else, and reads that
//!       │                       cannot be proved correct, are forwarded upstream (passthrough)
//!       │      admin            health, readiness, metrics
//!       ▼
//!   subscribers: kubefan clients; kubectl, client-go and other Kubernetes clients
//! ```
//!
//! Modules form layers. A module imports only modules before it in this list:
//!
//! 1. `telemetry`: metrics and logs.
//! 2. `cache`: one cache as a data structure.
//! 3. `upstream` and `fanout`, which do not import each other; `managed_tls`, the certificate that
//!    kubefan makes and renews itself.
//! 4. `peer`: warm starts between replicas, and their load.
//! 5. `caches`: the registry of all caches and its policies. It implements the trait
//!    [`fanout::Catalog`].
//! 6. `access`: who a caller is, and what it may read.
//! 7. `audit`: the record of each request, and the log of them.
//! 8. `server`: all ports. It finds caches only through that trait, so it is tested without them.
//! 9. `config`: flags, environment and file as plain data.
//! 10. `app`: creates everything and connects it.
//!
//! `docs/architecture.md` states the invariants and the reasons for each decision.

pub mod access;
pub mod admission;
pub mod app;
pub mod audit;
pub mod cache;
pub mod config;
pub mod fanout;
pub mod informers;
pub mod kube_encoding;
pub mod managed_tls;
pub mod peer;
pub mod server;
pub mod telemetry;
pub mod upstream;

#[cfg(test)]
extern crate self as kubefan_proxy;

#[cfg(test)]
#[path = "../../../fuzz/checks.rs"]
mod fuzz;
