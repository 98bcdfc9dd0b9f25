//! The open connections of the data port, the watches on each, and the requests to connections to
//! end: at a drain, at their greatest age, and when other replicas have fewer watches.
//!
//! The hazard is a crowd. Watches that end together come back together, and each asks another
//! replica for a connection, a TLS handshake, the review of its caller and a resume. So at a drain
//! the watches end evenly over a span of time, each connection in its turn; and connections that
//! opened together end at different ages.

use std::{
    collections::BTreeMap,
    future::poll_fn,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures::future::BoxFuture;
use kubefan_cache::StreamEnd;
use kubefan_common::spread::spread;
use kubefan_telemetry::metrics::ConnectionEnd;
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

use super::limits::WATCH_AGE_MIN;
use crate::watch::Movable;

/// The least watches that end per second of a drain, so that a drain of few watches is short.
const DRAINED_PER_SECOND_MIN: f64 = 100.0;

/// The part of a connection's greatest age that ages vary by, to both sides.
const AGE_JITTER: f64 = 0.1;

/// Times after which connections end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EndingOptions {
    /// The longest time over which the watches end at a drain.
    pub drain_spread_max: Duration,
    /// Approximate greatest age of a connection; `None`: no limit.
    pub connection_age_max: Option<Duration>,
}

/// The reason why a connection is asked to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReason {
    /// kubefan is shutting down.
    Draining,
    /// The connection has reached its greatest age.
    Age,
    /// Other replicas have fewer watches.
    Rebalanced,
}

impl EndReason {
    /// Whether it ends a watch that can be moved like this. Another watch stays open.
    pub fn ends(self, movable: Movable) -> bool {
        match self {
            Self::Draining => true,
            // A watch over HTTP ends by its timeout.
            Self::Age => movable == Movable::Cheaply,
            Self::Rebalanced => movable != Movable::No,
        }
    }

    /// Returns the end of the connection's watches.
    pub fn stream_end(self) -> StreamEnd {
        match self {
            Self::Draining => StreamEnd::Draining,
            Self::Age => StreamEnd::Aged,
            Self::Rebalanced => StreamEnd::Rebalanced,
        }
    }

    /// Returns the end of the connection.
    pub fn connection_end(self) -> ConnectionEnd {
        match self {
            Self::Draining => ConnectionEnd::Draining,
            Self::Age => ConnectionEnd::Age,
            Self::Rebalanced => ConnectionEnd::Rebalanced,
        }
    }
}

/// A request to a connection to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndRequest {
    /// Reason of the end.
    pub reason: EndReason,
    /// Time at which the connection takes no more requests, and its first watch ends.
    pub at: Instant,
    /// The time over which its watches end.
    pub over: Duration,
}

impl EndRequest {
    fn at(reason: EndReason, at: Instant) -> Self {
        Self { reason, at, over: Duration::ZERO }
    }
}

/// The open connections of the data port.
#[derive(Debug)]
pub struct OpenConnections {
    options: EndingOptions,
    all: Mutex<Connections>,
    watches: AtomicUsize,
    /// Connections that have watches.
    clients: AtomicUsize,
}

#[derive(Debug, Default)]
struct Connections {
    by_number: BTreeMap<u64, Arc<ConnectionState>>,
    started: u64,
    is_draining: bool,
}

/// State that a connection and the other tasks share.
#[derive(Debug, Default)]
struct ConnectionState {
    /// Watches by [`Movable`].
    watches: [AtomicUsize; 3],
    all_watches: AtomicUsize,
    /// Start of the youngest watch over HTTP.
    youngest: Mutex<Option<Instant>>,
    /// The request to the connection to end.
    request: Mutex<Option<EndRequest>>,
    changed: Notify,
}

impl ConnectionState {
    fn all_watches(&self) -> usize {
        self.all_watches.load(Ordering::Relaxed)
    }

    fn count(&self, movable: Movable) -> usize {
        self.watches[movable as usize].load(Ordering::Relaxed)
    }

    /// Returns how many watches would move with the connection. `None` if it has none, or one that
    /// cannot move or not yet, or if it is asked to end already.
    fn movable_watches(&self, now: Instant) -> Option<usize> {
        let youngest = *self.youngest.lock().unwrap_or_else(PoisonError::into_inner);
        let is_too_young = youngest.is_some_and(|at| now < at + WATCH_AGE_MIN);
        let can_move = self.count(Movable::No) == 0 && self.request().is_none() && !is_too_young;
        Some(self.all_watches()).filter(|count| can_move && *count > 0)
    }

