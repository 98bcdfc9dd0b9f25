//! The section "Callers": who they are, and what they may read. Names and defaults are those of
//! kube-apiserver and its library where they have the same.

use std::{
    path::{Path, PathBuf},
    time,
};

use super::{
    ConfigError, Duration,
    access::{Access, Requirement},
    rules::{any, at_least, names, or_false, up_to_a_day, wait, wait_or_never},
    section::section,
};

section! {
    heading: "Callers";
    /// The identity and the rights of callers, as given.
    options: CallerOptions;
    /// The identity and the rights of callers.
    config: CallerConfig {
        /// Extras of users that are left out of reviews.
        ignored_extra: Vec<String>, ignored_extra;
        /// Whether tokens of service accounts are checked with the issuer's keys.
        service_account_jwks: bool, checks_tokens_locally;
    }

    /// The rights of callers, and the treatment of requests that no cache answers. authorized:
    /// callers read what the apiserver lets them read (TokenReview, SubjectAccessReview; kubefan's
    /// account needs the ClusterRole system:auth-delegator), and other requests are forwarded with
    /// the caller's credentials. authorized-impersonate: they are forwarded with kubefan's
    /// credentials and Impersonate-User. authorized-cache-only: they are refused. local, on a
    /// loopback address or a Unix socket only: every caller reads everything that is cached, and
    /// other requests are forwarded with the caller's credentials. local-self: they are forwarded
    /// with kubefan's own, as by kubectl proxy. local-cache-only: they are refused. insecure,
    /// insecure-cache-only: as local, for every client that can reach any address
    /// [default: local if --listen is a loopback address without TLS or a Unix socket that only
    /// kubefan's user can use, otherwise authorized]
    #[arg(hide_possible_values = true)]
    access("PROFILE"): Access;
    /// Take tokens only if they are for one of these audiences, which are kubefan's own. Such
    /// tokens are of no use at the apiserver, so they cannot be forwarded: it needs
    /// --access=authorized-cache-only or --access=authorized-impersonate. Repeat it, or separate
    /// names by commas
    /// [default: tokens for the apiserver]
    #[arg(value_delimiter = ',')]
    api_audiences("NAME"): Vec<String> => api_audiences: Vec<String>, names(is_text, "an empty text is no audience");
    /// Take client certificates that one of these CAs has signed (PEM): their CN is the user's
    /// name, each O a group. The file is read again when it changes
    /// [default: the CAs of the ConfigMap kube-system/extension-apiserver-authentication]
    client_ca_file("FILE"): PathBuf => client_ca_file: Option<PathBuf>, any;
    /// A request without credentials is from the user system:anonymous; without this option it is
    /// refused.
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    anonymous_auth("BOOL"): bool => anonymous: bool, or_false;
    /// Serve the admin port over TLS with the certificate of the data port (on a Unix socket
    /// without). Only callers that may get a path see it (nonResourceURLs /, /status, /subscribers,
    /// /metrics and /can-i): the status page, who is connected, metrics, what users may read.
    /// Probes (/livez, /readyz) stay open, without the names of resources.
    #[arg(num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    admin_authorization("BOOL"): bool => admin_authorization: bool, or_false;

    [keys]
    /// After this time a watch ends, and its client must authenticate itself again to resume: a
    /// token may have become invalid before its end. 0s: never. Shorten it if revoked tokens must
    /// lose their watches sooner.
    limits.stream_age_max("DURATION"): Duration = Duration::from_secs(3600)
        => stream_age_max: Option<time::Duration>, wait_or_never;
    /// Reviews of tokens sent to the apiserver per second, and as many of reads. Twice as many may
    /// be sent at once after a silence. Others wait up to 10s, and addresses take turns. Raise it
    /// if callers wait for reviews and the apiserver can take more; lower it if reviews load the
    /// apiserver.
    limits.access_reviews_per_second("COUNT"): u32 = 200 => reviews_per_second: u32, at_least(1);
    /// Reviews of each kind that wait; more callers are asked to retry later (over HTTP 429). Lower
    /// it to refuse earlier in a storm of new callers.
    limits.access_reviews_waiting_max("COUNT"): usize = 10_000 => reviews_waiting_max: usize, at_least(1);
    /// Check tokens of service accounts with the keys of the apiserver's issuer (OIDC discovery),
    /// instead of a TokenReview for each. It needs --api-audiences, and --resource
    /// serviceaccounts,pods: a token counts only as long as the objects exist that it is bound to.
    /// Other tokens are reviewed. Turn it on if reviews of tokens load the apiserver and
    /// callers have tokens for kubefan.
    tuning.service_account_jwks("BOOL"): bool;
    /// Do not read the CAs of client certificates from the cluster. Without --client-ca-file,
    /// client certificates are not taken then. Turn it on if client certificates must not be taken.
    tuning.authentication_skip_lookup("BOOL"): bool => skip_lookup: bool, or_false;
    /// Time that the apiserver's answer about a token counts. Lengthen it to spare the apiserver
    /// reviews, shorten it if revoked tokens must fail sooner.
    tuning.authentication_token_webhook_cache_ttl("DURATION"): Duration = Duration::from_secs(10)
        => token_ttl: time::Duration, up_to_a_day;
    /// Time that a permission counts. Lengthen it to spare the apiserver reviews, shorten it if
    /// revoked rights must end sooner.
    tuning.authorization_webhook_cache_authorized_ttl("DURATION"): Duration = Duration::from_secs(5 * 60)
        => authorized_ttl: time::Duration, up_to_a_day;
    /// Time that a refusal counts. Shorten it if new rights must count sooner.
    tuning.authorization_webhook_cache_unauthorized_ttl("DURATION"): Duration = Duration::from_secs(30)
        => unauthorized_ttl: time::Duration, up_to_a_day;
    /// Let members of this group read everything, without a review. Change it if other callers are
    /// trusted with everything, or none are.
    /// [default: system:masters]
    tuning.authorization_always_allow_groups("GROUP"): Vec<String> => always_allow_groups: Vec<String>, groups;
    /// Leave this extra of users out of reviews, such as authentication.kubernetes.io/pod-name.
    /// Then all pods of a service account share their verdicts. Only for extras that give no right.
    /// Set it if reviews of many pods with equal rights load the apiserver.
    tuning.authorization_ignore_extra("KEY"): Vec<String>;
    /// For a list or watch, ask for the right to the whole resource first, then to the namespace,
    /// then to exactly what is read, so that one review serves many reads. Turn it off if an
    /// authorizer denies a part of what it allows as a whole.
    tuning.authorization_broad_first("BOOL"): bool = true => broad_first: bool, any;
    /// While the apiserver cannot be asked, known callers keep their last verdict for this long
    /// after it has ceased to count, and never beyond the end of their token. New ones are refused.
    /// Shorten it if rights must not outlive an outage, lengthen it if reads must.
    tuning.authorization_outage_grace("DURATION"): Duration = Duration::from_secs(10 * 60)
        => outage_grace: time::Duration, up_to_a_day;
    /// Time between two reviews of the right to an open watch. The watch ends when it is gone.
    /// Shorten it if revoked rights must end watches sooner; each open watch costs reviews.
    tuning.reauthorize_interval("DURATION"): Duration = Duration::from_secs(5 * 60)
        => reauthorize_interval: time::Duration, wait;
}

