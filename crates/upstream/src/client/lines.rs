//! Reads the events of a watch from its body.
//!
//! It guards against a broken or hostile server. An endless line meets a limit. A body that ends
//! inside a line is an error and never yields half an object. A silent connection ends after the
//! idle timeout. Concatenated gzip members are supported: Kubernetes 1.37 compresses watches with
//! one member per event, and a decoder that stops after the first member would lose the rest
//! silently.

use std::{
    io::{self, Write},
    time::Duration,
};

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
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
    /// Whether the body is gzip, according to its `Content-Encoding`.
    pub gzip: bool,
    /// Separation of the events.
    pub framing: Framing,
}

impl Default for LineOptions {
    fn default() -> Self {
        Self { line_bytes_max: LINE_BYTES_MAX, idle_timeout: None, gzip: false, framing: Framing::Lines }
    }
}

/// The lines, or length-prefixed messages, of a stream of chunks.
pub struct Lines<S> {
    chunks: S,
    options: LineOptions,
    /// Created with the first chunk, because an empty body has no gzip header.
    gunzip: Option<MultiGzDecoder<Vec<u8>>>,
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
            gunzip: None,
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
                    self.accept(chunk)?;
                }
                None => {
                    self.ended = true;
                    self.finish_gzip()?;
                }
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

    fn accept(&mut self, chunk: Bytes) -> Result<(), UpstreamError> {
        if !self.options.gzip {
            self.body.push(chunk);
            return Ok(());
        }
        let gunzip = self.gunzip.get_or_insert_with(|| MultiGzDecoder::new(Vec::new()));
        // In small steps, so that a chunk that inflates a thousandfold meets the limit before it
        // fills memory.
        for step in chunk.chunks(1024) {
            gunzip.write_all(step).and_then(|()| gunzip.flush()).map_err(broken_gzip)?;
            let inflated = std::mem::take(gunzip.get_mut());
            if !inflated.is_empty() {
                self.body.push(Bytes::from(inflated));
            }
            if self.body.unexamined_bytes() > self.options.line_bytes_max.saturating_mul(2) {
                return Err(UpstreamError::TooLarge { body_bytes_max: self.options.line_bytes_max * 2 });
            }
        }
        Ok(())
    }

    fn finish_gzip(&mut self) -> Result<(), UpstreamError> {
        let Some(mut gunzip) = self.gunzip.take() else { return Ok(()) };
        gunzip.try_finish().map_err(broken_gzip)?;
        let rest = std::mem::take(gunzip.get_mut());
        if !rest.is_empty() {
            self.body.push(Bytes::from(rest));
        }
        Ok(())
    }
}

fn broken_gzip(error: io::Error) -> UpstreamError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => UpstreamError::Reset { message: "the gzip stream was cut off".to_owned() },
        _ => UpstreamError::invalid(format_args!("broken gzip: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use flate2::{Compression, write::GzEncoder};
    use futures::stream;
    use proptest::prelude::*;

    use super::*;

    const GZIP: LineOptions =
        LineOptions { line_bytes_max: LINE_BYTES_MAX, idle_timeout: None, gzip: true, framing: Framing::Lines };

    async fn collect(chunks: Vec<Bytes>, options: LineOptions) -> Result<Vec<Bytes>, UpstreamError> {
        let mut lines = Lines::new(stream::iter(chunks.into_iter().map(Ok)), options);
        let mut all = Vec::new();
        while let Some(line) = lines.next_line().await? {
            all.push(line);
        }
        Ok(all)
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
    }

    fn split(mut body: &[u8], sizes: &[usize]) -> Vec<Bytes> {
        let mut chunks = Vec::new();
        for size in sizes.iter().cycle() {
            if body.is_empty() || sizes.is_empty() {
                break;
            }
            let (chunk, rest) = body.split_at((*size).min(body.len()));
            chunks.push(Bytes::copy_from_slice(chunk));
            body = rest;
        }
        chunks
    }

    fn members(lines: &[Vec<u8>]) -> Vec<u8> {
        let member = |line: &Vec<u8>| {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(line).unwrap();
            encoder.write_all(b"\n").unwrap();
            encoder.finish().unwrap()
        };
        lines.iter().flat_map(member).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_split_into_chunks_gives_the_same_lines(
            lines in prop::collection::vec("[a-z{}\" ]{0,40}[}]", 0..20),
            sizes in prop::collection::vec(1usize..50, 1..10),
        ) {
            let lines: Vec<Vec<u8>> = lines.into_iter().map(String::into_bytes).collect();
            let got = run(collect(split(&members(&lines), &sizes), GZIP)).unwrap();
            prop_assert_eq!(got, lines);
        }

        #[test]
        fn invalid_gzip_never_panics(body in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = run(collect(split(&body, &[7]), GZIP));
        }
    }

    #[tokio::test]
    async fn each_gzip_member_yields_its_line_without_waiting_for_the_next() {
        let (sender, receiver) = tokio::sync::mpsc::channel(4);
        let chunks = tokio_stream::wrappers::ReceiverStream::new(receiver);
        let mut lines = Lines::new(chunks, GZIP);
        for line in ["{\"first\":1}", "{\"second\":2}"] {
            sender.send(Ok(Bytes::from(members(&[line.as_bytes().to_vec()])))).await.unwrap();
            assert_eq!(lines.next_line().await.unwrap().unwrap(), line, "before the next member arrives");
        }
    }

    #[tokio::test]
    async fn a_body_that_ends_inside_a_line_is_truncated() {
        let error = collect(vec![Bytes::from_static(b"{}\n{\"a\"")], LineOptions::default()).await.unwrap_err();
        assert_eq!(error, UpstreamError::Truncated { partial_bytes: 4 });
        let mut gzip = members(&[b"{\"a\":1}".to_vec()]);
        gzip.truncate(gzip.len() - 9);
        let error = collect(vec![gzip.into()], GZIP).await.unwrap_err();
        assert!(matches!(error, UpstreamError::Reset { .. } | UpstreamError::Truncated { .. }), "{error}");
    }

    #[tokio::test]
    async fn an_endless_line_meets_the_limit() {
        let options = LineOptions { line_bytes_max: 100, ..LineOptions::default() };
        let endless = vec![Bytes::from_static(&[b'x'; 60]); 1000];
        assert_eq!(collect(endless, options).await, Err(UpstreamError::LineTooLong { line_bytes_max: 100 }));
        let mut bomb = GzEncoder::new(Vec::new(), Compression::best());
        bomb.write_all(&vec![b'x'; 1 << 20]).unwrap();
        let bomb = bomb.finish().unwrap();
        assert!(collect(vec![bomb.into()], LineOptions { gzip: true, ..options }).await.is_err());
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
