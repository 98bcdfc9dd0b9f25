//! A connection in memory that fails like a real one: slow, half-open, or broken in the middle of a
//! frame.
//!
//! One lock covers both directions, so that a cut happens at the same moment for both ends. If the
//! connection breaks, only a part of the unread bytes arrives. This is how a cut in the middle of a
//! frame looks.

use std::{
    collections::VecDeque,
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, Waker},
};

use bytes::{Buf, Bytes};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Duration, Instant, Sleep, sleep_until},
};

/// The bytes that one direction buffers before its writer must wait.
const PIPE_BYTES: usize = 64 << 10;

#[derive(Default)]
struct Direction {
    chunks: VecDeque<(Instant, Bytes)>,
    bytes: usize,
    /// The writer closed its side.
    closed: bool,
    /// The reader was dropped.
    reader_gone: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

#[derive(Default)]
struct State {
    directions: [Direction; 2],
    latency: Duration,
    /// Half-open: no bytes arrive any more, and neither end gets an error.
    silent: bool,
    broken: bool,
    /// The connection breaks after this many more bytes.
    breaks_after: Option<usize>,
}

impl State {
    fn wake_all(&mut self) {
        for direction in &mut self.directions {
            if let Some(waker) = direction.reader.take() {
                waker.wake();
            }
            if let Some(waker) = direction.writer.take() {
                waker.wake();
            }
        }
    }

