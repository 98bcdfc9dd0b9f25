//! Access to the admin port's view of the cluster.
//!
//! The port must answer probes and Prometheus, so more clients reach it than may know which
//! resources and namespaces there are. So the status page and the reviews of callers are shown
//! where every client may read everything anyway, where only kubefan's own user reaches the port,
//! or to callers with the right to the path (`--admin-authorization`).
//!
//! A change takes more. If callers are not authorized, only programs of this machine may make one:
//! a port that others reach would let each of them cut off the others, and a web page could have
//! its reader's browser do it.

use std::sync::Arc;

use http::{Extensions, HeaderMap, Request, StatusCode, header, request::Parts};
use kubefan_access::{AccessControl, Denial, NonResource, Presented};

use super::{
    client_info::ClientInfo,
    kube::guard::{self, Guard},
};

/// The clients that see the details.
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
    /// The names that requests may have for this port, and whether only programs of this machine
    /// reach it.
    guard: Guard,
}

/// A request that is not admitted: the status of its answer, and the text.
pub type Refused = (StatusCode, String);

const CLOSED: &str = "this is shown to callers with the right to it only: start kubefan with --admin-authorization, or let it \
    serve this port on a Unix socket (--admin-listen unix:PATH)\n";

const FROM_A_PAGE: &str = "this port changes nothing for web pages, nor under a name that is not this machine's: use the \
    kubefan command, and 127.0.0.1 or localhost\n";

const FOREIGN: &str = "the request names a host that kubefan does not know, as a web page could: name an address, localhost or \
    a name of --allowed-hosts\n";

const OPEN_TO_OTHERS: &str = "callers are not authorized here, so this would let everyone who reaches the port end the streams of \
    others: serve the port on a loopback address or a Unix socket (--admin-listen), or authorize callers \
    (--access=authorized --admin-authorization)\n";

impl AdminAccess {
    /// Returns access to details as `details` has it. `access` knows callers and their rights.
    /// Requests name the hosts of `guard`.
    pub fn new(details: Details, access: Arc<AccessControl>, guard: Guard) -> Self {
        Self { details, access, guard }
    }

    /// The authentication and authorization of callers.
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

    /// As [`Self::details`], for answers that name callers. If callers are not authorized, the host
    /// of the request must be known too: another name could be that of a web page (DNS rebinding).
    ///
    /// # Errors
    /// The answer to a caller that may not.
    pub async fn callers(&self, path: NonResource, request: &Request<()>) -> Result<(), Refused> {
        match self.details {
            Details::Open if !self.guard.names_known_host(request) => Err((StatusCode::FORBIDDEN, FOREIGN.to_owned())),
            Details::Open => Ok(()),
            Details::Closed => Err((StatusCode::FORBIDDEN, CLOSED.to_owned())),
            Details::Authorized => self.authorized(path, request.extensions(), request.headers()).await,
        }
    }

    /// Admits a request that changes something.
    ///
    /// # Errors
    /// The answer to a caller that may not.
    pub async fn changes(&self, path: NonResource, request: &Request<()>) -> Result<(), Refused> {
        let refused = |text: &str| Err((StatusCode::FORBIDDEN, text.to_owned()));
        // A browser sends it with every method but GET.
        if request.headers().contains_key(header::ORIGIN) {
            return refused(FROM_A_PAGE);
        }
        match self.details {
            Details::Authorized => self.authorized(path, request.extensions(), request.headers()).await,
            Details::Closed => refused(CLOSED),
            Details::Open if !self.guard.is_loopback => refused(OPEN_TO_OTHERS),
            Details::Open if guard::is_local(request, &self.guard.hosts) => Ok(()),
            Details::Open => refused(FROM_A_PAGE),
        }
    }

    /// Whether the answer to a probe has details. A probe without credentials costs no review.
    pub async fn shows_details(&self, path: NonResource, request: &Parts) -> bool {
        match self.details {
            Details::Open | Details::Closed => true,
            Details::Authorized => {
                let presented = presented(&request.extensions, &request.headers);
                let has_credentials = presented.token.is_some() || presented.certificate.is_some();
                has_credentials && self.access.authorize_path(path, &presented).await.is_ok()
            }
        }
    }

    async fn authorize(&self, path: NonResource, request: &Parts) -> Result<(), Refused> {
        self.authorized(path, &request.extensions, &request.headers).await
    }

    async fn authorized(&self, path: NonResource, extensions: &Extensions, headers: &HeaderMap) -> Result<(), Refused> {
        self.access.authorize_path(path, &presented(extensions, headers)).await.map_err(refused)
    }
}

fn presented(extensions: &Extensions, headers: &HeaderMap) -> Presented {
    let client = extensions.get::<ClientInfo>().cloned().unwrap_or_default();
    client.presents(headers, false)
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
        Denial::Invalid { message, .. } => (StatusCode::BAD_REQUEST, message),
    };
    (status, text + "\n")
}
