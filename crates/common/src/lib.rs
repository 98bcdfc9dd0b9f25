//! Code that the client library, the proxy and the simulator share.

pub mod api_json;
pub mod api_status;
pub mod backoff;
mod choice;
pub mod discovery;
pub mod encoding;
#[cfg(feature = "kubeconfig")]
pub mod kubeconfig;
pub mod names;
#[doc(hidden)]
pub mod planted;
pub mod proto;
#[rustfmt::skip]
#[path = "generated/reasons.rs"]
pub mod reasons;
pub mod query;
pub mod spread;
pub mod sync;
pub mod text;
pub mod tls;
pub mod token_file;
pub mod visible;
pub mod watch_body;
