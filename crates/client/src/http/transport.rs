//! Sends HTTP requests: over reqwest in programs, over in-memory connections in tests and
//! simulations.

use std::{fmt, time::Duration};

use bytes::{Bytes, BytesMut};
use futures::{StreamExt, future::BoxFuture, stream::BoxStream};

use crate::{
    budget::FallbackBudget,
    error::{ApiStatus, ClientError},
};

/// The number of bytes read from an error's body.
const ERROR_BODY_BYTES_MAX: usize = 64 << 10;

/// Sends GET requests to one server, with its credentials.
pub trait HttpTransport: Send + Sync + 'static {
    /// Sends a request. `path_and_query` is relative to the server's base URL and starts with a
    /// slash. The body of the response is plain: the transport decodes it. A response with an error
    /// status is a response, not an error.
    ///
    /// # Errors
    /// [`ClientError::HttpUnreachable`] without a connection or credentials.
    fn get(&self, path_and_query: String, accept: &'static str) -> BoxFuture<'_, Result<HttpResponse, ClientError>>;

    /// Scheme, host and port, for messages. Without user info.
    fn address(&self) -> &str;

    /// Returns the budget of requests at the apiserver that kubefan named last, in the header
    /// `Kubefan-Fallback`. Only answers that `Cache-Status` calls kubefan's own count. `None` if it
    /// has named none.
    fn fallback_budget(&self) -> Option<FallbackBudget> {
        None
    }
}

/// A response. The body may still be arriving.
pub struct HttpResponse {
    /// The HTTP status code.
    pub status: u16,
    /// The `Retry-After` header, if it is a number of seconds.
    pub retry_after: Option<Duration>,
    /// The body. It ends after an error.
    pub body: BoxStream<'static, Result<Bytes, ClientError>>,
}

impl fmt::Debug for HttpResponse {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("HttpResponse").field("status", &self.status).finish_non_exhaustive()
    }
}

impl HttpResponse {
    /// Turns every status except 200 into an error, with the Status or text in the body.
    pub(super) async fn success(self, address: &str) -> Result<Self, ClientError> {
        if self.status == 200 {
            return Ok(self);
        }
        let Self { status, retry_after, body } = self;
        if !(400..600).contains(&status) {
            let message = format!("HTTP status {status}");
            return Err(ClientError::HttpProtocol { address: address.to_owned(), message });
        }
        // Without a readable body, the status alone is sufficient.
        let body = read(body, ERROR_BODY_BYTES_MAX).await.ok().flatten().unwrap_or_default();
        Err(ApiStatus::from_response(status, retry_after, &body).into())
    }

    /// The whole body.
    pub(super) async fn bytes(self, bytes_max: usize, address: &str) -> Result<Bytes, ClientError> {
        read(self.body, bytes_max).await?.ok_or_else(|| ClientError::HttpProtocol {
            address: address.to_owned(),
            message: format!("the answer is longer than {bytes_max} bytes; a smaller page size may help"),
        })
    }
}

/// The whole body; `None` if it is longer than the limit. A body of one chunk is not copied.
async fn read(
    mut body: BoxStream<'static, Result<Bytes, ClientError>>,
    bytes_max: usize,
) -> Result<Option<Bytes>, ClientError> {
    let Some(first) = body.next().await.transpose()? else { return Ok(Some(Bytes::new())) };
    if first.len() > bytes_max {
        return Ok(None);
    }
    let Some(second) = body.next().await.transpose()? else { return Ok(Some(first)) };
    let mut bytes = BytesMut::from(first);
    let mut next = Some(second);
    while let Some(chunk) = next {
        if bytes.len() + chunk.len() > bytes_max {
            return Ok(None);
        }
        bytes.extend_from_slice(&chunk);
        next = body.next().await.transpose()?;
    }
    Ok(Some(bytes.freeze()))
}
