//! Resource versions. Only this file parses and compares them.
//!
//! A version is opaque on the wire. Since Kubernetes 1.35 the apiserver guarantees that versions of
//! one resource in one cluster compare as decimal numbers
//! (`k8s.io/apimachinery/pkg/util/resourceversion`, KEP-5504). There is no guarantee across
//! resources or clusters, and nothing here compares those.

use std::{fmt, num::NonZeroU64, str::FromStr};

/// A version of one resource in one cluster: an etcd revision, never zero.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResourceVersion(NonZeroU64);

/// A text is not a resource version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid resource version {text:?}: expected a positive decimal number of at most {}, without leading zeros",
    u64::MAX
)]
pub struct InvalidVersion {
    text: String,
}

impl ResourceVersion {
    /// The version with this number. `None` for 0, which means "any version" in requests.
    pub fn new(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }

    /// The number, for metrics and messages.
    pub fn get(self) -> u64 {
        self.0.get()
    }

    /// The version with the next lower number, even if nothing was written at it. `None` for 1.
    pub fn below(self) -> Option<Self> {
        Self::new(self.get() - 1)
    }

    /// Parses the version of a request. `None` if it is empty or `"0"`, which both mean "any
    /// version".
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
    fn invalid_versions_are_refused_and_named() {
        for text in ["", "0", "01", "-1", "+1", "1 ", "abc", "1.0", "99999999999999999999999"] {
            let error = text.parse::<ResourceVersion>().unwrap_err();
            assert!(error.to_string().contains(&format!("{text:?}")), "{error}");
            assert!(error.to_string().contains("at most 18446744073709551615"), "{error}");
        }
        assert_eq!(ResourceVersion::parse_request("0"), Ok(None));
        assert_eq!(ResourceVersion::parse_request(""), Ok(None));
    }
}
