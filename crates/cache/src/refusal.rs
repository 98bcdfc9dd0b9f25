//! Every reason to refuse a request. Logs, metrics and status codes share these names.

use std::time::Duration;

use kubefan_model::ResourceVersion;

use super::ring::Expired;

/// The reason why a subscription or a read cannot be served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The first list is not complete.
    #[error("{resource} is not synced: {message}")]
    NotSynced {
        /// The resource.
        resource: String,
        /// The current step, or the last error upstream.
        message: String,
    },
    /// The first list fails, and upstream says why.
    #[error("{resource} is not synced: {cause}")]
    Failing {
        /// The resource.
        resource: String,
        /// The message of upstream.
        cause: String,
    },
    /// The last proof of the state is too old.
    #[error(
        "the state of {resource} was {}, and --max-staleness is {staleness_max:?}{}",
        proved(.age), because(.message)
    )]
    Stale {
        /// The resource.
        resource: String,
        /// The age of the last proof; `None` if there was none.
        age: Option<Duration>,
        /// The allowed age.
        staleness_max: Duration,
        /// The last error upstream; may be empty.
        message: String,
    },
    /// The apiserver does not serve the resource.
    #[error("{0}")]
    NotFound(String),
    /// The apiserver denies kubefan the resource.
    #[error("{0}")]
    Forbidden(String),
    /// kubefan does not know who the caller is.
    #[error("{0}")]
    Unauthenticated(String),
    /// The caller may not read this.
    #[error("{0}")]
    Denied(String),
    /// The events after the version are no longer retained.
    #[error(transparent)]
    Expired(#[from] Expired),
    /// The version is of another history: from before etcd was restored, or of another cluster.
    #[error("{0}; start over with a snapshot")]
    Rewritten(String),
    /// This cache has not reached the version.
    #[error("too large resource version: {}, current: {}", requested.whole(), current.whole())]
    Future {
        /// The requested version.
        requested: ResourceVersion,
        /// The version of the cache.
        current: ResourceVersion,
    },
    /// The request is wrong.
    #[error("{message}")]
    Invalid {
        /// The field at fault, as a path in the request message.
        field: &'static str,
        /// The mistake, and the right form.
        message: String,
    },
    /// kubefan is not configured to cache this.
    #[error("{0}")]
    NotCached(String),
    /// The objects of this resource are not cached in this encoding, with any configuration.
    #[error("{0}")]
    NotEncoded(String),
    /// A limit is reached.
    #[error("{0}")]
    Exhausted(String),
    /// Upstream was read so often for readers of this resource that the next read has to wait.
    /// Upstream can answer instead.
    #[error("{message}")]
    RateLimited {
        /// The request that has to wait, and the reason.
        message: String,
        /// The delay.
        retry_after: Duration,
    },
    /// A limit of the caches that readers start is reached. Upstream can answer instead.
    #[error("{0}")]
    NoRoom(String),
    /// Upstream could not be asked.
    #[error("{0}")]
    Unavailable(String),
    /// The operator lets the apiserver answer.
    #[error("{0}")]
    Switched(String),
    /// kubefan is shutting down.
    #[error("kubefan is shutting down; try again, another replica may answer")]
    Draining,
}

fn proved(age: &Option<Duration>) -> String {
    match age {
        Some(age) => format!("last proved by the apiserver {}s ago", age.as_secs()),
        None => "not proved by the apiserver yet".to_owned(),
    }
}

fn because(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}
