//! When a reader has stopped; and the socket of an HTTP/1.1 connection, which ends then, or when its peer has gone in the middle of a watch.
//!
//! A body is only asked for more when there is room, so nothing above the socket sees that a list is not read: it would pin the state that it is
//! of for as long as the peer likes. And hyper does not look for the peer's end while bytes wait that the peer has sent already, the
//! next request, say; of a quiet watch nobody would ever learn that it is read no more.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep_until},
};
use tokio_util::io::poll_read_buf;

use super::limits::PROGRESS_BYTES_MIN;

/// What is read before it is asked for, in bytes; of a peer that sends more during a watch, its end is seen by the next event.
const AHEAD_BYTES_MAX: usize = 16 << 10;

/// What is being sent; for whoever makes it and the socket it is sent by.
#[derive(Debug, Clone, Default)]
pub struct Sending(Arc<Flags>);

#[derive(Debug, Default)]
struct Flags {
    must_not_wait: AtomicBool,
    looks_for_end: AtomicBool,
}

impl Sending {
    /// Whether what is sent from now on is to be read without a pause.
    pub fn must_not_wait(&self, must: bool) {
        self.0.must_not_wait.store(must, Ordering::Relaxed);
    }

    /// Whether the peer's end is looked for, though it may have sent more.
    pub fn look_for_end(&self, look: bool) {
        self.0.looks_for_end.store(look, Ordering::Relaxed);
    }
}

/// How a reader gets on with what must not wait. Only the time counts in which something waits for it.
#[derive(Debug)]
pub struct Progress {
    stall_timeout: Duration,
    /// Taken since it was last far enough.
    bytes: usize,
    /// Waited for since then.
    waited: Duration,
    /// It is waited for.
    since: Option<Instant>,
}

impl Progress {
    /// It is far enough with [`PROGRESS_BYTES_MIN`] bytes in each `stall_timeout`.
    pub fn new(stall_timeout: Duration) -> Self {
        Self { stall_timeout, bytes: 0, waited: Duration::ZERO, since: None }
    }

    /// There is no room: by when the reader is to have taken enough.
    pub fn due_at(&mut self) -> Instant {
        *self.since.get_or_insert_with(Instant::now) + self.stall_timeout.saturating_sub(self.waited)
    }

    /// The reader has taken something.
    pub fn took(&mut self, bytes: usize) {
        if let Some(since) = self.since.take() {
            self.waited += since.elapsed();
        }
        self.bytes += bytes;
        if self.bytes >= PROGRESS_BYTES_MIN {
            self.restart();
        }
    }

    /// Nothing has been waited for.
    fn restart(&mut self) {
        *self = Self::new(self.stall_timeout);
    }
}

/// A socket with a limit.
pub struct Guarded<Io> {
    io: Io,
    sending: Sending,
    progress: Progress,
    /// While there is no room.
    alarm: Option<Pin<Box<Sleep>>>,
    ahead: BytesMut,
}

impl<Io> Guarded<Io> {
    /// It ends when of what must not wait too little is read in `stall_timeout`.
    pub fn new(io: Io, sending: Sending, stall_timeout: Duration) -> Self {
        Self { io, sending, progress: Progress::new(stall_timeout), alarm: None, ahead: BytesMut::new() }
    }

    /// The same for what was written.
    fn bytes_in_time(&mut self, written: Poll<io::Result<usize>>, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(bytes)) = written {
            self.progress.took(bytes);
        }
        self.in_time(written, cx)
    }

    /// Fails where there was no room for too long.
    fn in_time<T>(&mut self, done: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        if done.is_ready() {
            self.alarm = None;
            return done;
        }
        if !self.sending.0.must_not_wait.load(Ordering::Relaxed) {
            self.alarm = None;
            self.progress.restart();
            return done;
        }
        let progress = &mut self.progress;
        let alarm = self.alarm.get_or_insert_with(|| Box::pin(sleep_until(progress.due_at())));
        ready!(alarm.as_mut().poll(cx));
        self.alarm = None;
        let message = format!("next to nothing was read in {:?}", self.progress.stall_timeout);
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, message)))
    }
}

impl<Io: AsyncRead + Unpin> Guarded<Io> {
    /// Fails where the peer has gone.
    fn look_ahead(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        while self.ahead.len() < AHEAD_BYTES_MAX {
            match poll_read_buf(Pin::new(&mut self.io), cx, &mut self.ahead) {
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => return Err(error),
                Poll::Pending => break,
            }
        }
        Ok(())
    }
}

