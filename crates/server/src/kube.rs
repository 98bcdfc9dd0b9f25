//! The Kubernetes API over HTTP: lists, gets and watches of cached resources, with the apiserver's
//! semantics and bytes. Everything else is forwarded to the apiserver (passthrough).
//!
//! The problem: clients of the Kubernetes API rely on details, from the order of validation errors
//! to the sorting of `Accept` clauses. An answer that is almost the apiserver's is worse than none.
//!
//! The choice: a request is answered from the cache only if it is understood completely and the
//! answer is provably correct. It answers `GET` requests for a collection or an object, as list,
//! get, watch or watch-list, over HTTP or a websocket, if
//!
//! - the path, the query and the `Accept` header are ones that this code reads exactly as the
//!   apiserver does,
//! - the resource is cached in the encoding asked for (with passthrough, only a watch or the list
//!   that informers send before it starts the first cache of a resource; any read starts another
//!   encoding of a resource that is cached as JSON; without passthrough any read starts a cache),
//! - the cache covers the request although it may be narrowed by `--upstream-field-selector`, and
//! - the cache is as fresh as `resourceVersion` and `resourceVersionMatch` demand: any state, a
//!   reached version, the exact version of the cached snapshot, or a freshness proof for a
//!   consistent read.
//!
//! In all other cases but one the apiserver answers in its own words: for discovery, subresources,
//! writes and unusual spellings, for an invalid query, for an expired continue token. A
//! [`read_error::ReadError`] says which failures are final and which are upstream's to answer. Only
//! with a profile that forwards nothing does kubefan itself send the latter. The exception is a
//! list or watch that uses a part of [`feature_gates`]: the apiserver might ignore that part, so
//! the request is never forwarded.
//!
//! Why not validate everything here and skip the apiserver for errors: the rules differ between its
//! versions, and a wrong refusal is as bad as a wrong answer.
//!
//! [`api`] puts the parts together. It decides the mode of a request and the [`fallback`] of a
//! cache, [`route`] decides how a read in the mode `Cache` is answered, and [`read_loop`] fetches
//! the facts for that decision. [`guard`] and [`forward`] guard against the two hazards of
//! taking the apiserver's place: browsers that reach a loopback address, and callers that would act
//! with kubefan's credentials.

mod acting_as;
pub mod allowed_hosts;
pub mod answer;
pub mod api;
pub mod audited;
pub mod cache_facts;
pub mod cache_reads;
pub mod content_coding;
pub mod cross_origin;
mod end_on_mode_change;
pub mod error_type;
pub mod fallback;
pub mod feature_gates;
pub mod forward;
mod forwarded_caller;
pub mod found_cache;
mod get;
pub mod guard;
mod gzip_list;
mod header_values;
mod hop_by_hop;
pub mod host;
pub mod http_read;
mod kept_bodies;
pub mod kube_upstream;
pub mod list;
pub mod negotiate;
pub mod options;
pub mod pages;
mod passed_on;
pub mod path;
pub mod query;
pub mod read_error;
pub mod read_loop;
mod request_body;
pub mod request_info;
pub mod route;
mod selector_coverage;
pub mod status;
pub mod tunnel;
pub mod watch;
pub mod websocket;
