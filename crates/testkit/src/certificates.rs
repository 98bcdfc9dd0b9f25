//! CAs and client certificates, for tests.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::pki_types::CertificateDer;

/// The time of the tests, in seconds since 1970.
pub const NOW_SECONDS: u64 = 1_800_000_000;
const DAY_SECONDS: i64 = 86_400;

/// The wall clock of the tests.
pub fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(NOW_SECONDS)
}

/// Content of a certificate.
pub struct Content(pub CertificateParams);

impl Content {
    /// A client certificate of this user, with a group, valid for a day before and after now.
    pub fn client(user: &str, group: &str) -> Self {
        let mut content = Self::named(user).usages(&[ExtendedKeyUsagePurpose::ClientAuth]);
        content.0.distinguished_name.push(DnType::OrganizationName, group);
        content.0.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        content
    }

    /// The certificate of a CA.
    pub fn ca(name: &str) -> Self {
        let mut content = Self::named(name);
        content.0.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        content.0.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        content
    }

    fn named(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        Self(params).days(1, 1)
    }

    /// Sets the validity to this many days before and after now.
    pub fn days(mut self, before: i64, after: i64) -> Self {
        let at = |days: i64| {
            let second = NOW_SECONDS as i64 + days * DAY_SECONDS;
            rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(second as u64)
        };
        self.0.not_before = at(-before);
        self.0.not_after = at(after);
        self
    }

    /// Sets the usages.
    pub fn usages(mut self, usages: &[ExtendedKeyUsagePurpose]) -> Self {
        self.0.extended_key_usages = usages.to_vec();
        self
    }
}

/// A certificate with its private key, which may sign others.
pub struct Signer {
    issuer: Issuer<'static, KeyPair>,
    /// The certificate, as DER.
    pub der: CertificateDer<'static>,
    /// The certificate, as PEM.
    pub pem: String,
    /// The private key, as PEM.
    pub key_pem: String,
}

impl Signer {
    /// Signs itself.
    pub fn root(Content(params): Content) -> Self {
        let key = KeyPair::generate().unwrap();
        let signed = params.self_signed(&key).unwrap();
        Self::new(params, signed, key)
    }

    /// Signs a certificate with a key of its own.
    pub fn sign(&self, Content(params): Content) -> Self {
        let key = KeyPair::generate().unwrap();
        let signed = params.signed_by(&key, &self.issuer).unwrap();
        Self::new(params, signed, key)
    }

    fn new(params: CertificateParams, signed: rcgen::Certificate, key: KeyPair) -> Self {
        let der = signed.der().clone();
        let pem = signed.pem();
        let key_pem = key.serialize_pem();
        Self { issuer: Issuer::new(params, key), der, pem, key_pem }
    }
}
