//! The open connections of the data port, the streams on each, and how connections are asked to
//! end: at a drain, at their greatest age, and when other replicas have fewer streams.
//!
//! The hazard is a crowd. Streams that end together come back together, and each asks another
//! replica for a connection, a TLS handshake, the review of its caller and a resume. So at a drain
//! the streams end evenly over a span of time, each connection in its turn; and connections of the
//! same age end at different ages.

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
use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use crate::{fanout::StreamEnd, server::watch::Movable, telemetry::metrics::ConnectionEnd};

/// At least so many streams end per second of a drain, so that a drain of few streams is short.
const DRAINED_PER_SECOND_MIN: f64 = 100.0;

/// The part of a connection's greatest age by which ages differ, to both sides.
const AGE_JITTER: f64 = 0.1;

/// When connections end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EndingOptions {
    /// The longest time over which the streams end at a drain.
    pub drain_spread_max: Duration,
    /// About how old a connection gets; `None`: as old as its client likes.
    pub connection_age_max: Option<Duration>,
}

/// Why a connection is asked to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaveReason {
    /// kubefan is shutting down.
    Draining,
    /// It has reached its greatest age.
    Age,
    /// Other replicas have fewer streams.
    Rebalanced,
}

impl LeaveReason {
    /// How the streams of the connection end.
    pub fn stream_end(self) -> StreamEnd {
        match self {
            Self::Draining => StreamEnd::Draining,
            Self::Age => StreamEnd::Aged,
            Self::Rebalanced => StreamEnd::Rebalanced,
        }
    }

    /// How the connection ends.
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
pub struct Leave {
    /// Why.
    pub reason: LeaveReason,
    /// When it takes no more requests, and its first stream ends.
    pub at: Instant,
    /// The time over which its streams end.
    pub over: Duration,
}

impl Leave {
    fn at(reason: LeaveReason, at: Instant) -> Self {
        Self { reason, at, over: Duration::ZERO }
    }
}

/// The open connections of the data port.
#[derive(Debug)]
pub struct OpenConnections {
    options: EndingOptions,
    drain: CancellationToken,
    all: Mutex<All>,
    watches: AtomicUsize,
}

#[derive(Debug, Default)]
struct All {
    /// By number.
    connections: BTreeMap<u64, Arc<Shared>>,
    started: u64,
    is_drain_planned: bool,
}

/// What a connection and the others know of each other.
#[derive(Debug, Default)]
struct Shared {
    /// Streams by [`Movable`].
    streams: [AtomicUsize; 3],
    /// What the connection is asked to do.
    leave: Mutex<Option<Leave>>,
    changed: Notify,
}

impl Shared {
    fn all_streams(&self) -> usize {
        self.streams.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    fn count(&self, movable: Movable) -> usize {
        self.streams[movable as usize].load(Ordering::Relaxed)
    }

    fn leave(&self) -> Option<Leave> {
        *self.leave.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, leave: Leave) {
        *self.leave.lock().unwrap_or_else(PoisonError::into_inner) = Some(leave);
        self.changed.notify_waiters();
    }
}

/// The place of number `number` between 0 and 1. Multiples of the golden ratio are spread more
/// evenly than random numbers.
fn spread(number: u64) -> f64 {
    const GOLDEN_RATIO: f64 = 0.618_033_988_749_894_9;
    (number as f64 * GOLDEN_RATIO).fract()
}

impl OpenConnections {
    /// No connections yet. All that open end when `drain` is cancelled.
    pub fn new(options: EndingOptions, drain: CancellationToken) -> Arc<Self> {
        Arc::new(Self { options, drain, all: Mutex::default(), watches: AtomicUsize::new(0) })
    }

    /// Adds a connection.
    pub fn open(self: &Arc<Self>) -> OpenConnection {
        let shared = Arc::new(Shared::default());
        let mut all = self.lock();
        all.started += 1;
        let number = all.started;
        all.connections.insert(number, shared.clone());
        let jitter = AGE_JITTER * (2.0 * spread(number) - 1.0);
        let age = self.options.connection_age_max.map(|age| age.mul_f64(1.0 + jitter));
        let ages_at = age.and_then(|age| Instant::now().checked_add(age));
        OpenConnection(Arc::new(Registered { shared, ages_at, number, all: self.clone() }))
    }

    /// Watches that are open, on all connections.
    pub fn watches(&self) -> usize {
        self.watches.load(Ordering::Relaxed)
    }

    /// Asks connections to move their watches elsewhere, of about `streams` watches together: gRPC
    /// first. A connection moves as a whole, and none that has more watches than are left of
    /// `streams`, or a watch that cannot move. Returns how many watches were asked.
    pub fn rebalance(&self, streams: usize) -> usize {
        let (all, now) = (self.lock(), Instant::now());
        let mut movable: Vec<(bool, u64, &Arc<Shared>)> = Vec::new();
        for (number, shared) in &all.connections {
            let cannot = shared.count(Movable::No) > 0 || shared.leave().is_some();
            if !cannot && (1..=streams).contains(&shared.all_streams()) {
                movable.push((shared.count(Movable::ByBookmark) > 0, *number, shared));
            }
        }
        movable.sort_by(|a, b| a.0.cmp(&b.0).then(spread(a.1).total_cmp(&spread(b.1))));
        let mut asked = 0;
        for (_, _, shared) in movable {
            let count = shared.all_streams();
            if asked + count <= streams {
                shared.ask(Leave::at(LeaveReason::Rebalanced, now));
                asked += count;
            }
        }
        asked
    }

