//! Finds peers that are gone without a word: after a silence a PING, and if nothing comes back in time, the connection is closed.

use std::{
    task::{Context, Poll},
    time::Duration,
};

use h2::{Ping, PingPong};
use tokio::time::Instant;

/// The clock of one connection.
pub struct Keepalive {
    ping_pong: PingPong,
    interval: Duration,
    timeout: Duration,
    heard_at: Instant,
    /// When the PING was sent that nothing has followed yet.
    asked_at: Option<Instant>,
    /// Whether a PING is not answered yet; HTTP/2 here has one at a time.
    in_flight: bool,
}

impl Keepalive {
    /// A PING after `interval` of silence; the peer is gone when it says nothing for `timeout` more.
    pub fn new(ping_pong: PingPong, interval: Duration, timeout: Duration) -> Self {
        Self { ping_pong, interval, timeout, heard_at: Instant::now(), asked_at: None, in_flight: false }
    }

    /// The peer said something.
    pub fn heard(&mut self, now: Instant, cx: &mut Context<'_>) {
        self.heard_at = now;
        self.asked_at = None;
        if self.in_flight {
            self.in_flight = self.ping_pong.poll_pong(cx).is_pending();
        }
    }

    /// When it must be looked at.
    pub fn due_at(&self) -> Instant {
        match self.asked_at {
            Some(asked_at) => asked_at + self.timeout,
            None => self.heard_at + self.interval,
        }
    }

    /// Asks when it is time. `Ready`: the peer is gone.
    pub fn tick(&mut self, now: Instant) -> Poll<()> {
        if now < self.due_at() {
            return Poll::Pending;
        }
        if self.asked_at.is_some() {
            return Poll::Ready(());
        }
        self.asked_at = Some(now);
        // Fails while one is in flight, which then is the question, and when the connection ends, which its driver sees.
        self.in_flight |= self.ping_pong.send_ping(Ping::opaque()).is_ok();
        Poll::Pending
    }
}
