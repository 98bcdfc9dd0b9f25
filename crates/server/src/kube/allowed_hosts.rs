//! The host names that requests may use for kubefan, beside `localhost` and addresses.
//!
//! The hazard is DNS rebinding: the owner of a name chooses its addresses. So a name is allowed
//! only if the operator gave it, or if no public DNS serves it.

use std::str::FromStr;

use http::Uri;

/// Suffixes that resolve Services in every cluster, and that no public DNS serves.
const SERVICE_SUFFIXES: [&str; 2] = [".svc", ".svc.cluster.local"];

/// Names of hosts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowedHosts {
    patterns: Vec<HostPattern>,
    /// The ends of the names of Services; empty if Services are not allowed.
    service_suffixes: Vec<String>,
}

/// A name of a host, every name below one (`*.example.com`), or every name (`*`). Case and a dot
/// at the end do not matter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostPattern {
    /// Every name.
    Any,
    /// The names that end with this, which starts with a dot.
    Below(String),
    /// Exactly this name.
    Name(String),
}

/// The error for a text that is no host name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no name of a host; write it like kubefan.example.com, *.example.com or *, without a port")]
pub struct InvalidHost;

impl FromStr for HostPattern {
    type Err = InvalidHost;

    fn from_str(text: &str) -> Result<Self, InvalidHost> {
        let is_name = |name: &str| {
            let is_label = |label: &str| {
                !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
            };
            name.len() <= 253 && name.split('.').all(is_label)
        };
        let name = text.to_ascii_lowercase();
        match name.strip_prefix('*') {
            Some("") => Ok(Self::Any),
            Some(below) if below.strip_prefix('.').is_some_and(is_name) => Ok(Self::Below(below.to_owned())),
            None if is_name(&name) => Ok(Self::Name(name)),
            _ => Err(InvalidHost),
        }
    }
}

impl AllowedHosts {
    /// Allows the names that the operator gave.
    pub fn new(patterns: Vec<HostPattern>) -> Self {
        Self { patterns, service_suffixes: Vec::new() }
    }

    /// Also allows the names of Services: those without a dot, and those that end in `.svc` or in
    /// the cluster's domain for Services. `resolv_conf` is the content of `/etc/resolv.conf`, where
    /// a pod finds that domain.
    #[must_use]
    pub fn with_services(mut self, resolv_conf: &str) -> Self {
        let searched = resolv_conf.lines().filter_map(|line| line.trim().strip_prefix("search"));
        let domains = searched.flat_map(str::split_whitespace).map(|domain| domain.trim_end_matches('.'));
        let domains = domains.filter(|domain| domain.starts_with("svc."));
        self.service_suffixes = SERVICE_SUFFIXES.map(str::to_owned).into();
        self.service_suffixes.extend(domains.map(|domain| format!(".{}", domain.to_ascii_lowercase())));
        self
    }

    /// Whether the host of an origin has an allowed name. A page without an origin of its own, such
    /// as one in a sandbox, has the origin `null`.
    pub fn allow_origin(&self, origin: &str) -> bool {
        origin.contains("://") && self.allow(origin)
    }

    /// Whether a host, with or without a port, has an allowed name.
    pub fn allow(&self, host: &str) -> bool {
        let Ok(uri) = host.parse::<Uri>() else { return false };
        let name = uri.host().unwrap_or_default().trim_end_matches('.').to_ascii_lowercase();
        let is_service = || !name.contains('.') || self.service_suffixes.iter().any(|suffix| name.ends_with(suffix));
        !name.is_empty() && self.patterns.iter().any(|pattern| pattern.matches(&name))
            || !self.service_suffixes.is_empty() && !name.is_empty() && is_service()
    }
}

impl HostPattern {
    fn matches(&self, host: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Below(suffix) => host.ends_with(suffix),
            Self::Name(name) => host == name,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(patterns: &[&str]) -> AllowedHosts {
        AllowedHosts::new(patterns.iter().map(|pattern| pattern.parse().unwrap()).collect())
    }

    #[test]
    fn only_given_names_are_allowed() {
        let given = hosts(&["kubefan.example.com", "*.corp.example"]);
        for (host, is) in [
            ("kubefan.example.com", true),
            ("KubeFan.Example.com:7443", true),
            ("kubefan.example.com.", true),
            ("https://kubefan.example.com", true),
            ("a.b.corp.example", true),
            ("corp.example", false),
            ("evilcorp.example", false),
            ("kubefan.example.com.evil.example", false),
            ("evil.example", false),
            ("kubefan", false),
            ("kubefan.ns.svc", false),
            ("null", false),
            ("", false),
        ] {
            assert_eq!(given.allow(host), is, "{host}");
            assert!(!AllowedHosts::default().allow(host), "{host}");
            assert_eq!(hosts(&["*"]).allow(host), !host.is_empty(), "{host}");
            assert_eq!(given.allow_origin(host), is && host.starts_with("https:"), "{host}");
        }
    }

    #[test]
    fn the_names_of_services_are_those_that_no_public_dns_serves() {
        let pod = "nameserver 10.96.0.10\nsearch ns.svc.corp.example svc.corp.example corp.example\noptions ndots:5\n";
        for (host, anywhere, in_pod) in [
            ("kubefan:7443", true, true),
            ("kubefan.ns.svc", true, true),
            ("kubefan.ns.svc:7443", true, true),
            ("kubefan.ns.svc.cluster.local", true, true),
            ("kubefan.ns.svc.corp.example", false, true),
            ("kubefan.ns.svc.evil.example", false, false),
            ("svc.corp.example", false, false),
            ("corp.example", false, false),
            ("evil.dev", false, false),
        ] {
            assert_eq!(AllowedHosts::default().with_services("").allow(host), anywhere, "{host}");
            assert_eq!(AllowedHosts::default().with_services(pod).allow(host), in_pod, "{host}");
        }
    }

    #[test]
    fn invalid_names_are_refused() {
        for text in ["", ".", "a:7443", "http://a", "a..b", "*.", "*a", "a.*", "a b", "[::1]"] {
            assert_eq!(text.parse::<HostPattern>(), Err(InvalidHost), "{text}");
        }
    }
}
