//! A bundle of CAs, and whether one of them has signed a client certificate.
//!
//! The rules are those of Go's `x509.Verify` with `ExtKeyUsageClientAuth`. The library that rustls
//! verifies with takes the top of a chain as a trusted key without limits. So Go's checks of the
//! top are made here: its time, its usages, and the length of chains below it. The hazard is a
//! certificate in the bundle that is no CA: it must not become one.

use std::time::Duration;

use rustls::{
    crypto::ring,
    pki_types::{CertificateDer, TrustAnchor, UnixTime, pem::PemObject},
};
use webpki::{EndEntityCert, ExtendedKeyUsageValidator, KeyPurposeIdIter, VerifiedPath};
use x509_parser::{
    certificate::X509Certificate, extensions::BasicConstraints, prelude::FromDer, time::ASN1Time, x509::X509Version,
};

use kubefan_common::tls::explain_pem;

/// The extended key usages. If a certificate names any, one of them must be `clientAuth` or
/// `anyExtendedKeyUsage`.
const CLIENT_AUTH: &[usize] = &[1, 3, 6, 1, 5, 5, 7, 3, 2];
const ANY_USAGE: &[usize] = &[2, 5, 29, 37, 0];

/// The reason why a bundle cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BundleError {
    /// A part of it cannot be read.
    #[error("certificate {number} of the bundle cannot be read: {message}")]
    Unreadable {
        /// Counted from 1.
        number: usize,
        /// The problem.
        message: String,
    },
    /// The bundle contains no certificate, or none that may sign client certificates.
    #[error("it contains no certificate of a CA (PEM) that may sign client certificates")]
    NoCa,
}

/// The reason why a certificate proves nothing about its holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Untrusted {
    /// No CA of the bundle has signed it.
    UnknownCa,
    /// The certificate or one above it is used before or after its time.
    WrongTime,
    /// The certificate or one above it is not for clients.
    WrongUsage,
}

/// The CAs that are trusted to name users.
pub struct CaBundle {
    /// In the order of `limits`.
    anchors: Vec<TrustAnchor<'static>>,
    limits: Vec<Limits>,
    ignored: usize,
}

/// The limits of a CA, beside its key.
struct Limits {
    not_before: ASN1Time,
    not_after: ASN1Time,
    /// The most certificates of other CAs between it and the client's.
    path_len: Option<u32>,
}

impl CaBundle {
    /// Reads certificates in PEM; other blocks are passed over. Certificates that may not sign
    /// client certificates are ignored.
    ///
    /// # Errors
    /// A certificate cannot be read, or no CA is left.
    pub fn parse(pem: &[u8]) -> Result<Self, BundleError> {
        let mut bundle = Self { anchors: Vec::new(), limits: Vec::new(), ignored: 0 };
        for (index, der) in CertificateDer::pem_slice_iter(pem).enumerate() {
            let unreadable = |message: String| BundleError::Unreadable { number: index + 1, message };
            let der = der.map_err(|error| unreadable(explain_pem(&error).to_owned()))?;
            let certificate = read(&der).ok_or_else(|| unreadable("it is no X.509 certificate".to_owned()))?;
            let anchor = webpki::anchor_from_trusted_cert(&der).map_err(|error| unreadable(error.to_string()))?;
            match signs_clients(&certificate) {
                None => bundle.ignored += 1,
                Some(path_len) => {
                    let not_before = certificate.validity().not_before;
                    let not_after = certificate.validity().not_after;
                    bundle.anchors.push(anchor.to_owned());
                    bundle.limits.push(Limits { not_before, not_after, path_len });
                }
            }
        }
        if bundle.anchors.is_empty() { Err(BundleError::NoCa) } else { Ok(bundle) }
    }

    /// The number of CAs.
    pub fn len(&self) -> usize {
        self.anchors.len()
    }

    /// Whether there are none, which [`Self::parse`] does not return.
    pub fn is_empty(&self) -> bool {
        self.anchors.is_empty()
    }

    /// The number of certificates that may not sign client certificates.
    pub fn ignored(&self) -> usize {
        self.ignored
    }

