//! Reads CA files.
//!
//! The hazard is a file without a usable certificate, such as one with a key. It would trust
//! nothing, and every server's certificate would look as if an unknown CA had signed it. So such a
//! file is an error that names it.

use std::path::Path;

use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};

/// Reads a CA file: its text, and the CAs in it. The error names the file and quotes nothing from
/// it.
pub(crate) async fn read(file: &Path) -> Result<(Vec<u8>, RootCertStore), String> {
    let failed = |problem: &str| format!("CA file {}: {problem}", file.display());
    let pem = tokio::fs::read(file).await.map_err(|error| failed(&error.to_string()))?;
    let mut roots = RootCertStore::empty();
    if roots.add_parsable_certificates(certificates(&pem).map_err(failed)?).0 == 0 {
        return Err(failed("it contains no usable certificate"));
    }
    Ok((pem, roots))
}

/// The certificates of a PEM file. There is at least one.
pub(crate) fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, &'static str> {
    let certificates: Vec<_> =
        CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>().map_err(|_| "it is not valid PEM")?;
    if !certificates.is_empty() {
        return Ok(certificates);
    }
    if PrivateKeyDer::from_pem_slice(pem).is_ok() {
        return Err("it contains a private key and no certificate; name the file with the certificate");
    }
    Err("it contains no PEM certificate")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_without_a_certificate_is_named_with_its_content() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ca.pem");
        let made = rcgen::generate_simple_self_signed(["kubefan".to_owned()]).unwrap();
        let certificate = made.cert.pem();
        let key = made.signing_key.serialize_pem();
        for (text, problem) in [
            (key.clone(), "it contains a private key and no certificate"),
            ("nothing".to_owned(), "it contains no PEM certificate"),
            ("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".to_owned(), "no usable certificate"),
            ("-----BEGIN CERTIFICATE-----\n".to_owned(), "it is not valid PEM"),
        ] {
            std::fs::write(&file, text).unwrap();
            let error = read(&file).await.err().unwrap();
            assert!(error.starts_with(&format!("CA file {}: ", file.display())) && error.contains(problem), "{error}");
        }
        std::fs::write(&file, key + &certificate).unwrap();
        assert_eq!(read(&file).await.unwrap().1.len(), 1, "a key beside it does not matter");
    }
}
