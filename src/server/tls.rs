//! The certificate of the data port.

use std::{io, sync::Arc};

use rustls::{
    DigitallySignedStruct, DistinguishedName, ServerConfig, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, UnixTime, pem::PemObject},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};
use tokio_rustls::TlsAcceptor;

use crate::config::TlsFiles;

/// The certificate or its key cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("--tls-cert-file {cert}, --tls-private-key-file {key}: {message}")]
pub struct TlsError {
    cert: String,
    key: String,
    message: String,
}

/// Reads a certificate chain and its key. HTTP/2 is preferred, and HTTP/1.1 is taken. `asks`: peers are asked for a certificate, and may
/// have none.
pub fn read(files: &TlsFiles, asks: bool) -> Result<TlsAcceptor, TlsError> {
    let failed = |message: String| TlsError {
        cert: files.cert_file.display().to_string(),
        key: files.private_key_file.display().to_string(),
        message,
    };
    let read = |path: &std::path::Path| {
        std::fs::read(path).map_err(|error: io::Error| failed(format!("cannot read {}: {error}", path.display())))
    };
    let (cert, key) = (read(&files.cert_file)?, read(&files.private_key_file)?);
    let chain: Vec<_> = CertificateDer::pem_slice_iter(&cert)
        .collect::<Result<_, _>>()
        .map_err(|error| failed(format!("the certificate is no PEM: {error}")))?;
    let key = PrivateKeyDer::from_pem_slice(&key).map_err(|error| failed(format!("the key is no PEM: {error}")))?;
    let provider = Arc::new(ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| {
            let builder = match asks {
                true => builder.with_client_cert_verifier(Arc::new(Unverified)),
                false => builder.with_no_client_auth(),
            };
            builder.with_single_cert(chain, key)
        })
        .map_err(|error| failed(error.to_string()))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Takes any certificate, and believes none: nobody is let in by one, nobody is kept out. All that is learnt is that the peer has one, so
/// that a caller who counts on it can be told that it goes no further than here.
#[derive(Debug)]
struct Unverified;

impl ClientCertVerifier for Unverified {
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