    /// Verifies the certificate of a client, which comes first in `chain`, at a time since 1970.
    /// Others in the chain may lead from it to a CA. Returns the last second of the certificate of
    /// this path that ends first, since 1970.
    ///
    /// # Errors
    /// The reason why the chain proves nothing.
    pub fn verify(&self, chain: &[CertificateDer<'_>], now: Duration) -> Result<Duration, Untrusted> {
        let (client, others) = chain.split_first().ok_or(Untrusted::UnknownCa)?;
        let leaf = EndEntityCert::try_from(client).map_err(|_| Untrusted::UnknownCa)?;
        let algorithms = ring::default_provider().signature_verification_algorithms;
        let at = UnixTime::since_unix_epoch(now);
        let usage = ForClients;
        let check = |path: &VerifiedPath<'_>| self.check(path, now);
        let verified = leaf.verify_for_usage(algorithms.all, &self.anchors, others, at, usage, None, Some(&check));
        let path = verified.map_err(|error| match error {
            webpki::Error::CertExpired { .. } | webpki::Error::CertNotValidYet { .. } => Untrusted::WrongTime,
            webpki::Error::RequiredEkuNotFoundContext(_) => Untrusted::WrongUsage,
            _ => Untrusted::UnknownCa,
        })?;
        let ca = self.limits(&path).map(|limits| limits.not_after);
        let signed = path.intermediate_certificates().map(|certificate| certificate.der());
        let ends = signed.chain([client.clone()]).filter_map(|der| Some(read(&der)?.validity().not_after));
        ends.chain(ca).map(since_1970).min().ok_or(Untrusted::UnknownCa)
    }

    /// Returns the limits of the CA at the top of a path.
    fn limits(&self, path: &VerifiedPath<'_>) -> Option<&Limits> {
        let at = self.anchors.iter().position(|anchor| std::ptr::eq(anchor, path.anchor()))?;
        self.limits.get(at)
    }

    /// Checks the rules that the library leaves out: the limits of the chain's CA, and the key
    /// usages of the certificates between.
    fn check(&self, path: &VerifiedPath<'_>, now: Duration) -> Result<(), webpki::Error> {
        let limits = self.limits(path).ok_or(webpki::Error::UnknownIssuer)?;
        let between: Vec<_> = path.intermediate_certificates().map(|certificate| certificate.der()).collect();
        if between.iter().any(|der| read(der).is_none_or(|certificate| !may_sign(&certificate))) {
            return Err(webpki::Error::UnknownIssuer);
        }
        if limits.path_len.is_some_and(|most| between.len() > most as usize) {
            return Err(webpki::Error::PathLenConstraintViolated);
        }
        let seconds = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
        let time = |at: ASN1Time| UnixTime::since_unix_epoch(since_1970(at));
        let now = UnixTime::since_unix_epoch(now);
        let not_before = limits.not_before;
        let not_after = limits.not_after;
        if seconds < not_before.timestamp() {
            return Err(webpki::Error::CertNotValidYet { time: now, not_before: time(not_before) });
        }
        if seconds > not_after.timestamp() {
            return Err(webpki::Error::CertExpired { time: now, not_after: time(not_after) });
        }
        Ok(())
    }
}

/// Accepts certificates for clients, for any usage, and without a limit of usages, as Go does.
struct ForClients;

impl ExtendedKeyUsageValidator for ForClients {
    fn validate(&self, usages: KeyPurposeIdIter<'_, '_>) -> Result<(), webpki::Error> {
        let mut present = Vec::new();
        for usage in usages {
            let usage = usage?.to_decoded_oid();
            if usage == CLIENT_AUTH || usage == ANY_USAGE {
                return Ok(());
            }
            present.push(usage);
        }
        if present.is_empty() {
            return Ok(());
        }
        let required = webpki::KeyUsage::client_auth();
        Err(webpki::Error::RequiredEkuNotFoundContext(webpki::RequiredEkuNotFoundContext { required, present }))
    }
}

fn since_1970(at: ASN1Time) -> Duration {
    Duration::from_secs(u64::try_from(at.timestamp()).unwrap_or_default())
}

/// Parses a certificate that fills all of `der`.
pub(super) fn read<'a>(der: &'a CertificateDer<'_>) -> Option<X509Certificate<'a>> {
    let (rest, certificate) = X509Certificate::from_der(der).ok()?;
    rest.is_empty().then_some(certificate)
}

/// Whether a certificate may sign others, and the length of chains below it.
fn signs_clients(certificate: &X509Certificate<'_>) -> Option<Option<u32>> {
    let usage_fits = match certificate.extended_key_usage() {
        Ok(None) => true,
        Ok(Some(usage)) => usage.value.any || usage.value.client_auth,
        Err(_) => false,
    };
    if !usage_fits || !may_sign(certificate) {
        return None;
    }
    let constraints = certificate.basic_constraints().ok()?;
    Some(constraints.and_then(|constraints| constraints.value.path_len_constraint))
}

/// Whether a certificate is one of a CA (`CheckSignatureFrom` in Go's `x509`). One of version 1
/// cannot say so.
fn may_sign(certificate: &X509Certificate<'_>) -> bool {
    let is_ca = match certificate.basic_constraints() {
        Ok(Some(constraints)) => matches!(constraints.value, BasicConstraints { ca: true, .. }),
        Ok(None) => certificate.version() != X509Version::V3,
        Err(_) => false,
    };
    is_ca && certificate.key_usage().is_ok_and(|usage| usage.is_none_or(|usage| usage.value.key_cert_sign()))
}

#[cfg(test)]
mod tests;
