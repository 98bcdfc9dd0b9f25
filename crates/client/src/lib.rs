//! Informers for Kubernetes objects: list and watch a resource, keep it in a store, and call
//! handlers for each change. The objects come from kubefan, a watch fan-out proxy, or straight from
//! a kube-apiserver.
//!
//! The parts have the names and contracts of client-go's `tools/cache`:
//!
//! | part | |
//! |---|---|
//! | [`Client`], [`Connection`] | the connection to a server |
//! | [`ListWatch`] | what to read: resource, namespace, selectors, projection |
//! | [`Reflector`] | keeps any [`Store`] equal to the server |
//! | [`UndeltaStore`] | a store that hands out the complete set after every change |
//! | [`SharedInformer`], [`SharedInformerFactory`] | one watch and one store for any number of handlers |
//! | [`Indexer`], [`Lister`] | read that store: by key, by namespace, by an index |
//! | [`EventHandler`], [`HandlerFuncs`], [`FilteredHandler`] | what is called for each change |
//! | [`WorkQueue`] | keys for workers, once each, with delays and retries |
//! | [`FakeListWatch`] | a server in memory, for tests |
//!
//! An informer with an index and a handler. With [`Client::connect`] and [`ListWatch::new`] in
//! place of the fake server it reads from kubefan, and nothing else changes:
//!
//! ```
//! use kubefan_client::{FakeListWatch, SharedInformer};
//! use serde::Deserialize;
//!
//! /// Only the fields that the program reads.
//! #[derive(Deserialize)]
//! struct Pod {
//!     spec: Spec,
//! }
//!
//! #[derive(Deserialize)]
//! struct Spec {
//!     #[serde(default, rename = "nodeName")]
//!     node: String,
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let server = FakeListWatch::new();
//! server.put("default/web", r#"{"spec":{"nodeName":"n1"}}"#);
//!
//! let pods = SharedInformer::<Pod>::new(server.clone());
//! pods.on_error(|error| eprintln!("{error}"));
//! pods.indexer().add_index("node", |pod| [pod.spec.node.clone()])?;
//! pods.add_event_handler(pods.handler().on_add(|pod, _| println!("{} is on {}", pod.key(), pod.spec.node)))?;
//!
//! let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
//! let running = pods.spawn(stopped)?;
//!
//! pods.synced().await?;
//! assert_eq!(pods.indexer().by_index("node", "n1")?[0].name(), "web");
//!
//! let version = server.put("default/db", r#"{"spec":{"nodeName":"n1"}}"#);
//! pods.wait_until(&version.to_string(), std::time::Duration::from_secs(5)).await?;
//! assert_eq!(pods.lister().namespace("default").list().len(), 2);
//!
//! drop(stop);
//! running.await??;
//! # Ok(()) }
//! ```
//!
//! An object is an [`Object<K>`], which dereferences to `K` and carries its key, uid and resource
//! version. `K` is any type that serde can deserialize, `serde_json::Value`, or [`RawJson`] for the
//! least memory.
//!
//! # Features
//! Without features the library speaks kubefan's gRPC.
//!
//! | feature | adds |
//! |---|---|
//! | `http` | lists and watches over HTTP, from a kubefan or an apiserver |
//! | `kubeconfig` | connections as a kubeconfig describes them |
//! | `kube-runtime` | events of kube-rs, for its `reflector()` and `Controller` |
//! | `prometheus` | metrics of informers |
//! | `clap` | the enums as values of command-line flags |

mod authorities;
mod budget;
pub mod error;
mod fake;
mod fallback;
pub mod grpc;
#[cfg(feature = "http")]
pub mod http;
mod informer;
#[cfg(feature = "kube-runtime")]
pub mod kube;
mod list_watch;
mod lister_watcher;
#[cfg(feature = "prometheus")]
mod metrics;
mod namespaces;
mod object;
mod panics;
mod queue;
mod random;
mod reflector;
mod stats;
mod store;
mod streams;
mod token;
mod version;

pub use budget::FallbackBudget;
pub use error::{ApiStatus, ApiStatusCause, ClientError, ServerStatus};
pub use fake::{FakeListWatch, FakeRequest};
pub use fallback::{ApiserverStarts, BudgetedOptions, Fallback, PacedOptions, WithFallback};
pub use grpc::{
    Client, ClientCertificate, ClientOptions, GrpcListWatch, IN_CLUSTER_ADDRESS, ObjectList, OnExpired, OnLag, Parts,
    Projection, ReadOptions, Resolve, WatchItem, WatchOptions, WatchStream,
};
pub use informer::{
    Backlog, EventHandler, FilteredHandler, HandlerCall, HandlerEnd, HandlerFuncs, HandlerOptions, InformerBuilder,
    InformerError, Lister, NamespaceLister, Registration, SharedInformer, SharedInformerFactory, Subscription,
};
pub use list_watch::{Connection, CustomConnection, ListWatch};
pub use lister_watcher::{ListOptions, ListPage, ListerWatcher, WatchEvent, WatchEventKind, WatchEvents};
#[cfg(feature = "prometheus")]
pub use metrics::InformerMetrics;
pub use namespaces::Namespaces;
pub use object::{Decode, Object, ObjectKey, ProtobufMessage, RawJson, RawObject, RawProtobuf};
pub use queue::{
    BucketRateLimiter, Delta, DeltaFifo, ItemExponentialFailureRateLimiter, KnownObjects, MaxOfRateLimiter,
    RateLimiter, RealFifo, WorkItem, WorkQueue,
};
pub use reflector::{Observers, Reflector, ReflectorError, Transform, TransformError};
pub use stats::{ErrorCounts, EventCounts, InformerStats};
pub use store::{
    Change, Deleted, DeletedFinalStateUnknown, ExpirationCache, IndexError, Indexer, Replacement, Snapshot, Store,
    TimestampedEntry, UndeltaStore,
};
pub use streams::{InformerEvent, Watcher, changed_only, objects, reflect, watcher, watcher_with};

pub use kubefan_common::proto::v1alpha1::{
    Event, EventType, GetFreshnessResponse, ResolvedResource, ResourceStatus, Target,
};
pub use kubefan_common::{
    backoff::BackoffOptions,
    encoding::Encoding,
    reasons::{ErrorReason, GapReason},
};

/// The examples of the README are compiled as tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
