//! The credentials that a request presents.

use http::HeaderMap;
use kubefan_admission::Holder;
use kubefan_upstream::identity_headers::impersonates;

use super::{bearer_token::BearerToken, certificate::CertificateVerdict};

/// The credentials of a request. It holds no header but the token, so a call that waits for its
/// message keeps little.
#[derive(Debug, Clone)]
pub struct Presented {
    /// The token, from whichever header.
    pub token: Option<BearerToken>,
    /// Whether a token may have been read on the way here: it came in plaintext over TCP.
    pub is_exposed: bool,
    /// The verdict of the client's certificate about the caller; `None` without one.
    pub certificate: Option<CertificateVerdict>,
    /// Whether the request acts as another user.
    pub impersonates: bool,
    /// The holder whose share of reviews it counts to.
    pub holder: Holder,
    /// The size of its headers, which stay in memory while it waits for its verdict.
    pub header_bytes: usize,
}

impl Presented {
    /// Returns the credentials in these headers.
    pub fn new(headers: &HeaderMap, is_websocket: bool, is_exposed: bool, holder: Holder) -> Self {
        let token = BearerToken::of(headers, is_websocket);
        let impersonates = impersonates(headers);
        let header_bytes = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
        Self { token, is_exposed, certificate: None, impersonates, holder, header_bytes }
    }

    /// Adds the verdict on the connection's client certificate.
    #[must_use]
    pub fn with_certificate(self, certificate: Option<CertificateVerdict>) -> Self {
        Self { certificate, ..self }
    }

    /// Whether only a certificate identifies the caller. It cannot be forwarded.
    pub fn is_by_certificate(&self) -> bool {
        self.token.is_none() && self.certificate.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_header_of_impersonation_counts() {
        for name in ["Impersonate-User", "impersonate-group", "IMPERSONATE-UID", "Impersonate-Extra-Scopes"] {
            let mut headers = HeaderMap::new();
            headers.insert(http::HeaderName::from_bytes(name.as_bytes()).unwrap(), "x".parse().unwrap());
            assert!(Presented::new(&headers, false, false, Holder::new(1, None)).impersonates, "{name}");
        }
        assert!(!Presented::new(&HeaderMap::new(), false, false, Holder::new(1, None)).impersonates);
    }
}
