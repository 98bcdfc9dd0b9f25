//! Reads the events of a watch from its body.
//!
//! It guards against a broken or hostile server. An endless line meets a limit. A body that ends
//! inside a line is an error and never yields half an object. A silent connection ends after the
//! idle timeout.

use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use kubefan_common::watch_body::{EventTooLong, Framing, WatchBody};
use tokio::time::{Instant, timeout_at};

use crate::error::UpstreamError;

/// The default limit for a line. etcd accepts requests of up to 1.5 MiB, and some clusters raise
/// that several times. JSON can need twice the bytes of the protobuf in etcd, and an event contains
/// at most one object.
pub const LINE_BYTES_MAX: usize = 16 << 20;

/// Limits for [`Lines`].
#[derive(Debug, Clone, Copy)]
pub struct LineOptions {
    /// The limit in bytes for a line without its newline, or for a message. It also limits the
    /// buffer.
    pub line_bytes_max: usize,
    /// The time without data after which the connection counts as dead; `None` for a body with its
    /// own deadline.
    pub idle_timeout: Option<Duration>,
    /// Separation of the events.
    pub framing: Framing,
}

impl Default for LineOptions {
    fn default() -> Self {
        Self { line_bytes_max: LINE_BYTES_MAX, idle_timeout: None, framing: Framing::Lines }
    }
}

/// The lines, or length-prefixed messages, of a stream of plain chunks.
pub struct Lines<S> {
    chunks: S,
    options: LineOptions,
    body: WatchBody,
    last_data: Instant,
    ended: bool,
}

impl<S> Lines<S>
where
    S: Stream<Item = Result<Bytes, UpstreamError>> + Unpin,
{
    /// Splits `chunks` into lines.
    pub fn new(chunks: S, options: LineOptions) -> Self {
        Self {
            chunks,
            body: WatchBody::new(options.framing, options.line_bytes_max),
            options,
            last_data: Instant::now(),
            ended: false,
        }
    }

    /// The next line without its newline; `None` at a clean end. After an error, it must not be
    /// called again.
    ///
    /// Cancel-safe.
    pub async fn next_line(&mut self) -> Result<Option<Bytes>, UpstreamError> {
        loop {
            let line_bytes_max = self.options.line_bytes_max;
            let ready = self.body.next_event().map_err(|EventTooLong| UpstreamError::LineTooLong { line_bytes_max })?;
            if ready.is_some() {
                return Ok(ready);
            }
            if self.ended {
                return match self.body.incomplete_bytes() {
                    0 => Ok(None),
                    partial_bytes => Err(UpstreamError::Truncated { partial_bytes }),
                };
            }
            match self.next_chunk().await? {
                Some(chunk) => {
                    self.last_data = Instant::now();
                    self.body.push(chunk);
                }
                None => self.ended = true,
            }
        }
    }

    async fn next_chunk(&mut self) -> Result<Option<Bytes>, UpstreamError> {
        let Some(idle_timeout) = self.options.idle_timeout else { return self.chunks.next().await.transpose() };
        match timeout_at(self.last_data + idle_timeout, self.chunks.next()).await {
            Ok(chunk) => chunk.transpose(),
            Err(_) => Err(UpstreamError::Idle { idle_timeout }),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::stream;

    use super::*;

    async fn collect(chunks: Vec<Bytes>, options: LineOptions) -> Result<Vec<Bytes>, UpstreamError> {
        let mut lines = Lines::new(stream::iter(chunks.into_iter().map(Ok)), options);
        let mut all = Vec::new();
        while let Some(line) = lines.next_line().await? {
            all.push(line);
        }
        Ok(all)
    }

    #[tokio::test]
    async fn a_body_that_ends_inside_a_line_is_truncated() {
        let error = collect(vec![Bytes::from_static(b"{}\n{\"a\"")], LineOptions::default()).await.unwrap_err();
        assert_eq!(error, UpstreamError::Truncated { partial_bytes: 4 });
    }

    #[tokio::test]
    async fn an_endless_line_meets_the_limit() {
        let options = LineOptions { line_bytes_max: 100, ..LineOptions::default() };
        let endless = vec![Bytes::from_static(&[b'x'; 60]); 1000];
        assert_eq!(collect(endless, options).await, Err(UpstreamError::LineTooLong { line_bytes_max: 100 }));
    }

    #[tokio::test(start_paused = true)]
    async fn silence_ends_with_idle_and_cancelled_waits_do_not_extend_it() {
        let chunks = stream::iter([Ok(Bytes::from_static(b"{}\n"))]).chain(stream::pending());
        let idle_timeout = Duration::from_secs(90);
        let mut lines = Lines::new(chunks, LineOptions { idle_timeout: Some(idle_timeout), ..LineOptions::default() });
        assert!(lines.next_line().await.unwrap().is_some());
        let start = Instant::now();
        for _ in 0..8 {
            assert!(tokio::time::timeout(Duration::from_secs(10), lines.next_line()).await.is_err());
        }
        assert_eq!(lines.next_line().await, Err(UpstreamError::Idle { idle_timeout }));
        assert_eq!(start.elapsed(), idle_timeout);
    }
}
