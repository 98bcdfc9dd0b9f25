//! The apiserver behind a kubefan, to read while the kubefan is away.
//!
//! It is read only if it shows the cluster of the kubefan, and is not a kubefan itself. That is
//! asked anew in each outage, because an address may lead to another cluster by then.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    client::{Upstream, identity::IdentityError},
    fallback::{Fallback, Obstacle},
};

/// The time for which a check counts in the same outage.
const CONFIRMED_FOR: Duration = Duration::from_secs(10);

/// The apiserver in place of a kubefan that is away. A clone is cheap.
#[derive(Clone)]
pub struct DirectApiserver {
    fallback: Fallback,
    upstream: Upstream,
    /// Time of the last check that found the right cluster.
    confirmed_at: Arc<Mutex<Option<Instant>>>,
}

impl DirectApiserver {
    /// Returns the server of `upstream`, in place of the kubefan of `fallback`.
    pub fn new(fallback: Fallback, upstream: Upstream) -> Self {
        Self { fallback, upstream, confirmed_at: Arc::default() }
    }

    fn lock_confirmed_at(&self) -> MutexGuard<'_, Option<Instant>> {
        self.confirmed_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn fallback(&self) -> &Fallback {
        &self.fallback
    }

    pub(super) fn upstream(&self) -> &Upstream {
        &self.upstream
    }

    /// Whether the kubefan is away, and the apiserver was found to be that behind it since.
    pub(super) fn is_usable(&self) -> bool {
        self.fallback.is_usable() && !self.upstream.is_doubted()
    }

    /// Whether the kubefan is away, and the apiserver may be read. Asks it if it was not asked yet
    /// in this outage.
    pub(super) async fn becomes_usable(&self) -> bool {
        self.is_usable() || self.fallback.is_away() && self.may_be_read().await
    }

    /// Whether the apiserver shows the cluster of the kubefan, and is no kubefan. Asks it, unless
    /// it was asked some seconds ago: a cache confirms the cluster again after its first answer.
    pub(super) async fn may_be_read(&self) -> bool {
        let epoch = self.fallback.epoch();
        if self.is_usable() && self.lock_confirmed_at().is_some_and(|at| at.elapsed() < CONFIRMED_FOR) {
            return true;
        }
        let checked = self.check().await;
        let may_be_read = checked.is_ok();
        *self.lock_confirmed_at() = may_be_read.then(Instant::now);
        self.fallback.checked(epoch, checked.err());
        may_be_read
    }

    async fn check(&self) -> Result<(), Obstacle> {
        let refused = |message| Obstacle { message, is_of_server: true };
        self.upstream.confirm().await.map_err(|error| Obstacle {
            is_of_server: !matches!(error, IdentityError::Unanswered(_)),
            message: error.to_string(),
        })?;
        let server = self.upstream.server();
        if self.upstream.is_kubefan() {
            return Err(refused(format!("the server at {server} is a kubefan, too")));
        }
        if self.upstream.cluster().is_none() {
            return Err(refused(format!("{server} does not show the uid of the namespace kube-system")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
