//! The plain bytes of an answer's body. All HTTP answers of upstream to kubefan's own requests are
//! decoded here.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures::Stream;
use http::{HeaderMap, HeaderValue, header};
use http_body::Body;
use http_body_util::{BodyDataStream, BodyExt};
use kubefan_cache::warnings::Warnings;
use kubefan_gzip::{BodyError, GzipError, PlainBody};

use crate::{
    error::UpstreamError,
    transport::{self, connection::UpstreamBody},
};

/// The plain chunks of a body.
pub struct BodyStream {
    body: PlainBody<BodyDataStream<UpstreamBody>>,
    server: String,
    /// The least number of plain bytes, if it is known.
    pub(super) bytes_min: usize,
    /// The warnings about the resource.
    pub(super) warnings: Warnings,
}

impl BodyStream {
    /// Reads a body with these headers.
    ///
    /// # Errors
    /// [`UpstreamError::InvalidResponse`] for an encoding that is not decoded.
    pub(super) fn new(headers: &HeaderMap, body: UpstreamBody, server: &str) -> Result<Self, UpstreamError> {
        let coding = headers.get(header::CONTENT_ENCODING).map(HeaderValue::as_bytes);
        let received_min = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
        let body = PlainBody::new(body.into_data_stream(), coding).map_err(UpstreamError::invalid)?;
        let bytes_min = if body.is_encoded() { 0 } else { received_min };
        Ok(Self { body, server: server.to_owned(), bytes_min, warnings: Warnings::default() })
    }

    /// Adds the warnings about the resource.
    pub(super) fn with_warnings(self, warnings: Warnings) -> Self {
        Self { warnings, ..self }
    }
}

impl Stream for BodyStream {
    type Item = Result<Bytes, UpstreamError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let chunk = ready!(Pin::new(&mut self.body).poll_next(context));
        Poll::Ready(chunk.map(|chunk| {
            chunk.map_err(|error| match error {
                BodyError::Chunks(error) => transport::classify(error, &self.server),
                // A broken connection has the same error.
                BodyError::Gzip(error @ GzipError::CutOff) => UpstreamError::Reset { message: error.to_string() },
                BodyError::Gzip(error @ GzipError::Broken(_)) => UpstreamError::invalid(error),
            })
        }))
    }
}
