//! Wake-ups that carry no data: a view wakes its subscriptions, and a connection learns which of
//! its streams have something to send.
//!
//! Two hazards. A lost wake-up is a stream that hangs. A wake-up per delivery is a system call per
//! delivery: with a thousand streams on a connection, an event for all of them must wake the
//! connection once. So a stream waker only marks its stream as ready on the connection waker, which
//! wakes the connection's task only when the first stream becomes ready.
//!
//! A stream waker is armed by the subscription that found nothing, under the lock of the view's
//! log, and wakes once for each time that it was armed: a subscription that has not looked yet is
//! not woken again. A channel per subscription would cost memory and an allocation per event, and
//! would carry data that the log has already.

use std::{
    iter::Sum,
    sync::{Arc, PoisonError, atomic::Ordering},
    task::Waker,
};

use futures::task::AtomicWaker;
use kubefan_common::when_planted;
use smallvec::SmallVec;

use crate::sync::{AtomicBool, Mutex};

/// Streams of one connection that are ready. Most connections have one stream; then this needs no
/// allocation.
pub type ReadyStreams = SmallVec<[u32; 4]>;

/// Wakes the task of one connection, which may have many streams.
#[derive(Default)]
pub struct ConnectionWaker {
    waker: AtomicWaker,
    ready: Mutex<ReadyStreams>,
}

impl ConnectionWaker {
    /// A waker without a task.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Sets the task to wake. Must come before [`Self::take_ready`], so that no wake-up is lost
    /// between the two.
    pub fn register(&self, waker: &Waker) {
        self.waker.register(waker);
    }

    /// Moves the streams that are ready to `into`.
    pub fn take_ready(&self, into: &mut ReadyStreams) {
        into.append(&mut self.ready.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Wakes the task for a reason of its own.
    pub fn wake(&self) {
        self.waker.wake();
    }

    /// Marks a stream ready. Returns true if no other stream was.
    pub fn mark_ready(&self, stream: u32) -> bool {
        when_planted!(WokenBeforeReady => return { self.waker.wake(); self.ready.lock().map(|mut ready| ready.push(stream)).is_ok() });
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        ready.push(stream);
        let is_first = ready.len() == 1;
        drop(ready);
        // The task takes all ready streams together: a second wake-up would find nothing.
        if is_first {
            self.waker.wake();
        }
        is_first
    }
}

/// Numbers of woken connections and streams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Woken {
    /// Connections without a ready stream before.
    pub connections: usize,
    /// Streams that are ready now.
    pub streams: usize,
}

impl Sum for Woken {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |sum, one| Self {
            connections: sum.connections + one.connections,
            streams: sum.streams + one.streams,
        })
    }
}

/// Wakes one stream of a connection on request.
pub struct OfStream {
    connection: Arc<ConnectionWaker>,
    stream: u32,
}

impl OfStream {
    /// Marks the stream ready. Returns true if no other stream of its connection was.
    pub fn wake(&self) -> bool {
        self.connection.mark_ready(self.stream)
    }
}

/// Wakes one stream of a connection.
pub struct StreamWaker {
    is_armed: AtomicBool,
    connection: Arc<ConnectionWaker>,
    stream: u32,
}

impl StreamWaker {
    /// A waker of the stream with this number. It is not armed.
    pub fn new(connection: &Arc<ConnectionWaker>, stream: u32) -> Self {
        Self { is_armed: AtomicBool::new(false), connection: connection.clone(), stream }
    }

    /// A waker of the same stream that is always armed.
    pub fn of_stream(&self) -> OfStream {
        OfStream { connection: self.connection.clone(), stream: self.stream }
    }

    /// The waker of its connection.
    pub fn connection(&self) -> &Arc<ConnectionWaker> {
        &self.connection
    }

    /// Makes the next [`Self::wake`] effective.
    pub(crate) fn arm(&self) {
        self.is_armed.store(true, Ordering::SeqCst);
    }

    /// Whether it was armed and has not woken since.
    pub(crate) fn is_armed(&self) -> bool {
        self.is_armed.load(Ordering::SeqCst)
    }

    /// Wakes if it is armed.
    pub(crate) fn wake(&self) -> Woken {
        if !self.disarm() {
            return Woken::default();
        }
        let connections = usize::from(self.connection.mark_ready(self.stream));
        when_planted!(DisarmedAfterTheWakeUp => self.disarm());
        Woken { connections, streams: 1 }
    }

    /// Disarms it. Returns whether it was armed.
    fn disarm(&self) -> bool {
        when_planted!(WokenTwice => return self.is_armed() | self.is_armed.swap(false, Ordering::SeqCst));
        self.is_armed.swap(false, Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::AtomicUsize,
        task::{Wake, Waker},
    };

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_connection_is_woken_once_for_all_its_streams() {
        let connection = ConnectionWaker::new();
        let count = Arc::new(Count::default());
        connection.register(&Waker::from(count.clone()));
        let wakers = [3, 5, 7].map(|stream| StreamWaker::new(&connection, stream));
        assert_eq!(wakers[0].wake(), Woken::default(), "not armed");
        for waker in &wakers {
            waker.arm();
        }
        let woken: Woken = [0, 2, 0].iter().map(|waker: &usize| wakers[*waker].wake()).sum();
        assert_eq!(woken, Woken { connections: 1, streams: 2 });
        let mut ready = ReadyStreams::new();
        connection.take_ready(&mut ready);
        assert_eq!((ready.to_vec(), count.0.load(Ordering::SeqCst)), (vec![3, 7], 1));
    }
}
