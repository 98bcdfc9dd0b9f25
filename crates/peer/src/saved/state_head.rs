//! The head of a file: the facts about a cache that a transfer does not have, because a receiver
//! asks the apiserver for them.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};

/// The servers of a cache. A state is served without the apiserver only if they are the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Endpoint {
    /// Scheme, host and port of the apiserver.
    pub apiserver: String,
    /// The fingerprints of the CAs that its certificate is verified against. Empty if the system's
    /// CAs are used.
    pub ca: Vec<String>,
    /// The address of lists and watches.
    pub source: String,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { apiserver, ca, source } = self;
        let ca = if ca.is_empty() { "no CA of its own".to_owned() } else { format!("the CA {}", ca.join(", ")) };
        write!(f, "{apiserver} with {ca}, listed at {source}")
    }
}

/// The head of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StateHead {
    /// The servers of the cache.
    pub endpoint: Endpoint,
    /// The uid of the namespace kube-system, if it could be read.
    pub cluster_uid: Option<String>,
    /// The name of the resource in the configuration.
    pub name: String,
    /// The kind of its objects.
    pub kind: String,
    /// The kind of its lists.
    pub list_kind: String,
    /// Whether it has namespaces.
    pub namespaced: bool,
    /// The `selectableFields` of a custom resource.
    pub selectable_fields: Vec<String>,
    /// The version of the apiserver.
    pub server_version: String,
    /// The hash of the schema.
    pub schema_hash: String,
    /// Time of the file, in milliseconds since 1970.
    pub saved_at_millis: u64,
    /// Time of the last proof, in milliseconds since 1970. `None` if there was none.
    pub proven_at_millis: Option<u64>,
}

impl StateHead {
    /// Returns the age of the last proof. `None` if it is unknown: without a proof, and if the
    /// clock is behind it.
    pub fn age(&self, now: SystemTime) -> Option<Duration> {
        elapsed_since(self.proven_at_millis?, now)
    }

    /// Returns the time since the file was written. `None` if the clock is behind it.
    pub fn elapsed(&self, now: SystemTime) -> Option<Duration> {
        elapsed_since(self.saved_at_millis, now)
    }
}

fn elapsed_since(millis: u64, now: SystemTime) -> Option<Duration> {
    now.duration_since(SystemTime::UNIX_EPOCH).ok()?.checked_sub(Duration::from_millis(millis))
}
