//! The connections of forwarded requests, and the permits for their streams.
//!
//! kube-apiserver closes an HTTP/2 connection (GOAWAY) after a request of an anonymous caller or
//! with credentials that it does not accept. So callers whose token it has not accepted lately have
//! connections of their own, and only their requests have to be repeated then.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::transport::connection::REQUESTS_MAX;

/// The HTTP client for a request. Each has one connection over HTTP/2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// The client with this number, for callers whose token the apiserver has accepted.
    Accepted(usize),
    /// The client with this number, for all others.
    Unaccepted(usize),
    /// A separate connection, which can be upgraded to another protocol.
    Upgrade,
}

/// The stream permits of each shared connection. Requests beyond the server's limit would wait for
/// each other, and for watches that means hours.
pub(super) struct StreamPermits {
    accepted: Vec<Arc<Semaphore>>,
    unaccepted: Vec<Arc<Semaphore>>,
}

impl StreamPermits {
    /// The permits for this many concurrent requests, of either kind of caller.
    pub(super) fn new(requests_max: usize) -> Self {
        let permits = || (0..shared(requests_max)).map(|_| Arc::new(Semaphore::new(REQUESTS_MAX))).collect();
        Self { accepted: permits(), unaccepted: permits() }
    }

    /// Takes a permit on the first connection that has one. The later ones fall idle and close.
    pub(super) fn acquire(&self, is_accepted: bool, is_upgrade: bool) -> (Route, Option<OwnedSemaphorePermit>) {
        if is_upgrade {
            return (Route::Upgrade, None);
        }
        let (route, connections): (fn(usize) -> Route, _) =
            if is_accepted { (Route::Accepted, &self.accepted) } else { (Route::Unaccepted, &self.unaccepted) };
        let free = |permits: &Arc<Semaphore>| permits.clone().try_acquire_owned().ok();
        let free = connections.iter().enumerate().find_map(|(number, permits)| Some((number, free(permits)?)));
        // The connections together have enough permits. A search can miss one only if it was
        // released behind the search's position.
        free.map_or((route(0), None), |(number, permit)| (route(number), Some(permit)))
    }
}

/// The number of shared connections of either kind of caller.
pub(super) fn shared(requests_max: usize) -> usize {
    requests_max.div_ceil(REQUESTS_MAX)
}

/// The most connections to upstream that this many requests need. Up to `upgrades_max` of the
/// requests may be sessions, which have one connection each.
pub fn connections_max(requests_max: usize, upgrades_max: usize) -> usize {
    2 * shared(requests_max) + upgrades_max
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::connection::STREAMS_MAX;

    #[test]
    fn no_request_waits_for_a_stream_that_the_server_has_not_seen_end() {
        let streams = StreamPermits::new(STREAMS_MAX);
        let held: Vec<_> = (0..STREAMS_MAX).map(|_| streams.acquire(true, false)).collect();
        let of_first = held.iter().filter(|(route, _)| *route == Route::Accepted(0));
        assert!(of_first.count() < STREAMS_MAX, "the server may still count streams that have ended here");
        assert!(held.iter().all(|(_, permit)| permit.is_some()));
    }

    #[test]
    fn callers_without_an_accepted_token_have_connections_of_their_own() {
        let streams = StreamPermits::new(2 * REQUESTS_MAX);
        let full: Vec<_> = (0..REQUESTS_MAX).map(|_| streams.acquire(false, false)).collect();
        assert!(full.iter().all(|(route, permit)| *route == Route::Unaccepted(0) && permit.is_some()));
        assert_eq!(streams.acquire(false, false).0, Route::Unaccepted(1), "the first connection is full");
        assert_eq!(streams.acquire(true, false).0, Route::Accepted(0));
        assert_eq!(streams.acquire(true, true).0, Route::Upgrade);
        drop(full);
        assert_eq!(streams.acquire(false, false).0, Route::Unaccepted(0));
    }
}
