//! Resource versions: the one file that parses and compares them.
//!
//! A version is opaque on the wire. Since Kubernetes 1.35 the apiserver promises that versions of one resource in one cluster
//! compare as decimal numbers (`k8s.io/apimachinery/pkg/util/resourceversion`, KEP-5504); nothing is promised across resources
//! or clusters, and nothing here compares those.

use std::{fmt, num::NonZeroU64, str::FromStr};

/// A version of one resource of one cluster: an etcd revision, never zero.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceVersion(NonZeroU64);

/// Why a text is no resource version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid resource version {text:?}: expected a positive decimal number of at most {}, without leading zeros",
    u64::MAX
)]
pub struct InvalidVersion {
    text: String,
}

impl ResourceVersion {
    /// The version with this number; `None` for 0, which stands for "any version" in requests and never names one.
    pub fn new(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }

    /// The number, for metrics and for the wire.
    pub fn get(self) -> u64 {
        self.0.get()
    }

    /// The one below it, whether anything was written at it or not; `None` below the first.
    pub fn below(self) -> Option<Self> {
        Self::new(self.get() - 1)
    }

    /// Reads the version of a request, where empty and `"0"` stand for "any".
    pub fn parse_request(text: &str) -> Result<Option<Self>, InvalidVersion> {
        match text {
            "" | "0" => Ok(None),
            text => text.parse().map(Some),
        }
    }
}

impl FromStr for ResourceVersion {
    type Err = InvalidVersion;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) && !text.starts_with('0');
        digits
            .then(|| text.parse().ok())
            .flatten()
            .map(Self)
            .ok_or_else(|| InvalidVersion { text: text.chars().take(64).collect() })
    }
}

impl fmt::Display for ResourceVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for ResourceVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rv{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_as_numbers() {
        let version = |text: &str| text.parse::<ResourceVersion>().unwrap();
        assert!(version("9") < version("10"));
        assert_eq!(version("10").to_string(), "10");
    }

    #[test]
    fn what_is_no_version_is_refused_by_name() {
        for text in ["", "0", "01", "-1", "+1", "1 ", "abc", "1.0", "99999999999999999999999"] {
            let error = text.parse::<ResourceVersion>().unwrap_err();
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
            assert!(error.to_string().contains("at most 18446744073709551615"), "{error}");
        }
        assert_eq!(ResourceVersion::parse_request("0"), Ok(None));
        assert_eq!(ResourceVersion::parse_request(""), Ok(None));
    }
}
