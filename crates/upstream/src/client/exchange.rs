//! Sends a request over the connections of the settings that are in use, and again over new ones if
//! it could not be sent because those settings are outdated.

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use tower::{BoxError, ServiceExt};

use super::{Upstream, UpstreamBody, UpstreamObserver, Verb, trusted_transport::Transport};
use crate::{error::UpstreamError, transport};

impl Upstream {
    /// Sends a request. Every status is an answer. A request that was not sent because of the
    /// credentials or the CA is sent with new ones, if there are any.
    pub(super) async fn exchange(
        &self,
        verb: Verb,
        request: Request<Bytes>,
    ) -> Result<Response<UpstreamBody>, UpstreamError> {
        let classify = |error| transport::classify(error, &self.inner.server);
        let used = self.inner.transport.current().await;
        let error = match self.exchange_over(&used, verb, request.clone()).await {
            Ok(response) => return Ok(response),
            Err(error) => error,
        };
        let is_unsent = transport::is_unsent(&*error);
        let error = classify(error);
        let is_renewed = error.may_be_of_settings() && self.inner.transport.refused(&used).await;
        // TLS may also break after the server has read the request.
        if !is_renewed || !is_unsent {
            return Err(error);
        }
        self.exchange_over(&self.inner.transport.last(), verb, request).await.map_err(classify)
    }

    async fn exchange_over(
        &self,
        transport: &Transport,
        verb: Verb,
        request: Request<Bytes>,
    ) -> Result<Response<UpstreamBody>, BoxError> {
        let mut observed = ObservedRequest { observer: &self.observer, verb, status: None };
        let response = transport.service.clone().oneshot(request).await?;
        observed.status = Some(response.status());
        Ok(response)
    }
}

/// Calls the observer when dropped, so exactly once per request, even if the caller stopped
/// waiting.
struct ObservedRequest<'a> {
    observer: &'a UpstreamObserver,
    verb: Verb,
    status: Option<StatusCode>,
}

impl Drop for ObservedRequest<'_> {
    fn drop(&mut self) {
        (self.observer)(self.verb, self.status);
    }
}
