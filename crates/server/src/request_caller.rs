//! The caller of a request, authenticated at most once, as in the apiserver.
//!
//! Several steps ask for it: the mode of a resource, the right to a read, and the user that a
//! forwarded request acts as. The hazard is that two of them act on different answers, or that each
//! of them costs a review. So a request has one value, which its steps pass on.

use kubefan_access::{Caller, Denial, Presented};
use kubefan_audit::Notes;
use tokio::sync::OnceCell;

/// The credentials of a request, and its caller as soon as a step has asked for it.
#[derive(Clone)]
pub struct RequestCaller {
    /// The credentials.
    pub presented: Presented,
    /// The notes for the record of the request.
    pub notes: Notes,
    /// The caller, or the reason why it is not known.
    pub(crate) verdict: OnceCell<Result<Caller, Denial>>,
}

impl RequestCaller {
    /// Creates the caller of a request with these credentials, not authenticated yet.
    pub fn new(presented: Presented, notes: Notes) -> Self {
        Self { presented, notes, verdict: OnceCell::new() }
    }

    /// Returns the same caller, whose further reads are not noted for the record of the request.
    #[must_use]
    pub fn without_notes(&self) -> Self {
        Self { notes: Notes::default(), ..self.clone() }
    }
}
