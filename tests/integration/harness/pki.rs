//! Certificates for a test's control plane: its own certificate authority, which signs the server
//! and client certificates, and the key that signs service account tokens.

use std::{fs, path::Path};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};

use super::secrets;

/// A certificate and its private key, both PEM.
pub(crate) struct IssuedPem {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

/// A certificate authority that tests can issue certificates from.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// The authority's certificate.
    pub(crate) ca_pem: String,
}

impl Authority {
    /// Creates an authority with a new key.
    pub(crate) fn new() -> Authority {
        let key = new_key();
        let params = ca("kubefan test authority");
        let ca_pem = params.self_signed(&key).expect("the authority signs itself").pem();
        Authority { issuer: Issuer::new(params, key), ca_pem }
    }

    /// Issues a server certificate for loopback.
    pub(crate) fn server(&self) -> IssuedPem {
        let mut params = CertificateParams::new(["127.0.0.1", "localhost", "apiserver.test"].map(str::to_owned))
            .expect("names are valid");
        params.distinguished_name.push(DnType::CommonName, "localhost");
        self.issue(params, &[ExtendedKeyUsagePurpose::ServerAuth])
    }

    /// Issues a server certificate for loopback that expired years ago.
    pub(crate) fn expired_server(&self) -> IssuedPem {
        let mut params = CertificateParams::new(["127.0.0.1".to_owned()]).expect("names are valid");
        params.not_before = date_time_ymd(2001, 1, 1);
        params.not_after = date_time_ymd(2002, 1, 1);
        self.issue(params, &[ExtendedKeyUsagePurpose::ServerAuth])
    }

    /// Issues a certificate for a replica on loopback, which is both server and client to its
    /// peers.
    pub(crate) fn peer(&self) -> IssuedPem {
        let mut params = CertificateParams::new(["127.0.0.1".to_owned()]).expect("names are valid");
        params.distinguished_name.push(DnType::CommonName, "kubefan");
        self.issue(params, &[ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth])
    }

    /// Issues a client certificate for this user and group.
    pub(crate) fn client(&self, user: &str, group: &str) -> IssuedPem {
        self.issue(named(user, group), &[ExtendedKeyUsagePurpose::ClientAuth])
    }

    /// An authority that this one has signed.
    pub(crate) fn intermediate(&self) -> Authority {
        let key = new_key();
        let params = ca("kubefan test intermediate");
        let ca_pem = params.signed_by(&key, &self.issuer).expect("the authority signs").pem();
        Authority { issuer: Issuer::new(params, key), ca_pem }
    }

    /// Issues a certificate.
    pub(crate) fn issue(&self, mut params: CertificateParams, usages: &[ExtendedKeyUsagePurpose]) -> IssuedPem {
        let key = new_key();
        params.extended_key_usages = usages.to_vec();
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let certificate = params.signed_by(&key, &self.issuer).expect("the authority signs");
        IssuedPem { certificate: certificate.pem(), key: key.serialize_pem() }
    }
}

/// A new key, which no program may show.
fn new_key() -> KeyPair {
    let key = KeyPair::generate().expect("a key is generated");
    secrets::remember_key(&key.serialize_pem());
    key
}

fn ca(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    params
}

/// The content of a client certificate for this user and group. An empty name is left out.
pub(crate) fn named(user: &str, group: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    for (kind, name) in [(DnType::CommonName, user), (DnType::OrganizationName, group)] {
        if !name.is_empty() {
            params.distinguished_name.push(kind, name);
        }
    }
    params
}

/// Writes kube-apiserver's files into `dir`: `ca.pem`, `server.pem`, `server-key.pem`, and the key
/// pair `service-account.pub` and `service-account.key`.
pub(crate) fn write_server_files(authority: &Authority, dir: &Path) {
    let IssuedPem { certificate, key } = authority.server();
    let tokens = new_key();
    let files = [
        ("ca.pem", authority.ca_pem.clone()),
        ("server.pem", certificate),
        ("server-key.pem", key),
        ("service-account.pub", tokens.public_key_pem()),
        ("service-account.key", tokens.serialize_pem()),
    ];
    for (name, text) in files {
        fs::write(dir.join(name), text).unwrap_or_else(|error| panic!("cannot write {name}: {error}"));
    }
}
