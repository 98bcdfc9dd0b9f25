//! Coalesces the small writes of one pass over a connection into few large ones.
//!
//! The problem: h2 writes and flushes each DATA frame separately. An event for a hundred streams of
//! one connection would cost a hundred system calls, and over TLS a hundred records.
//!
//! The choice: h2 writes into a buffer, and its flushes do nothing. The task of the connection
//! flushes the buffer once, at the end of its pass. A large write is not copied; it goes out at
//! once in one vectored write, after the buffered bytes.
//!
//! A `BufWriter` would not do: it honors h2's flushes, it copies large writes, and it keeps its
//! buffer while the connection is idle. Here the buffer is capped, so a socket that is not writable
//! stops h2 early, and it is borrowed from a per-thread pool only while it has content, so ten
//! thousand idle connections have no buffers.

use std::{
    cell::RefCell,
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::transport::limits::COALESCE_BYTES_MAX;

/// The most slices of one vectored write, including the buffered bytes.
const SLICES_MAX: usize = 64;

/// The largest write that is buffered, in bytes: a DATA frame of 16 KiB, the most that Go clients
/// accept, and its head. Copying it costs a third of the system call that it saves; copying more
/// would cost as much as a system call.
const BUFFERED_WRITE_BYTES_MAX: usize = (16 << 10) + 9;

/// The number of empty buffers in the pool of each thread.
const SPARE_BUFFERS_MAX: usize = 4;

thread_local! {
    static SPARE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// The half that h2 reads from and writes to.
pub struct Coalescer<Io>(Arc<Mutex<Shared<Io>>>);

/// The half that the task of the connection flushes.
pub struct Flusher<Io>(Arc<Mutex<Shared<Io>>>);

struct Shared<Io> {
    io: Io,
    buffer: Vec<u8>,
    /// The length of the part of the buffer that was written to the socket.
    written: usize,
    /// Whether the socket was not writable at the last attempt.
    blocked: bool,
    /// Whether something was read since [`Flusher::take_received`].
    received: bool,
}

/// Splits a connection into both halves.
pub fn coalesce<Io>(io: Io) -> (Coalescer<Io>, Flusher<Io>) {
    let shared = Shared { io, buffer: Vec::new(), written: 0, blocked: false, received: false };
    let shared = Arc::new(Mutex::new(shared));
    (Coalescer(shared.clone()), Flusher(shared))
}

fn lock<Io>(shared: &Mutex<Shared<Io>>) -> MutexGuard<'_, Shared<Io>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<Io: AsyncWrite + Unpin> Flusher<Io> {
    /// Writes the whole buffer and flushes the socket.
    pub fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut shared = lock(&self.0);
        let drained = shared.poll_drain(cx)?;
        if drained.is_pending() {
            shared.shrink();
            return Poll::Pending;
        }
        Pin::new(&mut shared.io).poll_flush(cx)
    }

    /// Whether the socket was not writable at the last attempt.
    pub fn is_blocked(&self) -> bool {
        lock(&self.0).blocked
    }

    /// Whether something was read since the last call.
    pub fn take_received(&self) -> bool {
        std::mem::take(&mut lock(&self.0).received)
    }
}

impl<Io: AsyncWrite + Unpin> Shared<Io> {
    fn pending(&self) -> usize {
        self.buffer.len() - self.written
    }

    /// Appends as much as there is room for. Returns the number of bytes appended.
    fn append(&mut self, slices: &[IoSlice<'_>]) -> usize {
        let mut room = COALESCE_BYTES_MAX - self.pending();
        if self.buffer.capacity() == 0 {
            self.buffer = SPARE.with_borrow_mut(Vec::pop).unwrap_or_else(|| Vec::with_capacity(COALESCE_BYTES_MAX));
        }
        if self.written > 0 {
            self.buffer.drain(..self.written);
            self.written = 0;
        }
        let mut taken = 0;
        for slice in slices {
            let part = &slice[..slice.len().min(room)];
            self.buffer.extend_from_slice(part);
            room -= part.len();
            taken += part.len();
            if room == 0 {
                break;
            }
        }
        taken
    }

    /// Records a write to the socket. Returns how many of its bytes did not come from the buffer.
    fn advance(&mut self, written: usize) -> usize {
        let buffered = written.min(self.pending());
        self.written += buffered;
        if self.pending() == 0 {
            self.release();
        }
        written - buffered
    }

    /// Returns the empty buffer to the pool.
    fn release(&mut self) {
        let mut buffer = std::mem::take(&mut self.buffer);
        self.written = 0;
        if buffer.capacity() == COALESCE_BYTES_MAX {
            buffer.clear();
            SPARE.with_borrow_mut(|spare| {
                if spare.len() < SPARE_BUFFERS_MAX {
                    spare.push(buffer);
                }
            });
        }
    }

    /// Moves a small rest that waits for a slow socket into a buffer of its size.
    fn shrink(&mut self) {
        if self.pending() < COALESCE_BYTES_MAX / 2 {
            let rest = self.buffer[self.written..].to_vec();
            self.release();
            self.buffer = rest;
        }
    }

    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.pending() > 0 {
            let written = self.poll_io(cx, &[])?;
            let Poll::Ready(written) = written else { return Poll::Pending };
            self.advance(written);
        }
        Poll::Ready(Ok(()))
    }

