//! The socket of an HTTP/1.1 connection. It fails if the client reads a response that pins a
//! snapshot too slowly, reads nothing of a live watch while events wait, or closes the connection
//! during a watch.
//!
//! hyper asks a body for more only when the socket has room, so only the socket sees that the
//! client does not read. And hyper does not look for the client's close while bytes of the client
//! are buffered, such as the next request; nothing else would notice that a quiet watch has no
//! reader any more.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep_until},
};
use tokio_util::io::poll_read_buf;

use crate::transport::read_progress::ReadProgress;

/// The most that is read ahead of hyper, in bytes. If a client sends more during a watch, its close
/// is noticed with the next event.
const READ_AHEAD_BYTES_MAX: usize = 16 << 10;

/// The response's needs from the socket; shared by both.
#[derive(Debug, Clone, Default)]
pub struct ResponseNeeds(Arc<Flags>);

#[derive(Debug, Default)]
struct Flags {
    pace: AtomicU8,
    /// The number of the response.
    response: AtomicU32,
    close_detection: AtomicBool,
}

/// The required read rate of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Pace {
    /// No minimum read rate.
    Any = 0,
    /// Something per stall timeout, if there is anything to read.
    Live = 1,
    /// Without long pauses, and not too slowly on average.
    Pinning = 2,
}

impl ResponseNeeds {
    /// Begins a new response, which is read at this pace.
    pub fn begin(&self, pace: Pace) {
        self.0.response.fetch_add(1, Ordering::Relaxed);
        self.pace(pace);
    }

    /// Sets how the client must read from now on.
    pub fn pace(&self, pace: Pace) {
        self.0.pace.store(pace as u8, Ordering::Relaxed);
    }

    /// The pace and the number of the response; `None` at any pace.
    fn now(&self) -> Option<(Pace, u32)> {
        let pace = match self.0.pace.load(Ordering::Relaxed) {
            1 => Pace::Live,
            2 => Pace::Pinning,
            _ => return None,
        };
        Some((pace, self.0.response.load(Ordering::Relaxed)))
    }

    /// Sets whether the socket looks for the client's close, even past bytes that hyper has not
    /// read yet.
    pub fn close_detection(&self, needed: bool) {
        self.0.close_detection.store(needed, Ordering::Relaxed);
    }
}

/// A socket that fails when its client has stalled or gone away.
pub struct MonitoredSocket<Io> {
    io: Io,
    needs: ResponseNeeds,
    stall_timeout: Duration,
    /// The progress of a response at a pace.
    progress: Option<(Pace, u32, ReadProgress)>,
    /// Set while the socket has no room.
    stall_timer: Option<Pin<Box<Sleep>>>,
    read_ahead: BytesMut,
}

impl<Io> MonitoredSocket<Io> {
    /// A socket that fails when its client reads too little in `stall_timeout` for the pace that
    /// the response needs.
    pub fn new(io: Io, needs: ResponseNeeds, stall_timeout: Duration) -> Self {
        Self { io, needs, stall_timeout, progress: None, stall_timer: None, read_ahead: BytesMut::new() }
    }

    /// The progress of the current response; `None` if it may be read at any pace.
    fn progress(&mut self) -> Option<&mut ReadProgress> {
        let needed = self.needs.now();
        if self.progress.as_ref().map(|(pace, response, _)| (*pace, *response)) != needed {
            self.stall_timer = None;
            self.progress = needed.map(|(pace, response)| {
                let progress = match pace {
                    Pace::Live => ReadProgress::of_live_stream(self.stall_timeout),
                    _ => ReadProgress::new(self.stall_timeout),
                };
                (pace, response, progress)
            });
        }
        self.progress.as_mut().map(|(.., progress)| progress)
    }

    /// Records the progress of a write, then behaves like [`Self::in_time`].
    fn write_in_time(&mut self, written: Poll<io::Result<usize>>, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = written
            && let Some(progress) = self.progress()
        {
            progress.advanced(bytes);
        }
        self.in_time(written, cx)
    }

    /// Turns a `Pending` into an error once the client has stalled.
    fn in_time<T>(&mut self, done: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if done.is_ready() {
            self.stall_timer = None;
            return done;
        }
        let Some(due_at) = self.progress().map(ReadProgress::due_at) else { return done };
        let timer = self.stall_timer.get_or_insert_with(|| Box::pin(sleep_until(due_at)));
        ready!(timer.as_mut().poll(cx));
        self.stall_timer = None;
        let message = format!("too little was read in {:?}", self.stall_timeout);
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)))
    }
}

impl<Io: AsyncRead + Unpin> MonitoredSocket<Io> {
    /// Reads ahead of hyper. Fails if the client has closed the connection.
    fn fill_read_ahead(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        while self.read_ahead.len() < READ_AHEAD_BYTES_MAX {
            match poll_read_buf(Pin::new(&mut self.io), cx, &mut self.read_ahead) {
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => return Err(error),
                Poll::Pending => break,
            }
        }
        Ok(())
    }
}

