//! Facts in a certificate: its dates and its names. For reports; nothing is verified.

use std::{
    fmt,
    net::{Ipv4Addr, Ipv6Addr},
};

use jiff::Timestamp;
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

    /// Reads the certificates of a PEM file. Unreadable ones are left out.
    pub fn all_of_pem(pem: &[u8]) -> Vec<Self> {
        CertificateDer::pem_slice_iter(pem).filter_map(|der| Self::of_der(&der.ok()?)).collect()
    }

    /// Whether the certificate is used outside its time. `now` is in seconds since 1970.
    pub fn wrong_at(&self, now: i64) -> Option<WrongTime> {
        if now < self.not_before {
            return Some(WrongTime::NotYet(self.not_before));
        }
        (now > self.not_after).then_some(WrongTime::Expired(self.not_after))
    }

    /// Reads a certificate. `None` if it cannot be read.
    pub fn of_der(der: &[u8]) -> Option<Self> {
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

/// A certificate is used outside its time, whose start or end is in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WrongTime {
    /// Before its start.
    NotYet(i64),
    /// After its end.
    Expired(i64),
}

impl fmt::Display for WrongTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotYet(start) => write!(f, "is not valid before {}", date(*start)),
            Self::Expired(end) => write!(f, "has expired: it was valid until {}", date(*end)),
        }
    }
}

/// A time in seconds since 1970, as reports show it.
pub fn date(second: i64) -> String {
    Timestamp::from_second(second).map_or_else(|_| format!("{second} s after 1970"), |time| time.to_string())
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
    fn a_certificate_is_valid_at_both_ends_of_its_time() {
        let facts = CertificateFacts { not_before: 10, not_after: 20, names: Vec::new() };
        for (now, wrong) in
            [(9, Some(WrongTime::NotYet(10))), (10, None), (20, None), (21, Some(WrongTime::Expired(20)))]
        {
            assert_eq!(facts.wrong_at(now), wrong, "{now}");
        }
    }

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
        assert_eq!(
            facts.wrong_at(1_798_761_601).unwrap().to_string(),
            "has expired: it was valid until 2027-01-01T00:00:00Z"
        );
        for text in ["", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
            assert_eq!(CertificateFacts::of_pem(text.as_bytes()), None, "{text}");
        }
    }
}
