//! Reads the lines of a watch from its body: one JSON document each.
//!
//! It guards against a broken server. An endless line meets a limit, a body that ends inside a line
//! is an error and never yields half an object, and a connection that outlives its deadline ends.

use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use tokio::time::{Instant, timeout_at};

use crate::error::ClientError;
use kubefan_common::watch_body::{EventTooLong, Framing, WatchBody};

/// The lines of a body.
pub(super) struct Lines {
    chunks: BoxStream<'static, Result<Bytes, ClientError>>,
    body: WatchBody,
    line_bytes_max: usize,
    deadline: Instant,
    address: String,
}

impl Lines {
    /// Splits the body of `chunks`, which must end before `deadline`.
    pub(super) fn new(
        chunks: BoxStream<'static, Result<Bytes, ClientError>>,
        line_bytes_max: usize,
        deadline: Instant,
        address: &str,
    ) -> Self {
        let body = WatchBody::new(Framing::Lines, line_bytes_max);
        Self { chunks, body, line_bytes_max, deadline, address: address.to_owned() }
    }

    /// The server's address, for messages.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// The next line without its newline; `None` at a clean end. After an error, it must not be
    /// called again.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        loop {
            if let Some(line) = self.body.next_event().map_err(|EventTooLong| self.too_long())? {
                return Ok(Some(line));
            }
            let Ok(chunk) = timeout_at(self.deadline, self.chunks.next()).await else {
                let message = "the server did not end the watch at its timeout; the connection is idle or dead";
                return Err(self.unreachable(message.to_owned()));
            };
            let Some(chunk) = chunk else {
                return match self.body.incomplete_bytes() {
                    0 => Ok(None),
                    bytes => {
                        let message = format!("the watch was cut off inside an event, after {bytes} bytes");
                        Err(self.unreachable(message))
                    }
                };
            };
            self.body.push(chunk?);
        }
    }

    fn too_long(&self) -> ClientError {
        let message = format!("a watch event is longer than {} bytes", self.line_bytes_max);
        ClientError::HttpProtocol { address: self.address.clone(), message }
    }

    fn unreachable(&self, message: String) -> ClientError {
        ClientError::HttpUnreachable { address: self.address.clone(), message }
    }
}