    fn cut(&mut self) {
        self.broken = true;
        for direction in &mut self.directions {
            direction.chunks.truncate(1);
            if let Some((_, chunk)) = direction.chunks.front_mut() {
                chunk.truncate(chunk.len() / 2);
            }
            direction.chunks.retain(|(_, chunk)| !chunk.is_empty());
        }
        self.wake_all();
    }
}

/// Controls a connection from outside. Clones control the same connection.
#[derive(Clone)]
pub(crate) struct Link(Arc<Mutex<State>>);

/// One end of a connection.
pub(crate) struct End {
    link: Link,
    side: usize,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Link {
    /// A connection whose bytes arrive after `latency`, and its two ends.
    pub(crate) fn new(latency: Duration) -> (Link, End, End) {
        let link = Link(Arc::new(Mutex::new(State { latency, ..State::default() })));
        let end = |side| End { link: link.clone(), side, sleep: None };
        let ours = end(0);
        let theirs = end(1);
        (link, ours, theirs)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Breaks the connection now. A part of the unread bytes still arrives.
    pub(crate) fn cut(&self) {
        self.state().cut();
    }

    /// Breaks the connection if it is half-open.
    fn cut_if_silent(&self) {
        let mut state = self.state();
        if state.silent {
            state.cut();
        }
    }

    /// Breaks the connection after this many more bytes, written by either end.
    pub(crate) fn cut_after(&self, bytes: usize) {
        self.state().breaks_after = Some(bytes);
    }

    /// From now on no bytes arrive, and neither end gets an error.
    pub(crate) fn silence(&self) {
        self.state().silent = true;
    }

    /// Whether one end may still wait for the other on a half-open connection.
    fn is_awaited(&self) -> bool {
        let state = self.state();
        state.silent && !state.broken && !state.directions.iter().all(|direction| direction.reader_gone)
    }

    /// Sets the latency of bytes that are written from now on.
    pub(crate) fn delay(&self, latency: Duration) {
        self.state().latency = latency;
    }

    /// Whether the connection is broken or one end was dropped.
    pub(crate) fn is_over(&self) -> bool {
        let state = self.state();
        state.broken || state.directions.iter().any(|direction| direction.reader_gone)
    }
}

impl AsyncRead for End {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let link = self.link.clone();
        loop {
            let mut state = link.state();
            let broken = state.broken;
            let silent = state.silent;
            let direction = &mut state.directions[1 - self.side];
            let now = Instant::now();
            let due = match direction.chunks.front_mut() {
                Some((at, chunk)) if *at <= now && !silent => {
                    let count = chunk.len().min(buffer.remaining());
                    buffer.put_slice(&chunk[..count]);
                    chunk.advance(count);
                    if chunk.is_empty() {
                        direction.chunks.pop_front();
                    }
                    direction.bytes -= count.min(direction.bytes);
                    if let Some(waker) = direction.writer.take() {
                        waker.wake();
                    }
                    return Poll::Ready(Ok(()));
                }
                Some((at, _)) if !silent => Some(*at),
                _ if broken => return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
                None if direction.closed && !silent => return Poll::Ready(Ok(())),
                _ => None,
            };
            direction.reader = Some(cx.waker().clone());
            drop(state);
            let Some(due) = due else { return Poll::Pending };
            let sleep = self.sleep.get_or_insert_with(|| Box::pin(sleep_until(due)));
            if sleep.deadline() != due {
                sleep.as_mut().reset(due);
            }
            if sleep.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
        }
    }
}

impl AsyncWrite for End {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut state = self.link.state();
        let state = &mut *state;
        let direction = &mut state.directions[self.side];
        if state.broken || direction.reader_gone || direction.closed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let room = PIPE_BYTES.saturating_sub(direction.bytes);
        if room == 0 {
            direction.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let count = bytes.len().min(room);
        let arrives = state.breaks_after.map_or(count, |left| left.min(count));
        // Bytes must not overtake earlier ones after the latency was reduced.
        let at = direction.chunks.back().map(|(at, _)| *at).max(Some(Instant::now() + state.latency));
        if arrives > 0 {
            direction.chunks.push_back((at.unwrap_or_else(Instant::now), Bytes::copy_from_slice(&bytes[..arrives])));
            direction.bytes += arrives;
        }
        if let Some(waker) = direction.reader.take() {
            waker.wake();
        }
        if let Some(left) = &mut state.breaks_after {
            *left -= arrives;
            if *left == 0 {
                state.broken = true;
                state.wake_all();
            }
        }
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.link.state();
        let direction = &mut state.directions[self.side];
        direction.closed = true;
        if let Some(waker) = direction.reader.take() {
            waker.wake();
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let mut state = self.link.state();
        state.directions[self.side].closed = true;
        state.directions[1 - self.side].reader_gone = true;
        state.wake_all();
    }
}

/// The connections of one route, and the settings for new ones.
#[derive(Default)]
pub(crate) struct Route {
    state: Mutex<RouteState>,
}

#[derive(Default)]
struct RouteState {
    links: Vec<Link>,
    latency: Duration,
    refused: bool,
    /// New connections are half-open from their start.
    hangs: bool,
}

impl Route {
    /// Makes a new connection, unless the route refuses them.
    pub(crate) fn connect(&self) -> io::Result<(End, End)> {
        let mut state = self.state.lock().unwrap();
        if state.refused {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let (link, ours, theirs) = Link::new(state.latency);
        if state.hangs {
            link.silence();
        }
        state.links.retain(|link| !link.is_over() || link.is_awaited());
        state.links.push(link);
        Ok((ours, theirs))
    }

    /// Breaks every half-open connection: packets arrive again, and an end that is left there gets
    /// a reset.
    pub(crate) fn reset_silent(&self) {
        let links = self.state.lock().unwrap().links.clone();
        for link in &links {
            link.cut_if_silent();
        }
    }

    /// Applies `what` to every open connection. Returns true if there was one.
    pub(crate) fn each(&self, what: impl Fn(&Link)) -> bool {
        let mut links = self.state.lock().unwrap().links.clone();
        links.retain(|link| !link.is_over());
        for link in &links {
            what(link);
        }
        !links.is_empty()
    }

    /// Whether an open connection is half-open.
    pub(crate) fn is_half_open(&self) -> bool {
        self.state.lock().unwrap().links.iter().any(|link| !link.is_over() && link.state().silent)
    }

    /// Sets the latency of open and new connections.
    pub(crate) fn delay(&self, latency: Duration) {
        self.state.lock().unwrap().latency = latency;
        self.each(|link| link.delay(latency));
    }

    /// Refuses new connections, or accepts them again.
    pub(crate) fn refuse(&self, refused: bool) {
        self.state.lock().unwrap().refused = refused;
    }

    /// Breaks every open connection, and refuses new ones.
    pub(crate) fn take_away(&self) {
        self.refuse(true);
        self.each(Link::cut);
    }

    /// Makes open and new connections half-open.
    pub(crate) fn hang(&self) {
        self.state.lock().unwrap().hangs = true;
        self.each(Link::silence);
    }

    /// Ends what [`Self::take_away`] and [`Self::hang`] did.
    pub(crate) fn bring_back(&self) {
        let mut state = self.state.lock().unwrap();
        state.refused = false;
        state.hangs = false;
        drop(state);
        self.reset_silent();
    }
}
