//! Makes CAs and certificates, with keys on the curve P-256.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, DnType, DnValue, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

/// The name in the certificates with which replicas prove themselves to each other. A serving
/// certificate never has it: `--tls-managed-dns-names` cannot contain it.
pub const PEER_NAME: &str = "peer.kubefan.internal";

/// Seconds by which a certificate starts before it was made: clocks differ.
pub(super) const BACKDATED_SECONDS: u64 = 3600;

/// A private key in PEM. Its text is in no message.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct KeyPem(pub(super) String);

impl fmt::Debug for KeyPem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyPem(..)")
    }
}

/// A certificate with its key, both in PEM.
#[derive(Debug, Clone)]
pub(super) struct Issued {
    pub(super) certificate: String,
    pub(super) key: KeyPem,
}

/// Usage of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Usage {
    /// Serving.
    Server,
    /// A replica among its peers.
    Peer,
}

/// A certificate cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a certificate cannot be made: {0}")]
pub(super) struct IssueError(String);

impl IssueError {
    /// Returns the error for an unusable certificate.
    pub(super) fn unusable(why: &str) -> Self {
        Self(format!("the CA signs unusable certificates: {why}"))
    }
}

impl From<rcgen::Error> for IssueError {
    fn from(error: rcgen::Error) -> Self {
        match error {
            // The text may quote the key.
            rcgen::Error::PemError(_) => Self("the certificate or the key of the CA is not PEM".to_owned()),
            error => Self(error.to_string()),
        }
    }
}

/// Makes a CA, at `now` and until `not_after`, in seconds since 1970.
pub(super) fn ca(now: u64, not_after: u64) -> Result<Issued, IssueError> {
    let mut params = params(now, not_after)?;
    // Each CA has a name of its own: a client that knows two finds the right one by it.
    let made = jiff::Timestamp::from_second(i64::try_from(now).unwrap_or_default()).unwrap_or_default();
    let key = KeyPair::generate()?;
    params.distinguished_name.push(DnType::CommonName, DnValue::Utf8String(format!("kubefan CA {made} {}", tag(&key))));
    // It signs certificates only, no further CAs.
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    Ok(Issued { certificate: params.self_signed(&key)?.pem(), key: KeyPem(key.serialize_pem()) })
}

/// Makes a certificate for these names with a CA, at `now` and until `not_after`.
pub(super) fn certificate(
    ca: &str,
    ca_key: &KeyPem,
    names: &[String],
    usage: Usage,
    now: u64,
    not_after: u64,
) -> Result<Issued, IssueError> {
    let issuer = Issuer::from_ca_cert_pem(ca, KeyPair::from_pem(&ca_key.0)?)?;
    let mut params = params(now, not_after)?;
    params.subject_alt_names = CertificateParams::new(names)?.subject_alt_names;
    params.distinguished_name.push(DnType::CommonName, "kubefan");
    params.use_authority_key_identifier_extension = true;
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = match usage {
        Usage::Server => vec![ExtendedKeyUsagePurpose::ServerAuth],
        Usage::Peer => vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth],
    };
    let key = KeyPair::generate()?;
    Ok(Issued { certificate: params.signed_by(&key, &issuer)?.pem(), key: KeyPem(key.serialize_pem()) })
}

fn params(now: u64, not_after: u64) -> Result<CertificateParams, IssueError> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    let at = |second: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(second);
    params.not_before = at(now.saturating_sub(BACKDATED_SECONDS)).into();
    params.not_after = at(not_after).into();
    Ok(params)
}

/// The start of the key's digest: two replicas that make a CA in the same second give it different
/// names.
fn tag(key: &KeyPair) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, key.public_key_raw());
    digest.as_ref().iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}