    fn request(&self) -> Option<EndRequest> {
        *self.request.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, request: EndRequest) {
        *self.request.lock().unwrap_or_else(PoisonError::into_inner) = Some(request);
        self.changed.notify_waiters();
    }
}

impl OpenConnections {
    /// No connections yet.
    pub fn new(options: EndingOptions) -> Arc<Self> {
        let watches = AtomicUsize::new(0);
        let clients = AtomicUsize::new(0);
        Arc::new(Self { options, all: Mutex::default(), watches, clients })
    }

    /// Adds a connection. After [`Self::drain`] it is asked to end at once.
    pub fn open(self: &Arc<Self>) -> OpenConnection {
        let state = Arc::new(ConnectionState::default());
        let now = Instant::now();
        let mut all = self.lock();
        all.started += 1;
        let number = all.started;
        all.by_number.insert(number, state.clone());
        if all.is_draining {
            state.ask(EndRequest::at(EndReason::Draining, now));
        }
        let jitter = AGE_JITTER * (2.0 * spread(number) - 1.0);
        let age_limit = self.options.connection_age_max.map(|age| age.mul_f64(1.0 + jitter));
        let age_limit_at = age_limit.and_then(|age| now.checked_add(age));
        OpenConnection(Arc::new(Registered { state, age_limit_at, number, all: self.clone() }))
    }

    /// Watches that are open, on all connections.
    pub fn watches(&self) -> usize {
        self.watches.load(Ordering::Relaxed)
    }

    /// Connections that have watches: about as many as there are clients.
    pub fn clients(&self) -> usize {
        self.clients.load(Ordering::Relaxed)
    }

    /// Asks connections to move their watches elsewhere, of about `watches` watches together: gRPC
    /// first. A connection moves as a whole, and none that has more watches than are left of
    /// `watches`, or a watch that cannot move. Returns the number of watches of each connection
    /// that was asked.
    pub fn rebalance(&self, watches: usize) -> Vec<usize> {
        let all = self.lock();
        let now = Instant::now();
        let mut movable: Vec<(bool, u64, usize, &ConnectionState)> = Vec::new();
        for (number, state) in &all.by_number {
            if let Some(count) = state.movable_watches(now) {
                movable.push((state.count(Movable::ByBookmark) > 0, *number, count, state));
            }
        }
        movable.sort_by(|a, b| a.0.cmp(&b.0).then(spread(a.1).total_cmp(&spread(b.1))));
        let mut asked = Vec::new();
        let mut left = watches;
        for (_, _, count, state) in movable {
            if count <= left {
                state.ask(EndRequest::at(EndReason::Rebalanced, now));
                asked.push(count);
                left -= count;
            }
        }
        asked
    }

    /// The fewest watches on a connection that can move; `None` if no connection can.
    pub fn least_movable(&self) -> Option<usize> {
        let now = Instant::now();
        self.lock().by_number.values().filter_map(|state| state.movable_watches(now)).min()
    }

