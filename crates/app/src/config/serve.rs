//! All sections together: the options of `serve`, and the configuration that they become.

use std::time;

use kubefan_model::Media;
use serde::de::MapAccess;

use super::{
    ConfigError, Duration, ListenAddress,
    access::{Access, AuthorizationMode, Requirement},
    audit::{AuditConfig, AuditOptions},
    cache::{CacheConfig, CacheOptions},
    callers::{CallerConfig, CallerOptions, ClientCas},
    logging::{LoggingConfig, LoggingOptions},
    managed_tls::TlsSource,
    modes::{ModeConfig, ModeOptions},
    next_kubefan::SourceSettings,
    no_effect,
    on_demand::{OnDemandConfig, OnDemandOptions},
    passthrough::{PassthroughConfig, PassthroughOptions},
    peers::{PeerConfig, PeerOptions},
    rules::unusable,
    section::{FileKey, SecondVariable, Section},
    serving::{ConsistentReads, ServingConfig, ServingOptions},
    traces::{self, TraceConfig, TraceOptions},
    upstream::{UpstreamConfig, UpstreamOptions},
};

/// Declares the sections in the order of `--help`.
macro_rules! sections {
    ($($(#[$doc:meta])* $section:ident: $options:ident => $config:ident;)*) => {
        /// The options of `kubefan serve`, by flag, environment and file. All are optional.
        #[derive(Debug, Clone, Default, PartialEq, clap::Args)]
        pub struct ServeOptions {
            $($(#[$doc])* #[command(flatten)] pub $section: $options,)*
        }

        /// Everything that `serve` needs: checked, and free of contradictions.
        #[derive(Debug, Clone, PartialEq)]
        pub struct ServeConfig {
            $($(#[$doc])* pub $section: $config,)*
            /// The profile of access.
            pub access: Access,
            /// The options that are given and have no effect, each with its reason.
            pub without_effect: Vec<String>,
        }

        impl ServeOptions {
            /// Completes the options that are not set from `lower`. A list replaces a list.
            pub fn overlay(self, lower: Self) -> Self {
                Self { $($section: self.$section.overlay(lower.$section)),* }
            }

            /// The keys at the top of the configuration file, which have flags.
            pub(super) fn keys() -> Vec<&'static str> {
                [$($options::KEYS),*].concat()
            }

            /// The keys without flags.
            pub(super) fn file_keys() -> Vec<FileKey> {
                [$($options::FILE_KEYS),*].concat()
            }

            /// Reads the value of a key in the map `map_name`, which is empty for a key that has a
            /// flag. Returns false if there is no such key.
            pub(super) fn read<'de, M: MapAccess<'de>>(
                &mut self,
                map_name: &str,
                key: &str,
                map: &mut M,
            ) -> Result<bool, M::Error> {
                Ok($(self.$section.read(map_name, key, map)?)||*)
            }

            /// The keys of the settings that differ. Those that become a field of the configuration
            /// are compared as such: a default that is given does not differ from one that is not.
            pub(super) fn changed(options: (&Self, &Self), config: (&ServeConfig, &ServeConfig)) -> Vec<&'static str> {
                let changed = [$($options::changed(
                    (&options.0.$section, &options.1.$section),
                    (&config.0.$section, &config.1.$section),
                )),*];
                changed.concat()
            }

            fn resolve(self, access: Access) -> Result<ServeConfig, ConfigError> {
                Ok(ServeConfig { $($section: self.$section.resolve()?,)* access, without_effect: Vec::new() })
            }
        }

        /// The environment variables with a second name.
        pub fn second_variables() -> Vec<SecondVariable> {
            [&[traces::ENDPOINT][..], $($options::SECOND_VARIABLES),*].concat()
        }

        /// The defaults as `--help` shows them, by the name of the option's field.
        pub fn default_texts() -> Vec<(&'static str, String)> {
            [$($options::default_texts()),*].concat()
        }

        /// The defaults of the keys without flags, by path.
        #[cfg(test)]
        pub(super) fn key_default_texts() -> Vec<(&'static str, String)> {
            [$($options::key_default_texts()),*].concat()
        }
    };
}

sections! {
    /// The ports and their limits.
    serving: ServingOptions => ServingConfig;
    /// The identity and the rights of callers.
    callers: CallerOptions => CallerConfig;
    /// The record of requests.
    audit: AuditOptions => AuditConfig;
    /// The apiserver.
    upstream: UpstreamOptions => UpstreamConfig;
    /// The caches that exist from the start.
    cache: CacheOptions => CacheConfig;
    /// The caches that readers start.
    on_demand: OnDemandOptions => OnDemandConfig;
    /// The requests that are forwarded upstream.
    passthrough: PassthroughOptions => PassthroughConfig;
    /// The other replicas.
    peer: PeerOptions => PeerConfig;
    /// The log.
    logging: LoggingOptions => LoggingConfig;
    /// The traces.
    traces: TraceOptions => TraceConfig;
    /// The switches of reads.
    modes: ModeOptions => ModeConfig;
}

impl ServeOptions {
    /// Completes the options by the defaults and checks them.
    pub fn validate(mut self) -> Result<ServeConfig, ConfigError> {
        let serving = self.serving.clone().resolve()?;
        let access = self.callers.access.unwrap_or_else(|| Access::default_for(&serving));
        self.on_demand.on_demand.get_or_insert(serving.listen.is_local());
        let given = self.clone();
        let mut config = self.resolve(access)?;
        access.check(given.callers.access.is_some(), config.callers.anonymous, &config.serving)?;
        config.check(&given)?;
        config.without_effect = no_effect::of_callers(&given.callers, access);
        config.without_effect.extend(no_effect::of_upstream(&given.upstream));
        config.without_effect.extend(no_effect::of_peers(&given.peer));
        if config.is_over_grpc() {
            config.without_effect.extend(no_effect::over_grpc(&given.cache, &given.on_demand));
            // Nothing else is read over gRPC.
            for resource in &mut config.cache.resources {
                resource.media = vec![Media::Json];
            }
        }
        Ok(config)
    }
}

impl ServeConfig {
    /// Whether caches list and watch at another kubefan over gRPC.
    fn is_over_grpc(&self) -> bool {
        matches!(self.upstream.source, Some(SourceSettings::Grpc(_)))
    }

    /// Returns the source of the CAs whose certificates name callers.
    pub fn client_cas(&self) -> ClientCas<'_> {
        let CallerConfig { client_ca_file, skip_lookup, .. } = &self.callers;
        if self.access.mode() == AuthorizationMode::AlwaysAllow || self.serving.tls.is_none() {
            return ClientCas::None;
        }
        match client_ca_file {
            Some(file) => ClientCas::File(file),
            None if *skip_lookup => ClientCas::None,
            None => ClientCas::Cluster,
        }
    }

    /// Refuses contradictions: options in whose effect the operator would believe wrongly. An
    /// option that only loses its effect and restricts nothing is none: [`no_effect`].
    fn check(&self, given: &ServeOptions) -> Result<(), ConfigError> {
        let Self { access, serving, callers, audit, .. } = self;
        callers.check(&given.callers, *access)?;
        let is_unix = |address: &ListenAddress| matches!(address, ListenAddress::Unix(_));
        if given.audit.audit_log_mode.is_some() && audit.path.is_none() {
            return ConfigError::contradiction("--audit-log-mode needs --audit-log-path");
        }
        if given.serving.listen_mode.is_some() && !is_unix(&serving.listen) && !is_unix(&serving.admin_listen) {
            return ConfigError::contradiction("--listen-mode needs --listen or --admin-listen unix:PATH");
        }
        let needing_tls = [
            ("--client-ca-file", callers.client_ca_file.is_some()),
            ("--admin-authorization", callers.admin_authorization && !is_unix(&serving.admin_listen)),
            ("--tls-min-version", given.serving.tls_min_version.is_some()),
        ];
        if let Some((option, _)) = needing_tls.iter().find(|(_, given)| *given && serving.tls.is_none()) {
            return ConfigError::contradiction(format!(
                "{option} needs TLS; add --tls-cert-file and --tls-private-key-file"
            ));
        }
        if serving.consistent_reads == ConsistentReads::Upstream {
            access.require("tuning.consistentReads: upstream", &[Requirement::Forwarding])?;
        }
        if serving.passthrough_on_alarm {
            access.require("tuning.passthroughOnAlarm", &[Requirement::Forwarding])?;
        }
        if self.cache.state_key_file.is_some() && self.cache.state_dir.is_none() {
            return ConfigError::contradiction("--state-key-file needs --state-dir");
        }
        self.modes.check(*access)?;
        given.peer.check(matches!(serving.tls, Some(TlsSource::Managed(_))))?;
        if self.cache.resources.is_empty() && !self.on_demand.is_on {
            return ConfigError::contradiction(
                "nothing to serve: name what to cache with --resource, or let readers choose with --on-demand",
            );
        }
        check_staleness(serving.staleness_max, self.upstream.idle_timeout, self.is_over_grpc())
    }
}

impl Default for ServeConfig {
    fn default() -> Self {
        ServeOptions::default().validate().expect("the defaults are valid")
    }
}

/// A resource without changes since it was listed is asked about after the idle timeout, and its
/// bookmark follows about a minute later. With a shorter limit it would look stale although it is
/// not. Over gRPC the ages of both kubefans add up, and the other one is asked from time to time.
fn check_staleness(
    given: Option<time::Duration>,
    idle_timeout: time::Duration,
    is_grpc: bool,
) -> Result<(), ConfigError> {
    const BOOKMARK: time::Duration = time::Duration::from_secs(90);
    const ASKED: time::Duration = time::Duration::from_secs(30);
    let least = idle_timeout + BOOKMARK + if is_grpc { ASKED } else { time::Duration::ZERO };
    let most = time::Duration::from_secs(24 * 3600).max(least);
    match given.map(Duration) {
        Some(given) if given.0 < least || given.0 > most => {
            let least = Duration(least);
            let most = Duration(most);
            let problem = format!(
                "must be from {least} to {most}: a quiet resource is proved by bookmarks, about once a minute, the first of \
                 them after tuning.upstreamIdleTimeout; with less it would look stale"
            );
            Err(unusable("--max-staleness", given, problem))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
