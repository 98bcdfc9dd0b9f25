//! Wake-ups that carry no data: a view rings the bells of its subscriptions, and a connection learns which of its streams have
//! something to send.
//!
//! A connection is woken once, however many of its streams have something. A bell rings once for each time that it was armed: who
//! has not looked yet is not told again.

use std::{
    iter::Sum,
    sync::{Arc, PoisonError, atomic::Ordering},
    task::Waker,
};

use futures::task::AtomicWaker;
use smallvec::SmallVec;

use crate::fanout::sync::{AtomicBool, Mutex};
use kubefan_common::planted::{self, Bug};

/// Streams of one connection. Most have one, for which this needs no memory of its own.
pub type ReadyStreams = SmallVec<[u32; 4]>;

/// What one connection listens on.
#[derive(Default)]
pub struct ConnectionWaker {
    waker: AtomicWaker,
    rung: Mutex<ReadyStreams>,
}

impl ConnectionWaker {
    /// A line that nobody listens on yet.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Who is woken. Comes before [`Self::rung`], so that no ring is missed between the two.
    pub fn register(&self, waker: &Waker) {
        self.waker.register(waker);
    }

    /// Moves the streams whose bells rang to `into`.
    pub fn take_ready(&self, into: &mut ReadyStreams) {
        into.append(&mut self.rung.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Wakes who listens, for a reason of its own.
    pub fn wake(&self) {
        self.waker.wake();
    }

    /// Says that there is something to see to on a stream; tells whether that is the first of them.
    pub fn ring(&self, stream: u32) -> bool {
        if planted::is(Bug::WokenBeforeTheRing) {
            self.waker.wake();
        }
        let mut rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        rung.push(stream);
        // Whoever takes the first takes all: a second wake-up would find nothing.
        let first = rung.len() == 1;
        drop(rung);
        if first && !planted::is(Bug::WokenBeforeTheRing) {
            self.waker.wake();
        }
        first
    }
}

/// Who was woken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Woken {
    /// Connections that had nothing to see to before.
    pub connections: usize,
    /// Streams that have something now.
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

/// One subscription's place on its connection's line.
pub struct StreamWaker {
    armed: AtomicBool,
    line: Arc<ConnectionWaker>,
    stream: u32,
}

impl StreamWaker {
    /// A bell on `line` for its stream of this number. It is not armed.
    pub fn new(line: &Arc<ConnectionWaker>, stream: u32) -> Self {
        Self { armed: AtomicBool::new(false), line: line.clone(), stream }
    }

    /// The line it is on.
    pub fn line(&self) -> &Arc<ConnectionWaker> {
        &self.line
    }

    /// From here it rings when there is something.
    pub(in crate::fanout) fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }

    /// Whether it will ring: nobody rang since it was armed.
    pub(in crate::fanout) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::SeqCst)
    }

    /// Rings if it was armed.
    pub(in crate::fanout) fn ring(&self) -> Woken {
        if planted::is(Bug::DisarmedAfterTheRing) && self.is_armed() {
            let connections = usize::from(self.line.ring(self.stream));
            self.armed.store(false, Ordering::SeqCst);
            return Woken { connections, streams: 1 };
        }
        let two_steps = planted::is(Bug::RingsTwice) && self.is_armed();
        if !self.armed.swap(false, Ordering::SeqCst) && !two_steps {
            return Woken::default();
        }
        Woken { connections: usize::from(self.line.ring(self.stream)), streams: 1 }
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
        let (line, count) = (ConnectionWaker::new(), Arc::new(Count::default()));
        line.register(&Waker::from(count.clone()));
        let bells = [3, 5, 7].map(|stream| StreamWaker::new(&line, stream));
        assert_eq!(bells[0].ring(), Woken::default(), "not armed");
        bells.iter().for_each(StreamWaker::arm);
        let woken: Woken = [0, 2, 0].iter().map(|bell: &usize| bells[*bell].ring()).sum();
        assert_eq!(woken, Woken { connections: 1, streams: 2 });
        let mut rung = ReadyStreams::new();
        line.take_ready(&mut rung);
        assert_eq!((rung.to_vec(), count.0.load(Ordering::SeqCst)), (vec![3, 7], 1));
    }
}
