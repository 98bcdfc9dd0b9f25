//! The section "Passthrough": the requests that are forwarded upstream because no cache answers
//! them.

use kubefan_upstream::passthrough::Credentials;
use serde::Deserialize;

use super::{
    ConfigError, ListenAddress,
    rules::{at_least, optional, or_false},
    section::section,
};

/// What happens to requests that are not answered from the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum PassthroughMode {
    /// They are forwarded with the caller's credentials.
    Caller,
    /// They are forwarded with kubefan's credentials.
    #[serde(rename = "self")]
    #[value(name = "self")]
    Own,
    /// They are forwarded with kubefan's credentials, and act as the caller.
    Impersonate,
    /// They are refused.
    Off,
}

kubefan_common::display_choice!(PassthroughMode);
section! {
    heading: "Passthrough";
    /// How requests are forwarded upstream, as given.
    options: PassthroughOptions;
    /// How requests are forwarded upstream.
    config: PassthroughConfig {}

    /// With which credentials to forward requests that are not answered from the cache to the
    /// apiserver: the caller's, kubefan's own (only on a loopback address or a Unix socket, because
    /// every client that can reach it acts as kubefan), kubefan's own with Impersonate-User and its
    /// like of the caller (its account needs the right to impersonate), or not at all.
    passthrough("MODE"): PassthroughMode = PassthroughMode::Caller => credentials: Option<Credentials>, credentials;

    [keys]
    /// Requests forwarded at a time, watches included; more are asked to retry (429). Raise it if
    /// requests are refused and the apiserver can take more of them.
    limits.passthrough_max("COUNT"): usize = 1000 => requests_max: usize, at_least(1);
    /// Such requests of one identity at a time: a credential, or an address where there is none.
    /// Set it if one program sends too many requests that the caches do not answer.
    /// [default: no limit]
    limits.passthrough_max_per_identity("COUNT"): usize
        => requests_max_per_identity: Option<usize>, optional(at_least(1));
    /// Forward exec, attach, port-forward and websockets too. Turn it on if kubectl exec and its
    /// like must work through kubefan.
    tuning.passthrough_upgrades("BOOL"): bool => upgrades: bool, or_false;
    /// Pass callers' tokens on to an apiserver over plain http, or without a check of its
    /// certificate. Others could then read them on the way. Without it kubefan does not start so.
    /// Only for an apiserver on the same machine, such as in tests.
    tuning.passthrough_insecure_upstream("BOOL"): bool => allows_insecure_upstream: bool, or_false;
}

/// `None` if passthrough is off.
fn credentials(_: &'static str, mode: PassthroughMode) -> Result<Option<Credentials>, ConfigError> {
    Ok(match mode {
        PassthroughMode::Caller => Some(Credentials::Caller),
        PassthroughMode::Own => Some(Credentials::Own),
        PassthroughMode::Impersonate => Some(Credentials::Impersonate),
        PassthroughMode::Off => None,
    })
}

impl PassthroughOptions {
    /// Refuses limits of a passthrough that is off, and kubefan's own credentials for clients on
    /// other machines.
    pub(super) fn check(&self, listen: &ListenAddress) -> Result<(), ConfigError> {
        let insecure = ("tuning.passthroughInsecureUpstream", self.passthrough_insecure_upstream == Some(true));
        let given = [
            insecure,
            ("limits.passthroughMax", self.passthrough_max.is_some()),
            ("limits.passthroughMaxPerIdentity", self.passthrough_max_per_identity.is_some()),
            ("tuning.passthroughUpgrades", self.passthrough_upgrades == Some(true)),
        ];
        match (self.passthrough, given.iter().find(|(_, given)| *given)) {
            (Some(PassthroughMode::Own), _) if !listen.is_local() => ConfigError::contradiction(format!(
                "--passthrough=self with --listen {listen}: other machines could reach it, and every client that reaches \
                 it would act as kubefan; listen on 127.0.0.1 or on unix:PATH, or let callers use their own credentials \
                 (--passthrough=caller)"
            )),
            (Some(mode @ (PassthroughMode::Own | PassthroughMode::Impersonate)), _) if insecure.1 => {
                ConfigError::contradiction(format!(
                    "{} has no effect with --passthrough={mode}, which passes on no caller's token; give one of them",
                    insecure.0
                ))
            }
            (Some(PassthroughMode::Off), Some((flag, _))) => {
                ConfigError::contradiction(format!("{flag} has no effect with --passthrough=off; give one of them"))
            }
            _ => Ok(()),
        }
    }
}