    /// The fewest watches on a connection that can move; `None` if no connection can.
    pub fn least_movable(&self) -> Option<usize> {
        let all = self.lock();
        let can = all.connections.values().filter(|one| one.count(Movable::No) == 0 && one.leave().is_none());
        can.map(|shared| shared.all_streams()).filter(|count| *count > 0).min()
    }

    /// Gives each connection its turn, in mixed order, so that streams end at an even rate.
    fn plan_drain(&self) {
        let (mut all, now) = (self.lock(), Instant::now());
        if std::mem::replace(&mut all.is_drain_planned, true) {
            return;
        }
        let mut connections: Vec<_> = all.connections.iter().collect();
        connections.sort_by(|a, b| spread(*a.0).total_cmp(&spread(*b.0)));
        let counts: Vec<usize> = connections.iter().map(|(_, shared)| shared.all_streams()).collect();
        let streams = counts.iter().sum::<usize>().max(1) as f64;
        let window = self.options.drain_spread_max.min(Duration::from_secs_f64(streams / DRAINED_PER_SECOND_MIN));
        let mut before = 0;
        for ((_, shared), count) in connections.into_iter().zip(counts) {
            let part = |streams_of: usize| window.mul_f64(streams_of as f64 / streams);
            // A connection without streams keeps no one waiting.
            let at = if count == 0 { now } else { now + part(before) };
            shared.ask(Leave { reason: LeaveReason::Draining, at, over: part(count) });
            before += count;
        }
    }

    fn lock(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One open connection. It closes with its last copy.
#[derive(Debug, Clone)]
pub struct OpenConnection(Arc<Registered>);

#[derive(Debug)]
struct Registered {
    shared: Arc<Shared>,
    ages_at: Option<Instant>,
    number: u64,
    all: Arc<OpenConnections>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.all.lock().connections.remove(&self.number);
    }
}

impl OpenConnection {
    /// Counts a watch until it is dropped.
    pub fn watch(&self, movable: Movable) -> CountedWatch {
        self.0.shared.streams[movable as usize].fetch_add(1, Ordering::Relaxed);
        self.0.all.watches.fetch_add(1, Ordering::Relaxed);
        CountedWatch { connection: self.clone(), movable }
    }

    /// The requests to this connection to end, as they become due.
    pub fn leaves(&self) -> Leaves {
        Leaves { connection: self.clone(), last: None, next: None }
    }