    /// Writes the buffer and then `slices`, in one system call.
    fn poll_io(&mut self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let Self { io, buffer, written, .. } = self;
        let buffered = &buffer[*written..];
        let result = if slices.is_empty() {
            Pin::new(io).poll_write(cx, buffered)
        } else {
            let mut all = [IoSlice::new(&[]); SLICES_MAX];
            let first = std::iter::once(IoSlice::new(buffered)).filter(|first| !first.is_empty());
            let mut count = 0;
            for (into, slice) in all.iter_mut().zip(first.chain(slices.iter().copied())) {
                *into = slice;
                count += 1;
            }
            Pin::new(io).poll_write_vectored(cx, &all[..count])
        };
        self.blocked = result.is_pending();
        match result {
            Poll::Ready(Ok(0)) => Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
            result => result,
        }
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let total: usize = slices.iter().map(|slice| slice.len()).sum();
        loop {
            if total <= BUFFERED_WRITE_BYTES_MAX && total <= COALESCE_BYTES_MAX - self.pending() {
                return Poll::Ready(Ok(self.append(slices)));
            }
            match self.poll_io(cx, slices)? {
                Poll::Ready(written) => match self.advance(written) {
                    // Only buffered bytes were written.
                    0 => {}
                    written => return Poll::Ready(Ok(written)),
                },
                Poll::Pending => match self.append(slices) {
                    0 => return Poll::Pending,
                    taken => return Poll::Ready(Ok(taken)),
                },
            }
        }
    }
}

impl<Io: AsyncRead + Unpin> AsyncRead for Coalescer<Io> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut shared = lock(&self.0);
        ready!(Pin::new(&mut shared.io).poll_read(cx, buffer))?;
        shared.received = true;
        Poll::Ready(Ok(()))
    }
}

