//! TLS of the data port: the configuration of the handshake.

use std::sync::Arc;

use rustls::{
    DigitallySignedStruct, DistinguishedName, ServerConfig, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::ring,
    pki_types::{CertificateDer, UnixTime},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};
use tokio_rustls::TlsAcceptor;

use super::certificate::{Certificate, TlsError};

/// Accepts connections with a certificate. ALPN prefers HTTP/2 and accepts HTTP/1.1. If
/// `requests_client_certificate`, clients are asked for a certificate but need not have one.
pub fn acceptor(certificate: Arc<Certificate>, requests_client_certificate: bool) -> Result<TlsAcceptor, TlsError> {
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(|error| certificate.unusable(&error))?;
    let builder = match requests_client_certificate {
        true => builder.with_client_cert_verifier(Arc::new(AcceptUnverified)),
        false => builder.with_no_client_auth(),
    };
    let mut config = builder.with_cert_resolver(certificate);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
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
