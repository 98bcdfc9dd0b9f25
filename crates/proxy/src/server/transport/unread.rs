//! Ends connections whose clients read nothing, when memory is short.
//!
//! A client that stops reading makes the kernel hold what was sent to it, up to some megabytes per
//! connection, and the connection holds what does not fit there. Live streams may wait like that
//! for as long as memory lasts. When it does not, these connections are what can be given up: their
//! clients notice nothing until they read again, and then resume.
//!
//! Every socket of the data port is observed here, below TLS and below each protocol: only the
//! socket shows that nothing was taken.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures::task::AtomicWaker;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

/// A connection may be ended if its socket took nothing for this long.
const UNREAD_MIN: Duration = Duration::from_secs(10);

/// The connections that are ended at a time: at least this many, or an eighth of those that may be.
/// Memory is measured again before the next.
const ENDED_MIN: usize = 16;

/// What can be closed without a wait for the client to take what was sent.
pub trait Reset {
    /// From now on closing discards what the client has not taken.
    fn reset_on_close(&self);
}

/// The sockets of one port.
#[derive(Debug)]
pub struct UnreadConnections {
    sockets: Mutex<Vec<Weak<Writes>>>,
    started_at: Instant,
}

/// What one socket shows of its client.
#[derive(Debug, Default)]
struct Writes {
    /// Since when the socket takes nothing: the milliseconds since the start, plus one. 0 while it
    /// does.
    blocked_since: AtomicU64,
    is_ended: AtomicBool,
    /// Of the task that waits for room.
    waker: AtomicWaker,
}

impl UnreadConnections {
    /// Without sockets yet.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { sockets: Mutex::default(), started_at: Instant::now() })
    }

    /// Observes a socket until it is dropped.
    pub fn observe<Io>(self: &Arc<Self>, io: Io) -> ObservedSocket<Io> {
        let writes = Arc::new(Writes::default());
        let mut sockets = self.lock();
        // Now and then, so that the work for each connection stays the same.
        if sockets.len() == sockets.capacity() {
            sockets.retain(|socket| socket.strong_count() > 0);
        }
        sockets.push(Arc::downgrade(&writes));
        ObservedSocket { io, writes, all: self.clone() }
    }

    /// Ends some of the connections whose sockets took nothing for ten seconds, the longest first.
    /// Returns how many.
    pub fn end_some(&self) -> usize {
        let latest = self.millis().saturating_sub(UNREAD_MIN.as_millis() as u64);
        let mut unread: Vec<(u64, Arc<Writes>)> = {
            let mut sockets = self.lock();
            sockets.retain(|socket| socket.strong_count() > 0);
            let since = |writes: Arc<Writes>| (writes.blocked_since.load(Ordering::Relaxed), writes);
            sockets.iter().filter_map(Weak::upgrade).map(since).collect()
        };
        unread.retain(|(since, writes)| (1..=latest).contains(since) && !writes.is_ended.load(Ordering::Relaxed));
        unread.sort_by_key(|(since, _)| *since);
        unread.truncate(ENDED_MIN.max(unread.len() / 8));
        for (_, writes) in &unread {
            writes.is_ended.store(true, Ordering::Release);
            writes.waker.wake();
        }
        unread.len()
    }

    fn millis(&self) -> u64 {
        self.started_at.elapsed().as_millis() as u64 + 1
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Writes>>> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A socket that fails when its connection is ended.
pub struct ObservedSocket<Io> {
    io: Io,
    writes: Arc<Writes>,
    all: Arc<UnreadConnections>,
}

impl<Io: Reset> ObservedSocket<Io> {
    fn written<T>(&self, written: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        let Writes { blocked_since, is_ended, waker } = &*self.writes;
        if written.is_ready() {
            if blocked_since.load(Ordering::Relaxed) != 0 {
                blocked_since.store(0, Ordering::Relaxed);
            }
            return written;
        }
        if blocked_since.load(Ordering::Relaxed) == 0 {
            blocked_since.store(self.all.millis(), Ordering::Relaxed);
        }
        // Before the look at the flag: who sets it in between wakes this task.
        waker.register(cx.waker());
        if !is_ended.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        self.io.reset_on_close();
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "nothing was read, and memory is short")))
    }
}

impl<Io: AsyncRead + Unpin> AsyncRead for ObservedSocket<Io> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl<Io: AsyncWrite + Reset + Unpin> AsyncWrite for ObservedSocket<Io> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.written(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, slices);
        self.written(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
        task::JoinHandle,
        time::sleep,
    };

    use super::*;

    impl Reset for DuplexStream {
        fn reset_on_close(&self) {}
    }

    /// A connection that sends without end, and its client.
    fn sender(all: &Arc<UnreadConnections>) -> (DuplexStream, JoinHandle<io::Error>) {
        let (near, far) = duplex(64);
        let mut socket = all.observe(near);
        let sending = async move {
            loop {
                if let Err(error) = socket.write_all(&[0; 64]).await {
                    return error;
                }
            }
        };
        (far, tokio::spawn(sending))
    }

    #[tokio::test(start_paused = true)]
    async fn only_connections_that_read_nothing_are_ended() {
        let all = UnreadConnections::new();
        let (_unread, unread_end) = sender(&all);
        let (mut slow, slow_end) = sender(&all);
        for _ in 0..20 {
            sleep(Duration::from_secs(1)).await;
            slow.read_exact(&mut [0; 8]).await.unwrap();
        }
        assert_eq!(all.end_some(), 1);
        assert_eq!(unread_end.await.unwrap().kind(), io::ErrorKind::TimedOut);
        assert!(!slow_end.is_finished());
        assert_eq!(all.end_some(), 0);
        sleep(UNREAD_MIN).await;
        sleep(UNREAD_MIN).await;
        assert_eq!(all.end_some(), 1, "it has stopped too");
        slow_end.await.unwrap();
        assert!(all.lock().iter().all(|socket| socket.strong_count() == 0));
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_read_nothing_for_the_longest_are_ended_first_and_some_at_a_time() {
        let all = UnreadConnections::new();
        let mut senders = Vec::new();
        for _ in 0..2 * ENDED_MIN {
            senders.push(sender(&all));
            sleep(Duration::from_secs(1)).await;
        }
        sleep(UNREAD_MIN).await;
        assert_eq!(all.end_some(), ENDED_MIN);
        tokio::task::yield_now().await;
        for (number, (_, end)) in senders.iter().enumerate() {
            assert_eq!(end.is_finished(), number < ENDED_MIN, "{number}");
        }
        assert_eq!(all.end_some(), ENDED_MIN);
    }

    #[tokio::test(start_paused = true)]
    async fn closed_connections_take_no_memory() {
        let all = UnreadConnections::new();
        for _ in 0..1000 {
            drop(all.observe(duplex(1).0));
        }
        assert!(all.lock().capacity() < 100);
    }
}
