//! All sections together: the options of `serve`, and the configuration that they become.

use std::time;

use serde::de::MapAccess;

use super::{
    ConfigError, Duration, ListenAddress,
    access::{Access, Need},
    audit::{AuditConfig, AuditOptions},
    cache::{CacheConfig, CacheOptions},
    callers::{CallerConfig, CallerOptions},
    logging::{LoggingConfig, LoggingOptions},
    managed_tls::TlsSource,
    modes::{ModeConfig, ModeOptions},
    next_kubefan::{SourceSettings, check_forms},
    on_demand::{OnDemandConfig, OnDemandOptions},
    passthrough::{PassthroughConfig, PassthroughOptions},
    peers::{PeerConfig, PeerOptions},
    rules::{needs, unusable},
    section::{FileKey, SecondVariable, Section},
    serving::{ConsistentReads, ServingConfig, ServingOptions, check_addresses, check_tls},
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

            /// Reads the value of a key under `place`, which is empty for a key that has a flag.
            /// Returns false if there is no such key.
            pub(super) fn read<'de, M: MapAccess<'de>>(
                &mut self,
                place: &str,
                key: &str,
                map: &mut M,
            ) -> Result<bool, M::Error> {
                Ok($(self.$section.read(place, key, map)?)||*)
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

            fn resolve(self) -> Result<ServeConfig, ConfigError> {
                Ok(ServeConfig { $($section: self.$section.resolve()?),* })
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
        let is_access_given = self.callers.access.is_some();
        let access = *self.callers.access.get_or_insert(Access::default_for(&serving));
        self.on_demand.on_demand.get_or_insert(serving.listen.is_local());
        let callers = self.callers.clone();
        let peer = self.peer.clone();
        let has_tls_min_version = self.serving.tls_min_version.is_some();
        let has_listen_mode = self.serving.listen_mode.is_some();
        let has_audit_mode = self.audit.audit_log_mode.is_some();
        let mut config = self.resolve()?;
        config.passthrough.credentials = access.credentials();

        check_addresses(&config.serving, config.peer.listen.as_ref())?;
        let is_unix = |address: &ListenAddress| matches!(address, ListenAddress::Unix(_));
        let has_socket = is_unix(&config.serving.listen) || is_unix(&config.serving.admin_listen);
        // Without its file or socket, the operator would believe in a record, or in a restriction.
        needs(("--audit-log-mode", has_audit_mode), ("--audit-log-path", config.audit.path.is_some()))?;
        needs(("--listen-mode", has_listen_mode), ("--listen or --admin-listen unix:PATH", has_socket))?;
        callers.check(&config.callers)?;
        access.check(is_access_given, config.callers.anonymous, &config.serving)?;
        let is_admin_tcp = matches!(config.serving.admin_listen, ListenAddress::Tcp(_));
        check_tls(
            &config.serving,
            &[
                ("--client-ca-file", config.callers.client_ca_file.is_some()),
                ("--admin-authorization", config.callers.admin_authorization && is_admin_tcp),
                ("--tls-min-version", has_tls_min_version),
            ],
        )?;
        if config.serving.consistent_reads == ConsistentReads::Upstream {
            access.require("tuning.consistentReads: upstream", Need::Forwarding)?;
        }
        peer.check(matches!(config.serving.tls, Some(TlsSource::Managed(_))))?;
        if config.cache.resources.is_empty() && !config.on_demand.is_on {
            return ConfigError::contradiction(
                "nothing to serve: name what to cache with --resource, or let readers choose with --on-demand",
            );
        }
        check_forms(config.upstream.source.as_ref(), &config.cache.resources, &config.on_demand)?;
        config.modes.check(access)?;
        let is_grpc = matches!(config.upstream.source, Some(SourceSettings::Grpc(_)));
        check_staleness(config.serving.staleness_max, config.upstream.idle_timeout, is_grpc)?;
        Ok(config)
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
