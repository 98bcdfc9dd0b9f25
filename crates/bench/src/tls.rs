//! A certificate for one invocation of the benchmark, and a TLS client that trusts only this one.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    CipherSuite, ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, ServerName},
};

/// The files for the server, and the configuration for its clients.
pub(super) struct Certificate {
    pub(super) cert_file: PathBuf,
    pub(super) key_file: PathBuf,
    pub(super) client: (Arc<ClientConfig>, ServerName<'static>),
}

impl Certificate {
    /// Creates a self-signed certificate for `localhost` and writes it to `directory`.
    pub(super) fn make(directory: &Path) -> io::Result<Self> {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).map_err(io::Error::other)?;
        let (cert_file, key_file) = (directory.join("tls.crt"), directory.join("tls.key"));
        std::fs::write(&cert_file, made.cert.pem())?;
        std::fs::write(&key_file, made.signing_key.serialize_pem())?;
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from(made.cert.der().to_vec())).map_err(io::Error::other)?;
        // Prefer the cipher suite that Go's clients prefer and Go's servers choose. Otherwise one
        // server would be measured with a more expensive cipher than the other.
        let mut provider = ring::default_provider();
        provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
        let config = ClientConfig::builder_with_provider(provider.into());
        let config = config.with_safe_default_protocol_versions().map_err(io::Error::other)?;
        let mut config = config.with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let name = ServerName::try_from("localhost").map_err(io::Error::other)?;
        Ok(Self { cert_file, key_file, client: (Arc::new(config), name) })
    }
}
