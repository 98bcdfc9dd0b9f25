//! The user that a forwarded request acts as (`--access=authorized-impersonate`).
//!
//! The hazard is a request that kubefan sends with its own rights. So only a caller that was
//! authenticated is forwarded, as exactly the user that the apiserver has named, and a request that
//! asks to be another user is refused: the apiserver would check kubefan's right to that, not the
//! caller's.

use http::HeaderMap;
use kubefan_access::{Caller, Denial, authentication::presented::impersonates, user::ANONYMOUS};
use kubefan_audit::Notes;
use kubefan_cache::Refusal;
use kubefan_telemetry::metrics::PassthroughRefusal;
use kubefan_upstream::acting_as::ActingAs;

use super::{forward::NotForwarded, hop_by_hop, status::Failure};
use crate::{client_info::ClientInfo, reader::Reader};

/// Returns the user of a request with these headers.
///
/// # Errors
/// The reason why the request is not forwarded.
pub(super) async fn acting_as(
    reader: &Reader,
    headers: &HeaderMap,
    client: &ClientInfo,
    notes: &Notes,
) -> Result<ActingAs, NotForwarded> {
    if impersonates(headers) {
        let message = "with --access=authorized-impersonate kubefan itself names the user of a request, and callers can be no other user: \
            leave out --as (in a kubeconfig: as), or send this request to the apiserver itself";
        return Err(NotForwarded::new(PassthroughRefusal::Impersonation, Failure::forbidden(message.to_owned())));
    }
    let presented = client.presents(headers, hop_by_hop::is_websocket(headers));
    let refused =
        |denial: Denial| NotForwarded::new(PassthroughRefusal::Identity, Failure::from(&Refusal::from(denial)));
    let unknown = || refused(Denial::Unauthenticated("only requests of authenticated users are forwarded"));
    match reader.authenticate(&presented, notes).await.map_err(refused)? {
        Caller::Known(known) if known.identity.user != ANONYMOUS => {
            let identity = &known.identity;
            let acting_as = ActingAs::new(&identity.user, &identity.uid, &identity.groups, &identity.extra);
            acting_as
                .map_err(|unfit| NotForwarded::new(PassthroughRefusal::Identity, Failure::forbidden(unfit.to_string())))
        }
        Caller::Known(_) | Caller::Any => Err(unknown()),
    }
}
