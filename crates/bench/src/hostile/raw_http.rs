//! HTTP/1.1 written by hand, so that requests can be wrong, late or unfinished.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::sleep,
};

use super::context::Context;

const READ_BYTES: usize = 16 << 10;
/// The bytes that show an HTTP/1.1 status: `HTTP/1.1 200`.
const STATUS_BYTES: usize = 12;

/// The head of a GET request.
pub(super) fn get(path: &str, headers: &[(&str, &str)]) -> String {
    let mut head = format!("GET {path} HTTP/1.1\r\n");
    if !headers.iter().any(|(name, _)| *name == "Host") {
        head.push_str("Host: localhost\r\n");
    }
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    head
}

/// A GET request after whose answer the server closes the connection.
pub(super) fn get_once(path: &str) -> String {
    get(path, &[("Connection", "close")])
}

/// The request for a watch over a websocket.
pub(super) fn websocket(path: &str) -> String {
    let headers = [
        ("Origin", "http://localhost"),
        ("Connection", "Upgrade"),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA=="),
    ];
    get(path, &headers)
}

/// Sends a request on a connection of its own and reads the answer to its end.
pub(super) async fn request(context: &Context, number: u64, request: &str) {
    let Some(mut stream) = context.connect(number).await else { return };
    if stream.write_all(request.as_bytes()).await.is_err() {
        return context.tally.count("write failed");
    }
    read_to_end(context, &mut stream).await;
}

/// Sends a request and does not read. Ends when the server ends the connection.
pub(super) async fn request_without_reading(context: &Context, number: u64, request: &str) {
    let Some(mut stream) = context.connect_with_small_buffer(number).await else { return };
    if stream.write_all(request.as_bytes()).await.is_err() {
        return context.tally.count("write failed");
    }
    context.tally.count("sent");
    wait_for_end(context, &stream).await;
}

/// Waits until the server closes or resets a connection that is not read.
pub(super) async fn wait_for_end(context: &Context, stream: &TcpStream) {
    // A reset shows as an error of the socket, and the end of the data as a peek of nothing.
    loop {
        sleep(Duration::from_millis(100)).await;
        let is_reset = stream.take_error().is_ok_and(|error| error.is_some());
        let mut byte = [0];
        let is_closed = matches!(stream.try_read_peek(&mut byte), Some(0));
        if is_reset || is_closed {
            return context.tally.count("ended");
        }
    }
}

/// Looks at the next byte without reading it.
trait TryPeek {
    /// `None` if there is none yet, 0 at the end.
    fn try_read_peek(&self, byte: &mut [u8; 1]) -> Option<usize>;
}

impl TryPeek for TcpStream {
    fn try_read_peek(&self, byte: &mut [u8; 1]) -> Option<usize> {
        use futures::FutureExt;
        match self.peek(byte).now_or_never()? {
            Ok(count) => Some(count),
            Err(_) => Some(0),
        }
    }
}

/// Reads an answer to the end of the connection. Counts its status.
pub(super) async fn read_to_end(context: &Context, stream: &mut TcpStream) {
    let mut buffer = vec![0; READ_BYTES];
    let mut head = Vec::new();
    loop {
        match stream.read(&mut buffer).await {
            Ok(0) if head.is_empty() => return context.tally.count("closed"),
            Ok(0) => return,
            Err(_) => return context.tally.count("reset"),
            Ok(count) => {
                context.tally.add_bytes(count);
                count_status(context, &mut head, &buffer[..count]);
            }
        }
    }
}

/// Reads a little at a time.
pub(super) async fn drip(context: &Context, number: u64, request: &str, bytes: usize, every: Duration) {
    let Some(mut stream) = context.connect_with_small_buffer(number).await else { return };
    if stream.write_all(request.as_bytes()).await.is_err() {
        return context.tally.count("write failed");
    }
    let mut buffer = vec![0; bytes];
    let mut head = Vec::new();
    loop {
        match stream.read(&mut buffer).await {
            Ok(count @ 1..) => {
                context.tally.add_bytes(count);
                count_status(context, &mut head, &buffer[..count]);
            }
            _ => return context.tally.count("ended"),
        }
        sleep(every).await;
    }
}

/// Writes a byte now and then, and never the end.
pub(super) async fn drip_out(context: &Context, mut stream: TcpStream, start: &str, every: Duration) {
    if stream.write_all(start.as_bytes()).await.is_err() {
        return context.tally.count("write failed");
    }
    context.tally.count("begun");
    let mut buffer = [0; 256];
    let mut head = Vec::new();
    loop {
        tokio::select! {
            read = stream.read(&mut buffer) => match read {
                Ok(count @ 1..) => count_status(context, &mut head, &buffer[..count]),
                _ => return context.tally.count("ended"),
            },
            () = sleep(every) => if stream.write_all(b"x").await.is_err() {
                return context.tally.count("ended");
            },
        }
    }
}

/// Counts the status once its bytes have arrived.
fn count_status(context: &Context, head: &mut Vec<u8>, read: &[u8]) {
    if head.len() < STATUS_BYTES {
        head.extend_from_slice(&read[..read.len().min(STATUS_BYTES - head.len())]);
        if head.len() == STATUS_BYTES {
            context.tally.count(&String::from_utf8_lossy(&head[9..]));
        }
    }
}
