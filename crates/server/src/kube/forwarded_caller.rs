//! The caller of a forwarded request, as far as kubefan must know it.
//!
//! The hazard is a caller with many tokens: a namespace's administrator makes any number of service
//! accounts, and by its token alone each is a newcomer with a share of its own. So if a place is
//! kept for long, or if few are left, the request counts to the share of the token's tenant. Other
//! requests are forwarded without a review: the apiserver checks their tokens anyway.

use http::request::Parts;
use kubefan_access::{Denial, user::ANONYMOUS};
use kubefan_cache::Refusal;
use kubefan_telemetry::metrics::PassthroughRefusal;

use super::{
    acting_as,
    forward::{ForwardedCaller, Forwarder, NotForwarded},
    status::Failure,
};
use crate::{reader::Reader, request_caller::RequestCaller};

/// Finds the caller of a request.
///
/// # Errors
/// The reason why the request is not forwarded.
pub(super) async fn forwarded_caller(
    reader: &Reader,
    forwarder: &Forwarder,
    request: &Parts,
    verb: &str,
    caller: &RequestCaller,
) -> Result<ForwardedCaller, NotForwarded> {
    let acting_as = if forwarder.impersonates() { Some(acting_as::acting_as(reader, caller).await?) } else { None };
    let presented = &caller.presented;
    let by_token = presented.token.as_ref().map_or(presented.holder, |token| token.holder(presented.holder));
    if acting_as.is_none() && !forwarder.needs_tenant(request, verb) {
        return Ok(ForwardedCaller { holder: by_token, acting_as });
    }
    let holder = match reader.authenticate(caller).await {
        Ok(caller) => caller.tenant().map_or(by_token, |tenant| by_token.of_tenant(tenant)),
        Err(denial @ Denial::Busy(_)) => {
            return Err(NotForwarded::new(PassthroughRefusal::Limit, Failure::from(&Refusal::from(denial))));
        }
        // A token that others could read is not reviewed, and the apiserver may know it.
        Err(Denial::Unauthenticated(_)) if presented.is_exposed && presented.token.is_some() => by_token,
        // Any client can make any number of tokens that no authenticator knows.
        Err(Denial::Unauthenticated(_)) => by_token.of_tenant(ANONYMOUS),
        Err(_) => by_token,
    };
    Ok(ForwardedCaller { holder, acting_as })
}