fn is_text(text: &str) -> bool {
    !text.trim().is_empty()
}

fn groups(flag: &'static str, given: Option<Vec<String>>) -> Result<Vec<String>, ConfigError> {
    let given = given.unwrap_or_else(|| vec!["system:masters".to_owned()]);
    names(is_text, "an empty text is no group")(flag, Some(given))
}

/// If kubefan acts as users, it ignores none of their extras: without one, a user could have other
/// rights.
fn ignored_extra(options: &CallerOptions) -> Result<Vec<String>, ConfigError> {
    let given = options.authorization_ignore_extra.clone();
    let ignored = names(is_text, "an empty text is no key")("tuning.authorizationIgnoreExtra", given)?;
    let acts_as_users = options.access == Some(Access::AuthorizedImpersonate);
    Ok(if acts_as_users { Vec::new() } else { ignored })
}

/// A local check cannot see everything that ends a token, so it is only for tokens of kubefan's own
/// audiences.
fn checks_tokens_locally(options: &CallerOptions) -> Result<bool, ConfigError> {
    let has_audiences = options.api_audiences.as_ref().is_some_and(|audiences| !audiences.is_empty());
    Ok(options.service_account_jwks == Some(true) && has_audiences)
}

/// The source of the CAs whose certificates name callers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientCas<'a> {
    /// Certificates name no callers.
    None,
    /// A file.
    File(&'a Path),
    /// The cluster.
    Cluster,
}

impl CallerConfig {
    /// Refuses options that would restrict no caller, and audiences whose tokens the apiserver
    /// would refuse.
    pub(super) fn check(&self, given: &CallerOptions, access: Access) -> Result<(), ConfigError> {
        if !self.api_audiences.is_empty() {
            access.require("--api-audiences", &[Requirement::KnownCallers, Requirement::NoTokenForwarded])?;
        }
        let restrictions = [
            ("--client-ca-file", self.client_ca_file.is_some()),
            ("--admin-authorization", self.admin_authorization),
            ("tuning.authorizationAlwaysAllowGroups", given.authorization_always_allow_groups.is_some()),
        ];
        for (option, _) in restrictions.into_iter().filter(|(_, given)| *given) {
            access.require(option, &[Requirement::KnownCallers])?;
        }
        Ok(())
    }
}
