//! Who sees what the admin port tells of the cluster.
//!
//! The port must answer probes and Prometheus, so more clients reach it than may know which
//! resources and namespaces there are. So the status page and the reviews of callers are shown
//! where every client may read everything anyway, where only kubefan's own user reaches the port,
//! or to callers with the right to the path (`--admin-authorization`).

use std::sync::Arc;

use http::{StatusCode, request::Parts};

use super::client_info::ClientInfo;
use crate::access::{AccessControl, Denial, NonResource, Presented};

/// Who sees the details.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Details {
    /// Every client that reaches the port.
    Open,
    /// Callers with the right to the path.
    Authorized,
    /// No client.
    Closed,
}

/// Admits requests.
#[derive(Clone)]
pub struct AdminAccess {
    details: Details,
    access: Arc<AccessControl>,
}

/// A request that is not admitted: the status of its answer, and the text.
pub type Refused = (StatusCode, String);

const CLOSED: &str = "this is shown to callers with the right to it only: start kubefan with --admin-authorization, or let it \
    serve this port on a Unix socket (--admin-listen unix:PATH)\n";

impl AdminAccess {
    /// Shows details as `details` says. `access` knows callers and their rights.
    pub fn new(details: Details, access: Arc<AccessControl>) -> Self {
        Self { details, access }
    }

    /// Who callers are, and what they may read.
    pub fn control(&self) -> &AccessControl {
        &self.access
    }

    /// Admits a request that every client may make, unless callers are authorized.
    ///
    /// # Errors
    /// The answer to a caller that may not.
    pub async fn metrics(&self, path: NonResource, request: &Parts) -> Result<(), Refused> {
        match self.details {
            Details::Open | Details::Closed => Ok(()),
            Details::Authorized => self.authorize(path, request).await,
        }
    }

    /// Admits a request for details.
    ///
    /// # Errors
    /// The answer to a caller that may not.
    pub async fn details(&self, path: NonResource, request: &Parts) -> Result<(), Refused> {
        match self.details {
            Details::Open => Ok(()),
            Details::Closed => Err((StatusCode::FORBIDDEN, CLOSED.to_owned())),
            Details::Authorized => self.authorize(path, request).await,
        }
    }

    /// Whether the answer to a probe has details. A probe without credentials costs no review.
    pub async fn shows_details(&self, path: NonResource, request: &Parts) -> bool {
        match self.details {
            Details::Open | Details::Closed => true,
            Details::Authorized => {
                let presented = presented(request);
                let has_credentials = presented.token.is_some() || presented.certificate.is_some();
                has_credentials && self.access.authorize_path(path, &presented).await.is_ok()
            }
        }
    }

    async fn authorize(&self, path: NonResource, request: &Parts) -> Result<(), Refused> {
        self.access.authorize_path(path, &presented(request)).await.map_err(refused)
    }
}

fn presented(request: &Parts) -> Presented {
    let client = request.extensions.get::<ClientInfo>().cloned().unwrap_or_default();
    client.presents(&request.headers, false)
}

/// The answer to a caller that is refused.
pub fn refused(denial: Denial) -> Refused {
    let (status, text) = match denial {
        Denial::Unauthenticated(why) | Denial::Certificate(why) => (StatusCode::UNAUTHORIZED, why.to_owned()),
        Denial::Forbidden(forbidden) => (StatusCode::FORBIDDEN, forbidden.message()),
        Denial::ForbiddenPath(forbidden) => (StatusCode::FORBIDDEN, forbidden.message()),
        Denial::Impersonation => {
            (StatusCode::FORBIDDEN, "the admin port lets no caller act as another user".to_owned())
        }
        // No path of the admin port has a mode.
        Denial::Switched(switched) => (StatusCode::FORBIDDEN, switched.message()),
        Denial::Unavailable(why) => (StatusCode::SERVICE_UNAVAILABLE, why.to_owned()),
        Denial::Busy(message) => (StatusCode::TOO_MANY_REQUESTS, message),
    };
    (status, text + "\n")
}