impl<Io: AsyncRead + Unpin> AsyncRead for MonitoredSocket<Io> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.read_ahead.is_empty() {
            return Pin::new(&mut self.io).poll_read(cx, buffer);
        }
        let len = self.read_ahead.len().min(buffer.remaining());
        buffer.put_slice(&self.read_ahead[..len]);
        self.read_ahead.advance(len);
        if self.read_ahead.is_empty() {
            self.read_ahead = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<Io: AsyncRead + AsyncWrite + Unpin> AsyncWrite for MonitoredSocket<Io> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.write_in_time(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, slices);
        self.write_in_time(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // hyper flushes whenever it is woken, so this is the place to look.
        if self.needs.0.close_detection.load(Ordering::Relaxed) {
            self.fill_read_ahead(cx)?;
        }
        let flushed = Pin::new(&mut self.io).poll_flush(cx);
        if flushed.is_ready()
            && let Some(progress) = self.progress()
        {
            // The socket took everything; the next wait starts a new window.
            progress.restart();
        }
        self.in_time(flushed, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, duplex},
        time::sleep,
    };

    use super::*;
    use crate::transport::limits::PROGRESS_BYTES_MIN;

    const STALL: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_client_that_stops_reading_ends_the_connection_unless_it_may_pause() {
        let (near, _far) = duplex(64);
        let needs = ResponseNeeds::default();
        let mut io = MonitoredSocket::new(near, needs.clone(), STALL);
        io.write_all(&[0; 64]).await.unwrap();
        let later = tokio::time::timeout(2 * STALL, io.write_all(&[0; 64])).await;
        assert!(later.is_err(), "a log waits for its client");
        for pace in [Pace::Live, Pace::Pinning] {
            needs.begin(pace);
            let start = tokio::time::Instant::now();
            let error = io.write_all(&[0; 64]).await.unwrap_err();
            assert_eq!((error.kind(), start.elapsed()), (io::ErrorKind::TimedOut, STALL), "{pace:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_client_of_a_live_watch_is_served() {
        let (near, mut far) = duplex(64);
        let needs = ResponseNeeds::default();
        needs.begin(Pace::Live);
        let mut io = MonitoredSocket::new(near, needs, STALL);
        let reading = async {
            loop {
                sleep(STALL * 9 / 10).await;
                far.read_exact(&mut [0; 1]).await.unwrap();
            }
        };
        tokio::select! {
            written = io.write_all(&[0; 128]) => written.unwrap(),
            never = reading => never,
        }
    }

    /// Writes to a client that reads `some` bytes ten times per stall timeout.
    async fn write_to_client_that_reads(some: usize) -> io::Result<()> {
        let (near, mut far) = duplex(64);
        let needs = ResponseNeeds::default();
        needs.begin(Pace::Pinning);
        let mut io = MonitoredSocket::new(near, needs, STALL);
        let mut some = vec![0; some];
        let reading = async {
            loop {
                sleep(STALL / 10).await;
                far.read_exact(&mut some).await.unwrap();
            }
        };
        tokio::select! {
            written = io.write_all(&[0; 2 * PROGRESS_BYTES_MIN]) => written,
            never = reading => never,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_client_is_served_and_one_that_reads_next_to_nothing_is_not() {
        let start = tokio::time::Instant::now();
        write_to_client_that_reads(PROGRESS_BYTES_MIN / 8).await.unwrap();
        assert!(start.elapsed() > STALL, "the client was slow");
        let start = tokio::time::Instant::now();
        let error = write_to_client_that_reads(8).await.unwrap_err();
        assert_eq!((error.kind(), start.elapsed()), (io::ErrorKind::TimedOut, STALL));
    }

    /// Accepts every write at once and flushes a second later, as TLS may.
    #[derive(Default)]
    struct Slow(Option<Pin<Box<Sleep>>>);

    impl AsyncWrite for Slow {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            let sent = self.0.get_or_insert_with(|| Box::pin(sleep(Duration::from_secs(1))));
            ready!(sent.as_mut().poll(cx));
            self.0 = None;
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncRead for Slow {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_stall_timer_stops_once_everything_is_flushed() {
        let needs = ResponseNeeds::default();
        needs.begin(Pace::Pinning);
        let mut io = MonitoredSocket::new(Slow::default(), needs, STALL);
        for _ in 0..3 {
            io.write_all(b"a little").await.unwrap();
            io.flush().await.unwrap();
            sleep(2 * STALL).await;
        }
    }

    #[tokio::test]
    async fn close_detection_works_past_unread_bytes_and_loses_none() {
        let (near, mut far) = duplex(64);
        let needs = ResponseNeeds::default();
        let mut io = MonitoredSocket::new(near, needs.clone(), STALL);
        far.write_all(b"the next request").await.unwrap();
        needs.close_detection(true);
        io.flush().await.unwrap();
        let mut some = [0; 3];
        io.read_exact(&mut some).await.unwrap();
        assert_eq!(&some, b"the");
        drop(far);
        assert!(io.flush().await.is_err());
        needs.close_detection(false);
        let mut rest = String::new();
        io.read_to_string(&mut rest).await.unwrap();
        assert_eq!(rest, " next request", "no byte is lost");
    }
}
