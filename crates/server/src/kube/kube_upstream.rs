//! Requests of the Kubernetes API to upstream: for answers that no cache has, and for the origins
//! whose pages may read kubefan's own answers.

use std::sync::Arc;

use futures::FutureExt;
use http::request::Parts;

use super::{
    answer::Answer,
    cross_origin::{AllowedOrigins, Asker, CorsRequest, origin_of},
    forward::Forwarder,
    status::Failure,
    websocket::check_origin,
};
use crate::client_info::ClientInfo;

/// The two kinds of requests to upstream.
#[derive(Clone, Default)]
pub struct KubeUpstream {
    /// Forwards requests; `None` if passthrough is off.
    pub forwarder: Option<Arc<Forwarder>>,
    /// Asks about origins; `None` if no page of another site may read.
    pub origins: Option<Arc<AllowedOrigins>>,
}

impl KubeUpstream {
    /// Whether requests are forwarded.
    pub fn forwards(&self) -> bool {
        self.forwarder.is_some()
    }

    /// Lets the page that sent a request read the answer, if there is one and it may.
    pub async fn permit(&self, page: Option<CorsRequest>, answer: Answer) -> Answer {
        match self.origins.as_ref().zip(page) {
            // Boxed: most requests name no origin and need not have the memory for it.
            Some((origins, page)) => origins.permit(page, answer).boxed().await,
            None => answer,
        }
    }

    /// Refuses a websocket of a page of another site that may not read.
    ///
    /// # Errors
    /// 403.
    pub async fn check_websocket_origin(&self, request: &Parts) -> Result<(), Failure> {
        let Err(foreign) = check_origin(&request.headers) else { return Ok(()) };
        let Some((origins, origin)) = self.origins.as_ref().zip(origin_of(&request.headers)) else {
            return Err(foreign);
        };
        let client = request.extensions.get::<ClientInfo>().cloned().unwrap_or_default();
        let asker = Asker { holder: client.holder(), is_served: true };
        if origins.headers(origin, asker).boxed().await.is_empty() { Err(foreign) } else { Ok(()) }
    }
}
