//! Splits a watch's body into lines: one JSON document each.
//!
//! It guards against a broken server. An endless line meets a limit, a body that ends inside a line
//! is an error and never yields half an object, and a connection that outlives its deadline ends.

use bytes::{Bytes, BytesMut};
use futures::{StreamExt, stream::BoxStream};
use tokio::time::{Instant, timeout_at};

use crate::error::ClientError;

/// The lines of a body.
///
/// A line that lies within one chunk is a slice of it, not a copy. Blank lines are skipped.
pub(super) struct Lines {
    body: BoxStream<'static, Result<Bytes, ClientError>>,
    /// The rest of the last chunk. It has not been searched.
    chunk: Bytes,
    /// The start of an incomplete line. It has no newline, so no byte is searched twice.
    partial: BytesMut,
    line_bytes_max: usize,
    deadline: Instant,
    address: String,
}

impl Lines {
    /// Splits `body`, which must end before `deadline`.
    pub(super) fn new(
        body: BoxStream<'static, Result<Bytes, ClientError>>,
        line_bytes_max: usize,
        deadline: Instant,
        address: &str,
    ) -> Self {
        let chunk = Bytes::new();
        let partial = BytesMut::new();
        Self { body, chunk, partial, line_bytes_max, deadline, address: address.to_owned() }
    }

    /// The server's address, for messages.
    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// The next line without its newline; `None` at a clean end. After an error, it must not be
    /// called again.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        loop {
            while let Some(line) = self.take_line()? {
                if !line.trim_ascii().is_empty() {
                    return Ok(Some(line));
                }
            }
            match timeout_at(self.deadline, self.body.next()).await {
                Ok(Some(chunk)) => self.chunk = chunk?,
                Ok(None) if self.partial.trim_ascii().is_empty() => return Ok(None),
                Ok(None) => {
                    let bytes = self.partial.len();
                    return Err(self.unreachable(format!("the watch was cut off inside an event, after {bytes} bytes")));
                }
                Err(_) => {
                    let message = "the server did not end the watch at its timeout; the connection is idle or dead";
                    return Err(self.unreachable(message.to_owned()));
                }
            }
        }
    }

    /// The next complete line of the chunk. The bytes after the last newline move to `partial`.
    fn take_line(&mut self) -> Result<Option<Bytes>, ClientError> {
        let newline = memchr::memchr(b'\n', &self.chunk);
        let bytes = self.partial.len() + newline.unwrap_or(self.chunk.len());
        if bytes > self.line_bytes_max {
            let message = format!("a watch event is longer than {} bytes", self.line_bytes_max);
            return Err(ClientError::HttpProtocol { address: self.address.clone(), message });
        }
        let Some(newline) = newline else {
            self.partial.extend_from_slice(&std::mem::take(&mut self.chunk));
            return Ok(None);
        };
        let head = self.chunk.split_to(newline + 1).slice(..newline);
        if self.partial.is_empty() {
            return Ok(Some(head));
        }
        self.partial.extend_from_slice(&head);
        Ok(Some(self.partial.split().freeze()))
    }

    fn unreachable(&self, message: String) -> ClientError {
        ClientError::HttpUnreachable { address: self.address.clone(), message }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::stream;
    use proptest::prelude::*;

    use super::*;

    const LIMIT: usize = 100;

    fn lines(chunks: Vec<Bytes>) -> Lines {
        let deadline = Instant::now() + Duration::from_secs(60);
        Lines::new(stream::iter(chunks.into_iter().map(Ok)).boxed(), LIMIT, deadline, "http://h")
    }

    async fn collect(chunks: Vec<Bytes>) -> Result<Vec<Bytes>, ClientError> {
        let mut lines = lines(chunks);
        let mut all = Vec::new();
        while let Some(line) = lines.next().await? {
            all.push(line);
        }
        Ok(all)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_split_into_chunks_gives_the_same_lines(
            texts in prop::collection::vec("[a-z{}\" ]{0,40}[}]", 0..20),
            sizes in prop::collection::vec(1usize..50, 1..10),
        ) {
            let body: Vec<u8> = texts.iter().flat_map(|text| [text.as_bytes(), b"\n"].concat()).collect();
            let mut chunks = Vec::new();
            let mut rest = &body[..];
            let mut sizes = sizes.iter().cycle();
            while !rest.is_empty() {
                let (chunk, tail) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
                chunks.push(Bytes::copy_from_slice(chunk));
                rest = tail;
            }
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let got = runtime.block_on(collect(chunks)).unwrap();
            prop_assert_eq!(got, texts.iter().map(|text| Bytes::from(text.clone())).collect::<Vec<_>>());
        }
    }

    #[tokio::test]
    async fn a_line_in_one_chunk_is_not_copied() {
        let chunk = Bytes::from_static(b"{\"a\":1}\n\r\n{\"b\":2}\n");
        let lines = collect(vec![chunk.clone()]).await.unwrap();
        assert_eq!((lines.len(), lines[1].as_ptr()), (2, chunk[10..].as_ptr()));
    }

    #[tokio::test]
    async fn a_body_that_ends_inside_a_line_is_an_error() {
        let error = collect(vec![Bytes::from_static(b"{}\n{\"a\"")]).await.unwrap_err();
        assert!(error.is_unreachable() && error.to_string().contains("inside an event, after 4 bytes"), "{error}");
    }

    #[tokio::test]
    async fn an_endless_line_meets_the_limit() {
        for chunks in [vec![Bytes::from_static(&[b'x'; 60]); 1000], vec![Bytes::from(vec![b'x'; 101])]] {
            let error = collect(chunks).await.unwrap_err();
            assert!(error.to_string().contains("longer than 100 bytes"), "{error}");
        }
        assert_eq!(collect(vec![[&[b'x'; 100][..], b"\n"].concat().into()]).await.unwrap().len(), 1);
    }
}