    /// Ends all connections, also those that open later. Gives each its turn, in mixed order, so
    /// that watches end at an even rate.
    pub fn drain(&self) {
        let mut all = self.lock();
        let now = Instant::now();
        if std::mem::replace(&mut all.is_draining, true) {
            return;
        }
        let mut connections: Vec<_> = all.by_number.iter().collect();
        connections.sort_by(|a, b| spread(*a.0).total_cmp(&spread(*b.0)));
        let counts: Vec<usize> = connections.iter().map(|(_, state)| state.all_watches()).collect();
        let watches = counts.iter().sum::<usize>().max(1) as f64;
        let window = self.options.drain_spread_max.min(Duration::from_secs_f64(watches / DRAINED_PER_SECOND_MIN));
        let mut before = 0;
        for ((_, state), count) in connections.into_iter().zip(counts) {
            let part = |watches_of: usize| window.mul_f64(watches_of as f64 / watches);
            // A connection without watches keeps no one waiting.
            let at = if count == 0 { now } else { now + part(before) };
            state.ask(EndRequest { reason: EndReason::Draining, at, over: part(count) });
            before += count;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One open connection. It closes with its last copy.
#[derive(Debug, Clone)]
pub struct OpenConnection(Arc<Registered>);

#[derive(Debug)]
struct Registered {
    state: Arc<ConnectionState>,
    /// Time at which the connection reaches its greatest age.
    age_limit_at: Option<Instant>,
    number: u64,
    all: Arc<OpenConnections>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.all.lock().by_number.remove(&self.number);
    }
}

impl OpenConnection {
    /// Counts a watch until it is dropped.
    pub fn watch(&self, movable: Movable) -> CountedWatch {
        let Registered { state, all, .. } = &*self.0;
        state.watches[movable as usize].fetch_add(1, Ordering::Relaxed);
        if movable == Movable::ByBookmark {
            *state.youngest.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        if state.all_watches.fetch_add(1, Ordering::Relaxed) == 0 {
            all.clients.fetch_add(1, Ordering::Relaxed);
        }
        all.watches.fetch_add(1, Ordering::Relaxed);
        CountedWatch { connection: self.clone(), movable }
    }

    /// The requests to this connection to end, as they become due.
    pub fn end_requests(&self) -> EndRequests {
        EndRequests { connection: self.clone(), last: None, next: None }
    }

    /// Waits until a request to end is due, for another reason than `last`.
    async fn next_request(self, last: Option<EndReason>) -> EndRequest {
        let Registered { state, age_limit_at, .. } = &*self.0;
        let aged = age_limit_at.map(|at| EndRequest::at(EndReason::Age, at)).filter(|_| last.is_none());
        loop {
            // Before the look at the request: a request that is made in between is not missed.
            let changed = state.changed.notified();
            let asked = state.request().filter(|request| Some(request.reason) != last);
            tokio::select! {
                biased;
                request = due(asked.or(aged)) => return request,
                () = changed => {}
            }
        }
    }
}

async fn due(request: Option<EndRequest>) -> EndRequest {
    match request {
        Some(request) => {
            sleep_until(request.at).await;
            request
        }
        None => std::future::pending().await,
    }
}

/// A watch on a connection, while it is open.
#[derive(Debug)]
pub struct CountedWatch {
    connection: OpenConnection,
    movable: Movable,
}

impl Drop for CountedWatch {
    fn drop(&mut self) {
        let Registered { state, all, .. } = &*self.connection.0;
        state.watches[self.movable as usize].fetch_sub(1, Ordering::Relaxed);
        if state.all_watches.fetch_sub(1, Ordering::Relaxed) == 1 {
            all.clients.fetch_sub(1, Ordering::Relaxed);
        }
        all.watches.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The requests to one connection to end, each when it is due. A drain is the last one.
pub struct EndRequests {
    connection: OpenConnection,
    last: Option<EndReason>,
    next: Option<BoxFuture<'static, EndRequest>>,
}

impl EndRequests {
    /// Returns the next request. After a drain there is none.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<EndRequest> {
        if self.last == Some(EndReason::Draining) {
            return Poll::Pending;
        }
        let next = self.next.get_or_insert_with(|| Box::pin(self.connection.clone().next_request(self.last)));
        let request = std::task::ready!(next.as_mut().poll(cx));
        self.last = Some(request.reason);
        self.next = None;
        Poll::Ready(request)
    }

    /// As [`Self::poll_next`].
    pub async fn next(&mut self) -> EndRequest {
        poll_fn(|cx| self.poll_next(cx)).await
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{advance, timeout};

    use super::*;

    fn draining_over(seconds: u64) -> EndingOptions {
        EndingOptions { drain_spread_max: Duration::from_secs(seconds), ..EndingOptions::default() }
    }

    /// The end of each watch of a connection, in milliseconds after `start`.
    fn ends(request: EndRequest, watches: u32, start: Instant) -> impl Iterator<Item = u128> {
        (0..watches).map(move |k| (request.at + request.over * k / watches - start).as_millis())
    }

    #[tokio::test(start_paused = true)]
    async fn watches_end_evenly_over_a_drain_on_however_many_connections() {
        let all = OpenConnections::new(draining_over(6));
        let open: Vec<_> = [700u32, 1, 1, 98, 0, 200, 1000].map(|count| (all.open(), count)).into();
        let watches: Vec<_> =
            open.iter().flat_map(|(one, count)| (0..*count).map(|_| one.watch(Movable::Cheaply))).collect();
        assert_eq!((all.watches(), all.clients()), (2000, 6));
        let start = Instant::now();
        all.drain();
        let mut at = Vec::new();
        for (one, count) in &open {
            let request = one.end_requests().next().await;
            assert_eq!(request.reason, EndReason::Draining);
            at.extend(ends(request, *count, start));
        }
        at.sort_unstable();
        for second in 0..6u128 {
            let ended = at.iter().filter(|at| (second * 1000..(second + 1) * 1000).contains(at)).count();
            assert!((330..=337).contains(&ended), "{ended} in second {second}");
        }
        drop(open);
        drop(watches);
        assert_eq!((all.watches(), all.clients(), all.lock().by_number.len()), (0, 0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_of_few_watches_is_short_and_idle_connections_do_not_wait() {
        let all = OpenConnections::new(draining_over(600));
        let idle = all.open();
        let busy = all.open();
        let _watches: Vec<_> = (0..50).map(|_| busy.watch(Movable::No)).collect();
        let start = Instant::now();
        all.drain();
        let request = busy.end_requests().next().await;
        assert_eq!((request.at, request.over.as_millis()), (start, 500));
        assert_eq!(idle.end_requests().next().await.at, start);
        let late = all.open().end_requests().next().await;
        assert_eq!((late.reason, late.at), (EndReason::Draining, start), "one that is opened after the plan");
    }

    #[tokio::test(start_paused = true)]
    async fn connections_of_the_same_age_end_at_different_ages_and_a_drain_ends_an_old_one() {
        let connection_age_max = Some(Duration::from_secs(1000));
        let all = OpenConnections::new(EndingOptions { connection_age_max, ..EndingOptions::default() });
        let start = Instant::now();
        let open: Vec<_> = (0..100).map(|_| all.open()).collect();
        let mut ages: Vec<u64> = Vec::new();
        let mut requests: Vec<_> = open.iter().map(OpenConnection::end_requests).collect();
        for of_one in &mut requests {
            let request = of_one.next().await;
            assert_eq!(request.reason, EndReason::Age);
            ages.push((request.at - start).as_secs());
        }
        ages.sort_unstable();
        assert!(ages[0] >= 900 && ages[99] <= 1100, "{ages:?}");
        assert!(ages.windows(5).all(|five| five[4] > five[0] + 3), "{ages:?}");
        let again = timeout(Duration::from_secs(5000), requests[0].next()).await;
        assert!(again.is_err(), "it is asked once");
        all.drain();
        assert_eq!(requests[0].next().await.reason, EndReason::Draining);
        assert!(timeout(Duration::from_secs(5000), requests[0].next()).await.is_err());
    }

    #[test]
    fn a_watch_that_cannot_move_ends_only_at_a_drain_and_one_over_http_not_by_age() {
        let all = [Movable::Cheaply, Movable::ByBookmark, Movable::No];
        let ended_by = |reason: EndReason| all.map(|movable| reason.ends(movable));
        assert_eq!(ended_by(EndReason::Draining), [true, true, true]);
        assert_eq!(ended_by(EndReason::Rebalanced), [true, true, false]);
        assert_eq!(ended_by(EndReason::Age), [true, false, false]);
    }

    #[tokio::test(start_paused = true)]
    async fn watches_that_resume_from_memory_move_first_up_to_the_requested_number() {
        let all = OpenConnections::new(EndingOptions::default());
        let open: Vec<_> = (0..8).map(|_| all.open()).collect();
        let mut watches: Vec<_> = open[..3].iter().map(|one| one.watch(Movable::ByBookmark)).collect();
        watches.extend(open[3..6].iter().map(|one| one.watch(Movable::Cheaply)));
        watches.push(open[6].watch(Movable::No));
        watches.extend((0..50).map(|_| open[7].watch(Movable::Cheaply)));
        let asked = |all: &OpenConnections| {
            let numbers = (0..8).filter(|n| all.lock().by_number[&(n + 1)].request().is_some());
            numbers.collect::<Vec<u64>>()
        };
        advance(WATCH_AGE_MIN).await;
        assert_eq!((all.rebalance(0), all.least_movable()), (vec![], Some(1)));
        assert_eq!(all.rebalance(3), [1, 1, 1]);
        assert_eq!(asked(&all), [3, 4, 5]);
        assert_eq!(all.rebalance(40), [1, 1, 1], "not the connection of fifty");
        assert_eq!(asked(&all), [0, 1, 2, 3, 4, 5]);
        assert_eq!((all.rebalance(40), all.least_movable()), (vec![], Some(50)));
        assert_eq!(all.rebalance(50), [50]);
        assert_eq!((all.rebalance(1000), all.least_movable()), (vec![], None), "one cannot move");
        let request = open[0].end_requests().next().await;
        assert_eq!(request.reason, EndReason::Rebalanced);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_does_not_move_while_a_watch_over_http_is_new() {
        let all = OpenConnections::new(EndingOptions::default());
        let open = all.open();
        let _old = open.watch(Movable::ByBookmark);
        advance(WATCH_AGE_MIN).await;
        assert_eq!(all.least_movable(), Some(1));
        let _new = open.watch(Movable::ByBookmark);
        assert_eq!((all.least_movable(), all.rebalance(10)), (None, vec![]));
        advance(WATCH_AGE_MIN).await;
        let _of_grpc = open.watch(Movable::Cheaply);
        assert_eq!(all.rebalance(10), [3], "gRPC resumes from memory");
    }
}
