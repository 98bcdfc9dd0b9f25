//! The user that a forwarded request acts as (`--access=authorized-impersonate`).
//!
//! The hazard is a request that kubefan sends with its own rights. So only a caller that was
//! authenticated is forwarded, as exactly the user that the apiserver has named, and a request that
//! asks to be another user is refused: the apiserver would check kubefan's right to that, not the
//! caller's.

use kubefan_access::{Caller, Denial, user::ANONYMOUS};
use kubefan_cache::Refusal;
use kubefan_telemetry::metrics::PassthroughRefusal;
use kubefan_upstream::acting_as::ActingAs;

use super::{forward::NotForwarded, status::Failure};
use crate::{reader::Reader, request_caller::RequestCaller};

/// Returns the user that a request of this caller acts as.
///
/// # Errors
/// The reason why the request is not forwarded.
pub(super) async fn acting_as(reader: &Reader, request: &RequestCaller) -> Result<ActingAs, NotForwarded> {
    if request.presented.impersonates {
        let message = "with --access=authorized-impersonate kubefan itself names the user of a request, and callers can be no other user: \
            leave out --as (in a kubeconfig: as), or send this request to the apiserver itself";
        return Err(NotForwarded::new(PassthroughRefusal::Impersonation, Failure::forbidden(message.to_owned())));
    }
    let refused =
        |denial: Denial| NotForwarded::new(PassthroughRefusal::Identity, Failure::from(&Refusal::from(denial)));
    let unknown = || refused(Denial::Unauthenticated("only requests of authenticated users are forwarded"));
    match reader.authenticate(request).await.map_err(refused)? {
        Caller::Known(known) if known.identity.user != ANONYMOUS => {
            let identity = &known.identity;
            let acting_as = ActingAs::new(&identity.user, &identity.uid, &identity.groups, &identity.extra);
            acting_as
                .map_err(|unfit| NotForwarded::new(PassthroughRefusal::Identity, Failure::forbidden(unfit.to_string())))
        }
        Caller::Known(_) | Caller::Any => Err(unknown()),
    }
}
