//! The credentials of forwarded requests, and the limits of their connections.

use crate::transport::connection::ConnectionLimits;

/// The owner of the credentials that a forwarded request carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Credentials {
    /// Only the client's credentials, from the request.
    Caller,
    /// Only kubefan's credentials. Those in the request are removed.
    Own,
    /// Kubefan's credentials, and the user that the request acts as. Those in the request are
    /// removed.
    Impersonate,
}

impl Credentials {
    /// Whether requests carry kubefan's credentials, and not their callers'.
    pub(super) fn are_kubefans(self) -> bool {
        self != Self::Caller
    }
}

/// Options of passthrough.
#[derive(Debug, Clone)]
pub struct PassthroughOptions {
    /// The owner of the credentials that requests carry.
    pub credentials: Credentials,
    /// The limit on concurrent requests.
    pub requests_max: usize,
    /// Whether callers' tokens may be sent where others could read them.
    pub allows_insecure_upstream: bool,
    /// Times after which a connection counts as dead.
    pub connection: ConnectionLimits,
}
