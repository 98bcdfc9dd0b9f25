//! The section "Passthrough": the requests that are forwarded upstream because no cache answers
//! them. The profile of `--access` says whether, and with which credentials.

use super::{
    rules::{at_least, optional, or_false},
    section::section,
};

section! {
    heading: "Passthrough";
    /// The options for requests that are forwarded upstream, as given.
    options: PassthroughOptions;
    /// The settings for requests that are forwarded upstream.
    config: PassthroughConfig {}

    [keys]
    /// Requests forwarded at a time, watches included; more are asked to retry (429). Raise it if
    /// requests are refused and the apiserver can take more of them.
    limits.passthrough_max("COUNT"): usize = 1000 => requests_max: usize, at_least(1);
    /// Forwarded requests of one identity at a time: a credential, or an address where there is
    /// none. Set it if one program sends too many requests that the caches do not answer.
    /// [default: no limit]
    limits.passthrough_max_per_identity("COUNT"): usize
        => requests_max_per_identity: Option<usize>, optional(at_least(1));
    /// Forward exec, attach, port-forward and websockets too. Turn it on if kubectl exec and its
    /// like must work through kubefan.
    tuning.passthrough_upgrades("BOOL"): bool => upgrades: bool, or_false;
    /// Pass callers' tokens on to an apiserver over plain http, or without a check of its
    /// certificate. Others could then read them on the way. If false, kubefan refuses to start with
    /// such an apiserver. Only for an apiserver on the same machine, such as in tests.
    tuning.passthrough_insecure_upstream("BOOL"): bool => allows_insecure_upstream: bool, or_false;
}
