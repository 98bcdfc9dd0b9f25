//! The plain chunks of a response's body, according to its `Content-Encoding`.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures::{Stream, TryStream};

use crate::{Decoder, GzipError};

/// A `Content-Encoding` other than `gzip` and `identity`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("it sends the content encoding {0:?}, which was not requested")]
pub struct UnknownCoding(pub String);

/// The reason why a body ends early.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BodyError<E> {
    /// The error of the chunks.
    #[error(transparent)]
    Chunks(E),
    /// The body is not the gzip that its header promises.
    #[error(transparent)]
    Gzip(#[from] GzipError),
}

/// A stream of the plain chunks of a body. Those of gzip are at most
/// [`SLICE_BYTES_MAX`](crate::SLICE_BYTES_MAX) long, and decoded when they are asked for, so limits
/// that its reader has for plain bytes also hold for a body that inflates a thousandfold.
#[derive(Debug)]
pub struct PlainBody<S> {
    chunks: S,
    /// `None` for a body that is not encoded.
    decoder: Option<Decoder>,
}

impl<S> PlainBody<S> {
    /// Reads the chunks of a body with a `Content-Encoding`.
    ///
    /// # Errors
    /// [`UnknownCoding`].
    pub fn new(chunks: S, content_encoding: Option<&[u8]>) -> Result<Self, UnknownCoding> {
        let coding = content_encoding.unwrap_or_default().trim_ascii();
        let is = |name: &[u8]| coding.eq_ignore_ascii_case(name);
        if coding.is_empty() || is(b"identity") {
            return Ok(Self { chunks, decoder: None });
        }
        if is(b"gzip") || is(b"x-gzip") {
            return Ok(Self { chunks, decoder: Some(Decoder::new()) });
        }
        Err(UnknownCoding(String::from_utf8_lossy(coding).into_owned()))
    }

    /// Whether the body is encoded, so that its plain bytes are not those of the response.
    pub fn is_encoded(&self) -> bool {
        self.decoder.is_some()
    }
}

impl<S: TryStream<Ok = Bytes> + Unpin> Stream for PlainBody<S> {
    type Item = Result<Bytes, BodyError<S::Error>>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { chunks, decoder } = self.get_mut();
        loop {
            if let Some(slice) = decoder.as_mut().map(Decoder::next_slice).transpose()?.flatten() {
                return Poll::Ready(Some(Ok(slice)));
            }
            let chunk = ready!(Pin::new(&mut *chunks).try_poll_next(context)).transpose().map_err(BodyError::Chunks)?;
            match (decoder.as_mut(), chunk) {
                (Some(decoder), Some(chunk)) => decoder.push(chunk),
                (Some(decoder), None) => {
                    decoder.finish()?;
                    return Poll::Ready(None);
                }
                (None, chunk) => return Poll::Ready(chunk.map(Ok)),
            }
        }
    }
}