    /// Waits until it is asked to end for another reason than `last`.
    async fn next(self, last: Option<LeaveReason>) -> Leave {
        let Registered { shared, all, ages_at, .. } = &*self.0;
        let aged = ages_at.map(|at| Leave::at(LeaveReason::Age, at)).filter(|_| last.is_none());
        loop {
            // Before the look at the request: one that is made in between is not missed.
            let changed = shared.changed.notified();
            let asked = shared.leave().filter(|leave| Some(leave.reason) != last);
            let next = asked.or(aged);
            let is_draining = asked.is_some_and(|leave| leave.reason == LeaveReason::Draining);
            tokio::select! {
                biased;
                () = all.drain.cancelled(), if !is_draining => {
                    all.plan_drain();
                    // One that was opened after the plan has no turn.
                    if shared.leave().is_none_or(|leave| leave.reason != LeaveReason::Draining) {
                        shared.ask(Leave::at(LeaveReason::Draining, Instant::now()));
                    }
                }
                () = due(next) => if let Some(leave) = next { return leave },
                () = changed => {}
            }
        }
    }
}

async fn due(leave: Option<Leave>) {
    match leave {
        Some(leave) => sleep_until(leave.at).await,
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
        let Registered { shared, all, .. } = &*self.connection.0;
        shared.streams[self.movable as usize].fetch_sub(1, Ordering::Relaxed);
        all.watches.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The requests to one connection to end, each when it is due. The last one is that of a drain.
pub struct Leaves {
    connection: OpenConnection,
    last: Option<LeaveReason>,
    next: Option<BoxFuture<'static, Leave>>,
}

impl Leaves {
    /// The next request. After that of a drain there is none.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Leave> {
        if self.last == Some(LeaveReason::Draining) {
            return Poll::Pending;
        }
        let next = self.next.get_or_insert_with(|| Box::pin(self.connection.clone().next(self.last)));
        let leave = std::task::ready!(next.as_mut().poll(cx));
        (self.last, self.next) = (Some(leave.reason), None);
        Poll::Ready(leave)
    }

    /// As [`Self::poll_next`].
    pub async fn next(&mut self) -> Leave {
        poll_fn(|cx| self.poll_next(cx)).await
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    fn connections(options: EndingOptions) -> (Arc<OpenConnections>, CancellationToken) {
        let drain = CancellationToken::new();
        (OpenConnections::new(options, drain.clone()), drain)
    }

    fn draining_over(seconds: u64) -> EndingOptions {
        EndingOptions { drain_spread_max: Duration::from_secs(seconds), ..EndingOptions::default() }
    }

    /// The end of each stream of a connection, in milliseconds after `start`.
    fn ends(leave: Leave, streams: u32, start: Instant) -> impl Iterator<Item = u128> {
        (0..streams).map(move |k| (leave.at + leave.over * k / streams - start).as_millis())
    }

    #[tokio::test(start_paused = true)]
    async fn streams_end_evenly_over_a_drain_on_however_many_connections() {
        let (all, drain) = connections(draining_over(6));
        let open: Vec<_> = [700u32, 1, 1, 98, 0, 200, 1000].map(|count| (all.open(), count)).into();
        let watches: Vec<_> =
            open.iter().flat_map(|(one, count)| (0..*count).map(|_| one.watch(Movable::Cheaply))).collect();
        assert_eq!(all.watches(), 2000);
        let start = Instant::now();
        drain.cancel();
        let mut at = Vec::new();
        for (one, count) in &open {
            let leave = one.leaves().next().await;
            assert_eq!(leave.reason, LeaveReason::Draining);
            at.extend(ends(leave, *count, start));
        }
        at.sort_unstable();
        for second in 0..6u128 {
            let ended = at.iter().filter(|at| (second * 1000..(second + 1) * 1000).contains(at)).count();
            assert!((330..=337).contains(&ended), "{ended} in second {second}");
        }
        drop((open, watches));
        assert_eq!((all.watches(), all.lock().connections.len()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_of_few_streams_is_short_and_idle_connections_do_not_wait() {
        let (all, drain) = connections(draining_over(600));
        let (idle, busy) = (all.open(), all.open());
        let _watches: Vec<_> = (0..50).map(|_| busy.watch(Movable::No)).collect();
        let start = Instant::now();
        drain.cancel();
        let leave = busy.leaves().next().await;
        assert_eq!((leave.at, leave.over.as_millis()), (start, 500));
        assert_eq!(idle.leaves().next().await.at, start);
        let late = all.open().leaves().next().await;
        assert_eq!((late.reason, late.at), (LeaveReason::Draining, start), "one that is opened after the plan");
    }

    #[tokio::test(start_paused = true)]
    async fn connections_of_the_same_age_end_at_different_ages_and_a_drain_ends_an_old_one() {
        let connection_age_max = Some(Duration::from_secs(1000));
        let (all, drain) = connections(EndingOptions { connection_age_max, ..EndingOptions::default() });
        let start = Instant::now();
        let open: Vec<_> = (0..100).map(|_| all.open()).collect();
        let mut ages: Vec<u64> = Vec::new();
        let mut leaves: Vec<_> = open.iter().map(OpenConnection::leaves).collect();
        for leaves in &mut leaves {
            let leave = leaves.next().await;
            assert_eq!(leave.reason, LeaveReason::Age);
            ages.push((leave.at - start).as_secs());
        }
        ages.sort_unstable();
        assert!(ages[0] >= 900 && ages[99] <= 1100, "{ages:?}");
        assert!(ages.windows(5).all(|five| five[4] > five[0] + 3), "{ages:?}");
        let again = timeout(Duration::from_secs(5000), leaves[0].next()).await;
        assert!(again.is_err(), "it is asked once");
        drain.cancel();
        assert_eq!(leaves[0].next().await.reason, LeaveReason::Draining);
        assert!(timeout(Duration::from_secs(5000), leaves[0].next()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_resume_from_memory_move_first_and_no_more_than_were_asked_for() {
        let (all, _drain) = connections(EndingOptions::default());
        let open: Vec<_> = (0..8).map(|_| all.open()).collect();
        let mut watches: Vec<_> = open[..3].iter().map(|one| one.watch(Movable::ByBookmark)).collect();
        watches.extend(open[3..6].iter().map(|one| one.watch(Movable::Cheaply)));
        watches.push(open[6].watch(Movable::No));
        watches.extend((0..50).map(|_| open[7].watch(Movable::Cheaply)));
        let asked = |all: &OpenConnections| {
            let numbers = (0..8).filter(|n| all.lock().connections[&(n + 1)].leave().is_some());
            numbers.collect::<Vec<u64>>()
        };
        assert_eq!((all.rebalance(0), all.least_movable()), (0, Some(1)));
        assert_eq!(all.rebalance(3), 3);
        assert_eq!(asked(&all), [3, 4, 5]);
        assert_eq!(all.rebalance(40), 3, "not the connection of fifty");
        assert_eq!(asked(&all), [0, 1, 2, 3, 4, 5]);
        assert_eq!((all.rebalance(40), all.least_movable()), (0, Some(50)));
        assert_eq!(all.rebalance(50), 50);
        assert_eq!((all.rebalance(1000), all.least_movable()), (0, None), "one cannot move");
        let leave = open[0].leaves().next().await;
        assert_eq!(leave.reason, LeaveReason::Rebalanced);
    }
}
