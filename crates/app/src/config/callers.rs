//! The section "Callers": who they are, and what they may read. Names and defaults are those of
//! kube-apiserver and its library where they have the same.

use std::{path::PathBuf, time};

use serde::Deserialize;

use super::{
    ConfigError, Duration, ListenAddress,
    passthrough::PassthroughMode,
    rules::{any, at_least, names, or_false, up_to_a_day, wait, wait_or_never},
    section::section,
    serving::ServingConfig,
};

/// What callers may read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
pub enum AuthorizationMode {
    /// What the apiserver lets them read, by SubjectAccessReview.
    #[value(name = "Webhook")]
    Webhook,
    /// Everything.
    #[value(name = "AlwaysAllow")]
    AlwaysAllow,
}

kubefan_common::display_choice!(AuthorizationMode);
section! {
    heading: "Callers";
    /// Who callers are and what they may read, as given.
    options: CallerOptions;
    /// Who callers are and what they may read.
    config: CallerConfig {}

    /// Let callers read what the apiserver lets them read (Webhook), or everything that is cached
    /// (AlwaysAllow). With Webhook, kubefan asks the apiserver whose token it is and what its user
    /// may read (TokenReview, SubjectAccessReview); its account needs the ClusterRole
    /// system:auth-delegator
    /// [default: AlwaysAllow if --listen is a loopback address without TLS or a Unix socket that
    /// only kubefan's user can use, otherwise Webhook]
    authorization_mode("MODE"): AuthorizationMode => mode: AuthorizationMode, or_webhook;
    /// Take tokens only if they are for one of these audiences, which are kubefan's own. Such
    /// tokens are of no use at the apiserver, so they cannot be forwarded: it needs
    /// --passthrough=off or --passthrough=impersonate. Repeat it, or separate names by commas
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
    /// What cannot be proved so is reviewed. Turn it on if reviews of tokens load the apiserver and
    /// callers have tokens for kubefan.
    tuning.service_account_jwks("BOOL"): bool => service_account_jwks: bool, or_false;
    /// Do not read the CAs of client certificates from the cluster. Without --client-ca-file,
    /// client certificates are not taken then. Turn it on if client certificates must not be taken.
    tuning.authentication_skip_lookup("BOOL"): bool => skip_lookup: bool, or_false;
    /// How long the apiserver's answer about a token counts. Lengthen it to spare the apiserver
    /// reviews, shorten it if revoked tokens must fail sooner.
    tuning.authentication_token_webhook_cache_ttl("DURATION"): Duration = Duration::from_secs(10)
        => token_ttl: time::Duration, up_to_a_day;
    /// How long a permission counts. Lengthen it to spare the apiserver reviews, shorten it if
    /// revoked rights must end sooner.
    tuning.authorization_webhook_cache_authorized_ttl("DURATION"): Duration = Duration::from_secs(5 * 60)
        => authorized_ttl: time::Duration, up_to_a_day;
    /// How long a refusal counts. Shorten it if new rights must count sooner.
    tuning.authorization_webhook_cache_unauthorized_ttl("DURATION"): Duration = Duration::from_secs(30)
        => unauthorized_ttl: time::Duration, up_to_a_day;
    /// Let members of this group read everything, without a review. Repeat it, or separate names by
    /// commas. Change it if other callers are trusted with everything, or none are.
    /// [default: system:masters]
    tuning.authorization_always_allow_groups("GROUP"): Vec<String> => always_allow_groups: Vec<String>, groups;
    /// Leave this extra of users out of reviews, such as authentication.kubernetes.io/pod-name.
    /// Then all pods of a service account share their verdicts. Only for extras that give no right.
    /// Repeat it, or separate keys by commas. Set it if reviews of many pods with equal rights load
    /// the apiserver.
    tuning.authorization_ignore_extra("KEY"): Vec<String> => ignored_extra: Vec<String>, names(is_text, "an empty text is no key");
    /// Of a list or watch, ask for the right to the whole resource first, then to the namespace,
    /// then to exactly what is read, so that one review serves many reads. Turn it off if an
    /// authorizer denies a part of what it allows as a whole.
    tuning.authorization_broad_first("BOOL"): bool = true => broad_first: bool, any;
    /// While the apiserver cannot be asked, known callers keep their last verdict for this long
    /// after it has ceased to count, and never beyond the end of their token. New ones are refused.
    /// Shorten it if rights must not outlive an outage, lengthen it if reads must.
    tuning.authorization_outage_grace("DURATION"): Duration = Duration::from_secs(10 * 60)
        => outage_grace: time::Duration, up_to_a_day;
    /// How often the right to an open watch is reviewed again. The watch ends when it is gone.
    /// Shorten it if revoked rights must end watches sooner; each open watch costs reviews.
    tuning.reauthorize_interval("DURATION"): Duration = Duration::from_secs(5 * 60)
        => reauthorize_interval: time::Duration, wait;
}

/// [`default_mode`] takes the place of a mode that is not given. Without it, nothing is open.
fn or_webhook(_: &'static str, given: Option<AuthorizationMode>) -> Result<AuthorizationMode, ConfigError> {
    Ok(given.unwrap_or(AuthorizationMode::Webhook))
}

/// The mode if none is given. Only what the users of this machine reach without TLS is open, as
/// with `kubectl proxy`: who sets up TLS, or admits others to a socket, expects callers that
/// differ.
pub(super) fn default_mode(serving: &ServingConfig) -> AuthorizationMode {
    let is_open = match &serving.listen {
        ListenAddress::Unix(_) => serving.listen_mode.is_owners(),
        ListenAddress::Tcp(_) => serving.listen.is_local() && serving.tls.is_none(),
    };
    if is_open { AuthorizationMode::AlwaysAllow } else { AuthorizationMode::Webhook }
}

