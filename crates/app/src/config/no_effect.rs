//! Options that are given and have no effect because of others. None of them takes a right from
//! callers that would have it otherwise, so kubefan starts and warns. An option in which the
//! operator would believe wrongly is refused instead, by `ServeOptions::validate`. Each text is an
//! option with its reason.

use kubefan_informers::ConfiguredResource;
use kubefan_model::Media;
use kubefan_upstream::passthrough::Credentials;

use super::{
    access::{Access, AuthorizationMode},
    cache::CacheOptions,
    callers::CallerOptions,
    on_demand::OnDemandOptions,
    peers::PeerOptions,
    upstream::UpstreamOptions,
};

/// Options of callers.
pub(super) fn of_callers(given: &CallerOptions, access: Access) -> Vec<String> {
    let ignores_extra = given.authorization_ignore_extra.as_ref().is_some_and(|keys| !keys.is_empty());
    let has_audiences = given.api_audiences.as_ref().is_some_and(|audiences| !audiences.is_empty());
    let has_jwks = given.service_account_jwks == Some(true);
    if access.mode() == AuthorizationMode::AlwaysAllow {
        let about_callers = [
            ("--anonymous-auth", given.anonymous_auth == Some(true)),
            ("tuning.authenticationSkipLookup", given.authentication_skip_lookup == Some(true)),
            ("tuning.authorizationIgnoreExtra", ignores_extra),
            ("tuning.serviceAccountJwks", has_jwks),
        ];
        let of_given = about_callers.into_iter().filter(|(_, given)| *given);
        let text =
            |(option, _)| format!("{option} has no effect with --access={access}, which does not distinguish callers");
        return of_given.map(text).collect();
    }
    let mut found = Vec::new();
    if ignores_extra && access.credentials() == Some(Credentials::Impersonate) {
        found.push(format!(
            "tuning.authorizationIgnoreExtra has no effect with --access={access}, which acts as users with all their extras"
        ));
    }
    if has_jwks && !has_audiences {
        found.push(
            "tuning.serviceAccountJwks has no effect without --api-audiences: it is for tokens of kubefan's own, others are \
             reviewed"
                .to_owned(),
        );
    }
    found
}

/// The encodings that another kubefan does not send over gRPC.
pub(super) fn over_grpc(cache: &CacheOptions, on_demand: &OnDemandOptions) -> Vec<String> {
    let is_protobuf = |text: &&String| {
        ConfiguredResource::parse(text).is_ok_and(|resource| resource.media.contains(&Media::Protobuf))
    };
    let resources = cache.resources.iter().flatten().filter(is_protobuf).map(|text| format!("--resource {text}"));
    let tables = (on_demand.cache_tables == Some(true)).then(|| "--cache-tables".to_owned());
    let text =
        |option| format!("{option} has no effect with a gRPC address as --upstream: only JSON is read over gRPC");
    resources.chain(tables).map(text).collect()
}

/// Options of the way to another kubefan.
pub(super) fn of_upstream(given: &UpstreamOptions) -> Option<String> {
    if given.upstream_fallback_kubeconfig.is_some() && given.upstream.is_none() {
        return Some("--upstream-fallback-kubeconfig has no effect without --upstream".to_owned());
    }
    if given.upstream_cert_file.is_some() && given.upstream_token_file.is_some() {
        return Some(
            "--upstream-token-file has no effect with --upstream-cert-file, which is shown instead of a token"
                .to_owned(),
        );
    }
    let has_key_alone = given.upstream_key_file.is_some() && given.upstream_cert_file.is_none();
    has_key_alone.then(|| "--upstream-key-file has no effect without --upstream-cert-file".to_owned())
}

/// Options of the other replicas.
pub(super) fn of_peers(given: &PeerOptions) -> Option<String> {
    let is_alone = given.peers.is_none() || given.peer_listen.is_none();
    let text = "--rebalance has no effect without --peers and --peer-listen: the replicas tell each other their load";
    (given.rebalance == Some(true) && is_alone).then(|| text.to_owned())
}
