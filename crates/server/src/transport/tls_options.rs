//! The versions and cipher suites of TLS on the data port, by the names of kube-apiserver's flags,
//! which are Go's.

use rustls::{
    CipherSuite, SupportedCipherSuite, SupportedProtocolVersion,
    crypto::{CryptoProvider, ring},
    version::{TLS12, TLS13},
};
use serde::Deserialize;

/// The oldest version of TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
pub enum TlsVersion {
    /// TLS 1.2.
    #[value(name = "VersionTLS12")]
    #[serde(rename = "VersionTLS12")]
    Tls12,
    /// TLS 1.3.
    #[value(name = "VersionTLS13")]
    #[serde(rename = "VersionTLS13")]
    Tls13,
}

kubefan_common::display_choice!(TlsVersion);

/// TLS versions and suites that a handshake may agree on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsOptions {
    /// The oldest version.
    pub min_version: TlsVersion,
    /// The suites of TLS 1.2; empty for all. Those of TLS 1.3 are always all.
    pub cipher_suites: Vec<CipherSuite>,
}

impl TlsOptions {
    pub(super) fn versions(&self) -> Vec<&'static SupportedProtocolVersion> {
        match self.min_version {
            TlsVersion::Tls12 => vec![&TLS13, &TLS12],
            TlsVersion::Tls13 => vec![&TLS13],
        }
    }

    pub(super) fn provider(&self) -> CryptoProvider {
        let mut provider = ring::default_provider();
        let is_wanted = |suite: &SupportedCipherSuite| {
            is_tls13(suite) || self.cipher_suites.is_empty() || self.cipher_suites.contains(&suite.suite())
        };
        provider.cipher_suites.retain(is_wanted);
        provider
    }
}

fn is_tls13(suite: &SupportedCipherSuite) -> bool {
    suite.tls13().is_some()
}

/// The name of a suite in Go.
fn name_of(suite: &SupportedCipherSuite) -> String {
    let name = suite.suite().as_str().unwrap_or_default();
    if is_tls13(suite) { name.replacen("TLS13_", "TLS_", 1) } else { name.to_owned() }
}

/// The cipher suite of this name.
///
/// # Errors
/// The reason why the suite cannot be chosen, and the suites that can.
pub fn cipher_suite(name: &str) -> Result<CipherSuite, String> {
    // Names of kube-apiserver that are older than Go's.
    let full = if name.ends_with("_POLY1305") { format!("{name}_SHA256") } else { name.to_owned() };
    let all = ring::default_provider().cipher_suites;
    match all.iter().find(|suite| name_of(suite) == full) {
        Some(suite) if is_tls13(suite) => {
            Err("a cipher suite of TLS 1.3; those are always on and cannot be chosen: leave it out".to_owned())
        }
        Some(suite) => Ok(suite.suite()),
        None => {
            let names: Vec<_> = all.iter().filter(|suite| !is_tls13(suite)).map(name_of).collect();
            Err(format!("no cipher suite that kubefan has; choose among {}", names.join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_names_choose_the_suites_of_tls12_only() {
        let suites = ["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256", "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305"];
        let cipher_suites: Vec<_> = suites.iter().map(|name| cipher_suite(name).unwrap()).collect();
        let options = TlsOptions { min_version: TlsVersion::Tls12, cipher_suites };
        let names: Vec<_> = options.provider().cipher_suites.iter().map(name_of).collect();
        let expected = [
            "TLS_AES_256_GCM_SHA384",
            "TLS_AES_128_GCM_SHA256",
            "TLS_CHACHA20_POLY1305_SHA256",
            "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
            "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
        ];
        assert_eq!(names, expected);
        let all = TlsOptions { min_version: TlsVersion::Tls13, cipher_suites: Vec::new() };
        assert_eq!(all.provider().cipher_suites.len(), 9);
        assert_eq!((all.versions().len(), options.versions().len()), (1, 2));
    }

    #[test]
    fn other_names_are_refused_with_those_that_can_be_chosen() {
        assert!(cipher_suite("TLS_AES_128_GCM_SHA256").unwrap_err().contains("TLS 1.3"));
        for name in ["TLS_RSA_WITH_AES_128_CBC_SHA", "TLS13_AES_128_GCM_SHA256", "x", ""] {
            let problem = cipher_suite(name).unwrap_err();
            assert_eq!(problem.matches("TLS_ECDHE_").count(), 6, "{problem}");
        }
    }
}
