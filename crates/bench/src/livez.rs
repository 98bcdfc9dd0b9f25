//! Asks for `/livez` as the kubelet does, each time on a new connection, and notes the slowest
//! answer.
//!
//! The thread uses blocking sockets of its own: a runtime that is busy with subscribers would be
//! measured too.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// The time between two requests.
const INTERVAL: Duration = Duration::from_millis(50);
/// Maximum time of an answer. A missing answer counts as this slow.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Asks until it is dropped.
pub(super) struct Livez {
    slowest_micros: Arc<AtomicU64>,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Livez {
    /// Starts to ask the admin port at this address.
    #[expect(clippy::disallowed_methods, reason = "a thread of its own, on the machine's clock")]
    pub(super) fn start(address: SocketAddr) -> Self {
        let slowest_micros = Arc::new(AtomicU64::new(0));
        let stopped = Arc::new(AtomicBool::new(false));
        let slowest = slowest_micros.clone();
        let is_stopped = stopped.clone();
        let thread = thread::spawn(move || {
            while !is_stopped.load(Relaxed) {
                let start = Instant::now();
                let took = ask(address).map_or(ANSWER_TIMEOUT, |()| start.elapsed());
                slowest.fetch_max(took.as_micros() as u64, Relaxed);
                thread::sleep(INTERVAL.saturating_sub(start.elapsed()));
            }
        });
        Self { slowest_micros, stopped, thread: Some(thread) }
    }

    /// The slowest answer since the last call, in milliseconds.
    pub(super) fn take_slowest_millis(&self) -> f64 {
        self.slowest_micros.swap(0, Relaxed) as f64 / 1e3
    }
}

impl Drop for Livez {
    fn drop(&mut self) {
        self.stopped.store(true, Relaxed);
        // Ends within the timeout of an answer.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn ask(address: SocketAddr) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&address, ANSWER_TIMEOUT)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    stream.write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    if answer.starts_with(b"HTTP/1.1 200") { Ok(()) } else { Err(io::Error::other("not alive")) }
}
