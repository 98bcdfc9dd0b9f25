//! The certificate of the data port.

use std::{io, sync::Arc};

use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
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

/// Reads a certificate chain and its key. HTTP/2 is preferred, and HTTP/1.1 is taken.
pub fn read(files: &TlsFiles) -> Result<TlsAcceptor, TlsError> {
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
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|error| failed(error.to_string()))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
