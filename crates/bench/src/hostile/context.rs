//! The parts of every attack: its target, its end, its own addresses, and a tally.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use tokio::{
    net::{TcpSocket, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep_until, timeout_at},
};
use tokio_rustls::TlsConnector;

use super::tally::Tally;
use crate::{connector::Transport, tls::TlsClient};

/// The number of addresses that the attackers use, from 127.0.0.2 on. The honest clients use
/// 127.0.0.1.
const ADDRESSES: u8 = 8;
/// The receive buffer of a client that does not read, in bytes.
const SMALL_BUFFER_BYTES: u32 = 4096;
/// Interval at which operations are started.
const TICK: Duration = Duration::from_millis(10);
/// Operations that run at a time, so that a server that does not answer bounds the attack.
const RUNNING_MAX: usize = 6000;
/// Outcome of a connection that was not accepted.
const NOT_CONNECTED: &str = "not connected";

/// An attack that runs. Clones share the tally.
#[derive(Clone)]
pub(crate) struct Context {
    /// The data port of the server.
    pub(super) target: SocketAddr,
    /// The admin port of the server.
    pub(super) admin: SocketAddr,
    /// A version that the server can resume from.
    pub(super) version: u64,
    /// End of the attack.
    pub(super) end: Instant,
    /// `None` without TLS.
    pub(super) tls: Option<TlsClient>,
    pub(super) tally: Arc<Tally>,
}

impl Context {
    /// Runs `operation` for the numbers below `count`, at most `per_second`, until the attack ends.
    /// Each operation is dropped at the end.
    pub(super) async fn run<F: Future<Output = ()> + Send + 'static>(
        &self,
        count: u64,
        per_second: u64,
        operation: impl Fn(Self, u64) -> F,
    ) {
        let start = Instant::now();
        let places = Arc::new(Semaphore::new(RUNNING_MAX));
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut running = JoinSet::new();
        let mut next = 0;
        while Instant::now() < self.end && next < count {
            ticks.tick().await;
            // A slow machine starts late operations together, up to a tenth of a second's.
            let due = (start.elapsed().as_micros() as u64 * per_second / 1_000_000 + 1).min(count);
            next = next.max(due.saturating_sub((per_second / 10).max(1)));
            while next < due {
                let Ok(place) = places.clone().try_acquire_owned() else { break };
                let operation = operation(self.clone(), next);
                let end = self.end;
                running.spawn(async move {
                    let _ = timeout_at(end, operation).await;
                    drop(place);
                });
                next += 1;
            }
            while running.try_join_next().is_some() {}
        }
        sleep_until(self.end).await;
    }

    /// Connects to the data port from the address of this number.
    pub(super) async fn connect(&self, number: u64) -> Option<TcpStream> {
        self.connect_to(self.target, number, false).await
    }

    /// Like [`Self::connect`], over TLS if the server has it.
    pub(super) async fn connect_by_tls(&self, number: u64) -> Option<Box<dyn Transport>> {
        let stream = self.connect(number).await?;
        let Some((config, name)) = &self.tls else { return Some(Box::new(stream)) };
        let connected = TlsConnector::from(config.clone()).connect(name.clone(), stream).await;
        let connected = connected.inspect_err(|_| self.tally.count(NOT_CONNECTED)).ok()?;
        Some(Box::new(connected))
    }

    /// Like [`Self::connect`], with a receive buffer that is soon full.
    pub(super) async fn connect_with_small_buffer(&self, number: u64) -> Option<TcpStream> {
        self.connect_to(self.target, number, true).await
    }

    /// Connects to an address of the server.
    pub(super) async fn connect_to(&self, address: SocketAddr, number: u64, is_small: bool) -> Option<TcpStream> {
        let connected = bound(number, is_small).map(|socket| socket.connect(address));
        let connected = match connected {
            Ok(connecting) => connecting.await,
            Err(error) => Err(error),
        };
        connected.inspect_err(|_| self.tally.count(NOT_CONNECTED)).ok()
    }

    /// Waits for the end of the attack.
    pub(super) async fn hold(&self) {
        sleep_until(self.end).await;
    }
}

/// A socket with the address of this number.
fn bound(number: u64, is_small: bool) -> io::Result<TcpSocket> {
    let socket = TcpSocket::new_v4()?;
    if is_small {
        socket.set_recv_buffer_size(SMALL_BUFFER_BYTES)?;
    }
    let host = Ipv4Addr::new(127, 0, 0, 2 + (number % u64::from(ADDRESSES)) as u8);
    socket.bind((host, 0).into())?;
    socket.set_nodelay(true)?;
    Ok(socket)
}
