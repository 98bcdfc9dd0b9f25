//! Connections to the data port: accepting them, TLS, HTTP/2 and HTTP/1.1, and the watches on them.
//!
//! [`serve`] accepts connections and detects their protocol. [`http2`] and [`http1`] each drive one
//! connection as one task. The hazard throughout is a client that stops reading: it must pin no
//! snapshot, hold no thread and delay no other client. [`limits`] has the limits of one connection.

pub mod certificate;
pub mod early_answer;
pub mod http1;
pub mod http2;
pub mod limits;
pub mod listen;
pub mod listen_address;
pub mod mismatch;
pub mod open_connections;
pub mod preface;
pub mod read_progress;
pub mod serve;
pub mod services;
mod spare_files;
pub mod tls;
pub mod tls_handshake;
pub mod tls_options;
pub mod unix_socket;
pub mod unread;
pub mod watch_timers;
