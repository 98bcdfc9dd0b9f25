//! Every limit of the data port, in one place. What an operator may change is in the configuration; the rest is here.
//!
//! What one connection can make kubefan keep: [`COALESCE_BYTES_MAX`] on its way to the socket and [`TLS_BYTES_MAX`] behind that,
//! [`PASS_BYTES_MAX`] handed to HTTP/2 and not written yet, and for each stream whose window is closed the rest of one message. All but the
//! first two are shared with the cache.

use std::time::Duration;

/// How long a TLS handshake and the first bytes of HTTP may take together.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// The largest header list of a request, its path and query included, in bytes. More is answered with 431. The apiserver takes 1 MiB, which
/// is more than its own clients ever send, and every connection of a crowd could make kubefan keep as much.
pub const HEADER_LIST_BYTES_MAX: u32 = 64 << 10;

/// The window of a stream and of a connection for what peers send us, in bytes: requests are small.
pub const RECEIVE_WINDOW_BYTES: u32 = 65_535;

/// The largest frame that peers may send us, in bytes; the least that HTTP/2 allows.
pub const RECEIVE_FRAME_BYTES_MAX: u32 = 16 << 10;

/// Streams that the peer has reset and that are still remembered.
pub const RESET_STREAMS_MAX: usize = 50;

/// Streams that the peer may open and reset before they were looked at; more end the connection ("rapid reset").
pub const PENDING_RESET_STREAMS_MAX: usize = 20;

/// Streams that may be reset for the peer's own faults; more end the connection.
pub const ERROR_RESET_STREAMS_MAX: usize = 1024;

/// About how much one stream is given at a time, in bytes: enough for full segments, little enough that a stream that stalls pins next
/// to nothing.
pub const BATCH_BYTES_MAX: usize = 64 << 10;

/// About how much one connection sends before others have their turn, in bytes.
pub const PASS_BYTES_MAX: usize = 256 << 10;

/// What a reader takes at least per stall timeout while it is waited for, in bytes. Whoever takes less has stopped, or takes a byte now and
/// then to keep what its answer holds. Over TCP it is seen in the steps in which the reader's kernel takes more, a sixteenth of its receive
/// buffer: whoever reads a megabyte in that time is never taken for one that has stopped.
pub const PROGRESS_BYTES_MIN: usize = 16 << 10;

/// What the kernel takes for a connection before it is on its way, in bytes. By default it is up to 4 MiB (`net.ipv4.tcp_wmem`), of which a
/// third has to go before there is room again: a slow reader would hold that much, and look like one that has stopped in between.
pub const UNSENT_BYTES_MAX: u32 = 512 << 10;

/// Requests that one connection begins before others have their turn.
pub const PASS_REQUESTS_MAX: usize = 64;

/// What is gathered before it is written to the socket, in bytes: a batch and the heads of its frames. A few bytes that are left over would
/// cost a write of their own.
pub const COALESCE_BYTES_MAX: usize = BATCH_BYTES_MAX + (4 << 10);

/// What TLS takes at a time, in bytes: all that was gathered, and the heads of its records. It keeps as much, encrypted, for a socket that
/// takes nothing.
pub const TLS_BYTES_MAX: usize = COALESCE_BYTES_MAX + (4 << 10);

/// How long an HTTP/1.1 connection may take for the headers of its next request.
pub const HTTP1_HEADERS_TIMEOUT: Duration = Duration::from_secs(60);