fn is_text(text: &str) -> bool {
    !text.trim().is_empty()
}

fn groups(flag: &'static str, given: Option<Vec<String>>) -> Result<Vec<String>, ConfigError> {
    let given = given.unwrap_or_else(|| vec!["system:masters".to_owned()]);
    names(is_text, "an empty text is no group")(flag, Some(given))
}

impl CallerOptions {
    /// Refuses what has no effect, and what would let callers act as kubefan or as others.
    /// `is_given`: the mode is not the default.
    pub(super) fn check(
        &self,
        callers: &CallerConfig,
        is_given: bool,
        serving: &ServingConfig,
        passthrough: PassthroughMode,
    ) -> Result<(), ConfigError> {
        let listen = &serving.listen;
        if callers.mode == AuthorizationMode::AlwaysAllow && passthrough == PassthroughMode::Impersonate {
            return ConfigError::contradiction(
                "--passthrough=impersonate acts as callers, and kubefan does not know them with --authorization-mode=AlwaysAllow; \
                 add --authorization-mode=Webhook (over TLS, or on a Unix socket)",
            );
        }
        if callers.mode == AuthorizationMode::AlwaysAllow {
            let given = [
                ("--api-audiences", self.api_audiences.is_some()),
                ("--client-ca-file", self.client_ca_file.is_some()),
                ("tuning.authenticationSkipLookup", self.authentication_skip_lookup == Some(true)),
                ("--anonymous-auth", self.anonymous_auth == Some(true)),
                ("tuning.authorizationAlwaysAllowGroups", self.authorization_always_allow_groups.is_some()),
                ("tuning.authorizationIgnoreExtra", self.authorization_ignore_extra.is_some()),
                ("--admin-authorization", callers.admin_authorization),
                ("tuning.serviceAccountJwks", callers.service_account_jwks),
            ];
            return match given.iter().find(|(_, given)| *given) {
                Some((flag, _)) => ConfigError::contradiction(format!(
                    "{flag} has no effect with --authorization-mode=AlwaysAllow; add --authorization-mode=Webhook"
                )),
                None => Ok(()),
            };
        }
        if passthrough == PassthroughMode::Own && !is_given {
            let (with, flag) = match listen {
                ListenAddress::Unix(_) => (format!("--listen-mode={}", serving.listen_mode), "--listen-mode"),
                ListenAddress::Tcp(_) => ("TLS".to_owned(), "--tls-cert-file"),
            };
            return ConfigError::contradiction(format!(
                "--passthrough=self lets every caller act as kubefan, and with {with} callers read only what they may \
                 (--authorization-mode=Webhook is the default then); leave {flag} out, or add --authorization-mode=AlwaysAllow"
            ));
        }
        if passthrough == PassthroughMode::Own {
            return ConfigError::contradiction(
                "--passthrough=self lets every caller act as kubefan, and --authorization-mode=Webhook lets callers read \
                 only what they may; give only one of them",
            );
        }
        if passthrough == PassthroughMode::Caller && !callers.api_audiences.is_empty() {
            return ConfigError::contradiction(
                "--api-audiences names audiences of kubefan's own, and the apiserver would refuse their tokens if they were \
                 passed on; add --passthrough=off or --passthrough=impersonate, or leave --api-audiences out",
            );
        }
        if callers.client_ca_file.is_some() && serving.tls.is_none() {
            return ConfigError::contradiction(
                "--client-ca-file has no effect without TLS, where clients present no certificates; add --tls-cert-file and \
                 --tls-private-key-file",
            );
        }
        if passthrough == PassthroughMode::Impersonate && !callers.ignored_extra.is_empty() {
            return ConfigError::contradiction(
                "tuning.authorizationIgnoreExtra leaves extras out of what kubefan knows of a user, and --passthrough=impersonate \
                 would act as the user without them; give only one of them",
            );
        }
        if callers.service_account_jwks && callers.api_audiences.is_empty() {
            return ConfigError::contradiction(
                "tuning.serviceAccountJwks is for tokens of kubefan's own, because it cannot see everything that ends a token; add \
                 --api-audiences, or leave it out",
            );
        }
        if callers.admin_authorization && matches!(serving.admin_listen, ListenAddress::Tcp(_)) && serving.tls.is_none()
        {
            return ConfigError::contradiction(
                "--admin-authorization needs TLS, because others could read the tokens of callers on the way; add --tls-cert-file \
                 and --tls-private-key-file, or serve the admin port on a Unix socket (--admin-listen unix:PATH)",
            );
        }
        let is_exposed = matches!(listen, ListenAddress::Tcp(_)) && serving.tls.is_none();
        if is_exposed && !callers.anonymous && !is_given {
            return ConfigError::contradiction(format!(
                "--listen {listen} can be reached by other machines, so callers are authorized (--authorization-mode=Webhook), \
                 and that needs TLS, because others could read their tokens on the way; add --tls-cert-file and \
                 --tls-private-key-file, or listen on 127.0.0.1 or on unix:PATH, or let every client that can reach it read \
                 everything cached with --authorization-mode=AlwaysAllow --insecure"
            ));
        }
        if is_exposed && !callers.anonymous {
            return ConfigError::contradiction(format!(
                "--authorization-mode=Webhook with --listen {listen} needs TLS: callers could send no token, because others could \
                 read it on the way; add --tls-cert-file and --tls-private-key-file, or listen on unix:PATH"
            ));
        }
        Ok(())
    }
}
