//! TLS of the data port: the configuration of the handshake.
//!
//! The handshake proves that a client has the private key of its certificate, and nothing else. Its
//! holder is identified afterwards (`access::authentication::certificate`). So a certificate of an
//! unknown CA does not fail the handshake, and its holder gets a reason.

use std::sync::Arc;

use rustls::{
    DigitallySignedStruct, DistinguishedName, ServerConfig, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, UnixTime},
    server::{
        ResolvesServerCert,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};
use tokio_rustls::TlsAcceptor;

use super::{
    limits::{CLIENT_CHAIN_BYTES_MAX, CLIENT_CHAIN_LENGTH_MAX},
    tls_options::TlsOptions,
};

/// Accepts connections with a certificate. ALPN prefers HTTP/2 and accepts HTTP/1.1. If
/// `requests_client_certificate`, clients are asked for a certificate but need not have one.
///
/// # Errors
/// The options leave no cipher suite.
pub fn acceptor(
    certificate: Arc<dyn ResolvesServerCert>,
    options: &TlsOptions,
    requests_client_certificate: bool,
) -> Result<TlsAcceptor, rustls::Error> {
    let provider = Arc::new(options.provider());
    let possession = ProofOfPossession { algorithms: provider.signature_verification_algorithms };
    let builder = ServerConfig::builder_with_provider(provider).with_protocol_versions(&options.versions());
    let builder = builder?;
    let builder = if requests_client_certificate {
        builder.with_client_cert_verifier(Arc::new(possession))
    } else {
        builder.with_no_client_auth()
    };
    let mut config = builder.with_cert_resolver(certificate);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Asks for a certificate, as kube-apiserver does (`RequestClientCert`), and verifies that the
/// client has its private key.
#[derive(Debug)]
struct ProofOfPossession {
    algorithms: WebPkiSupportedAlgorithms,
}

impl ClientCertVerifier for ProofOfPossession {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    /// Names no CA: a client that has a certificate of another one then sends it, and its user
    /// reads why it is refused.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    /// Refuses a chain that a connection should not keep in memory.
    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let bytes = end_entity.len() + intermediates.iter().map(|certificate| certificate.len()).sum::<usize>();
        if intermediates.len() >= CLIENT_CHAIN_LENGTH_MAX || bytes > CLIENT_CHAIN_BYTES_MAX {
            return Err(rustls::Error::General(format!(
                "the chain of the client certificate is too long: at most {CLIENT_CHAIN_LENGTH_MAX} certificates with \
                 {CLIENT_CHAIN_BYTES_MAX} bytes are taken"
            )));
        }
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests;