impl<Io: AsyncWrite + Unpin> AsyncWrite for Coalescer<Io> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        lock(&self.0).poll_write(cx, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        lock(&self.0).poll_write(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Does nothing: see [`Flusher::poll_flush`].
    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut shared = lock(&self.0);
        ready!(shared.poll_drain(cx))?;
        Pin::new(&mut shared.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::VecDeque, task::Waker};

    use proptest::prelude::*;

    use super::*;
    use crate::transport::limits::BATCH_BYTES_MAX;

    /// A socket that accepts as many bytes per write as its script says (`None`: it is not
    /// writable), and everything after the script's end.
    #[derive(Default)]
    struct Socket {
        script: VecDeque<Option<usize>>,
        writes: Vec<Vec<u8>>,
        flushes: usize,
        shut: bool,
    }

    impl AsyncWrite for Socket {
        fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            self.poll_write_vectored(cx, &[IoSlice::new(bytes)])
        }

        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            slices: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            let limit = match self.script.pop_front() {
                Some(None) => return Poll::Pending,
                Some(Some(limit)) => limit,
                None => usize::MAX,
            };
            let bytes: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).take(limit).collect();
            let count = bytes.len();
            self.writes.push(bytes);
            Poll::Ready(Ok(count))
        }

        fn is_write_vectored(&self) -> bool {
            true
        }

        fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.flushes += 1;
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.shut = true;
            Poll::Ready(Ok(()))
        }
    }

    fn cx() -> Context<'static> {
        Context::from_waker(Waker::noop())
    }

    fn socket(script: Vec<Option<usize>>) -> (Coalescer<Socket>, Flusher<Socket>) {
        coalesce(Socket { script: script.into(), ..Socket::default() })
    }

    fn write(half: &mut Coalescer<Socket>, bytes: &[u8]) -> Poll<usize> {
        Pin::new(half).poll_write(&mut cx(), bytes).map(Result::unwrap)
    }

    #[test]
    fn small_writes_become_one_and_an_idle_connection_has_no_buffer() {
        let (mut half, flusher) = socket(vec![]);
        for byte in 0..100 {
            assert_eq!(write(&mut half, &[byte; 100]), Poll::Ready(100));
            assert!(Pin::new(&mut half).poll_flush(&mut cx()).is_ready());
        }
        assert!(lock(&flusher.0).io.writes.is_empty(), "nothing is written before the flush");
        assert!(flusher.poll_flush(&mut cx()).is_ready());
        let shared = lock(&flusher.0);
        assert_eq!((shared.io.writes.len(), shared.io.writes[0].len(), shared.io.flushes), (1, 10_000, 1));
        assert_eq!(shared.buffer.capacity(), 0, "an idle connection has no buffer");
    }

    #[test]
    fn a_batch_in_frames_of_16_kib_is_one_write() {
        let (mut half, flusher) = socket(vec![]);
        let frames = BATCH_BYTES_MAX >> 14;
        for _ in 0..frames {
            assert_eq!(write(&mut half, &[3; 9 + (16 << 10)]), Poll::Ready(9 + (16 << 10)));
        }
        assert!(flusher.poll_flush(&mut cx()).is_ready());
        let written: Vec<_> = lock(&flusher.0).io.writes.iter().map(Vec::len).collect();
        assert_eq!(written, [BATCH_BYTES_MAX + 9 * frames]);
    }

    #[test]
    fn a_large_write_goes_out_with_the_buffer_and_is_not_copied() {
        let (mut half, flusher) = socket(vec![]);
        let large = vec![2; COALESCE_BYTES_MAX];
        assert_eq!(write(&mut half, &[1; 10]), Poll::Ready(10));
        assert_eq!(write(&mut half, &large), Poll::Ready(large.len()));
        let shared = lock(&flusher.0);
        assert_eq!(shared.io.writes.len(), 1);
        assert_eq!(shared.io.writes[0].len(), 10 + large.len());
        assert_eq!(shared.pending(), 0);
    }

    #[test]
    fn a_socket_that_is_not_writable_stops_the_writer_at_the_cap() {
        let (mut half, flusher) = socket(vec![None; 100]);
        let mut taken = 0;
        while let Poll::Ready(count) = write(&mut half, &[0; 1000]) {
            taken += count;
        }
        assert_eq!(taken, COALESCE_BYTES_MAX);
        assert!(flusher.is_blocked());
        assert!(flusher.poll_flush(&mut cx()).is_pending());
    }

    #[test]
    fn a_small_rest_that_waits_for_a_slow_socket_takes_little_memory() {
        let (mut half, flusher) = socket(vec![None]);
        assert_eq!(write(&mut half, &[7; 1000]), Poll::Ready(1000));
        assert!(flusher.poll_flush(&mut cx()).is_pending());
        assert!(lock(&flusher.0).buffer.capacity() < 2000);
        assert!(flusher.poll_flush(&mut cx()).is_ready() && !flusher.is_blocked());
        assert_eq!(lock(&flusher.0).io.writes, [vec![7; 1000]]);
    }

    #[test]
    fn shutdown_follows_the_last_byte() {
        let (mut half, flusher) = socket(vec![None, Some(4)]);
        assert_eq!(write(&mut half, b"goodbye"), Poll::Ready(7));
        assert!(Pin::new(&mut half).poll_shutdown(&mut cx()).is_pending());
        assert!(!lock(&flusher.0).io.shut);
        assert!(Pin::new(&mut half).poll_shutdown(&mut cx()).is_ready());
        let shared = lock(&flusher.0);
        assert!(shared.io.shut);
        assert_eq!(shared.io.writes.concat(), b"goodbye");
    }

    proptest! {
        #[test]
        fn bytes_are_written_in_order_however_much_the_socket_accepts(
            writes in prop::collection::vec((0..3usize, 1usize..50_000), 1..30),
            script in prop::collection::vec(prop::option::of(1usize..70_000), 0..60),
        ) {
            let (mut half, flusher) = socket(script);
            let mut expected = Vec::new();
            let mut next = 0u8;
            for (flushes, length) in writes {
                let bytes: Vec<u8> = (0..length).map(|_| { next = next.wrapping_add(1); next }).collect();
                expected.extend_from_slice(&bytes);
                let (left, right) = bytes.split_at(length / 3);
                let mut rest = [IoSlice::new(left), IoSlice::new(right)];
                let mut rest = &mut rest[..];
                while !rest.is_empty() {
                    // After the script's end everything is accepted.
                    if let Poll::Ready(taken) = Pin::new(&mut half).poll_write_vectored(&mut cx(), rest) {
                        IoSlice::advance_slices(&mut rest, taken.unwrap());
                    }
                    prop_assert!(lock(&flusher.0).pending() <= COALESCE_BYTES_MAX);
                }
                for _ in 0..flushes {
                    let _ = flusher.poll_flush(&mut cx());
                }
            }
            while flusher.poll_flush(&mut cx()).is_pending() {}
            prop_assert_eq!(lock(&flusher.0).io.writes.concat(), expected);
        }
    }
}
