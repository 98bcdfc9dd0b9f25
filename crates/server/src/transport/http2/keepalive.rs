//! Detects clients that vanished: after a silence a PING is sent, and if nothing arrives in time,
//! the connection is closed.

use std::{
    task::{Context, Poll},
    time::Duration,
};

use h2::{Ping, PingPong};
use tokio::time::Instant;

/// The keepalive of one connection.
pub struct Keepalive {
    ping_pong: PingPong,
    interval: Duration,
    timeout: Duration,
    received_at: Instant,
    /// Time at which a PING was sent, if nothing has arrived since.
    ping_sent_at: Option<Instant>,
    /// Whether a PING is not acknowledged yet; h2 allows one at a time.
    in_flight: bool,
}

impl Keepalive {
    /// Sends a PING after `interval` of silence; the client is gone if it stays silent for another
    /// `timeout`.
    pub fn new(ping_pong: PingPong, interval: Duration, timeout: Duration) -> Self {
        Self { ping_pong, interval, timeout, received_at: Instant::now(), ping_sent_at: None, in_flight: false }
    }

    /// Records that the client has sent something.
    pub fn received(&mut self, now: Instant, cx: &mut Context<'_>) {
        self.received_at = now;
        self.ping_sent_at = None;
        if self.in_flight {
            self.in_flight = self.ping_pong.poll_pong(cx).is_pending();
        }
    }

    /// Time of the next call of [`Self::tick`].
    pub fn due_at(&self) -> Instant {
        match self.ping_sent_at {
            Some(sent_at) => sent_at + self.timeout,
            None => self.received_at + self.interval,
        }
    }

    /// Sends a PING if one is due. `Ready` if the client is gone.
    pub fn tick(&mut self, now: Instant) -> Poll<()> {
        if now < self.due_at() {
            return Poll::Pending;
        }
        if self.ping_sent_at.is_some() {
            return Poll::Ready(());
        }
        self.ping_sent_at = Some(now);
        // Fails while a PING is in flight, which then serves the purpose, and when the connection
        // ends, which its task notices.
        self.in_flight |= self.ping_pong.send_ping(Ping::opaque()).is_ok();
        Poll::Pending
    }
}
