//! The two wakers of a connection's task.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Wake,
};

use kubefan_fanout::ConnectionWaker;

/// The waker for h2 and the socket. The task mutes it while it hands data to h2 itself.
pub struct IoWaker {
    connection_waker: Arc<ConnectionWaker>,
    muted: AtomicBool,
}

impl IoWaker {
    /// A waker for the task that is registered with `connection_waker`.
    pub fn new(connection_waker: Arc<ConnectionWaker>) -> Arc<Self> {
        Arc::new(Self { connection_waker, muted: AtomicBool::new(false) })
    }

    /// Mutes or unmutes the waker.
    pub fn set_muted(&self, muted: bool) {
        self.muted.store(muted, Ordering::SeqCst);
    }
}

impl Wake for IoWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // A wake-up from another thread while muted is not lost: the task polls h2 after it has
        // unmuted the waker.
        if !self.muted.load(Ordering::SeqCst) {
            self.connection_waker.wake();
        }
    }
}

/// The waker for the timer and the requests to end. An ordinary pass does not touch their memory;
/// with a thousand connections that saves a good part of the cost of a pass.
pub struct TimerWaker {
    connection_waker: Arc<ConnectionWaker>,
    woken: AtomicBool,
}

impl TimerWaker {
    /// A waker for the task that is registered with `connection_waker`. It starts as woken, so that
    /// the first pass polls the timer.
    pub fn new(connection_waker: Arc<ConnectionWaker>) -> Arc<Self> {
        Arc::new(Self { connection_waker, woken: AtomicBool::new(true) })
    }

    /// Marks the timer as changed, so that the next pass polls it.
    pub fn mark(&self) {
        self.woken.store(true, Ordering::SeqCst);
    }

    /// Whether the timer must be polled; resets that.
    pub fn take(&self) -> bool {
        self.woken.swap(false, Ordering::SeqCst)
    }
}

impl Wake for TimerWaker {
    fn wake(self: Arc<Self>) {
        self.mark();
        self.connection_waker.wake();
    }
}
