//! What a certificate says about itself: its dates and its names. For reports; nothing is verified.

use std::net::{Ipv4Addr, Ipv6Addr};

use rustls::pki_types::{CertificateDer, pem::PemObject};
use x509_parser::{certificate::X509Certificate, extensions::GeneralName, prelude::FromDer};

/// The dates and names of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFacts {
    /// The start of its validity, in seconds since 1970.
    pub not_before: i64,
    /// The end of its validity, in seconds since 1970.
    pub not_after: i64,
    /// The DNS names and IP addresses that it is for (`subjectAltName`).
    pub names: Vec<String>,
}

impl CertificateFacts {
    /// Reads the first certificate of a PEM file. `None` if there is none that can be read.
    pub fn of_pem(pem: &[u8]) -> Option<Self> {
        Self::all_of_pem(pem).into_iter().next()
    }

    /// Reads the certificates of a PEM file. What cannot be read is left out.
    pub fn all_of_pem(pem: &[u8]) -> Vec<Self> {
        CertificateDer::pem_slice_iter(pem).filter_map(|der| Self::of_der(&der.ok()?)).collect()
    }

    pub(super) fn of_der(der: &[u8]) -> Option<Self> {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        let alternatives = certificate.subject_alternative_name().ok().flatten();
        let names = alternatives.iter().flat_map(|extension| &extension.value.general_names).filter_map(name);
        let validity = certificate.validity();
        Some(Self {
            not_before: validity.not_before.timestamp(),
            not_after: validity.not_after.timestamp(),
            names: names.collect(),
        })
    }
}

fn name(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match bytes.len() {
            4 => <[u8; 4]>::try_from(*bytes).ok().map(|octets| Ipv4Addr::from(octets).to_string()),
            _ => <[u8; 16]>::try_from(*bytes).ok().map(|octets| Ipv6Addr::from(octets).to_string()),
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_and_names_are_those_of_the_first_certificate() {
        let mut params = rcgen::CertificateParams::new(["kubefan.svc".to_owned(), "10.0.0.7".to_owned()]).unwrap();
        params.not_before = rcgen::date_time_ymd(2026, 1, 1);
        params.not_after = rcgen::date_time_ymd(2027, 1, 1);
        let key = rcgen::KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        let facts = CertificateFacts::of_pem(pem.as_bytes()).unwrap();
        assert_eq!((facts.not_before, facts.not_after), (1_767_225_600, 1_798_761_600));
        assert_eq!(facts.names, ["kubefan.svc", "10.0.0.7"]);
        assert_eq!(CertificateFacts::all_of_pem(format!("{pem}{pem}").as_bytes()).len(), 2);
        for text in ["", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
            assert_eq!(CertificateFacts::of_pem(text.as_bytes()), None, "{text}");
        }
    }
}
