//! Ends streams and sockets that clients do not read, when memory is short.
//!
//! A client that stops reading makes the kernel hold the bytes sent to it, up to some megabytes per
//! connection, and the connection holds the rest. Over HTTP/2 it may also leave a stream without a
//! window: then the stream, its segments and, if it is passed on, the bytes from upstream wait in
//! this process. Live streams may wait like that for as long as memory lasts. When it runs short,
//! these can be given up: their clients notice nothing until they read again, and then resume.
//!
//! Every socket of the data port is observed here, below TLS and below each protocol: only the
//! socket shows that nothing was taken. A stream is observed from its first wait for a window.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use futures::task::AtomicWaker;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

use kubefan_cache::StreamEnd;

/// A socket or stream that reads nothing for this long may be ended.
const UNREAD_MIN: Duration = Duration::from_secs(10);

/// Sockets and streams ended at a time: at least this many, or an eighth of those that may be.
/// Memory is measured again before the next.
const ENDED_MIN: usize = 16;

/// A socket that can be closed without a wait for the client to take the sent bytes.
pub trait Reset {
    /// From now on closing discards the bytes that the client has not taken.
    fn reset_on_close(&self);
}

/// The clients of one port: the readers of its sockets and its streams.
#[derive(Debug)]
pub struct Readers {
    all: Mutex<Vec<Weak<Progress>>>,
    started_at: Instant,
}

/// Read progress of one socket or stream.
#[derive(Debug, Default)]
struct Progress {
    /// Start of the time in which nothing is read, in milliseconds since the start, plus one. 0
    /// while the client reads.
    blocked_since: AtomicU64,
    is_ended: AtomicBool,
    /// Waker of the task that waits for room.
    waker: AtomicWaker,
}

/// The reader of one socket or stream.
#[derive(Debug)]
pub struct ObservedReader {
    progress: Arc<Progress>,
    readers: Arc<Readers>,
}

impl Readers {
    /// Without readers yet.
    pub fn new() -> Arc<Self> {
        Arc::new(Self { all: Mutex::default(), started_at: Instant::now() })
    }

    /// Observes a reader until it is dropped.
    pub fn observe(self: &Arc<Self>) -> ObservedReader {
        let progress = Arc::new(Progress::default());
        let mut all = self.lock();
        // Now and then, so that the work for each reader stays the same.
        if all.len() == all.capacity() {
            all.retain(|reader| reader.strong_count() > 0);
        }
        all.push(Arc::downgrade(&progress));
        ObservedReader { progress, readers: self.clone() }
    }

    /// Observes a socket until it is dropped.
    pub fn observe_socket<Io>(self: &Arc<Self>, io: Io) -> ObservedSocket<Io> {
        ObservedSocket { io, reader: self.observe() }
    }

    /// Ends some of the sockets and streams that have read nothing for ten seconds, the longest
    /// first. Returns how many.
    pub fn end_some(&self) -> usize {
        let latest = self.millis().saturating_sub(UNREAD_MIN.as_millis() as u64);
        let mut unread: Vec<(u64, Arc<Progress>)> = {
            let mut all = self.lock();
            all.retain(|reader| reader.strong_count() > 0);
            let since = |progress: Arc<Progress>| (progress.blocked_since.load(Ordering::Relaxed), progress);
            all.iter().filter_map(Weak::upgrade).map(since).collect()
        };
        unread.retain(|(since, progress)| (1..=latest).contains(since) && !progress.is_ended.load(Ordering::Relaxed));
        unread.sort_by_key(|(since, _)| *since);
        unread.truncate(ENDED_MIN.max(unread.len() / 8));
        for (_, progress) in &unread {
            progress.is_ended.store(true, Ordering::Release);
            progress.waker.wake();
        }
        unread.len()
    }

    fn millis(&self) -> u64 {
        self.started_at.elapsed().as_millis() as u64 + 1
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<Progress>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ObservedReader {
    /// Records that the client takes something, or that nothing waits for it.
    pub fn reads(&self) {
        let blocked_since = &self.progress.blocked_since;
        if blocked_since.load(Ordering::Relaxed) != 0 {
            blocked_since.store(0, Ordering::Relaxed);
        }
    }

    /// Records that something waits and the client takes nothing. Returns whether it is to be
    /// ended; if not, `waker` is woken when it is.
    pub fn is_given_up(&self, waker: &Waker) -> bool {
        let Progress { blocked_since, is_ended, waker: registered } = &*self.progress;
        if blocked_since.load(Ordering::Relaxed) == 0 {
            blocked_since.store(self.readers.millis(), Ordering::Relaxed);
        }
        // Before the look at the flag: a task that sets it in between wakes this one.
        registered.register(waker);
        is_ended.load(Ordering::Acquire)
    }

    /// Returns the end of a stream that was given up.
    pub fn end() -> StreamEnd {
        StreamEnd::Overloaded("memory is short, and nothing of this stream was read for 10 s".to_owned())
    }
}

/// A socket that fails when its connection is ended.
pub struct ObservedSocket<Io> {
    io: Io,
    reader: ObservedReader,
}

impl<Io: Reset> ObservedSocket<Io> {
    fn written<T>(&self, written: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.reader.reads();
            return written;
        }
        if !self.reader.is_given_up(cx.waker()) {
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
    fn sender(all: &Arc<Readers>) -> (DuplexStream, JoinHandle<io::Error>) {
        let (near, far) = duplex(64);
        let mut socket = all.observe_socket(near);
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
        let all = Readers::new();
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
    async fn the_longest_unread_connections_end_first_some_at_a_time() {
        let all = Readers::new();
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
        let all = Readers::new();
        for _ in 0..1000 {
            drop(all.observe_socket(duplex(1).0));
        }
        assert!(all.lock().capacity() < 100);
    }
}
