//! The limits of a connection that are not configurable, in one place.
//!
//! One connection can pin at most [`COALESCE_BYTES_MAX`] in its write buffer, [`TLS_BYTES_MAX`] in
//! its TLS session, [`PASS_BYTES_MAX`] handed to HTTP/2 and not written yet, and for each stream
//! whose window is closed the rest of one message. The bytes of the last two are shared with the
//! cache.

use std::time::Duration;

/// Time for each of the TLS handshake, the first bytes of HTTP and the HTTP/2 handshake.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The certificates in the chain of a client, its own included. The verifier may try them in every
/// order, so a few more would cost much more.
pub const CLIENT_CHAIN_LENGTH_MAX: usize = 5;
/// The bytes of the chain of a client. Its connection keeps it.
pub const CLIENT_CHAIN_BYTES_MAX: usize = 16 << 10;

/// Time for a gRPC call to send its request.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The largest header list of a request, including path and query, in bytes. Longer ones are
/// answered with 431. The apiserver accepts 1 MiB, which its own clients never send, and which
/// every connection could make kubefan buffer.
pub const HEADER_LIST_BYTES_MAX: u32 = 64 << 10;

/// The receive window of a stream and of a connection, in bytes. Requests are small.
pub const RECEIVE_WINDOW_BYTES: u32 = 65_535;

/// The largest frame that clients may send, in bytes: the smallest limit that HTTP/2 allows.
pub const RECEIVE_FRAME_BYTES_MAX: u32 = 16 << 10;

/// The number of reset streams that are remembered.
pub const RESET_STREAMS_MAX: usize = 50;

/// The number of streams that the client may open and reset before they are accepted. More end the
/// connection ("rapid reset").
pub const PENDING_RESET_STREAMS_MAX: usize = 20;

/// The number of streams that may be reset because of protocol errors of the client. More end the
/// connection.
pub const ERROR_RESET_STREAMS_MAX: usize = 1024;

/// The approximate size of a batch of one stream, in bytes.
pub const BATCH_BYTES_MAX: usize = kubefan_fanout::BATCH_BYTES_MAX;

/// The approximate number of bytes that one connection sends in one pass, before other tasks run.
pub const PASS_BYTES_MAX: usize = 256 << 10;

/// The least that a client must read per stall timeout while the server waits for it, in bytes. A
/// client that reads less has stopped, or reads a byte now and then to keep its snapshot pinned.
/// One that reads just this much is ended by [`time_for`].
/// Over TCP, progress is visible only in steps of a sixteenth of the client's receive buffer; a
/// client that reads a megabyte per stall timeout is never mistaken for a stopped one.
pub const PROGRESS_BYTES_MIN: usize = 16 << 10;

/// Time for which a watch over HTTP stays open after its state, before it ends only so that its
/// client comes back. client-go takes a watch that ends within a second and without an event for a
/// failure, and lists again.
pub const WATCH_AGE_MIN: Duration = Duration::from_secs(2);

/// The length of the accept queue; Linux uses `net.core.somaxconn` if that is less. After a restart
/// every subscriber reconnects at once. A connection that finds the queue full (usually 128) is
/// dropped, or reset when it first sends something.
pub const BACKLOG: i32 = 4096;

/// The least that a reader of pinned state must read per stall timeout on average, in bytes, once
/// it has read for [`SLOW_STALL_TIMEOUTS`] of them.
pub const AVERAGE_BYTES_MIN: usize = 1 << 20;

/// The stall timeouts that a reader of pinned state has at any pace. The apiserver gives a list a
/// minute in all.
pub const SLOW_STALL_TIMEOUTS: u32 = 2;

/// Returns the time that a reader has for `bytes` of pinned state.
pub fn time_for(bytes: usize, stall_timeout: Duration) -> Duration {
    let times = f64::from(SLOW_STALL_TIMEOUTS) + bytes as f64 / AVERAGE_BYTES_MIN as f64;
    Duration::try_from_secs_f64(stall_timeout.as_secs_f64() * times).unwrap_or(Duration::MAX)
}

/// The unsent bytes that the kernel buffers for a connection (`TCP_NOTSENT_LOWAT`). The default is
/// up to 4 MiB (`net.ipv4.tcp_wmem`), and a third of it must be sent before the socket is writable
/// again: a slow reader would hold that much, and would seem to have stopped.
pub const UNSENT_BYTES_MAX: u32 = 512 << 10;

/// The number of requests that one connection accepts in one pass, before other tasks run.
pub const PASS_REQUESTS_MAX: usize = 64;

/// The size of the write buffer of a connection, in bytes: a batch and the heads of its frames. A
/// few bytes less, and the rest of a batch would need a second write.
pub const COALESCE_BYTES_MAX: usize = BATCH_BYTES_MAX + (4 << 10);

/// The plaintext that a TLS session accepts at a time, in bytes: the whole write buffer and the
/// heads of its records. It buffers as much ciphertext for a socket that is not writable.
pub const TLS_BYTES_MAX: usize = COALESCE_BYTES_MAX + (4 << 10);

/// Time for an HTTP/1.1 connection to send the headers of its next request.
pub const HTTP1_HEADERS_TIMEOUT: Duration = Duration::from_secs(60);