impl<Io: AsyncRead + Unpin> AsyncRead for Guarded<Io> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.ahead.is_empty() {
            return Pin::new(&mut self.io).poll_read(cx, buffer);
        }
        let len = self.ahead.len().min(buffer.remaining());
        buffer.put_slice(&self.ahead[..len]);
        self.ahead.advance(len);
        if self.ahead.is_empty() {
            self.ahead = BytesMut::new();
        }
        Poll::Ready(Ok(()))
    }
}

impl<Io: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Guarded<Io> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.bytes_in_time(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, slices);
        self.bytes_in_time(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // hyper comes by here whenever it is woken.
        if self.sending.0.looks_for_end.load(Ordering::Relaxed) {
            self.look_ahead(cx)?;
        }
        let flushed = Pin::new(&mut self.io).poll_flush(cx);
        if flushed.is_ready() {
            // Everything was taken; what comes later is waited for anew.
            self.progress.restart();
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

    const STALL: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_does_not_read_what_must_not_wait_ends_the_connection() {
        let (near, _far) = duplex(64);
        let sending = Sending::default();
        let mut io = Guarded::new(near, sending.clone(), STALL);
        io.write_all(&[0; 64]).await.unwrap();
        let later = tokio::time::timeout(2 * STALL, io.write_all(&[0; 64])).await;
        assert!(later.is_err(), "a watch waits for as long as it takes");
        sending.must_not_wait(true);
        let error = io.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    /// What becomes of a peer that reads some bytes ten times per stall timeout.
    async fn written_to_one_who_reads(some: usize) -> io::Result<()> {
        let (near, mut far) = duplex(64);
        let sending = Sending::default();
        sending.must_not_wait(true);
        let mut io = Guarded::new(near, sending, STALL);
        let mut some = vec![0; some];
        let reading = async {
            loop {
                sleep(STALL / 10).await;
                far.read_exact(&mut some).await.unwrap();
            }
        };
        tokio::select! {
            written = io.write_all(&[0; 10 * PROGRESS_BYTES_MIN]) => written,
            never = reading => never,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_reader_goes_on_and_one_that_only_keeps_its_place_does_not() {
        let start = Instant::now();
        written_to_one_who_reads(PROGRESS_BYTES_MIN / 8).await.unwrap();
        assert!(start.elapsed() > 5 * STALL, "it took its time");
        let (start, error) = (Instant::now(), written_to_one_who_reads(8).await.unwrap_err());
        assert_eq!((error.kind(), start.elapsed()), (io::ErrorKind::TimedOut, STALL));
    }

    #[tokio::test(start_paused = true)]
    async fn only_what_waits_for_its_reader_is_counted() {
        let mut progress = Progress::new(STALL);
        for _ in 0..10 {
            // Nothing was there to be read.
            sleep(STALL).await;
            assert_eq!(progress.due_at(), Instant::now() + STALL, "it has not waited for long");
            progress.took(1);
        }
        progress.due_at();
        sleep(STALL / 2).await;
        progress.took(PROGRESS_BYTES_MIN / 2);
        assert_eq!(progress.due_at(), Instant::now() + STALL / 2);
        progress.took(PROGRESS_BYTES_MIN / 2);
        assert_eq!(progress.due_at(), Instant::now() + STALL);
    }

    /// Takes everything, and has sent it a second later, as TLS may.
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
    async fn after_everything_was_taken_nobody_is_waited_for() {
        let sending = Sending::default();
        sending.must_not_wait(true);
        let mut io = Guarded::new(Slow::default(), sending, STALL);
        for _ in 0..3 {
            io.write_all(b"a little").await.unwrap();
            io.flush().await.unwrap();
            sleep(2 * STALL).await;
        }
    }

    #[tokio::test]
    async fn the_end_of_a_peer_that_has_sent_more_is_seen_where_it_is_looked_for() {
        let (near, mut far) = duplex(64);
        let sending = Sending::default();
        let mut io = Guarded::new(near, sending.clone(), STALL);
        far.write_all(b"the next request").await.unwrap();
        sending.look_for_end(true);
        io.flush().await.unwrap();
        let mut some = [0; 3];
        io.read_exact(&mut some).await.unwrap();
        assert_eq!(&some, b"the");
        drop(far);
        assert!(io.flush().await.is_err());
        sending.look_for_end(false);
        let mut rest = String::new();
        io.read_to_string(&mut rest).await.unwrap();
        assert_eq!(rest, " next request", "nothing of it is lost");
    }
}
