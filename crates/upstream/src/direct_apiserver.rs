//! The apiserver behind a kubefan, to read while the kubefan is away.
//!
//! It is read only if it shows the cluster of the kubefan, and is not a kubefan itself. That is
//! asked anew in each outage, because an address may lead to another cluster by then.

use super::{client::Upstream, fallback::Fallback};

/// The apiserver in place of a kubefan that is away. A clone is cheap.
#[derive(Clone)]
pub struct DirectApiserver {
    fallback: Fallback,
    upstream: Upstream,
}

impl DirectApiserver {
    /// Returns the server of `upstream`, in place of the kubefan of `fallback`.
    pub fn new(fallback: Fallback, upstream: Upstream) -> Self {
        Self { fallback, upstream }
    }

    pub(super) fn fallback(&self) -> &Fallback {
        &self.fallback
    }

    pub(super) fn upstream(&self) -> &Upstream {
        &self.upstream
    }

    /// Whether the kubefan is away, and the apiserver may be read. Asks it if it was not asked yet
    /// in this outage.
    pub(super) async fn becomes_usable(&self) -> bool {
        self.fallback.is_usable() || self.fallback.is_away() && self.may_be_read().await
    }

    /// Whether the apiserver shows the cluster of the kubefan, and is no kubefan.
    pub(super) async fn may_be_read(&self) -> bool {
        let server = self.upstream.server();
        let epoch = self.fallback.epoch();
        let obstacle = match self.upstream.confirm().await {
            Err(error) => Some(error.to_string()),
            Ok(()) if self.upstream.is_kubefan() => Some(format!("the server at {server} is a kubefan, too")),
            Ok(()) if self.upstream.cluster().is_none() => {
                Some(format!("{server} does not show the uid of the namespace kube-system"))
            }
            Ok(()) => None,
        };
        let may_be_read = obstacle.is_none();
        self.fallback.checked(epoch, obstacle);
        may_be_read
    }
}

#[cfg(test)]
mod tests;
