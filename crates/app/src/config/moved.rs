//! The flags of earlier versions, and where their settings are now.
//!
//! A flag that is silently gone is a setting that the operator believes in. So the flag, its
//! environment variable and its key at the top of the configuration file are refused with their new
//! place, and so are the chart's values that set them (`files/moved.yaml` of the chart).
//! CHANGELOG.md has the same table.

use std::iter;

/// The flags whose settings are in one place now.
struct Moved {
    /// A map of the configuration file, a key in one, or the flag that takes their place.
    to: &'static str,
    /// The flags without `--`.
    flags: &'static [&'static str],
}

const MOVED: [Moved; 4] = [
    Moved { to: "--access", flags: &["authorization-mode", "insecure", "passthrough"] },
    Moved { to: "limits.conflatedBytesMax", flags: &["residue-bytes-max"] },
    Moved {
        to: "limits",
        flags: &[
            "access-reviews-per-second",
            "access-reviews-waiting-max",
            "audit-log-batch-buffer-size",
            "audit-log-maxage",
            "audit-log-maxbackup",
            "audit-log-maxsize",
            "cache-tables-bytes-max",
            "calls-pending-max",
            "connection-age-max",
            "connections-max",
            "max-concurrent-streams",
            "max-message-size",
            "on-demand-bytes-max",
            "on-demand-objects-max",
            "on-demand-resources-max",
            "passthrough-max",
            "passthrough-max-per-identity",
            "peer-transfer-bytes-max",
            "pending-requests-memory-max",
            "protobuf-bytes-max",
            "reads-max",
            "reads-max-per-identity",
            "ring-age-max",
            "ring-bytes-max",
            "ring-events-max",
            "selector-memory-max",
            "selector-terms-max",
            "selector-values-max",
            "snapshots-max",
            "stream-age-max",
            "subscribers-max",
            "subscribers-max-per-identity",
            "upstream-lists-max",
        ],
    },
    Moved {
        to: "tuning",
        flags: &[
            "authentication-skip-lookup",
            "authentication-token-webhook-cache-ttl",
            "authorization-always-allow-groups",
            "authorization-broad-first",
            "authorization-ignore-extra",
            "authorization-outage-grace",
            "authorization-webhook-cache-authorized-ttl",
            "authorization-webhook-cache-unauthorized-ttl",
            "cache-compression",
            "coalesce-max",
            "cold",
            "consistent-list-bytes-min",
            "consistent-reads",
            "feature-gates",
            "keepalive-interval",
            "keepalive-timeout",
            "on-demand-idle-timeout",
            "otlp-headers-file",
            "otlp-protocol",
            "otlp-sampling-ratio",
            "page-size",
            "passthrough-insecure-upstream",
            "passthrough-upgrades",
            "peer-allowed-names",
            "peer-timeout",
            "protobuf",
            "reauthorize-interval",
            "rebalance-percent",
            "request-timeout",
            "require-upstream",
            "schema-check-interval",
            "self-check-interval",
            "service-account-jwks",
            "snapshot-queue-timeout",
            "snapshot-stall-timeout",
            "tls-cipher-suites",
            "tls-managed-ca-lifetime",
            "tls-managed-ca-overlap",
            "tls-managed-lifetime",
            "upstream-idle-timeout",
            "watch-list",
        ],
    },
];

impl Moved {
    fn is_flag(&self) -> bool {
        self.to.starts_with("--")
    }

    /// The new place of the setting of a flag, such as `limits.readsMax`.
    fn place_of(&self, flag: &str) -> String {
        let is_whole = self.is_flag() || self.to.contains('.');
        if is_whole { self.to.to_owned() } else { format!("{}.{}", self.to, camel(flag)) }
    }
}

/// Every flag that moved, without `--`, with its new place.
pub fn all() -> impl Iterator<Item = (&'static str, String)> {
    MOVED.iter().flat_map(|moved| moved.flags.iter().map(move |flag| (*flag, moved.place_of(flag))))
}

/// The new place of a flag that moved, such as `--reads-max`, as the end of a sentence.
pub fn flag(flag: &str) -> Option<String> {
    let name = flag.strip_prefix("--")?;
    let moved = MOVED.iter().find(|moved| moved.flags.contains(&name))?;
    let place = moved.place_of(name);
    if moved.is_flag() {
        return Some(format!("a part of {place} (kubefan serve --help lists its profiles)"));
    }
    Some(format!("{place} in the configuration file (--config)"))
}

/// The environment variables of the flags that moved, with the flags.
pub fn variables() -> impl Iterator<Item = (String, String)> {
    let variable = |flag: &str| format!("KUBEFAN_{}", flag.to_ascii_uppercase().replace('-', "_"));
    all().map(move |(flag, _)| (variable(flag), format!("--{flag}")))
}

/// The new place of a key that was at the top of the configuration file.
pub(super) fn key(key: &str) -> Option<String> {
    let (_, place) = all().find(|(flag, _)| camel(flag) == key)?;
    Some(match place.strip_prefix("--") {
        Some(flag) => format!("a part of {flag}"),
        None => place,
    })
}

/// The name of a flag's key in the configuration file.
pub(super) fn camel(flag: &str) -> String {
    let mut words = flag.split('-');
    let first = words.next().unwrap_or_default().to_owned();
    let capital = |word: &str| word.chars().take(1).flat_map(char::to_uppercase).chain(word.chars().skip(1)).collect();
    iter::once(first).chain(words.map(capital)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServeOptions;

    #[test]
    fn every_new_place_exists_and_no_flag_that_moved_does() {
        let keys: Vec<_> = ServeOptions::file_keys().into_iter().map(|key| key.path.to_owned()).collect();
        let flags = ServeOptions::keys();
        for (flag, place) in all() {
            let is_flag = flags.iter().any(|key| place == format!("--{key}"));
            assert!(is_flag || keys.contains(&place), "{flag}: there is no {place}");
            assert!(!flags.contains(&&*camel(flag)), "{flag} is still there");
        }
    }

    #[test]
    fn a_flag_its_variable_and_its_key_have_the_same_new_place() {
        assert_eq!(flag("--reads-max").unwrap(), "limits.readsMax in the configuration file (--config)");
        assert_eq!(key("readsMax").unwrap(), "limits.readsMax");
        assert_eq!(key("residueBytesMax").unwrap(), "limits.conflatedBytesMax");
        assert!(variables().any(|(name, flag)| name == "KUBEFAN_READS_MAX" && flag == "--reads-max"));
        assert!(flag("--insecure").unwrap().starts_with("a part of --access (kubefan serve --help"));
        assert_eq!(key("passthrough").unwrap(), "a part of access");
        assert_eq!((flag("--listen"), flag("reads-max"), key("listen")), (None, None, None));
    }
}
