//! `--access`: what callers may read, and what happens to requests that no cache answers.
//!
//! It is one choice among profiles, because most combinations of the two would be unsafe: a caller
//! whom kubefan does not know must not act as kubefan from another machine.

use clap::ValueEnum;
use kubefan_upstream::passthrough::Credentials;
use serde::Deserialize;

use super::{ConfigError, ListenAddress, serving::ServingConfig};

/// The rule by which callers read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuthorizationMode {
    /// Callers read what the apiserver lets them read, by SubjectAccessReview.
    Webhook,
    /// Callers read everything.
    AlwaysAllow,
}

/// A profile of access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// Callers read what the apiserver lets them read; other requests are forwarded with their
    /// credentials.
    Authorized,
    /// As `authorized`; other requests are forwarded with kubefan's credentials, and act as the
    /// caller.
    AuthorizedImpersonate,
    /// As `authorized`; other requests are refused.
    AuthorizedCacheOnly,
    /// On this machine alone: every caller reads everything cached; other requests are forwarded
    /// with the caller's credentials.
    Local,
    /// As `local`; other requests are forwarded with kubefan's credentials, as by `kubectl proxy`.
    LocalSelf,
    /// As `local`; other requests are refused.
    LocalCacheOnly,
    /// Every client that reaches the address reads everything cached; other requests are forwarded
    /// with the caller's credentials.
    Insecure,
    /// As `insecure`; other requests are refused.
    InsecureCacheOnly,
}

kubefan_common::display_choice!(Access);

/// A property of a profile that an option requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Requirement {
    /// Callers are known.
    KnownCallers,
    /// Callers' tokens stay here.
    NoTokenForwarded,
    /// Requests are forwarded.
    Forwarding,
}

impl Requirement {
    /// Returns the reason why an option does not go with a profile, which follows the option's
    /// name.
    fn reason(self, access: Access) -> String {
        match self {
            Self::KnownCallers => {
                format!("would restrict nobody with --access={access}, which does not distinguish callers")
            }
            Self::NoTokenForwarded => format!(
                "names audiences of kubefan's own, and --access={access} would forward their tokens to the apiserver, which \
                 refuses them"
            ),
            Self::Forwarding => {
                format!("needs requests to be forwarded to the apiserver, and --access={access} refuses them")
            }
        }
    }
}

impl Access {
    /// Returns the profile if none is given. Only what the users of this machine reach without TLS
    /// is open, as with `kubectl proxy`: an operator who sets up TLS, or admits other users to a
    /// socket, expects different callers.
    pub(super) fn default_for(serving: &ServingConfig) -> Self {
        let is_open = match &serving.listen {
            ListenAddress::Unix(_) => serving.listen_mode.is_owners(),
            ListenAddress::Tcp(_) => serving.listen.is_local() && serving.tls.is_none(),
        };
        if is_open { Self::Local } else { Self::Authorized }
    }

    /// Returns the rule by which callers read.
    pub fn mode(self) -> AuthorizationMode {
        match self {
            Self::Authorized | Self::AuthorizedImpersonate | Self::AuthorizedCacheOnly => AuthorizationMode::Webhook,
            Self::Local | Self::LocalSelf | Self::LocalCacheOnly | Self::Insecure | Self::InsecureCacheOnly => {
                AuthorizationMode::AlwaysAllow
            }
        }
    }

    /// Returns the credentials with which requests are forwarded; `None` if they are refused.
    pub fn credentials(self) -> Option<Credentials> {
        match self {
            Self::Authorized | Self::Local | Self::Insecure => Some(Credentials::Caller),
            Self::LocalSelf => Some(Credentials::Own),
            Self::AuthorizedImpersonate => Some(Credentials::Impersonate),
            Self::AuthorizedCacheOnly | Self::LocalCacheOnly | Self::InsecureCacheOnly => None,
        }
    }

    /// Whether it is for this machine alone.
    fn is_local(self) -> bool {
        matches!(self, Self::Local | Self::LocalSelf | Self::LocalCacheOnly)
    }

    fn has(self, requirement: Requirement) -> bool {
        match requirement {
            Requirement::KnownCallers => self.mode() == AuthorizationMode::Webhook,
            Requirement::NoTokenForwarded => self.credentials() != Some(Credentials::Caller),
            Requirement::Forwarding => self.credentials().is_some(),
        }
    }

    /// Refuses an option that does not go with this profile. Names the profiles that have all of
    /// its requirements.
    pub(super) fn require(self, option: &str, all: &[Requirement]) -> Result<(), ConfigError> {
        let Some(requirement) = all.iter().copied().find(|requirement| !self.has(*requirement)) else {
            return Ok(());
        };
        let same_callers = |other: &&Self| requirement == Requirement::KnownCallers || other.mode() == self.mode();
        // A profile for this machine may be unsafe at the address, and `local-self` gives rights.
        let is_safe = |other: &&Self| (self.is_local() || !other.is_local()) && **other != Self::LocalSelf;
        let has_all = |other: &&Self| all.iter().all(|requirement| other.has(*requirement));
        let others = Self::value_variants().iter().filter(has_all).filter(same_callers).filter(is_safe);
        let others: Vec<_> = others.map(|other| format!("--access={other}")).collect();
        ConfigError::contradiction(format!(
            "{option} {}; leave {option} out, or choose {}",
            requirement.reason(self),
            others.join(" or ")
        ))
    }

    /// Refuses a profile that the address would make unsafe. `is_given`: it is not the default.
    pub(super) fn check(
        self,
        is_given: bool,
        allows_anonymous: bool,
        serving: &ServingConfig,
    ) -> Result<(), ConfigError> {
        let listen = &serving.listen;
        if self.is_local() && !listen.is_local() {
            let way = match self {
                Self::LocalSelf => "would act as kubefan; listen on 127.0.0.1 or on unix:PATH, or leave --access out",
                _ => {
                    "could read everything cached; leave --access out, listen on 127.0.0.1 or on unix:PATH, or accept this with \
                     --access=insecure"
                }
            };
            return ConfigError::contradiction(format!(
                "--listen {listen} can be reached by other machines, and with --access={self} every client that can reach it \
                 {way}"
            ));
        }
        let is_plain = matches!(listen, ListenAddress::Tcp(_)) && serving.tls.is_none();
        if self.mode() == AuthorizationMode::Webhook && is_plain && !allows_anonymous {
            let (who, places) = if is_given {
                (format!("--access={self} with --listen {listen}"), "unix:PATH")
            } else {
                let who =
                    format!("--listen {listen} can be reached by other machines, so callers are authorized, and that");
                let places = "127.0.0.1 or on unix:PATH, or let every client that can reach it read everything cached with \
                              --access=insecure";
                (who, places)
            };
            return ConfigError::contradiction(format!(
                "{who} needs TLS: callers could send no token, because others could read it on the way; add --tls-cert-file and \
                 --tls-private-key-file, or listen on {places}"
            ));
        }
        Ok(())
    }
}
