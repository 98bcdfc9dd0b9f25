//! The managed certificate: kubefan makes its own CA and its serving certificate, keeps both in a
//! Secret, renews them, and publishes the CA in ConfigMaps for its clients. A kubefan that serves
//! with the certificate but does not renew it gets a copy, a Secret of its own without the CA's
//! key.
//!
//! All replicas do the same, without a leader: each looks at the Secret again and again, decides on
//! the next step (`next_step`, without I/O), and writes with the version that it read. A conflict
//! means that another replica was first, and then this one looks again.
//!
//! Two hazards. A client must never meet a certificate whose CA it could not know: so a new CA is
//! published for a stated time before it signs anything, and the old one stays published until it
//! ends. No certificate that it signed outlives it. And the CA's key must not leave the Secret and
//! the memory of the replicas that renew: no text of this module has content of the Secret.
//!
//! Replicas prove themselves to each other with certificates of the same CA that are never stored:
//! each makes its own from the CA's key. A holder of the serving certificate alone has no such
//! certificate ([`PEER_NAME`]).

pub mod certificate_facts;
mod in_use;
mod issue;
mod keeper;
mod managed_options;
mod material;
mod renewal_plan;
mod stored_objects;

#[cfg(test)]
mod tests;

pub use in_use::{ManagedTls, PeerProof};
pub use issue::PEER_NAME;
pub use keeper::Keeper;
pub use managed_options::{Lifetimes, ManagedOptions, ObjectName, Stored, is_dns_label};
pub use material::Material;
pub use stored_objects::{LookError, look_once};
