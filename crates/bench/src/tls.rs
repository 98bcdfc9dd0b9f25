//! A certificate for one invocation of the benchmark, and a TLS client that trusts only this one.

use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    CipherSuite, ClientConfig, RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
};
use tokio_rustls::TlsAcceptor;

/// The files for the server, and the configuration for its clients.
pub(super) struct Certificate {
    pub(super) cert_file: PathBuf,
    pub(super) key_file: PathBuf,
    pub(super) client: TlsClient,
}

/// The configuration of a client with ALPN, and the server name in the certificate.
pub(super) type TlsClient = (Arc<ClientConfig>, ServerName<'static>);

impl Certificate {
    /// Creates a self-signed certificate for `localhost` and writes it to `directory`.
    pub(super) fn make(directory: &Path) -> io::Result<Self> {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).map_err(io::Error::other)?;
        let cert_file = directory.join("tls.crt");
        let key_file = directory.join("tls.key");
        std::fs::write(&cert_file, made.cert.pem())?;
        std::fs::write(&key_file, made.signing_key.serialize_pem())?;
        let client = client(made.cert.der().clone())?;
        Ok(Self { cert_file, key_file, client })
    }

    /// The flags with which `kubefan serve` and the floor use the certificate.
    pub(super) fn server_args(&self) -> [OsString; 4] {
        let cert = self.cert_file.clone().into_os_string();
        let key = self.key_file.clone().into_os_string();
        ["--tls-cert-file".into(), cert, "--tls-private-key-file".into(), key]
    }
}

/// A client that trusts only the certificate in this file.
pub(super) fn client_of(cert_file: &Path) -> io::Result<TlsClient> {
    client(CertificateDer::from_pem_file(cert_file).map_err(io::Error::other)?)
}

fn client(certificate: CertificateDer<'static>) -> io::Result<TlsClient> {
    let mut roots = RootCertStore::empty();
    roots.add(certificate).map_err(io::Error::other)?;
    // Prefer the cipher suite that Go's clients prefer and Go's servers choose. Otherwise one
    // server would be measured with a more expensive cipher than the other.
    let mut provider = ring::default_provider();
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    let config = ClientConfig::builder_with_provider(provider.into());
    let config = config.with_safe_default_protocol_versions().map_err(io::Error::other)?;
    let mut config = config.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let name = ServerName::try_from("localhost").map_err(io::Error::other)?;
    Ok((Arc::new(config), name))
}

/// Accepts TLS connections of a server that speaks no HTTP/2, with PEM files.
pub(super) fn acceptor(cert_file: &Path, key_file: &Path) -> io::Result<TlsAcceptor> {
    let cert = CertificateDer::from_pem_file(cert_file).map_err(io::Error::other)?;
    let key = PrivateKeyDer::from_pem_file(key_file).map_err(io::Error::other)?;
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(io::Error::other)?;
    let config = builder.with_no_client_auth().with_single_cert(vec![cert], key).map_err(io::Error::other)?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}
