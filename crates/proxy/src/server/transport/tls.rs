//! TLS of the data port: reads the certificate, and reads it again after it was renewed.
//!
//! The hazard is a renewal that is half written. A certificate that cannot be used never replaces
//! the one in use.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rustls::{
    DigitallySignedStruct, DistinguishedName, ServerConfig, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject},
    server::{
        ClientHello, ResolvesServerCert,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::CertifiedKey,
};
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tracing::{info, warn};

/// A certificate and its private key, as PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate chain.
    pub cert_file: PathBuf,
    /// The private key.
    pub private_key_file: PathBuf,
}

/// The certificate or its key cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("--tls-cert-file {cert}, --tls-private-key-file {key}: {message}")]
pub struct TlsError {
    cert: String,
    key: String,
    message: String,
}

/// How often the files are checked for a renewed certificate, at most. New connections use it,
/// existing ones do not.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(10);

/// Reads a certificate chain and its key, now and after each renewal. ALPN prefers HTTP/2 and
/// accepts HTTP/1.1. If `requests_client_certificate`, clients are asked for a certificate but need
/// not have one.
pub fn read(files: &TlsFiles, requests_client_certificate: bool) -> Result<TlsAcceptor, TlsError> {
    let certificate = Arc::new(Certificate::read(files)?);
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(|error| failed(files, error.to_string()))?;
    let builder = match requests_client_certificate {
        true => builder.with_client_cert_verifier(Arc::new(AcceptUnverified)),
        false => builder.with_no_client_auth(),
    };
    let mut config = builder.with_cert_resolver(certificate);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn failed(files: &TlsFiles, message: String) -> TlsError {
    let name = |path: &Path| path.display().to_string();
    TlsError { cert: name(&files.cert_file), key: name(&files.private_key_file), message }
}

/// The contents of the two files.
#[derive(PartialEq, Eq)]
struct Pem {
    cert: Vec<u8>,
    key: Vec<u8>,
}

impl Pem {
    fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        let read = |path: &Path| {
            std::fs::read(path)
                .map_err(|error: io::Error| failed(files, format!("cannot read {}: {error}", path.display())))
        };
        Ok(Self { cert: read(&files.cert_file)?, key: read(&files.private_key_file)? })
    }

    fn certified(&self, files: &TlsFiles) -> Result<Arc<CertifiedKey>, TlsError> {
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&self.cert)
            .collect::<Result<_, _>>()
            .map_err(|error| failed(files, format!("the certificate is not PEM: {error}")))?;
        if chain.is_empty() {
            return Err(failed(files, "the first file contains no certificate".to_owned()));
        }
        let key = PrivateKeyDer::from_pem_slice(&self.key)
            .map_err(|error| failed(files, format!("the second file contains no private key: {error}")))?;
        let certified = CertifiedKey::from_der(chain, key, &ring::default_provider());
        Ok(Arc::new(certified.map_err(|error| failed(files, error.to_string()))?))
    }
}

/// The certificate that the server presents.
struct Certificate {
    files: TlsFiles,
    current: Mutex<Current>,
}

struct Current {
    certified: Arc<CertifiedKey>,
    pem: Pem,
    looked_at: Instant,
}

impl Certificate {
    fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        let pem = Pem::read(files)?;
        let current = Current { certified: pem.certified(files)?, pem, looked_at: Instant::now() };
        Ok(Self { files: files.clone(), current: Mutex::new(current) })
    }

    /// The newest usable certificate. The files are small and rarely read, so the handshake may
    /// wait for that.
    fn current(&self) -> Arc<CertifiedKey> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.looked_at.elapsed() >= RENEWAL_INTERVAL {
            current.looked_at = Instant::now();
            if let Err(error) = current.renew(&self.files) {
                warn!(%error, "the renewed certificate of the data port cannot be used; the old one stays in use");
            }
        }
        current.certified.clone()
    }
}

impl Current {
    fn renew(&mut self, files: &TlsFiles) -> Result<(), TlsError> {
        let pem = Pem::read(files)?;
        if pem != self.pem {
            self.certified = pem.certified(files)?;
            self.pem = pem;
            info!(cert_file = %files.cert_file.display(), "the certificate of the data port was renewed");
        }
        Ok(())
    }
}

/// Leaves the key out.
impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate").field("files", &self.files).finish_non_exhaustive()
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current())
    }
}

/// Accepts any client certificate without verification: it neither grants nor denies access.
/// kubefan only learns that the client has one, to explain to a caller that relies on it that it
/// cannot be forwarded to the apiserver.
#[derive(Debug)]
struct AcceptUnverified;

impl ClientCertVerifier for AcceptUnverified {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(files: &TlsFiles, name: &str) {
        let made = rcgen::generate_simple_self_signed([name.to_owned()]).unwrap();
        std::fs::write(&files.cert_file, made.cert.pem()).unwrap();
        std::fs::write(&files.private_key_file, made.signing_key.serialize_pem()).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewed_certificate_is_used_and_a_broken_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let files = TlsFiles { cert_file: path("tls.crt"), private_key_file: path("tls.key") };
        write(&files, "first.example");
        let certificate = Certificate::read(&files).unwrap();
        let presented = || certificate.current().cert.clone();
        let first = presented();
        write(&files, "second.example");
        assert_eq!(presented(), first, "the files are not read for each connection");
        tokio::time::advance(RENEWAL_INTERVAL).await;
        let second = presented();
        assert_ne!(second, first);
        std::fs::write(&files.private_key_file, "half a fi").unwrap();
        tokio::time::advance(RENEWAL_INTERVAL).await;
        assert_eq!(presented(), second);
        write(&files, "third.example");
        tokio::time::advance(RENEWAL_INTERVAL).await;
        assert_ne!(presented(), second);
    }
}
