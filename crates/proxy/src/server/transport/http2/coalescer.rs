//! Gathers the small writes of one pass over a connection into few large ones.
//!
//! HTTP/2 writes each DATA frame by itself and flushes after it; with a hundred streams that would be a hundred system calls for one
//! event. So writes are copied into a buffer while there is room, its own flush does nothing, and the driver of the connection flushes
//! once, at the end of its pass. A large write is not copied: it goes out at once, together with what was gathered, in one vectored
//! write. The buffer is capped: a socket that takes nothing soon holds up whoever writes. It is borrowed from the thread while there is something in it, so that a
//! connection at rest has none.

use std::{
    cell::RefCell,
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::limits::COALESCE_BYTES_MAX;

/// Slices of one vectored write, those of what was gathered included.
const SLICES_MAX: usize = 64;

/// The largest write that is gathered, in bytes: a DATA frame of 16 KiB, which is what clients in Go take at most, and its head. Copying it
/// costs a third of the system call that it saves; copying more than that costs as much.
const GATHERED_WRITE_BYTES_MAX: usize = (16 << 10) + 9;

/// Empty buffers that each thread keeps.
const SPARE_BUFFERS_MAX: usize = 4;

thread_local! {
    static SPARE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// The half that HTTP/2 reads from and writes to.
pub struct Coalescer<Io>(Arc<Mutex<Shared<Io>>>);

/// The half that the driver of the connection flushes.
pub struct Flusher<Io>(Arc<Mutex<Shared<Io>>>);

struct Shared<Io> {
    io: Io,
    gathered: Vec<u8>,
    /// How much of it is written.
    written: usize,
    /// The last attempt to write found no room.
    blocked: bool,
    /// Something was read since it was last asked.
    heard: bool,
}

/// Both halves.
pub fn coalesce<Io>(io: Io) -> (Coalescer<Io>, Flusher<Io>) {
    let shared = Shared { io, gathered: Vec::new(), written: 0, blocked: false, heard: false };
    let shared = Arc::new(Mutex::new(shared));
    (Coalescer(shared.clone()), Flusher(shared))
}

fn lock<Io>(shared: &Mutex<Shared<Io>>) -> MutexGuard<'_, Shared<Io>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<Io: AsyncWrite + Unpin> Flusher<Io> {
    /// Writes everything that was gathered.
    pub fn poll_flush(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut shared = lock(&self.0);
        let drained = shared.poll_drain(cx)?;
        if drained.is_pending() {
            shared.shrink();
            return Poll::Pending;
        }
        Pin::new(&mut shared.io).poll_flush(cx)
    }

    /// Whether the socket takes nothing at present.
    pub fn is_blocked(&self) -> bool {
        lock(&self.0).blocked
    }

    /// Whether something was read since this was last asked.
    pub fn heard(&self) -> bool {
        std::mem::take(&mut lock(&self.0).heard)
    }
}

impl<Io: AsyncWrite + Unpin> Shared<Io> {
    fn pending(&self) -> usize {
        self.gathered.len() - self.written
    }

    /// Appends as much as there is room for; tells how much.
    fn gather(&mut self, slices: &[IoSlice<'_>]) -> usize {
        let mut room = COALESCE_BYTES_MAX - self.pending();
        if self.gathered.capacity() == 0 {
            self.gathered = SPARE.with_borrow_mut(Vec::pop).unwrap_or_else(|| Vec::with_capacity(COALESCE_BYTES_MAX));
        }
        if self.written > 0 {
            self.gathered.drain(..self.written);
            self.written = 0;
        }
        let mut taken = 0;
        for slice in slices {
            let part = &slice[..slice.len().min(room)];
            self.gathered.extend_from_slice(part);
            room -= part.len();
            taken += part.len();
            if room == 0 {
                break;
            }
        }
        taken
    }

    /// Takes note of what was written; tells how much of it was not from the buffer.
    fn advance(&mut self, written: usize) -> usize {
        let ours = written.min(self.pending());
        self.written += ours;
        if self.pending() == 0 {
            self.release();
        }
        written - ours
    }

    /// Gives the empty buffer back.
    fn release(&mut self) {
        let mut buffer = std::mem::take(&mut self.gathered);
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

    /// What waits for a slow socket takes no more memory than it has bytes.
    fn shrink(&mut self) {
        if self.pending() < COALESCE_BYTES_MAX / 2 {
            let rest = self.gathered[self.written..].to_vec();
            self.release();
            self.gathered = rest;
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

    /// One write of what was gathered and of `slices` after it.
    fn poll_io(&mut self, cx: &mut Context<'_>, slices: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let Self { io, gathered, written, .. } = self;
        let gathered = &gathered[*written..];
        let result = if slices.is_empty() {
            Pin::new(io).poll_write(cx, gathered)
        } else {
            let mut all = [IoSlice::new(&[]); SLICES_MAX];
            let filled = std::iter::once(IoSlice::new(gathered)).filter(|first| !first.is_empty());
            let mut count = 0;
            for (place, slice) in all.iter_mut().zip(filled.chain(slices.iter().copied())) {
                *place = slice;
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
            if total <= GATHERED_WRITE_BYTES_MAX && total <= COALESCE_BYTES_MAX - self.pending() {
                return Poll::Ready(Ok(self.gather(slices)));
            }
            match self.poll_io(cx, slices)? {
                Poll::Ready(written) => match self.advance(written) {
                    // Only what was gathered before, or a part of it.
                    0 => {}
                    written => return Poll::Ready(Ok(written)),
                },
                Poll::Pending => match self.gather(slices) {
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
        shared.heard = true;
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

    /// Nothing: see [`Flusher::poll_flush`].
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
    use crate::server::limits::BATCH_BYTES_MAX;

    /// A socket that takes what its script says, `None` for nothing at present, and everything after its end.
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
    fn small_writes_go_out_in_one_and_nothing_stays_behind() {
        let (mut half, flusher) = socket(vec![]);
        for byte in 0..100 {
            assert_eq!(write(&mut half, &[byte; 100]), Poll::Ready(100));
            assert!(Pin::new(&mut half).poll_flush(&mut cx()).is_ready());
        }
        assert!(lock(&flusher.0).io.writes.is_empty(), "not before it is flushed");
        assert!(flusher.poll_flush(&mut cx()).is_ready());
        let shared = lock(&flusher.0);
        assert_eq!((shared.io.writes.len(), shared.io.writes[0].len(), shared.io.flushes), (1, 10_000, 1));
        assert_eq!(shared.gathered.capacity(), 0, "a connection at rest has no buffer");
    }

    #[test]
    fn a_batch_in_the_frames_that_go_takes_is_one_write() {
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
    fn what_is_large_goes_out_with_what_was_gathered_and_is_not_copied() {
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
    fn a_socket_that_takes_nothing_holds_up_the_writer_at_the_cap() {
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
    fn what_waits_for_a_slow_socket_takes_little_memory() {
        let (mut half, flusher) = socket(vec![None]);
        assert_eq!(write(&mut half, &[7; 1000]), Poll::Ready(1000));
        assert!(flusher.poll_flush(&mut cx()).is_pending());
        assert!(lock(&flusher.0).gathered.capacity() < 2000);
        assert!(flusher.poll_flush(&mut cx()).is_ready() && !flusher.is_blocked());
        assert_eq!(lock(&flusher.0).io.writes, [vec![7; 1000]]);
    }

    #[test]
    fn shutdown_comes_after_the_last_byte() {
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
        fn bytes_come_out_in_order_whatever_the_socket_takes(
            writes in prop::collection::vec((0..3usize, 1usize..50_000), 1..30),
            script in prop::collection::vec(prop::option::of(1usize..70_000), 0..60),
        ) {
            let (mut half, flusher) = socket(script);
            let (mut expected, mut next) = (Vec::new(), 0u8);
            for (flushes, length) in writes {
                let bytes: Vec<u8> = (0..length).map(|_| { next = next.wrapping_add(1); next }).collect();
                expected.extend_from_slice(&bytes);
                let (left, right) = bytes.split_at(length / 3);
                let mut rest = [IoSlice::new(left), IoSlice::new(right)];
                let mut rest = &mut rest[..];
                while !rest.is_empty() {
                    // The script ends, and then everything is taken.
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
